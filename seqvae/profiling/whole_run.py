"""What one validation and one checkpoint mean for a whole run: how often they come, and what all of them take."""

from typing import NamedTuple

from seqvae.config.run import ValidationSettings
from seqvae.reports.performance_report import WholeRun
from seqvae.training.schedules import Plan
from seqvae.training.trainer import Cadence, validation_cadence


class Costs(NamedTuple):
    """Seconds of one."""

    step: float
    """Of the optimizer."""
    validation: float
    """As it comes while training goes on."""
    last_validation: float
    """On all validation data."""
    checkpoint: float


def whole_run(
    settings: ValidationSettings, plan: Plan, costs: Costs, *, batches_per_epoch: int, accumulate: int
) -> WholeRun:
    """Of the run that was asked for, by one process."""
    cadence = validation_cadence(
        settings.val_check_interval, batches_per_epoch=batches_per_epoch, accumulate=accumulate
    )

    def until(step: int) -> int:
        return validations_until(step, cadence, plan.steps_per_epoch, batches_per_epoch, accumulate)

    is_on = settings.limit_val_batches > 0
    on_the_way = until(plan.total_steps) if is_on else 0
    ends_with_one = is_on and on_the_way > until(plan.total_steps - 1)
    needs_another = not (ends_with_one and settings.is_on_all)
    checkpoints = checkpoints_of_run(settings, plan, on_the_way, ends_with_one)
    return WholeRun(
        steps=plan.total_steps,
        epochs=plan.total_steps / plan.steps_per_epoch,
        training_seconds=plan.total_steps * costs.step,
        validations=on_the_way + needs_another,
        validation_seconds=on_the_way * costs.validation + needs_another * costs.last_validation,
        checkpoints=checkpoints,
        checkpoint_seconds=checkpoints * costs.checkpoint,
    )


def validations_until(
    step: int, cadence: Cadence, steps_per_epoch: int, batches_per_epoch: int, accumulate: int
) -> int:
    """In so many optimizer steps. They are counted from the beginning of each epoch.

    >>> validations_until(25, Cadence(batches=3, epochs=1), steps_per_epoch=10, batches_per_epoch=10, accumulate=1)
    7
    >>> validations_until(25, Cadence(batches=None, epochs=2), steps_per_epoch=10, batches_per_epoch=10, accumulate=1)
    1
    """
    epochs, rest = divmod(step, steps_per_epoch)
    if cadence.batches is None:
        return epochs // cadence.epochs
    return epochs * (batches_per_epoch // cadence.batches) + rest * accumulate // cadence.batches


def checkpoints_of_run(settings: ValidationSettings, plan: Plan, validations: int, ends_with_one: bool) -> int:
    """One stands at the end of a run, whatever else there is. A best one, where they come by steps, is not counted."""
    if settings.checkpoint_every_n_steps is not None:
        return -(-plan.total_steps // settings.checkpoint_every_n_steps)
    if settings.limit_val_batches == 0:
        return -(-plan.total_steps // plan.steps_per_epoch)
    return validations + (not ends_with_one)
