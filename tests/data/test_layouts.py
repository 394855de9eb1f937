"""Every kind and layout of Parquet that is promised comes out as the sequences that were put in."""

import datetime as dt
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.data.cache import open_cache, prepare_cache
from seqvae.data.parquet import reader as reading
from seqvae.errors import DataError
from tests.support.parquet_files import (
    by_id,
    events,
    events_of,
    ids,
    labels,
    meds_table,
    tokens,
    vectors,
    write,
    write_splits,
)

LISTS = [[3, 1, 2], [5], [0, 4]]


# Tokens


@pytest.mark.parametrize("integer", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("make_list", [pa.list_, pa.large_list])
def test_token_lists_of_every_integer_width(tmp_path, load, integer, make_list):
    column = pa.array(LISTS, make_list(pa.type_for_alias(integer)))
    data = load(write_splits(tmp_path / "d", train={"tokens": column}, valid={"tokens": column}))
    assert tokens(data.splits["train"]) == LISTS
    assert data.description.vocabulary_size == 6


def test_token_lists_of_fixed_size(tmp_path, load):
    column = pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2))
    data = load(write_splits(tmp_path / "d", train={"tokens": column}, valid={"tokens": column}))
    assert tokens(data.splits["train"]) == [[1, 2], [3, 4]]


def test_list_types_may_differ_between_files(tmp_path, load):
    write(tmp_path / "d/train/a.parquet", {"tokens": pa.array([[1]], pa.list_(pa.int8()))})
    write(tmp_path / "d/train/b.parquet", {"tokens": pa.array([[2, 300]], pa.large_list(pa.int64()))})
    write(tmp_path / "d/valid/a.parquet", {"tokens": pa.array([[3, 3]], pa.list_(pa.uint16(), 2))})
    data = load(tmp_path / "d")
    assert tokens(data.splits["train"]) == [[1], [2, 300]]
    assert tokens(data.splits["valid"]) == [[3, 3]]


@pytest.mark.parametrize(("largest", "stored"), [(255, "u1"), (256, "u2"), (70_000, "u4")])
def test_tokens_are_stored_in_the_smallest_type(tmp_path, load, largest, stored):
    column = [[1, largest]]
    data = load(write_splits(tmp_path / "d", train={"tokens": column}, valid={"tokens": column}))
    assert data.splits["train"]._arrays["tokens"].dtype == np.dtype(stored)
    assert tokens(data.splits["train"]) == column


def test_vocabulary_size_is_that_of_the_training_split_or_as_given(tmp_path, load):
    directory = write_splits(tmp_path / "d", train={"tokens": [[0, 7]]}, valid={"tokens": [[3]]})
    assert load(directory).description.vocabulary_size == 8
    assert load(directory, vocabulary_size=20).description.vocabulary_size == 20


def test_a_sequence_may_have_an_id(tmp_path, load):
    columns = {"id": ["a", "b"], "tokens": [[1], [2]]}
    data = load(write_splits(tmp_path / "d", train=columns, valid={"id": ["c"], "tokens": [[1]]}))
    assert ids(data.splits["train"]) == ["a", "b"]


def test_without_an_id_sequences_are_numbered_through_the_files(tmp_path, load):
    write(tmp_path / "d/train/a.parquet", {"tokens": [[1], [2]]})
    write(tmp_path / "d/train/b.parquet", {"tokens": [[3]]})
    write(tmp_path / "d/valid.parquet", {"tokens": [[1]]})
    assert ids(load(tmp_path / "d").splits["train"]) == [0, 1, 2]


def test_rows_of_one_id_are_sequences_of_their_own_and_counted(tmp_path, load):
    columns = {"user_id": [5, 6, 5], "tokens": [[1], [2], [3]]}
    data = load(write_splits(tmp_path / "d", train=columns, valid={"user_id": [7], "tokens": [[1]]}))
    assert ids(data.splits["train"]) == [5, 6, 5]
    assert "train: 1 row whose id (column 'user_id') was met before: each is a sequence of its own" in data.notes


# Vectors


@pytest.mark.parametrize(
    "steps",
    [
        pa.list_(pa.list_(pa.float32())),
        pa.list_(pa.list_(pa.float64())),
        pa.large_list(pa.large_list(pa.float16())),
        pa.list_(pa.list_(pa.int32())),
        pa.list_(pa.list_(pa.float32(), 2)),
    ],
    ids=str,
)
def test_nested_lists_are_vectors(tmp_path, load, steps):
    sequences = [[[1, 2], [3, 4]], [[5, 6]]]
    column = pa.array(sequences, steps)
    data = load(write_splits(tmp_path / "d", train={"frames": column}, valid={"frames": column}))
    assert data.description.kind == "vectors"
    assert data.description.names == ("frames[0]", "frames[1]")
    assert vectors(data.splits["train"], data.description) == sequences


def test_a_list_of_floats_is_a_sequence_of_one_dimension(tmp_path, load):
    columns = {"signal": [[0.5, 1.5, 2.5], [4.0]]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns))
    assert vectors(data.splits["train"], data.description) == [[[0.5], [1.5], [2.5]], [[4.0]]]


def test_a_list_of_whole_numbers_is_a_signal_where_that_is_said(tmp_path, load):
    columns = {"signal": [[1, 2], [4]]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns), kind="vectors")
    assert vectors(data.splits["train"], data.description) == [[[1.0], [2.0]], [[4.0]]]


def test_nulls_in_vectors_are_missing_values(tmp_path, load):
    sequences = [[[1.0, None], None, [None, None]], [[3.0, 4.0]]]
    for name, inner in (("list", pa.list_(pa.float32())), ("fixed", pa.list_(pa.float32(), 2))):
        column = pa.array(sequences, pa.list_(inner))
        data = load(write_splits(tmp_path / name, train={"x": column}, valid={"x": column}))
        assert vectors(data.splits["train"], data.description) == [
            [[1.0, None], [None, None], [None, None]],
            [[3.0, 4.0]],
        ]
        assert "train: 5 of 8 values are missing" in data.notes
        assert data.counts["train"]["missing"] == [2, 3]


