"""How real training processes end: the exit code that the README promises, and a line that says why."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    places = ("--output_dir", str(directory / "runs"), "--cache_dir", str(directory / "cache"))
    small = ("--width", "16", "--heads", "2", "--depth", "1", "--tokens_per_batch", "1000", "--log_every_n_steps", "1")
    command = [sys.executable, str(ROOT / "train_optimized.py"), *places, *small, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=directory)


@pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGINT, 130, "stopped by Ctrl-C", marks=pytest.mark.slow),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
    ],
)
def test_a_signal_ends_a_run_with_its_code(tmp_path, number, code, said):
    with start(tmp_path) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step"):
            assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (code, f"train_optimized.py: {said}")


def test_a_diverged_run_ends_with_code_4_and_advice(tmp_path):
    with start(tmp_path, "--lr", "1e30", "--max_steps", "20", "--gradient_clip", "0") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 4
    assert "Lower --lr" in err.splitlines()[-1]
    assert "done" not in out


def test_a_run_that_ends_well_says_so_last_and_nothing_on_stderr_but_that_the_cache_is_built(tmp_path):
    with start(tmp_path, "--max_steps", "2") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.splitlines()[-1].startswith("done: validation ELBO")
    assert {line.split(" ")[0] for line in err.splitlines()} <= {"building", "train:", "valid:", "test:"}
