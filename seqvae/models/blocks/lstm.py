"""The blocks of recurrent networks: vectors of steps in, vectors of steps out, added to the stream that came in.

Nothing is packed: packing wants the lengths on the CPU, for which a GPU would have to wait. Padding stands behind all real steps,
so reading forwards never meets it in time to matter; reading backwards starts at each sequence's own last step, because the
sequence is reversed within its length first.

Shapes: B sequences, T steps, W width, N = B * T steps of the whole batch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.models.cpu_kernels import Dropout


class RecurrentBlock(nn.Module):
    """Reads from the first step to the last.

    Its state starts from the first step's vector: in a decoder that step holds the begin mark and the latent, nothing else, so
    the latent is in the initial state as well as in every step.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.width
        self.norm = nn.LayerNorm(width)
        self.initial = nn.Linear(width, 2 * width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, width)
        self.dropout = Dropout(settings.dropout)

    def forward(self, hidden_BTW: Tensor, context: None) -> Tensor:
        normed_BTW = self.norm(hidden_BTW)
        read_BTW, _last = self.lstm(normed_BTW, self.initial_state(normed_BTW[:, 0]))
        return hidden_BTW + self.dropout(self.out(read_BTW))

    def step(
        self, hidden_BW: Tensor, step: int, context: None, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what `forward` does for one step, and the past of the next one: state and cell, (B, W) each."""
        normed_BW = self.norm(hidden_BW)
        state_and_cell = tuple(kept[None] for kept in past) or self.initial_state(normed_BW)
        read_B1W, after = self.lstm(normed_BW[:, None], state_and_cell)
        return hidden_BW + self.dropout(self.out(read_B1W[:, 0])), tuple(kept[0] for kept in after)

    def initial_state(self, normed_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Return state and cell before the first step, (1, B, W) each."""
        # Under autocast the two differ in type, which torch's LSTM refuses on a GPU.
        state_BW, cell_BW = self.initial(normed_BW).to(normed_BW.dtype).chunk(2, dim=-1)
        return state_BW.tanh()[None].contiguous(), cell_BW[None].contiguous()


class BidirectionalBlock(nn.Module):
    """Reads in both directions."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.width
        self.norm = nn.LayerNorm(width)
        self.forwards = nn.LSTM(width, width, batch_first=True)
        self.backwards = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(2 * width, width)
        self.dropout = Dropout(settings.dropout)

    def forward(self, hidden_BTW: Tensor, opposite_N: Tensor) -> Tensor:
        normed_BTW = self.norm(hidden_BTW)
        forwards_BTW, _ = self.forwards(normed_BTW)
        backwards_BTW, _ = self.backwards(_Reversed.apply(normed_BTW, opposite_N))
        both = torch.cat((forwards_BTW, _Reversed.apply(backwards_BTW, opposite_N)), dim=-1)
        return hidden_BTW + self.dropout(self.out(both))


def opposite_steps(real_BT: Tensor) -> Tensor:
    """Return for each step of the batch the one as far from the other end of its sequence, as a flat index; padding stays put.

    >>> opposite_steps(torch.tensor([[True, True, True], [True, True, False]]))
    tensor([2, 1, 0, 4, 3, 5])
    """
    sequences, length = real_BT.shape
    steps_T = torch.arange(length, device=real_BT.device)
    opposite_BT = torch.where(real_BT, real_BT.sum(dim=1, keepdim=True) - 1 - steps_T, steps_T)
    return (opposite_BT + length * torch.arange(sequences, device=real_BT.device)[:, None]).flatten()


class _Reversed(torch.autograd.Function):
    """Each sequence from its last real step to its first. The backward pass is the same operation, which torch does not know:
    it would add the gradients up one at a time."""

    @staticmethod
    def forward(ctx: Any, steps_BTW: Tensor, opposite_N: Tensor) -> Tensor:
        ctx.save_for_backward(opposite_N)
        return steps_BTW.flatten(0, 1).index_select(0, opposite_N).view_as(steps_BTW)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (opposite_N,) = ctx.saved_tensors
        (gradient_BTW,) = gradients
        return gradient_BTW.flatten(0, 1).index_select(0, opposite_N).view_as(gradient_BTW), None
