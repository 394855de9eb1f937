"""What a few extreme values do to the scale of the others: heavy tails, and codes like -9999 for what was not measured.

In: the values of each name in the training split, piece by piece, and how many there are. Out: for each name mean and standard
deviation of the values between two outer quantiles, and the values that look like codes. Quantiles are of a sample that a hash of
the position chooses, the same in every build; it holds all values where they are no more than `SAMPLED`.

Shapes: V names, E values one behind the other, U different values of one name.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from seqvae.data.building.parts import Each, Part, Pieces
from seqvae.data.parquet.reader import hash_ids

SAMPLED = 1 << 21
"""Values that are kept to take quantiles of, 24 MB; each name gets the same share of them, at least `FEWEST`."""
FEWEST = 128
OUTER = (0.01, 0.99)
"""Quantiles between which a value counts where tails are heavy."""
ENOUGH = 100
"""Values of a name below which a hundredth of them is less than one."""
FAR = 10.0
"""Standard deviations of all other values that a code is away from their mean at least."""
REPEATED, SHARE = 5, 0.0005
"""How often a code stands there at least: so many times, and so large a share of the values."""
MOST_CODES = 0.5
"""Codes stand for what is missing: a larger share of the values is the feature itself."""


class Tails(NamedTuple):
    """The values of each name without the few that are extreme."""

    inner_mean_V: np.ndarray
    inner_std_V: np.ndarray
    """NaN where a name has too few values to tell."""
    codes: dict[float, np.ndarray]
    """Values that are repeated, and far from all others: bool [V], of which names."""


def measure_tails(
    pieces_of: Callable[[Any], Pieces],
    count_V: np.ndarray,
    parts: Sequence[Any],
    each: Each = map,
    *,
    at_most: int = SAMPLED,
) -> Tails:
    """Return what the values are without the extreme ones; `count_V` are the numbers of values that are no NaN."""
    of_each = max(FEWEST, at_most // max(1, int((count_V > 0).sum())))
    limit_V = None
    if (count_V > of_each).any():
        limit_V = np.minimum(of_each / np.maximum(count_V, 1) * 2.0**64, 2.0**64)
    sizes = [0] if len(parts) == 1 else [*each(partial(_number_of_values, pieces_of), parts)]
    begins = accumulate(sizes, initial=0)
    samples = each(partial(_sample, pieces_of, limit_V), zip(parts, begins, strict=False))
    names, values = zip(*samples, strict=True)
    names_E, values_E = np.concatenate(names), np.concatenate(values)
    order = np.lexsort((values_E, names_E))
    names_E, values_E = names_E[order], values_E[order]
    size = len(count_V)
    number_V = np.bincount(names_E, minlength=size)
    ends_V = np.cumsum(number_V)
    begins_V = ends_V - number_V
    codes: dict[float, np.ndarray] = {}
    inner_mean_V, inner_std_V = np.full(size, np.nan), np.full(size, np.nan)
    for v in np.flatnonzero(number_V >= ENOUGH).tolist():
        within = slice(begins_V[v], ends_V[v])
        own_E = values_E[within]
        found = codes_among(own_E)
        for code in found:
            codes.setdefault(code, np.zeros(size, bool))[v] = True
        inner_E = _inner(own_E[~np.isin(own_E, found)] if found else own_E)
        inner_mean_V[v], inner_std_V[v] = inner_E.mean(), inner_E.std()
    return Tails(inner_mean_V, inner_std_V, codes)


def codes_among(sorted_E: np.ndarray) -> list[float]:
    """Return the values that look as if they stood for something else than a measurement: repeated, alone in their surroundings
    (nothing lies half as near as the median), and far from all others.

    >>> codes_among(np.sort(np.append(np.linspace(5, 9, 2000), [-9999.0] * 5)))
    [-9999.0]
    """
    begins_U = np.flatnonzero(np.append(True, np.diff(sorted_E) != 0))
    distinct_U, counts_U = sorted_E[begins_U], np.diff(begins_U, append=len(sorted_E))
    if len(distinct_U) < 3:
        return []
    gaps = np.diff(distinct_U)
    nearest_U = np.minimum(np.append(np.inf, gaps), np.append(gaps, np.inf))
    is_frequent_U = counts_U >= max(REPEATED, SHARE * len(sorted_E))
    middle = sorted_E[len(sorted_E) // 2]
    candidate_U = is_frequent_U & (nearest_U >= 0.5 * np.abs(distinct_U - middle)) & (distinct_U != middle)
    if not candidate_U.any() or counts_U[candidate_U].sum() > MOST_CODES * len(sorted_E):
        return []
    others_E = _inner(sorted_E[~np.isin(sorted_E, distinct_U[candidate_U])])
    mean, std = others_E.mean(), others_E.std()
    is_far_U = (np.abs(distinct_U - mean) > FAR * std) & bool(std > 0)
    found: list[float] = distinct_U[candidate_U & is_far_U].tolist()
    return found


def _inner(sorted_E: np.ndarray) -> np.ndarray:
    """Return the values between the outer quantiles."""
    low, high = np.quantile(sorted_E, OUTER)
    return sorted_E[np.searchsorted(sorted_E, low) : np.searchsorted(sorted_E, high, side="right")]


def _number_of_values(pieces_of: Callable[[Part], Pieces], part: Part) -> int:
    return sum(len(values_E) for _, values_E in pieces_of(part))


def _sample(
    pieces_of: Callable[[Part], Pieces], limit_V: np.ndarray | None, part_and_begin: tuple[Part, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return names and values of a part: those whose place among all values has a hash below the limit of their name, or all."""
    part, done = part_and_begin
    names, values = [np.zeros(0, np.int32)], [np.zeros(0)]
    for names_E, values_E in pieces_of(part):
        chosen_E = ~np.isnan(values_E)
        if limit_V is not None:
            keys_E = hash_ids(pa.array(np.arange(done, done + len(values_E))))
            chosen_E &= keys_E < limit_V[names_E]
        done += len(values_E)
        names.append(names_E[chosen_E].astype(np.int32))
        values.append(values_E[chosen_E])
    return np.concatenate(names), np.concatenate(values)
