"""What several processes of one run have to agree on before they train: decided in the first, known in all.

Lightning starts the other processes itself, with the command typed once more and the environment of the first: what was
decided travels there. torchrun starts all of them at once: they have to talk.
"""

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from seqvae.errors import UsageError
from seqvae.training.devices import Devices, started_by_torchrun

Decision = TypeVar("Decision")

DECISION = "SEQVAE_DECISION"
"""The variable of the environment."""


RANKS = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""What launchers number processes with, where none has given out a RANK for all."""


def is_first_process() -> bool:
    """Known before Lightning has made its strategy, too."""
    names = ("RANK",) if "RANK" in os.environ else RANKS
    return all(int(os.environ.get(name, "0")) == 0 for name in names)


def decided_by_first(decide: Callable[[], dict[str, str | None]], devices: Devices) -> dict[str, str | None]:
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


def decided_together(decide: Callable[[], Decision]) -> Decision:
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
