"""Where a few readings are heading: a line through their logarithms that no single outlier moves.

Plain Python: some tens of numbers in, a `Trend` out.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

LARGEST_LOG = 700.0
"""What a diverging run leads to may be more than a float holds."""


class Trend(NamedTuple):
    """log(value) = log(level) + slope * (step - step of the last reading)."""

    slope: float
    """Change of the logarithm in one step."""
    level: float
    """The line's value at the last reading."""
    agreement: float
    """From 0 to 1: the share of pairs of readings that go the line's way, less those that go the other."""

    def steps_until(self, target: float) -> float:
        """Until the line reaches a value; infinite where it does not go there, 0 where it is beyond already."""
        distance = math.log(target) - math.log(self.level)
        if self.slope == 0 or distance / self.slope < 0:
            return math.inf
        return distance / self.slope


def log_trend(steps: Sequence[int], values: Sequence[float], floor: float) -> Trend:
    """The median of the slopes of all pairs (Theil and Sen). Values below `floor`, where noise rules, count as `floor`.

    Steps rise; one value at least, and none is NaN.

    >>> trend = log_trend([0, 10, 20, 30], [8.0, 4.0, 2.0, 1.0], floor=0.01)
    >>> round(trend.level, 6), round(trend.steps_until(0.25)), trend.agreement
    (1.0, 20, 1.0)
    """
    logs = [math.log(max(value, floor)) for value in values]
    if len(logs) < 2:
        return Trend(0.0, math.exp(logs[-1]), 0.0)
    slopes = [
        (later - earlier) / (end - start)
        for (start, earlier), (end, later) in combinations(zip(steps, logs, strict=True), 2)
    ]
    slope = median(slopes)
    level = median(log + slope * (steps[-1] - step) for step, log in zip(steps, logs, strict=True))
    same_way = sum((one > 0) - (one < 0) for one in slopes) / len(slopes)
    return Trend(slope, math.exp(min(level, LARGEST_LOG)), abs(same_way) if same_way * slope >= 0 else 0.0)
