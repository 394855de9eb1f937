"""Small functions on tensors that several parts of the model share.

Shapes: B sequences, T steps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIRST_ROOM = 16
"""Steps that there is space for at first, while sequences are drawn."""


def real_steps(lengths_B: Tensor, length: int) -> Tensor:
    """Return (B, length): True where a step is real, False where it is padded."""
    return torch.arange(length, device=lengths_B.device) < lengths_B[:, None]


def bounded(raw: Tensor, limit: float) -> Tensor:
    """Squash into -limit to limit: close to the identity around 0, with a slope everywhere."""
    return limit * torch.tanh(raw / limit)


def in_float32(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Apply the layer in float32: the 3 digits of bf16 would be most of the error that a Gaussian's moments describe."""
    with torch.autocast(inputs.device.type, enabled=False):
        return layer(inputs.float())


def with_room(kept: Tensor | None, new: Tensor, step: int, most: int | None = None) -> Tensor:
    """Return what is kept of the steps so far, in a tensor that has space for `step`; steps stand in the last dimension but one.

    `new` is one such step. Space doubles, up to `most` steps: what is kept of T steps is copied less than twice.
    """
    if kept is None:
        return new.new_empty(*new.shape[:-2], FIRST_ROOM, new.shape[-1])
    size = kept.shape[-2]
    if step < size or (most is not None and size >= most):
        return kept
    return F.pad(kept, (0, 0, 0, size if most is None else min(size, most - size)))
