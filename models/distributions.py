"""The distributions that the likelihoods are made of: -log p of what came, in nats, and draws of what might.

The densities are proper: they integrate to 1. Draws take a temperature, 1 for the distribution itself and 0 for its most
likely value, and a generator on the tensors' device, so that drawing leaves the noise of training alone.
"""

import math

import torch
from torch import Tensor

LOG_2_PI = math.log(2 * math.pi)

OUTLIER_SHARE = 1e-4
OUTLIER_SCALE = 10.0
"""One value in 10,000 is taken for an outlier. A pH of 735 that was meant to be 7.35 lies 20 standard deviations out and costs
a learned Gaussian hundreds of nats, as much as all the rest of an ICU stay. Outliers follow a Cauchy distribution around 0, in
standard deviations of the data: far out it costs two logarithms, where a broad Gaussian would still cost a square. So 20
standard deviations cost 14 nats, 1,000 cost 22 and a million 36, for which an ordinary value pays 0.0001."""

FARTHEST = 1e9
"""Standard deviations; so far from its mean a Gaussian is 0 in any case, and squares must not overflow."""


def robust_nll(values: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    """-log((1 - share) * Normal(value; mean, exp(logvar)) + share * Cauchy(value; 0, scale)), for normalised values."""
    log_ordinary = math.log1p(-OUTLIER_SHARE) - gaussian_nll(values, mean, logvar)
    distances = torch.hypot(values / OUTLIER_SCALE, torch.ones_like(values))
    log_outlier = math.log(OUTLIER_SHARE / (math.pi * OUTLIER_SCALE)) - 2 * distances.log()
    return -torch.logaddexp(log_ordinary, log_outlier)


def robust_nll_up_to(limit: float, mean: Tensor, logvar: Tensor) -> Tensor:
    """-log of the probability that `robust_nll` gives to all values up to a limit."""
    log_ordinary = math.log1p(-OUTLIER_SHARE) + torch.special.log_ndtr((limit - mean) * torch.exp(-0.5 * logvar))
    outlier = OUTLIER_SHARE * (0.5 + math.atan(limit / OUTLIER_SCALE) / math.pi)
    return -torch.logaddexp(log_ordinary, torch.full_like(log_ordinary, math.log(outlier)))


def gaussian_nll(values: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    deviations = (values - mean).clamp(-FARTHEST, FARTHEST)
    return 0.5 * (LOG_2_PI + logvar + deviations.square() * torch.exp(-logvar))


def gap_nll(gaps: Tensor, mean: Tensor, logvar: Tensor, shortest: float) -> Tensor:
    """Log-normal, and as robust as a value; `mean` and `logvar` are those of a gap's logarithm.

    Gaps up to the shortest that are told apart, 0 among them, share evenly what the log-normal has for them: the logarithm
    of 0 says nothing.
    """
    log_gaps, log_shortest = gaps.clamp(min=shortest).log(), math.log(shortest)
    longer = robust_nll(log_gaps, mean, logvar) + log_gaps
    return torch.where(gaps > shortest, longer, robust_nll_up_to(log_shortest, mean, logvar) + log_shortest)


def draw_gaussian(mean: Tensor, logvar: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Without outliers: they stand for mistakes in the data, which nobody wants more of."""
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    return mean + temperature * torch.exp(0.5 * logvar) * noise


def draw_category(scores_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return scores_BV.argmax(dim=-1)
    probabilities_BV = (scores_BV.float() / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities_BV, 1, generator=generator).squeeze(-1)


def draw_presence(scores: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return scores > 0
    return (
        torch.rand(scores.shape, generator=generator, device=scores.device) < (scores.float() / temperature).sigmoid()
    )
