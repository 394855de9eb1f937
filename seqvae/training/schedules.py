"""What changes in the course of a run, as pure functions of the optimizer step. A step counts from 0."""

import math

from seqvae.config.training_settings import ObjectiveSettings, OptimizerSettings

ENOUGH_STEPS = 3_000_000
"""Of sequences: what a run without a limit goes through. Small sets are repeated for it, though not more than MOST_EPOCHS."""

MOST_EPOCHS = 30

STEEPNESS = 10.0
"""Of the S: it leaves 0 with 0.007 and arrives at 1 with 0.993."""


def planned_steps(
    max_epochs: int | None, max_steps: int | None, *, optimizer_steps_per_epoch: int, sequence_steps_per_epoch: int
) -> int:
    """Optimizer steps of a run: as many as asked, or else whole passes, enough for ENOUGH_STEPS.

    >>> planned_steps(None, None, optimizer_steps_per_epoch=50, sequence_steps_per_epoch=300_000)
    500
    """
    if max_epochs is None and max_steps is not None:
        return max_steps
    if max_epochs is None:
        max_epochs = min(MOST_EPOCHS, math.ceil(ENOUGH_STEPS / sequence_steps_per_epoch))
    steps = max_epochs * optimizer_steps_per_epoch
    return steps if max_steps is None else min(steps, max_steps)


def steps_of(amount: float, total_steps: int) -> int:
    """A number of steps, or, up to 1, a fraction of the run; a part of a step counts as one.

    Rounded up, so that a cycle of a quarter of the run comes four times and not once more for a step or two.

    >>> steps_of(300, total_steps=1000), steps_of(0.1, total_steps=1000), steps_of(0.25, total_steps=1001)
    (300, 100, 251)
    """
    return math.ceil(round(amount * total_steps if amount <= 1 else amount, 6))


# --- The weight of the KL ---------------------------------------------------------------------------------------------


def scheduled_kl_weight(step: int, total_steps: int, settings: ObjectiveSettings) -> float:
    """--beta times what --kl_schedule says of an optimizer step."""
    if settings.kl_schedule == "constant":
        return settings.beta
    if settings.kl_schedule == "cyclical":
        cycle = max(1, steps_of(settings.kl_cycle, total_steps))
        return settings.beta * cyclical(step, steps_of(settings.kl_warmup, cycle), cycle)
    rise = steps_of(settings.kl_warmup, total_steps)
    return settings.beta * (linear(step, rise) if settings.kl_schedule == "linear" else sigmoid(step, rise))


def linear(step: int, rise: int) -> float:
    """From 0 to 1, which is reached after `rise` steps and held.

    >>> [linear(step, rise=4) for step in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return 1.0 if step >= rise else step / rise


def sigmoid(step: int, rise: int) -> float:
    """From next to 0 to 1 along an S (Bowman et al. 2016): slow where the latent comes to life, and before the end.

    >>> [round(sigmoid(step, rise=4), 3) for step in range(6)]
    [0.007, 0.076, 0.5, 0.924, 1.0, 1.0]
    """
    return 1.0 if step >= rise else 1 / (1 + math.exp(STEEPNESS * (0.5 - step / rise)))


def cyclical(step: int, rise: int, cycle: int) -> float:
    """Again and again from 0 to 1 (Fu et al. 2019): in each cycle `rise` steps up, and the rest at 1.

    >>> [cyclical(step, rise=2, cycle=4) for step in range(8)]
    [0.0, 0.5, 1.0, 1.0, 0.0, 0.5, 1.0, 1.0]
    """
    return linear(step % cycle, rise)


# --- The learning rate ------------------------------------------------------------------------------------------------


def learning_rate_factor(step: int, total_steps: int, settings: OptimizerSettings) -> float:
    """Share of --lr in an optimizer step: up during --warmup, then as --lr_schedule says, to 0 after the run's last step."""
    warmup = steps_of(settings.warmup, total_steps)
    if step < warmup:
        return (step + 1) / warmup  # not from 0: that would be a step that learns nothing
    if settings.lr_schedule == "constant":
        return 1.0
    progress = linear(step - warmup, total_steps - warmup)
    return 1 - progress if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
