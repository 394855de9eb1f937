"""How real training processes end: the exit code that the README promises, and a line that says why."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent


on_posix = pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")


def start(directory: Path, *words: str, start_new_session: bool = False) -> subprocess.Popen[str]:
    places = ("--output_dir", str(directory / "runs"), "--cache_dir", str(directory / "cache"))
    small = ("--width", "16", "--heads", "2", "--depth", "1", "--tokens_per_batch", "1000", "--log_every_n_steps", "1")
    command = [sys.executable, str(ROOT / "train_optimized.py"), *places, *small, *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        start_new_session=start_new_session,
    )


def wait_for_steps(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    while number:
        line = process.stdout.readline()
        assert line, "the run ended before its time"
        number -= line.startswith("step")


@on_posix
@pytest.mark.parametrize(
    ("number", "code", "cause", "words"),
    [
        (signal.SIGTERM, 143, "SIGTERM", ()),
        pytest.param(signal.SIGINT, 130, "Ctrl-C", ("--devices", "2"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_saves_the_run_and_ends_it_with_its_code(tmp_path, number, code, cause, words, to_group):
    with start(tmp_path, "--run_name", "a", *words, start_new_session=True) as process:
        wait_for_steps(process, 2)
        if to_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, err = process.communicate(timeout=60)  # returns when all its processes have let go of stderr
    *_, ended, command = err.rstrip().splitlines()
    step = torch.load(tmp_path / "runs" / "a" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert process.returncode == code
    assert ended == f"train_optimized.py: stopped by {cause} after step {step}, which is saved. To go on:"
    assert command.startswith("python ")


def test_a_diverged_run_ends_with_code_4_and_advice(tmp_path):
    words = ("--lr", "1e30", "--max_steps", "20", "--gradient_clip", "0", "--disable_metrics_monitoring")
    with start(tmp_path, *words) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 4
    assert "Lower --lr" in err.splitlines()[-1]
    assert "done" not in out


def test_a_run_that_ends_well_says_so_last_and_nothing_on_stderr_but_that_the_cache_is_built(tmp_path):
    with start(tmp_path, "--max_steps", "2") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    *_, done, report = out.splitlines()
    assert done.startswith("done: validation ELBO")
    assert report.startswith(f"report  {tmp_path}")
    assert report.endswith("report.html")
    assert {line.split(" ")[0] for line in err.splitlines()} <= {"building", "train:", "valid:", "test:"}
