"""What is known of a run beforehand: how long it is, how many steps lie between two readings, what its KL will weigh."""

import math
from typing import Protocol, runtime_checkable

from lightning import LightningModule, Trainer

from seqvae.monitors.detection.kl_schedule import KLSchedule

FEWEST_READINGS = 50
"""Of a run whose length is known: a short one is read more often than asked."""


@runtime_checkable
class KnowsKLSchedule(Protocol):
    """A module that can say beforehand what the KL will weigh; the monitor then knows when to begin to judge."""

    def kl_weight_at(self, step: int) -> float | None:
        """Return the weight in an optimizer step; None: a controller steers it towards some KL."""


def planned_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps that the whole run will have, where that is known."""
    known = [trainer.max_steps] if trainer.max_steps > 0 else []
    epochs, batches = trainer.max_epochs or -1, trainer.num_training_batches
    if epochs > 0 and math.isfinite(batches):
        known.append(epochs * math.ceil(batches / trainer.accumulate_grad_batches))
    return min(known, default=None)


def steps_between_readings(update_frequency: int, last_step: int | None) -> int:
    """
    >>> steps_between_readings(100, None), steps_between_readings(100, 1_000), steps_between_readings(100, 20)
    (100, 20, 1)
    """
    if last_step is None:
        return update_frequency
    return max(1, min(update_frequency, last_step // FEWEST_READINGS))


def schedule_of(module: LightningModule, total_steps: int | None) -> KLSchedule:
    """What the module knows."""
    if not isinstance(module, KnowsKLSchedule):
        return KLSchedule(total_steps)
    if module.kl_weight_at(0) is None:
        return KLSchedule(total_steps, is_steered=True)
    return KLSchedule(total_steps, lambda step: float(module.kl_weight_at(step) or 0.0))


def is_due(step: int, before: int, every_n_steps: int, last_step: int | None) -> bool:
    """At each multiple, or at the first step behind it that is seen, and at the last: some training steps take two optimizer steps.

    `before` is the step of the last time.

    >>> [step for step in (1, 3, 5, 6, 7, 9) if is_due(step, before=step - 2, every_n_steps=4, last_step=7)]
    [5, 7, 9]
    """
    if step == before:
        return False
    return step // every_n_steps > before // every_n_steps or step == last_step
