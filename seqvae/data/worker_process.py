"""A process that makes batches for its parent, one after the other.

In: requests, over a pipe of its own. Out: batches in shared memory, or the error, for the parent to raise. Workers share nothing
with each other, so one that is killed in the midst of anything leaves the others whole; it holds nothing that is worth a farewell.
"""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch

from seqvae.data.batches import Batch
from seqvae.data.making import Maker, NotMade, attempt

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
