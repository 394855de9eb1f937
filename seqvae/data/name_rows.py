"""The tokens, features or variables of an opened cache -> rows of a table, distributions to draw, and what is odd about them.

All counts are of the training split unless they say otherwise, and before the length cap.

Shapes: V names, K of them shown, U names that occur, Q quantiles.
"""

from typing import NamedTuple

import numpy as np

from seqvae.data.building.moments import Pieces
from seqvae.data.cache import SequenceData
from seqvae.data.description import UNKNOWN
from seqvae.data.name_statistics import (
    FlatSplit,
    count_ids,
    event_pieces,
    feature_pieces,
    quantiles,
    sequences_with,
    value_statistics,
)

MOSTLY_MISSING = 0.95
"""Share of a feature's values that are missing from which on it deserves a warning."""
SPARSE_IDS = 0.1
"""Share of a vocabulary that occurs, below which its ids look like hashes, or like those of another vocabulary."""
LARGE_VOCABULARY = 1000
"""A smaller one costs next to nothing, however little of it occurs."""
MOST_DRAWN = 20
"""Names whose values are worth a picture."""
SMALLEST_DIGIT = 1e-6
"""Of a standard deviation: less is rounding, as values are stored in float32."""


class NameRow(NamedTuple):
    """A token, feature or variable; values in their own units. None where a field has no meaning for the kind."""

    name: str
    seen: int | None = None
    """How often it occurs."""
    share: float | None = None
    in_sequences: float | None = None
    """Share of the sequences that have it."""
    missing: float | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    far_out: int | None = None


class Distributions(NamedTuple):
    """Of the values of K names, in standard deviations from the mean."""

    names: tuple[str, ...]
    values_KQ: np.ndarray


class Names(NamedTuple):
    possible: int
    """How many a model has to reckon with."""
    total: int
    """How many of them occur."""
    rows: tuple[NameRow, ...]
    """Of tokens and variables the most frequent; of features all, or those with the most missing values."""
    counts_U: np.ndarray | None
    """Tokens and events: how often each one occurs, descending."""
    missing: dict[str, np.ndarray]
    """Features: per split the share of missing values of each row."""
    distributions: Distributions | None
    warnings: tuple[str, ...]


def describe_names(data: SequenceData, flat: dict[str, FlatSplit], most: int) -> Names:
    """At most so many rows."""
    return {"tokens": _tokens, "vectors": _features, "events": _variables}[data.description.kind](data, flat, most)


def _tokens(data: SequenceData, flat: dict[str, FlatSplit], most: int) -> Names:
    symbols, size = data.description.symbols, data.description.vocabulary_size
    ids_U, counts_U = count_ids(flat["train"])
    total = int(counts_U.sum())
    rows = [
        NameRow(f"'{symbols[token]}'" if symbols else str(token), count, count / total)
        for token, count in zip(ids_U[:most].tolist(), counts_U[:most].tolist(), strict=True)
    ]
    warnings = []
    learned = symbols[:1] == (UNKNOWN,)
    if not learned:
        warnings += [_unseen(name, split, ids_U) for name, split in flat.items() if name != "train"]
    if size > LARGE_VOCABULARY and len(ids_U) < SPARSE_IDS * size and not symbols:
        warnings.append(
            f"the ids go up to {size - 1:,}, but only {len(ids_U):,} of them occur: the model's vocabulary would be "
            f"{size / len(ids_U):,.0f} times as large as it need be. Number them 0, 1, 2, ..."
        )
    return Names(size, len(ids_U), tuple(rows), counts_U, {}, None, tuple(filter(None, warnings)))


def _features(data: SequenceData, flat: dict[str, FlatSplit], most: int) -> Names:
    about, width = data.description, len(data.description.names)
    missing = {name: np.array(data.counts[name]["missing"]) / data.counts[name]["steps"] for name in flat}
    pieces = feature_pieces(flat["train"], width)
    values = value_statistics(pieces, width)
    shown_K = np.arange(width)
    if width > most:
        shown_K = np.lexsort((-values.far_V, -missing["train"]))[:most]
    rows = _value_rows(data, values.lowest_V, values.highest_V, shown_K)
    rows = [
        row._replace(missing=float(missing["train"][v]), far_out=int(values.far_V[v]))
        for row, v in zip(rows, shown_K.tolist(), strict=True)
    ]
    empty = np.flatnonzero((missing["train"] > MOSTLY_MISSING) & (values.valued_V > 0))
    warnings = [f"{about.names[v]}: {missing['train'][v]:.1%} of its values are missing" for v in empty[:8]]
    if len(empty) > 8:
        warnings.append(f"{len(empty) - 8} more features are as empty")
    shown_missing = {name: share_V[shown_K] for name, share_V in missing.items()}
    return Names(width, width, tuple(rows), None, shown_missing, _distributions(data, pieces, shown_K), tuple(warnings))


def _variables(data: SequenceData, flat: dict[str, FlatSplit], most: int) -> Names:
    counts, size = data.counts["train"], len(data.description.names)
    number_V, valued_V = np.array(counts["per_name"]), np.array(counts["valued"])
    pieces = event_pieces(flat["train"])
    values = value_statistics(pieces, size)
    present_V = sequences_with(flat["train"], size) / counts["sequences"]
    order_V = np.argsort(-number_V, kind="stable")
    shown_K = order_V[number_V[order_V] > 0][:most]
    rows = [
        row._replace(
            seen=int(number_V[v]),
            in_sequences=float(present_V[v]),
            missing=float(1 - valued_V[v] / number_V[v]),
            far_out=int(values.far_V[v]),
        )
        for row, v in zip(_value_rows(data, values.lowest_V, values.highest_V, shown_K), shown_K.tolist(), strict=True)
    ]
    counts_U = number_V[order_V][number_V[order_V] > 0]
    return Names(size, len(counts_U), tuple(rows), counts_U, {}, _distributions(data, pieces, shown_K), ())


def _value_rows(data: SequenceData, lowest_V: np.ndarray, highest_V: np.ndarray, shown_K: np.ndarray) -> list[NameRow]:
    """Name, mean, standard deviation and range; without numbers where a name has no value."""
    about = data.description
    rows = []
    for v in shown_K.tolist():
        mean, std = about.mean[v], about.std[v]
        row = NameRow(about.names[v])
        if not np.isnan(lowest_V[v]):
            low, high = (_own_units(float(value), mean, std) for value in (lowest_V[v], highest_V[v]))
            row = row._replace(mean=mean, std=std if high > low else 0.0, min=low, max=high)
        rows.append(row)
    return rows


def _own_units(value: float, mean: float, std: float) -> float:
    own = value * std + mean
    return 0.0 if abs(own) < SMALLEST_DIGIT * std * max(1.0, abs(value)) else own


def _distributions(data: SequenceData, pieces: Pieces, shown_K: np.ndarray) -> Distributions:
    names, drawn_K = data.description.names, shown_K[:MOST_DRAWN]
    return Distributions(tuple(names[v] for v in drawn_K), quantiles(pieces, len(names), drawn_K))


def _unseen(name: str, split: FlatSplit, known_U: np.ndarray) -> str | None:
    """A sentence about tokens that the training split never shows, where there are any."""
    ids_U, counts_U = count_ids(split)
    unseen_U = ~np.isin(ids_U, known_U)
    if not unseen_U.any():
        return None
    return (
        f"{name}: {counts_U[unseen_U].sum():,} of {counts_U.sum():,} tokens are of {unseen_U.sum():,} ids that never "
        f"occur in the training split"
    )
