"""The caches in a cache directory: what they hold and how large they are, and their removal.

In: the directory. Out: one row a cache. Only what `seqvae/data/cache.py` builds again from the data counts as a cache; data that
came from memory (`frames`) have no other copy, and stay.
"""

import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from seqvae.data.cache import FORMAT, remove_cache
from seqvae.data.dataset import read_meta
from seqvae.data.flat_file import META
from seqvae.data.parquet.plain_files import FOLDER
from seqvae.errors import UsageError
from seqvae.files import AlreadyLocked, is_in_use, take_lock

NAME = re.compile(r".+-[0-9a-f]{12}-[0-9a-f]{12}")
"""The name of data, a digest of the request, and a digest of the files."""


class StoredCache(NamedTuple):
    """A cache, as a row of a table."""

    name: str
    kind: str | None
    """None: this version would build it again."""
    sequences: int | None
    size: int
    built: str
    is_in_use: bool
    data: str
    """The folder of the first file that it was built from."""


def stored_caches(root: Path) -> list[StoredCache]:
    """Return the caches below a directory, the largest first."""
    found = []
    for path in root.glob("*") if root.is_dir() else ():
        if not NAME.fullmatch(path.name) or not (path / META).is_file():
            continue
        kind, sequences, data = None, None, ""
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):  # of an older version, or damaged
            meta = read_meta(path)
            data = str(Path(meta["files"][0]["path"]).parent)
            if meta["format"] == FORMAT:
                sequences = sum(split["counts"]["sequences"] for split in meta["splits"].values())
                kind = str(meta["description"]["kind"])
        built = time.strftime("%Y-%m-%d %H:%M", time.localtime((path / META).stat().st_mtime))
        found.append(StoredCache(path.name, kind, sequences, size_of(path), built, has_readers(path), data))
    return sorted(found, key=lambda one: -one.size)


def size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory; links count as nothing."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def has_readers(cache: Path) -> bool:
    """Return whether a run has the cache open."""
    return any(map(is_in_use, cache.glob("*/")))


def clear_caches(root: Path, names: Sequence[str] = ()) -> tuple[list[StoredCache], list[str]]:
    """Remove these caches, by default all; return those removed, and the names of those that a run has open or is building.

    Builds that were killed leave directories behind, which go as well.
    """
    stored = {one.name: one for one in stored_caches(root)}
    if unknown := [name for name in names if name not in stored]:
        raise UsageError(f"{unknown[0]!r} is no cache in {root}; seqvae cache list names those there are")
    removed, left = [], []
    for one in stored.values():
        if names and one.name not in names:
            continue
        try:
            with take_lock(root / f".{one.name}.lock"):
                if has_readers(root / one.name):
                    left.append(one.name)
                    continue
                remove_cache(root / one.name)
                removed.append(one)
        except AlreadyLocked:
            left.append(one.name)
    if not names:  # copies of plain files, which are written again when they are needed
        shutil.rmtree(root / FOLDER, ignore_errors=True)
    for leftover in () if names else root.glob(".*.building-*"):
        with suppress(AlreadyLocked), take_lock(root / f"{leftover.name.partition('.building-')[0]}.lock"):
            shutil.rmtree(leftover, ignore_errors=True)
    return removed, left
