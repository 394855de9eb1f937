"""The input embedding of each kind: a batch in, one vector for each of its steps out.

Encoder and decoder share it. Padded steps get some finite vector, which nothing looks at. Values enter as their inverse hyperbolic
sine, linear near 0, logarithmic far out: an outlier of 1,000 deviations counts 7.6 and drowns nothing.

Shapes: B sequences, T steps, N = B * T steps of the whole batch, D features, V variables, E events of the whole batch, W width,
R width of an event, F time features, G width of pretrained vectors.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.data.batch import EventBatch, TokenBatch, VectorBatch
from seqvae.data.description import DataDescription

TIME_WAVES = 6
"""Waves over the logarithm of a time, with periods of 1, 2, ... 32: the finest separates 1 minute from 2, the widest would take
a second to 2 million years to come round. Times count in shortest gaps of the data, so that their unit does not matter."""
TIME_FEATURES = 1 + 2 * TIME_WAVES


class PretrainedVectors(NamedTuple):
    """Vectors of the variables that are known before training."""

    vectors_VG: Tensor
    frozen: bool
    """Whether they stay as they are; otherwise they are only where training starts."""


class TokenEmbedding(nn.Module):
    """A table of vectors, one for each id."""

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary_size, width)

    def forward(self, batch: TokenBatch) -> Tensor:
        return self.table(batch.tokens_BT)


class VectorEmbedding(nn.Module):
    """The values, and which of them were observed: a missing value is not the mean."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(2 * features, width)

    def forward(self, batch: VectorBatch) -> Tensor:
        squashed_BTD = batch.values_BTD.asinh()
        return self.projection(torch.cat((squashed_BTD, batch.observed_BTD.to(squashed_BTD.dtype)), dim=-1))


class EventEmbedding(nn.Module):
    """The set of a step's events, free of order, and when the step happened.

    An event becomes gelu(variable + value * slope), with a vector `variable` and a vector `slope` for each variable, so that
    the sum over a step still shows which value belongs to which variable. Events are narrower than steps: there are several
    of them in a step, and moving their vectors through memory is what costs time.
    """

    def __init__(self, description: DataDescription, width: int, pretrained: PretrainedVectors | None = None) -> None:
        super().__init__()
        event_width = width // 2
        self.shortest_gap = description.shortest_gap
        self.table = VariableTable(len(description.names), 2 * event_width, pretrained)
        self.has_value = nn.Parameter(torch.randn(event_width))
        self.from_set = nn.Linear(event_width, width)
        self.from_time = nn.Linear(2 * TIME_FEATURES, width, bias=False)

    def forward(self, batch: EventBatch, times_BT: Tensor | None = None) -> Tensor:
        """Embed the steps; `times_BT` are times since each sequence's first step, where the batch does not begin with that.

        What a value adds to its variable is added in the table, which is shorter than the events; `values_E` is 0 without.
        """
        variable_VR, slope_VR = self.table().chunk(2, dim=-1)
        without_and_with = torch.cat((variable_VR, variable_VR + self.has_value))
        variable_ER = F.embedding(batch.variables_E + len(variable_VR) * batch.has_value_E, without_and_with)
        slope_ER = F.embedding(batch.variables_E, slope_VR)
        events_ER = F.gelu(torch.addcmul(variable_ER, batch.values_E.asinh()[:, None], slope_ER))
        if torch.compiler.is_compiling():  # only for export: ONNX knows no search for a step's events
            sets_NR = events_ER.new_zeros(batch.gaps_BT.numel(), events_ER.shape[1]).index_add(
                0, batch.steps_E, events_ER
            )
        else:
            sets_NR = SumByStep.apply(events_ER, batch.steps_E, step_offsets(batch.steps_E, batch.gaps_BT.numel()))
        sets_BTR = sets_NR.unflatten(0, batch.gaps_BT.shape)
        times_BT = batch.gaps_BT.cumsum(dim=1) if times_BT is None else times_BT
        times_BT2 = torch.stack((batch.gaps_BT, times_BT), dim=-1)
        times_BTF = time_features(times_BT2, self.shortest_gap).flatten(-2)
        return self.from_set(sets_BTR) + self.from_time(times_BTF)


class VariableTable(nn.Module):
    """A vector for each variable: drawn at random, or starting from pretrained vectors of any width."""

    def __init__(self, variables: int, width: int, pretrained: PretrainedVectors | None) -> None:
        super().__init__()
        self.projection = None
        if pretrained is None:
            self.vectors_VR = nn.Parameter(torch.randn(variables, width))
        else:
            self.vectors_VG = nn.Parameter(pretrained.vectors_VG.clone(), requires_grad=not pretrained.frozen)
            self.projection = Float32Linear(pretrained.vectors_VG.shape[1], width)
            length = pretrained.vectors_VG.square().sum(dim=1).mean().sqrt().clamp(min=1e-6)
            nn.init.normal_(self.projection.weight, std=float(1 / length))  # the scale of a table drawn at random

    def forward(self) -> Tensor:
        return self.vectors_VR if self.projection is None else self.projection(self.vectors_VG)


class Float32Linear(nn.Linear):
    """A layer that computes in float32: the 3 digits of bf16 would be most of the error that a Gaussian's moments describe."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            return super().forward(inputs.float())


def time_features(times: Tensor, shortest: float) -> Tensor:
    """Return the logarithm of a time as waves of several lengths, (..., F): equal ratios are equally far apart.

    Shorter times than the shortest, and 0, count as that.
    """
    log_times = (times.clamp(min=shortest).log() - math.log(shortest))[..., None]
    periods = 2.0 ** torch.arange(TIME_WAVES, device=times.device)
    angles = 2 * math.pi * log_times / periods
    return torch.cat((log_times / periods[-1], angles.sin(), angles.cos()), dim=-1)


# Between the events of a batch and its steps. Events stand in the order of their steps, so a step's events are a slice.
#
# `embedding_bag` adds up slices 13 times as fast on a CPU as `segment_reduce` (14,549 events of 192 numbers on 2,496 steps: 0.3
# ms instead of 3.7), and on a GPU its sums do not depend on a race of threads as those of `index_add` do. Its own backward pass
# takes 4.3 ms, where spreading takes 0.5 and is the same: each of the two functions is the adjoint of the other.


def step_offsets(steps_E: Tensor, step_count: int) -> Tensor:
    """Return where each step's events begin, and where the last one's end: N + 1 offsets into the events.

    >>> step_offsets(torch.tensor([0, 0, 2]), step_count=4)
    tensor([0, 2, 2, 3, 3])
    """
    return torch.searchsorted(steps_E, torch.arange(step_count + 1, device=steps_E.device))


class SumByStep(torch.autograd.Function):
    """The sum of each step's events, (E, R) -> (N, R); 0 for a step without events.

    >>> SumByStep.apply(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2, 3])).flatten()
    tensor([3., 0., 3.])
    """

    @staticmethod
    def forward(ctx: Any, events_ER: Tensor, steps_E: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(steps_E, offsets)
        every_E = torch.arange(len(events_ER), device=events_ER.device)
        return F.embedding_bag(every_E, events_ER.contiguous(), offsets, mode="sum", include_last_offset=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return SpreadToEvents.apply(gradients[0], *ctx.saved_tensors), None, None


class SpreadToEvents(torch.autograd.Function):
    """The row of its step for each event, (N, R) -> (E, R)."""

    @staticmethod
    def forward(ctx: Any, steps_NR: Tensor, steps_E: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(steps_E, offsets)
        return F.embedding(steps_E, steps_NR)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return SumByStep.apply(gradients[0], *ctx.saved_tensors), None, None
