"""What several processes of one run have to agree on before they train: decided in the first, known in all.

Lightning starts the other processes itself, with the command typed once more and the environment of the first: what was
decided travels there. torchrun starts all of them at once: they have to talk.
"""

import json
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy

from seqvae.config.training import ComputeSettings
from seqvae.errors import UsageError

# What a run computes on, and how several processes share the work: what the user asked for in, Lightning's arguments out.

# What precision a device really computes with: what the user asked for in, what is in force out.

Precision = Literal["32-true", "16-mixed", "bf16-mixed"]

NAMES: dict[str, Precision] = {
    "32-true": "32-true",
    "16-mixed": "16-mixed",
    "bf16-mixed": "bf16-mixed",
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}
"""What a user may type, and what it stands for."""

DTYPES: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
}
"""What matrices are multiplied in."""


class ResolvedPrecision(NamedTuple):
    """The precision that a run gets, and why, where that is not what was asked for."""

    precision: Precision
    reason: str = ""


def resolve_precision(asked: str, device_type: str) -> ResolvedPrecision:
    """A CPU has no fast half precision, but some have bf16 units."""
    precision = NAMES[asked]
    if device_type != "cpu" or precision != "16-mixed":
        return ResolvedPrecision(precision)
    if cpu_has_bf16_units():
        return ResolvedPrecision("bf16-mixed", "a CPU has no fast 16-mixed")
    return ResolvedPrecision("32-true", "this CPU has no bf16 units")


def cpu_has_bf16_units() -> bool:
    """Without them bf16 runs, but slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


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
    """What there is of what was asked for. Under torchrun the processes are there already, and their number holds."""
    accelerator = _accelerator(compute.accelerator)
    if started_by_torchrun():
        world, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return Devices(accelerator, per_node, world // per_node)
    there = torch.cuda.device_count() if accelerator == "cuda" else 1
    if compute.devices == "auto":
        return Devices(accelerator, there, compute.num_nodes)
    if accelerator != "cpu" and compute.devices > there:
        raise UsageError(f"--devices {compute.devices}: this machine has {there} of them")
    return Devices(accelerator, compute.devices, compute.num_nodes)


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _accelerator(asked: str) -> Literal["cpu", "cuda", "mps"]:
    if asked == "cpu":
        return "cpu"
    if asked in ("auto", "gpu") and torch.cuda.is_available():
        return "cuda"
    if asked in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "mps"
    if asked == "auto":
        return "cpu"
    raise UsageError(f"--accelerator {asked}: there is none here that torch can use")


def make_strategy(asked: str, devices: Devices, *, static_graph: bool = False) -> Strategy | str:
    """Processes that average their gradients; any other strategy of Lightning's goes by its name.

    `static_graph`: every batch uses all weights in the same way, and is an optimizer step of its own. Where several batches make
    one, torch 2.13 fails, as the first of them would have to tell it what the graph is like.
    """
    if asked not in ("auto", "ddp"):
        return asked
    if devices.world == 1:
        return "auto"
    backend = "nccl" if devices.accelerator == "cuda" else "gloo"
    return DDPStrategy(process_group_backend=backend, gradient_as_bucket_view=True, static_graph=static_graph)


def make_precision(precision: ResolvedPrecision, devices: Devices, initial_loss_scale: float) -> MixedPrecision | None:
    """The one precision that takes a setting of its own; None: Lightning makes it from the name."""
    if precision.precision != "16-mixed":
        return None
    scaler = torch.amp.GradScaler(devices.accelerator, init_scale=initial_loss_scale)
    return MixedPrecision("16-mixed", devices.accelerator, scaler)


Decision = TypeVar("Decision")

DECISION = "SEQVAE_DECISION"
"""The variable of the environment."""


RANKS = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""What launchers number processes with, where none has given out a RANK for all."""


def is_first_process() -> bool:
    """Known before Lightning has made its strategy, too."""
    names = ("RANK",) if "RANK" in os.environ else RANKS
    return all(int(os.environ.get(name, "0")) == 0 for name in names)


def decide_in_first_process(decide: Callable[[], dict[str, str | None]], devices: Devices) -> dict[str, str | None]:
    """What `decide` says in the first process. On other machines each first process decides alike, from the same files."""
    if devices.world == 1:
        return decide()
    if started_by_torchrun():
        return _broadcast(decide, "nccl" if devices.accelerator == "cuda" else "gloo")
    if "LOCAL_RANK" in os.environ and DECISION in os.environ:
        return _read(os.environ[DECISION])
    decision = decide()
    os.environ[DECISION] = json.dumps(decision)
    return decision


def decide_together(decide: Callable[[], Decision]) -> Decision:
    """What `decide` says in the first process, while a run goes on and its processes are in touch."""
    if not torch.distributed.is_initialized():
        return decide()
    decision: list[Any] = [decide() if is_first_process() else None]
    torch.distributed.broadcast_object_list(decision, src=0)
    decided: Decision = decision[0]
    return decided


def _read(text: str) -> dict[str, str | None]:
    """What stands in the environment is data, and may be anybody's."""
    try:
        decision = json.loads(text)
    except (ValueError, RecursionError):
        decision = None
    if not isinstance(decision, dict) or not all(isinstance(value, str | None) for value in decision.values()):
        raise UsageError(f"{DECISION}, which a run sets for its own processes, holds {text[:40]!r}: unset it")
    return decision


def _broadcast(decide: Callable[[], dict[str, str | None]], backend: str) -> dict[str, str | None]:
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend)  # Lightning takes the one that is there
    decision = [decide() if is_first_process() else None]
    torch.distributed.broadcast_object_list(decision, src=0)
    assert decision[0] is not None
    return decision[0]
