"""A file of one JSON object a line, so that another program may follow it while a run goes on: rows in, the same rows out.

Each row tells its `step`. NaN and infinity are null. What is not told (None) has no key. No torch here.
"""

import errno
import json
import logging
import math
import os
import re
import sys
import time
import unicodedata
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


class JsonLines:
    """Written by one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = PatientFile(path)

    def start_after(self, step: int) -> None:
        """Drop the rows beyond a step: those steps will be taken again."""
        self.drop(lambda row: row["step"] > step)

    def drop(self, unwanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop some rows, and what is no row: the rest of a line that a kill cut short, or what somebody else wrote."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)  # as text, other characters would end a line, too
        kept = [line for line in lines if (row := _row_of(line)) is not None and not unwanted(row)]
        if kept == lines:
            return
        beside = self.path.with_name(f"{self.path.name}.tmp")
        beside.write_bytes(b"".join(kept))
        beside.replace(self.path)

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path) if self.path.exists() else []

    def append(self, row: Mapping[str, Any]) -> None:
        """At once, or, where that fails, with the rows to come."""
        self._file.append(json.dumps(to_json(row), allow_nan=False) + "\n")

    def try_again(self) -> None:
        """Write rows that still wait, if they can be written by now."""
        self._file.try_again()

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._file.finish()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines of a file."""
    rows = map(_row_of, path.read_bytes().splitlines(keepends=True))
    return [row for row in rows if row is not None]


def to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> to_json({"step": 5, "rate": math.nan, "nll": None, "kl_per_dim": (1.0, math.inf)})
    {'step': 5, 'rate': None, 'kl_per_dim': [1.0, None]}
    """
    return {name: _value_to_json(value) for name, value in row.items() if value is not None}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return to_json(value)
    if isinstance(value, tuple):
        return [_value_to_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row_of(line: bytes) -> dict[str, Any] | None:
    """None of what is no row."""
    if not line.endswith(b"}\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


# What a run does where a file cannot be written: it goes on without, says so once, tries again, and gives up only after a while.
#
# In: lines for a file that grows, or the errors of whoever else writes. Out: whole lines in the file, in their order, none
# twice; or the operating system's own error once it has lasted. No torch here.

MOST_TRIES = 4
"""In a row, before whatever cannot be written ends the run."""
LEAST_SECONDS = 60.0
"""That it has to last as well: somebody may be making room."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk, a quota and a limit on files say."""

_log = logging.getLogger(__name__)


class Patience:
    """Of one output."""

    def __init__(
        self, name: str, *, say: Callable[[str], None] = _log.warning, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`name` is how the output is called in what is said."""
        self.name = name
        self._say = say
        self._now = now
        self._tries = 0
        self._since = 0.0

    @property
    def is_tried(self) -> bool:
        """Whether the last try failed."""
        return self._tries > 0

    def bears(self, reason: str) -> bool:
        """Another try failed: say so if it is the first in a row. False: that was the last one."""
        if self._tries == 0:
            self._since = self._now()
            self._say(f"{self.name} cannot be written ({reason}): training goes on, and tries again")
        self._tries += 1
        return self._tries < MOST_TRIES or self._now() - self._since < LEAST_SECONDS

    def succeeded(self) -> None:
        if self._tries:
            self._say(f"{self.name} is written again")
        self._tries = 0


class PatientFile:
    """Lines behind one another. Others may append to the same file; a line that a kill or a full disk cut short is cut off."""

    def __init__(self, path: Path, heading: str = "", now: Callable[[], float] = time.monotonic) -> None:
        """`heading` is what a file without a line begins with."""
        self.path = path
        self.heading = heading
        self.waiting: list[str] = []
        """Lines that did not get there yet."""
        self._patience = Patience(path.name, now=now)

    def append(self, line: str) -> None:
        """Closed, and so handed to the system, at once: a checkpoint never stands behind a line that is neither there nor waits."""
        self.waiting.append(line)
        try:
            self._write()
        except OSError as error:
            if not self._patience.bears(str(error.strerror)):
                raise _named(error, self.path) from None
        else:
            self._patience.succeeded()

    def try_again(self) -> None:
        """Before something is to count on the lines; where it fails they wait on."""
        if self.waiting:
            with suppress(OSError):
                self._write()

    def finish(self) -> None:
        """A last try for lines that still wait; whoever ends a run must not end it well without them."""
        if self.waiting:
            try:
                self._write()
            except OSError as error:
                raise _named(error, self.path) from None

    def _write(self) -> None:
        with open(self.path, "rb+", opener=_make_if_missing) as file:
            whole = _end_of_whole_lines(file.fileno())
            file.truncate(whole)
            file.seek(whole)
            try:
                file.write("".join([*([] if whole else [self.heading]), *self.waiting]).encode())
                file.flush()
            except OSError:
                os.ftruncate(file.fileno(), whole)  # some of the lines may be there
                raise
        self.waiting.clear()


def _make_if_missing(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


def _end_of_whole_lines(descriptor: int) -> int:
    """Where the last line ends that was written to its end, found from the file's end."""
    end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - 4096)
        piece = os.pread(descriptor, end - begin, begin)
        if (found := piece.rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0


def _named(error: OSError, path: Path) -> OSError:
    """With its path, which a failed write does not know."""
    return OSError(error.errno, error.strerror, str(path))


# Locks on files, which the operating system releases when their holder ends, however it ends.
#
# `exclusive`: one process at a time. `hold` and `is_held`: whoever uses something says so, whoever would delete it asks.

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


# What the user typed in for a path -> whether it can be one of this machine. Nothing is ever fetched.

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def refuse_no_paths(settings: object, *names: str) -> None:
    """Refuse what stands in these fields of settings and is no path of this machine."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and (reason := why_no_path(value)):
            raise ValueError(f"--{name} {reason}")


def why_no_path(text: str) -> str | None:
    """Why a text can be no path here, or None. Every flag that names a place is asked about here, and nowhere else.

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
    return f"{text}: there is no such home directory; give the path in full" if _is_of_nobody(text) else None


def _is_of_nobody(text: str) -> bool:
    try:
        return text.startswith("~") and not Path(text).expanduser()
    except RuntimeError:
        return True
