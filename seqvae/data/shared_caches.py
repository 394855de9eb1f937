"""Caches in an object store, which machines share.

In: the URL of --cache_dir. Out: which caches lie there; one of them, fetched as a whole or read in parts; and one more that was put
there. What comes from a store was written by anyone: names lead nowhere else, and types are numbers.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from seqvae.data.flat_file import META, SPLITS, described
from seqvae.data.storage import SMALL_BYTES, THREADS, StoredPlace, open_store, require_consent
from seqvae.data.stream import Read, write_at
from seqvae.errors import DataError
from seqvae.files import is_remote


class Shelf:
    """A directory of caches in a store."""

    def __init__(self, url: str, endpoint_url: str | None) -> None:
        self._store, self._path = open_store(url, endpoint_url)

    def url_of(self, name: str) -> str:
        return self._store.url_of(f"{self._path}/{name}")

    def place_of(self, name: str) -> StoredPlace:
        """Return where to build a cache."""
        return StoredPlace(PurePosixPath(self._path, name), self._store)

    def has(self, name: str) -> bool:
        return self._store.exists(f"{self._path}/{name}/{META}")

    def put(self, cache: Path) -> None:
        """Put a cache there, its description last: without that, it is not there."""
        meta = json.loads((cache / META).read_text(encoding="utf-8"))
        paths = [path for split, path, _ in files_of(cache, meta)]
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda path: self._store.write(self._key_of(cache, path), path), paths):
                pass
        self._store.write(self._key_of(cache, cache / META), cache / META)

    def _key_of(self, cache: Path, path: Path) -> str:
        return f"{self._path}/{cache.name}/{path.relative_to(cache).as_posix()}"

    def meta_of(self, name: str) -> bytes:
        """Return the description of a cache."""
        return self._store.read(f"{self._path}/{name}/{META}")

    def ranges(self, name: str, split: str) -> Read:
        """Return what reads parts of the files of a split."""
        return self._store.ranges(f"{self._path}/{name}/{split}")

    def fetch(self, name: str, directory: Path) -> None:
        """Put the files of a cache into an empty directory; what they hold is not looked at."""
        (directory / META).write_bytes(self.meta_of(name))
        meta = json.loads((directory / META).read_text(encoding="utf-8"))
        pieces: list[tuple[Path, Read, int, int]] = []
        for split, path, size in files_of(directory, meta):
            path.parent.mkdir(exist_ok=True)
            path.touch()
            read = self.ranges(name, split)
            starts = range(0, size, SMALL_BYTES)
            pieces += [(path, read, start, min(SMALL_BYTES, size - start)) for start in starts]
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(_fetch_piece, pieces):
                pass


def shelf_of(cache_dir: str | None, endpoint_url: str | None, allowed: bool) -> Shelf | None:
    """Return the caches in a store that --cache_dir names; None: it is a directory."""
    if cache_dir is None or not is_remote(cache_dir):
        return None
    require_consent(cache_dir, allowed)
    return Shelf(cache_dir, endpoint_url)


def files_of(directory: Path, meta: dict[str, Any]) -> Iterator[tuple[str, Path, int]]:
    """Yield split, path and bytes of each file that a cache's description names; one that leads elsewhere is refused."""
    try:
        for split, parts in meta["splits"].items():
            if split not in SPLITS:
                raise ValueError(f"{split!r} is no split")
            for entry in (parts["table"], *parts["arrays"].values()):
                path, dtype, count = described(directory / split, entry)
                yield split, path, count * dtype.itemsize
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{directory.name}/{META}: is damaged ({error}). Delete that cache; it is built again."
        ) from error


def _fetch_piece(piece: tuple[Path, Read, int, int]) -> None:
    path, read, start, size = piece
    content = read(path.name, start, size)
    if len(content) != size:
        raise DataError(
            f"{path.parent.name}/{path.name} of a cache in a store ends after {start + len(content):,} bytes"
        )
    with path.open("r+b") as file:
        write_at(file.fileno(), memoryview(content), start)
