"""Data in memory -> a Parquet file below the cache directory, named after its content: runs resume, and caches are found again."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.data.cache import cache_root
from seqvae.errors import DataError, StorageError

if TYPE_CHECKING:
    import pandas as pd


class ArrowStream(Protocol):
    """An object that exports itself as Arrow data, like a table of polars, pyarrow or DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


if TYPE_CHECKING:
    Data: TypeAlias = str | Path | pd.DataFrame | ArrowStream | Sequence[object]
"""Path, table, or list of sequences: of ints (tokens), of lists of floats (vectors), or of strings (which need a tokenizer)."""

FRAMES = "frames"
"""Folder of the files below the cache directory."""
VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Types that polars exports and Parquet does not know."""


def path_of(data: "Data", cache_dir: str | None = None) -> str:
    """Return the path of data; data in memory are written first, unless the same content was written before."""
    if isinstance(data, str | Path):
        return str(data)
    table = _table_of(data)
    if not len(table):
        raise DataError("the data hold no rows. Wanted: one or more sequences.")
    folder = cache_root(cache_dir) / FRAMES
    partial = folder / f".{os.getpid()}.partial"
    try:
        folder.mkdir(exist_ok=True)
        pq.write_table(table, partial)
        path = folder / f"{hashlib.sha256(partial.read_bytes()).hexdigest()[:16]}.parquet"
        if path.exists():  # as it is: its time of change is part of what tells a cache from others
            partial.unlink()
        else:
            partial.replace(path)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror}). Choose another cache_dir.") from error
    return str(path)


def _table_of(data: Any) -> pa.Table:
    """Return data in memory as a table of types that Parquet knows; of a list of sequences, as its one column."""
    try:
        if type(data).__module__.partition(".")[0] == "pandas":
            has_names = any(name is not None for name in data.index.names)  # an index without a name counts rows
            table = pa.Table.from_pandas(data, preserve_index=has_names)
        elif not isinstance(data, Sequence):
            table = pa.table(data)
        elif not data:
            table = pa.table({})
        else:
            column = pa.array([row.tolist() if isinstance(row, np.ndarray | np.generic) else row for row in data])
            steps = column.type.value_type if pa.types.is_list(column.type) else None
            if pa.types.is_string(column.type):
                table = pa.table({"text": column})
            elif steps is not None and pa.types.is_integer(steps):
                table = pa.table({"tokens": column})
            elif steps is not None and pa.types.is_list(steps):
                table = pa.table({"values": column.cast(pa.list_(pa.list_(pa.float64())))})
            elif steps is not None and pa.types.is_floating(steps):
                table = pa.table({"values": column})
            else:
                raise TypeError(f"sequences are {column.type}")
        views = {place: VIEWS[kind] for place, kind in enumerate(table.schema.types) if kind in VIEWS}
        for place, kind in views.items():
            table = table.set_column(place, table.column_names[place], table.column(place).cast(kind))
        return table.replace_schema_metadata(None).combine_chunks()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"data of type {type(data).__name__} cannot be read as a table ({problem}). Wanted: a path, a DataFrame, a pyarrow "
            "Table, or a list of sequences (ints: tokens; lists of floats: vectors; strings with a tokenizer)."
        ) from error
