"""Tables as people have them are taken at the first try, or the first message is right and can be pasted.

A long table with units in its column names, lines of text, a nested export with names and labels, a wide table with odd times.
"""

import datetime as dt
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seqvae.data.parquet.schema import plain_name
from seqvae.errors import DataError
from tests.support.parquet_files import Load, events, ids, labels, vectors, write, write_splits

DEVICES, READINGS = 40, 5


def stamps(minutes: list[float]) -> pa.Array:
    return pa.array([dt.datetime(2024, 1, 1) + dt.timedelta(minutes=one) for one in minutes], pa.timestamp("us"))


def sensors(numbers_are_text: bool = False, every: float = 5.0) -> dict[str, Any]:
    """A long table of readings, latest first, so that only its times show their order."""
    device = [number for number in range(DEVICES) for _ in range(READINGS)]
    return {
        "Device No.": [f"D-{number:02d}" for number in device] if numbers_are_text else device,
        "ts (UTC)": stamps([every * step for _ in range(DEVICES) for step in reversed(range(READINGS))]),
        "Temp °C": [20.0 + step for _ in range(DEVICES) for step in reversed(range(READINGS))],
        "Humidity %": np.random.default_rng(0).uniform(30, 60, DEVICES * READINGS),
        "site": [("north", "south")[number % 2] for number in device],
    }


@pytest.mark.parametrize("numbers_are_text", [False, True])
def test_a_long_table_with_ordinary_column_names_is_taken_at_the_first_try(
    tmp_path: Path, load: Load, numbers_are_text
):
    write(tmp_path / "d/readings.parquet", sensors(numbers_are_text))
    data = load(tmp_path / "d")
    layout = "vectors: long table, id 'Device No.', time 'ts (UTC)', 2 features ('Temp °C', 'Humidity %')"
    assert data.layout == layout
    assert sum(len(split) for split in data.splits.values()) == DEVICES
    found = np.array(vectors(data.splits["valid"], data.description))
    assert (found[..., 0] == 20.0 + np.arange(READINGS)).all()
    assert "columns that are not used: 'site'" in data.notes


def test_the_only_column_of_text_names_the_sequences_of_a_long_table(tmp_path: Path, load: Load):
    table = sensors(numbers_are_text=True)
    del table["site"]
    table["sensor"] = table.pop("Device No.")
    write(tmp_path / "d/readings.parquet", table)
    assert load(tmp_path / "d").layout.startswith("vectors: long table, id 'sensor', time 'ts (UTC)'")


def test_files_of_one_sequence_each_stay_that_whatever_text_repeats_in_them(tmp_path: Path, load: Load):
    for name in ("a", "b", "c", "d", "e"):
        for split in ("train", "valid"):
            columns = {"time": [0, 1, 2, 3], "x": [1.0, 2.0, 3.0, 4.0], "bed no": [7, 7, 7, 7]}
            write(tmp_path / f"d/{split}/{split}-{name}.parquet", columns)
    data = load(tmp_path / "d")
    assert data.layout.startswith("vectors: one sequence a file, id = the file's name, time 'time'")


def test_names_are_compared_without_units_and_punctuation():
    names = ["ts (UTC)", "Time [s]", "Device No.", "Subject-ID", "t"]
    assert [plain_name(name) for name in names] == ["ts", "time", "device_no", "subject_id", "t"]


def test_a_column_of_texts_that_are_all_different_names_the_rows_of_a_nested_file(tmp_path: Path, load: Load):
    columns = {"uid": ["rec-1", "rec-2"], "frames": [[[0.5, 1.0]], [[2.0, 3.0]]], "label": [0, 1]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns))
    assert ids(data.splits["train"]) == ["rec-1", "rec-2"]
    assert data.layout == "vectors: one sequence a row in column 'frames', id 'uid'"


