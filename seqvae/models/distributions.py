"""The distributions that the likelihoods are made of: -log p of what came, in nats, and draws of what might.

The densities are proper: they integrate to 1. Draws take a temperature, 1 for the distribution itself and 0 for its most
likely value, and a generator on the tensors' device, so that drawing leaves the noise of training alone.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG_2_PI = math.log(2 * math.pi)

OUTLIER_SHARE = 1e-4
"""One value in 10,000 is taken for an outlier. A pH of 735 that was meant to be 7.35 lies 20 standard deviations out and costs
a learned Gaussian hundreds of nats, as much as all the rest of an ICU stay. Outliers follow Student's distribution with 2 degrees
of freedom, at the mean and scale that are learned: far out it costs logarithms, where a broad Gaussian would still cost a
square. So 20 of the learned standard deviations cost 18 nats, 1,000 cost 30 and a million 51, for which an ordinary value pays
0.0001. The tail hangs on the learned mean and scale so that it pulls at both: a feature that is 1 in 4 % of the steps, 5 standard
deviations from its mean, is else taken for an outlier for good before its cause is found."""

FARTHEST = 1e9
"""Learned standard deviations; so far from its mean a Gaussian is 0 in any case, and squares must not overflow."""


class GapScale(NamedTuple):
    """What gaps are measured by: `log_gap_mean`, `log_gap_std` and `shortest_gap` of the DataDescription."""

    log_mean: float
    log_std: float
    shortest: float


def robust_nll(values: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    """-log((1 - share) * Normal(value; mean, exp(logvar)) + share * Student2(value; mean, exp(logvar)))."""
    squares = ((values - mean) * torch.exp(-0.5 * logvar)).clamp(-FARTHEST, FARTHEST).square()
    log_ordinary = math.log1p(-OUTLIER_SHARE) - 0.5 * (LOG_2_PI + squares)
    log_outlier = math.log(OUTLIER_SHARE) - 1.5 * torch.log(2 + squares)
    return 0.5 * logvar - torch.logaddexp(log_ordinary, log_outlier)


def robust_nll_up_to(limit: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    """-log of the probability that `robust_nll` gives to all values up to a limit."""
    deviations = (limit - mean) * torch.exp(-0.5 * logvar)
    log_ordinary = math.log1p(-OUTLIER_SHARE) + torch.special.log_ndtr(deviations)
    return -torch.logaddexp(log_ordinary, math.log(OUTLIER_SHARE) + student_up_to(deviations).log())


def student_up_to(deviations: Tensor) -> Tensor:
    """The probability of all values up to one, with 2 degrees of freedom; exact in the far tail, too."""
    roots = (2 + deviations.square()).sqrt()
    beyond = 1 / (roots * (roots + deviations.abs()))
    return torch.where(deviations < 0, beyond, 1 - beyond)


def gap_nll(gaps: Tensor, mean: Tensor, logvar: Tensor, scale: GapScale) -> Tensor:
    """Log-normal, and as robust as a value; `mean` and `logvar` are those of a gap's standardised logarithm.

    Gaps up to the shortest that are told apart, 0 among them, share evenly what the log-normal has for them: the logarithm
    of 0 says nothing.
    """
    log_gaps = gaps.clamp(min=scale.shortest).log()
    standard = (log_gaps - scale.log_mean) / scale.log_std
    longer = robust_nll(standard, mean, logvar) + math.log(scale.log_std)
    return torch.where(gaps > scale.shortest, longer, robust_nll_up_to(standard, mean, logvar)) + log_gaps


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