LONG = {"id": [7, 7, 8], "time": [0.0, 1.0, 0.0], "x": [1.0, 2.0, 3.0], "y": [4, None, 6]}


def test_a_long_table_has_a_column_a_feature(tmp_path, load):
    other = {**LONG, "id": [1, 1, 2]}
    data = load(write_splits(tmp_path / "d", train=LONG, valid=other))
    assert data.description.names == ("x", "y")
    assert by_id(data.splits["train"], vectors(data.splits["train"], data.description)) == {
        7: [[1.0, 4.0], [2.0, None]],
        8: [[3.0, 6.0]],
    }


def test_feature_columns_can_be_chosen(tmp_path, load):
    data = load(write_splits(tmp_path / "d", train=LONG, valid={**LONG, "id": [1, 1, 2]}), feature_columns=" y, y ")
    assert data.description.names == ("y",)
    assert "columns that are not used: 'x'" in data.notes


def test_labels_and_stray_indices_are_no_features(tmp_path, load):
    frame = pd.DataFrame({"id": [1, 1], "t": [0, 1], "x": [1.0, 2.0], "label": [0, 0]}, index=[10, 11])
    for name, offset in (("train", 0), ("valid", 5)):
        path = tmp_path / f"d/{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        shifted = frame.assign(id=frame["id"] + offset)
        shifted["Unnamed: 0"] = 3
        shifted.reset_index().to_parquet(path)
    data = load(tmp_path / "d")
    assert data.description.names == ("x",)


def test_an_index_that_pandas_saved_is_no_feature(tmp_path, load):
    for name, offset in (("train", 0), ("valid", 5)):
        frame = pd.DataFrame({"id": [1 + offset] * 2, "t": [0, 1], "x": [1.0, 2.0]}, index=[5, 9])
        (tmp_path / "d").mkdir(exist_ok=True)
        frame.to_parquet(tmp_path / f"d/{name}.parquet")
    data = load(tmp_path / "d")
    assert data.description.names == ("x",)


# Events


def test_meds_with_its_table_of_splits(tmp_path, load):
    write(tmp_path / "d/data/train/0.parquet", meds_table(1, 2, 3))
    write(tmp_path / "d/data/held_out/0.parquet", meds_table(4))
    write(
        tmp_path / "d/metadata/subject_splits.parquet",
        {"subject_id": [1, 2, 3, 4], "split": ["train", "train", "tuning", "held_out"]},
    )
    write(tmp_path / "d/metadata/codes.parquet", {"code": ["PULSE"], "description": ["heart rate"]})
    data = load(tmp_path / "d")
    assert {name: ids(split) for name, split in data.splits.items()} == {"train": [1, 2], "valid": [3], "test": [4]}
    assert data.description.time_unit == "minutes"


def test_a_null_time_is_a_static_fact_of_the_first_step_and_a_null_value_means_presence(tmp_path, load):
    data = load(write_splits(tmp_path / "d", train=meds_table(1), valid=meds_table(2)))
    first = [("BORN", None), ("PULSE", 80.0), ("VISIT", None)]
    assert events(data.splits["train"], data.description) == [[(0.0, first), (60.0, [("PULSE", 90.0)])]]


def test_meds_below_data_without_a_table_of_splits(tmp_path, load):
    write(tmp_path / "d/data/train/0.parquet", meds_table(1))
    write(tmp_path / "d/data/tuning/0.parquet", meds_table(2))
    write(tmp_path / "d/metadata/codes.parquet", {"code": ["PULSE"], "description": ["heart rate"]})
    assert {name: ids(split) for name, split in load(tmp_path / "d").splits.items()} == {"train": [1], "valid": [2]}


def normalised(directory: Path, *, sharded_by_split: bool = True) -> Path:
    """Write a cohort as MEDS_transforms leaves it after its stage `normalization`: numbers for codes, their names beside the data,
    a folder for each earlier stage, shards without rows, and (without splits) no table of splits."""
    numbers = {"BORN": 1, "PULSE": 2, "VISIT": 3}
    for subject, split in ((1, "train"), (2, "tuning"), (3, "held_out")):
        table = meds_table(subject)
        codes = pa.array([numbers[code] for code in table["code"].to_pylist()], pa.uint8())
        table = pa.table(
            {name: table[name] for name in ("subject_id", "time")} | {"code": codes, "numeric_value": [1.0] * 4}
        )
        shard = f"{split}/0.parquet" if sharded_by_split else f"{subject}.parquet"
        write(directory / "data" / shard, table)
        write(directory / "data" / shard.replace(".", "-empty."), table.slice(0, 0))
        write(directory / "filter_subjects" / shard, meds_table(subject))
    codes = {"code": [*numbers, None], "code/vocab_index": pa.array([*numbers.values(), None], pa.uint8())}
    write(directory / "metadata/codes.parquet", codes)
    write(directory / "fit_normalization/codes.parquet", codes)
    return directory


def test_a_normalised_meds_cohort_has_the_names_of_its_codes_and_only_its_last_stage(tmp_path, load):
    data = load(normalised(tmp_path / "d"))
    assert {name: ids(split) for name, split in data.splits.items()} == {"train": [1], "valid": [2], "test": [3]}
    assert data.description.names == ("<unknown>", "BORN", "PULSE", "VISIT")
    first = [("BORN", 1.0), ("PULSE", 1.0), ("VISIT", 1.0)]
    assert events(data.splits["train"], data.description) == [[(0.0, first), (60.0, [("PULSE", 1.0)])]]
    pool = load(normalised(tmp_path / "pool", sharded_by_split=False), validation_fraction=0.5)
    assert {subject for split in pool.splits.values() for subject in ids(split)} == {1, 2, 3}
    assert pool.description.names[1:] == ("BORN", "PULSE", "VISIT")
    assert any(note.startswith("4 files left out that stand beside the data, the first: ") for note in pool.notes)


