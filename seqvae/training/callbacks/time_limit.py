"""--max_time: ends a run between two optimizer steps, where a checkpoint can be written. Lightning's own timer ends it anywhere,
also within an accumulation, and what was trained since the last checkpoint is lost."""

import time
from datetime import timedelta
from typing import Any

from lightning import Callback, LightningModule, Trainer

from seqvae.training.callbacks.checkpoints import is_between_steps


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
