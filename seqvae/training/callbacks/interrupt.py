"""The ends of a run before its last step, where a checkpoint can be written: --max_time, validations that no longer get better,
Ctrl-C, SIGTERM and SIGUSR1.

In: a clock, validations, or a signal. Out: the end of training, or `Stopped`, raised where nothing is lost; the command then ends
with 130, 143 or 138. A second signal ends the process at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import early_stopping

from seqvae.errors import STOP_SIGNALS, Stopped
from seqvae.training.callbacks.checkpoint import Checkpoints, is_between_steps

SAME_SIGNAL_SECONDS = 1.0
"""A launcher passes on a signal that the process has already got from elsewhere; that is no second request."""


class TimeLimit(Callback):
    """Callback that ends a run after so much time in all of its sessions, between two optimizer steps.

    Lightning's own timer ends a run anywhere, also within an accumulation, and loses what was trained since the last checkpoint.
    """

    def __init__(self, limit: timedelta) -> None:
        self.limit_seconds = limit.total_seconds()
        self._earlier_seconds = 0.0
        self._started = 0.0
        """Such that the time since then is that of all sessions."""

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": time.monotonic() - self._started}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier_seconds = state_dict["seconds"]

    def on_train_start(self, *_: Any) -> None:
        self._started = time.monotonic() - self._earlier_seconds

    def seconds_left(self) -> float:
        """Return how long the run may still take; monitors plan by it."""
        return self.limit_seconds - (time.monotonic() - self._started)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not is_between_steps(trainer):
            return
        is_over = self.seconds_left() <= 0
        if trainer.world_size > 1:  # all stop at the same step. sync: one per step
            is_over = trainer.strategy.reduce_boolean_decision(is_over, all=False)
        trainer.should_stop = trainer.should_stop or is_over


class EarlyStopping(early_stopping.EarlyStopping):
    """Callback that stops after `patience` validations in a row without a better ELBO.

    It counts those under the KL's full weight: while the weight rises, the model is pulled from one objective to another, and the
    ELBO, which is at weight 1, may fall for a while. Where a run goes on with other validation sequences, it counts from 0. It has
    the name of Lightning's class, which checkpoints of earlier versions know its state by.
    """

    def __init__(self, patience: int, is_counted: Callable[[int], bool]) -> None:
        """`is_counted` says whether the KL has its full weight in an optimizer step, counted from 0."""
        super().__init__("valid_elbo", mode="max", patience=patience, check_on_train_epoch_end=False)
        self.is_counted = is_counted
        self.sequences: int | None = None
        """How many the best ELBO so far was validated on."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._should_skip_check(trainer) or not self.is_counted(trainer.global_step - 1):
            return
        sequences = int(trainer.callback_metrics["valid_sequences"])
        if sequences != self.sequences:
            self.sequences, self.wait_count, self.best_score = sequences, 0, torch.tensor(float("-inf"))
        super().on_validation_end(trainer, pl_module)

    def start_over(self) -> None:
        """Forget the best ELBO so far."""
        self.sequences = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"sequences": self.sequences}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting, by the patience that this session was given."""
        super().load_state_dict(state_dict | {"patience": self.patience})
        self.sequences = state_dict.get("sequences")  # older ones counted from the beginning of the run


@contextmanager
def restore_signal_handlers() -> Iterator[None]:
    """Restore the handlers of signals at the end, whatever a training within does with them."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # other threads may not, and have changed nothing
            for number, handler in before.items():
                signal.signal(number, handler)


class StopOnSignal(Callback):
    """Callback that ends a run at the first Ctrl-C, SIGTERM or SIGUSR1, when the optimizer step is saved.

    It stands right before `checkpoints`, behind all callbacks whose state belongs into the file.
    From the first training step on it handles the signals in place of all others, Lightning included, whose own handler
    communicates with other processes from within. Before and after, a signal ends a run as it ends any command.
    """

    def __init__(self, checkpoints: Checkpoints, resume_command: str) -> None:
        self.checkpoints = checkpoints
        self.resume_command = resume_command
        self.signal_number = 0
        """The signal that this process got, or 0."""
        self._came_at = 0.0
        self._is_listening = False
        self._is_first_process = True
        self._handlers_before: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._is_listening, self._is_first_process = True, trainer.is_global_zero
        # Other threads may not handle signals, which then do what they did before.
        if threading.current_thread() is threading.main_thread():
            self._handlers_before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if is_between_steps(trainer):
            self._stop_if_signalled(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._is_listening and is_between_steps(trainer):  # a validation within a training
            self._stop_if_signalled(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._stop_listening()
        self._stop_if_signalled(trainer, is_end=True)

    def on_exception(self, *_: Any) -> None:
        self._stop_listening()

    def _stop_if_signalled(self, trainer: Trainer, *, is_end: bool = False) -> None:
        """Save, unless the end of training did so, and raise `Stopped` where a signal came to any process.

        All stop at the same step, or the others would wait for ever.
        """
        number = self.signal_number
        if trainer.world_size > 1:
            own = torch.tensor(number, device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(own, reduce_op="max"))  # sync: one per step, as Lightning itself has
        if not number:
            return
        is_saved = is_end or self.checkpoints.save_last(trainer)
        if not is_end and trainer.global_step >= trainer.max_steps:
            return  # a validation is all that is left
        if not trainer.is_global_zero:
            sys.exit(0)  # another code would make the launcher kill the first process before its message
        saved = "is saved" if is_saved else "could not be saved"
        raise Stopped(number, f" after step {trainer.global_step}, which {saved}. To go on:\n{self.resume_command}")

    def _stop_listening(self) -> None:
        """Restore the handlers of before; once a signal has come, the next one is to end the process."""
        self._is_listening = False
        for number, handler in self._handlers_before.items():
            signal.signal(number, self._on_signal if self.signal_number else handler)
        self._handlers_before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.signal_number:
            self.signal_number, self._came_at = number, time.monotonic()
            if self._is_first_process:  # straight to the descriptor: print must not be interrupted by itself
                os.write(2, b"\nstopping after this step; a second signal ends the process at once\n")
        elif time.monotonic() - self._came_at > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