def test_numbers_of_one_code_stay_apart_and_those_without_a_name_stay_numbers(tmp_path, load):
    cohort = normalised(tmp_path / "d")
    write(cohort / "metadata/codes.parquet", {"code": ["PULSE", "PULSE"], "code/vocab_index": [1, 2]})
    assert load(cohort).description.names == ("<unknown>", "3", "PULSE #1", "PULSE #2")


def test_cohorts_that_number_their_codes_differently_are_not_mixed(tmp_path, load):
    for name in ("one", "two"):
        normalised(tmp_path / name)
    write(tmp_path / "two/metadata/codes.parquet", {"code": ["X", "PULSE"], "code/vocab_index": [1, 2]})
    with pytest.raises(DataError, match="code/vocab_index 1 is 'X' here and 'BORN' elsewhere"):
        load(f"{tmp_path}/*")


def test_the_table_of_codes_is_part_of_what_names_a_cache(tmp_path, load):
    cohort = normalised(tmp_path / "d")
    before = load(cohort).path
    write(cohort / "metadata/codes.parquet", {"code": ["BIRTH"], "code/vocab_index": [1]})
    after = load(cohort)
    assert after.path != before
    assert after.description.names == ("<unknown>", "2", "3", "BIRTH")


def test_a_table_of_the_meds_schema_is_read(tmp_path, load):
    meds = pytest.importorskip("meds", reason="the package meds, which holds the schema of MEDS, is not installed")
    columns = {**meds_table(1).to_pydict(), "numeric_value": [None, 80.0, None, 90.0]}
    for split, subject in (("train", 1), ("tuning", 2), ("held_out", 3)):
        rows = pa.table(columns | {"subject_id": [subject] * 4}, schema=meds.DataSchema.schema())
        write(tmp_path / "d" / meds.data_subdirectory / split / "0.parquet", meds.DataSchema.align(rows))
    names = {"code": ["PULSE"], "description": ["heart rate"], "parent_codes": [["LOINC/8867-4"]]}
    write(tmp_path / "d" / meds.code_metadata_filepath, pa.table(names, schema=meds.CodeMetadataSchema.schema()))
    data = load(tmp_path / "d")
    assert {name: ids(split) for name, split in data.splits.items()} == {"train": [1], "valid": [2], "test": [3]}
    assert data.description.names == ("<unknown>", "BORN", "PULSE", "VISIT")


STEPS = [(0.0, [("bp", 120.0), ("hr", 60.0)]), (5.0, [("hr", 70.0)])]


def test_a_long_table_of_events(tmp_path, load):
    data = load(write_splits(tmp_path / "d", train=events_of(3, 1), valid=events_of(2)))
    assert data.description.names == ("<unknown>", "bp", "hr")
    assert by_id(data.splits["train"], events(data.splits["train"], data.description)) == {3: STEPS, 1: STEPS}


def test_the_set_index_says_what_belongs_to_a_step(tmp_path, load):
    columns = {
        "ts_id": [1, 1, 1, 1],
        "minute": [0.0, 0.5, 3.0, 3.5],
        "variable": ["a", "b", "a", "b"],
        "value": [1.0, 2.0, 3.0, 4.0],
    }
    directory = tmp_path / "d"
    for name, number in (("train", 1), ("valid", 2)):
        write(directory / f"{name}.parquet", {**columns, "ts_id": [number] * 4, "set_index": [0, 0, 1, 1]})
    data = load(directory)
    assert events(data.splits["train"], data.description) == [
        [(0.0, [("a", 1.0), ("b", 2.0)]), (3.0, [("a", 3.0), ("b", 4.0)])]
    ]


def test_measurements_of_one_variable_at_one_time_become_their_mean(tmp_path, load):
    columns = {
        "ts_id": [1] * 5,
        "minute": [0.0, 0.0, 0.0, 1.0, 1.0],
        "variable": ["a", "a", "a", "a", "a"],
        "value": [1.0, None, 4.0, None, None],
    }
    data = load(write_splits(tmp_path / "d", train=columns, valid={**columns, "ts_id": [2] * 5}))
    assert events(data.splits["train"], data.description) == [[(0.0, [("a", 2.5)]), (1.0, [("a", None)])]]
    assert "6 events merged with another of the same variable at the same time: the mean is kept" in data.notes


def write_patients(directory: Path, stems: list[str], **extra: list) -> None:
    columns = {name: values for name, values in events_of(0).items() if name != "ts_id"}
    for stem in stems:
        write(directory / f"{stem}.parquet", {**columns, **extra})


@pytest.mark.parametrize("extra", [{}, {"set_index": [0, 0, 1]}])
def test_one_file_a_sequence_whose_stem_is_the_id(tmp_path, load, extra):
    write_patients(tmp_path / "d/train", ["200001.0", "200002.0"], **extra)
    write_patients(tmp_path / "d/valid", ["200003.0"], **extra)
    write_patients(tmp_path / "d/test", ["200004"], **extra)
    data = load(tmp_path / "d")
    assert {name: ids(split) for name, split in data.splits.items()} == {
        "train": [200001, 200002],
        "valid": [200003],
        "test": [200004],
    }
    assert events(data.splits["train"], data.description) == [STEPS, STEPS]


