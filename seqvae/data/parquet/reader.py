"""Parquet files -> blocks of rows with columns named by their part and canonical types, one after the other.

A block is bounded in size whatever the size of files and row groups, as long as one sequence fits in memory several times
over. It knows the file and row of each of its rows, so that whatever is wrong with a value can be said with its place.
Nothing here becomes a Python object per row.
"""

import errno
import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat

from seqvae.data.parquet.schema import Layout, is_list, is_text, is_time
from seqvae.errors import DamagedFileError, DataError

BLOCK_ROWS = 262_144
BLOCK_VALUES = 2_000_000
BLOCK_BYTES = 32 << 20
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What pyarrow raises for damaged files; the last one for the names of columns."""
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of the machine: no fault of the file."""
EXACT_BELOW = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}
"""Whole numbers from here on are not told apart any more."""
MINUTE_IN = {"s": 60.0, "ms": 60e3, "us": 60e6, "ns": 60e9}
WHOLE_NUMBER = re.compile(r"(-?\d{1,18})(\.0)?", re.ASCII)
"""A file's stem that is a number of 64 bits: 200001 and 200001.0 (a float written by pandas) are the same sequence."""


class Block(NamedTuple):
    """Some rows, in the order of the files."""

    table: pa.Table
    """Columns id, sequence | id, time, variable, value, set_index | id, time, 0, 1, ... (features), and label."""
    files_R: np.ndarray
    """int32, the file of each row, as an index into the list of files."""
    rows_R: np.ndarray
    """int64, the row in that file."""

    def take(self, indices: np.ndarray) -> "Block":
        return Block(self.table.take(pa.array(indices)), self.files_R[indices], self.rows_R[indices])

    def slice(self, start: int, stop: int | None = None) -> "Block":
        stop = len(self.rows_R) if stop is None else stop
        return Block(self.table.slice(start, stop - start), self.files_R[start:stop], self.rows_R[start:stop])

    def column(self, name: str) -> pa.Array:
        """One column as one array, however many pieces it came in."""
        chunks = self.table.column(name).chunks
        return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)

    def numbers(self, name: str) -> np.ndarray:
        """A number column as float64, nulls as NaN; not to be written to."""
        return np.asarray(self.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def concat_blocks(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    tables, files, rows = zip(*blocks, strict=True)
    return Block(pa.concat_tables(tables), np.concatenate(files), np.concatenate(rows))


class BlockReader:
    """Reads the columns of a layout from a list of files."""

    def __init__(self, files: Sequence[Path], layout: Layout) -> None:
        self.files = files
        self.layout = layout
        self._stems_are_numbers = all(WHOLE_NUMBER.fullmatch(file.stem) for file in files)

    def where(self, block: Block, row: int) -> str:
        """The place of a row, for messages; rows are counted from 0."""
        return f"{self.files[block.files_R[row]]}: row {block.rows_R[row]}"

    def stem_id(self, file: Path) -> int | str:
        """The id of the sequence in a file: the number it is named after, where all files are named after numbers."""
        number = WHOLE_NUMBER.fullmatch(file.stem)
        return int(number[1]) if number and self._stems_are_numbers else file.stem

    def __call__(self, paths: Sequence[Path]) -> Iterator[Block]:
        """The blocks of some of the files; small ones are put together, as one file may hold one short sequence."""
        index = {path: number for number, path in enumerate(self.files)}
        waiting: list[Block] = []
        rows_before = waiting_rows = waiting_bytes = 0
        for path in paths:
            first_row = 0
            batches = read_batches(path, self.layout.columns)
            for batch in (piece for whole in batches for piece in cut_by_size(whole, self.layout.sequence)):
                block = self._canonical(batch, index[path], first_row, rows_before)
                rows, size = len(block.rows_R), block.table.nbytes
                full = waiting_rows + rows > BLOCK_ROWS or waiting_bytes + size > BLOCK_BYTES
                if waiting and (full or waiting[0].table.schema != block.table.schema):
                    yield concat_blocks(waiting)
                    waiting, waiting_rows, waiting_bytes = [], 0, 0
                waiting.append(block)
                waiting_rows, waiting_bytes = waiting_rows + rows, waiting_bytes + size
                first_row += rows
            rows_before += first_row
        if waiting:
            yield concat_blocks(waiting)

    def _canonical(self, batch: pa.RecordBatch, file: int, first_row: int, rows_before: int) -> Block:
        rows_R = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
        columns: dict[str, pa.Array] = {}
        for part, name in canonical_columns(self.layout).items():
            try:
                columns[part] = _convert(part, batch.column(name))
            except pa.ArrowInvalid as error:
                row = _first_bad_row(part, batch.column(name))
                found = _shown(batch.column(name)[row])
                raise DataError(
                    f"{self.files[file]}: row {first_row + row}: column {name!r} holds {found}. Correct it, or leave "
                    f"such files out with --on_bad_files skip."
                ) from error
        if self.layout.form == "files":
            columns["id"] = self._stem_column(self.files[file], batch.num_rows)
        elif "id" not in columns:
            columns["id"] = pa.array(rows_R + rows_before)
        return Block(pa.table(columns), np.full(batch.num_rows, file, np.int32), rows_R)

    def _stem_column(self, file: Path, rows: int) -> pa.Array:
        stem_type = pa.int64() if self._stems_are_numbers else pa.large_string()
        return pa.repeat(pa.scalar(self.stem_id(file), stem_type), rows)


def canonical_columns(layout: Layout) -> dict[str, str]:
    """Part -> column, for every column that a block holds."""
    parts = ("id", "sequence", "time", "variable", "value", "set_index", "label")
    columns = {part: column for part in parts if (column := getattr(layout, part)) is not None}
    return columns | {str(number): column for number, column in enumerate(layout.features)}


def read_batches(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of one file; page checksums are verified where the file has them."""
    row = 0
    try:
        with _open(path) as file:
            size = _rows_per_batch(file, columns) if file.metadata.num_rows else 1
            for batch in file.iter_batches(batch_size=size, columns=list(columns)):
                yield batch
                row += batch.num_rows
            if columns and row != file.metadata.num_rows:
                raise pa.ArrowInvalid(f"it ends after {row} of {file.metadata.num_rows} rows")
    except MemoryError:  # pyarrow's is one of its exceptions, too
        raise
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise
        reason = " ".join(str(error).split())[:200]
        raise DamagedFileError(
            f"{path}: {_damaged_part(path, columns, row)} cannot be read, the file is damaged ({reason}). "
            f"Write it again, or leave such files out with --on_bad_files skip."
        ) from error


def cut_by_size(batch: pa.RecordBatch, sequence: str | None) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of similar size: its number of rows is right on average, which a few long rows among short ones spoil."""
    column = None if sequence is None else batch.column(sequence)
    if column is None or batch.nbytes <= 2 * BLOCK_BYTES or pat.is_dictionary(column.type):
        yield batch
        return
    lengths_R = pc.list_value_length(column) if is_list(column.type) else pc.binary_length(column)
    share_R = np.cumsum(np.asarray(lengths_R.fill_null(0)), dtype=np.float64)
    pieces = batch.nbytes / BLOCK_BYTES
    piece_R = np.floor(share_R / max(1.0, share_R[-1]) * pieces)
    bounds = [0, *(np.flatnonzero(np.diff(piece_R)) + 1).tolist(), batch.num_rows]
    for start, stop in pairwise(bounds):
        yield batch.slice(start, stop - start)


def _open(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 20)


def _rows_per_batch(file: pq.ParquetFile, columns: Sequence[str]) -> int:
    """So many rows that a batch stays small in memory, however long the lists or texts in a row are."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    bytes_per_row = max(group.total_byte_size / max(1, group.num_rows) for group in groups)
    leaves = [number for number, leaf in enumerate(file.schema) if _belongs_to(leaf.path, columns)]
    nested = [number for number in leaves if file.schema.column(number).max_repetition_level]
    values_per_row = _values_per_row(file, groups, nested, columns) if nested else 1
    return int(max(1, min(BLOCK_ROWS, BLOCK_VALUES / max(1, values_per_row), BLOCK_BYTES / max(1, bytes_per_row))))


def _values_per_row(
    file: pq.ParquetFile, groups: list[pq.RowGroupMetaData], nested: list[int], columns: Sequence[str]
) -> float:
    """Of the longest lists, in the row group where rows are longest: as told by the largest, and by the sizes of all."""
    largest = max(range(len(groups)), key=lambda number: groups[number].num_rows)
    # Reading a row first: it raises where asking for the metadata of a damaged column would end the process.
    next(file.iter_batches(batch_size=1, row_groups=[largest], columns=columns), None)
    sizes = [group.total_byte_size / max(1, group.num_rows) for group in groups]
    values = max(groups[largest].column(number).num_values for number in nested) / max(1, groups[largest].num_rows)
    return float(values * max(sizes) / max(sizes[largest], 1e-9))


def _belongs_to(path_in_schema: str, columns: Sequence[str]) -> bool:
    """Whether a leaf is part of one of these columns, whose names may have dots in them."""
    return path_in_schema in columns or any(path_in_schema.startswith(f"{column}.") for column in columns)


def _damaged_part(path: Path, columns: Sequence[str], row: int) -> str:
    """The first row group at or after this row with a column that cannot be read; each is tried for itself."""
    try:
        metadata = pq.read_metadata(path)
    except UNREADABLE:
        return "its footer"
    ends = np.cumsum([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)])
    first = int(np.searchsorted(ends, row, side="right"))
    for group in range(first, metadata.num_row_groups):
        for column in columns:
            try:
                with _open(path) as file:
                    for _ in file.iter_batches(row_groups=[group], columns=[column]):
                        pass
            except UNREADABLE:
                return f"column {column!r} in row group {group}"
    return f"row group {first} (at or after row {row})"


def _convert(part: str, column: pa.Array) -> pa.Array:
    """One column in the type of its part: ids int64 or text, times in minutes, numbers float64, lists as they are."""
    kind = column.type
    if part == "sequence" and is_list(kind):
        return column
    if is_text(kind) or part == "variable":
        text = column.cast(pa.large_string())
        text.validate(full=True)  # that it is UTF-8, which Parquet does not promise
        return text
    if part in ("id", "set_index"):
        if pat.is_floating(kind):
            if (pc.max(pc.abs(column.cast(pa.float64()))).as_py() or 0) >= EXACT_BELOW[kind]:
                raise pa.ArrowInvalid("several whole numbers are one float here")
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
        return column.cast(pa.int64())
    if is_time(kind):
        return _minutes(column)
    return column.cast(pa.int64() if part == "label" and pat.is_integer(kind) else pa.float64(), safe=False)


def _minutes(column: pa.Array) -> pa.Array:
    kind = column.type
    if pat.is_date(kind):
        column, kind = column.cast(pa.timestamp("ms")), pa.timestamp("ms")
    return pc.divide(column.cast(pa.int64()).cast(pa.float64(), safe=False), MINUTE_IN[kind.unit])


def _first_bad_row(part: str, column: pa.Array) -> int:
    """The first row that does not convert, found by halves."""
    start, stop = 0, len(column)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            _convert(part, column.slice(start, middle - start))
            start = middle
        except pa.ArrowInvalid:
            stop = middle
    return start


def _shown(value: pa.Scalar) -> str:
    try:
        shown = value.as_py()
    except UnicodeDecodeError:
        return "bytes that are not UTF-8"
    exact = EXACT_BELOW.get(value.type)
    if exact and exact <= abs(shown) < math.inf:
        return f"{shown}, but {value.type} counts in ones only below {exact:,}"
    return f"{shown}, which is no whole number of 64 bits with a sign"
