"""Transformer backbones: vectors of steps in, vectors of steps out, whatever kind of sequence they stand for.

Pre-norm blocks, rotary positions, fused attention. The encoder sees a whole sequence, the decoder only what came before;
the latent enters every layer of the decoder, so that no layer has to carry it for the others.

Shapes: B sequences, T steps, W width, Z latent dimensions, H heads, K = W / H numbers of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.settings import ModelSettings

ROTARY_BASE = 10_000.0


class TransformerEncoder(nn.Module):
    """Every step sees every real step of its sequence."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.depth))
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, steps_BTW: Tensor, real_BT: Tensor) -> Tensor:
        """`real_BT` is False where padded; each sequence needs one real step for its attention to be defined."""
        rotary = rotary_angles(steps_BTW, self.heads)
        visible_B11T = real_BT[:, None, None, :]
        for block in self.blocks:
            steps_BTW = block(steps_BTW, rotary, visible_B11T)
        return self.norm(steps_BTW)


class TransformerDecoder(nn.Module):
    """A step sees itself, the steps before it, and the latent. Padding stands behind all real steps: no mask is needed."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.depth))
        self.latent = nn.Linear(settings.latent_size, settings.depth * settings.width)
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, inputs_BTW: Tensor, z_BZ: Tensor) -> Tensor:
        rotary = rotary_angles(inputs_BTW, self.heads)
        hidden_BTW = inputs_BTW
        shifts = self.latent(z_BZ).unsqueeze(1).chunk(len(self.blocks), dim=-1)
        for block, shift_B1W in zip(self.blocks, shifts, strict=True):
            hidden_BTW = block(hidden_BTW + shift_B1W, rotary, None)
        return self.norm(hidden_BTW)


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
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, hidden_BTW: Tensor, rotary: tuple[Tensor, Tensor], visible_B11T: Tensor | None) -> Tensor:
        """`visible_B11T` says which steps may be seen; None: those up to the step itself."""
        attended_BTW = self.attend(self.attention_norm(hidden_BTW), rotary, visible_B11T)
        hidden_BTW = hidden_BTW + self.dropout(attended_BTW)
        changed_BTW = self.down(F.gelu(self.up(self.feed_forward_norm(hidden_BTW))))
        return hidden_BTW + self.dropout(changed_BTW)

    def attend(self, hidden_BTW: Tensor, rotary: tuple[Tensor, Tensor], visible_B11T: Tensor | None) -> Tensor:
        """Without dropout on the attention itself: that would leave the fused kernels."""
        packed_BTHK = self.query_key_value(hidden_BTW).unflatten(-1, (self.heads, -1))
        query_BHTK, key_BHTK, value_BHTK = packed_BTHK.transpose(1, 2).chunk(3, dim=-1)
        attended_BHTK = F.scaled_dot_product_attention(
            rotate(query_BHTK, rotary),
            rotate(key_BHTK, rotary),
            value_BHTK,
            attn_mask=visible_B11T,
            is_causal=visible_B11T is None,
        )
        return self.attention_out(attended_BHTK.transpose(1, 2).flatten(-2))


def rotary_angles(steps_BTW: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, one angle for each pair of numbers of a head; any length, no table."""
    length, width = steps_BTW.shape[1:]
    pairs = width // heads // 2
    frequencies = ROTARY_BASE ** (-torch.arange(pairs, device=steps_BTW.device) / pairs)
    angles_TP = torch.arange(length, device=steps_BTW.device)[:, None] * frequencies
    return angles_TP.cos(), angles_TP.sin()


def rotate(vectors_BHTK: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of numbers by its position's angle, so that products of two vectors see their distance alone."""
    cos_TP, sin_TP = (table.to(vectors_BHTK.dtype) for table in rotary)
    first, second = vectors_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cos_TP - second * sin_TP, first * sin_TP + second * cos_TP), dim=-1)
