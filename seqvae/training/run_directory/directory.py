"""A run directory belongs to one run at a time: whoever comes second is refused.

The lock is the operating system's and goes with its process, however that ends. It is not inherited: a loader process that outlives
a killed run for some seconds does not keep the run from going on.
"""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seqvae.config.run import RunSettings
from seqvae.errors import StorageError, UsageError

LOCK = ".lock"


@contextmanager
def lock_run_directory(directory: Path) -> Iterator[None]:
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


# Whether a run may write where it wants to: asked at its start, before data are read, and not after hours.
#
# In: what --output_dir, --run_name, --resume and --log_dir say. Out: nothing, or a `StorageError` with the first path that
# cannot be written. Nothing is made, and nothing that is there is changed.

CONFIG = "config.yaml"
FOLDERS = ("checkpoints", "plots", "samples", "tensorboard")
FILES = (CONFIG, "environment.json", "run.json", "*.csv", "*.jsonl")
"""What stands in a run's directory and is written to in place."""


def refuse_unwritable(run: RunSettings) -> None:
    """The run's directory, what of the run lies in it already, and --log_dir."""
    directory, flag = _directory_of(run)
    _try(_written_in(directory), directory, flag)
    if run.log_dir is not None and run.logger != "csv":
        log_dir = Path(run.log_dir).expanduser()
        _try(iter([_nearest(log_dir)]), log_dir, "--log_dir")


def _directory_of(run: RunSettings) -> tuple[Path, str]:
    """Where the run will be, as far as that is known without its data, and the flag that leads elsewhere."""
    output_dir = Path(run.output_dir).expanduser()
    if run.run_name is not None:
        return output_dir / run.run_name, "--output_dir"
    if run.resume not in ("auto", "never"):
        given = Path(run.resume).expanduser().absolute()
        own = given if given.is_dir() else given.parent.parent
        if (own / CONFIG).is_file():
            return own, "--run_name"
    return output_dir, "--output_dir"


def _written_in(directory: Path) -> Iterator[Path]:
    if directory.exists() and not directory.is_dir():
        return  # it is no run, which is said where runs are opened
    yield _nearest(directory)
    if not (directory / CONFIG).exists():
        return  # what lies there is not the run's
    yield from (folder for name in FOLDERS if (folder := directory / name).is_dir())
    yield from (path for pattern in FILES for path in sorted(directory.glob(pattern)) if path.is_file())


def _nearest(directory: Path) -> Path:
    """The directory, or that of those above it in which it would be made."""
    absolute = directory.absolute()
    nearest = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return nearest


def _try(paths: Iterator[Path], asked: Path, flag: str) -> None:
    """Only trying tells: a file system may not grant what the permissions say."""
    path = asked
    try:
        for path in paths:
            if path.is_dir():
                tempfile.TemporaryFile(dir=path).close()
            else:
                path.open("rb+").close()
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}). Make it writable, or choose another {flag}."
        ) from error
