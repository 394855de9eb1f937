"""Dropout with cheap random bits: 0.16 of the time of torch's (4,000 x 256 numbers in bf16), which took 12 % of a training step.

Torch draws a random number for each element, on one core alone. Here 64 random bits from a faster generator serve for four of
them, and are compared where they stand. Measured by `python -m benchmarks.speed.step`; "Dropout" in docs/performance_log.md.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.models.cpu_kernels import HasCpuKernel


class Dropout(HasCpuKernel, nn.Module):
    """Sets a share of the numbers to zero in training, exact to 1 in 65,536, and scales the others so that the mean stays."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, numbers: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return numbers
        if not self.use_kernel(numbers):
            return F.dropout(numbers, self.share)
        seed = int(torch.empty((), dtype=torch.int64).random_())  # so that torch's seed decides
        words = np.random.SFC64(seed).random_raw((numbers.numel() + 3) // 4)
        bits = torch.from_numpy(words.view(np.int16))[: numbers.numel()].view(numbers.shape)
        threshold = min(round(self.share * 2**16), 2**16 - 1) - 2**15
        kept = bits.ge_(threshold)  # 0 or 1, where the bits stood: booleans become bf16 slowly
        return numbers * kept.to(numbers.dtype).mul_(1 / (1 - self.share))

    def extra_repr(self) -> str:
        return f"share={self.share}"
