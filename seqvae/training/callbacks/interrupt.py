"""--max_time: ends a run between two optimizer steps, where a checkpoint can be written. Lightning's own timer ends it anywhere,
also within an accumulation, and what was trained since the last checkpoint is lost.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from seqvae.errors import Stopped
from seqvae.training.callbacks.checkpoint import Checkpoints, is_between_steps


class TimeLimit(Callback):
    """Counts the time of all sessions of a run, from the first training step on."""

    def __init__(self, limit: timedelta) -> None:
        self.limit_seconds = limit.total_seconds()
        self._earlier_seconds = 0.0
        self._started = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier_seconds = state_dict["seconds"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_between_steps(trainer):
            return
        over = self._seconds() >= self.limit_seconds
        if trainer.world_size > 1:  # all stop at the same step. sync: one a step
            over = trainer.strategy.reduce_boolean_decision(over, all=False)
        trainer.should_stop = trainer.should_stop or over

    def _seconds(self) -> float:
        return self._earlier_seconds + time.monotonic() - self._started


# Ctrl-C and SIGTERM while a run trains: the step ends, last.ckpt is written, the command ends with 130 or 143.
#
# In: a signal. Out: `Stopped`, raised where nothing is lost. A second signal ends the process at once.

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_SECONDS = 1.0
"""A launcher passes on what the process got already from elsewhere; that is no second wish."""


@contextmanager
def restore_signal_handlers() -> Iterator[None]:
    """Whatever a training within does with signals ends with it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # others may not, and have changed nothing
            for number, handler in before.items():
                signal.signal(number, handler)


class StopOnSignal(Callback):
    """Stands right before `checkpoints`, behind all callbacks whose state belongs into the file.

    From the first training step on it takes the place of whoever handled the signals, Lightning included, whose own handler
    talks to other processes from within. Before and after, a signal ends a run as it ends any command.
    """

    def __init__(self, checkpoints: Checkpoints, resume_command: str = "") -> None:
        self.checkpoints = checkpoints
        self.resume_command = resume_command
        self._requests = _Requests()

    @property
    def asked(self) -> int:
        """The signal that this process got, or 0."""
        return self._requests.number

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._requests.listen(aloud=trainer.is_global_zero)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._requests.is_listening:  # otherwise it is no validation of a training
            self._stop_if_asked(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._requests.ignore()
        if number := self._agreed(trainer):
            self._stop(trainer, number, is_saved=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._requests.ignore()

    def _stop_if_asked(self, trainer: Trainer) -> None:
        number = self._agreed(trainer) if is_between_steps(trainer) else 0
        if not number:
            return
        is_saved = self.checkpoints.save_last(trainer)
        if trainer.global_step < trainer.max_steps:  # else a validation is all that is left
            self._stop(trainer, number, is_saved)

    def _agreed(self, trainer: Trainer) -> int:
        """The signal that any process got, or 0. All of them stop at the same step, or those that go on would wait for ever."""
        if trainer.world_size == 1:
            return self._requests.number
        number = torch.tensor(self._requests.number, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(number, reduce_op="max"))  # sync: one a step; Lightning itself has one, too

    def _stop(self, trainer: Trainer, number: int, is_saved: bool) -> None:
        if not trainer.is_global_zero:
            sys.exit(0)  # another code would make the launcher kill the first process, which has something to say
        said = f" after step {trainer.global_step}, which {'is saved' if is_saved else 'could not be saved'}"
        raise Stopped(number, f"{said}. To go on:\n{self.resume_command}" if self.resume_command else said)


class _Requests:
    """The signal that came, for whoever asks between two steps."""

    def __init__(self) -> None:
        self.number = 0
        self.is_listening = False
        self._aloud = True
        self._came_at = 0.0
        self._before: dict[int, Any] = {}

    def listen(self, *, aloud: bool) -> None:
        self.is_listening, self._aloud = True, aloud
        if (
            threading.current_thread() is threading.main_thread()
        ):  # others may not; signals then do what they did before
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def ignore(self) -> None:
        """Give the signals back to whoever had them; once one has come, the next one is to end the process."""
        self.is_listening = False
        for number, handler in self._before.items():
            signal.signal(number, self._end_if_meant if self.number else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._came_at = number, now
            if self._aloud:  # straight to the descriptor: print is not made for being interrupted by itself
                os.write(2, b"\nstopping after this step; a second signal ends the process at once\n")
        else:
            self._end_if_meant(number, frame)

    def _end_if_meant(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._came_at > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
