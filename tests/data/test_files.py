"""Files: replaced at once, read while they grow, and locked by one process at a time however it ends."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seqvae.files import (
    AlreadyLocked,
    JsonLines,
    is_in_use,
    mark_in_use,
    parse_rows,
    read_rows,
    replace_file,
    take_lock,
    wait_for_lock,
    whole_lines,
)

ROOT = Path(__file__).parent.parent.parent

# Atomic replacement


@pytest.mark.parametrize("durable", [False, True])
def test_a_reader_finds_the_old_file_or_the_new_one(tmp_path, durable):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replace_file(path, durable=durable) as partial:
        partial.write_text("n")
        assert path.read_text() == "old"
        partial.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail() -> None:
        with replace_file(path) as partial:
            partial.write_text("half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed_and_what_another_writes_stays(tmp_path):
    left, fresh = tmp_path / ".a[1].txt.1.partial", tmp_path / ".a[1].txt.2.partial"
    left.touch()
    fresh.touch()
    os.utime(left, (0, time.time() - 3600))
    with replace_file(tmp_path / "a[1].txt") as partial:
        partial.touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [fresh.name, "a[1].txt"]


# JSON lines


def test_rows_are_objects_with_a_step_on_whole_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n[2]\n\xff\n{"other": 3}\n{"step": 4, "x": null}\n{"step": 5')
    assert read_rows(path) == [{"step": 1}, {"step": 4, "x": None}]
    assert parse_rows(whole_lines(path)) == [{"step": 1}, {"other": 3}, {"step": 4, "x": None}]


def test_a_missing_file_has_no_lines(tmp_path):
    assert whole_lines(tmp_path / "a.jsonl") == []
    assert JsonLines(tmp_path / "a.jsonl").rows() == []


def test_the_end_of_a_long_file_is_read_with_its_heading(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"head\n" + b"".join(b"%d\n" % number for number in range(100)) + b"half")
    assert whole_lines(path, at_most=9) == [b"99"]
    assert whole_lines(path, at_most=9, head=100) == [b"head", b"99"]
    assert whole_lines(path, at_most=10_000, head=100)[:2] == [b"head", b"0"]


def test_rows_beyond_a_step_are_dropped_with_what_is_no_row(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    for step in (1, 2, 3):
        lines.append({"step": step})
    with lines.path.open("a") as file:
        file.write('[1]\n{"step": 1, "ha')
    lines.start_after(2)
    assert lines.path.read_text() == '{"step": 1}\n{"step": 2}\n'


# Locks

HOLD = """
import sys
from pathlib import Path
from seqvae.files import take_lock
with take_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
USE = """
import sys
from pathlib import Path
from seqvae.files import mark_in_use
mark_in_use(Path, Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
LEAVE_A_CHILD = HOLD.replace("print", "import os, time; os.fork() or time.sleep(60); print")


@contextmanager
def holder(path: Path, code: str = HOLD) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_second_process_learns_who_holds_the_lock(tmp_path):
    path = tmp_path / ".lock"
    with holder(path) as first:
        with pytest.raises(AlreadyLocked) as refused:
            take_lock(path)
        assert refused.value.holder == str(first.pid)
        first.communicate("")
    with take_lock(path):
        assert path.read_text() == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_one_process_cannot_take_a_lock_twice(tmp_path):
    path = tmp_path / ".lock"
    with take_lock(path):
        with pytest.raises(AlreadyLocked) as refused:
            take_lock(path)
        assert refused.value.holder == str(os.getpid())
    take_lock(path).close()


@pytest.mark.skipif(os.name != "posix", reason="other platforms do not fork, and have no such signals")
@pytest.mark.parametrize("code", [HOLD, LEAVE_A_CHILD], ids=["alone", "with a child"])
def test_a_lock_ends_with_its_holder_though_children_outlive_it(tmp_path, code):
    path = tmp_path / ".lock"
    with holder(path, code) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert path.exists()
        with take_lock(path):
            pass


def test_a_lock_whose_file_was_removed_can_be_taken_again(tmp_path):
    path = tmp_path / ".lock"
    with take_lock(path):
        path.unlink()
    with take_lock(path):
        assert path.exists()


def test_a_place_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        take_lock(tmp_path / "file" / ".lock")


def test_a_process_waits_for_a_lock_and_says_so_once(tmp_path):
    path, order = tmp_path / ".lock", list[str]()

    def second() -> None:
        with wait_for_lock(path, lambda: order.append("waits")):
            order.append("second")

    with wait_for_lock(path, lambda: pytest.fail("no other process is there")):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join()
    assert order == ["waits", "first", "second"]


class Owner:
    """A user of a directory."""


def test_a_directory_is_in_use_as_long_as_one_of_its_users_lives(tmp_path):
    assert not is_in_use(tmp_path)
    one, other = Owner(), Owner()
    mark_in_use(one, tmp_path)
    mark_in_use(other, tmp_path)
    del one
    gc.collect()
    assert is_in_use(tmp_path)
    del other
    gc.collect()
    assert not is_in_use(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")
def test_what_a_killed_user_leaves_does_not_count_and_is_removed(tmp_path):
    with holder(tmp_path, USE) as user:
        assert is_in_use(tmp_path)
        user.kill()
        user.wait()
    assert len(list(tmp_path.iterdir())) == 1
    assert not is_in_use(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_used_without_protection(tmp_path):
    (tmp_path / "file").touch()
    owner = Owner()
    mark_in_use(owner, tmp_path / "file")
    assert not is_in_use(tmp_path / "file")
