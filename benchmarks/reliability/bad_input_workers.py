"""Cases in long-lived processes, because starting one takes longer than a case: killed when a case hangs, replaced when dead.

In: a seed and the numbers of cases. Out: their outcomes, in whatever order they come.
"""

import importlib
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from benchmarks.reliability.bad_input_runs import FAILED, Outcome, run_case

MOST_MEMORY = 12 << 30
"""Address space of a worker: who asks for terabytes is refused, and the machine lives on."""
LOST = "hung or died"
"""In place of a case's family, which nobody knows any more."""


def run_in_workers(seed: int, numbers: Sequence[int], workers: int, limit: float) -> Iterator[Outcome]:
    """The outcome of each case, as they come; of one that hangs or kills its process, that."""
    left = list(reversed(numbers))
    running = [_start(seed, left.pop()) for _ in range(min(workers, len(left)))]
    try:
        while running:
            wait([one.pipe for one in running], timeout=min(1.0, limit))
            for at, one in reversed(list(enumerate(running))):
                outcome = _result(one, limit)
                if outcome is None:
                    continue
                yield outcome
                if left and outcome.family != LOST:
                    running[at] = one.go_on_with(left.pop())
                    continue
                one.stop()
                running[at : at + 1] = [_start(seed, left.pop())] if left else []
    finally:
        for one in running:
            one.stop()


class Worker(NamedTuple):
    """A process, the case it is at, and since when."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    number: int
    since: float

    def go_on_with(self, number: int) -> "Worker":
        self.pipe.send(number)
        return self._replace(number=number, since=time.monotonic())

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _start(seed: int, number: int) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(seed, theirs), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, number, time.monotonic()).go_on_with(number)


def _result(worker: Worker, limit: float) -> Outcome | None:
    if worker.pipe.poll():
        try:
            outcome: Outcome = worker.pipe.recv()
            return outcome
        except EOFError:
            worker.process.join()
            return _lost(worker.number, f"the process died with {worker.process.exitcode}")
    if time.monotonic() - worker.since > limit:
        return _lost(worker.number, f"the process hung for {limit:g} s")
    return None


def _lost(number: int, why: str) -> Outcome:
    return Outcome(number, LOST, "", "", {"refuse": FAILED}, [why])


def _work(seed: int, pipe: Connection) -> None:
    import resource

    import torch

    importlib.import_module(
        "seqvae.training.fit"
    )  # Lightning keeps the outputs that it was imported with: not those of a case
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    while True:
        number = pipe.recv()
        with tempfile.TemporaryDirectory() as scratch:
            pipe.send(run_case(seed, number, Path(scratch)))
