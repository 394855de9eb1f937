"""The tokens, features or variables of an opened cache -> rows of a table, distributions to draw, and what is odd about them.

All counts are of the training split unless they say otherwise, and before the length cap.

Shapes: V names, K of them shown, U names that occur, Q quantiles.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from seqvae.data.building.finishing import FAR_OUT, Pieces
from seqvae.data.cache import SequenceData
from seqvae.data.description import UNKNOWN
from seqvae.data.flat_file import PIECE_ITEMS, map_flat, read_pieces

# What the names of a data set (token ids, features, variables) come to, from plain passes over a cache's flat files.
#
# Nothing here depends on the length cap: the files hold the sequences as they are in the Parquet. Memory stays bounded.
#
# Shapes: S sequences, V names, E values one behind the other, U ids that occur, K names chosen, Q quantiles.

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BIN = 0.02
"""Standard deviations: how fine the quantiles are."""
REACH = 5.0
"""Standard deviations from the mean beyond which quantiles are not told apart."""
SEQUENCES_AT_ONCE = 4096


class IdCounts(NamedTuple):
    """Token ids that occur, the most frequent first."""

    ids_U: np.ndarray
    counts_U: np.ndarray


class ValueStatistics(NamedTuple):
    """Values of V names, in standard deviations from the mean; NaN where a name has no value."""

    valued_V: np.ndarray
    """int64, values that are there."""
    lowest_V: np.ndarray
    highest_V: np.ndarray
    far_V: np.ndarray
    """int64, values more than `FAR_OUT` standard deviations from the mean."""


class FlatSplit(NamedTuple):
    """The flat files of one split."""

    directory: Path
    arrays: dict[str, dict[str, Any]]
    """As `map_flat` wants them."""

    def map(self, name: str) -> np.ndarray:
        return map_flat(self.directory, self.arrays[name])

    def pieces(self, name: str, items: int = PIECE_ITEMS) -> Iterator[np.ndarray]:
        entry = self.arrays[name]
        return read_pieces(self.directory / entry["file"], np.dtype(entry["dtype"]), items)


def count_ids(split: FlatSplit) -> IdCounts:
    """Whatever the largest id is: ids may be hashes."""
    total = pd.Series(dtype=np.int64)
    for ids_T in split.pieces("tokens"):
        counts = pd.Series(ids_T).value_counts()
        total = counts if total.empty else pd.concat([total, counts]).groupby(level=0).sum()
    ids_U, counts_U = total.index.to_numpy(np.int64), total.to_numpy(np.int64)
    order = np.lexsort((ids_U, -counts_U))
    return IdCounts(ids_U[order], counts_U[order])


def feature_pieces(split: FlatSplit, width: int) -> Pieces:
    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for values_E in split.pieces("values", max(1, PIECE_ITEMS // width) * width):
            yield np.tile(np.arange(width), len(values_E) // width), values_E

    return pieces


def event_pieces(split: FlatSplit) -> Pieces:
    return lambda: zip(split.pieces("variables"), split.pieces("values"), strict=True)


def value_statistics(pieces: Pieces, size: int) -> ValueStatistics:
    valued_V, far_V = np.zeros(size, np.int64), np.zeros(size, np.int64)
    lowest_V, highest_V = np.full(size, np.nan), np.full(size, np.nan)
    for names_E, values_E in pieces():
        valued_V += np.bincount(names_E[~np.isnan(values_E)], minlength=size)
        far_V += np.bincount(names_E[np.abs(values_E) > FAR_OUT], minlength=size)
        np.fmin.at(lowest_V, names_E, values_E)
        np.fmax.at(highest_V, names_E, values_E)
    return ValueStatistics(valued_V, lowest_V, highest_V, far_V)


def quantiles(pieces: Pieces, size: int, chosen_K: np.ndarray) -> np.ndarray:
    """[K, Q], in standard deviations from the mean, of some of the names; NaN where one has no value."""
    edges = np.arange(-REACH, REACH + BIN / 2, BIN)
    place_V = np.full(size, -1)
    place_V[chosen_K] = np.arange(len(chosen_K))
    counts_KB = np.zeros((len(chosen_K), len(edges) + 1), np.int64)
    for names_E, values_E in pieces():
        wanted_E = (place_V[names_E] >= 0) & ~np.isnan(values_E)
        bins_E = np.searchsorted(edges, values_E[wanted_E])
        flat_E = place_V[names_E[wanted_E]] * counts_KB.shape[1] + bins_E
        counts_KB += np.bincount(flat_E, minlength=counts_KB.size).reshape(counts_KB.shape)
    totals_K = counts_KB.sum(axis=1)
    reached_KQB = counts_KB.cumsum(axis=1)[:, None, :] >= np.array(QUANTILES)[:, None] * totals_K[:, None, None]
    middles_B = np.concatenate([[-REACH], edges[1:] - BIN / 2, [REACH]])
    return np.where(totals_K[:, None] > 0, middles_B[reached_KQB.argmax(axis=2)], np.nan)


def sequences_with(split: FlatSplit, size: int) -> np.ndarray:
    """int64 [V]: in how many sequences each variable occurs."""
    ends_S1 = split.map("event_offsets")[split.map("offsets")]
    variables_E = split.map("variables")
    total_V = np.zeros(size, np.int64)
    at_once = max(1, min(SEQUENCES_AT_ONCE, (1 << 26) // size))
    for begin in range(0, len(ends_S1) - 1, at_once):
        bounds = ends_S1[begin : begin + at_once + 1]
        sequence_E = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        seen_SV = np.zeros((len(bounds) - 1, size), bool)
        seen_SV[sequence_E, variables_E[bounds[0] : bounds[-1]]] = True
        total_V += seen_SV.sum(axis=0)
    return total_V


def time_spans(split: FlatSplit) -> np.ndarray:
    """float64 [S]: time from the first to the last step of each sequence."""
    return np.add.reduceat(split.map("gaps"), split.map("offsets")[:-1], dtype=np.float64)


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
