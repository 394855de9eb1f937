"""The epochs' plans and a split -> the batches of one process, epoch after epoch, from any position on.

All processes see one plan and take turns: in each round, process r takes the r-th of the next `world` batches. Where the
batches do not come out even, the last round is filled with empty ones (one sequence of length 0), since every process has to
take part in every step. A position is (epoch, batches delivered by all processes), so a run can go on with another number
of processes.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from seqvae.config.data import LoadingSettings
from seqvae.data.batch import Batch, Gathers
from seqvae.data.batching import Plan
from seqvae.data.dataset import UNREADABLE
from seqvae.errors import DataError, SettingsError, StorageError, is_out_of_memory
from seqvae.text import some

# One batch for one request, or why there is none: the same in process, in a thread and in a worker process.
#
# In: a split, and the sequences asked for. Out: a padded batch. What would come again is raised as it is; what may be gone at the
# next try comes as `NotMade`.

Made = TypeVar("Made")
AFTER_AN_ERROR = (
    "If it stays so, look whether the disks with the cache and the Parquet files are well, and delete the cache directory: it is "
    "built anew from the files"
)


class NotMade(Exception):
    """A batch that did not come about, for a reason that may be gone when the workers have started anew."""

    def __init__(self, reason: str, advice: str) -> None:
        """`advice`: what to do if it stays so; without a full stop, as is the reason."""
        super().__init__(reason, advice)
        self.reason, self.advice = reason, advice


class NothingCame(NotMade):
    """Whoever makes the batch hangs."""


class Maker:
    """Makes the batches of a split; what a worker process is sent."""

    def __init__(self, sequences: Gathers, pad_to: int | None) -> None:
        self._sequences = sequences
        self._pad_to = pad_to

    def __call__(self, sequences_B: np.ndarray) -> Batch:
        return self._sequences.gather(sequences_B, self._pad_to)


def attempt(make: Callable[[np.ndarray], Made], sequences_B: np.ndarray) -> Made:
    """Make something of a request; whatever goes wrong is either final or `NotMade`."""
    try:
        return make(sequences_B)
    except (NotMade, DataError, SettingsError, StorageError):
        raise
    except Exception as error:  # of any type, as anybody's `gather` may run here; it is counted and told, not swallowed
        if is_out_of_memory(error):
            raise
        raise NotMade(_in_words(error), AFTER_AN_ERROR) from error


def pin(batch: Batch) -> Batch:
    """Copy a batch's tensors to page-locked memory."""
    pinned: dict[str, Any] = {
        name: value.pin_memory() for name, value in batch._asdict().items() if isinstance(value, Tensor)
    }
    return batch._replace(**pinned)


