"""Locks on files, which the operating system releases when their holder ends, however it ends.

`exclusive`: one process at a time. `hold` and `is_held`: whoever uses something says so, whoever would delete it asks.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

RETRY_SECONDS = 0.1


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock at `path`; calls `on_wait` once if somebody else holds it."""
    with path.open("ab") as file:
        waited = False
        while not _try_lock(file):
            if not waited:
                on_wait()
            waited = True
            time.sleep(RETRY_SECONDS)
        yield


def hold(owner: object, path: Path) -> None:
    """Say that the file is in use, as long as `owner` lives; any number of processes may hold it."""
    descriptor = os.open(path, os.O_RDONLY)
    weakref.finalize(owner, os.close, descriptor)
    _try_share(descriptor)


def is_held(path: Path) -> bool:
    """Whether somebody holds the file. On Windows nobody seems to, but what is open cannot be deleted there anyway."""
    with path.open("rb") as file:
        return not _try_lock(file)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: BinaryIO) -> bool:
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _try_share(descriptor: int) -> None:
        """An open file is all that is needed."""

else:
    import fcntl

    def _try_lock(file: BinaryIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _try_share(descriptor: int) -> None:
        with suppress(OSError):  # file systems without locks: then nobody is protected, and nothing breaks
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
