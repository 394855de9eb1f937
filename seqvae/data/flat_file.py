"""Flat binary files of one type, written by appending and read back in pieces or as a memory map."""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

META = "meta.json"
"""Name of the file beside the splits' folders that describes what lies in them."""

OFFSETS = "offsets.bin"
"""Name of the file of each split that says where its sequences begin and end."""

PIECE_ITEMS = 1 << 21


class FlatWriter:
    """A file that arrays are appended to; counts its items and their checksum."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.count = 0
        self.checksum = 0
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)

    def append(self, array: np.ndarray) -> None:
        """Write an array behind those before."""
        data = np.ascontiguousarray(array, dtype=self.dtype).reshape(-1)
        self._file.write(data.data)
        self.checksum = zlib.crc32(data.data, self.checksum)
        self.count += data.size

    def close(self) -> dict[str, Any]:
        """Close the file and return its entry, which `map_flat` reads, as JSON."""
        self._file.close()
        return {"file": self.path.name, "dtype": self.dtype.str, "count": self.count, "crc32": self.checksum}

    def abandon(self) -> None:
        """Close the file after an error: what is still unwritten may not fit the disk."""
        with suppress(OSError):
            self._file.close()


class OffsetWriter:
    """A file of int64 offsets that lengths are appended to: item i stands at offsets[i] .. offsets[i + 1]."""

    def __init__(self, path: Path) -> None:
        self.flat = FlatWriter(path, np.int64)
        self.flat.append(np.zeros(1, np.int64))
        self.end = 0

    def append(self, lengths: np.ndarray) -> None:
        """Write where items of these lengths end."""
        if len(lengths):
            ends = np.cumsum(lengths, dtype=np.int64) + self.end
            self.flat.append(ends)
            self.end = int(ends[-1])

    def close(self) -> dict[str, Any]:
        """Close the file and return its entry."""
        return self.flat.close()


def describe_file(path: Path) -> dict[str, Any]:
    """Return the entry of a file of bytes that something else wrote, as `FlatWriter.close` does."""
    return {"file": path.name, "dtype": "|u1", "count": path.stat().st_size, "crc32": checksum_of(path)}


def checksum_of(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def described(directory: Path, entry: dict[str, Any]) -> tuple[Path, np.dtype, int]:
    """Return where a file is, its type and its length. An entry that leads elsewhere, or to what is not numbers, is refused."""
    name, dtype, count = entry["file"], np.dtype(entry["dtype"]), entry["count"]
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file")
    if dtype.kind not in "iuf":  # as objects, the bytes of a file would be addresses in memory
        raise ValueError(f"{name} holds {dtype}, not numbers")
    return directory / name, dtype, count


def map_flat(directory: Path, entry: dict[str, Any], in_memory: bool = False) -> np.ndarray:
    """Open the array of an entry."""
    path, dtype, count = described(directory, entry)
    if in_memory or count == 0:
        return np.fromfile(path, dtype, count)
    return np.memmap(path, dtype, mode="r", shape=(count,)).view(np.ndarray)  # plain arrays index 15 % faster


def read_pieces(path: Path, dtype: Any, items: int = PIECE_ITEMS) -> Iterator[np.ndarray]:
    """Yield the file from its beginning to its end, a piece at a time: plain reads, so that it never counts as our memory."""
    with path.open("rb") as file:
        while len(piece := np.fromfile(file, dtype, items)):
            yield piece
