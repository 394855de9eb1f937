"""Between the events of a batch and its steps. Events stand in the order of their steps, so a step's events are a slice.

`embedding_bag` adds up slices 13 times as fast on a CPU as `segment_reduce` (14,549 events of 192 numbers on 2,496 steps: 0.3
ms instead of 3.7), and on a GPU its sums do not depend on a race of threads as those of `index_add` do. Its own way back
takes 4.3 ms, where spreading takes 0.5 and is the same: each of the two functions is the adjoint of the other.

Shapes: E events of the whole batch, N = B * T steps of the whole batch, R numbers of an event or a step.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def step_offsets(steps_E: Tensor, step_count: int) -> Tensor:
    """Where each step's events begin, and where the last one's end: N + 1 offsets into the events.

    >>> step_offsets(torch.tensor([0, 0, 2]), step_count=4)
    tensor([0, 2, 2, 3, 3])
    """
    return torch.searchsorted(steps_E, torch.arange(step_count + 1, device=steps_E.device))


def sum_by_step(events_ER: Tensor, steps_E: Tensor, offsets: Tensor) -> Tensor:
    """Add up the events of each step, (E, R) -> (N, R); a step without events is 0.

    >>> sum_by_step(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2, 3])).flatten()
    tensor([3., 0., 3.])
    """
    sums_NR: Tensor = _SumByStep.apply(events_ER, steps_E, offsets)
    return sums_NR


def spread_to_events(steps_NR: Tensor, steps_E: Tensor, offsets: Tensor) -> Tensor:
    """Give each event the row of its step, (N, R) -> (E, R)."""
    events_ER: Tensor = _SpreadToEvents.apply(steps_NR, steps_E, offsets)
    return events_ER


class _SumByStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, events_ER: Tensor, steps_E: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(steps_E, offsets)
        every_E = torch.arange(len(events_ER), device=events_ER.device)
        return F.embedding_bag(every_E, events_ER.contiguous(), offsets, mode="sum", include_last_offset=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return spread_to_events(gradients[0], *ctx.saved_tensors), None, None


class _SpreadToEvents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps_NR: Tensor, steps_E: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(steps_E, offsets)
        return F.embedding(steps_E, steps_NR)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return sum_by_step(gradients[0], *ctx.saved_tensors), None, None
