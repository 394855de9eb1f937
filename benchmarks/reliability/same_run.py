"""Compare two run directories: all results of training, and nothing that depends on the clock."""

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from seqvae.files import read_rows

CLOCKED_COLUMNS = {"seconds", "steps_per_second"}
"""Columns of metrics.csv."""
LEFT_ALONE = ("seconds", "lap_seconds", "origin.settings", "val_loop", "verdict.evidence")
"""Values of checkpoints that may differ: the time that a run took so far; what was typed, of which much may differ; Lightning's
count of the validation batches that it began, which grows with each validation that was cut short and repeated, and on which
nothing depends; and the wording of a verdict, whose name and numbers are compared."""
Parts = dict[str, dict[str, Any]]
"""A result as named parts, each of them a flat table of values."""


def differences_of_runs(one: Path, other: Path) -> list[str]:
    """Return one line for each part of two runs in which anything differs."""
    parts, others = parts_of_run(one), parts_of_run(other)
    return [f"{part}: {text}" for part in parts if (text := difference(parts[part], others[part]))]


def parts_of_run(run: Path) -> Parts:
    """Return weights, optimizer and schedules, the rest of last.ckpt, the rows of metrics.csv and posterior.jsonl, the previews."""
    parts: Parts = {"weights": {}, "optimizer": {}, "rest of last.ckpt": {}}
    part_of_key = {"state_dict": "weights", "optimizer_states": "optimizer", "lr_schedulers": "optimizer"}
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    readings = run / "posterior.jsonl"
    for key, value in checkpoint.items():
        parts[part_of_key.get(key, "rest of last.ckpt")] |= flat(value, key)
    return parts | {
        "metrics.csv": flat(_numbered(metrics_of(run))),
        "posterior.jsonl": flat(_numbered(read_rows(readings) if readings.exists() else [])),
        "samples": {path.name: path.read_bytes() for path in sorted((run / "samples").glob("step-*"))},
    }


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return how many values differ, and by how much at most; an empty text where all are equal to the last bit."""
    both = {name: (one.get(name, "nothing"), other.get(name, "nothing")) for name in sorted(one.keys() | other.keys())}

    def short(value: Any) -> str:
        return str(value).replace("\n", " ")[:40]

    sizes = {name: _distance(*values) for name, values in both.items() if not _is_same(*values)}
    if not sizes:
        return ""
    parts = [f"{len(sizes):,} of {len(both):,} differ"]
    if numbers := {name: size for name, size in sizes.items() if math.isfinite(size)}:
        largest = max(numbers, key=lambda name: numbers[name])
        parts.append(f"by {numbers[largest]:.2g} at most ({largest})")
    if first := next((name for name, size in sizes.items() if not math.isfinite(size)), None):
        parts.append(f"{first} is {short(both[first][0])} and {short(both[first][1])}")
    return ", ".join(parts)


def metrics_of(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without those of the clock."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if name not in CLOCKED_COLUMNS} for row in rows]


def _numbered(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"row {number}": row for number, row in enumerate(rows)}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested containers as one table."""
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


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def _distance(one: Any, other: Any) -> float:
    """Return the largest difference of two numbers, texts of numbers or tensors; infinity or NaN where there is no such thing."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return float((one.double() - other.double()).abs().max()) if one.shape == other.shape else math.inf
    try:
        return abs(float(one) - float(other))
    except (TypeError, ValueError):
        return math.inf
