"""Index arrays -> padded batches, in the order asked for: in process, by threads or by processes, always the same batches.

Threads are the default: numpy's copies release the GIL, and what a thread makes need not be sent. Processes cost more
than they bring once the data lie in the cache; they are there for those who add heavy work of their own.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from multiprocessing.util import Finalize
from queue import SimpleQueue
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from sequences.batches import Batch
from sequences.settings import LoadingSettings

THREAD_AHEAD = 8
"""Batches of a thread. Half of them are made in one go: a thread that is called between two steps finds the caches cold, and then
takes 0.25 ms for a batch of 0.03 ms (`python -m benchmarks.step --part loop`)."""


class Gathers(Protocol):
    """What is needed of a `SequenceSet`."""

    @property
    def lengths_N(self) -> np.ndarray: ...

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch: ...


class Loading(NamedTuple):
    """Who makes the batches."""

    worker_type: str
    workers: int
    """0: batches are made when asked for."""
    prefetch_factor: int
    """Batches that each worker keeps ready at most."""
    persistent: bool
    pin_memory: bool
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
        hint=hint,
    )


class Workers:
    """Makes batches of one split, as `loading` says."""

    def __init__(
        self, sequences: Gathers, loading: Loading, pad_to: int | None = None, start_method: str | None = None
    ) -> None:
        self.loading = loading
        self._maker = _Maker(sequences, pad_to)
        self._start_method = start_method
        self._processes: _Processes | None = None

    def make(self, requests: Iterable[np.ndarray]) -> Generator[Batch]:
        """Yield the batch of each request, in order. Whatever runs ahead has ended when the iterator is closed."""
        if self.loading.workers == 0:
            return (self._make_here(request) for request in requests)
        if self.loading.worker_type == "thread":
            return _make_in_threads(self._make_here, requests, self.loading)
        if self._processes is None:
            self._processes = _Processes(self._maker, self.loading, self._start_method)
        return self._processes.make(requests)

    def close(self) -> None:
        """End the worker processes that were kept; they start again when needed."""
        self._processes = None

    def _make_here(self, sequences_B: np.ndarray) -> Batch:
        batch = self._maker[sequences_B]
        return pin(batch) if self.loading.pin_memory else batch


def pin(batch: Batch) -> Batch:
    """Copy a batch's tensors to page-locked memory."""
    pinned: dict[str, Any] = {
        name: value.pin_memory() for name, value in batch._asdict().items() if isinstance(value, Tensor)
    }
    return batch._replace(**pinned)


def _make_in_threads(
    make: Callable[[np.ndarray], Batch], requests: Iterable[np.ndarray], loading: Loading
) -> Generator[Batch]:
    """Threads take turns, so that order is kept without anybody sorting, and are called when half of what was made is gone. Bare
    queues hand a batch over in half the time of futures, which matters where making it takes no longer than that."""
    lanes = [_Lane(make) for _ in range(loading.workers)]
    coming = iter(requests)
    given = taken = 0
    ahead = len(lanes) * loading.prefetch_factor
    try:
        while True:
            if given - taken <= max(ahead // 2, len(lanes) - 1):
                for request in islice(coming, ahead - (given - taken)):
                    lanes[given % len(lanes)].requests.put(request)
                    given += 1
            if given == taken:
                return
            made = lanes[taken % len(lanes)].batches.get()
            taken += 1
            if isinstance(made, BaseException):
                raise made
            yield made
    finally:
        for lane in lanes:
            lane.close()


class _Lane:
    """A thread that makes one batch after the other."""

    def __init__(self, make: Callable[[np.ndarray], Batch]) -> None:
        self.requests: SimpleQueue[np.ndarray | None] = SimpleQueue()
        """None: it is over."""
        self.batches: SimpleQueue[Batch | BaseException] = SimpleQueue()
        """An error is handed over like a batch, for the consumer to raise."""
        self._make = make
        self._over = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()
        # A command that ends in mid-epoch: torch aborts the process, exit code and all, if a thread is inside it by then.
        atexit.register(self.close)

    def close(self) -> None:
        """Leave the requests that still wait, and end the thread."""
        self._over = True
        self.requests.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    def _work(self) -> None:
        while (request := self.requests.get()) is not None and not self._over:
            try:
                self.batches.put(self._make(request))
            except BaseException as error:  # whatever it is: who waits for the batch would wait for ever
                self.batches.put(error)


class _Maker(Dataset[Batch]):
    """A map-style dataset whose index is a whole batch; what a worker process is sent."""

    def __init__(self, sequences: Gathers, pad_to: int | None) -> None:
        self._sequences = sequences
        self._pad_to = pad_to

    def __getitem__(self, sequences_B: np.ndarray) -> Batch:
        return self._sequences.gather(sequences_B, self._pad_to)


class _Requests(Sampler[np.ndarray]):
    """A sampler that passes on whatever it is given for the next epoch."""

    def __init__(self) -> None:
        self.coming: Iterable[np.ndarray] = ()

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.coming)


class _Processes:
    """torch's DataLoader, fed with our own order."""

    def __init__(self, maker: _Maker, loading: Loading, start_method: str | None) -> None:
        self._requests = _Requests()
        over = multiprocessing.get_context(start_method).RawValue(ctypes.c_bool, False)
        # Runs when this object goes and, at the interpreter's exit, before multiprocessing terminates its children.
        Finalize(self, _declare_over, (over,), exitpriority=0)
        with warnings.catch_warnings():
            # The header already says when there are more workers than cores.
            warnings.filterwarnings("ignore", message="This DataLoader will create .* worker processes")
            self._loader: DataLoader[Batch] = DataLoader(
                maker,
                batch_size=None,
                sampler=self._requests,
                num_workers=loading.workers,
                prefetch_factor=loading.prefetch_factor,
                persistent_workers=loading.persistent,
                pin_memory=loading.pin_memory,
                collate_fn=_as_it_is,
                worker_init_fn=_LeaveSignalsToParent(over),
                multiprocessing_context=start_method,
                generator=torch.Generator(),  # the workers' seeds shall not come out of the run's own random numbers
            )

    def make(self, requests: Iterable[np.ndarray]) -> Generator[Batch]:
        self._requests.coming = requests
        yield from self._loader


def _as_it_is(batch: Any) -> Any:
    return batch


def _declare_over(over: Any) -> None:
    over.value = True


class _LeaveSignalsToParent:
    """Ctrl-C and SIGTERM reach a whole process group: the parent finishes its step, then ends the workers.

    It does so by a message, or by SIGTERM where the message got lost; so SIGTERM counts once the parent said that it is over.
    """

    def __init__(self, over: Any) -> None:
        self._over = over

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._exit_if_over)

    def _exit_if_over(self, number: int, frame: FrameType | None) -> None:
        if self._over.value:
            os._exit(0)
