"""The data of the examples: packages known before they are opened, files read exactly, published splits kept."""

import gzip
import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from examples import get_data
from examples.get_data import Wheel, files_in, japanese_vowels, moses_smiles, physionet2012, read_stay
from seqvae.errors import DataError

TS = "#Kudo et al.\n@problemName JapaneseVowels\n@classLabel true 1 2\n@data\n"
HEAD = "Time,Parameter,Value\n00:00,RecordID,{record}\n00:00,Age,54\n00:00,Height,-1\n"
STAY = HEAD + "00:07,HR,73\n00:07,HR,75\n26:30,Temp,-1\n30:00,,5\n"
OUTCOMES = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death\n"
PUBLISHED = ["C" * length + "O" for length in range(1, 1000)]


def make_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]) -> None:
    """Write a package in place of the published one."""
    path = folder / getattr(get_data, name).file_name
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(get_data, name, getattr(get_data, name)._replace(sha256=sha256))


def utterance(steps: int, first: float, speaker: int) -> str:
    return ":".join(",".join(str(first + d + s / 100) for s in range(steps)) for d in range(12)) + f":{speaker}\n"


def folder_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_every_second_test_utterance_validates_and_frames_come_back(tmp_path, monkeypatch, load):
    sides = (
        TS + utterance(3, 0.5, 1) + utterance(7, -1.5, 2),
        TS + utterance(2, 10, 1) + utterance(4, 20, 2) + utterance(5, 30, 2),
    )
    make_wheel(tmp_path, monkeypatch, "VOWELS", dict(zip(get_data.VOWEL_FILES, map(str.encode, sides), strict=True)))
    folder = folder_of(tmp_path, "japanese_vowels")
    japanese_vowels(folder)
    splits = {split: pd.read_parquet(folder / f"{split}.parquet") for split in ("train", "valid", "test")}
    assert {split: rows["label"].tolist() for split, rows in splits.items()} == {
        "train": [1, 2],
        "valid": [2],
        "test": [1, 2],
    }
    np.testing.assert_allclose(np.stack(splits["test"]["frames"][1])[4], 30 + np.arange(12) + 0.04)
    assert load(folder).description.kind == "vectors"


def test_all_published_molecules_come_out_once_and_a_limit_changes_no_side(tmp_path, monkeypatch):
    sides = (["SMILES", *PUBLISHED], ["SMILES", "CCN", "CN"])
    files = dict(
        zip(get_data.MOLECULE_FILES, (gzip.compress("\n".join([*side, ""]).encode()) for side in sides), strict=True)
    )
    make_wheel(tmp_path, monkeypatch, "MOLECULES", files)
    splits = {}
    for name, limit in {"all": None, "some": 500}.items():
        moses_smiles(folder_of(tmp_path, name), limit)
        splits[name] = [
            set(pd.read_parquet(tmp_path / name / f"{split}.parquet")["smiles"]) for split in ("train", "valid", "test")
        ]
    train, valid, test = splits["all"]
    assert train | valid == set(PUBLISHED)
    assert not train & valid
    assert 1 <= len(valid) <= 20
    assert test == {"CCN", "CN"}
    assert splits["some"][1] == valid & set(PUBLISHED[:500])


def publish(folder: Path, records: range) -> Path:
    (folder / "set-a").mkdir(parents=True)
    for record in records:
        (folder / "set-a" / f"{record}.txt").write_text(STAY.format(record=record))
    (folder / "Outcomes-a.txt").write_text(
        OUTCOMES + "".join(f"{record},6,1,5,-1,{record % 2}\n" for record in records)
    )
    return folder


def test_events_come_back_in_their_order_without_what_is_not_known(tmp_path):
    stay = read_stay(publish(tmp_path, range(7, 8)) / "set-a" / "7.txt")
    rows = stay[["ts_id", "minute", "variable", "value"]].to_numpy().tolist()
    assert rows == [[7, 0, "Age", 54], [7, 7, "HR", 73], [7, 7, "HR", 75], [7, 1590, "Temp", -1]]


def test_stays_are_read_as_events_with_splits_and_outcomes(tmp_path, load):
    folder = folder_of(tmp_path, "physionet2012")
    records = range(132539, 132579)
    physionet2012(folder, publish(tmp_path / "published", records))
    splits = [set(pd.read_parquet(folder / split)["ts_id"]) for split in ("train", "valid", "test")]
    assert sorted(record for split in splits for record in split) == list(records)
    assert all(splits)
    outcomes = pd.read_csv(folder / "outcomes.csv", index_col="ts_id")
    assert outcomes["in_hospital_mortality"].to_dict() == {record: record % 2 for record in records}
    assert load(folder).description.kind == "events"


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match="set-a is missing"):
        physionet2012(tmp_path, tmp_path)
    (publish(tmp_path, range(7, 8)) / "Outcomes-a.txt").unlink()
    with pytest.raises(DataError, match=r"Outcomes-a\.txt is missing"):
        physionet2012(tmp_path, tmp_path)
    (tmp_path / "7.txt").write_text("Time,Parameter,Value\n00:00,Age,54\n")
    with pytest.raises(DataError, match="first row should be the RecordID"):
        read_stay(tmp_path / "7.txt")


def test_a_wheel_that_is_not_the_published_one_is_not_opened(tmp_path):
    wheel = Wheel("package", "1.0", "0" * 64)
    (tmp_path / wheel.file_name).write_bytes(b"something else")
    with pytest.raises(DataError, match="remove the file"):
        files_in(wheel, tmp_path, [])


def test_without_a_network_it_says_what_to_do(tmp_path, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        DataError, match=r"Without a network: run `python -m pip download --no-deps no-such-package==1\.0`"
    ):
        files_in(Wheel("no-such-package", "1.0", "0" * 64), tmp_path, [])
