"""Everything that is known of a trained model on some sequences, as one record in types of JSON.

In: a trained model, opened data, splits. Out: the record that is printed, written to a file and appended to `evaluation.jsonl`; and
the importance-weighted NLL of each sequence, for whoever compares runs on the same ones.
"""

import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from seqvae.data.batches import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription
from seqvae.inference.evaluation import (
    Estimate,
    PosteriorStatistics,
    SequenceNLL,
    exp,
    importance_weighted_nll,
    posterior_statistics,
)
from seqvae.inference.feature_errors import FeatureError, feature_errors
from seqvae.inference.splits import joined_batches, sequences_in, shares
from seqvae.inference.trained import Trained

NEAR_CAP = 0.9
"""Share of log N from which on the mutual information is said to saturate."""
FEW_SAMPLES = 10.0
"""Samples that carry an importance-weighted estimate; of fewer it is said that it is not tight."""
TOLD_EVERY_SECONDS = 15.0

_log = logging.getLogger(__name__)


class Weighted(NamedTuple):
    """Importance-weighted NLL, sequence by sequence."""

    nll: SequenceNLL
    samples: int
    names: tuple[str, ...]
    """Split and id of each sequence."""
    description: DataDescription
    """Without classes: the units that the values were measured in."""


def weighted_nll(
    trained: Trained, data: SequenceDataModule, splits: Sequence[str], *, samples: int, sequences: int, seed: int
) -> Weighted | None:
    """Of so many sequences, the same for the same seed; None of 0."""
    if sequences == 0:
        return None
    batches = joined_batches(data, splits, sequences=sequences, seed=seed)
    counts = shares(data, splits, sequences)
    told = _told((batch for _, batch in batches), data, splits, sequences)
    nll = importance_weighted_nll(trained.network, told, samples=samples, seed=seed, autocast=trained.autocast)
    names, first = [], 0
    for split, count in zip(splits, counts, strict=True):
        names += [f"{split} {name}" for name in data.split(split).ids(nll.sequences_N[first : first + count])]
        first += count
    return Weighted(nll, samples, tuple(names), _units(trained.description))


def evaluate(
    trained: Trained, data: SequenceDataModule, splits: Sequence[str], weighted: Weighted | None, seed: int
) -> dict[str, Any]:
    """The record, without what the command knows: when, and of which checkpoint."""

    def batches() -> Iterator[Batch]:
        return (batch for _, batch in joined_batches(data, splits))

    statistics = posterior_statistics(trained.network, batches(), seed=seed, autocast=trained.autocast)
    features = feature_errors(trained, batches())
    steps = sum(int(data.split(split).lengths_N.sum(dtype=np.int64)) for split in splits)
    steps += trained.network.likelihood.extra_steps * statistics.sequences
    return {
        "step": trained.step,
        "parameters": trained.parameters,
        "kind": trained.description.kind,
        "units": _checksum([repr(_units(trained.description)).encode()]),
        "content": _checksum(_content(batches())),
        "split": "+".join(splits),
        "sequences": statistics.sequences,
        "steps": steps,
        "seed": seed,
        "latent_size": len(statistics.kl_per_dim),
        "rows": tuple(_rows(statistics, weighted, steps, trained.description)),
        "kl_per_dim": statistics.kl_per_dim,
        "features": tuple(one._asdict() for one in features),
        "notes": tuple(_notes(statistics, weighted, features)),
    }


def paired_difference(one: Weighted | None, other: Weighted | None) -> Estimate | None:
    """IW-NLL of one run less that of another, nats a sequence; None where they were not measured on the same sequences."""
    if one is None or other is None or one.description != other.description or sorted(one.names) != sorted(other.names):
        return None
    ours, theirs = np.argsort(one.names, kind="stable"), np.argsort(other.names, kind="stable")
    if not np.array_equal(one.nll.steps_N[ours], other.nll.steps_N[theirs]):
        return None
    difference_N = one.nll.nll_N[ours] - other.nll.nll_N[theirs]
    mean, count = float(difference_N.mean()), len(difference_N)
    return Estimate(mean, float(difference_N.std(ddof=1) / math.sqrt(count)) if count > 1 else math.inf)


def _units(description: DataDescription) -> DataDescription:
    """What values are measured in: a network that was told of labels compares with one that was not."""
    return replace(description, classes=())


def _content(batches: Iterator[Batch]) -> Iterator[bytes]:
    """All that the network was given, as it was cut, but for labels."""
    for batch in batches:
        for name, value in batch._asdict().items():
            if isinstance(value, Tensor) and name != "labels_B":
                yield value.contiguous().numpy().tobytes()


def _checksum(parts: Iterable[bytes]) -> str:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return f"{checksum:08x}"


