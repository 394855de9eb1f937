"""What a detector remembers of readings, and what those under the full KL weight say together: numbers, answers, trends.

In: a `Reading` -> `Point`; some points -> `Seen`. The rules that make a finding of it stand in `findings.py`.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise, takewhile
from statistics import median
from typing import Literal, NamedTuple

from seqvae.monitors.detection.thresholds import Thresholds
from seqvae.monitors.reading import Reading

# Where a few readings are heading: a line through their logarithms that no single outlier moves.
#
# Plain Python: some tens of numbers in, a `Trend` out.

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


Told = Literal["rate", "information"]


class Stretch(NamedTuple):
    """How far a trend looks back: over so many readings and, where a run's length is known, at least this share of it."""

    readings: int
    share_of_run: float


RECENT = Stretch(4, 0.03)
"""What has just begun."""
LONG = Stretch(12, 0.15)
"""What leads somewhere."""
MOST_IN_TREND = 16
"""Points of a trend, evenly taken: its cost grows with their square."""
NOISE = 0.05
"""Rates and informations below go up and down by themselves, and their logarithms are no trend."""
HEARD_READINGS = 12
"""What the decoder said before has no part in it any more."""
LEAST_POSTERIORS = 8
"""Below, the information is capped at two nats or less, and nobody can say whether means move. That the rate is gone can still
be seen."""


class Point(NamedTuple):
    """What a detector remembers of a reading."""

    step: int
    rate: float
    information: float
    posteriors: int
    use: float | None
    use_error: float | None
    active: int
    dimensions: int
    largest: float
    """KL of the dimension that has most."""
    variance: float
    """Geometric mean of the active dimensions' variances; NaN where none is active."""
    weight: float | None
    early: str | None
    """Why the KL weight is not full."""
    peak: float
    """The highest rate under the full weight so far."""


def point_of(reading: Reading, early: str | None, thresholds: Thresholds, before: Point | None = None) -> Point:
    """What there is to remember of a reading; `early` says why its KL weight is not full, `before` is the one before it."""
    active = [
        variance
        for variance, moves in zip(reading.mean_of_variances, reading.variance_of_means, strict=True)
        if moves >= thresholds.dead_variance
    ]
    rate = reading.rate
    logs = [math.log(max(variance, 1e-30)) for variance in active]
    return Point(
        step=reading.step,
        rate=reading.rate,
        information=reading.mutual_information,
        posteriors=reading.posteriors,
        use=reading.decoder_use,
        use_error=reading.decoder_use_error,
        active=len(active),
        dimensions=len(reading.kl_per_dim),
        largest=max(reading.kl_per_dim, default=0.0),
        variance=math.exp(sum(logs) / len(logs)) if logs else math.nan,
        weight=reading.kl_weight,
        early=early,
        peak=max(rate if math.isfinite(rate) else 0.0, 0.0 if before is None or before.early else before.peak),
    )


