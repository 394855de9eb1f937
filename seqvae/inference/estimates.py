"""Exact numbers of a network on sequences: likelihood by importance weighting, and statistics of its posteriors.

In: a network that turns a batch into a `VAEOutput` and has `nll_given_z`, and batches, alone or in pairs (`streaming` makes
them). Out: plain numbers in nats, with standard errors over stored sequences, as the windows of one are not independent. The same
seed gives the same numbers; the network's mode and torch's random numbers are left as they were.

Shapes: B sequences of a batch, N sequences of all batches, P posteriors of a batch, R posteriors that stand for all, S steps,
Z latent dimensions.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from seqvae.data.batch import Batch
from seqvae.inference.streaming import Pairs, evaluating
from seqvae.models.codes import UniformCodes
from seqvae.models.levels import StepLatents
from seqvae.models.posteriors import FlowPosterior, log_density
from seqvae.models.vae import Posterior, SequenceVAE, VAEOutput, latents_of
from seqvae.monitors.codes import joint_entropy, perplexity
from seqvae.monitors.decoder_use import repeated
from seqvae.monitors.formulas import (
    Moments,
    count_active,
    gaussian_kl,
    kl_to_moments,
    logmeanexp,
    moments_of_draws,
    moved_information,
    mutual_information,
)

MOST_POSTERIORS = 16_384
"""Posteriors that the mutual information is estimated from, as it compares each with each; it then reads at most 9.7 nats."""


SEQUENCE_LEVEL, STEP_LEVEL = "sequence", "step"
"""What has a latent on each of two levels."""

MOST_MOVED, MOVED_DRAWS = 1024, 32
"""Posteriors that it is estimated from where a flow moves latents, each with each through the inverse, and draws of each that
moments are estimated from."""
LEAST_SAMPLES, MOST_SAMPLES = 16, 500
"""Samples of an importance-weighted NLL that may stop early; published tables have 500."""


class Network(Protocol):
    """The methods that an `nn.Module` needs to be evaluated."""

    def __call__(self, batch: Batch) -> VAEOutput: ...

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor: ...


class EncodingNetwork(Network, Protocol):
    """The methods that it needs besides for the statistics of its posteriors."""

    def encode(self, batch: Batch) -> Posterior: ...


class Estimate(NamedTuple):
    """A mean over sequences and its standard error, that over the stored sequences that they are parts of."""

    value: float
    error: float


class SequenceNLL(NamedTuple):
    """The NLL of each sequence, in the order of the batches."""

    nll_N: np.ndarray
    """-log p(x), nats, float64."""
    steps_N: np.ndarray
    """Steps that were predicted, with the end mark if there is one."""
    sequences_N: np.ndarray
    """Numbers of these sequences in the split."""
    effective_N: np.ndarray
    """How many of the K samples carry the estimate, (sum w)^2 / sum w^2 of their weights; near 1 it is far from tight."""
    samples_N: np.ndarray
    """How many samples were drawn."""
    owners_N: np.ndarray | None = None
    """The stored sequences that these are parts of; None: each is whole."""

    @property
    def per_sequence(self) -> Estimate:
        return mean_of(self.nll_N, owners_N=self.owners_N)

    @property
    def per_step(self) -> Estimate:
        return mean_of(self.nll_N, self.steps_N, self.owners_N)

    @property
    def perplexity(self) -> float:
        return exp(self.per_step.value)


class LevelStatistics(NamedTuple):
    """Readings of one of two levels of latents, as in `PosteriorStatistics`; those of steps are in units of their prior."""

    rate: Estimate
    kl_per_dim: tuple[float, ...]
    active_units: int
    mutual_information: float
    posteriors: int
    decoder_use: Estimate | None
    """NLL with this level's latents of another sequence, minus NLL with its own; the other level's stay."""


class PosteriorStatistics(NamedTuple):
    """Readings of a network on a split; in nats, with the KL at weight 1."""

    sequences: int
    steps: int
    """Steps that were predicted, with the end marks that there are."""
    owners: int
    """The stored sequences that these are parts of; the errors are those over owners."""
    elbo: Estimate
    nll: Estimate
    """-log p(x | z) per sequence, with one z each."""
    nll_per_step: Estimate
    rate: Estimate
    """KL per sequence, of all levels; where it has no closed form, the mean of one draw for each posterior."""
    kl_per_dim: tuple[float, ...]
    """Means over sequences; they add up to the rate. Where only the KL of all dimensions together is known, each is that to a
    Gaussian with the moments of all posteriors: what a dimension can tell at most. Of codes there is none."""
    active_units: int
    mutual_information: float
    """At most log `posteriors`, where it saturates."""
    posteriors: int
    """How many posteriors the mutual information was estimated from."""
    decoder_use: Estimate | None
    """NLL with the z of another sequence, of like length and no window of the same one, minus NLL with its own; None: there is no
    other sequence."""
    without_partner: int
    """Sequences that the decoder use leaves out, as all others are windows of the same one."""
    codes: "CodeUse | None" = None
    """Of latents that are codes: there are then no active units, and the mutual information is the entropy of the codes."""
    rate_is_estimated: bool = False
    """Whether the KL has no closed form."""
    own_units: "InOwnUnits | None" = None
    """The densities of values as the data have them; None: these are of what the network sees."""
    levels: Mapping[str, LevelStatistics] = MappingProxyType({})
    """Where there are latents of two levels: the readings of each by what has them. The other fields, but the rate, are then of the
    sequences'."""


