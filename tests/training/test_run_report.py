"""A run keeps its report.html, says why where it cannot, and never ends for it."""

import json
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from lightning import Trainer

import train_optimized
from seqvae.errors import DivergedError, Stopped, run_command
from seqvae.reports.read_run import read_run
from seqvae.reports.run_files import REPORT, read_events
from seqvae.reports.story import story_of
from seqvae.training.callbacks.report import EVERY_SECONDS, RunReport
from seqvae.training.run_directory.records import RunEvents, result_of
from tests.support.parquet_files import write_splits


class FakeDrawing:
    def __init__(self, reason: str | None = None) -> None:
        self.did: list[Any] = []
        self.reason = reason

    def start(self, directory: Any, *, is_urgent: bool = False) -> bool:
        self.did.append("urgent" if is_urgent else "start")
        return True

    def finish(self, seconds: float) -> None:
        self.did.append(seconds)

    def failure(self) -> str | None:
        reason, self.reason = self.reason, None
        return reason


def report_of(tmp_path, reason=None, writes=True):
    clock = SimpleNamespace(seconds=0.0)
    report = RunReport(RunEvents(tmp_path, writes=writes), every_n_steps=10, clock=lambda: clock.seconds)
    drawing = FakeDrawing(reason)
    vars(report)["_drawing"] = drawing
    return report, drawing, clock


def step_of(step: int, *, sanity_checking: bool = False) -> Trainer:
    trainer: Any = SimpleNamespace(global_step=step, sanity_checking=sanity_checking)
    return trainer


def test_a_report_is_written_at_validations_and_lines_of_progress_and_not_too_often(tmp_path):
    report, drawing, clock = report_of(tmp_path)
    module: Any = None
    report.on_validation_end(step_of(0, sanity_checking=True), module)
    report.on_train_batch_end(step_of(9), module, None, None, 0)
    assert drawing.did == []
    report.on_train_batch_end(step_of(10), module, None, None, 0)
    report.on_validation_end(step_of(10), module)
    assert drawing.did == ["start"]
    clock.seconds = EVERY_SECONDS
    report.on_train_batch_end(step_of(10), module, None, None, 1)
    assert drawing.did == ["start"]
    report.on_validation_end(step_of(15), module)
    assert drawing.did == ["start", "start"]


@pytest.mark.parametrize(
    ("error", "noted", "seconds"),
    [
        (None, [], 30.0),
        (RuntimeError("out of paper"), [("failed", "RuntimeError: out of paper")], 30.0),
        (DivergedError("NaN"), [], 30.0),
        (SystemExit(7), [], 30.0),
        (Stopped(2), [], 10.0),
    ],
)
def test_however_a_run_ends_its_report_is_written_and_an_error_is_noted(error, noted, seconds, tmp_path):
    report, drawing, _ = report_of(tmp_path)
    with suppress(type(error) if error else Stopped), report:
        if error:
            raise error
    assert drawing.did == ["urgent", seconds]
    assert [(row["event"], row["said"]) for row in read_events(tmp_path)] == noted


def test_a_report_that_cannot_be_written_is_said_and_ends_nothing(tmp_path, capsys):
    report, _, _ = report_of(tmp_path, reason="no space left")
    module: Any = None
    report.on_validation_end(step_of(10), module)
    assert capsys.readouterr().out == (
        "note: report.html cannot be written (no space left); the run is none the worse for it\n"
    )


def test_what_failed_before_the_end_is_said_beside_the_last_attempt(tmp_path, capsys):
    report, drawing, _ = report_of(tmp_path, reason="no space left")
    with report:
        pass
    assert drawing.did == ["urgent", 30.0]
    assert "report.html cannot be written (no space left)" in capsys.readouterr().out


def test_where_the_report_lies_is_said_of_one_written_at_the_end(tmp_path, capsys):
    report, drawing, _ = report_of(tmp_path)
    with report:
        pass
    assert capsys.readouterr().out == ""
    vars(drawing)["start"] = lambda directory, is_urgent: (directory / REPORT).touch()
    with report:
        pass
    assert capsys.readouterr().out == f"report  {tmp_path / REPORT}\n"


def test_a_last_validation_of_nan_is_an_event_and_in_the_report(tmp_path):
    trainer: Any = SimpleNamespace(callback_metrics={"valid_elbo": float("nan")}, global_step=7)
    unused: Any = None
    with pytest.raises(DivergedError, match="the validation ELBO is nan: training diverged"):
        result_of(trainer, unused, unused, "steps", RunEvents(tmp_path))
    story = story_of(read_run(tmp_path), 0.0)
    assert (story.verdict, story.why, story.state) == ("diverged", "the validation ELBO is nan", "Ended at step 7.")


def test_other_processes_write_none(tmp_path):
    report, drawing, _ = report_of(tmp_path, writes=False)
    module: Any = None
    with report:
        report.on_validation_end(step_of(10), module)
    assert drawing.did == []


@pytest.mark.draws
def test_a_run_of_the_command_has_its_report_and_what_it_needs(tmp_path, monkeypatch, capsys):
    rows = pa.table({"tokens": [[1, 2] * length for length in range(1, 9)]})
    write_splits(tmp_path / "data", train=rows, valid=rows)
    places = {"data_dir": "data", "output_dir": ".", "cache_dir": "cache", "run_name": "a", "width": "16", "heads": "2"}
    words = [word for name, place in places.items() for word in (f"--{name}", place)]
    words += ["--fast_dev_run", "--disable_metrics_monitoring"]
    monkeypatch.setattr(sys, "argv", ["train_optimized.py", *words])
    monkeypatch.chdir(tmp_path)
    assert run_command(train_optimized.main, "train_optimized.py") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "report  a/report.html"
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "Finished at step 2 of 2." in page
    assert "Not there, or not readable" not in page
    assert "<td>--width</td><td>16</td><td>128</td>" in page
    facts = json.loads((tmp_path / "a" / "run.json").read_text(encoding="utf-8"))
    assert facts["total_steps"] == 2
    assert sum(facts["data"]["lengths"]["counts"]) == facts["data"]["splits"][0]["sequences"]