def test_lines_of_text_with_a_name_and_a_label_are_told_apart(tmp_path: Path, load: Load):
    columns = {"doc id": ["a-1", "a-2"], "sentence": ["x y", "y z"], "label": ["good", "bad"]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns), tokenizer="words", label_column="label")
    assert data.layout == "tokens: one sequence a row in column 'sentence' (text), label 'label', id 'doc id'"
    assert ids(data.splits["train"]) == ["a-1", "a-2"]


def test_an_id_that_was_found_by_its_values_moves_no_sequence_to_another_split(tmp_path: Path, load: Load):
    rows = {"tokens": [[number] for number in range(100)]}
    write(tmp_path / "a/pool.parquet", rows)
    write(tmp_path / "b/pool.parquet", rows | {"name": [f"r{number}" for number in range(100)]})
    without, named = load(tmp_path / "a"), load(tmp_path / "b")
    assert ids(named.splits["valid"]) == [f"r{number}" for number in ids(without.splits["valid"])]


@pytest.mark.parametrize("labelled", [[1, 0, 1], [1, 2, -1]])
def test_the_names_of_a_class_label_stay(tmp_path: Path, load: Load, labelled):
    about = {"info": {"features": {"label": {"names": ["walk", "run", "fall"], "_type": "ClassLabel"}}}}
    table = pa.table({"tokens": [[1], [2], [3]], "label": pa.array(labelled, pa.int64())})
    table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    data = load(write_splits(tmp_path / "d", train=table, valid=table), label_column="label", allow_missing_labels=True)
    names = ["walk", "run", "fall"]
    assert data.description.classes == tuple(name for n, name in enumerate(names) if n in labelled)
    assert labels(data.splits["train"], data.description) == [None if n < 0 else names[n] for n in labelled]


# --- Readings one below the other ---------------------------------------------------------------------------------------

SENSORS = ("TEMP °C", "vib.rms", "load%")


def readings(name: str = "sensor name", machine: str = "Asset No.", *, at_one_time: bool = False) -> dict[str, Any]:
    """A long table with a row for each reading of a machine's sensors; sorted by sensor, as pandas.melt leaves it."""
    rows = [
        (sensor, number, 10.0 * step + (0 if at_one_time else place), 100.0 * place + step)
        for place, sensor in enumerate(SENSORS)
        for number in range(DEVICES)
        for step in range(READINGS)
    ]
    sensor, number, minutes, value = zip(*rows, strict=True)
    return {
        machine: [f"P-{one:02d}" for one in number],
        "Logged At": stamps(list(minutes)),
        "site": [("north", "south")[one % 2] for one in number],
        name: pa.array(sensor).dictionary_encode(),
        "Reading (raw)": value,
    }


@pytest.mark.parametrize(
    ("name", "at_one_time"), [("sensor name", False), ("SensorName", False), ("Messgröße", True), ("Was?", True)]
)
def test_a_reading_a_row_is_an_event_of_what_was_measured(tmp_path: Path, load: Load, name, at_one_time):
    write(tmp_path / "d/readings.parquet", readings(name, at_one_time=at_one_time))
    data = load(tmp_path / "d")
    wanted = f"events: long table, id 'Asset No.', time 'Logged At', variable {name!r}, value 'Reading (raw)'"
    assert data.layout == wanted
    assert data.description.names == ("<unknown>", *sorted(SENSORS))
    assert sum(len(split) for split in data.splits.values()) == DEVICES
    assert "columns that are not used: 'site'" in data.notes


@pytest.mark.parametrize("kind", ["auto", "events"])
def test_where_a_column_of_text_may_say_what_was_measured_the_flags_of_both_are_named(tmp_path: Path, load: Load, kind):
    write(tmp_path / "d/readings.parquet", readings("Zustand der Anlage"))
    said = refusal(load, tmp_path / "d", kind=kind)
    assert "'Zustand der Anlage' may say what 'Reading (raw)' measures" in said
    flags = {"variable_column": "Zustand der Anlage", "value_column": "Reading (raw)"}
    assert " ".join(f"--{flag} '{column}'" for flag, column in flags.items()) in said
    assert load(tmp_path / "d", kind=kind, **flags).description.kind == "events"
    features = "--feature_columns 'Reading (raw)'"
    assert (features if kind == "auto" else f"--kind events {features}") in said
    of_one = load(tmp_path / "d", kind=kind, feature_columns="Reading (raw)").layout
    assert "1 feature ('Reading (raw)')" in of_one or "1 variable, a column each ('Reading (raw)')" in of_one