class CodeUse(NamedTuple):
    """How the codes of a codebook are used over a split."""

    size: int
    books: int
    in_use: float
    """Share of the codes of all codebooks."""
    perplexity: float
    has_fitted_prior: bool = False
    """Whether the rate is that by a prior which was fitted to them; else all codes count as equally likely."""


class InOwnUnits(NamedTuple):
    """Readings of densities in the data's own units. A change of units moves them all alike, by a number of the data alone."""

    elbo: Estimate
    nll: Estimate
    nll_per_step: Estimate


def importance_weighted_nll(
    network: Network,
    batches: Iterable[Batch],
    *,
    samples: int = MOST_SAMPLES,
    within: float | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> SequenceNLL:
    """Return -log (1/K sum_k p(x, z_k) / q(z_k | x)) of each sequence, with K `samples` z_k drawn from q (Burda et al. 2016).

    Never below -log p(x) on average, and closer to it the more samples; a network whose posterior is the prior and whose
    decoder ignores z needs one. `within`: a batch gets fewer samples, where the error bar of its mean is no more than so many nats
    before. `autocast` computes the decoder in that type. Of latents that are codes there is nothing to draw, and what is
    returned is -log p(x, codes), which is never below -log p(x) either.
    """
    assert isinstance(network, nn.Module)
    family, prior = latents_of(network)
    parts = []
    with evaluating(network, autocast) as device:
        torch.manual_seed(seed)
        for batch in batches:
            batch = move_data_to_device(batch, device)
            output = network(batch)
            posterior = output.posterior
            wide = Posterior(posterior.mean.double(), posterior.logvar.double(), posterior.mask)
            # Each round draws one z for every sequence of a full batch: as good a use of the machine as several z for fewer
            # sequences, without a copy of the batch.
            real_B = batch.lengths_B > 0
            rounds: list[Tensor] = []
            below = StepsBelow(network, batch)
            if output.codes is not None:
                rounds.append(-output.nll_B.double() - rate_of(output))
            while len(rounds) < (samples if output.codes is None else 1):
                drawn = family.draw(posterior)
                exact = drawn.double()
                log_p_over_q = torch.where(posterior.mask, prior.log_density(exact.z) - log_density(wide, exact), 0.0)
                log_p_over_q_B = log_p_over_q.sum(dim=1) if log_p_over_q.dim() == 2 else log_p_over_q
                if (steps := below.draw(drawn.z)) is not None:
                    log_p_over_q_B = log_p_over_q_B + steps.log_p_over_q()
                z = below.joined(drawn.z, steps)
                rounds.append(log_p_over_q_B - network.nll_given_z(batch, z).double())
                is_looked_at = len(rounds) >= LEAST_SAMPLES and len(rounds).bit_count() == 1  # 16, 32, 64 ...
                if within is not None and is_looked_at and error_bar(torch.stack(rounds)[:, real_B]) <= within:
                    break
            weights_KB = torch.stack(rounds)
            drawn_B = torch.full_like(batch.lengths_B, len(rounds))
            estimates = (-logmeanexp(weights_KB, dim=0), output.steps_B, batch.sequences_B)
            columns = (*estimates, effective_samples(weights_KB), drawn_B)
            parts.append([column[real_B].cpu().numpy() for column in columns])
    return SequenceNLL(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class StepsBelow:
    """The latents of steps below those of a batch's sequences, where a network has two levels."""

    def __init__(self, network: nn.Module, batch: Batch) -> None:
        self.network = network if isinstance(network, SequenceVAE) and network.step_level is not None else None
        self.encoding = None if self.network is None else self.network.encoding(batch)

    def draw(self, z_BZ: Tensor) -> StepLatents | None:
        """Draw them given those of the sequences; None: there is one level."""
        if self.network is None or self.encoding is None:
            return None
        return self.network.draw_steps(z_BZ, self.encoding)

    def joined(self, z: Tensor, steps: StepLatents | None, relative_BSY: Tensor | None = None) -> Tensor:
        """Return what the decoder gets of `z` and the draw of its steps, or one that was made of other sequences."""
        if self.network is None or steps is None:
            return z
        return self.network.with_steps(z, steps.drawn if relative_BSY is None else relative_BSY)


def rate_of(output: VAEOutput) -> Tensor:
    """Return the rate of each sequence, (B,), as its prior has it; float64."""
    assert output.kl is not None, "the prior leaves it to mean and variance"
    rate = torch.where(output.posterior_mask[..., None], output.kl.double(), 0.0)
    return rate.flatten(1).sum(dim=1)


def error_bar(weights_KB: Tensor) -> float:
    """Return by how many nats more samples may change the mean of -log (1/K sum_k w_k) over sequences, from their logarithms.

    That is what the second half of the samples has lowered it by, and the standard error that is left.
    """
    gained_B = logmeanexp(weights_KB, dim=0) - logmeanexp(weights_KB[: len(weights_KB) // 2], dim=0)
    variance_B = (1 / effective_samples(weights_KB) - 1 / len(weights_KB)).clamp(min=0)
    return float(gained_B.mean().clamp(min=0) + variance_B.sum().sqrt() / len(variance_B))


def effective_samples(weights_KB: Tensor) -> Tensor:
    """Return how many of the K samples carry each sum of weights, (sum w)^2 / sum w^2, from their logarithms."""
    return torch.exp(2 * torch.logsumexp(weights_KB, dim=0) - torch.logsumexp(2 * weights_KB, dim=0))


def posterior_statistics(
    network: EncodingNetwork,
    pairs: Iterable[Pairs],
    *,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    nats_of_units: Callable[[Batch], Tensor] | None = None,
) -> PosteriorStatistics:
    """Return the readings of all sequences; those of the decoder's use from the partners that they come with.

    `nats_of_units`: what the NLL of each sequence of a batch rises by in the data's own units.
    """
    assert isinstance(network, nn.Module)
    family, prior = latents_of(network)
    posteriors, parts, owners = AllPosteriors(MOST_POSTERIORS, seed), [], []
    of_steps, step_parts = AllPosteriors(MOST_POSTERIORS, seed), []
    counts_HK: Tensor | None = None
    with evaluating(network, autocast) as device:
        torch.manual_seed(seed)
        for part, others, has_other in pairs:
            batch, has_other_B = move_data_to_device(part.batch, device), torch.from_numpy(has_other).to(device)
            output = network(batch)
            posterior = output.posterior
            drawn = family.draw(posterior)
            z, real_B, others = drawn.z, batch.lengths_B > 0, move_data_to_device(others, device)
            below = StepsBelow(network, batch)
            steps = below.draw(z)
            nll_B = network.nll_given_z(batch, below.joined(z, steps)).double()
            of_others = network.encode(others)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                other_z = family.draw(of_others).z  # the other readings do not depend on it
                other_steps = StepsBelow(network, others).draw(other_z)
            if other_z.dim() == 3:
                other_z = repeated(other_z, of_others.mask, z.shape[1])
            lost_B = network.nll_given_z(batch, below.joined(other_z, steps)).double() - nll_B
            if steps is not None and other_steps is not None:
                mean, logvar, mask = steps.relative
                relative_BSY = repeated(other_steps.drawn, other_steps.relative.mask, mean.shape[1])
                step_lost_B = network.nll_given_z(batch, below.joined(z, steps, relative_BSY)).double() - nll_B
                kl_BSY = torch.where(mask[..., None], gaussian_kl(mean, logvar).double(), 0.0)
                step_parts.append([column[real_B].cpu() for column in (kl_BSY.sum(dim=1), step_lost_B)])
                of_steps.add(mean[mask].cpu(), logvar[mask].cpu())
            kl = prior.kl(posterior, drawn) if output.codes is None else output.kl
            kl = gaussian_kl(posterior.mean, posterior.logvar) if kl is None else kl
            kl = torch.where(posterior.mask[..., None], kl.double(), 0.0)
            kl_BZ = kl.flatten(start_dim=1, end_dim=-2).sum(dim=1) if kl.dim() == 3 else kl
            if output.codes is not None and isinstance(network, SequenceVAE):
                codes_NH = output.codes[posterior.mask].cpu()
                counts_HK = add_counts(codes_NH, network.settings.codes, counts_HK)
                posteriors.add(codes_NH.float(), torch.zeros(codes_NH.shape))
            else:
                posteriors.add(posterior.mean[posterior.mask].cpu(), posterior.logvar[posterior.mask].cpu())
            units_B = torch.zeros_like(nll_B) if nats_of_units is None else nats_of_units(batch)
            parts.append(
                [column[real_B].cpu() for column in (nll_B, output.steps_B, kl_BZ, lost_B, has_other_B, units_B)]
            )
            owners.append(part.owners_B[real_B.cpu().numpy()])
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    all_nll_N, all_steps_N, kl_NZ, lost_N, has_other_N, units_N = columns
    mean_RZ, logvar_RZ = posteriors.chosen
    use_of_codes, active, kl_to_moments_Z = None, 0, logvar_RZ.new_zeros(0)
    generator = torch.Generator().manual_seed(seed)
    if counts_HK is not None:
        information = joint_entropy(mean_RZ.long())
        (books, size), in_use = counts_HK.shape, float((counts_HK > 0).double().mean())
        use_of_codes = CodeUse(size, books, in_use, float(perplexity(counts_HK)), not isinstance(prior, UniformCodes))
    elif isinstance(family, FlowPosterior):
        every = -(-len(mean_RZ) // MOST_MOVED)
        mean_RZ, logvar_RZ = mean_RZ[::every].to(device), logvar_RZ[::every].to(device)
        moments, information = moved_statistics(family, mean_RZ, logvar_RZ, generator)
        active, kl_to_moments_Z = int(count_active(moments.variance_of_means)), moments.kl
    else:
        information = float(mutual_information(mean_RZ, logvar_RZ, generator))
        active = int(count_active(posteriors.variance_of_means_Z))
        kl_to_moments_Z = kl_to_moments(mean_RZ, logvar_RZ)
    nll_N, kl_N, steps_N = (tensor.numpy() for tensor in (all_nll_N, kl_NZ.sum(dim=1), all_steps_N))
    owners_N, exchanged_N = np.concatenate(owners), has_other_N.numpy()

    def mean_lost(lost_N: Tensor) -> Estimate | None:
        return mean_of(lost_N.numpy()[exchanged_N], owners_N=owners_N[exchanged_N]) if exchanged_N.any() else None

    use = mean_lost(lost_N)
    kl_Z = kl_NZ.mean(dim=0)
    if use_of_codes is not None:
        kl_Z = kl_Z[:0]  # the rate is that of all codes together
    elif len(kl_Z) < mean_RZ.shape[1]:
        kl_Z = kl_to_moments_Z * posteriors.count / len(nll_N)
    levels = {}
    if step_parts:
        own_rate = mean_of(kl_N, owners_N=owners_N)
        own = LevelStatistics(own_rate, tuple(kl_Z.tolist()), active, information, len(mean_RZ), use)
        step_kl_NY, step_lost_N = (torch.cat(column) for column in zip(*step_parts, strict=True))
        mean_RY, logvar_RY = of_steps.chosen
        step_kl_N = step_kl_NY.sum(dim=1).numpy()
        below_it = LevelStatistics(
            rate=mean_of(step_kl_N, owners_N=owners_N),
            kl_per_dim=tuple(step_kl_NY.mean(dim=0).tolist()),
            active_units=int(count_active(of_steps.variance_of_means_Z)),
            mutual_information=float(mutual_information(mean_RY, logvar_RY, torch.Generator().manual_seed(seed))),
            posteriors=len(mean_RY),
            decoder_use=mean_lost(step_lost_N),
        )
        levels, kl_N = {SEQUENCE_LEVEL: own, STEP_LEVEL: below_it}, kl_N + step_kl_N
    own_units = None
    if nats_of_units is not None:
        own_N = nll_N + units_N.numpy()
        own_units = InOwnUnits(
            elbo=mean_of(-own_N - kl_N, owners_N=owners_N),
            nll=mean_of(own_N, owners_N=owners_N),
            nll_per_step=mean_of(own_N, steps_N, owners_N),
        )
    return PosteriorStatistics(
        sequences=len(nll_N),
        steps=int(steps_N.sum()),
        owners=len(np.unique(owners_N)),
        elbo=mean_of(-nll_N - kl_N, owners_N=owners_N),
        nll=mean_of(nll_N, owners_N=owners_N),
        nll_per_step=mean_of(nll_N, steps_N, owners_N),
        rate=mean_of(kl_N, owners_N=owners_N),
        kl_per_dim=tuple(kl_Z.tolist()),
        active_units=active,
        mutual_information=information,
        posteriors=len(mean_RZ),
        decoder_use=use,
        without_partner=int((~exchanged_N).sum()),
        codes=use_of_codes,
        own_units=own_units,
        levels=levels,
        rate_is_estimated=prior.estimates_kl(drawn),
    )


def add_counts(codes_NH: Tensor, size: int, counts_HK: Tensor | None = None) -> Tensor:
    """Return how often each code of each codebook stands there, (H, K), with those counted before."""
    own_HK = torch.stack([torch.bincount(codes_N, minlength=size) for codes_N in codes_NH.unbind(dim=1)])
    return own_HK if counts_HK is None else own_HK + counts_HK


@torch.no_grad()
def moved_statistics(
    family: FlowPosterior, mean_RZ: Tensor, logvar_RZ: Tensor, generator: torch.Generator
) -> tuple[Moments, float]:
    """Return the moments of latents that a flow moves from these Gaussians, and how much they tell."""
    noise_KRZ = torch.randn((MOVED_DRAWS, *mean_RZ.shape), generator=generator).to(mean_RZ)
    posterior = Posterior(mean_RZ, logvar_RZ, torch.ones(mean_RZ.shape[:-1], dtype=torch.bool, device=mean_RZ.device))
    z_KRZ = torch.stack([family.draw(posterior, noise_RZ).z for noise_RZ in noise_KRZ])
    information = moved_information(z_KRZ[0], lambda z_BZ: family.log_density_at(z_BZ, posterior))
    return moments_of_draws(z_KRZ.double().cpu()), float(information)


def mean_of(sums_N: np.ndarray, counts_N: np.ndarray | None = None, owners_N: np.ndarray | None = None) -> Estimate:
    """Return the mean per sequence or, with counts_N, per step: the sum of all sums over the sum of all counts.

    The error takes sequences of the same owner for one: the windows of a long sequence are alike.
    """
    counts_N = np.ones(len(sums_N)) if counts_N is None else counts_N
    value = sums_N.sum() / counts_N.sum()
    if owners_N is not None:
        sums_N, counts_N = _by_owner(sums_N, owners_N), _by_owner(counts_N, owners_N)
    if len(sums_N) == 1:
        return Estimate(float(value), math.inf)
    scatter = (sums_N - value * counts_N).std(ddof=1)
    return Estimate(float(value), float(scatter / math.sqrt(len(sums_N)) / counts_N.mean()))


def _by_owner(numbers_N: np.ndarray, owners_N: np.ndarray) -> np.ndarray:
    """Add up the numbers of each owner; where each has one, they stay as they are."""
    owners, place_N = np.unique(owners_N, return_inverse=True)
    return numbers_N if len(owners) == len(numbers_N) else np.bincount(place_N, weights=numbers_N)


def exp(nats: float) -> float:
    """Return a perplexity, which is infinite where it is too large for a float.

    >>> exp(1000.0)
    inf
    """
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


class AllPosteriors:
    """Every posterior of a split at constant memory: the exact variance of the means, and a random choice of at most `most`.

    Where there are no more than `most`, all are kept, in their order. The same seed makes the same choice. Lives on the CPU.
    """

    def __init__(self, most: int, seed: int) -> None:
        self._most = most
        self._generator = torch.Generator().manual_seed(seed)
        self._keys_R = torch.empty(0, dtype=torch.float64)
        self._kept_R2Z: Tensor | None = None
        self._count = 0
        self._center_Z = self._squares_Z = torch.zeros(())

    @property
    def count(self) -> int:
        return self._count

    @property
    def variance_of_means_Z(self) -> Tensor:
        """The variance of each dimension's posterior mean, float64; NaN for a single posterior."""
        return self._squares_Z / (self._count - 1)

    @property
    def chosen(self) -> tuple[Tensor, Tensor]:
        """Means and log-variances of the chosen posteriors, (R, Z) each."""
        assert self._kept_R2Z is not None, "there was a batch"
        mean_RZ, logvar_RZ = self._kept_R2Z.unbind(dim=1)
        return mean_RZ, logvar_RZ

    def add(self, mean_PZ: Tensor, logvar_PZ: Tensor) -> None:
        """Add the posteriors of a batch."""
        if not len(mean_PZ):
            return
        # Squared deviations are added up, each from the mean of its own part (Chan et al. 1979): large means cancel nothing.
        wide_PZ = mean_PZ.double()
        count, center_Z = len(wide_PZ), wide_PZ.mean(dim=0)
        moved_Z, total = center_Z - self._center_Z, self._count + count
        squares_Z = (wide_PZ - center_Z).square().sum(dim=0)
        self._squares_Z = self._squares_Z + squares_Z + moved_Z.square() * (self._count * count / total)
        self._center_Z, self._count = self._center_Z + moved_Z * (count / total), total
        # Each posterior gets a random key, and the smallest keys stay; once there are enough, few new ones come in.
        rows_P2Z = torch.stack((mean_PZ, logvar_PZ), dim=1)
        keys_P = torch.rand(len(rows_P2Z), generator=self._generator, dtype=torch.float64)
        if len(self._keys_R) == self._most:
            enters_P = keys_P < self._keys_R.max()
            rows_P2Z, keys_P = rows_P2Z[enters_P], keys_P[enters_P]
        kept_R2Z = rows_P2Z if self._kept_R2Z is None else torch.cat((self._kept_R2Z, rows_P2Z))
        keys_R = torch.cat((self._keys_R, keys_P))
        if len(keys_R) > self._most:
            stays_R = keys_R.topk(self._most, largest=False).indices.sort().values
            kept_R2Z, keys_R = kept_R2Z[stays_R], keys_R[stays_R]
        self._kept_R2Z, self._keys_R = kept_R2Z, keys_R
