"""What a run computes on, and what its processes agree on.

In: the compute settings. Out: devices, precision and strategy for Lightning's Trainer, and decisions of the first process that
all processes know.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy

from seqvae.config.training import ComputeSettings
from seqvae.errors import UsageError

Decision = TypeVar("Decision")
Precision = Literal["32-true", "16-mixed", "bf16-mixed"]

PRECISIONS: dict[str, Precision] = {
    "32-true": "32-true",
    "16-mixed": "16-mixed",
    "bf16-mixed": "bf16-mixed",
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}
"""Each value of --precision, and the precision that it stands for."""

DTYPES: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
}
"""The type that matrices are multiplied in."""

DECISION = "SEQVAE_DECISION"
"""Variable of the environment that carries a decision to the processes that Lightning starts."""

RANKS = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Variables that launchers number processes with where none of them sets RANK."""


class Devices(NamedTuple):
    """The processes of a run: one for each device."""

    accelerator: Literal["cpu", "cuda", "mps"]
    per_node: int
    nodes: int

    @property
    def world(self) -> int:
        return self.per_node * self.nodes

    def __str__(self) -> str:
        name = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU"}[self.accelerator]
        if self.world == 1:
            return f"one {name}"
        processes = f"{self.world} processes" if self.accelerator == "cpu" else f"{self.world} {name}s"
        return processes if self.nodes == 1 else f"{processes} on {self.nodes} machines"


def resolve_devices(compute: ComputeSettings) -> Devices:
    """Return the devices of this machine for --accelerator, --devices and --num_nodes.

    Under torchrun the processes exist already, and their number holds.
    """
    accelerator: Literal["cpu", "cuda", "mps"] = "cpu"
    if compute.accelerator in ("auto", "gpu") and torch.cuda.is_available():
        accelerator = "cuda"
    elif compute.accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        accelerator = "mps"
    elif compute.accelerator not in ("auto", "cpu"):
        raise UsageError(f"--accelerator {compute.accelerator}: there is none here that torch can use")
    if started_by_torchrun():
        world, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return Devices(accelerator, per_node, world // per_node)
    available = torch.cuda.device_count() if accelerator == "cuda" else 1
    requested = available if compute.devices == "auto" else compute.devices
    if accelerator != "cpu" and requested > available:
        raise UsageError(f"--devices {compute.devices}: this machine has {available} of them")
    devices = Devices(accelerator, requested, compute.num_nodes)
    refuse_other_tasks(devices)
    if devices.world > 1 and hasattr(sys, "ps1"):
        raise UsageError(
            f"--devices {requested}: each process of a run starts the command again, which a notebook or an interactive session "
            "has not. Type `seqvae train` with the same flags into a shell"
        )
    return devices


def refuse_other_tasks(devices: Devices) -> None:
    """Refuse what SLURM started, where it is not a task for each device: Lightning would say so when all data have been read."""
    if "SLURM_NTASKS" not in os.environ or not SLURMEnvironment.detect():
        return
    try:
        slurm = SLURMEnvironment()
        if devices.world > 1:
            slurm.validate_settings(devices.per_node, devices.nodes)
    except (RuntimeError, ValueError) as error:
        names = ("SLURM_NNODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
        found = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        raise UsageError(
            f"SLURM's tasks ({found}) do not fit this run, which takes {devices}: give sbatch or srun --nodes {devices.nodes} "
            f"--ntasks-per-node {devices.per_node} in place of --ntasks, or other --devices and --num_nodes"
        ) from error


class ResolvedPrecision(NamedTuple):
    """The precision that a run computes with, and the reason where it is not the requested one."""

    precision: Precision
    reason: str = ""


def resolve_precision(requested: str, device_type: str) -> ResolvedPrecision:
    """Return the precision for --precision on a device: a CPU has no fast half precision, but some have bf16 units."""
    precision = PRECISIONS[requested]
    if device_type != "cpu" or precision != "16-mixed":
        return ResolvedPrecision(precision)
    if cpu_has_bf16_units():
        return ResolvedPrecision("bf16-mixed", "a CPU has no fast 16-mixed")
    return ResolvedPrecision("32-true", "this CPU has no bf16 units")


def cpu_has_bf16_units() -> bool:
    """Return whether this CPU multiplies bf16 in hardware; without, bf16 works, but slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def make_precision(precision: ResolvedPrecision, devices: Devices, initial_loss_scale: float) -> MixedPrecision | None:
    """Return the plugin of 16-mixed, which takes a setting of its own; None: Lightning makes it from the name."""
    if precision.precision != "16-mixed":
        return None
    scaler = torch.amp.GradScaler(devices.accelerator, init_scale=initial_loss_scale)
    return MixedPrecision("16-mixed", devices.accelerator, scaler)


def make_strategy(requested: str, devices: Devices, *, static_graph: bool = False) -> Strategy | str:
    """Return what averages the gradients of several processes; other strategies of Lightning's go by their names.

    `static_graph`: every batch uses all weights in the same way, and is an optimizer step of its own. Where several batches make
    one, torch 2.13 fails, as the first of them would have to describe the graph.
    """
    if requested not in ("auto", "ddp"):
        return requested
    if devices.world == 1:
        return "auto"
    backend = "nccl" if devices.accelerator == "cuda" else "gloo"
    return DDPStrategy(process_group_backend=backend, gradient_as_bucket_view=True, static_graph=static_graph)


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_process() -> bool:
    """Return whether this is the first process of a run; known before Lightning has made its strategy, too."""
    names = ("RANK",) if "RANK" in os.environ else RANKS
    return all(int(os.environ.get(name, "0")) == 0 for name in names)


def decide_in_first_process(decide: Callable[[], dict[str, str | None]], devices: Devices) -> dict[str, str | None]:
    """Return what `decide` returns in the first process, before a Trainer exists.

    Lightning starts the other processes itself, with the same command and the environment of the first: the decision travels
    there. torchrun starts all of them at once, so it is broadcast. On other machines each first process decides alike, from
    the same files.
    """
    if devices.world == 1:
        return decide()
    if started_by_torchrun():
        if devices.accelerator == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not torch.distributed.is_initialized():  # Lightning uses an existing group
            torch.distributed.init_process_group("nccl" if devices.accelerator == "cuda" else "gloo")
        return decide_together(decide)
    if "LOCAL_RANK" in os.environ and DECISION in os.environ:
        text = os.environ[DECISION]  # which anyone may have set
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict) or not all(isinstance(value, str | None) for value in read.values()):
            raise UsageError(f"{DECISION}, which a run sets for its own processes, holds {text[:40]!r}: unset it")
        return read
    decision = decide()
    os.environ[DECISION] = json.dumps(decision)
    return decision


def decide_together(decide: Callable[[], Decision]) -> Decision:
    """Return what `decide` returns in the first process, while the processes of a run are connected."""
    if not torch.distributed.is_initialized():
        return decide()
    decision: list[Any] = [decide() if is_first_process() else None]
    torch.distributed.broadcast_object_list(decision, src=0)
    decided: Decision = decision[0]
    return decided
