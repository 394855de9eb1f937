"""The prior p(z) of the latents: what the KL is to, what the density of a latent is, and where new sequences come from.

A prior is a `Prior`: `log_density` and `sample`, and `kl` where it can do better than an estimate from one draw.

Shapes: B sequences, S steps, Z latent dimensions, K components, N pseudo-inputs, L steps of one, W width; latents are (B, Z) or
(B, S, Z).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from seqvae.config.model import LARGEST_ALPHA, ModelSettings
from seqvae.models.noise import Noise
from seqvae.models.posteriors import Draw, Posterior, PosteriorFamily, entropy, gaussian_log_density

PSEUDO_STEPS = 16
"""Steps of a learned pseudo-input. The encoder pools them, so that a handful can say what a longer sequence would."""
FIRST_ALPHA = -2.0
"""Where the weight of a step on the next begins: after a sigmoid, 12 % of the way from the least one to the largest."""


class Prior(nn.Module):
    """The standard normal distribution, and what the others have in common with it."""

    def kl(self, posterior: Posterior, drawn: Draw) -> Tensor | None:
        """Return the KL of each posterior in nats, by dimension, (B, Z) or (B, S, Z), or in all, with 1 in place of Z.

        None: it is that of a Gaussian to N(0, I), which everybody computes from mean and variance. What has no closed form is
        estimated from the draw: the entropy of a Gaussian is exact, and only log p(z) scatters.
        """
        if not self.estimates_kl(drawn):
            return None
        return -entropy(posterior, drawn)[..., None] - self.log_density(drawn.z)[..., None]

    def estimates_kl(self, drawn: Draw) -> bool:
        """Return whether `kl` is an estimate from the draw."""
        return drawn.log_det is not None

    def log_density(self, z: Tensor) -> Tensor:
        """Return log p(z) of each latent, (B,) or (B, S): of a step given those before it."""
        return -0.5 * (z.square() + math.log(2 * math.pi)).sum(dim=-1)

    def sample(self, shape: Sequence[int], noise: Noise) -> Tensor:
        """Draw latents of this shape, one for each sequence, or each step of it."""
        return noise.normal(shape)

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Compute once what log densities and draws are made of, as long as no weight changes."""
        yield


class MixturePrior(Prior):
    """Learned Gaussians, each with a weight (Dilokthanakul et al. 2016; Tomczak & Welling 2018 as their MoG)."""

    def __init__(self, components: int, latent_size: int) -> None:
        super().__init__()
        self.mean_KZ = nn.Parameter(torch.randn(components, latent_size))
        self.logvar_KZ = nn.Parameter(torch.zeros(components, latent_size))
        self.weight_K = nn.Parameter(torch.zeros(components))

    def estimates_kl(self, drawn: Draw) -> bool:
        return True

    def log_density(self, z: Tensor) -> Tensor:
        log_weight_K = self.weight_K.to(z.dtype).log_softmax(dim=0)
        return torch.logsumexp(log_weight_K + gaussian_log_density(z, self.mean_KZ, self.logvar_KZ), dim=-1)

    def sample(self, shape: Sequence[int], noise: Noise) -> Tensor:
        bounds_K = self.weight_K.softmax(dim=0).cumsum(dim=0)[:-1].contiguous()
        chosen = torch.searchsorted(bounds_K, noise.uniform(shape[:-1]))
        return self.mean_KZ[chosen] + torch.exp(0.5 * self.logvar_KZ[chosen]) * noise.normal(shape)


class Encodes(Protocol):
    """The network that a `VampPrior` belongs to."""

    @property
    def posterior(self) -> PosteriorFamily: ...

    def posteriors_of_steps(self, steps_NLW: Tensor) -> Posterior:
        """Return the posteriors of sequences of embedded steps, (K, Z), by the encoder of the data."""


