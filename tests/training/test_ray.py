"""Runs over Ray are those of one process, whatever is lost on the way, and end by errors of their own, not by Ray's."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest

import seqvae
from seqvae.config.flags import CommandLine
from seqvae.config.training import ComputeSettings, OptimizedSettings
from seqvae.data.demo import write_demo
from seqvae.errors import DataError, ExitCode, ProcessesError, Stopped, UsageError
from seqvae.files import read_rows
from seqvae.training.distributed import resolve_devices
from seqvae.training.processes import LAUNCHER, find_launch
from tests.support.launched import COLUMNS, ROOT, SMALL, Ended, ends, environment, events_of, wait_for_step
from tests.support.parquet_files import write
from tests.support.ray_cluster import Nodes, cluster

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")

# --- What is typed ------------------------------------------------------------------------------------------------------


def settings_of(words: str) -> OptimizedSettings:
    line = CommandLine(OptimizedSettings)
    return line.settings(line.read_words(words.split()))


@pytest.mark.parametrize("name", ["num_workers", "num-workers", "ray_workers"])
def test_bounds_are_processes_of_ray_whichever_flag_they_stand_behind(name):
    settings = settings_of(f"--launcher ray --{name} 2:8")
    assert settings.compute.ray_bounds == (2, 8)
    assert settings.loading.num_workers == "auto"


def test_a_number_of_workers_is_the_loaders_on_ray_too():
    settings = settings_of("--launcher ray --ray_workers 3 --num_workers 0")
    assert settings.compute.ray_bounds == (3, 3)
    assert settings.loading.num_workers == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num_workers 2:8", "2:8 needs --launcher ray"),
        ("--storage_path s3://bucket", "--storage_path s3://bucket needs --launcher ray"),
        ("--launcher ray", "--launcher ray needs --ray_workers"),
        ("--launcher ray --ray_workers 8:2", "the fewest and the most as 2:8, got 8:2"),
        ("--launcher ray --ray_workers 0:2", "got 0:2"),
        ("--launcher ray --ray_workers many", "got many"),
        ("--launcher ray --ray_workers 2 --devices 2", "in place of --devices and --num_nodes"),
        ("--launcher slurm", "--launcher wants ray, got 'slurm'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words, said):
    with pytest.raises(UsageError) as refusal:
        settings_of(words)
    assert said in str(refusal.value)


def test_without_the_extra_the_message_names_it(monkeypatch):
    monkeypatch.setattr("seqvae.clusters.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the extra 'ray': pip install -e '\.\[ray\]'"):
        seqvae.fit(launcher="ray", ray_workers="2")


@needs_ray
def test_a_run_without_a_name_is_refused_before_ray_starts():
    with pytest.raises(UsageError, match="only a run with --run_name goes on"):
        seqvae.fit(launcher="ray", ray_workers="2")


@needs_ray
def test_bounds_within_which_no_number_shares_the_batches_of_a_step_are_refused_before_ray_starts(tmp_path):
    with pytest.raises(UsageError, match=r"--batches_per_step 16: no number of processes within --ray_workers 5:7"):
        seqvae.fit(
            launcher="ray", ray_workers="5:7", batches_per_step=16, run_name="x", output_dir=str(tmp_path / "runs")
        )


def test_the_scripts_send_ray_to_the_command(monkeypatch):
    with pytest.raises(UsageError, match="--launcher ray is for `seqvae train`"):
        resolve_devices(ComputeSettings(launcher="ray", ray_workers="2"))


# --- What Ray decides by ------------------------------------------------------------------------------------------------


def test_processes_of_ray_know_it_also_within_a_job_of_slurm(monkeypatch):
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS": "1", LAUNCHER: "Ray"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    launch = find_launch()
    assert launch is not None
    assert (launch.launcher, launch.environment.world_size(), launch.per_node) == ("Ray", 2, 2)


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_of_the_room_that_there_is_as_many_processes_are_taken_as_share_a_step_evenly():
    from ray.train import ScalingConfig

    from seqvae.training.ray_launcher import EvenShares

    policy = EvenShares(ScalingConfig(num_workers=(2, 8)), [2, 4, 8])
    counts = [policy._count_possible_workers({"a": {"CPU": 1.0}, "b": {"CPU": rest}}) for rest in (0.0, 2.0, 4.0, 99.0)]
    assert counts == [0, 2, 4, 8]


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_begins_again_where_a_process_was_lost_and_never_after_an_error_of_its_own():
    from ray.exceptions import RayActorError
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    from seqvae.training.ray_launcher import error_of_workers

    def ended_by(*errors: BaseException) -> BaseException | None:
        return error_of_workers(WorkerGroupError("", dict(enumerate(errors))))

    data, bug, stopped = DataError("no such column"), TypeError("a bug"), Stopped(2)
    lost, gone, reset = (
        ProcessesError("lost"),
        WorkerHealthCheckFailedError("", RayActorError()),
        RuntimeError("Connection closed by peer"),
    )
    assert ended_by(data) is data
    assert ended_by(lost, data) is data
    assert ended_by(stopped) is stopped
    assert ended_by(bug) is bug
    assert ended_by(gone) is ended_by(lost) is ended_by(reset) is None
    assert ended_by(bug, gone) is ended_by(bug, reset) is None


# --- Runs ---------------------------------------------------------------------------------------------------------------

WORDS = SMALL.replace("--max_steps 12", "--max_steps 40") + " --batches_per_step 4 --checkpoint_every_n_steps 5"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"), "tokens", sequences=300, mean_length=20)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with cluster(2) as found:
        yield found


@pytest.fixture(scope="module")
def alone(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The metrics of one process whose steps are of four batches."""
    folder = tmp_path_factory.mktemp("alone")
    (ended,) = ends([start(folder, f"--data_dir {data_dir} --run_name run")])
    assert ended.code == 0, ended.errors
    return pd.read_csv(folder / "runs" / "run" / "metrics.csv")[COLUMNS]


