"""From --data_dir to a list of Parquet files, each with the split it belongs to and a fingerprint.

Known layouts: train/ valid/ test/ as folders or as train.parquet ...; the same below data/ (MEDS); MEDS with
metadata/subject_splits.parquet; one pool without splits; a single file. A glob takes the union over its matches.
"""

import glob
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.errors import DataError

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "tuning": "valid",
    "dev": "valid",
    "test": "test",
    "testing": "test",
    "held_out": "test",
}
SHARD = re.compile(r"-\d{5}-of-\d{5}.*")
"""What follows the split's name in train-00000-of-00002.parquet."""
POOL = "pool"
SUFFIXES = (".parquet", ".pq")
TAIL_BYTES = 4096
"""The end of a Parquet file holds its footer; a digest of this much tells a rewritten file from an untouched one."""


class DataFiles(NamedTuple):
    """The files of a data set by split; "pool" where the split is not known from the layout."""

    by_split: dict[str, list[Path]]
    subject_splits: tuple[Path, ...]
    """MEDS tables that say which subject belongs to which split."""
    hidden: tuple[Path, ...]
    """Files left out because their name, or that of a folder they are in, starts with a dot or an underscore."""
    beside: tuple[Path, ...]
    """Files left out because they stand beside train/, valid/, ... and belong to no split."""


class Fingerprint(NamedTuple):
    """What tells a changed file from an unchanged one."""

    path: str
    size: int
    modified_ns: int
    tail_digest: str


class Footer(NamedTuple):
    """What a readable Parquet file says of itself."""

    path: Path
    schema: pa.Schema
    rows: int


def find_files(data_dir: str, *, to_learn_from: bool = True) -> DataFiles:
    try:
        found = [_find_below(root, split) for root, split in _expand(data_dir)]
    except OSError as error:
        place = error.filename or data_dir
        raise DataError(
            f"{place}: cannot be looked into ({error.strerror}). Check the path and its permissions."
        ) from error
    by_split: dict[str, list[Path]] = {}
    for one in found:
        for split, paths in one.by_split.items():
            by_split[split] = list(dict.fromkeys([*by_split.get(split, []), *paths]))
    tables, hidden, beside = (
        tuple(dict.fromkeys(path for one in found for path in paths(one)))
        for paths in (lambda one: one.subject_splits, lambda one: one.hidden, lambda one: one.beside)
    )
    if not any(by_split.values()):
        passed = f" beside {len(hidden)} whose names begin with . or _" if hidden else ""
        raise DataError(
            f"{data_dir}: holds no Parquet file ({' or '.join(SUFFIXES)}){passed}. Wanted: train/, valid/, test/ or one pool "
            f"of files; point --data_dir there."
        )
    if POOL in by_split and len(by_split) > 1:
        raise DataError(
            f"{data_dir}: some matches have train/ and valid/, others are pools (the first: {by_split[POOL][0]}); "
            f"give them to --data_dir apart."
        )
    if to_learn_from and POOL not in by_split and "train" not in by_split:
        raise DataError(
            f"{data_dir}: has {', '.join(sorted(by_split))} but no train/ or train.parquet to learn from. Add one, or point "
            f"--data_dir at a folder that has it."
        )
    return DataFiles(by_split, tables, hidden, beside)


