"""Data of each kind that make several parts, where a part is small."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.support.parquet_files import write

SMALL_PART = 20_000


def write_tokens(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    for number in range(3):
        lists = [random.integers(0, 300, random.integers(1, 40)).astype(np.int32) for _ in range(700)]
        write(folder / f"{number}.parquet", {"tokens": lists}, row_group_size=100)
    return {}


def write_text(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    words = np.array([f"word{number}" for number in range(500)])
    for number in range(3):
        texts = [" ".join(random.choice(words, random.integers(1, 12))) for _ in range(700)]
        write(
            folder / f"{number}.parquet",
            {"id": [f"{number}-{row}" for row in range(700)], "text": texts},
            row_group_size=100,
        )
    return {"tokenizer": "words", "minimum_count": 2, "test_fraction": 0.1}


def write_vectors(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    for number in range(3):
        lists = [random.normal(number, 1 + number, (random.integers(1, 9), 3)).tolist() for _ in range(400)]
        lists[5][0][1] = float("nan")
        write(folder / f"{number}.parquet", {"values": lists}, row_group_size=100)
    return {"bad_values": "missing"}


def write_events(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    """Two sequences that go on from one file to the next, and a variable that comes in the last file alone."""
    ids = np.repeat(np.arange(900), random.integers(1, 20, 900))
    variables = np.array(["hr", "bp", "rare"])[np.minimum(random.integers(0, 2, len(ids)) + (ids > 890), 2)]
    minutes = np.arange(len(ids)) * 1.5
    table = pa.table({"id": ids, "minute": minutes, "variable": variables, "value": random.gamma(2.0, 30.0, len(ids))})
    cuts = [int(np.searchsorted(ids, first)) + (first in (300, 500)) for first in range(0, 1000, 100)]
    for number, (start, stop) in enumerate(pairwise(cuts)):
        write(folder / f"{number}.parquet", table.slice(start, stop - start))
    return {}


WRITERS = {"tokens": write_tokens, "text": write_text, "vectors": write_vectors, "events": write_events}
