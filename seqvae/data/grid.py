"""Batches of few shapes: lengths -> the few lengths that sequences are padded to, and batches of fixed numbers of rows.

A GPU that replays recorded graphs (--compile_mode reduce-overhead) records one for each shape. Here a shape is a length of the
grid and the number of sequences of that length that make a full batch; what is missing in a batch is filled up with sequences of
length 0, which weigh nothing.

    grid_G = grid_lengths(lengths_N, shapes=8)
    cut = cut_batches(rounded_up(lengths_N, grid_G), limits)
    on_grid = OnGrid(sequences, grid_G, limits)  # gathers as `sequences` does, padded

Shapes: N sequences, D distinct lengths, G lengths of the grid, B sequences of one batch, T steps.
"""

from collections import Counter

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from seqvae.data.batches import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.limits import Limits
from seqvae.data.making import Gathers
from seqvae.data.plan import Cut, fitting

MOST_CANDIDATES = 512
"""Lengths that the grid is chosen from: its choice takes 20 ms for so many, and grows with their square."""


def grid_lengths(lengths_N: np.ndarray, shapes: int) -> np.ndarray:
    """At most so many lengths, ascending up to the longest, to which all can be padded with the fewest steps.

    By dynamic programming over distinct lengths: the least padded steps of all up to the d-th, with the d-th in the grid.

    >>> grid_lengths(np.array([3, 3, 3, 4, 9]), shapes=2).tolist()
    [4, 9]
    """
    counts_L = np.bincount(lengths_N)
    lengths_D = np.flatnonzero(counts_L)
    if len(lengths_D) > MOST_CANDIDATES:
        lengths_D = lengths_D[np.linspace(0, len(lengths_D) - 1, MOST_CANDIDATES).round().astype(np.int64)]
    until_D = np.cumsum(counts_L)[lengths_D]
    more_DD = (until_D[:, None] - until_D[None, :]) * lengths_D[:, None].astype(np.float64)
    more_DD[np.triu_indices(len(lengths_D))] = np.inf  # before a length stand shorter ones alone
    least_D = (until_D * lengths_D).astype(np.float64)
    choices: list[np.ndarray] = []  # for each length of the grid but the first: which one stands before it
    for _ in range(min(shapes, len(lengths_D)) - 1):
        padded_DD = least_D[None, :] + more_DD
        choices.append(padded_DD.argmin(axis=1))
        least_D = padded_DD.min(axis=1)
    chosen = [len(lengths_D) - 1]
    for before_D in reversed(choices):
        chosen.append(int(before_D[chosen[-1]]))
    return lengths_D[chosen[::-1]]


def rounded_up(lengths_N: np.ndarray, grid_G: np.ndarray) -> np.ndarray:
    rounded_L = grid_G[np.searchsorted(grid_G, np.arange(grid_G[-1] + 1))].astype(lengths_N.dtype)
    return rounded_L[lengths_N]


def grid_efficiency(lengths_N: np.ndarray, cut: Cut, limits: Limits) -> float:
    """Real steps / padded steps of batches that were cut of rounded lengths; what `drop_last` leaves out comes in other epochs."""
    rows_K = np.diff(cut.starts_K1)
    shapes = Counter((cut.tokens_K // rows_K).tolist())
    padded = sum(number * length * fitting(length, limits) for length, number in shapes.items())
    return float(lengths_N.sum(dtype=np.int64) / padded)


class OnGrid:
    """Sequences that come in batches of the grid's shapes."""

    def __init__(self, sequences: Gathers, grid_G: np.ndarray, limits: Limits) -> None:
        self._sequences, self._grid_G, self._limits = sequences, grid_G, limits

    @property
    def lengths_N(self) -> np.ndarray:
        return self._sequences.lengths_N

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch:
        """The empty batch is of the smallest shape."""
        longest = int(self.lengths_N[sequences_B].max(initial=0))
        length = int(self._grid_G[np.searchsorted(self._grid_G, longest)])
        batch = self._sequences.gather(sequences_B, length)
        return with_rows(batch, fitting(length, self._limits))


def with_rows(batch: Batch, rows: int) -> Batch:
    """Filled up with sequences of length 0, which have no number (-1) and no label."""
    missing = rows - len(batch.lengths_B)
    assert missing >= 0, "a batch of more sequences than were to fit"

    def filled(tensor: Tensor, value: int = 0) -> Tensor:
        return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=value)

    longer = batch._replace(
        lengths_B=filled(batch.lengths_B),
        sequences_B=filled(batch.sequences_B, -1),
        labels_B=None if batch.labels_B is None else filled(batch.labels_B, -1),
    )
    match longer:
        case TokenBatch():
            return longer._replace(tokens_BT=filled(longer.tokens_BT))
        case VectorBatch():
            return longer._replace(values_BTD=filled(longer.values_BTD), observed_BTD=filled(longer.observed_BTD))
        case EventBatch():
            return longer._replace(gaps_BT=filled(longer.gaps_BT))
