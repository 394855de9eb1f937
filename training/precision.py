"""What precision a device really computes with: what the user asked for in, what is in force out."""

from typing import Literal, NamedTuple

import torch

Precision = Literal["32-true", "16-mixed", "bf16-mixed"]


class InForce(NamedTuple):
    """The precision that a run gets, and why, where that is not what was asked for."""

    precision: Precision
    reason: str = ""


def precision_in_force(asked: Precision, device_type: str) -> InForce:
    """A CPU has no fast half precision, but some have bf16 units."""
    if device_type != "cpu" or asked != "16-mixed":
        return InForce(asked)
    if cpu_has_bf16_units():
        return InForce("bf16-mixed", "a CPU has no fast 16-mixed")
    return InForce("32-true", "this CPU has no bf16 units")


def cpu_has_bf16_units() -> bool:
    """Without them bf16 runs, but slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