def test_text_that_describes_a_sequence_and_states_beside_several_numbers_are_no_variables(tmp_path: Path, load: Load):
    table = readings()
    table["sensor"] = table.pop("site")
    del table["sensor name"]
    write(tmp_path / "a/readings.parquet", table)
    assert "vectors: long table, id 'Asset No.'" in load(tmp_path / "a").layout
    write(tmp_path / "b/readings.parquet", readings() | {"humidity": [1.0] * len(table["sensor"])})
    assert "2 features" in load(tmp_path / "b").layout


def test_the_only_column_of_numbers_holds_the_values_of_a_named_variable(tmp_path: Path, load: Load):
    table = readings("what") | {"more": [1.0] * (DEVICES * READINGS * len(SENSORS))}
    write(tmp_path / "d/readings.parquet", readings("what"))
    wanted = "variable 'what', value 'Reading (raw)'"
    assert load(tmp_path / "d", variable_column="what").layout.endswith(wanted)
    write(tmp_path / "e/readings.parquet", table)
    assert "name --value_column" in refusal(load, tmp_path / "e", variable_column="what")


def test_of_two_texts_that_could_be_the_id_the_shorter_list_may_be_the_variables(tmp_path: Path, load: Load):
    table = readings("kind of reading", machine="machine")
    del table["site"]
    write(tmp_path / "d/readings.parquet", table)
    said = refusal(load, tmp_path / "d")
    flags = "--id_column machine --variable_column 'kind of reading' --value_column 'Reading (raw)'"
    assert f"or, where 'kind of reading' says what was measured, {flags}" in said


# --- Messages ---------------------------------------------------------------------------------------------------------


