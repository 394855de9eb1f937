"""Demo data with known truth: Parquet files of each kind, drawn from a process whose likelihood is exact.

In: a directory, a kind, a size and a seed. Out: a folder in there that --data_dir takes as it is, with train.parquet,
valid.parquet, test.parquet and truth.json, from which `read_truth` gives the process back. One row per sequence, except for
events:

    tokens   text of invented languages: id, text, tokens list<uint8> (the same as numbers), label (the language), factor
    vectors  drawings of a pen: id, step, x, y, pressure (null where missing), label (the shape), one row per step;
             beside them factors.csv (id, size, slant)
    events   diaries of patients: ts_id, minute, variable, value (null: presence only), label (the illness), one row per event;
             beside them factors.csv (ts_id, severity)

Every sequence has a length, a latent class (its label; all equally likely) and one factor or two; the length says nothing about
the others. Samples are flat arrays with offsets, and of any such sample log p is known, in nats.

Shapes: N sequences, S steps of all sequences one behind the other (offsets_N1 says where each begins), C classes, F factors.
"""

import dataclasses
import itertools
import json
import math
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seqvae.data.description import Kind
from seqvae.files import wait_for_lock

VERSION = 2
"""Version of the generator; raise it with every change that changes the files."""
SEQUENCES = 20_000
MEAN_LENGTH = 50.0
"""Together a million steps: few enough to go through several times in a minute or two on two cores."""
HELD_OUT_SHARE = 10
ROW_GROUP_ROWS = {"tokens": 4_000, "vectors": 200_000, "events": 200_000}
CHUNK = 512  # token sequences whose transition counts are held at once: 4 MB at 32 tokens
ALPHABET = " aeioutnsrlmdkphvgbyzfjwcxqäöüøé"
"""What stands for each token, the frequent ones first."""
VOWELS, FINALS = "aeiouyäöüøé", "tnsrl"
LANGUAGES = ("Aveno", "Belosk", "Cistu", "Dovari", "Ekelo", "Fasiri", "Gonnet", "Hapolu")
SHAPES = ("circle", "clover", "eight", "heart")
ILLNESSES = ("diabetes", "heart failure", "infection", "recovery")
VARIABLES = (
    *("pulse", "pressure", "temperature", "breaths", "oxygen", "glucose", "sodium", "lactate", "weight"),
    *("ventilated", "moved", "visited"),
)
"""Variables of the events; the last three are present or not and have no value."""


@dataclass(frozen=True, kw_only=True)
class LengthLaw:
    """Log-normal lengths, rounded to whole steps and clipped to shortest..longest."""

    mean: float = 75.0
    """Mean before clipping, which moves it by less than 1 % as long as the bounds are far away."""
    spread: float = 0.8
    """Standard deviation of the logarithm."""
    shortest: int = 3
    longest: int = 1000

    def __post_init__(self) -> None:
        if not 1 <= self.shortest < self.longest:
            raise ValueError(f"lengths need 1 <= shortest < longest, got {self.shortest} and {self.longest}")
        if not (self.shortest < self.mean < self.longest and self.spread > 0):
            raise ValueError(
                f"the mean length must lie between {self.shortest} and {self.longest} and its spread above 0, "
                f"got {self.mean} and {self.spread}"
            )

    @property
    def log_median(self) -> float:
        return math.log(self.mean) - self.spread**2 / 2

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        lengths_N = np.rint(rng.lognormal(self.log_median, self.spread, count))
        return np.clip(lengths_N, self.shortest, self.longest).astype(np.int64)

    def probabilities(self) -> np.ndarray:
        """Return the probabilities of shortest..longest; lengths beyond fall to these two."""
        edges = (np.log(np.arange(self.shortest, self.longest) + 0.5) - self.log_median) / self.spread
        below = [0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges]
        return np.diff(below, prepend=0.0, append=1.0)

    def log_probability(self, lengths_N: np.ndarray) -> np.ndarray:
        """Return the log-probability of each length, -inf where it cannot occur."""
        reachable_N = (lengths_N >= self.shortest) & (lengths_N <= self.longest)
        with np.errstate(divide="ignore"):
            logs = np.log(self.probabilities())
        return np.where(reachable_N, logs[np.clip(lengths_N, self.shortest, self.longest) - self.shortest], -np.inf)


