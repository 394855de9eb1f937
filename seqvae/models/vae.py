"""The sequence VAE: a batch of any kind in, its posterior and the negative log-likelihood of each sequence out, in nats.

    batch -> embedding -> encoder -> pooled -> posterior -> z
                 |                                          |
                 +--> begun, shifted by one step -----> decoder -> likelihood -> nll

With a latent for each step nothing is pooled: the encoder's vector of a step gives the step's posterior, and z enters the
decoder at its step. Where sequences have an end mark, it is a step with a latent like any other.

Shapes: B sequences, T steps, S steps with the end mark (S = T for kinds that have none), W width, Z latent dimensions, C classes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.data.batch import Batch
from seqvae.data.description import DataDescription
from seqvae.models.backbones import Decoder, Encoder
from seqvae.models.blocks.pieces import Dropout, real_steps
from seqvae.models.embeddings import GivenVectors, make_embedding
from seqvae.models.likelihoods import TokenLikelihood, make_likelihood
from seqvae.models.posteriors import Posterior, draw, make_posterior

__all__ = ["Posterior", "SequenceVAE", "VAEOutput", "draw"]


class VAEOutput(NamedTuple):
    """What a forward pass says about a batch. Sequences of length 0 have 0 nats and 0 steps."""

    posterior_mean: Tensor
    """(B, Z), or (B, S, Z) with a latent for each step; as in `Posterior`, and so are the next two."""
    posterior_logvar: Tensor
    posterior_mask: Tensor
    nll_B: Tensor
    """-log p(x | z) with one z drawn from the posterior, in nats, summed over the steps of a sequence."""
    steps_B: Tensor
    """How many steps were predicted: the sequence's length, and 1 for its end mark if the kind has one."""
    class_scores_BC: Tensor | None = None
    """Logits of the supervised head, where the data have labels."""