def _in_words(error: Exception) -> str:
    """With the line that raised it: the traceback does not get out of a worker process, nor into the message that ends a run."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said} ({Path(frame.f_code.co_filename).name}:{line})"


# Index arrays -> padded batches, in the order asked for: in process, by threads or by processes, always the same batches.
#
# Threads are the default: numpy's copies release the GIL, and what a thread makes need not be sent. Processes cost more
# than they bring once the data lie in the cache; they are there for those who add heavy work of their own. Either way threads of
# this process wait for the batches, so that a worker that hangs can be left. `restarts.py` decides what comes then.

THREAD_AHEAD = 8
"""Batches of a thread. Half of them are made in one go: a thread that is called between two steps finds the caches cold, and then
takes 0.25 ms for a batch of 0.03 ms (`python -m benchmarks.speed.step --part loop`)."""
CLOSING_SECONDS = 10.0
"""A thread that has not finished its batch by then is left behind."""


class Loading(NamedTuple):
    """Who makes the batches."""

    worker_type: str
    workers: int
    """0: batches are made when asked for."""
    prefetch_factor: int
    """Batches that each worker keeps ready at most."""
    persistent: bool
    pin_memory: bool
    timeout_seconds: float | None
    """How long to wait for a batch; None: for ever."""
    hint: str = ""
    """What is odd about the request, for the header."""


def resolve_loading(settings: LoadingSettings) -> Loading:
    """Fill in what the user left open."""
    workers = 1 if settings.num_workers == "auto" else settings.num_workers
    cores = os.cpu_count() or 1
    hint = f"--num_workers {workers}: more than this machine's {cores} cores brings nothing" if workers > cores else ""
    return Loading(
        worker_type=settings.worker_type,
        workers=workers,
        prefetch_factor=settings.prefetch_factor
        or (THREAD_AHEAD if settings.worker_type == "thread" else max(2, workers)),
        persistent=settings.persistent_workers,
        pin_memory=settings.pin_memory and torch.cuda.is_available(),
        timeout_seconds=settings.loader_timeout_seconds or None,
        hint=hint,
    )


class Workers:
    """Makes batches of one split, as `loading` says."""

    def __init__(
        self, sequences: Gathers, loading: Loading, pad_to: int | None = None, start_method: str | None = None
    ) -> None:
        self.loading = loading
        self._maker = Maker(sequences, pad_to)
        self._start_method = start_method
        self._kept: list[WorkerProcess] = []

    def make(self, requests: Iterable[np.ndarray]) -> Generator[Batch]:
        """Yield the batch of each request, in order, until one is `NotMade`. Whatever runs ahead has ended when the iterator is
        closed, but for threads that hang."""
        if self.loading.workers == 0:
            make = self._pinned(self._maker)
            return (attempt(make, request) for request in requests)
        if self.loading.worker_type == "thread":
            return self._take_turns([self._maker] * self.loading.workers, requests)
        return self._make_in_processes(requests)

    def close(self) -> None:
        """End the worker processes that were kept; they start again when needed."""
        for process in self._kept:
            process.end()
        self._kept = []

    def _make_in_processes(self, requests: Iterable[np.ndarray]) -> Generator[Batch]:
        processes = self._kept or [WorkerProcess(self._maker, self._start_method) for _ in range(self.loading.workers)]
        self._kept = processes if self.loading.persistent else []
        is_whole = True
        try:
            yield from self._take_turns(processes, requests)
        except NotMade:
            is_whole = False
            raise
        finally:
            if not (is_whole and self.loading.persistent):
                self.close()
                for process in processes:
                    process.end()

    def _take_turns(
        self, makers: Iterable[Callable[[np.ndarray], Batch]], requests: Iterable[np.ndarray]
    ) -> Generator[Batch]:
        """Threads take turns, so that order is kept without anybody sorting, and are called when half of what was made is gone.
        Bare queues hand a batch over in half the time of futures, which matters where making it takes no longer than that."""
        lanes = [_Lane(self._pinned(make)) for make in makers]
        coming = iter(requests)
        given = taken = 0
        ahead = len(lanes) * self.loading.prefetch_factor
        try:
            while True:
                if given - taken <= max(ahead // 2, len(lanes) - 1):
                    for request in islice(coming, ahead - (given - taken)):
                        lanes[given % len(lanes)].requests.put(request)
                        given += 1
                if given == taken:
                    return
                made = lanes[taken % len(lanes)].take(self.loading.timeout_seconds)
                taken += 1
                if isinstance(made, BaseException):
                    raise made
                yield made
        except NothingCame:
            for lane in lanes:
                lane.leave()
            lanes.clear()
            raise
        finally:
            until = time.monotonic() + CLOSING_SECONDS
            for lane in lanes:
                lane.stop()
            for lane in lanes:
                lane.close(max(0.0, until - time.monotonic()))

    def _pinned(self, make: Callable[[np.ndarray], Batch]) -> Callable[[np.ndarray], Batch]:
        return (lambda sequences_B: pin(make(sequences_B))) if self.loading.pin_memory else make


class _Lane:
    """A thread that makes one batch after the other, or waits for a process that does."""

    def __init__(self, make: Callable[[np.ndarray], Batch]) -> None:
        self.requests: SimpleQueue[np.ndarray | None] = SimpleQueue()
        """None: it is over."""
        self._batches: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._make = make
        self._over = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()
        # A command that ends in mid-epoch: torch aborts the process, exit code and all, if a thread is inside it by then.
        atexit.register(self.close)

    def take(self, timeout_seconds: float | None) -> Batch | BaseException:
        """The next batch; an error is handed over like one, for the consumer to raise."""
        try:
            return self._batches.get(timeout=timeout_seconds)
        except Empty:
            raise NothingCame(
                f"nothing came for {timeout_seconds:,g} s",
                "Look whether the disk with the cache answers; where a batch may take so long, raise --loader_timeout_seconds",
            ) from None

    def stop(self) -> None:
        """Let the thread end after the batch that it is at."""
        self._over = True
        self.requests.put(None)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Leave the requests that still wait, and end the thread."""
        self.stop()
        self._thread.join(seconds)
        atexit.unregister(self.close)

    def leave(self) -> None:
        """Wait for nothing: the thread is a daemon, and should it make its batch after all, that reaches nobody."""
        self.stop()
        atexit.unregister(self.close)

    def _work(self) -> None:
        while (request := self.requests.get()) is not None and not self._over:
            try:
                self._batches.put(attempt(self._make, request))
            except BaseException as error:  # whatever it is: who waits for the batch would wait for ever
                self._batches.put(error)


# All batches of an epoch in spite of trouble: when one is not made, the workers are thrown away and begin anew at that very batch.
#
# In: workers, and the requests by number. Out: every batch once, in order, the same as without trouble; one line for each restart;
# after three failures at one batch, a DataError that names the sequences, their files and their row groups.

