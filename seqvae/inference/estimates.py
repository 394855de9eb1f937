"""Exact numbers of a network on sequences of a split: likelihood by importance weighting, and what its posteriors are worth.

In: a network that turns a batch into a `VAEOutput` and has `nll_given_z`, and batches (`batches_of` makes them: all of a
split, or a fixed random choice). Out: plain numbers in nats, with standard errors over sequences. The same seed gives the
same numbers; neither the network's mode nor anybody else's random numbers are changed.

Shapes: B sequences of a batch, N sequences of all batches, R posteriors that stand for all, S steps, Z latent dimensions.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.models.vae import Posterior, VAEOutput, draw
from seqvae.monitors.decoder_use import undisturbed, z_of_another
from seqvae.monitors.formulas import count_active, gaussian_kl, logmeanexp, mutual_information

# Every posterior of a split, at constant memory: how far the means scatter, and a random choice of the posteriors themselves.
#
# In: means and log-variances, batch after batch. Out: the variance of the means, and no more than so many posteriors, which are all
# of them, in their order, where there are not more. The same seed chooses the same.
#
# Shapes: P posteriors of a batch, R rows that are kept, Z latent dimensions.


class AllPosteriors:
    """On the CPU; `most` is how many are kept."""

    def __init__(self, most: int, seed: int) -> None:
        self._most = most
        self._generator = torch.Generator().manual_seed(seed)
        self._keys_R = torch.empty(0, dtype=torch.float64)
        self._kept_R2Z: Tensor | None = None
        self._count = 0
        self._center_Z = self._squares_Z = torch.zeros(())

    def add(self, mean_PZ: Tensor, logvar_PZ: Tensor) -> None:
        if len(mean_PZ):
            self._add_to_variance(mean_PZ.double())
            self._add_to_choice(torch.stack((mean_PZ, logvar_PZ), dim=1))

    @property
    def variance_of_means_Z(self) -> Tensor:
        """float64; NaN of one posterior."""
        return self._squares_Z / (self._count - 1)

    @property
    def chosen(self) -> tuple[Tensor, Tensor]:
        """Means and log-variances, (R, Z) each."""
        assert self._kept_R2Z is not None, "there was a batch"
        mean_RZ, logvar_RZ = self._kept_R2Z.unbind(dim=1)
        return mean_RZ, logvar_RZ

    def _add_to_variance(self, mean_PZ: Tensor) -> None:
        """Sums of squared deviations, each from the mean of its own part (Chan et al. 1979): large means cancel nothing."""
        count, center_Z = len(mean_PZ), mean_PZ.mean(dim=0)
        moved_Z, total = center_Z - self._center_Z, self._count + count
        squares_Z = (mean_PZ - center_Z).square().sum(dim=0)
        self._squares_Z = self._squares_Z + squares_Z + moved_Z.square() * (self._count * count / total)
        self._center_Z, self._count = self._center_Z + moved_Z * (count / total), total

    def _add_to_choice(self, rows_P2Z: Tensor) -> None:
        """Each gets a random key, and the smallest keys stay; once there are enough, few new ones come in."""
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


STEPS_AT_ONCE = 4096
"""Steps of a batch, padding included; a sequence that is longer makes a batch of its own. Measured on two cores: importance
weighting goes through 10 to 25 % fewer steps a second with 1,024 of them, and through 35 % fewer with 16,384."""

MOST_POSTERIORS = 16_384
"""Of which the mutual information is estimated, as it compares each with each. It can then read no more than 9.7 nats."""


class Network(Protocol):
    """What is asked of an `nn.Module`."""

    def __call__(self, batch: Batch) -> VAEOutput: ...

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor: ...


class Estimate(NamedTuple):
    """A mean over sequences and its standard error."""

    value: float
    error: float


class SequenceNLL(NamedTuple):
    """Of each sequence, in the order of the batches."""

    nll_N: np.ndarray
    """-log p(x), nats, float64."""
    steps_N: np.ndarray
    """Steps that were predicted, with the end mark where there is one."""
    sequences_N: np.ndarray
    """Which sequences of the split these are."""
    effective_N: np.ndarray
    """How many of the K samples carry the estimate, (sum w)^2 / sum w^2 of their weights; near 1 it is far from tight."""

    @property
    def per_sequence(self) -> Estimate:
        return mean_of(self.nll_N)

    @property
    def per_step(self) -> Estimate:
        return mean_of(self.nll_N, self.steps_N)

    @property
    def perplexity(self) -> float:
        return exp(self.per_step.value)


class PosteriorStatistics(NamedTuple):
    """What a split's posteriors say; all in nats, and the KL always at weight 1."""

    sequences: int
    elbo: Estimate
    nll: Estimate
    """-log p(x | z) per sequence, with one z each."""
    nll_per_step: Estimate
    rate: Estimate
    """KL per sequence."""
    kl_per_dim: tuple[float, ...]
    """Means over sequences; they add up to the rate."""
    active_units: int
    mutual_information: float
    """No more than log `posteriors`, which is where it saturates."""
    posteriors: int
    """How many posteriors the mutual information was estimated from."""
    decoder_use: Estimate | None
    """NLL with the z of another sequence of similar length minus NLL with the own one; None: there is no other sequence."""


