"""All sequences of a split, batch by batch in an order that wastes little, and rows that come out in the order of the data.

A window of sequences at a time is sorted by length, cut into batches, computed, and brought back into its order: memory is that of
one window, however many sequences there are.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa
from lightning.fabric.utilities import move_data_to_device

from dataset import SequenceDataModule
from sequences.batches import Batch
from training.evaluation import STEPS_AT_ONCE, cut_ascending
from using.trained import Trained

WINDOW = 8192
"""Sequences; sorted among so many, 99 % of what a batch holds is real."""
WINDOW_STEPS = 2**20
"""Steps; long sequences come in smaller windows."""

Columns = Mapping[str, pa.Array]
"""One value a sequence of the batch, in its order."""


def rows_of(
    data: SequenceDataModule,
    split: str,
    trained: Trained,
    compute: Callable[[Batch], Columns],
    *,
    steps: int = STEPS_AT_ONCE,
) -> Iterator[pa.Table]:
    """A table for each window: `id`, and what `compute` makes of each batch, in the order of the data."""
    stored = data.split(split)
    lengths_N = np.asarray(stored.lengths_N)
    for first, behind in windows(lengths_N):
        order_W = first + np.argsort(lengths_N[first:behind], kind="stable")
        parts = []
        for part in cut_ascending(lengths_N[order_W], steps):
            batch = stored.gather(order_W[part])
            parts.append(pa.table(dict(compute(move_data_to_device(batch, trained.device)))))
        place_W = np.empty(behind - first, np.int64)
        place_W[order_W - first] = np.arange(behind - first)
        table = pa.concat_tables(parts).combine_chunks().take(pa.array(place_W))
        yield table.add_column(0, "id", pa.array(stored.ids(np.arange(first, behind))))


def windows(lengths_N: np.ndarray) -> Iterator[tuple[int, int]]:
    """
    >>> list(windows(np.full(3, 2**19)))
    [(0, 2), (2, 3)]
    """
    first = 0
    while first < len(lengths_N):
        steps_W = np.cumsum(lengths_N[first : first + WINDOW], dtype=np.int64)
        behind = first + max(1, int(np.searchsorted(steps_W, WINDOW_STEPS, side="right")))
        yield first, behind
        first = behind
