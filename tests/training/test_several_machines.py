"""Runs of several processes that a launcher started: one run, whoever started it and wherever it is, and nobody waits for ever."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from seqvae.data.demo import write_demo
from seqvae.errors import ExitCode
from seqvae.files import read_rows
from tests.support.launched import (
    COLUMNS,
    by_torchrun,
    ends,
    environment,
    events_of,
    free_port,
    ranked,
    start,
    wait_for_step,
    workers_of,
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"), "tokens", sequences=300, mean_length=20)


@pytest.fixture(scope="module")
def alone(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The metrics of one process whose steps are of four batches."""
    folder = tmp_path_factory.mktemp("alone")
    (ended,) = ends([start(folder, words_of(data_dir, "one"))])
    assert ended.code == 0, ended.errors
    return rows_of(folder / "runs" / "one")


def words_of(data_dir: Path, name: str, more: str = "") -> str:
    return f"--data_dir {data_dir} --cache_dir cache --run_name {name} --batches_per_step 4 {more}"


def rows_of(run: Path) -> pd.DataFrame:
    return pd.read_csv(run / "metrics.csv")[COLUMNS]


def assert_same_curve(run: Path, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(rows_of(run), expected, rtol=2e-4, check_exact=False)


# --- Who this is --------------------------------------------------------------------------------------------------------


def test_rank_and_world_size_alone_make_one_run_also_without_a_shared_disk(data_dir, alone, tmp_path):
    port = free_port()
    folders = [tmp_path / name for name in ("a", "b")]
    first = start(folders[0], words_of(data_dir, "two"), ranked(0, 2, port))
    time.sleep(1.0)
    ended = ends([first, start(folders[1], words_of(data_dir, "two"), ranked(1, 2, port))])
    assert [one.code for one in ended] == [0, 0], ended
    assert_same_curve(folders[0] / "runs" / "two", alone)
    assert not (folders[1] / "runs").exists()
    started = read_rows(folders[0] / "runs" / "two" / "events.jsonl")[0]
    assert (started["processes"], started["launcher"]) == (2, "RANK and WORLD_SIZE")


@pytest.mark.slow
def test_a_late_machine_leaves_the_files_of_the_run_alone(data_dir, alone, tmp_path):
    port = free_port()
    first = start(tmp_path, words_of(data_dir, "two"), ranked(0, 2, port))
    time.sleep(12.0)
    second = start(tmp_path, words_of(data_dir, "two"), ranked(1, 2, port))
    assert [one.code for one in ends([first, second])] == [0, 0]
    run = tmp_path / "runs" / "two"
    assert_same_curve(run, alone)
    assert (run / "config.yaml").exists()
    assert events_of(run)[0] == "started"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two"]


def test_other_data_on_another_machine_are_refused_by_all(data_dir, tmp_path):
    port = free_port()
    other = write_demo(tmp_path, "tokens", sequences=290, mean_length=20)
    folders = [tmp_path / name for name in ("a", "b")]
    ended = ends(
        [
            start(folder, words_of(data, "two"), ranked(rank, 2, port))
            for rank, (folder, data) in enumerate(zip(folders, (data_dir, other), strict=True))
        ]
    )
    assert [one.code for one in ended] == [ExitCode.USAGE] * 2
    for one in ended:
        assert "the processes of this run have other data: sequences is 300 in process 0" in one.errors
        assert "Give all machines the same files" in one.errors
    assert not (folders[0] / "runs" / "two").exists()


@pytest.mark.slow
def test_other_flags_on_another_machine_are_refused_by_all(data_dir, tmp_path):
    port = free_port()
    words = [words_of(data_dir, "two"), words_of(data_dir, "two", "--seed 1")]
    ended = ends([start(tmp_path, one, ranked(rank, 2, port)) for rank, one in enumerate(words)])
    assert [one.code for one in ended] == [ExitCode.USAGE] * 2
    for one in ended:
        assert "have other settings: seed is 0 in process 0" in one.errors
        assert "Give all machines the same flags" in one.errors


def test_a_process_that_does_not_come_is_named(data_dir, tmp_path):
    words = words_of(data_dir, "two", "--distributed_timeout 0:00:03")
    port = free_port()
    ended = ends([start(tmp_path, words, ranked(rank, 3, port)) for rank in (0, 2)])
    assert [one.code for one in ended] == [ExitCode.PROCESSES] * 2
    text = "process 1, of those that RANK and WORLD_SIZE says there are, did not come within 0:00:03"
    assert text in ended[0].errors


@pytest.mark.parametrize("numbers", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_compressed_gradients_train_nearly_as_whole_ones(data_dir, alone, tmp_path, numbers):
    port, words = free_port(), words_of(data_dir, "two", f"--compress_gradients {numbers} --bucket_megabytes 0.01")
    ended = ends([start(tmp_path, words, ranked(rank, 2, port)) for rank in range(2)])
    assert [one.code for one in ended] == [0, 0], ended
    found = rows_of(tmp_path / "runs" / "two")
    pd.testing.assert_frame_equal(found, alone, rtol=2e-2, check_exact=False)
    assert found["gradient_norm"].iloc[0] != pytest.approx(alone["gradient_norm"].iloc[0], rel=1e-6)


# --- Going on -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(1, 2, 4, 1), (4, 1, 2)])
def test_a_run_goes_on_among_another_number_of_processes_as_if_it_had_not_been_interrupted(
    data_dir, alone, tmp_path, worlds
):
    steps = [*(3, 6, 9)[: len(worlds) - 1], 12]
    for world, last in zip(worlds, steps, strict=True):
        port = free_port()
        words = (
            words_of(data_dir, "many") if last == 3 else words_of(data_dir, "many").replace("--batches_per_step 4", "")
        )
        variables = [ranked(rank, world, port) if world > 1 else {} for rank in range(world)]
        processes = [start(tmp_path, words, one) for one in variables]
        if last < 12:
            wait_for_step(tmp_path / "runs" / "many", last, processes)
            processes[0].send_signal(signal.SIGTERM)
        codes = [one.code for one in ends(processes)]
        assert codes[0] == (0 if last == 12 else ExitCode.TERMINATED)
    found = rows_of(tmp_path / "runs" / "many")
    pd.testing.assert_frame_equal(found, alone, rtol=1e-3, check_exact=False)


def test_processes_that_cannot_share_the_batches_of_a_step_evenly_are_refused(data_dir, tmp_path):
    (ended,) = ends([start(tmp_path, words_of(data_dir, "x", "--devices 3"))])
    assert ended.code == ExitCode.USAGE
    assert (
        "--batches_per_step 4: 3 processes cannot share them evenly. Start as many as divide it (1, 2, 4)"
        in ended.errors
    )


def interrupted_run(data_dir: Path, folders: list[Path]) -> Path:
    """Return the first machine's run, saved after some steps; the other machine has only its cache."""
    port = free_port()
    processes = [
        start(folder, words_of(data_dir, "two", "--checkpoint_every_n_steps 2"), ranked(rank, 2, port))
        for rank, folder in enumerate(folders)
    ]
    run = folders[0] / "runs" / "two"
    wait_for_step(run, 6, processes)
    processes[0].send_signal(signal.SIGTERM)
    assert [one.code for one in ends(processes)] == [ExitCode.TERMINATED, 0]
    assert not (folders[1] / "runs").exists()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("has", ["none", "an earlier one under its name"])
def test_a_machine_without_the_checkpoint_gets_it_from_the_first(data_dir, alone, tmp_path, has):
    folders = [tmp_path / name for name in ("a", "b")]
    run = interrupted_run(data_dir, folders)
    if has != "none":
        other = folders[1] / "runs" / "two" / "checkpoints" / "last.ckpt"
        other.parent.mkdir(parents=True)
        shutil.copy(run / "checkpoints" / "previous.ckpt", other)
    port = free_port()
    words = words_of(data_dir, "two", "--checkpoint_every_n_steps 2")
    ended = ends([start(folder, words, ranked(rank, 2, port)) for rank, folder in enumerate(folders)])
    assert [one.code for one in ended] == [0, 0], ended
    assert "resumed" in events_of(run)
    assert_same_curve(run, alone)


@pytest.mark.slow
def test_a_machine_that_has_no_room_for_the_checkpoint_ends_all(data_dir, tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    interrupted_run(data_dir, folders)
    port, words = free_port(), words_of(data_dir, "two")
    full = [{"fault": "full_disk", "most_bytes": 20_000, "hook": "now"}]
    processes = [
        start(folder, words, ranked(rank, 2, port), faults=full if rank else ()) for rank, folder in enumerate(folders)
    ]
    ended = ends(processes, timeout=60)
    assert [one.code for one in ended] == [ExitCode.STORAGE] * 2, ended
    for one in ended:
        assert "cannot keep a copy of it ([Errno 27] File too large)" in one.errors


@pytest.mark.slow
def test_a_slow_build_on_another_machine_is_waited_for(data_dir, alone, tmp_path):
    port, words = free_port(), words_of(data_dir, "two", "--distributed_timeout 0:00:05")
    slow = [{"fault": "slow_build", "seconds": 12}]
    processes = [
        start(tmp_path / name, words, ranked(rank, 2, port), faults=slow if rank else ())
        for rank, name in enumerate(("a", "b"))
    ]
    assert [one.code for one in ends(processes)] == [0, 0]
    assert_same_curve(tmp_path / "a" / "runs" / "two", alone)


# --- Lost processes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_ends_the_others_and_is_named(data_dir, tmp_path, frozen):
    port = free_port()
    words = words_of(data_dir, "two", "--max_steps 100000 --distributed_timeout 0:00:10")
    processes = [start(tmp_path, words, ranked(rank, 2, port)) for rank in (0, 1)]
    wait_for_step(tmp_path / "runs" / "two", 3, processes)
    processes[frozen].send_signal(signal.SIGSTOP)
    since = time.monotonic()
    (other,) = ends([processes[1 - frozen]], timeout=90)
    assert time.monotonic() - since < 60
    processes[frozen].kill()
    ends([processes[frozen]])
    assert other.code == ExitCode.PROCESSES, other.errors
    assert ("the first process" if frozen == 0 else "process 1 (") in other.errors
    assert "did not answer any more" in other.errors
    if frozen == 1:
        assert events_of(tmp_path / "runs" / "two")[-1] == "failed"


@pytest.mark.slow
def test_all_that_are_left_of_three_name_the_same_lost_process(data_dir, tmp_path):
    port = free_port()
    words = words_of(data_dir, "three", "--max_steps 100000 --batches_per_step 3").replace("--batches_per_step 4", "")
    processes = [start(tmp_path, words, ranked(rank, 3, port)) for rank in range(3)]
    wait_for_step(tmp_path / "runs" / "three", 3, processes)
    since = time.monotonic()
    processes[2].kill()
    others = ends(processes[:2], timeout=60)
    assert time.monotonic() - since < 30
    ends(processes[2:])
    assert [one.code for one in others] == [ExitCode.PROCESSES] * 2, others
    for one in others:
        assert "process 2 (" in one.errors
        assert "did not answer any more" in one.errors


# --- Started again by torchrun ------------------------------------------------------------------------------------------


def test_a_killed_process_of_one_agent_is_started_again_with_that_of_the_other(data_dir, alone, tmp_path):
    words = words_of(data_dir, "again", "--checkpoint_every_n_steps 2")
    endpoint = f"127.0.0.1:{free_port()}"
    folders = [tmp_path / name for name in ("a", "b")]
    agents = [
        start(folder, words, launcher=by_torchrun(2, endpoint, local=f"127.0.0.{number}", restarts=2))
        for number, folder in enumerate(folders, start=1)
    ]
    first = folders[0] / "runs" / "again"  # on the agent whose address comes first
    wait_for_step(first, 5, agents)
    workers_of(agents[1])[0].kill()
    assert [one.code for one in ends(agents, timeout=60)] == [0, 0]
    assert events_of(first).count("resumed") == 1
    assert not (folders[1] / "runs").exists()
    assert_same_curve(first, alone)


@pytest.mark.slow
def test_where_a_whole_machine_is_lost_the_other_goes_on(data_dir, alone, tmp_path):
    words = words_of(data_dir, "again", "--checkpoint_every_n_steps 2")
    endpoint = f"127.0.0.1:{free_port()}"
    folders = [tmp_path / name for name in ("a", "b")]
    first, second = (
        start(folder, words, launcher=by_torchrun("1:2", endpoint, local=f"127.0.0.{number}", restarts=2))
        for number, folder in enumerate(folders, start=1)
    )
    run = folders[0] / "runs" / "again"
    wait_for_step(run, 5, [first, second])
    (worker,) = workers_of(second)
    second.kill()
    worker.kill()
    (ended,) = ends([first], timeout=150)
    ends([second])
    assert ended.code == 0, ended.errors
    rows = read_rows(run / "events.jsonl")
    assert [row["processes"] for row in rows if row["event"] in ("started", "resumed")] == [2, 1]
    assert_same_curve(run, alone)


def test_a_run_without_a_name_is_refused_where_it_would_be_started_again(data_dir, tmp_path):
    variables = {
        **ranked(0, 1, free_port(), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK="0"),
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }
    (ended,) = ends([start(tmp_path, f"--data_dir {data_dir}", variables)])
    assert ended.code == ExitCode.USAGE
    assert "only a run with --run_name goes on then" in ended.errors


@pytest.mark.slow
def test_processes_that_give_signs_of_life_all_the_time_end_without_being_aborted(tmp_path):
    """Within a call of the store, the end of the interpreter aborts a process: most often of those that call it all the time."""
    program = (
        "from datetime import timedelta; from seqvae.training import processes; processes.BEAT_SECONDS = 0.0; "
        "processes.connect('gloo', timedelta(seconds=30), 2); processes.meet('the end')"
    )
    for _ in range(8):
        port = free_port()
        line = [sys.executable, "-c", program]
        places = [environment(ranked(rank, 2, port)) for rank in range(2)]
        both = [subprocess.Popen(line, env=place, stderr=subprocess.PIPE, text=True) for place in places]
        errors = [process.communicate(timeout=60)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], errors
