"""The settings of the model. Imports nothing heavy, since `--help` imports it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
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

    posterior: Literal["gaussian", "batch_norm", "du", "flow"] = "gaussian"
    """batch_norm: the posterior means are normalised over each batch, which keeps the KL above a floor; du: and some of the
    variances dropped in training; flow: draws from the Gaussian are moved by --flow_layers."""

    flow_layers: int = 4
    """Coupling layers of --posterior flow."""

    latent: Literal["gaussian", "discrete"] = "gaussian"
    """What a latent is: numbers with a distribution, or codes, each one of a few vectors."""

    codebook: Literal["vq", "fsq"] = "vq"
    """Where the vectors of --latent discrete come from: vq learns them, as means of what the encoder writes; fsq takes the points
    of a grid, which need no learning."""

    codes: int = 512
    """Vectors in a codebook of --latent discrete."""

    codebooks: int = 1
    """Codes of each latent of --latent discrete, each with a codebook of its own for its share of the --latent_size."""

    commitment: float = 0.25
    """Pull of --codebook vq on what the encoder writes, towards the vector that stands for it."""

    revive_codes: bool = True
    """Give vectors of --codebook vq that nothing falls to any more to what the encoder has written lately."""

    dropout: float = 0.1
    """Share of each layer's output that is set to zero in training."""

    word_dropout: float = 0.0
    """Share of the steps hidden from the decoder's input in training: what it cannot look up, it must take from the latent."""

    @property
    def is_discrete(self) -> bool:
        return self.latent == "discrete"

    @property
    def decoded_size(self) -> int:
        """Numbers of all latents that the decoder gets at a step."""
        return self.latent_size + (self.step_latent_size if self.latent_scope == "both" else 0)

    @property
    def watched_levels(self) -> tuple[str | None, ...]:
        """The `level` of a PosteriorMetricsMonitor for each level of latents; None: the only one, or the uppermost."""
        return (None, "step") if self.latent_scope == "both" else (None,)

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
        sizes = (
            "width",
            "depth",
            "heads",
            "latent_size",
            "step_latent_size",
            "prior_components",
            "flow_layers",
            "codebooks",
        )
        refuse_below(1, self, *sizes)
        refuse_below(2, self, "codes")
        refuse_below(0, self, "commitment")
        self._refuse_mixed_latents()
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
        if self.posterior == "flow" and self.latent_size < 2:
            raise ValueError(
                "--posterior flow moves some dimensions by what others are: it needs --latent_size 2 or more"
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

    def _refuse_mixed_latents(self) -> None:
        """Refuse flags of Gaussian latents beside codes, flags of codes beside Gaussians, and codebooks that cannot be."""
        defaults = {each.name: each.default for each in fields(self)}

        def refuse(names: tuple[str, ...], reason: str) -> None:
            for name in names:
                if (value := getattr(self, name)) != defaults[name]:
                    raise ValueError(f"--{name} {str(value).lower()} {reason}")

        if not self.is_discrete:
            refuse(("codebook", "codes", "codebooks", "commitment", "revive_codes"), "needs --latent discrete")
            return
        if self.latent_scope == "both":
            raise ValueError(
                "--latent_scope both is for Gaussian latents: give --latent discrete a scope of sequence or step"
            )
        refuse(
            ("posterior", "flow_layers", "prior", "prior_components", "least_rate"),
            "is for Gaussian latents, and --latent discrete has codes",
        )
        if self.latent_size % self.codebooks:
            raise ValueError(
                f"--latent_size must be a multiple of --codebooks, got {self.latent_size} for {self.codebooks} codebooks"
            )
        if self.codebook == "vq":
            return
        refuse(("commitment", "revive_codes"), "is for --codebook vq: the grid of fsq neither pulls nor loses codes")
        share, levels = self.latent_size // self.codebooks, fsq_levels(self.codes)
        if levels is None:
            below = next(codes for codes in range(self.codes - 1, 0, -1) if fsq_levels(codes))
            above = next(codes for codes in range(self.codes + 1, 2 * self.codes) if fsq_levels(codes))
            raise ValueError(
                f"--codes {self.codes} is no grid for --codebook fsq, which has 2 to {MOST_LEVELS} levels a dimension: take "
                f"{below} or {above}"
            )
        if len(levels) > share:
            raise ValueError(
                f"--codes {self.codes} is a grid of {len(levels)} dimensions, but --latent_size {self.latent_size} has {share} "
                f"for each of --codebooks {self.codebooks}: raise --latent_size to {len(levels) * self.codebooks}"
            )


MOST_LEVELS = 8
"""Levels of a dimension of --codebook fsq: those of Mentzer et al. (2023) have 5 to 8."""


def fsq_levels(codes: int) -> tuple[int, ...] | None:
    """Return the levels of each dimension of a grid with so many points: the fewest dimensions, as even as can be; None: there is
    none.

    >>> fsq_levels(512), fsq_levels(1000), fsq_levels(60), fsq_levels(11)
    ((8, 8, 8), (8, 5, 5, 5), (5, 4, 3), None)
    """
    found = list(_factors(codes, MOST_LEVELS))
    return min(found, key=lambda levels: (len(levels), -levels[-1]), default=None)


def _factors(number: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of factors from 2 to `largest`, the largest first."""
    if number == 1:
        yield ()
    for factor in range(min(number, largest), 1, -1):
        if number % factor == 0:
            yield from ((factor, *rest) for rest in _factors(number // factor, factor))
