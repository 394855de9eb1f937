"""Where sequences came from, for messages: their ids, and the Parquet files and row groups that they begin in.

In: an opened split, numbers of sequences. Out: one line, short however many there are.
"""

from collections.abc import Iterable
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.data.building.encoded import counted
from seqvae.data.building.moments import some
from seqvae.data.sequence_set import SequenceSet

SHOWN, SHOWN_FILES = 5, 3
UNREADABLE = (OSError, pa.ArrowException)


def place_of(split: SequenceSet, sequences_B: np.ndarray) -> str:
    if len(sequences_B) == 0:
        return "no sequences"
    whole = f"of the {split.directory.name} split"
    try:
        ids, rows_of = split.ids(sequences_B), split.rows_of(sequences_B)
    except UNREADABLE as error:
        return f"sequences {_some(sequences_B)} {whole} by number, as {split.directory} cannot be read ({error})"
    files = [f"{file}: {_part(file, rows_R)}" for file, rows_R in islice(rows_of.items(), SHOWN_FILES)]
    more = len(rows_of) - len(files)
    beside = f"; and {counted(more, 'more file')}" if more else ""
    noun = "sequence" if len(ids) == 1 else "sequences"
    return f"{noun} {_some(ids)} {whole} ({'; '.join(files)}{beside})"


def _part(file: str, rows_R: np.ndarray) -> str:
    """Row groups, as the file says; rows where it cannot be asked any more."""
    try:
        footer = pq.read_metadata(file)
    except UNREADABLE:
        return _numbered("row", rows_R)
    if rows_R.max() >= footer.num_rows:  # another file by now
        return _numbered("row", rows_R)
    ends_G = np.cumsum([footer.row_group(group).num_rows for group in range(footer.num_row_groups)])
    return _numbered("row group", np.searchsorted(ends_G, rows_R, side="right"))


def _numbered(noun: str, numbers: np.ndarray) -> str:
    distinct = np.unique(numbers)
    return f"{noun}{'s' * (len(distinct) != 1)} {_some(distinct)}"


def _some(names: Iterable[object]) -> str:
    return some([str(name) for name in names], SHOWN)
