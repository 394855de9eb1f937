"""What the three demo processes share: the law of the lengths, the integral over a factor, estimates, and JSON.

In: plain numpy arrays. Out: exact log-probabilities in nats. Every demo sequence has a length, a latent class (all equally
likely) and a factor; the length says nothing about the other two.

Shapes: N sequences, S steps of all sequences one behind the other (offsets_N1 says where each begins), C classes.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


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
        """Of the lengths shortest..longest; what rounds to less or more than these falls to the ends."""
        edges = (np.log(np.arange(self.shortest, self.longest) + 0.5) - self.log_median) / self.spread
        below = [0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges]
        return np.diff(below, prepend=0.0, append=1.0)

    def log_probability(self, lengths_N: np.ndarray) -> np.ndarray:
        """-inf for lengths that cannot occur."""
        reachable_N = (lengths_N >= self.shortest) & (lengths_N <= self.longest)
        with np.errstate(divide="ignore"):
            logs = np.log(self.probabilities())
        return np.where(reachable_N, logs[np.clip(lengths_N, self.shortest, self.longest) - self.shortest], -np.inf)

    def expected(self) -> float:
        """Mean of the clipped lengths."""
        return float(self.probabilities() @ np.arange(self.shortest, self.longest + 1))


class FactorTerms(NamedTuple):
    """log p(x | class, factor) = constant + linear * factor - curvature * factor^2 / 2, exactly.

    True of every Gaussian whose mean is linear in the factor. With factor ~ Normal(0, 1) the integral has a closed form.
    """

    constant_NC: np.ndarray
    linear_NC: np.ndarray
    curvature_NC: np.ndarray

    def given(self, classes_N: np.ndarray, factors_N: np.ndarray) -> np.ndarray:
        """log p(x | class, factor) at one class and factor for each sequence."""
        constant_N, linear_N, curvature_N = (term_NC[np.arange(len(classes_N)), classes_N] for term_NC in self)
        return constant_N + linear_N * factors_N - curvature_N * factors_N**2 / 2

    def integrated(self) -> np.ndarray:
        """log p(x | class), (N, C)."""
        precision_NC = 1 + self.curvature_NC
        return self.constant_NC + self.linear_NC**2 / (2 * precision_NC) - np.log(precision_NC) / 2

    def marginal(self) -> np.ndarray:
        """log p(x), (N,): all classes equally likely."""
        return logsumexp(self.integrated(), axis=1) - math.log(self.constant_NC.shape[1])


class Estimate(NamedTuple):
    """A mean over sequences and its standard error."""

    value: float
    error: float


def estimate_mean(sums_N: np.ndarray, counts_N: np.ndarray | None = None) -> Estimate:
    """Per sequence, or with counts_N per step: sum of the sums over sum of the counts."""
    counts_N = np.ones(len(sums_N)) if counts_N is None else counts_N
    value = sums_N.sum() / counts_N.sum()
    error = (sums_N - value * counts_N).std(ddof=1) / math.sqrt(len(sums_N)) / counts_N.mean()
    return Estimate(float(value), float(error))


def logsumexp(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    highest = values.max(axis=axis, keepdims=True)
    return np.log(np.exp(values - highest).sum(axis=axis)) + highest.squeeze(axis)


def sum_by_sequence(values_S: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
    """Sums over the steps of each sequence; none may be empty."""
    return np.add.reduceat(values_S, offsets_N1[:-1], axis=0)


def offsets_of(lengths_N: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths_N)])


def step_numbers(offsets_N1: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each sequence, (S,)."""
    return np.arange(offsets_N1[-1]) - np.repeat(offsets_N1[:-1], np.diff(offsets_N1))


def to_json(truth: Any) -> dict[str, Any]:
    """The fields of a truth, which are arrays, numbers and a LengthLaw, as JSON types."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in dataclasses.asdict(truth).items()
    }


def from_json(stored: dict[str, Any]) -> dict[str, Any]:
    """The fields again, ready to be passed to the truth's class."""
    fields = {name: np.array(value) if isinstance(value, list) else value for name, value in stored.items()}
    return fields | {"lengths": LengthLaw(**stored["lengths"])}
