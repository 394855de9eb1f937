"""A run directory belongs to one run at a time: whoever comes second is refused.

The lock is the operating system's and goes with its process, however that ends. It is not inherited: a loader process that outlives
a killed run for some seconds does not keep the run from going on.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seqvae.errors import StorageError
from seqvae.exit_codes import UsageError

LOCK = ".lock"


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory, or say who does. The file goes with the lock, so that a directory that was made in vain is empty."""
    path = directory / LOCK
    descriptor = _locked(path)
    try:
        with suppress(OSError):  # who holds it is only for a message
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(
                f"{path.parent}: cannot be written ({error.strerror}). Choose another --output_dir."
            ) from error
        if not _try_lock(descriptor):
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise UsageError(
                f"{path.parent} is in use by another run{f' (process {holder})' if holder else ''}: wait until it ends, or choose "
                "another --run_name"
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # who held it before has removed it meanwhile


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # beyond what is written, which others may then read
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True  # a file system without locks: then nobody is refused, and nothing breaks
        return True
