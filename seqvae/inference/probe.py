"""What the latents know of a label that the model was never told: a linear probe, beside what simple summaries know of it.

In: a trained model and data with labels. Out: for the posterior means, for summaries of the raw sequences, and for both together,
how well a logistic regression tells the classes apart; trained on the training split, scored on others. The windows that
--long_sequences split cuts a sequence into count as one sequence, with the mean of their numbers: they share its label.

Shapes: N sequences, P numbers, C classes.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import DataError, UsageError
from seqvae.inference.model import Trained, at_work, joined_batches
from seqvae.models.vae import mean_over_steps

# How well classes are told apart, and how far chance goes: scores and classes in, a score with its 95 % interval out.
#
# The bootstrap draws the scored sequences anew, with the same draws for every method, so that two methods are compared on the same
# sequences. The seed is fixed.
#
# Shapes: N sequences, C classes, R draws.

DRAWS = 2000
AT_ONCE = 100
"""Draws; their weights of 20,000 sequences are 16 MB."""


class Interval(NamedTuple):
    value: float
    low: float
    high: float


class Drawn(NamedTuple):
    """A score of the sequences as they are, and of each draw of them."""

    value: float
    values_R: np.ndarray
    """NaN where a draw came to one class alone."""

    @property
    def interval(self) -> Interval:
        """95 %, by percentiles."""
        low, high = np.nanquantile(self.values_R, [0.025, 0.975])
        return Interval(self.value, float(low), float(high))

    def minus(self, other: "Drawn") -> "Drawn":
        return Drawn(self.value - other.value, self.values_R - other.values_R)


def draw_score(log_p_NC: np.ndarray, classes_N: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Drawn:
    """AUROC of the second of two classes; of more classes, accuracy."""
    generator = np.random.default_rng(seed)
    count = len(classes_N)
    pieces = [
        _score(
            log_p_NC,
            classes_N,
            generator.multinomial(count, np.full(count, 1 / count), size=min(AT_ONCE, draws - done)),
        )
        for done in range(0, draws, AT_ONCE)
    ]
    return Drawn(float(_score(log_p_NC, classes_N, np.ones((1, count), np.int64))[0]), np.concatenate(pieces))


def auroc(scores_N: np.ndarray, positive_N: np.ndarray, weights_RN: np.ndarray) -> np.ndarray:
    """The probability that a positive scores above a negative, ties counted half; for each row of how often each counts.

    >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]), np.ones((1, 4)))
    array([0.75])
    """
    order_N = np.argsort(scores_N, kind="stable")
    first_G = np.flatnonzero(np.diff(scores_N[order_N], prepend=-np.inf))  # where a group of equal scores begins
    weights_RN = weights_RN[:, order_N].astype(np.float64)
    positive_RG, negative_RG = (
        np.add.reduceat(weights_RN * is_N, first_G, axis=1) for is_N in (positive_N[order_N], ~positive_N[order_N])
    )
    below_RG = np.cumsum(negative_RG, axis=1) - 0.5 * negative_RG
    pairs_R = positive_RG.sum(axis=1) * negative_RG.sum(axis=1)
    wins_R = (positive_RG * below_RG).sum(axis=1)
    return np.divide(wins_R, pairs_R, out=np.full(len(wins_R), np.nan), where=pairs_R > 0)


def _score(log_p_NC: np.ndarray, classes_N: np.ndarray, weights_RN: np.ndarray) -> np.ndarray:
    if log_p_NC.shape[1] == 2:
        return auroc(log_p_NC[:, 1] - log_p_NC[:, 0], classes_N == 1, weights_RN)
    return weights_RN @ (log_p_NC.argmax(axis=1) == classes_N) / len(classes_N)


# What anybody can tell of a sequence without a model: simple numbers of its raw steps, for a probe's latents to be measured
# against. A batch in, one row of numbers a sequence out; NaN where nothing was measured.
#
# vectors: of each feature mean, deviation, first and last value;  events: of each variable mean, whether it was measured, and how
# often (logarithm);  tokens: shares of the most frequent tokens, and the length (logarithm). Values are normalised.
#
# Shapes: B sequences, T steps, D features, V variables or tokens, E events, P numbers.

MOST_TOKENS = 1000


class Summary(NamedTuple):
    means: np.ndarray | None
    """(B, D) of each feature or variable; tokens have none."""
    rest: np.ndarray
    """(B, P), all else that is told."""


class Summarise:
    """`tokens_V`: those whose share is told; `names`: how many variables there are."""

    def __init__(self, names: int, tokens_V: np.ndarray | None = None) -> None:
        self.names, self.tokens_V = names, tokens_V

    def __call__(self, batch: Batch) -> Summary:
        match batch:
            case VectorBatch():
                return _of_vectors(batch)
            case EventBatch():
                return _of_events(batch, self.names)
            case TokenBatch():
                assert self.tokens_V is not None
                return Summary(None, _of_tokens(batch, self.tokens_V))


def frequent_tokens(batches: Iterable[Batch], vocabulary: int) -> np.ndarray:
    """The ids that come most often, ascending."""
    counts_V = np.zeros(vocabulary, np.int64)
    for batch in batches:
        assert isinstance(batch, TokenBatch)
        counts_V += np.bincount(batch.tokens_BT[_real(batch.tokens_BT, batch.lengths_B)].numpy(), minlength=vocabulary)
    return np.sort(np.argsort(-counts_V, kind="stable")[:MOST_TOKENS])


def _of_vectors(batch: VectorBatch) -> Summary:
    known_BTD, values_BTD = batch.observed_BTD, batch.values_BTD.double()
    count_BD = known_BTD.sum(dim=1)
    mean_BD = _ratio((values_BTD * known_BTD).sum(dim=1), count_BD)
    off_BTD = (values_BTD - mean_BD.nan_to_num()[:, None]) * known_BTD
    std_BD = _ratio(off_BTD.square().sum(dim=1), count_BD).sqrt()
    steps = values_BTD.shape[1]
    first_BD = known_BTD.int().argmax(dim=1)
    last_BD = steps - 1 - known_BTD.flip(1).int().argmax(dim=1)
    first, last = (
        values_BTD.gather(1, step_BD[:, None]).squeeze(1).masked_fill(count_BD == 0, torch.nan)
        for step_BD in (first_BD, last_BD)
    )
    return Summary(mean_BD.numpy(), torch.cat((std_BD, first, last), dim=1).numpy())


def _of_events(batch: EventBatch, names: int) -> Summary:
    sequences, steps = batch.gaps_BT.shape
    cell_E = batch.steps_E // steps * names + batch.variables_E

    def added(values_E: Tensor) -> Tensor:
        flat = torch.zeros(sequences * names, dtype=torch.float64).index_add(0, cell_E, values_E.double())
        return flat.view(sequences, names)

    events_BV = added(torch.ones_like(batch.values_E))
    mean_BV = _ratio(added(batch.values_E * batch.has_value_E), added(batch.has_value_E))
    return Summary(mean_BV.numpy(), torch.cat((events_BV > 0, events_BV.log1p()), dim=1).numpy())


def _of_tokens(batch: TokenBatch, tokens_V: np.ndarray) -> np.ndarray:
    shares_BV = np.zeros((len(batch.lengths_B), len(tokens_V)))
    for row_V, ids_T, length in zip(shares_BV, batch.tokens_BT.numpy(), batch.lengths_B.tolist(), strict=True):
        place_T = np.minimum(np.searchsorted(tokens_V, ids_T[:length]), len(tokens_V) - 1)
        np.add.at(row_V, place_T[tokens_V[place_T] == ids_T[:length]], 1 / max(length, 1))
    return np.column_stack((shares_BV, np.log1p(batch.lengths_B.numpy())))


def _ratio(sums: Tensor, counts: Tensor) -> Tensor:
    """NaN of nothing."""
    return torch.where(counts > 0, sums / counts, torch.nan)


def _real(tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
    return torch.arange(tokens_BT.shape[1]) < lengths_B[:, None]


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


# Logistic regression with an L2 penalty, for two classes or more, in float64: features and classes in, class scores out.
#
#     loss = mean cross entropy + strength / 2 * |weights|^2        (the biases are free)
#
# The strength is chosen by cross-validation on the same sequences, so that whoever is scored afterwards has no part in it. Nothing
# is drawn but the folds, from a fixed seed.
#
# Shapes: N sequences, P features, C classes.

STRENGTHS = tuple(10.0**power for power in (1, 0, -1, -2, -3, -4, -5))
"""From strong to weak, each beginning where the one before it ended."""
FOLDS = 5
MOST_ROUNDS = 200
FARTHEST = 10.0
"""Standard deviations; a pH of 735 must not lead the fit."""


class Standardiser(NamedTuple):
    """Each feature to mean 0 and deviation 1 over the training sequences; what is missing (NaN) becomes the mean."""

    mean_P: np.ndarray
    std_P: np.ndarray

    def __call__(self, features_NP: np.ndarray) -> Tensor:
        standard_NP = (features_NP - self.mean_P) / self.std_P
        return torch.from_numpy(np.clip(np.nan_to_num(standard_NP, nan=0.0), -FARTHEST, FARTHEST))


class Classifier(NamedTuple):
    """As fitted, with the standardising that goes before it."""

    standardise: Standardiser
    weights_PC: Tensor
    bias_C: Tensor
    strength: float

    def scores(self, features_NP: np.ndarray) -> np.ndarray:
        """log p(class), (N, C)."""
        return F.log_softmax(self.standardise(features_NP) @ self.weights_PC + self.bias_C, dim=1).numpy()


def fit_classifier(features_NP: np.ndarray, classes_N: np.ndarray, classes: int, seed: int = 0) -> Classifier:
    standardise = standardiser_of(features_NP)
    x_NP, y_N = standardise(features_NP), torch.from_numpy(classes_N)
    strength = _choose_strength(x_NP, y_N, classes, seed)
    weights_PC, bias_C = _begin(x_NP, classes)
    for stronger in (one for one in STRENGTHS if one >= strength):
        weights_PC, bias_C = minimise(x_NP, y_N, stronger, weights_PC, bias_C)
    return Classifier(standardise, weights_PC, bias_C, strength)


def standardiser_of(features_NP: np.ndarray) -> Standardiser:
    known_NP = ~np.isnan(features_NP)
    count_P = np.maximum(known_NP.sum(axis=0), 1)
    mean_P = np.where(known_NP, features_NP, 0.0).sum(axis=0) / count_P
    std_P = np.sqrt(np.where(known_NP, (features_NP - mean_P) ** 2, 0.0).sum(axis=0) / count_P)
    return Standardiser(mean_P, np.where(std_P > 1e-12 * (1 + np.abs(mean_P)), std_P, 1.0))


def folds_of(classes_N: np.ndarray, seed: int) -> np.ndarray:
    """Which fold each sequence is in: each class shared out evenly, at random."""
    shuffled_N = np.random.default_rng(seed).permutation(len(classes_N))
    by_class_N = shuffled_N[np.argsort(classes_N[shuffled_N], kind="stable")]
    folds_N = np.empty(len(classes_N), np.int64)
    folds_N[by_class_N] = np.arange(len(classes_N)) % FOLDS
    return folds_N


def minimise(x_NP: Tensor, y_N: Tensor, strength: float, weights_PC: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
    """From the weights given to those where the loss is least; it is convex."""
    weights_PC, bias_C = weights_PC.clone().requires_grad_(), bias_C.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights_PC, bias_C],
        max_iter=MOST_ROUNDS,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x_NP @ weights_PC + bias_C, y_N) + 0.5 * strength * weights_PC.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weights_PC.detach(), bias_C.detach()


def _choose_strength(x_NP: Tensor, y_N: Tensor, classes: int, seed: int) -> float:
    """The one with the least cross entropy on sequences left out."""
    fold_N = torch.from_numpy(folds_of(y_N.numpy(), seed))
    losses = dict.fromkeys(STRENGTHS, 0.0)
    for fold in range(FOLDS):
        inside_N, outside_N = fold_N != fold, fold_N == fold
        if not bool(outside_N.any()) or not bool(inside_N.any()):
            continue
        weights_PC, bias_C = _begin(x_NP, classes)
        for strength in STRENGTHS:
            weights_PC, bias_C = minimise(x_NP[inside_N], y_N[inside_N], strength, weights_PC, bias_C)
            scores_NC = x_NP[outside_N] @ weights_PC + bias_C
            losses[strength] += float(F.cross_entropy(scores_NC, y_N[outside_N], reduction="sum"))
    return min(losses, key=losses.__getitem__)


def _begin(x_NP: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    return x_NP.new_zeros(x_NP.shape[1], classes), x_NP.new_zeros(classes)
