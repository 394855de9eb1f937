"""The lower of two levels of latents (--latent_scope both): one for each step, below that of the sequence.

    z ~ p(z),  s_t ~ p(s_t | z) = N(prior mean, prior deviation)          a sequence is made from the top down
    q(s_t | x, z) = N(prior mean + deviation * mean, deviation^2 * variance)

Mean and variance of the posterior are thus in units of its prior (NVAE, Vahdat & Kautz 2020): there the prior is N(0, I), whatever
z says, mean 0 and variance 1 say that a step adds nothing to what z has said, and the KL is that to N(0, I).

Shapes: B sequences, S steps, W width, Z dimensions of the sequence's latent, Y of a step's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.models.backbones import position_waves
from seqvae.models.embeddings import Float32Linear
from seqvae.models.posteriors import POSTERIOR_LOGVAR_LIMIT, Draw, Posterior, bounded, draw, log_density

PRIOR_LOGVAR_LIMIT = 6.0
"""Variances of the prior stay within exp(-6) and exp(6): narrower ones would let z say what a step is to the last digit."""

MakeNoise = Callable[[Sequence[int]], Tensor]
"""A shape -> standard normal numbers, or zeros for the means."""


class StepPrior(NamedTuple):
    """p(s_t | z) of each step, diagonal Gaussians, (B, S, Y); float32."""

    mean: Tensor
    logvar: Tensor

    def place(self, relative: Tensor) -> Tensor:
        """Return latents that are given in units of this prior in the decoder's units."""
        return self.mean + torch.exp(0.5 * self.logvar) * relative


class StepLatents(NamedTuple):
    """The latents of the steps, given that of their sequence."""

    relative: Posterior
    """q(s_t | x, z) in units of the prior, (B, S, Y)."""
    prior: StepPrior
    drawn: Tensor
    """A draw of each, in units of the prior."""

    @property
    def posterior(self) -> Posterior:
        """q(s_t | x, z) in the decoder's units."""
        mean, logvar, mask = self.relative
        return Posterior(self.prior.place(mean), self.prior.logvar + logvar, mask)

    @property
    def z(self) -> Tensor:
        """What the decoder gets, (B, S, Y)."""
        return self.prior.place(self.drawn)

    def log_p_over_q(self) -> Tensor:
        """Return log p(s | z) - log q(s | x, z) of each sequence's draw, (B,) in float64."""
        mean, logvar, mask = self.relative
        drawn = Draw(self.drawn, self.drawn).double()
        log_p_BS = log_density(Posterior(torch.zeros_like(drawn.z), torch.zeros_like(drawn.z), mask), drawn)
        log_q_BS = log_density(Posterior(mean.double(), logvar.double(), mask), drawn)
        return torch.where(mask, log_p_BS - log_q_BS, 0.0).sum(dim=1)


class StepLevel(nn.Module):
    """Prior and posterior of each step's latent, given the sequence's."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width, size = settings.width, settings.step_latent_size
        self.of_sequence = nn.Linear(settings.latent_size, width)
        self.of_position = nn.Linear(width, width, bias=False)
        self.prior_moments = Float32Linear(width, 2 * size)
        self.posterior_moments = Float32Linear(2 * width, 2 * size)
        for weight in self.prior_moments.parameters():  # N(0, I) at first
            nn.init.zeros_(weight)

    def forward(self, z_BZ: Tensor, hidden_BSW: Tensor, mask_BS: Tensor, noise: MakeNoise | None = None) -> StepLatents:
        """Return the posterior of each step and a draw from it, by torch's own noise if by no other."""
        context_BSW = self._context(z_BZ, hidden_BSW.shape[1])
        both = torch.cat((hidden_BSW.float(), context_BSW.float()), dim=-1)
        mean, raw_logvar = self.posterior_moments(both).chunk(2, dim=-1)
        relative = Posterior(mean, bounded(raw_logvar, POSTERIOR_LOGVAR_LIMIT), mask_BS)
        drawn = draw(relative, None if noise is None else noise(mean.shape))
        return StepLatents(relative, self._prior_from(context_BSW), drawn)

    def prior(self, z_BZ: Tensor, steps: int) -> StepPrior:
        """Return the prior of the first steps of each sequence."""
        return self._prior_from(self._context(z_BZ, steps))

    def _context(self, z_BZ: Tensor, steps: int) -> Tensor:
        """Return what prior and posterior of a step are to know of z and of where the step stands, (B, S, W)."""
        waves_SW = position_waves(steps, self.of_position.in_features, z_BZ.device)
        return F.gelu(self.of_sequence(z_BZ)[:, None] + self.of_position(waves_SW))

    def _prior_from(self, context_BSW: Tensor) -> StepPrior:
        mean, raw_logvar = self.prior_moments(context_BSW).chunk(2, dim=-1)
        return StepPrior(mean, bounded(raw_logvar, PRIOR_LOGVAR_LIMIT))


def side_by_side(z_BZ: Tensor, z_BSY: Tensor) -> Tensor:
    """Return what the decoder gets at each step, (B, S, Z + Y): the sequence's latent, and the step's beside it."""
    return torch.cat((z_BZ[:, None].expand(-1, z_BSY.shape[1], -1), z_BSY), dim=-1)
