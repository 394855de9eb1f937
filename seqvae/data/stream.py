"""A split of a cache that lies elsewhere, of which only what is needed soon lies on this disk.

In: where the cache is, and how many bytes may lie here. Out: the files of the split, of full length but with holes. What is fetched
is written at its own place, so that whoever maps the files finds sequences where they always are; what is given up becomes a hole
again and takes no room.

Training goes through *groups* of sequences, one after the other: while one is used the next is fetched, and those that were used
longest ago are given up. A group is drawn once, from all over the data, as a number of stretches of neighbouring sequences. So an
epoch's order is that of a plan over all groups, known beforehand and the same in any number of processes, and a batch mixes
sequences of one group.

Shapes: S sequences, G groups, H shards, H1 their bounds, T steps.
"""

import ctypes
import os
import shutil
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

from seqvae.data.batch import Batch, Gathers
from seqvae.data.batching import Cut, Limits, Plan, cut_batches, plan_epoch
from seqvae.data.flat_file import BEGINS, OFFSETS, checksum_of, described
from seqvae.errors import DataError, UsageError
from seqvae.files import is_in_use, mark_in_use, replace_file, wait_for_lock

GROUPS, GROUP_BYTES = 32, 1 << 30
"""A split has at least so many groups, each of at most so many bytes; whatever lies here at least is two of them."""
SHARDS_PER_GROUP, SHARD_BYTES = 16, 1 << 20
"""A group is drawn as so many stretches, fewer where each would be shorter than so many bytes."""
STREAMED = "streamed"
"""Beginning of the names of directories that hold what was fetched."""
READERS = 8
"""Requests that are under way at a time."""
REQUEST_BYTES = 8 << 20
"""Of a longer range, as many pieces are requested at a time."""
NEAR_BYTES = 256 << 10
"""Ranges that are no farther apart are read by one request."""
WHOLE = ("offsets", "labels")
"""Arrays that lie here as a whole: 8 and 4 bytes a sequence."""
KEEP_SIZE, PUNCH_HOLE = 1, 2

Read = Callable[[str, int, int], bytes]
"""Returns bytes of a file of the split elsewhere: its name, where they begin, and how many."""


class Stretch(NamedTuple):
    """Neighbouring sequences."""

    first: int
    behind: int


class Room:
    """A directory for what is fetched, which nobody else uses, and which goes with this object or with the program."""

    def __init__(self, root: Path) -> None:
        with wait_for_lock(root / f".{STREAMED}.lock", lambda: None):
            for left in root.glob(f"{STREAMED}-*"):  # of processes that were killed
                if not is_in_use(left):
                    shutil.rmtree(left, ignore_errors=True)
            self.directory = Path(tempfile.mkdtemp(prefix=f"{STREAMED}-", dir=root))
            mark_in_use(self, self.directory)
        finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        refuse_without_holes(self.directory)