def fingerprint(path: Path) -> Fingerprint:
    try:
        _refuse_what_is_no_file(path)
        with path.open("rb") as file:
            status = path.stat()
            file.seek(max(0, status.st_size - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.") from error
    return Fingerprint(str(path), status.st_size, status.st_mtime_ns, hashlib.sha256(tail).hexdigest()[:16])


def read_footer(path: Path) -> Footer:
    """The schema and row count of one file, or a DataError that says why it is no Parquet file."""
    skip = "or leave such files out with --on_bad_files skip"
    try:
        _refuse_what_is_no_file(path)
        str(path).encode()  # as pyarrow will do, somewhere
        metadata = pq.read_metadata(path)
        footer = Footer(path, metadata.schema.to_arrow_schema(), metadata.num_rows)
        _ = footer.schema.names  # they are decoded here, or cannot be
        rows = sum(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        if rows != metadata.num_rows:
            raise pa.ArrowInvalid(f"it declares {metadata.num_rows} rows, but {rows} in its row groups")
        return footer
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read (permission denied). Change its permissions, {skip}.") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}: cannot be read, as its name is not UTF-8. Rename it or its folder, {skip}."
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        wrong = _what_is_wrong(path, error)
        raise DataError(f"{path}: is not a readable Parquet file: {wrong}. Write it again, {skip}.") from error


def split_of(name: str) -> str | None:
    """The split that a folder or file is named after.

    >>> split_of("Tuning"), split_of("test-00000-of-00001.parquet"), split_of("notes")
    ('valid', 'test', None)
    """
    stem = Path(name).stem if name.lower().endswith(SUFFIXES) else name
    return SPLIT_NAMES.get(SHARD.sub("", stem).lower())


def _expand(data_dir: str) -> list[tuple[Path, str | None]]:
    """The directories (or files) that --data_dir names, literally or as a glob.

    Matches of a glob that are named after splits are these splits: dir/* is then what dir is.
    """
    literal = Path(data_dir).expanduser()
    if literal.exists():
        return [(literal.absolute(), None)]
    if glob.has_magic(data_dir):
        matches = [Path(match).absolute() for match in sorted(glob.glob(str(literal), recursive=True))]
        matches = [match for match in matches if match.is_dir() or _is_parquet(match.name)]
        if matches:
            return [(match, split_of(match.name)) for match in matches]
        raise DataError(f"--data_dir {data_dir}: no directory or Parquet file matches this pattern.")
    parent = next(p for p in literal.absolute().parents if p.exists())
    raise DataError(f"--data_dir {data_dir}: does not exist. {parent} is there and holds {_listing(parent)}.")


def _find_below(root: Path, split: str | None) -> DataFiles:
    """`split`: what all files below are, unless there are split folders below."""
    if root.is_file():
        return DataFiles({split or POOL: [root]}, (), (), ())
    files, hidden = _parquet_below(root)
    metadata, data = root / "metadata", root / "data"
    tables = tuple(path for path in files if path == metadata / "subject_splits.parquet")
    if tables or (data.is_dir() and metadata.is_dir()):
        files = [path for path in files if path.parent != metadata]
    entries = {} if tables else _split_entries(root) or (_split_entries(data) if data.is_dir() else {})
    if not entries:
        return DataFiles({split or POOL: files} if files else {}, tables, hidden, ())
    by_split: dict[str, list[Path]] = {name: [] for name in entries.values()}
    above = next(iter(entries)).parent.parts
    split_below = {(*above, entry.name): name for entry, name in entries.items()}
    beside: list[Path] = []
    for path in files:
        name = split_below.get(path.parts[: len(above) + 1])
        (by_split[name] if name else beside).append(path)
    for entry, name in entries.items():
        if not by_split[name]:
            raise DataError(
                f"{entry}: holds no Parquet file, but a {name} split was expected there. Fill or remove it."
            )
    return DataFiles(by_split, (), hidden, tuple(beside))


def _split_entries(directory: Path) -> dict[Path, str]:
    """The folders and Parquet files directly below a directory that are named after a split."""
    return {
        child: split
        for child in sorted(directory.iterdir())
        if (split := split_of(child.name)) and (child.is_dir() or _is_parquet(child.name))
    }


def _parquet_below(directory: Path) -> tuple[list[Path], tuple[Path, ...]]:
    """The files in all folders below, links followed; and apart from them those that hide. A closed folder is an error."""
    files: list[Path] = []
    entered = {os.path.realpath(directory)}
    for parent, folders, names in os.walk(directory, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if os.path.realpath(Path(parent, name)) not in entered]
        entered |= {os.path.realpath(Path(parent, name)) for name in folders}
        files += [Path(parent, name) for name in names if _is_parquet(name)]
    hidden = {path for path in files if any(part.startswith((".", "_")) for part in path.relative_to(directory).parts)}
    return sorted(set(files) - hidden), tuple(sorted(hidden))


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _raise(error: OSError) -> None:
    raise error


def _refuse_what_is_no_file(path: Path) -> None:
    """Whoever opens a pipe waits until somebody writes to it, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError(
            f"{path}: is no file but a pipe, a device or the like. Put a Parquet file in its place, or leave such files out "
            f"with --on_bad_files skip."
        )


def _what_is_wrong(path: Path, error: Exception) -> str:
    if not path.is_file():
        return "it is gone"
    with path.open("rb") as file:
        head = file.read(64)
        file.seek(max(0, path.stat().st_size - 4))
        tail = file.read(4)
    if not head:
        return "it is empty (0 bytes)"
    if not head.startswith(b"PAR1"):
        is_text = all(byte >= 32 or byte in b"\t\r\n" for byte in head)
        hint = "; pandas.read_csv(...).to_parquet(...) makes Parquet of a CSV" if is_text else ""
        return f"it begins with {head[:16]!r} where Parquet begins with b'PAR1'{hint}"
    if tail != b"PAR1":
        return "its end is missing (truncated while it was written or copied)"
    return f"its footer is damaged ({' '.join(str(error).split())[:200]})"


def _listing(directory: Path) -> str:
    try:
        names = sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
    except OSError:
        return "nothing that may be listed"
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