def refusal(load: Load, directory: Path, **flags: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(directory, **flags)
    return str(caught.value)


def test_of_two_columns_that_could_be_the_id_the_message_names_both_and_can_be_pasted(tmp_path: Path, load: Load):
    table = sensors(numbers_are_text=True)
    table["Device name"] = table.pop("Device No.")
    write(tmp_path / "d/readings.parquet", table)
    said = refusal(load, tmp_path / "d")
    assert "several columns could name the sequence that a row belongs to ('site', 'Device name')" in said
    assert "--sequence_column" not in said
    words = shlex.split("--id_column site")
    assert " ".join(words) in said
    assert load(tmp_path / "d", id_column="Device name").layout.startswith("vectors: long table, id 'Device name'")


def test_names_with_spaces_are_quoted_in_what_is_to_be_pasted(tmp_path: Path, load: Load):
    columns = {"Time of day": ["noon", "night"], "my text": ["a b", "c d"], "x": [1.0, 2.0]}
    said = refusal(load, write_splits(tmp_path / "d", train=columns, valid=columns), id_column="none")
    assert "choose with --sequence_column 'Time of day'" in said


def test_names_categories_and_dates_are_not_proposed_as_the_sequence(tmp_path: Path, load: Load):
    table = readings(machine="machine") | {"sensor name": ["a", "b"] * (DEVICES * READINGS * len(SENSORS) // 2)}
    for times in (["2025-03-01 05:01"], ["1 May 2025"], ["01.05.25, 12:00"]):
        write(tmp_path / "d/readings.parquet", table | {"Logged At": times * len(table["sensor name"])})
        said = refusal(load, tmp_path / "d")
        assert "'Logged At' is text: convert it to time stamps or numbers (pandas.to_datetime)" in said
        assert "--sequence_column" not in said
    given = {"id_column": "machine", "variable_column": "sensor name", "value_column": "Reading (raw)"}
    assert "Convert it (pandas.to_datetime)" in refusal(load, tmp_path / "d", **given, time_column="Logged At")
    del table["Logged At"]
    write(tmp_path / "d/readings.parquet", table)
    said = refusal(load, tmp_path / "d")
    assert "several columns could be the sequence" not in said
    assert "--time_column" in said


def test_an_id_is_not_advised_after_one_was_given(tmp_path: Path, load: Load):
    table = sensors(numbers_are_text=True) | {"ts (UTC)": ["1 May"] * DEVICES * READINGS}
    write(tmp_path / "d/readings.parquet", table)
    for flags in ({}, {"id_column": "Device No."}):
        said = refusal(load, tmp_path / "d", **flags)
        assert "--sequence_column" not in said or not flags
        assert "--id_column" not in said or not flags
    assert "'ts (UTC)' is text: convert it to time stamps or numbers" in said


def test_a_table_of_two_times_is_told_to_choose_one(tmp_path: Path, load: Load):
    table = {"id": [1, 1], "start": stamps([0, 1]), "end": stamps([2, 3])}
    said = refusal(load, write_splits(tmp_path / "d", train=table, valid=table | {"id": [2, 2]}))
    assert "several could be the time ('start', 'end'): choose with --time_column start" in said


def test_lines_of_text_are_told_how_to_be_cut_and_nothing_of_long_tables(tmp_path: Path, load: Load):
    lines = {"line": ["a b c", "d e"]}
    directory = write_splits(tmp_path / "d", train=lines, valid=lines)
    said = refusal(load, directory)
    assert said.endswith("say how to cut it with --tokenizer words, characters, bytes or the path of a tokenizer.json.")
    assert load(directory, tokenizer="words").description.kind == "tokens"


# --- Times ------------------------------------------------------------------------------------------------------------

ODD = {"id": [1, 1, 1], "time": [0.0, 1.0, 61.0], "pulse": [60.0, None, 70.0], "temp": [None, 37.0, 38.0]}


def test_vectors_at_odd_times_say_that_only_the_order_is_kept(tmp_path: Path, load: Load):
    directory = write_splits(tmp_path / "odd", train=ODD, valid=ODD | {"id": [2, 2, 2]})
    said = "steps are 1 to 60 apart (column 'time'), but vectors keep only their order: --kind events keeps the times"
    assert said in load(directory).notes
    even = ODD | {"time": [0.0, 1.0, 2.0]}
    directory = write_splits(tmp_path / "even", train=even, valid=even | {"id": [2, 2, 2]})
    assert not [note for note in load(directory).notes if "apart" in note]


@pytest.mark.parametrize("flags", [{}, {"feature_columns": "pulse,temp"}, {"feature_columns": "pulse"}])
def test_a_wide_table_is_taken_as_events(tmp_path: Path, load: Load, flags):
    directory = write_splits(tmp_path / "wide", train=ODD, valid=ODD | {"id": [2, 2, 2]})
    data = load(directory, kind="events", **flags)
    found = events(data.splits["train"], data.description)
    if flags.get("feature_columns") == "pulse":
        assert found == [[(0.0, [("pulse", 60.0)]), (61.0, [("pulse", 70.0)])]]
        return
    assert data.layout == "events: long table, id 'id', time 'time', 2 variables, a column each ('pulse', 'temp')"
    assert found == [[(0.0, [("pulse", 60.0)]), (1.0, [("temp", 37.0)]), (60.0, [("pulse", 70.0), ("temp", 38.0)])]]


def test_a_sequence_without_any_value_is_refused_or_left_out(tmp_path: Path, load: Load):
    train = {"id": [1, 2, 2], "time": [0.0, 0.0, 1.0], "pulse": [60.0, None, None]}
    directory = write_splits(tmp_path / "wide", train=train, valid=train | {"id": [3, 4, 4]})
    assert "row 1: a sequence without any value" in refusal(load, directory, kind="events")
    assert ids(load(directory, kind="events", bad_values="drop").splits["train"]) == [1]