def start(folder: Path, words: str, nodes: Nodes | None = None) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "seqvae", "train", *WORDS.split(), "--cache_dir", "cache", *words.split()]
    variables = environment({} if nodes is None else nodes.variables)
    return subprocess.Popen(line, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: "subprocess.Popen[str]") -> Ended:
    (ended,) = ends([process], timeout=400)
    return ended


def workers_of(nodes: Nodes) -> list[psutil.Process]:
    """Return those that train; the names of others are of zombies, too, whose command lines cannot be read."""
    children = psutil.Process(nodes.process.pid).children(recursive=True)
    return [child for child in children if child.name().startswith("ray::RayTrain")]


def assert_same_curve(run: Path, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(pd.read_csv(run / "metrics.csv")[COLUMNS], expected, rtol=1e-3, check_exact=False)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_train_as_one_process_does_and_the_command_of_the_user_is_kept(data_dir, alone, nodes, tmp_path):
    ended = end(start(tmp_path, f"--data_dir {data_dir} --run_name run --launcher ray --num_workers 1:2", nodes))
    assert ended.code == 0, ended.errors
    run = tmp_path / "runs" / "run"
    assert_same_curve(run, alone)
    started = read_rows(run / "events.jsonl")[0]
    assert (started["event"], started["launcher"], started["processes"]) == ("started", "Ray", 2)
    assert "seqvae train --width 16" in (run / "environment.json").read_text()
    assert "to go on    python -m seqvae train --config runs/run/config.yaml" in ended.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_process_is_replaced_and_the_curve_is_that_of_an_unbroken_run(data_dir, alone, nodes, tmp_path):
    process = start(tmp_path, f"--data_dir {data_dir} --run_name run --launcher ray --ray_workers 2", nodes)
    wait_for_step(tmp_path / "runs" / "run", 12, [process])
    workers_of(nodes)[-1].kill()
    ended = end(process)
    assert ended.code == 0, ended.errors
    assert "resumed" in events_of(tmp_path / "runs" / "run")
    assert_same_curve(tmp_path / "runs" / "run", alone)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_is_lost_in_mid_epoch_leaves_the_run_to_the_other(data_dir, alone, tmp_path):
    with cluster(2) as nodes:
        process = start(tmp_path, f"--data_dir {data_dir} --run_name run --launcher ray --ray_workers 1:2", nodes)
        wait_for_step(tmp_path / "runs" / "run", 12, [process])
        nodes.remove_last()
        ended = end(process)
    assert ended.code == 0, ended.errors
    run = tmp_path / "runs" / "run"
    rows = [row for row in read_rows(run / "events.jsonl") if row["event"] in ("started", "resumed")]
    assert [row["processes"] for row in rows] == [2, 1]
    assert_same_curve(run, alone)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_run_whose_directory_was_lost_goes_on_from_its_storage_or_says_that_it_has_none(
    data_dir, alone, nodes, tmp_path, is_stored
):
    storage = f"--storage_path {tmp_path / 'storage'}" if is_stored else ""
    words = f"--data_dir {data_dir} --run_name run --launcher ray --ray_workers 2 {storage}"
    process = start(tmp_path, words, nodes)
    run = tmp_path / "runs" / "run"
    wait_for_step(run, 12, [process])
    for worker in workers_of(nodes):
        worker.kill()
    shutil.rmtree(run)
    ended = end(process)
    if is_stored:
        assert ended.code == 0, ended.errors
        resumed = [row for row in read_rows(run / "events.jsonl") if row["event"] == "resumed"]
        assert [row["step"] for row in resumed] in ([5], [10])  # what Ray had taken note of, every 2 s
        assert_same_curve(run, alone)
        shutil.rmtree(run)
        again = end(start(tmp_path, words, nodes))
        assert "nothing left to do" in again.output, again.errors
    else:
        assert ended.code == ExitCode.STORAGE
        *_, last = ended.errors.splitlines()
        assert last.startswith("seqvae train: runs/run is not on ")
        assert last.endswith("Machines without a shared disk need --storage_path")


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_error_of_a_run_is_that_of_the_command_and_not_tried_again(data_dir, nodes, tmp_path):
    words = f"--data_dir {data_dir} --run_name run --launcher ray --ray_workers 2 --sequence_column nothing"
    ended = end(start(tmp_path, words, nodes))
    assert ended.code == end(start(tmp_path, words.partition("--launcher")[0] + "--sequence_column nothing")).code
    assert "seqvae train: " in ended.errors
    assert "'nothing'" in ended.errors
    assert "Traceback" not in ended.output + ended.errors


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_saves_and_the_run_goes_on_without_ray(data_dir, alone, nodes, tmp_path):
    words = f"--data_dir {data_dir} --run_name run"
    process = start(tmp_path, f"{words} --launcher ray --ray_workers 2", nodes)
    wait_for_step(tmp_path / "runs" / "run", 7, [process])
    process.send_signal(signal.SIGINT)
    since = time.monotonic()
    ended = end(process)
    assert ended.code == ExitCode.INTERRUPTED, ended.errors
    assert "which is saved. To go on:\npython -m seqvae train --config runs/run/config.yaml" in ended.errors
    assert time.monotonic() - since < 60
    assert "interrupted" in events_of(tmp_path / "runs" / "run")
    assert end(start(tmp_path, words)).code == 0
    assert_same_curve(tmp_path / "runs" / "run", alone)


# --- Work in pieces -----------------------------------------------------------------------------------------------------

PIECES = """
import os, time
from seqvae.errors import DataError
from seqvae.clusters import run_on_ray

taken = []
def items():
    for item in range(12):
        taken.append(item)
        yield item

def slow_at_first(item):
    time.sleep(0.5 if item == 0 else 0.0)
    if item == 9:
        raise DataError("the ninth")
    return item * item, os.getpid()

answers = run_on_ray(slow_at_first, items(), at_once=4)
found = [next(answers)]
assert taken == [0, 1, 2, 3], taken
try:
    found.extend(answers)
except DataError as error:
    assert str(error) == "the ninth", error
assert [square for square, _ in found] == [item * item for item in range(9)], found
assert os.getpid() not in {process for _, process in found}
"""


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_work_in_pieces_comes_back_in_order_a_few_at_once_and_ends_by_its_own_error(nodes):
    done = subprocess.run(
        [sys.executable, "-c", PIECES], env=environment(nodes.variables), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@needs_ray
@pytest.mark.slow
def test_a_cache_by_tasks_of_two_nodes_is_that_of_this_process(tmp_path):
    random = np.random.default_rng(0)
    for number in range(3):
        lists = [random.integers(0, 300, random.integers(1, 40)).astype(np.int32) for _ in range(700)]
        write(tmp_path / "data" / f"{number}.parquet", {"tokens": lists}, row_group_size=100)
    program = (
        "import sys; from seqvae.data.building import parts; parts.PART_BYTES = 20_000; "
        "from seqvae.cli.manage_cache import build; build('build-cache', sys.argv[1:])"
    )
    found = []
    with cluster(2) as nodes:
        for more in (["--launcher", "ray"], ["--workers", "1"]):
            folder = tmp_path / more[-1]
            line = [
                sys.executable,
                "-c",
                program,
                "--data_dir",
                str(tmp_path / "data"),
                "--cache_dir",
                str(folder),
                *more,
            ]
            ended = subprocess.run(
                line, env=environment(nodes.variables), capture_output=True, text=True, timeout=120, cwd=ROOT
            )
            assert ended.returncode == 0, ended.stderr
            cache = Path(ended.stdout.splitlines()[-1])
            assert cache.parent == folder
            found.append(
                {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.is_file()}
            )
    assert found[0] == found[1]
