"""metrics.csv: one file for a whole run, one header, a row at a time, however often the run is interrupted.

In: rows as mappings from column to value. Out: CSV that another program may read at any time. A checkpoint takes along what
`state` says; after `go_on` with it the file holds exactly the rows that had been written when the checkpoint was made.
"""

import csv
import io
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

logger = logging.getLogger(__name__)


class MetricsState(TypedDict):
    """Where a file stands, in types of JSON."""

    rows: int
    """On the disk."""
    unwritten: list[str]
    """Lines that did not get there."""


class MetricsFile:
    """Appends rows. Where that fails, training goes on: it is said once, and the row is tried again with the next one."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self._rows = self._bytes = 0
        self._unwritten: list[str] = []
        self._is_failing = False

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
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = [row for _, row in zip(range(state["rows"]), csv.DictReader(file), strict=False)]
        self._replace(rows)
        self._unwritten = list(state["unwritten"])

    def append(self, row: Mapping[str, object]) -> None:
        """Columns that the row lacks stay empty."""
        self._unwritten.append(self._lines([row]))
        try:
            self._write()
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "%s cannot be written (%s): training goes on, its rows wait", self.path.name, error.strerror
                )
            self._is_failing = True

    def state(self) -> MetricsState:
        return {"rows": self._rows, "unwritten": list(self._unwritten)}

    def sync(self) -> None:
        """Make sure that what a checkpoint will count on survives a loss of power, too."""
        with suppress(OSError), self.path.open("rb+") as file:  # the next row says what is wrong
            os.fsync(file.fileno())

    def _write(self) -> None:
        data = "".join(self._unwritten).encode()
        with self.path.open("rb+") as file:
            file.truncate(self._bytes)  # cuts off what a full disk let through of a row
            file.seek(self._bytes)
            file.write(data)
        self._bytes += len(data)
        self._rows += len(self._unwritten)
        self._unwritten.clear()
        self._is_failing = False

    def _replace(self, rows: Sequence[Mapping[str, object]]) -> None:
        """The whole file at once: a reader sees the old one or the new one."""
        header = dict(zip(self.columns, self.columns, strict=True))
        data = self._lines([header, *rows]).encode()
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_bytes(data)
        beside.replace(self.path)
        self._rows, self._bytes, self._unwritten = len(rows), len(data), []

    def _lines(self, rows: Sequence[Mapping[str, object]]) -> str:
        text = io.StringIO(newline="")
        # A file of another version may have other columns: those it has in common with this one are kept.
        csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue()
