"""Small pieces that several files of the model share."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIRST_ROOM = 16
"""Steps that are kept in the beginning, while sequences are drawn."""


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


def is_plain_cpu(tensor: Tensor) -> bool:
    """On a CPU, in code that torch does not compile: there, operations are written out by hand, and a look at data is free."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def room_like(step: Tensor) -> Tensor:
    """Empty space for what is kept of several steps, all of them like this one; they stand in the last dimension but one."""
    return step.new_empty(*step.shape[:-2], FIRST_ROOM, step.shape[-1])


def with_room(kept: Tensor, step: int, most: int | None = None) -> Tensor:
    """Where `step` no longer fits in, twice the space, and `most` at most: what is kept of T steps is copied less than twice."""
    size = kept.shape[-2]
    if step < size or (most is not None and size >= most):
        return kept
    return F.pad(kept, (0, 0, 0, size if most is None else min(size, most - size)))


class Dropout(nn.Module):
    """Sets a share of the numbers to zero in training, and scales the others so that their mean stays.

    On a CPU torch draws a random number for each, on one core alone: a tenth of a training step. Here 64 random bits serve for
    four of them, from a faster generator (4,000 x 256 in bf16: a sixth of torch's time), and the share is exact to 1 in 65,536.
    """

    by_hand = True
    """Or torch's own, on a CPU as well."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, numbers: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return numbers
        if not (self.by_hand and is_plain_cpu(numbers)):
            return F.dropout(numbers, self.share)
        threshold = min(round(self.share * 2**16), 2**16 - 1) - 2**15
        kept = _random_int16(numbers.shape).ge_(threshold)  # 0 or 1, where the bits stood
        return numbers * kept.to(numbers.dtype).mul_(1 / (1 - self.share))

    def extra_repr(self) -> str:
        return f"share={self.share}"


def _random_int16(shape: torch.Size) -> Tensor:
    """Of all 2^16 numbers, as torch's generator decides, but drawn by a faster one that it seeds."""
    seed = int(torch.empty((), dtype=torch.int64).random_())
    words = np.random.SFC64(seed).random_raw((shape.numel() + 3) // 4)
    return torch.from_numpy(words.view(np.int16))[: shape.numel()].view(shape)
