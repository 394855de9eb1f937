"""Operations written by hand for training on a CPU, where they are faster than torch's; each file names its gain.

All of them together train 1.5 to 1.9 times as many tokens per second as torch's operations (`python -m benchmarks.speed.ablation`,
table in docs/performance.md). `--plain_operations` leaves everything to torch.
"""

import torch
from torch import Tensor


class HasCpuKernel:
    """Mixin of the modules that compute with a kernel of this package; `use_kernel` is the one switch that they ask."""

    kernel_enabled = True
    """False with --plain_operations."""

    def use_kernel(self, tensor: Tensor) -> bool:
        """Decide whether the kernel computes on `tensor`: on a CPU, where looking at data is free, in code that is not compiled.

        In compiled code a kernel would be slower than what the compiler makes ("Custom operations" in docs/performance_log.md).
        """
        return self.kernel_enabled and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
