"""What the latents know of a label that the model was never told: a linear probe, beside what simple summaries know of it.

In: a trained model and data with labels. Out: for the posterior means, for summaries of the raw sequences, and for both together,
how well a logistic regression tells the classes apart; trained on the training split, scored on others. The windows that
--long_sequences split cuts a sequence into count as one sequence, with the mean of their numbers: they share its label.

Shapes: N sequences, P numbers, C classes.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from lightning.fabric.utilities import move_data_to_device

from seqvae.data.batches import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import DataError
from seqvae.exit_codes import UsageError
from seqvae.inference.bootstrap import Drawn, Interval, draw_score
from seqvae.inference.logistic import fit_classifier
from seqvae.inference.splits import joined_batches
from seqvae.inference.summaries import Summarise, frequent_tokens
from seqvae.inference.trained import Trained, at_work
from seqvae.models.sequence_vae import mean_over_steps

MOST_SEQUENCES = 20_000
"""Of each side; more would change the third digit."""

_log = logging.getLogger(__name__)


class ProbeRow(NamedTuple):
    features: str
    """What the probe was told."""
    numbers: int
    """How many numbers of each sequence."""
    score: Interval
    strength: float
    """Of the penalty, as chosen."""


class Difference(NamedTuple):
    """Of two rows' scores on the same sequences."""

    of: str
    score: Interval


class Probed(NamedTuple):
    label: str
    metric: str
    """AUROC (of the second of two classes) or accuracy."""
    classes: tuple[str, ...]
    trained_on: int
    scored_on: int
    without_label: int
    """Sequences of both sides that have none, and were left out."""
    largest_share: float
    """Of the scored sequences, those of the most frequent class: what guessing comes to."""
    rows: tuple[ProbeRow, ...]
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """In types of JSON, but for tuples."""
        return self._asdict() | {
            "rows": tuple(row._asdict() for row in self.rows),
            "differences": tuple(one._asdict() for one in self.differences),
        }


def probe(trained: Trained, data: SequenceDataModule, label: str, splits: Sequence[str], seed: int = 0) -> Probed:
    classes = data.description.classes
    refuse_no_probe(data, label, splits)
    summarise = _summariser(trained, data, seed)
    train, test = (_collect(trained, data, of, summarise, seed) for of in (["train"], splits))
    for side, name in ((train, "training split"), (test, f"{' and '.join(splits)} split")):
        if len(np.unique(side.classes_N)) < 2:
            found = f"only {classes[side.classes_N[0]]!r}" if len(side.classes_N) else "no label at all"
            raise DataError(f"--probe {label}: the {name} has {found}, so that there is nothing to tell apart.")
    rows, drawn = [], {}
    for name, parts in _feature_sets(train, test).items():
        of_train, of_test = (np.concatenate([side.numbers[part] for part in parts], axis=1) for side in (train, test))
        _log.info("probe: %s (%s numbers of %s sequences)", name, f"{of_train.shape[1]:,}", f"{len(of_train):,}")
        fitted = fit_classifier(of_train, train.classes_N, len(classes), seed)
        drawn[name] = draw_score(fitted.scores(of_test), test.classes_N)
        rows.append(ProbeRow(name, of_train.shape[1], drawn[name].interval, fitted.strength))
    return Probed(
        label=label,
        metric="AUROC" if len(classes) == 2 else "accuracy",
        classes=classes,
        trained_on=len(train.classes_N),
        scored_on=len(test.classes_N),
        without_label=train.without_label + test.without_label,
        largest_share=float(np.bincount(test.classes_N).max() / len(test.classes_N)),
        rows=tuple(rows),
        differences=tuple(_differences(drawn)),
    )


def refuse_no_probe(data: SequenceDataModule, label: str, splits: Sequence[str]) -> None:
    """Before anything is computed."""
    if "train" in splits:
        raise UsageError(f"--probe {label} is trained on the training split: choose another --split to score it on")
    if "train" not in data.data.splits:
        raise DataError(
            f"--probe {label} is trained on a training split, and these data have only {' and '.join(data.data.splits)}. "
            "Give data with train/ beside them."
        )
    if len(data.description.classes) < 2:
        raise DataError(
            f"--probe {label}: all labels are {data.description.classes[0]!r}, so that there is nothing to tell apart."
        )


