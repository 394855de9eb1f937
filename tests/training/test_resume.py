"""Resuming by equality: a run that was stopped anywhere and went on is, to the last bit, the run that was never stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning import Callback

from seqvae.config.data import LoadingSettings
from seqvae.errors import Stopped
from tests.support.short_runs import (
    BATCHES,
    EPOCHS,
    STEPS,
    STEPS_PER_EPOCH,
    VALID_BATCHES,
    VALIDATED_AT,
    Ask,
    Kill,
    Killed,
    Run,
    ShortData,
    assert_same,
    last_of,
    short_module,
    train,
)

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")
ROOT = Path(__file__).parent.parent.parent
VALIDATION_BATCHES = VALID_BATCHES * len(VALIDATED_AT)


def few_of(number: int, some: set[int]) -> list[Any]:
    """All of them, of which most are left to the long tests."""
    return [each if each in some else pytest.param(each, marks=pytest.mark.slow) for each in range(number)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("unbroken"))
    assert run.validated_at == VALIDATED_AT
    return run


def go_on(directory: Path, *callbacks: Callback, **options: Any) -> Run:
    return train(directory, callbacks, checkpoint=last_of(directory), **options)


# --- A signal: nothing is lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", range(BATCHES * EPOCHS))
def test_a_run_asked_to_stop_in_any_batch_goes_on_exactly(batch, unbroken, tmp_path):
    before = train(tmp_path, [Ask("on_train_batch_start", batch)])
    assert isinstance(before.ended_by, Stopped)
    assert before.trainer.global_step == batch // 2 + 1
    after = go_on(tmp_path)
    assert_same(after, unbroken)
    assert before.validations + after.validations == unbroken.validations


@pytest.mark.parametrize("batch", few_of(VALIDATION_BATCHES, {0, 4, 17}))
def test_a_run_asked_to_stop_in_any_batch_of_a_validation_goes_on_exactly(batch, unbroken, tmp_path):
    before = train(tmp_path, [Ask("on_validation_batch_start", batch)])
    assert isinstance(before.ended_by, Stopped)
    after = go_on(tmp_path)
    assert_same(after, unbroken)
    assert before.validations + after.validations == unbroken.validations


@pytest.mark.parametrize(
    ("hook", "at", "sessions"),
    [("on_train_batch_start", 0, STEPS), ("on_validation_batch_start", VALID_BATCHES, len(VALIDATED_AT))],
)
def test_a_run_asked_to_stop_again_and_again_goes_on_exactly(hook, at, sessions, unbroken, tmp_path):
    runs = [go_on(tmp_path, Ask(hook, at)) for _ in range(sessions)]
    assert [run.ended_by is None for run in runs] == [False] * (sessions - 1) + [hook != "on_train_batch_start"]
    assert_same(runs[-1], unbroken)
    assert [each for run in runs for each in run.validations] == unbroken.validations


@pytest.mark.parametrize("batch", [1, 6, 7, 13])
def test_the_end_of_an_epoch_in_an_odd_batch_is_no_obstacle(batch, tmp_path):
    options: dict[str, Any] = {"val_check_interval": 1.0}
    odd = {"train": 14, "valid": 6}
    unbroken = train(tmp_path / "unbroken", data=ShortData(odd), **options)
    before = train(tmp_path, [Ask("on_train_batch_start", batch)], data=ShortData(odd), **options)
    after = go_on(tmp_path, data=ShortData(odd), **options)
    assert_same(after, unbroken)
    assert before.validations + after.validations == unbroken.validations


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_workers_change_nothing(worker_type, unbroken, tmp_path):
    def data() -> ShortData:
        return ShortData(loading=LoadingSettings(worker_type=worker_type, num_workers=2))

    train(tmp_path, [Ask("on_train_batch_start", 10)], data=data())
    assert_same(go_on(tmp_path, data=data()), unbroken)


# --- A kill: back to the last checkpoint ----------------------------------------------------------------------------


@pytest.mark.parametrize("every_n_steps", [None, 3])
@pytest.mark.parametrize("batch", [8, 15, 21])
def test_a_run_killed_in_any_batch_goes_on_exactly(batch, every_n_steps, unbroken, tmp_path):
    before = train(tmp_path, [Kill("on_train_batch_start", batch)], every_n_steps=every_n_steps)
    assert isinstance(before.ended_by, Killed)
    after = go_on(tmp_path, every_n_steps=every_n_steps)
    assert_same(after, unbroken)
    assert after.validations == unbroken.validations[-len(after.validations) :]


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_run_killed_while_it_validates_goes_on_exactly(hook, at, unbroken, tmp_path):
    train(tmp_path, [Kill(hook, at)])
    assert_same(go_on(tmp_path), unbroken)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_killed_between_two_epochs_goes_on_exactly(epochs, unbroken, tmp_path):
    train(tmp_path, [Kill("on_train_epoch_end", epochs - 1)])
    after = go_on(tmp_path)
    assert after.validated_at[0] == epochs * STEPS_PER_EPOCH + 2
    assert_same(after, unbroken)


# --- What may be changed on purpose ---------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Ask, Kill])
@pytest.mark.parametrize("step", [4, 5, 8])
@pytest.mark.parametrize("changes", [{"val_check_interval": 1.0}, {"val_check_interval": 3}, {"limit_val_batches": 0}])
def test_a_run_that_validates_at_other_times_when_it_goes_on_learns_the_same(end, step, changes, unbroken, tmp_path):
    train(tmp_path, [end("on_train_batch_start", 2 * step)])  # killed, it goes on from right behind a validation
    assert_same(go_on(tmp_path, **changes), unbroken)


@pytest.mark.parametrize("step", [4, 7, 8])
def test_a_finished_run_that_is_made_longer_goes_on_as_if_it_had_been_long_from_the_beginning(step, tmp_path):
    def module():
        return short_module(lr_schedule="constant")

    unbroken = train(tmp_path / "unbroken", module=module())
    train(tmp_path, module=module(), max_steps=step)
    assert_same(go_on(tmp_path, module=module()), unbroken)


def test_another_learning_rate_and_weight_decay_are_in_force(tmp_path):
    train(tmp_path, [Ask("on_train_batch_start", 9)])
    rates = []

    class Rates(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    unbroken = train(tmp_path / "other", [Rates()], module=short_module(lr=0.5, weight_decay=0.25))
    expected, rates[:] = rates[10:], []
    resumed = go_on(tmp_path, Rates(), module=short_module(lr=0.5, weight_decay=0.25))
    assert rates == expected
    settings = [{**group, "params": None} for group in resumed.trainer.optimizers[0].param_groups]
    assert settings == [{**group, "params": None} for group in unbroken.trainer.optimizers[0].param_groups]


# --- Signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_says_which_signal_it_was_and_how_to_go_on(number, tmp_path):
    run = train(tmp_path, [Ask("on_train_batch_start", 4, number)])
    assert isinstance(run.ended_by, Stopped)
    assert (run.ended_by.number, run.ended_by.message) == (
        number,
        " after step 3, which is saved. To go on:\nresume me",
    )


def test_a_signal_that_a_launcher_passes_on_once_more_is_one_wish(tmp_path, unbroken):
    train(tmp_path, [Ask("on_train_batch_start", 4), Ask("on_train_batch_start", 4)])
    assert_same(go_on(tmp_path), unbroken)


def test_signals_do_afterwards_what_they_did_before(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for callbacks in ([], [Ask("on_train_batch_start", 2)], [Kill("on_train_batch_start", 2)]):
        train(tmp_path, callbacks, max_steps=2)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


SECOND = """
import signal, sys, time
from pathlib import Path
import torch
from tests.support.short_runs import Ask, train
from seqvae.training.callbacks import interrupt as interrupts

torch.set_num_threads(1)

class Twice(Ask):
    def act(self):
        signal.raise_signal(signal.SIGINT)
        time.sleep(interrupts.SAME_SIGNAL_SECONDS + 0.1)
        signal.raise_signal(signal.SIGTERM)
        print("still here")

train(Path(sys.argv[1]), [Twice("on_train_batch_start", 2)])
"""


@pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")
def test_a_second_signal_ends_the_process_at_once(tmp_path):
    ended = subprocess.run([sys.executable, "-c", SECOND, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "")
    assert ended.stderr.endswith("stopping after this step; a second signal ends the process at once\n")
