"""What a run computes on.

In: the compute settings, and what launchers say. Out: devices, precision and strategy for Lightning's Trainer.
"""

import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from seqvae.config.training import SHARDED, ComputeSettings
from seqvae.errors import UsageError
from seqvae.training.processes import Launch, connect, find_launch
from seqvae.training.sharding import ShardedStrategy

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


class Devices(NamedTuple):
    """The processes of a run: one for each device."""

    accelerator: Literal["cpu", "cuda", "mps"]
    per_node: int
    nodes: int
    launcher: str = ""
    """What started the processes; empty: this command, or Lightning, which starts it again."""

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

    Where a launcher has started the processes, their number holds; flags that say otherwise are refused.
    """
    accelerator: Literal["cpu", "cuda", "mps"] = "cpu"
    if compute.accelerator in ("auto", "gpu") and torch.cuda.is_available():
        accelerator = "cuda"
    elif compute.accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        accelerator = "mps"
    elif compute.accelerator not in ("auto", "cpu"):
        raise UsageError(f"--accelerator {compute.accelerator}: there is none here that torch can use")
    try:
        launch = find_launch()
    except (RuntimeError, ValueError):  # of SLURM, whose variables do not go together
        refuse_other_tasks(Devices(accelerator, _typed(compute.devices) or 1, compute.num_nodes or 1))
        raise
    if launch is not None:
        return _launched(launch, accelerator, compute)
    if compute.launcher is not None:
        raise UsageError(
            f"--launcher {compute.launcher} is for `seqvae train` and `seqvae.fit`: give it to one of them"
        )
    available = torch.cuda.device_count() if accelerator == "cuda" else 1
    requested = available if compute.devices == "auto" else compute.devices or 1
    if accelerator != "cpu" and requested > available:
        raise UsageError(f"--devices {compute.devices}: this machine has {available} of them")
    devices = Devices(accelerator, requested, compute.num_nodes or 1)
    if devices.world > 1 and hasattr(sys, "ps1"):
        raise UsageError(
            f"--devices {requested}: each process of a run starts the command again, which a notebook or an interactive session "
            "has not. Type `seqvae train` with the same flags into a shell"
        )
    return devices


def _launched(launch: Launch, accelerator: Literal["cpu", "cuda", "mps"], compute: ComputeSettings) -> Devices:
    """Return the devices of processes that a launcher has started."""
    world = launch.environment.world_size()
    per_node = launch.per_node or _typed(compute.devices) or 1
    typed = Devices(accelerator, _typed(compute.devices) or per_node, compute.num_nodes or max(1, world // per_node))
    if launch.launcher == "SLURM":
        refuse_other_tasks(typed)
    if world % per_node or typed.world != world or typed.per_node != per_node:
        flags = [
            f"--{name} {value}" for name, value in vars(compute).items() if name in ("devices", "num_nodes") and value
        ]
        raise UsageError(
            f"{launch.launcher} started {world} processes, {per_node} on each machine, which does not go with "
            f"{' '.join(flags) or 'as many on each machine'}: leave these flags out, or start as many processes as they say"
        )
    return Devices(accelerator, per_node, world // per_node, launch.launcher)


def _typed(devices: int | Literal["auto"] | None) -> int | None:
    return None if devices == "auto" else devices


def refuse_other_tasks(devices: Devices) -> None:
    """Refuse what SLURM started, where it is not a task for each device: Lightning would say so when all data have been read."""
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


def connect_processes(devices: Devices, timeout: timedelta) -> None:
    """Connect the processes of a run before any of them touches data or directories.

    One machine's, typed with --devices, are started by Lightning when all is decided. Several machines' take torchrun, with which
    this command replaces itself where it was typed on each of them.
    """
    if devices.nodes > 1 and not devices.launcher:
        start_by_torchrun(devices)
    connect("nccl" if devices.accelerator == "cuda" else "gloo", timeout, devices.per_node)


def start_by_torchrun(devices: Devices) -> None:
    """Become torchrun for this machine's part of a run on several: it starts the same command once for each device."""
    names = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    torchrun = [f"--nnodes={devices.nodes}", f"--nproc_per_node={devices.per_node}"]
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(
            f"--num_nodes {devices.nodes}: without {', '.join(missing)} in the environment it is not known which of the machines "
            f"this is. Type on each, numbered from 0 on: torchrun {' '.join(torchrun)} --node_rank=N --master_addr=HOST "
            "--master_port=29500 train_optimized.py, and your flags"
        )
    rank, address, port = (os.environ[name] for name in names)
    torchrun += [f"--node_rank={rank}", f"--master_addr={address}", f"--master_port={port}", "--no_python"]
    for name in names:
        del os.environ[name]
    sys.stdout.flush()
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, sys.executable, *sys.orig_argv[1:]]
    os.execv(sys.executable, command)


