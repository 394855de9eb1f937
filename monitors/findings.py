"""What readings look like at one moment: points in, a `Finding` out, with its evidence in words and numbers. No memory.

The rules in their order: NaN; a weight that is not full; too few readings; faint (collapsed, unless it grows); paid for and
unused (the decoder ignores z, unless that changes); next to points (not variational); falling (collapsing); dead dimensions
(partly collapsed); clear (healthy). What lies between is "cannot tell", with the reason.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .advice import REASONS
from .reading import Reading
from .thresholds import Thresholds
from .trend import Trend, log_trend
from .verdict import NO_NUMBERS, VerdictName

FEWEST = 3
"""Readings under the full weight that a finding takes."""
BEGINNING = 0.03
"""Share of a run in which everything moves: the learning rate rises, and the window of posteriors fills up."""


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
DEAD_MARGIN = 0.1
"""Share of dimensions that have to come back to life before a partly collapsed latent is none."""
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


class Finding(NamedTuple):
    """What the readings would be called if there were no others."""

    name: VerdictName
    evidence: str
    numbers: Mapping[str, float] = NO_NUMBERS
    dead_by_step: int | None = None
    is_early: bool = False
    """It is too early to say, whatever the decoder does."""


def point_of(reading: Reading, early: str | None, thresholds: Thresholds) -> Point:
    active = [
        variance
        for variance, moves in zip(reading.mean_of_variances, reading.variance_of_means, strict=True)
        if moves >= thresholds.dead_variance
    ]
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
        largest=max(reading.kl_per_dim),
        variance=math.exp(sum(logs) / len(logs)) if logs else math.nan,
        weight=reading.kl_weight,
        early=early,
    )


class Judged(NamedTuple):
    """The points under the full weight, newest last, and what the newest says."""

    points: list[Point]
    use: float | None
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
        return self.now.rate < self.faint_rate and (self.is_few or self.now.information < self.t.faint_information)

    @property
    def faint_rate(self) -> float:
        return self.t.faint_rate + self.t.restless_rate * self.now.dimensions

    @property
    def is_used(self) -> bool | None:
        if self.use is None:
            return None
        return self.use >= max(self.t.clear_use, self.t.clear_use_errors * self.use_error)

    @property
    def is_unused(self) -> bool | None:
        if self.use is None:
            return None
        return self.use < self.t.no_use + self.t.no_use_errors * self.use_error

    @property
    def numbers(self) -> dict[str, float]:
        told = {"rate": self.now.rate, "mutual_information": self.now.information, "decoder_use": self.use}
        return {name: float(f"{value:.3g}") for name, value in told.items() if value is not None}

    @property
    def said(self) -> str:
        use = "" if self.use is None else f", decoder use {self.use:.2f} ± {self.use_error:.2f}"
        return f"rate {self.now.rate:.2f}, mutual information {self.now.information:.2f}{use}"


def find(points: Sequence[Point], thresholds: Thresholds, total_steps: int | None, before: VerdictName) -> Finding:
    now = points[-1]
    if not is_finite(now):
        return Finding("diverged", REASONS["diverged"])
    if now.early:
        return Finding("warming_up", now.early, is_early=True)
    if total_steps is not None and now.step < BEGINNING * total_steps:
        return Finding("cannot_tell", f"the run has only begun: step {now.step:,} of {total_steps:,}", is_early=True)
    full = _trailing(points)
    if len(full) < FEWEST:
        return Finding("cannot_tell", f"{len(full)} readings under the full KL weight are too few", is_early=True)
    seen = _judged(full, thresholds, total_steps)
    if seen.is_faint:
        return _of_faint(seen)
    if seen.is_few:
        return _undecided(f"{now.posteriors} posteriors are too few", seen)
    if seen.is_unused:
        return _of_unused(seen)
    if seen.is_used or (seen.is_used is None and seen.now.information >= thresholds.clear_information):
        return _of_used(seen, before)
    return _undecided("neither clear nor gone", seen)


def is_finite(point: Point) -> bool:
    return math.isfinite(point.rate) and (point.posteriors < 2 or math.isfinite(point.information))


def _trailing(points: Sequence[Point]) -> list[Point]:
    full: list[Point] = []
    for point in reversed(points):
        if point.early or not is_finite(point):
            break
        full.append(point)
    return full[::-1]


def _judged(full: list[Point], thresholds: Thresholds, total_steps: int | None) -> Judged:
    asked = [point for point in full[-HEARD_READINGS:] if point.use is not None]
    use, error = (asked[-1].use, asked[-1].use_error) if asked else (None, None)
    if error is None or math.isnan(error):  # of one sequence
        use, error = None, math.nan
    return Judged(full, use, error, thresholds, total_steps)


def _of_faint(seen: Judged) -> Finding:
    if seen.is_used:
        return _undecided("next to no information, and yet it is used", seen)
    if _grows(seen, "rate", seen.t.growth):
        return _undecided("faint, but it grows", seen)
    if seen.now.largest >= seen.t.faint_dimension:
        return _undecided("faint, but one dimension stands out", seen)
    return _verdict("collapsed", seen)


def _of_unused(seen: Judged) -> Finding:
    if seen.now.rate < seen.t.paid_rate:
        return _undecided("little, and not used", seen)
    if _falls(seen, "rate", seen.faint_rate):
        return _undecided("not used, and the rate falls", seen)
    if _grows(seen, "information", 2 * seen.t.growth):
        return _undecided("not used so far, but the information grows", seen)
    return _verdict("decoder_ignores_z", seen)


def _of_used(seen: Judged, before: VerdictName) -> Finding:
    now = seen.now
    if now.variance < seen.t.narrow_variance:
        return _verdict("not_variational", seen)
    dead_by = _dead_by(seen)
    if dead_by is not None:
        return _verdict("collapsing", seen)._replace(dead_by_step=dead_by)
    dead = (now.dimensions - now.active) / now.dimensions
    if dead > seen.t.many_dead - (DEAD_MARGIN if before == "partly_collapsed" else 0):
        return _verdict("partly_collapsed", seen)
    return _verdict("healthy", seen)


def _dead_by(seen: Judged) -> int | None:
    """The step at which rate and information will be faint, if they fall as they do, within the run and soon."""
    rate, information = _trend(seen, "rate", LONG), _trend(seen, "information", LONG)
    if not (_leads_down(rate, seen) and _leads_down(information, seen)):
        return None
    if rate.level > seen.t.falling_share * max(point.rate for point in seen.points):
        return None
    steps = max(rate.steps_until(seen.faint_rate), information.steps_until(seen.t.faint_information))
    if steps > min(seen.steps_left, 2 * _span(seen, LONG)):
        return None
    if _trend(seen, "rate", RECENT).slope > seen.t.slowing_share * rate.slope:
        return None  # it settles
    return seen.now.step + math.ceil(steps)


def _undecided(why: str, seen: Judged) -> Finding:
    return Finding("cannot_tell", f"{why}: {seen.said}", seen.numbers)


def _verdict(name: VerdictName, seen: Judged) -> Finding:
    """With the reason and the numbers."""
    reason = f"{REASONS[name]}; " if name in REASONS else ""
    return Finding(name, f"{reason}{seen.said}", seen.numbers)


def _grows(seen: Judged, name: str, growth: float) -> bool:
    trend = _trend(seen, name, RECENT)
    grown = trend.slope * _span(seen, RECENT)
    return grown > math.log(growth) and trend.agreement >= seen.t.agreement


def _falls(seen: Judged, name: str, target: float) -> bool:
    """Whether it will soon be below."""
    trend = _trend(seen, name, LONG)
    return _leads_down(trend, seen) and trend.steps_until(target) <= 2 * _span(seen, LONG)


def _leads_down(trend: Trend, seen: Judged) -> bool:
    return trend.slope < 0 and trend.agreement >= seen.t.agreement


def _span(seen: Judged, stretch: Stretch) -> int:
    points = _back(seen, stretch)
    return points[-1].step - points[0].step


def _trend(seen: Judged, name: str, stretch: Stretch) -> Trend:
    points = _back(seen, stretch)
    every = -(-len(points) // MOST_IN_TREND)
    points = points[::-1][::every][::-1]
    return log_trend([point.step for point in points], [getattr(point, name) for point in points], NOISE)


def _back(seen: Judged, stretch: Stretch) -> list[Point]:
    """The last points, as many as the stretch asks for."""
    since = seen.now.step - stretch.share_of_run * (seen.total_steps or 0)
    within = sum(point.step >= since for point in seen.points)
    return seen.points[-max(stretch.readings, within) :]
