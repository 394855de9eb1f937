"""Tiny real runs for the tests of faults: started as a user does, with or without something that goes wrong, and compared."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.same_run import differences_of_runs
from monitors.json_lines import read_rows

ROOT = Path(__file__).parent.parent.parent
SECONDS = 240
"""That a run may take before it counts as hanging."""
SMALL = (
    *("--width", "16", "--heads", "2", "--depth", "1", "--tokens_per_batch", "1000", "--dropout", "0.2"),
    *("--max_steps", "24", "--log_every_n_steps", "2", "--val_check_interval", "8", "--limit_val_batches", "3"),
    *("--checkpoint_every_n_steps", "4", "--monitor_every_n_steps", "3", "--kind", "tokens"),
)
"""24 steps of two batches each; a checkpoint every 4, a validation every 8."""

on_posix = pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")


class Ended(NamedTuple):
    """A process that ended."""

    code: int
    out: str
    err: str
    run: Path


class Place(NamedTuple):
    """Where a test's runs are made; the cache is shared by all tests."""

    directory: Path
    cache: Path

    def train(self, name: str, *words: str, faults: list[dict[str, Any]] | None = None, **popen: Any) -> Ended:
        with self.start(name, *words, faults=faults, **popen) as process:
            out, err = process.communicate(timeout=SECONDS)
        return Ended(process.returncode, out, err, self.run(name))

    def start(
        self,
        name: str,
        *words: str,
        faults: list[dict[str, Any]] | None = None,
        env: dict[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[str]:
        places = ("--output_dir", str(self.directory / "runs"), "--cache_dir", str(self.cache), "--run_name", name)
        command = [sys.executable, str(ROOT / "train_optimized.py")]
        if faults is not None:
            command = [sys.executable, "-m", "tests.faults.faulty", json.dumps(faults), "train_optimized.py"]
        return subprocess.Popen(
            [*command, *SMALL, *places, *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "FAULT_MARKER": str(self.directory / "marker")} | (env or {}),
            **popen,
        )

    def run(self, name: str) -> Path:
        return self.directory / "runs" / name

    def events(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        rows = read_rows(self.run(name) / "events.jsonl")
        return [row for row in rows if not kinds or row["event"] in kinds]


def assert_same(one: Path, other: Path) -> None:
    assert differences_of_runs(one, other) == []


def assert_done(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    return ended
