"""Two run directories in, what differs between them out: everything that training comes to, nothing that the clock decides."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from seqvae.files import read_rows

CLOCKED_COLUMNS = {"seconds", "steps_per_second"}
"""Of metrics.csv."""
LEFT_ALONE = ("seconds", "lap_seconds", "origin.settings", "val_loop")
"""In checkpoints: how long a run took so far; what was typed, of which much may differ; and Lightning's count of the validation
batches that it began, which grows with each validation that was cut short and made up for, and which nothing depends on."""
MOST_TOLD = 5


def differences_of_runs(one: Path, other: Path) -> list[str]:
    """Weights, optimizer, schedules, positions, the monitor's windows, rows of metrics.csv and posterior.jsonl: to the last bit."""
    found = [
        *_differences(flat(checkpoint_of(one)), flat(checkpoint_of(other)), "last.ckpt"),
        *_differences(numbered(metrics_of(one)), numbered(metrics_of(other)), "metrics.csv"),
        *_differences(numbered(readings_of(one)), numbered(readings_of(other)), "posterior.jsonl"),
    ]
    return found[:MOST_TOLD]


def checkpoint_of(run: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint


def metrics_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if name not in CLOCKED_COLUMNS} for row in rows]


def readings_of(run: Path) -> list[dict[str, Any]]:
    path = run / "posterior.jsonl"
    return read_rows(path) if path.exists() else []


def numbered(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"row {number}": row for number, row in enumerate(rows)}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested containers as one table."""
    return {path: leaf for path, leaf in _leaves(value, name) if not any(part in path for part in LEFT_ALONE)}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{name}[{number}]")
    else:
        yield name, value


def _differences(one: dict[str, Any], other: dict[str, Any], where: str) -> Iterator[str]:
    for name in sorted(one.keys() ^ other.keys()):
        yield f"{where}: {name} is in one of them alone"
    for name in one.keys() & other.keys():
        if not _is_same(one[name], other[name]):
            yield f"{where}: {name}: {_short(one[name])} and {_short(other[name])}"


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def _short(value: Any) -> str:
    return str(value).replace("\n", " ")[:60]
