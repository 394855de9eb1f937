"""The sequence VAE: a batch of any kind in, its posterior and the negative log-likelihood of each sequence out, in nats.

    batch -> embedding -> encoder -> pooled -> posterior -> z
                 |                                          |
                 +--> begun, shifted by one step -----> decoder -> likelihood -> nll

Shapes: B sequences, T steps (S: with the end mark, for kinds that have one), W width, Z latent dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.embeddings import GivenVectors, make_embedding
from models.likelihoods import make_likelihood
from models.pieces import bounded, in_float32, real_steps
from models.settings import ModelSettings
from models.transformer import TransformerDecoder, TransformerEncoder
from sequences.batches import Batch
from sequences.description import DataDescription

POSTERIOR_LOGVAR_LIMIT = 12.0
"""Posterior variances stay within exp(-12) and exp(12), where float32 carries every formula on them."""


class Posterior(NamedTuple):
    """The diagonal Gaussian q(z | x) of each sequence, in float32."""

    mean_BZ: Tensor
    logvar_BZ: Tensor


class VAEOutput(NamedTuple):
    """What a forward pass says about a batch. The sequence of length 0 of an empty batch has 0 nats and 0 steps."""

    posterior_mean_BZ: Tensor
    posterior_logvar_BZ: Tensor
    nll_B: Tensor
    """-log p(x | z) with one z drawn from the posterior, in nats, summed over the steps of a sequence."""
    steps_B: Tensor
    """How many steps were predicted: the sequence's length, and 1 for its end mark if the kind has one."""


class SequenceVAE(nn.Module):
    """One latent Gaussian for each sequence, an autoregressive decoder that is told it at every layer."""

    def __init__(
        self, description: DataDescription, settings: ModelSettings, given: GivenVectors | None = None
    ) -> None:
        super().__init__()
        width = settings.width
        self.word_dropout = settings.word_dropout
        self.embedding = make_embedding(description, width, given)
        self.encoder = TransformerEncoder(settings)
        self.posterior = nn.Linear(width, 2 * settings.latent_size)
        self.begin_W = nn.Parameter(torch.randn(width))
        self.dropped_W = nn.Parameter(torch.randn(width))
        self.input_dropout = nn.Dropout(settings.dropout)
        self.decoder = TransformerDecoder(settings)
        self.likelihood = make_likelihood(description, width)

    def forward(self, batch: Batch) -> VAEOutput:
        steps_BTW = self.embedding(batch)
        posterior = self._posterior(steps_BTW, batch.lengths_B)
        nll_BS = self._nll(steps_BTW, batch, draw(posterior))
        steps_B = (batch.lengths_B + self.likelihood.extra_steps) * (batch.lengths_B > 0)
        return VAEOutput(posterior.mean_BZ, posterior.logvar_BZ, nll_BS.sum(dim=1), steps_B)

    def encode(self, batch: Batch) -> Posterior:
        return self._posterior(self.embedding(batch), batch.lengths_B)

    def decode(self, batch: Batch, z_BZ: Tensor) -> Tensor:
        """-log p of each step given z and the steps before it, (B, T), or (B, T + 1) with the end mark; 0 where padded."""
        return self._nll(self.embedding(batch), batch, z_BZ)

    def _posterior(self, steps_BTW: Tensor, lengths_B: Tensor) -> Posterior:
        # A sequence of length 0 is taken for one of length 1: attention to nothing at all would be NaN.
        real_BT = real_steps(lengths_B.clamp(min=1), steps_BTW.shape[1])
        hidden_BTW = self.encoder(self.input_dropout(steps_BTW), real_BT)
        pooled_BW = (hidden_BTW * real_BT[..., None]).sum(dim=1) / real_BT.sum(dim=1, keepdim=True)
        mean_BZ, raw_logvar_BZ = in_float32(self.posterior, pooled_BW).chunk(2, dim=-1)
        return Posterior(mean_BZ, bounded(raw_logvar_BZ, POSTERIOR_LOGVAR_LIMIT))

    def _nll(self, steps_BTW: Tensor, batch: Batch, z_BZ: Tensor) -> Tensor:
        before_BTW = self._drop_words(steps_BTW)
        begin_B1W = self.begin_W.expand(len(before_BTW), 1, -1)
        inputs_BSW = torch.cat((begin_B1W, before_BTW), dim=1)[:, : steps_BTW.shape[1] + self.likelihood.extra_steps]
        return self.likelihood(self.decoder(self.input_dropout(inputs_BSW), z_BZ), batch)

    def _drop_words(self, steps_BTW: Tensor) -> Tensor:
        if not self.training or self.word_dropout == 0:
            return steps_BTW
        drop_BT1 = torch.rand(steps_BTW.shape[:2], device=steps_BTW.device)[..., None] < self.word_dropout
        return torch.where(drop_BT1, self.dropped_W, steps_BTW)


def draw(posterior: Posterior) -> Tensor:
    """z = mean + deviation * noise, so that gradients reach mean and deviation."""
    return posterior.mean_BZ + torch.exp(0.5 * posterior.logvar_BZ) * torch.randn_like(posterior.mean_BZ)