def test_stems_that_are_no_numbers_are_names(tmp_path, load):
    write_patients(tmp_path / "d/train", ["12", "b-7"])
    write_patients(tmp_path / "d/valid", ["99999999999999999999999"])
    data = load(tmp_path / "d")
    assert ids(data.splits["train"]) == ["12", "b-7"]
    assert ids(data.splits["valid"]) == ["99999999999999999999999"]


def test_a_number_in_front_of_the_variable_names_counts_as_a_name(tmp_path, load):
    columns = {**events_of(1), "variable": [7, 9, 7]}
    data = load(write_splits(tmp_path / "d", train=columns, valid={**columns, "ts_id": [2] * 3}))
    assert data.description.names == ("<unknown>", "7", "9")


def test_whole_floats_are_ids(tmp_path, load):
    columns = events_of(1)
    data = load(
        write_splits(
            tmp_path / "d",
            train={**columns, "ts_id": [200001.0] * 3},
            valid={**columns, "ts_id": pa.array([200002] * 3, pa.int32())},
        )
    )
    assert ids(data.splits["train"]) == [200001]


@pytest.mark.parametrize(
    ("column", "minutes"),
    [
        (pa.array([0, 90], pa.timestamp("s")), 1.5),
        (pa.array([0, 90_000], pa.timestamp("ms", tz="Europe/Berlin")), 1.5),
        (pa.array([0, 90_000_000_000], pa.timestamp("ns")), 1.5),
        (pa.array([0, 90_000_000], pa.duration("us")), 1.5),
        (pa.array([0, 2], pa.date32()), 2880.0),
        (pa.array([1_700_000_000_000_000_000, 1_700_000_000_000_001_024], pa.int64()), 1024.0),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_time_stamps_become_minutes_and_numbers_stay_what_they_are(tmp_path, load, column, minutes):
    columns = {"id": [1, 1], "time": column, "code": ["a", "a"], "value": [1.0, 2.0]}
    data = load(write_splits(tmp_path / "d", train=columns, valid={**columns, "id": [2, 2]}))
    gaps = [gap for gap, _ in events(data.splits["train"], data.description)[0]]
    assert gaps == [0.0, minutes]
    assert data.description.time_unit == ("time" if pa.types.is_integer(column.type) else "minutes")


def test_a_large_time_stamp_loses_no_seconds(tmp_path, load):
    times = pa.array([dt.datetime(2024, 5, 1, 12), dt.datetime(2024, 5, 1, 12, 0, 1)], pa.timestamp("ns"))
    columns = {"id": [1, 1], "time": times, "code": ["a", "a"], "value": [1.0, 2.0]}
    data = load(write_splits(tmp_path / "d", train=columns, valid={**columns, "id": [2, 2]}))
    assert events(data.splits["train"], data.description, digits=5)[0][1][0] == pytest.approx(1 / 60, abs=1e-4)


def test_dictionary_encoded_strings_are_strings(tmp_path, load):
    columns = {
        "ts_id": pa.array(["p", "p", "q"]).dictionary_encode(),
        "minute": [0, 1, 0],
        "variable": pa.array(["a", "b", "a"]).dictionary_encode(),
        "value": [1.0, 2.0, 3.0],
    }
    other = {**columns, "ts_id": pa.array(["r", "r", "s"]).dictionary_encode()}
    data = load(write_splits(tmp_path / "d", train=columns, valid=other))
    assert ids(data.splits["train"]) == ["p", "q"]
    assert data.description.names == ("<unknown>", "a", "b")


def test_a_rare_variable_is_unknown_and_its_values_are_not_used(tmp_path, load):
    columns = {"ts_id": [1] * 3, "minute": [0, 1, 2], "variable": ["a", "a", "b"], "value": [1.0, 3.0, 1e6]}
    data = load(write_splits(tmp_path / "d", train=columns, valid={**columns, "ts_id": [2] * 3}), minimum_count=2)
    assert data.description.names == ("<unknown>", "a")
    assert (data.description.mean, data.description.std) == ((0.0, 2.0), (1.0, 1.0))
    assert events(data.splits["train"], data.description)[0][2] == (1.0, [("<unknown>", None)])
    assert "train: 1 of 3 events count as <unknown>, and their values are not used" in data.notes


def test_new_variables_are_expected_at_as_many_steps_as_show_a_variable_only_once(tmp_path, load):
    columns = {"ts_id": [1] * 4, "minute": [0, 1, 1, 2], "variable": ["a", "a", "b", "a"], "value": [1.0] * 4}
    data = load(write_splits(tmp_path / "d", train=columns, valid={**columns, "ts_id": [2] * 4}))
    assert data.description.unknown_share == pytest.approx(1 / 3)


# Where files stand


@pytest.mark.parametrize("valid", ["valid", "val", "validation", "tuning", "dev", "Valid"])
def test_split_folders_by_any_of_their_names(tmp_path, load, valid):
    write(tmp_path / "d/train/a/b/x.parquet", {"tokens": [[1]]})
    write(tmp_path / "d/train/y.pq", {"tokens": [[2]]})
    write(tmp_path / f"d/{valid}/x.PARQUET", {"tokens": [[1]]})
    write(tmp_path / "d/held_out.parquet", {"tokens": [[2]]})
    data = load(tmp_path / "d")
    assert tokens(data.splits["train"]) == [[1], [2]]
    assert tokens(data.splits["valid"]) == [[1]]
    assert tokens(data.splits["test"]) == [[2]]


def test_splits_in_shards_as_the_hub_names_them(tmp_path, load):
    for shard in (0, 1):
        write(tmp_path / f"d/data/train-0000{shard}-of-00002-ab12.parquet", {"tokens": [[shard]]})
    write(tmp_path / "d/data/validation-00000-of-00001.parquet", {"tokens": [[1]]})
    data = load(tmp_path / "d")
    assert tokens(data.splits["train"]) == [[0], [1]]
    assert tokens(data.splits["valid"]) == [[1]]


def test_a_split_can_be_a_folder_that_is_called_like_a_file(tmp_path, load):
    write(tmp_path / "d/train.parquet/part-0.parquet", {"tokens": [[1]]})
    (tmp_path / "d/train.parquet/_SUCCESS").touch()
    write(tmp_path / "d/valid.parquet/part-0.parquet", {"tokens": [[0]]})
    assert tokens(load(tmp_path / "d").splits["train"]) == [[1]]


def test_a_glob_takes_the_union_of_its_matches(tmp_path, load):
    for run in ("1", "2"):
        write(tmp_path / f"runs_{run}/data/train.parquet", {"tokens": [[int(run)]]})
        write(tmp_path / f"runs_{run}/data/valid.parquet", {"tokens": [[0]]})
    (tmp_path / "runs_notes").mkdir()
    data = load(str(tmp_path / "runs_*/data"))
    assert tokens(data.splits["train"]) == [[1], [2]]
    assert tokens(data.splits["valid"]) == [[0], [0]]


def test_a_glob_over_splits_keeps_them_apart(tmp_path, load):
    write_splits(tmp_path / "d", train={"tokens": [[1]]}, valid={"tokens": [[0]]})
    (tmp_path / "d/readme.md").write_text("not data")
    data = load(str(tmp_path / "d/*"))
    assert tokens(data.splits["train"]) == [[1]]
    assert tokens(data.splits["valid"]) == [[0]]


def test_a_glob_that_meets_a_file_twice_takes_it_once(tmp_path, load):
    write(tmp_path / "d/sub/a.parquet", {"tokens": [[n] for n in range(40)]})
    data = load(str(tmp_path / "d/**"))
    assert sum(len(split) for split in data.splits.values()) == 40


def test_a_directory_whose_name_looks_like_a_glob_is_itself(tmp_path, load):
    write_splits(tmp_path / "run[1]*", train={"tokens": [[1]]}, valid={"tokens": [[0]]})
    assert tokens(load(tmp_path / "run[1]*").splits["train"]) == [[1]]


def test_linked_folders_are_followed_once(tmp_path, load):
    write(tmp_path / "elsewhere/a.parquet", {"tokens": [[1]]})
    write(tmp_path / "d/valid/a.parquet", {"tokens": [[0]]})
    (tmp_path / "d/train").mkdir()
    (tmp_path / "d/train/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "d/train")
    assert tokens(load(tmp_path / "d").splits["train"]) == [[1]]


def test_files_that_are_not_used_are_counted(tmp_path, load):
    write_splits(tmp_path / "d", train={"tokens": [[1]]}, valid={"tokens": [[0]]}, extra={"tokens": [[1]]})
    write(tmp_path / "d/train/_temporary/part.parquet", {"tokens": [[1]]})
    write(tmp_path / "d/train/.part.parquet", {"tokens": [[1]]})
    write(tmp_path / "d/train/part.parquet", {"tokens": [[1]]})
    data = load(tmp_path / "d")
    assert tokens(data.splits["train"]) == [[1], [1]]
    assert "2 files left out whose name, or that of a folder, begins with . or _" in data.notes
    assert f"1 file left out that stand beside the data, the first: {tmp_path}/d/extra.parquet" in data.notes


def test_files_without_rows_among_others_are_counted(tmp_path, load):
    write_splits(tmp_path / "d", train={"id": [1], "tokens": [[1]]}, valid={"id": [2], "tokens": [[0]]})
    (tmp_path / "d/train").mkdir()
    pd.DataFrame({"id": [], "tokens": []}).to_parquet(tmp_path / "d/train/empty.parquet")
    data = load(tmp_path / "d")
    assert tokens(data.splits["train"]) == [[1]]
    assert f"1 file without rows, the first: {tmp_path}/d/train/empty.parquet" in data.notes


# Pools


def test_a_pool_is_split_by_a_hash_of_the_id_that_nothing_moves(tmp_path, load):
    columns: dict[str, list] = {"id": list(range(200)), "tokens": [[number] for number in range(200)]}
    write(tmp_path / "a/pool.parquet", columns)
    write(tmp_path / "b/1.parquet", {name: values[:50] for name, values in columns.items()})
    write(tmp_path / "b/0.parquet", {name: values[:49:-1] for name, values in columns.items()})
    shares = {"validation_fraction": 0.2, "test_fraction": 0.1, "vocabulary_size": 200}
    one, other = load(tmp_path / "a", **shares), load(tmp_path / "b", **shares)
    for name in ("train", "valid", "test"):
        assert sorted(ids(one.splits[name])) == sorted(ids(other.splits[name]))
    assert sorted(ids(one.splits["test"])) == [20, 40, 57, 61, 65, 74, 88, 99, 104, 117, 127, 136, 146, 147, 158, 183]
    assert "valid: 20% of the pool, by a hash of the sequence's id" in one.notes


def test_the_hash_of_names_does_not_move_either(tmp_path, load):
    names = [f"p{number}" for number in range(60)]
    write(tmp_path / "d/pool.parquet", {"id": names, "tokens": [[1]] * 60})
    assert ids(load(tmp_path / "d").splits["valid"]) == ["p5", "p14", "p17", "p19", "p21", "p40"]


def test_rows_without_ids_keep_their_side_when_files_are_added(tmp_path, load):
    write(tmp_path / "d/m.parquet", {"tokens": [[number] for number in range(100)]})
    before = load(tmp_path / "d", vocabulary_size=1000)
    write(tmp_path / "d/a.parquet", {"tokens": [[500 + number] for number in range(100)]})
    after = load(tmp_path / "d", vocabulary_size=1000)
    for name in ("train", "valid"):
        assert [one for one in tokens(after.splits[name]) if one[0] < 500] == tokens(before.splits[name])


def test_what_the_directory_lacks_is_taken_from_its_training_split(tmp_path, load):
    write(tmp_path / "d/train.parquet", {"id": list(range(100)), "tokens": [[1]] * 100})
    data = load(tmp_path / "d", test_fraction=0.2)
    assert sum(len(split) for split in data.splits.values()) == 100
    assert {"train", "valid", "test"} == set(data.splits)
    assert "test: 20% of the training split, by a hash of the sequence's id" in data.notes


# What is detected, and what overrules it


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"tokens": [[1]]}, "tokens: one sequence a row in column 'tokens', ids are row numbers"),
        ({"id": [1], "x": [[0.5]]}, "vectors: one sequence a row in column 'x', id 'id'"),
        (events_of(1), "events: long table, id 'ts_id', time 'minute', variable 'variable', value 'value'"),
        (LONG, "vectors: long table, id 'id', time 'time', 2 features ('x', 'y')"),
        ({"time": [1], "x": [1.0]}, "vectors: one sequence a file, id = the file's name, time 'time', 1 feature ('x')"),
        (meds_table(1), "events: long table, id 'subject_id', time 'time', variable 'code', value 'numeric_value'"),
    ],
)
def test_what_was_detected_is_said_in_a_line(tmp_path, load, columns, wanted):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    write(tmp_path / "d/train/one.parquet", table)
    name = table.column_names[0]
    if "id" in name:
        table = table.set_column(0, name, pa.array([9] * len(table)))
    write(tmp_path / "d/valid/two.parquet", table)
    assert load(tmp_path / "d").layout == wanted


