"""The settings of the model. Imports nothing heavy, since `--help` imports it."""

from dataclasses import dataclass
from typing import Literal

from seqvae.config.run import refuse_below

Architecture = Literal["transformer", "lstm", "tcn"]

LARGEST_ALPHA = 0.99
"""The largest weight of a step's latent on the next one's that --prior autoregressive may learn."""
LARGEST_LEAST_RATE = 0.34
"""Nats of a dimension that --prior autoregressive can hold a step to, with that weight: log(1 + alpha^2) / 2."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Model"""

    encoder: Architecture = "transformer"
    """What reads a sequence: attention, a recurrent network (in both directions), or dilated convolutions."""

    decoder: Literal["transformer", "lstm", "tcn", "parallel"] = "transformer"
    """What predicts each step from those before it and the latent; parallel: from the latent and the step's position alone."""

    width: int = 128
    """Numbers that describe a step inside the network."""

    depth: int = 2
    """Layers of the encoder, and as many of the decoder."""

    heads: int = 4
    """Attention heads of a layer, which share the width among them; lstm and tcn have none."""

    latent_size: int = 16
    """Dimensions of the latent Gaussian."""

    pooling: Literal["mean", "max", "last"] = "mean"
    """What the posterior of a sequence is computed from: the mean of the encoder's vectors over the steps, the largest of each of
    their numbers, or the vector of the last step."""

    latent_scope: Literal["sequence", "step", "both"] = "sequence"
    """One latent for a whole sequence, or one for each of its steps; both: one for the sequence, and below it one for each step,
    whose prior follows from that of the sequence."""

    step_latent_size: int = 16
    """Dimensions of the latent of each step with --latent_scope both; those of the sequence are --latent_size."""

    prior: Literal["standard", "mixture", "vamp", "autoregressive"] = "standard"
    """What latents are held against, and where new sequences come from: the standard normal distribution, a mixture of learned
    Gaussians, one of the posteriors of learned pseudo-inputs, or, with --latent_scope step, Gaussians that follow each other."""

    prior_components: int = 32
    """Gaussians of --prior mixture, and posteriors of --prior vamp."""

    least_rate: float = 0.0
    """Nats per step that the KL cannot fall below, with --prior autoregressive, in sequences of two steps or more."""

    posterior: Literal["gaussian", "batch_norm"] = "gaussian"
    """batch_norm: the posterior means are normalised over each batch, which keeps the KL above a floor."""

    dropout: float = 0.1
    """Share of each layer's output that is set to zero in training."""

    word_dropout: float = 0.0
    """Share of the steps hidden from the decoder's input in training: what it cannot look up, it must take from the latent."""

    @property
    def decoded_size(self) -> int:
        """Numbers of all latents that the decoder gets at a step."""
        return self.latent_size + (self.step_latent_size if self.latent_scope == "both" else 0)

    @property
    def described_latent(self) -> str:
        """What has a latent of how many dimensions."""
        if self.latent_scope == "both":
            return f"{self.latent_size} latent dimensions for each sequence, {self.step_latent_size} below it for each step"
        return f"{self.latent_size} latent dimensions for each {self.latent_scope}"

    @property
    def attention_steps(self) -> float | None:
        """Length of a sequence at which attention takes as long as all else in the layers: 4 T W beside 24 W^2 operations per step
        and layer. Measured on a CPU, forward and backward: 6.0 W at width 128, at 256 5.2 W in bf16 and 5.8 W in float32. Where one
        of encoder and decoder has no attention, twice that; None: neither has."""
        attending = [self.encoder == "transformer", self.decoder in ("transformer", "parallel")]
        return 6.0 * self.width * len(attending) / sum(attending) if any(attending) else None

    def __post_init__(self) -> None:
        refuse_below(1, self, "width", "depth", "heads", "latent_size", "step_latent_size", "prior_components")
        if self.width % 2:
            raise ValueError(f"--width must be an even number, got {self.width}")
        if {self.encoder, self.decoder} & {"transformer", "parallel"} and self.width % (2 * self.heads):
            raise ValueError(
                f"--width must be a multiple of twice --heads (each head turns pairs of numbers), got {self.width} for "
                f"{self.heads} heads"
            )
        if self.pooling != "mean" and self.latent_scope == "step":
            raise ValueError(
                f"--pooling {self.pooling} has no effect with --latent_scope step, which pools nothing: leave it out"
            )
        if self.prior == "autoregressive" and self.latent_scope != "step":
            raise ValueError("--prior autoregressive goes from step to step: it needs --latent_scope step")
        if self.least_rate and self.prior != "autoregressive":
            raise ValueError(f"--least_rate {self.least_rate:g} needs --prior autoregressive")
        if not 0 <= self.least_rate <= LARGEST_LEAST_RATE * self.latent_size:
            raise ValueError(
                f"--least_rate must be from 0 to {LARGEST_LEAST_RATE:g} nats for each of the {self.latent_size} latent dimensions, "
                f"{LARGEST_LEAST_RATE * self.latent_size:g} in all, got {self.least_rate:g}"
            )
        for name in ("dropout", "word_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 0 or more and below 1, got {getattr(self, name)}")
