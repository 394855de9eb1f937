"""The posterior q(z | x): the encoder's vectors in, a diagonal Gaussian in float32 out, and latents drawn from it.

A family of posteriors is a `PosteriorFamily`: `forward` makes the Gaussians, and `draw` latents of them. Where it moves what was
drawn from the Gaussian, it says by how much that stretches space.

A flow (Dinh et al. 2017) is coupling layers: each moves half of the dimensions by a scale and a shift that a small network makes of
the other half, and of the mean and the log-variance of the Gaussian. Either direction costs the same; the determinant is a
product.

Shapes: B sequences, S steps, W width, Z latent dimensions; `hidden` is (B, W) or (B, S, W), and so is what comes out.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed.nn.functional as over_processes
from torch import Tensor, nn
from torch.nn.functional import dropout

from seqvae.config.model import ModelSettings
from seqvae.models.embeddings import Float32Linear

COUPLING_WIDTH = 64
"""Numbers between the two linear layers of a coupling."""
LARGEST_LOG_SCALE = 2.0
"""A layer stretches a dimension by exp(-2) to exp(2), so that no step of training makes the map singular."""

POSTERIOR_LOGVAR_LIMIT = 12.0
"""Posterior variances stay within exp(-12) and exp(12), where float32 carries every formula on them."""

DEVIATION = 0.6
"""Standard deviation of batch-normalised means. It keeps the mean KL of each dimension at 0.6^2 / 2 = 0.18 nats or more, 2.9 nats
for 16 dimensions: enough to be worth using. A deviation of 1 would fill the prior with means and leave the variances nothing."""

MOMENTUM = 0.1
"""Share of the newest batch in the statistics that evaluation uses."""

LEAST_VARIANCE = 1 / (2 * math.pi * math.e)
"""The variance of a Gaussian whose entropy is 0: that of --posterior du where dropout takes all else."""

VARIANCE_DROPOUT = 0.2
"""Share of the variances that --posterior du drops in training; that of the paper's experiments."""

SMALLEST_VARIANCE = 1e-12
"""Means that are all alike have no deviation to divide by."""


class Posterior(NamedTuple):
    """The diagonal Gaussian q(z | x) of each sequence, (B, Z), or of each step, (B, S, Z); float32."""

    mean: Tensor
    logvar: Tensor
    mask: Tensor
    """bool, (B,) or (B, S): what belongs to something real. The sequence of length 0 of an empty batch does not."""


class Draw(NamedTuple):
    """One latent of each posterior."""

    z: Tensor
    """What the decoder gets, (B, Z) or (B, S, Z)."""
    base: Tensor
    """The draw from the Gaussian that z was made of; z itself, where the posterior is Gaussian."""
    log_det: Tensor | None = None
    """log |dz / dbase| of each posterior, (B,) or (B, S); None: 0, as z is the base."""

    def double(self) -> "Draw":
        return Draw(self.z.double(), self.base.double(), None if self.log_det is None else self.log_det.double())


class PosteriorFamily(nn.Module):
    """What the families have in common: by itself, diagonal Gaussians that somebody else makes."""

    least_sequences = 1
    """How many real sequences a training batch must hold."""
    name = ""
    """As --posterior has it."""
    synchronised = False
    """Whether a batch's statistics are shared among processes; False where nothing depends on the rest of the batch."""

    def at_rest(self, hidden: Tensor, mask: Tensor) -> Posterior:
        """Return the posteriors as evaluation has them: nothing depends on the rest of the batch, and nothing is learned of it."""
        posterior: Posterior = self(hidden, mask)
        return posterior

    def draw(self, posterior: Posterior, noise: Tensor | None = None) -> Draw:
        """Draw a latent of each posterior; `noise` is standard normal, of the mean's shape: zeros give the latent at the mean."""
        base = draw(posterior, noise)
        return Draw(base, base)

    def log_density_at(self, z: Tensor, posterior_K: Posterior) -> Tensor:
        """Return log q(z | x) of each latent under each of K posteriors, (B, K) or (B, S, K), in the latents' own type."""
        return gaussian_log_density(z, posterior_K.mean, posterior_K.logvar)


