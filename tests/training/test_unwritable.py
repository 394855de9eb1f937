"""What a run may not write to is said at its start, with the path and what to do, and nothing is changed by asking."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train_optimized
from seqvae.config.run import RunSettings
from seqvae.errors import StorageError, run_command
from seqvae.training.run_directory.resume import refuse_unwritable
from tests.support.unprivileged import run_unprivileged

ASK = """
import json, sys
from seqvae.errors import StorageError
from seqvae.training.run_directory.resume import refuse_unwritable
from seqvae.config.run import RunSettings
answers = []
for settings in json.loads(sys.argv[1]):
    try:
        refuse_unwritable(RunSettings(**settings))
        answers.append("")
    except StorageError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
INSIDE = (
    *("checkpoints", "plots", "samples", "tensorboard", "config.yaml", "metrics.csv", "posterior.jsonl"),
    *("throughput.jsonl", "events.jsonl", "environment.json", "run.json"),
)


def make_run(directory: Path, closed: str | None = None) -> Path:
    """A run's directory in which one thing may not be written to."""
    directory.mkdir(parents=True)
    for name in INSIDE:
        path = directory / name
        path.touch() if "." in name else path.mkdir()
        mode = 0o444 if "." in name else 0o555
        path.chmod(mode if name == closed else 0o777)
    directory.chmod(0o555 if closed == "." else 0o777)
    return directory


def state_of(directory: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in (directory, *sorted(directory.rglob("*")))}
    return {str(path): (status.st_mtime_ns, status.st_size) for path, status in found.items() if path.is_file()} | {
        str(path): (0, len(list(path.iterdir()))) for path in found if path.is_dir()
    }


def test_what_may_not_be_written_to_is_named_before_a_run_begins(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    in_place = {"output_dir": str(tmp_path)}
    wanted: list[tuple[dict[str, str], Path, str]] = [
        ({"output_dir": str(closed)}, closed, "--output_dir"),
        ({"output_dir": str(closed / "new" / "newer"), "run_name": "a"}, closed, "--output_dir"),
        (in_place | {"log_dir": str(closed / "logs"), "logger": "tensorboard"}, closed, "--log_dir"),
    ]
    for name in (".", *INSIDE):
        run = make_run(tmp_path / f"run {name.strip('.')}", closed=name)
        told = run if name == "." else run / name
        wanted.append((in_place | {"run_name": run.name}, told, "--output_dir"))
    run = make_run(tmp_path / "resumed", closed="checkpoints")
    ways = (run, run / "checkpoints" / "last.ckpt")
    wanted += [(in_place | {"resume": str(path)}, run / "checkpoints", "--run_name") for path in ways]
    before = state_of(tmp_path)
    done = run_unprivileged(["-c", ASK, json.dumps([settings for settings, _, _ in wanted])], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        f"{path}: cannot be written (Permission denied). Make it writable, or choose another {flag}."
        for _, path, flag in wanted
    ]
    assert state_of(tmp_path) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda place: RunSettings(output_dir=str(place / "new" / "newer")),
        lambda place: RunSettings(output_dir=str(place), run_name="new"),
        lambda place: RunSettings(output_dir=str(place), run_name="a"),
        lambda place: RunSettings(output_dir=str(place), resume=str(place / "a")),
        lambda place: RunSettings(output_dir=str(place), resume=str(place / "nowhere.ckpt")),
        lambda place: RunSettings(output_dir=str(place), log_dir=str(place / "logs"), logger="tensorboard"),
    ],
)
def test_where_all_may_be_written_nothing_is_said_and_nothing_is_made(make: Callable[[Path], RunSettings], tmp_path):
    make_run(tmp_path / "a")
    before = state_of(tmp_path)
    refuse_unwritable(make(tmp_path))
    assert state_of(tmp_path) == before


def test_a_command_says_so_before_it_looks_at_data(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    place, cache = tmp_path / "file" / "runs", tmp_path / "cache"
    words = ("--output_dir", place, "--cache_dir", cache, "--data_dir", tmp_path / "nowhere")
    monkeypatch.setattr(sys, "argv", ["train_optimized.py", *map(str, words)])
    assert run_command(train_optimized.main, "train_optimized.py") == 6
    assert capsys.readouterr().err == (
        f"train_optimized.py: {place}: cannot be written (Not a directory). Make it writable, or choose another --output_dir.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="other platforms have other limits")
def test_an_output_directory_below_a_file_or_with_an_endless_name_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written \(Not a directory\)\. .* another --output_dir\."):
        refuse_unwritable(RunSettings(output_dir=str(tmp_path / "file" / "runs")))
    with pytest.raises(StorageError, match=r"cannot be written \(File name too long\)"):
        refuse_unwritable(RunSettings(output_dir=str(tmp_path / ("x" * 300))))
