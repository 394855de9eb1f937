"""The blocks that backbones are stacks of: attention, recurrent networks, dilated convolutions.

    block(hidden, context)              vectors of steps in, vectors of steps out, added to the stream that came in
    block.step(hidden, step, ...)       the same for one step of a decoder, and what the block remembers for the next one: its past

The context is what all blocks need to know of a batch: an `AttentionContext` for attention, `opposite_steps` for networks that read
in both directions, which steps are real for convolutions that look ahead; None for other blocks that look back only.

Shapes: B sequences, T steps, N = B * T steps of the whole batch, W width, H heads, K = W / H numbers of a head, P = K / 2 pairs of
them, X = 3 W packed.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.models.cpu_kernels import LONGEST_ATTENTION, Dropout, RotaryAttention, complex_turns

FIRST_ROOM = 16
"""Steps that there is space for at first, while sequences are drawn."""

ROTARY_BASE = 10_000.0

CONVOLUTIONS_PER_BLOCK = 3

DISTANCES = tuple(3**power for power in range(6))
"""Up to 243; deeper networks begin again at 1, since what is farther away than a sequence is long teaches nothing."""


class AttentionContext(NamedTuple):
    """The places of a batch's steps and which of them may be seen, computed once for all blocks."""

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


class AttentionBlock(nn.Module):
    """Attention, then a feed-forward network, each on a normalised copy whose result is added to the stream.

    Positions are rotary: pairs of numbers of queries and keys are turned by an angle for each position, so that products see
    distances alone. There is no dropout on the attention itself: that would leave the fused kernels.
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
    """Reads in both directions.

    Nothing is packed: packing wants the lengths on the CPU, for which a GPU would have to wait. Padding stands behind all real
    steps, so reading forwards never meets it in time to matter; reading backwards starts at each sequence's own last step, because
    the sequence is reversed within its length first.
    """

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


class ConvolutionBlock(nn.Module):
    """Convolutions at growing distances.

    A convolution looks at a step and at those once and twice a distance away, which triples from one convolution to the next, so
    that every step within reach is found on exactly one way, and never on one through padding. A block has three convolutions:
    then it costs about what a block of attention does, and two of them reach 728 steps back.
    """

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
        normed_BTW = F.pad(normed_BTW, (0, 0, shifts[0], -shifts[-1]))
        starts = [shifts[0] - shift for shift in shifts]
        around = torch.cat([normed_BTW[:, start : start + length] for start in starts], dim=-1)
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


def with_room(kept: Tensor | None, new: Tensor, step: int, most: int | None = None) -> Tensor:
    """Return what is kept of the steps so far, in a tensor that has space for `step`; steps stand in the last dimension but one.

    `new` is one such step. Space doubles, up to `most` steps: what is kept of T steps is copied less than twice.
    """
    if kept is None:
        return new.new_empty(*new.shape[:-2], FIRST_ROOM, new.shape[-1])
    size = kept.shape[-2]
    if step < size or (most is not None and size >= most):
        return kept
    return F.pad(kept, (0, 0, 0, size if most is None else min(size, most - size)))
