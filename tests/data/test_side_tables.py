"""The small tables beside the data: labels, given moments, given embeddings."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from seqvae.data.parquet.side_tables import ids_as_text, read_params_map, read_variable_embeddings
from seqvae.errors import DataError
from tests.support.parquet_files import events_of, ids, labels, vectors, write, write_splits


def refusal(call: Any, *arguments: Any, **flags: Any) -> str:
    with pytest.raises(DataError) as caught:
        call(*arguments, **flags)
    return str(caught.value)


def assert_says(message: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in message, message


def csv(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


# Labels


@pytest.fixture
def stays(tmp_path):
    return write_splits(tmp_path / "d", train=events_of(11, 12, 13), valid=events_of(14))


def test_labels_come_from_a_file_by_id(tmp_path, load, stays):
    path = csv(tmp_path / "oc.csv", "ts_id,in_hospital_mortality", "14,1", "13,0", "12,1", "11,0")
    data = load(stays, label_path=path)
    assert data.description.classes == ("0", "1")
    assert dict(zip(ids(data.splits["train"]), labels(data.splits["train"], data.description), strict=True)) == {
        11: "0",
        12: "1",
        13: "0",
    }
    assert labels(data.splits["valid"], data.description) == ["1"]
    assert "labels have 2 classes (in train '0': 2, '1': 1)" in data.notes


@pytest.mark.parametrize("written", ["11.0", "011", " 11"])
def test_ids_are_the_same_however_a_number_is_written(tmp_path, load, stays, written):
    path = csv(tmp_path / "oc.csv", "ts_id,y", f"{written},a", "12,b", "13,a", "14,b")
    assert labels(load(stays, label_path=path).splits["train"], load(stays, label_path=path).description) == [
        "a",
        "b",
        "a",
    ]


def test_ids_that_only_look_like_numbers_match_whatever_read_them(tmp_path, load):
    train = {"id": ["0012", "x"], "tokens": [[1], [1]]}
    directory = write_splits(tmp_path / "d", train=train, valid={"id": ["0013"], "tokens": [[1]]})
    path = csv(tmp_path / "oc.csv", "id,y", "12,a", "x,b", "0013,a")
    data = load(directory, label_path=path)
    assert labels(data.splits["train"], data.description) == ["a", "b"]


def test_large_ids_beside_missing_ones_lose_no_digit(tmp_path, load):
    number = 2**60 + 1
    directory = write_splits(
        tmp_path / "d", train={"id": [number], "tokens": [[1]]}, valid={"id": [1], "tokens": [[1]]}
    )
    path = csv(tmp_path / "oc.csv", "id,y", f"{number},a", ",b", "1,b")
    data = load(directory, label_path=path)
    assert labels(data.splits["train"], data.description) == ["a"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.array([3, -4], np.int64), ["3", "-4"]),
        (np.array([3.0, -4.0]), ["3", "-4"]),
        (np.array(["007", "-0", "1.50", "a.0", "0.00"], object), ["7", "-0", "1.50", "a.0", "0"]),
    ],
)
def test_ids_as_text(values, text):
    assert ids_as_text(values).tolist() == text


def test_one_of_several_label_columns_is_named(tmp_path, load, stays):
    path = csv(tmp_path / "oc.csv", "ts_id,stay,died", "11,5,0", "12,6,1", "13,7,0", "14,8,1")
    data = load(stays, label_path=path, label_column="died")
    assert labels(data.splits["train"], data.description) == ["0", "1", "0"]
    assert_says(
        refusal(load, stays, label_path=path), path, "choose one of its columns (stay, died) with --label_column"
    )
    said = refusal(load, stays, label_path=path, label_column="dead")
    assert_says(said, path, "has no column 'dead'; did you mean 'died'?")


def test_labels_may_come_from_parquet_and_be_text(tmp_path, load, stays):
    path = write(tmp_path / "oc.parquet", {"ts_id": [11, 12, 13, 14], "y": ["b", "10", "9", "b"]})
    data = load(stays, label_path=str(path))
    assert data.description.classes == ("9", "10", "b")


def test_a_sequence_without_a_label_is_refused_or_accepted_and_counted(tmp_path, load, stays):
    path = csv(tmp_path / "oc.csv", "ts_id,y", "11,0", "13,", "14,1", "99,1")
    said = refusal(load, stays, label_path=path)
    assert_says(
        said, "train.parquet: row 3: id 12 has no label in --label_path", path, "in train 2 of 3 sequences have no"
    )
    assert_says(said, "Add them, or accept that with --allow_missing_labels.")
    data = load(stays, label_path=path, allow_missing_labels=True)
    assert labels(data.splits["train"], data.description) == ["0", None, None]
    assert "train: 2 of 3 sequences have no label" in data.notes
    assert f"--label_path {path}: 1 row without a sequence in the data" in data.notes
    assert "warning: no sequence of the training split has the label '1'" in data.notes


def test_labels_of_other_sequences_alone_are_refused_even_so(tmp_path, load, stays):
    path = csv(tmp_path / "oc.csv", "ts_id,y", "1,0", "2,1")
    said = refusal(load, stays, label_path=path, allow_missing_labels=True)
    assert_says(said, path, "no sequence has a label there. Check the ids")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["ts_id,y", "11,0.5", "12,1"], ["row 0: column 'y' holds 0.5, but a label must be a class", "--label_column"]),
        (["ts_id,y", "11,1", "12,inf"], ["row 1: column 'y' holds inf"]),
        (["ts_id,y", "11,0", "12,1", "11.0,0"], ["row 2: id '11' occurred before; keep one row per sequence"]),
        (["ts_id", "11"], ["needs one row per name and at least two columns, has 1 rows and 1 columns"]),
        (["ts_id,y"], ["has 0 rows and 2 columns"]),
        ([""], ["cannot be read as a table"]),
        (["a,b", "1,2,3,4", "1,2,3"], ["cannot be read as a table"]),
    ],
)
def test_label_files_with_faults_are_refused(tmp_path, load, stays, lines, parts):
    path = csv(tmp_path / "oc.csv", *lines)
    assert_says(refusal(load, stays, label_path=path), f"--label_path {path}", *parts)


def test_a_label_file_that_is_not_there_is_refused(tmp_path, load, stays):
    assert_says(
        refusal(load, stays, label_path="nowhere.csv"), "--label_path nowhere.csv: does not exist. Check the path"
    )


@pytest.mark.parametrize(
    ("column", "classes", "wanted"),
    [
        (pa.array([10, 9], pa.int8()), ("9", "10"), ["10", "9"]),
        (pa.array([1.0, 0.0]), ("0", "1"), ["1", "0"]),
        (pa.array([True, False]), ("0", "1"), ["1", "0"]),
        (pa.array(["b", "a"]).dictionary_encode(), ("a", "b"), ["b", "a"]),
        (pa.array([-1, 1]), ("-1", "1"), ["-1", "1"]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_labels_may_stand_in_the_data(tmp_path, load, column, classes, wanted):
    columns = {"tokens": [[1], [2]], "outcome": column}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns), label_column="outcome")
    assert data.description.classes == classes
    assert labels(data.splits["train"], data.description) == wanted


def test_labels_in_the_data_that_are_missing_or_measures_are_refused(tmp_path, load):
    columns = {"tokens": [[1], [2]], "y": [0, None]}
    directory = write_splits(tmp_path / "d", train=columns, valid=columns)
    assert_says(refusal(load, directory, label_column="y"), "train.parquet: row 1: id 1 has no label in column 'y'")
    data = load(directory, label_column="y", allow_missing_labels=True)
    assert labels(data.splits["train"], data.description) == ["0", None]
    assert "warning: all labels are '0', so that there is nothing to tell apart" in data.notes
    write(directory / "train.parquet", {"tokens": [[1], [2]], "y": [0.0, 0.25]})
    said = refusal(load, directory, label_column="y")
    assert_says(said, "train.parquet: row 1: column 'y' holds 0.25, but a label must be a class")


def test_labels_of_a_long_table_are_those_of_its_sequences(tmp_path, load):
    train = {**events_of(1, 2), "label": ["x"] * 3 + ["y"] * 3}
    directory = write_splits(tmp_path / "d", train=train, valid={**events_of(3), "label": ["x"] * 3})
    data = load(directory, label_column="label")
    assert labels(data.splits["train"], data.description) == ["x", "y"]


# Given moments


def test_given_moments_take_the_place_of_measured_ones(tmp_path, load, stays):
    path = csv(tmp_path / "stats.csv", "variable,mean,std", "hr,50,10", "bp,100,20", "never seen,1,1")
    data = load(stays, params_map_path=path)
    assert data.description.names == ("<unknown>", "bp", "hr")
    assert data.description.mean == (0.0, 100.0, 50.0)
    assert data.description.std == (1.0, 20.0, 10.0)
    batch = data.splits["train"].gather(np.array([0]))
    assert sorted(batch.values_E.tolist()) == [1.0, 1.0, 2.0]


def test_given_moments_of_features(tmp_path, load):
    columns = {"id": [1], "time": [0], "NA": [3.0], "007": [10.0]}
    directory = write_splits(tmp_path / "d", train=columns, valid={**columns, "id": [2]})
    path = csv(tmp_path / "stats.csv", "variable,mean,std", "NA,1,2", "007,10,0")
    data = load(directory, params_map_path=path)
    assert (data.description.mean, data.description.std) == ((1.0, 10.0), (2.0, 1.0))
    assert vectors(data.splits["train"], data.description) == [[[3.0, 10.0]]]


def test_variables_that_are_rare_need_no_given_moments(tmp_path, load, stays):
    path = csv(tmp_path / "stats.csv", "variable,mean,std", "hr,50,10")
    said = refusal(load, stays, params_map_path=path)
    assert_says(said, path, "lacks 1 of those that have values (bp). Add them")
    assert load(stays, params_map_path=path, minimum_count=4).description.names == ("<unknown>", "hr")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["variable,mean,sd", "a,1,1"], ["has no column 'std'; did you mean 'sd'?", "Wanted: variable, mean, std"]),
        (
            ["variable,mean,std", "a,1,1", "b,x,1"],
            ["row 1: variable 'b' has mean x and std 1.", "Wanted: finite numbers"],
        ),
        (["variable,mean,std", "a,1,-1"], ["row 0: variable 'a' has mean 1 and std -1"]),
        (["variable,mean,std", "a,1,"], ["row 0: variable 'a' has mean 1 and std nothing"]),
        (["variable,mean,std", "a,1,1", "a,2,2"], ["row 1: variable 'a' occurred before; keep one row each"]),
    ],
)
def test_given_moments_with_faults_are_refused(tmp_path, lines, parts):
    path = csv(tmp_path / "stats.csv", *lines)
    assert_says(refusal(read_params_map, path), f"--params_map_path {path}", *parts)


# Given embeddings

NAMES = ("<unknown>", "NA", "bp")


def test_embeddings_come_in_the_order_of_the_variables(tmp_path):
    path = csv(tmp_path / "cached.csv", "variable,0,1", "bp,1,2", "other,9,9", "NA,3,4")
    found = read_variable_embeddings(path, NAMES)
    assert found.tolist() == [[2.0, 3.0], [3.0, 4.0], [1.0, 2.0]]
    assert found.dtype == np.float32


def test_embeddings_may_come_from_parquet(tmp_path):
    frame = pd.DataFrame({"name": ["bp", "NA"], "a": [1.0, 3.0]})
    frame.to_parquet(tmp_path / "cached.parquet")
    assert read_variable_embeddings(str(tmp_path / "cached.parquet"), NAMES).tolist() == [[2.0], [3.0], [1.0]]


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["v,0", "bp,1"], ["lacks 1 of 2 variables (NA). Add them."]),
        (["v,0", "bp,1", "NA,x"], ["row 1: column '0' holds x. Wanted: finite numbers"]),
        (["v,0", "bp,1", "NA,"], ["row 1: column '0' holds nothing"]),
        (["v,0", "bp,1", "NA,2", "bp,3"], ["row 2: variable 'bp' occurred before"]),
        (["v", "bp"], ["at least two columns, has 1 rows and 1 columns"]),
    ],
)
def test_embeddings_with_faults_are_refused(tmp_path, lines, parts):
    path = csv(tmp_path / "cached.csv", *lines)
    assert_says(refusal(read_variable_embeddings, path, NAMES), f"--variable_embeddings_path {path}", *parts)
