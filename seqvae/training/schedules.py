"""How long a run is, and what changes in its course: the learning rate and the weight of the KL.

In: settings, data, and an optimizer step, counted from 0. Out: a plan; numbers, or, with --target_kl, a weight from a controller
that watches the KL.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seqvae.config.training import ObjectiveSettings, OptimizerSettings, TrainingSettings
from seqvae.data.datamodule import SequenceDataModule

ENOUGH_STEPS = 3_000_000
"""Steps of sequences that a run without a limit goes through. Small sets are repeated for it, though not more than MOST_EPOCHS."""

MOST_EPOCHS = 30

STEEPNESS = 10.0
"""Steepness of the sigmoid: it leaves 0 with 0.007 and arrives at 1 with 0.993."""


class Plan(NamedTuple):
    """The length of a whole run, and its learning rate. Numbers per step are means over the run."""

    total_steps: int
    """Optimizer steps."""
    steps_per_epoch: int
    tokens_per_step: float
    """Real steps of sequences in an optimizer step; a token is one step of a sequence."""
    sequences_per_step: float
    lr: float
    """Highest learning rate."""


def plan_run(settings: TrainingSettings, data: SequenceDataModule, world: int) -> Plan:
    lengths_N = data.split("train").lengths_N
    steps_per_epoch = data.steps_per_epoch(world)
    tokens = int(lengths_N.sum(dtype=np.int64))
    tokens_per_step = tokens / steps_per_epoch
    return Plan(
        total_steps=planned_steps(
            settings.run.max_epochs,
            settings.run.max_steps,
            optimizer_steps_per_epoch=steps_per_epoch,
            sequence_steps_per_epoch=tokens,
        ),
        steps_per_epoch=steps_per_epoch,
        tokens_per_step=tokens_per_step,
        sequences_per_step=len(lengths_N) / steps_per_epoch,
        lr=settings.optimizer.rate(tokens_per_step),
    )


def planned_steps(
    max_epochs: int | None, max_steps: int | None, *, optimizer_steps_per_epoch: int, sequence_steps_per_epoch: int
) -> int:
    """Return the optimizer steps of a run: what is requested, or else whole epochs, enough for ENOUGH_STEPS.

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
    """Convert a number of steps, or, up to 1, a fraction of the run, into steps; a part of a step counts as one.

    Rounded up, so that a cycle of a quarter of the run comes four times and not once more for a step or two.

    >>> steps_of(300, total_steps=1000), steps_of(0.1, total_steps=1000), steps_of(0.25, total_steps=1001)
    (300, 100, 251)
    """
    return math.ceil(round(amount * total_steps if amount <= 1 else amount, 6))


def learning_rate_factor(step: int, total_steps: int, settings: OptimizerSettings) -> float:
    """Return the share of --lr in an optimizer step: up during --warmup, then by --lr_schedule to 0 after the run's last step."""
    warmup = steps_of(settings.warmup, total_steps)
    if step < warmup:
        return (step + 1) / warmup  # not from 0: that would be a step that learns nothing
    if settings.lr_schedule == "constant":
        return 1.0
    progress = linear(step - warmup, total_steps - warmup)
    return 1 - progress if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def scheduled_kl_weight(step: int, total_steps: int, settings: ObjectiveSettings) -> float:
    """Return the weight of the KL in an optimizer step: --beta times --kl_schedule, which begins after any pretraining."""
    if step < settings.pretrain_autoencoder:
        return 0.0
    step, total_steps = step - settings.pretrain_autoencoder, total_steps - settings.pretrain_autoencoder
    if settings.kl_schedule == "constant":
        return settings.beta
    if settings.kl_schedule == "cyclical":
        cycle = max(1, steps_of(settings.kl_cycle, total_steps))
        return settings.beta * linear(step % cycle, steps_of(settings.kl_warmup, cycle))  # Fu et al. 2019
    progress = linear(step, steps_of(settings.kl_warmup, total_steps))
    if settings.kl_schedule == "sigmoid" and progress < 1:
        # Along an S (Bowman et al. 2016): slow where the latent comes to life, and before the end.
        progress = 1 / (1 + math.exp(STEEPNESS * (0.5 - progress)))
    return settings.beta * progress


REWARMING_STEPS, REWARMING_SHARE = 20, 0.1
"""Optimizer steps over which the learning rate rises again where the optimizer starts over, whose second moments are means over 50;
the second is the share of the steps that are left, where that is less."""


class Steering(NamedTuple):
    """What a rescue has put in place of the schedules of the KL weight and of the learning rate. In types of JSON."""

    kl_weight: float
    """Constant from now on."""
    free_bits: float
    target_kl: float | None
    since_step: int
    """The optimizer started over behind this step, and so did the schedule of its rate, for the steps that are left."""
    added_steps: int
    """By which the run is longer than planned."""

    def objective(self, settings: ObjectiveSettings) -> ObjectiveSettings:
        """Return the objective that is trained; `settings`: the user's."""
        weight, free_bits, target_kl = self.kl_weight, self.free_bits, self.target_kl
        settings = replace(settings, pretrain_autoencoder=0, reset_decoder=False)
        return replace(settings, kl_schedule="constant", beta=weight, free_bits=free_bits, target_kl=target_kl)

    def learning_rate_factor(self, step: int, total_steps: int, settings: OptimizerSettings) -> float:
        """Return the share of --lr: all of it however late the rescue, as a rate near 0 would heal nothing."""
        left = max(1, total_steps - self.since_step)
        settings = replace(settings, warmup=min(REWARMING_STEPS / left, REWARMING_SHARE))
        return learning_rate_factor(step - self.since_step, left, settings)