def _rows(
    statistics: PosteriorStatistics, weighted: Weighted | None, steps: int, description: DataDescription
) -> Iterator[dict[str, Any]]:
    """A text, its number, the number's standard error and what it is of."""
    size, posteriors = len(statistics.kl_per_dim), statistics.posteriors
    yield _row("ELBO", statistics.elbo, f"{statistics.sequences:,} sequences")
    yield _row("NLL", statistics.nll, "-log p(x | z), one z each")
    yield _row("NLL per step", statistics.nll_per_step, f"{steps:,} steps")
    yield _row("rate", statistics.rate, "KL of q(z | x) from the prior")
    if weighted is not None:
        of = f"-log p(x): {weighted.samples:,} z, {len(weighted.names):,} sequences"
        yield _row("IW-NLL", weighted.nll.per_sequence, of)
        yield _row("IW-NLL per step", weighted.nll.per_step, "")
    if description.kind == "tokens":
        if weighted is not None:
            per_step, perplexity = weighted.nll.per_step, weighted.nll.perplexity
            yield _row("perplexity", Estimate(perplexity, perplexity * per_step.error), "of the IW-NLL; not in nats")
        bound = exp(-statistics.elbo.value * statistics.sequences / steps)
        error = bound * statistics.elbo.error * statistics.sequences / steps
        yield _row("perplexity, ELBO", Estimate(bound, error), "an upper bound; not in nats")
    yield _row("active units", statistics.active_units, f"of {size} dimensions")
    of = f"of N = {posteriors:,} posteriors: at most {math.log(posteriors):.2f}"
    yield _row("mutual information", statistics.mutual_information, of)
    yield _row("decoder use", statistics.decoder_use, "what another's z costs")


def _row(name: str, value: Estimate | float | None, of: str) -> dict[str, Any]:
    if isinstance(value, Estimate):
        return {"name": name, "value": value.value, "error": value.error, "of": of}
    return {"name": name, "value": math.nan if value is None else value, "error": None, "of": of}


def _notes(
    statistics: PosteriorStatistics, weighted: Weighted | None, features: Sequence[FeatureError]
) -> Iterator[str]:
    """What is notable."""
    size, cap = len(statistics.kl_per_dim), math.log(statistics.posteriors)
    use = statistics.decoder_use
    if use is not None and use.value < 2 * use.error:
        yield (
            f"the decoder does not listen to z: another sequence's costs it {use.value:.3g} ± {use.error:.2g} nats, and the "
            f"rate of {statistics.rate.value:.3g} is paid for nothing"
        )
    if dead := size - statistics.active_units:
        yield f"{dead} of {size} latent dimensions are dead: their means vary by less than 0.01 over the data"
    if statistics.mutual_information > NEAR_CAP * cap:
        yield (
            f"the mutual information of {statistics.mutual_information:.2f} is near log N = {cap:.2f}, the most that "
            f"{statistics.posteriors:,} posteriors can show: the truth may be more, and runs on fewer sequences do not compare"
        )
    if weighted is not None:
        effective = float(np.median(weighted.nll.effective_N))
        if effective < min(FEW_SAMPLES, weighted.samples / 2):
            yield (
                f"the IW-NLL is not tight: in the median sequence {effective:.1f} of {weighted.samples:,} samples carry it, so "
                "that it is an upper bound on -log p(x) that more --iw_samples would lower"
            )
    worse = [one.name for one in features if 0 < one.rmse_of_mean < one.rmse - 2 * one.rmse_error]
    if worse:
        shown = ", ".join(worse[:5]) + (", ..." if len(worse) > 5 else "")
        yield f"worse than their training mean: {len(worse)} of {len(features)} ({shown})"


def _told(batches: Iterator[Batch], data: SequenceDataModule, splits: Sequence[str], sequences: int) -> Iterator[Batch]:
    """The batches, and on stderr now and then how far they have come."""
    total = min(sequences, sequences_in(data, splits))
    expected = sum(
        data.split(split).lengths_N.mean(dtype=np.float64) * count
        for split, count in zip(splits, shares(data, splits, total), strict=True)
    )
    begun = told = time.monotonic()
    done, steps = 0, 0
    for batch in batches:
        now = time.monotonic()
        if now - told > TOLD_EVERY_SECONDS and steps:
            told = now
            left = max(0.0, (now - begun) * (expected / steps - 1))
            _log.info(
                "importance weighting: %s of %s sequences, about %.1f minutes left",
                f"{done:,}",
                f"{total:,}",
                left / 60,
            )
        yield batch
        done, steps = done + len(batch.lengths_B), steps + int(batch.lengths_B.sum())
