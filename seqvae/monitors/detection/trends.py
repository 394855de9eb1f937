"""What a detector remembers of readings, and what those under the full KL weight say together: numbers, answers, trends.

In: a `Reading` -> `Point`; some points -> `Evidence`; the KL weights -> whether the weight is full. The rules that make a finding
of it stand in `findings.py`. Plain Python.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import Literal, NamedTuple

from seqvae.monitors.detection.thresholds import Thresholds
from seqvae.monitors.reading import Reading

LARGEST_LOG = 700.0
"""A diverging run may lead to more than a float holds."""
MOST_IN_TREND = 16
"""Points of a trend, evenly taken: its cost grows with their square."""
NOISE = 0.05
"""Rates and informations below go up and down by themselves, and their logarithms are no trend."""
USE_READINGS = 12
"""Readings after which a decoder use is too old to count."""
LEAST_POSTERIORS = 8
"""Below, the information is capped at two nats or less, and whether means move cannot be known. That the rate is gone can still
be seen."""


class Stretch(NamedTuple):
    """How far a trend looks back: over n readings and, where a run's length is known, at least this share of it."""

    readings: int
    share_of_run: float


RECENT = Stretch(4, 0.03)
"""What has just begun."""
LONG = Stretch(12, 0.15)
"""What leads somewhere."""


class Trend(NamedTuple):
    """log(value) = log(level) + slope * (step - step of the last reading)."""

    slope: float
    """Change of the logarithm in one step."""
    level: float
    """The line's value at the last reading."""
    agreement: float
    """From 0 to 1: the share of pairs of readings that go the line's way, less those that go the other."""

    def steps_until(self, target: float) -> float:
        """Return the steps until the line reaches a value; infinite where it does not go there, or is beyond already."""
        distance = math.log(target) - math.log(self.level)
        if self.slope == 0 or distance / self.slope < 0:
            return math.inf
        return distance / self.slope

    def falls(self, agreement: float) -> bool:
        """Whether it leads down, and the readings agree on that."""
        return self.slope < 0 and self.agreement >= agreement


