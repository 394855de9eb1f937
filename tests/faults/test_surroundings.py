"""What surrounds a run changes nothing: its clock, TMPDIR, HOME, names of places, a checkout and data that are read-only.

Real commands in processes of their own, each of which has to come to the weights of an undisturbed run, bit for bit.
"""

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.parquet_files import write_splits
from tests.support.unprivileged import run_unprivileged

ROOT = Path(__file__).parent.parent.parent
PRODUCT = ("seqvae", "monitors")
SMALL = (
    *("--width", "16", "--heads", "2", "--depth", "1", "--tokens_per_batch", "200", "--precision", "32"),
    *("--log_every_n_steps", "1", "--max_steps", "4", "--dropout", "0.2"),
)
ODD = "a b  $HOME 'q' \"d\" `x` ;&|<>#%! [1]* {2} 体温\u3000é"
"""A name of a folder that shells, globs, URLs and formats would all read in ways of their own."""
PROCESSES = ("--worker_type", "process", "--num_workers", "1")
on_posix = pytest.mark.skipif(os.name != "posix", reason="written for the file systems of POSIX")

JUMPING = """
import itertools, os, runpy, sys, time
offsets, real = itertools.cycle([0, -3600, 86400, -1e6]), time.time
time.time = lambda: real() + next(offsets)
time.time_ns = lambda: int(1e9 * time.time())
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a command while its clock goes back an hour, forth a day and back again, from one look to the next."""


def make_data(directory: Path) -> Path:
    random = np.random.default_rng(0)
    splits = {
        name: {"tokens": [random.integers(0, 9, random.integers(3, 20)).tolist() for _ in range(count)]}
        for name, count in {"train": 60, "valid": 12}.items()
    }
    return write_splits(directory, **splits)


def run(
    place: Path,
    *words: object,
    data: Path,
    wrapped: str | None = None,
    checkout: Path = ROOT,
    **environment: str | None,
) -> subprocess.CompletedProcess[str]:
    """A training command, whose run is `place`/runs/`ODD`."""
    env = {name: value for name, value in (os.environ | environment).items() if value is not None}
    places = ("--data_dir", data, "--output_dir", place / "runs", "--cache_dir", place / "cache", "--run_name", ODD)
    command = [*(["-c", wrapped] if wrapped else []), checkout / "train_optimized.py", *places, *SMALL, *words]
    place.mkdir(parents=True, exist_ok=True)
    return run_unprivileged(command, cwd=place, env=env)


def weights_of(place: Path) -> dict[str, torch.Tensor]:
    return torch.load(place / "runs" / ODD / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def rows_of(place: Path) -> list[dict[str, str]]:
    with (place / "runs" / ODD / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_equal(place: Path, other: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    one, two = weights_of(place), weights_of(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    ours, theirs = rows_of(place), rows_of(other)
    untimed = [name for name in theirs[0] if "second" not in name]
    assert [[row[name] for name in untimed] for row in ours] == [[row[name] for name in untimed] for row in theirs]
    seconds = [float(row["seconds"]) for row in ours]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0
    assert all(float(row["steps_per_second"]) > 0 for row in ours if row["steps_per_second"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("undisturbed")
    done = run(
        place, "--disable_metrics_monitoring", data=make_data(place / "data")
    )  # which is quicker, and changes nothing
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A checkout and data below a folder with an odd name; nothing there may be written to."""
    place = tmp_path / ODD
    for name in PRODUCT:
        shutil.copytree(ROOT / name, place / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, place / "checkout")
    make_data(place / "data")
    everything = [place, *place.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield place
    for path in everything:
        path.chmod(0o755)


@on_posix
def test_all_at_once_changes_nothing(undisturbed, read_only, tmp_path):
    """Odd names, a clock that jumps, a read-only checkout and data, no TMPDIR, no HOME and no such backend of matplotlib."""
    before = {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}
    done = run(
        tmp_path / f"out {ODD}",
        data=read_only / "data",
        wrapped=JUMPING,
        checkout=read_only / "checkout",
        TMPDIR=str(tmp_path / "nowhere"),
        HOME=None,
        MPLBACKEND="nowhere",
    )
    assert_equal(tmp_path / f"out {ODD}", undisturbed, done)
    assert (tmp_path / f"out {ODD}" / "runs" / ODD / "plots" / "timeline.png").exists()
    assert {path: path.stat().st_mtime_ns for path in read_only.rglob("*")} == before


@on_posix
@pytest.mark.parametrize("script", ["train_optimized.py", "train_with_collapse_detection.py", "analyze_performance.py"])
def test_a_script_finds_its_package_where_python_does_not_look_beside_it(script, tmp_path):
    """`-S`: nothing is installed, but what PYTHONPATH leads to."""
    command = [sys.executable, "-S", "-P", str(ROOT / script), "--version"]
    installed = {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | installed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("seqvae ")


@on_posix
@pytest.mark.slow
@pytest.mark.parametrize("where", ["elsewhere", "nowhere", "closed"])
def test_where_temporary_files_go_changes_nothing(where, undisturbed, tmp_path):
    """With loader processes, which talk through temporary files."""
    directory = tmp_path / where
    if where == "elsewhere":
        shared_memory = Path("/dev/shm")
        if not shared_memory.is_dir() or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is no other file system to be had")
        directory = shared_memory
    if where == "closed":
        directory.mkdir(mode=0o555)
    done = run(tmp_path / "out", *PROCESSES, data=undisturbed / "data", TMPDIR=str(directory))
    assert_equal(tmp_path / "out", undisturbed, done)


@on_posix
@pytest.mark.slow
def test_the_command_that_a_run_of_an_odd_name_prints_goes_on_with_it(undisturbed, tmp_path):
    place = tmp_path / ODD
    first = run(place, "--max_steps", "2", data=undisturbed / "data")
    command = next(line for line in first.stdout.splitlines() if line.startswith("to go on")).removeprefix("to go on")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    typed = ["bash", "-c", f"{command} --max_steps 4"]
    done = subprocess.run(
        typed, cwd=place, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=240
    )
    assert "goes on from last.ckpt" in done.stdout
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows_of(place)][-1] == "4"
    assert [path.name for path in (place / "runs").iterdir()] == [ODD]


@on_posix
@pytest.mark.slow
@pytest.mark.parametrize("name", [".", "checkpoints", "samples", "metrics.csv"])
def test_a_run_that_may_not_be_written_to_is_refused_in_a_line_and_left_as_it_is(name, undisturbed, tmp_path):
    place = tmp_path / "out"
    shutil.copytree(undisturbed / "runs", place / "runs")
    closed = place / "runs" / ODD / name
    closed.chmod(0o555 if closed.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in (place / "runs").rglob("*")}
    done = run(place, "--max_steps", "8", data=undisturbed / "data")
    closed.chmod(0o755)
    assert done.returncode == 6
    assert done.stderr == (
        f"train_optimized.py: {closed}: cannot be written (Permission denied). Make it writable, or choose another "
        "--output_dir.\n"
    ).replace("\u3000", "\\u3000")
    assert done.stdout == ""
    assert {path: path.stat().st_mtime_ns for path in (place / "runs").rglob("*")} == before
    assert not (place / "cache").exists()