def lengthened(total_steps: int, steering: Mapping[str, Any] | None) -> int:
    """Return the steps of a run with what a rescue added to it; `steering` is that of a checkpoint."""
    return total_steps if steering is None else total_steps + int(steering["added_steps"])


def has_full_kl_weight(step: int, total_steps: int, settings: ObjectiveSettings) -> bool:
    """Return whether the KL has its final weight in an optimizer step.

    With --target_kl, whose controller moves the weight for good: whether as many steps as --kl_warmup says have gone by, in which
    the KL comes to its target.
    """
    if step < settings.pretrain_autoencoder:
        return False
    if settings.target_kl is not None:
        since, left = step - settings.pretrain_autoencoder, total_steps - settings.pretrain_autoencoder
        return since >= steps_of(settings.kl_warmup, left)
    return scheduled_kl_weight(step, total_steps, settings) >= settings.beta


def linear(step: int, rise: int) -> float:
    """Rise from 0 to 1, which is reached after `rise` steps and held.

    >>> [linear(step, rise=4) for step in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return 1.0 if step >= rise else step / rise


LOG_LOWEST, LOG_HIGHEST = math.log(1e-4), math.log(1e3)
"""Bounds of the controller's weight. A dimension that explains L times as much variance as there is noise has a KL of
log(L / weight) / 2. To hold an offset common to 400 values (L = 3,000) at 1 nat takes a weight of 400; to have 4 nats in a
dimension of L = 1, one of 0.0003."""

SMOOTHING_STEPS = 20.0
"""Time constant of the mean of the KL that the controller sees: that of 2 to 30 sequences scatters by a third and more."""

PROPORTIONAL = 3.0
"""Change of the log weight for a relative error of 1. With 4 and half the smoothing, the weight for a target of 1 nat swung by a
factor of 30 at batches of 2."""

INTEGRAL_STEPS = 30.0
"""Steps after which a constant error has the integral do as much as the proportional part. Means over 50 steps came within 10 % of
the target after 50 to 450 steps, for linear, recurrent and attention networks at learning rates from 0.001 to 0.01 (around a target
of 1 nat, batches of 4 scatter further than that for good). With 50 here, a network that still learns lagged by 8 %."""

LARGEST_ERROR = 2.0
"""So that a first KL of a hundred nats does not wind up the integral; downwards the relative error ends at -1 by itself."""


class KLWeight(nn.Module):
    """The weight of the KL, from the schedule or, with --target_kl, from a controller.

    A part of the training module, so that the controller's memory goes into checkpoints and resumes exactly. The controller is
    that of ControlVAE (Shao et al. 2020), proportional and integral, with three changes that make it work from 1 to 50 nats
    without tuning: it moves the logarithm of the weight, since what is needed differs by powers of ten from target to target; it
    takes the error relative to the target; and its proportional part is strong, since the KL follows the weight within some tens
    of steps. `tests/training/test_remedies.py` holds it to its set point in real trainings.
    """

    smoothed_kl: Tensor
    integral: Tensor
    weight: Tensor

    def __init__(self, settings: ObjectiveSettings, total_steps: int) -> None:
        super().__init__()
        self.settings = settings
        self.total_steps = total_steps
        self.target_kl = settings.target_kl
        if self.target_kl is not None:
            # As if the KL had been 0 so far: the weight starts low, which lets the latent come to life.
            self.register_buffer("smoothed_kl", torch.zeros(()))
            self.register_buffer("integral", torch.zeros(()))
            log_weight = PROPORTIONAL * relative_error(self.smoothed_kl, self.target_kl)
            self.register_buffer("weight", log_weight.clamp(LOG_LOWEST, LOG_HIGHEST).exp())

    def forward(self, step: int) -> Tensor | float:
        """Return the weight of an optimizer step: a float, or a tensor on the device."""
        if self.target_kl is None or step < self.settings.pretrain_autoencoder:
            return scheduled_kl_weight(step, self.total_steps, self.settings)
        return self.weight.clone()  # what is logged must not change with the next update

    @torch.no_grad()
    def update(self, kl_per_sequence: Tensor) -> None:
        """Take in the mean true KL of the sequences of an optimizer step, over all processes, without leaving the device."""
        if self.target_kl is None:
            return
        # A step that overflowed was not taken either.
        kl = torch.where(kl_per_sequence.isfinite(), kl_per_sequence, self.smoothed_kl)
        self.smoothed_kl += (kl - self.smoothed_kl) / SMOOTHING_STEPS
        error = relative_error(self.smoothed_kl, self.target_kl)
        stuck = pushes_outwards(PROPORTIONAL * error + self.integral, error)
        self.integral += torch.where(stuck, 0.0, error * (PROPORTIONAL / INTEGRAL_STEPS))
        self.weight.copy_((PROPORTIONAL * error + self.integral).clamp(LOG_LOWEST, LOG_HIGHEST).exp())


def relative_error(kl: Tensor, target_kl: float) -> Tensor:
    """Return how much too high the KL is, in units of a nat more than the target, because a KL below a nat or two answers to
    the weight more strongly in proportion.

    >>> relative_error(torch.tensor([0.0, 4.0, 9.0, 99.0]), 4.0)
    tensor([-0.8000,  0.0000,  1.0000,  2.0000])
    """
    return ((kl - target_kl) / (target_kl + 1)).clamp(max=LARGEST_ERROR)


def pushes_outwards(log_weight: Tensor, error: Tensor) -> Tensor:
    """Return whether the weight is at a bound and the error pushes it beyond.

    The integral then stands still (anti-windup), or it would take as long to come back as it was out there, with the KL far off
    all the while.
    """
    return ((log_weight <= LOG_LOWEST) & (error < 0)) | ((log_weight >= LOG_HIGHEST) & (error > 0))
