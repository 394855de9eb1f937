"""When to validate: what the user said in, what Lightning counts out."""

from typing import NamedTuple


class Cadence(NamedTuple):
    """Every so many batches within an epoch, in every so many epochs."""

    batches: int | None
    """Of one process; None: at the end of the epoch."""
    epochs: int


def validation_cadence(interval: float | int, *, batches_per_epoch: int, accumulate: int) -> Cadence:
    """Validation always falls between two optimizer steps, where a checkpoint holds no half-added gradients.

    Counted from the beginning of each epoch, because an epoch's last optimizer step may be of fewer batches.

    >>> validation_cadence(0.1, batches_per_epoch=100, accumulate=2)
    Cadence(batches=10, epochs=1)
    >>> validation_cadence(150, batches_per_epoch=100, accumulate=2)
    Cadence(batches=None, epochs=3)
    """
    steps_per_epoch = -(-batches_per_epoch // accumulate)
    steps = interval if isinstance(interval, int) else max(1, round(interval * steps_per_epoch))
    if steps >= steps_per_epoch or steps * accumulate > batches_per_epoch:
        return Cadence(None, max(1, round(steps / steps_per_epoch)))
    return Cadence(steps * accumulate, 1)
