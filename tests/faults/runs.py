"""Tiny real runs for the tests of faults: started as a user does, with or without something that goes wrong, and compared."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from benchmarks.reliability.same_run import differences_of_runs
from seqvae.files import read_rows

ROOT = Path(__file__).parent.parent.parent
SECONDS = 240
"""That a run may take before it counts as hanging."""
SMALL = (
    *(
        "--width",
        "16",
        "--heads",
        "2",
        "--depth",
        "1",
        "--tokens_per_batch",
        "1000",
        "--dropout",
        "0.2",
        "--lr",
        "0.002",
    ),
    *("--max_steps", "24", "--log_every_n_steps", "2", "--val_check_interval", "3", "--limit_val_batches", "1.0"),
    *("--checkpoint_every_n_steps", "4", "--monitor_every_n_steps", "3"),
)
"""Epochs of 9 steps of two batches each; a checkpoint every 4 steps, a validation every 3, the last one of an epoch at its end."""
RATE = 0.002
ALWAYS = ({"fault": "no_figures"}, {"fault": "often_shown"})
"""What is put into every run, so that so short a one does what a long one does."""

on_posix = pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")


class Ended(NamedTuple):
    """A process that ended."""

    code: int
    out: str
    err: str
    run: Path


class Place(NamedTuple):
    """Where a test's runs are made, and the data that all tests share, with their cache."""

    directory: Path
    data: Path

    def train(self, name: str, *words: str, faults: Sequence[dict[str, Any]] = (), **popen: Any) -> Ended:
        with self.start(name, *words, faults=faults, **popen) as process:
            try:
                out, err = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return Ended(process.returncode, out, err, self.run(name))

    def start(
        self, name: str, *words: str, faults: Sequence[dict[str, Any]] = (), **popen: Any
    ) -> subprocess.Popen[str]:
        put_in = json.dumps([*ALWAYS, *faults])
        places = ("--output_dir", self.directory / "runs", "--run_name", name)
        data = ("--data_dir", self.data, "--cache_dir", self.data / "cache")
        command = [
            sys.executable,
            "-m",
            "tests.faults.faulty",
            put_in,
            "train_optimized.py",
            *SMALL,
            *places,
            *data,
            *words,
        ]
        return subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "FAULT_MARKER": str(self.directory / "marker")},
            **popen,
        )

    def run(self, name: str) -> Path:
        return self.directory / "runs" / name

    def events(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        rows = read_rows(self.run(name) / "events.jsonl")
        return [row for row in rows if not kinds or row["event"] in kinds]


def make_data(directory: Path, shift: int = 0) -> Path:
    """18 batches to an epoch, and a few for a validation."""
    shutil.rmtree(directory, ignore_errors=True)
    for split, ids in (("train", range(480)), ("valid", range(480, 540))):
        (directory / split).mkdir(parents=True)
        tokens = [[1 + (row * step + shift) % 7 for step in range(20 + row % 25)] for row in ids]
        pd.DataFrame({"id": ids, "tokens": tokens}).to_parquet(directory / split / "part.parquet")
    return directory


def assert_same(one: Path, other: Path) -> None:
    assert differences_of_runs(one, other) == []


def assert_done(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    return ended