class Seen(NamedTuple):
    """The points under the full weight, newest last, and what they say."""

    points: list[Point]
    use: float | None
    """What the decoder last said, or None."""
    use_error: float
    t: Thresholds
    total_steps: int | None

    @property
    def steps_left(self) -> float:
        return math.inf if self.total_steps is None else self.total_steps - self.now.step

    @property
    def now(self) -> Point:
        """Alone: each reading is made of a window of posteriors, and a verdict takes several that agree."""
        return self.points[-1]

    @property
    def is_few(self) -> bool:
        return self.now.posteriors < LEAST_POSTERIORS

    @property
    def is_faint(self) -> bool:
        return is_faint(self.now, self.t)

    @property
    def has_long_been_faint(self) -> bool:
        """All along a whole long stretch."""
        wanted = LONG.share_of_run * (self.total_steps or 0)
        return len(self.points) >= LONG.readings and self.span(LONG) >= 0.9 * wanted and self._all_faint()

    def _all_faint(self) -> bool:
        return all(is_faint(point, self.t) for point in self._back(LONG))

    @property
    def faint_rate(self) -> float:
        return faint_rate(self.now, self.t)

    @property
    def is_used(self) -> bool | None:
        if self.use is None:
            return None
        return self.use >= max(self.t.clear_use, self.t.clear_use_errors * self.use_error)

    @property
    def is_unused(self) -> bool | None:
        if self.use is None:
            return None
        near = self.t.no_use + self.t.no_use_errors * self.use_error
        return (
            -near < self.use < min(self.t.clear_use, near)
        )  # a decoder that does worse with its own latent listens, too

    @property
    def numbers(self) -> dict[str, float]:
        told = {"rate": self.now.rate, "mutual_information": self.now.information, "decoder_use": self.use}
        return {
            name: float(f"{value:.3g}") for name, value in told.items() if value is not None and math.isfinite(value)
        }

    @property
    def said(self) -> str:
        """The numbers in words; the information of one posterior is none."""
        information = f", mutual information {self.now.information:.2f}" if math.isfinite(self.now.information) else ""
        use = "" if self.use is None else f", decoder use {self.use:.2f} ± {self.use_error:.2f}"
        return f"rate {self.now.rate:.2f}{information}{use}"

    def grows(self, name: Told, growth: float, stretch: Stretch = RECENT) -> bool:
        """Whether it became so many times larger."""
        trend = self.trend(name, stretch)
        return trend.slope * self.span(stretch) > math.log(growth) and trend.agreement >= self.t.agreement

    def leads_down(self, trend: Trend) -> bool:
        return trend.slope < 0 and trend.agreement >= self.t.agreement

    def trend(self, name: Told, stretch: Stretch) -> Trend:
        """Of the points that tell the number: the newest does."""
        points = [point for point in self._back(stretch) if not math.isnan(getattr(point, name))]
        every = -(-len(points) // MOST_IN_TREND)
        points = points[::-1][::every][::-1]
        return log_trend([point.step for point in points], [getattr(point, name) for point in points], NOISE)

    def span(self, stretch: Stretch) -> int:
        """In steps."""
        points = self._back(stretch)
        return points[-1].step - points[0].step

    def _back(self, stretch: Stretch) -> list[Point]:
        """The last points, as many as the stretch asks for."""
        since = self.now.step - stretch.share_of_run * (self.total_steps or 0)
        within = sum(point.step >= since for point in self.points)
        return self.points[-max(stretch.readings, within) :]


def is_faint(point: Point, t: Thresholds) -> bool:
    is_few = point.posteriors < LEAST_POSTERIORS
    return point.rate < faint_rate(point, t) and (is_few or point.information < t.faint_information)


def faint_rate(point: Point, t: Thresholds) -> float:
    return t.faint_rate + t.restless_rate * point.dimensions


def points_to_judge(points: Sequence[Point]) -> list[Point]:
    """The newest in a row that can be judged."""
    return list(takewhile(_can_be_judged, reversed(points)))[::-1]


def _can_be_judged(point: Point) -> bool:
    return not point.early and point.posteriors > 0 and math.isfinite(point.rate) and tells_information(point)


def tells_information(point: Point) -> bool:
    """One posterior has none, and variances of e^-709 are too small for the formula."""
    return point.posteriors < 2 or math.isfinite(point.information)


def seen_in(points: list[Point], thresholds: Thresholds, total_steps: int | None) -> Seen:
    asked = [point for point in points[-HEARD_READINGS:] if point.use is not None]
    use, error = (asked[-1].use, asked[-1].use_error) if asked else (None, None)
    if use is None or error is None or not (math.isfinite(use) and math.isfinite(error)):
        return Seen(points, None, math.nan, thresholds, total_steps)  # nobody was asked, or one sequence alone
    return Seen(points, use, error, thresholds, total_steps)


# What a detector knows of the KL weight: whether it has its full value, or how long that will take.
#
# In: a schedule that is known beforehand, where there is one, and the weights of the readings. Out: words for why it is too early
# to judge, or none. Plain Python.

FULL_SHARE = 0.95
"""Of the highest weight: from here on the weight counts as full. The last twentieth changes a KL by no more than that."""
LOOKS = 1000
"""At a known schedule, to find where it settles: a thousandth of the run is exact enough."""
STEADY_READINGS = 5
STEADY_SHARE = 0.005
"""A weight whose schedule is not known counts as rising while it grew by more than this share within so many readings."""


class KLSchedule(NamedTuple):
    """Of a run of `total_steps` optimizer steps, where that is known."""

    total_steps: int | None = None
    weight_at: Callable[[int], float] | None = None
    """The weight in an optimizer step, counted from 0; None: not known beforehand. Asked only when a run starts."""
    is_steered: bool = False
    """A controller moves the weight towards some KL: it is in force at all times, whatever its size."""

    def falls(self) -> bool:
        """Whether the weight is known to fall again after it was higher, as in cycles."""
        weights = self._looks()
        return any(later < earlier for (_, earlier), (_, later) in pairwise(weights))

    def full_from(self) -> int | None:
        """The step in which the weight gets to its height for the last time; None: not known beforehand."""
        weights = self._looks()
        if not weights:
            return None
        full = FULL_SHARE * max(weight for _, weight in weights)
        arrivals = [step for (_, before), (step, weight) in pairwise(weights) if before < full <= weight]
        return max(arrivals, default=0)

    def _looks(self) -> list[tuple[int, float]]:
        """Steps and their weights, where they are known."""
        if not self.total_steps or self.weight_at is None:
            return []
        last = self.total_steps - 1
        steps = sorted({round(last * look / LOOKS) for look in range(LOOKS + 1)})
        return [(step, self.weight_at(step)) for step in steps]


def why_not_full(step: int, weights: Sequence[float | None], schedule: KLSchedule, full_from: int | None) -> str | None:
    """Why the weight does not count as full, or None. `weights` are those of the readings so far, as they were told."""
    weight = weights[-1]
    if schedule.is_steered:
        return None
    if full_from is not None:
        now = "" if weight is None else f"is {weight:.3g} and "
        return None if step > full_from else f"the KL weight {now}will be full from step {full_from:,}"
    if weight is None or not math.isfinite(weight):
        return None
    told = [one for one in weights if one is not None and math.isfinite(one)]
    highest = max(told)
    if weight < FULL_SHARE * highest:
        return f"the KL weight is {weight:.3g} and has been {highest:.3g}"
    before = told[-STEADY_READINGS - 1 : -1]
    rises_slowly = len(told) > STEADY_READINGS and sorted(told) == list(told) and told[-2] < weight
    if before and (
        weight > (1 + STEADY_SHARE) * min(before) or (rises_slowly and weight > (1 + STEADY_SHARE) * told[0])
    ):
        return f"the KL weight is {weight:.3g} and still rising"
    return None
