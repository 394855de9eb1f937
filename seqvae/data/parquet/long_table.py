"""Long tables: from blocks in file order to blocks of whole sequences, each in order of time.

Rows of one sequence that lie apart (sorted by time, appended day by day) are brought together with a bounded amount of
memory: rows are distributed to spill files by a hash of their id, and each spill file is small enough to sort.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from seqvae.data.parquet.reader import Block, BlockReader, concat_blocks
from seqvae.errors import DataError

SPILL_ROWS = 1_000_000
"""Rows that one spill file holds on average: about 100 MB while it is sorted."""
MOST_SPILL_FILES = 256
IDS_AT_ONCE = 1 << 16
"""Ids that are hashed together: pandas hashes Python strings, and mixing makes copies."""


def sequence_starts(ids: pa.Array) -> np.ndarray:
    """Return the first row of every run of equal ids.

    >>> sequence_starts(pa.array(["a", "a", "b"])).tolist()
    [0, 2]
    """
    if len(ids) == 0:
        return np.zeros(0, np.int64)
    keys = ids.to_numpy() if pa.types.is_integer(ids.type) else ids.dictionary_encode().indices.to_numpy()
    return np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1]).astype(np.int64)


def whole_sequences(blocks: Iterator[Block]) -> Iterator[Block]:
    """Cut blocks only where a new sequence begins; equal ids must already lie together."""
    unfinished: list[Block] = []
    for block in blocks:
        ids = block.columns["id"]
        last = int(sequence_starts(ids)[-1])
        if last:
            yield concat_blocks([*unfinished, block.slice(0, last)])
            unfinished = []
        elif unfinished and unfinished[-1].columns["id"][-1] != ids[0]:
            yield concat_blocks(unfinished)
            unfinished = []
        unfinished.append(block.slice(last, len(ids)))
    if unfinished:
        yield concat_blocks(unfinished)


def first_scattered_row(reader: BlockReader, paths: Sequence[Path]) -> str | None:
    """Return the place of a row whose id occurred before, with others in between, or None where equal ids lie together."""
    runs = [np.zeros(0, np.uint64)]
    for keys, _, _ in _runs(reader, paths):
        runs.append(keys)
        if len(np.unique(keys)) < len(keys):
            break  # enough is known
    keys, counts = np.unique(np.concatenate(runs), return_counts=True)
    if (counts == 1).all():
        return None
    repeated = keys[counts > 1]
    met: set[int] = set()
    for keys, starts, block in _runs(reader, paths):
        for run in np.flatnonzero(np.isin(keys, repeated)).tolist():
            if int(keys[run]) in met:
                return reader.where(block, int(starts[run]))
            met.add(int(keys[run]))
    return str(paths[0])


def _runs(reader: BlockReader, paths: Sequence[Path]) -> Iterator[tuple[np.ndarray, np.ndarray, Block]]:
    """Yield the hashes of the ids in their order, one for each run of equal ids, and the rows of the block where runs begin."""
    ids_alone = dataclasses.replace(
        reader.layout, time=None, variable=None, value=None, set_index=None, features=(), label=None
    )
    last = np.zeros(0, np.uint64)
    for block in BlockReader(reader.files, ids_alone)(paths):
        ids = block.columns["id"]
        rows = np.flatnonzero(ids.is_valid())
        starts = rows[sequence_starts(ids.drop_null())]
        keys = hash_ids(ids.take(pa.array(starts)))
        goes_on = int(len(keys) > 0 and len(last) > 0 and keys[0] == last[-1])
        last = keys if len(keys) else last
        yield keys[goes_on:], starts[goes_on:], block


def bring_together(blocks: Iterator[Block], rows: int, directory: Path) -> Iterator[Block]:
    """Yield blocks of whole sequences from blocks whose equal ids lie anywhere; `rows` decides the number of spill files."""
    directory.mkdir(parents=True, exist_ok=True)
    count = min(MOST_SPILL_FILES, 1 + rows // SPILL_ROWS)
    paths = [directory / f"{number}.arrow" for number in range(count)]
    try:
        with ExitStack() as stack:
            writers: dict[int, pa.RecordBatchStreamWriter] = {}
            for block in blocks:
                bucket_R = (hash_ids(block.columns["id"]) % np.uint64(count)).astype(np.int64)
                order = np.argsort(bucket_R, kind="stable")
                columns = block.columns.append_column("__file", pa.array(block.files_R))
                columns = columns.append_column("__row", pa.array(block.rows_R)).take(pa.array(order))
                bounds = np.searchsorted(bucket_R[order], np.arange(count + 1))
                for number in np.flatnonzero(np.diff(bounds)).tolist():
                    if number not in writers:
                        sink = stack.enter_context(pa.OSFile(str(paths[number]), "wb"))
                        writers[number] = stack.enter_context(pa.ipc.new_stream(sink, columns.schema))
                    writers[number].write_batch(columns.slice(bounds[number], bounds[number + 1] - bounds[number]))
        for path in filter(Path.exists, paths):
            with pa.OSFile(str(path)) as source:
                table = pa.ipc.open_stream(source).read_all()
            path.unlink()
            table = table.take(pa.array(np.argsort(hash_ids(table["id"]), kind="stable")))
            files_R, rows_R = (table[name].to_numpy() for name in ("__file", "__row"))
            [columns] = table.drop_columns(["__file", "__row"]).combine_chunks().to_batches()
            yield Block(columns, files_R, rows_R)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def in_order_of_time(block: Block, reader: BlockReader, unsorted: str) -> tuple[Block, int]:
    """Return the block with each sequence's rows in order of time (null times first), and how many rows came too early."""
    if "time" not in block.columns.schema.names:
        return block, 0
    starts = sequence_starts(block.columns["id"])
    sequence_R = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(block.rows_R)))
    time_R = block.numbers("time")
    valid_R = np.asarray(block.columns["time"].is_valid())
    timed = np.flatnonzero(valid_R)  # a static fact may stand anywhere
    earlier, later = timed[:-1], timed[1:]
    backwards = np.flatnonzero((time_R[later] < time_R[earlier]) & (sequence_R[later] == sequence_R[earlier]))
    if not len(backwards):
        return block, 0
    if unsorted == "error":
        before, row = int(earlier[backwards[0]]), int(later[backwards[0]])
        raise DataError(
            f"{reader.where(block, row)}: time goes backwards in column {reader.layout.time!r}, from {time_R[before]:g} to "
            f"{time_R[row]:g} within one sequence. Sort the rows by id and time, or say --unsorted sort."
        )
    return block.take(np.lexsort((np.where(valid_R, time_R, -np.inf), sequence_R))), len(backwards)


