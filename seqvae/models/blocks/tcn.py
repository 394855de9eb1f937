"""The block of a temporal convolutional network: vectors of steps in, vectors of steps out, added to the stream that came in.

A convolution looks at a step and at those once and twice a distance away, which triples from one convolution to the next, so that
every step within reach is found on exactly one way, and never on one through padding. A block has three convolutions: then it
costs about what a block of a transformer does, and two of them reach 728 steps back.

Shapes: B sequences, T steps, W width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.models.blocks import with_room
from seqvae.models.cpu_kernels import Dropout

CONVOLUTIONS_PER_BLOCK = 3

DISTANCES = tuple(3**power for power in range(6))
"""Up to 243; deeper networks begin again at 1, since what is farther away than a sequence is long teaches nothing."""


class ConvolutionBlock(nn.Module):
    """Convolutions at growing distances."""

    def __init__(self, settings: ModelSettings, layer: int, *, causal: bool) -> None:
        super().__init__()
        first = CONVOLUTIONS_PER_BLOCK * layer
        distances = [DISTANCES[number % len(DISTANCES)] for number in range(first, first + CONVOLUTIONS_PER_BLOCK)]
        self.convolutions = nn.ModuleList(Convolution(settings, distance, causal=causal) for distance in distances)

    def forward(self, hidden_BTW: Tensor, real_BT1: Tensor | None) -> Tensor:
        for convolution in self.convolutions:
            hidden_BTW = convolution(hidden_BTW, real_BT1)
        return hidden_BTW

    def step(
        self, hidden_BW: Tensor, step: int, context: None, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what `forward` does for one step, and what each convolution has seen, as far back as it looks."""
        seen: list[Tensor] = []
        for number, convolution in enumerate(self.convolutions):
            assert isinstance(convolution, Convolution)
            hidden_BW, seen_BTW = convolution.step(hidden_BW, step, past[number] if past else None)
            seen.append(seen_BTW)
        return hidden_BW, tuple(seen)


class Convolution(nn.Module):
    """Sees a step and those once and twice `distance` before it, and as far behind it where not causal.

    One matrix product over these steps' vectors side by side: on a CPU no slower than torch's convolution in float32, and
    faster in bf16, whose dilated convolutions have no good kernel there.
    """

    def __init__(self, settings: ModelSettings, distance: int, *, causal: bool) -> None:
        super().__init__()
        width = settings.width
        self.shifts = tuple(distance * number for number in (range(2, -1, -1) if causal else range(2, -3, -1)))
        self.norm = nn.LayerNorm(width)
        self.around = nn.Linear(len(self.shifts) * width, width)
        self.out = nn.Linear(width, width)
        self.dropout = Dropout(settings.dropout)

    def forward(self, hidden_BTW: Tensor, real_BT1: Tensor | None) -> Tensor:
        """Convolve. A block that looks ahead needs `real_BT1`: padding then counts as what lies beyond the ends, which is 0."""
        normed_BTW = self.norm(hidden_BTW)
        if real_BT1 is not None:
            normed_BTW = normed_BTW * real_BT1
        length, shifts = hidden_BTW.shape[1], self.shifts
        if not torch.compiler.is_compiling():
            # No further than the sequence is long, or most of a short one's copy would be zeros. Compiled code makes no such copy,
            # and would be compiled again for lengths on either side of a shift.
            shifts = tuple(max(-length, min(shift, length)) for shift in shifts)
        padded = F.pad(normed_BTW, (0, 0, shifts[0], -shifts[-1]))
        around = torch.cat([padded[:, shifts[0] - shift : shifts[0] - shift + length] for shift in shifts], dim=-1)
        return hidden_BTW + self.dropout(self.out(F.gelu(self.around(around))))

    def step(self, hidden_BW: Tensor, step: int, seen_BTW: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve at one step; steps that are too far back to be seen again make room for newer ones."""
        normed_BW = self.norm(hidden_BW)
        seen_BTW = with_room(seen_BTW, normed_BW[:, None], step, most=self.shifts[0] + 1)
        seen_BTW[:, step % seen_BTW.shape[1]] = normed_BW
        none_BW = torch.zeros_like(normed_BW)
        around = torch.cat(
            [seen_BTW[:, (step - shift) % seen_BTW.shape[1]] if shift <= step else none_BW for shift in self.shifts],
            dim=-1,
        )
        return hidden_BW + self.dropout(self.out(F.gelu(self.around(around)))), seen_BTW
