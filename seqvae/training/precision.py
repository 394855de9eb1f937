"""What precision a device really computes with: what the user asked for in, what is in force out."""

from typing import Literal, NamedTuple

import torch

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


class InForce(NamedTuple):
    """The precision that a run gets, and why, where that is not what was asked for."""

    precision: Precision
    reason: str = ""


def precision_in_force(asked: str, device_type: str) -> InForce:
    """A CPU has no fast half precision, but some have bf16 units."""
    precision = NAMES[asked]
    if device_type != "cpu" or precision != "16-mixed":
        return InForce(precision)
    if cpu_has_bf16_units():
        return InForce("bf16-mixed", "a CPU has no fast 16-mixed")
    return InForce("32-true", "this CPU has no bf16 units")


def cpu_has_bf16_units() -> bool:
    """Without them bf16 runs, but slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
