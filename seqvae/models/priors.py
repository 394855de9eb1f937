"""The prior p(z) of the latents: what the KL is to, what the density of a latent is, and where new sequences come from.

A prior is a `Prior`: `log_density` and `sample`, and `kl` where it can do better than an estimate from one draw.

Shapes: B sequences, S steps, Z latent dimensions, K components; latents are (B, Z) or (B, S, Z).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.models.noise import Noise
from seqvae.models.posteriors import Draw, Posterior, entropy


class Prior(nn.Module):
    """The standard normal distribution, and what the others have in common with it."""

    def kl(self, posterior: Posterior, drawn: Draw) -> Tensor | None:
        """Return the KL of each posterior in nats, by dimension, (B, Z) or (B, S, Z), or in all, with 1 in place of Z.

        None: it is that of a Gaussian to N(0, I), which everybody computes from mean and variance. What has no closed form is
        estimated from the draw: the entropy of a Gaussian is exact, and only log p(z) scatters.
        """
        if type(self) is Prior and drawn.log_det is None:
            return None
        return (-entropy(posterior, drawn) - self.log_density(drawn.z))[..., None]

    def log_density(self, z: Tensor) -> Tensor:
        """Return log p(z) of each latent, (B,) or (B, S): of a step given those before it."""
        return -0.5 * (z.square() + math.log(2 * math.pi)).sum(dim=-1)

    def sample(self, shape: Sequence[int], noise: Noise) -> Tensor:
        """Draw latents of this shape, one for each sequence, or each step of it."""
        return noise.normal(shape)


class MixturePrior(Prior):
    """Learned Gaussians, each with a weight (Dilokthanakul et al. 2016; Tomczak & Welling 2018 as their MoG)."""

    def __init__(self, components: int, latent_size: int) -> None:
        super().__init__()
        self.mean_KZ = nn.Parameter(torch.randn(components, latent_size))
        self.logvar_KZ = nn.Parameter(torch.zeros(components, latent_size))
        self.weight_K = nn.Parameter(torch.zeros(components))

    def log_density(self, z: Tensor) -> Tensor:
        return mixture_density(z, self.mean_KZ, self.logvar_KZ, self.weight_K.log_softmax(dim=0))

    def sample(self, shape: Sequence[int], noise: Noise) -> Tensor:
        bounds_K = self.weight_K.softmax(dim=0).cumsum(dim=0)[:-1].contiguous()
        chosen = torch.searchsorted(bounds_K, noise.uniform(shape[:-1]))
        return self.mean_KZ[chosen] + torch.exp(0.5 * self.logvar_KZ[chosen]) * noise.normal(shape)


def mixture_density(z: Tensor, mean_KZ: Tensor, logvar_KZ: Tensor, log_weight_K: Tensor) -> Tensor:
    """Return the log density of a mixture of diagonal Gaussians at each latent, in the latents' own type whatever the precision."""
    mean_KZ, logvar_KZ, log_weight_K = (part.to(z.dtype) for part in (mean_KZ, logvar_KZ, log_weight_K))
    precision_KZ = torch.exp(-logvar_KZ)
    constant_K = log_weight_K - 0.5 * (mean_KZ.square() * precision_KZ + logvar_KZ + math.log(2 * math.pi)).sum(dim=1)
    with torch.autocast(z.device.type, enabled=False):
        log_p_K = constant_K + z @ (mean_KZ * precision_KZ).T - 0.5 * z.square() @ precision_KZ.T
    return torch.logsumexp(log_p_K, dim=-1)


def make_prior(settings: ModelSettings) -> Prior:
    """Return the prior that --prior names."""
    match settings.prior:
        case "standard":
            return Prior()
        case "mixture":
            return MixturePrior(settings.prior_components, settings.latent_size)
