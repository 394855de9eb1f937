"""The sequence VAE: a batch of any kind in, its posterior and the negative log-likelihood of each sequence out, in nats.

    batch -> embedding -> encoder -> pooled -> posterior -> z
                 |                                          |
                 +--> begun, shifted by one step -----> decoder -> likelihood -> nll

With a latent for each step nothing is pooled: the encoder's vector of a step gives the step's posterior, and z enters the
decoder at its step. Where a sequence has an end mark, it is a step with a latent like any other. With both, the sequence's z
is drawn first, and those of the steps given it (`levels.py`); the decoder gets the two side by side.

Shapes: B sequences, T steps, S steps with the end mark (S = T for kinds that have none), W width, Z latent dimensions, Y those
of a step below its sequence's, C classes.
"""

from typing import Any, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.data.batch import Batch, TokenBatch, end_marks, predicted_steps
from seqvae.data.description import DataDescription
from seqvae.models.backbones import Decoder, Encoder
from seqvae.models.codes import CodePosterior, CodePrior, Quantised, UniformCodes, make_codes
from seqvae.models.cpu_kernels import Dropout, HasCpuKernel
from seqvae.models.embeddings import EventEmbedding, PretrainedVectors, TokenEmbedding, VectorEmbedding
from seqvae.models.levels import MakeNoise, StepLatents, StepLevel, side_by_side
from seqvae.models.likelihoods import EventLikelihood, TokenLikelihood, VectorLikelihood, real_steps
from seqvae.models.posteriors import (
    BatchNormPosterior,
    GaussianPosterior,
    Posterior,
    PosteriorFamily,
    draw,
    make_posterior,
)
from seqvae.models.priors import Prior, make_prior

__all__ = ["Posterior", "SequenceVAE", "VAEOutput", "draw", "latents_of"]


class VAEOutput(NamedTuple):
    """The result of a forward pass. Sequences of length 0 have 0 nats and 0 steps."""

    posterior_mean: Tensor
    """(B, Z), or (B, S, Z) with a latent for each step; as in `Posterior`, and so are the next two."""
    posterior_logvar: Tensor
    posterior_mask: Tensor
    nll_B: Tensor
    """-log p(x | z) with one z drawn from the posterior, in nats, summed over the steps of a sequence."""
    steps_B: Tensor
    """How many steps were predicted: the sequence's length, and 1 for its end mark if it has one."""
    class_scores_BC: Tensor | None = None
    """Logits of the supervised head, where the data have labels."""
    kl: Tensor | None = None
    """The KL of each posterior as its prior has it (`Prior.kl`); None: that to N(0, I)."""
    kl_is_estimated: bool = False
    """Whether `kl` is an estimate from the latent that was drawn."""
    steps: StepLatents | None = None
    """Where there are latents of two levels: those of the steps; all else is of the sequences'."""
    codes: Tensor | None = None
    """Of latents that are codes: theirs, (B, H) or (B, S, H); the means are then the vectors that they stand for."""
    commitment_B: Tensor | None = None
    """What the loss adds for them (`Quantised`)."""

    @property
    def posterior(self) -> Posterior:
        return Posterior(self.posterior_mean, self.posterior_logvar, self.posterior_mask)


class Encoding(NamedTuple):
    """What the encoder makes of a batch: all that latents are drawn from."""

    posterior: Posterior
    hidden_BSW: Tensor
    """A vector of each step."""
    mask_BS: Tensor
    """bool: which steps are real."""
    quantised: Quantised | None = None
    """Where latents are codes: these."""


class Latents(NamedTuple):
    """The posteriors of a batch, and a latent drawn from each."""

    posterior: Posterior
    z: Tensor
    """What the decoder gets, (B, Z), (B, S, Z) or, of two levels, (B, S, Z + Y)."""
    top_z: Tensor
    """What was drawn from the posterior: z without the latents of steps below it."""
    kl: Tensor | None
    """As in `VAEOutput`, and so are the next four."""
    kl_is_estimated: bool = False
    steps: StepLatents | None = None
    codes: Tensor | None = None
    commitment_B: Tensor | None = None


