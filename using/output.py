"""Files that are there in full or not at all, and Parquet that grows row group by row group at constant memory."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sequences.errors import StorageError


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields the path to write to, beside the real one, which it replaces where nothing went wrong."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}). What was there before is whole; choose another --output."
        ) from error
    finally:
        with suppress(OSError):  # what went wrong before is what is to be told
            partial.unlink(missing_ok=True)


def write_parquet(path: Path, tables: Iterable[pa.Table], about: Mapping[str, str]) -> int:
    """One row group a table; `about` stands in the file's own metadata. Returns how many rows there are."""
    rows = 0
    with new_file(path) as partial:
        writer: pq.ParquetWriter | None = None
        try:
            for table in tables:
                table = table.replace_schema_metadata(dict(about))
                if writer is None:
                    writer = pq.ParquetWriter(partial, table.schema, compression="zstd")
                writer.write_table(table)
                rows += table.num_rows
        finally:
            if writer is not None:
                writer.close()
    return rows
