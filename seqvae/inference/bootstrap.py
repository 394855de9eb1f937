"""How well classes are told apart, and how far chance goes: scores and classes in, a score with its 95 % interval out.

The bootstrap draws the scored sequences anew, with the same draws for every method, so that two methods are compared on the same
sequences. The seed is fixed.

Shapes: N sequences, C classes, R draws.
"""

from typing import NamedTuple

import numpy as np

DRAWS = 2000
AT_ONCE = 100
"""Draws; their weights of 20,000 sequences are 16 MB."""


class Interval(NamedTuple):
    value: float
    low: float
    high: float


class Drawn(NamedTuple):
    """A score of the sequences as they are, and of each draw of them."""

    value: float
    values_R: np.ndarray
    """NaN where a draw came to one class alone."""

    @property
    def interval(self) -> Interval:
        """95 %, by percentiles."""
        low, high = np.nanquantile(self.values_R, [0.025, 0.975])
        return Interval(self.value, float(low), float(high))

    def minus(self, other: "Drawn") -> "Drawn":
        return Drawn(self.value - other.value, self.values_R - other.values_R)


def draw_score(log_p_NC: np.ndarray, classes_N: np.ndarray, draws: int = DRAWS, seed: int = 0) -> Drawn:
    """AUROC of the second of two classes; of more classes, accuracy."""
    generator = np.random.default_rng(seed)
    count = len(classes_N)
    pieces = [
        _score(
            log_p_NC,
            classes_N,
            generator.multinomial(count, np.full(count, 1 / count), size=min(AT_ONCE, draws - done)),
        )
        for done in range(0, draws, AT_ONCE)
    ]
    return Drawn(float(_score(log_p_NC, classes_N, np.ones((1, count), np.int64))[0]), np.concatenate(pieces))


def auroc(scores_N: np.ndarray, positive_N: np.ndarray, weights_RN: np.ndarray) -> np.ndarray:
    """The probability that a positive scores above a negative, ties counted half; for each row of how often each counts.

    >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]), np.ones((1, 4)))
    array([0.75])
    """
    order_N = np.argsort(scores_N, kind="stable")
    first_G = np.flatnonzero(np.diff(scores_N[order_N], prepend=-np.inf))  # where a group of equal scores begins
    weights_RN = weights_RN[:, order_N].astype(np.float64)
    positive_RG, negative_RG = (
        np.add.reduceat(weights_RN * is_N, first_G, axis=1) for is_N in (positive_N[order_N], ~positive_N[order_N])
    )
    below_RG = np.cumsum(negative_RG, axis=1) - 0.5 * negative_RG
    pairs_R = positive_RG.sum(axis=1) * negative_RG.sum(axis=1)
    wins_R = (positive_RG * below_RG).sum(axis=1)
    return np.divide(wins_R, pairs_R, out=np.full(len(wins_R), np.nan), where=pairs_R > 0)


def _score(log_p_NC: np.ndarray, classes_N: np.ndarray, weights_RN: np.ndarray) -> np.ndarray:
    if log_p_NC.shape[1] == 2:
        return auroc(log_p_NC[:, 1] - log_p_NC[:, 0], classes_N == 1, weights_RN)
    return weights_RN @ (log_p_NC.argmax(axis=1) == classes_N) / len(classes_N)
