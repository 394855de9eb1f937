"""metrics.csv: one file for a whole run, one header, a row at a time, however often the run is interrupted.

In: rows as mappings from column to value. Out: CSV that another program may read at any time. A checkpoint takes along what
`state` says; after `go_on` with it the file holds exactly the rows that had been written when the checkpoint was made.
"""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypedDict

from seqvae.patience import PatientFile


class MetricsState(TypedDict):
    """Where a file stands, in types of JSON."""

    rows: int
    """On the disk."""
    unwritten: list[str]
    """Lines that did not get there."""


class MetricsFile:
    """Appends rows."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self._heading = self._lines([dict(zip(columns, columns, strict=True))])
        self._file = PatientFile(path, self._heading)
        self._appended = 0
        """Rows, with those that wait."""

    def begin(self) -> None:
        """A new file with nothing but the header."""
        self._replace([])

    def go_on(self, state: MetricsState) -> None:
        """Keep the rows that the state knows; those written after it will be written once more.

        In a directory without the file a new one begins: a run can go on elsewhere.
        """
        if not self.path.exists():
            self.begin()
            return
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = list(_readable(islice(csv.DictReader(file), state["rows"])))
        self._replace(rows)
        self._file.waiting.extend(state["unwritten"])
        self._appended += len(state["unwritten"])

    def append(self, row: Mapping[str, object]) -> None:
        """Columns that the row lacks stay empty."""
        self._appended += 1
        self._file.append(self._lines([row]))

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._file.finish()

    def state(self) -> MetricsState:
        waiting = list(self._file.waiting)
        return {"rows": self._appended - len(waiting), "unwritten": waiting}

    def sync(self) -> None:
        """Make sure that what a checkpoint will count on survives a loss of power, too."""
        with suppress(OSError), self.path.open("rb+") as file:  # the next row says what is wrong
            os.fsync(file.fileno())

    def _replace(self, rows: Sequence[Mapping[str, object]]) -> None:
        """The whole file at once: a reader sees the old one or the new one."""
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_bytes((self._heading + self._lines(rows)).encode())
        beside.replace(self.path)
        self._appended = len(rows)
        self._file.waiting.clear()

    def _lines(self, rows: Sequence[Mapping[str, object]]) -> str:
        text = io.StringIO(newline="")
        # A file of another version may have other columns: those it has in common with this one are kept.
        csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue()


def _readable(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Up to what is no row of ours: somebody else may have written here."""
    with suppress(csv.Error):
        yield from rows
