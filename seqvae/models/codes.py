"""Codes: latents that are one of K vectors each, in place of a distribution over all of space.

    encoder's vector -> a vector for each codebook -> the nearest of its K vectors -> its number, the code

`LearnedCodes` learns the vectors (VQ, van den Oord et al. 2017), `GridCodes` takes the points of a grid (FSQ, Mentzer et al. 2023).
A gradient goes through the choice as if it were none. Each sequence or step has H codes, one for each codebook, of its own slice of
the latent. There is nothing to draw: a posterior is a point, and its KL is -log p of its codes. Under the prior of the training,
which finds all codes equally likely, that is H log K, whatever they are; another one is fitted afterwards (`code_prior.py`).

Shapes: B sequences, S steps, W width, Z latent dimensions, H codebooks, K codes of each, D dimensions of each (Z = H D), N real
latents of a batch, P vectors that are kept of a step; `hidden` is (B, W) or (B, S, W), codes are (B, H) or (B, S, H).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqvae.config.model import ModelSettings, fsq_levels
from seqvae.models.embeddings import Float32Linear
from seqvae.models.noise import Noise
from seqvae.models.posteriors import Draw, Posterior, PosteriorFamily
from seqvae.models.priors import Prior

DECAY = 0.99
"""Share of the moving averages of counts and sums that an optimizer step leaves."""
SMOOTHING = 1e-5
"""What Laplace smoothing adds to each count: no vector is divided by nothing."""
IDLE = 8.0
"""Latents for each code of a codebook, on average, without any for one of them, after which that one counts as dead: if all were
equally likely, that would happen to one code in 3,000."""
KEPT = 1024
"""Vectors of an optimizer step, over all processes, that dead codes may be given to."""
ROUNDED_UP = 1e-3
"""Share by which the outermost levels of a grid lie inside of what the encoder can reach."""


class Quantised(NamedTuple):
    """Latents as codes."""

    z: Tensor
    """The vectors of the codes, (B, Z) or (B, S, Z), with the gradient of what the encoder wrote."""
    codes: Tensor
    commitment_B: Tensor
    """What is paid for the distance of what the encoder wrote from the vectors that stand for it."""


class CodePosterior(PosteriorFamily, ABC):
    """The base of learned codes and those of a grid; every posterior is a point."""

    def __init__(self, width: int, settings: ModelSettings, dimensions: int) -> None:
        """`dimensions`: numbers that the encoder writes for each codebook."""
        super().__init__()
        self.codes, self.codebooks = settings.codes, settings.codebooks
        self.written = Float32Linear(width, settings.codebooks * dimensions)

    def forward(self, hidden: Tensor, mask: Tensor) -> Posterior:
        return self.as_posterior(self.quantise(hidden, mask), mask)

    def as_posterior(self, quantised: Quantised, mask: Tensor) -> Posterior:
        """Return points as Gaussians without a variance."""
        return Posterior(quantised.z, torch.full_like(quantised.z, -math.inf), mask)

    def draw(self, posterior: Posterior, noise: Tensor | None = None) -> Draw:
        return Draw(posterior.mean, posterior.mean)

    @abstractmethod
    def quantise(self, hidden: Tensor, mask: Tensor) -> Quantised:
        """Return the codes of each latent; `mask` is true for what is real."""

    @abstractmethod
    def vectors_of(self, codes: Tensor) -> Tensor:
        """Return the latents that codes stand for, (B, Z) or (B, S, Z)."""

    def after_step(
        self, step: int, total: Callable[[Tensor], Tensor] = lambda own: own, rank: int = 0, world: int = 1
    ) -> None:
        """Learn what an optimizer step, the `step`-th, teaches beside gradients; `total` adds up over the processes."""

    def begin_step(self) -> None:
        """Forget what was collected for an optimizer step that begins, or begins again."""

    def described(self) -> str:
        """Return what there is to choose from, in words."""
        books = "" if self.codebooks == 1 else f" in each of {self.codebooks} codebooks"
        return f"{self.codes:,} codes{books}"


class GridCodes(CodePosterior):
    """The points of a grid: each of a few numbers is squashed into its bounds and rounded to one of its levels.

    A code is the number of its point, the first dimension counting least. A slice of the latent that has more dimensions than the
    grid is 0 in the others.
    """

    levels_D: Tensor
    steps_D: Tensor

    def __init__(self, width: int, settings: ModelSettings) -> None:
        levels = fsq_levels(settings.codes)
        assert levels is not None, "ModelSettings refuses what is no grid"
        super().__init__(width, settings, len(levels))
        self.padding = settings.latent_size // settings.codebooks - len(levels)
        steps = [math.prod(levels[:place]) for place in range(len(levels))]
        self.register_buffer("levels_D", torch.tensor(levels), persistent=False)
        self.register_buffer("steps_D", torch.tensor(steps), persistent=False)

    def quantise(self, hidden: Tensor, mask: Tensor) -> Quantised:
        raw = self.written(hidden).unflatten(-1, (self.codebooks, -1))
        half_D = (self.levels_D - 1) / 2
        squashed = torch.tanh(raw) * half_D * (1 + ROUNDED_UP)
        places = (squashed.detach() + half_D).round().clamp(min=0).minimum(self.levels_D - 1).nan_to_num()
        codes = (places.long() * self.steps_D).sum(dim=-1)
        # The straight way back: the value is that of the grid, the gradient that of the squashed number.
        z = self.vectors_of(codes) + self._padded((squashed - squashed.detach()) / half_D)
        return Quantised(z, codes, z.new_zeros(len(hidden)))

    def vectors_of(self, codes: Tensor) -> Tensor:
        places = codes[..., None] // self.steps_D % self.levels_D
        return self._padded(2 * places / (self.levels_D - 1) - 1)

    def _padded(self, points: Tensor) -> Tensor:
        """Return (..., H, D) as latents."""
        return nn.functional.pad(points, (0, self.padding)).flatten(-2)


class LearnedCodes(CodePosterior):
    """Vectors that are moving averages of what falls to them.

    Of the latents of an optimizer step, over all its micro-batches and processes, those that fall to a code are counted and added
    up. Counts and sums are averaged over the steps, and a vector is its sum through its count, smoothed as Laplace did. A code that
    nothing has fallen to for long gets the place of a vector that the encoder has just written, drawn at random.
    """

    vectors_HKD: Tensor
    counts_HK: Tensor
    sums_HKD: Tensor
    idle_HK: Tensor

    def __init__(self, width: int, settings: ModelSettings) -> None:
        dimensions = settings.latent_size // settings.codebooks
        super().__init__(width, settings, dimensions)
        self.commitment, self.revives = settings.commitment, settings.revive_codes
        vectors_HKD = torch.randn(settings.codebooks, settings.codes, dimensions)
        self.register_buffer("vectors_HKD", vectors_HKD)
        self.register_buffer("counts_HK", torch.ones(settings.codebooks, settings.codes))
        self.register_buffer("sums_HKD", vectors_HKD.clone())
        self.register_buffer("idle_HK", torch.zeros(settings.codebooks, settings.codes))
        """Latents that were given codes since one of them got this one."""
        self.begin_step()

    def quantise(self, hidden: Tensor, mask: Tensor) -> Quantised:
        written = self.written(hidden).unflatten(-1, (self.codebooks, -1))
        codes = nearest(written.detach(), self.vectors_HKD)
        if self.training and torch.is_grad_enabled():
            self._collect(written.detach(), codes, mask)
        vectors = self.vectors_of(codes)
        apart = written.flatten(-2) - vectors
        distance = torch.where(mask, apart.square().sum(dim=-1), 0.0)
        commitment_B = self.commitment * (distance.sum(dim=1) if distance.dim() == 2 else distance)
        # The value is that of the vector, to the bit, and the gradient that of what was written.
        written = written.flatten(-2)
        return Quantised(vectors + (written - written.detach()), codes, commitment_B)

    def vectors_of(self, codes: Tensor) -> Tensor:
        books_H = torch.arange(self.codebooks, device=codes.device)
        return self.vectors_HKD[books_H, codes].flatten(-2)

    def begin_step(self) -> None:
        self._collected: list[tuple[Tensor, Tensor, Tensor]] = []

    def _collect(self, written: Tensor, codes: Tensor, mask: Tensor) -> None:
        """Count and add up the real latents of a micro-batch, and keep some of them. Waits for no device."""
        written_NHD, codes_NH = written.flatten(0, -3), codes.flatten(0, -2)
        real_N = mask.flatten() & written_NHD.isfinite().all(dim=(1, 2))
        written_NHD = torch.where(real_N[:, None, None], written_NHD, 0.0)
        places_NH = codes_NH + torch.arange(self.codebooks, device=codes.device) * self.codes
        with_count_NHD = torch.cat((real_N[:, None, None].expand(-1, self.codebooks, 1).float(), written_NHD), dim=2)
        size = with_count_NHD.shape[2]
        totals_HKD = written_NHD.new_zeros(self.codebooks * self.codes, size)
        totals_HKD = totals_HKD.index_add(0, places_NH.flatten(), with_count_NHD.flatten(0, 1))
        totals_HKD = totals_HKD.unflatten(0, (self.codebooks, self.codes))
        every = max(1, -(-len(written_NHD) // KEPT))
        kept_PHD = with_count_NHD[::every].clone()
        self._collected.append((totals_HKD[..., 0], totals_HKD[..., 1:], kept_PHD))

    @torch.no_grad()
    def after_step(
        self, step: int, total: Callable[[Tensor], Tensor] = lambda own: own, rank: int = 0, world: int = 1
    ) -> None:
        if not self._collected:  # the same in all processes
            return
        counts, sums, kept = zip(*self._collected, strict=True)
        self.begin_step()
        counts_HK, sums_HKD = torch.stack(counts).sum(dim=0), torch.stack(sums).sum(dim=0)
        share = KEPT // world
        kept_PHD = self.sums_HKD.new_zeros(share * world, self.codebooks, sums_HKD.shape[2] + 1)
        own_PHD = torch.cat(kept)[-share:]
        kept_PHD[rank * share : rank * share + len(own_PHD)] = own_PHD
        parts = (counts_HK, sums_HKD, kept_PHD)
        everything = total(torch.cat([part.flatten() for part in parts]))
        flat = everything.split([part.numel() for part in parts])
        counts_HK, sums_HKD, kept_PHD = (one.view_as(part) for one, part in zip(flat, parts, strict=True))
        self.learn(counts_HK, sums_HKD)
        if self.revives:
            self.revive(kept_PHD[..., 1:], kept_PHD[:, 0, 0] > 0, step)

    def learn(self, counts_HK: Tensor, sums_HKD: Tensor) -> None:
        """Take in how many latents of a step fell to each code, and their sums."""
        latents = counts_HK[0].sum()
        keeps = torch.where(latents > 0, DECAY, 1.0)  # a step of nothing real teaches nothing
        self.counts_HK.mul_(keeps).add_((1 - keeps) * counts_HK)
        self.sums_HKD.mul_(keeps).add_((1 - keeps) * sums_HKD)
        self.idle_HK.add_(latents).mul_(counts_HK == 0)
        self._place()

    def _place(self) -> None:
        """Put each vector where its moving averages say."""
        whole_H1 = self.counts_HK.sum(dim=1, keepdim=True)
        smooth_HK = (self.counts_HK + SMOOTHING) / (whole_H1 + self.codes * SMOOTHING) * whole_H1
        self.vectors_HKD.copy_(self.sums_HKD / smooth_HK[..., None])

    def revive(self, kept_PHD: Tensor, is_real_P: Tensor, seed: int) -> None:
        """Give dead codes the places of vectors that the encoder has just written, and the count of an average code.

        The seed is the number of the step, so that the choice is the same in all processes and in a resumed run.
        """
        keys_P = torch.rand(len(kept_PHD), generator=torch.Generator().manual_seed(seed)).to(kept_PHD.device)
        order_P = torch.where(is_real_P, keys_P, 2.0).argsort()
        is_dead_HK = self.idle_HK > IDLE * self.codes
        place_HK = (is_dead_HK.cumsum(dim=1) - 1).clamp(min=0)
        is_revived_HK = is_dead_HK & (place_HK < is_real_P.sum())
        chosen_HK = order_P[place_HK.clamp(max=len(order_P) - 1)]
        books_H1 = torch.arange(self.codebooks, device=chosen_HK.device)[:, None]
        given_HKD = kept_PHD[chosen_HK, books_H1]
        average_H1 = self.counts_HK.mean(dim=1, keepdim=True)
        self.counts_HK.copy_(torch.where(is_revived_HK, average_H1, self.counts_HK))
        self.sums_HKD.copy_(torch.where(is_revived_HK[..., None], given_HKD * average_H1[..., None], self.sums_HKD))
        self.idle_HK.mul_(~is_revived_HK)
        self._place()


def nearest(written: Tensor, vectors_HKD: Tensor) -> Tensor:
    """Return the number of the nearest vector of each codebook, (..., H); `written` is (..., H, D), in float32 whatever the
    precision."""
    with torch.autocast(written.device.type, enabled=False):
        products = torch.einsum("...hd,hkd->...hk", written.float(), vectors_HKD)
        return (vectors_HKD.square().sum(dim=-1) - 2 * products).argmin(dim=-1)


class CodePrior(Prior, ABC):
    """A prior over codes: what each costs, and draws of them."""

    def __init__(self, codes: int, codebooks: int) -> None:
        super().__init__()
        self.codes, self.codebooks = codes, codebooks

    @abstractmethod
    def nll(self, codes: Tensor) -> Tensor:
        """Return -log p of the codes of each latent given those of the steps before it, (B,) or (B, S): the KL of a point."""

    @abstractmethod
    def sample_codes(self, shape: Sequence[int], noise: Noise) -> Tensor:
        """Draw codes for latents of this shape, (..., H)."""


class UniformCodes(CodePrior):
    """All codes equally likely, whatever the others are."""

    def nll(self, codes: Tensor) -> Tensor:
        return torch.full(codes.shape[:-1], self.codebooks * math.log(self.codes), device=codes.device)

    def sample_codes(self, shape: Sequence[int], noise: Noise) -> Tensor:
        return (noise.uniform((*shape, self.codebooks)) * self.codes).long()


def make_codes(width: int, settings: ModelSettings) -> CodePosterior:
    """Return the codebooks that --codebook names."""
    return LearnedCodes(width, settings) if settings.codebook == "vq" else GridCodes(width, settings)
