"""The posterior q(z | x): the encoder's vectors in, a diagonal Gaussian in float32 out.

Shapes: B sequences, S steps, W width, Z latent dimensions; `hidden` is (B, W) or (B, S, W), and so is what comes out.
"""

from typing import NamedTuple

import torch
import torch.distributed.nn.functional as over_processes
from torch import Tensor, nn

from seqvae.models.embeddings import Float32Linear

POSTERIOR_LOGVAR_LIMIT = 12.0
"""Posterior variances stay within exp(-12) and exp(12), where float32 carries every formula on them."""

DEVIATION = 0.6
"""Standard deviation of batch-normalised means. It keeps the mean KL of each dimension at 0.6^2 / 2 = 0.18 nats or more, 2.9 nats
for 16 dimensions: enough to be worth using. A deviation of 1 would fill the prior with means and leave the variances nothing."""

MOMENTUM = 0.1
"""Share of the newest batch in the statistics that evaluation uses."""

SMALLEST_VARIANCE = 1e-12
"""Means that are all alike have no deviation to divide by."""


class Posterior(NamedTuple):
    """The diagonal Gaussian q(z | x) of each sequence, (B, Z), or of each step, (B, S, Z); float32."""

    mean: Tensor
    logvar: Tensor
    mask: Tensor
    """bool, (B,) or (B, S): what belongs to something real. The sequence of length 0 of an empty batch does not."""


class GaussianPosterior(nn.Module):
    """Mean and log-variance are linear in the encoder's vectors."""

    least_sequences = 1
    """How many real sequences a training batch must hold."""
    synchronised = False
    """Nothing depends on the rest of the batch, so there is nothing to share among processes."""

    def __init__(self, width: int, latent_size: int) -> None:
        super().__init__()
        self.moments = Float32Linear(width, 2 * latent_size)

    def forward(self, hidden: Tensor, mask: Tensor) -> Posterior:
        mean, raw_logvar = self.moments(hidden).chunk(2, dim=-1)
        return Posterior(mean, bounded(raw_logvar, POSTERIOR_LOGVAR_LIMIT), mask)


class BatchNormPosterior(nn.Module):
    """Means of mean 0 and deviation DEVIATION over the batch in each dimension, whatever the encoder does (Zhu et al. 2020).

    The mean KL of a batch is then Z * DEVIATION^2 / 2 or more. The paper adds a learned shift; here there is none: the decoder has
    biases, and all that a shift could do is raise the KL.
    """

    least_sequences = 2
    synchronised = False
    """Whether the statistics are those of all processes' batches together."""

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
        mean_Z, variance_Z = self.update_statistics(raw_mean, mask) if self.training else (self.mean_Z, self.variance_Z)
        mean = DEVIATION * (raw_mean - mean_Z) * variance_Z.clamp(min=SMALLEST_VARIANCE).rsqrt()
        return Posterior(mean, bounded(self.logvar(hidden), POSTERIOR_LOGVAR_LIMIT), mask)

    def update_statistics(self, raw_mean: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance over what is real; the running ones where that is less than two, as in an empty batch."""
        # sync: only for a batch of one posterior, which a plan for batches of two or more makes empty.
        if mask.numel() == 1 and not self.synchronised and bool(mask.any()):
            raise ValueError(
                "--posterior batch_norm needs two sequences or more in every batch, got one: raise --batch_size"
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


def draw(posterior: Posterior) -> Tensor:
    """Draw z = mean + deviation * noise, so that gradients reach mean and deviation."""
    return posterior.mean + torch.exp(0.5 * posterior.logvar) * torch.randn_like(posterior.mean)


def bounded(raw: Tensor, limit: float) -> Tensor:
    """Squash into -limit to limit: close to the identity around 0, with a slope everywhere."""
    return limit * torch.tanh(raw / limit)
