"""What prepares batches raises, dies or hangs: nothing is lost or repeated, nothing stays behind, and three times are the end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from seqvae.config.data import BatchSettings, CacheSettings, LoadingSettings, SourceSettings
from seqvae.data.batching import plan_epoch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.dataset import SequenceSet
from seqvae.data.loader import CLOSING_SECONDS, BatchLoader, resolve_loading
from seqvae.errors import DataError, SettingsError, Stopped, StorageError
from tests.data.test_loader import content
from tests.data.test_sequence_places import write_two_files
from tests.support.fake_sequences import FakeSequences
from tests.support.faulty_sequences import (
    AT,
    CUT,
    LENGTHS,
    LIMITS,
    NEVER,
    WAYS,
    Faulty,
    cannot_read,
    exits,
    hangs,
    is_stopped,
    killed,
    make_loader,
)

ROOT = Path(__file__).parent.parent.parent


def epoch_of(loader: Any, epoch: int = 0) -> list[tuple]:
    loader.set_epoch(epoch)
    return [content(batch) for batch in loader]


def undisturbed(epoch: int = 0) -> list[tuple]:
    return epoch_of(make_loader(FakeSequences(LENGTHS), "in process"), epoch)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Threads that hang cannot be ended; here they are woken up, and then have to end by themselves."""
    threads = threading.active_count()
    yield
    NEVER.set()
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    NEVER.clear()
    assert threading.active_count() == threads
    assert not multiprocessing.active_children()


RAISED = [(way, cannot_read, "OSError: the disk is asleep (faulty_sequences.py:") for way in WAYS]
HUNG = [(way, hangs, "nothing came for 0.8 s") for way in ("one thread", "three threads", "two kept processes")]
STOPPED = [(way, is_stopped, "nothing came for 0.8 s") for way in ("kept process", "two processes")]
DIED = [(way, killed, "was killed by SIGKILL") for way in ("kept process", "two kept processes", "two processes")] + [
    ("two kept processes", exits, "ended with code 9")
]
FAULTS = RAISED + HUNG + STOPPED + DIED
NAMES = [f"{fault.__name__}, {way}" for way, fault, _ in FAULTS]


@pytest.mark.parametrize(("way", "fault", "reason"), FAULTS, ids=NAMES)
def test_a_batch_that_failed_is_made_again_and_none_is_lost_or_repeated(way, fault, reason, tmp_path):
    messages: list[str] = []
    sequences = Faulty(fault, 1, tmp_path / "calls")
    loader = make_loader(sequences, way, messages, wait=60 if "nothing" not in reason else 0.8)
    assert [epoch_of(loader, epoch) for epoch in (0, 1)] == [undisturbed(0), undisturbed(1)]
    loader.close()
    (line,) = messages
    assert line.startswith(f"batch {AT} (counted through all epochs) was not made: ")
    assert reason in line
    assert line.endswith("The loader starts again from this batch (try 2 of 3)")


@pytest.mark.parametrize("way", ["in process", "three threads", "two kept processes"])
def test_two_failures_at_each_of_several_batches_are_borne(way, tmp_path):
    messages: list[str] = []
    far_apart = (0, AT, CUT.batches - 1)  # of those that are made ahead, a failure would not be seen
    loader = make_loader(Faulty(cannot_read, 2, tmp_path / "calls", far_apart), way, messages)
    assert epoch_of(loader) == undisturbed()
    loader.close()
    assert [line.split(" ")[1] for line in messages] == [str(number) for number in far_apart for _ in "12"]


@pytest.mark.parametrize(
    ("way", "fault", "reason"),
    [
        ("in process", cannot_read, "OSError: the disk is asleep"),
        ("three threads", cannot_read, "OSError: the disk is asleep"),
        ("one thread", hangs, "nothing came for 0.3 s"),
        ("two kept processes", cannot_read, "OSError: the disk is asleep"),
        ("kept process", killed, "was killed by SIGKILL"),
    ],
)
def test_the_third_failure_at_one_batch_ends_the_run_and_names_its_sequences(way, fault, reason, tmp_path):
    messages: list[str] = []
    sequences = Faulty(fault, 99, tmp_path / "calls")
    loader = make_loader(
        sequences, way, messages, 0.3 if fault is hangs else 60, origin_of=lambda batch_B: f"<{batch_B}>"
    )
    batches = iter(loader)
    head = [content(next(batches)) for _ in range(AT)]
    with pytest.raises(DataError) as caught:
        next(batches)
    message = str(caught.value)
    assert message.startswith(f"batch {AT} (counted through all epochs) could not be made, 3 times in a row: ")
    assert reason in message
    assert f"It holds <{plan_epoch(CUT, 0, 0).batch(AT)}>." in message
    assert head == undisturbed()[:AT]
    assert sequences.calls() == 3
    assert [line.partition("(try ")[2] for line in messages] == ["2 of 3)", "3 of 3)"]
    loader.close()