def launched(devices: Devices, command: str) -> str:
    """Return a command behind the launcher's own, as this run was started."""
    if devices.launcher == "SLURM":
        return f"srun --nodes {devices.nodes} --ntasks-per-node {devices.per_node} {command}"
    if devices.launcher != "torchrun":
        return command
    words = ["torchrun"]
    if devices.nodes > 1:
        words.append(f"--nnodes {devices.nodes} --rdzv_backend c10d --rdzv_endpoint HOST:29500")
    words.append(f"--nproc_per_node {devices.per_node}")
    if (restarts := os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) != "0":
        words.append(f"--max_restarts {restarts}")
    script = command.removeprefix("python ")  # which torchrun types itself
    return " ".join([*words, script if script != command else f"--no_python {command}"])


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


def refuse_strategy(compute: ComputeSettings, devices: Devices) -> None:
    """Refuse a strategy that would fail when all data have been read."""
    precision = resolve_precision(compute.precision, devices.accelerator).precision
    if compute.strategy in SHARDED and devices.world > 1 and precision == "16-mixed":
        raise UsageError(
            f"--strategy {compute.strategy}: it does not scale the loss, as 16-mixed needs. Give --precision bf16-mixed or 32-true"
        )
    if compute.strategy.startswith("deepspeed") and find_spec("deepspeed") is None:
        raise UsageError(
            f"--strategy {compute.strategy}: the package deepspeed is not installed. Type `pip install deepspeed`, or give "
            "--strategy fsdp, which needs no package"
        )


def make_strategy(
    compute: ComputeSettings,
    devices: Devices,
    *,
    timeout: timedelta = timedelta(minutes=10),
    static_graph: bool = False,
) -> Strategy | str:
    """Return what averages the gradients of several processes; other strategies of Lightning's go by their names. One process has
    nothing to share out.

    `static_graph`: every batch uses all weights in the same way, and is an optimizer step of its own. Where several batches make
    one, torch 2.13 fails, as the first of them would have to describe the graph.
    """
    if compute.strategy not in ("auto", "ddp", *SHARDED):
        return compute.strategy
    if devices.world == 1:
        return "auto"
    backend = "nccl" if devices.accelerator == "cuda" else "gloo"
    if compute.strategy in SHARDED:
        return ShardedStrategy(backend, timeout)
    return _DDP(
        compute.compress_gradients,
        process_group_backend=backend,
        timeout=timeout,
        bucket_cap_mb=compute.bucket_megabytes,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
    )


class _DDP(DDPStrategy):
    """Lightning's strategy with compressed gradients on all devices: its own `ddp_comm_hook` is for GPUs alone."""

    def __init__(self, compression: Literal["none", "fp16", "bf16"], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.compression = compression

    def configure_ddp(self) -> None:
        super().configure_ddp()
        if self.compression != "none":
            assert isinstance(self.model, DistributedDataParallel)
            hook = fp16_compress_hook if self.compression == "fp16" else _averaged_in_bf16
            self.model.register_comm_hook(None, hook)


def _averaged_in_bf16(group: torch.distributed.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Do what torch's own hook does, which DDP knows by its name and refuses without NCCL, though gloo adds bf16, too."""
    return bf16_compress_hook(group, bucket)
