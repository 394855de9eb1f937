"""Files that others may read while they are written: atomic replacement, JSON lines, full disks, locks.

No torch here, and nothing that only Unix has: the monitors and the reports, which others may use on their own, import this module.
"""

import errno
import glob
import json
import logging
import math
import os
import re
import time
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger(__name__)

# Atomic replacement

ABANDONED_SECONDS = 60.0
"""A partial file that has not changed for so long belongs to a process that was killed."""


@contextmanager
def replace_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` when the block ends without an error and is removed otherwise.

    A reader finds the old file or the new one, never a part. It lies in the same directory, as a move between file systems is not
    atomic, and has a name of its own in each process, so that two writers do not mix. `durable`: the new file outlives a power cut
    once the block has ended (25 ms on a disk that keeps its promises).

        with replace_file(directory / "report.html") as partial:
            partial.write_text(page, encoding="utf-8")
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    for left in path.parent.glob(f".{glob.escape(path.name)}.[0-9]*.partial"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                left.unlink()
    try:
        yield partial
        if durable:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
        partial.replace(path)
        if durable:
            sync_directory(path.parent)
    finally:
        with suppress(OSError):  # the first error is the one to report
            partial.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make sure that the names in a directory outlive a power cut; Windows cannot open a directory."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# JSON lines: one object per line. NaN and infinity are null; None has no key.


class JsonLines:
    """A file of one JSON object per line, written by one process; each row has its `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = PatientFile(path)

    def start_after(self, step: int) -> None:
        """Drop the rows beyond a step: those steps will be taken again."""
        self.drop(lambda row: row["step"] > step)

    def drop(self, drops: Callable[[dict[str, Any]], bool]) -> None:
        """Drop some rows, and every line that is no row: one that a kill cut short, or that another program wrote."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        lines = content.split(b"\n")[:-1]
        kept = [line for line in lines if (row := _parse(line)) and _has_step(row) and not drops(row)]
        rest = b"".join(line + b"\n" for line in kept)
        if rest != content:
            with replace_file(self.path) as partial:
                partial.write_bytes(rest)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that the file holds now."""
        return read_rows(self.path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row at once, or, where that fails, together with the rows to come."""
        self._file.append(json.dumps(to_json(row), allow_nan=False) + "\n")

    def try_again(self) -> None:
        """Write rows that still wait, if they can be written by now."""
        self._file.try_again()

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._file.finish()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file that have a `step`; none of a missing file."""
    return [row for row in parse_rows(whole_lines(path)) if _has_step(row)]


def whole_lines(path: Path, *, at_most: int | None = None, head: int = 0) -> list[bytes]:
    """Return the lines of a file that were written to their end, without that end; none of a missing file.

    `at_most` reads only that many bytes at the end. `head`, in bytes: the first line comes first even then, up to this length.
    """
    try:
        with path.open("rb") as file:
            first = [file.readline(head).rstrip(b"\n")] if head else []
            size = file.seek(0, os.SEEK_END)
            begin = 0 if at_most is None else max(0, size - at_most)
            file.seek(begin)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [*first, *lines[1:]] if begin else lines


def parse_rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines, and leave out the others.

    >>> parse_rows([b'{"step": 1}', b'{"ste', b'[1]'])
    [{'step': 1}]
    """
    return [row for row in map(_parse, lines) if row is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what JSON can hold of a row.

    >>> to_json({"step": 5, "rate": math.nan, "nll": None, "kl_per_dim": (1.0, math.inf)})
    {'step': 5, 'rate': None, 'kl_per_dim': [1.0, None]}
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return to_json(value)
        if isinstance(value, tuple):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: plain(value) for name, value in row.items() if value is not None}


def _has_step(row: dict[str, Any]) -> bool:
    return isinstance(row.get("step"), int)


# Outputs that cannot be written: a run goes on without them, says so once, tries again, and gives up only after a while.

MOST_TRIES = 4
"""Failed tries in a row before an output that cannot be written ends the run."""
LEAST_SECONDS = 60.0
"""The least time that it has to fail as well: a user may be making room."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a quota and a limit on the size of files."""


class Patience:
    """Patience with one output that may fail to be written for a while."""

    def __init__(
        self, name: str, *, say: Callable[[str], None] = log.warning, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`name` is what messages call the output."""
        self.name = name
        self._say = say
        self._now = now
        self._tries = 0
        self._since = 0.0

    @property
    def has_failed(self) -> bool:
        """Return whether the last try failed."""
        return self._tries > 0

    def should_retry(self, reason: str) -> bool:
        """Return whether to try again after a failure; the first one in a row is reported."""
        if self._tries == 0:
            self._since = self._now()
            self._say(f"{self.name} cannot be written ({reason}): training goes on, and tries again")
        self._tries += 1
        return self._tries < MOST_TRIES or self._now() - self._since < LEAST_SECONDS

    def succeeded(self) -> None:
        """Forget the failures; a success after one is reported."""
        if self._tries:
            self._say(f"{self.name} is written again")
        self._tries = 0


class PatientFile:
    """A file that grows by lines, in order and none twice. Others may append to it; a line that was cut short is cut off."""

    def __init__(self, path: Path, heading: str = "", now: Callable[[], float] = time.monotonic) -> None:
        """`heading` is what a file without a line begins with."""
        self.path = path
        self.heading = heading
        self.unwritten: list[str] = []
        """Lines that could not be written yet."""
        self._patience = Patience(path.name, now=now)

    def append(self, line: str) -> None:
        """Write a line and close the file: a checkpoint never comes after a line that is neither written nor waiting."""
        self.unwritten.append(line)
        try:
            self._write()
        except OSError as error:
            if not self._patience.should_retry(str(error.strerror)):
                raise
        else:
            self._patience.succeeded()

    def try_again(self) -> None:
        """Write lines that still wait, if they can be written by now."""
        with suppress(OSError):
            self.finish()

    def finish(self) -> None:
        """Write lines that still wait, or raise the error: a run must not end well without them."""
        if self.unwritten:
            self._write()

    def _write(self) -> None:
        try:
            with self.path.open("ab+", buffering=0) as file:
                whole = end = file.seek(0, os.SEEK_END)
                while whole:  # find the end of the last whole line
                    begin = max(0, whole - 4096)
                    file.seek(begin)
                    if (found := file.read(whole - begin).rfind(b"\n")) >= 0:
                        whole = begin + found + 1
                        break
                    whole = begin
                if whole < end:
                    file.truncate(whole)
                rest = memoryview("".join([*([] if whole else [self.heading]), *self.unwritten]).encode())
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(whole)  # a part of the lines may be there
                    raise
        except OSError as error:  # a failed write does not know its path
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.unwritten.clear()


# Locks on files, which the operating system releases when their holder ends, however it ends. `filelock` closes them in forked
# children, so that a worker process which outlives a killed run keeps nothing locked. It is imported where it is used: 50 ms.

RETRY_SECONDS = 0.1
JUST_FORKED_SECONDS = 0.5
"""A child that was forked a moment before its parent was killed may not have closed its copy of the lock yet."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system without locks."""


class AlreadyLocked(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder
        """The id of that process; empty where that is not known."""


def take_lock(path: Path) -> ExitStack:
    """Lock the file at `path` and write this process's id into it, or raise `AlreadyLocked`; close the stack to release it.

    The file is removed with the lock. A file system without locks refuses no one. An `OSError` says that it cannot be written.
    """
    from filelock import FileLock, Timeout

    released = ExitStack()
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=JUST_FORKED_SECONDS, poll_interval=RETRY_SECONDS)
    except Timeout:
        holder = ""
        with suppress(OSError):
            holder = path.read_text(encoding="ascii", errors="replace")[:20].strip()
        raise AlreadyLocked(holder) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return released
    with suppress(OSError):  # only a message needs it
        path.write_text(str(os.getpid()), encoding="ascii")
    released.callback(_release, lock, path, os.getpid())
    return released


@contextmanager
def wait_for_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock at `path`; call `on_wait` once if another process holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_wait()
        lock.acquire(poll_interval=RETRY_SECONDS)
    try:
        yield
    finally:
        lock.release()


def mark_in_use(owner: object, directory: Path) -> None:
    """Mark a directory as in use, as long as `owner` lives; any number of processes may do so.

    Each mark is a locked file of its own, as `filelock` shares no lock. Where none can be written, the directory is not protected.
    """
    from filelock import FileLock

    is_in_use(directory)  # removes what killed processes left
    path = directory / f".in-use-{os.getpid()}-{id(owner):x}.lock"
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    with suppress(OSError):
        lock.acquire(timeout=JUST_FORKED_SECONDS)
        weakref.finalize(owner, _release, lock, path, os.getpid())


def is_in_use(directory: Path) -> bool:
    """Return whether a process has marked the directory as in use."""
    from filelock import FileLock

    in_use = False
    for path in directory.glob(".in-use-*.lock"):
        lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(blocking=False)
        except OSError:  # a timeout, or another process's file, which cannot be opened: it may be in use
            in_use = True
        else:
            _release(lock, path, os.getpid())
    return in_use


def _release(lock: "BaseFileLock", path: Path, holder: int) -> None:
    """Release a lock and remove its file, unless this is a child of the process that holds it."""
    if os.getpid() == holder:
        with suppress(OSError):  # on Windows an open file cannot be removed; filelock does it after the release
            path.unlink(missing_ok=True)
        lock.release(force=True)


# Paths that a user typed in

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


MADE_BY = "SeqVAE"
"""Who made a file, in its metadata: such files may be overwritten."""
STORES = ("s3", "gs", "abfs", "abfss", "hf")
"""The schemes of object stores that data may lie in."""


def refuse_no_paths(settings: object, *names: str, remote: str | None = None) -> None:
    """Raise ValueError where one of these fields of settings can be no path of this machine; `remote` may be in a store, too."""
    for name in (*names, remote) if remote else names:
        value = getattr(settings, name)
        if value is not None and (
            reason := why_no_url(value) if name == remote and is_remote(value) else why_no_path(value)
        ):
            raise ValueError(f"--{name} {reason}")


def is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def is_remote(text: str) -> bool:
    """Return whether a text is the URL of something in an object store.

    >>> is_remote("s3://bucket/data"), is_remote("https://example.org/a"), is_remote("data")
    (True, False, False)
    """
    return text.partition("://")[0].lower() in STORES and "://" in text


def why_no_url(text: str) -> str | None:
    """Return why a URL of an object store cannot be used, or None; what may be a password is not repeated.

    >>> why_no_url("s3://key:password@bucket/data")
    'holds a password or options: leave them out, credentials are taken from the environment'
    """
    scheme, _, rest = text.partition("://")
    authority = rest.partition("/")[0]
    is_account = scheme.lower() in ("abfs", "abfss") and ":" not in authority
    if ("@" in authority and not is_account) or re.search(r"[?&;]\w+=|\?\w*(key|token|secret|sig)", rest):
        return "holds a password or options: leave them out, credentials are taken from the environment"
    if not authority or any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        return f"{text!r} names no bucket: write {scheme}://bucket/path"
    return None


def why_no_path(text: str) -> str | None:
    """Return why a text can be no path of this machine, or None. Nothing is ever fetched.

    >>> why_no_path("s3://bucket/a")
    's3://bucket/a is a URL, and URLs are not fetched: copy it to this machine, and give the path of the copy'
    """
    if not text:
        return "is empty: give a path, or leave the flag out"
    if _URL.match(text):
        return f"{text} is a URL, and URLs are not fetched: copy it to this machine, and give the path of the copy"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        return f"{text!r} holds control characters or bytes that are no UTF-8: rename it, or let a link lead there"
    if text.startswith("--"):
        return f"{text} begins like a flag: give the path in full"
    if text.startswith("~"):
        try:
            Path(text).expanduser()
        except RuntimeError:
            return f"{text}: there is no such home directory; give the path in full"
    return None
