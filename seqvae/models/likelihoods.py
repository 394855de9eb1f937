"""The likelihood of each kind: the decoder's vector of each step and the batch in, -log p of each step, in nats, out.

All are proper distributions: their probabilities sum, or their densities integrate, to 1. How many steps a sequence has is
modelled for tokens alone, by their end mark, which a sequence that the length cap cut off does not have; for vectors and events
the number of steps is a condition, and so is when the first step happened, and which of the values that came are missing. Where
training shows no <unknown>, it has a fixed share of the probability beside what is learned (`mix_in_unknown`). "Gaussian" stands
for one with a small share of outliers (`robust_nll`). Each likelihood also draws one step of each sequence from the decoder's
vectors. Draws take a temperature, 1 for the distribution itself and 0 for its most likely value, and noise on the tensors'
device (`Noise`), so that drawing leaves the noise of training alone.

Shapes: B sequences, T steps (S = T + 1 with the end mark), N steps of the whole batch, D features, V variables or token ids,
E events of the whole batch, W width, R numbers of a value's code, C variables of a block, M variables that are drawn.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqvae.data.batch import EventBatch, TokenBatch, VectorBatch, predicted_steps
from seqvae.data.description import DataDescription
from seqvae.models.cpu_kernels import (
    MANY_IDS,
    HasCpuKernel,
    columns_at_once,
    linear_cross_entropy,
    rows_at_once,
    wide_cross_entropy,
)
from seqvae.models.embeddings import (
    TIME_FEATURES,
    Float32Linear,
    SpreadToEvents,
    SumByStep,
    step_offsets,
    time_features,
)
from seqvae.models.noise import Noise
from seqvae.models.posteriors import bounded

LOGVAR_LIMIT = 7.0
"""Learned variances stay within exp(-7) and exp(7): a feature that never moves cannot pull the density to infinity."""

LONGEST_LOG_GAP = 60.0
"""Limit of a drawn gap's logarithm: some thousands of such gaps still add up within float32."""

FEW_VARIABLES = 256
"""Up to this many variables, the means and variances of all of them are computed at each step, in one product of matrices: 8
times as fast with 42 variables as a product for each event, and about as fast here."""

DRAWN_VARIABLES = 1024
"""Of more variables than this, training computes those that are present and draws so many of the others."""
EVEN_SHARE = 0.5
"""The share of these draws that goes to all variables alike; the rest goes to each by its rate. Without it the rarest would be
drawn once in thousands of steps with a weight of thousands, which an optimizer's running means do not bear."""
DRAW_UNIT = 2**32
"""Chances of being drawn are stored as multiples of 1 / DRAW_UNIT: whole numbers stay exact when a network is cast to bf16."""
START_STD = 0.1
"""Standard deviation of the scores of `PresenceOfMany` around the base rates, before training."""

OUTLIER_SHARE = 1e-4
"""One value in 10,000 counts as an outlier. A pH of 735 that was meant to be 7.35 lies 20 standard deviations out and costs
a learned Gaussian hundreds of nats, as much as all the rest of an ICU stay. Outliers follow Student's distribution with 2 degrees
of freedom, at the mean and scale that are learned: far out it costs logarithms, where a broad Gaussian would still cost a
square. So 20 of the learned standard deviations cost 18 nats, 1,000 cost 30 and a million 51, for which an ordinary value pays
0.0001. The tail hangs on the learned mean and scale so that it pulls at both: otherwise a feature that is 1 in 4 % of the steps,
5 standard deviations from its mean, counts as an outlier for good before its cause is found."""

UNKNOWN_ID = 0
"""Id or variable that <unknown> is, where a vocabulary has it."""

FARTHEST = 1e9
"""Learned standard deviations; this far from its mean a Gaussian is 0 in any case, and squares must not overflow."""


class GapScale(NamedTuple):
    """The scale that gaps are measured by: `log_gap_mean`, `log_gap_std` and `shortest_gap` of the DataDescription."""

    log_mean: float
    log_std: float
    shortest: float


