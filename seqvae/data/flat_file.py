"""The files of one split in a cache: flat binary files of one type each, and a table of the sequences.

They are written by appending, and the flat ones read back in pieces or as a memory map. An entry, in the cache's meta.json, holds
a file's name, type, length and checksum. Beside them lies what follows from them and takes as much memory as they have sequences.

Shapes: S sequences, T steps of all sequences, S1 the beginnings of the sequences and the end of the last.
"""

import hashlib
import logging
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from seqvae.data.storage import SMALL_BYTES, DataFile, StoredPlace, Upload
from seqvae.errors import DataError, StorageError
from seqvae.files import replace_file, wait_for_lock

log = logging.getLogger(__name__)
META = "meta.json"
"""Name of the file beside the splits' folders that describes what lies in them."""
SPLITS = frozenset({"train", "valid", "test", "pool"})
OFFSETS = "offsets.bin"
"""Name of the file of each split that says where its sequences begin and end."""
BEGINS = (OFFSETS, "event_offsets.bin")
"""Names of the files that say where sequences, and where the events of a step, begin."""
TABLE = "sequences.arrow"
PIECE_ITEMS = 1 << 21
SHARED_FILES_KEPT = 2
"""Files of one name that are kept: of this epoch and the last one, or of two runs at once."""
ALIGNED = 64
"""Bytes that the arrays of a shared file are aligned to, in it and in memory."""
RAW_TYPES = {"tokens": np.int32, "values": np.float64, "variables": np.int32}
"""How values lie on disk until the training split's vocabulary and moments are known."""
FINAL_TYPES = {"gaps": np.float32}
AS_READ = "values_as_read"
"""The array of values in the data's own units, where they are kept beside the normalised ones."""
Place = Path | StoredPlace
"""A file or a folder of a cache that is being built, on this machine or in a store."""


class FlatWriter:
    """A file that arrays are appended to, with the number of its items and their checksum."""

    closed = False
    """pyarrow asks before it writes a table."""

    def __init__(self, path: Place, dtype: Any) -> None:
        self.name = path.name
        self.dtype = np.dtype(dtype)
        self.count = 0
        self.checksum = 0
        self.file: BinaryIO | Upload
        if isinstance(path, StoredPlace):
            self.file = path.store.create(str(path.path))
        else:
            self.file = path.open("wb", buffering=1 << 20)

    def append(self, array: np.ndarray) -> None:
        """Write an array after the previous ones."""
        self.write(np.ascontiguousarray(array, dtype=self.dtype).reshape(-1).data)

    def write(self, content: Any) -> None:
        """Write the bytes of some items."""
        self.file.write(content)
        self.checksum = zlib.crc32(content, self.checksum)
        self.count += memoryview(content).nbytes // self.dtype.itemsize

    def close(self) -> dict[str, Any]:
        """Close the file and return its entry, which `map_flat` reads, as JSON."""
        self.file.close()
        return {"file": self.name, "dtype": self.dtype.str, "count": self.count, "crc32": self.checksum}


