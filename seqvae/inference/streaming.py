"""All sequences of a split, batch by batch in an order that wastes little, and rows that come out in the order of the data.

A window of sequences at a time is sorted by length, cut into batches, computed, and brought back into its order: memory is that of
one window, however many sequences there are.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa
from lightning.fabric.utilities import move_data_to_device

from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.inference.estimates import STEPS_AT_ONCE, cut_ascending
from seqvae.inference.model import Trained

WINDOW = 8192
"""Sequences; sorted among so many, 98 to 99 % of what a batch holds is real."""
WINDOW_CELLS = 2**22
"""Numbers of an output; where a step has many of them, and where sequences are long, they come in smaller windows."""
SEQUENCE = "(sequence)"
"""Column with the number of the sequence that a row is of."""


def rows_of(
    data: SequenceDataModule,
    split: str,
    trained: Trained,
    compute: Callable[[Batch], pa.Table],
    *,
    cells_a_step: int = 1,
    steps: int = STEPS_AT_ONCE,
) -> Iterator[pa.Table]:
    """A table for each window, in the order of the data: `id, split`, and the columns that `compute` makes of each batch.

    It makes one row a sequence, or several one behind the other, and says in a column SEQUENCE (`sequences_B`) whose they are.
    Sequences that are windows of longer ones are told apart by a column `window`.
    """
    stored = data.split(split)
    lengths_N = np.asarray(stored.lengths_N)
    for first, behind in windows(lengths_N, max(1, WINDOW_CELLS // cells_a_step)):
        order_W = first + np.argsort(lengths_N[first:behind], kind="stable")
        slices = cut_ascending(lengths_N[order_W], steps)
        batches = (move_data_to_device(stored.gather(order_W[part]), trained.device) for part in slices)
        names = {"id": pa.array(stored.ids(np.arange(first, behind)))}
        if (window_W := stored.window_of(np.arange(first, behind))) is not None:
            names["window"] = pa.array(window_W)
        names["split"] = pa.array([split] * (behind - first), pa.string())
        yield in_order(pa.concat_tables([compute(batch) for batch in batches]), names, first)


def in_order(table: pa.Table, names: Mapping[str, pa.Array], first: int) -> pa.Table:
    """Rows by their sequence; what it is called takes the place of its number: `names` are of sequences `first` and following."""
    table = table.combine_chunks()
    sequence_R = table.column(SEQUENCE).to_numpy()
    order_R = np.argsort(sequence_R, kind="stable")
    rows_R = pa.array(sequence_R[order_R] - first)
    ordered = table.drop_columns([SEQUENCE]).take(pa.array(order_R))
    columns = {name: of.take(rows_R) for name, of in names.items()}
    return pa.table(columns | dict(zip(ordered.column_names, ordered.columns, strict=True)))


def windows(lengths_N: np.ndarray, most_steps: int = WINDOW_CELLS) -> Iterator[tuple[int, int]]:
    """
    >>> list(windows(np.full(3, 5), 10))
    [(0, 2), (2, 3)]
    """
    first = 0
    while first < len(lengths_N):
        steps_W = np.cumsum(lengths_N[first : first + WINDOW], dtype=np.int64)
        behind = first + max(1, int(np.searchsorted(steps_W, most_steps, side="right")))
        yield first, behind
        first = behind


# Files that are there in full or not at all, and Parquet that grows row group by row group at constant memory.
