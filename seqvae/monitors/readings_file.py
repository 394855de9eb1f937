"""posterior.jsonl: one reading a line, as `json_lines.py` has it."""

import math
from pathlib import Path
from typing import Any

from seqvae.json_lines import JsonLines, read_rows, to_json
from seqvae.monitors.detection.verdict import VerdictName
from seqvae.monitors.reading import Reading

NAME = "posterior.jsonl"


class ReadingsFile:
    """Written by one process."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._lines = JsonLines(self.path)

    def start_after(self, step: int) -> None:
        """Drop the rows beyond a step: those readings will be taken again."""
        self._lines.start_after(step)

    def append(self, reading: Reading, verdict: VerdictName) -> None:
        """With the name of the verdict that is in force after it."""
        self._lines.append(reading._asdict() | {"verdict": verdict})

    def try_again(self) -> None:
        """Write rows that still wait, if they can be written by now."""
        self._lines.try_again()

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._lines.finish()


def to_row(reading: Reading) -> dict[str, Any]:
    """
    >>> to_row(Reading(5, 0, "sequence", 2, 1.0, (1.0,), 1, math.nan, 0.69, math.nan, (1.0,), (1.0,), 1.0))["aggregate_kl"]
    """
    return to_json(reading._asdict())


def from_row(row: dict[str, Any]) -> Reading:
    """The reading that a row was made from; infinity has become NaN."""
    told = {name: _from_json(row[name]) for name in Reading._fields if name in row}
    return Reading(**({"active_units": None} | told))


def read_readings(path: Path) -> list[Reading]:
    """Return all whole lines of a posterior.jsonl."""
    return [from_row(row) for row in read_rows(path)]


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(part) for part in value)
    return math.nan if value is None else value
