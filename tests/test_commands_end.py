"""How real training processes end: the exit code that the README promises, and a line that says why."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


on_posix = pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")
PROCESSES = ("--worker_type", "process", "--num_workers", "2")


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


def weights_of(directory: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(directory / "runs" / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def run_to_end(directory: Path, *words: str) -> str:
    with start(directory, *words) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def assert_equal_runs(directory: Path, name: str, other: str) -> None:
    one, two = weights_of(directory, name), weights_of(directory, other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@on_posix
@pytest.mark.parametrize(
    ("number", "code", "said", "words"),
    [
        (signal.SIGTERM, 143, "SIGTERM", ()),
        pytest.param(signal.SIGINT, 130, "Ctrl-C", (), marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "SIGTERM", PROCESSES, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "Ctrl-C", PROCESSES, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "Ctrl-C", ("--devices", "2"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_saves_the_run_and_ends_it_with_its_code(tmp_path, number, code, said, words, to_group):
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
    assert ended == f"train_optimized.py: stopped by {said} after step {step}, which is saved. To go on:"
    assert command.startswith("python ")


@on_posix
@pytest.mark.slow
def test_the_command_that_an_interrupted_run_prints_goes_on_with_it_exactly(tmp_path):
    length = ("--max_steps", "30", "--dropout", "0.2")
    run_to_end(tmp_path, "--run_name", "unbroken", *length)
    with start(tmp_path, "--run_name", "broken", *length) as process:
        wait_for_steps(process, 7)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    command = shlex.split(err.rstrip().splitlines()[-1])
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert_equal_runs(tmp_path, "broken", "unbroken")


@on_posix
@pytest.mark.slow
def test_a_killed_run_goes_on_exactly_when_the_same_command_is_typed_again(tmp_path):
    words = ("--max_steps", "30", "--dropout", "0.2", "--checkpoint_every_n_steps", "3")
    run_to_end(tmp_path, "--run_name", "unbroken", *words)
    with start(tmp_path, "--run_name", "broken", *words) as process:
        wait_for_steps(process, 8)
        process.kill()
    assert "goes on from last.ckpt" in run_to_end(tmp_path, "--run_name", "broken", *words)
    assert_equal_runs(tmp_path, "broken", "unbroken")


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
