"""How data can end a run, apart from bugs."""

import atexit
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType


class DataError(Exception):
    """The data cannot be used as asked: where, what was found, what was wanted, what to do. Ends a command with exit 3."""


class DamagedFileError(DataError):
    """A file that looked well from outside and cannot be read to its end."""


class SettingsError(ValueError):
    """Settings that are fine by themselves but do not go with these data. Ends a command with exit 2."""


class StorageError(Exception):
    """A directory cannot be written or a disk is full. Ends a command with exit 6."""


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own, a GPU's, or that of torch's CPU allocator, which has no type. Torch is not imported to find out."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in str(error)
    )


# How a command ends: its exit code, and one or two lines on stderr where it was not the program's fault.
#
# In: a command's `main`. Out: the exit code for `sys.exit`. Bugs are not caught here: they show their traceback.


class UsageError(Exception):
    """What the user typed cannot be run: what was found, what was wanted, what to do. Ends a command with exit 2."""


class DivergedError(FloatingPointError):
    """Training came to NaN or infinity. Ends a command with exit 4."""


class Stopped(BaseException):
    """A signal asked the command to end. No KeyboardInterrupt, because Lightning turns that into an exit code of its own."""

    def __init__(self, number: int, said: str = "") -> None:
        """`said` goes on after "stopped by Ctrl-C"."""
        super().__init__(number, said)
        self.number, self.said = number, said


class ExitCode(IntEnum):
    """What a script may rely on."""

    DONE = 0
    """All that was asked for is done."""
    USAGE = 2
    """A flag, a preset or a config file is wrong; nothing was started."""
    DATA = 3
    """The data cannot be used as asked."""
    DIVERGED = 4
    """The loss became NaN or infinite."""
    OUT_OF_MEMORY = 5
    """Main or GPU memory ran out."""
    STORAGE = 6
    """A disk is full, or a file or directory may not be read or written."""
    COLLAPSED = 7
    """The run was stopped because the posterior collapsed."""
    INTERRUPTED = 130
    """Ctrl-C."""
    OUTPUT_CLOSED = 141
    """Nobody reads the output any more, as in `... | head`."""
    TERMINATED = 143
    """SIGTERM."""


_STORAGE_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}


def run_command(main: Callable[[], int | None], prog: str) -> int:
    """Run a command; the result belongs into `sys.exit`. A `main` that returns nothing is done."""
    try:
        try:
            with _signals_raised():
                code = main()
        finally:
            sys.stdout.flush()  # here, where a closed pipe is still answered, and not while the interpreter shuts down
        return ExitCode.DONE if code is None else code
    except (UsageError, SettingsError) as error:
        return _fail(prog, str(error), ExitCode.USAGE)
    except DataError as error:  # it quotes names, and a name with a line break in it must not begin a line of its own
        return _fail(prog, str(error).replace("\n", "\\n"), ExitCode.DATA)
    except StorageError as error:
        return _fail(prog, str(error), ExitCode.STORAGE)
    except DivergedError as error:
        return _fail(prog, str(error), ExitCode.DIVERGED)
    except Stopped as stop:
        name = "Ctrl-C" if stop.number == signal.SIGINT else "SIGTERM"
        return _fail(prog, f"stopped by {name}{stop.said}", ExitCode(128 + stop.number))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it closes
        return ExitCode.OUTPUT_CLOSED
    except OSError as error:
        if error.errno not in _STORAGE_ERRNOS:
            raise
        place = "" if error.filename is None else f"{error.filename}: "
        return _fail(prog, f"{place}{error.strerror}", ExitCode.STORAGE)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(prog, f"out of memory {error}".rstrip(), ExitCode.OUT_OF_MEMORY)
    except KeyboardInterrupt:
        return _fail(prog, "stopped by Ctrl-C", ExitCode.INTERRUPTED)


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise `Stopped`, so that whatever is open is closed; a second one ends the process at once.

    Also while the interpreter shuts down, where Python itself would answer Ctrl-C with a traceback.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        let_signals_end_the_process()
        raise Stopped(number)

    for number in before:
        signal.signal(number, stop)
    atexit.register(let_signals_end_the_process)
    is_stopped = False
    try:
        yield
    except Stopped:
        is_stopped = True
        let_signals_end_the_process()
        raise
    finally:
        if not is_stopped:
            for number, handler in before.items():
                signal.signal(number, handler)


def let_signals_end_the_process() -> None:
    """At once, from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def harmless(text: str) -> str:
    """Spell out what a terminal would obey instead of show: messages quote data, and data can hold escape sequences.

    >>> harmless("column \\x1b[2Jtoken\\r")
    'column \\\\x1b[2Jtoken\\\\r'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _fail(prog: str, message: str, code: ExitCode) -> ExitCode:
    print(f"{prog}: {harmless(message)}", file=sys.stderr)
    return code
