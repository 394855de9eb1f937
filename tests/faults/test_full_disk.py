"""A disk that is full: what was there stays whole, training goes on, it is said once, and given up after a few tries."""

from pathlib import Path

import pytest

from tests.faults.runs import Place, assert_done, assert_same, on_posix

pytestmark = [on_posix, pytest.mark.slow]

NO_CHECKPOINT, NO_ROW = 60_000, 10
"""Bytes: more than any log of these runs has, and less than a checkpoint; less than a line."""
IMPATIENT = {"fault": "impatient"}


def test_a_disk_that_was_full_for_a_while_costs_nothing_but_checkpoints(place: Place, unbroken: Path) -> None:
    full = {"fault": "full_disk", "most_bytes": NO_CHECKPOINT, "hook": "on_train_batch_start", "at": 10, "until": 26}
    ended = assert_done(place.train("a", faults=[full]))
    assert ended.err.count("the checkpoint cannot be written") == 1
    assert ended.err.count("the checkpoint is written again") == 1
    assert [event["event"] for event in place.events("a", "not_saved")] == ["not_saved"] * 2
    assert_same(ended.run, unbroken)


def test_killed_on_a_full_disk_a_run_goes_on_from_the_checkpoint_before(place: Place, unbroken: Path) -> None:
    full = {"fault": "full_disk", "most_bytes": NO_CHECKPOINT, "hook": "on_train_batch_start", "at": 10}
    kill = {"fault": "kill", "hook": "on_train_batch_start", "at": 30}
    assert place.train("a", faults=[full, kill]).code < 0
    again = assert_done(place.train("a"))
    assert place.events("a", "resumed")[0]["step"] == 4
    assert_same(again.run, unbroken)


def test_a_disk_that_stays_full_ends_the_run_after_a_few_tries(place: Place, unbroken: Path) -> None:
    full = {"fault": "full_disk", "most_bytes": NO_CHECKPOINT, "hook": "on_train_batch_start", "at": 6}
    ended = place.train("a", faults=[full, IMPATIENT])
    assert ended.code == 6
    assert "Traceback" not in ended.err
    assert "what was there before is whole" in ended.err.splitlines()[-1]
    assert_same(assert_done(place.train("a")).run, unbroken)


def test_a_run_whose_end_cannot_be_saved_has_not_ended_well(place: Place, unbroken: Path) -> None:
    full = {"fault": "full_disk", "most_bytes": NO_CHECKPOINT, "hook": "on_train_batch_start", "at": 42}
    ended = place.train("a", faults=[full])
    assert ended.code == 6
    assert "the end of the run, step 24, could not be saved" in ended.err
    assert "Traceback" not in ended.err
    assert_same(assert_done(place.train("a")).run, unbroken)


def test_logs_and_plots_that_cannot_be_written_are_made_up_for(place: Place, unbroken: Path) -> None:
    full = {"fault": "full_disk", "most_bytes": NO_ROW, "hook": "on_train_batch_start", "at": 10, "until": 30}
    ended = assert_done(place.train("a", faults=[full]))
    for name in ("metrics.csv", "posterior.jsonl", "throughput.jsonl"):
        assert ended.err.count(f"{name} cannot be written") == 1
        assert ended.err.count(f"{name} is written again") == 1
    assert_same(ended.run, unbroken)


def test_logs_that_stay_unwritable_end_the_run(place: Place) -> None:
    full = {"fault": "full_disk", "most_bytes": NO_ROW, "hook": "on_train_batch_start", "at": 10}
    ended = place.train("a", "--checkpoint_every_n_steps", "1000", faults=[full, IMPATIENT])
    assert ended.code == 6
    assert "Traceback" not in ended.err


def test_a_full_disk_where_the_cache_is_built_ends_the_run_and_leaves_nothing(place: Place) -> None:
    full = {"fault": "full_disk", "most_bytes": NO_CHECKPOINT, "hook": "now"}
    ended = place.train("a", "--cache_dir", str(place.directory / "cache"), faults=[full])
    assert ended.code == 6
    assert "the disk is full" in ended.err.splitlines()[-1]
    assert not list((place.directory / "cache").rglob("*.bin"))
