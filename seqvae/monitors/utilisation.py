"""What a machine does while it trains: clocks and gauges in, time and CPU time of a stretch of training and peak memory out.

Nothing here waits for a device.
"""

import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

MACHINE_CPUS = Path("/proc/stat")
OWN_STATUS = Path("/proc/self/status")
GIB = 2**30


class Spent(NamedTuple):
    """Seconds since anywhere, or, of a lap, in it."""

    wall: float
    process: float
    """Of this process's CPU time: all its threads, but no other process that it started."""
    machine_busy: float
    """CPU time of all processes of the machine. This and the next stay 0 where the machine does not tell."""
    machine_total: float
    """With what its cores were idle."""


NOTHING = Spent(0.0, 0.0, 0.0, 0.0)


class Machine:
    """The real one. Tests have their own."""

    def now(self) -> float:
        return time.perf_counter()

    def spent(self) -> Spent:
        busy, total = cpu_times(MACHINE_CPUS.read_text(encoding="ascii")) if MACHINE_CPUS.exists() else (0.0, 0.0)
        return Spent(self.now(), time.process_time(), busy, total)

    def cores(self) -> int:
        """How many this process may use."""
        return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

    def peak_memory_gib(self) -> float | None:
        """The most that this process ever had in memory."""
        if OWN_STATUS.exists():  # getrusage takes over what the parent process once had
            return peak_of(OWN_STATUS.read_text(encoding="utf-8")) / GIB
        if sys.platform == "win32":
            return None
        import resource  # Windows has none

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB

    def gpu_peak_memory_gib(self, device: torch.device) -> float | None:
        return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None

    def gpu_utilisation(self, device: torch.device) -> float | None:
        """The share of the last second, or less, in which the GPU was at work; torch asks a package of the vendor's for it."""
        package = "amdsmi" if torch.version.hip else "pynvml"
        if device.type != "cuda" or find_spec(package) is None:
            return None
        return torch.cuda.utilization(device) / 100


class TrainingTime:
    """Adds up what training spends, lap by lap, and how much of the time it waits for data. Pauses count for nothing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._sum = NOTHING
        self._waited = 0.0
        self._running_since: Spent | None = None
        self._waiting_since: float | None = None
        self._is_paused = False

    def begin(self) -> None:
        """The first time, the clock starts; then it runs already."""
        if self._running_since is None:
            self._running_since = self._machine.spent()
            self._is_paused = False

    def pause(self) -> None:
        if self._running_since is None:
            return
        self.stop_waiting()
        stretch = difference(self._machine.spent(), self._running_since)
        self._sum = Spent(*(before + more for before, more in zip(self._sum, stretch, strict=True)))
        self._running_since, self._is_paused = None, True

    def go_on(self) -> None:
        """After a pause; else it does nothing."""
        if self._is_paused:
            self.begin()

    def wait(self) -> None:
        """From here on training waits, if it has begun."""
        if self._running_since is not None:
            self._waiting_since = self._machine.now()

    def stop_waiting(self) -> None:
        if self._waiting_since is not None:
            self._waited += self._machine.now() - self._waiting_since
            self._waiting_since = None

    def end_lap(self) -> tuple[Spent, float]:
        """What the lap came to, and the seconds of it that were waited. The next one begins."""
        self.pause()
        lap, waited = self._sum, self._waited
        self._sum, self._waited = NOTHING, 0.0
        self.begin()
        return lap, waited


def difference(now: Spent, before: Spent) -> Spent:
    return Spent(*(a - b for a, b in zip(now, before, strict=True)))


def peak_of(status: str) -> int:
    """Bytes, from /proc/self/status.

    >>> peak_of("VmPeak:   900 kB\\nVmHWM:\\t  20 kB\\nVmRSS: 10 kB")
    20480
    """
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def cpu_times(stat: str) -> tuple[float, float]:
    """Busy and total CPU time from the first line of /proc/stat, in its own unit: only their ratio has a meaning.

    user, nice, system, idle, waiting for disks, interrupts, more of them, stolen by other virtual machines; guests, which
    come next, are counted among the users already.

    >>> cpu_times("cpu  70 0 10 15 5 0 0 0 30 0\\ncpu0 1 2 3")
    (80.0, 100.0)
    """
    times = [float(word) for word in stat.splitlines()[0].split()[1:9]]
    return sum(times) - times[3] - times[4], sum(times)