class GaussianPosterior(PosteriorFamily):
    """Mean and log-variance are linear in the encoder's vectors."""

    def __init__(self, width: int, latent_size: int) -> None:
        super().__init__()
        self.moments = Float32Linear(width, 2 * latent_size)

    def forward(self, hidden: Tensor, mask: Tensor) -> Posterior:
        mean, raw_logvar = self.moments(hidden).chunk(2, dim=-1)
        return Posterior(mean, bounded(raw_logvar, POSTERIOR_LOGVAR_LIMIT), mask)


class FlowPosterior(GaussianPosterior):
    """Draws from a Gaussian, moved by coupling layers that know its mean and log-variance (Rezende & Mohamed 2015)."""

    def __init__(self, width: int, latent_size: int, layers: int) -> None:
        super().__init__(width, latent_size)
        self.flow = Flow(layers, latent_size)

    def draw(self, posterior: Posterior, noise: Tensor | None = None) -> Draw:
        base = draw(posterior, noise)
        z, log_det = self.flow(base, posterior.mean, posterior.logvar)
        return Draw(z, base, log_det)

    def move(self, base: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
        """Return the latents that draws from Gaussians with these moments are moved to."""
        return self.flow(base, mean, logvar)[0]

    def log_density_at(self, z: Tensor, posterior_K: Posterior) -> Tensor:
        mean_KZ, logvar_KZ = posterior_K.mean, posterior_K.logvar
        base, log_det = self.flow.inverse(z[..., None, :].float(), mean_KZ, logvar_KZ)
        distance = (base - mean_KZ).square() * torch.exp(-logvar_KZ)
        return (-0.5 * (distance + logvar_KZ + math.log(2 * math.pi)).sum(dim=-1) - log_det).to(z.dtype)


class BatchNormPosterior(PosteriorFamily):
    """Means of mean 0 and deviation DEVIATION over the batch in each dimension, whatever the encoder does (Zhu et al. 2020).

    The mean KL of a batch is then Z * DEVIATION^2 / 2 or more. The paper adds a learned shift; here there is none: the decoder has
    biases, and all that a shift could do is raise the KL.
    """

    least_sequences = 2
    name = "batch_norm"

    mean_Z: Tensor
    variance_Z: Tensor

    def __init__(self, width: int, latent_size: int) -> None:
        super().__init__()
        self.mean = Float32Linear(width, latent_size, bias=False)
        self.logvar = Float32Linear(width, latent_size)
        self.register_buffer("mean_Z", torch.zeros(latent_size))
        self.register_buffer("variance_Z", torch.ones(latent_size))

    def forward(self, hidden: Tensor, mask: Tensor) -> Posterior:
        raw_mean = self.mean(hidden)
        statistics = self.update_statistics(raw_mean, mask) if self.training else (self.mean_Z, self.variance_Z)
        return Posterior(normalised(raw_mean, *statistics), self.logvar_of(hidden, drops=self.training), mask)

    def at_rest(self, hidden: Tensor, mask: Tensor) -> Posterior:
        mean = normalised(self.mean(hidden), self.mean_Z, self.variance_Z)
        return Posterior(mean, self.logvar_of(hidden, drops=False), mask)

    def logvar_of(self, hidden: Tensor, *, drops: bool) -> Tensor:
        """Return the log-variances; `drops`: as in training, where a family may leave out some of it."""
        return bounded(self.logvar(hidden), POSTERIOR_LOGVAR_LIMIT)

    def update_statistics(self, raw_mean: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance over what is real; the running ones where that is less than two, as in an empty batch."""
        # sync: only for a batch of one posterior, which a plan for batches of two or more makes empty.
        if mask.numel() == 1 and not self.synchronised and bool(mask.any()):
            raise ValueError(
                f"--posterior {self.name} needs two sequences or more in every batch, got one: raise --batch_size"
            )

        def total(part: Tensor) -> Tensor:
            return over_processes.all_reduce(part) if self.synchronised else part

        rows_NZ, real_N1 = raw_mean.flatten(0, -2), mask.flatten()[:, None]
        count = total(real_N1.sum().float())
        enough, divisor = count >= 2, count.clamp(min=1)
        mean_Z = total((rows_NZ * real_N1).sum(dim=0)) / divisor
        variance_Z = total(((rows_NZ - mean_Z).square() * real_N1).sum(dim=0)) / divisor
        mean_Z, variance_Z = torch.where(enough, mean_Z, self.mean_Z), torch.where(enough, variance_Z, self.variance_Z)
        self.mean_Z.lerp_(mean_Z.detach(), MOMENTUM)
        self.variance_Z.lerp_(variance_Z.detach(), MOMENTUM)
        return mean_Z, variance_Z


class DuPosterior(BatchNormPosterior):
    """Normalised means, and variances of which some are dropped in training (DU-VAE, Shen et al. 2021).

    A variance is c + v with c = LEAST_VARIANCE and v what the encoder says; dropped, it is c, and the others are c + v / (1 - p),
    so that its mean stays. It differs from posterior to posterior then, whatever the encoder does.
    """

    name = "du"

    def logvar_of(self, hidden: Tensor, *, drops: bool) -> Tensor:
        variance = bounded(self.logvar(hidden), POSTERIOR_LOGVAR_LIMIT).exp()
        if drops:
            variance = dropout(variance, VARIANCE_DROPOUT)
        return torch.log(LEAST_VARIANCE + variance)


def make_posterior(settings: ModelSettings) -> GaussianPosterior | BatchNormPosterior:
    """Return the family that --posterior names."""
    sizes = settings.width, settings.latent_size
    match settings.posterior:
        case "gaussian":
            return GaussianPosterior(*sizes)
        case "batch_norm":
            return BatchNormPosterior(*sizes)
        case "du":
            return DuPosterior(*sizes)
        case "flow":
            return FlowPosterior(*sizes, settings.flow_layers)


def normalised(raw_mean: Tensor, mean_Z: Tensor, variance_Z: Tensor) -> Tensor:
    """Return means of deviation DEVIATION around 0, where these are the moments of the raw ones."""
    return DEVIATION * (raw_mean - mean_Z) * variance_Z.clamp(min=SMALLEST_VARIANCE).rsqrt()


def draw(posterior: Posterior, noise: Tensor | None = None) -> Tensor:
    """Draw z = mean + deviation * noise of the Gaussian, so that gradients reach mean and deviation."""
    noise = torch.randn_like(posterior.mean) if noise is None else noise
    return posterior.mean + torch.exp(0.5 * posterior.logvar) * noise


def log_density(posterior: Posterior, drawn: Draw) -> Tensor:
    """Return log q(z | x) of each posterior, (B,) or (B, S)."""
    distance = (drawn.base - posterior.mean).square() * torch.exp(-posterior.logvar)
    log_q = -0.5 * (distance + posterior.logvar + math.log(2 * math.pi)).sum(dim=-1)
    return log_q if drawn.log_det is None else log_q - drawn.log_det


def entropy(posterior: Posterior, drawn: Draw) -> Tensor:
    """Return the entropy of each posterior, (B,) or (B, S): exact of a Gaussian, else with the draw for its change of volume."""
    own = 0.5 * (posterior.logvar + math.log(2 * math.pi * math.e)).sum(dim=-1)
    return own if drawn.log_det is None else own + drawn.log_det


def gaussian_log_density(z: Tensor, mean_KZ: Tensor, logvar_KZ: Tensor) -> Tensor:
    """Return the log density of K diagonal Gaussians at each latent, (..., K), in the latents' own type whatever the precision."""
    mean_KZ, logvar_KZ = mean_KZ.to(z.dtype), logvar_KZ.to(z.dtype)
    precision_KZ = torch.exp(-logvar_KZ)
    constant_K = -0.5 * (mean_KZ.square() * precision_KZ + logvar_KZ + math.log(2 * math.pi)).sum(dim=1)
    with torch.autocast(z.device.type, enabled=False):
        return constant_K + z @ (mean_KZ * precision_KZ).T - 0.5 * z.square() @ precision_KZ.T


def bounded(raw: Tensor, limit: float) -> Tensor:
    """Squash into -limit to limit: close to the identity around 0, with a slope everywhere."""
    return limit * torch.tanh(raw / limit)


# --- Flows -------------------------------------------------------------------------------------------------------------


class Coupling(nn.Module):
    """One layer: keeps the dimensions before the middle and moves those after it, or the other way around. Begins as identity."""

    def __init__(self, latent_size: int, *, moves_first: bool) -> None:
        super().__init__()
        self.middle, self.moves_first = latent_size // 2, moves_first
        kept = latent_size - self.middle if moves_first else self.middle
        self.of_kept = nn.Linear(kept, COUPLING_WIDTH, bias=False)
        self.of_posterior = nn.Linear(2 * latent_size, COUPLING_WIDTH)
        self.out = nn.Linear(COUPLING_WIDTH, 2 * (latent_size - kept))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, z: Tensor, posterior: Tensor) -> tuple[Tensor, Tensor]:
        """Move z; return it and log |dz' / dz|. `posterior` is mean and log-variance, one behind the other."""
        kept, moved = self._split(z)
        log_scale, shift = self._made_of(kept, posterior)
        return self._joined(kept, moved * log_scale.exp() + shift), log_scale.sum(dim=-1)

    def inverse(self, z: Tensor, posterior: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `forward` moves to z, and the log |dz' / dz| of that."""
        kept, moved = self._split(z)
        log_scale, shift = self._made_of(kept, posterior)
        kept = kept.expand(*log_scale.shape[:-1], -1)
        return self._joined(kept, (moved - shift) * torch.exp(-log_scale)), log_scale.sum(dim=-1)

    def _made_of(self, kept: Tensor, posterior: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self.out(torch.tanh(self.of_kept(kept) + self.of_posterior(posterior))).chunk(2, dim=-1)
        return LARGEST_LOG_SCALE * torch.tanh(raw / LARGEST_LOG_SCALE), shift

    def _split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        first, last = z[..., : self.middle], z[..., self.middle :]
        return (last, first) if self.moves_first else (first, last)

    def _joined(self, kept: Tensor, moved: Tensor) -> Tensor:
        return torch.cat((moved, kept) if self.moves_first else (kept, moved), dim=-1)


class Flow(nn.Module):
    """Coupling layers in turn, in float32 whatever the precision."""

    def __init__(self, layers: int, latent_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(latent_size, moves_first=layer % 2 == 1) for layer in range(layers))

    def forward(self, base: Tensor, mean: Tensor, logvar: Tensor) -> tuple[Tensor, Tensor]:
        """Return z and log |dz / dbase| of draws from the Gaussian with these moments."""
        with torch.autocast(base.device.type, enabled=False):
            z, posterior = base, torch.cat((mean, logvar), dim=-1)
            log_det = torch.zeros((), device=base.device)
            for layer in self.layers:
                z, stretched = layer(z, posterior)
                log_det = log_det + stretched
        return z, log_det

    def inverse(self, z: Tensor, mean: Tensor, logvar: Tensor) -> tuple[Tensor, Tensor]:
        """Return the draw that was moved to z, and log |dz / dbase| there; z and moments may broadcast."""
        with torch.autocast(z.device.type, enabled=False):
            base, posterior = z, torch.cat((mean, logvar), dim=-1)
            log_det = torch.zeros((), device=z.device)
            for layer in reversed(self.layers):
                assert isinstance(layer, Coupling)
                base, stretched = layer.inverse(base, posterior)
                log_det = log_det + stretched
        return base, log_det
