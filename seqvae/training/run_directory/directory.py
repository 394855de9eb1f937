"""A run directory belongs to one run at a time, and can be written to: both are found out before data are read.

In: a directory, or the settings that lead to one. Out: a lock that is held while the run lasts, or an error that says why not.
"""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from seqvae.config.run import RunSettings
from seqvae.errors import StorageError, UsageError

LOCK = ".lock"
CONFIG = "config.yaml"
FOLDERS = ("checkpoints", "plots", "samples", "tensorboard")
FILES = (CONFIG, "environment.json", "run.json", "*.csv", "*.jsonl")
"""What stands in a run's directory and is written to in place."""


@contextmanager
def lock_run_directory(directory: Path) -> Iterator[None]:
    """Hold the directory, or raise an error that names the process that does.

    The operating system's lock goes with its process, however that ends; the file goes with the lock, so that a directory that
    was made in vain is empty.
    """
    path = directory / LOCK
    with _exclusive(path) as file:
        with suppress(OSError):  # the number is only for a message
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


@contextmanager
def _exclusive(path: Path) -> Iterator[TextIO]:
    """Open a file that no other process holds.

    On POSIX with `lockf`, whose locks are not inherited: a loader process that outlives a killed run for some seconds must not
    keep the run from going on, as it would with the library filelock and its `flock`.
    """
    if sys.platform == "win32":
        beside = FileLock(
            f"{path}.held", timeout=0
        )  # what is locked on Windows cannot be read by the one who is refused
        try:
            beside.acquire()
        except Timeout:
            raise _in_use(path) from None
        with beside, path.open("w", encoding="utf-8") as file:
            yield file
        return
    import fcntl  # only here: Windows has none

    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise StorageError(
                f"{path.parent}: cannot be written ({error.strerror}). Choose another --output_dir."
            ) from error
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise _in_use(path) from None
            except OSError:
                pass  # a file system without locks: no one is refused, and nothing breaks
            try:
                is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_current = False
            if is_current:
                yield file
                return
        # The holder before removed the file between the opening and the lock: open the new one.


def _in_use(path: Path) -> UsageError:
    """Return the error for a directory whose lock another process holds."""
    holder = path.read_bytes()[:20].decode(errors="replace").strip() if path.exists() else ""
    return UsageError(
        f"{path.parent} is in use by another run{f' (process {holder})' if holder else ''}: wait until it ends, or choose "
        "another --run_name"
    )


def refuse_unwritable(run: RunSettings) -> None:
    """Raise an error for the first path that a run cannot write to: its directory, what it has there, and --log_dir.

    Nothing is made, and nothing that exists is changed.
    """
    directory, flag = Path(run.output_dir).expanduser(), "--output_dir"
    if run.run_name is not None:
        directory /= run.run_name
    elif run.resume not in ("auto", "never"):
        resumed = Path(run.resume).expanduser().absolute()
        resumed = resumed if resumed.is_dir() else resumed.parent.parent
        if (resumed / CONFIG).is_file():
            directory, flag = resumed, "--run_name"
    _try_to_write(directory, flag)
    if run.log_dir is not None and run.logger != "csv":
        _try_to_write(Path(run.log_dir).expanduser(), "--log_dir", contents=False)


def _try_to_write(directory: Path, flag: str, *, contents: bool = True) -> None:
    """Try, because a file system may not grant what the permissions say."""
    path = directory
    try:
        if directory.exists() and not directory.is_dir() and contents:
            return  # it is no run, which is reported where runs are opened
        absolute = directory.absolute()
        path = nearest = next(above for above in (absolute, *absolute.parents) if above.exists())
        if not nearest.is_dir():
            path = directory
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        tempfile.TemporaryFile(dir=nearest).close()
        if not contents or not (directory / CONFIG).exists():
            return  # what lies there is not the run's
        for path in (folder for name in FOLDERS if (folder := directory / name).is_dir()):
            tempfile.TemporaryFile(dir=path).close()
        for path in (file for pattern in FILES for file in sorted(directory.glob(pattern)) if file.is_file()):
            path.open("rb+").close()
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}). Make it writable, or choose another {flag}."
        ) from error
