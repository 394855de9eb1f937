"""Parquet files -> blocks of rows with columns named by their role and canonical types; of long tables, blocks of whole sequences.

A block is bounded in size whatever the size of files and row groups, as long as one sequence fits in memory several times
over. It knows the file and row of each of its rows, so that a message about a value can name its place.
Nothing here becomes a Python object per row.

Rows of one sequence that lie apart (sorted by time, appended day by day) are brought together with a bounded amount of
memory: rows are distributed to spill files by a hash of their id, and each spill file is small enough to sort.
"""

import dataclasses
import errno
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat

from seqvae.data.parquet.schema import SKIP, Layout, is_list, is_text, is_time
from seqvae.data.storage import READ_AHEAD_BYTES, SMALL_BYTES, DataFile, RemoteFile, ahead, readable, trouble_with
from seqvae.errors import DamagedFileError, DataError

log = logging.getLogger(__name__)
BLOCK_ROWS = 262_144
BLOCK_VALUES = 2_000_000
BLOCK_BYTES = 32 << 20
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What pyarrow raises for damaged files; the last one for the names of columns."""
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the machine, which are no fault of the file."""
EXACT_BELOW = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}
"""Floats of these types hold every whole number below these."""
MINUTE_IN = {"s": 60.0, "ms": 60e3, "us": 60e6, "ns": 60e9}
WHOLE_NUMBER = re.compile(r"(-?\d{1,18})(\.0)?", re.ASCII)
"""A file's stem that is a number of 64 bits: 200001 and 200001.0 (a float written by pandas) are the same sequence."""
SPILL_ROWS = 1_000_000
"""Rows that one spill file holds on average: about 100 MB while it is sorted."""
MOST_SPILL_FILES = 256
IDS_AT_ONCE = 1 << 16
"""Ids that are hashed together: pandas hashes Python strings, and mixing makes copies."""
open_parquet = partial(pq.ParquetFile, page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 20)


class Stretch(NamedTuple):
    """Consecutive rows of one file."""

    path: DataFile
    rows_before: int
    """Rows of the files before it, as ids number them that come from no column."""
    first_row: int = 0
    groups: tuple[int, ...] | None = None
    """Its row groups; None: the whole file."""


def whole_files(rows_of: Mapping[DataFile, int]) -> list[Stretch]:
    """Return a stretch for each of these files with so many rows."""
    starts = accumulate(rows_of.values(), initial=0)
    return [Stretch(path, start) for path, start in zip(rows_of, starts, strict=False)]


class Block(NamedTuple):
    """Consecutive rows of the files."""

    columns: pa.RecordBatch
    """Columns id, sequence | id, time, variable, value, set_index | id, time, 0, 1, ... (features), and label."""
    files_R: np.ndarray
    """int32, the file of each row, as an index into the list of files."""
    rows_R: np.ndarray
    """int64, the row in that file."""

    def take(self, indices: np.ndarray) -> "Block":
        return Block(self.columns.take(pa.array(indices)), self.files_R[indices], self.rows_R[indices])

    def slice(self, start: int, stop: int) -> "Block":
        return Block(self.columns.slice(start, stop - start), self.files_R[start:stop], self.rows_R[start:stop])

    def numbers(self, name: str) -> np.ndarray:
        """Return a number column as float64, nulls as NaN; not to be written to."""
        return np.asarray(self.columns[name].to_numpy(zero_copy_only=False), dtype=np.float64)


