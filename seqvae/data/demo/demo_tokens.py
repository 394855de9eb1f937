"""Demo tokens: a finite mixture of Markov chains, whose likelihood is therefore exact.

In: a generator of random numbers. Out: flat tokens with offsets, and for any such tokens log p in nats.

Which token follows which is common to all sequences (that is what a model learns first). A class has its favourite tokens,
and the factor, one of G equally likely values, pulls along one direction of the vocabulary:

    p(next | previous, class, factor) = softmax(base[previous] + favour[class] + factor * direction)

The first token comes from the stationary law of its chain, so a token is distributed alike at every step. Class and factor
show slowly: of log 8 = 2.1 nats about the class 1.6 are still open after 5 tokens, 0.7 after 20 and 0.1 after 50. To know
them from the start is what a latent variable can bring. The default process (seed 0, mean length 50), in nats per symbol:

    3.35  without any context
    2.38  from the token before alone: 87 % of the way to
    2.23  the truth, of which 2.8 nats per sequence are about class and factor
    2.18  told class and factor beforehand

Shapes: N sequences, S tokens of all sequences one behind the other, V vocabulary, C classes, G values of the factor,
K = C * G chains.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from seqvae.data.demo.demo_shared import Estimate, LengthLaw, estimate_mean, logsumexp, offsets_of

CHUNK = 512  # sequences whose transition counts are held at once: 4 MB at 32 tokens


class TokenSample(NamedTuple):
    tokens_S: np.ndarray
    offsets_N1: np.ndarray
    classes_N: np.ndarray
    factors_N: np.ndarray


class TokenEntropies(NamedTuple):
    """What a model can be held against, on one split. A symbol is a token or the end mark of a sequence."""

    unigram: Estimate
    """Nats per symbol without any context: where a model starts."""
    true: Estimate
    """Nats per symbol under the process itself: no model can do better."""
    given_latent: Estimate
    """Nats per symbol for somebody who is told class and factor beforehand."""
    true_per_sequence: Estimate
    mutual_information: Estimate
    """Nats per sequence between a sequence and its class and factor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTruth:
    """A mixture of Markov chains; its lists and numbers are what truth.json holds."""

    base_VV: np.ndarray
    favour_CV: np.ndarray
    direction_V: np.ndarray
    factors_G: np.ndarray
    lengths: LengthLaw

    @classmethod
    def draw(
        cls, rng: np.random.Generator, lengths: LengthLaw, *, vocabulary_size: int = 32, classes: int = 8
    ) -> "TokenTruth":
        """Three decimals are enough, and what stands in truth.json is then the process itself."""
        return cls(
            base_VV=rng.normal(scale=2.0, size=(vocabulary_size, vocabulary_size)).round(3),
            favour_CV=rng.normal(scale=0.6, size=(classes, vocabulary_size)).round(3),
            direction_V=rng.normal(scale=0.5, size=vocabulary_size).round(3),
            factors_G=np.linspace(-1.7, 1.7, 16).round(3),
            lengths=lengths,
        )

    @cached_property
    def log_transitions_KVV(self) -> np.ndarray:
        pull_GV = self.factors_G[:, None] * self.direction_V
        logits_CGVV = self.base_VV + (self.favour_CV[:, None] + pull_GV)[:, :, None]
        logits_KVV = logits_CGVV.reshape(-1, *self.base_VV.shape)
        return logits_KVV - logsumexp(logits_KVV, axis=2)[:, :, None]

    @cached_property
    def log_first_KV(self) -> np.ndarray:
        """The stationary law of each chain: p = p T and sum p = 1."""
        size = len(self.direction_V)
        equations_KVV = np.exp(self.log_transitions_KVV).transpose(0, 2, 1) - np.eye(size)
        equations_KVV[:, -1] = 1
        return np.log(np.linalg.solve(equations_KVV, np.eye(size)[:, -1:])[:, :, 0])

    def sample(self, count: int, rng: np.random.Generator) -> TokenSample:
        # Longest first, so that the sequences which still run at a step are always the first so many.
        lengths_N = self.lengths.sample(count, rng)
        offsets_N1 = offsets_of(lengths_N)
        order_N = np.argsort(-lengths_N, kind="stable")
        chains_N = rng.integers(len(self.log_first_KV), size=count)
        ordered_chains_N, starts_N = chains_N[order_N], offsets_N1[order_N]
        tokens_S = np.empty(offsets_N1[-1], dtype=np.uint8 if len(self.direction_V) <= 256 else np.uint16)
        cumulative_KVV = cumulative(self.log_transitions_KVV)
        now_N = choose(cumulative(self.log_first_KV)[ordered_chains_N], rng)
        tokens_S[starts_N] = now_N
        for step in range(1, lengths_N.max()):
            running = np.count_nonzero(lengths_N > step)
            now_N = choose(cumulative_KVV[ordered_chains_N[:running], now_N[:running]], rng)
            tokens_S[starts_N[:running] + step] = now_N
        classes_N, levels_N = np.divmod(chains_N, len(self.factors_G))
        return TokenSample(tokens_S, offsets_N1, classes_N, self.factors_G[levels_N])

    def log_likelihood_given(self, tokens_S: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
        """log p(tokens, length | class, factor), (N, C, G): how often each transition occurs is all that matters."""
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
        """log p(tokens, length), (N,)."""
        given_NCG = self.log_likelihood_given(tokens_S, offsets_N1)
        return logsumexp(given_NCG, axis=(1, 2)) - math.log(given_NCG[0].size)

    def posterior(self, tokens_S: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
        """p(class, factor | tokens), (N, C, G)."""
        given_NCG = self.log_likelihood_given(tokens_S, offsets_N1)
        return np.exp(given_NCG - logsumexp(given_NCG, axis=(1, 2))[:, None, None])

    @cached_property
    def unigram_probabilities(self) -> np.ndarray:
        """Of each token and, last, of the end mark, (V + 1,)."""
        tokens_V = np.exp(self.log_first_KV).mean(axis=0)
        return np.append(tokens_V * self.lengths.expected(), 1.0) / (self.lengths.expected() + 1)

    @property
    def unigram_entropy(self) -> float:
        """Nats per symbol."""
        return float(-self.unigram_probabilities @ np.log(self.unigram_probabilities))

    def unigram_log_likelihood(self, tokens_S: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
        """What the best model without any context gives, (N,)."""
        logs = np.log(self.unigram_probabilities)
        return np.add.reduceat(logs[tokens_S], offsets_N1[:-1]) + logs[-1]

    def entropies(self, sample: TokenSample) -> TokenEntropies:
        tokens_S, offsets_N1 = sample.tokens_S, sample.offsets_N1
        symbols_N = np.diff(offsets_N1) + 1
        given_NCG = self.log_likelihood_given(tokens_S, offsets_N1)
        levels_N = np.searchsorted(self.factors_G, sample.factors_N)
        chosen_N = given_NCG[np.arange(len(symbols_N)), sample.classes_N, levels_N]
        summed_N, log_chains = logsumexp(given_NCG, axis=(1, 2)), math.log(given_NCG[0].size)
        # log K - posterior entropy scatters less than the difference of the two likelihoods, and has the same mean.
        log_posterior_NCG = given_NCG - summed_N[:, None, None]
        information_N = log_chains + (np.exp(log_posterior_NCG) * log_posterior_NCG).sum(axis=(1, 2))
        return TokenEntropies(
            unigram=estimate_mean(-self.unigram_log_likelihood(tokens_S, offsets_N1), symbols_N),
            true=estimate_mean(log_chains - summed_N, symbols_N),
            given_latent=estimate_mean(-chosen_N, symbols_N),
            true_per_sequence=estimate_mean(log_chains - summed_N),
            mutual_information=estimate_mean(information_N),
        )


def cumulative(log_probabilities: np.ndarray) -> np.ndarray:
    """Along the last axis; the last entry is 1 whatever the rounding."""
    sums = np.exp(log_probabilities).cumsum(axis=-1)
    sums[..., -1] = 1
    return sums


def choose(cumulative_NV: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One index for each row."""
    return (rng.random((len(cumulative_NV), 1)) >= cumulative_NV).sum(axis=1)