def test_every_part_can_be_named(tmp_path, load):
    columns = {"who": [1, 1], "when": [0, 1], "what": ["a", "b"], "how much": [1.0, 2.0], "tokens": [[1], [2]]}
    directory = write_splits(tmp_path / "d", train=columns, valid={**columns, "who": [2, 2]})
    flags = {"id_column": "who", "time_column": "when", "variable_column": "what", "value_column": "how much"}
    data = load(directory, **flags)
    assert events(data.splits["train"], data.description) == [[(0.0, [("a", 1.0)]), (1.0, [("b", 2.0)])]]
    assert tokens(load(directory, sequence_column="tokens").splits["train"]) == [[1], [2]]
    long = load(directory, id_column="who", time_column="when", feature_columns="how much")
    assert vectors(long.splits["train"], long.description) == [[[1.0], [2.0]]]


def test_columns_with_common_names_that_hold_something_else_are_not_taken(tmp_path, load):
    columns = {"id": [[0.5], [0.25]], "time": ["noon", "night"], "tokens": [[1], [2]], "value": ["x", "y"]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns), kind="tokens")
    assert tokens(data.splits["train"]) == [[1], [2]]
    assert data.layout == "tokens: one sequence a row in column 'tokens', ids are row numbers"


def test_columns_that_are_called_like_the_caches_own_do_no_harm(tmp_path, load):
    columns = {
        "__file": [1, 2, 1],
        "__row": [0.0, 1.0, 2.0],
        "0": [5.0, 6.0, 7.0],
        "row": [1.0, 1.0, 1.0],
        "label": [1, 2, 3],
    }
    directory = write_splits(tmp_path / "d", train=columns, valid={**columns, "__file": [3, 4, 3]})
    data = load(directory, id_column="__file", time_column="__row", feature_columns="0,row")
    assert by_id(data.splits["train"], vectors(data.splits["train"], data.description)) == {
        1: [[5.0, 1.0], [7.0, 1.0]],
        2: [[6.0, 1.0]],
    }


