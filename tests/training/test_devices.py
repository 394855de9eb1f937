"""What a run computes on: what was requested, what there is, and what Lightning receives."""

import sys

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from seqvae.config.training import ComputeSettings
from seqvae.errors import UsageError
from seqvae.training.distributed import (
    DECISION,
    Devices,
    ResolvedPrecision,
    decide_in_first_process,
    is_first_process,
    make_precision,
    make_strategy,
    resolve_devices,
)
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
    assert resolve_devices(ComputeSettings()) == Devices("cpu", 3, 2)


def test_several_processes_average_gradients_and_other_strategies_pass_through():
    two = Devices("cpu", 2, 1)
    strategy = make_strategy("auto", two)
    assert isinstance(strategy, DDPStrategy)
    assert strategy.process_group_backend == "gloo"
    assert make_strategy("auto", Devices("cpu", 1, 1)) == "auto"
    assert make_strategy("fsdp", two) == "fsdp"


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
        resolve_devices(ComputeSettings(devices=devices))


def test_a_task_of_slurm_for_each_device_is_a_run(monkeypatch):
    for name, value in {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    assert resolve_devices(ComputeSettings(devices=2, num_nodes=2)).world == 4


def test_the_graph_is_declared_static_where_a_batch_is_a_step_of_its_own():
    two = Devices("cpu", 2, 1)
    for static_graph in (False, True):
        strategy = make_strategy("ddp", two, static_graph=static_graph)
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
    assert decide_in_first_process(lambda: {"directory": "runs/a"}, two) == {"directory": "runs/a"}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert decide_in_first_process(lambda: {"directory": "another"}, two) == {"directory": "runs/a"}


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
