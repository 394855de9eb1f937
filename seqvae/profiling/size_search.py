"""How much a size needs -> the largest size that fits: a search of few tries, blind to what is being sized."""

import math
from collections.abc import Callable
from typing import NamedTuple

RESOLUTION = 0.05
"""What is found may be smaller than the largest that fits by this share."""

FASTEST_GROWTH = 2
"""From one try to the next, so that no try needs much more than what is known to be there."""


class Point(NamedTuple):
    """A size that was tried."""

    size: int
    peak_bytes: int | None
    """None: memory ran out."""


def largest_that_fits(
    peak_bytes: Callable[[int], int | None],
    *,
    lowest: int,
    highest: int,
    usable_bytes: float,
) -> int | None:
    """The largest size up to `highest` whose need is usable, to `RESOLUTION`; None: not even `lowest`.

    What a size needs grows with it, nearly along a line: the next try is where the line through the last two meets what is
    usable, within the bounds that keep the search safe (at most twice the last that fitted) and going on.
    """
    fitting: list[Point] = []
    too_large: Point | None = None
    size = lowest
    while True:
        tried = Point(size, peak_bytes(size))
        if tried.peak_bytes is not None and tried.peak_bytes <= usable_bytes:
            fitting.append(tried)
        else:
            too_large = tried
        if not fitting:
            return None
        if fitting[-1].size >= highest or (too_large and too_large.size <= _a_little_more(fitting[-1].size) + 1):
            return fitting[-1].size
        size = min(highest, _next_size(fitting, too_large, usable_bytes))


def _next_size(fitting: list[Point], too_large: Point | None, usable_bytes: float) -> int:
    last = fitting[-1]
    least = max(last.size + 1, _a_little_more(last.size))
    if too_large is None:
        if len(fitting) == 1:  # nothing needs more than its share and what is always needed
            likely = last.size * usable_bytes / _known(last)
        else:
            likely = _where_reached(fitting[-2], last, usable_bytes)
        return max(least, int(min(likely, FASTEST_GROWTH * last.size)))
    if too_large.peak_bytes is None:
        likely = math.sqrt(last.size * too_large.size)
    else:
        likely = _where_reached(last, too_large, usable_bytes)
    return max(least, int(min(likely, too_large.size / (1 + RESOLUTION))))


def _where_reached(one: Point, other: Point, usable_bytes: float) -> float:
    """The size at which the line through two points is at `usable_bytes`."""
    slope = (_known(other) - _known(one)) / (other.size - one.size)
    return other.size + (usable_bytes - _known(other)) / slope if slope > 0 else math.inf


def _known(point: Point) -> int:
    assert point.peak_bytes is not None
    return point.peak_bytes


def _a_little_more(size: int) -> int:
    return int(size * (1 + RESOLUTION))