log = logging.getLogger(__name__)
TRIES = 3
"""At one and the same batch: what fails so often will fail again."""
NAMING_SECONDS = 10.0
"""Where sequences came from stands on disks, and a disk that hangs may be why it is asked for."""


def warn(line: str) -> None:
    log.warning("%s", line)


class Restarts:
    """Stands between a loader and its workers."""

    def __init__(
        self, workers: Workers, place_of: Callable[[np.ndarray], str], on_trouble: Callable[[str], None] = warn
    ) -> None:
        """`place_of` says which sequences a request asks for and where they came from, `on_trouble` is told of each restart."""
        self._workers, self._place_of, self._on_trouble = workers, place_of, on_trouble

    def make(
        self, request: Callable[[int], np.ndarray], numbers: range, name: Callable[[int], str]
    ) -> Generator[Batch]:
        """Yield the batch of each number; `name` is what messages call it."""
        done = failures = 0
        while True:
            try:
                with closing(self._workers.make(request(number) for number in numbers[done:])) as batches:
                    for batch in batches:
                        done, failures = done + 1, 0
                        yield batch
                return
            except NotMade as trouble:
                failures += 1
                self._tell_or_give_up(trouble, failures, name(numbers[done]), request(numbers[done]))

    def _tell_or_give_up(self, trouble: NotMade, failures: int, name: str, sequences_B: np.ndarray) -> None:
        place = _within(NAMING_SECONDS, lambda: self._place_of(sequences_B))
        if failures == TRIES:
            raise DataError(
                f"{name} could not be made, {TRIES} times in a row: {trouble.reason}. It holds {place}. {trouble.advice}."
            ) from trouble
        self._on_trouble(
            f"{name} was not made: {trouble.reason}. It holds {place}. The loader starts anew from this batch "
            f"(try {failures + 1} of {TRIES})"
        )


def _within(seconds: float, say: Callable[[], str]) -> str:
    """What `say` returns, if it does so in time."""
    said: SimpleQueue[str] = SimpleQueue()

    def look_up() -> None:
        try:
            said.put(say())
        except (*UNREADABLE, ValueError, LookupError) as error:  # what lies there may be damaged, too
            said.put(f"sequences that cannot be looked up ({error})")

    threading.Thread(target=look_up, name="place", daemon=True).start()
    try:
        return said.get(timeout=seconds)
    except Empty:
        return f"sequences that could not be looked up within {seconds:g} s"


SHOWN = 5
NO_SEQUENCES = np.empty(0, dtype=np.int64)
"""Asks for an empty batch."""


