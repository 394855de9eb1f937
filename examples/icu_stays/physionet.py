"""The text files of the PhysioNet Computing in Cardiology Challenge 2012, as published: stays and outcomes out of a directory.

    set-a/132539.txt      Time,Parameter,Value: the first row is the RecordID; times are HH:MM since admission
    Outcomes-a.txt        RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death

and the same for sets b and c, where they are there. Repeated measurements stay as they are. -1 says of what is known of a patient
at admission that it is not known, and such a row is left out; so is one that names no parameter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from seqvae.errors import DataError

ADMISSION_FACTS = frozenset(("Age", "Gender", "Height", "ICUType", "Weight"))
UNKNOWN = -1.0
HEADING, RECORD, DEATH = "Time,Parameter,Value", "RecordID", "In-hospital_death"


class Stay(NamedTuple):
    """One file; its three lists are as long as one another, in the order of the file."""

    record: int
    minutes: list[int]
    parameters: list[str]
    values: list[float]
    unknown: int
    """Rows left out."""


def find_sets(directory: Path) -> list[tuple[Path, Path]]:
    """Folders of stays, each with the file of its outcomes."""
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
                f"{outcomes} is not there, which holds the outcomes of {folder.name}. Put it beside the folder."
            )
    return pairs


def read_stays(folder: Path) -> Iterator[Stay]:
    """In the order of their numbers."""
    for path in sorted(folder.glob("*.txt")):
        yield read_stay(path.read_text(encoding="utf-8"), f"{folder.name}/{path.name}")


def read_stay(text: str, name: str) -> Stay:
    """`name`: of the file, for messages.

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
    """Of each stay, whether the patient died in hospital."""
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
