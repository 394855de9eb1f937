"""How a command or a call can end, apart from bugs: the errors with their exit codes, and `run_command`, which prints them.

In: a command's `main`. Out: the exit code for `sys.exit`, and one or two lines on stderr where the program is not at fault.
Bugs are not caught: they show their traceback.
"""

import atexit
import difflib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

STOP_SIGNALS = tuple(one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGUSR1"))
"""Ctrl-C; what ends a process; and what SLURM sends when a job's time is nearly over, which Windows does not have."""


class ExitCode(IntEnum):
    """The exit codes that a script may rely on."""

    DONE = 0
    """Everything that was requested is done."""
    USAGE = 2
    """A flag, a preset or a config file is wrong; nothing was started."""
    DATA = 3
    """The data cannot be used as they are."""
    DIVERGED = 4
    """The loss became NaN or infinite."""
    OUT_OF_MEMORY = 5
    """Main or GPU memory ran out."""
    STORAGE = 6
    """A disk is full, or a file or directory may not be read or written."""
    COLLAPSED = 7
    """The run was stopped because the posterior collapsed."""
    PROCESSES = 8
    """One of several processes did not come, or was lost."""
    INTERRUPTED = 130
    """Ctrl-C."""
    REQUEUE = 138
    """SIGUSR1: what was trained is saved, and the run waits to be started again."""
    OUTPUT_CLOSED = 141
    """No one reads the output any more, as in `... | head`."""
    TERMINATED = 143
    """SIGTERM."""


class SeqVAEError(Exception):
    """Anything that the caller can mend: where, what was found, what was expected, what to do, in one or two lines."""

    exit_code = ExitCode.USAGE


class UsageError(SeqVAEError):
    """An error in what the user typed, or in an argument of a call."""


class SettingsError(SeqVAEError, ValueError):
    """Settings that are fine by themselves but do not go with these data."""


class DataError(SeqVAEError):
    """The data cannot be used."""

    exit_code = ExitCode.DATA


class DamagedFileError(DataError):
    """A file that looked well from outside and cannot be read to its end."""


class DivergedError(SeqVAEError, FloatingPointError):
    """Training came to NaN or infinity."""

    exit_code = ExitCode.DIVERGED


class StorageError(SeqVAEError):
    """A directory cannot be written, or a disk is full."""

    exit_code = ExitCode.STORAGE


class CollapsedError(SeqVAEError):
    """The posterior collapsed, and the run was set to stop then."""

    exit_code = ExitCode.COLLAPSED


class ProcessesError(SeqVAEError):
    """One of the processes of a run did not come, or was lost."""

    exit_code = ExitCode.PROCESSES


class Stopped(BaseException):
    """A signal that ends the command. No KeyboardInterrupt, because Lightning turns that into an exit code of its own."""

    def __init__(self, number: int, message: str = "") -> None:
        """`message` goes on after "stopped by Ctrl-C"."""
        super().__init__(number, message)
        self.number, self.message = number, message

    def __str__(self) -> str:
        return (
            f"stopped by {'Ctrl-C' if self.number == signal.SIGINT else signal.Signals(self.number).name}{self.message}"
        )

    @property
    def exit_code(self) -> ExitCode:
        codes = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
        return codes.get(signal.Signals(self.number), ExitCode.REQUEUE)


def did_you_mean(word: str, names: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return `; did you mean ...?` where one of the names has at least this share of letters in common, else an empty string."""
    close = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


NO_MEMORY = re.compile(
    r"can't allocate memory"  # torch's allocator on a CPU
    r"|Cannot allocate memory|std::bad_alloc"
    r"|could not create a primitive(?! descriptor)"  # oneDNN, which compiles its kernels into memory of their own
    r"|can't start new thread|Resource temporarily unavailable"  # Python's and C++'s threads, each of which has a stack
)
"""What a RuntimeError says where memory ran out."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. Python and GPUs have a type for that, the system a number, libraries words of their own."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


def is_out_of_files(error: BaseException) -> bool:
    """Return whether more files were to be opened than the system allows; shared memory and pipes count among them."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return isinstance(error, RuntimeError) and "Too many open files" in str(error)


def storage_error(error: Exception) -> StorageError | None:
    """Return an error of the operating system as one of storage, or None where it is about something else."""
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        said = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if is_out_of_files(error):
        return StorageError(
            f"{said}. Raise the limit with `ulimit -n 4096`, or give fewer --num_workers, or --worker_type thread"
        )
    full_or_failing = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
    denied = (errno.EACCES, errno.EPERM, errno.EROFS)
    if not isinstance(error, OSError) or error.errno not in (*full_or_failing, *denied):
        return None
    return StorageError(said)


def run_command(main: Callable[[], int | None], prog: str) -> int:
    """Run a command and return its exit code; a `main` that returns None is done."""
    _discard_what_goes_nowhere()
    os.environ["MPLBACKEND"] = "agg"  # commands draw into files; a name that matplotlib does not know ends its import
    try:
        try:
            with _signals_raised():
                code = main()
        finally:
            sys.stdout.flush()  # here, where a closed pipe is still answered, and not while the interpreter shuts down
        return ExitCode.DONE if code is None else code
    except SeqVAEError as error:  # a name of data may hold a line break, and must not begin a line of its own
        message = str(error).replace("\n", "\\n") if isinstance(error, DataError) else str(error)
        return _fail(prog, message, error.exit_code)
    except Stopped as stop:
        return _fail(prog, str(stop), stop.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it closes
        return ExitCode.OUTPUT_CLOSED
    except (MemoryError, RuntimeError, OSError) as error:
        if is_out_of_memory(error):
            return _fail(prog, f"out of memory {error}".rstrip(), ExitCode.OUT_OF_MEMORY)
        if (reported := storage_error(error)) is None:
            raise
        return _fail(prog, str(reported), reported.exit_code)
    except KeyboardInterrupt:
        return _fail(prog, "stopped by Ctrl-C", ExitCode.INTERRUPTED)


def _discard_what_goes_nowhere() -> None:
    """Open the null device for each standard stream that was closed from the start (`>&-`).

    Python has None there, and the next file that is opened would get the stream's number, and with it what libraries and child
    processes write. The system gives the lowest free number, so that in this order each stream gets its own.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGUSR1 raise `Stopped`, so that whatever is open is closed; a second one ends the process at once.

    Also while the interpreter shuts down, where Python itself would answer Ctrl-C with a traceback.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        let_signals_end_the_process()
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
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
    """Let Ctrl-C, SIGTERM and SIGUSR1 end the process at once, from now on."""
    for number in STOP_SIGNALS:
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
