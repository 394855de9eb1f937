"""A plain file (CSV, TSV, lines of text, JSON lines) -> a Parquet file below the cache directory, where all else begins.

Types are pyarrow's: ISO dates become time stamps. Text is one sequence a line, with the line's number, from 0, as its id.
"""

import hashlib
import os
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from seqvae.errors import DataError
from seqvae.files import is_remote

TABLES, LINES, RECORDS = (".csv", ".tsv"), (".txt",), (".jsonl", ".ndjson")
PLAIN = (*TABLES, *LINES, *RECORDS)
"""How names of files end that are read."""
FOLDER = "plain"
"""Folder of the Parquet files below the cache directory."""
GROUP_ROWS = 1 << 17


def is_plain(data_dir: str | None) -> bool:
    """Return whether data are a plain file on this machine.

    >>> is_plain("there/is/no.csv"), is_plain("s3://bucket/a.csv"), is_plain(None)
    (False, False, False)
    """
    if data_dir is None or is_remote(data_dir):
        return False
    path = Path(data_dir).expanduser()
    return path.suffix.lower() in PLAIN and path.is_file()


def as_parquet(data_dir: str, root: Path) -> str:
    """Return the path of the Parquet file of a plain file, which is written where it is not there or the plain file has changed."""
    plain = Path(data_dir).expanduser().absolute()
    folder = root / FOLDER / hashlib.sha256(str(plain).encode()).hexdigest()[:12]
    path, changed_ns = folder / f"{plain.name}.parquet", plain.stat().st_mtime_ns
    if path.exists() and path.stat().st_mtime_ns == changed_ns:
        return str(path)
    table = _read(plain)
    if not len(table):
        raise DataError(f"{plain}: holds no rows. Fill it, or point --data_dir elsewhere.")
    # An index that pandas wrote has no name; as this one it is passed over.
    table = table.rename_columns([name or f"Unnamed: {n}" for n, name in enumerate(table.column_names)])
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(prefix=".", dir=folder)
    os.close(descriptor)
    try:
        pq.write_table(table, scratch, row_group_size=GROUP_ROWS)
        os.utime(
            scratch, ns=(changed_ns, changed_ns)
        )  # so that a copy that is written again is the same file to a cache
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return str(path)


def _read(path: Path) -> pa.Table:
    try:
        if path.suffix.lower() in LINES:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines) if line.strip()]
            return pa.table({"id": [number for number, _ in numbered], "text": [line for _, line in numbered]})
        if path.suffix.lower() in RECORDS:
            return pa_json.read_json(path)
        with path.open(encoding="utf-8-sig") as file:
            marks = Counter(character for character in file.readline() if character in ",;\t|")
        delimiter = marks.most_common(1)[0][0] if marks else ","
        in_order = pa_csv.ReadOptions(use_threads=False)  # an error then has the number of its row
        return pa_csv.read_csv(path, in_order, pa_csv.ParseOptions(delimiter=delimiter))
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path}: cannot be read as {path.suffix.lower()[1:].upper()} ({reason}). Correct it, or make Parquet of it."
        ) from error
