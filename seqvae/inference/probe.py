"""What the latents know of a label that the model never saw: a linear probe, beside what simple summaries know of it.

In: a trained model and data with labels. Out: for the posterior means, for summaries of the raw sequences, and for both together,
how well a logistic regression separates the classes; trained on the training split, scored on others. The windows that
--long_sequences split cuts a sequence into count as one sequence, with the mean of their numbers: they share its label.

Shapes: N sequences, P numbers of a sequence, C classes, R draws; B sequences, T steps, D features, V variables or tokens,
E events or stored numbers.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import DataError, UsageError
from seqvae.inference.streaming import evaluating, joined_batches
from seqvae.models.vae import mean_over_steps

if TYPE_CHECKING:
    from seqvae.inference.model import Model

MOST_SEQUENCES = 20_000
"""Most sequences to train or to score on; more would change the third digit."""
MOST_TOKENS = 1000
"""Tokens whose shares are part of a summary."""
DENSE_VARIABLES = 1000
"""Of more variables than this, only what a sequence has is stored: the summaries of 20,000 sequences with 40,000 codes would be
19 GB, and several copies of them."""

STRENGTHS = tuple(10.0**power for power in (1, 0, -1, -2, -3, -4, -5))
"""Strengths of the penalty, from strong to weak; each fit begins where the one before it ended."""
FOLDS = 5
MOST_ITERATIONS = 1000
FARTHEST = 10.0
"""Standard deviations that a number may be from the mean; a pH of 735 must not lead the fit."""

DRAWS = 2000
DRAWS_AT_ONCE = 100
"""Draws that are scored together: their weights of 20,000 sequences are 16 MB."""

_log = logging.getLogger(__name__)


def probe(model: "Model", data: SequenceDataModule, label: str, splits: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """Train a linear probe on the training split, for each set of features, and score it on `splits`.

    Return types of JSON, but for tuples. A score is an `Interval`: AUROC (of the second of two classes), or accuracy. A row holds
    how many `numbers` of each sequence the probe gets, and the `strength` of the penalty that was chosen; a difference, that of two
    rows' scores on the same sequences. `without_label`: sequences that have none, and were left out. `largest_share`: the share
    of the most frequent class among the scored sequences, which guessing reaches.
    """
    refuse_no_probe(data, label, splits)
    classes, tokens_V = data.description.classes, None
    if model.description.kind == "tokens":
        trained_on = joined_batches(data, ["train"], sequences=MOST_SEQUENCES, seed=seed)
        tokens_V = frequent_tokens((part.batch for part in trained_on), model.description.vocabulary_size)
    train, test = (_collect(model, data, names, tokens_V, seed) for names in (["train"], splits))
    for side, name in ((train, "training split"), (test, f"{' and '.join(splits)} split")):
        if len(np.unique(side.classes_N)) < 2:
            found = f"only {classes[side.classes_N[0]]!r}" if len(side.classes_N) else "no label at all"
            raise DataError(f"--probe {label}: the {name} has {found}, so that there is nothing to tell apart.")
    sets, whole = {"latents": ["latents"]}, ["rest"]
    if "means" in train.numbers:
        sets, whole = sets | {"means": ["means"], "means + latents": ["means", "latents"]}, ["means", "rest"]
    sets |= {"summaries": whole, "summaries + latents": [*whole, "latents"]}
    rows: list[dict[str, Any]] = []
    scores: dict[str, np.ndarray] = {}
    for name, parts in sets.items():
        train_NP, test_NP = (side_by_side([side.numbers[part] for part in parts]) for side in (train, test))
        sequences, numbers = train_NP.shape
        _log.info("probe: %s (%s numbers of %s sequences)", name, f"{numbers:,}", f"{sequences:,}")
        fitted = fit_classifier(train_NP, train.classes_N, len(classes), seed)
        scores[name] = score_with_draws(fitted.scores(test_NP), test.classes_N)
        score = interval(scores[name])
        rows.append({"features": name, "numbers": numbers, "score": score, "strength": fitted.strength})
    pairs = [(f"{simple} + latents", simple) for simple in ("means", "summaries")]
    pairs += [("latents", simple) for simple in ("means", "summaries")]
    return {
        "label": label,
        "metric": "AUROC" if len(classes) == 2 else "accuracy",
        "classes": classes,
        "trained_on": len(train.classes_N),
        "scored_on": len(test.classes_N),
        "without_label": train.without_label + test.without_label,
        "largest_share": float(np.bincount(test.classes_N).max() / len(test.classes_N)),
        "rows": tuple(rows),
        "differences": tuple(
            {"of": f"{one} - {other}", "score": interval(scores[one] - scores[other])}
            for one, other in pairs
            if other in scores
        ),
    }


def refuse_no_probe(data: SequenceDataModule, label: str, splits: Sequence[str]) -> None:
    """Refuse what cannot be probed, before anything is computed."""
    import_logistic_regression()
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


# --- Features ----------------------------------------------------------------------------------------------------------


class Bag(NamedTuple):
    """(N, P) numbers of which most are their column's background and are not stored."""

    sequences: int
    background_P: np.ndarray
    """0, or NaN where what is not stored was not measured."""
    rows_E: np.ndarray
    columns_E: np.ndarray
    values_E: np.ndarray
    """Never NaN."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.sequences, len(self.background_P)


Numbers = Any
"""(N, P), NaN where nothing was measured: an array or a Bag."""


class _Side(NamedTuple):
    """One side of the probe, without the sequences that have no label."""

    numbers: dict[str, Numbers]
    """(N, P) each: `latents`, `means` (of each feature or variable; tokens have none) and the `rest` of a summary."""
    classes_N: np.ndarray
    without_label: int


def _collect(
    model: "Model", data: SequenceDataModule, splits: Sequence[str], tokens_V: np.ndarray | None, seed: int
) -> _Side:
    parts: dict[str, list[Numbers]] = {"latents": [], "means": [], "rest": []}
    labels, owners = [], []
    for _, batch, owners_B, _ in joined_batches(data, splits, sequences=MOST_SEQUENCES, seed=seed):
        assert batch.labels_B is not None, "the data were opened with labels"
        labels.append(batch.labels_B.numpy())
        owners.append(owners_B)
        with evaluating(model.network, model.autocast) as device:
            latents = model.network.latents(move_data_to_device(batch, device), at_mean=True)
        z = latents.top_z
        mean_BZ = mean_over_steps(z, latents.posterior.mask) if z.dim() == 3 else z
        parts["latents"].append(mean_BZ.float().cpu().numpy())
        for name, numbers_BP in summary(batch, len(model.description.names), tokens_V).items():
            parts[name].append(numbers_BP)
    classes_N, owners_N = np.concatenate(labels), np.concatenate(owners)
    numbers = {name: one_below_the_other(each) for name, each in parts.items() if each}
    if len(np.unique(owners_N)) < len(owners_N):
        numbers = {name: mean_of_windows(numbers_NP, owners_N) for name, numbers_NP in numbers.items()}
        classes_N = classes_N[np.unique(owners_N, return_index=True)[1]]
    has_label_N = classes_N >= 0
    numbers = {name: chosen_rows(numbers_NP, has_label_N) for name, numbers_NP in numbers.items()}
    return _Side(numbers, classes_N[has_label_N], int((~has_label_N).sum()))


def one_below_the_other(parts: Sequence[Numbers]) -> Numbers:
    """Return the rows of all parts; either all of them are bags, or none."""
    bags = [part for part in parts if isinstance(part, Bag)]
    if not bags:
        return np.concatenate(parts).astype(np.float64)
    begins = np.cumsum([0, *(bag.sequences for bag in bags)])
    rows_E = np.concatenate([bag.rows_E + begin for bag, begin in zip(bags, begins, strict=False)])
    columns_E, values_E = (np.concatenate(each) for each in zip(*(bag[3:] for bag in bags), strict=True))
    return Bag(int(begins[-1]), bags[0].background_P, rows_E, columns_E, values_E)


def side_by_side(parts: Sequence[Numbers]) -> Numbers:
    """Return the columns of all parts; a bag where one of them is."""
    if not any(isinstance(part, Bag) for part in parts):
        return np.concatenate(parts, axis=1)
    bags = [part if isinstance(part, Bag) else _as_bag(part) for part in parts]
    begins = np.cumsum([0, *(len(bag.background_P) for bag in bags)])
    columns_E = np.concatenate([bag.columns_E + begin for bag, begin in zip(bags, begins, strict=False)])
    background_P, rows_E, values_E = (
        np.concatenate([getattr(bag, name) for bag in bags]) for name in ("background_P", "rows_E", "values_E")
    )
    return Bag(bags[0].sequences, background_P, rows_E, columns_E, values_E)


def _as_bag(numbers_NP: np.ndarray) -> Bag:
    rows_E, columns_E = (~np.isnan(numbers_NP)).nonzero()
    return Bag(len(numbers_NP), np.full(numbers_NP.shape[1], np.nan), rows_E, columns_E, numbers_NP[rows_E, columns_E])


def chosen_rows(numbers_NP: Numbers, chosen_N: np.ndarray) -> Numbers:
    """Return the rows where the mask is true."""
    if not isinstance(numbers_NP, Bag):
        return numbers_NP[chosen_N]
    is_chosen_E = chosen_N[numbers_NP.rows_E]
    rows_E, columns_E, values_E = (each[is_chosen_E] for each in numbers_NP[2:])
    return Bag(int(chosen_N.sum()), numbers_NP.background_P, (np.cumsum(chosen_N) - 1)[rows_E], columns_E, values_E)


def mean_of_windows(numbers_NP: Numbers, owners_N: np.ndarray) -> Numbers:
    """Return a row for each owner, ascending: the mean over its windows, NaN where none of them has a number."""
    unique, place_N = np.unique(owners_N, return_inverse=True)
    if isinstance(numbers_NP, Bag):
        columns = len(numbers_NP.background_P)
        cells_C, cell_E = np.unique(place_N[numbers_NP.rows_E] * columns + numbers_NP.columns_E, return_inverse=True)
        rows_C, columns_C = np.divmod(cells_C, columns)
        is_measured_C = np.isnan(numbers_NP.background_P)[columns_C]
        windows_C = np.where(is_measured_C, np.bincount(cell_E), np.bincount(place_N)[rows_C])
        means_C = np.bincount(cell_E, numbers_NP.values_E) / windows_C
        return Bag(len(unique), numbers_NP.background_P, rows_C, columns_C, means_C)
    known_NP = ~np.isnan(numbers_NP)
    sums, counts = (np.zeros((len(unique), numbers_NP.shape[1])) for _ in range(2))
    np.add.at(sums, place_N, np.where(known_NP, numbers_NP, 0.0))
    np.add.at(counts, place_N, known_NP)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def frequent_tokens(batches: Iterable[Batch], vocabulary: int) -> np.ndarray:
    """Return the ids that come most often, ascending."""
    counts_V = np.zeros(vocabulary, np.int64)
    for batch in batches:
        assert isinstance(batch, TokenBatch)
        real_BT = torch.arange(batch.tokens_BT.shape[1]) < batch.lengths_B[:, None]
        counts_V += np.bincount(batch.tokens_BT[real_BT].numpy(), minlength=vocabulary)
    return np.sort(np.argsort(-counts_V, kind="stable")[:MOST_TOKENS])


def summary(batch: Batch, names: int, tokens_V: np.ndarray | None = None) -> dict[str, Numbers]:
    """Return what is known of a sequence without a model, (B, P) each; NaN where nothing was measured.

    Vectors: of each feature the mean (`means`), deviation, first and last value (`rest`). Events: of each of `names` variables the
    mean (`means`), whether it was measured, and how often as a logarithm (`rest`). Tokens: the shares of `tokens_V`, and the
    length as a logarithm (`rest`). Values are normalised.
    """
    match batch:
        case VectorBatch():
            known_BTD, values_BTD = batch.observed_BTD, batch.values_BTD.double()
            count_BD = known_BTD.sum(dim=1)
            mean_BD = _ratio((values_BTD * known_BTD).sum(dim=1), count_BD)
            off_BTD = (values_BTD - mean_BD.nan_to_num()[:, None]) * known_BTD
            std_BD = _ratio(off_BTD.square().sum(dim=1), count_BD).sqrt()
            first_BD = known_BTD.int().argmax(dim=1)
            last_BD = values_BTD.shape[1] - 1 - known_BTD.flip(1).int().argmax(dim=1)
            first, last = (
                values_BTD.gather(1, step_BD[:, None]).squeeze(1).masked_fill(count_BD == 0, torch.nan)
                for step_BD in (first_BD, last_BD)
            )
            return {"means": mean_BD.numpy(), "rest": torch.cat((std_BD, first, last), dim=1).numpy()}
        case EventBatch() if names > DENSE_VARIABLES:
            return _bags_of_events(batch, names)
        case EventBatch():
            known_E = batch.has_value_E.double()
            parts = (torch.ones_like(known_E), batch.values_E * known_E, known_E)
            events_BV, sums_BV, values_BV = sums_by_variable(batch, names, parts)
            rest_BP = torch.cat((events_BV > 0, events_BV.log1p()), dim=1)
            return {"means": _ratio(sums_BV, values_BV).numpy(), "rest": rest_BP.numpy()}
        case TokenBatch():
            assert tokens_V is not None
            shares_BV = np.zeros((len(batch.lengths_B), len(tokens_V)))
            for row_V, ids_T, length in zip(shares_BV, batch.tokens_BT.numpy(), batch.lengths_B.tolist(), strict=True):
                place_T = np.minimum(np.searchsorted(tokens_V, ids_T[:length]), len(tokens_V) - 1)
                np.add.at(row_V, place_T[tokens_V[place_T] == ids_T[:length]], 1 / max(length, 1))
            return {"rest": np.column_stack((shares_BV, np.log1p(batch.lengths_B.numpy())))}


def _bags_of_events(batch: EventBatch, names: int) -> dict[str, Numbers]:
    """Return the summaries of events with what a sequence does not have left out."""
    sequences, steps = batch.gaps_BT.shape
    cells_C, cell_E = np.unique((batch.steps_E // steps * names + batch.variables_E).numpy(), return_inverse=True)
    rows_C, columns_C = np.divmod(cells_C, names)
    events_C, values_C, sums_C = (
        np.bincount(cell_E, part_E.double().numpy(), minlength=len(cells_C))
        for part_E in (torch.ones_like(batch.values_E), batch.has_value_E, batch.values_E * batch.has_value_E)
    )
    has_C, nothing_V = values_C > 0, np.zeros(names)
    means = Bag(sequences, nothing_V + np.nan, rows_C[has_C], columns_C[has_C], sums_C[has_C] / values_C[has_C])
    was_measured, how_often = (
        Bag(sequences, nothing_V, rows_C, columns_C, each_C) for each_C in (np.ones(len(cells_C)), np.log1p(events_C))
    )
    return {"means": means, "rest": side_by_side([was_measured, how_often])}


def sums_by_variable(batch: EventBatch, variables: int, parts_E: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Add up numbers of the events by sequence and variable, (B, V) each."""
    sequences, steps = batch.gaps_BT.shape
    cell_E = batch.steps_E // steps * variables + batch.variables_E
    return tuple(
        part_E.new_zeros(sequences * variables).index_add(0, cell_E, part_E).view(sequences, variables)
        for part_E in parts_E
    )