def hash_ids(ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return a 64-bit hash of each id, equal on every machine and in every run; ids are int64 or text without nulls.

    >>> hash_ids(pa.array([1, 2, 1]))[[0, 2]].tolist() == [hash_ids(pa.array([1]))[0]] * 2
    True
    """
    hashes_N = np.empty(len(ids), np.uint64)
    for start in range(0, len(ids), IDS_AT_ONCE):
        piece = ids.slice(start, IDS_AT_ONCE)
        if pa.types.is_integer(ids.type):
            hashed_P = _mix(piece.to_numpy().astype(np.uint64))
        else:
            words = (
                pa.concat_arrays(piece.chunks) if isinstance(piece, pa.ChunkedArray) else piece
            ).dictionary_encode()
            distinct_words = words.dictionary.to_numpy(zero_copy_only=False).astype(object)
            hashed_P = _mix(pd.util.hash_array(distinct_words, categorize=False).astype(np.uint64))[
                words.indices.to_numpy()
            ]
        hashes_N[start : start + IDS_AT_ONCE] = hashed_P
    return hashes_N


def _mix(keys_N: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64: neighbouring numbers come out unrelated. Wraps around on purpose."""
    keys_N = keys_N + np.uint64(0x9E3779B97F4A7C15)
    keys_N = (keys_N ^ (keys_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys_N = (keys_N ^ (keys_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys_N ^ (keys_N >> np.uint64(31))
