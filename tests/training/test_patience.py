"""Files that cannot be written for a while: nothing is lost, nothing is there twice, and there is an end to trying."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seqvae.files import LEAST_SECONDS, MOST_TRIES, Patience, PatientFile
from tests.support.scripted_training import Clock


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Files may grow to so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_that_do_not_fit_wait_and_come_in_their_order(tmp_path):
    file = PatientFile(tmp_path / "a.jsonl")
    file.append("one\n")
    with room_for(7):  # half of the next line
        file.append("two\n")
        file.append("three\n")
        assert file.path.read_text() == "one\n"
        assert file.unwritten == ["two\n", "three\n"]
    file.append("four\n")
    assert file.path.read_text() == "one\ntwo\nthree\nfour\n"
    assert file.unwritten == []


def test_that_it_fails_is_said_once_and_that_it_works_again_too(tmp_path, caplog):
    file = PatientFile(tmp_path / "a.jsonl")
    with room_for(0):
        for _ in range(3):
            file.append("x\n")
    file.append("x\n")
    file.append("x\n")
    assert [record.getMessage() for record in caplog.records] == [
        "a.jsonl cannot be written (File too large): training goes on, and tries again",
        "a.jsonl is written again",
    ]


def test_after_some_tries_and_some_time_the_error_is_raised_with_its_file(tmp_path):
    clock = Clock()
    file = PatientFile(tmp_path / "a.jsonl", now=clock)
    with room_for(0):
        for _ in range(2 * MOST_TRIES):
            file.append("x\n")
        clock.seconds += LEAST_SECONDS
        with pytest.raises(OSError, match="File too large") as raised:
            file.append("x\n")
    assert raised.value.filename == str(tmp_path / "a.jsonl")


def test_few_tries_are_borne_however_long_they_take():
    clock = Clock()
    patience = Patience("the checkpoint", now=clock)
    for _ in range(MOST_TRIES - 1):
        assert patience.should_retry("full")
        clock.seconds += LEAST_SECONDS
    assert not patience.should_retry("full")


def test_a_success_in_between_begins_the_count_anew():
    clock = Clock()
    patience = Patience("the checkpoint", now=clock)
    for _ in range(3 * MOST_TRIES):
        clock.seconds += LEAST_SECONDS
        assert patience.should_retry("full")
        patience.succeeded()


def test_a_run_that_ends_with_lines_in_hand_has_not_ended_well(tmp_path):
    file = PatientFile(tmp_path / "a.jsonl")
    with room_for(0):
        file.append("x\n")
        with pytest.raises(OSError, match=r"a\.jsonl"):
            file.finish()
    file.finish()
    assert file.path.read_text() == "x\n"


def test_half_a_line_is_cut_off_however_long_it_is(tmp_path):
    file = PatientFile(tmp_path / "a.jsonl")
    file.path.write_text("one\n" + "x" * 10_000)
    file.append("two\n")
    assert file.path.read_text() == "one\ntwo\n"


def test_a_file_that_was_removed_begins_again_with_its_heading(tmp_path):
    file = PatientFile(tmp_path / "a.csv", heading="step\n")
    file.append("1\n")
    file.path.unlink()
    file.append("2\n")
    assert file.path.read_text() == "step\n2\n"


def test_whoever_else_appends_is_not_overwritten(tmp_path):
    one, other = PatientFile(tmp_path / "a.jsonl"), PatientFile(tmp_path / "a.jsonl")
    for number in range(4):
        (one, other)[number % 2].append(f"{number}\n")
    assert Path(tmp_path / "a.jsonl").read_text() == "0\n1\n2\n3\n"
