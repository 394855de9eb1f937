"""Memory of a machine and of this process: sizes as people type them, what is left, what was needed at most.

Knows nothing of torch: a command reads a flag through here.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

RESIDENT_NOW = "5"
"""Written to clear_refs: the peak of resident memory is to be what is resident now."""


# --- What is left ------------------------------------------------------------------------------------------------------


class Available(NamedTuple):
    """Memory that more processes could have."""

    bytes: int
    source: str
    """Where the number is from, in words that go on after it."""


def available_memory(root: Path = Path("/")) -> Available:
    """Of this machine or, where that is less, of the control group (a container) that this process lives in."""
    information = root / "proc/meminfo"
    if information.exists():
        machine = Available(_kib(information, "MemAvailable"), "available now")
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        machine = Available(total, "all that this machine has")
    return min(machine, *_left_of_groups(root), key=lambda available: available.bytes)


def _left_of_groups(root: Path) -> list[Available]:
    """Of every group around this process that has a limit. Files in the page cache can be dropped: they are no need of memory."""
    groups = root / "proc/self/cgroup"
    if not groups.exists():
        return [Available(sys.maxsize, "")]
    found = [Available(sys.maxsize, "")]
    for line in groups.read_text(encoding="utf-8").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = mount / name.lstrip("/")
        for group in (inner, *inner.parents):
            if group.is_relative_to(mount) and all((group / file).exists() for file in (*names[:2], "memory.stat")):
                found += _left_of(group, *names)
    return found


def _left_of(group: Path, limit_file: str, used_file: str, droppable: str) -> list[Available]:
    limit = (group / limit_file).read_text(encoding="utf-8").strip()
    if limit == "max":
        return []
    used = int((group / used_file).read_text(encoding="utf-8"))
    statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    left = max(0, int(limit) - used + int(statistics.get(droppable, 0)))
    return [Available(left, "left of the limit of its control group")]


# --- What was needed ---------------------------------------------------------------------------------------------------


class Meter(Protocol):
    """The most memory that something had since the last reset."""

    can_reset: bool
    """Without, a peak is that of the process's whole life."""

    def reset(self) -> None: ...

    def peak_bytes(self) -> int: ...


class ResidentMemory:
    """Of this process, on Linux."""

    can_reset = True

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text(RESIDENT_NOW, encoding="ascii")

    def peak_bytes(self) -> int:
        return _kib(Path("/proc/self/status"), "VmHWM")


class HighWaterMark:
    """Of this process, on any Unix."""

    can_reset = False

    def reset(self) -> None:
        pass

    def peak_bytes(self) -> int:
        import resource  # Windows has none

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_meter() -> Meter:
    """The best there is; some containers do not let a process reset its own peak."""
    meter = ResidentMemory()
    try:
        meter.reset()
    except OSError:
        return HighWaterMark()
    return meter


def _kib(path: Path, name: str) -> int:
    """Bytes, from a line like `VmHWM:   1616 kB`."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")
