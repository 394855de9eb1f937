"""What a run does where a file cannot be written: it goes on without, says so once, tries again, and gives up only after a while.

In: lines for a file that grows, or the errors of whoever else writes. Out: whole lines in the file, in their order, none twice; or
the operating system's own error once it has lasted. No torch here.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
