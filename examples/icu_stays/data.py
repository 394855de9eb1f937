"""The PhysioNet Computing in Cardiology Challenge 2012 as published, written as a data set in MEDS form with its labels.

    set-a/132539.txt      Time,Parameter,Value: the first row is the RecordID; times are HH:MM since admission
    Outcomes-a.txt        RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death

and the same for sets b and c, where they exist, become

    data/train/0.parquet, data/tuning/0.parquet, data/held_out/0.parquet      subject_id, time, code, numeric_value
    metadata/subject_splits.parquet                                           subject_id, split
    labels.csv beside the data set                                            subject_id, in_hospital_mortality

Repeated measurements stay as they are. A fact of admission that is -1 is not known, and its row is left out; so is a row that
names no parameter. The challenge has no dates, so that all admissions are on the same day. Eight of ten stays train, one tunes,
one is held out, by a hash of the number: a stay never changes sides, whichever sets exist.
"""

import csv
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from examples.shared import write_once
from seqvae.errors import DataError

# --- Text files ---------------------------------------------------------------------------------------------------------


ADMISSION_FACTS = frozenset(("Age", "Gender", "Height", "ICUType", "Weight"))
UNKNOWN = -1.0
HEADING, RECORD, DEATH = "Time,Parameter,Value", "RecordID", "In-hospital_death"


class Stay(NamedTuple):
    """One file; its three lists are of one length, in the order of the file."""

    record: int
    minutes: list[int]
    parameters: list[str]
    values: list[float]
    unknown: int
    """Rows left out."""


def find_sets(directory: Path) -> list[tuple[Path, Path]]:
    """Return the folders of stays, each with the file of its outcomes."""
    folders = sorted(path for path in directory.glob("set-?") if path.is_dir())
    if not folders:
        raise DataError(
            f"{directory}: no folder set-a, which the challenge's archive makes. Unpack it there, and put Outcomes-a.txt beside it "
            "(https://physionet.org/content/challenge-2012)."
        )
    pairs = [(folder, directory / f"Outcomes-{folder.name[-1]}.txt") for folder in folders]
    for folder, outcomes in pairs:
        if not outcomes.is_file():
            raise DataError(
                f"{outcomes} is missing, which holds the outcomes of {folder.name}. Put it beside the folder."
            )
    return pairs


def read_stays(folder: Path) -> Iterator[Stay]:
    """Yield the stays in the order of their numbers."""
    for path in sorted(folder.glob("*.txt")):
        yield read_stay(path.read_text(encoding="utf-8"), f"{folder.name}/{path.name}")


def read_stay(text: str, name: str) -> Stay:
    """Read the text of a file, whose name is for messages.

    >>> read_stay("Time,Parameter,Value\\n00:00,RecordID,7\\n00:00,Height,-1\\n01:30,HR,80\\n", "7.txt")
    Stay(record=7, minutes=[90], parameters=['HR'], values=[80.0], unknown=1)
    """
    heading, *lines = text.splitlines() or [""]
    if heading != HEADING:
        raise DataError(f"{name}: its first line is {heading!r}, and should be {HEADING}")
    rows = [_row_of(line, f"{name}, line {number}") for number, line in enumerate(lines, start=2) if line]
    if not rows or rows[0][1] != RECORD:
        raise DataError(f"{name}: the first row should be the {RECORD}")
    (_, _, record), *measured = rows
    known = [row for row in measured if row[1] and not (row[1] in ADMISSION_FACTS and row[2] == UNKNOWN)]
    minutes, parameters, values = (list(column) for column in zip(*known, strict=True)) if known else ([], [], [])
    return Stay(int(record), minutes, parameters, values, len(measured) - len(known))


def read_outcomes(path: Path) -> dict[int, int]:
    """Return for each stay whether the patient died in hospital."""
    heading, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    names = heading.split(",")
    if not {RECORD, DEATH} <= set(names):
        raise DataError(f"{path}: its columns are {heading!r}, and should hold {RECORD} and {DEATH}")
    rows = [dict(zip(names, line.split(","), strict=False)) for line in lines if line]
    try:
        return {int(row[RECORD]): int(row[DEATH]) for row in rows}
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: {error}, and each row should hold whole numbers under {heading}") from None


def _row_of(line: str, place: str) -> tuple[int, str, float]:
    try:
        time, parameter, value = line.split(",")
        hours, minutes = time.split(":")
        return 60 * int(hours) + int(minutes), parameter, float(value)
    except ValueError:
        raise DataError(f"{place}: {line!r}, and a row should be like 07:35,HR,80") from None


# --- MEDS ---------------------------------------------------------------------------------------------------------------


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


class Counts(NamedTuple):
    """What was written."""

    stays: Mapping[str, int]
    """In each split."""
    events: int
    unknown: int
    """Rows left out, as their value was not known."""
    deaths: int


def make_meds(source: Path, target: Path, labels: Path) -> Counts:
    """Write the challenge's text files below `source` as MEDS, and their labels."""
    stays: list[Stay] = []
    outcomes: dict[int, int] = {}
    for folder, outcome_file in find_sets(source):
        stays += read_stays(folder)
        outcomes |= read_outcomes(outcome_file)
    without = [stay.record for stay in stays if stay.record not in outcomes]
    if without:
        raise DataError(f"{source}: stay {without[0]} has no outcome ({len(without):,} have none): take whole sets")
    write_meds(stays, target)
    with labels.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("subject_id", LABEL), *((stay.record, outcomes[stay.record]) for stay in stays)])
    return Counts(
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
    """Return the rows of all stays, neither sorted nor merged."""
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
