"""Lengths -> a histogram drawn with characters, whose bins are whole numbers that people would choose.

Shapes: E edges of bins, one more than there are bins.
"""

from collections.abc import Iterator, Mapping
from itertools import count, pairwise

import numpy as np

from seqvae.text import Ink

MOST_BINS = 16
LONG_TAIL = 5.0
"""Longest length / median from which on the bins grow with the length."""
SERIES = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
"""Round numbers of a decade, the finest series first."""
EIGHTHS = " ▏▎▍▌▋▊▉█"


def bin_edges(lengths: np.ndarray, cap: int | None = None, most: int = MOST_BINS) -> np.ndarray:
    """Whole numbers, ascending; bin i holds the lengths edges[i] .. edges[i + 1] - 1. Where lengths go beyond the cap,
    a bin ends with it.

    >>> bin_edges(np.array([1, 2, 2, 4])).tolist()
    [1, 2, 3, 4, 5]
    >>> bin_edges(np.array([3, 50, 60, 900]), cap=400, most=8).tolist()
    [3, 5, 10, 20, 50, 100, 200, 401, 500, 901]
    """
    lowest, highest = int(lengths.min()), int(lengths.max())
    long_tail = highest > LONG_TAIL * float(np.median(lengths))
    inner = _by_decades(lowest, highest, most) if long_tail else _evenly(lowest, highest, most)
    if cap is not None and lowest <= cap < highest:
        if cap - 1 not in inner:
            inner = inner[inner != cap]  # no bin for the cap alone, where bins are wide
        inner = np.append(inner, cap + 1)
    inner = np.unique(inner)
    return np.array([lowest, *inner[(inner > lowest) & (inner <= highest)], highest + 1])


def draw_histogram(lengths: Mapping[str, np.ndarray], cap: int, ink: Ink) -> list[str]:
    """A bar for each bin of the first split, and the counts of every split behind it."""
    edges = bin_edges(np.concatenate(list(lengths.values())), cap)
    counts = {split: np.histogram(of_split, edges)[0].tolist() for split, of_split in lengths.items()}
    labels = ["steps", *(_label(first, end - 1) for first, end in pairwise(edges.tolist()))]
    numbers = [[split, *(f"{number:,}" for number in column)] for split, column in counts.items()]
    widths = [max(map(len, column)) for column in numbers]
    label_width = max(map(len, labels))
    room = ink.width - 4 - label_width - sum(width + 2 for width in widths)
    first = next(iter(counts.values()))
    bars = [" " * room, *(bar(number / max(first), room, ink) for number in first)]
    lines = []
    for label, drawn, *row in zip(labels, bars, *numbers, strict=True):
        right = "".join(f"  {number:>{width}}" for number, width in zip(row, widths, strict=True))
        lines.append(f"  {label:>{label_width}}  {drawn}{right}")
    lines[0] = ink.dim(lines[0])
    over_cap = np.flatnonzero(edges[:-1] > cap)
    if len(over_cap):
        line = f"  {'':>{label_width}}  -- over --max_sequence_length {cap:,} ".ljust(ink.width, "-")
        lines.insert(1 + int(over_cap[0]), ink.warning(line))
    return lines


def bar(share: float, width: int, ink: Ink) -> str:
    """A bar padded with spaces; what is more than nothing is never drawn as nothing.

    >>> bar(0.5, 4, Ink(blocks=False)), bar(0.001, 4, Ink(blocks=False)), bar(0.45, 4, Ink())
    ('##  ', '#   ', '█▊  ')
    """
    if not ink.blocks:
        return ("#" * max(int(share > 0), round(share * width))).ljust(width)
    eighths = max(int(share > 0), round(share * width * 8))
    return (EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(width)


def _label(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _evenly(lowest: int, highest: int, most: int) -> np.ndarray:
    step = next(s for s in _steps() if highest // s - lowest // s < most)
    return np.arange(lowest // step, highest // step + 1) * step


def _by_decades(lowest: int, highest: int, most: int) -> np.ndarray:
    decades = 10.0 ** np.arange(len(str(highest)) + 1)
    for series in SERIES:
        edges = np.unique((decades[:, None] * np.array(series)).round().astype(np.int64))
        inside = edges[(edges > lowest) & (edges <= highest)]
        if len(inside) < most:
            break
    return inside


def _steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, ..."""
    return (factor * 10**decade for decade in count() for factor in (1, 2, 5))
