"""SIGTERM and Ctrl-C end a run after its step, saved; a second one at once; and the run goes on exactly."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.runs import ALWAYS, ROOT, SECONDS, Place, assert_done, assert_same, on_posix

pytestmark = [on_posix, pytest.mark.slow]

PROCESSES = ("--worker_type", "process", "--num_workers", "2")
CODES = {"term": 143, "int": 130}


@pytest.mark.parametrize("words", [(), PROCESSES], ids=["threads", "processes"])
@pytest.mark.parametrize("to_group", [False, True], ids=["to the process", "to its group"])
@pytest.mark.parametrize("name", CODES)
def test_a_signal_saves_and_the_run_goes_on_exactly(
    name: str, to_group: bool, words: tuple[str, ...], place: Place, unbroken: Path
) -> None:
    fault = {"fault": "send", "name": name, "hook": "on_train_batch_start", "at": 21, "to_group": to_group}
    stopped = place.train("a", *words, faults=[fault], start_new_session=True)
    assert stopped.code == CODES[name], stopped.err
    assert "Traceback" not in stopped.err
    assert "after step 11, which is saved. To go on:" in stopped.err
    assert place.events("a")[-1]["event"] == "interrupted"
    assert_same(assert_done(place.train("a", *words)).run, unbroken)


@pytest.mark.parametrize("hook", ["on_validation_batch_start", "on_before_backward", "on_before_optimizer_step"])
def test_the_command_that_is_printed_goes_on_from_wherever_it_was(hook: str, place: Place, unbroken: Path) -> None:
    stopped = place.train("a", faults=[{"fault": "send", "name": "int", "hook": hook, "at": 4}])
    assert stopped.code == 130
    command = shlex.split(stopped.err.rstrip().splitlines()[-1])
    typed = [sys.executable, "-m", "tests.faults.faulty", json.dumps(ALWAYS), *command[1:]]
    subprocess.run(typed, cwd=ROOT, check=True, capture_output=True, timeout=SECONDS)
    assert_same(place.run("a"), unbroken)


@pytest.mark.parametrize("name", CODES)
def test_a_second_signal_leaves_at_once_and_nothing_saved_is_lost(name: str, place: Place, unbroken: Path) -> None:
    fault = {"fault": "send", "name": name, "hook": "on_train_batch_start", "at": 21, "twice": True}
    stopped = place.train("a", faults=[fault])
    assert stopped.code == -{"term": signal.SIGTERM, "int": signal.SIGINT}[name]
    assert "still here" not in stopped.out
    assert "Traceback" not in stopped.err
    assert_same(assert_done(place.train("a")).run, unbroken)
