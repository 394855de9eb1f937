"""--strategy fsdp: each process holds a share of the network, and trains what DDP trains."""

import copy
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from seqvae.config.training import ComputeSettings, OptimizerSettings
from seqvae.data.demo import write_demo
from seqvae.errors import ExitCode, UsageError
from seqvae.files import read_rows
from seqvae.monitors.callback import own_part
from seqvae.training import distributed, sharding
from seqvae.training.distributed import Devices, make_strategy, refuse_strategy
from seqvae.training.objective import negative_elbo
from seqvae.training.optimizers import make_optimizer
from seqvae.training.sharding import ShardedStrategy, load_whole, refuse_wrong_means, share_out, whole
from tests.support.launched import COLUMNS, ends, environment, events_of, free_port, ranked, start, wait_for_step
from tests.support.small_models import make_batch, make_vae

CLOSE = 1e-6
LENGTHS = ([7, 3, 5, 2], [6, 1, 4], [8, 8], [3, 0, 2, 5])
"""Of four micro-batches: a step has two of them in each of two processes, or all in one."""


# --- Two processes, in which a network is trained both ways --------------------------------------------------------------


def losses(network: nn.Module, kind: str, numbers: list[int]) -> list[Tensor]:
    """Return the loss of each of these micro-batches, as a run divides it for one process of two."""
    found = []
    for number in numbers:
        torch.manual_seed(number)
        loss = negative_elbo(network(make_batch(kind, LENGTHS[number], seed=number)), kl_weight=0.5, free_bits=0.1).loss
        found.append(loss / 50)
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = float((found[name] - value).abs().max()) / max(float(value.abs().max()), 1e-3)
        assert error < CLOSE, f"{what}: {name} differs by {error}"


def gradients(network: nn.Module) -> dict[str, Tensor]:
    return {name: whole(weight.grad) for name, weight in network.named_parameters() if weight.grad is not None}