@pytest.mark.parametrize(
    "name", ["a.b", "$x$", "größe 変", "with space", "tab\there", "\x1b[31mred", "'quoted'", "list"]
)
def test_columns_may_have_any_name(tmp_path, load, name):
    columns = {name: [[1, 2], [3]], "a": [1, 2]}
    directory = write_splits(tmp_path / "dir $x 変", train=columns, valid=columns)
    data = load(directory, sequence_column=name)
    assert tokens(data.splits["train"]) == [[1, 2], [3]]
    assert "\x1b" not in data.layout


def test_what_most_files_hold_decides(tmp_path, load):
    write(tmp_path / "d/train/0.parquet", {"x": [[1, 2]]})
    write(tmp_path / "d/train/1.parquet", {"x": [[0.5]]})
    write(tmp_path / "d/valid/2.parquet", {"x": [[3]]})
    data = load(tmp_path / "d")
    assert vectors(data.splits["train"], data.description) == [[[1.0], [2.0]], [[0.5]]]


# The rows of a sequence, wherever they stand


@pytest.fixture(params=[1, 2, 3, 1000])
def block_rows(request, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_ROWS", request.param)
    return request.param


def test_a_sequence_may_span_blocks_row_groups_and_files(tmp_path, load, block_rows):
    numbers = [1] * 5 + [2] + [3] * 7
    times = [*range(5), 0, *range(7)]
    for file, (start, stop) in enumerate([(0, 3), (3, 4), (4, 9), (9, 13)]):
        columns = {"id": numbers[start:stop], "time": times[start:stop], "x": [float(n) for n in range(start, stop)]}
        write(tmp_path / f"d/train/{file}.parquet", columns, row_group_size=2)
    write(tmp_path / "d/valid.parquet", {"id": [4], "time": [0], "x": [1.0]})
    data = load(tmp_path / "d")
    found = by_id(data.splits["train"], vectors(data.splits["train"], data.description))
    assert found == {1: [[float(n)] for n in range(5)], 2: [[5.0]], 3: [[float(n)] for n in range(6, 13)]}
    assert not [note for note in data.notes if "brought together" in note]


@pytest.mark.parametrize("names", [[1, 2, 3], ["p", "q", "ö"]])
def test_interleaved_ids_are_brought_together_in_order_of_time(tmp_path, load, block_rows, names):
    rows = [(names[n % 3], n, float(n)) for n in range(12)]
    rows = rows[6:] + rows[:6]
    for file in range(2):
        chosen = rows[file * 6 : file * 6 + 6]
        columns = dict(zip(("id", "time", "x"), map(list, zip(*chosen, strict=True)), strict=True))
        write(tmp_path / f"d/train/{file}.parquet", columns)
    write(tmp_path / "d/valid.parquet", {"id": [9 if names[0] == 1 else "z"], "time": [0], "x": [1.0]})
    data = load(tmp_path / "d")
    found = by_id(data.splits["train"], vectors(data.splits["train"], data.description))
    assert found == {name: [[float(n)] for n in range(k, 12, 3)] for k, name in enumerate(names)}
    assert "12 rows brought together by id, as rows of one sequence lay apart" in data.notes
    assert "3 rows earlier than the row before in the same sequence: sorted by time" in data.notes


def test_many_spill_files_bring_together_the_same(tmp_path, load, monkeypatch):
    monkeypatch.setattr("seqvae.data.parquet.reader.SPILL_ROWS", 10)
    numbers = np.random.default_rng(0).integers(0, 30, 200)
    columns = {"id": numbers, "time": np.arange(200), "x": np.arange(200.0)}
    data = load(write_splits(tmp_path / "d", train=columns, valid={"id": [99], "time": [0], "x": [1.0]}))
    found = by_id(data.splits["train"], vectors(data.splits["train"], data.description))
    assert found == {
        number: [[float(n)] for n in np.flatnonzero(numbers == number)] for number in np.unique(numbers).tolist()
    }


def test_rows_that_are_together_but_not_in_order_of_time_are_sorted(tmp_path, load, block_rows):
    columns = {"id": [1, 1, 1], "time": [2, 0, 1], "x": [2.0, 0.0, 1.0]}
    data = load(write_splits(tmp_path / "d", train=columns, valid={"id": [2], "time": [0], "x": [0.0]}))
    assert vectors(data.splits["train"], data.description) == [[[0.0], [1.0], [2.0]]]
    assert "1 row earlier than the row before in the same sequence: sorted by time" in data.notes


def test_static_facts_between_others_are_not_out_of_order(tmp_path, load):
    columns = {
        "subject_id": [1] * 4,
        "time": pa.array([1.0, None, None, 2.0]),
        "code": list("abcd"),
        "value": [1.0] * 4,
    }
    directory = write_splits(tmp_path / "d", train=columns, valid={**columns, "subject_id": [2] * 4})
    data = load(directory, unsorted="error")
    assert [[name for name, _ in step] for _, step in events(data.splits["train"], data.description)[0]] == [
        ["a", "b", "c"],
        ["d"],
    ]


def test_a_sequence_of_static_facts_alone_is_one_step(tmp_path, load):
    columns = {"subject_id": [1, 1], "time": pa.nulls(2, pa.float64()), "code": ["a", "b"], "value": [1.0, None]}
    data = load(write_splits(tmp_path / "d", train=columns, valid={**columns, "subject_id": [2, 2]}))
    assert events(data.splits["train"], data.description) == [[(0.0, [("a", 1.0), ("b", None)])]]


Row = tuple[int, float | None, str, float | None]
rows_of_events = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.none() | st.integers(0, 4).map(float),
        st.sampled_from("abc"),
        st.none() | st.integers(-9, 9).map(float),
    ),
    min_size=1,
    max_size=24,
)


