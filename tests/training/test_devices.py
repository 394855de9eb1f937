"""What a run computes on: what was requested, what there is, and what Lightning receives."""

import os
import sys
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from seqvae.config.training import ComputeSettings, OptimizerSettings
from seqvae.errors import UsageError
from seqvae.training.distributed import (
    Devices,
    ResolvedPrecision,
    make_precision,
    make_strategy,
    resolve_devices,
    start_by_torchrun,
)
from seqvae.training.processes import DECISION, connect, decide_in_first_process, is_first_process
from seqvae.training.run_directory.resume import shared_out
from seqvae.training.trainer import validation_cadence

LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
SLURM = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NAME")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """No GPU, no launcher."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in (*LAUNCHERS, *SLURM, DECISION):
        monkeypatch.delenv(name, raising=False)


def give_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_without_a_gpu_one_process_runs_on_the_cpu():
    assert resolve_devices(ComputeSettings(devices="auto")) == Devices("cpu", 1, 1)


def test_all_gpus_are_taken_on_request(monkeypatch):
    give_gpus(monkeypatch, 8)
    assert resolve_devices(ComputeSettings(devices="auto", num_nodes=2)).world == 16
    assert resolve_devices(ComputeSettings()).world == 1


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    give_gpus(monkeypatch, 2)
    with pytest.raises(UsageError, match="--devices 4"):
        resolve_devices(ComputeSettings(devices=4))


def test_an_accelerator_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="--accelerator gpu"):
        resolve_devices(ComputeSettings(accelerator="gpu"))


def test_the_number_of_processes_that_torchrun_started_holds(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert resolve_devices(ComputeSettings()) == Devices("cpu", 3, 2, "torchrun")


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "flags", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, {}, (1, 4)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, {"devices": 2}, (2, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, {}, (4, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, {"devices": 2, "num_nodes": 2}, (2, 2)),
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}, {}, (2, 2)),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {}, (1, 1)),
    ],
)
def test_how_many_processes_there_are_is_what_the_launcher_says(monkeypatch, variables, flags, expected):
    launch(monkeypatch, **variables)
    devices = resolve_devices(ComputeSettings(**flags))
    assert (devices.per_node, devices.nodes) == expected


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, {"devices": 3}, "started 4 processes, 2 on each machine, .*--devices 3: leave"),
        ({"LOCAL_WORLD_SIZE": "2"}, {"num_nodes": 4}, "--num_nodes 4: leave these flags out"),
        ({"LOCAL_WORLD_SIZE": "3"}, {}, "which does not go with as many on each machine"),
        ({"RANK": "4"}, {}, "RANK=4 and WORLD_SIZE=4: processes are numbered from 0 to 3"),
        ({"RANK": "first"}, {}, "RANK='first': a launcher sets it to a number"),
    ],
)
def test_flags_that_disagree_with_the_launcher_are_refused(monkeypatch, variables, flags, message):
    launch(monkeypatch, **{"RANK": "3", "WORLD_SIZE": "4"} | variables)
    with pytest.raises(UsageError, match=message):
        resolve_devices(ComputeSettings(**flags))


