"""Where a training step's time goes: Lightning's profiler hooks in, seconds of each stage out.

Each moment belongs to one stage, the innermost that is under way, so that stages add up to the whole.
"""

import time
from collections import defaultdict
from collections.abc import Callable

from lightning.pytorch.profilers import Profiler

STAGES = ("data", "transfer", "forward", "backward", "optimizer", "monitoring", "checkpoint", "loop")
"""Waiting for a batch; its way to the device; network and objective; gradients; clipping, step and zeroing; callbacks and
loggers; saving; what is left is Lightning's own loop."""

_STAGE_OF = {
    "train_dataloader_next": "data",
    "batch_to_device": "transfer",
    "transfer_batch_to_device": "transfer",
    "on_before_batch_transfer": "transfer",
    "on_after_batch_transfer": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": "checkpoint",
}
"""By the last part of an action's name."""


class StageClock(Profiler):
    """Lightning's actions as they begin and end; those that have no stage of their own count for the one around them."""

    def __init__(
        self, synchronise: Callable[[], object] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`synchronise` waits for the device before each look at the clock, so that its work counts where it was asked for."""
        super().__init__()
        self._synchronise, self._now = synchronise, now
        self._open = ["loop"]
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = now()

    def start(self, action_name: str) -> None:
        stage = stage_of(action_name) or self._open[-1]
        if stage != self._open[-1]:
            self._charge()
        self._open.append(stage)

    def stop(self, action_name: str) -> None:
        if self._open[-1] != self._open[-2]:
            self._charge()
        self._open.pop()

    def restart(self) -> None:
        """Forget what was counted; what is under way goes on."""
        self._charge()
        self._seconds.clear()

    def seconds(self) -> dict[str, float]:
        """Of each stage since the restart."""
        self._charge()
        return {stage: self._seconds.get(stage, 0.0) for stage in STAGES}

    def _charge(self) -> None:
        if self._synchronise is not None:
            self._synchronise()
        now = self._now()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


def stage_of(action: str) -> str | None:
    """
    >>> stage_of("[Strategy]SingleDeviceStrategy.training_step"), stage_of("[Callback]Progress.on_train_batch_end")
    ('forward', 'monitoring')
    >>> stage_of("run_training_batch")
    """
    hook = action.rpartition(".")[2]
    if action.startswith("[Callback]"):
        return "checkpoint" if hook == "on_save_checkpoint" else "monitoring"
    return _STAGE_OF.get(hook)
