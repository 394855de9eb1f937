"""Data in memory -> a Parquet file below the cache directory, named after its content: runs resume, and caches are found again.

Tables that are not in memory as a whole (a LazyFrame, a pyarrow Dataset, a Dataset of the library `datasets`) pass through it in
batches. Several splits are a folder with a file for each.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.data.cache import cache_root
from seqvae.data.parquet.discovery import split_of
from seqvae.errors import DataError, StorageError
from seqvae.files import DISK_FULL

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import polars as pl
    import pyarrow.dataset


@runtime_checkable
class ArrowStream(Protocol):
    """An object that exports itself as Arrow data, like a table of polars, pyarrow or DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


if TYPE_CHECKING:
    Table: TypeAlias = (
        pd.DataFrame
        | pl.LazyFrame
        | pyarrow.dataset.Dataset
        | datasets.Dataset
        | datasets.IterableDataset
        | ArrowStream
        | Sequence[object]
    )
    Data: TypeAlias = str | Path | Table | Mapping[str, Table]
"""Path, table, list of sequences (of ints: tokens; of lists of floats: vectors; strings: with a tokenizer), or these by split."""

FRAMES = "frames"
"""Folder of the files below the cache directory."""
GROUP_ROWS, GROUP_BYTES = 1 << 20, 256 << 20
"""Largest row group: what of a table in batches is in memory at a time."""
BATCH_ROWS = 1000
"""Rows that are asked of the library `datasets` at a time."""
KEPT_METADATA = b"huggingface"
"""The part of a schema's metadata that names the classes of a label."""
DECODED = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Types that polars exports and Parquet does not know."""


class Batches(NamedTuple):
    """A table in pieces."""

    schema: pa.Schema
    batches: Iterable[pa.RecordBatch]


def path_of(data: "Data", cache_dir: str | None = None) -> str:
    """Return the path of data; data in memory are written first, unless the same content was written before."""
    if isinstance(data, str | Path):
        return str(data)
    folder = cache_root(cache_dir) / FRAMES
    with _told_of_disk(folder):
        folder.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=folder))
    try:
        if not _is_by_split(data):
            partial, suffix = scratch / "whole", ".parquet"
            name = _write(data, partial)
        else:
            assert isinstance(data, Mapping)
            partial, suffix = scratch / "splits", ""
            with _told_of_disk(folder):
                partial.mkdir()
            of_splits = [(split, _write(table, partial / f"{split}.parquet")) for split, table in data.items()]
            name = hashlib.sha256(repr(sorted(of_splits)).encode()).hexdigest()
        path = folder / f"{name[:16]}{suffix}"
        with _told_of_disk(folder):
            if not path.exists():  # else it stays: its time of change is part of what tells a cache from others
                partial.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return str(path)


def _is_by_split(data: "Data") -> bool:
    """Return whether data are tables by the name of their split, and not columns by their name."""
    if not isinstance(data, Mapping) or not data:
        return False
    others = [name for name in data if not split_of(str(name))]
    if others and _library_of(data) == "datasets":
        raise DataError(
            f"data of type {type(data).__name__}: {others[0]!r} is the name of no split. Leave it out or rename it: wanted are "
            "train, valid (validation, ...) and test."
        )
    return not others


@contextmanager
def _told_of_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror}). Choose another cache_dir.") from error


def _write(data: Any, path: Path) -> str:
    """Write a table as Parquet, a row group at a time, and return the digest of the file."""
    with _told_of_type(data):
        found = _batches_of(data, path.with_suffix(".collected"))
        schema = pa.schema([field.with_type(_stored(field.type)) for field in found.schema])
        if about := (found.schema.metadata or {}).get(KEPT_METADATA):
            schema = schema.with_metadata({KEPT_METADATA: about})
        groups = _groups(found.batches, schema)
        first = next(groups, None)
    if first is None:
        raise DataError("the data hold no rows. Wanted: one or more sequences.")
    with _told_of_disk(path.parent.parent):
        file = path.open("wb")
    with file, pq.ParquetWriter(file, schema) as writer:
        group: pa.Table | None = first
        while group is not None:
            with _told_of_disk(path.parent.parent):
                writer.write_table(group, row_group_size=GROUP_ROWS)
            with _told_of_type(data):
                group = next(groups, None)
    with path.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


@contextmanager
def _told_of_type(data: Any) -> Iterator[None]:
    try:
        yield
    except MemoryError:  # pyarrow's is one of its exceptions, too
        raise
    except (pa.ArrowException, TypeError, ValueError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise StorageError(f"the disk is full ({error.strerror}). Choose another cache_dir.") from error
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"data of type {type(data).__name__} cannot be read as a table ({problem}). Wanted: a path, a DataFrame, a pyarrow "
            "Table, or a list of sequences (ints: tokens; lists of floats: vectors; strings with a tokenizer)."
        ) from error


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows in groups whose borders follow from the content as far as it fits GROUP_BYTES, however it was cut before."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        while batch.num_rows:
            piece = batch.slice(0, GROUP_ROWS - rows)
            batch = batch.slice(piece.num_rows)
            waiting.append(pa.record_batch(list(map(_converted, piece.columns, schema.types)), schema=schema))
            rows, size = rows + piece.num_rows, size + piece.nbytes
            if rows == GROUP_ROWS or size >= GROUP_BYTES:
                yield pa.Table.from_batches(waiting).combine_chunks()
                waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


def _stored(kind: pa.DataType) -> pa.DataType:
    """Return the type that Parquet knows for one that it does not.

    >>> _stored(pa.large_list(pa.string_view())), _stored(pa.dictionary(pa.uint32(), pa.string_view()))
    (LargeListType(large_list<item: large_string>), DataType(large_string))
    """
    if pa.types.is_dictionary(kind):
        return DECODED.get(kind.value_type, kind)
    for is_of, make in LISTS:
        if is_of(kind):
            return make(kind.value_field.with_type(_stored(kind.value_type)))
    return DECODED.get(kind, kind)


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column in the type that it is stored in."""
    if pa.types.is_dictionary(column.type) and not pa.types.is_dictionary(kind):
        return column.dictionary.cast(kind).take(column.indices)
    return column if column.type == kind else column.cast(kind)


