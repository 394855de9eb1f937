"""Everything that is known of a trained model on some sequences, as one record in types of JSON, and records side by side.

In: a trained model, opened data, splits. Out: the record that is printed, written to a file and appended to `evaluation.jsonl`; and
the importance-weighted NLL of each sequence, for comparing models on the same ones.

Shapes: B sequences, N sequences of all batches, T steps, D features or variables, E events.
"""

import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from seqvae.config.inference import EvaluateSettings
from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch, checksum_of, padded_length, predicted_steps
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import UNKNOWN, DataDescription
from seqvae.errors import harmless
from seqvae.files import JsonLines
from seqvae.inference.estimates import (
    MOST_SAMPLES,
    STEP_LEVEL,
    CodeUse,
    Estimate,
    LevelStatistics,
    PosteriorStatistics,
    SequenceNLL,
    exp,
    importance_weighted_nll,
    mean_of,
    posterior_statistics,
)
from seqvae.inference.probe import probe, refuse_no_probe, sums_by_variable
from seqvae.inference.streaming import Part, evaluating, joined_batches, paired_batches, shares
from seqvae.models.likelihoods import EventLikelihood, TokenLikelihood, VectorLikelihood
from seqvae.models.vae import SequenceVAE
from seqvae.reports.__main__ import write_report
from seqvae.reports.run_files import LATENTS, REPORT, command_line, utc_now
from seqvae.text import counted
from seqvae.training.callbacks.latents import MOST_STEPS, choose, picture_of, write_picture

if TYPE_CHECKING:
    from seqvae.inference.model import Model

EVALUATION = "evaluation.jsonl"
NEAR_CAP = 0.9
"""Share of log N from which on a note says that the mutual information saturates."""
DECISIVE = 0.2
"""Nats, the error bar of an IW-NLL at which no more samples are drawn, unless their number was given."""
FEW_SAMPLES = 10.0
"""Samples that carry an importance-weighted estimate; below it a note says that it is not tight."""
PROGRESS_EVERY_SECONDS = 15.0
UNLIKE = {
    "kind": "not data of the same kind",
    "split": "not the same split",
    "units": "not in the same units: the models know other vocabularies, moments or scales of time",
    "content": "not the same sequences, in the same order and cut alike",
}
"""Fields of a record that have to agree for its numbers to compare, and the finding where they do not."""

_log = logging.getLogger(__name__)


# --- One model ---------------------------------------------------------------------------------------------------------


class Weighted(NamedTuple):
    """Importance-weighted NLL, sequence by sequence."""

    nll: SequenceNLL
    most_samples: int
    """A sequence that got fewer had enough."""
    names: tuple[str, ...]
    """Split and id of each sequence."""
    description: DataDescription
    """Without classes and the share of <unknown>: the units that the values were measured in."""
    units_N: np.ndarray | None = None
    """What the NLL of each sequence rises by in the data's own units; None for tokens, which have none."""


