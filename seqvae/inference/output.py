"""Output files that are complete or absent, and Parquet written row group by row group at constant memory."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.errors import StorageError, UsageError

MADE_BY = "SeqVAE"


def refuse_foreign_file(path: Path) -> None:
    """A Parquet file of ours may be written over, and nothing else: somebody's data may have been meant for the input."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: {path.absolute().parent} is no directory; make it first, or choose another")
    if path.is_dir():
        raise UsageError(f"--output {path}: is a directory; give the name of a file")
    if path.exists() and not _is_ours(path):
        raise UsageError(f"--output {path}: is there already, and use_model.py did not make it; choose another")


def _is_ours(path: Path) -> bool:
    try:
        return (pq.read_schema(path).metadata or {}).get(b"made_by") == MADE_BY.encode()
    except (OSError, pa.ArrowException):
        return False


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
    about = {"made_by": MADE_BY, **about}
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