LISTS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Field], pa.DataType]], ...] = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
)


def _batches_of(data: Any, scratch: Path) -> Batches:
    """Return data as a table in pieces; of a list of sequences, as its one column. A LazyFrame is computed into `scratch`."""
    match _library_of(data), type(data).__name__:
        case "pandas", _:
            has_names = any(name is not None for name in data.index.names)  # an index without a name counts rows
            table = pa.Table.from_pandas(data, preserve_index=has_names)
            return Batches(table.schema, table.to_batches())
        case "polars", "LazyFrame":
            data.sink_parquet(scratch)
            file = pq.ParquetFile(scratch)
            return Batches(file.schema_arrow, file.iter_batches())
        case "pyarrow", "Scanner":
            return Batches(data.projected_schema, data.to_batches())
        case "pyarrow", "FileSystemDataset" | "InMemoryDataset" | "UnionDataset":
            return Batches(data.schema, data.to_batches())
        case "datasets", _:
            tables = data.with_format("arrow").iter(batch_size=BATCH_ROWS)
            return _batches_of_tables(tables, None if data.features is None else data.features.arrow_schema)
    if isinstance(data, ArrowStream):
        reader = pa.RecordBatchReader.from_stream(data)
        return Batches(reader.schema, reader)
    table = _table_of_sequences(data) if isinstance(data, Sequence) else pa.table(data)
    return Batches(table.schema, table.to_batches())


def _library_of(data: Any) -> str:
    return type(data).__module__.partition(".")[0]


def _batches_of_tables(tables: Iterator[pa.Table], schema: pa.Schema | None) -> Batches:
    """Return the batches of tables; without a schema, that of the first."""
    first = next(tables, pa.table({}))

    def batches() -> Iterator[pa.RecordBatch]:
        yield from first.to_batches()
        for table in tables:
            yield from table.to_batches()

    return Batches(schema or first.schema, batches())


def _table_of_sequences(data: Sequence[Any]) -> pa.Table:
    """Return a list of sequences as a table of one column, whose name says what they are."""
    if not data:
        return pa.table({})
    column = pa.array([row.tolist() if isinstance(row, np.ndarray | np.generic) else row for row in data])
    steps = column.type.value_type if pa.types.is_list(column.type) else None
    if pa.types.is_string(column.type):
        return pa.table({"text": column})
    if steps is not None and pa.types.is_integer(steps):
        return pa.table({"tokens": column})
    if steps is not None and pa.types.is_list(steps):
        return pa.table({"values": column.cast(pa.list_(pa.list_(pa.float64())))})
    if steps is not None and pa.types.is_floating(steps):
        return pa.table({"values": column})
    raise TypeError(f"sequences are {column.type}")
