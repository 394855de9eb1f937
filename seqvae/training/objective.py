"""The negative evidence lower bound, in nats: what the model returns for a batch in, what is minimised out.

Shapes: B sequences, P posteriors (one for each sequence, or for each step of each), Z latent dimensions (1 where the KL is that of
all of them together), G groups of dimensions that have their free bits together, of all levels of latents,
C classes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from seqvae.config.training import ObjectiveSettings
from seqvae.models.vae import VAEOutput
from seqvae.monitors.formulas import gaussian_kl, mutual_information

NO_LABEL = -1

FREE_BITS = {"sequence": 0.1, "step": 0.01}
"""Nats of each dimension that cost nothing, for a latent of each sequence and of each step: `docs/training.md` has the reason."""


class FreeBits(NamedTuple):
    """The free bits of one level of latents."""

    nats: float = 0.0
    """Of each dimension."""
    shared_by: int = 1
    """How many dimensions have theirs together."""


NO_FREE_BITS = FreeBits()


class Objective(NamedTuple):
    """Sums over the sequences of a batch, in nats."""

    loss: Tensor
    """What is minimised: NLL + weight * KL, each dimension's KL counted as no less than the free bits."""
    nll: Tensor
    kl: Tensor
    """The true KL: neither weighted nor raised to the free bits."""
    kl_weight: Tensor | float


def negative_elbo(
    output: VAEOutput,
    kl_weight: Tensor | float,
    free_bits: float,
    above_floor_G: Tensor | None = None,
    *,
    shared_by: int = 1,
    of_steps: FreeBits = NO_FREE_BITS,
) -> Objective:
    """Return NLL + weight * sum_g max(KL_g, |g| * free bits), with KL_g the mean over the batch of the KL of the dimensions in g.

    A group g is of `shared_by` neighbours: of one dimension (Kingma et al. 2016), of some, or of all. The mean is over the real
    posteriors of this micro-batch, and the floor is paid once for each of them. Of few sequences the mean is noisy, and that is
    right as it stands: a group is pushed down only in batches where it is above its floor, whichever sequences they hold. A KL of
    all dimensions together has the free bits of all of them.
    A batch of one makes the floor one for each sequence instead of one for their mean, and a noisy mean is something in
    between; no batch ever pushes a group that it finds below its floor.
    Of a part of a micro-batch, `above_floor_G` says what the whole finds (`find_above_floor`): then the losses of the parts, and
    their gradients, add up to those of the whole.
    Of two levels of latents the groups of both stand in a row, those of the steps with free bits of their own, `of_steps`.
    """
    kl_G, floor = kl_and_floor(output, free_bits, shared_by, of_steps)
    nll = output.nll_B.sum()
    if above_floor_G is None:
        above_floor_G = kl_G > floor
    paid_kl = torch.where(above_floor_G, kl_G, floor).sum()
    return Objective(nll + kl_weight * paid_kl, nll, kl_G.sum(), kl_weight)


def kl_of(output: VAEOutput) -> Tensor:
    """Return the KL of each posterior, (B, Z) or (B, S, Z), with 1 in place of Z where it is that of all dimensions together."""
    return gaussian_kl(output.posterior_mean, output.posterior_logvar) if output.kl is None else output.kl


def kl_and_floor(
    output: VAEOutput, free_bits: float, shared_by: int = 1, of_steps: FreeBits = NO_FREE_BITS
) -> tuple[Tensor, Tensor]:
    """Return the KL of each group of dimensions, (G,), and the least that is paid for one, summed over the real posteriors."""
    mean, mask = output.posterior_mean, output.posterior_mask
    own = _of_level(kl_of(output), mask, mean.shape[-1], FreeBits(free_bits, shared_by))
    if output.steps is None:
        return own
    mean, logvar, mask = output.steps.relative
    levels = own, _of_level(gaussian_kl(mean, logvar), mask, mean.shape[-1], of_steps)
    kls, floors = zip(*((kl_G, floor.expand(len(kl_G))) for kl_G, floor in levels), strict=True)
    return torch.cat(kls), torch.cat(floors)


def _of_level(kl: Tensor, mask: Tensor, dimensions: int, free_bits: FreeBits) -> tuple[Tensor, Tensor]:
    real_P = mask.flatten()
    kl_PZ = torch.where(real_P[:, None], kl.flatten(0, -2), 0.0)
    kl_Z, free = kl_PZ.sum(dim=0), free_bits.nats * dimensions / kl_PZ.shape[1]
    if free_bits.shared_by == 1 or len(kl_Z) == 1:
        return kl_Z, free * real_P.sum()
    groups = kl_Z.split(free_bits.shared_by)
    free_G = kl_Z.new_tensor([free * len(group) for group in groups])
    return torch.stack([group.sum() for group in groups]), free_G * real_P.sum()


