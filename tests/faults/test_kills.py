"""SIGKILL at any moment: the same command again comes to what the unbroken run came to, to the last bit."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import Place, assert_done, assert_same, on_posix

pytestmark = on_posix

MOMENTS: dict[str, dict[str, Any]] = {
    "in the first step": {"fault": "kill", "hook": "on_train_batch_start", "at": 1},
    "within an accumulation": {"fault": "kill", "hook": "on_train_batch_start", "at": 31},
    "right behind a step": {"fault": "kill", "hook": "on_train_batch_end", "at": 33},
    "in the way back": {"fault": "kill", "hook": "on_before_backward", "at": 20},
    "as the optimizer begins": {"fault": "kill", "hook": "on_before_optimizer_step", "at": 13},
    "in the last batch of an epoch": {"fault": "kill", "hook": "on_train_batch_start", "at": 17},
    "in the first batch of the next": {"fault": "kill", "hook": "on_train_batch_start", "at": 18},
    "as a validation begins": {"fault": "kill", "hook": "on_validation_start", "at": 1},
    "within a validation": {"fault": "kill", "hook": "on_validation_batch_end", "at": 4},
    "behind a validation": {"fault": "kill", "hook": "on_validation_end", "at": 1},
    "in the last validation": {"fault": "kill", "hook": "on_validation_batch_end", "at": 13},
    "as a save begins": {"fault": "kill", "hook": "on_save_checkpoint", "at": 3},
    "while saving, nothing written": {"fault": "kill_while_saving", "save": 2, "share": 0.0},
    "while saving, half written": {"fault": "kill_while_saving", "save": 3, "share": 0.5},
    "while saving, all but a byte": {"fault": "kill_while_saving", "save": 4, "share": 0.999},
    "between two names of a checkpoint": {"fault": "kill_between_names", "rename": 9},
    "at the very end": {"fault": "kill", "hook": "on_train_end", "at": 0},
}


def moments() -> list[Any]:
    """One of them stands for all in the quick tests."""
    quick = "within an accumulation"
    return [each if each == quick else pytest.param(each, marks=pytest.mark.slow) for each in MOMENTS]


@pytest.mark.parametrize("moment", moments())
def test_a_run_killed_at_any_moment_goes_on_exactly(moment: str, place: Place, unbroken: Path) -> None:
    killed = place.train("a", faults=[dict(MOMENTS[moment])])
    assert killed.code == -signal.SIGKILL, killed.err
    assert_same(assert_done(place.train("a")).run, unbroken)


@pytest.mark.slow
def test_a_run_killed_again_and_again_goes_on_exactly(place: Place, unbroken: Path) -> None:
    for at in (9, 12, 15, 18):
        assert place.train("a", faults=[{"fault": "kill", "hook": "on_train_batch_start", "at": at}]).code < 0
    assert_same(assert_done(place.train("a")).run, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_that_is_said(
    damage: str, place: Place, unbroken: Path
) -> None:
    place.train("a", faults=[{"fault": "kill", "hook": "on_train_batch_start", "at": 31}])
    last = place.run("a") / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    last.unlink()  # it may be one file with best.ckpt
    last.write_bytes({"truncated": whole[:half], "flipped": flipped, "empty": b""}[damage])
    again = assert_done(place.train("a"))
    assert "last.ckpt: damaged" in again.err
    assert "going on from previous.ckpt instead" in again.err
    assert place.events("a", "resumed")[-1]["checkpoint"] == "previous.ckpt"
    assert_same(again.run, unbroken)


@pytest.mark.slow
def test_it_goes_on_exactly_from_two_processes_that_load(place: Place, unbroken: Path) -> None:
    words = ("--worker_type", "process", "--num_workers", "2")
    killed = place.train("a", *words, faults=[{"fault": "kill", "hook": "on_train_batch_start", "at": 20}])
    assert killed.code == -signal.SIGKILL
    assert_same(assert_done(place.train("a", *words)).run, unbroken)
