"""Figures of a run that goes on: drawn by a process of their own that disturbs neither the run nor anything else."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from seqvae.monitors import drawing
from seqvae.monitors.drawing import Drawing
from tests.support.report_runs import make_run

pytestmark = pytest.mark.draws

PATIENT_SECONDS = 240
"""For a real drawing: it stands behind everything else that a busy machine does."""


@pytest.fixture
def painter():
    one = Drawing()
    yield one
    one.finish(0)


@pytest.fixture
def instead(tmp_path, monkeypatch):
    """Let a shell script run instead of Python."""

    def replace(script):
        path = tmp_path / "instead"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(drawing, "sys", SimpleNamespace(executable=str(path), path=sys.path, platform=sys.platform))

    return replace


def test_a_run_elsewhere_is_drawn_at_the_lowest_priority(tmp_path, monkeypatch, painter):
    make_run(tmp_path / "run")
    (tmp_path / "numpy.py").write_text("raise ImportError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    assert painter.start("run")
    assert os.getpriority(os.PRIO_PROCESS, painter._process.pid) == 19
    assert not painter.start("run"), "one at a time"
    painter.finish(PATIENT_SECONDS)
    assert painter.failure() is None
    assert {path.name for path in (tmp_path / "run" / "plots").glob("*.png")} == {
        "timeline.png",
        "kl_per_dim.png",
        "active_units.png",
        "posterior_means.png",
        "posterior_pca.png",
    }


def test_a_directory_without_readings_is_reported(tmp_path, painter):
    painter.start(tmp_path / "nowhere")
    painter.finish(PATIENT_SECONDS)
    assert painter.failure().endswith(f"No such file or directory: '{tmp_path}/nowhere/posterior.jsonl'")


def test_a_process_that_cannot_be_started_is_reported(tmp_path, monkeypatch, painter):
    monkeypatch.setattr(drawing, "sys", SimpleNamespace(executable=str(tmp_path / "python"), path=[], platform="linux"))
    assert not painter.start(tmp_path)
    assert "No such file" in painter.failure()


def test_of_a_traceback_the_last_line_is_reported_once(tmp_path, painter, instead):
    instead("printf 'Traceback\\nImportError: no matplotlib\\n' >&2; exit 1")
    told = []
    for _ in range(2):
        assert painter.start(tmp_path)
        painter.finish()
        told += [painter.failure(), painter.failure()]
    assert told == ["ImportError: no matplotlib", None, None, None]


def test_a_process_that_fails_without_a_word_is_reported_by_its_exit_code(tmp_path, painter, instead):
    instead("exit 3")
    assert painter.start(tmp_path)
    painter.finish()
    assert painter.failure() == "it ended with exit code 3"


def test_what_a_process_that_succeeds_writes_is_no_failure(tmp_path, painter, instead):
    instead("echo careful >&2")
    assert painter.start(tmp_path)
    painter.finish()
    assert painter.failure() is None


def test_a_drawing_that_hangs_is_ended(tmp_path, painter, instead):
    instead("exec sleep 60")
    assert painter.start(tmp_path)
    process = painter._process
    painter.finish(0.1)
    assert process.returncode == -9
    assert painter.failure() == (
        "ended after 0.1 s, as other programs or a slow disk held it up; "
        f"`python -m seqvae.reports.draw {tmp_path}` does it again"
    )


def test_an_urgent_drawing_takes_the_place_of_one_under_way(tmp_path, painter, instead):
    instead("exec sleep 60")
    assert painter.start(tmp_path)
    before = painter._process
    assert not painter.start(tmp_path)
    assert painter.start(tmp_path, is_urgent=True)
    assert before.returncode == -9
    assert painter.failure() is None
    assert os.getpriority(os.PRIO_PROCESS, painter._process.pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_signals_to_the_run_pass_the_drawing_by(tmp_path, painter, instead):
    instead("exec sleep 60")
    painter.start(tmp_path)
    assert os.getpgid(painter._process.pid) != os.getpgid(0)


def test_after_a_drawing_the_next_one_starts_and_no_zombie_is_left(tmp_path, painter, instead):
    instead("exit 0")
    assert painter.start(tmp_path)
    first = painter._process
    deadline = time.monotonic() + 60
    while not painter.start(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert first.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)
