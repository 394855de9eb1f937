"""One run in a directory at a time, whoever dies how."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seqvae.errors import UsageError
from seqvae.training.run_directory.resume import LOCK, lock_run_directory

ROOT = Path(__file__).parent.parent.parent
HOLDS = """
import sys
from pathlib import Path
from seqvae.training.run_directory.resume import lock_run_directory
with lock_run_directory(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
LEAVES_A_CHILD = HOLDS.replace("print", "import os, time; os.fork() or time.sleep(60); print")


@contextmanager
def holder(directory: Path, code: str = HOLDS) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_the_second_is_refused_with_who_is_there(tmp_path):
    with holder(tmp_path) as first:
        said = rf"in use by another run \(process {first.pid}\): wait until it ends"
        with pytest.raises(UsageError, match=said), lock_run_directory(tmp_path):
            pytest.fail("there are two")
        first.communicate("")
    with lock_run_directory(tmp_path):
        assert (tmp_path / LOCK).read_text() == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")
def test_a_killed_run_leaves_its_directory_free(tmp_path):
    with holder(tmp_path) as first:
        first.kill()
        first.wait()
        assert (tmp_path / LOCK).exists()
        with lock_run_directory(tmp_path):
            pass


@pytest.mark.skipif(os.name != "posix", reason="other platforms do not fork")
def test_children_that_outlive_a_killed_run_do_not_keep_its_directory(tmp_path):
    with holder(tmp_path, LEAVES_A_CHILD) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        with lock_run_directory(tmp_path):
            pass


def test_a_lock_that_was_removed_meanwhile_is_made_anew(tmp_path):
    with lock_run_directory(tmp_path):
        (tmp_path / LOCK).unlink()
    with lock_run_directory(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_on_windows_the_library_holds_the_lock_and_the_second_is_refused_alike(tmp_path, monkeypatch):
    """The library's lock conflicts within a process, too, so that any platform can show this."""
    monkeypatch.setattr(sys, "platform", "win32")
    with lock_run_directory(tmp_path):
        said = rf"in use by another run \(process {os.getpid()}\): wait until it ends"
        with pytest.raises(UsageError, match=said), lock_run_directory(tmp_path):
            pytest.fail("there are two")
        assert (tmp_path / LOCK).read_text() == str(os.getpid())
    with lock_run_directory(tmp_path):
        pass
    assert all(path.name.startswith(LOCK) for path in tmp_path.iterdir())