def evaluate(
    model: "Model",
    data: SequenceDataModule,
    splits: Sequence[str],
    settings: EvaluateSettings,
    seed: int,
    argv: Sequence[str] | None = None,
) -> tuple[dict[str, Any], Weighted | None]:
    """Return the record, with the command line if it is given, and the IW-NLL of each sequence that it was computed of."""
    if settings.probe is not None:
        refuse_no_probe(data, settings.probe, splits)
    weighted = None
    if settings.iw_sequences:
        weighted = weighted_nll(model, data, splits, settings.iw_samples, settings.iw_sequences, seed)
    measured_at = utc_now()

    pairs = paired_batches(data, splits, seed=seed)
    units_of = None if model.description.kind == "tokens" else partial(nats_of_units, model.description)
    statistics = posterior_statistics(model.network, pairs, seed=seed, autocast=model.autocast, nats_of_units=units_of)
    features = feature_errors(model, joined_batches(data, splits))
    # A network that was trained with labels compares with one that was not: classes are no units.
    units = repr(replace(model.description, classes=())).encode()
    content = 0
    for part in joined_batches(data, splits):
        content = checksum_of(part.batch, without=("labels_B",), begin=content)
    folder = model.path.absolute().parent if model.run is None else model.run
    source = data.source.data_dir
    record: dict[str, Any] = {
        "time": measured_at,
        **({} if argv is None else {"command": command_line(argv)}),
        "checkpoint": f"{folder.name}/{model.path.name}",
        "data": "demo data" if source is None else Path(source).name or source,
        "step": model.step,
        "parameters": model.parameters,
        "kind": model.description.kind,
        "units": f"{zlib.crc32(units):08x}",
        "content": f"{content:08x}",
        "split": "+".join(splits),
        "sequences": statistics.sequences,
        "steps": statistics.steps,
        "seed": seed,
        "latent_size": model.settings["latent_size"],
        "rows": (
            *_rows(statistics, weighted, model.description.unit),
            *_row_of_known(model, data, splits, seed),
        ),
        "kl_per_dim": statistics.kl_per_dim,
        **({"step_kl_per_dim": statistics.levels[STEP_LEVEL].kl_per_dim} if statistics.levels else {}),
        "features": tuple(one._asdict() for one in features),
        "notes": tuple(_notes(statistics, weighted, features)),
    }
    if settings.probe is not None:
        record["probe"] = probe(model, data, settings.probe, splits, seed)
    return record, weighted


def weighted_nll(
    model: "Model", data: SequenceDataModule, splits: Sequence[str], samples: int | None, sequences: int, seed: int
) -> Weighted:
    """Weigh `sequences` sequences, the same for the same seed, with `samples` each; None: while they decide. Log progress."""
    counts = shares(data, splits, sequences)
    lengths = [data.split(split).lengths_N.mean(dtype=np.float64) for split in splits]
    expected_steps = float(np.dot(lengths, counts))
    units = []

    fewer = sum(counts) // 4
    cheaper = (
        f" (--iw_sequences {fewer} would take a quarter of the time, for twice the standard error)" if fewer else ""
    )
    owners = []

    def with_progress() -> Iterator[Batch]:
        begun = logged = time.monotonic()
        done, steps = 0, 0
        for part in joined_batches(data, splits, sequences=sequences, seed=seed):
            batch, now = part.batch, time.monotonic()
            owners.append(part.owners_B)
            if now - logged > PROGRESS_EVERY_SECONDS and steps:
                logged = now
                minutes = max(0.0, (now - begun) * (expected_steps / steps - 1)) / 60
                progress = f"{done:,} of {sum(counts):,} sequences, about {minutes:.1f} minutes left{cheaper}"
                _log.info("importance weighting: %s", progress)
            units.append(nats_of_units(model.description, batch).numpy())
            yield batch
            done, steps = done + len(batch.lengths_B), steps + int(batch.lengths_B.sum())

    most, within = (MOST_SAMPLES, DECISIVE) if samples is None else (samples, None)
    batches = with_progress()
    nll = importance_weighted_nll(
        model.network, batches, samples=most, within=within, seed=seed, autocast=model.autocast
    )
    nll = nll._replace(owners_N=np.concatenate(owners))
    names, first = [], 0
    for split, count in zip(splits, counts, strict=True):
        names += [f"{split} {name}" for name in data.split(split).ids(nll.sequences_N[first : first + count])]
        first += count
    units_N = None if model.description.kind == "tokens" else np.concatenate(units)
    return Weighted(nll, most, tuple(names), replace(model.description, classes=(), unknown_share=0.0), units_N)