def compare(rank: int, directory: str, kind: str, changes: dict[str, Any]) -> None:
    """Train one step in each way, in one of two processes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    alone = make_vae(kind, **changes).train()
    before = {name: value.clone() for name, value in alone.state_dict().items()}
    replicated, shared = DistributedDataParallel(copy.deepcopy(alone)), copy.deepcopy(alone)
    share_out(shared, init_device_mesh("cpu", (2,)))
    share_out(shared, init_device_mesh("cpu", (2,)))  # as where a run goes back: nothing is left to do

    # Gradients, with accumulation: those of a process's two micro-batches are added up, and averaged over processes.
    for loss in losses(alone, kind, [0, 1, 2, 3]):
        loss.backward()
    mine = [2 * rank, 2 * rank + 1]
    with replicated.no_sync():
        (2 * losses(replicated, kind, mine[:1])[0]).backward()
    (2 * losses(replicated, kind, mine[1:])[0]).backward()
    for number in mine:
        (2 * losses(shared, kind, [number])[0]).backward()
    assert_close(gradients(shared), gradients(replicated.module), "gradients beside DDP's")
    assert_close(gradients(shared), gradients(alone), "gradients beside one process's")

    # The optimizer step, clipped; after it each process holds half of the weights and states.
    settings = OptimizerSettings(lr=0.1, gradient_clip=0.1)
    optimizers = [make_optimizer(network, settings) for network in (replicated.module, shared)]
    norms = [
        whole(nn.utils.clip_grad_norm_(network.parameters(), settings.gradient_clip))
        for network in (replicated.module, shared)
    ]
    assert math.isclose(float(norms[0]), float(norms[1]), rel_tol=CLOSE)
    for optimizer in optimizers:
        optimizer.step()
    trained = {name: whole(value) for name, value in shared.state_dict().items()}
    # Adam divides a gradient by its size: where that is near 0, rounding shows.
    for name, value in replicated.module.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
    held = [
        sum(own_part(weight).numel() for weight in network.parameters())
        + sum(
            own_part(value).numel() for state in optimizer.state.values() for value in state.values() if value.dim() > 0
        )
        for network, optimizer in zip((replicated.module, shared), optimizers, strict=True)
    ]
    assert 0.45 < held[1] / held[0] < 0.55, held

    # What monitors call, in eval mode and with gradients of their own, between two steps.
    plain = copy.deepcopy(alone)
    plain.load_state_dict(trained)
    batch = make_batch(kind, LENGTHS[0], seed=9)
    for network in (plain, shared):
        network.eval()
    with torch.no_grad():
        mean, shared_mean = (network.encode(batch).mean for network in (plain, shared))
        assert_close({"mean": shared_mean}, {"mean": mean}, "encode")
        nll_B, shared_nll_B = (network.nll_given_z(batch, mean) for network in (plain, shared))
        assert_close({"nll": shared_nll_B}, {"nll": nll_B}, "nll_given_z")
    scores = []
    for network in (plain, shared):
        torch.manual_seed(3)
        with torch.no_grad():
            scores.append(dict(zip("dkf", network.latent_scores(batch, 2), strict=True)))
    assert_close(scores[1], scores[0], "latent_scores")
    assert sum(own_part(weight).numel() for weight in shared.parameters()) < 0.55 * len_of(plain)

    # Whole weights go back into shares.
    load_whole(shared, before)
    assert all(torch.equal(whole(value), before[name]) for name, value in shared.state_dict().items())
    torch.distributed.destroy_process_group()
    os._exit(0)  # all is compared; threads of torch's autograd may abort an interpreter that ends beside them


def len_of(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("tokens", {"dropout": 0.1}),
        pytest.param("tokens", {"prior": "vamp", "prior_components": 2, "dropout": 0.1}, marks=pytest.mark.slow),
        pytest.param("events", {"encoder": "tcn", "decoder": "tcn"}, marks=pytest.mark.slow),
        pytest.param("vectors", {"encoder": "lstm", "decoder": "lstm"}, marks=pytest.mark.slow),
    ],
)
def test_shared_out_networks_have_the_gradients_steps_and_monitored_values_of_whole_ones(tmp_path, kind, changes):
    spawn(compare, (str(tmp_path), kind, changes), nprocs=2)


# --- Whole runs ---------------------------------------------------------------------------------------------------------

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"), "tokens", sequences=300, mean_length=20)


def words_of(data_dir: Path, name: str, more: str) -> str:
    return f"--data_dir {data_dir} --cache_dir cache --run_name {name} --batches_per_step 4 --dropout 0.1 {more}"


def rows_of(run: Path) -> pd.DataFrame:
    return pd.read_csv(run / "metrics.csv")[COLUMNS]


def train(folder: Path, words: str, launcher: tuple[str, ...] = ()) -> None:
    (ended,) = ends([start(folder, words, launcher=launcher)])
    assert ended.code == 0, ended.errors


@pytest.fixture(scope="module")
def replicated(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by DDP, watched, of two processes."""
    folder = tmp_path_factory.mktemp("replicated")
    words = words_of(data_dir, "ddp", "--devices 2 --strategy ddp --disable_metrics_monitoring false")
    train(folder, words)
    return folder / "runs" / "ddp"


@pytest.mark.slow
def test_a_shared_out_run_is_one_by_ddp_also_where_all_of_it_is_killed_and_goes_on(data_dir, replicated, tmp_path):
    watched = "--strategy fsdp --disable_metrics_monitoring false"
    words = words_of(data_dir, "whole", watched)
    train(tmp_path, words, TORCHRUN)
    run = tmp_path / "runs" / "whole"
    pd.testing.assert_frame_equal(rows_of(run), rows_of(replicated), rtol=1e-4, check_exact=False)
    found, expected = (read_rows(one / "posterior.jsonl") for one in (run, replicated))
    assert [row["verdict"] for row in found] == [row["verdict"] for row in expected]
    for name in ("rate", "nll", "decoder_use", "mutual_information", "active_units"):
        values = [[row[name] for row in rows if name in row] for rows in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-3) != []
    assert not (run / "samples").exists()
    assert (replicated / "samples").exists()

    killed = words_of(data_dir, "killed", f"{watched} --checkpoint_every_n_steps 2")
    agent = start(tmp_path, killed, launcher=TORCHRUN)
    wait_for_step(tmp_path / "runs" / "killed", 5, [agent])
    workers = psutil.Process(agent.pid).children(recursive=True)
    for process in (*workers, agent):
        process.kill()
    ends([agent])
    train(tmp_path, killed, TORCHRUN)
    assert "resumed" in events_of(tmp_path / "runs" / "killed")
    pd.testing.assert_frame_equal(rows_of(tmp_path / "runs" / "killed"), rows_of(run))  # exactly

    figures = []
    for one in (run, replicated):
        line = [sys.executable, "-m", "seqvae", "evaluate", str(one / "checkpoints" / "last.ckpt")]
        subprocess.run([*line, "--data_dir", str(data_dir)], check=True, env=environment(), cwd=tmp_path, timeout=200)
        figures.append(read_rows(one / "evaluation.jsonl")[-1])
    values = [[row["value"] for row in figure["rows"]] for figure in figures]
    assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-3)
    assert len(values[0]) > 5


