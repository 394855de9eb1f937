"""Two machines with nothing in common but a cable: one run, the numbers of one process, and restarts that come to the same."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks.two_machines import Machine, two_machines, why_not
from seqvae.data.demo import write_demo
from seqvae.files import read_rows
from tests.support.launched import COLUMNS, by_torchrun, ends, events_of, start, wait_for_step, workers_of

WHY_NOT = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")]

WATCHED = (
    "--disable_metrics_monitoring false --batches_per_step 4 --monitor_every_n_steps 4 --checkpoint_every_n_steps 2"
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"), "tokens", sequences=300, mean_length=20)


@pytest.fixture(scope="module")
def alone(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process whose steps are of four batches."""
    folder = tmp_path_factory.mktemp("alone")
    (ended,) = ends([start(folder, f"--data_dir {data_dir} --run_name two {WATCHED}")])
    assert ended.code == 0, ended.errors
    return folder / "runs" / "two"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    with two_machines([tmp_path / "a", tmp_path / "b"]) as both:
        yield both


def train(machine: Machine, data_dir: Path, launcher: list[str], more: str = "") -> subprocess.Popen[str]:
    words = f"--data_dir {data_dir} --run_name two {WATCHED} {more}"
    return start(machine.folder, words, machine.variables, launcher, machine.before)


def by_c10d(machines: list[Machine], agents: int | str = 2, restarts: int = 0) -> list[list[str]]:
    place = f"{machines[0].name}:29500"  # a port of their own
    return [by_torchrun(agents, place, local=machine.name, restarts=restarts) for machine in machines]


def by_number(machines: list[Machine]) -> list[list[str]]:
    words = (
        f"-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr={machines[0].name} --master_port=29500"
    )
    return [[*words.split(), f"--node_rank={number}"] for number in range(len(machines))]


def assert_like(run: Path, alone: Path) -> None:
    """The same curve and the same weights, up to rounding."""
    curves = [pd.read_csv(one / "metrics.csv")[COLUMNS] for one in (run, alone)]
    pd.testing.assert_frame_equal(*curves, rtol=2e-4, check_exact=False)
    weights = [torch.load(one / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for one in (run, alone)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def assert_read_alike(run: Path, alone: Path) -> None:
    """The same readings of the monitor, but for the mutual information, whose noise goes by the order of the posteriors."""
    readings = [read_rows(one / "posterior.jsonl") for one in (run, alone)]
    assert [row["step"] for row in readings[0]] == [row["step"] for row in readings[1]] != []
    for one, other in zip(*readings, strict=True):
        for name in ("posteriors", "rate", "active_units", "kl_per_dim", "variance_of_means"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("ways", [by_c10d, by_number])
def test_two_nodes_train_as_one_process_and_only_the_first_writes_the_run(data_dir, alone, machines, ways):
    nodes = [train(machine, data_dir, way) for machine, way in zip(machines, ways(machines), strict=True)]
    ended = ends(nodes)
    assert [one.code for one in ended] == [0, 0], ended
    runs = [machine.folder / "runs" for machine in machines]
    assert [run.exists() for run in runs] == [True, False]
    assert_like(runs[0] / "two", alone)
    assert_read_alike(runs[0] / "two", alone)
    assert [row["processes"] for row in read_rows(runs[0] / "two" / "events.jsonl")[:1]] == [2]


def test_a_killed_worker_ends_the_other_and_both_are_started_again(data_dir, alone, machines):
    ways = by_c10d(machines, restarts=2)
    nodes = [train(machine, data_dir, way) for machine, way in zip(machines, ways, strict=True)]
    run = machines[0].folder / "runs" / "two"
    wait_for_step(run, 5, nodes)
    workers_of(nodes[1])[0].kill()
    ended = ends(nodes)
    assert [one.code for one in ended] == [0, 0], ended
    assert events_of(run).count("resumed") == 1
    assert_like(run, alone)
    assert_read_alike(run, alone)


def test_a_killed_node_leaves_the_other_to_go_on(data_dir, alone, machines):
    first, second = (
        train(machine, data_dir, way) for machine, way in zip(machines, by_c10d(machines, "1:2", 2), strict=True)
    )
    run = machines[0].folder / "runs" / "two"
    wait_for_step(run, 5, [first, second])
    worker = workers_of(second)[0]
    second.kill()
    worker.kill()
    (ended,) = ends([first])
    ends([second])
    assert ended.code == 0, ended
    rows = read_rows(run / "events.jsonl")
    assert [row["processes"] for row in rows if row["event"] in ("started", "resumed")] == [2, 1]
    assert_like(run, alone)


def test_a_killed_node_ends_the_other_within_half_a_minute_where_none_is_started_again(data_dir, machines):
    nodes = [
        train(machine, data_dir, way, "--max_steps 100000")
        for machine, way in zip(machines, by_number(machines), strict=True)
    ]
    wait_for_step(machines[0].folder / "runs" / "two", 5, nodes)
    worker = workers_of(nodes[1])[0]
    nodes[1].kill()
    worker.kill()
    since = time.monotonic()
    (ended,) = ends(nodes[:1])
    assert time.monotonic() - since < 30
    ends(nodes[1:])
    assert "process 1 (node-b) of 2 did not answer any more" in ended.errors
    assert ended.code != 0


def test_a_cut_cable_ends_both_within_the_time_that_was_given(data_dir, machines):
    nodes = [
        train(machine, data_dir, way, "--max_steps 100000 --distributed_timeout 0:00:10")
        for machine, way in zip(machines, by_number(machines), strict=True)
    ]
    wait_for_step(machines[0].folder / "runs" / "two", 5, nodes)
    subprocess.run([*machines[0].before[:4], "ip", "link", "set", "cable", "down"], check=True)
    since = time.monotonic()
    ended = ends(nodes[:1])
    assert time.monotonic() - since < 60
    ends(nodes[1:])
    assert "process 1 (node-b) of 2 did not answer any more" in ended[0].errors