class _Side(NamedTuple):
    """One side of the probe, without what has no label."""

    numbers: dict[str, np.ndarray]
    """(N, P) each."""
    classes_N: np.ndarray
    without_label: int


def _feature_sets(train: _Side, test: _Side) -> dict[str, tuple[str, ...]]:
    """What each probe is told, of `_Side.numbers`."""
    if "means" not in train.numbers:
        return {"latents": ("latents",), "summaries": ("rest",), "summaries + latents": ("rest", "latents")}
    return {
        "latents": ("latents",),
        "means": ("means",),
        "means + latents": ("means", "latents"),
        "summaries": ("means", "rest"),
        "summaries + latents": ("means", "rest", "latents"),
    }


def _differences(drawn: dict[str, Drawn]) -> Iterator[Difference]:
    pairs = [(f"{simple} + latents", simple) for simple in ("means", "summaries")]
    pairs += [("latents", simple) for simple in ("means", "summaries")]
    for one, other in pairs:
        if one in drawn and other in drawn:
            yield Difference(f"{one} - {other}", drawn[one].minus(drawn[other]).interval)


def _summariser(trained: Trained, data: SequenceDataModule, seed: int) -> Summarise:
    if trained.description.kind != "tokens":
        return Summarise(len(trained.description.names))
    batches = (batch for _, batch in joined_batches(data, ["train"], sequences=MOST_SEQUENCES, seed=seed))
    return Summarise(0, frequent_tokens(batches, trained.description.vocabulary_size))


def _collect(
    trained: Trained, data: SequenceDataModule, splits: Sequence[str], summarise: Summarise, seed: int
) -> _Side:
    parts: dict[str, list[np.ndarray]] = {"latents": [], "means": [], "rest": []}
    labels, owners = [], []
    for split, batch in joined_batches(data, splits, sequences=MOST_SEQUENCES, seed=seed):
        assert batch.labels_B is not None, "the data were opened with labels"
        labels.append(batch.labels_B.numpy())
        cut_N, sequences_B = data.split(split).windows.owners_N, batch.sequences_B.numpy()
        owners.append((splits.index(split) << 48) + (sequences_B if cut_N is None else cut_N[sequences_B]))
        summary = summarise(batch)
        parts["latents"].append(_latents(trained, batch))
        parts["rest"].append(summary.rest)
        if summary.means is not None:
            parts["means"].append(summary.means)
    classes_N, owners_N = np.concatenate(labels), np.concatenate(owners)
    numbers = {name: np.concatenate(pieces).astype(np.float64) for name, pieces in parts.items() if pieces}
    if len(np.unique(owners_N)) < len(owners_N):
        numbers = {name: mean_of_windows(numbers_NP, owners_N) for name, numbers_NP in numbers.items()}
        classes_N = classes_N[np.unique(owners_N, return_index=True)[1]]
    has_label_N = classes_N >= 0
    numbers = {name: numbers_NP[has_label_N] for name, numbers_NP in numbers.items()}
    return _Side(numbers, classes_N[has_label_N], int((~has_label_N).sum()))


def mean_of_windows(numbers_NP: np.ndarray, owners_N: np.ndarray) -> np.ndarray:
    """A row for each owner, ascending: the mean over its windows, NaN where none of them knows."""
    unique, place_N = np.unique(owners_N, return_inverse=True)
    known_NP = ~np.isnan(numbers_NP)
    sums, counts = (np.zeros((len(unique), numbers_NP.shape[1])) for _ in range(2))
    np.add.at(sums, place_N, np.where(known_NP, numbers_NP, 0.0))
    np.add.at(counts, place_N, known_NP)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _latents(trained: Trained, batch: Batch) -> np.ndarray:
    """Posterior means, (B, Z); with a latent for each step, their mean over the steps."""
    with at_work(trained):
        posterior = trained.network.encode(move_data_to_device(batch, trained.device))
    mean_BZ = mean_over_steps(posterior.mean, posterior.mask) if posterior.mean.dim() == 3 else posterior.mean
    return np.asarray(mean_BZ.float().cpu().numpy())
