"""Parquet that is left as it is where it holds the same already: what is built from it knows it by its date."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_once(path: Path, table: pa.Table) -> None:
    if path.exists() and pq.read_table(path, partitioning=None).equals(table):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
