"""The weight of the KL in each optimizer step: from the schedule, or, with --target_kl, from a controller that watches the KL.

In: the step, and for the controller the true KL of each step. Out: the weight in force, a float or a tensor of the device.

The controller is that of ControlVAE (Shao et al. 2020), proportional and integral, with three changes that make it work from
1 to 50 nats without tuning: it moves the logarithm of the weight, since what is needed differs by powers of ten from target to
target; it takes the error relative to the target; and its proportional part is strong, since the KL follows the weight within
some tens of steps. `tests/test_remedies.py` holds it to its set point in real trainings.
"""

import math

import torch
from torch import Tensor, nn

from seqvae.config.training_settings import ObjectiveSettings
from seqvae.training.schedules import scheduled_kl_weight

LOG_LOWEST, LOG_HIGHEST = math.log(1e-4), math.log(1e3)
"""A dimension that explains L times as much variance as there is noise has a KL of log(L / weight) / 2. To hold an offset common to
400 values (L = 3,000) at 1 nat takes a weight of 400; to have 4 nats in a dimension of L = 1, one of 0.0003."""

SMOOTHING_STEPS = 20.0
"""Time constant of the mean of the KL that the controller sees: that of 2 to 30 sequences scatters by a third and more."""

PROPORTIONAL = 3.0
"""Change of the log weight for a relative error of 1. With 4 and half the smoothing, the weight for a target of 1 nat swung by a
factor of 30 at batches of 2."""

INTEGRAL_STEPS = 30.0
"""An error that lasts so long has the integral do as much as the proportional part. Means over 50 steps came within 10 % of the
target after 50 to 450 steps, for linear, recurrent and attention networks at learning rates from 0.001 to 0.01 (around a target
of 1 nat, batches of 4 scatter further than that for good). With 50 here, a network that still learns lagged by 8 %."""

LARGEST_ERROR = 2.0
"""So that a first KL of a hundred nats does not wind up the integral; downwards the relative error ends at -1 by itself."""


class KLWeight(nn.Module):
    """A part of the training module, so that the controller's memory goes into checkpoints and resumes exactly."""

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
            nothing = torch.zeros(())
            self.register_buffer("smoothed_kl", nothing)
            self.register_buffer("integral", nothing.clone())
            self.register_buffer("weight", bounded_weight(PROPORTIONAL * relative_error(nothing, self.target_kl)))

    @property
    def wants_feedback(self) -> bool:
        """Whether `update` has to be told the KL of each optimizer step."""
        return self.target_kl is not None

    def forward(self, step: int) -> Tensor | float:
        """The weight in force in this optimizer step."""
        if self.target_kl is None:
            return scheduled_kl_weight(step, self.total_steps, self.settings)
        return self.weight.clone()  # what is logged must not change with the next update

    @torch.no_grad()
    def update(self, kl_per_sequence: Tensor) -> None:
        """Take in the mean true KL of the sequences of an optimizer step, over all processes. Stays on the device."""
        if self.target_kl is None:
            return
        # A step that overflowed was not taken either.
        kl = torch.where(kl_per_sequence.isfinite(), kl_per_sequence, self.smoothed_kl)
        self.smoothed_kl += (kl - self.smoothed_kl) / SMOOTHING_STEPS
        error = relative_error(self.smoothed_kl, self.target_kl)
        stuck = pushes_outwards(PROPORTIONAL * error + self.integral, error)
        self.integral += torch.where(stuck, 0.0, error * (PROPORTIONAL / INTEGRAL_STEPS))
        self.weight.copy_(bounded_weight(PROPORTIONAL * error + self.integral))


def relative_error(kl: Tensor, target_kl: float) -> Tensor:
    """How much too high the KL is. In units of a nat more than the target, because a KL below a nat or two answers to the
    weight more strongly in proportion.

    >>> relative_error(torch.tensor([0.0, 4.0, 9.0, 99.0]), 4.0)
    tensor([-0.8000,  0.0000,  1.0000,  2.0000])
    """
    return ((kl - target_kl) / (target_kl + 1)).clamp(max=LARGEST_ERROR)


def pushes_outwards(log_weight: Tensor, error: Tensor) -> Tensor:
    """Anti-windup: whether the weight is at a bound and the error wants it beyond. The integral then stands still, or it would
    take as long to come back as it was out there, with the KL far off all the while."""
    return ((log_weight <= LOG_LOWEST) & (error < 0)) | ((log_weight >= LOG_HIGHEST) & (error > 0))


def bounded_weight(log_weight: Tensor) -> Tensor:
    return log_weight.clamp(LOG_LOWEST, LOG_HIGHEST).exp()