@pytest.mark.slow
def test_a_shared_out_run_goes_on_by_ddp_and_in_one_process_and_back(data_dir, replicated, tmp_path):
    run, strategies = tmp_path / "runs" / "many", ("fsdp", "ddp", "fsdp in one process", "fsdp")
    for last, strategy in zip((3, 6, 9, 12), strategies, strict=True):
        words, port = words_of(data_dir, "many", f"--strategy {strategy.split()[0]}"), free_port()
        world = 1 if "one" in strategy else 2
        processes = [start(tmp_path, words, ranked(rank, world, port) if world > 1 else {}) for rank in range(world)]
        if last < 12:
            wait_for_step(run, last, processes)
            processes[0].send_signal(signal.SIGTERM)
        ended = ends(processes)
        assert ended[0].code == (0 if last == 12 else ExitCode.TERMINATED), ended[0].errors
    assert events_of(run).count("resumed") == 3
    pd.testing.assert_frame_equal(rows_of(run), rows_of(replicated), rtol=1e-3, check_exact=False)


@pytest.mark.slow
def test_where_a_process_that_holds_a_share_freezes_the_other_ends_and_names_it(data_dir, tmp_path):
    words, port = (
        words_of(data_dir, "two", "--strategy fsdp --max_steps 100000 --distributed_timeout 0:00:10"),
        free_port(),
    )
    processes = [start(tmp_path, words, ranked(rank, 2, port)) for rank in (0, 1)]
    wait_for_step(tmp_path / "runs" / "two", 3, processes)
    processes[1].send_signal(signal.SIGSTOP)
    (other,) = ends(processes[:1], timeout=90)
    processes[1].kill()
    ends(processes[1:])
    assert other.code == ExitCode.PROCESSES, other.errors
    assert "process 1 (" in other.errors


# --- Refusals -----------------------------------------------------------------------------------------------------------


def test_a_network_is_shared_out_among_several_processes_alone():
    assert isinstance(make_strategy(ComputeSettings(strategy="fsdp"), Devices("cpu", 2, 1)), ShardedStrategy)
    assert isinstance(make_strategy(ComputeSettings(strategy="fsdp2"), Devices("cpu", 2, 1)), ShardedStrategy)
    assert make_strategy(ComputeSettings(strategy="fsdp"), Devices("cpu", 1, 1)) == "auto"


def test_16_mixed_and_compiled_layers_are_refused():
    settings = ComputeSettings(strategy="fsdp", precision="16-mixed")
    with pytest.raises(UsageError, match=r"--strategy fsdp: .*Give --precision bf16-mixed or 32-true"):
        refuse_strategy(settings, Devices("cuda", 2, 1))
    refuse_strategy(settings, Devices("cuda", 1, 1))
    with pytest.raises(ValueError, match=r"--strategy fsdp .*leave out --compile_model"):
        ComputeSettings(strategy="fsdp", compile_model=True)


def test_deepspeed_passes_where_it_is_installed(monkeypatch):
    settings, two = ComputeSettings(strategy="deepspeed_stage_2"), Devices("cpu", 2, 1)
    monkeypatch.setattr(distributed, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"deepspeed is not installed\. Type `pip install deepspeed`"):
        refuse_strategy(settings, two)
    monkeypatch.setattr(distributed, "find_spec", lambda name: name)
    refuse_strategy(settings, two)
    assert make_strategy(settings, two) == "deepspeed_stage_2"


@pytest.mark.parametrize("factor", [1, 2])
def test_a_torch_that_adds_up_where_it_should_average_is_refused(monkeypatch, factor):
    def fake(module: nn.Linear, mesh: Any) -> nn.Linear:
        module.weight.register_hook(lambda gradient: factor * gradient)
        return module

    monkeypatch.setattr(sharding, "fully_shard", fake)
    mesh: Any = SimpleNamespace(device_type="cpu")
    if factor == 1:
        refuse_wrong_means(mesh)
    else:
        with pytest.raises(UsageError, match=r"adds gradients up .*or --strategy ddp"):
            refuse_wrong_means(mesh)
