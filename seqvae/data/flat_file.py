"""Flat binary files of one type, written by appending and read back in pieces or as a memory map."""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

META = "meta.json"
"""Beside the splits' folders: what lies in them."""

OFFSETS = "offsets.bin"
"""In each split: where its sequences begin and end."""

PIECE_ITEMS = 1 << 21


class FlatWriter:
    """Appends arrays to a file; knows how many items it holds and their checksum."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.count = 0
        self.checksum = 0
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)

    def append(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array, dtype=self.dtype).reshape(-1)
        self._file.write(data.data)
        self.checksum = zlib.crc32(data.data, self.checksum)
        self.count += data.size

    def close(self) -> dict[str, Any]:
        """What `map_flat` has to know, as JSON."""
        self._file.close()
        return {"file": self.path.name, "dtype": self.dtype.str, "count": self.count, "crc32": self.checksum}

    def abandon(self) -> None:
        """Let go of the file after something went wrong: what is still unwritten may not fit the disk."""
        with suppress(OSError):
            self._file.close()


class OffsetWriter:
    """Appends lengths to a file of int64 offsets: item i stands at offsets[i] .. offsets[i + 1]."""

    def __init__(self, path: Path) -> None:
        self.flat = FlatWriter(path, np.int64)
        self.flat.append(np.zeros(1, np.int64))
        self.end = 0

    def append(self, lengths: np.ndarray) -> None:
        if len(lengths):
            ends = np.cumsum(lengths, dtype=np.int64) + self.end
            self.flat.append(ends)
            self.end = int(ends[-1])

    def close(self) -> dict[str, Any]:
        return self.flat.close()


def describe_file(path: Path) -> dict[str, Any]:
    """What `FlatWriter.close` says, of a file that something else wrote: so many bytes."""
    return {"file": path.name, "dtype": "|u1", "count": path.stat().st_size, "crc32": checksum_of(path)}


def checksum_of(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def described(directory: Path, entry: dict[str, Any]) -> tuple[Path, np.dtype, int]:
    """Where a file is, of what type and how long. An entry that leads elsewhere, or to what is not numbers, is none of ours."""
    name, dtype, count = entry["file"], np.dtype(entry["dtype"]), entry["count"]
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file")
    if dtype.kind not in "iuf":  # as objects, the bytes of a file would be addresses in memory
        raise ValueError(f"{name} holds {dtype}, not numbers")
    return directory / name, dtype, count


def map_flat(directory: Path, entry: dict[str, Any], in_memory: bool = False) -> np.ndarray:
    """The array that `FlatWriter.close` described."""
    path, dtype, count = described(directory, entry)
    if in_memory or count == 0:
        return np.fromfile(path, dtype, count)
    return np.memmap(path, dtype, mode="r", shape=(count,)).view(np.ndarray)  # plain arrays index 15 % faster


def read_pieces(path: Path, dtype: Any, items: int = PIECE_ITEMS) -> Iterator[np.ndarray]:
    """The file from its beginning to its end, a piece at a time: plain reads, so that it never counts as our memory."""
    with path.open("rb") as file:
        while len(piece := np.fromfile(file, dtype, items)):
            yield piece


def smallest_unsigned(largest: int) -> np.dtype:
    """The smallest unsigned type that holds 0 .. largest."""
    return np.min_scalar_type(largest)
