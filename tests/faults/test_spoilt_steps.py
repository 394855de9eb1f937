"""Losses that are NaN: steps that are not taken, runs that go back, and runs that give up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.runs import RATE, Place, assert_done, assert_same

pytestmark = pytest.mark.slow

IN_A_ROW = {"fault": "nan", "positions": list(range(24, 40)), "times": 9}
"""Steps 13 to 20."""
ABOVE = {"above_lr": 0.6 * RATE}
"""Half the rate heals it."""


def test_a_step_that_comes_to_nan_is_not_taken_and_its_sequences_are_written_down(place: Place) -> None:
    ended = assert_done(place.train("a", faults=[{"fault": "nan", "positions": [9, 30], "times": 9}]))
    skipped = place.events("a", "step_skipped")
    assert [event["step"] for event in skipped] == [5, 16]
    assert all(event["sequences"] for event in skipped)
    assert "step 5: the loss is nan, so the step is not taken (sequences " in ended.err
    assert not any(event["verdict"] == "diverged" for event in place.events("a", "verdict"))
    assert_finite(ended.run)


def test_after_a_few_in_a_row_a_run_goes_back_with_a_lower_rate(place: Place) -> None:
    ended = assert_done(place.train("a", faults=[IN_A_ROW | ABOVE]))
    (back,) = place.events("a", "rolled_back")
    assert (back["step"], back["lr"], back["asked_lr"]) == (13, 0.5 * RATE, RATE)
    assert "back to last.ckpt, on with --lr" in ended.err
    assert "rolled_back" in json.dumps(place.events("a"))
    assert_finite(ended.run)


def test_a_run_that_is_killed_after_it_went_back_goes_on_as_it_would_have(place: Place) -> None:
    whole = assert_done(place.train("whole", faults=[IN_A_ROW | ABOVE])).run
    killed = place.train("a", faults=[IN_A_ROW | ABOVE, {"fault": "kill", "hook": "on_train_batch_start", "at": 52}])
    assert killed.code < 0
    assert place.events("a", "rolled_back")
    assert_same(assert_done(place.train("a", faults=[IN_A_ROW | ABOVE])).run, whole)


def test_another_rate_on_purpose_is_in_force_after_a_run_went_back(place: Place) -> None:
    place.train("a", faults=[IN_A_ROW | ABOVE, {"fault": "kill", "hook": "on_train_batch_start", "at": 52}])
    ended = assert_done(place.train("a", "--lr", "0.0001"))
    assert "lr 0.0001" in ended.out


def test_a_run_that_never_comes_out_of_nan_gives_up_with_advice(place: Place) -> None:
    ended = place.train("a", faults=[IN_A_ROW])
    assert ended.code == 4
    assert len(place.events("a", "rolled_back")) == 3
    assert place.events("a")[-1]["event"] == "diverged"
    assert "Lower --lr or raise --warmup" in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err
    assert_finite(ended.run)


def test_a_run_without_a_checkpoint_goes_back_to_its_beginning(place: Place) -> None:
    ended = assert_done(place.train("a", faults=[{"fault": "nan", "positions": list(range(2, 12)), **ABOVE}]))
    assert "back to its beginning, on with --lr" in ended.err
    assert_same(ended.run, assert_done(place.train("low", "--lr", str(0.5 * RATE))).run)


def test_two_processes_go_back_together(place: Place) -> None:
    fault: dict[str, Any] = {"fault": "nan", "positions": list(range(24, 64)), "times": 9} | ABOVE
    ended = assert_done(place.train("a", "--devices", "2", faults=[fault]))
    assert len(place.events("a", "rolled_back")) == 1
    assert_finite(ended.run)


def test_two_processes_that_never_come_out_of_nan_end_with_its_code_and_advice(place: Place) -> None:
    fault: dict[str, Any] = {"fault": "nan", "positions": list(range(24, 64)), "times": 9}
    ended = place.train("a", "--devices", "2", faults=[fault])
    assert ended.code == 4, ended.err
    assert "Lower --lr or raise --warmup" in ended.err


def test_a_signal_that_comes_as_a_run_breaks_off_is_not_lost(place: Place) -> None:
    term = {"fault": "send", "name": "term", "hook": "on_exception", "at": 0}
    ended = place.train("a", faults=[IN_A_ROW | ABOVE, term])
    assert ended.code == 143, ended.err
    assert place.events("a")[-1]["event"] == "interrupted"
    assert "To go on:" in ended.err
    assert_done(place.train("a"))


def assert_finite(run: Path) -> None:
    for path in (run / "checkpoints").glob("*.ckpt"):
        weights = torch.load(path, weights_only=True)["state_dict"].values()
        assert all(bool(weight.isfinite().all()) for weight in weights if weight.is_floating_point()), path.name
