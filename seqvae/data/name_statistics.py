"""What the names of a data set (token ids, features, variables) come to, from plain passes over a cache's flat files.

Nothing here depends on the length cap: the files hold the sequences as they are in the Parquet. Memory stays bounded.

Shapes: S sequences, V names, E values one behind the other, U ids that occur, K names chosen, Q quantiles.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from seqvae.data.building.moments import FAR_OUT, Pieces
from seqvae.data.flat_file import PIECE_ITEMS, map_flat, read_pieces

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