class VampPrior(Prior):
    """The posteriors of K learned pseudo-inputs, each with the same weight (Tomczak & Welling 2018).

    A pseudo-input is a short sequence of embedded steps that the network's own encoder reads. With a latent for each step it has a
    posterior for each of its steps, so that fewer of them make K.
    """

    def __init__(self, components: int, settings: ModelSettings, network: Encodes) -> None:
        super().__init__()
        self.components = components
        inputs = components if settings.latent_scope != "step" else -(-components // PSEUDO_STEPS)
        self.inputs_NLW = nn.Parameter(torch.randn(inputs, PSEUDO_STEPS, settings.width))
        self._network = (network,)  # in a tuple, so that its weights are not found here again
        self._fixed: Posterior | None = None
        self._is_fixed = False

    def posteriors(self) -> Posterior:
        """Return the components, (K, Z)."""
        if self._fixed is not None:
            return self._fixed
        found = Posterior(*(part[: self.components] for part in self._network[0].posteriors_of_steps(self.inputs_NLW)))
        if self._is_fixed:
            self._fixed = found
        return found

    def estimates_kl(self, drawn: Draw) -> bool:
        return True

    def log_density(self, z: Tensor) -> Tensor:
        log_q = self._network[0].posterior.log_density_at(z, self.posteriors())
        return torch.logsumexp(log_q, dim=-1) - math.log(self.components)

    def sample(self, shape: Sequence[int], noise: Noise) -> Tensor:
        chosen = (noise.uniform(shape[:-1]) * self.components).long()
        posterior = Posterior(*(part[chosen] for part in self.posteriors()))
        return self._network[0].posterior.draw(posterior, noise.normal(shape)).z

    @contextmanager
    def fixed(self) -> Iterator[None]:
        before, self._is_fixed = self._is_fixed, True
        try:
            yield
        finally:
            self._is_fixed = before
            if not before:
                self._fixed = None


class AutoregressivePrior(Prior):
    """The latent of a step is close to the one before it (delta-VAE, Razavi et al. 2019): a stationary AR(1) in each dimension.

        z_1 ~ N(0, 1),  z_t | z_(t-1) ~ N(alpha z_(t-1), 1 - alpha^2)

    No posterior that is independent from step to step comes near it, so that the KL has a least value (`least_kl`). Alpha is
    learned, and never so small that this would fall below `least_rate` nats per step.
    """

    def __init__(self, least_rate: float, latent_size: int) -> None:
        super().__init__()
        self.least_alpha = least_alpha(least_rate / latent_size)
        self.raw_Z = nn.Parameter(torch.full((latent_size,), FIRST_ALPHA))

    @property
    def alpha_Z(self) -> Tensor:
        """The weight of a step's latent on the next one's."""
        return self.least_alpha + (LARGEST_ALPHA - self.least_alpha) * self.raw_Z.sigmoid()

    def kl(self, posterior: Posterior, drawn: Draw) -> Tensor | None:
        """Return the KL of each step to the prior given the step before it, in expectation over that one's posterior."""
        if self.estimates_kl(drawn):
            return super().kl(posterior, drawn)
        alpha_Z, variance_BSZ = self.alpha_Z, posterior.logvar.exp()
        away_BSZ = posterior.mean - alpha_Z * step_before(posterior.mean)
        before_BSZ = alpha_Z.square() * step_before(variance_BSZ)
        log_given_SZ = self._log_variance(posterior.mean)
        ratio_BSZ = (variance_BSZ + away_BSZ.square() + before_BSZ) * torch.exp(-log_given_SZ)
        return 0.5 * (ratio_BSZ - 1 + log_given_SZ - posterior.logvar)

    def log_density(self, z: Tensor) -> Tensor:
        log_given_SZ = self._log_variance(z)
        away_BSZ = z - self.alpha_Z.to(z.dtype) * step_before(z)
        return -0.5 * (away_BSZ.square() * torch.exp(-log_given_SZ) + log_given_SZ + math.log(2 * math.pi)).sum(dim=-1)

    def sample(self, shape: Sequence[int], noise: Noise) -> Tensor:
        noise_BSZ = noise.normal(shape)
        deviation_SZ = torch.exp(0.5 * self._log_variance(noise_BSZ))
        steps = [noise_BSZ[:, 0]]
        for step in range(1, shape[1]):
            steps.append(self.alpha_Z * steps[-1] + deviation_SZ[step] * noise_BSZ[:, step])
        return torch.stack(steps, dim=1)

    def _log_variance(self, z_BSZ: Tensor) -> Tensor:
        """Return the log-variance of each step given the one before it, (S, Z): 0 of the first."""
        later_SZ = torch.log1p(-self.alpha_Z.to(z_BSZ.dtype).square()).expand(z_BSZ.shape[1], -1)
        is_first_S1 = torch.arange(z_BSZ.shape[1], device=z_BSZ.device)[:, None] == 0
        return torch.where(is_first_S1, 0.0, later_SZ)


def step_before(vectors_BSZ: Tensor) -> Tensor:
    """Return what stands one step before, 0 before the first."""
    return functional.pad(vectors_BSZ[:, :-1], (0, 0, 1, 0))


def least_kl(alpha: float, steps: int) -> float:
    """Return the least KL, in nats per dimension, that a Gaussian posterior with independent steps can have from the AR(1).

    Its means are 0 then, and its variances 1 - alpha^2 at both ends and (1 - alpha^2) / (1 + alpha^2) between them.

    >>> least_kl(0.5, 1), round(least_kl(0.5, 2), 4), round(least_kl(0.5, 3), 4)
    (0.0, 0.1438, 0.2554)
    """
    return 0.0 if steps < 2 else 0.5 * ((steps - 2) * math.log1p(alpha**2) - math.log1p(-(alpha**2)))


def least_alpha(rate: float) -> float:
    """Return the smallest alpha with which each sequence of two steps or more costs `rate` nats per step and dimension.

    `least_kl` per step goes from -log(1 - alpha^2) / 4 for two steps to log(1 + alpha^2) / 2 for endless ones, without leaving what
    is between.

    >>> least_alpha(0.0), round(least_alpha(0.05), 4)
    (0.0, 0.4258)
    """
    return math.sqrt(max(-math.expm1(-4 * rate), math.expm1(2 * rate)))


def make_prior(settings: ModelSettings, network: Encodes) -> Prior:
    """Return the prior that --prior names."""
    match settings.prior:
        case "standard":
            return Prior()
        case "mixture":
            return MixturePrior(settings.prior_components, settings.latent_size)
        case "vamp":
            return VampPrior(settings.prior_components, settings, network)
        case "autoregressive":
            return AutoregressivePrior(settings.least_rate, settings.latent_size)
