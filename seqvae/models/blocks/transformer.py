"""The block of a transformer: vectors of steps in, vectors of steps out, whatever kind of sequence they stand for.

Pre-norm, with rotary positions: pairs of numbers of queries and keys are turned by an angle for each position, so that products see
distances alone. A block sees a whole sequence or, in a decoder, what came before, as the `AttentionContext` has it.

Shapes: B sequences, T steps, H heads, W width, K = W / H numbers of a head, P = K / 2 pairs of them, X = 3 W packed.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.models.blocks import with_room
from seqvae.models.cpu_kernels import LONGEST_ATTENTION, Dropout, RotaryAttention, complex_turns

ROTARY_BASE = 10_000.0


class AttentionContext(NamedTuple):
    """Where the steps of a batch stand and which of them may be seen, computed once for all blocks."""

    cos_TP: Tensor
    sin_TP: Tensor
    visible_B11T: Tensor | None
    """Which steps may be seen; None: those up to the step itself."""
    use_kernel: bool
    """Whether attention is computed by the kernel for CPUs, where code is not compiled."""
    bias: Tensor | None
    """What the kernel adds to its scores; None: nothing, since all steps are seen."""


def attention_context(
    steps_BTW: Tensor, heads: int, real_BT: Tensor | None = None, *, start: int = 0, use_kernel: bool = False
) -> AttentionContext:
    """Compute one angle for each position, counted from `start`, and pair of numbers of a head; any length, no table.

    All real steps are seen, and each sequence needs one for its attention to be defined. Without `real_BT`, the steps up to each
    step itself are seen: padding stands behind all real steps, and no mask is needed.
    """
    length, width = steps_BTW.shape[1:]
    device, pairs = steps_BTW.device, width // heads // 2
    positions_T = torch.arange(start, start + length, device=device)
    angles_TP = positions_T[:, None] * ROTARY_BASE ** (-torch.arange(pairs, device=device) / pairs)
    visible_B11T = None if real_BT is None else real_BT[:, None, None, :]
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else steps_BTW.dtype
    use_kernel = use_kernel and length <= LONGEST_ATTENTION["bf16" if dtype == torch.bfloat16 else "others"]
    bias = None
    if use_kernel and visible_B11T is None:
        bias = torch.full((length, length), -math.inf, dtype=dtype).triu(1)
    elif use_kernel and visible_B11T is not None and not bool(visible_B11T.all()):
        bias = torch.zeros((), dtype=dtype).where(visible_B11T, -math.inf)
    return AttentionContext(angles_TP.cos(), angles_TP.sin(), visible_B11T, use_kernel, bias)


class Block(nn.Module):
    """Attention, then a feed-forward network, each on a normalised copy whose result is added to the stream.

    There is no dropout on the attention itself: that would leave the fused kernels.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = Dropout(settings.dropout)

    def forward(self, hidden_BTW: Tensor, context: AttentionContext) -> Tensor:
        packed_BTX = self.queries_keys_values(self.attention_norm(hidden_BTW))
        attended_BTW = attention(packed_BTX, context, self.heads)
        hidden_BTW = hidden_BTW + self.dropout(self.attention_out(attended_BTW))
        return hidden_BTW + self.dropout(self.feed_forward(hidden_BTW))

    def step(
        self, hidden_BW: Tensor, step: int, context: AttentionContext, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what `forward` does for one step, (B, W), and the past of the next one.

        The past are turned keys and values of the steps before, (B, H, T or more, K), and is written to; () before the first step.
        """
        parts_BH31K = self.queries_keys_values(self.attention_norm(hidden_BW)).unflatten(-1, (self.heads, 3, 1, -1))
        query_BH1K, key_BH1K = rotate(parts_BH31K[:, :, :2], context).unbind(2)
        latest = (key_BH1K, parts_BH31K[:, :, 2])
        past = tuple(with_room(kept, new, step) for kept, new in zip(past or (None, None), latest, strict=True))
        for kept, new in zip(past, latest, strict=True):
            kept[:, :, step : step + 1] = new
        keys_BHTK, values_BHTK = (kept[:, :, : step + 1] for kept in past)
        scores_BH1T = (query_BH1K * query_BH1K.shape[-1] ** -0.5) @ keys_BHTK.mT
        attended_BW = (scores_BH1T.softmax(dim=-1).to(values_BHTK.dtype) @ values_BHTK).flatten(1)
        hidden_BW = hidden_BW + self.dropout(self.attention_out(attended_BW))
        return hidden_BW + self.dropout(self.feed_forward(hidden_BW)), past

    def feed_forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))


def attention(packed_BTX: Tensor, context: AttentionContext, heads: int) -> Tensor:
    """Return the softmax of scaled products of turned queries and keys, times values: (B, T, W).

    Of each head, query, key and value stand one behind the other. Compiled code on a CPU has one way for all lengths: a second
    would have to be compiled when the first long batch comes.
    """
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and context.use_kernel:  # in this order: compiled code must not depend on it
        return RotaryAttention.apply(packed_BTX, context.cos_TP, context.sin_TP, context.bias, heads)
    query_BHTK, key_BHTK, value_BHTK = packed_BTX.unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, dim=-1)
    query_BHTK, key_BHTK = rotate(query_BHTK, context), rotate(key_BHTK, context)
    visible = context.visible_B11T
    if is_compiling and query_BHTK.device.type == "cpu":
        scores_BHTT = (query_BHTK / math.sqrt(query_BHTK.shape[-1])) @ key_BHTK.transpose(-1, -2)
        if visible is None:
            visible = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool).tril()
        bias = torch.zeros((), dtype=scores_BHTT.dtype).where(visible, -math.inf)
        attended_BHTK = torch.softmax(scores_BHTT + bias, dim=-1) @ value_BHTK
    else:
        attended_BHTK = F.scaled_dot_product_attention(
            query_BHTK, key_BHTK, value_BHTK, attn_mask=visible, is_causal=visible is None
        )
    return attended_BHTK.transpose(1, 2).flatten(-2)


def rotate(vectors_BHTK: Tensor, context: AttentionContext) -> Tensor:
    """Turn each pair of neighbours by its position's angle, so that products of two vectors see their distance alone."""
    if vectors_BHTK.device.type != "cpu" or torch.compiler.is_compiling():
        # Compiled code has no complex numbers, and not every device has.
        cos_TP, sin_TP = context.cos_TP.to(vectors_BHTK.dtype), context.sin_TP.to(vectors_BHTK.dtype)
        first, second = vectors_BHTK.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos_TP - second * sin_TP, first * sin_TP + second * cos_TP), dim=-1).flatten(-2)
    turns_TP = complex_turns(context.cos_TP, context.sin_TP, vectors_BHTK.dtype)
    pairs_BHTP = torch.view_as_complex(vectors_BHTK.to(turns_TP.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_BHTP * turns_TP).flatten(-2).to(vectors_BHTK.dtype)