class SplitFiles:
    """One split of a cache while it is being built: flat files that grow, and a table of its sequences."""

    def __init__(self, directory: Place, sources: Sequence[DataFile], *, keeps_values: bool = False) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.keeps_values = keeps_values
        self.sources = sources
        """The Parquet files, as the table numbers them."""
        self.sequences = self.steps = 0
        self.entries: dict[str, dict[str, Any]] = {}
        """Finished files, as `map_flat` reads them."""
        self.table_entry: dict[str, Any] = {}
        self._table_writer: pa.RecordBatchFileWriter | None = None
        self._writers: dict[str, FlatWriter] = {}
        self._ends: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what is open: a closed split goes from process to process by its names."""
        state = self.__dict__ | {"_writers": {}, "_table_writer": None}
        state.pop("table", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if self.table_entry and isinstance(self.directory, Path) and not (self.directory / TABLE).exists():
            raise StorageError(
                f"{self.directory}: is not there in another process that works on the same cache. All machines have to see the "
                "directory that caches are built in (--cache_dir)"
            )

    @cached_property
    def table(self) -> pa.Table:
        """Return id, file, row (and label, where the data have one) of each sequence; mapped, and only after `close`."""
        return read_table(self.directory / TABLE)

    def new_writer(self, file: str, dtype: Any) -> FlatWriter:
        writer = self._writers[file] = FlatWriter(self.directory / file, dtype)
        return writer

    def append(
        self,
        table: pa.Table,
        lengths_S: np.ndarray,
        events_per_step_T: np.ndarray | None,
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        """Add one or more sequences: their rows of the table, their steps, and the flat arrays of their contents."""
        self.sequences += len(table)
        for file, lengths in zip(BEGINS, (lengths_S, events_per_step_T), strict=True):
            if lengths is not None:
                if file not in self._writers:
                    self.new_writer(file, np.int64).append(np.zeros(1))
                ends = np.cumsum(lengths, dtype=np.int64) + self._ends.get(file, 0)
                self._writers[file].append(ends)
                self._ends[file] = int(ends[-1])
        self.steps = self._ends[OFFSETS]
        for name, array in arrays.items():
            is_final = name in FINAL_TYPES
            file = f"{name}.bin" if is_final else f"{name}.raw"
            if file not in self._writers:
                self.new_writer(file, FINAL_TYPES[name] if is_final else RAW_TYPES[name])
            self._writers[file].append(array)
        self._append_rows(table)

    def _append_rows(self, table: pa.Table) -> None:
        if self._table_writer is None:
            file = pa.PythonFile(self.new_writer(TABLE, np.uint8), mode="w")
            self._table_writer = pa.ipc.new_file(file, table.schema)
        self._table_writer.write_table(table)

    def close(self) -> None:
        """Flush everything; the raw arrays still wait for their final form."""
        if self._table_writer is not None:
            self._table_writer.close()
            self._table_writer = None
            self.__dict__.pop("table", None)
        for name, writer in self._writers.items():
            entry = writer.close()
            if name == TABLE:
                self.table_entry = entry
            elif name.endswith(".bin"):
                self.entries[PurePath(name).stem] = entry

    def adopt(self, other: Path, entry: dict[str, Any], *, with_table: bool) -> None:
        """Take over the files of the same sequences from another cache, all but labels; as links where the file system has them.

        `entry`: what its meta.json says of the split. Without its table, `write_table` has to follow.
        """
        assert isinstance(self.directory, Path)
        self.sequences, self.steps = entry["counts"]["sequences"], entry["counts"]["steps"]
        self.entries = {name: one for name, one in entry["arrays"].items() if name != "labels"}
        self.table_entry = entry["table"]
        for one in ([self.table_entry] if with_table else []) + [*self.entries.values()]:
            try:
                os.link(other / one["file"], self.directory / one["file"])
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(other / one["file"], self.directory / one["file"])
        if not with_table:
            self.table = read_table(other / TABLE)

    def join_rows(self, part: "SplitFiles") -> None:
        """Add the sequences of a closed part behind those that are there: their rows of the table, and how many there are."""
        self._append_rows(part.table)
        part.release()  # of a store, it takes room on the disk
        self.sequences += part.sequences
        self.steps += part.steps

    def join_arrays(self, part: "SplitFiles") -> None:
        """Move the final arrays of a part behind those that are there."""
        for entry in part.entries.values():
            file, path = entry["file"], part.directory / entry["file"]
            known = self._ends.get(file)
            writer = self._writers.get(file) or self.new_writer(file, entry["dtype"])
            for number, piece in enumerate(read_pieces(path, np.dtype(entry["dtype"]))):
                if file in BEGINS:
                    piece = piece[number == 0 and known is not None :] + (known or 0)
                    self._ends[file] = int(piece[-1]) if len(piece) else known or 0
                writer.append(piece)
            if isinstance(path, Path):
                path.unlink()

    def write_table(self, table: pa.Table) -> None:
        """Write the table of all sequences at once."""
        self._append_rows(table)
        self.close()

    def raw(self, name: str) -> tuple[Place, Any]:
        """Return path and type of an array that waits for its final form."""
        return self.directory / f"{name}.raw", RAW_TYPES[name]

    def finish(self, writer: FlatWriter) -> None:
        """Note a final array, which `writer` has written, and remove the raw one that it replaces, or keep it by another name.

        In a store the raw one stays, so that a build can begin with it again.
        """
        name = PurePath(writer.name).stem
        self.entries[name] = writer.close()
        raw = self.directory / f"{name}.raw"
        if isinstance(raw, StoredPlace):
            return
        if name == "values" and self.keeps_values:
            kept, dtype = raw.rename(raw.with_name(f"{AS_READ}.bin")), np.dtype(RAW_TYPES[name])
            count = kept.stat().st_size // dtype.itemsize
            self.entries[AS_READ] = {"file": kept.name, "dtype": dtype.str, "count": count, "crc32": checksum_of(kept)}
        raw.unlink(missing_ok=True)

    def place_of(self, sequence: int) -> str:
        """Return file and row where a sequence begins, for messages."""
        [where] = self.table.slice(sequence, 1).to_pylist()
        return f"{self.sources[where['file']]}: row {where['row']}"

    def place_of_step(self, step: int) -> str:
        """Return file and row where the sequence of a step begins."""
        return self.place_of(int(np.searchsorted(self.offsets(), step, side="right")) - 1)

    def offsets(self) -> np.ndarray:
        """Return where the sequences begin and end, int64 [S1]."""
        return np.concatenate([*read_pieces(self.directory / OFFSETS, np.int64)])

    def release(self) -> None:
        """Leave no file open, also after an error: what is still unwritten may not fit the disk."""
        if self._table_writer is not None:
            with suppress(OSError, StorageError, DataError, pa.ArrowException):
                self._table_writer.close()
        for writer in self._writers.values():
            with suppress(OSError, StorageError, DataError):
                writer.file.close()
        self.__dict__.pop("table", None)  # Windows renames no directory with a mapped file in it


def read_table(path: Place) -> pa.Table:
    """Return a table of sequences, mapped; one of a store lies without a name on this disk as long as it is used."""
    if isinstance(path, Path):
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    with tempfile.TemporaryFile() as file:
        for piece in path.store.pieces(str(path.path), SMALL_BYTES):
            file.write(piece)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()


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
    """Open the array of an entry as a memory map, or read it into memory."""
    path, dtype, count = described(directory, entry)
    if in_memory or count == 0:
        return np.fromfile(path, dtype, count)
    return np.memmap(path, dtype, mode="r", shape=(count,)).view(np.ndarray)  # plain arrays index 15 % faster


def read_pieces(path: Place, dtype: Any, items: int = PIECE_ITEMS) -> Iterator[np.ndarray]:
    """Yield the file from its beginning to its end, a piece at a time: plain reads, so that it never counts as our memory."""
    if isinstance(path, StoredPlace):
        for content in path.store.pieces(str(path.path), items * np.dtype(dtype).itemsize):
            yield np.frombuffer(content, dtype)
        return
    with path.open("rb") as file:
        while len(piece := np.fromfile(file, dtype, items)):
            yield piece


# Arrays that the processes of a machine share: made by the first that needs them, written to a file, and mapped by all. What was
# mapped stays so when the file is removed, and what is missing is made again, so that files may go at any time.


def shared_arrays(
    directory: Path, name: str, key: Sequence[object], make: Callable[[], Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Return the arrays of integers that `make` returns, mapped from a file that lies in the directory or is written there.

    They depend on nothing but the name and the key, whose `repr` says all. Where no file can be written, they take memory of this
    process. The file is on the disk before it has its name, so that a power cut leaves none with holes.
    """
    digest = hashlib.sha256(repr((np.__version__, *key)).encode()).hexdigest()[:16]
    path = directory / f"{name}-{digest}.shared"
    if (mapped := map_arrays(path)) is not None:
        return mapped
    made: Sequence[np.ndarray] | None = None
    try:
        lock = directory / f".{name}.lock"
        with wait_for_lock(lock, lambda: log.info("waiting for the process that works out: %s", name)):
            if (mapped := map_arrays(path)) is not None:
                return mapped
            made = make()
            with replace_file(path, durable=True) as partial, partial.open("wb") as file:
                for array in made:
                    file.write(bytes(-file.tell() % ALIGNED))
                    np.save(file, array)
            by_age = sorted(directory.glob(f"{name}-*.shared"), key=lambda one: one.stat().st_mtime_ns)
            abandoned = directory.glob(f".{name}-*.shared.*.partial")  # by writers that were killed
            for old in [*by_age[:-SHARED_FILES_KEPT], *abandoned]:
                old.unlink()
    except OSError as error:
        log.debug("%s: %s is not shared (%s)", directory, name, error)
    return map_arrays(path) or list(make() if made is None else made)


def map_arrays(path: Path) -> list[np.ndarray] | None:
    """Map the arrays of a shared file; None where it is not there or not whole."""
    arrays: list[np.ndarray] = []
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while file.tell() < size:
                file.seek(-file.tell() % ALIGNED, os.SEEK_CUR)
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                if dtype.kind not in "iu":
                    raise ValueError(f"{path.name} holds {dtype}, not integers")
                begin = file.tell()
                arrays.append(np.memmap(file, dtype, "r", begin, shape).view(np.ndarray))
                file.seek(begin + arrays[-1].nbytes)
    except (OSError, ValueError):
        return None
    return arrays or None
