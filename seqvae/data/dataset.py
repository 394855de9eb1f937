"""One split of a cache, opened: which sequences there are after the length cap, padded batches of any of them, and their origin.

Everything large is memory-mapped, opened at the first use in each process and left behind when pickled, so that a
loader process costs no copy of the data.

Shapes: S stored sequences, N sequences after the cap, B sequences of a batch, T their steps, E their events, R rows of a file.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from seqvae.config.data import LengthSettings
from seqvae.data.batch import Batch, EventBatch, Gathers, TokenBatch, VectorBatch, checksum_of
from seqvae.data.description import Kind
from seqvae.data.flat_file import AS_READ, META, map_flat, shared_arrays
from seqvae.data.stream import Stream
from seqvae.errors import DataError
from seqvae.files import mark_in_use
from seqvae.text import counted, some

LONGEST = 2**31 - 1
"""Steps of one sequence, which are counted in int32."""
SHOWN, SHOWN_FILES = 5, 3
"""Sequences, rows and files that a message names."""
SHARED_FROM = 2_000_000
"""Stored sequences from which on a machine holds what follows from their lengths once: below, a process works it out sooner than it
is read."""
UNREADABLE = (OSError, pa.ArrowException)
"""Errors of files that cannot be read."""


class Windows(NamedTuple):
    """The parts of the sequences that the length cap leaves."""

    starts_N: np.ndarray
    """int64, first step in the flat arrays."""
    lengths_N: np.ndarray
    """int32, steps."""
    owners_N: np.ndarray | None
    """int64, the stored sequence each is a part of; None: sequence n itself."""
    over_cap: int
    """Stored sequences that are longer than the cap."""
    cut_off: bool = False
    """Whether some sequences go on in the data where they end here."""


class SequenceSet:
    """A split; its sequence n has `lengths_N[n]` steps."""

    def __init__(
        self,
        directory: Path,
        kind: Kind,
        arrays: dict[str, Any],
        lengths: LengthSettings,
        in_memory: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """`arrays`: the entries of meta.json, by name. `stream`: fetches what is gathered, where not all of it is here."""
        self.directory = directory
        self.kind = kind
        self._entries = arrays
        self._length_settings = lengths
        self._in_memory = in_memory
        self.stream = stream

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getstate__(self) -> dict[str, Any]:
        opened = ("windows", "_arrays", "_table")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    @property
    def lengths_N(self) -> np.ndarray:
        """int32, steps of each sequence after the cap."""
        return self.windows.lengths_N

    @property
    def content(self) -> str:
        """A checksum of all that is stored of these sequences."""
        checksums = sorted((name, entry["crc32"]) for name, entry in self._entries.items())
        return f"{zlib.crc32(json.dumps(checksums).encode()):08x}"

    @cached_property
    def windows(self) -> Windows:
        """The sequences after the length cap."""
        offsets_S1 = self._arrays["offsets"]

        def cut() -> list[np.ndarray]:
            windows = cut_windows(offsets_S1, self._length_settings)
            more = [] if np.may_share_memory(windows.starts_N, offsets_S1) else [windows.starts_N]
            more += [] if windows.owners_N is None else [windows.owners_N]
            return [np.array([windows.over_cap, windows.cut_off]), windows.lengths_N, *more]

        (over_cap, cut_off), lengths_N, *more = self.share("lengths", (), cut)
        starts_N, owners_N = [*more, None, None][:2]
        if starts_N is None:
            starts_N = offsets_S1[:-1]
        windows = Windows(starts_N, lengths_N, owners_N, int(over_cap), bool(cut_off))
        if len(windows.lengths_N) == 0:
            raise DataError(
                f"--long_sequences drop leaves nothing of the {self.directory.name} split: all {windows.over_cap:,} sequences "
                f"have more than --max_sequence_length {self._length_settings.max_sequence_length} steps. Raise it, or "
                f"choose truncate, keep_last or split."
            )
        return windows

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """The flat arrays by name."""
        mark_in_use(self, self.directory)  # worker processes open the files later than their parent
        return {name: map_flat(self.directory, entry, self._in_memory) for name, entry in self._entries.items()}

    @cached_property
    def _table(self) -> pa.Table:
        """The stored sequences: their ids, and where they came from."""
        path = self.directory / "sequences.arrow" if self.stream is None else self.stream.table()
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def share(self, name: str, key: Sequence[object], make: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Return the arrays of integers that `make` works out of these sequences' lengths and the key. Where sequences are many, a
        machine has them once: in a file beside the data, which goes with them."""
        if self._entries["offsets"]["count"] <= SHARED_FROM:
            return list(make())
        return shared_arrays(self.directory, name, (self.content, self._length_settings, *key), make)

    def cropped(self, most_steps: int) -> "SequenceSet":
        """Return the same sequences, of which longer ones end after `most_steps`."""
        lengths_N = self.windows.lengths_N
        cut_off = self.windows.cut_off or int(lengths_N.max()) > most_steps
        windows = self.windows._replace(lengths_N=np.minimum(lengths_N, most_steps), cut_off=cut_off)
        cropped = object.__new__(SequenceSet)
        vars(cropped).update(vars(self), windows=windows)  # the arrays are shared
        return cropped

    def owners(self, sequences_B: np.ndarray) -> np.ndarray:
        """Return the stored sequence that each is a part of."""
        owners_N = self.windows.owners_N
        return sequences_B if owners_N is None else owners_N[sequences_B]

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch:
        """Return a padded batch of these sequences; of none: the empty batch, one sequence of length 0 with the number -1."""
        if self.stream is None:
            return self._gather(sequences_B, pad_to)
        with self.stream.here(self.owners(np.asarray(sequences_B, np.int64))):
            return self._gather(sequences_B, pad_to)

    def _gather(self, sequences_B: np.ndarray, pad_to: int | None) -> Batch:
        windows, arrays = self.windows, self._arrays
        is_empty = len(sequences_B) == 0
        if is_empty:
            starts_B, lengths_B, sequences_B = np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, -1)
        else:
            starts_B, lengths_B = windows.starts_N[sequences_B], windows.lengths_N[sequences_B].astype(np.int64)
            sequences_B = np.array(sequences_B, np.int64)  # they may be part of a mapped plan, which no tensor may be
        longest = int(lengths_B.max())
        steps = pad_to or max(1, longest)
        assert steps >= longest, "a longer sequence would run into the next row"
        source_T = ranges(starts_B, lengths_B)
        target_T = ranges(np.arange(len(lengths_B)) * steps, lengths_B)
        shape = (len(lengths_B), steps)
        labels_B = None
        if "labels" in arrays:
            stored_B = np.full(1, -1) if is_empty else arrays["labels"][self.owners(sequences_B)].astype(np.int64)
            labels_B = torch.from_numpy(stored_B)
        common = (torch.from_numpy(lengths_B), torch.from_numpy(sequences_B), labels_B, 0, 0)
        if self.kind == "tokens":
            tokens_BT = np.zeros(shape, np.int64)
            tokens_BT.reshape(-1)[target_T] = arrays["tokens"][source_T]
            ends_B = None
            if windows.cut_off and not is_empty:
                ends_B = torch.from_numpy(starts_B + lengths_B == arrays["offsets"][self.owners(sequences_B) + 1])
            return TokenBatch(torch.from_numpy(tokens_BT), *common, ends_B)
        if self.kind == "vectors":
            width = len(arrays["values"]) // int(arrays["offsets"][-1])
            values_BTD = np.full((*shape, width), np.nan, np.float32)
            values_BTD.reshape(-1, width)[target_T] = arrays["values"].reshape(-1, width)[source_T]
            observed_BTD = ~np.isnan(values_BTD)
            values_BTD[~observed_BTD] = 0.0
            return VectorBatch(torch.from_numpy(values_BTD), torch.from_numpy(observed_BTD), *common)
        gaps_BT = np.zeros(shape, np.float32)
        gaps_BT.reshape(-1)[target_T] = arrays["gaps"][source_T]
        gaps_BT[:, 0] = 0.0  # a window that begins within a sequence does not know what came before
        first_event_T = arrays["event_offsets"][source_T]
        events_T = arrays["event_offsets"][source_T + 1] - first_event_T
        source_E = ranges(first_event_T, events_T)
        values_E = arrays["values"][source_E]
        has_value_E = ~np.isnan(values_E)
        values_E[~has_value_E] = 0.0
        variables_E = arrays["variables"][source_E].astype(np.int64)
        steps_E = np.repeat(target_T, events_T)
        columns: tuple[np.ndarray, ...] = (variables_E, values_E, has_value_E, steps_E)
        unknown_U = np.flatnonzero(variables_E == 0)
        repeated = unknown_U[1:][np.diff(steps_E[unknown_U]) == 0]
        if len(repeated):  # several at one time are one member of the set
            columns = tuple(np.delete(column, repeated) for column in columns)
        events = [torch.from_numpy(column) for column in columns]
        return EventBatch(torch.from_numpy(gaps_BT), common[0], events[0], events[1], events[2], events[3], *common[1:])

    def values_as_read(self, sequences_B: np.ndarray) -> np.ndarray:
        """Return the values of these sequences in the data's own units, to the bit, as `gather` orders them: of vectors for each
        real step, (T, D), of events (E,). Only where the cache was built to keep them."""
        arrays, windows = self._arrays, self.windows
        source_T = ranges(windows.starts_N[sequences_B], windows.lengths_N[sequences_B].astype(np.int64))
        if self.kind == "vectors":
            width = len(arrays["values"]) // int(arrays["offsets"][-1])
            steps_TD: np.ndarray = arrays[AS_READ].reshape(-1, width)[source_T]
            return steps_TD
        first_event_T = arrays["event_offsets"][source_T]
        values_E: np.ndarray = arrays[AS_READ][
            ranges(first_event_T, arrays["event_offsets"][source_T + 1] - first_event_T)
        ]
        return values_E

    def ids(self, sequences_B: np.ndarray) -> list[int | str]:
        """Return the ids that the user knows these sequences by."""
        rows_B, column = self.owners(np.asarray(sequences_B)), self._table.column("id")
        if len(rows_B) and np.array_equal(rows_B, np.arange(rows_B[0], rows_B[0] + len(rows_B))):
            column = column.slice(rows_B[0], len(rows_B))  # `take` looks at all there are
        else:
            column = column.take(pa.array(rows_B))
        ids: list[int | str] = column.to_pylist()
        return ids

    def window_of(self, sequences_B: np.ndarray) -> np.ndarray | None:
        """Return which window of its stored sequence each is, from 0 on; None where sequences are not cut into windows."""
        owners_N = self.windows.owners_N
        if owners_N is None or self._length_settings.long_sequences != "split":
            return None
        window_B: np.ndarray = sequences_B - np.searchsorted(owners_N, owners_N[sequences_B])
        return window_B

    def sequence_of(self, id_: str) -> int | None:
        """Return which sequence the user knows by this id; of several windows or sequences with it the first."""
        column, owners_N = self._table.column("id"), self.windows.owners_N
        try:
            row = int(pc.index(column, pa.scalar(id_, pa.string()).cast(column.type)).as_py())
        except pa.ArrowInvalid:  # ids are numbers, and this is none
            return None
        if row < 0 or owners_N is None:
            return None if row < 0 else row
        sequence = int(np.searchsorted(owners_N, row))
        return sequence if sequence < len(owners_N) and owners_N[sequence] == row else None

    @property
    def files(self) -> list[str]:
        """The Parquet files that sequences come from, as `origins` numbers them."""
        meta = read_meta(self.directory.parent)
        return [meta["files"][number]["path"] for number in meta["sources"]]

    def origins(self, sequences_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the file, and the row in it, that each sequence begins in."""
        origins = self._table.select(["file", "row"]).take(pa.array(self.owners(np.asarray(sequences_B))))
        file_B, row_B = (origins.column(name).to_numpy() for name in ("file", "row"))
        return file_B, row_B

    def rows_of(self, sequences_B: np.ndarray) -> dict[str, np.ndarray]:
        """Return, for each Parquet file, the rows that some of these sequences begin in."""
        files, (files_B, rows_B) = self.files, self.origins(sequences_B)
        return {files[file]: rows_B[files_B == file] for file in np.unique(files_B)}


def cut_windows(offsets_S1: np.ndarray, settings: LengthSettings) -> Windows:
    """Apply the length cap without touching the data: a window is a start and a length in the flat arrays."""
    cap = min(settings.max_sequence_length, LONGEST)
    # int32 from the start: ten million sequences and more should cost little beside their offsets, which are mapped
    starts_S, full_S = offsets_S1[:-1], np.subtract(offsets_S1[1:], offsets_S1[:-1], dtype=np.int32, casting="unsafe")
    over_S = full_S > cap
    over = int(over_S.sum())
    if over == 0 or settings.long_sequences == "truncate":
        return Windows(starts_S, np.minimum(full_S, cap, out=full_S), None, over, cut_off=over > 0)
    if settings.long_sequences == "keep_last":
        lengths_S = np.minimum(full_S, cap, out=full_S)
        return Windows(offsets_S1[1:] - lengths_S, lengths_S, None, over)
    if settings.long_sequences == "drop":
        kept = np.flatnonzero(~over_S)
        return Windows(starts_S[kept], full_S[kept], kept, over)
    stride = settings.window_stride or cap
    windows_S = 1 + np.maximum(0, -(-(full_S - cap) // stride))
    owners_N = np.repeat(np.arange(len(full_S)), windows_S)
    within_N = ranges(np.zeros(len(full_S), np.int64), windows_S) * stride
    lengths_N = np.minimum(full_S[owners_N] - within_N, cap)
    return Windows(starts_S[owners_N] + within_N, lengths_N.astype(np.int32), owners_N, over, cut_off=True)


def same_content(sequences: Gathers, chosen_N: np.ndarray) -> np.ndarray:
    """Return a number for each of the chosen sequences, int64, which those of the same content share."""
    return np.array([checksum_of(sequences.gather(chosen_N[n : n + 1])) for n in range(len(chosen_N))], np.int64)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return start, start + 1, ... for each start, `count` of them, one behind the other.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + counts, counts)


def read_meta(directory: Path) -> dict[str, Any]:
    """Read the meta.json of a cache."""
    meta: dict[str, Any] = json.loads((directory / META).read_text(encoding="utf-8"))
    return meta


def origin_of(split: SequenceSet, sequences_B: np.ndarray) -> str:
    """Return the ids of sequences and the files and row groups that they begin in, for a message; short however many there are."""
    if len(sequences_B) == 0:
        return "no sequences"
    whole = f"of the {split.directory.name} split"
    try:
        ids, rows_of = split.ids(sequences_B), split.rows_of(sequences_B)
    except UNREADABLE as error:
        numbers = some([*map(str, sequences_B)], SHOWN)
        return f"sequences {numbers} {whole} by number, as {split.directory} cannot be read ({error})"
    places = []
    for file, rows_R in islice(rows_of.items(), SHOWN_FILES):
        noun, parts = "row", np.unique(rows_R)
        with suppress(*UNREADABLE):
            footer = pq.read_metadata(file)
            if parts[-1] < footer.num_rows:  # or it is another file by now
                ends_G = np.cumsum([footer.row_group(group).num_rows for group in range(footer.num_row_groups)])
                noun, parts = "row group", np.unique(np.searchsorted(ends_G, parts, side="right"))
        places.append(f"{file}: {noun}{'s' * (len(parts) != 1)} {some([*map(str, parts)], SHOWN)}")
    if len(rows_of) > SHOWN_FILES:
        places.append(f"and {counted(len(rows_of) - SHOWN_FILES, 'more file')}")
    noun = "sequence" if len(ids) == 1 else "sequences"
    return f"{noun} {some([*map(str, ids)], SHOWN)} {whole} ({'; '.join(places)})"
