"""Everything that is known of a trained model on some sequences, as one record in types of JSON.

In: a trained model, opened data, splits. Out: the record that is printed, written to a file and appended to `evaluation.jsonl`; and
the importance-weighted NLL of each sequence, for whoever compares runs on the same ones.
"""

import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription
from seqvae.errors import harmless
from seqvae.files import JsonLines
from seqvae.inference.estimates import (
    Estimate,
    PosteriorStatistics,
    SequenceNLL,
    exp,
    importance_weighted_nll,
    posterior_statistics,
)
from seqvae.inference.model import Trained, at_work, joined_batches, sequences_in, shares
from seqvae.models.likelihoods import EventLikelihood, VectorLikelihood
from seqvae.models.vae import SequenceVAE
from seqvae.reports.__main__ import write_report
from seqvae.reports.run_files import REPORT, command_line, utc_now

# How far off the model is, feature by feature, in the data's own units: each value against its mean under the model, told the
# posterior's mean for z and all steps before it (one step ahead, by teacher forcing).
#
# In: a trained model and batches of vectors or events. Out: for each feature or variable RMSE and MAE over all measured values,
# with standard errors over sequences, and beside them the RMSE of the training mean, which knows nothing.
#
# Shapes: B sequences, T steps, D features or variables, E events.


class FeatureError(NamedTuple):
    """Of one feature or variable, in its own units."""

    name: str
    values: int
    """Values that were measured."""
    rmse: float
    rmse_error: float
    mae: float
    mae_error: float
    rmse_of_mean: float
    """Of the training mean in place of the model."""


def feature_errors(trained: Trained, batches: Iterable[Batch]) -> list[FeatureError]:
    """Of those that were measured at least once; tokens have none."""
    if trained.description.kind == "tokens":
        return []
    sums = None
    with at_work(trained):
        for batch in batches:
            found = _sums_of(*_per_sequence(trained.network, move_data_to_device(batch, trained.device)))
            sums = found if sums is None else sums + found
    assert sums is not None, "there is a batch"
    return _in_own_units(sums, trained)


class _PerSequence(NamedTuple):
    """(B, D) each, float64."""

    counts: Tensor
    squares: Tensor
    absolutes: Tensor
    plain_squares: Tensor
    """Of the values themselves, normalised: the training mean is 0 there."""


def _per_sequence(network: SequenceVAE, batch: Batch) -> _PerSequence:
    assert not isinstance(batch, TokenBatch)
    hidden_BTW = network.decoder_says(network.embedding(batch), network.encode(batch).mean)
    if isinstance(batch, VectorBatch):
        assert isinstance(network.likelihood, VectorLikelihood)
        known_BTD = batch.observed_BTD.double()
        values_BTD = batch.values_BTD.double()
        off_BTD = (values_BTD - network.likelihood.predict(hidden_BTW)[0].double()) * known_BTD
        kinds = (known_BTD, off_BTD.square(), off_BTD.abs(), values_BTD.square() * known_BTD)
        return _PerSequence(*(kind.sum(dim=1) for kind in kinds))
    assert isinstance(network.likelihood, EventLikelihood)
    return _of_events(
        batch, network.likelihood.event_means(hidden_BTW, batch).double(), len(network.likelihood.valued_V)
    )


def _of_events(batch: EventBatch, means_E: Tensor, variables: int) -> _PerSequence:
    known_E, values_E = batch.has_value_E.double(), batch.values_E.double()
    off_E = (values_E - means_E) * known_E
    sequences, steps = batch.gaps_BT.shape
    cell_E = batch.steps_E // steps * variables + batch.variables_E

    def added(values_E: Tensor) -> Tensor:
        flat = values_E.new_zeros(sequences * variables).index_add(0, cell_E, values_E)
        return flat.view(sequences, variables)

    return _PerSequence(*map(added, (known_E, off_E.square(), off_E.abs(), values_E.square() * known_E)))


def _sums_of(counts: Tensor, squares: Tensor, absolutes: Tensor, plain_squares: Tensor) -> np.ndarray:
    """What means and their standard errors take, (10, D): a sum over sequences each, so that batches add up."""
    parts = (
        *(torch.ones_like(counts), counts, squares, absolutes, plain_squares),
        *(counts.square(), squares.square(), absolutes.square(), squares * counts, absolutes * counts),
    )
    return torch.stack([part.sum(dim=0) for part in parts]).cpu().numpy()


