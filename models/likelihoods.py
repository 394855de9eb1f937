"""The likelihood of each kind: what the decoder says of each step, and what came, in; -log p of each step, in nats, out.

All are proper distributions: their probabilities sum, or their densities integrate, to 1. How many steps a sequence has is
modelled for tokens alone, by their end mark; for vectors and events the number of steps is given, and so is when the first
step happened, and which of the values that came are missing.

Shapes: B sequences, T steps (S = T + 1 with the end mark), N steps of the whole batch, D features, V variables or token ids,
E events of the whole batch, W width, R numbers of a value's code.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.embeddings import log_time, time_feature_count, time_features
from models.pieces import bounded, in_float32, real_steps
from models.segments import spread_to_events, step_offsets, sum_by_step
from sequences.batches import EventBatch, TokenBatch, VectorBatch
from sequences.description import DataDescription

LOG_2_PI = math.log(2 * math.pi)

LOGVAR_LIMIT = 7.0
"""Learned variances stay within exp(-7) and exp(7): a feature that never moves cannot pull the density to infinity."""

SCORES_AT_ONCE = 2**21
"""Scores of a large vocabulary that exist at one time: 8 MB, which stay in a processor's cache."""


def make_likelihood(description: DataDescription, width: int) -> "TokenLikelihood | VectorLikelihood | EventLikelihood":
    match description.kind:
        case "tokens":
            return TokenLikelihood(description.vocabulary_size, width)
        case "vectors":
            return VectorLikelihood(len(description.names), width)
        case "events":
            return EventLikelihood(len(description.names), width)


class TokenLikelihood(nn.Module):
    """Categorical over the ids and the end mark, whose id is the vocabulary's size."""

    extra_steps = 1

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.end = vocabulary_size
        self.scores = nn.Linear(width, vocabulary_size + 1)

    def forward(self, hidden_BSW: Tensor, batch: TokenBatch) -> Tensor:
        steps_S = torch.arange(hidden_BSW.shape[1], device=hidden_BSW.device)
        lengths_B1 = batch.lengths_B[:, None]
        targets_BS = F.pad(batch.tokens_BT, (0, 1)).masked_fill(steps_S == lengths_B1, self.end)
        nll_N = by_rows(self.cross_entropy, self.scores.out_features, hidden_BSW.flatten(0, 1), targets_BS.flatten())
        return nll_N.view_as(targets_BS) * ((steps_S <= lengths_B1) & (lengths_B1 > 0))

    def cross_entropy(self, hidden_NW: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(hidden_NW).float(), targets_N, reduction="none")


class VectorLikelihood(nn.Module):
    """One Gaussian for each feature, its variance learned; what is missing says nothing."""

    extra_steps = 0

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.moments = nn.Linear(width, 2 * features)

    def forward(self, hidden_BTW: Tensor, batch: VectorBatch) -> Tensor:
        mean_BTD, logvar_BTD = in_float32(self.moments, hidden_BTW).chunk(2, dim=-1)
        nll_BTD = gaussian_nll(batch.values_BTD, mean_BTD, bounded(logvar_BTD, LOGVAR_LIMIT))
        return (nll_BTD * batch.observed_BTD).sum(dim=-1) * real_steps(batch.lengths_B, mean_BTD.shape[1])


class EventLikelihood(nn.Module):
    """The gap since the step before (log-normal), then, knowing it, which variables are present (Bernoulli over all of
    them), then the values of those present (Gaussian).

    A value's mean and variance are products of a code of its step and a vector of its variable: the cost grows with the
    events that came, not with the variables that there are.
    """

    extra_steps = 0

    def __init__(self, variables: int, width: int) -> None:
        super().__init__()
        code_width = width // 2
        self.gap_moments = nn.Linear(width, 2)
        self.after_gap = nn.Sequential(
            nn.Linear(width + time_feature_count(), width), nn.GELU(), nn.Linear(width, width)
        )
        self.presence = nn.Linear(width, variables)
        self.value_code = nn.Linear(width, code_width)
        self.value_moments = nn.Embedding(variables, 2 * code_width)
        self.value_bias = nn.Embedding(variables, 2)
        nn.init.normal_(self.value_moments.weight, std=1 / math.sqrt(code_width))
        nn.init.zeros_(self.value_bias.weight)

    def forward(self, hidden_BTW: Tensor, batch: EventBatch) -> Tensor:
        real_BT = real_steps(batch.lengths_B, hidden_BTW.shape[1])
        later_BT = torch.arange(hidden_BTW.shape[1], device=hidden_BTW.device) > 0
        features_BTF = torch.cat((hidden_BTW, time_features(batch.gaps_BT).to(hidden_BTW.dtype)), dim=-1)
        hidden_NW = (hidden_BTW + self.after_gap(features_BTF)).flatten(0, 1)
        contents_N = self.presence_nll(hidden_NW, batch) + self.values_nll(hidden_NW, batch)
        return (self.gap_nll(hidden_BTW, batch) * later_BT + contents_N.view_as(real_BT)) * real_BT

    def gap_nll(self, hidden_BTW: Tensor, batch: EventBatch) -> Tensor:
        mean_BT, logvar_BT = in_float32(self.gap_moments, hidden_BTW).unbind(dim=-1)
        log_gaps_BT = log_time(batch.gaps_BT)
        return gaussian_nll(log_gaps_BT, mean_BT, bounded(logvar_BT, LOGVAR_LIMIT)) + log_gaps_BT

    def presence_nll(self, hidden_NW: Tensor, batch: EventBatch) -> Tensor:
        present_NV = torch.zeros(len(hidden_NW), self.presence.out_features, dtype=torch.bool, device=hidden_NW.device)
        present_NV[batch.steps_E, batch.variables_E] = True
        return by_rows(self.bernoulli, self.presence.out_features, hidden_NW, present_NV)

    def bernoulli(self, hidden_NW: Tensor, present_NV: Tensor) -> Tensor:
        scores_NV = self.presence(hidden_NW).float()
        return (F.softplus(scores_NV) - scores_NV * present_NV).sum(dim=-1)

    def values_nll(self, hidden_NW: Tensor, batch: EventBatch) -> Tensor:
        offsets = step_offsets(batch.steps_E, len(hidden_NW))
        code_ER = spread_to_events(in_float32(self.value_code, hidden_NW), batch.steps_E, offsets)
        products_E2 = (code_ER[:, None] * self.value_moments(batch.variables_E).unflatten(-1, (2, -1))).sum(dim=-1)
        mean_E, logvar_E = (products_E2 + self.value_bias(batch.variables_E)).unbind(dim=-1)
        nll_E = gaussian_nll(batch.values_E, mean_E, bounded(logvar_E, LOGVAR_LIMIT)) * batch.has_value_E
        return sum_by_step(nll_E, offsets)


def by_rows(function: Callable[..., Tensor], scores_per_row: int, *tensors_N: Tensor) -> Tensor:
    """Call `function` on slices of the rows, so that no more than SCORES_AT_ONCE scores exist at a time.

    Each slice forgets its scores and computes them anew on the way back: one more product, but none of the memory traffic
    of a batch of scores, which costs more than arithmetic.
    """
    rows = max(256, SCORES_AT_ONCE // scores_per_row)
    if len(tensors_N[0]) <= rows:
        return function(*tensors_N)
    slices = zip(*(tensor.split(rows) for tensor in tensors_N), strict=True)
    return torch.cat([checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in slices])


def gaussian_nll(values: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    return 0.5 * (LOG_2_PI + logvar + (values - mean).square() * torch.exp(-logvar))