class BatchLoader:
    """An iterable over one process's batches of an epoch.

    With `reshuffled`, it is its own `sampler`: that is how Lightning comes to call `set_epoch`. Nothing runs before the first
    batch is asked for, as Lightning also makes iterators that it never uses. A batch's position is the same whatever the
    number of processes; that of an empty batch runs on into the next epoch's, where it does no harm.
    """

    def __init__(
        self,
        sequences: Gathers,
        plan_of_epoch: Callable[[int], Plan],
        batches: int,
        loading: Loading,
        *,
        pad_to: int | None = None,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
        reshuffled: bool = False,
        start_method: str | None = None,
        place_of: Callable[[np.ndarray], str] | None = None,
        on_trouble: Callable[[str], None] = warn,
    ) -> None:
        """Every epoch's plan has `batches` batches; `accumulate` rounds make one optimizer step.

        `place_of` says where sequences came from; `on_trouble` gets a line each time that the workers start anew.
        """
        self.batches, self.rank, self.world, self.accumulate = batches, rank, world, accumulate
        self.epoch = 0
        self.delivered = 0
        self._start = 0
        self._lengths_N = sequences.lengths_N
        self._plan_of_epoch = plan_of_epoch
        self._workers = Workers(sequences, loading, pad_to, start_method)
        self._restarts = Restarts(self._workers, place_of or _numbers, on_trouble)
        if reshuffled:  # Lightning asks an evaluation loader that has a sampler for more than we are
            self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; nothing changes where it is the present one, so that a resumed position holds."""
        if epoch != self.epoch:
            self.epoch, self.delivered, self._start = epoch, 0, 0

    def __len__(self) -> int:
        """Rounds of an epoch."""
        return rounds(self.batches, self.world)

    @property
    def rounds_done(self) -> int:
        """Rounds of the present epoch that have gone by, as many as leave enough for the rest."""
        return len(self) - rounds(self.batches - self.delivered, self.world)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start, self._start = self.epoch, self._start, 0
        self.delivered = start
        plan = self._plan_of_epoch(epoch)
        turns = range(self.rounds_done, len(self))
        origin = start - turns.start * self.world  # where the epoch's round 0 began, seen from here
        numbers = range(start + self.rank, start + self.rank + len(turns) * self.world, self.world)
        step_tokens = 0
        named = partial(_named, epoch * self.batches)
        with closing(self._restarts.make(partial(self._request, plan), numbers, named)) as batches:
            for turn, number in zip(turns, numbers, strict=True):
                if turn == turns.start or turn % self.accumulate == 0:
                    step_tokens = self._step_tokens(plan, origin, turn)
                position = epoch * self.batches + number
                batch = _next_named(batches, position)
                self.delivered = min(self.batches, number - self.rank + self.world)
                yield batch._replace(step_tokens=step_tokens, position=position)

    def _request(self, plan: Plan, number: int) -> np.ndarray:
        return plan.batch(number) if number < self.batches else NO_SEQUENCES

    def _step_tokens(self, plan: Plan, origin: int, turn: int) -> int:
        """Real steps of all batches, of all processes, in the optimizer step that this round belongs to."""
        first = origin + turn // self.accumulate * self.accumulate * self.world
        numbers = range(max(0, first), min(self.batches, first + self.accumulate * self.world))
        return sum(int(self._lengths_N[plan.batch(number)].sum()) for number in numbers)

    def state_dict(self) -> dict[str, Any]:
        """Batches that are prepared but not yet handed out do not count as delivered."""
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


def _next_named(batches: Iterator[Batch], position: int) -> Batch:
    """Return the next batch; an error says which one it was."""
    try:
        return next(batches)
    except BaseException as error:
        error.add_note(f"while making {_named(0, position)}")
        raise


def _named(first: int, number: int) -> str:
    return f"batch {first + number:,} (counted through all epochs)"


def _numbers(sequences_B: np.ndarray) -> str:
    return f"sequences {some([str(number) for number in sequences_B], SHOWN)} by number"


# A process that makes batches for its parent, one after the other.
#
# In: requests, over a pipe of its own. Out: batches in shared memory, or the error, for the parent to raise. Workers share nothing
# with each other, so one that is killed in the midst of anything leaves the others whole; it holds nothing that is worth a
# farewell.

AFTER_A_DEATH = (
    "Most often main memory ran out: lower --num_workers or --prefetch_factor, or take --worker_type thread, which shares the "
    "memory of the run"
)
END_SECONDS = 5.0
"""A process that the system cannot kill within this, as it waits for a disk, is left to the system."""
LOOK_SECONDS = 1.0
"""How often a worker looks whether its parent is still there."""


class WorkerProcess:
    """Lives until `end` is called, this object goes, or the program ends, however it ends."""

    def __init__(self, make: Maker, start_method: str | None) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(make, theirs, self._connection), name="batches", daemon=True
        )
        self._one_at_a_time = threading.Lock()
        # Before the start, so that nothing comes between. At the interpreter's exit it runs before multiprocessing waits for its
        # children, which do not listen to signals.
        self.end = Finalize(self, _end, (self._process,), exitpriority=0)
        self._process.start()
        theirs.close()  # now the worker alone holds it: when it dies, whoever waits for it is told at once

    def __call__(self, sequences_B: np.ndarray) -> Batch:
        """Wait for the batch of this request."""
        with self._one_at_a_time:
            try:
                self._connection.send(sequences_B)
                made: Batch | Exception = self._connection.recv()
            except (EOFError, OSError) as error:
                raise NotMade(self._how_it_ended(), AFTER_A_DEATH) from error
        if isinstance(made, Exception):
            raise made
        return made

    def _how_it_ended(self) -> str:
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        if code is None:
            return f"worker process {self._process.pid} does not answer"
        names = {known.value: known.name for known in signal.Signals}
        end = f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with code {code}"
        return f"worker process {self._process.pid} {end}"


def _end(process: Any) -> None:
    if process.pid is not None:
        process.kill()
        process.join(END_SECONDS)


def _serve(make: Maker, connection: Connection, parents_end: Connection) -> None:
    """What the worker process does."""
    # Ctrl-C and SIGTERM reach a whole process group: the parent finishes its step, then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parents_end.close()  # a copy; with it, the pipe would not end with the parent
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()

    def make_and_pack(sequences_B: np.ndarray) -> memoryview:
        return ForkingPickler.dumps(make(sequences_B))

    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        try:
            reply = attempt(make_and_pack, request)
        except Exception as error:  # sorted by `attempt`; the parent raises it
            reply = ForkingPickler.dumps(error)
        connection.send_bytes(reply)


def _end_with_parent(parent: int) -> None:
    """A thread, as the main one may hang. The parent's number changes for a forked process, its handle for others."""
    handle = multiprocessing.parent_process()
    while os.getppid() == parent and handle is not None and handle.is_alive():
        time.sleep(LOOK_SECONDS)
    os._exit(0)
