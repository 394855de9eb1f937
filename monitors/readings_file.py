"""posterior.jsonl: one reading a line, one JSON object each, so that another program may follow it while the run goes on.

NaN and infinity are null. What a reading does not tell (None) has no key.
"""

import json
import math
from pathlib import Path
from typing import Any

from .reading import Reading

NAME = "posterior.jsonl"


class ReadingsFile:
    """Written by one process."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME

    def start_after(self, step: int) -> None:
        """Drop the rows beyond a step, and the rest of a line that a kill cut short: those readings will be taken again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _is_whole(line) and json.loads(line)["step"] <= step]
        if kept == lines:
            return
        beside = self.path.with_name(f"{NAME}.tmp")
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(self.path)

    def append(self, reading: Reading) -> None:
        """Closed, and so flushed, at once: a checkpoint never stands behind a reading that is not in the file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_row(reading), allow_nan=False) + "\n")


def to_row(reading: Reading) -> dict[str, Any]:
    """
    >>> to_row(Reading(5, 0, "sequence", 2, 1.0, (1.0,), 1, math.nan, 0.69, math.nan, (1.0,), (1.0,), 1.0))["aggregate_kl"]
    """
    return {name: _to_json(value) for name, value in reading._asdict().items() if value is not None}


def from_row(row: dict[str, Any]) -> Reading:
    """The reading that a row was made from; infinity has become NaN."""
    return Reading(**({"active_units": None} | {name: _from_json(value) for name, value in row.items()}))


def read_readings(path: Path) -> list[Reading]:
    """Return all whole lines of a posterior.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [from_row(json.loads(line)) for line in lines if _is_whole(line)]


def _is_whole(line: str) -> bool:
    return line.endswith("}\n")


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(part) for part in value)
    return math.nan if value is None else value
