"""Stays -> a data set in MEDS form, and their labels beside it.

    data/train/0.parquet, data/tuning/0.parquet, data/held_out/0.parquet      subject_id, time, code, numeric_value
    metadata/subject_splits.parquet                                           subject_id, split
    labels.csv beside the data set                                            subject_id, in_hospital_mortality

The challenge tells no dates, so that all admissions are on the same day. Eight of ten stays train, one tunes, one is held out, by
a hash of the number: a stay never changes sides, whichever sets are there.
"""

import csv
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from examples.icu_stays.physionet import Stay, find_sets, read_outcomes, read_stays
from examples.parquet import write_once
from seqvae.errors import DataError

ADMISSION = np.datetime64("2012-01-01T00:00", "us")
SPLITS = (*["train"] * 8, "tuning", "held_out")
LABEL = "in_hospital_mortality"
SCHEMA = pa.schema(
    [
        ("subject_id", pa.int64()),
        ("time", pa.timestamp("us")),
        ("code", pa.string()),
        ("numeric_value", pa.float32()),
    ]
)


class Made(NamedTuple):
    """What was made of the text files."""

    stays: Mapping[str, int]
    """In each split."""
    events: int
    unknown: int
    """Rows left out, as their value was not known."""
    deaths: int


def make_meds(source: Path, target: Path, labels: Path) -> Made:
    """Read the challenge's text files below `source`."""
    stays: list[Stay] = []
    outcomes: dict[int, int] = {}
    for folder, outcome_file in find_sets(source):
        stays += read_stays(folder)
        outcomes |= read_outcomes(outcome_file)
    without = [stay.record for stay in stays if stay.record not in outcomes]
    if without:
        raise DataError(f"{source}: stay {without[0]} has no outcome ({len(without):,} have none): take whole sets")
    write_meds(stays, target)
    _write_labels(labels, {stay.record: outcomes[stay.record] for stay in stays})
    return Made(
        stays={split: sum(split_of(stay.record) == split for stay in stays) for split in dict.fromkeys(SPLITS)},
        events=sum(len(stay.values) for stay in stays),
        unknown=sum(stay.unknown for stay in stays),
        deaths=sum(outcomes[stay.record] for stay in stays),
    )


def write_meds(stays: Iterable[Stay], target: Path) -> None:
    sides: dict[str, list[Stay]] = {split: [] for split in SPLITS}
    for stay in stays:
        sides[split_of(stay.record)].append(stay)
    for split, members in sides.items():
        write_once(target / "data" / split / "0.parquet", _events(members))
    records = [(stay.record, split) for split, members in sides.items() for stay in members]
    names = pa.schema([("subject_id", pa.int64()), ("split", pa.string())])
    columns = [[record for record, _ in records], [split for _, split in records]]
    write_once(target / "metadata" / "subject_splits.parquet", pa.table(columns, schema=names))


def split_of(record: int) -> str:
    number = int.from_bytes(hashlib.sha256(str(record).encode()).digest()[:8], "big")
    return SPLITS[number % len(SPLITS)]


def _events(stays: Iterable[Stay]) -> pa.Table:
    """Nothing is sorted and nothing is merged."""
    tables = [
        pa.table(
            [
                np.full(len(stay.values), stay.record, np.int64),
                ADMISSION + np.array(stay.minutes, "timedelta64[m]"),
                stay.parameters,
                np.array(stay.values, np.float32),
            ],
            schema=SCHEMA,
        )
        for stay in stays
    ]
    return pa.concat_tables([SCHEMA.empty_table(), *tables])


def _write_labels(path: Path, deaths: Mapping[int, int]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("subject_id", LABEL), *deaths.items()])
