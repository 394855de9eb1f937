"""When a run is read: how long it is, as far as a Trainer knows, and how many steps lie between two readings."""

import math

from lightning import Trainer

FEWEST_READINGS = 50
"""Of a run whose length is known: a short one is read more often than asked."""


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