class TokenLikelihood(HasCpuKernel, nn.Module):
    """Categorical over the ids and the end mark, whose id is the vocabulary's size."""

    extra_steps = 1

    def __init__(self, vocabulary_size: int, width: int, unknown_share: float = 0.0) -> None:
        super().__init__()
        self.end = vocabulary_size
        self.unknown_share = unknown_share
        self.scores = nn.Linear(width, vocabulary_size + 1)

    def forward(self, hidden_BSW: Tensor, batch: TokenBatch) -> Tensor:
        steps_S = torch.arange(hidden_BSW.shape[1], device=hidden_BSW.device)
        targets_BS = F.pad(batch.tokens_BT, (0, 1)).masked_fill(steps_S == batch.lengths_B[:, None], self.end)
        return self.nll_of(targets_BS, hidden_BSW, batch)

    def nll_of_drawn(self, hidden_BSW: Tensor, batch: TokenBatch, seed: int) -> Tensor:
        """Return -log p, (B, S), of what the likelihood draws at each step of the batch."""
        with torch.no_grad():
            slices = drawing(hidden_BSW.flatten(0, 1), self.scores.out_features, seed)
            targets_N = torch.cat([self.sample(hidden_RW, 1.0, noise) for hidden_RW, noise in slices])
            if self.unknown_share:
                uniform_N = Noise(seed + 1, torch.arange(len(targets_N), device=targets_N.device)).uniform(
                    targets_N.shape
                )
                targets_N = targets_N.masked_fill(uniform_N < self.unknown_share, UNKNOWN_ID)
        return self.nll_of(targets_N.view(hidden_BSW.shape[:2]), hidden_BSW, batch)

    def nll_of(self, targets_BS: Tensor, hidden_BSW: Tensor, batch: TokenBatch) -> Tensor:
        """Return -log p of these ids at the steps that count, (B, S)."""
        steps_S = torch.arange(hidden_BSW.shape[1], device=hidden_BSW.device)
        counts_BS = steps_S < predicted_steps(batch)[:, None]
        hidden_NW, targets_N = hidden_BSW.flatten(0, 1), targets_BS.flatten()
        if self.kernel_enabled and self.end >= MANY_IDS:
            weight_VW, bias_V = self.scores.weight, self.scores.bias
            nll_N = wide_cross_entropy(hidden_NW, weight_VW, bias_V, targets_N, counts_BS.flatten())
        elif hidden_NW.device.type != "cpu" or not torch.is_grad_enabled():
            nll_N = by_rows(self.cross_entropy, self.scores.out_features, hidden_NW, targets_N)
        elif self.use_kernel(hidden_NW):
            weight_VW, bias_V = self.scores.weight, self.scores.bias
            nll_N = linear_cross_entropy(hidden_NW, weight_VW, bias_V, targets_N, counts_BS.flatten())
        else:
            nll_N = self.cross_entropy(hidden_NW, targets_N)
        if self.unknown_share:
            nll_N = mix_in_unknown(nll_N, targets_N == UNKNOWN_ID, self.unknown_share)
        return nll_N.view_as(targets_BS) * counts_BS

    def unknown_nll(self, hidden_BSW: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return what `forward` has for <unknown>, (B, S), and where it stands."""
        real_BT = real_steps(batch.lengths_B, batch.tokens_BT.shape[1])
        is_unknown_BS = F.pad((batch.tokens_BT == UNKNOWN_ID) & real_BT, (0, 1))
        return self(hidden_BSW, batch) * is_unknown_BS, is_unknown_BS

    def cross_entropy(self, hidden_NW: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(hidden_NW).float(), targets_N, reduction="none")

    def sample(self, hidden_BW: Tensor, temperature: float, noise: Noise) -> Tensor:
        """Draw an id, or the end mark, for each sequence; <unknown> only as often as it was learned: it says nothing."""
        scores_BV = self.scores(hidden_BW)
        if temperature == 0:
            return scores_BV.argmax(dim=-1)
        sums_BV = (scores_BV.float() / temperature).softmax(dim=-1).cumsum(dim=-1)
        # torch.multinomial draws a number for each id: no faster for 6 ids, and 5 times as slow for 40.
        uniform_B1 = noise.uniform((len(sums_BV), 1))
        return torch.searchsorted(sums_BV, uniform_B1 * sums_BV[:, -1:], right=True).squeeze(-1)


class VectorLikelihood(nn.Module):
    """One Gaussian for each feature, its variance learned; what is missing adds nothing."""

    extra_steps = 0
    valued_D: Tensor
    """bool: has values in the training split. The moments of others were never learned."""

    def __init__(self, description: DataDescription, width: int) -> None:
        super().__init__()
        assert len(description.valued) == len(description.names)
        self.moments = Float32Linear(width, 2 * len(description.names))
        self.register_buffer("valued_D", torch.tensor(description.valued), persistent=False)

    def forward(self, hidden_BTW: Tensor, batch: VectorBatch) -> Tensor:
        nll_BTD = robust_nll(batch.values_BTD, *self.predict(hidden_BTW)) * batch.observed_BTD
        return nll_BTD.sum(dim=-1) * real_steps(batch.lengths_B, hidden_BTW.shape[1])

    def nll_of_drawn(self, hidden_BTW: Tensor, batch: VectorBatch, seed: int) -> Tensor:
        """Return -log p, (B, T), of what the likelihood draws where the batch has values."""
        with torch.no_grad():
            drawn_BTD = self.sample(
                hidden_BTW, 1.0, Noise(seed, torch.arange(len(hidden_BTW), device=hidden_BTW.device))
            )
        return self(hidden_BTW, batch._replace(values_BTD=drawn_BTD))

    def predict(self, hidden_BTW: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance of each feature."""
        mean_BTD, raw_logvar_BTD = self.moments(hidden_BTW).chunk(2, dim=-1)
        return mean_BTD, bounded(raw_logvar_BTD, LOGVAR_LIMIT)

    def sample(self, hidden: Tensor, temperature: float, noise: Noise) -> Tensor:
        """Draw all features, normalised, (B, ..., D)."""
        return draw_gaussian(*self.predict(hidden), temperature, noise)


class EventLikelihood(nn.Module):
    """The gap since the step before (log-normal), then, knowing it, which variables are present (`Presence`), then the values of
    those present (Gaussian)."""

    extra_steps = 0
    valued_V: Tensor
    """bool: has values in the training split. Others are present or not, and no more can be drawn of them."""

    def __init__(self, description: DataDescription, width: int) -> None:
        super().__init__()
        variables = len(description.names)
        assert len(description.valued) == variables
        self.unknown_share = description.unknown_share
        self.gap_scale = GapScale(description.log_gap_mean, description.log_gap_std, description.shortest_gap)
        self.gap_moments = Float32Linear(width, 2)
        self.after_gap = nn.Sequential(nn.Linear(width + TIME_FEATURES, width), nn.GELU(), nn.Linear(width, width))
        if variables <= FEW_VARIABLES:
            self.presence = Presence(width, variables)
        else:
            self.presence = PresenceOfMany(width, variables, description.presence_rates)
        make_moments = MomentsOfAll if variables <= FEW_VARIABLES else MomentsOfPresent
        self.value_moments = make_moments(variables, width)
        self.register_buffer("valued_V", torch.tensor(description.valued), persistent=False)

    def forward(self, hidden_BTW: Tensor, batch: EventBatch) -> Tensor:
        real_BT = real_steps(batch.lengths_B, hidden_BTW.shape[1])
        later_BT = torch.arange(hidden_BTW.shape[1], device=hidden_BTW.device) > 0
        hidden_NW = self.condition_on_gaps(hidden_BTW, batch.gaps_BT).flatten(0, 1)
        offsets = step_offsets(batch.steps_E, len(hidden_NW))
        moments_E2 = self.value_moments(hidden_NW, batch.steps_E, batch.variables_E, offsets)
        mean_E, raw_logvar_E = moments_E2.unbind(dim=-1)
        values_E = robust_nll(batch.values_E, mean_E, bounded(raw_logvar_E, LOGVAR_LIMIT)) * batch.has_value_E
        values_N = SumByStep.apply(values_E[:, None], batch.steps_E, offsets).squeeze(-1)
        contents_N = self.presence.nll(hidden_NW, batch) + values_N
        if self.unknown_share:
            learned_N, mixed_N, _ = self._unknown_presence(hidden_NW, batch)
            contents_N = contents_N + (mixed_N - learned_N)
        gaps_BT = gap_nll(batch.gaps_BT, *self.predict_gaps(hidden_BTW), self.gap_scale)
        return (gaps_BT * later_BT + contents_N.view_as(real_BT)) * real_BT

    def nll_of_drawn(self, hidden_BTW: Tensor, batch: EventBatch, seed: int) -> Tensor:
        """Return -log p, (B, T), of the gap and the events that the likelihood draws at each step of the batch."""
        with torch.no_grad():
            events: list[tuple[Tensor, Tensor, Tensor]] = []
            gaps, rows = [], 0
            is_first_N = (torch.arange(hidden_BTW.shape[1], device=hidden_BTW.device) == 0).repeat(len(hidden_BTW))
            for hidden_RW, noise in drawing(hidden_BTW.flatten(0, 1), len(self.valued_V), seed):
                gaps_R = self.sample_gap(hidden_RW, 1.0, noise)
                gaps_R = gaps_R.masked_fill(is_first_N[rows : rows + len(gaps_R)], 0.0)
                present_RV, values_RV = self.sample(hidden_RW, gaps_R, 1.0, noise)
                if self.unknown_share:
                    present_RV[:, UNKNOWN_ID] |= noise.uniform(gaps_R.shape) < self.unknown_share
                steps, variables = present_RV.nonzero(as_tuple=True)
                events.append((rows + steps, variables, values_RV[steps, variables]))
                gaps.append(gaps_R)
                rows += len(gaps_R)
            steps_E, variables_E, values_E = (torch.cat(column) for column in zip(*events, strict=True))
        drawn = batch._replace(
            gaps_BT=torch.cat(gaps).view_as(batch.gaps_BT),
            steps_E=steps_E,
            variables_E=variables_E,
            values_E=values_E.nan_to_num(),
            has_value_E=~values_E.isnan(),
        )
        return self(hidden_BTW, drawn)

    def unknown_nll(self, hidden_BTW: Tensor, batch: EventBatch) -> tuple[Tensor, Tensor]:
        """Return what `forward` has for whether <unknown> is present at a step, (B, T), and where it is."""
        real_BT = real_steps(batch.lengths_B, hidden_BTW.shape[1])
        hidden_NW = self.condition_on_gaps(hidden_BTW, batch.gaps_BT).flatten(0, 1)
        _, mixed_N, is_unknown_N = self._unknown_presence(hidden_NW, batch)
        return mixed_N.view_as(real_BT) * real_BT, is_unknown_N.view_as(real_BT)

    def _unknown_presence(self, hidden_NW: Tensor, batch: EventBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return -log p of whether <unknown> is present, as learned and with its share mixed in, and where it is, (N,) each."""
        is_unknown_E = (batch.variables_E == UNKNOWN_ID).float()
        is_unknown_N = is_unknown_E.new_zeros(len(hidden_NW)).index_add(0, batch.steps_E, is_unknown_E) > 0
        score_N = self.presence.score_of(UNKNOWN_ID, hidden_NW).float()
        learned_N = F.softplus(torch.where(is_unknown_N, -score_N, score_N))
        return learned_N, mix_in_unknown(learned_N, is_unknown_N, self.unknown_share), is_unknown_N

    def condition_on_gaps(self, hidden_BTW: Tensor, gaps_BT: Tensor) -> Tensor:
        """Add to the vector of each step what is known from the gap before it."""
        times_BTF = time_features(gaps_BT, self.gap_scale.shortest).to(hidden_BTW.dtype)
        return hidden_BTW + self.after_gap(torch.cat((hidden_BTW, times_BTF), dim=-1))

    def predict_gaps(self, hidden_BTW: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance of the logarithm of each gap, standardised."""
        mean_BT, raw_logvar_BT = self.gap_moments(hidden_BTW).unbind(dim=-1)
        return mean_BT, bounded(raw_logvar_BT, LOGVAR_LIMIT)

    def predict_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance of the value of every variable, (..., V), present or not; `hidden` knows the gap."""
        mean, raw_logvar = self.value_moments.of_all(hidden).unbind(dim=-1)
        return mean, bounded(raw_logvar, LOGVAR_LIMIT)

    def event_means(self, hidden_BTW: Tensor, batch: EventBatch) -> Tensor:
        """Return the mean of each event's value, (E,), knowing the gap before its step."""
        hidden_NW = self.condition_on_gaps(hidden_BTW, batch.gaps_BT).flatten(0, 1)
        offsets = step_offsets(batch.steps_E, len(hidden_NW))
        return self.value_moments(hidden_NW, batch.steps_E, batch.variables_E, offsets)[:, 0]

    def sample_gap(self, hidden_BW: Tensor, temperature: float, noise: Noise) -> Tensor:
        """Draw the time since the step before; at temperature 0 its median."""
        drawn_B = draw_gaussian(*self.predict_gaps(hidden_BW), temperature, noise)
        log_gaps_B = drawn_B * self.gap_scale.log_std + self.gap_scale.log_mean
        return log_gaps_B.clamp(max=LONGEST_LOG_GAP).exp()

    def sample(
        self,
        hidden_BW: Tensor,
        gaps_B: Tensor,
        temperature: float,
        noise: Noise,
        present_BV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw the events of a step, knowing the gap before it: which variables are present, (B, V), unless that is known, and
        their values, (B, V), NaN for what is not present and for variables that never had a value in training."""
        hidden_BW = self.condition_on_gaps(hidden_BW, gaps_B)
        if present_BV is None:
            present_BV = self.presence.sample(hidden_BW, temperature, noise)
        values_BV = draw_gaussian(*self.predict_values(hidden_BW), temperature, noise)
        return present_BV, values_BV.masked_fill(~(present_BV & self.valued_V), math.nan)


class Presence(nn.Linear):
    """The variables that are present at a step: Bernoulli over all of them. Calling it returns their scores."""

    def nll(self, hidden_NW: Tensor, batch: EventBatch) -> Tensor:
        """Return -log p of which variables have an event at each step and which have none, (N,)."""
        present_NV = torch.zeros(len(hidden_NW), self.out_features, dtype=torch.bool, device=hidden_NW.device)
        present_NV[batch.steps_E, batch.variables_E] = True
        return by_rows(self.bernoulli_nll, self.out_features, hidden_NW, present_NV)

    def score_of(self, variable: int, hidden_NW: Tensor) -> Tensor:
        """Return the scores of one variable, (N,)."""
        return F.linear(hidden_NW, self.weight[variable : variable + 1], self.bias[variable : variable + 1]).squeeze(-1)

    def bernoulli_nll(self, hidden_NW: Tensor, present_NV: Tensor) -> Tensor:
        scores_NV = self(hidden_NW).float()
        return (F.softplus(scores_NV) - scores_NV * present_NV).sum(dim=-1)

    def sample(self, hidden_BW: Tensor, temperature: float, noise: Noise) -> Tensor:
        """Draw which variables are present, (B, V)."""
        scores_BV = self(hidden_BW)
        if temperature == 0:
            return scores_BV > 0
        return noise.uniform(scores_BV.shape) < (scores_BV.float() / temperature).sigmoid()


class PresenceOfMany(Presence):
    """The presence of many variables: it starts at their base rates, and in training its cost follows the events that came.

    -log p of a step is a sum over all variables. In training the terms of those present are computed, and the sum over all others
    is estimated from DRAWN_VARIABLES of them, the same for a whole micro-batch, each term divided by its variable's chance of being
    drawn (Horvitz and Thompson): the mean of value and gradient over the draws is exact. Without gradients all terms are computed.
    """

    bounds_V1: Tensor
    """int64: a variable is drawn where a multiple of DRAW_UNIT, shifted at random, falls between its bound and the next."""

    def __init__(self, width: int, variables: int, rates: Sequence[float]) -> None:
        """`rates`: the share of the steps at which each variable is present; none where they are not known."""
        super().__init__(width, variables)
        assert len(rates) in (0, variables)
        rates_V = torch.tensor(rates or [1.0] * variables, dtype=torch.float64)
        if rates:
            nn.init.normal_(self.weight, std=START_STD / math.sqrt(width))
            with torch.no_grad():
                self.bias.copy_(rates_V.logit())
        self.register_buffer("bounds_V1", draw_bounds(rates_V, DRAWN_VARIABLES), persistent=False)

    def nll(self, hidden_NW: Tensor, batch: EventBatch) -> Tensor:
        """Return -log p of which variables have an event at each step and which have none, (N,); in training an estimate."""
        if not torch.is_grad_enabled():
            return self.exact_nll(hidden_NW, batch)
        if self.training and self.out_features > DRAWN_VARIABLES:
            return self.estimated_nll(hidden_NW, batch)
        return super().nll(hidden_NW, batch)

    def exact_nll(self, hidden_NW: Tensor, batch: EventBatch) -> Tensor:
        """Go through the variables in blocks, so that memory does not grow with their number."""
        steps_E, variables_E, is_first_E = self.sorted_events(batch)
        nll_N = torch.zeros(len(hidden_NW), device=hidden_NW.device)
        present_E = torch.zeros(len(steps_E), device=hidden_NW.device)
        columns = columns_at_once(len(hidden_NW))
        for start in range(0, self.out_features, columns):
            block = slice(start, start + columns)
            scores_NC = F.linear(hidden_NW, self.weight[block], self.bias[block]).float()
            places_E = variables_E - start
            is_here_E = (places_E >= 0) & (places_E < scores_NC.shape[1])
            here_E = scores_NC[steps_E, places_E.clamp(0, scores_NC.shape[1] - 1)]
            present_E = torch.where(is_here_E & is_first_E, here_E, present_E)
            nll_N += F.softplus(scores_NC).sum(dim=-1)
        return nll_N - sum_by_step(present_E, steps_E, len(hidden_NW))

    def estimated_nll(self, hidden_NW: Tensor, batch: EventBatch) -> Tensor:
        """Compute what is present, and estimate what is absent from the variables that `draw` returns."""
        steps_E, variables_E, is_first_E = self.sorted_events(batch)
        chosen_M, weights_M = self.draw()
        # One look-up, so that the backward pass makes one gradient of all variables.
        together, sizes = torch.cat((variables_E, chosen_M)), (len(variables_E), len(chosen_M))
        weight_EW, weight_MW = F.embedding(together, self.weight).split(sizes)
        bias_E, bias_M = self.bias[together].split(sizes)
        offsets = step_offsets(steps_E, len(hidden_NW))
        hidden_EW = SpreadToEvents.apply(hidden_NW, steps_E, offsets)
        scores_E = (hidden_EW.float() * weight_EW).sum(dim=-1) + bias_E
        present_N = sum_by_step(F.softplus(-scores_E) * is_first_E, steps_E, len(hidden_NW))
        column_V = torch.full((self.out_features,), len(chosen_M), device=chosen_M.device)
        column_V[chosen_M] = torch.arange(len(chosen_M), device=chosen_M.device)
        present_NM = torch.zeros(len(hidden_NW), len(chosen_M) + 1, dtype=torch.bool, device=hidden_NW.device)
        present_NM[steps_E, column_V[variables_E]] = True  # in the last column what was not drawn

        def absent(hidden_RW: Tensor, present_RM: Tensor) -> Tensor:
            scores_RM = F.linear(hidden_RW, weight_MW, bias_M).float()
            return (F.softplus(scores_RM) * weights_M).masked_fill(present_RM, 0.0).sum(dim=-1)

        return present_N + by_rows(absent, len(chosen_M), hidden_NW, present_NM[:, :-1])

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draw DRAWN_VARIABLES variables, by torch's seed; return them, and 1 / chance of each."""
        shift = torch.randint(0, DRAW_UNIT, (), device=self.bounds_V1.device)
        marks_M = shift + DRAW_UNIT * torch.arange(DRAWN_VARIABLES, device=shift.device)
        chosen_M = torch.searchsorted(self.bounds_V1[1:], marks_M, right=True)
        return chosen_M, DRAW_UNIT / (self.bounds_V1[chosen_M + 1] - self.bounds_V1[chosen_M]).float()

    def sorted_events(self, batch: EventBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return step and variable of each event, ascending, and whether it is the first of its kind: a step holds a variable
        or not."""
        keys_E = (batch.steps_E * self.out_features + batch.variables_E).sort().values
        is_first_E = keys_E != F.pad(keys_E, (1, 0), value=-1)[:-1]
        return keys_E // self.out_features, keys_E % self.out_features, is_first_E


def draw_bounds(rates_V: Tensor, draws: int) -> Tensor:
    """Return running sums, in units of 1 / DRAW_UNIT, of the chances of being among the `draws` variables that are drawn.

    What would be more than certain is certain, and the others share the remaining draws.
    """
    draws = min(draws, len(rates_V))
    shares_V = (1 - EVEN_SHARE) * rates_V / rates_V.sum() + EVEN_SHARE / len(rates_V)
    is_certain_V, chances_V = torch.zeros(len(rates_V), dtype=torch.bool), draws * shares_V
    while bool((chances_V > 1).any()):
        is_certain_V |= chances_V >= 1
        remaining = draws - int(is_certain_V.sum())
        chances_V = (shares_V * (remaining / shares_V[~is_certain_V].sum())).masked_fill(is_certain_V, 1.0)
    return F.pad((chances_V.cumsum(dim=0) * DRAW_UNIT).round().long(), (1, 0))


class MomentsOfAll(nn.Module):
    """Moments of few variables: mean and log-variance of all at each step, from which those of the events are picked."""

    def __init__(self, variables: int, width: int) -> None:
        super().__init__()
        self.moments = Float32Linear(width, 2 * variables)

    def forward(self, hidden_NW: Tensor, steps_E: Tensor, variables_E: Tensor, offsets: Tensor) -> Tensor:
        return self.of_all(hidden_NW)[steps_E, variables_E]

    def of_all(self, hidden_NW: Tensor) -> Tensor:
        """Return (N, V, 2)."""
        return self.moments(hidden_NW).unflatten(-1, (-1, 2))


class MomentsOfPresent(nn.Module):
    """Moments of many variables: products of a code of the event's step and two vectors of its variable. The cost grows with the
    events that came, not with the variables that there are."""

    def __init__(self, variables: int, width: int) -> None:
        super().__init__()
        code_width = width // 2
        self.code = Float32Linear(width, code_width)
        self.weights = nn.Embedding(variables, 2 * code_width)
        self.bias = nn.Embedding(variables, 2)
        nn.init.normal_(self.weights.weight, std=1 / math.sqrt(code_width))
        nn.init.zeros_(self.bias.weight)

    def forward(self, hidden_NW: Tensor, steps_E: Tensor, variables_E: Tensor, offsets: Tensor) -> Tensor:
        code_ER = SpreadToEvents.apply(self.code(hidden_NW), steps_E, offsets)
        weights_E2R = self.weights(variables_E).unflatten(-1, (2, -1))
        return (code_ER[:, None] * weights_E2R).sum(dim=-1) + self.bias(variables_E)

    def of_all(self, hidden_NW: Tensor) -> Tensor:
        """Return (N, V, 2)."""
        code_NR = self.code(hidden_NW)
        weights = self.weights.weight.view(-1, code_NR.shape[-1])
        return F.linear(code_NR, weights, self.bias.weight.flatten()).unflatten(-1, (-1, 2))


def drawing(hidden_NW: Tensor, scores_per_row: int, seed: int) -> Iterator[tuple[Tensor, Noise]]:
    """Yield slices of the rows that have no more than SCORES_AT_ONCE scores, each with the noise of its rows."""
    numbers_N = torch.arange(len(hidden_NW), device=hidden_NW.device)
    rows = rows_at_once(scores_per_row)
    for hidden_RW, numbers_R in zip(hidden_NW.split(rows), numbers_N.split(rows), strict=True):
        yield hidden_RW, Noise(seed, numbers_R)


def sum_by_step(numbers_E: Tensor, steps_E: Tensor, steps: int) -> Tensor:
    """Add up a number of each event over its step, (N,)."""
    return SumByStep.apply(numbers_E[:, None], steps_E, step_offsets(steps_E, steps)).squeeze(-1)


def real_steps(lengths_B: Tensor, length: int) -> Tensor:
    """Return (B, length): True where a step is real, False where it is padded."""
    return torch.arange(length, device=lengths_B.device) < lengths_B[:, None]


def by_rows(function: Callable[..., Tensor], scores_per_row: int, *tensors_N: Tensor) -> Tensor:
    """Call `function` on slices of the rows, so that no more than SCORES_AT_ONCE scores exist at a time.

    Each slice forgets its scores and computes them again in the backward pass: one more product, but none of the memory traffic
    of a batch of scores, which costs more than arithmetic.
    """
    rows = rows_at_once(scores_per_row)
    if len(tensors_N[0]) <= rows:
        return function(*tensors_N)
    slices = zip(*(tensor.split(rows) for tensor in tensors_N), strict=True)
    return torch.cat([checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in slices])


def mix_in_unknown(nll_N: Tensor, is_unknown_N: Tensor, share: float) -> Tensor:
    """Return -log of (1 - share) * p, and of (1 - share) * p + share where what came is <unknown>, from -log p.

    Where <unknown> never came, the gradient is that of -log p.
    """
    if share == 0:
        return nll_N
    known_N = nll_N - math.log1p(-share)
    unknown_N = -torch.logaddexp(-known_N, torch.full_like(known_N, math.log(share)))
    return torch.where(is_unknown_N, unknown_N, known_N)


def robust_nll(values: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
    """-log((1 - share) * Normal(value; mean, exp(logvar)) + share * Student2(value; mean, exp(logvar)))."""
    squares = ((values - mean) * torch.exp(-0.5 * logvar)).clamp(-FARTHEST, FARTHEST).square()
    log_ordinary = math.log1p(-OUTLIER_SHARE) - 0.5 * (math.log(2 * math.pi) + squares)
    log_outlier = math.log(OUTLIER_SHARE) - 1.5 * torch.log(2 + squares)
    return 0.5 * logvar - torch.logaddexp(log_ordinary, log_outlier)


def student_cdf(deviations: Tensor) -> Tensor:
    """Return the distribution function of Student's distribution with 2 degrees of freedom, exact in the far tail, too."""
    roots = (2 + deviations.square()).sqrt()
    beyond = 1 / (roots * (roots + deviations.abs()))
    return torch.where(deviations < 0, beyond, 1 - beyond)


def gap_nll(gaps: Tensor, mean: Tensor, logvar: Tensor, scale: GapScale) -> Tensor:
    """Return -log p of gaps: log-normal, and as robust as a value; `mean` and `logvar` are those of a gap's standardised logarithm.

    Gaps up to the shortest that can be distinguished, 0 among them, share evenly what the log-normal has for them, as the
    logarithm of 0 means nothing.
    """
    log_gaps = gaps.clamp(min=scale.shortest).log()
    standard = (log_gaps - scale.log_mean) / scale.log_std
    longer = robust_nll(standard, mean, logvar) + math.log(scale.log_std)
    deviations = (standard - mean) * torch.exp(-0.5 * logvar)
    log_ordinary = math.log1p(-OUTLIER_SHARE) + torch.special.log_ndtr(deviations)
    up_to_shortest = -torch.logaddexp(log_ordinary, math.log(OUTLIER_SHARE) + student_cdf(deviations).log())
    return torch.where(gaps > scale.shortest, longer, up_to_shortest) + log_gaps


def draw_gaussian(mean: Tensor, logvar: Tensor, temperature: float, noise: Noise) -> Tensor:
    """Draw without outliers: they stand for mistakes in the data, of which more would be no use."""
    if temperature == 0:
        return mean
    return mean + temperature * torch.exp(0.5 * logvar) * noise.normal(mean.shape)
