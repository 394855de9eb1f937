"""Formulas on diagonal Gaussian posteriors: tensors in, tensors out, nothing else. Everything in nats.

A posterior q(z|x) is a mean and a log-variance; the prior p(z) is the standard normal. Formulas on a set of posteriors take
real ones only: the caller leaves padding out.

Shapes: B sequences, N posteriors (of sequences, or of single steps), Z latent dimensions, R rows at once, K draws
of each posterior.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ACTIVE_VARIANCE = 0.01
"""From this variance of its mean on, a latent dimension counts as active (Burda et al. 2016)."""


def gaussian_kl(mean_BZ: Tensor, logvar_BZ: Tensor) -> Tensor:
    """Return KL(q || p) of each latent dimension, from the diagonal Gaussian q to the standard normal p, in float32 at least.

    0.5 * (mean^2 + exp(logvar) - 1 - logvar); an axis for steps may stand in between.

    >>> gaussian_kl(torch.tensor([0.0, 2.0]), torch.zeros(2))
    tensor([0., 2.])
    """
    mean_BZ, logvar_BZ = at_least_float32(mean_BZ), at_least_float32(logvar_BZ)
    return 0.5 * (mean_BZ.square() + torch.expm1(logvar_BZ) - logvar_BZ)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half precision, whose 3 digits are too few for a difference of variances near 1."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def kl_per_dim(mean_NZ: Tensor, logvar_NZ: Tensor) -> Tensor:
    """Return the true KL of each dimension, its mean over the posteriors: neither clamped by free bits nor weighted.

    Their sum is the rate: what a posterior tells about its input, at most.
    """
    return gaussian_kl(mean_NZ, logvar_NZ).mean(dim=0)


def variance_of_means(mean_NZ: Tensor) -> Tensor:
    """Return how much the mean of each dimension moves with the input; NaN where there are fewer than two posteriors.

    Beside a standard normal prior, this and the mean of variances add up to 1 once the posteriors fill the prior.
    """
    if len(mean_NZ) < 2:
        return at_least_float32(mean_NZ).new_full((mean_NZ.shape[1],), math.nan)
    return at_least_float32(mean_NZ).var(dim=0)


def mean_of_variances(logvar_NZ: Tensor) -> Tensor:
    """Return how wide the posterior is in each dimension: 1 at collapse, towards 0 where a model is no longer variational."""
    return at_least_float32(logvar_NZ).exp().mean(dim=0)


def count_active(variance_of_means_Z: Tensor, threshold: float = ACTIVE_VARIANCE) -> Tensor:
    """Count the active units: dimensions whose posterior mean moves with the input (Burda et al. 2016).

    >>> count_active(variance_of_means(torch.tensor([[0.0, 1.0], [0.0, -1.0]])))
    tensor(1)
    """
    return (variance_of_means_Z >= threshold).sum()


class Moments(NamedTuple):
    """What is known of each dimension of posteriors from latents that were drawn of them, (Z,)."""

    variance_of_means: Tensor
    mean_of_variances: Tensor
    mean_logvar: Tensor

    @property
    def kl(self) -> Tensor:
        """The KL that `kl_to_moments` computes of Gaussians."""
        return 0.5 * ((self.variance_of_means + self.mean_of_variances).log() - self.mean_logvar)


def moments_of_draws(z_KNZ: Tensor) -> Moments:
    """Estimate them from K latents of each of N posteriors, without bias: what K draws scatter by is taken from the variance of
    their means, and what a sample's log-variance falls short of on average (as for Gaussians) is added.

    >>> moments_of_draws(torch.tensor([[[1.0], [3.0]], [[-1.0], [1.0]]]))[:2]
    (tensor([1.]), tensor([2.]))
    """
    draws = len(z_KNZ)
    variance_NZ = z_KNZ.var(dim=0)
    variance_Z = variance_NZ.mean(dim=0)
    between_Z = (variance_of_means(z_KNZ.mean(dim=0)) - variance_Z / draws).clamp(min=0)
    half = torch.tensor((draws - 1) / 2, dtype=torch.float64)
    short = float(half.digamma() - half.log())
    return Moments(between_Z, variance_Z, variance_NZ.log().mean(dim=0) - short)


def kl_to_moments(mean_NZ: Tensor, logvar_NZ: Tensor) -> Tensor:
    """Return each dimension's mean KL to the Gaussian with the moments of all posteriors together: what it can tell at most.

    >>> kl_to_moments(torch.tensor([[1.0], [-1.0]]), torch.zeros(2, 1))
    tensor([0.3466])
    """
    moments_Z = mean_NZ.var(dim=0, correction=0) + logvar_NZ.exp().mean(dim=0)
    return 0.5 * (moments_Z.log() - logvar_NZ.mean(dim=0))


def effective_dimensions(kl_Z: Tensor) -> Tensor:
    """Return how many dimensions carry the rate: its participation ratio (sum KL)^2 / sum KL^2.

    k where k dimensions share the rate evenly, 1 where one has it all, 0 where there is none. It is blind to the size of the
    rate: a collapsed posterior with its last 1e-6 nats spread evenly has all its dimensions.

    >>> effective_dimensions(torch.tensor([3.0, 3.0, 0.0, 0.0]))
    tensor(2.)
    """
    shares_Z = kl_Z / kl_Z.max()  # the ratio does not change, and squares of a tiny KL do not vanish
    return torch.where(kl_Z.max() == 0, 0.0, shares_Z.sum().square() / shares_Z.square().sum())


def mutual_information(
    mean_NZ: Tensor,
    logvar_NZ: Tensor,
    generator: torch.Generator | None = None,
    *,
    every_nth_sample: int = 1,
    rows_at_once: int = 128,
) -> Tensor:
    """Return I(x; z) under q, with q(z) the mixture of the N posteriors at hand (Hoffman & Johnson 2016); float64.

    mean_i(l_ii - logsumexp_j l_ij) + log N,  l_ij = log q(z_i | x_j),  z_i drawn from q(z | x_i)

    The same samples stand in both terms. So it is 0 at collapse, to rounding and without scatter, and never above log N, which
    is all that N posteriors can show: where it comes near, the truth may be more. It may fall a little below 0 near collapse.
    `every_nth_sample`: the mean over i can do with fewer, at a share of the time; N stays what it is, and so does its cap.
    In float32 it read -7.6 for 7.0 at small variances. Memory: rows_at_once * N numbers, which stay in the processor's cache: 1.3
    to 1.7 times as fast as all 1,024 rows at once. The rate minus this is the aggregate KL, KL(q(z) || p(z)): the part of the rate
    that tells nothing about x, too high by what the cap cuts off.
    """
    count = len(mean_NZ)
    mean_NZ, logvar_NZ = mean_NZ.double(), logvar_NZ.double()
    mean_NZ = mean_NZ - mean_NZ.mean(dim=0)  # moves all alike and changes nothing but the cancellation below
    noise_NZ = torch.randn(mean_NZ.shape, generator=generator, dtype=mean_NZ.dtype, device=mean_NZ.device)
    z_NZ = mean_NZ + torch.exp(0.5 * logvar_NZ) * noise_NZ
    # (z - mean)^2 * precision, multiplied out: products of matrices instead of N * N * Z differences. What does not depend
    # on j drops out of l_ii - l_ij and is left out.
    precision_NZ = torch.exp(-logvar_NZ)
    constant_N = -0.5 * (mean_NZ.square() * precision_NZ + logvar_NZ).sum(dim=1)
    factors_2ZN = torch.cat((mean_NZ * precision_NZ, -0.5 * precision_NZ), dim=1).T
    surprise, nth = mean_NZ.new_zeros(()), every_nth_sample
    for start in range(0, count, rows_at_once * nth):
        z_RZ = z_NZ[start : start + rows_at_once * nth : nth]
        l_RN = torch.addmm(constant_N, torch.cat((z_RZ, z_RZ.square()), dim=1), factors_2ZN)
        own_R = l_RN[:, start : start + rows_at_once * nth : nth].diagonal()
        surprise = surprise + (torch.logsumexp(l_RN, dim=1) - own_R).sum()
    return math.log(max(count, 1)) - surprise / -(-count // nth)


def moved_information(
    z_NZ: Tensor, log_density_at: Callable[[Tensor], Tensor], *, every_nth_sample: int = 1, rows_at_once: int = 32
) -> Tensor:
    """Return I(x; z) as `mutual_information` does, of posteriors of any form: one latent of each, and log q(z_i | x_j) by a
    function from (R, Z) to (R, N)."""
    surprises, nth = [], every_nth_sample
    for start in range(0, len(z_NZ), rows_at_once * nth):
        places_R = torch.arange(start, min(start + rows_at_once * nth, len(z_NZ)), nth, device=z_NZ.device)
        l_RN = log_density_at(z_NZ[places_R]).double()
        surprises.append(torch.logsumexp(l_RN, dim=1) - l_RN.gather(1, places_R[:, None])[:, 0])
    return math.log(len(z_NZ)) - torch.cat(surprises).mean()


def logmeanexp(values: Tensor, dim: int) -> Tensor:
    """Return the log of the mean of exp(values), without overflow.

    >>> logmeanexp(torch.full((4,), 1000.0), dim=0)
    tensor(1000.)
    """
    return torch.logsumexp(values, dim=dim) - math.log(values.shape[dim])