def log_trend(steps: Sequence[int], values: Sequence[float], floor: float) -> Trend:
    """Fit a line through the logarithms that no single outlier moves: the median of the slopes of all pairs (Theil and Sen).

    Values below `floor`, where noise rules, count as `floor`. Steps rise; one value at least, and none is NaN.

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
    """Return what there is to remember of a reading; `early` says why its KL weight is not full, `before` is the point before."""
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


def faint_rate(point: Point, t: Thresholds) -> float:
    return t.faint_rate + t.restless_rate * point.dimensions


def is_faint(point: Point, t: Thresholds) -> bool:
    """Whether a point carries nothing worth a latent."""
    is_few = point.posteriors < LEAST_POSTERIORS
    return point.rate < faint_rate(point, t) and (is_few or point.information < t.faint_information)


def tells_information(point: Point) -> bool:
    """Whether the information is known. One posterior has none, and variances of e^-709 are too small for the formula."""
    return point.posteriors < 2 or math.isfinite(point.information)


class Evidence:
    """What points under the full KL weight, newest last, say together."""

    def __init__(self, points: list[Point], thresholds: Thresholds, total_steps: int | None) -> None:
        self.points, self.thresholds, self.total_steps = points, thresholds, total_steps
        t, now = thresholds, points[-1]
        self.faint_rate = faint_rate(now, t)
        probed = [point for point in points[-USE_READINGS:] if point.use is not None]
        use, error = (probed[-1].use, probed[-1].use_error) if probed else (None, None)
        self.is_used = self.is_unused = False
        """Whether the decoder clearly uses the latent, or clearly does not; neither where that is not known."""
        has_information = math.isfinite(now.information)  # that of one posterior is none
        self.text = f"rate {now.rate:.2f}" + (f", mutual information {now.information:.2f}" if has_information else "")
        numbers = {"rate": now.rate, "mutual_information": now.information}
        if use is not None and error is not None and math.isfinite(use) and math.isfinite(error):
            near = t.no_use + t.no_use_errors * error
            self.is_used = use >= max(t.clear_use, t.clear_use_errors * error)
            # A decoder that does worse with its own latent uses it, too.
            self.is_unused = -near < use < min(t.clear_use, near)
            self.text += f", decoder use {use:.2f} ± {error:.2f}"
            numbers["decoder_use"] = use
        self.numbers = {name: float(f"{value:.3g}") for name, value in numbers.items() if math.isfinite(value)}

    def last(self, stretch: Stretch) -> list[Point]:
        """Return the last points, as many as the stretch has."""
        since = self.points[-1].step - stretch.share_of_run * (self.total_steps or 0)
        within = sum(point.step >= since for point in self.points)
        return self.points[-max(stretch.readings, within) :]

    def span(self, stretch: Stretch) -> int:
        """Return the length of a stretch in steps."""
        points = self.last(stretch)
        return points[-1].step - points[0].step

    def trend(self, name: Literal["rate", "information"], stretch: Stretch) -> Trend:
        """Return the trend of the points that have the number; the newest has."""
        points = [point for point in self.last(stretch) if not math.isnan(getattr(point, name))]
        every = -(-len(points) // MOST_IN_TREND)
        points = points[::-1][::every][::-1]
        return log_trend([point.step for point in points], [getattr(point, name) for point in points], NOISE)

    def grows(self, name: Literal["rate", "information"], growth: float, stretch: Stretch = RECENT) -> bool:
        """Whether the number became `growth` times as large."""
        trend = self.trend(name, stretch)
        return trend.slope * self.span(stretch) > math.log(growth) and trend.agreement >= self.thresholds.agreement


FULL_SHARE = 0.95
"""Share of the highest weight from which on the weight counts as full: the last twentieth changes a KL by no more than that."""
LOOKS = 1000
"""Steps at which a known schedule is evaluated, to find where it settles: a thousandth of the run is exact enough."""
STEADY_READINGS = 5
STEADY_SHARE = 0.005
"""A weight whose schedule is not known counts as rising while it grew by more than this share within STEADY_READINGS."""


class KLSchedule(NamedTuple):
    """What is known of the KL weight of a run before it starts."""

    total_steps: int | None = None
    """Optimizer steps of the run, where that is known."""
    weight_at: Callable[[int], float] | None = None
    """The weight in an optimizer step, counted from 0; None: not known beforehand. Called only when a run starts."""
    is_steered: bool = False
    """A controller moves the weight towards some KL: it is in force at all times, whatever its size."""

    def falls(self) -> bool:
        """Whether the weight is known to fall again after it was higher, as in cycles."""
        return any(later < earlier for (_, earlier), (_, later) in pairwise(self._steps_and_weights()))

    def full_from(self) -> int | None:
        """Return the step in which the weight gets to its height for the last time; None: not known beforehand."""
        weights = self._steps_and_weights()
        if not weights:
            return None
        full = FULL_SHARE * max(weight for _, weight in weights)
        arrivals = [step for (_, before), (step, weight) in pairwise(weights) if before < full <= weight]
        return max(arrivals, default=0)

    def _steps_and_weights(self) -> list[tuple[int, float]]:
        if not self.total_steps or self.weight_at is None:
            return []
        last = self.total_steps - 1
        steps = sorted({round(last * look / LOOKS) for look in range(LOOKS + 1)})
        return [(step, self.weight_at(step)) for step in steps]


def why_not_full(step: int, weights: Sequence[float | None], schedule: KLSchedule, full_from: int | None) -> str | None:
    """Return why the weight does not count as full, or None. `weights` are those of the readings so far."""
    weight = weights[-1]
    if schedule.is_steered:
        return None
    if full_from is not None:
        now = "" if weight is None else f"is {weight:.3g} and "
        return None if step > full_from else f"the KL weight {now}will be full from step {full_from:,}"
    if weight is None or not math.isfinite(weight):
        return None
    known = [one for one in weights if one is not None and math.isfinite(one)]
    highest = max(known)
    if weight < FULL_SHARE * highest:
        return f"the KL weight is {weight:.3g} and has been {highest:.3g}"
    before = known[-STEADY_READINGS - 1 : -1]
    rises_slowly = len(known) > STEADY_READINGS and sorted(known) == known and known[-2] < weight
    if before and (
        weight > (1 + STEADY_SHARE) * min(before) or (rises_slowly and weight > (1 + STEADY_SHARE) * known[0])
    ):
        return f"the KL weight is {weight:.3g} and still rising"
    return None
