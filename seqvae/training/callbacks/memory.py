"""Memory on a CPU: flat over thousands of batches of different shapes, and not fetched again in each of them.

Each shape leaves holes of other sizes in the C heap, which glibc keeps: in 600 steps of random lengths a small network grew from
1.0 to 1.3 GB, and still grew. What is free is given back; and --pad_grid keeps the shapes few, for each of which kernels are kept.
But it is given back now and then, not in every step: glibc on its own returns the end of the heap whenever enough of it is free,
and the next step gets it again page by page. That was 1,700 page faults and 2 of 14 ms of a small step.
"""

import ctypes
import math
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import psutil
from lightning import Callback, Trainer

EVERY_N_STEPS, EVERY_SECONDS = 200, 60.0
"""Between two looks; both have to be over. Seconds are those that the process computes. Giving back the holes of 800 MB takes
15 ms, and getting the memory again, page by page, up to 0.3 s: every 200 steps of 13 ms it was a tenth of the time."""
GROWTH = 1.02
"""How much more than at the look after the last time has to be held: less is not worth the pages."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""mallopt's names for: how much at the end of the heap may be free, and from what size on memory is the system's at once."""
KEPT_BYTES, OWN_BYTES = 512 << 20, 32 << 20
"""The first: more than the activations of a small step; what gathers there goes back like all holes. The second is where glibc's
own rule would stop; naming the first ends that rule, at 128 kB."""
OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables of the environment that configure glibc; where the user sets one, it is left as it is."""


def own_bytes() -> int:
    """Return the main memory without mapped files, of which a run holds more the further it gets through its data."""
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


class FlatMemory(Callback):
    """Callback that gives freed memory back, where training is on a CPU and memory is managed by glibc."""

    def __init__(
        self,
        every_n_steps: int = EVERY_N_STEPS,
        every_seconds: float = EVERY_SECONDS,
        now: Callable[[], float] = time.process_time,
        held: Callable[[], int] = own_bytes,
    ) -> None:
        self.every_n_steps, self.every_seconds = every_n_steps, every_seconds
        self._now, self._held = now, held
        self._give_back: Callable[[int], int] | None = None
        self._next_step, self._looked_when = 0, 0.0
        self._level: float | None = -math.inf
        """What was held at the look after pages were given back; None: that look is still to come. At first anything is more."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._give_back = malloc_trim() if trainer.strategy.root_device.type == "cpu" else None
        if self._give_back is not None:
            keep_freed_memory()
        self._next_step, self._looked_when = trainer.global_step + self.every_n_steps, self._now()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._give_back is None or trainer.global_step < self._next_step:
            return
        now = self._now()
        if now < self._looked_when + self.every_seconds:
            return
        self._next_step, self._looked_when = trainer.global_step + self.every_n_steps, now
        if self._level is None:
            self._level = self._held()
        elif self._held() > GROWTH * self._level:
            self._give_back(0)
            self._level = None


def keep_freed_memory() -> None:
    """Let the C heap of this process keep what a step frees for the next one, from now on."""
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in OWN_SETTINGS):
        libc = ctypes.CDLL(None)
        if libc.mallopt(MMAP_THRESHOLD, OWN_BYTES):
            libc.mallopt(TRIM_THRESHOLD, KEPT_BYTES)


def malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function that gives free pages back but for a number of bytes; None: this is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return None
    trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    return trim
