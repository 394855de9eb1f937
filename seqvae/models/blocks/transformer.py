"""The block of a transformer: vectors of steps in, vectors of steps out, whatever kind of sequence they stand for.

Pre-norm. A block sees a whole sequence or, in a decoder, what came before; `Sight` says which.

Shapes: B sequences, T steps, W width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.models.blocks.pieces import Dropout
from seqvae.models.cpu_kernels.attention import AttentionContext, attend_next, attention


class Block(nn.Module):
    """Attention, then a feed-forward network, each on a normalised copy whose result is added to the stream."""

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

    def forward(self, hidden_BTW: Tensor, sight: AttentionContext) -> Tensor:
        hidden_BTW = hidden_BTW + self.dropout(self.attend(self.attention_norm(hidden_BTW), sight))
        return hidden_BTW + self.dropout(self.feed_forward(hidden_BTW))

    def step(
        self, hidden_BW: Tensor, step: int, sight: AttentionContext, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `forward` has it for one step; the past are the keys and values of those before it."""
        packed_BX = self.queries_keys_values(self.attention_norm(hidden_BW))
        attended_BW, past = attend_next(packed_BX, sight, step, past, self.heads)
        hidden_BW = hidden_BW + self.dropout(self.attention_out(attended_BW))
        return hidden_BW + self.dropout(self.feed_forward(hidden_BW)), past

    def attend(self, hidden_BTW: Tensor, sight: AttentionContext) -> Tensor:
        """Without dropout on the attention itself: that would leave the fused kernels."""
        return self.attention_out(attention(self.queries_keys_values(hidden_BTW), sight, self.heads))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))
