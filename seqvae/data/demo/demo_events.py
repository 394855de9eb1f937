"""Demo events: twelve variables, some of them at each of irregular times, with an exact likelihood.

In: a generator of random numbers. Out: for each step which variables are present, their values (NaN: none) and the
minutes since the step before, all flat with offsets; and log p of any such in nats.

Variables have rates of their own, and each class has its own rates, levels and pace. A step has at least one event (an
empty one could not be told from none). Values and the logarithms of the gaps are Gaussian with means linear in the factor,
Normal(0, 1), so that the integral over it has a closed form (FactorTerms):

    p(variables present | class) = product of Bernoulli(presence[class]), given that there is one
    (value - location) / scale ~ Normal(level[class] + factor * slope, noise)
    log(gap in minutes) ~ Normal(pace[class] + factor * pace_slope, pace_noise)

Shapes: N sequences, S steps of all sequences one behind the other, V variables, C classes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqvae.data.demo.demo_shared import FactorTerms, LengthLaw, offsets_of, step_numbers, sum_by_sequence

VARIABLES = (
    "pulse",
    "pressure",
    "temperature",
    "breaths",
    "oxygen",
    "glucose",
    "sodium",
    "lactate",
    "weight",
    "ventilated",
    "moved",
    "visited",
)
"""The last three are present or not and have no value."""


class EventSample(NamedTuple):
    present_SV: np.ndarray
    values_SV: np.ndarray
    gaps_S: np.ndarray
    """0 at the first step of a sequence."""
    offsets_N1: np.ndarray
    classes_N: np.ndarray
    factors_N: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class EventTruth:
    """The parameters of presence, values and gaps; what truth.json holds."""

    presence_CV: np.ndarray
    has_value_V: np.ndarray
    level_CV: np.ndarray
    slope_V: np.ndarray
    noise_V: np.ndarray
    location_V: np.ndarray
    scale_V: np.ndarray
    pace_C: np.ndarray
    pace_slope: float
    pace_noise: float
    lengths: LengthLaw

    @classmethod
    def draw(cls, rng: np.random.Generator, lengths: LengthLaw) -> "EventTruth":
        variables, classes = len(VARIABLES), 4
        log_odds_CV = np.linspace(1.0, -2.5, variables) + rng.normal(scale=0.5, size=(classes, variables))
        return cls(
            presence_CV=(1 / (1 + np.exp(-log_odds_CV))).round(3),
            has_value_V=np.arange(variables) < variables - 3,
            level_CV=rng.normal(scale=0.5, size=(classes, variables)).round(3),
            slope_V=rng.normal(scale=0.3, size=variables).round(3),
            noise_V=rng.uniform(0.7, 1.0, variables).round(3),
            location_V=np.array([85.0, 120, 37, 18, 97, 130, 139, 2, 80, 0, 0, 0]),
            scale_V=np.array([15.0, 20, 0.7, 4, 2, 40, 4, 1, 15, 1, 1, 1]),
            pace_C=np.log([15.0, 25.0, 40.0, 60.0]).round(3),
            pace_slope=0.2,
            pace_noise=0.8,
            lengths=lengths,
        )

    def sample(self, count: int, rng: np.random.Generator) -> EventSample:
        offsets_N1 = offsets_of(self.lengths.sample(count, rng))
        classes_N = rng.integers(len(self.pace_C), size=count)
        factors_N = rng.normal(size=count)
        classes_S, factors_S = (np.repeat(latent_N, np.diff(offsets_N1)) for latent_N in (classes_N, factors_N))
        present_SV = rng.random((len(classes_S), len(self.slope_V))) < self.presence_CV[classes_S]
        while len(empty := np.flatnonzero(~present_SV.any(axis=1))):
            present_SV[empty] = rng.random((len(empty), len(self.slope_V))) < self.presence_CV[classes_S[empty]]
        standard_SV = self.level_CV[classes_S] + factors_S[:, None] * self.slope_V
        standard_SV += self.noise_V * rng.normal(size=present_SV.shape)
        values_SV = (self.location_V + self.scale_V * standard_SV).astype(np.float32)
        values_SV[~(present_SV & self.has_value_V)] = np.nan
        log_gaps_S = self.pace_C[classes_S] + self.pace_slope * factors_S
        gaps_S = np.exp(log_gaps_S + self.pace_noise * rng.normal(size=len(classes_S)))
        gaps_S[offsets_N1[:-1]] = 0
        return EventSample(present_SV, values_SV, gaps_S, offsets_N1, classes_N, factors_N)

    def factor_terms(
        self, present_SV: np.ndarray, values_SV: np.ndarray, gaps_S: np.ndarray, offsets_N1: np.ndarray
    ) -> FactorTerms:
        """log p(variables, values, gaps | length, class, factor) as a quadratic in the factor; gaps per minute."""
        valued_SV = present_SV & self.has_value_V
        standard_SV = np.where(valued_SV, (values_SV - self.location_V) / self.scale_V, 0.0)
        later_S = step_numbers(offsets_N1) > 0
        log_gaps_S = np.log(gaps_S, out=np.zeros(len(gaps_S)), where=later_S)
        precision_V, pace_precision = self.noise_V**-2.0, self.pace_noise**-2.0
        norm_S = valued_SV @ -np.log(self.scale_V * self.noise_V * math.sqrt(2 * math.pi))
        norm_S -= later_S * (log_gaps_S + math.log(self.pace_noise * math.sqrt(2 * math.pi)))
        norm_S = norm_S[:, None] + self.log_presence(present_SV)
        curvature_S = valued_SV @ (self.slope_V**2 * precision_V) + later_S * self.pace_slope**2 * pace_precision
        terms_SC: list[list[np.ndarray]] = [[], []]
        for level_V, pace in zip(self.level_CV, self.pace_C, strict=True):
            rest_SV, rest_S = valued_SV * (standard_SV - level_V), later_S * (log_gaps_S - pace)
            terms_SC[0].append(-(rest_SV**2 @ precision_V + rest_S**2 * pace_precision) / 2)
            terms_SC[1].append(rest_SV @ (self.slope_V * precision_V) + rest_S * self.pace_slope * pace_precision)
        constant_NC = sum_by_sequence(norm_S + np.stack(terms_SC[0], axis=1), offsets_N1)
        linear_NC = sum_by_sequence(np.stack(terms_SC[1], axis=1), offsets_N1)
        curvature_N = sum_by_sequence(curvature_S, offsets_N1)
        return FactorTerms(constant_NC, linear_NC, np.repeat(curvature_N[:, None], len(self.pace_C), axis=1))

    def log_presence(self, present_SV: np.ndarray) -> np.ndarray:
        """log p(variables present | class), (S, C), given that there is one."""
        log_absent_C = np.log1p(-self.presence_CV).sum(axis=1)
        log_odds_CV = np.log(self.presence_CV) - np.log1p(-self.presence_CV)
        return present_SV @ log_odds_CV.T + log_absent_C - np.log(-np.expm1(log_absent_C))

    def log_likelihood(
        self, present_SV: np.ndarray, values_SV: np.ndarray, gaps_S: np.ndarray, offsets_N1: np.ndarray
    ) -> np.ndarray:
        """log p(variables, values, gaps, length), (N,)."""
        terms = self.factor_terms(present_SV, values_SV, gaps_S, offsets_N1)
        return terms.marginal() + self.lengths.log_probability(np.diff(offsets_N1))

    def log_likelihood_given(self, sample: EventSample) -> np.ndarray:
        """log p(variables, values, gaps, length | class, factor) with the sample's own class and factor, (N,)."""
        terms = self.factor_terms(sample.present_SV, sample.values_SV, sample.gaps_S, sample.offsets_N1)
        log_lengths_N = self.lengths.log_probability(np.diff(sample.offsets_N1))
        return terms.given(sample.classes_N, sample.factors_N) + log_lengths_N
