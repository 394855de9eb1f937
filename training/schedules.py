"""What changes in the course of a run, as pure functions of the optimizer step. A step counts from 0."""

import math

ENOUGH_STEPS = 3_000_000
"""Of sequences: what a run without a limit goes through. Small sets are repeated for it, though not more than MOST_EPOCHS."""

FEWEST_EPOCHS, MOST_EPOCHS = 3, 30


def planned_steps(
    max_epochs: int | None, max_steps: int | None, *, optimizer_steps_per_epoch: int, sequence_steps_per_epoch: int
) -> int:
    """Optimizer steps of a run.

    >>> planned_steps(None, None, optimizer_steps_per_epoch=50, sequence_steps_per_epoch=300_000)
    500
    """
    if max_epochs is None and max_steps is not None:
        return max_steps
    if max_epochs is None:
        max_epochs = min(MOST_EPOCHS, max(FEWEST_EPOCHS, math.ceil(ENOUGH_STEPS / sequence_steps_per_epoch)))
    steps = max_epochs * optimizer_steps_per_epoch
    return steps if max_steps is None else min(steps, max_steps)


def steps_of(amount: float, total_steps: int) -> int:
    """A number of steps, or, below 1, a fraction of the run.

    >>> steps_of(300, total_steps=1000), steps_of(0.1, total_steps=1000)
    (300, 100)
    """
    return round(amount * total_steps) if amount < 1 else round(amount)


def ramp(step: int, steps: int) -> float:
    """Rise evenly from next to 0 to 1, which is reached in the last of `steps` and held.

    >>> [ramp(step, steps=4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (step + 1) / max(1, steps))


def cosine_with_warmup(step: int, warmup: int, total_steps: int) -> float:
    """Share of the highest learning rate: a ramp, then half a cosine down to 0 at the end of the run.

    >>> [round(cosine_with_warmup(step, warmup=2, total_steps=6), 2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 0.0]
    """
    if step < warmup:
        return ramp(step, warmup)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress))
