"""How commands end: the exit code says why, stderr says it in a line, and only bugs show a traceback."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqvae.errors import DataError, DivergedError, ExitCode, StorageError, UsageError, harmless, run_command

ROOT = Path(__file__).parent.parent.parent
MORE_FILES = "Raise the limit with `ulimit -n 4096`, or give fewer --num_workers, or --worker_type thread"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("--x is not a flag"), 2, "demo.py: --x is not a flag\n"),
        (DataError("a.parquet: empty"), 3, "demo.py: a.parquet: empty\n"),
        (StorageError("cache: disk full"), 6, "demo.py: cache: disk full\n"),
        (OSError(errno.ENOSPC, "No space left", "/x"), 6, "demo.py: /x: No space left\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 6, "demo.py: /x: Permission denied\n"),
        (OSError(errno.EROFS, "Read-only"), 6, "demo.py: Read-only\n"),
        (MemoryError(), 5, "demo.py: out of memory\n"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            5,
            "demo.py: out of memory [enforce fail] DefaultCPUAllocator: can't allocate memory\n",
        ),
        (RuntimeError("could not create a primitive"), 5, "demo.py: out of memory could not create a primitive\n"),
        (RuntimeError("std::bad_alloc"), 5, "demo.py: out of memory std::bad_alloc\n"),
        (RuntimeError("can't start new thread"), 5, "demo.py: out of memory can't start new thread\n"),
        (
            RuntimeError("Resource temporarily unavailable"),
            5,
            "demo.py: out of memory Resource temporarily unavailable\n",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            5,
            "demo.py: out of memory [Errno 12] Cannot allocate memory\n",
        ),
        (OSError(errno.EMFILE, "Too many open files"), 6, f"demo.py: Too many open files. {MORE_FILES}\n"),
        (
            RuntimeError("unable to open shared memory object: Too many open files (24)"),
            6,
            f"demo.py: unable to open shared memory object: Too many open files (24). {MORE_FILES}\n",
        ),
        (DivergedError("step 3: the loss is NaN"), 4, "demo.py: step 3: the loss is NaN\n"),
        (KeyboardInterrupt(), 130, "demo.py: stopped by Ctrl-C\n"),
    ],
)
def test_an_end_that_is_no_bug_is_a_code_and_a_line(capsys, error, code, line):
    def main() -> None:
        raise error

    assert run_command(main, "demo.py") == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("bug"), KeyError("bug"), RuntimeError("bug"), OSError(errno.EBUSY, "broken"), SystemExit(0)),
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        ValueError("std::bad_alloc"),
    ],
)
def test_everything_else_is_left_alone(error):
    def main() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run_command(main, "demo.py")
    assert caught.value is error


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (ExitCode.COLLAPSED, 7), (4, 4)])
def test_a_main_that_returns_says_its_own_code(returned, code):
    assert run_command(lambda: returned, "demo.py") == code


def test_the_codes_are_those_that_are_documented():
    assert sorted(ExitCode) == [0, 2, 3, 4, 5, 6, 7, 8, 130, 138, 141, 143]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\rb\x07\x9b\u202e", "a\\rb\\x07\\x9b\\u202e"),
        ("zwei\nZeilen, größer: 変分", "zwei\nZeilen, größer: 変分"),
        ("\udcff", "\\udcff"),
    ],
)
def test_messages_cannot_command_the_terminal(capsys, text, shown):
    def main() -> None:
        raise UsageError(text)

    assert harmless(text) == shown
    run_command(main, "demo.py")
    assert capsys.readouterr().err == f"demo.py: {shown}\n"


@pytest.mark.skipif(os.name != "posix", reason="pipes close differently elsewhere")
def test_a_reader_that_leaves_early_causes_no_noise():
    code = (
        "import sys; from seqvae.errors import run_command;"
        "sys.exit(run_command(lambda: print('line ' * 100_000), 'demo.py'))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == ExitCode.OUTPUT_CLOSED


@pytest.mark.skipif(os.name != "posix", reason="other shells have no such way")
@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        (">&-", "", "demo.py: done\n"),
        ("<&- >&-", "", "demo.py: done\n"),
        ("2>&-", "said\nby a library", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_what_is_said_on_a_stream_that_is_closed_from_the_start_goes_nowhere(closed, out, err, tmp_path):
    code = (
        "import os, sys; from seqvae.errors import UsageError, run_command\n"
        "def main():\n"
        "    print('said', flush=True)\n"
        "    with open('file', 'wb') as file:\n"
        "        os.write(1, b'by a library')\n"
        "    raise UsageError('done')\n"
        "sys.exit(run_command(main, 'demo.py'))"
    )
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (2, out, err)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_closes_what_is_open_and_shows_in_the_code(number, code):
    program = (
        "import sys, time\n"
        "from seqvae.errors import run_command\n"
        "def main():\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('closed')\n"
        "sys.exit(run_command(main, 'demo.py'))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "closed\n")
    assert err == f"demo.py: stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}\n"
