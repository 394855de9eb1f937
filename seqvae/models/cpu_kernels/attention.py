"""Rotary attention with a backward pass of its own: in bf16 0.92 of the time of torch's operations at 8 steps, 0.72 at 300, 0.63
at 512, 0.86 at 1,000, forward and backward; in float32 0.85 at 300 steps and 1.2 at 700.

What torch does in thirty operations forward and forty backward, each through memory and with results of its own to keep, takes as
few passes as possible here; the turned vectors and the weights are kept, nothing else. Measured by `python -m
benchmarks.speed.step`; "Attention written out" in docs/performance_log.md.

Shapes: B sequences, T steps, H heads, K numbers of a head, P = K / 2 pairs of them, X = 3 H K packed, G = B H.
"""

from typing import Any

import torch
from torch import Tensor

LONGEST = {"bf16": 1024, "others": 384}
"""Steps up to which the kernel is faster than torch's fused one."""


class RotaryAttention(torch.autograd.Function):
    """Attention of packed queries, keys and values, (B, T, X), with rotary positions: (B, T, H K).

    Of each head, query, key and value stand one behind the other. `bias` is added to the scores: minus infinity where a step may
    not be seen; None where all may.
    """

    @staticmethod
    def forward(
        ctx: Any, packed_BTX: Tensor, cos_TP: Tensor, sin_TP: Tensor, bias: Tensor | None, heads: int
    ) -> Tensor:
        batch, steps, size = *packed_BTX.shape[:2], packed_BTX.shape[2] // 3 // heads
        # Both sides of a product by the fourth root: the scores are then divided by the root.
        turns_TP = complex_turns(cos_TP, sin_TP, packed_BTX.dtype) * size**-0.25
        turned = packed_BTX.new_empty(3, batch, heads, steps, size)
        turned.copy_(packed_BTX.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4))
        _turn_in_place(turned[:2], turns_TP)
        query_GTK, key_GTK, value_GTK = turned.flatten(1, 2)
        weights_GTT = query_GTK @ key_GTK.mT
        if bias is not None:
            weights_GTT.view(batch, heads, steps, steps).add_(bias)
        torch.softmax(weights_GTT, dim=-1, out=weights_GTT)
        ctx.save_for_backward(turned, weights_GTT, turns_TP)
        return (weights_GTT @ value_GTK).view(batch, heads, steps, size).transpose(1, 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_BTW,) = gradients
        turned, weights_GTT, turns_TP = ctx.saved_tensors
        _, batch, heads, steps, size = turned.shape
        query_GTK, key_GTK, value_GTK = turned.flatten(1, 2)
        attended_GTK = gradient_BTW.view(batch, steps, heads, size).transpose(1, 2).reshape(-1, steps, size)
        by_part = torch.empty_like(turned)
        query_gradient, key_gradient, value_gradient = by_part.flatten(1, 2)
        torch.bmm(weights_GTT.mT, attended_GTK, out=value_gradient)
        scores_GTT = attended_GTK @ value_GTK.mT
        torch._softmax_backward_data(scores_GTT, weights_GTT, -1, scores_GTT.dtype, grad_input=scores_GTT)
        torch.bmm(scores_GTT, key_GTK, out=query_gradient)
        torch.bmm(scores_GTT.mT, query_GTK, out=key_gradient)
        _turn_in_place(by_part[:2], turns_TP.conj())
        packed_BTX = turned.new_empty(batch, steps, 3 * heads * size)
        packed_BTX.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4).copy_(by_part)
        return packed_BTX, None, None, None, None


def complex_turns(cos_TP: Tensor, sin_TP: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a complex number for each position and pair, which turns a pair that is multiplied by it; float32 for bf16 vectors."""
    real = dtype if dtype == torch.float64 else torch.float32
    return torch.complex(cos_TP.to(real), sin_TP.to(real))


def _turn_in_place(vectors: Tensor, turns_TP: Tensor) -> None:
    """Turn pairs of neighbours as complex numbers, in the order of memory; bf16 goes through float32 and back.

    Pairs whose numbers lie half a head apart take four passes, 32 numbers at a time, and twice as long.
    """
    pairs = vectors.to(turns_TP.real.dtype)
    torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(turns_TP)
    if pairs is not vectors:
        vectors.copy_(pairs)
