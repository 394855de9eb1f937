"""A process that trains the batches it is told to, one try after another, and says what each needed at most.

    with Trials(train_what_is_asked, settings) as trials:
        trials.peak_bytes(Try(sequences_B, tokens_per_batch))  # None: memory ran out

On a CPU the system kills a process for which there is no memory left: that can only be survived from another one.
"""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from seqvae.errors import ExitCode

PATIENCE_SECONDS = 5.0
"""For a process to end by itself."""


class Try(NamedTuple):
    """Train this batch: forward, backward, optimizer step."""

    sequences_B: np.ndarray
    tokens_per_batch: int
    """The budget that it was cut by; with --pad_grid it says how many rows the batch has."""
    after_trimming: bool = True
    """What the heap kept of earlier tries is given back first, so that it does not count for this one."""


class Ready(NamedTuple):
    """A network that has made its first steps, so that the optimizer has all its moments."""

    can_reset: bool
    """Whether one process can measure several tries."""
    least_sequences: int
    """That the network needs in a batch."""
    device_bytes: int | None
    """What a GPU has left for this process; None: it is the CPU that computes."""


class Trials:
    """Starts the process when it is first needed, and anew where it died."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        """`work` gets one end of a pipe, a directory for whatever it writes, and the arguments. It sends a `Ready`, then bytes for
        each `Try`, or the exception it ends with. A module has to have it, since the new process imports it from there."""
        self._work, self._arguments = work, arguments
        self._context = multiprocessing.get_context("spawn")  # a process that begins as small as a training does
        self._directory = tempfile.TemporaryDirectory(prefix="seqvae-find-batch-")
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._ready: Ready | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()
        self._directory.cleanup()

    def ready(self) -> Ready | None:
        """None: there is not even memory for the network."""
        if self._process is None:
            self._connection, theirs = self._context.Pipe()
            arguments = (theirs, self._directory.name, *self._arguments)
            self._process = self._context.Process(target=self._work, args=arguments, daemon=True)
            self._process.start()
            theirs.close()  # the other process alone holds it, so that its end is seen here
            self._ready = self._answer()
        return self._ready

    def peak_bytes(self, wanted: Try) -> int | None:
        """None: memory ran out."""
        ready = self.ready()
        if ready is None or self._connection is None:
            return None
        try:
            self._connection.send(wanted)
        except BrokenPipeError:
            self._death()
            return None
        peak: int | None = self._answer()
        if not ready.can_reset:
            self._stop()
        return peak

    def _answer(self) -> Any:
        assert self._connection is not None
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._death()
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _death(self) -> None:
        """That of a process which found no memory is what was to be found out; any other is an error."""
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode
        self._stop()
        if code not in (ExitCode.OUT_OF_MEMORY, -signal.SIGKILL):
            raise RuntimeError(
                f"the process that tries batches ended with exit code {code}; its last words stand above"
            )

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(PATIENCE_SECONDS)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._connection = self._process = None