def offsets_of(lengths_N: np.ndarray) -> np.ndarray:
    """Return where each sequence begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths_N)])


def step_numbers(offsets_N1: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, ... within each sequence, (S,)."""
    return np.arange(offsets_N1[-1]) - np.repeat(offsets_N1[:-1], np.diff(offsets_N1))


def logsumexp(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    highest = values.max(axis=axis, keepdims=True)
    return np.log(np.exp(values - highest).sum(axis=axis)) + highest.squeeze(axis)


# --- Tokens ---------------------------------------------------------------------------------------------------------


class TokenSample(NamedTuple):
    """Sequences of tokens, and the class and factor of each."""

    tokens_S: np.ndarray
    offsets_N1: np.ndarray
    classes_N: np.ndarray
    factors_N: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTruth:
    """Text of invented languages: a finite mixture of Markov chains over letters and the space, whose likelihood is exact.

    What follows what is common to all languages (that is what a model learns first): words of syllables. A language, the class,
    has its favourite letters, and the factor, one of G equally likely values, pulls along one direction of the alphabet:

        p(next | previous, class, factor) = softmax(base[previous] + favour[class] + factor * direction)

    A text begins and ends anywhere: its first letter comes from the stationary law of its chain, so a letter is distributed alike
    at every step. Class and factor show slowly: of log 8 = 2.1 nats about the class 1.6 are still open after 5 letters, 0.65 after
    20 and 0.1 after 50. A latent variable can hold them from the start. The default process (seed 0, mean length 50), in nats per
    symbol (a letter, a space, or the end mark of a text):

        3.30  without any context
        2.37  from the symbol before alone: 86 % of the way to
        2.22  the truth, of which 2.8 nats per sequence are about class and factor
        2.17  with class and factor known beforehand

    Its fields are what truth.json holds. Shapes: V symbols, G values of the factor, K = C * G chains.
    """

    base_VV: np.ndarray
    favour_CV: np.ndarray
    direction_V: np.ndarray
    factors_G: np.ndarray
    lengths: LengthLaw

    @classmethod
    def draw(
        cls, rng: np.random.Generator, lengths: LengthLaw, *, vocabulary_size: int = 32, classes: int = 8
    ) -> "TokenTruth":
        """Draw a process over the first symbols of the alphabet; rounded to three decimals, so that truth.json holds the process
        itself."""
        symbols = ALPHABET[:vocabulary_size]
        is_space_V, is_vowel_V, is_final_V = (np.array([one in of for one in symbols]) for of in (" ", VOWELS, FINALS))
        base_VV = rng.normal(scale=1.3, size=(vocabulary_size, vocabulary_size))
        # Vowels follow consonants, consonants vowels and spaces; letters are rarely doubled, and some are rare.
        base_VV -= 1.3 * np.where(is_vowel_V | is_space_V, 1, -1)[:, None] * np.where(is_vowel_V, 1, -1)
        base_VV -= 0.05 * np.arange(vocabulary_size) + np.eye(vocabulary_size)
        # Words end with a vowel or one of a few consonants, and no word is empty.
        base_VV[:, 0] = rng.normal(np.select([is_vowel_V, is_final_V, is_space_V], [3, 2, -9], -1), 0.5)
        return cls(
            base_VV=base_VV.round(3),
            favour_CV=rng.normal(scale=0.6, size=(classes, vocabulary_size)).round(3),
            direction_V=rng.normal(scale=0.5, size=vocabulary_size).round(3),
            factors_G=np.linspace(-1.7, 1.7, 16).round(3),
            lengths=lengths,
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        return LANGUAGES[: len(self.favour_CV)]

    @cached_property
    def log_transitions_KVV(self) -> np.ndarray:
        pull_GV = self.factors_G[:, None] * self.direction_V
        logits_CGVV = self.base_VV + (self.favour_CV[:, None] + pull_GV)[:, :, None]
        logits_KVV = logits_CGVV.reshape(-1, *self.base_VV.shape)
        return logits_KVV - logsumexp(logits_KVV, axis=2)[:, :, None]

    @cached_property
    def log_first_KV(self) -> np.ndarray:
        """Log-probabilities of the first token: the stationary law of each chain, from p = p T and sum p = 1."""
        size = len(self.direction_V)
        equations_KVV = np.exp(self.log_transitions_KVV).transpose(0, 2, 1) - np.eye(size)
        equations_KVV[:, -1] = 1
        return np.log(np.linalg.solve(equations_KVV, np.eye(size)[:, -1:])[:, :, 0])

    def sample(self, count: int, rng: np.random.Generator) -> TokenSample:
        # Longest first, so that the n sequences which still run at a step are always the first n.
        lengths_N = self.lengths.sample(count, rng)
        offsets_N1 = offsets_of(lengths_N)
        order_N = np.argsort(-lengths_N, kind="stable")
        chains_N = rng.integers(len(self.log_first_KV), size=count)
        ordered_chains_N, starts_N = chains_N[order_N], offsets_N1[order_N]
        tokens_S = np.empty(offsets_N1[-1], dtype=np.uint8 if len(self.direction_V) <= 256 else np.uint16)
        first_KV, next_KVV = (np.exp(logs).cumsum(axis=-1) for logs in (self.log_first_KV, self.log_transitions_KVV))
        first_KV[..., -1] = next_KVV[..., -1] = 1  # whatever the rounding
        cumulative_NV = first_KV[ordered_chains_N]
        for step in range(lengths_N.max()):
            running = np.count_nonzero(lengths_N > step)
            now_N = (rng.random((running, 1)) >= cumulative_NV[:running]).sum(axis=1)
            tokens_S[starts_N[:running] + step] = now_N
            cumulative_NV = next_KVV[ordered_chains_N[:running], now_N]
        classes_N, levels_N = np.divmod(chains_N, len(self.factors_G))
        return TokenSample(tokens_S, offsets_N1, classes_N, self.factors_G[levels_N])

    def log_likelihood_given(self, tokens_S: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
        """Return log p(tokens, length | class, factor), (N, C, G): how often each transition occurs is all that matters."""
        size = len(self.direction_V)
        log_transitions_PK = self.log_transitions_KVV.reshape(-1, size * size).T
        result_NK = self.log_first_KV.T[tokens_S[offsets_N1[:-1]]]
        result_NK += self.lengths.log_probability(np.diff(offsets_N1))[:, None]
        for first in range(0, len(result_NK), CHUNK):
            bounds = offsets_N1[first : first + CHUNK + 1]
            rows = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds) - 1)
            later = np.delete(np.arange(bounds[0], bounds[-1]), bounds[:-1] - bounds[0])
            pairs = tokens_S[later - 1].astype(np.int64) * size + tokens_S[later]
            counts = np.bincount(rows * size**2 + pairs, minlength=(len(bounds) - 1) * size**2)
            result_NK[first : first + CHUNK] += counts.reshape(-1, size**2).astype(np.float64) @ log_transitions_PK
        return result_NK.reshape(-1, len(self.favour_CV), len(self.factors_G))

    def log_likelihood(self, tokens_S: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
        """Return log p(tokens, length), (N,)."""
        given_NCG = self.log_likelihood_given(tokens_S, offsets_N1)
        return logsumexp(given_NCG, axis=(1, 2)) - math.log(given_NCG[0].size)

    @cached_property
    def unigram_probabilities(self) -> np.ndarray:
        """Probability of each token and, last, of the end mark, (V + 1,)."""
        law = self.lengths
        mean_length = float(law.probabilities() @ np.arange(law.shortest, law.longest + 1))
        tokens_V = np.exp(self.log_first_KV).mean(axis=0)
        return np.append(tokens_V * mean_length, 1.0) / (mean_length + 1)

    def unigram_log_likelihood(self, tokens_S: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
        """Return the log-likelihood of the best model without any context, (N,)."""
        logs = np.log(self.unigram_probabilities)
        return np.add.reduceat(logs[tokens_S], offsets_N1[:-1]) + logs[-1]


# --- Gaussians whose mean is linear in the factors: vectors and events ----------------------------------------------


class FactorTerms(NamedTuple):
    """The terms of log p(x, length | class, factors) = constant + linear . factors - factors . curvature . factors / 2.

    It is exact for every Gaussian whose mean is linear in the factors. With factors ~ Normal(0, 1) the integral has a closed form.
    """

    constant_NC: np.ndarray
    linear_NCF: np.ndarray
    curvature_NCFF: np.ndarray

    @classmethod
    def of_steps(cls, terms_SC: list[np.ndarray], offsets_N1: np.ndarray, lengths: LengthLaw) -> "FactorTerms":
        """Sum the three terms over the steps of each sequence, and add the log-probability of its length."""
        constant_NC, linear_NCF, curvature_NCFF = (np.add.reduceat(term, offsets_N1[:-1], axis=0) for term in terms_SC)
        return cls(constant_NC + lengths.log_probability(np.diff(offsets_N1))[:, None], linear_NCF, curvature_NCFF)

    def marginal(self) -> np.ndarray:
        """Return log p(x, length), (N,), with all classes equally likely."""
        precision_NCFF = np.eye(self.linear_NCF.shape[-1]) + self.curvature_NCFF
        mean_NCF = np.linalg.solve(precision_NCFF, self.linear_NCF[..., None])[..., 0]
        integrated_NC = self.constant_NC + (self.linear_NCF * mean_NCF).sum(axis=-1) / 2
        integrated_NC -= np.linalg.slogdet(precision_NCFF).logabsdet / 2
        return logsumexp(integrated_NC, axis=1) - math.log(self.constant_NC.shape[1])


class VectorSample(NamedTuple):
    """Sequences of vectors, and the class and factors of each."""

    values_SD: np.ndarray
    """float32, NaN where missing."""
    offsets_N1: np.ndarray
    classes_N: np.ndarray
    factors_NF: np.ndarray


COSINES_CDK = np.array(
    [  # of once, twice, three and four times the angle; x, y
        [[1, 0, 0, 0], [0, 0, 0, 0]],
        [[0, 0.5, 0, 0.5], [0, 0, 0, 0]],
        [[1, 0, 0, 0], [0, 0, 0, 0]],
        [[0, 0, 0, 0], [0.8125, -0.3125, -0.125, -0.0625]],
    ]
)
SINES_CDK = np.array(
    [
        [[0, 0, 0, 0], [1, 0, 0, 0]],
        [[0, 0, 0, 0], [0, -0.5, 0, 0.5]],
        [[0, 0, 0, 0], [0, 0.7, 0, 0]],
        [[0.75, 0, -0.25, 0], [0, 0, 0, 0]],
    ]
)


@dataclass(frozen=True, kw_only=True, eq=False)
class VectorTruth:
    """Drawings of a pen, whose hand trembles and of which some values are missing; its fields are what truth.json holds.

    The class is the shape, a curve that the pen goes round and round: a finite Fourier series of the angle, which grows by
    `frequency` at each step. The pen is pressed harder on its way down. Two factors, Normal(0, 1), change all of it: the size,
    and the slant, by which x moves with y. In millimetres and grams:

        position and pressure = offset + scale * (1 + size * sizing + slant * slanting) curve(class, angle) + noise

    Noise is Normal(0, covariance) in units of each feature's own scale, independent from step to step. Values are missing at
    random, and log p is that of the others.

    Shapes: D features (x, y, pressure), K multiples of the angle, P patterns of observed features.
    """

    cosines_CDK: np.ndarray
    sines_CDK: np.ndarray
    frequency: float
    """Radians per step."""
    loading_FDD: np.ndarray
    """What one unit of a factor, size and slant, adds to the curve, as a product with it."""
    offset_D: np.ndarray
    scale_D: np.ndarray
    covariance_DD: np.ndarray
    missing: float
    """Share of the values that are missing."""
    lengths: LengthLaw

    @classmethod
    def draw(cls, rng: np.random.Generator, lengths: LengthLaw) -> "VectorTruth":
        multiples_K = np.arange(1, 5)
        down_CK = SINES_CDK[:, 1] * multiples_K, -COSINES_CDK[:, 1] * multiples_K
        rate_C = np.hypot(*down_CK).max(axis=1, keepdims=True)
        slanting_DD = np.zeros((3, 3))
        slanting_DD[0, 1] = 0.3
        common_D, own = rng.uniform(-0.06, 0.06, 3), 0.07
        return cls(
            cosines_CDK=np.concatenate([COSINES_CDK, -(down_CK[0] / rate_C)[:, None]], axis=1).round(4),
            sines_CDK=np.concatenate([SINES_CDK, -(down_CK[1] / rate_C)[:, None]], axis=1).round(4),
            frequency=round(2 * math.pi / 24, 4),
            loading_FDD=np.stack([0.25 * np.eye(3), slanting_DD]),
            offset_D=np.array([0.0, 0.0, 120.0]),
            scale_D=np.array([10.0, 10.0, 15.0]),
            covariance_DD=(np.outer(common_D, common_D) + own**2 * np.eye(3)).round(6),
            missing=0.03,
            lengths=lengths,
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        return SHAPES

    def sample(self, count: int, rng: np.random.Generator) -> VectorSample:
        offsets_N1 = offsets_of(self.lengths.sample(count, rng))
        classes_N = rng.integers(len(self.cosines_CDK), size=count)
        factors_NF = rng.normal(size=(count, len(self.loading_FDD)))
        steps_N = np.diff(offsets_N1)
        base_SD = np.empty((offsets_N1[-1], len(self.scale_D)))
        classes_S, steps_S = np.repeat(classes_N, steps_N), step_numbers(offsets_N1)
        for one in range(len(self.cosines_CDK)):
            base_SD[classes_S == one] = self.curve(one, steps_S[classes_S == one])
        added_SFD = np.einsum("fde,se->sfd", self.loading_FDD, base_SD)
        values_SD = base_SD + np.einsum("sf,sfd->sd", np.repeat(factors_NF, steps_N, axis=0), added_SFD)
        values_SD += rng.normal(size=base_SD.shape) @ np.linalg.cholesky(self.covariance_DD).T
        values_SD = (self.offset_D + self.scale_D * values_SD).astype(np.float32)
        values_SD[rng.random(values_SD.shape) < self.missing] = np.nan
        return VectorSample(values_SD, offsets_N1, classes_N, factors_NF)

    def curve(self, group: int, steps_S: np.ndarray) -> np.ndarray:
        """Return where the pen of a class is at these steps where both factors are 0, (S, D), in units of each feature's scale."""
        angle_SK = self.frequency * steps_S[:, None] * np.arange(1, self.cosines_CDK.shape[2] + 1)
        mean_SD: np.ndarray = np.cos(angle_SK) @ self.cosines_CDK[group].T + np.sin(angle_SK) @ self.sines_CDK[group].T
        return mean_SD

    def factor_terms(self, sample: VectorSample) -> FactorTerms:
        """Return log p(observed values, length | class, factors) as a quadratic in the factors."""
        size = len(self.scale_D)
        observed_SD = ~np.isnan(sample.values_SD)
        standard_SD = np.where(observed_SD, (sample.values_SD - self.offset_D) / self.scale_D, 0.0)
        codes, pattern_S = np.unique(observed_SD @ (1 << np.arange(size)), return_inverse=True)
        observed_PD = (codes[:, None] >> np.arange(size)) & 1
        both_PDD = observed_PD[:, :, None] * observed_PD[:, None, :]
        # Ones on the diagonal of what is missing: it then takes no part in the determinant or in the others' inverse.
        covariance_PDD = self.covariance_DD * both_PDD + np.eye(size) * (1 - observed_PD)[:, None, :]
        precision_SDD = (np.linalg.inv(covariance_PDD) * both_PDD)[pattern_S]
        norm_S = -np.linalg.slogdet(covariance_PDD).logabsdet[pattern_S] / 2
        norm_S -= observed_SD @ (np.log(self.scale_D) + math.log(2 * math.pi) / 2)
        terms_SC: list[list[np.ndarray]] = [[], [], []]
        for group in range(len(self.cosines_CDK)):
            base_SD = self.curve(group, step_numbers(sample.offsets_N1))
            added_SFD = np.einsum("fde,se->sfd", self.loading_FDD, base_SD)
            rest_SD = standard_SD - base_SD
            weighted_SFD = np.einsum("sfd,sde->sfe", added_SFD, precision_SDD)
            squares_S = np.einsum("sd,sde,se->s", rest_SD, precision_SDD, rest_SD)
            terms_SC[0].append(norm_S - squares_S / 2)
            terms_SC[1].append(np.einsum("sfd,sd->sf", weighted_SFD, rest_SD))
            terms_SC[2].append(np.einsum("sfd,sgd->sfg", weighted_SFD, added_SFD))
        return FactorTerms.of_steps([np.stack(term, axis=1) for term in terms_SC], sample.offsets_N1, self.lengths)


class EventSample(NamedTuple):
    """Sequences of events, and the class and factor of each."""

    present_SV: np.ndarray
    values_SV: np.ndarray
    """float32, NaN where an event has no value or is not present."""
    gaps_S: np.ndarray
    """Minutes since the step before; 0 at the first step of a sequence."""
    offsets_N1: np.ndarray
    classes_N: np.ndarray
    factors_NF: np.ndarray
    """Of one factor."""


LEVELS_C: tuple[dict[str, float], ...] = (
    {"glucose": 1.5, "weight": 0.8, "pressure": 0.4},
    {"pressure": -1.0, "oxygen": -0.7, "weight": 0.6, "pulse": 0.5, "breaths": 0.5},
    {"temperature": 1.3, "pulse": 1.0, "lactate": 0.8, "breaths": 0.7, "pressure": -0.4},
    {"lactate": -0.6, "pulse": -0.5, "breaths": -0.4},
)
SEVERE = {"lactate": 0.5, "pulse": 0.4, "breaths": 0.4, "oxygen": -0.4, "pressure": -0.3, "temperature": 0.3}
"""What an illness, and one unit of its severity, does to the level of a variable, in units of its scale."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EventTruth:
    """Diaries of patients, twelve variables at irregular times; its fields are what truth.json holds.

    Variables have rates of their own, and each class, an illness, has its own rates, levels and pace. A step has at least one event
    (an empty one could not be seen). Values and the logarithms of the gaps are Gaussian with means linear in the factor, the
    severity, Normal(0, 1):

        p(variables present | class) = product of Bernoulli(presence[class]), given that there is one
        (value - location) / scale ~ Normal(level[class] + factor * slope, noise)
        log(gap in minutes) ~ Normal(pace[class] + factor * pace_slope, pace_noise)

    Shapes: V variables.
    """

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
        variables, classes = len(VARIABLES), len(ILLNESSES)
        log_odds_CV = np.linspace(1.0, -2.5, variables) + rng.normal(scale=0.5, size=(classes, variables))
        return cls(
            presence_CV=(1 / (1 + np.exp(-log_odds_CV))).round(3),
            has_value_V=np.arange(variables) < variables - 3,
            level_CV=np.array([[levels.get(name, 0.0) for name in VARIABLES] for levels in LEVELS_C]),
            slope_V=np.array([SEVERE.get(name, 0.0) for name in VARIABLES]),
            noise_V=rng.uniform(0.7, 1.0, variables).round(3),
            location_V=np.array([85.0, 120, 37, 18, 97, 130, 139, 2, 80, 0, 0, 0]),
            scale_V=np.array([15.0, 20, 0.7, 4, 2, 40, 4, 1, 15, 1, 1, 1]),
            pace_C=np.log([40.0, 25.0, 15.0, 60.0]).round(3),
            pace_slope=-0.2,
            pace_noise=0.8,
            lengths=lengths,
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        return ILLNESSES

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
        return EventSample(present_SV, values_SV, gaps_S, offsets_N1, classes_N, factors_N[:, None])

    def log_presence(self, present_SV: np.ndarray) -> np.ndarray:
        """Return log p(variables present | class), (S, C), given that there is one."""
        log_absent_C = np.log1p(-self.presence_CV).sum(axis=1)
        log_odds_CV = np.log(self.presence_CV) - np.log1p(-self.presence_CV)
        return present_SV @ log_odds_CV.T + log_absent_C - np.log(-np.expm1(log_absent_C))

    def factor_terms(self, sample: EventSample) -> FactorTerms:
        """Return log p(variables, values, gaps, length | class, factor) as a quadratic in the factor; gaps per minute."""
        valued_SV = sample.present_SV & self.has_value_V
        standard_SV = np.where(valued_SV, (sample.values_SV - self.location_V) / self.scale_V, 0.0)
        later_S = step_numbers(sample.offsets_N1) > 0
        log_gaps_S = np.log(sample.gaps_S, out=np.zeros(len(later_S)), where=later_S)
        precision_V, pace_precision = self.noise_V**-2.0, self.pace_noise**-2.0
        norm_S = valued_SV @ -np.log(self.scale_V * self.noise_V * math.sqrt(2 * math.pi))
        norm_S -= later_S * (log_gaps_S + math.log(self.pace_noise * math.sqrt(2 * math.pi)))
        constant_SC = norm_S[:, None] + self.log_presence(sample.present_SV)
        linear_SC = np.empty_like(constant_SC)
        curvature_S = valued_SV @ (self.slope_V**2 * precision_V) + later_S * self.pace_slope**2 * pace_precision
        for c, (level_V, pace) in enumerate(zip(self.level_CV, self.pace_C, strict=True)):
            rest_SV, rest_S = valued_SV * (standard_SV - level_V), later_S * (log_gaps_S - pace)
            constant_SC[:, c] -= (rest_SV**2 @ precision_V + rest_S**2 * pace_precision) / 2
            linear_SC[:, c] = rest_SV @ (self.slope_V * precision_V) + rest_S * self.pace_slope * pace_precision
        curvature_SC = np.repeat(curvature_S[:, None], len(self.pace_C), axis=1)
        terms_SC = [constant_SC, linear_SC[..., None], curvature_SC[..., None, None]]
        return FactorTerms.of_steps(terms_SC, sample.offsets_N1, self.lengths)


# --- Files ----------------------------------------------------------------------------------------------------------

Truth: TypeAlias = TokenTruth | VectorTruth | EventTruth
TRUTHS: dict[str, type[Truth]] = {"tokens": TokenTruth, "vectors": VectorTruth, "events": EventTruth}


def write_demo(
    directory: Path, kind: Kind, *, sequences: int = SEQUENCES, mean_length: float = MEAN_LENGTH, seed: int = 0
) -> Path:
    """Return the folder below `directory` with these data, and write it first where it does not exist.

    `sequences` train; a tenth as many each validate and test. Safe for several processes at once, and to kill.
    """
    if sequences < 1:
        raise ValueError(f"demo data need 1 sequence or more, got {sequences}")
    lengths = LengthLaw(mean=mean_length)
    name = f"demo-{kind}-v{VERSION}-{sequences}x{mean_length:g}-seed{seed}"
    target = directory / name
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(directory / f".{name}.lock", lambda: None):
        if not target.exists():
            unfinished = directory / f".{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: the lock is ours
            try:
                unfinished.mkdir()
                _write_files(unfinished, kind, sequences, lengths, seed)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return target


def read_truth(folder: Path) -> Truth:
    """Return the process that the files in a folder of `write_demo` were drawn from."""
    stored = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    process = stored["process"]
    fields: dict[str, Any] = {n: np.array(value) if isinstance(value, list) else value for n, value in process.items()}
    return TRUTHS[stored["kind"]](**fields | {"lengths": LengthLaw(**process["lengths"])})


def read_tokens(path: Path) -> TokenSample:
    """Return the sample in one Parquet file of a token demo."""
    table = pq.read_table(path, page_checksum_verification=True).combine_chunks()
    lengths_N = pc.list_value_length(table["tokens"]).to_numpy()
    tokens_S = pc.list_flatten(table["tokens"]).to_numpy()
    classes_N = pc.index_in(table["label"].cast(pa.string()), pa.array(LANGUAGES)).to_numpy()
    return TokenSample(tokens_S, offsets_of(lengths_N), classes_N, table["factor"].to_numpy())


def _write_files(folder: Path, kind: Kind, sequences: int, lengths: LengthLaw, seed: int) -> None:
    truth = TRUTHS[kind].draw(np.random.default_rng([seed, 0]), lengths)
    held_out = max(1, sequences // HELD_OUT_SHARE)
    factors = []
    first_id = 0
    for number, (split, count) in enumerate({"train": sequences, "valid": held_out, "test": held_out}.items(), start=1):
        sample = truth.sample(count, np.random.default_rng([seed, number]))
        ids_N, offsets_N1 = np.arange(first_id, first_id + count), sample.offsets_N1
        lengths_N = np.diff(offsets_N1)
        label_N = pa.array(truth.class_names).take(pa.array(sample.classes_N))
        columns: dict[str, Any]
        if isinstance(sample, EventSample):
            step_E, variable_E = np.nonzero(sample.present_SV)
            elapsed_S, sequence_E = np.cumsum(sample.gaps_S), np.repeat(np.arange(count), lengths_N)[step_E]
            minutes_S = elapsed_S - np.repeat(elapsed_S[offsets_N1[:-1]], lengths_N)
            columns = {
                "ts_id": ids_N[sequence_E],
                "minute": minutes_S[step_E],
                "variable": pa.array(VARIABLES).take(pa.array(variable_E)),
                "value": pa.array(sample.values_SV[step_E, variable_E], from_pandas=True),
                "label": label_N.take(pa.array(sequence_E)),
            }
            factors.append(pd.DataFrame({"ts_id": ids_N, "severity": sample.factors_NF[:, 0]}))
        elif isinstance(sample, VectorSample):
            values_D = (pa.array(values_S, from_pandas=True) for values_S in sample.values_SD.T)  # NaN becomes null
            sequence_S = np.repeat(np.arange(count), lengths_N)
            columns = {"id": ids_N[sequence_S], "step": step_numbers(offsets_N1)}
            columns |= dict(zip(("x", "y", "pressure"), values_D, strict=True))
            columns["label"] = label_N.take(pa.array(sequence_S))
            size_N, slant_N = sample.factors_NF.T
            factors.append(pd.DataFrame({"id": ids_N, "size": size_N, "slant": slant_N}))
        else:
            written = "".join(map(ALPHABET.__getitem__, sample.tokens_S.tolist()))
            columns = {
                "id": ids_N,
                "text": [written[first:end] for first, end in itertools.pairwise(offsets_N1.tolist())],
                "tokens": pa.ListArray.from_arrays(pa.array(offsets_N1, pa.int32()), pa.array(sample.tokens_S)),
                "label": label_N,
                "factor": sample.factors_N,
            }
        pq.write_table(
            pa.table(columns),
            folder / f"{split}.parquet",
            row_group_size=ROW_GROUP_ROWS[kind],
            write_page_checksum=True,
        )
        first_id += count
    if factors:
        pd.concat(factors).to_csv(folder / "factors.csv", index=False)
    process = dataclasses.asdict(truth)
    process = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in process.items()}
    stored = {"kind": kind, "version": VERSION, "sequences": sequences, "seed": seed, "process": process}
    (folder / "truth.json").write_text(json.dumps(stored), encoding="utf-8")