def slow_events(rows: list[Row], id_: int) -> list[tuple[float, dict[str, float | None]]]:
    """The steps of one sequence, found one row at a time: gap, and the value of each variable or None."""
    own = [row for row in rows if row[0] == id_]
    first = min((time for _, time, _, _ in own if time is not None), default=0.0)
    measured: dict[float, dict[str, list[float]]] = {}
    for _, time, variable, value in own:
        step = measured.setdefault(first if time is None else time, {})
        step.setdefault(variable, []).extend([] if value is None else [value])
    times = sorted(measured)
    return [
        (
            time - times[max(0, number - 1)],
            {variable: sum(values) / len(values) if values else None for variable, values in measured[time].items()},
        )
        for number, time in enumerate(times)
    ]


@settings(max_examples=60)
@given(rows_of_events, st.lists(st.integers(0, 24), max_size=3), st.integers(1, 5), st.integers(1, 30))
def test_any_table_of_events_comes_out_as_a_loop_over_its_rows_would_make_it(rows, cuts, group, block_rows):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BLOCK_ROWS", block_rows)
        patch.setattr("seqvae.data.parquet.reader.SPILL_ROWS", 5)
        bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
        for number, (start, stop) in enumerate(pairwise(bounds)):
            write_rows(Path(name, f"d/train/{number}.parquet"), rows[start:stop], group)
        write_rows(Path(name, "d/valid.parquet"), [(9, *row[1:]) for row in rows], group)
        path = prepare_cache(SourceSettings(data_dir=f"{name}/d"), CacheSettings(cache_dir=f"{name}/cache"))
        data = open_cache(path, LengthSettings())
        found = by_id(data.splits["train"], events(data.splits["train"], data.description))
        assert sorted(found) == sorted({row[0] for row in rows})
        for id_, steps in found.items():
            wanted = slow_events(rows, int(id_))
            assert [gap for gap, _ in steps] == [gap for gap, _ in wanted]
            for (_, present), (_, measured) in zip(steps, wanted, strict=True):
                assert dict(present) == {
                    variable: None if value is None else pytest.approx(value, abs=1e-2)
                    for variable, value in measured.items()
                }
                assert len(present) == len(measured)


