"""A file of one JSON object a line, so that another program may follow it while a run goes on: rows in, the same rows out.

Each row tells its `step`. NaN and infinity are null. What is not told (None) has no key. No torch here.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from seqvae.patience import PatientFile


class JsonLines:
    """Written by one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = PatientFile(path)

    def start_after(self, step: int) -> None:
        """Drop the rows beyond a step: those steps will be taken again."""
        self.drop(lambda row: row["step"] > step)

    def drop(self, unwanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop some rows, and what is no row: the rest of a line that a kill cut short, or what somebody else wrote."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)  # as text, other characters would end a line, too
        kept = [line for line in lines if (row := _row_of(line)) is not None and not unwanted(row)]
        if kept == lines:
            return
        beside = self.path.with_name(f"{self.path.name}.tmp")
        beside.write_bytes(b"".join(kept))
        beside.replace(self.path)

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path) if self.path.exists() else []

    def append(self, row: Mapping[str, Any]) -> None:
        """At once, or, where that fails, with the rows to come."""
        self._file.append(json.dumps(to_json(row), allow_nan=False) + "\n")

    def try_again(self) -> None:
        """Write rows that still wait, if they can be written by now."""
        self._file.try_again()

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._file.finish()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a file."""
    rows = map(_row_of, path.read_bytes().splitlines(keepends=True))
    return [row for row in rows if row is not None]


def to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> to_json({"step": 5, "rate": math.nan, "nll": None, "kl_per_dim": (1.0, math.inf)})
    {'step': 5, 'rate': None, 'kl_per_dim': [1.0, None]}
    """
    return {name: _value_to_json(value) for name, value in row.items() if value is not None}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return to_json(value)
    if isinstance(value, tuple):
        return [_value_to_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row_of(line: bytes) -> dict[str, Any] | None:
    """None of what is no row."""
    if not line.endswith(b"}\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
