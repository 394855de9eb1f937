"""The example of intensive care: MEDS holds what the published text files hold, value by value."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from examples.icu_stays.data import ADMISSION, make_meds, read_stay, split_of
from examples.icu_stays.results import VARIABLES, roc_of, show_deaths, show_stay
from seqvae.errors import DataError
from tests.support import parquet_files

HEADING = "Time,Parameter,Value\n"
OUTCOMES = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death\n"
ADMITTED = "00:00,RecordID,{record}\n00:00,Age,54\n00:00,Gender,0\n00:00,Height,-1\n00:00,ICUType,4\n00:00,Weight,-1\n"
MEASURED = "00:07,HR,73\n00:07,Temp,35.1\n00:07,HR,75\n26:30,HR,88.5\n48:00,Urine,0\n"
RECORDS = range(132539, 132579)

Rows = Sequence[tuple[float, str, float]]
"""Minute, variable, value."""


def publish(folder: Path, stays: dict[int, str], deaths: dict[int, int]) -> Path:
    """Write text files as the challenge has them."""
    (folder / "set-a").mkdir(parents=True)
    for record, text in stays.items():
        (folder / "set-a" / f"{record}.txt").write_text(HEADING + text)
    rows = "".join(f"{record},6,1,5,-1,{death}\n" for record, death in deaths.items())
    (folder / "Outcomes-a.txt").write_text(OUTCOMES + rows)
    return folder


def made_up(folder: Path) -> Path:
    stays = {record: ADMITTED.format(record=record) + MEASURED for record in RECORDS}
    return publish(folder, stays, {record: record % 2 for record in RECORDS})


def make(source: Path, folder: Path) -> pd.DataFrame:
    """Return all events of the MEDS data set."""
    make_meds(source, folder / "data", folder / "labels.csv")
    return pd.concat(pq.read_table(path).to_pandas() for path in sorted((folder / "data" / "data").glob("*/*.parquet")))


def test_values_and_times_come_back_in_their_order_and_duplicates_stay(tmp_path):
    events = make(made_up(tmp_path / "published"), tmp_path)
    assert set(events["subject_id"]) == set(RECORDS)
    one = events[events["subject_id"] == RECORDS[0]]
    minutes = (one["time"] - pd.Timestamp(ADMISSION)).dt.total_seconds() / 60
    assert list(zip(minutes, one["code"], one["numeric_value"].round(3), strict=True)) == [
        *((0, "Age", 54), (0, "Gender", 0), (0, "ICUType", 4)),  # -1: height and weight are not known
        *((7, "HR", 73), (7, "Temp", pytest.approx(35.1)), (7, "HR", 75), (1590, "HR", 88.5), (2880, "Urine", 0)),
    ]


def test_what_was_made_is_counted(tmp_path):
    counts = make_meds(made_up(tmp_path / "published"), tmp_path / "data", tmp_path / "labels.csv")
    assert (counts.events, counts.unknown, counts.deaths) == (40 * 8, 40 * 2, 20)
    assert sum(counts.stays.values()) == 40
    assert min(counts.stays.values()) >= 1


def test_it_is_read_as_meds_with_its_splits_and_labels(tmp_path, load):
    make(made_up(tmp_path / "published"), tmp_path)
    opened = load(tmp_path / "data", label_path=str(tmp_path / "labels.csv"))
    assert opened.description.kind == "events"
    names = {"train": "train", "valid": "tuning", "test": "held_out"}
    for split, name in names.items():
        records = parquet_files.ids(opened.splits[split])
        assert {split_of(int(record)) for record in records} == {name}
        assert parquet_files.labels(opened.splits[split], opened.description) == [str(int(one) % 2) for one in records]
    (first, *_) = parquet_files.events(opened.splits["train"], opened.description, only=[0])
    assert [gap for gap, _ in first] == [0, 7, 1583, 1290]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Time,Value\n", "its first line is 'Time,Value'"),
        (HEADING + "00:00,Age,54\n", "first row should be the RecordID"),
        (HEADING + "00:00,RecordID,7\n00:07,HR,high\n", r"7\.txt, line 3: '00:07,HR,high'"),
        (HEADING + "00:00,RecordID,7\n7,HR,80\n", r"line 3: '7,HR,80'"),
    ],
)
def test_what_is_no_such_file_is_refused_with_its_line(text, complaint):
    with pytest.raises(DataError, match=complaint):
        read_stay(text, "7.txt")


def test_minus_one_is_a_value_where_it_can_be_one():
    stay = read_stay(HEADING + "00:00,RecordID,7\n00:00,Weight,-1\n03:00,Temp,-1\n04:00,,5\n", "7.txt")
    assert (stay.parameters, stay.values, stay.unknown) == (["Temp"], [-1.0], 2)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no folder set-a"):
        make(tmp_path, tmp_path / "out")
    source = publish(tmp_path / "published", {7: "00:00,RecordID,7\n00:01,HR,80\n"}, {8: 0})
    with pytest.raises(DataError, match="stay 7 has no outcome"):
        make(source, tmp_path / "out")
    (source / "Outcomes-a.txt").unlink()
    with pytest.raises(DataError, match=r"Outcomes-a\.txt is missing"):
        make(source, tmp_path / "out")


def test_real_stays_come_back(tmp_path, real_data):
    table = pd.read_parquet(real_data / "physionet2012" / "valid" / "events.parquet")
    outcomes = pd.read_csv(real_data / "physionet2012" / "outcomes.csv", index_col="ts_id")["in_hospital_mortality"]
    chosen = table[table["ts_id"].isin(sorted(table["ts_id"].unique())[:40])]
    stays = {}
    for record, rows in chosen.groupby("ts_id"):
        lines = [
            f"{int(minute) // 60:02}:{int(minute) % 60:02},{variable},{value}\n"
            for minute, variable, value in zip(rows["minute"], rows["variable"], rows["value"], strict=True)
        ]
        stays[int(record)] = f"00:00,RecordID,{record}\n" + "".join(lines)
    source = publish(tmp_path / "published", stays, {record: int(outcomes[record]) for record in stays})
    events = make(source, tmp_path).sort_values("subject_id", kind="stable")
    minutes = (events["time"] - pd.Timestamp(ADMISSION)).dt.total_seconds() / 60
    is_unknown = (chosen["value"] == -1) & chosen["variable"].isin(["Gender", "Height", "Weight"])
    known = chosen[~is_unknown].sort_values("ts_id", kind="stable")
    assert events["code"].tolist() == known["variable"].tolist()
    assert events["numeric_value"].tolist() == known["value"].tolist()
    assert minutes.tolist() == known["minute"].tolist()
    labels = pd.read_csv(tmp_path / "labels.csv", index_col="subject_id")["in_hospital_mortality"]
    assert labels.to_dict() == {record: int(outcomes[record]) for record in stays}


def test_the_area_under_the_curve_counts_pairs():
    rng = np.random.default_rng(0)
    died_N = (rng.random(300) < 0.2).astype(int)
    scores_N = np.round(rng.normal(size=300) + died_N, 1)  # many of them equal
    pairs = scores_N[died_N == 1][:, None] - scores_N[died_N == 0]
    curve = roc_of(scores_N, died_N)
    assert curve.area == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
    assert (curve.false_positive_rate_P[-1], curve.true_positive_rate_P[-1]) == (1, 1)


def test_deaths_are_predicted_from_latents_of_the_held_out_stays(tmp_path):
    """One latent dimension predicts deaths in both splits; the outlier score predicts the opposite."""
    rng = np.random.default_rng(0)
    records = np.arange(100)
    died = records % 2
    splits = np.where(records < 60, "train", "test")
    mean = np.stack([rng.normal(size=100), died + rng.normal(size=100)], axis=1)
    mean[60:, 1] = died[60:]
    encoded = {"id": records, "split": splits.tolist(), "mean": mean.tolist(), "nll": 9.0 - died, "rate": records / 1e3}
    latents = parquet_files.write(tmp_path / "latents.parquet", encoded)
    pd.DataFrame({"subject_id": records, "in_hospital_mortality": died}).to_csv(tmp_path / "labels.csv", index=False)
    curves = show_deaths(latents, tmp_path / "labels.csv", tmp_path / "deaths.png")
    probe, outliers = (curve.area for curve in curves.values())
    assert (probe > 0.7, outliers) == (True, 0)
    assert (tmp_path / "deaths.png").stat().st_size > 5_000


def test_a_stay_is_drawn_that_has_something_of_all_variables(tmp_path):
    def stay(record: int, measurements: int) -> pd.DataFrame:
        times = 60.0 * np.arange(10)
        rows = pd.MultiIndex.from_product([times, VARIABLES], names=["time", "variable"]).to_frame(index=False)
        is_measured = rows["time"] < 60 * measurements
        return rows.assign(id=record, split="test", value=80.0, std=np.where(is_measured, 0, 5.0), measured=is_measured)

    pd.concat([stay(1, 3), stay(2, 9)]).to_parquet(tmp_path / "filled.parquet")
    show_stay(tmp_path / "filled.parquet", tmp_path / "stay.png")
    assert (tmp_path / "stay.png").stat().st_size > 5_000
    stay(1, 3).to_parquet(tmp_path / "filled.parquet")
    with pytest.raises(DataError, match="no stay has 8 measurements of each of HR"):
        show_stay(tmp_path / "filled.parquet", tmp_path / "stay.png")