class Stream:
    """The files of one split. Several threads may fetch; one at a time goes through groups."""

    def __init__(self, read: Read, room: Room, directory: Path, parts: dict[str, Any]) -> None:
        """`directory`: of the split, in the room. `parts`: the arrays and the table, as the cache's meta.json has them."""
        self._room = room
        self._read = read
        self._table, entries = parts["table"], parts["arrays"]
        self._is_closed = False
        self._given_up: deque[Future[None]] = deque()
        self._files: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        directory.mkdir()
        self._directory = directory
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="seqvae-fetch")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="seqvae-ahead")
        self._lock = threading.RLock()
        for name, entry in entries.items():
            path, dtype, count = described(directory, entry)
            self._files[name] = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._sizes[name] = dtype.itemsize
            os.truncate(self._files[name], count * dtype.itemsize)
        self._names = {name: entry["file"] for name, entry in entries.items()}
        whole = [name for name in WHOLE if name in entries]
        self._fetch_items([(name, 0, entries[name]["count"]) for name in whole])
        for name in whole:
            if checksum_of(path := directory / entries[name]["file"]) != entries[name]["crc32"]:
                raise DataError(
                    f"{directory.name}/{path.name} of the cache is damaged. Delete that cache; it is built again."
                )
        self._offsets_S1 = np.memmap(directory / OFFSETS, np.int64, mode="r")
        steps = int(self._offsets_S1[-1])
        self._event_offsets = None
        if "event_offsets" in entries:
            self._event_offsets = np.memmap(directory / BEGINS[1], np.int64, mode="r")
        of_steps = ("tokens", "values") if self._event_offsets is None else ("gaps",)
        self._widths = {name: entries[name]["count"] // steps for name in of_steps if name in entries}
        """Items for each step of the arrays that have as many for all."""
        sizes = {name: entry["count"] * self._sizes[name] for name, entry in entries.items()}
        self._whole_bytes = sum(sizes.pop(name, 0) for name in WHOLE)
        size = sum(sizes.values())
        number = max(GROUPS, -(-size // GROUP_BYTES))
        self.groups = draw_groups(
            self._offsets_S1, number, min(SHARDS_PER_GROUP, max(1, size // number // SHARD_BYTES))
        )
        shards = sorted((stretch.first, group) for group, stretches in enumerate(self.groups) for stretch in stretches)
        self._firsts_H, self._groups_H = np.array(shards).T
        self._bytes_per_step = size / steps
        self._is_here_S = np.zeros(len(self._offsets_S1) - 1, bool)
        self._loaded: OrderedDict[int, Future[None]] = OrderedDict()
        self._order: list[int] = []
        self.least_bytes = self._whole_bytes + sum(sorted(map(self._bytes_of, self.groups))[-2:])
        """What has to lie here at a time: the largest two groups, and the arrays that are here as a whole."""
        self.room_bytes = self.least_bytes
        """Bytes that may lie here: as long as there is room, groups stay."""

    def group_of(self, stored_B: np.ndarray) -> np.ndarray:
        """Return the group of each sequence."""
        groups_B: np.ndarray = self._groups_H[np.searchsorted(self._firsts_H, stored_B, side="right") - 1]
        return groups_B

    # --- Groups -----------------------------------------------------------------------------------------------------------

    def follow(self, order: Sequence[int]) -> None:
        """Take note in which order groups are going to be entered."""
        self._order = list(order)

    def enter(self, group: int) -> None:
        """Wait until a group is here, and begin to fetch the one after it; others go where room is needed."""
        with self._lock:
            coming = self._start(group, keep=group)
        try:
            coming.result()
            while self._given_up and self._given_up[0].done():
                self._given_up.popleft().result()
        except BaseException:
            with self._lock:
                self._loaded.pop(group, None)  # another try fetches it again
            raise
        with self._lock:
            for after in self._order[self._order.index(group) + 1 :][:1] if group in self._order else ():
                self._start(after, keep=group)

    def _start(self, group: int, keep: int) -> "Future[None]":
        """Begin to fetch a group, unless that has begun; `keep` is the one in use."""
        if group not in self._loaded:
            room = self.room_bytes - self._whole_bytes - self._bytes_of(self.groups[group])
            for other in [*self._loaded]:
                if other != keep and sum(self._bytes_of(self.groups[one]) for one in self._loaded) > room:
                    self._loaded.pop(other).cancel()
                    self._given_up.append(self._ahead.submit(self._give_up, self.groups[other]))
            self._loaded[group] = self._ahead.submit(self._fetch_stretches, self.groups[group])
        self._loaded.move_to_end(group)
        return self._loaded[group]

    def _bytes_of(self, stretches: Iterable[Stretch]) -> int:
        offsets_S1 = self._offsets_S1
        steps = sum(int(offsets_S1[behind] - offsets_S1[first]) for first, behind in stretches)
        return int(steps * self._bytes_per_step)

    # --- Sequences --------------------------------------------------------------------------------------------------------

    @contextmanager
    def here(self, stored_B: np.ndarray) -> Iterator[None]:
        """Fetch those of some sequences that are not here, whichever groups they are of; all stay until the block ends."""
        with self._lock:
            missing = np.unique(stored_B[~self._is_here_S[stored_B]])
            if len(missing):
                cuts = np.flatnonzero(np.diff(missing) != 1) + 1
                self._fetch_stretches([Stretch(int(run[0]), int(run[-1]) + 1) for run in np.split(missing, cuts)])
            yield

    def bytes_of(self, stored_B: np.ndarray) -> int:
        """Return about how much room some sequences take."""
        return int((self._offsets_S1[stored_B + 1] - self._offsets_S1[stored_B]).sum() * self._bytes_per_step)

    def _fetch_stretches(self, stretches: Sequence[Stretch]) -> None:
        steps = [(int(self._offsets_S1[first]), int(self._offsets_S1[behind])) for first, behind in stretches]
        of_events = self._event_offsets
        items = [(name, begin * width, end * width) for name, width in self._widths.items() for begin, end in steps]
        if of_events is not None:
            self._fetch_items([*items, *(("event_offsets", begin, end + 1) for begin, end in steps)])
            items = [
                (name, int(of_events[begin]), int(of_events[end]))
                for name in ("variables", "values")
                for begin, end in steps
            ]
        self._fetch_items(items)
        for first, behind in stretches:
            self._is_here_S[first:behind] = True

    def _fetch_items(self, items: Iterable[tuple[str, int, int]]) -> None:
        """Fetch ranges of arrays: their names, first items, and those behind the last."""
        by_name: dict[str, list[tuple[int, int]]] = {}
        for name, begin, end in items:
            by_name.setdefault(name, []).append((begin * self._sizes[name], end * self._sizes[name]))
        requests = [(name, request) for name, ranges in by_name.items() for request in joined_ranges(ranges)]
        for _ in self._pool.map(self._fetch_request, requests):
            pass

    def _fetch_request(self, request: tuple[str, list[tuple[int, int]]]) -> None:
        """Read from the first of some neighbouring ranges to the last, and write what lies in them."""
        if self._is_closed:
            raise OSError("the program ends")
        name, ranges = request
        start, number = ranges[0][0], ranges[-1][1] - ranges[0][0]
        content = memoryview(self._read(self._names[name], start, number))
        if len(content) != number:
            file = f"{self._directory.name}/{self._names[name]}"
            raise DataError(
                f"{file} of the cache ends after {start + len(content):,} bytes: it was changed while it was read"
            )
        for begin, end in ranges:
            write_at(self._files[name], content[begin - start : end - start], begin)

    def _give_up(self, stretches: Sequence[Stretch]) -> None:
        with self._lock:
            for first, behind in stretches:
                self._is_here_S[first:behind] = False
                begin, end = int(self._offsets_S1[first]), int(self._offsets_S1[behind])
                for name, width in self._widths.items():
                    self._punch(name, begin * width, end * width)
                if self._event_offsets is not None:
                    events = int(self._event_offsets[begin]), int(self._event_offsets[end])
                    self._punch("variables", *events)
                    self._punch("values", *events)
                    self._punch("event_offsets", begin + 1, end)  # the first one ends what lies before

    def _punch(self, name: str, begin: int, end: int) -> None:
        """Make items of an array a hole in its file."""
        if end > begin:
            punch_hole(self._files[name], begin * self._sizes[name], (end - begin) * self._sizes[name])

    def table(self) -> Path:
        """Return where the table of sequences lies, which is fetched when it is first needed."""
        path = self._directory / str(self._table["file"])
        if not path.exists():
            with replace_file(path) as partial:
                partial.write_bytes(self._read(path.name, 0, int(self._table["count"])))
        return path

    def close(self) -> None:
        """Fetch nothing any more; the rest of a group may take long."""
        self._is_closed = True
        for pool in (self._ahead, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)


class Followed:
    """Sequences in the order of a plan of groups: the group of each batch is there before it is gathered."""

    def __init__(self, sequences: Gathers, stream: Stream, stored_of: Callable[[np.ndarray], np.ndarray]) -> None:
        """`stored_of`: the stored sequence that each is (a part of)."""
        self._sequences, self._stream, self._stored_of = sequences, stream, stored_of

    @property
    def lengths_N(self) -> np.ndarray:
        return self._sequences.lengths_N

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch:
        if len(sequences_B):
            self._stream.enter(int(self._stream.group_of(self._stored_of(sequences_B[:1]))[0]))
        return self._sequences.gather(sequences_B, pad_to)


# --- Plans --------------------------------------------------------------------------------------------------------------


def draw_groups(offsets_S1: np.ndarray, number: int, shards_of_each: int) -> list[list[Stretch]]:
    """Return the stretches of sequences that make up each group, the same for the same data: each of as many steps, or nearly."""
    steps_H1 = np.linspace(0, int(offsets_S1[-1]), number * shards_of_each + 1)
    bounds_H1 = np.unique(np.searchsorted(offsets_S1, steps_H1))
    bounds_H1[-1] = len(offsets_S1) - 1
    shards = [Stretch(first, behind) for first, behind in pairwise(np.unique(bounds_H1).tolist())]
    drawn_H = np.random.Generator(np.random.Philox(key=[0, len(shards)])).permutation(len(shards))
    return [sorted(shards[shard] for shard in group_H) for group_H in np.array_split(drawn_H, min(number, len(shards)))]


class GroupedCut:
    """The cut of each group, and of all of them one behind the other."""

    def __init__(self, lengths_N: np.ndarray, group_N: np.ndarray, limits: Limits, *, bucketing: bool = True) -> None:
        """`group_N`: the group that each sequence is in; some may be in none."""
        order_N = np.argsort(group_N, kind="stable")
        groups, begins = np.unique(group_N[order_N], return_index=True)
        self._groups: list[int] = groups.tolist()
        self._members = np.split(order_N, begins[1:])
        self._cuts = [cut_batches(lengths_N[members], limits, bucketing=bucketing) for members in self._members]
        starts = begins.tolist()
        bounds = [
            start + bound for start, cut in zip(starts, self._cuts, strict=True) for bound in cut.bucket_starts[1:]
        ]
        self.whole = Cut(
            np.concatenate([members[cut.order_N] for members, cut in zip(self._members, self._cuts, strict=True)]),
            np.array([0, *bounds]),
            np.concatenate([[0], *(start + cut.starts_K1[1:] for start, cut in zip(starts, self._cuts, strict=True))]),
            np.concatenate([cut.tokens_K for cut in self._cuts]),
        )

    def groups(self, seed: int, epoch: int) -> list[int]:
        """Return the groups in the order of an epoch, and the first one of the next."""
        orders = [self._order(seed, one) for one in (epoch, epoch + 1)]
        return [self._groups[place] for place in (*orders[0], orders[1][0])]

    def _order(self, seed: int, epoch: int) -> list[int]:
        """Return the places of the groups in an epoch; the first one begins with the dearest, so that memory runs out at once."""
        places: list[int] = (
            np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(self._cuts)).tolist()
        )
        if epoch == 0:
            dearest = max(places, key=lambda place: int(self._cuts[place].tokens_K.max()))
            places.sort(key=lambda place: place != dearest)
        return places

    def plan(self, seed: int, epoch: int) -> Plan:
        """Return the batches of an epoch: group after group, each shuffled as `plan_epoch` does."""
        plans = [plan_epoch(cut, seed + (place + 1) * 2**32, epoch) for place, cut in enumerate(self._cuts)]
        batches = [0, *accumulate(cut.batches for cut in self._cuts)]
        return Plan(
            np.concatenate([members[plan.order_N] for members, plan in zip(self._members, plans, strict=True)]),
            self.whole.starts_K1,
            np.concatenate([batches[place] + plans[place].turns_K for place in self._order(seed, epoch)]),
        )


# --- Files with holes ---------------------------------------------------------------------------------------------------


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return ranges in their order, those of one request together: near to each other, and of bounded length.

    >>> joined_ranges([(5, 9), (0, 2), (NEAR_BYTES + 10, NEAR_BYTES + 12)])
    [[(0, 2), (5, 9)], [(262154, 262156)]]
    """
    requests: list[list[tuple[int, int]]] = []
    for begin, end in sorted(ranges):
        for start in range(begin, end, REQUEST_BYTES):
            piece = (start, min(end, start + REQUEST_BYTES))
            last = requests[-1] if requests else None
            if last and piece[0] - last[-1][1] <= NEAR_BYTES and piece[1] - last[0][0] <= REQUEST_BYTES:
                last.append(piece)
            else:
                requests.append([piece])
    return requests


def write_at(file: int, content: memoryview, position: int) -> None:
    """Write bytes to their place in a file."""
    while len(content):
        written = os.pwrite(file, content, position)
        content, position = content[written:], position + written


def read_bytes(folder: Path, name: str, begin: int, number: int) -> bytes:
    """Return some bytes of a file of this machine."""
    with (folder / name).open("rb") as file:
        file.seek(begin)
        return file.read(number)


def refuse_without_holes(directory: Path) -> None:
    """Refuse a file system that cannot give back a part of a file, on which everything would stay."""
    size = 1 << 20
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
            punch_hole(file.fileno(), 0, size)
            has_holes = os.fstat(file.fileno()).st_blocks * 512 < size
    except (OSError, AttributeError, TypeError):  # the system has no such call
        has_holes = False
    if not has_holes:
        raise UsageError(
            f"--stream: {directory.parent} cannot give back parts of a file (Linux on ext4, xfs, btrfs or tmpfs can). Set "
            "XDG_CACHE_HOME to a directory of such a disk"
        )


def punch_hole(file: int, position: int, size: int) -> None:
    """Give the room of some bytes of a file back to the file system; they read as zeros then."""
    library = ctypes.CDLL(None, use_errno=True)
    offset = ctypes.c_int64
    if library.fallocate(file, KEEP_SIZE | PUNCH_HOLE, offset(position), offset(size)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