class SequenceVAE(nn.Module):
    """Gaussian latents, one for each sequence or each step, and a decoder that is told them at every layer."""

    def __init__(
        self, description: DataDescription, settings: ModelSettings, given: GivenVectors | None = None
    ) -> None:
        super().__init__()
        width = settings.width
        self.latent_per_step = settings.latent_scope == "step"
        self.embedding = make_embedding(description, width, given)
        self.likelihood = make_likelihood(description, width)
        self.input_dropout = Dropout(settings.dropout)
        self.encoder = Encoder(settings)
        self.posterior = make_posterior(settings)
        self.decoder = Decoder(settings)
        self.classifier = nn.Linear(settings.latent_size, len(description.classes)) if description.classes else None
        # A decoder that does not look at its inputs has no use for hiding them. Vectors that nothing looks at do not train: the
        # processes of a parallel run would wait for their gradients.
        self.word_dropout = settings.word_dropout if self.decoder.autoregressive else 0.0
        self.end_has_latent = self.latent_per_step and self.likelihood.extra_steps > 0
        self.begin_W = nn.Parameter(torch.randn(width))
        self.end_W = nn.Parameter(torch.randn(width), requires_grad=self.end_has_latent)
        self.dropped_W = nn.Parameter(torch.randn(width), requires_grad=self.word_dropout > 0)

    @property
    def least_sequences(self) -> int:
        """How many real sequences a training batch must hold."""
        return self.posterior.least_sequences

    @property
    def synchronise_batch_norm(self) -> bool:
        """Whether the statistics of --posterior batch_norm are those of all processes together."""
        return self.posterior.synchronised

    @synchronise_batch_norm.setter
    def synchronise_batch_norm(self, synchronised: bool) -> None:
        self.posterior.synchronised = synchronised

    def forward(self, batch: Batch) -> VAEOutput:
        return self._output(batch, draw)

    def at_mean(self, batch: Batch) -> VAEOutput:
        """As forward, with the posterior's mean for z: nothing is drawn."""
        return self._output(batch, lambda posterior: posterior.mean)

    def _output(self, batch: Batch, choose: Callable[[Posterior], Tensor]) -> VAEOutput:
        steps_BTW = self.embedding(batch)
        posterior = self._posterior(steps_BTW, batch.lengths_B)
        nll_B = self._nll(steps_BTW, batch, choose(posterior)).sum(dim=1)
        steps_B = (batch.lengths_B + self.likelihood.extra_steps) * (batch.lengths_B > 0)
        return VAEOutput(*posterior, nll_B, steps_B, self._class_scores(posterior))

    def encode(self, batch: Batch) -> Posterior:
        return self._posterior(self.embedding(batch), batch.lengths_B)

    def decode(self, batch: Batch, z: Tensor) -> Tensor:
        """-log p of each step given z and the steps before it, (B, S); 0 where padded."""
        return self._nll(self.embedding(batch), batch, z)

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        """-log p of each sequence given z, (B,)."""
        return self.decode(batch, z).sum(dim=1)

    def decoder_says(self, steps_BTW: Tensor, z: Tensor) -> Tensor:
        """Of each step, (B, S, W), given z and the embedded steps before it: what the likelihood goes by."""
        before_BTW = self._drop_words(steps_BTW)
        begin_B1W = self.begin_W.expand(len(before_BTW), 1, -1)
        inputs_BSW = torch.cat((begin_B1W, before_BTW), dim=1)[:, : steps_BTW.shape[1] + self.likelihood.extra_steps]
        return self.decoder(self.input_dropout(inputs_BSW), z)

    def use_gradient_checkpointing(self) -> None:
        """Forget the inner results of each layer and compute them anew on the way back."""
        for backbone in (self.encoder, self.decoder):
            backbone.blocks.forgetful = True

    def use_plain_operations(self) -> None:
        """Leave to torch what is otherwise written out by hand."""
        for module in self.modules():
            if isinstance(module, Dropout | Encoder | Decoder | TokenLikelihood):
                module.by_hand = False

    def compile_inner(self, mode: str) -> None:
        """In place, so that weights keep their names."""
        for backbone in (self.encoder, self.decoder):
            backbone.blocks.compile_each(mode)

    def _posterior(self, steps_BTW: Tensor, lengths_B: Tensor) -> Posterior:
        # A sequence of length 0 is taken for one of length 1: attention to nothing at all would be NaN.
        seen_B = lengths_B.clamp(min=1)
        if self.end_has_latent:
            steps_BTW, seen_B = with_end(steps_BTW, seen_B, self.end_W), seen_B + 1
        real_BS = real_steps(seen_B, steps_BTW.shape[1])
        hidden_BSW = self.encoder(self.input_dropout(steps_BTW), real_BS)
        if self.latent_per_step:
            return self.posterior(hidden_BSW, real_BS & (lengths_B > 0)[:, None])
        return self.posterior(mean_over_steps(hidden_BSW, real_BS), lengths_B > 0)

    def _nll(self, steps_BTW: Tensor, batch: Batch, z: Tensor) -> Tensor:
        return self.likelihood(self.decoder_says(steps_BTW, z), batch)

    def _drop_words(self, steps_BTW: Tensor) -> Tensor:
        if not self.training or self.word_dropout == 0:
            return steps_BTW
        drop_BT1 = torch.rand(steps_BTW.shape[:2], device=steps_BTW.device)[..., None] < self.word_dropout
        return torch.where(drop_BT1, self.dropped_W, steps_BTW)

    def _class_scores(self, posterior: Posterior) -> Tensor | None:
        if self.classifier is None:
            return None
        mean_BZ = mean_over_steps(posterior.mean, posterior.mask) if self.latent_per_step else posterior.mean
        return self.classifier(mean_BZ)


def with_end(steps_BTW: Tensor, lengths_B: Tensor, end_W: Tensor) -> Tensor:
    """One step more, and `end_W` right behind the last real step of each sequence."""
    longer_BSW = F.pad(steps_BTW, (0, 0, 0, 1))
    is_end_BS = torch.arange(longer_BSW.shape[1], device=lengths_B.device) == lengths_B[:, None]
    return torch.where(is_end_BS[..., None], end_W, longer_BSW)


def mean_over_steps(vectors_BSR: Tensor, mask_BS: Tensor) -> Tensor:
    """Of those steps that the mask says; 0 where it says none."""
    return (vectors_BSR * mask_BS[..., None]).sum(dim=1) / mask_BS.sum(dim=1, keepdim=True).clamp(min=1)