@pytest.mark.parametrize("way", ["in process", "three threads", "two kept processes"])
@pytest.mark.parametrize(
    "error",
    [
        DataError("x"),
        SettingsError("x"),
        StorageError("x"),
        MemoryError("x"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_would_come_again_is_raised_at_once_as_it_is(way, error, tmp_path):
    def final() -> None:
        raise error

    messages: list[str] = []
    sequences = Faulty(final, 99, tmp_path / "calls")
    loader = make_loader(sequences, way, messages)
    with pytest.raises(type(error), match=str(error)):
        epoch_of(loader)
    assert loader.delivered == AT
    assert (messages, sequences.calls()) == ([], 1)
    loader.close()


@pytest.mark.parametrize("way", ["in process", "three threads"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(signal.SIGTERM)], ids=lambda stop: type(stop).__name__)
def test_a_request_to_stop_is_no_failure(way, stop, tmp_path):
    def stops() -> None:
        raise stop

    messages: list[str] = []
    with pytest.raises(type(stop)):
        epoch_of(make_loader(Faulty(stops, 99, tmp_path / "calls"), way, messages))
    assert messages == []


@pytest.mark.parametrize("way", ["one thread", "two kept processes"])
def test_a_position_is_exact_after_a_restart(way, tmp_path):
    first = make_loader(Faulty(cannot_read, 1, tmp_path / "calls"), way)
    for delivered, _ in enumerate(islice(first, AT + 2), start=1):
        assert first.state_dict()["delivered"] == delivered
    second = make_loader(FakeSequences(LENGTHS), way)
    second.load_state_dict(first.state_dict())
    assert [content(batch) for batch in second] == undisturbed()[AT + 2 :]
    first.close()
    second.close()


def test_a_process_that_takes_turns_starts_again_at_its_own_batch(tmp_path):
    messages: list[str] = []
    ranks = [
        make_loader(Faulty(cannot_read, 1, tmp_path / "calls"), "one thread", messages, rank=r, world=2) for r in (0, 1)
    ]
    zero, one = (epoch_of(loader) for loader in ranks)
    expected = [make_loader(FakeSequences(LENGTHS), "in process", rank=rank, world=2) for rank in (0, 1)]
    assert [zero, one] == [epoch_of(loader) for loader in expected]
    assert [line.split(" ")[1] for line in messages] == [str(AT)]


def test_a_worker_killed_between_two_batches_does_not_disturb_the_step_that_runs():
    messages: list[str] = []
    loader = make_loader(FakeSequences(LENGTHS), "kept process", messages)
    batches = iter(loader)
    head = [content(next(batches))]
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:  # a handler of SIGCHLD would raise here
        pass
    assert head + [content(batch) for batch in batches] == undisturbed()
    assert len(messages) == 1
    loader.close()


def test_a_thread_that_hangs_is_not_waited_for(tmp_path):
    begun = time.monotonic()
    assert epoch_of(make_loader(Faulty(hangs, 1, tmp_path / "calls"), "three threads", wait=0.3)) == undisturbed()
    assert time.monotonic() - begun < CLOSING_SECONDS / 2


def test_a_consumer_that_stops_waits_for_a_thread_that_hangs_but_for_so_long(tmp_path, monkeypatch):
    monkeypatch.setattr("seqvae.data.loader.CLOSING_SECONDS", 0.2)
    loader = make_loader(Faulty(hangs, 9, tmp_path / "calls"), "three threads")
    begun = time.monotonic()
    with closing(iter(loader)) as batches:
        list(islice(batches, AT))
    assert time.monotonic() - begun < 5


def test_a_thread_that_wakes_up_later_disturbs_nothing(tmp_path):
    loader = make_loader(Faulty(hangs, 1, tmp_path / "calls"), "one thread", wait=0.3)
    batches = iter(loader)
    seen = [content(next(batches)) for _ in range(AT + 1)]
    NEVER.set()
    assert seen + [content(batch) for batch in batches] == undisturbed()


def test_no_limit_waits_as_long_as_it_takes(tmp_path):
    messages: list[str] = []
    loader = make_loader(Faulty(lambda: time.sleep(0.5), 1, tmp_path / "calls"), "one thread", messages, wait=0)
    assert epoch_of(loader) == undisturbed()
    assert messages == []
    assert resolve_loading(LoadingSettings(loader_timeout_seconds=0)).timeout_seconds is None


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_wait_that_is_no_time_is_refused_in_the_words_of_the_flag(seconds):
    with pytest.raises(ValueError, match="--loader_timeout_seconds must be 0"):
        LoadingSettings(loader_timeout_seconds=seconds)


def test_a_restart_is_a_warning_by_default(tmp_path, caplog):
    sequences = Faulty(cannot_read, 1, tmp_path / "calls")
    loading = resolve_loading(LoadingSettings())
    list(BatchLoader(sequences, LIMITS, lambda _: plan_epoch(CUT, 0, 0), CUT.batches, loading))
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "seqvae.data.loader")
    assert "the disk is asleep" in record.message


def test_a_disk_that_hangs_when_names_are_looked_up_does_not_keep_the_run(tmp_path, monkeypatch):
    def origin_of(sequences_B: np.ndarray) -> str:
        hangs()
        return "nothing"

    monkeypatch.setattr("seqvae.data.loader.NAMING_SECONDS", 0.1)
    messages: list[str] = []
    sequences = Faulty(cannot_read, 1, tmp_path / "calls")
    assert epoch_of(make_loader(sequences, "one thread", messages, origin_of=origin_of)) == undisturbed()
    assert "It holds sequences that could not be looked up within 0.1 s." in messages[0]


# --- A real cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "valid"])
def test_the_data_module_names_ids_files_and_row_groups_in_training_and_validation(split, tmp_path, monkeypatch):
    data_dir = write_two_files(tmp_path / "data")
    cache, batches = CacheSettings(cache_dir=str(tmp_path / "cache")), BatchSettings(batch_size=11)
    data = SequenceDataModule(SourceSettings(data_dir=str(data_dir)), cache=cache, batches=batches)
    messages: list[str] = []
    data.on_trouble = messages.append
    monkeypatch.setattr(SequenceSet, "gather", lambda *_, **__: cannot_read())
    loader = data.train_dataloader() if split == "train" else data.val_dataloader()
    with pytest.raises(DataError, match="3 times in a row: OSError: the disk is asleep") as caught:
        list(loader)
    places = {
        "train": f"(11 in all) of the train split ({data_dir}/train/a.parquet: row group 0; "
        f"{data_dir}/train/b.parquet: row groups 0, 1, 2)",
        "valid": f"sequence v0 of the valid split ({data_dir}/valid/c.parquet: row group 0)",
    }
    assert len(messages) == 2
    assert all(places[split] in message for message in (*messages, str(caught.value)))


# --- The end of a program -------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
import tests.support.faulty_sequences as t
from seqvae.errors import DataError

def main():
    loader = t.make_loader(t.Faulty(t.{fault}, 99, Path(sys.argv[1]) / "calls"), "{way}", wait={wait})
    print("ready", flush=True)
    for _ in loader:
        pass

try:
    main()
except DataError:
    sys.exit(3)
"""


def start(tmp_path: Path, fault: str, way: str, wait: float) -> subprocess.Popen[str]:
    program = PROGRAM.format(fault=fault, way=way, wait=wait)
    return subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one thread", "two kept processes"])
def test_a_program_whose_loader_hangs_ends_with_its_own_code(way, tmp_path):
    with start(tmp_path, "hangs", way, wait=0.5) as process:
        assert process.wait(timeout=60) == 3


@pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")
def test_worker_processes_end_with_a_parent_that_is_killed_though_they_hang(tmp_path):
    with start(tmp_path, "hangs", "two kept processes", wait=0) as process:
        until = time.monotonic() + 60
        while not (tmp_path / f"calls.{AT}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=10)
    assert (len(workers), alive) == (2, [])