def nats_of_units(description: DataDescription, batch: Batch) -> Tensor:
    """Return what the NLL of each sequence rises by where values count in their own units, (B,) in float64: the logarithm of the
    standard deviation of each value that was measured. Gaps of events are densities in the data's time as they are."""
    rises_B = torch.zeros(len(batch.lengths_B), dtype=torch.float64, device=batch.lengths_B.device)
    if isinstance(batch, TokenBatch):
        return rises_B
    log_std_V = torch.tensor(description.std, dtype=torch.float64, device=rises_B.device).log()
    if isinstance(batch, VectorBatch):
        return (batch.observed_BTD * log_std_V).sum(dim=(1, 2))
    rises_E = log_std_V[batch.variables_E] * batch.has_value_E
    return rises_B.index_add(0, batch.steps_E // padded_length(batch), rises_E)


def draw_latents(model: "Model", data: SequenceDataModule) -> None:
    """Write what the latents look like into a run whose end did not: one that was stopped, not monitored, or is older than that."""
    if model.run is None or not (model.run / REPORT).is_file() or (model.run / LATENTS).exists():
        return
    sequences = data.split("valid")
    chosen_N = choose(sequences, MOST_STEPS, seed=0)
    if len(chosen_N) > 1:
        write_picture(model.run, model.step, picture_of(model.network, sequences, chosen_N, model.description))


def append_record(run: Path | None, record: dict[str, Any]) -> None:
    """Append a record to the run that the checkpoint lies in, if any, and renew its report if it has one."""
    if run is None or not run.is_dir():
        return
    file = JsonLines(run / EVALUATION)
    file.append(record)
    file.finish()
    if (run / REPORT).is_file():
        try:
            write_report(run)
        except OSError as error:
            reason = error.strerror or error
            print(harmless(f"note: {run / REPORT} cannot be written ({reason}) and is as it was before"), flush=True)


def _rows(statistics: PosteriorStatistics, weighted: Weighted | None, unit: str) -> tuple[dict[str, Any], ...]:
    """Return name, value, standard error and what it is of, row by row."""
    sequences, steps, elbo = statistics.sequences, statistics.steps, statistics.elbo
    whole = counted(statistics.owners, "sequence")
    rate_of = "KL of q(z | x) from the prior" + (", both levels" if statistics.levels else "")
    if statistics.rate_is_estimated:
        rate_of += ", one draw each"
    if statistics.codes is not None:
        rate_of = "-log p(codes), " + (
            "by the fitted prior" if statistics.codes.has_fitted_prior else "all equally likely"
        )
    rows: list[tuple[str, Estimate | float, str]] = [
        ("ELBO", elbo, whole if statistics.owners == sequences else f"{sequences:,} windows of {whole}"),
        ("NLL", statistics.nll, "-log p(x | z), one z each"),
        ("NLL per step", statistics.nll_per_step, counted(steps, unit)),
        ("rate", statistics.rate, rate_of),
    ]
    if weighted is not None:
        least, most = weighted.nll.samples_N.min(), weighted.nll.samples_N.max()
        drawn = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        of = f"-log p(x): {drawn} z, {len(weighted.names):,} sequences"
        if statistics.codes is not None:
            of = f"-log p(x, codes), an upper bound: nothing is drawn; {len(weighted.names):,} sequences"
        rows += [("IW-NLL", weighted.nll.per_sequence, of), ("IW-NLL per step", weighted.nll.per_step, f"per {unit}")]
    if unit == "token":
        if weighted is not None:
            perplexity = weighted.nll.perplexity
            estimate = Estimate(perplexity, perplexity * weighted.nll.per_step.error)
            rows.append(("perplexity", estimate, "of the IW-NLL; not in nats"))
        bound = exp(-elbo.value * sequences / steps)
        estimate = Estimate(bound, bound * elbo.error * sequences / steps)
        rows.append(("perplexity, ELBO", estimate, "an upper bound; not in nats"))
    if (own := statistics.own_units) is not None:
        of = "values in their own units"
        rows += [("ELBO, own units", own.elbo, of), ("NLL, own units", own.nll, of)]
        rows.append(("NLL per step, own units", own.nll_per_step, of))
        if weighted is not None and weighted.units_N is not None:
            nll = weighted.nll._replace(nll_N=weighted.nll.nll_N + weighted.units_N)
            rows.append(("IW-NLL, own units", nll.per_sequence, of))
    for name, level in _levels_of(statistics).items():
        of = f"of N = {level.posteriors:,} posteriors: at most {math.log(level.posteriors):.2f}"
        costs = (
            f"what another's {name} latents cost, of like length" if name else "what another's z costs, of like length"
        )
        of_level = f", {name}" if name else ""
        rows += [("rate" + of_level, level.rate, "KL from their prior, per sequence")] if name else []
        rows += [
            *_use_of(statistics.codes, level, of_level),
            ("mutual information" + of_level, level.mutual_information, of),
            ("decoder use" + of_level, level.decoder_use or math.nan, costs),
        ]
    return tuple(
        {"name": name, **value._asdict(), "of": of}
        if isinstance(value, Estimate)
        else {"name": name, "value": value, "error": None, "of": of}
        for name, value, of in rows
    )


def _levels_of(statistics: PosteriorStatistics) -> Mapping[str, PosteriorStatistics | LevelStatistics]:
    """Return the readings of each level of latents by what has them, which is empty where there is one level."""
    return statistics.levels or {"": statistics}


def _use_of(
    codes: CodeUse | None, level: PosteriorStatistics | LevelStatistics, of_level: str
) -> list[tuple[str, float, str]]:
    """Return what is in use of a latent: dimensions, or codes."""
    if codes is None:
        return [("active units" + of_level, level.active_units, f"of {len(level.kl_per_dim)} dimensions")]
    books = "" if codes.books == 1 else f" in each of {codes.books} codebooks"
    return [
        ("codes in use", codes.in_use, f"share of {codes.size:,} codes{books}"),
        ("code perplexity", codes.perplexity, "as many codes, equally used, would tell as much"),
    ]


def _notes(
    statistics: PosteriorStatistics, weighted: Weighted | None, features: Sequence["FeatureError"]
) -> Iterator[str]:
    for name, level in _levels_of(statistics).items():
        use = level.decoder_use
        if use is not None and use.value < 2 * use.error:
            ignored = (
                f"the {name} latents: those of another sequence cost" if name else "z: that of another sequence costs"
            )
            yield (
                f"the decoder ignores {ignored} it {use.value:.3g} ± {use.error:.2g} nats, and the "
                f"rate of {level.rate.value:.3g} is paid for nothing"
            )
    if (left_out := statistics.without_partner) == statistics.sequences:
        yield "the decoder use is not known: there is no other sequence, or all are windows of a single one"
    elif left_out:
        yield f"the decoder use leaves out {counted(left_out, 'sequence')}: all others of the split are windows of the same one"
    for name, level in _levels_of(statistics).items():
        size, cap, of_level = (
            len(level.kl_per_dim),
            math.log(level.posteriors),
            f" of the {name} latents" if name else "",
        )
        if statistics.codes is None and (dead := size - level.active_units):
            dimensions = f"dimensions{of_level}" if name else "latent dimensions"
            yield f"{dead} of {size} {dimensions} are dead: their means vary by less than 0.01 over the data"
        if level.mutual_information > NEAR_CAP * cap:
            yield (
                f"the mutual information{of_level} of {level.mutual_information:.2f} is near log N = {cap:.2f}, the most that "
                f"{level.posteriors:,} posteriors can show: the truth may be more, and runs on fewer sequences do not compare"
            )
    if weighted is not None:
        effective, drawn = (float(np.median(each)) for each in (weighted.nll.effective_N, weighted.nll.samples_N))
        if drawn == weighted.most_samples and effective < min(FEW_SAMPLES, drawn / 2):
            yield (
                f"the IW-NLL is not tight: in the median sequence {effective:.1f} of {drawn:,.0f} samples carry it, so "
                "that it is an upper bound on -log p(x) that more --iw_samples would lower"
            )
    worse = [one.name for one in features if 0 < one.rmse_of_mean < one.rmse - 2 * one.rmse_error]
    if worse:
        shown = ", ".join(worse[:5]) + (", ..." if len(worse) > 5 else "")
        yield f"worse than their training mean: {len(worse)} of {len(features)} ({shown})"


# --- What is unknown ---------------------------------------------------------------------------------------------------


def _row_of_known(
    model: "Model", data: SequenceDataModule, splits: Sequence[str], seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a row with the NLL per step of all but <unknown>, one z each, where there is any: steps of tokens that are <unknown>
    are left out, and of the steps of events whether <unknown> is among them."""
    counts = [data.data.counts[split] for split in splits]
    if not any(each.get("unknown", each.get("per_name", [0])[0]) for each in counts):
        return
    network, likelihood, parts, owners = model.network, model.network.likelihood, [], []
    with evaluating(network, model.autocast) as device:
        torch.manual_seed(seed)
        for part in joined_batches(data, splits):
            batch = move_data_to_device(part.batch, device)
            owners.append(part.owners_B)
            steps_BTW = network.embedding(batch)
            hidden_BSW = network.decode_hidden(steps_BTW, network.latents(batch, steps_BTW).z)
            known_steps_B = predicted_steps(batch)
            if isinstance(batch, TokenBatch):
                assert isinstance(likelihood, TokenLikelihood)
                unknown_BS, is_unknown_BS = likelihood.unknown_nll(hidden_BSW, batch)
                known_steps_B = known_steps_B - is_unknown_BS.sum(dim=1)
            else:
                assert isinstance(likelihood, EventLikelihood)
                assert isinstance(batch, EventBatch)
                unknown_BS, is_unknown_BS = likelihood.unknown_nll(hidden_BSW, batch)
            known_B = likelihood(hidden_BSW, batch).sum(dim=1) - unknown_BS.sum(dim=1)
            columns = (known_B, known_steps_B, (unknown_BS * is_unknown_BS).sum(dim=1), is_unknown_BS.sum(dim=1))
            parts.append(torch.stack([column.double() for column in columns]).cpu().numpy())
    known_N, known_steps_N, unknown_N, is_unknown_N = np.concatenate(parts, axis=1)
    count = int(is_unknown_N.sum())
    if count == 0:
        return  # they are beyond the length cap
    of = f"all but {UNKNOWN} ({count:,}, at {unknown_N.sum() / count:.3g} nats each)"
    yield {"name": "NLL per known step", **mean_of(known_N, known_steps_N, np.concatenate(owners))._asdict(), "of": of}


# --- Errors of each feature --------------------------------------------------------------------------------------------


class FeatureError(NamedTuple):
    """The error of the model for one feature or variable, in its own units.

    Each value is held against its mean under the model, given the posterior's mean for z and all steps before it.
    """

    name: str
    values: int
    """Values that were measured."""
    rmse: float
    rmse_error: float
    mae: float
    mae_error: float
    rmse_of_mean: float
    """RMSE of the training mean in place of the model."""


def feature_errors(model: "Model", parts: Iterable[Part]) -> list[FeatureError]:
    """Return the errors of all features that were measured at least once; tokens have none."""
    if model.description.kind == "tokens":
        return []
    gram_55D = np.zeros((5, 5, len(model.description.names)))
    parts_of: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    """By owner, of those that were cut into windows: the columns that were measured in each window, and its sums there."""
    with evaluating(model.network, model.autocast) as device:
        for _, batch, owners_B, is_whole_B in parts:
            sums = _sums_per_sequence(model.network, move_data_to_device(batch, device))
            sums_5BD = torch.stack((torch.ones_like(sums[0]), *sums))
            whole_5BD = sums_5BD[:, torch.from_numpy(is_whole_B).to(device)]
            gram_55D += torch.einsum("ibd,jbd->ijd", whole_5BD, whole_5BD).cpu().numpy()
            for place in np.flatnonzero(~is_whole_B).tolist():
                sums_5D = sums_5BD[:, place].cpu().numpy()
                measured = np.flatnonzero(sums_5D[1])
                parts_of.setdefault(int(owners_B[place]), []).append((measured, sums_5D[:, measured]))
    for windows in parts_of.values():
        total_5D = np.zeros(gram_55D.shape[1:])
        for measured, sums_5M in windows:
            total_5D[:, measured] += sums_5M
        total_5D[0] = 1.0
        gram_55D += total_5D[:, None] * total_5D
    found = []
    for place, (name, std) in enumerate(zip(model.description.names, model.description.std, strict=True)):
        gram_55 = gram_55D[..., place]
        _, count, squares, absolutes, plain = gram_55[0]
        if count == 0:
            continue
        rmse = math.sqrt(squares / count)
        rmse_error = _error_of_ratio(gram_55, 2) / (2 * rmse) if rmse > 0 else 0.0  # the slope of the root
        numbers = (rmse, rmse_error, absolutes / count, _error_of_ratio(gram_55, 3), math.sqrt(plain / count))
        found.append(FeatureError(name, int(count), *(float(number * std) for number in numbers)))
    return found


def _error_of_ratio(gram_55: np.ndarray, kind: int) -> float:
    """Return the standard error of a sum over the count of values, both over owners, as `mean_of` has it."""
    owners, count, ratio = gram_55[0, 0], gram_55[0, 1], gram_55[0, kind] / gram_55[0, 1]
    if owners < 2:
        return math.inf
    scatter = max(0.0, gram_55[kind, kind] - 2 * ratio * gram_55[kind, 1] + ratio**2 * gram_55[1, 1])
    return math.sqrt(scatter * owners / (owners - 1)) / float(count)


def _sums_per_sequence(network: SequenceVAE, batch: Batch) -> tuple[Tensor, ...]:
    """Return counts of measured values, and sums of squared errors, absolute errors and squared values, (B, D) in float64.

    Values are normalised: the training mean is 0.
    """
    assert not isinstance(batch, TokenBatch)
    hidden_BTW = network.decode_hidden(network.embedding(batch), network.latent_at_mean(batch))
    if isinstance(batch, VectorBatch):
        assert isinstance(network.likelihood, VectorLikelihood)
        known_BTD, values_BTD = batch.observed_BTD.double(), batch.values_BTD.double()
        off_BTD = (values_BTD - network.likelihood.predict(hidden_BTW)[0].double()) * known_BTD
        parts = (known_BTD, off_BTD.square(), off_BTD.abs(), values_BTD.square() * known_BTD)
        return tuple(part.sum(dim=1) for part in parts)
    assert isinstance(network.likelihood, EventLikelihood)
    known_E, values_E = batch.has_value_E.double(), batch.values_E.double()
    off_E = (values_E - network.likelihood.event_means(hidden_BTW, batch).double()) * known_E
    parts = (known_E, off_E.square(), off_E.abs(), values_E.square() * known_E)
    return sums_by_variable(batch, len(network.likelihood.valued_V), parts)


# --- Models side by side -----------------------------------------------------------------------------------------------


def compare(found: Sequence[tuple[dict[str, Any], Weighted | None]]) -> dict[str, Any]:
    """Return records side by side, with the `differences` of their IW-NLL where both were measured on the same sequences."""
    letters = [chr(ord("A") + number) for number in range(len(found))]
    differences, unlike = [], []
    for (one, (record, ours)), (other, (another, theirs)) in combinations(zip(letters, found, strict=True), 2):
        reason = next((text for name, text in UNLIKE.items() if record[name] != another[name]), None)
        if reason is not None:
            unlike.append(f"{one} and {other}: {reason}")
        elif (difference := paired_difference(ours, theirs)) is not None:
            lower = one if difference.value < 0 else other
            differences.append({"of": f"{one} - {other}", **difference._asdict(), "lower": lower})
    records = tuple(record for record, _ in found)
    return {"records": records, "same_data": not unlike, "unlike": tuple(unlike), "differences": tuple(differences)}


def paired_difference(one: Weighted | None, other: Weighted | None) -> Estimate | None:
    """Return the IW-NLL of one model minus that of another, nats per sequence; None if not of the same sequences."""
    if one is None or other is None or one.description != other.description or sorted(one.names) != sorted(other.names):
        return None
    ours, theirs = np.argsort(one.names, kind="stable"), np.argsort(other.names, kind="stable")
    if not np.array_equal(one.nll.steps_N[ours], other.nll.steps_N[theirs]):
        return None
    owners_N = None if one.nll.owners_N is None else one.nll.owners_N[ours]
    return mean_of(one.nll.nll_N[ours] - other.nll.nll_N[theirs], owners_N=owners_N)
