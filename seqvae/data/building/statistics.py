"""Mean and standard deviation of each feature or variable, and of the logarithm of gaps, over the training split, and what
is odd about them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from seqvae.data.parquet.side_tables import read_params_map
from seqvae.errors import DataError
from seqvae.text import counted, some

FAR_OUT = 10.0
"""Standard deviations from the mean beyond which a value is counted as an outlier."""
CONSTANT = 1e-12
"""A standard deviation below this share of the mean is rounding, not variation."""

LEAST_LOG_GAP_STD = 0.1
"""Gaps that differ by less than a tenth come from a clock: were its wavering taken for the unit, a gap twice as long would lie
beyond all reckoning."""

Pieces = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Starts over at each call; yields which name, and its value or NaN."""


class Moments(NamedTuple):
    """Of each of V names."""

    count_V: np.ndarray
    """Values in the training split."""
    mean_V: np.ndarray
    std_V: np.ndarray
    """1 where there is only one value."""
    constant_V: np.ndarray


def training_moments(pieces: Pieces, names: tuple[str, ...], params_map_path: str | None) -> Moments:
    """Those of --params_map_path, or else those of the pieces."""
    count_V, mean_V, std_V = _measure(pieces, len(names))
    if params_map_path is not None:
        mean_V, std_V = _given(params_map_path, names, count_V)
    constant_V = std_V <= CONSTANT * np.abs(mean_V)
    return Moments(count_V, mean_V, np.where(constant_V, 1.0, std_V), constant_V)


class GapMoments(NamedTuple):
    """Fields of the DataDescription."""

    log_gap_mean: float
    log_gap_std: float
    shortest_gap: float


def gap_moments(pieces: Callable[[], Iterator[np.ndarray]]) -> GapMoments:
    """Of gaps that are not those of first steps.

    The shortest gap that is told apart is half the smallest that is not 0: where times are rounded, less than that becomes 0.
    """
    smallest = min((float(gaps_T[gaps_T > 0].min(initial=np.inf)) for gaps_T in pieces()), default=np.inf)
    if smallest == np.inf:
        return GapMoments(0.0, 1.0, 1.0)
    shortest = smallest / 2

    def log_pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for gaps_T in pieces():
            yield np.zeros(len(gaps_T), np.int64), np.log(np.maximum(gaps_T, shortest, dtype=np.float64))

    _, mean_1, std_1 = _measure(log_pieces, 1)
    return GapMoments(float(mean_1[0]), max(float(std_1[0]), LEAST_LOG_GAP_STD), shortest)


def moment_notes(names: tuple[str, ...], moments: Moments, far_V: np.ndarray) -> list[str]:
    """`far_V` counts the values that lie FAR_OUT."""
    notes = []
    constant = [names[v] for v in np.flatnonzero(moments.constant_V & (moments.count_V > 0))]
    if constant:
        notes.append(f"warning: constant in the training split, left unscaled: {some(constant)}")
    if far_V.sum():
        worst = [f"{names[v]} {far_V[v]:,}" for v in np.argsort(-far_V)[:5] if far_V[v]]
        lie = "lies" if far_V.sum() == 1 else "lie"
        notes.append(
            f"{counted(int(far_V.sum()), 'value')} {lie} more than {FAR_OUT:g} standard deviations from the mean "
            f"({', '.join(worst)}{', ...' if (far_V > 0).sum() > 5 else ''})"
        )
    return notes


def _measure(pieces: Pieces, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count, mean and standard deviation in two passes, which is exact where one pass would cancel.

    Sums are of differences to one value of each name: those of a constant are exactly 0.
    """
    count_V, base_V = np.zeros(size, np.int64), np.full(size, np.nan)
    sum_V, square_V = np.zeros(size), np.zeros(size)
    for names_E, values_E in _present(pieces):
        found_V = np.full(size, np.nan)
        found_V[names_E] = values_E
        base_V = np.where(np.isnan(base_V), found_V, base_V)
        count_V += np.bincount(names_E, minlength=size)
        sum_V += np.bincount(names_E, values_E - base_V[names_E], minlength=size)
    mean_V = np.nan_to_num(base_V) + sum_V / np.maximum(count_V, 1)
    for names_E, values_E in _present(pieces):
        square_V += np.bincount(names_E, (values_E - mean_V[names_E]) ** 2, minlength=size)
    return count_V, mean_V, np.sqrt(square_V / np.maximum(count_V, 1))


def _present(pieces: Pieces) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for names_E, values_E in pieces():
        present = ~np.isnan(values_E)
        yield names_E[present], values_E[present]


def _given(path: str, names: tuple[str, ...], count_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    given = read_params_map(path)
    missing = [name for name, count in zip(names, count_V, strict=True) if name not in given and count > 0]
    if missing:
        raise DataError(
            f"--params_map_path {path}: lacks {len(missing)} of those that have values ({some(missing)}). Add them."
        )
    moments_V2 = np.array([given.get(name, (0.0, 1.0)) for name in names])
    return moments_V2[:, 0], moments_V2[:, 1]
