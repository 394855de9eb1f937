"""Small data sets in every form that the product reads, with the values that each file means, before anything is done to them.

In: a form and a generator of random numbers. Out: the tables to be written, and beside them their sequences as plain Python.
Numbers are multiples of 1/8, so that no type of float changes them, and times are whole minutes.
"""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

FORMS = ("tokens", "text", "nested", "fixed", "table", "events", "meds", "files")
"""Lists of token ids, text, lists of lists, lists of fixed lists, a long table of features, one of events, MEDS, a file each."""
ROWS, LONG = FORMS[:4], FORMS[4:]
FLAGS = {"text": ("--tokenizer", "characters")}
PARTS = {
    "tokens": "tokens",
    "text": "text",
    "nested": "frames",
    "fixed": "frames",
    "table": "x",
    "events": "value",
    "meds": "numeric_value",
    "files": "value",
}
"""The column with what a sequence is made of."""
IDS = {"meds": "subject_id", "files": None}
"""The column with the ids, where it is not called id."""
VARIABLES = {"events": "variable", "files": "variable", "meds": "code"}
TIMES = {"events": "minute", "files": "minute", "meds": "time", "table": "time"}
SPLITS = {"train": (3, 4), "valid": (1, 4)}
"""Files of a split, and sequences of a file."""
NAMES = ("pulse", "ph", "age")
EPOCH = dt.datetime(2020, 1, 1)
MINUTE = dt.timedelta(minutes=1)

Value = Any
"""Tokens: numbers; text: a text; vectors: lists of numbers or None; events: (minute, {variable: number or None}) a step."""


class Meant(NamedTuple):
    """A sequence, and what of it may stand in a cache; None: nothing, it has to be refused or left out."""

    id: int | str
    value: Value
    if_missing: Value
    """With --bad_values missing."""


def as_it_is(id_: int | str, value: Value) -> Meant:
    return Meant(id_, value, value)


@dataclass
class File:
    """A file that is about to be written, and what stands in it."""

    path: str
    """Below the data's directory."""
    split: str
    table: pa.Table
    meant: list[Meant]


def make_files(form: str, random: np.random.Generator) -> list[File]:
    """The files of an undamaged data set."""
    files = []
    number = 100
    for split, (count, per_file) in SPLITS.items():
        count, per_file = (count * per_file, 1) if form == "files" else (count, per_file)
        folder = f"data/{'tuning' if split == 'valid' else split}" if form == "meds" else split
        for _ in range(count):
            sequences = [(number + at, make_value(form, random)) for at in range(per_file)]
            table = to_table(form, sequences)
            files.append(File(f"{folder}/{number}.parquet", split, table, [as_it_is(*pair) for pair in sequences]))
            number += per_file
    return files


def make_value(form: str, random: np.random.Generator) -> Value:
    steps = int(random.integers(3, 20))
    if form == "tokens":
        return [39, *random.integers(0, 40, steps).tolist()]
    if form == "text":
        return "abcdefgh " + "".join(random.choice(list("abcdefgh "), steps))
    if form in ("nested", "fixed", "table"):
        return eighths(random, (steps, 2)).tolist()
    minutes = np.cumsum(random.integers(1, 600, steps)).tolist()
    return [(minute, dict(zip(NAMES, eighths(random, 3).tolist(), strict=True))) for minute in minutes]


def eighths(random: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    return random.integers(-800, 800, shape) / 8


def to_table(form: str, sequences: Sequence[tuple[int | str, Value]]) -> pa.Table:
    """As the form has it; sequences of None are nulls."""
    part = PARTS[form]
    if form in ("tokens", "text", "nested", "fixed"):
        kinds = {
            "tokens": pa.list_(pa.int64()),
            "text": pa.string(),
            "nested": pa.list_(pa.list_(pa.float64())),
            "fixed": pa.list_(pa.list_(pa.float32(), 2)),
        }
        ids, values = zip(*sequences, strict=True)
        return pa.table({"id": list(ids), part: pa.array(values, kinds[form])})
    if form == "table":
        rows = [(id_, float(time), *step) for id_, steps in sequences for time, step in enumerate(steps)]
        return _columns(rows, ("id", "time", "x", "y"))
    events = [
        (id_, minute, name, number)
        for id_, steps in sequences
        for minute, step in steps
        for name, number in step.items()
    ]
    if form == "meds":
        stamped = [(id_, EPOCH + minute * MINUTE, name, number) for id_, minute, name, number in events]
        table = _columns(stamped, ("subject_id", "time", "code", "numeric_value"))
        return table.set_column(3, "numeric_value", table["numeric_value"].cast(pa.float32()))
    table = _columns(events, ("id", "minute", "variable", "value"))
    return table.drop_columns(["id"]) if form == "files" else table


def _columns(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> pa.Table:
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