def _ratio(sums: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts > 0, sums / counts, torch.nan)


# --- Logistic regression ----------------------------------------------------------------------------------------------


class Classifier(NamedTuple):
    """A logistic regression with an L2 penalty, and the standardising that goes before it."""

    standardise: Callable[[Any], Any]
    regression: Any
    classes: int
    strength: float
    """loss = mean cross entropy + strength / 2 * |weights|^2, with a weight for each number and class; biases are free."""

    def scores(self, features_NP: Numbers) -> np.ndarray:
        """Return log p(class), (N, C)."""
        return _log_probabilities(self.regression, self.standardise(features_NP), self.classes)


def fit_classifier(features_NP: Numbers, classes_N: np.ndarray, classes: int, seed: int = 0) -> Classifier:
    """Fit with the strength of the least cross entropy on folds of these sequences; those scored later have no part in it."""
    standardise = _standardiser_of_bag(features_NP) if isinstance(features_NP, Bag) else _standardiser(features_NP)
    x_NP = standardise(features_NP)
    shuffled_N = np.random.default_rng(seed).permutation(len(classes_N))
    by_class_N = shuffled_N[np.argsort(classes_N[shuffled_N], kind="stable")]
    fold_N = np.empty(len(classes_N), np.int64)
    fold_N[by_class_N] = np.arange(len(classes_N)) % FOLDS  # each class shared out evenly
    losses = dict.fromkeys(STRENGTHS, 0.0)
    for fold in range(FOLDS):
        inside_N, outside_N = fold_N != fold, fold_N == fold
        if not outside_N.any() or len(np.unique(classes_N[inside_N])) < 2:
            continue
        for strength, regression in zip(STRENGTHS, _fits(x_NP[inside_N], classes_N[inside_N], STRENGTHS), strict=True):
            log_p_NC = _log_probabilities(regression, x_NP[outside_N], classes)
            losses[strength] -= float(log_p_NC[np.arange(len(log_p_NC)), classes_N[outside_N]].sum())
    strength = min(losses, key=losses.__getitem__)
    *_, regression = _fits(x_NP, classes_N, [one for one in STRENGTHS if one >= strength])
    return Classifier(standardise, regression, classes, strength)