def _in_own_units(sums: np.ndarray, trained: Trained) -> list[FeatureError]:
    found = []
    for name, std, column in zip(trained.description.names, trained.description.std, sums.T, strict=True):
        sequences, count, squares, absolutes, plain, counts2, squares2, absolutes2, crossed, crossed_absolutes = column
        if count == 0:
            continue
        mse, mae = squares / count, absolutes / count
        mse_error = _error(sequences, count, mse, squares2, crossed, counts2)
        mae_error = _error(sequences, count, mae, absolutes2, crossed_absolutes, counts2)
        rmse = float(np.sqrt(mse))
        rmse_error = mse_error / (2 * rmse) if rmse > 0 else 0.0  # the slope of the root
        numbers = (rmse, rmse_error, mae, mae_error, np.sqrt(plain / count))
        found.append(FeatureError(name, int(count), *(float(number * std) for number in numbers)))
    return found


def _error(sequences: float, count: float, ratio: float, squared: float, crossed: float, counts2: float) -> float:
    """The standard error of a ratio of sums over sequences, as `seqvae.inference.estimates.mean_of` has it."""
    if sequences < 2:
        return float("inf")
    scatter = max(0.0, squared - 2 * ratio * crossed + ratio**2 * counts2)
    return float(np.sqrt(scatter * sequences / (sequences - 1)) / count)


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


# Where and when a model was evaluated, and the row of it in its run's directory.
#
# In: a trained model and the command as typed. Out: the beginning of the record, and one line more in `evaluation.jsonl`.

EVALUATION = "evaluation.jsonl"


def place_and_time(trained: Trained, data: SequenceDataModule, argv: Sequence[str]) -> dict[str, Any]:
    source = data.source.data_dir
    return {
        "time": utc_now(),
        "command": command_line(argv),
        "checkpoint": name_of(trained),
        "data": "demo data" if source is None else Path(source).name or source,
    }


def name_of(trained: Trained) -> str:
    """Short, and without the way to it: `mine/best.ckpt`, or of what lies in no run, its file and folder."""
    folder = trained.path.absolute().parent if trained.run is None else trained.run
    return f"{folder.name}/{trained.path.name}"


def append_record(run: Path | None, record: dict[str, Any]) -> None:
    """To the directory of the run, if the checkpoint lies in one, and to its report, if it has one."""
    if run is None or not run.is_dir():
        return
    file = JsonLines(run / EVALUATION)
    file.append(record)
    file.finish()
    if (run / REPORT).is_file():
        _renew_report(run)


def _renew_report(directory: Path) -> None:
    try:
        write_report(directory)
    except OSError as error:
        reason = error.strerror or error
        print(harmless(f"note: {directory / REPORT} cannot be written ({reason}) and is as it was before"), flush=True)


# Evaluated models side by side: their records and paired differences in, one dict in types of JSON out.

UNLIKE = {
    "kind": "not data of the same kind",
    "split": "not the same split",
    "units": "not in the same units: the models know other vocabularies, moments or scales of time",
    "content": "not the same sequences, in the same order and cut alike",
}
"""Of a record: what has to be the same for its numbers to compare, and what is said where it is not."""


def compare(found: Sequence[tuple[dict[str, Any], Weighted | None]]) -> dict[str, Any]:
    """`differences`: IW-NLL of one less that of another, where both were measured on the same sequences."""
    letters = [chr(ord("A") + number) for number in range(len(found))]
    pairs = combinations(zip(letters, found, strict=True), 2)
    differences, unlike = [], []
    for (one, (record, ours)), (other, (another, theirs)) in pairs:
        if (reason := _unlike(record, another)) is not None:
            unlike.append(f"{one} and {other}: {reason}")
        elif (difference := paired_difference(ours, theirs)) is not None:
            lower = one if difference.value < 0 else other
            differences.append({"of": f"{one} - {other}", **difference._asdict(), "lower": lower})
    records = tuple(record for record, _ in found)
    return {"records": records, "same_data": not unlike, "unlike": tuple(unlike), "differences": tuple(differences)}


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    return next((text for name, text in UNLIKE.items() if one[name] != other[name]), None)
