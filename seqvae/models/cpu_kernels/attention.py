"""Attention with positions that turn: packed queries, keys and values in, attended vectors out.

A step sees a whole sequence or, in a decoder, what came before; `Sight` says which, for all blocks of a batch.

Shapes: B sequences, T steps, H heads, W width, K = W / H numbers of a head, P = K / 2 pairs of them, X = 3 W packed, G = B H.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqvae.models.blocks.pieces import is_plain_cpu, room_like, with_room

ROTARY_BASE = 10_000.0

LONGEST_WRITTEN_OUT = {"bf16": 1024, "others": 384}
"""Steps up to which attention is written out on a CPU, where the way back through torch's fused kernel is slow."""


class AttentionContext(NamedTuple):
    """Where the steps of a batch stand and which of them may be seen, worked out once for all blocks."""

    cos_TP: Tensor
    sin_TP: Tensor
    visible_B11T: Tensor | None
    """Which steps may be seen; None: those up to the step itself."""
    is_written_out: bool
    """Whether attention goes its own way instead of torch's."""
    bias: Tensor | None
    """What is then added to its scores; None: nothing, since all steps are seen."""


def sight(steps_BTW: Tensor, heads: int, real_BT: Tensor | None = None, *, by_hand: bool = True) -> AttentionContext:
    """One angle for each position and pair of numbers of a head; any length, no table.

    All real steps are seen, and each sequence needs one for its attention to be defined; without `real_BT`, those up to the
    step itself: padding stands behind all real steps, and no mask is needed. `by_hand`: attention may be written out.
    """
    length, width = steps_BTW.shape[1:]
    angles_TP = angles(torch.arange(length, device=steps_BTW.device), width // heads)
    visible_B11T = None if real_BT is None else real_BT[:, None, None, :]
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else steps_BTW.dtype
    longest = LONGEST_WRITTEN_OUT["bf16" if dtype == torch.bfloat16 else "others"]
    is_written_out = by_hand and is_plain_cpu(steps_BTW) and length <= longest
    bias = score_bias(visible_B11T, length, dtype) if is_written_out else None
    return AttentionContext(angles_TP.cos(), angles_TP.sin(), visible_B11T, is_written_out, bias)


def sight_of_step(step: int, hidden_BW: Tensor, heads: int) -> AttentionContext:
    """Of one step alone, for `attend_next`."""
    angles_1P = angles(torch.tensor([step], device=hidden_BW.device), hidden_BW.shape[1] // heads)
    return AttentionContext(angles_1P.cos(), angles_1P.sin(), visible_B11T=None, is_written_out=False, bias=None)


def angles(positions_T: Tensor, size: int) -> Tensor:
    """(T, P), for heads of `size` numbers."""
    pairs = size // 2
    return positions_T[:, None] * ROTARY_BASE ** (-torch.arange(pairs, device=positions_T.device) / pairs)


def score_bias(visible_B11T: Tensor | None, length: int, dtype: torch.dtype) -> Tensor | None:
    """0 where a step may be seen, minus infinity where not, on a CPU."""
    if visible_B11T is None:
        return torch.full((length, length), -math.inf, dtype=dtype).triu(1)
    if bool(visible_B11T.all()):
        return None
    return torch.zeros((), dtype=dtype).where(visible_B11T, -math.inf)


def attention(packed_BTX: Tensor, sight: AttentionContext, heads: int) -> Tensor:
    """Softmax of scaled products of turned queries and keys, times values: (B, T, W).

    Each head's query, key and value stand one behind the other.
    """
    if is_plain_cpu(packed_BTX) and sight.is_written_out:
        return _RotaryAttention.apply(packed_BTX, sight.cos_TP, sight.sin_TP, sight.bias, heads)
    return _as_torch_has_it(packed_BTX, sight, heads)


def attend_next(
    packed_BX: Tensor, sight: AttentionContext, step: int, past: tuple[Tensor, ...], heads: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What `attention` says of one step, (B, W), and the past of the next one.

    The past are turned keys and values of the steps before, (B, H, T or more, K), and is written to; () before the first step.
    """
    parts_BH31K = packed_BX.unflatten(-1, (heads, 3, 1, -1))
    query_BH1K, key_BH1K = rotate(parts_BH31K[:, :, :2], sight).unbind(2)
    news = (key_BH1K, parts_BH31K[:, :, 2])
    past = tuple(with_room(kept, step) for kept in past) or tuple(room_like(new) for new in news)
    for kept, new in zip(past, news, strict=True):
        kept[:, :, step : step + 1] = new
    keys_BHTK, values_BHTK = (kept[:, :, : step + 1] for kept in past)
    scores_BH1T = (query_BH1K * query_BH1K.shape[-1] ** -0.5) @ keys_BHTK.mT
    return (scores_BH1T.softmax(dim=-1).to(values_BHTK.dtype) @ values_BHTK).flatten(1), past


class _RotaryAttention(torch.autograd.Function):
    """What torch would do as thirty operations forward and forty on the way back, each through memory and with results of its
    own to keep, is written out here with as few passes as it takes. It keeps the turned vectors and the weights, nothing else."""

    @staticmethod
    def forward(
        ctx: Any, packed_BTX: Tensor, cos_TP: Tensor, sin_TP: Tensor, bias: Tensor | None, heads: int
    ) -> Tensor:
        batch, steps, size = *packed_BTX.shape[:2], packed_BTX.shape[2] // 3 // heads
        # Both sides of a product by the fourth root: the scores are then divided by the root.
        turns_TP = _turns(cos_TP, sin_TP, packed_BTX.dtype) * size**-0.25
        turned = packed_BTX.new_empty(3, batch, heads, steps, size)
        turned.copy_(_by_part(packed_BTX, heads))
        _turn(turned[:2], turns_TP)
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
        _turn(by_part[:2], turns_TP.conj())
        packed_BTX = turned.new_empty(batch, steps, 3 * heads * size)
        _by_part(packed_BTX, heads).copy_(by_part)
        return packed_BTX, None, None, None, None


def _by_part(packed_BTX: Tensor, heads: int) -> Tensor:
    """A view of queries, keys and values: (3, B, H, T, K)."""
    return packed_BTX.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)


def _turn(vectors: Tensor, turns_TP: Tensor) -> None:
    """In place, as complex numbers, in the order of memory; bf16 goes through float32 and back. Pairs whose numbers lie half a head
    apart take four passes, 32 numbers at a time, and twice as long."""
    pairs = vectors.to(turns_TP.real.dtype)
    torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(turns_TP)
    if pairs is not vectors:
        vectors.copy_(pairs)


def _as_torch_has_it(packed_BTX: Tensor, sight: AttentionContext, heads: int) -> Tensor:
    """With torch's fused kernel, or compiled. Compiled code on a CPU has one way for all lengths: a second would have to be
    compiled when the first long batch comes."""
    query_BHTK, key_BHTK, value_BHTK = packed_BTX.unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, dim=-1)
    query_BHTK, key_BHTK = rotate(query_BHTK, sight), rotate(key_BHTK, sight)
    visible_B11T = sight.visible_B11T
    if query_BHTK.device.type == "cpu" and torch.compiler.is_compiling():
        attended_BHTK = _written_out(query_BHTK, key_BHTK, value_BHTK, visible_B11T)
    else:
        attended_BHTK = F.scaled_dot_product_attention(
            query_BHTK, key_BHTK, value_BHTK, attn_mask=visible_B11T, is_causal=visible_B11T is None
        )
    return attended_BHTK.transpose(1, 2).flatten(-2)


def rotate(vectors_BHTK: Tensor, sight: AttentionContext) -> Tensor:
    """Turn each pair of neighbours by its position's angle, so that products of two vectors see their distance alone."""
    if not is_plain_cpu(vectors_BHTK):  # compiled code has no complex numbers, and not every device has
        cos_TP, sin_TP = sight.cos_TP.to(vectors_BHTK.dtype), sight.sin_TP.to(vectors_BHTK.dtype)
        first, second = vectors_BHTK.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos_TP - second * sin_TP, first * sin_TP + second * cos_TP), dim=-1).flatten(-2)
    turns_TP = _turns(sight.cos_TP, sight.sin_TP, vectors_BHTK.dtype)
    pairs_BHTP = torch.view_as_complex(vectors_BHTK.to(turns_TP.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_BHTP * turns_TP).flatten(-2).to(vectors_BHTK.dtype)


def _turns(cos_TP: Tensor, sin_TP: Tensor, dtype: torch.dtype) -> Tensor:
    """A complex number for each position and pair, which turns it by being multiplied with it; of float32 for vectors of less."""
    real = dtype if dtype == torch.float64 else torch.float32
    return torch.complex(cos_TP.to(real), sin_TP.to(real))


def _written_out(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, visible_B11T: Tensor | None) -> Tensor:
    scores_BHTT = (query_BHTK / math.sqrt(query_BHTK.shape[-1])) @ key_BHTK.transpose(-1, -2)
    if visible_B11T is None:
        visible_B11T = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool).tril()
    bias = torch.zeros((), dtype=scores_BHTT.dtype).where(visible_B11T, -math.inf)
    return torch.softmax(scores_BHTT + bias, dim=-1) @ value_BHTK
