"""What readings look like at one moment: points, which are what is remembered of readings, in, a `Finding` out. No memory.

The rules in their order: NaN (diverged); a weight that is not full (warming up); nothing to judge yet; faint (collapsed, unless
it grows); paid for and unused (the decoder ignores z, unless that changes); used, or so clear that it may well be, and then nearly
points (not variational), falling (collapsing), mostly dead dimensions (partly collapsed) or none of these (healthy). What lies
between is "cannot tell", with the reason.

The names of the verdicts and the `Verdict` itself stand here, too: plain Python, so that no torch is needed to show or store one.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Literal, NamedTuple

from seqvae.monitors.detection.thresholds import Thresholds
from seqvae.monitors.reading import Reading

VerdictName = Literal[
    "healthy",
    "warming_up",
    "collapsing",
    "collapsed",
    "decoder_ignores_z",
    "partly_collapsed",
    "not_variational",
    "diverged",
    "cannot_tell",
]

ALARMS: frozenset[VerdictName] = frozenset(
    ("collapsing", "collapsed", "decoder_ignores_z", "not_variational", "diverged")
)
"""Verdicts that need attention. Partly collapsed is often as it should be."""

COLLAPSES: frozenset[VerdictName] = frozenset(("collapsed", "decoder_ignores_z"))
"""The latent carries nothing that is used, whether or not a remedy keeps the rate up."""

UNHARMED: frozenset[VerdictName] = frozenset(("healthy", "partly_collapsed"))
"""Verdicts whose checkpoints are worth going back to."""

NO_NUMBERS: Mapping[str, float] = {}

REASONS: dict[VerdictName, str] = {
    "healthy": "the latent carries something and the decoder uses it",
    "collapsing": "the latent is losing what it carries, and a rescue is cheap now",
    "collapsed": "the decoder models the data without the latent",
    "decoder_ignores_z": "the rate is paid and not used: something holds it up (free bits, normalised means, a fixed variance) and "
    "hides a collapse",
    "partly_collapsed": "most dimensions are dead and the rest carry everything, which is often as it should be",
    "not_variational": "the posteriors are nearly points, so samples from the prior are unlike all that the decoder was trained on",
    "diverged": "the posteriors hold NaN or infinity",
}
USE_UNKNOWN = "the latent carries something, but whether the decoder uses it is not certain"
"""The reason for healthy where decoder use was not probed, or is not clear."""

BEGINNING, LONGEST_BEGINNING = 0.03, 500
"""Share of a run, and steps at most, in which everything moves: the learning rate rises, and the window of posteriors fills up."""
BEGINNING_STEPS = 50
"""The same where the length of the run is not known."""
FEWEST = 3
"""Readings under the full weight that a finding takes."""
DEAD_MARGIN = 0.1
"""Share of dimensions that have to come back to life before a partly collapsed latent is none."""


class Verdict(NamedTuple):
    """The judgement in force, from a reading on until the evidence says otherwise."""

    name: VerdictName
    since_step: int
    """The step of the first reading that it was in force after."""
    evidence: str
    """One sentence, with the numbers."""
    advice: tuple[str, ...] = ()
    """What to try, the most promising first: a flag, and in brackets what it does."""
    numbers: Mapping[str, float] = NO_NUMBERS
    """What the evidence rests on, by the names of `Reading`."""
    dead_by_step: int | None = None
    """For a run that is collapsing: when nothing will be left if nothing changes."""


def line_of(verdict: Verdict, before: VerdictName | None, step: int) -> str:
    """Describe a change of verdict in one line.

    >>> line_of(Verdict("collapsing", 90, "the rate fell from 4 to 1", ("--free_bits 0.25 (why)",), {}, 300), "healthy", 90)
    'step 90: collapsing, dead by step 300 (was healthy): the rate fell from 4 to 1. Try --free_bits 0.25'
    """
    dead_by = "" if verdict.dead_by_step is None else f", dead by step {verdict.dead_by_step:,}"
    was = "" if before is None else f" (was {spoken(before)})"
    flags = [one.partition(" (")[0] for one in verdict.advice]
    advice = f". Try {' or '.join(flags)}" if flags else ""
    return f"step {step:,}: {spoken(verdict.name)}{dead_by}{was}: {verdict.evidence}{advice}"


def spoken(name: VerdictName) -> str:
    """
    >>> spoken("decoder_ignores_z")
    'decoder ignores z'
    """
    return name.replace("_", " ")


# --- Points and what they say together ------------------------------------------------------------

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


# --- Rules ------------------------------------------------------------


class Finding(NamedTuple):
    """What the readings would be called if there were no others."""

    name: VerdictName
    evidence: str
    numbers: Mapping[str, float] = NO_NUMBERS
    dead_by_step: int | None = None
    contradicts: bool = False
    """Whether it contradicts the decoder use that was last read."""
    decoder_matters: bool = True
    """Whether reading decoder use could change it."""


def find(points: Sequence[Point], thresholds: Thresholds, total_steps: int | None, before: VerdictName) -> Finding:
    """Go through the rules in their order; `before` is the verdict in force."""
    now, t = points[-1], thresholds
    if now.posteriors and not math.isfinite(now.rate):
        return Finding("diverged", REASONS["diverged"], decoder_matters=False)
    if now.early:
        return Finding("warming_up", now.early, decoder_matters=False)
    judged: list[Point] = []
    for point in reversed(points):
        if point.early or not (point.posteriors and math.isfinite(point.rate) and tells_information(point)):
            break
        judged.insert(0, point)
    why = None
    if not (now.posteriors and now.dimensions):
        why = "there were no posteriors to read"
    elif not tells_information(now):
        why = f"the mutual information is beyond what can be computed (rate {now.rate:.4g})"
    elif total_steps is None and now.step < BEGINNING_STEPS:
        why = f"the run has only begun: step {now.step:,}"
    elif total_steps is not None and now.step < min(BEGINNING * total_steps, LONGEST_BEGINNING):
        why = f"the run has only begun: step {now.step:,} of {total_steps:,}"
    elif len(judged) < FEWEST:
        why = f"too few readings under the full KL weight so far ({len(judged)})"
    if why:
        return Finding("cannot_tell", why, decoder_matters=False)
    seen = Evidence(judged, t, total_steps)
    if is_faint(now, t):
        if seen.is_used:
            return _undecided("almost no information, and yet it is used", seen)._replace(contradicts=True)
        if seen.grows("rate", t.growth):
            return _undecided("faint, but it grows", seen)
        has_long_been_faint = (
            len(judged) >= LONG.readings
            and seen.span(LONG) >= 0.9 * LONG.share_of_run * (total_steps or 0)
            and all(is_faint(point, t) for point in seen.last(LONG))
        )
        if now.largest >= t.faint_dimension and not has_long_been_faint:
            return _undecided("faint, but one dimension stands out", seen)
        return _verdict("collapsed", seen)
    if now.posteriors < LEAST_POSTERIORS:
        return _undecided(f"too few posteriors ({now.posteriors})", seen)
    if seen.is_unused:
        if now.rate < t.paid_rate:
            return _undecided("a small rate, and not used", seen)
        rate = seen.trend("rate", LONG)
        if rate.falls(t.agreement) and rate.steps_until(seen.faint_rate) <= 2 * seen.span(LONG):
            return _undecided("not used, and the rate falls", seen)
        if seen.grows("information", t.waking) or seen.grows("information", 1.3 * t.waking, LONG):
            return _undecided("not used so far, but the information grows", seen)
        return _verdict("decoder_ignores_z", seen)
    if not (seen.is_used or now.information >= t.clear_information):
        return _undecided("neither clearly there nor gone", seen)
    if now.variance < t.narrow_variance:
        return _verdict("not_variational", seen)
    dead_by = _dead_by(seen)
    if dead_by is not None:
        return _verdict("collapsing", seen)._replace(dead_by_step=dead_by)
    dead = (now.dimensions - now.active) / now.dimensions
    if dead > t.many_dead - (DEAD_MARGIN if before == "partly_collapsed" else 0):
        return _verdict("partly_collapsed", seen)
    return _verdict("healthy", seen)


def _dead_by(seen: Evidence) -> int | None:
    """Return the step at which rate and information will be faint, if they fall as they do, within the run and soon."""
    now, t = seen.points[-1], seen.thresholds
    rate, information = seen.trend("rate", LONG), seen.trend("information", LONG)
    if not (rate.falls(t.agreement) and information.falls(t.agreement)):
        return None
    if rate.level > t.falling_share * now.peak:
        return None
    steps = max(rate.steps_until(seen.faint_rate), information.steps_until(t.faint_information))
    steps_left = math.inf if seen.total_steps is None else seen.total_steps - now.step
    if steps > min(steps_left, 2 * seen.span(LONG)):
        return None
    if seen.trend("rate", RECENT).slope > t.slowing_share * rate.slope:
        return None  # it settles
    return now.step + math.ceil(steps)


def _undecided(why: str, seen: Evidence) -> Finding:
    return Finding("cannot_tell", f"{why}: {seen.text}", seen.numbers)


def _verdict(name: VerdictName, seen: Evidence) -> Finding:
    reason = USE_UNKNOWN if name == "healthy" and not seen.is_used else REASONS[name]
    return Finding(name, f"{reason}; {seen.text}", seen.numbers)
