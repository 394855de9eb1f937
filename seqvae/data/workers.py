"""Index arrays -> padded batches, in the order asked for: in process, by threads or by processes, always the same batches.

Threads are the default: numpy's copies release the GIL, and what a thread makes need not be sent. Processes cost more
than they bring once the data lie in the cache; they are there for those who add heavy work of their own. Either way threads of
this process wait for the batches, so that a worker that hangs can be left. `restarts.py` decides what comes then.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from seqvae.config.data_settings import LoadingSettings
from seqvae.data.batches import Batch
from seqvae.data.making import Gathers, Maker, NothingCame, NotMade, attempt, pin
from seqvae.data.worker_process import WorkerProcess

THREAD_AHEAD = 8
"""Batches of a thread. Half of them are made in one go: a thread that is called between two steps finds the caches cold, and then
takes 0.25 ms for a batch of 0.03 ms (`python -m benchmarks.step --part loop`)."""
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
