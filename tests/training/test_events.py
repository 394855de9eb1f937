"""events.jsonl: readable at any time, whole after a crash; what was survived is said, but not for ever."""

import logging

import pytest

from seqvae.reports.run_files import EVENTS, read_events
from seqvae.training.run_directory.records import MOST_REPEATED, RunEvents


def test_events_come_back_in_the_order_they_happened(tmp_path):
    assert read_events(tmp_path) == []
    events = RunEvents(tmp_path)
    events.note("started", 0)
    events.note("verdict", 40, verdict="collapsing", evidence={"kl": 0.1})
    first, second = read_events(tmp_path)
    assert (first["event"], first["step"]) == ("started", 0)
    assert (second["verdict"], second["evidence"]) == ("collapsing", {"kl": 0.1})
    assert list(second)[:3] == ["time", "step", "event"]
    assert first["time"] <= second["time"]
    assert second["time"].endswith("Z")


def test_half_a_line_is_not_read_and_gives_way_to_the_next_event(tmp_path):
    RunEvents(tmp_path).note("started", 0)
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"time": "2025-01')
    assert [entry["event"] for entry in read_events(tmp_path)] == ["started"]
    RunEvents(tmp_path).note("resumed", 5)
    assert [entry["event"] for entry in read_events(tmp_path)] == ["started", "resumed"]


@pytest.mark.parametrize(("value", "written"), [(float("nan"), None), (float("-inf"), None), (0.5, 0.5)])
def test_an_event_is_json_whatever_the_numbers(tmp_path, value, written):
    RunEvents(tmp_path).note("diverged", 3, loss=value)
    assert read_events(tmp_path)[0]["loss"] == written


def test_a_line_break_in_a_text_stays_within_its_line(tmp_path):
    RunEvents(tmp_path).note("note", 1, text="two\nlines\u2028 and a half")
    assert (tmp_path / EVENTS).read_text(encoding="utf-8").count("\n") == 1
    assert read_events(tmp_path)[0]["text"] == "two\nlines\u2028 and a half"


def test_what_was_survived_is_written_and_said(tmp_path, caplog):
    RunEvents(tmp_path).survived("step_skipped", 1200, "the loss is nan", sequences=[4, 7])
    (event,) = read_events(tmp_path)
    assert (event["event"], event["step"], event["sequences"]) == ("step_skipped", 1200, [4, 7])
    assert [record.getMessage() for record in caplog.records] == ["step 1,200: the loss is nan"]
    assert caplog.records[0].levelno == logging.WARNING


def test_what_goes_wrong_again_and_again_does_not_fill_the_disk(tmp_path, caplog):
    events = RunEvents(tmp_path)
    for step in range(MOST_REPEATED + 20):
        events.survived("step_skipped", step, "the loss is nan")
    events.survived("rolled_back", 1000, "another kind")
    assert len(read_events(tmp_path)) == len(caplog.records) == MOST_REPEATED + 1
    assert caplog.records[MOST_REPEATED - 1].getMessage().endswith("(the last time that this is reported)")


def test_other_processes_than_the_first_neither_write_nor_speak(tmp_path, caplog):
    events = RunEvents(tmp_path, writes=False)
    events.survived("step_skipped", 1, "the loss is nan")
    events.finish()
    assert not (tmp_path / EVENTS).exists()
    assert not caplog.records