def find_above_floor(
    parts: Iterable[VAEOutput], free_bits: float, shared_by: int = 1, of_steps: FreeBits = NO_FREE_BITS
) -> Tensor:
    """Return which groups cost more than their free bits over all parts of a micro-batch together, (G,)."""
    kls, floors = zip(*(kl_and_floor(output, free_bits, shared_by, of_steps) for output in parts), strict=True)
    return torch.stack(kls).sum(dim=0) > torch.stack(floors).sum(dim=0)


def contrastive_loss(posterior_mean: Tensor, posterior_logvar: Tensor) -> Tensor:
    """Return -sum_i log(q(z_i | x_i) / sum_j q(z_i | x_j)): the nats that it takes to find among the B sequences of a micro-batch
    the one that a latent was drawn for. Of a single sequence, which may be an empty one, it is 0.

    This is InfoNCE (van den Oord et al. 2018) between sequences and latents with the posterior itself in place of a learned critic,
    so B log B minus this is B times a lower bound on their mutual information, and in fact the estimate that the monitor reads.
    A posterior that has an affine or invertible layer behind its Gaussian tells sequences apart as its Gaussian does.
    """
    if posterior_mean.device.type == "mps":  # which has no float64
        posterior_mean, posterior_logvar = posterior_mean.cpu(), posterior_logvar.cpu()
    sequences = len(posterior_mean)
    return sequences * (math.log(sequences) - mutual_information(posterior_mean, posterior_logvar))


class WholeBatch(NamedTuple):
    """What depends on all parts of a micro-batch together, found before the first of them goes backward."""

    above_floor_G: Tensor | None
    """Which groups of dimensions cost more than their free bits; None: there are none."""
    contrast: Tensor | None = None
    """The contrastive loss of a sequence, and its gradient by each mean and log-variance, (B, 1 + 2Z); None: it has no weight."""

    def of_part(self, first: int, last: int) -> "WholeBatch":
        """Return the same for the part that holds these sequences."""
        return self if self.contrast is None else self._replace(contrast=self.contrast[first:last])


def contrast_of_parts(parts: Sequence[VAEOutput]) -> Tensor:
    """Return `WholeBatch.contrast` of the posteriors of all parts."""
    with torch.enable_grad():
        mean_BZ = torch.cat([part.posterior_mean for part in parts]).detach().requires_grad_()
        logvar_BZ = torch.cat([part.posterior_logvar for part in parts]).detach().requires_grad_()
        loss = contrastive_loss(mean_BZ, logvar_BZ)
        gradients = torch.autograd.grad(loss, (mean_BZ, logvar_BZ))
    return torch.cat(((loss.detach() / len(mean_BZ)).to(mean_BZ).expand(len(mean_BZ), 1), *gradients), dim=1)


def share_of_contrast(output: VAEOutput, contrast: Tensor) -> Tensor:
    """Return a part's share of the contrastive loss of a micro-batch, with the gradient that the whole has there."""
    posterior = torch.cat((output.posterior_mean, output.posterior_logvar), dim=1)
    return contrast[:, 0].sum() + ((posterior - posterior.detach()) * contrast[:, 1:]).sum()


def resolve_free_bits(settings: ObjectiveSettings, latent_scope: Literal["sequence", "step", "both"]) -> float:
    """Return --free_bits, or by default a protective amount.

    A step is worth but a few nats, and its latent would copy it for free: hence less for a latent of each step. Below free
    bits --target_kl could not bring the KL.
    """
    if settings.free_bits is not None:
        return settings.free_bits
    return FREE_BITS["step" if latent_scope == "step" else "sequence"] if settings.target_kl is None else 0.0


def resolve_step_free_bits(settings: ObjectiveSettings) -> float:
    """Return --step_free_bits, or by default what a latent of each step has."""
    return resolve_free_bits(replace(settings, free_bits=settings.step_free_bits), "step")


def commitment_loss(output: VAEOutput) -> Tensor:
    """Return what codes cost beside the evidence lower bound, summed over the sequences; 0 where latents are no codes."""
    return output.nll_B.new_zeros(()) if output.commitment_B is None else output.commitment_B.sum()


def classification_loss(output: VAEOutput, labels_B: Tensor | None) -> Tensor:
    """Return the sum of the cross entropies of the sequences that have a label; 0 where there are no labels or no classifier."""
    if output.class_scores_BC is None or labels_B is None:
        return output.nll_B.new_zeros(())
    return functional.cross_entropy(output.class_scores_BC.float(), labels_B, ignore_index=NO_LABEL, reduction="sum")