def importance_weighted_nll(
    network: Network,
    batches: Iterable[Batch],
    *,
    samples: int = 500,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> SequenceNLL:
    """-log (1/K sum_k p(x, z_k) / q(z_k | x)) of each sequence, with K `samples` z_k drawn from q (Burda et al. 2016).

    Never below -log p(x) on average, and closer to it the more samples; a network whose posterior is the prior and whose
    decoder ignores z needs one. `autocast` computes the decoder in that type.
    """
    with _evaluating(network, seed, autocast) as device:
        parts = [_importance_weighted(network, move_data_to_device(batch, device), samples) for batch in batches]
    return SequenceNLL(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def posterior_statistics(
    network: Network, batches: Iterable[Batch], *, seed: int = 0, autocast: torch.dtype | None = None
) -> PosteriorStatistics:
    """Go through all batches once. Sequences of a batch should be of similar length: they exchange their latents."""
    with _evaluating(network, seed, autocast) as device:
        posteriors = AllPosteriors(MOST_POSTERIORS, seed)
        parts = [_batch_statistics(network, move_data_to_device(batch, device), posteriors) for batch in batches]
    joined = _BatchStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))
    mean_RZ, logvar_RZ = posteriors.chosen
    information = mutual_information(mean_RZ, logvar_RZ, torch.Generator().manual_seed(seed))
    nll_N, kl_N, steps_N = (tensor.numpy() for tensor in (joined.nll_N, joined.kl_NZ.sum(dim=1), joined.steps_N))
    loss_N = joined.loss_of_exchange_N[~joined.loss_of_exchange_N.isnan()].numpy()
    return PosteriorStatistics(
        sequences=len(nll_N),
        elbo=mean_of(-nll_N - kl_N),
        nll=mean_of(nll_N),
        nll_per_step=mean_of(nll_N, steps_N),
        rate=mean_of(kl_N),
        kl_per_dim=tuple(joined.kl_NZ.mean(dim=0).tolist()),
        active_units=int(count_active(posteriors.variance_of_means_Z)),
        mutual_information=float(information),
        posteriors=len(mean_RZ),
        decoder_use=mean_of(loss_N) if len(loss_N) else None,
    )


def mean_of(sums_N: np.ndarray, counts_N: np.ndarray | None = None) -> Estimate:
    """The mean of a sequence, or, with counts_N, of a step: the sum of all sums over the sum of all counts."""
    counts_N = np.ones(len(sums_N)) if counts_N is None else counts_N
    value = sums_N.sum() / counts_N.sum()
    if len(sums_N) == 1:
        return Estimate(float(value), math.inf)
    scatter = (sums_N - value * counts_N).std(ddof=1)
    return Estimate(float(value), float(scatter / math.sqrt(len(sums_N)) / counts_N.mean()))


