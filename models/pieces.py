"""Small pieces that several files of the model share."""

import torch
from torch import Tensor, nn


def real_steps(lengths_B: Tensor, length: int) -> Tensor:
    """(B, length): True where a step is real, False where it is padded."""
    return torch.arange(length, device=lengths_B.device) < lengths_B[:, None]


def bounded(raw: Tensor, limit: float) -> Tensor:
    """Within -limit and limit, close to the identity around 0, with a slope everywhere."""
    return limit * torch.tanh(raw / limit)


def in_float32(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Means and variances of Gaussians: the 3 digits of bf16 would be most of the error that they describe."""
    with torch.autocast(inputs.device.type, enabled=False):
        return layer(inputs.float())
