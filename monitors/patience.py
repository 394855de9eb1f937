"""What a run does where a file cannot be written: it goes on without, says so once, tries again, and gives up only after a while.

In: lines for a file that grows, or the errors of whoever else writes. Out: whole lines in the file, in their order, none twice; or
the operating system's own error once it has lasted. No torch here.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

MOST_TRIES = 5
"""In a row, before whatever cannot be written ends the run."""
LEAST_SECONDS = 60.0
"""That it has to last as well: somebody may be making room."""
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE)
"""Disks that are full, broken or not to be written to."""

_log = logging.getLogger(__name__)


class Patience:
    """Of one output."""

    def __init__(self, name: str, *, most_tries: int = MOST_TRIES, now: Callable[[], float] = time.monotonic) -> None:
        """`name` is how the output is called in what is said."""
        self.name = name
        self.most_tries = most_tries
        self._now = now
        self._tries = 0
        self._since = 0.0

    @property
    def is_tried(self) -> bool:
        """Whether the last try failed."""
        return self._tries > 0

    def failed(self, error: OSError) -> None:
        """Say so at the first failure in a row; raise the error when the last one is reached."""
        if self._tries == 0:
            self._since = self._now()
            _log.warning("%s cannot be written (%s): training goes on, and tries again", self.name, error.strerror)
        self._tries += 1
        if self._tries >= self.most_tries and self._now() - self._since >= LEAST_SECONDS:
            raise error

    def succeeded(self) -> None:
        if self._tries:
            _log.warning("%s is written again", self.name)
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
            self._patience.failed(_named(error, self.path))
        else:
            self._patience.succeeded()

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
