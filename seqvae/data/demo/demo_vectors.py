"""Demo vectors: damped oscillations in correlated noise, some values missing, with an exact likelihood.

In: a generator of random numbers. Out: flat float32 vectors (NaN where missing) with offsets, and log p of any such in nats.

The class sets the frequency; the factor, Normal(0, 1), changes the amplitude of the first feature, shifts the phase of the
last, and does some of both to those between. At step t of a sequence, in units of each feature's own scale,

    mean = decay^t * (sin(angle) + factor / 2 * sin(angle + shift)),   angle = frequency[class] * t + phase

Noise is Normal(0, covariance), independent from step to step. Values are missing at random, and log p is that of the
others. As the mean is linear in the factor, the integral over it has a closed form (FactorTerms).

Shapes: N sequences, S steps of all sequences one behind the other, D features, C classes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqvae.data.demo.demo_shared import FactorTerms, LengthLaw, offsets_of, step_numbers, sum_by_sequence


class VectorSample(NamedTuple):
    values_SD: np.ndarray
    offsets_N1: np.ndarray
    classes_N: np.ndarray
    factors_N: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class VectorTruth:
    """The parameters of the oscillations and of their noise; what truth.json holds."""

    frequency_C: np.ndarray
    """Radians a step."""
    phase_D: np.ndarray
    shift_D: np.ndarray
    decay: float
    offset_D: np.ndarray
    scale_D: np.ndarray
    covariance_DD: np.ndarray
    missing: float
    """Share of the values that are missing."""
    lengths: LengthLaw

    @classmethod
    def draw(cls, rng: np.random.Generator, lengths: LengthLaw, *, features: int = 6) -> "VectorTruth":
        common_D = rng.uniform(-0.7, 0.7, features).round(3)
        return cls(
            frequency_C=(2 * np.pi / np.array([8.0, 11.0, 16.0, 24.0])).round(4),
            phase_D=rng.uniform(0, 2 * np.pi, features).round(3),
            shift_D=np.linspace(0, np.pi / 2, features).round(3),
            decay=0.98,
            offset_D=np.append(np.zeros(features - 1), 120.0),
            scale_D=np.append(np.ones(features - 1), 15.0),
            covariance_DD=np.outer(common_D, common_D) + 0.5 * np.eye(features),
            missing=0.03,
            lengths=lengths,
        )

    def sample(self, count: int, rng: np.random.Generator) -> VectorSample:
        offsets_N1 = offsets_of(self.lengths.sample(count, rng))
        classes_N = rng.integers(len(self.frequency_C), size=count)
        factors_N = rng.normal(size=count)
        steps_N = np.diff(offsets_N1)
        base_SD, tilt_SD = self.waves(self.frequency_C[np.repeat(classes_N, steps_N)], step_numbers(offsets_N1))
        noise_SD = rng.normal(size=base_SD.shape) @ np.linalg.cholesky(self.covariance_DD).T
        values_SD = base_SD + np.repeat(factors_N, steps_N)[:, None] * tilt_SD + noise_SD
        values_SD = (self.offset_D + self.scale_D * values_SD).astype(np.float32)
        values_SD[rng.random(values_SD.shape) < self.missing] = np.nan
        return VectorSample(values_SD, offsets_N1, classes_N, factors_N)

    def waves(self, frequency_S: np.ndarray | float, steps_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean without the factor, and what one unit of the factor adds to it."""
        angle_SD = (frequency_S * steps_S)[:, None] + self.phase_D
        envelope_S1 = (self.decay**steps_S)[:, None]
        return envelope_S1 * np.sin(angle_SD), envelope_S1 * np.sin(angle_SD + self.shift_D) / 2

    def factor_terms(self, values_SD: np.ndarray, offsets_N1: np.ndarray) -> FactorTerms:
        """log p(values | length, class, factor) as a quadratic in the factor."""
        observed_SD = ~np.isnan(values_SD)
        standard_SD = np.where(observed_SD, (values_SD - self.offset_D) / self.scale_D, 0.0)
        precision_PDD, log_determinant_P, pattern_S = self.noise_where_observed(observed_SD)
        norm_S = -log_determinant_P[pattern_S] / 2
        norm_S -= observed_SD @ (np.log(self.scale_D) + math.log(2 * math.pi) / 2)
        steps_S = step_numbers(offsets_N1)
        terms_SC: list[list[np.ndarray]] = [[], [], []]
        for frequency in self.frequency_C:
            base_SD, tilt_SD = self.waves(frequency, steps_S)
            rest_SD = standard_SD - base_SD
            weighted_SD = np.einsum("sd,sde->se", tilt_SD, precision_PDD[pattern_S])
            squares_S = np.einsum("sd,sde,se->s", rest_SD, precision_PDD[pattern_S], rest_SD)
            terms_SC[0].append(norm_S - squares_S / 2)
            terms_SC[1].append((weighted_SD * rest_SD).sum(axis=1))
            terms_SC[2].append((weighted_SD * tilt_SD).sum(axis=1))
        return FactorTerms(*(sum_by_sequence(np.stack(terms, axis=1), offsets_N1) for terms in terms_SC))

    def noise_where_observed(self, observed_SD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each pattern of observed features: precision (0 elsewhere), log determinant; and the pattern of each step."""
        codes, pattern_S = np.unique(observed_SD @ (1 << np.arange(len(self.scale_D))), return_inverse=True)
        observed_PD = (codes[:, None] >> np.arange(len(self.scale_D))) & 1
        both_PDD = observed_PD[:, :, None] * observed_PD[:, None, :]
        # Ones on the diagonal of what is missing: it then takes no part in the determinant or in the others' inverse.
        covariance_PDD = self.covariance_DD * both_PDD + np.eye(len(self.scale_D)) * (1 - observed_PD)[:, None, :]
        return np.linalg.inv(covariance_PDD) * both_PDD, np.linalg.slogdet(covariance_PDD).logabsdet, pattern_S

    def log_likelihood(self, values_SD: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
        """log p(observed values, length), (N,)."""
        return self.factor_terms(values_SD, offsets_N1).marginal() + self.lengths.log_probability(np.diff(offsets_N1))

    def log_likelihood_given(self, sample: VectorSample) -> np.ndarray:
        """log p(observed values, length | class, factor) with the sample's own class and factor, (N,)."""
        terms = self.factor_terms(sample.values_SD, sample.offsets_N1)
        log_lengths_N = self.lengths.log_probability(np.diff(sample.offsets_N1))
        return terms.given(sample.classes_N, sample.factors_N) + log_lengths_N
