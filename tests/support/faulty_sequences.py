"""A split that fails on request, in whatever process, and a loader over it."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from seqvae.config.data import LoadingSettings
from seqvae.data.batch import TokenBatch
from seqvae.data.batching import Limits, cut_batches, plan_epoch
from seqvae.data.loader import BatchLoader, resolve_loading
from tests.support.fake_sequences import FakeSequences, log_normal_lengths

LENGTHS = log_normal_lengths(60, cap=100)
LIMITS = Limits(4, 400, None)
CUT = cut_batches(LENGTHS, LIMITS)
AT = 7
"""The number of the faulty batch."""
NEVER = threading.Event()
WAYS: dict[str, dict[str, Any]] = {
    "in process": {"num_workers": 0},
    "one thread": {},
    "three threads": {"num_workers": 3, "prefetch_factor": 2},
    "kept process": {"worker_type": "process", "num_workers": 1},
    "two kept processes": {"worker_type": "process", "num_workers": 2},
    "two processes": {"worker_type": "process", "num_workers": 2, "persistent_workers": False},
}


def cannot_read() -> None:
    raise OSError("the disk is asleep")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exits() -> None:
    os._exit(9)


def hangs() -> None:
    NEVER.wait()


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Faulty(FakeSequences):
    """A split that fails the first times that one of its faulty batches is gathered, in whatever process."""

    def __init__(self, fault: Callable[[], None], times: int, log: Path, batches: tuple[int, ...] = (AT,)) -> None:
        super().__init__(LENGTHS)
        plan = plan_epoch(CUT, 0, 0)
        self.first_of = {int(plan.batch(number)[0]): number for number in batches}
        self.fault, self.times, self.log = fault, times, log

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> TokenBatch:
        number = self.first_of.get(int(sequences_B[0])) if len(sequences_B) else None
        if number is not None and self.count(number) <= self.times:
            self.fault()
        return super().gather(sequences_B, pad_to)

    def count(self, number: int) -> int:
        """Count the calls in a file, as each process has its own memory."""
        with self.log.with_suffix(f".{number}").open("ab") as file:
            file.write(b".")
            file.flush()
            return file.tell()

    def calls(self, number: int = AT) -> int:
        return self.log.with_suffix(f".{number}").stat().st_size


def make_loader(sequences: FakeSequences, way: str, told: list[str] | None = None, wait: float = 60, **options) -> Any:
    loading = LoadingSettings(**WAYS[way], loader_timeout_seconds=wait)
    return BatchLoader(
        sequences,
        LIMITS,
        lambda epoch: plan_epoch(CUT, 0, epoch),
        CUT.batches,
        resolve_loading(loading),
        on_trouble=([] if told is None else told).append,
        **options,
    )
