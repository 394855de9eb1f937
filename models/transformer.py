"""The block of a transformer: vectors of steps in, vectors of steps out, whatever kind of sequence they stand for.

Pre-norm, rotary positions. A block sees a whole sequence or, in a decoder, what came before; `sight` says which.

Shapes: B sequences, T steps, W width, H heads, K = W / H numbers of a head, P = K / 2 pairs of them.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.pieces import Dropout
from models.settings import ModelSettings

ROTARY_BASE = 10_000.0


class Sight(NamedTuple):
    """Where the steps of a batch stand and which of them may be seen, worked out once for all blocks."""

    cos_TP: Tensor
    sin_TP: Tensor
    visible_B11T: Tensor | None
    """Which steps may be seen; None: those up to the step itself."""


def sight(steps_BTW: Tensor, heads: int, real_BT: Tensor | None = None) -> Sight:
    """One angle for each position and pair of numbers of a head; any length, no table.

    All real steps are seen, and each sequence needs one for its attention to be defined; without `real_BT`, those up to the
    step itself: padding stands behind all real steps, and no mask is needed.
    """
    length, width = steps_BTW.shape[1:]
    pairs = width // heads // 2
    frequencies = ROTARY_BASE ** (-torch.arange(pairs, device=steps_BTW.device) / pairs)
    angles_TP = torch.arange(length, device=steps_BTW.device)[:, None] * frequencies
    return Sight(angles_TP.cos(), angles_TP.sin(), None if real_BT is None else real_BT[:, None, None, :])


class Block(nn.Module):
    """Attention, then a feed-forward network, each on a normalised copy whose result is added to the stream."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = Dropout(settings.dropout)

    def forward(self, hidden_BTW: Tensor, sight: Sight) -> Tensor:
        hidden_BTW = hidden_BTW + self.dropout(self.attend(self.attention_norm(hidden_BTW), sight))
        changed_BTW = self.down(F.gelu(self.up(self.feed_forward_norm(hidden_BTW))))
        return hidden_BTW + self.dropout(changed_BTW)

    def attend(self, hidden_BTW: Tensor, sight: Sight) -> Tensor:
        """Without dropout on the attention itself: that would leave the fused kernels."""
        packed_BTHK = self.query_key_value(hidden_BTW).unflatten(-1, (self.heads, -1))
        query_BHTK, key_BHTK, value_BHTK = packed_BTHK.transpose(1, 2).chunk(3, dim=-1)
        attended_BHTK = attention(rotate(query_BHTK, sight), rotate(key_BHTK, sight), value_BHTK, sight.visible_B11T)
        return self.attention_out(attended_BHTK.transpose(1, 2).flatten(-2))


def rotate(vectors_BHTK: Tensor, sight: Sight) -> Tensor:
    """Turn each pair of numbers by its position's angle, so that products of two vectors see their distance alone."""
    cos_TP, sin_TP = sight.cos_TP.to(vectors_BHTK.dtype), sight.sin_TP.to(vectors_BHTK.dtype)
    first, second = vectors_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cos_TP - second * sin_TP, first * sin_TP + second * cos_TP), dim=-1)


def attention(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, visible_B11T: Tensor | None) -> Tensor:
    """Softmax of scaled products, times values; `visible_B11T` as in `Sight`.

    Written out for short sequences on a CPU, where the way back through torch's fused kernel is slow. Forward and backward of
    4,000 tokens, width 128, 4 heads, two cores, fused / written out in ms:

        steps         8       36        75       300       512      1,000
        bf16     14 / 5   47 / 4    39 / 6   33 / 14   40 / 25    52 / 77
        fp32     18 / 7   12 / 8   14 / 11   27 / 35   43 / 57  100 / 262

    Compiled code has one way for all lengths: a second would have to be compiled when the first long batch comes.
    """
    if not (query_BHTK.device.type == "cpu" and (torch.compiler.is_compiling() or is_short(query_BHTK))):
        return F.scaled_dot_product_attention(
            query_BHTK, key_BHTK, value_BHTK, attn_mask=visible_B11T, is_causal=visible_B11T is None
        )
    scores_BHTT = (query_BHTK / math.sqrt(query_BHTK.shape[-1])) @ key_BHTK.transpose(-1, -2)
    if visible_B11T is None:
        visible_B11T = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool).tril()
    bias = torch.zeros((), dtype=scores_BHTT.dtype).where(visible_B11T, -math.inf)
    return torch.softmax(scores_BHTT + bias, dim=-1) @ value_BHTK


def is_short(query_BHTK: Tensor) -> bool:
    return query_BHTK.shape[-2] <= (512 if query_BHTK.dtype == torch.bfloat16 else 128)
