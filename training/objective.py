"""The negative evidence lower bound, in nats: what the model says about a batch in, what is minimised out.

Shapes: B sequences, Z latent dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.sequence_vae import VAEOutput
from monitors.formulas import gaussian_kl
from training.schedules import ramp, steps_of
from training.settings import ObjectiveSettings


class Objective(NamedTuple):
    """Sums over the sequences of a batch, in nats."""

    loss: Tensor
    """What is minimised: NLL + weight * KL, each dimension's KL taken for no less than the free bits."""
    nll: Tensor
    kl: Tensor
    """The true KL: neither weighted nor raised to the free bits."""
    kl_weight: float


def negative_elbo(output: VAEOutput, kl_weight: float, free_bits: float) -> Objective:
    """NLL + weight * sum_z max(KL_z, free bits), with KL_z the mean of a dimension's KL over the batch (Kingma et al. 2016).

    A sequence of length 0 has no share in it.
    """
    real_B = output.steps_B > 0
    kl_BZ = gaussian_kl(output.posterior_mean_BZ, output.posterior_logvar_BZ) * real_B[:, None]
    kl_Z, nll = kl_BZ.sum(dim=0), output.nll_B.sum()
    paid_kl = torch.maximum(kl_Z, free_bits * real_B.sum()).sum()
    return Objective(nll + kl_weight * paid_kl, nll, kl_Z.sum(), kl_weight)


def kl_weight_at(step: int, total_steps: int, settings: ObjectiveSettings) -> float:
    """The weight of the KL in an optimizer step: an even rise, then --beta."""
    return settings.beta * ramp(step, steps_of(settings.kl_warmup, total_steps))
