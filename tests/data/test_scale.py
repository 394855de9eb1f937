"""Large inputs: memory that does not grow with them, and starts that stay quick. All slow; `make test-slow` runs them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.measure import write_token_lists
from seqvae.data.batching import Limits, cut_batches, plan_epoch
from seqvae.data.demo import LengthLaw
from tests.support.parquet_files import write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent.parent


def build(directory: Path, cache: Path) -> dict[str, float]:
    """Seconds and peak memory of a build in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.speed.loading", "--build", str(directory), str(cache)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_memory_of_a_build_does_not_grow_with_the_data(tmp_path):
    peaks = []
    for number, sequences in enumerate((800_000, 3_200_000)):
        write_token_lists(tmp_path / str(number) / "all.parquet", sequences)
        peaks.append(build(tmp_path / str(number), tmp_path / "cache")["peak MB"])
    assert peaks[1] < 1000
    assert peaks[1] < 1.15 * peaks[0]


def test_millions_of_text_ids_with_labels_stay_below_a_gigabyte(tmp_path):
    rows = 3_000_000
    for split, start in (("train", 0), ("valid", rows)):
        numbers = pa.array(np.arange(start, start + (rows if split == "train" else 1000)))
        ids = pa.compute.binary_join_element_wise("sequence-", numbers.cast(pa.string()), "")
        tokens = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * len(ids)) % 7), 2)
        write(tmp_path / "d" / f"{split}.parquet", {"id": ids, "tokens": tokens})
    assert build(tmp_path / "d", tmp_path / "cache")["peak MB"] < 1000


def test_a_second_start_on_a_large_cache_takes_a_moment(tmp_path):
    write_token_lists(tmp_path / "d" / "all.parquet", 3_200_000)
    build(tmp_path / "d", tmp_path / "cache")
    assert build(tmp_path / "d", tmp_path / "cache")["seconds"] < 0.5


def test_ten_million_sequences_are_planned_in_a_second():
    lengths_N = LengthLaw().sample(10_000_000, np.random.default_rng(0)).astype(np.int32)
    start = time.perf_counter()
    plan = plan_epoch(cut_batches(lengths_N, Limits(None, 4096, None)), seed=0, epoch=0)
    seconds = time.perf_counter() - start
    assert plan.batches > 100_000
    assert seconds < 1.5