def concat_blocks(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    batches, files, rows = zip(*blocks, strict=True)
    [columns] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return Block(columns, np.concatenate(files), np.concatenate(rows))


class BlockReader:
    """A reader of the columns of a layout from a list of files, with an account of what was wrong in them."""

    def __init__(
        self, files: Sequence[DataFile], layout: Layout, bad_values: str = "error", missing_values: Sequence[float] = ()
    ) -> None:
        self.files = files
        self.layout = layout
        self.bad_values = bad_values
        """The --bad_values."""
        with np.errstate(over="ignore"):
            singles = np.array(missing_values, np.float32).astype(np.float64)
        self.missing_values = np.append(missing_values, singles[np.isfinite(singles)])
        """The --missing_values, and what columns of float32 hold in their place."""
        self.repairs: Counter[tuple[str, str]] = Counter()
        """What was left out or changed: a noun, and the rest of a sentence about n of these."""
        self._codes = pa.array([code for code, _ in layout.code_names], pa.large_string())
        self._names_of_codes = pa.array([name for _, name in layout.code_names], pa.large_string())
        self._stems_are_numbers = all(WHOLE_NUMBER.fullmatch(file.stem) for file in files)

    def where(self, block: Block, row: int) -> str:
        """Return the place of a row, for messages; rows are counted from 0."""
        return f"{self.files[block.files_R[row]]}: row {block.rows_R[row]}"

    def bad_value(self, block: Block, row: int, what: str) -> DataError:
        return DataError(
            f"{self.where(block, row)}: {what}. Correct it, or leave such sequences out with --bad_values drop."
        )

    def stem_id(self, file: DataFile) -> int | str:
        """Return the id of the sequence in a file: the number in its name, where all files are named after numbers."""
        number = WHOLE_NUMBER.fullmatch(file.stem)
        return int(number[1]) if number and self._stems_are_numbers else file.stem

    def __call__(self, stretches: Sequence[Stretch]) -> Iterator[Block]:
        """Yield the blocks of these rows, none empty; small ones are put together, as one file may hold one short sequence.

        Rows whose id is null belong to no sequence: they are refused or left out.
        """
        index = {path: number for number, path in enumerate(self.files)}
        stem_type = pa.int64() if self._stems_are_numbers else pa.large_string()
        waiting: list[Block] = []
        waiting_rows = waiting_bytes = 0
        batches_of = _batches_of_each(stretches, self.layout.columns, self.layout.sequence)
        for path, rows_before, first_row, _ in stretches:
            for batch in next(batches_of):
                rows_R = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
                columns = {}
                for role, name in self.layout.roles.items():
                    try:
                        columns[role] = _convert(role, batch.column(name))
                    except pa.ArrowInvalid as error:
                        row, found = _first_bad_value(role, batch.column(name))
                        raise DataError(
                            f"{path}: row {first_row + row}: column {name!r} holds {found}. Correct it, {SKIP}."
                        ) from error
                if len(self._codes):
                    names = self._names_of_codes.take(pc.index_in(columns["variable"], value_set=self._codes))
                    columns["variable"] = pc.coalesce(names, columns["variable"])
                if self.layout.form == "files":
                    columns["id"] = pa.repeat(pa.scalar(self.stem_id(path), stem_type), len(rows_R))
                elif "id" not in columns:
                    columns["id"] = pa.array(rows_R + rows_before)
                block = Block(pa.record_batch(columns), np.full(len(rows_R), index[path], np.int32), rows_R)
                first_row += batch.num_rows
                if nulls := columns["id"].null_count:
                    valid_R, what = np.asarray(columns["id"].is_valid()), f"a null in the id column {self.layout.id!r}"
                    if self.bad_values != "drop":
                        raise self.bad_value(block, int(np.flatnonzero(~valid_R)[0]), what)
                    self.repairs["row", f"left out (--bad_values drop): {what}"] += nulls
                    block = block.take(np.flatnonzero(valid_R))
                rows, size = len(block.rows_R), block.columns.nbytes
                if rows == 0:
                    continue
                full = waiting_rows + rows > BLOCK_ROWS or waiting_bytes + size > BLOCK_BYTES
                if waiting and (full or waiting[0].columns.schema != block.columns.schema):
                    yield concat_blocks(waiting)
                    waiting, waiting_rows, waiting_bytes = [], 0, 0
                waiting.append(block)
                waiting_rows, waiting_bytes = waiting_rows + rows, waiting_bytes + size
        if waiting:
            yield concat_blocks(waiting)


def _batches_of_each(
    stretches: Sequence[Stretch], columns: Sequence[str], sequence: str | None
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Yield what `read_batches` does for each stretch. Of files in a store, threads fetch and decode row groups before their turn,
    the next files' as well, in bounded memory (`ahead`); a group beyond that bound is streamed when its turn comes."""
    if not any(isinstance(stretch.path, RemoteFile) for stretch in stretches):
        yield from (read_batches(stretch.path, columns, sequence, stretch.groups) for stretch in stretches)
        return

    def opened(path: RemoteFile) -> tuple[RemoteFile, pa.NativeFile, pq.FileMetaData, int]:
        with _damage_told(path, columns):
            source = path.open()
            if path.size <= SMALL_BYTES:
                source = pa.BufferReader(source.read_buffer())
            file = open_parquet(source)
            return path, source, file.metadata, _rows_per_batch(file, columns) if file.metadata.num_rows else 1

    def decoded(
        number: int, path: RemoteFile, source: pa.NativeFile, metadata: pq.FileMetaData, batch_rows: int, group: int
    ) -> tuple[int, int, Iterator[pa.RecordBatch]]:
        is_streamed = _decoded_bytes(metadata, group, columns) > READ_AHEAD_BYTES
        file = pq.ParquetFile(
            source,
            metadata=metadata,
            page_checksum_verification=True,
            pre_buffer=not is_streamed,
            buffer_size=SMALL_BYTES if is_streamed else 0,
        )
        batches = file.iter_batches(batch_size=batch_rows, row_groups=[group], columns=list(columns))
        if is_streamed:
            return number, batch_rows, batches
        with _damage_told(path, columns, groups=[group]):
            ready = list(batches)
            rows, wanted = sum(batch.num_rows for batch in ready), metadata.row_group(group).num_rows
            if columns and rows != wanted:
                raise pa.ArrowInvalid(f"row group {group} ends after {rows} of {wanted} rows")
            return number, batch_rows, iter(ready)

    def row_groups() -> Iterator[tuple[int, Callable[[], tuple[int, int, Iterator[pa.RecordBatch]]]]]:
        """Yield the size of each row group, and what returns its stretch, the rows of a batch, and its batches."""
        paths = [stretch.path for stretch in stretches if isinstance(stretch.path, RemoteFile)]
        for number, found in enumerate(ahead((min(path.size, SMALL_BYTES), partial(opened, path)) for path in paths)):
            metadata, groups = found[2], stretches[number].groups
            for group in range(metadata.num_row_groups) if groups is None else groups:
                size = _decoded_bytes(metadata, group, columns)
                yield (0 if size > READ_AHEAD_BYTES else size), partial(decoded, number, *found, group)

    fetched = ahead(row_groups())
    waiting = next(fetched, None)

    def decoded_of(number: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        nonlocal waiting
        while waiting is not None and waiting[0] == number:
            _, batch_rows, batches = waiting
            with _damage_told(stretches[number].path, columns, groups=stretches[number].groups):
                yield from ((batch_rows, batch) for batch in batches)
            waiting = next(fetched, None)

    def batches_of(number: int) -> Iterator[pa.RecordBatch]:
        """Cut the rows as one pass over the file does, across row groups: the cache's tables keep where blocks begin."""
        pieces: list[pa.RecordBatch] = []
        for batch_rows, batch in decoded_of(number):
            while batch.num_rows:
                missing = batch_rows - sum(piece.num_rows for piece in pieces)
                pieces.append(batch.slice(0, missing))
                batch = batch.slice(missing) if batch.num_rows > missing else batch.slice(0, 0)
                if sum(piece.num_rows for piece in pieces) == batch_rows:
                    yield from _in_pieces(_joined(pieces), sequence)
                    pieces = []
        if pieces:
            yield from _in_pieces(_joined(pieces), sequence)

    with closing(fetched):
        yield from map(batches_of, range(len(stretches)))


def _joined(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(pieces) == 1:
        return pieces[0]
    [batch] = pa.Table.from_batches(pieces).combine_chunks().to_batches()
    return batch


def _decoded_bytes(metadata: pq.FileMetaData, group: int, columns: Sequence[str]) -> int:
    """Return about how many bytes the columns of a row group take in memory: of numbers, eight each, however they are packed."""
    chunks = map(metadata.row_group(group).column, range(metadata.num_columns))
    wanted = [one for one in chunks if one.path_in_schema in columns or one.path_in_schema.partition(".")[0] in columns]
    return sum(max(one.total_uncompressed_size, 8 * one.num_values) for one in wanted)


@contextmanager
def _damage_told(
    path: DataFile, columns: Sequence[str], row: Callable[[], int] = lambda: 0, groups: Sequence[int] | None = None
) -> Iterator[None]:
    """Turn what pyarrow raises within the block into a message about the damaged part of a file, or about its store.

    `row`: of the row groups that are read, the one that was reached.
    """
    try:
        yield
    except MemoryError:  # pyarrow's is one of its exceptions, too
        raise
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise
        if isinstance(path, RemoteFile) and (trouble := trouble_with(path, error)):
            raise trouble from error
        reason = " ".join(str(error).split())[:200]
        raise DamagedFileError(
            f"{path}: {_damaged_part(path, columns, row(), groups)} cannot be read, the file is damaged ({reason}). "
            f"Write it again, {SKIP}."
        ) from error


def read_batches(
    path: DataFile, columns: Sequence[str], sequence: str | None = None, groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one file, or of some of its row groups, in batches of bounded size; page checksums are verified where the
    file has them.

    The number of rows of a batch is right on average, which a few long rows among short ones spoil: such a batch is cut into
    pieces of similar size by the lengths in its `sequence` column.
    """
    row = 0
    with _damage_told(path, columns, lambda: row, groups), open_parquet(readable(path)) as file:
        size = _rows_per_batch(file, columns) if file.metadata.num_rows else 1
        wanted = range(file.metadata.num_row_groups) if groups is None else groups
        rows = sum(file.metadata.row_group(group).num_rows for group in wanted)
        for batch in file.iter_batches(batch_size=size, columns=list(columns), row_groups=list(wanted)):
            yield from _in_pieces(batch, sequence)
            row += batch.num_rows
        if columns and row != rows:
            raise pa.ArrowInvalid(f"it ends after {row} of {rows} rows")


def _in_pieces(batch: pa.RecordBatch, sequence: str | None) -> Iterator[pa.RecordBatch]:
    """Yield a batch whole, or one that is much too large in pieces of similar size."""
    bounds = [0, batch.num_rows]
    large = sequence is not None and batch.nbytes > 2 * BLOCK_BYTES
    if large and not pat.is_dictionary((lists := batch.column(sequence)).type):
        lengths_R = pc.list_value_length(lists) if is_list(lists.type) else pc.binary_length(lists)
        share_R = np.cumsum(np.asarray(lengths_R.fill_null(0)), dtype=np.float64)
        piece_R = np.floor(share_R / max(1.0, share_R[-1]) * (batch.nbytes / BLOCK_BYTES))
        bounds[1:1] = (np.flatnonzero(np.diff(piece_R)) + 1).tolist()
    for start, stop in pairwise(bounds):
        yield batch.slice(start, stop - start)


def _rows_per_batch(file: pq.ParquetFile, columns: Sequence[str]) -> int:
    """Return a number of rows that keeps a batch small in memory, however long the lists or texts in a row are."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    bytes_per_row = [group.total_byte_size / max(1, group.num_rows) for group in groups]
    paths = [leaf.path for leaf in file.schema]
    nested = [
        number
        for number, path in enumerate(paths)  # a column's name may have dots in it
        if (path in columns or any(path.startswith(f"{column}.") for column in columns))
        and file.schema.column(number).max_repetition_level
    ]
    values_per_row = 1.0
    if nested:  # the longest lists, in the row group where rows are longest: judged by the largest group and all sizes
        largest = max(range(len(groups)), key=lambda number: groups[number].num_rows)
        # Reading a row first: it raises where the metadata of a damaged column would end the process.
        next(file.iter_batches(batch_size=1, row_groups=[largest], columns=columns), None)
        values = max(groups[largest].column(number).num_values for number in nested) / max(1, groups[largest].num_rows)
        values_per_row = float(values * max(bytes_per_row) / max(bytes_per_row[largest], 1e-9))
    rows = min(BLOCK_ROWS, BLOCK_VALUES / max(1, values_per_row), BLOCK_BYTES / max(1, *bytes_per_row))
    return int(max(1, rows))


def _damaged_part(path: DataFile, columns: Sequence[str], row: int, groups: Sequence[int] | None) -> str:
    """Return the first of the row groups that were read, at or after this row of theirs, with a column that cannot be read; each is
    tried on its own."""
    try:
        metadata = pq.read_metadata(readable(path))
    except UNREADABLE:
        return "its footer"
    groups = range(metadata.num_row_groups) if groups is None else groups
    ends = np.cumsum([metadata.row_group(group).num_rows for group in groups])
    first = int(np.searchsorted(ends, row, side="right"))
    for group in groups[first:]:
        for column in columns:
            try:
                with open_parquet(readable(path)) as file:
                    for _ in file.iter_batches(row_groups=[group], columns=[column]):
                        pass
            except UNREADABLE:
                return f"column {column!r} in row group {group}"
    return f"row group {groups[first] if first < len(groups) else first} (at or after row {row})"


def _convert(role: str, column: pa.Array) -> pa.Array:
    """Return a column in the type of its role: ids int64 or text, times in minutes, numbers float64, lists as they are."""
    kind = column.type
    if role == "sequence" and is_list(kind):
        return column
    if is_text(kind) or role == "variable":
        text = column.cast(pa.large_string())
        text.validate(full=True)  # that it is UTF-8, which Parquet does not promise
        return text
    if role in ("id", "set_index"):
        if pat.is_floating(kind):
            if (pc.max(pc.abs(column.cast(pa.float64()))).as_py() or 0) >= EXACT_BELOW[kind]:
                raise pa.ArrowInvalid("several whole numbers are one float here")
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
        return column.cast(pa.int64())
    if is_time(kind):
        column = column.cast(pa.timestamp("ms")) if pat.is_date(kind) else column
        return pc.divide(column.cast(pa.int64()).cast(pa.float64(), safe=False), MINUTE_IN[column.type.unit])
    return column.cast(pa.int64() if role == "label" and pat.is_integer(kind) else pa.float64(), safe=False)


def _first_bad_value(role: str, column: pa.Array) -> tuple[int, str]:
    """Return the first row that does not convert, found by halves, and its value as a message shows it."""
    start, stop = 0, len(column)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            _convert(role, column.slice(start, middle - start))
            start = middle
        except pa.ArrowInvalid:
            stop = middle
    try:
        value = column[start].as_py()
    except UnicodeDecodeError:
        return start, "bytes that are not UTF-8"
    exact = EXACT_BELOW.get(column.type)
    if exact and exact <= abs(value) < math.inf:
        return start, f"{value}, but {column.type} is exact only below {exact:,}"
    return start, f"{value}, which is not a signed 64-bit whole number"


# --- Long tables ----------------------------------------------------------------------------------------------------


def sequence_starts(ids: pa.Array) -> np.ndarray:
    """Return the first row of every run of equal ids.

    >>> sequence_starts(pa.array(["a", "a", "b"])).tolist()
    [0, 2]
    """
    if len(ids) == 0:
        return np.zeros(0, np.int64)
    keys = ids.to_numpy() if pa.types.is_integer(ids.type) else ids.dictionary_encode().indices.to_numpy()
    return np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1]).astype(np.int64)


def sequences_of(block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Return the row where each sequence of a block begins, and the number of the sequence that each row belongs to."""
    starts_S = sequence_starts(block.columns["id"])
    return starts_S, np.repeat(np.arange(len(starts_S)), np.diff(starts_S, append=len(block.rows_R)))


def ordered_sequences(reader: BlockReader, blocks: Iterator[Block], unsorted: str) -> Iterator[Block]:
    """Yield blocks of whole sequences, each in order of time, from blocks in which equal ids lie together."""
    layout = reader.layout
    for block in _whole_sequences(blocks):
        if layout.label is not None:
            labels = block.columns["label"]
            codes_R = labels.dictionary_encode("encode").indices.to_numpy()
            starts_S, sequence_R = sequences_of(block)
            first_R = starts_S[sequence_R]
            changed = np.flatnonzero(codes_R != codes_R[first_R])
            if len(changed):
                row = int(changed[0])
                found, before = (labels[at].as_py() for at in (row, int(first_R[row])))
                raise DataError(
                    f"{reader.where(block, row)}: column {layout.label!r} holds {found!r}, but {before!r} where the same "
                    f"sequence begins. A label is of a whole sequence: choose another --label_column, or put the labels into "
                    f"--label_path."
                )
        yield _in_order_of_time(block, reader, unsorted)


def _whole_sequences(blocks: Iterator[Block]) -> Iterator[Block]:
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


def first_scattered_row(reader: BlockReader, paths: Sequence[DataFile]) -> tuple[str | None, set[DataFile]]:
    """Return the place of a row whose id occurred before, with others in between; or None where equal ids lie together, and the
    files that begin with a new one."""
    runs, beginnings = [np.zeros(0, np.uint64)], set()
    for keys, starts, block in _runs(reader, paths):
        runs.append(keys)
        first = starts[block.rows_R[starts] == 0]
        beginnings |= {reader.files[file] for file in block.files_R[first].tolist()}
        if len(np.unique(keys)) < len(keys):
            break  # enough is known
    keys, counts = np.unique(np.concatenate(runs), return_counts=True)
    if (counts == 1).all():
        return None, beginnings
    repeated = keys[counts > 1]
    met: set[int] = set()
    for keys, starts, block in _runs(reader, paths):
        for run in np.flatnonzero(np.isin(keys, repeated)).tolist():
            if int(keys[run]) in met:
                return reader.where(block, int(starts[run])), beginnings
            met.add(int(keys[run]))
    return str(paths[0]), beginnings


def _runs(reader: BlockReader, paths: Sequence[DataFile]) -> Iterator[tuple[np.ndarray, np.ndarray, Block]]:
    """Yield the hashes of the ids in their order, one for each run of equal ids, and the rows of the block where runs begin."""
    ids_alone = dataclasses.replace(
        reader.layout, time=None, variable=None, value=None, set_index=None, features=(), label=None
    )
    last = np.zeros(0, np.uint64)
    for block in BlockReader(reader.files, ids_alone, bad_values="drop")([Stretch(path, 0) for path in paths]):
        starts = sequence_starts(block.columns["id"])
        keys = hash_ids(block.columns["id"].take(pa.array(starts)))
        goes_on = int(len(last) > 0 and keys[0] == last[-1])
        last = keys
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


def _in_order_of_time(block: Block, reader: BlockReader, unsorted: str) -> Block:
    """Return the block with each sequence's rows in order of time, null times first."""
    if reader.layout.time is None:
        return block
    _, sequence_R = sequences_of(block)
    time_R = block.numbers("time")
    valid_R = np.asarray(block.columns["time"].is_valid())
    timed = np.flatnonzero(valid_R)  # a static fact may stand anywhere
    earlier, later = timed[:-1], timed[1:]
    backwards = np.flatnonzero((time_R[later] < time_R[earlier]) & (sequence_R[later] == sequence_R[earlier]))
    if not len(backwards):
        return block
    if unsorted == "error":
        before, row = int(earlier[backwards[0]]), int(later[backwards[0]])
        raise DataError(
            f"{reader.where(block, row)}: time goes backwards in column {reader.layout.time!r}, from {time_R[before]:g} to "
            f"{time_R[row]:g} within one sequence. Sort the rows by id and time, or say --unsorted sort."
        )
    reader.repairs["row", "earlier than the row before in the same sequence: sorted by time"] += len(backwards)
    return block.take(np.lexsort((np.where(valid_R, time_R, -np.inf), sequence_R)))


def hash_ids(ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return a 64-bit hash of each id, equal on every machine and in every run; ids are int64 or text without nulls.

    >>> hash_ids(pa.array([1, 2, 1]))[[0, 2]].tolist() == [hash_ids(pa.array([1]))[0]] * 2
    True
    """
    hashes_N = np.empty(len(ids), np.uint64)
    for start in range(0, len(ids), IDS_AT_ONCE):
        piece = ids.slice(start, IDS_AT_ONCE)
        if pa.types.is_integer(ids.type):
            keys, indices = piece.to_numpy().astype(np.uint64), None
        else:
            whole = pa.concat_arrays(piece.chunks) if isinstance(piece, pa.ChunkedArray) else piece
            encoded = whole.dictionary_encode()
            texts = encoded.dictionary.to_numpy(zero_copy_only=False).astype(object)
            keys = pd.util.hash_array(texts, categorize=False).astype(np.uint64)
            indices = encoded.indices.to_numpy()
        # The finaliser of splitmix64: neighbouring numbers come out unrelated. It wraps around on purpose.
        keys = keys + np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys = keys ^ (keys >> np.uint64(31))
        hashes_N[start : start + IDS_AT_ONCE] = keys if indices is None else keys[indices]
    return hashes_N