def _standardiser(features_NP: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return what brings each number to mean 0 and deviation 1 over these sequences; what is missing becomes the mean."""
    known_NP = ~np.isnan(features_NP)
    count_P = np.maximum(known_NP.sum(axis=0), 1)
    mean_P = np.where(known_NP, features_NP, 0.0).sum(axis=0) / count_P
    std_P = _scale(np.where(known_NP, (features_NP - mean_P) ** 2, 0.0).sum(axis=0) / count_P, mean_P)
    return lambda numbers_NP: _standard(numbers_NP, mean_P, std_P)


def _standardiser_of_bag(features: Bag) -> Callable[[Bag], Any]:
    """Return what does the same as a sparse matrix, but for one number that is added to each column so that what is not stored
    becomes 0: the regression's bias, which is free, makes up for it, and the fit is the same."""
    from scipy.sparse import csr_matrix

    stored_P = np.bincount(features.columns_E, minlength=len(features.background_P))
    others_P = np.where(np.isnan(features.background_P), 0, features.sequences - stored_P)
    count_P = np.maximum(stored_P + others_P, 1)
    mean_P = np.bincount(features.columns_E, features.values_E, minlength=len(stored_P)) / count_P
    squares_E = (features.values_E - mean_P[features.columns_E]) ** 2
    squares_P = np.bincount(features.columns_E, squares_E, minlength=len(stored_P)) + others_P * mean_P**2
    std_P = _scale(squares_P / count_P, mean_P)
    background_P = _standard(features.background_P, mean_P, std_P)

    def standardise(bag: Bag) -> Any:
        at_E = bag.columns_E
        values_E = _standard(bag.values_E, mean_P[at_E], std_P[at_E]) - background_P[at_E]
        return csr_matrix((values_E, (bag.rows_E, at_E)), shape=bag.shape)

    return standardise


def _scale(variance_P: np.ndarray, mean_P: np.ndarray) -> np.ndarray:
    """Return standard deviations; 1 for what is constant."""
    std_P = np.sqrt(variance_P)
    return np.where(std_P > 1e-12 * (1 + np.abs(mean_P)), std_P, 1.0)


def _standard(numbers: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    return np.clip(np.nan_to_num((numbers - mean) / std, nan=0.0), -FARTHEST, FARTHEST)


def _fits(x_NP: Any, classes_N: np.ndarray, strengths: Sequence[float]) -> Iterator[Any]:
    """Yield the regression as fitted with each strength, from where the fit before it ended; the loss is convex."""
    regression = import_logistic_regression()(tol=1e-6, max_iter=MOST_ITERATIONS, warm_start=True)
    # The library adds up cross entropies where the strength is of their mean, and has one row of weights for two classes, which
    # stand for the half of each that two rows would have.
    per_class = 2 if len(np.unique(classes_N)) == 2 else 1
    for strength in strengths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit that has not converged by then scores as well
            regression.set_params(C=per_class / (strength * x_NP.shape[0])).fit(x_NP, classes_N)
        yield regression


def _log_probabilities(regression: Any, x_NP: Any, classes: int) -> np.ndarray:
    """Return log p(class), (N, C); that of a class which the fit never saw is very low."""
    scores_NK = regression.decision_function(x_NP)
    if scores_NK.ndim == 1:
        scores_NK = np.column_stack((np.zeros(len(scores_NK)), scores_NK))
    log_p_NC = np.full((len(scores_NK), classes), np.log(1e-12))
    log_p_NC[:, regression.classes_] = torch.from_numpy(scores_NK).log_softmax(dim=1).numpy()
    return log_p_NC


def import_logistic_regression() -> Any:
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise UsageError('--probe needs scikit-learn: pip install "seqvae[eval]"') from None
    return LogisticRegression


# --- Scores -----------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A score and its 95 % interval."""

    value: float
    low: float
    high: float


def interval(score_R1: np.ndarray) -> Interval:
    """Return a score with its interval, by percentiles of the draws; see `score_with_draws`."""
    low, high = np.nanquantile(score_R1[1:], [0.025, 0.975])
    return Interval(float(score_R1[0]), float(low), float(high))


def score_with_draws(log_p_NC: np.ndarray, classes_N: np.ndarray, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """Return the AUROC of the second of two classes, or the accuracy of more: of these sequences, then of each bootstrap draw.

    NaN where a draw holds one class alone. The draws are the same for every method, so that two methods are compared on the same
    sequences. Each draw is a row of how often it holds each sequence: scipy's bootstrap would sort the scores again for each of
    2,000 draws.
    """
    count = len(classes_N)

    def score(weights_RN: np.ndarray) -> np.ndarray:
        if log_p_NC.shape[1] == 2:
            return auroc(log_p_NC[:, 1] - log_p_NC[:, 0], classes_N == 1, weights_RN)
        return weights_RN @ (log_p_NC.argmax(axis=1) == classes_N) / count

    generator, even_N = np.random.default_rng(seed), np.full(count, 1 / count)
    sizes = [min(DRAWS_AT_ONCE, draws - done) for done in range(0, draws, DRAWS_AT_ONCE)]
    drawn = [score(generator.multinomial(count, even_N, size=size)) for size in sizes]
    return np.concatenate([score(np.ones((1, count), np.int64)), *drawn])


def auroc(scores_N: np.ndarray, positive_N: np.ndarray, weights_RN: np.ndarray) -> np.ndarray:
    """Return how likely a positive scores above a negative, ties counted half, for each row of how often each counts.

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
