"""The batches of one process, epoch after epoch, from any position on: in process, by threads or by processes, always the same.

In: a split, and the plan of each epoch. Out: padded batches in the plan's order. All processes of a run see one plan and take
turns: in each round, process r takes the r-th of the next `world` batches. Where the batches do not come out even, the last round
is filled with empty ones (one sequence of length 0), since every process has to take part in every step. A position is (epoch,
batches delivered by all processes), so a run can go on with another number of processes.

Trouble costs no batch: when one cannot be made, the workers are thrown away and start again at that very batch.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from seqvae.config.data import LoadingSettings
from seqvae.data.batch import Batch, Gathers
from seqvae.data.batching import Limits, Plan, gather_batch
from seqvae.data.dataset import UNREADABLE
from seqvae.errors import DataError, SettingsError, StorageError, is_out_of_files, is_out_of_memory
from seqvae.text import some

log = logging.getLogger(__name__)
Made = TypeVar("Made")
MakeBatch = Callable[[np.ndarray], Batch]

THREAD_AHEAD = 8
"""Batches that a thread keeps ready. Half of them are made in one go: a thread that is called between two steps finds the caches
cold, and then takes 0.25 ms for a batch of 0.03 ms (`python -m benchmarks.speed.step --part loop`)."""
CLOSING_SECONDS = 10.0
"""A thread that has not finished its batch by then is left behind."""
TRIES = 3
"""Tries to make one and the same batch: what fails so often will fail again."""
NAMING_SECONDS = 10.0
"""How long to look up where sequences came from: the disk that knows may be the one that hangs."""
END_SECONDS = 5.0
"""A process that the system cannot kill within this, as it waits for a disk, is left to the system."""
LOOK_SECONDS = 1.0
"""How often a worker process looks whether its parent still lives."""
SHOWN = 5


class Loading(NamedTuple):
    """The way batches are made: `LoadingSettings` with all that the user left open."""

    worker_type: str
    workers: int
    """0: batches are made when they are requested."""
    prefetch_factor: int
    """Batches that each worker keeps ready at most."""
    persistent: bool
    pin_memory: bool
    timeout_seconds: float | None
    """How long to wait for a batch; None: without a limit."""
    hint: str = ""
    """What is odd about the settings, for the header."""


def resolve_loading(settings: LoadingSettings) -> Loading:
    """Fill in what the user left open."""
    workers = 1 if settings.num_workers == "auto" else settings.num_workers
    cores = os.cpu_count() or 1
    ahead = THREAD_AHEAD if settings.worker_type == "thread" else max(2, workers)
    return Loading(
        worker_type=settings.worker_type,
        workers=workers,
        prefetch_factor=settings.prefetch_factor or ahead,
        persistent=settings.persistent_workers,
        pin_memory=settings.pin_memory and torch.cuda.is_available(),
        timeout_seconds=settings.loader_timeout_seconds or None,
        hint=f"--num_workers {workers}: more than this machine's {cores} cores brings nothing"
        if workers > cores
        else "",
    )


class BatchLoader:
    """An iterable over one process's batches of an epoch.

    With `reshuffled`, it is its own `sampler`: that is how Lightning comes to call `set_epoch`. Nothing runs before the first
    batch is requested, as Lightning also makes iterators that it never uses. A batch's position is the same whatever the
    number of processes; that of an empty batch runs on into the next epoch's, where it does no harm.
    """

    def __init__(
        self,
        sequences: Gathers,
        limits: Limits,
        plan_of_epoch: Callable[[int], Plan],
        batches: int,
        loading: Loading,
        *,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
        reshuffled: bool = False,
        origin_of: Callable[[np.ndarray], str] | None = None,
        on_trouble: Callable[[str], None] = log.warning,
    ) -> None:
        """Every epoch's plan has `batches` batches, cut under `limits`; `accumulate` rounds make one optimizer step.

        `origin_of` returns where sequences came from; `on_trouble` gets a line each time that the workers start again.
        """
        self.batches, self.rank, self.world, self.accumulate = batches, rank, world, accumulate
        self.epoch = 0
        self.delivered = 0
        self._start = 0
        self._lengths_N = sequences.lengths_N
        self._plan_of_epoch = plan_of_epoch
        self._workers = Workers(sequences, limits, loading)
        self._origin_of = origin_of or (
            lambda sequences_B: f"sequences {some([*map(str, sequences_B)], SHOWN)} by number"
        )
        self._on_trouble = on_trouble
        if reshuffled:  # Lightning expects more of an evaluation loader that has a sampler
            self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; nothing changes where it is the present one, so that a resumed position holds."""
        if epoch != self.epoch:
            self.epoch, self.delivered, self._start = epoch, 0, 0

    def __len__(self) -> int:
        """Return the rounds of an epoch."""
        return rounds(self.batches, self.world)

    @property
    def rounds_done(self) -> int:
        """Rounds of the present epoch that have gone by, as many as leave enough for the rest."""
        return len(self) - rounds(self.batches - self.delivered, self.world)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start, self._start = self.epoch, self._start, 0
        self.delivered = start
        plan, first = self._plan_of_epoch(epoch), epoch * self.batches
        left = len(self) - self.rounds_done
        numbers = range(start + self.rank, start + self.rank + left * self.world, self.world)
        step_tokens = self._step_tokens(plan)
        with closing(self._make(plan, numbers, first)) as batches:
            for number in numbers:
                try:
                    batch = next(batches)
                except BaseException as error:
                    error.add_note(f"while making batch {first + number:,} (counted through all epochs)")
                    raise
                self.delivered = min(self.batches, number - self.rank + self.world)
                yield batch._replace(step_tokens=step_tokens, position=first + number)

    def _step_tokens(self, plan: Plan) -> float:
        """Return the real steps of an optimizer step, on average over the epoch."""
        lengths_N, order_N, end = self._lengths_N, plan.order_N, plan.starts_K1[-1]
        if len(order_N) == len(lengths_N):  # to look up all of them takes a second for each hundred million
            steps = lengths_N.sum(dtype=np.int64) - lengths_N[order_N[end:]].sum(dtype=np.int64)
        else:
            steps = lengths_N[order_N[:end]].sum(dtype=np.int64)
        return int(steps) / rounds(len(self), self.accumulate)

    def _make(self, plan: Plan, numbers: range, first: int) -> Generator[Batch]:
        """Yield the batch of each number in spite of trouble; a batch that fails `TRIES` times in a row is a DataError."""
        done = failures = 0
        while True:
            try:
                with closing(self._workers.make(map(plan.batch, numbers[done:]))) as batches:
                    for batch in batches:
                        done, failures = done + 1, 0
                        yield batch
                return
            except BatchNotMade as trouble:
                failures += 1
                reason, advice = trouble.args
                name = f"batch {first + numbers[done]:,} (counted through all epochs)"
                place = self._look_up(plan.batch(numbers[done]))
                if failures == TRIES:
                    raise DataError(
                        f"{name} could not be made, {TRIES} times in a row: {reason}. It holds {place}. {advice}."
                    ) from trouble
                self._on_trouble(
                    f"{name} was not made: {reason}. It holds {place}. The loader starts again from this batch "
                    f"(try {failures + 1} of {TRIES})"
                )

    def _look_up(self, sequences_B: np.ndarray) -> str:
        """Return where sequences came from, if that is known in time."""
        found: SimpleQueue[str] = SimpleQueue()

        def look_up() -> None:
            try:
                found.put(self._origin_of(sequences_B))
            except (*UNREADABLE, ValueError, LookupError) as error:  # what lies there may be damaged, too
                found.put(f"sequences that cannot be looked up ({error})")

        threading.Thread(target=look_up, name="place", daemon=True).start()
        try:
            return found.get(timeout=NAMING_SECONDS)
        except Empty:
            return f"sequences that could not be looked up within {NAMING_SECONDS:g} s"

    def state_dict(self) -> dict[str, Any]:
        """Return the position. Batches that are prepared but not yet handed out do not count as delivered."""
        return {"epoch": self.epoch, "delivered": self.delivered, "batches": self.batches, "world": self.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader was; after an epoch's last batch, with the next epoch."""
        epoch, delivered = state["epoch"], state["delivered"]
        if delivered >= state["batches"]:
            epoch, delivered = epoch + 1, 0
        if delivered and state["batches"] != self.batches:
            raise SettingsError(
                f"the checkpoint stands within an epoch of {state['batches']:,} batches, these settings make "
                f"{self.batches:,}: resume with the data and the flags for batches that it was made with"
            )
        self.epoch, self.delivered, self._start = epoch, delivered, delivered

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()


def rounds(batches: int, world: int) -> int:
    """Return how often each of `world` processes has to take a batch until none is left."""
    return -(-batches // world)


# --- Making batches: requests (the sequences of each batch) in, batches out, until one is not made ----------------------
#
# Threads are the default: numpy's copies release the GIL, and what a thread makes need not be sent. Processes cost more than they
# bring once the data lie in the cache; they are there for those who add heavy work of their own.


class BatchNotMade(Exception):
    """A batch that could not be made, for a reason that may be gone when the workers have started again.

    Its arguments: the reason, and what to do if it stays so; both without a full stop.
    """


class Workers:
    """Makes batches of one split, as `loading` says."""

    def __init__(self, sequences: Gathers, limits: Limits, loading: Loading) -> None:
        self.loading = loading
        self._gather = partial(gather_batch, sequences, limits)
        self._kept: list[WorkerProcess] = []

    def make(self, requests: Iterable[np.ndarray]) -> Generator[Batch]:
        """Yield the batch of each request, in order, until one is not made. What runs ahead has ended when the iterator is closed,
        but for threads that hang.

        Threads take turns, so that order is kept without sorting, and are called when half of what was made is gone.
        """
        loading = self.loading
        makers: Sequence[MakeBatch] = [self._gather] * max(1, loading.workers)
        processes: list[WorkerProcess] = []
        if loading.workers and loading.worker_type == "process":
            processes = self._kept or [WorkerProcess(self._gather) for _ in range(loading.workers)]
            self._kept = processes if loading.persistent else []
            makers = processes
        if loading.pin_memory:
            makers = [partial(make_pinned, make) for make in makers]
        if loading.workers == 0:
            yield from (attempt(makers[0], request) for request in requests)
            return
        lanes = [_Lane(make) for make in makers]
        coming = iter(requests)
        sent = taken = 0
        ahead = len(lanes) * loading.prefetch_factor
        has_failed = False
        try:
            while True:
                if sent - taken <= max(ahead // 2, len(lanes) - 1):
                    for request in islice(coming, ahead - (sent - taken)):
                        lanes[sent % len(lanes)].requests.put(request)
                        sent += 1
                if sent == taken:
                    return
                try:
                    made = lanes[taken % len(lanes)].batches.get(timeout=loading.timeout_seconds)
                except Empty:
                    for lane in lanes:  # left behind: one of them hangs
                        lane.close(seconds=0)
                    lanes = []
                    raise BatchNotMade(
                        f"nothing came for {loading.timeout_seconds:,g} s",
                        "Look whether the disk with the cache answers; where a batch may take so long, raise "
                        "--loader_timeout_seconds",
                    ) from None
                taken += 1
                if isinstance(made, BaseException):
                    raise made
                yield made
        except BatchNotMade:
            has_failed = True
            raise
        finally:
            for lane in lanes:
                lane.is_over = True  # all at once, before the first is waited for
            until = time.monotonic() + CLOSING_SECONDS
            for lane in lanes:
                lane.close(max(0.0, until - time.monotonic()))
            if has_failed or not loading.persistent:
                self._kept = []
                for process in processes:
                    process.end()

    def close(self) -> None:
        """End the worker processes; they start again when needed."""
        for process in self._kept:
            process.end()
        self._kept = []


def make_pinned(make: MakeBatch, sequences_B: np.ndarray) -> Batch:
    """Make a batch and copy its tensors to page-locked memory."""
    batch = make(sequences_B)
    pinned: dict[str, Any] = {
        name: value.pin_memory() for name, value in batch._asdict().items() if isinstance(value, Tensor)
    }
    return batch._replace(**pinned)


def attempt(make: Callable[[np.ndarray], Made], sequences_B: np.ndarray) -> Made:
    """Make something of a request; what may succeed at another try is raised as `BatchNotMade`, anything else as it is."""
    try:
        return make(sequences_B)
    except (BatchNotMade, DataError, SettingsError, StorageError):
        raise
    except Exception as error:  # of any type, as foreign code may gather; it is counted and reported, not swallowed
        if is_out_of_memory(error) or is_out_of_files(error):
            raise
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)  # no traceback gets out of a worker process
        raise BatchNotMade(
            f"{type(error).__name__}: {' '.join(str(error).split())} ({Path(frame.f_code.co_filename).name}:{line})",
            "If it stays so, look whether the disks with the cache and the Parquet files are well, and delete the cache directory: "
            "it is built again from the files",
        ) from error


class _Lane:
    """A thread that makes one batch after the other, or waits for a process that does, so that a worker that hangs can be left.

    Bare queues hand a batch over in half the time of futures, which matters where making it takes no longer than that.
    """

    def __init__(self, make: MakeBatch) -> None:
        self.requests: SimpleQueue[np.ndarray | None] = SimpleQueue()
        """None: there are no more."""
        self.batches: SimpleQueue[Batch | BaseException] = SimpleQueue()
        """An error is handed over like a batch, for the consumer to raise."""
        self._make = make
        self.is_over = False
        """Whether the thread ends after the batch that it is at, whatever still waits."""
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()
        # A command that ends in mid-epoch: torch aborts the process, exit code and all, if a thread is inside it by then.
        atexit.register(self.close)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Leave the requests that still wait, and end the thread; one that hangs is a daemon, and its batch is dropped."""
        self.is_over = True
        self.requests.put(None)
        self._thread.join(seconds)
        atexit.unregister(self.close)

    def _work(self) -> None:
        while (request := self.requests.get()) is not None and not self.is_over:
            try:
                self.batches.put(attempt(self._make, request))
            except BaseException as error:  # of any type: the consumer would wait for the batch without end
                self.batches.put(error)


class WorkerProcess:
    """A process that makes batches, one after the other, until `end` is called, this object goes, or the program ends.

    Not torch's DataLoader, which cannot say at which batch a worker died, raises the death from a signal handler in the midst of a
    training step (or, in a thread, notices it after 5 s), and waits 5 s for each worker that hangs. Workers share nothing with each
    other, so one that is killed in the midst of anything leaves the others whole.
    """

    def __init__(self, make: MakeBatch) -> None:
        context: Any = multiprocessing.get_context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(make, theirs, self._connection), name="batches", daemon=True
        )
        self._one_at_a_time = threading.Lock()
        # Before the start, so that nothing comes between. At the interpreter's exit it runs before multiprocessing waits for its
        # children, which do not listen to signals.
        self.end = Finalize(self, _kill, (self._process,), exitpriority=0)
        self._process.start()
        theirs.close()  # now the worker alone holds it: its death ends the pipe

    def __call__(self, sequences_B: np.ndarray) -> Batch:
        """Wait for the batch of a request."""
        try:
            with self._one_at_a_time:
                self._connection.send(sequences_B)
                made: Batch | Exception = self._connection.recv()
        except (EOFError, OSError) as error:
            if is_out_of_files(error):
                raise
            self._process.join(END_SECONDS)
            code = self._process.exitcode
            if code is None:
                end = "does not answer"
            elif code < 0:
                names = {known.value: known.name for known in signal.Signals}
                end = f"was killed by {names.get(-code, f'signal {-code}')}"
            else:
                end = f"ended with code {code}"
            raise BatchNotMade(
                f"worker process {self._process.pid} {end}",
                "Most often main memory ran out: lower --num_workers or --prefetch_factor, or take --worker_type thread, which "
                "shares the memory of the run",
            ) from error
        if isinstance(made, Exception):
            raise made
        return made


def _kill(process: Any) -> None:
    if process.pid is not None:
        process.kill()
        process.join(END_SECONDS)


def _show_unless_of_system(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Show an error of the thread that hands out shared memory, unless a pipe broke or found no room: the parent says that."""
    if not isinstance(error, OSError):
        sys.__excepthook__(kind, error, place)


def _serve(make: MakeBatch, connection: Connection, parents_end: Connection) -> None:
    """Answer each request with its batch in shared memory, or with the error, which the parent raises."""
    # Signals reach a whole process group, or all of a job: the parent finishes its step, then ends its workers.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parents_end.close()  # a copy; with it, the pipe would not end with the parent
    torch.set_num_threads(1)
    sys.excepthook = _show_unless_of_system
    parent, handle = os.getppid(), multiprocessing.parent_process()

    def end_with_parent() -> None:
        """A thread, as the main one may hang. The parent's number changes for a forked process, its handle for others."""
        while os.getppid() == parent and handle is not None and handle.is_alive():
            time.sleep(LOOK_SECONDS)
        os._exit(0)

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        try:
            reply = attempt(lambda sequences_B: ForkingPickler.dumps(make(sequences_B)), request)
        except Exception as error:  # sorted by `attempt`; the parent raises it
            reply = ForkingPickler.dumps(error)
        connection.send_bytes(reply)