def test_one_process_of_several_needs_the_address_of_the_first(monkeypatch):
    launch(monkeypatch, RANK="1", WORLD_SIZE="2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match=r"RANK=1 and WORLD_SIZE=2 .* but MASTER_ADDR of the first one is not set"):
        connect("gloo", timedelta(seconds=1), 1)


def test_several_machines_are_started_by_torchrun(monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.setattr(sys, "orig_argv", ["python", "train_optimized.py", "--num_nodes", "2"])
    with pytest.raises(UsageError, match=r"without NODE_RANK, .*torchrun --nnodes=2 --nproc_per_node=3 --node_rank=N"):
        start_by_torchrun(Devices("cpu", 3, 2))
    launch(monkeypatch, NODE_RANK="1", MASTER_ADDR="a", MASTER_PORT="5")
    start_by_torchrun(Devices("cpu", 3, 2))
    torchrun = "-m torch.distributed.run --nnodes=2 --nproc_per_node=3 --node_rank=1 --master_addr=a --master_port=5 --no_python"
    assert started == [[sys.executable, *torchrun.split(), sys.executable, "train_optimized.py", "--num_nodes", "2"]]


BEGAN = {"gradient_accumulation_steps": "4", "batches_per_step": "8"}
"""Of a run of two processes."""


@pytest.mark.parametrize(
    ("began", "flags", "world", "expected"),
    [
        ({}, {"gradient_accumulation_steps": 2}, 3, (2, 6)),
        ({}, {"batches_per_step": 6}, 3, (2, 6)),
        (BEGAN, {"gradient_accumulation_steps": 4}, 4, (2, 8)),
        (BEGAN, {"gradient_accumulation_steps": 4}, 1, (8, 8)),
        (BEGAN, {}, 2, (4, 8)),
        ({"gradient_accumulation_steps": "2", "batches_per_step": "8"}, {}, 4, (2, 8)),  # and once more among four
        (BEGAN, {"gradient_accumulation_steps": 3}, 2, (3, 6)),  # another choice, which is refused later
        ({"gradient_accumulation_steps": "4"}, {"gradient_accumulation_steps": 4}, 2, (4, 8)),  # of an earlier version
    ],
)
def test_a_step_has_as_many_batches_as_the_run_began_with(began, flags, world, expected):
    shared = shared_out(OptimizerSettings(**flags), began, world, default=1)
    assert (shared.gradient_accumulation_steps, shared.batches_per_step) == expected


def test_several_processes_average_gradients_and_other_strategies_pass_through():
    two = Devices("cpu", 2, 1)
    strategy = make_strategy(ComputeSettings(), two)
    assert isinstance(strategy, DDPStrategy)
    assert strategy.process_group_backend == "gloo"
    assert make_strategy(ComputeSettings(), Devices("cpu", 1, 1)) == "auto"
    assert make_strategy(ComputeSettings(strategy="deepspeed"), two) == "deepspeed"


@pytest.mark.parametrize("name", ["ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_fork_find_unused_parameters_true"])
def test_strategies_that_copy_a_running_process_are_refused_with_one_that_works(name):
    with pytest.raises(ValueError, match=f"--strategy {name}: .*Give --strategy ddp, .*or start it with torchrun"):
        ComputeSettings(strategy=name)


def test_several_processes_are_refused_where_there_is_no_command_to_start_again(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert resolve_devices(ComputeSettings()).world == 1
    with pytest.raises(UsageError, match=r"--devices 2: .* a notebook .*`seqvae train`"):
        resolve_devices(ComputeSettings(devices=2))


@pytest.mark.parametrize(
    ("slurm", "devices"),
    [
        ({"SLURM_NTASKS": "4"}, 1),
        ({"SLURM_NTASKS": "4"}, 4),
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"}, 2),
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}, 2),
    ],
)
def test_tasks_of_slurm_that_do_not_fit_are_refused_before_data_are_read(monkeypatch, slurm, devices):
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UsageError, match=rf"SLURM_NTASKS=4.*--nodes 1 --ntasks-per-node {devices} in place of --ntasks"
    ):
        resolve_devices(ComputeSettings(devices=devices, num_nodes=1))


def test_a_task_of_slurm_for_each_device_is_a_run(monkeypatch):
    for name, value in {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    assert resolve_devices(ComputeSettings(devices=2, num_nodes=2)).world == 4


def test_the_graph_is_declared_static_where_a_batch_is_a_step_of_its_own():
    two = Devices("cpu", 2, 1)
    for static_graph in (False, True):
        strategy = make_strategy(ComputeSettings(strategy="ddp"), two, static_graph=static_graph)
        assert isinstance(strategy, DDPStrategy)
        assert strategy._ddp_kwargs["static_graph"] is static_graph


def test_the_initial_loss_scale_reaches_the_scaler_of_16_mixed_alone():
    plugin = make_precision(ResolvedPrecision("16-mixed"), Devices("cpu", 1, 1), 1024.0)
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 1024.0
    assert make_precision(ResolvedPrecision("bf16-mixed"), Devices("cpu", 1, 1), 1024.0) is None


@pytest.mark.parametrize(
    ("variables", "first"),
    [({}, True), ({"LOCAL_RANK": "1"}, False), ({"NODE_RANK": "1"}, False), ({"RANK": "2", "LOCAL_RANK": "0"}, False)],
)
def test_which_process_is_the_first_is_known_before_training(monkeypatch, variables, first):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_first_process() == first


def test_what_the_first_process_decides_reaches_those_that_lightning_starts(monkeypatch):
    two = Devices("cpu", 2, 1)
    monkeypatch.setenv(DECISION, "")  # so that it is removed again
    monkeypatch.delenv(DECISION)
    assert decide_in_first_process(lambda: {"directory": "runs/a"}, two.world) == {"directory": "runs/a"}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert decide_in_first_process(lambda: {"directory": "another"}, two.world) == {"directory": "runs/a"}


@pytest.mark.parametrize(
    ("interval", "batches", "accumulate", "expected"),
    [
        (1.0, 100, 2, (None, 1)),
        (0.1, 1000, 2, (100, 1)),
        (0.1, 100, 2, (50, 1)),  # every 5 steps would be too often
        (0.1, 59, 1, (29, 1)),
        (0.1, 7, 2, (None, 1)),
        (1, 100, 2, (2, 1)),
        (25, 100, 2, (50, 1)),
        (49, 99, 2, (98, 1)),
        (50, 99, 2, (None, 1)),
        (150, 100, 2, (None, 3)),
    ],
)
def test_validation_falls_between_optimizer_steps(interval, batches, accumulate, expected):
    assert validation_cadence(interval, batches_per_epoch=batches, accumulate=accumulate) == expected