def write_rows(path: Path, rows: list[Row], group: int) -> None:
    columns = zip(*rows, strict=True) if rows else [()] * 4
    types = (pa.int64(), pa.float64(), pa.string(), pa.float64())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    write(path, pa.table(arrays, names=["id", "time", "code", "value"]), row_group_size=group)


# Normalisation


def test_values_are_normalised_by_the_training_split(tmp_path, load):
    train = {"id": [1, 1, 2, 2], "time": [0, 1, 0, 1], "x": [1.0, 3.0, 5.0, 7.0], "c": [4.0, 4.0, 4.0, 4.0]}
    valid = {"id": [3, 3], "time": [0, 1], "x": [4.0, 1000.0], "c": [4.0, 5.0]}
    data = load(write_splits(tmp_path / "d", train=train, valid=valid))
    assert data.description.mean == (4.0, 4.0)
    assert data.description.std == pytest.approx((np.std([1, 3, 5, 7]), 1.0))
    batch = data.splits["valid"].gather(np.array([0]))
    assert batch.values_BTD[0, :, 1].tolist() == [0.0, 1.0]
    assert "warning: constant in the training split, left unscaled: c" in data.notes
    assert "1 value lies more than 10 standard deviations from the mean (x 1)" in data.notes


@pytest.mark.parametrize("constant", [0.1, -1e9, 1e-20, 1 / 3])
def test_a_constant_is_recognised_whatever_it_is(tmp_path, load, constant):
    columns = {"x": [[constant] * 1001, [constant]]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns))
    assert data.description.mean == (constant,)
    assert data.description.std == (1.0,)


def test_small_variation_on_a_large_value_is_no_constant(tmp_path, load):
    columns = {"x": [[1.7e9, 1.7e9 + 1.0]]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns))
    assert data.description.std == (0.5,)
    assert data.splits["train"].gather(np.array([0])).values_BTD.flatten().tolist() == [-1.0, 1.0]


def test_a_feature_without_values_in_the_training_split_is_named(tmp_path, load):
    columns = {"id": [1, 1], "time": [0, 1], "x": [1.0, 2.0], "y": pa.nulls(2, pa.float64())}
    data = load(write_splits(tmp_path / "d", train=columns, valid={**columns, "id": [2, 2], "y": [1.0, 2.0]}))
    assert "warning: without any value in the training split: y" in data.notes
    assert vectors(data.splits["valid"], data.description) == [[[1.0, None], [2.0, None]]]


# Real data


def test_the_molecules_come_out_as_they_are(real_data, load):
    data = load(real_data / "moses_smiles", tokenizer="characters")
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 200_000,
        "valid": 10_000,
        "test": 10_000,
    }
    written = pd.read_parquet(real_data / "moses_smiles/valid.parquet")["smiles"].iloc[[0, 5000, 9999]].tolist()
    batch = data.splits["valid"].gather(np.array([0, 5000, 9999]))
    symbols = np.array(data.description.symbols)
    assert ["".join(symbols[row[:n]]) for row, n in zip(batch.tokens_BT, batch.lengths_B, strict=True)] == written


def test_the_utterances_come_out_as_they_are(real_data, load):
    data = load(real_data / "japanese_vowels", label_column="label")
    table = pd.read_parquet(real_data / "japanese_vowels/test.parquet")
    found = vectors(data.splits["test"], data.description, digits=4)
    assert np.allclose(np.array(found[7], float), np.stack(table["frames"].iloc[7]), atol=1e-3)
    assert labels(data.splits["test"], data.description) == table["label"].astype(str).tolist()


def test_the_stays_come_out_as_they_are(real_data, load):
    outcomes = real_data / "physionet2012/outcomes.csv"
    flags = {"label_path": str(outcomes), "label_column": "in_hospital_mortality"}
    data = load(real_data / "physionet2012", **flags)
    assert [len(data.splits[name]) for name in ("train", "valid", "test")] == [3200, 400, 400]
    assert len(data.description.names) == 42
    table = pd.read_parquet(real_data / "physionet2012/valid/events.parquet")
    stay = ids(data.splits["valid"])[3]
    rows = table[table["ts_id"] == stay].groupby(["minute", "variable"])["value"].mean()
    found = events(data.splits["valid"], data.description, only=[3])[0]
    assert sum(len(step) for _, step in found) == len(rows)
    assert [value for _, step in found for _, value in step] == pytest.approx(rows.tolist(), rel=1e-4, abs=1e-2)


def test_a_kind_that_the_data_are_not_is_refused(tmp_path, load):
    directory = write_splits(tmp_path / "d", train={"x": [[0.5]]}, valid={"x": [[0.5]]})
    with pytest.raises(DataError, match=r"no tokens recognised in its columns \('x': list<"):
        load(directory, kind="tokens")


def test_ids_that_start_anew_in_each_split_are_passed_over_when_told_so(tmp_path, load):
    rows = {"id": [0, 1, 2], "tokens": [[1], [2], [3]]}
    write(tmp_path / "train.parquet", rows)
    write(tmp_path / "valid.parquet", rows)
    with pytest.raises(DataError, match=r"in both train and valid.*--id_column"):
        load(tmp_path)
    data = load(tmp_path, id_column="none")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 3, "valid": 3}


def test_a_long_table_whose_times_are_text_is_told_so_and_not_taken_for_text(tmp_path, load):
    write(tmp_path / "train.parquet", {"id": [1, 1], "time": ["1 May", "2 May"], "hr": [60.0, 61.0]})
    for tokenizer in (None, "words"):
        with pytest.raises(DataError, match="'time' is text: convert it to time stamps or numbers"):
            load(tmp_path, tokenizer=tokenizer)
