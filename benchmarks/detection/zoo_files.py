"""Where the zoo keeps what it trained: one gzipped JSON for each run and each baseline, which appears at once or not at all."""

import gzip
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.detection.zoo_species import Species

BASELINE_SEEDS = (0, 1)
"""The first is what runs are compared with; the second tells how far chance alone moves such a comparison."""


def record_path(species: Species, directory: Path) -> Path:
    return directory / "records" / f"{species.name}.json.gz"


def baseline_path(species: Species, directory: Path, seed: int) -> Path:
    return directory / "baselines" / f"{species.baseline}.seed-{seed}.json.gz"


def seed_errors(species: Iterable[Species], directory: Path) -> dict[str, float]:
    """For each data set: the standard deviation of the difference between two networks' held-out NLL that their seeds make.

    From the pairs of baselines of all its decoders together, as two seeds alone may agree by chance; 0 where there are none yet.
    """
    squares: dict[str, dict[str, float]] = defaultdict(dict)
    for one in species:
        paths = [baseline_path(one, directory, seed) for seed in BASELINE_SEEDS]
        if all(path.exists() for path in paths):
            first, second = (statistics.fmean(read_json(path)["nll"]) for path in paths)
            squares[one.data][one.baseline] = (first - second) ** 2
    return defaultdict(float, {data: math.sqrt(statistics.fmean(found.values())) for data, found in squares.items()})


def write_at_once(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".unfinished")
    with gzip.open(beside, "wt", encoding="utf-8") as file:
        json.dump(content, file, allow_nan=False)
    beside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content