def exp(nats: float) -> float:
    """A perplexity too large for a float is infinite.

    >>> exp(1000.0)
    inf
    """
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def batches_of(
    data: SequenceDataModule, split: str, *, sequences: int | None = None, seed: int = 0, steps: int = STEPS_AT_ONCE
) -> Iterator[Batch]:
    """Batches of a split, short sequences first: all of them, or so many chosen at random, the same for the same seed."""
    stored = data.split(split)
    chosen_N = np.arange(len(stored))
    if sequences is not None and sequences < len(stored):
        chosen_N = np.sort(np.random.default_rng(seed).choice(len(stored), sequences, replace=False))
    lengths_N = np.asarray(stored.lengths_N)[chosen_N]
    order_N = np.argsort(lengths_N, kind="stable")
    for part in cut_ascending(lengths_N[order_N], steps):
        yield stored.gather(chosen_N[order_N[part]])


def cut_ascending(lengths_N: np.ndarray, steps: int) -> Iterator[slice]:
    """Ascending lengths into slices of at most so many steps, padding included."""
    first = 0
    for place, length in enumerate(lengths_N.tolist()):
        if place > first and (place + 1 - first) * length > steps:
            yield slice(first, place)
            first = place
    yield slice(first, len(lengths_N))


def _importance_weighted(network: Network, batch: Batch, samples: int) -> tuple[np.ndarray, ...]:
    # Each round draws one z for every sequence of a full batch: as good a use of the machine as several z for fewer
    # sequences, without a copy of the batch.
    output = network(batch)
    posterior = Posterior(output.posterior_mean, output.posterior_logvar, output.posterior_mask)
    rounds = []
    for _ in range(samples):
        z = draw(posterior)
        rounds.append(_log_prior_over_posterior(z, posterior) - network.nll_given_z(batch, z).double())
    real_B = batch.lengths_B > 0
    weights_KB = torch.stack(rounds)
    effective_B = torch.exp(2 * torch.logsumexp(weights_KB, dim=0) - torch.logsumexp(2 * weights_KB, dim=0))
    columns = (-logmeanexp(weights_KB, dim=0), output.steps_B, batch.sequences_B, effective_B)
    return tuple(column[real_B].cpu().numpy() for column in columns)


def _log_prior_over_posterior(z: Tensor, posterior: Posterior) -> Tensor:
    """log p(z) - log q(z | x) of each sequence, in float64."""
    z, mean, logvar = z.double(), posterior.mean.double(), posterior.logvar.double()
    terms = 0.5 * (logvar + (z - mean).square() * torch.exp(-logvar) - z.square())
    return (terms * posterior.mask[..., None]).flatten(start_dim=1).sum(dim=1)


class _BatchStatistics(NamedTuple):
    """On the CPU."""

    nll_N: Tensor
    steps_N: Tensor
    kl_NZ: Tensor
    """Added up over steps."""
    loss_of_exchange_N: Tensor
    """NaN where a sequence was alone in its batch."""


def _batch_statistics(network: Network, batch: Batch, posteriors: AllPosteriors) -> _BatchStatistics:
    """`posteriors` gets one of each sequence, or of each step where each step has its own."""
    output = network(batch)
    posterior = Posterior(output.posterior_mean, output.posterior_logvar, output.posterior_mask)
    z = draw(posterior)
    nll_B = network.nll_given_z(batch, z).double()
    loss_B = torch.full_like(nll_B, math.nan)
    if int((batch.lengths_B > 0).sum()) > 1:
        loss_B = network.nll_given_z(batch, z_of_another(z, posterior.mask)).double() - nll_B
    kl = gaussian_kl(posterior.mean, posterior.logvar).double() * posterior.mask[..., None]
    kl_BZ = kl.flatten(start_dim=1, end_dim=-2).sum(dim=1) if kl.dim() == 3 else kl
    real_B = batch.lengths_B > 0
    columns = (nll_B[real_B], output.steps_B[real_B], kl_BZ[real_B], loss_B[real_B])
    posteriors.add(posterior.mean[posterior.mask].cpu(), posterior.logvar[posterior.mask].cpu())
    return _BatchStatistics(*(column.cpu() for column in columns))


@contextmanager
def _evaluating(network: Network, seed: int, autocast: torch.dtype | None) -> Iterator[torch.device]:
    """No gradients, no dropout, random numbers of its own; yields the device that the network is on."""
    assert isinstance(network, nn.Module)
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    with undisturbed(network, device, torch.autocast(device.type, autocast, enabled=autocast is not None)):
        torch.manual_seed(seed)
        yield device