class SequenceVAE(nn.Module):
    """Gaussian latents, one for each sequence, each step or both, or codes, and a decoder that gets them at every layer."""

    embedding: TokenEmbedding | VectorEmbedding | EventEmbedding
    likelihood: TokenLikelihood | VectorLikelihood | EventLikelihood
    posterior: GaussianPosterior | BatchNormPosterior | CodePosterior

    def __init__(
        self, description: DataDescription, settings: ModelSettings, pretrained: PretrainedVectors | None = None
    ) -> None:
        super().__init__()
        self.kind, self.settings = description.kind, settings
        width = settings.width
        self.latent_per_step = settings.latent_scope == "step"
        """Whether the one level of latents is that of the steps."""
        self.has_step_latents = settings.latent_scope != "sequence"
        match description.kind:
            case "tokens":
                self.embedding = TokenEmbedding(description.vocabulary_size, width)
                self.likelihood = TokenLikelihood(description.vocabulary_size, width, description.unknown_share)
            case "vectors":
                self.embedding = VectorEmbedding(len(description.names), width)
                self.likelihood = VectorLikelihood(description, width)
            case "events":
                self.embedding = EventEmbedding(description, width, pretrained)
                self.likelihood = EventLikelihood(description, width)
            case _:
                assert_never(description.kind)
        self.input_dropout = Dropout(settings.dropout)
        self.encoder = Encoder(settings)
        if settings.is_discrete:
            self.posterior = make_codes(width, settings)
        else:
            self.posterior = make_posterior(settings)
        self.prior = (
            UniformCodes(settings.codes, settings.codebooks) if settings.is_discrete else make_prior(settings, self)
        )
        self.step_level = StepLevel(settings) if settings.latent_scope == "both" else None
        self.decoder = Decoder(settings)
        self.classifier = nn.Linear(settings.latent_size, len(description.classes)) if description.classes else None
        # A decoder that does not look at its inputs has no use for hiding them. Vectors that nothing looks at do not train: the
        # processes of a parallel run would wait for their gradients.
        self.word_dropout = settings.word_dropout if self.decoder.autoregressive else 0.0
        self.end_has_latent = self.has_step_latents and self.likelihood.extra_steps > 0
        self.begin_W = nn.Parameter(torch.randn(width))
        self.end_W = nn.Parameter(torch.randn(width), requires_grad=self.end_has_latent)
        self.dropped_W = nn.Parameter(torch.randn(width), requires_grad=self.word_dropout > 0)

    def __repr__(self) -> str:
        """Describe the network in a few lines; each part, such as `network.decoder`, shows its layers by itself."""
        own = self.settings
        sizes = {name: sum(one.numel() for one in part.parameters()) for name, part in self.named_children()}
        parts = ", ".join(f"{name} {size / 1e3:,.0f} k" for name, size in sizes.items() if size)
        posterior = f"{own.posterior} posterior"
        if isinstance(self.posterior, CodePosterior):
            posterior = self.posterior.described()
        return (
            f"SequenceVAE of {self.kind}: {own.encoder} encoder, {own.decoder} decoder, width {own.width}, depth {own.depth}\n"
            f"  {own.described_latent}, {posterior}\n"
            f"  {sum(one.numel() for one in self.parameters()) / 1e6:.2f} M parameters: {parts}"
        )

    def forward(self, batch: Batch, *, at_mean: bool = False) -> VAEOutput:
        """Encode a batch, draw z, or with `at_mean` take the posterior's mean for it, and compute the likelihood given z."""
        steps_BTW = self.embedding(batch)
        latents = self.latents(batch, steps_BTW, at_mean=at_mean)
        posterior, z, _, kl, kl_is_estimated, steps, codes, commitment_B = latents
        nll_B = self.likelihood(self.decode_hidden(steps_BTW, z), batch).sum(dim=1)
        class_scores_BC = None
        if self.classifier is not None:
            mean = posterior.mean
            class_scores_BC = self.classifier(mean_over_steps(mean, posterior.mask) if self.latent_per_step else mean)
        of_batch, of_codes = (nll_B, predicted_steps(batch), class_scores_BC), (codes, commitment_B)
        return VAEOutput(*posterior, *of_batch, kl, kl_is_estimated, steps, *of_codes)

    def latents(self, batch: Batch, steps_BTW: Tensor | None = None, *, at_mean: bool = False) -> Latents:
        """Return the posteriors of a batch and a latent of each; `steps_BTW` are the embedded steps, where known already."""
        # Not by `encode`, which is an entrance from outside: where weights are shared out, it frees them at its end.
        encoding = self.encoding(batch, steps_BTW)
        return self.draw(encoding, encoding.posterior.mean.new_zeros if at_mean else None)

    def encoding(self, batch: Batch, steps_BTW: Tensor | None = None) -> Encoding:
        """Return what latents of a batch are drawn from; `steps_BTW` as in `latents`."""
        hidden_BSW, seen_BS, is_real_B = self._read(batch, self.embedding(batch) if steps_BTW is None else steps_BTW)
        hidden, mask = self._pooled(hidden_BSW, seen_BS, is_real_B)
        real_BS = seen_BS & is_real_B[:, None]
        if isinstance(self.posterior, CodePosterior):
            quantised = self.posterior.quantise(hidden, mask)
            return Encoding(self.posterior.as_posterior(quantised, mask), hidden_BSW, real_BS, quantised)
        return Encoding(self.posterior(hidden, mask), hidden_BSW, real_BS)

    def draw(self, encoding: Encoding, noise: MakeNoise | None = None) -> Latents:
        """Draw the latents of a batch, that of a sequence before those of its steps; without `noise` by torch's own."""
        posterior = encoding.posterior
        drawn = self.posterior.draw(posterior, None if noise is None else noise(posterior.mean.shape))
        if encoding.quantised is not None:
            assert isinstance(self.prior, CodePrior)
            _, codes, commitment_B = encoding.quantised
            nll = self.prior.nll(codes)[..., None]
            return Latents(posterior, drawn.z, drawn.z, nll, codes=codes, commitment_B=commitment_B)
        kl, is_estimated = self.prior.kl(posterior, drawn), self.prior.estimates_kl(drawn)
        latents = Latents(posterior, drawn.z, drawn.z, kl, is_estimated)
        if self.step_level is None:
            return latents
        steps = self.draw_steps(drawn.z, encoding, noise)
        return latents._replace(z=side_by_side(drawn.z, steps.z), steps=steps)

    def draw_steps(self, z_BZ: Tensor, encoding: Encoding, noise: MakeNoise | None = None) -> StepLatents:
        """Draw the latents of steps given those of their sequences."""
        assert self.step_level is not None
        steps: StepLatents = self.step_level(z_BZ, encoding.hidden_BSW, encoding.mask_BS, noise)
        return steps

    def with_steps(self, z_BZ: Tensor, relative_BSY: Tensor) -> Tensor:
        """Return what the decoder gets of a sequence's latent and of its steps', these in units of the prior that z gives them."""
        assert self.step_level is not None
        return side_by_side(z_BZ, self.step_level.prior(z_BZ, relative_BSY.shape[1]).place(relative_BSY))

    def encode(self, batch: Batch, steps_BTW: Tensor | None = None) -> Posterior:
        """Return the posterior of each sequence, or of each step where it alone has one; `steps_BTW` as in `latents`."""
        return self.encoding(batch, steps_BTW).posterior

    def posteriors_of_steps(self, steps_NLW: Tensor) -> Posterior:
        """Return the posteriors of sequences of embedded steps, one behind the other, (K, Z), as evaluation has them."""
        real_NL = torch.ones(steps_NLW.shape[:2], dtype=torch.bool, device=steps_NLW.device)
        hidden_NLW = self.encoder(steps_NLW, real_NL)
        features_KW = hidden_NLW.flatten(0, 1) if self.latent_per_step else self.pool(hidden_NLW, real_NL)
        return self.posterior.at_rest(features_KW, real_NL.new_ones(len(features_KW)))

    def codes_of(self, batch: Batch) -> tuple[Tensor, int, Tensor]:
        """Return the codes of each sequence or step, how many a codebook has, and what of them is real."""
        latents = self.latents(batch)
        assert latents.codes is not None, "latents are no codes"
        return latents.codes, self.settings.codes, latents.posterior.mask

    def latent_at_mean(self, batch: Batch) -> Tensor:
        """Return the latent at the mean of each posterior: what stands for a sequence where nothing is drawn."""
        return self.latents(batch, at_mean=True).z

    def features(self, batch: Batch, steps_BTW: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the posterior is computed from, (B, W) or (B, S, W), and what of it is real."""
        return self._pooled(*self._read(batch, steps_BTW))

    def _read(self, batch: Batch, steps_BTW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the encoder's vector of each step, which steps it has seen, (B, S), and which sequences are real, (B,)."""
        # A sequence of length 0 counts as one of length 1: attention to nothing at all would be NaN.
        is_real_B, seen_B = batch.lengths_B > 0, batch.lengths_B.clamp(min=1)
        if self.end_has_latent:  # one step more, and the end mark, if there is one, right behind the last real step
            assert isinstance(batch, TokenBatch)
            steps_BTW = F.pad(steps_BTW, (0, 0, 0, 1))
            is_end_BS = torch.arange(steps_BTW.shape[1], device=seen_B.device) == seen_B[:, None]
            steps_BTW, seen_B = torch.where(is_end_BS[..., None], self.end_W, steps_BTW), seen_B + end_marks(batch)
        seen_BS = real_steps(seen_B, steps_BTW.shape[1])
        return self.encoder(self.input_dropout(steps_BTW), seen_BS), seen_BS, is_real_B

    def _pooled(self, hidden_BSW: Tensor, seen_BS: Tensor, is_real_B: Tensor) -> tuple[Tensor, Tensor]:
        if self.latent_per_step:
            return hidden_BSW, seen_BS & is_real_B[:, None]
        return self.pool(hidden_BSW, seen_BS), is_real_B

    def pool(self, hidden_BSW: Tensor, real_BS: Tensor) -> Tensor:
        """Return what stands for all real steps of a sequence, of which each has one or more, (B, W)."""
        match self.settings.pooling:
            case "mean":
                return mean_over_steps(hidden_BSW, real_BS)
            case "max":
                return hidden_BSW.masked_fill(~real_BS[..., None], -torch.inf).amax(dim=1)
            case "last":
                return hidden_BSW[torch.arange(len(hidden_BSW), device=hidden_BSW.device), real_BS.sum(dim=1) - 1]

    def decode_hidden(self, steps_BTW: Tensor, z: Tensor) -> Tensor:
        """Return the decoder's vector of each step, (B, S, W), given z and the embedded steps before it."""
        return self.decoder(self.decoder_inputs(steps_BTW), z)

    def decoder_inputs(self, steps_BTW: Tensor) -> Tensor:
        """Return what the decoder sees at each step, (B, S, W): the begin mark, then the steps before it; in training not all."""
        if self.training and self.word_dropout > 0:
            drop_BT1 = torch.rand(steps_BTW.shape[:2], device=steps_BTW.device)[..., None] < self.word_dropout
            steps_BTW = torch.where(drop_BT1, self.dropped_W, steps_BTW)
        begin_B1W = self.begin_W.expand(steps_BTW.shape[0], 1, -1)  # as a number of its own, which export leaves open
        inputs_BSW = torch.cat((begin_B1W, steps_BTW), dim=1)[:, : steps_BTW.shape[1] + self.likelihood.extra_steps]
        return self.input_dropout(inputs_BSW)

    @property
    def has_codes(self) -> bool:
        """Whether latents are codes."""
        return isinstance(self.posterior, CodePosterior)

    def decode(self, batch: Batch, z: Tensor) -> Tensor:
        """Return -log p of each step given z, or its codes, and the steps before it, (B, S); 0 where padded."""
        if isinstance(self.posterior, CodePosterior) and not z.is_floating_point():
            z = self.posterior.vectors_of(z)
        return self.likelihood(self.decode_hidden(self.embedding(batch), z), batch)

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        """Return -log p of each sequence, (B,), given z as the decoder gets it."""
        return self.decode(batch, z).sum(dim=1)

    def nll_given_level(self, batch: Batch, z: Tensor, *, of_steps: bool) -> Tensor:
        """Return -log p of each sequence, (B,), given latents of one of two levels beside its own of the other.

        Those of sequences are (B, Z); those of steps, (B, S, Y), are in units of their prior, so that they hold nothing of a
        sequence but what its own z does not say. The own are z at its mean, and steps drawn with the same noise in every call.
        """
        steps_BTW = self.embedding(batch)
        own = self.latents(batch, steps_BTW, at_mean=True)
        assert own.steps is not None
        top_z, relative_BSY = own.top_z, z
        if not of_steps:
            noise = torch.randn(own.steps.drawn.shape, generator=torch.Generator().manual_seed(0))
            top_z, relative_BSY = z, draw(own.steps.relative, noise.to(z.device))
        hidden_BSW = self.decode_hidden(steps_BTW, self.with_steps(top_z, relative_BSY))
        return self.likelihood(hidden_BSW, batch).sum(dim=1)

    def step_posterior(self, batch: Batch) -> Posterior:
        """Return the posterior of each step, in units of its prior, below its sequence's latent at the mean."""
        steps = self.latents(batch, at_mean=True).steps
        assert steps is not None
        return steps.relative

    def latent_scores(self, batch: Batch, draws: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the escape threshold is estimated from (`LatentScores` of the monitors), for a latent of each sequence.

        These are the gradients of log p by what z adds to the decoder's layers, at z = 0, of the data, (P, B, M), and of targets
        that the decoder draws, (K, B, M); and what the posterior's mean is linear in. The decoder is as in training, the encoder
        is not; where there is dropout, each draw has a pass with a mask of its own.
        """
        with torch.no_grad():
            steps_BTW = self.embedding(batch)
            features_BW, _ = self.features(batch, steps_BTW)
        nll_of_drawn: Any = self.likelihood.nll_of_drawn
        parts = (self, *self.decoder.modules(), *self.likelihood.modules(), self.input_dropout)
        modes = [(part, part.training, part._compiled_call_impl) for part in parts]
        data, drawn, passes = [], [], draws if max(self.word_dropout, self.settings.dropout) > 0 else 1
        try:
            for part in parts:
                part.training, part._compiled_call_impl = True, None  # compiled code goes backward only once
            with torch.enable_grad():
                for _ in range(passes):
                    added_B1M = self.decoder.latent.bias.detach().expand(len(steps_BTW), 1, -1).clone().requires_grad_()
                    hidden_BSW = self.decoder.add_at_layers(self.decoder_inputs(steps_BTW), added_B1M)
                    data.append(_gradient(-self.likelihood(hidden_BSW, batch), added_B1M))
                    for _ in range(draws // passes):
                        nll_BS = nll_of_drawn(hidden_BSW, batch, int(torch.randint(2**62, ())))
                        drawn.append(_gradient(-nll_BS, added_B1M))
        finally:
            for part, mode, compiled in modes:
                part.training, part._compiled_call_impl = mode, compiled
        return torch.stack(data), torch.stack(drawn), features_BW

    def use_gradient_checkpointing(self) -> None:
        """Forget the inner results of each layer and compute them again in the backward pass."""
        self.encoder.blocks.recomputes_activations = self.decoder.blocks.recomputes_activations = True

    def use_torch_operations(self) -> None:
        """Leave to torch what `cpu_kernels` computes otherwise."""
        for module in self.modules():
            if isinstance(module, HasCpuKernel):
                module.kernel_enabled = False

    def compile_inner(self, mode: str) -> None:
        """Compile the layers in place, so that weights keep their names."""
        self.encoder.blocks.compile_each(mode)
        self.decoder.blocks.compile_each(mode)


def latents_of(network: nn.Module) -> tuple[PosteriorFamily, Prior]:
    """Return a network's family of posteriors and its prior; of another kind than ours, Gaussians and N(0, I)."""
    if isinstance(network, SequenceVAE):
        return network.posterior, network.prior
    return PosteriorFamily(), Prior()


def _gradient(log_p: Tensor, added_B1M: Tensor) -> Tensor:
    """Return the gradient of log p of each sequence by what is added, (B, M); the graph stays for the next."""
    (gradient_B1M,) = torch.autograd.grad(log_p.sum(), added_B1M, retain_graph=True)
    return gradient_B1M.squeeze(1)


def mean_over_steps(vectors_BSR: Tensor, mask_BS: Tensor) -> Tensor:
    """Return the mean over the steps where the mask is true; 0 where it is true nowhere."""
    return (vectors_BSR * mask_BS[..., None]).sum(dim=1) / mask_BS.sum(dim=1, keepdim=True).clamp(min=1)
