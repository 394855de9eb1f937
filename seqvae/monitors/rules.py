"""What readings look like at one moment: points, which are what is remembered of readings, in, a `Finding` out. No memory.

The rules stand in `find`, in their order: NaN (diverged); a weight that is not full (warming up, unless the latent is faint and the
weight can only become worse for it); nothing to judge yet; faint (collapsed, unless it grows); codes that are mostly dead (the
codebook collapsed, unless more and more are used); falling (collapsing); paid for and unused (the decoder ignores z, unless that
changes); used, or so clear that it may well be, and then nearly points (not variational), mostly dead dimensions (partly collapsed)
or none of these (healthy). What lies between is "cannot tell", with the reason. `escape_of` compares a weight with an escape
threshold. Plain Python: no torch, no clock, no files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal, NamedTuple

from seqvae.monitors.reading import Reading, Scope, describe_probe
from seqvae.text import percent
from seqvae.verdicts import USE_UNKNOWN_REASON, VERDICTS

# --- Where the lines are drawn ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The lines between verdicts, each with its reason. Nats are per posterior, those of decoder use per sequence.

    They were drawn on one half of the runs of `benchmarks/detection/collapse_zoo.py` and checked on the other. The defaults are
    meant for all models; a latent that should carry less than half a nat needs lower ones.
    """

    faint_rate: float = 0.3
    """A rate below this carries nothing worth a latent: the information is never more than the rate."""

    restless_rate: float = 0.001
    """Added to `faint_rate` for each dimension: training never leaves a dead one quite still."""

    faint_information: float = 0.2
    """A little above the noise that collapsed posteriors of a model in training show."""

    faint_dimension: float = 0.03
    """A dimension with this much KL is more than noise, and models that come to life late do so in one or two dimensions first."""

    growth: float = 1.25
    """A rate that grew by this factor lately is growing."""

    waking: float = 1.9
    """The same factor for the information of a model that begins to use a rate that it pays for, as it scatters more than the rate,
    and for a rate below a twentieth of a nat, where readings scatter as much."""

    clear_information: float = 0.5
    """From here on the latent tells things apart. Counts where decoder use cannot be read, or is neither clear nor gone."""

    clear_use: float = 0.5
    """From this decoder use on the decoder uses z, if it is also `clear_use_errors` standard errors away from 0."""

    clear_use_errors: float = 3.0

    no_use: float = 0.1
    """Below this, or within `no_use_errors` standard errors above it, the decoder may as well not use z at all."""

    no_use_errors: float = 2.0
    """The same number of errors above the reading has to stay below `clear_use`: what may be a use is none that is gone."""

    chance_wins: float = 1.0
    """Standard errors from one half within which the share of comparisons that the own z wins is chance. It takes the place of the
    upper bound where a few sequences make the errors of the mean large."""

    paid_rate: float = 0.5
    """A rate of this much that is not used is held up by something: free bits, normalised means, a fixed variance."""

    dead_variance: float = 0.01
    """A dimension whose mean varies less is dead (Burda et al. 2016)."""

    many_dead: float = 0.5
    """Share of dead dimensions from which a latent is called partly collapsed."""

    narrow_variance: float = 0.02
    """A geometric mean of the active dimensions' variances below this is nearly a point, no distribution: more than two nats in
    each dimension. That alone is no fault, as a latent that tells much is precise; hence the next three."""

    light_weight: float = 0.5
    """Under a KL weight of this or more, the rate is paid for at something like its price, however narrow the posteriors are."""

    worth_use: float = 2.0
    """A decoder use of this many times the rate says that the latent gains more than it costs: another sequence's z costs about
    twice as much as a decoder that knows of none."""

    worth_misled_use: float = 10.0
    """The same for a decoder that sees earlier steps, too, where a small weight alone made the posteriors narrow: another
    sequence's z misleads it by more. Six runs that were 15 to 70 nats worse than without a latent read 0.4 to 8 times the rate,
    three that were not worse 11 to 74 times."""

    falling_share: float = 0.6
    """A rate that fell to less than this share of what it was is falling, if the information was clear then: before a model has
    learned anything, its rate always falls."""

    slowing_share: float = 0.6
    """A fall that has slowed down to less than this share of its slope will settle."""

    many_dead_codes: float = 0.5
    """Share of the codes that should have been met, as often as latents were counted, from which on those that were not are too
    many."""

    agreement: float = 0.5
    """How much the readings have to agree on a trend: the share of pairs that go one way less those that go the other."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


OF_SEQUENCES = Thresholds()
OF_STEPS = Thresholds(
    faint_rate=0.03,
    restless_rate=0.0001,
    faint_dimension=0.003,
    faint_information=0.1,
    clear_information=0.2,
    paid_rate=0.05,
)
"""Where steps have posteriors of their own: the rate of one is a tenth of a sequence's, or less, and its information less than
half. Decoder use is per sequence either way."""

BEGINNING, LONGEST_BEGINNING = 0.03, 500
"""Share of a run, and steps at most, in which everything moves: the learning rate rises, and the window of posteriors fills up."""
BEGINNING_STEPS = 50
"""The same where the length of the run is not known."""
FEWEST = 3
"""Readings under the full weight that a finding takes; readings in a row that were faint, of a latent that is."""
DEAD_MARGIN = 0.1
"""Share of dimensions that have to come back to life before a partly collapsed latent is none."""
LEAST_POSTERIORS = 8
"""Below, the information is capped at two nats or less, and whether means move cannot be known. That the rate is gone can still
be seen."""
USE_READINGS = 12
"""Readings after which a decoder use is too old to count."""
CLOSE_READINGS = 5
"""Readings for which a close look counts more than quick ones that decide nothing."""
RANKED_SEQUENCES = 48
"""Fewest sequences whose share of wins says anything: that of 32 has an error of 0.09."""


# --- Points -------------------------------------------------------------------------------------------------------------


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
    use_sequences: int | None = None
    """Sequences that the use was read on, and their steps."""
    use_steps: int | None = None
    peak_information: float = 0.0
    """The highest information under the full weight so far."""
    is_binding: bool = True
    """Whether a latent that is faint under this weight will be no better under those to come."""
    lowest_ahead: float | None = None
    """The lowest KL weight from here on, and the highest; None: not known."""
    highest_ahead: float | None = None
    use_wins: float | None = None
    """Share of the comparisons that the own z won."""
    threshold: float | None = None
    """The escape threshold, its standard error, and what it could be at best; None: not read."""
    threshold_error: float | None = None
    ideal_threshold: float | None = None
    scope: Scope = "sequence"
    """What has a posterior."""
    codes_in_use: float | None = None
    """Share of the codes, and what it would be if all were equally likely; None: latents are no codes."""
    codes_in_use_expected: float | None = None
    codes: int | None = None
    """Of a codebook."""
    perplexity: float | None = None

    @property
    def codes_met(self) -> float:
        """Return the share of the codes in use of those that should be; 1 where latents are no codes."""
        if self.codes_in_use is None or not self.codes_in_use_expected:
            return 1.0
        return self.codes_in_use / self.codes_in_use_expected

    @property
    def has_information(self) -> bool:
        """Whether the information is what it should be: one posterior has none, and variances of e^-709 are too small for it."""
        return self.posteriors < 2 or math.isfinite(self.information)


def point_of(reading: Reading, early: str | None, thresholds: Thresholds, before: Point | None = None) -> Point:
    """Return what there is to remember of a reading; `early` says why its KL weight is not full, `before` is the point before.

    What the weights ahead are is left to the caller.
    """
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
        largest=max(reading.kl_per_dim, default=0.0),
        variance=math.exp(sum(logs) / len(logs)) if logs else math.nan,
        weight=reading.kl_weight,
        early=early,
        peak=max(
            reading.rate if math.isfinite(reading.rate) else 0.0,
            0.0 if before is None or before.early else before.peak,
        ),
        use_sequences=reading.decoder_use_sequences,
        use_steps=reading.decoder_use_steps,
        peak_information=max(
            reading.mutual_information if math.isfinite(reading.mutual_information) else 0.0,
            0.0 if before is None or before.early else before.peak_information,
        ),
        use_wins=reading.decoder_use_wins,
        threshold=reading.escape_threshold,
        threshold_error=reading.escape_threshold_error,
        ideal_threshold=reading.ideal_escape_threshold,
        scope=reading.scope,
        codes_in_use=reading.codes_in_use,
        codes_in_use_expected=reading.codes_in_use_expected,
        codes=reading.codebook_size,
        perplexity=reading.code_perplexity,
    )


def faint_rate(point: Point, thresholds: Thresholds) -> float:
    """Return the rate below which a latent of so many dimensions is faint."""
    return thresholds.faint_rate + thresholds.restless_rate * point.dimensions


def is_faint(point: Point, thresholds: Thresholds) -> bool:
    """Return whether a point carries nothing worth a latent."""
    is_few = point.posteriors < LEAST_POSTERIORS
    return point.rate < faint_rate(point, thresholds) and (is_few or point.information < thresholds.faint_information)


def use_of(point: Point, thresholds: Thresholds) -> Literal["used", "unused", "open"]:
    """Return whether the decoder clearly uses the latent, or clearly does not, by the point's decoder use."""
    t, use, error = thresholds, point.use, point.use_error
    if use is None or error is None or not (math.isfinite(use) and math.isfinite(error)):
        return "open"
    wins_above_chance = 0.0
    """In standard errors."""
    is_ranked = point.use_wins is not None and (point.use_sequences or 0) >= RANKED_SEQUENCES
    if is_ranked and point.use_wins is not None and point.use_sequences is not None:
        wins_above_chance = (point.use_wins - 0.5) / (0.5 / math.sqrt(point.use_sequences))
    if use >= t.clear_use and (use >= t.clear_use_errors * error or wins_above_chance >= t.clear_use_errors):
        return "used"
    near = t.no_use + t.no_use_errors * error
    is_bounded = use + t.no_use_errors * error < t.clear_use
    is_chance = is_ranked and abs(wins_above_chance) <= t.chance_wins
    # A decoder that does worse with its own latent uses it, too.
    return "unused" if -near < use < near and (is_bounded or is_chance) else "open"


def variance_at_full_weight(point: Point) -> float:
    """Return about what the variance of the active dimensions would be under a KL weight of 1.

    A posterior's precision is that of the prior and what the decoder asks for, divided by the weight.

    >>> point = Point(9, 30.0, 6.0, 64, None, None, 4, 4, 9.0, 0.001, 0.001, None, 30.0)
    >>> round(variance_at_full_weight(point), 3), variance_at_full_weight(point._replace(weight=None))
    (0.5, 0.001)
    """
    if point.weight is None or not math.isfinite(point.weight):
        return point.variance
    return point.variance / (point.variance + point.weight * (1 - point.variance))


def _posteriors_of_sequence(point: Point, probed: Point) -> float:
    """Return how many posteriors a sequence has: one, or one at each step."""
    if point.scope == "sequence" or not probed.use_sequences or probed.use_steps is None:
        return 1.0
    return probed.use_steps / probed.use_sequences


Escape = Literal["dead", "asleep", "open"]
ASLEEP_ERRORS = 2.0
"""Standard errors by which a threshold must lie above the weight for a silent latent to be asleep."""
DEAD_ERRORS = 1.0
"""The same for one that lies below the weight. It takes two such readings, so that one is enough of each: of 30 dead runs 27 read a
threshold below the weight twice, of 25 that woke none."""


def escape_of(point: Point, *, dead_errors: float = DEAD_ERRORS, asleep_errors: float = ASLEEP_ERRORS) -> Escape | None:
    """Return whether a silent latent can leave its silence under the weights ahead; None: the threshold was not read.

    It is dead where even the lowest weight to come is above the threshold, and asleep where the highest is below. "open" is what
    lies between, or could not be estimated.

    >>> point = Point(9, 0.0, 0.0, 64, None, None, 0, 4, 0.0, math.nan, 1.0, None, 0.0, lowest_ahead=1.0, highest_ahead=1.0)
    >>> escape_of(point), *[escape_of(point._replace(threshold=t, threshold_error=0.1)) for t in (0.5, 1.0, 1.5, math.nan)]
    (None, 'dead', 'open', 'asleep', 'open')
    """
    threshold, error = point.threshold, point.threshold_error
    if threshold is None:
        return None
    if error is None or not (math.isfinite(threshold) and math.isfinite(error)):
        return "open"
    if point.lowest_ahead is not None and point.lowest_ahead > threshold + dead_errors * error:
        return "dead"
    is_asleep = point.highest_ahead is not None and point.highest_ahead < threshold - asleep_errors * error
    return "asleep" if is_asleep else "open"


# --- What points say together -------------------------------------------------------------------------------------------


LARGEST_LOG = 700.0
"""A diverging run may lead to more than a float holds, or to less."""
MOST_IN_TREND = 16
"""Points of a trend, evenly taken: its cost grows with their square."""
NOISE = 0.05
"""Rates and informations below go up and down by themselves, and their logarithms are no trend."""
FEWEST_CODES = 0.001
"""The same for shares of the codes in use, which do not scatter."""
QUIET_NOISE = 0.02
"""The same for a growth of `Thresholds.waking`, which noise seldom reaches: 0.02 to 0.09 is how a latent begins to wake."""


class Stretch(NamedTuple):
    """How far a trend looks back: over n readings and, where a run's length is known, at least this share of it."""

    readings: int
    share_of_run: float


RECENT = Stretch(4, 0.03)
"""What has just begun."""
MIDDLE = Stretch(6, 0.1)
"""What falls or wakes. Of twice that, a run that fell from a rate of 1.30 to 0.16 in 150 of 800 steps showed no trend in time."""
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


def log_trend(steps: Sequence[int], values: Sequence[float], floor: float = NOISE) -> Trend:
    """Fit a line through the logarithms that no single outlier moves: the median of the slopes of all pairs (Theil and Sen).

    Values below `floor`, where noise rules, count as `floor`. Steps rise; one value at least, and none is NaN.

    >>> trend = log_trend([0, 10, 20, 30], [8.0, 4.0, 2.0, 1.0])
    >>> round(trend.level, 6), round(trend.steps_until(0.25)), trend.agreement
    (1.0, 20, 1.0)
    """
    logs = [math.log(max(value, floor)) for value in values]
    if len(logs) < 2:
        return Trend(0.0, math.exp(logs[-1]), 0.0)
    pairs = combinations(zip(steps, logs, strict=True), 2)
    slopes = [(later - earlier) / (end - start) for (start, earlier), (end, later) in pairs]
    slope = median(slopes)
    level = median(log + slope * (steps[-1] - step) for step, log in zip(steps, logs, strict=True))
    level = math.exp(max(-LARGEST_LOG, min(level, LARGEST_LOG)))
    same_way = sum((one > 0) - (one < 0) for one in slopes) / len(slopes)
    return Trend(slope, level, abs(same_way) if same_way * slope >= 0 else 0.0)


class Evidence:
    """What points under the full KL weight, newest last, say together."""

    def __init__(
        self, points: list[Point], thresholds: Thresholds, total_steps: int | None, sees_inputs: bool | None = None
    ) -> None:
        self.points, self.thresholds, self.total_steps = points, thresholds, total_steps
        t, now = thresholds, points[-1]
        probed = [point for point in points[-USE_READINGS:] if point.use is not None]
        point = probed[-1] if probed else None
        if point is not None and use_of(point, t) == "open":
            # A quick look that decides nothing leaves the word to a close one of late.
            for closer in reversed(points[-CLOSE_READINGS:]):
                is_closer = closer.use is not None and (closer.use_sequences or 0) > (point.use_sequences or 0)
                if is_closer and use_of(closer, t) != "open":
                    point = closer
                    break
        found = "open" if point is None else use_of(point, t)
        self.is_used, self.is_unused = found == "used", found == "unused"
        """Whether the decoder clearly uses the latent, or clearly does not; neither where that is not known."""
        self.is_use_open = point is not None and found == "open"
        """Whether it was probed, and that did not decide it."""
        self.is_unused_for_certain = False
        """Whether even the upper bound of the use is none."""
        self.is_worth_it = False
        """Whether the decoder uses it so much that it gains more than its rate."""
        self.text = f"rate {now.rate:.2f}"
        numbers = {"rate": now.rate}
        if math.isfinite(now.information):  # that of one posterior is none
            self.text += f", mutual information {now.information:.2f}"
            numbers["mutual_information"] = now.information
        use, error = (None, None) if point is None else (point.use, point.use_error)
        if point is not None and use is not None and error is not None and math.isfinite(use) and math.isfinite(error):
            rate = now.rate * _posteriors_of_sequence(now, point)
            self.is_unused_for_certain = abs(use) + t.no_use_errors * error < t.no_use
            is_misled = sees_inputs and variance_at_full_weight(now) >= t.narrow_variance
            worth = t.worth_misled_use if is_misled else t.worth_use
            self.is_worth_it = use - t.no_use_errors * error > worth * rate
            probed_on = describe_probe(point.use_sequences, point.use_steps)
            self.text += f", decoder use {use:.2f} ± {error:.2f}{probed_on}"
            numbers["decoder_use"] = use
        if now.codes_in_use is not None and now.codes is not None and now.perplexity is not None:
            self.text += f", {percent(now.codes_in_use)} of {now.codes:,} codes in use, perplexity {now.perplexity:.0f}"
            numbers |= {"codes_in_use": now.codes_in_use, "code_perplexity": now.perplexity}
        self.numbers = {name: float(f"{value:.3g}") for name, value in numbers.items()}

    def last(self, stretch: Stretch) -> tuple[list[Point], int]:
        """Return the last points, as many as the stretch has, and the steps that they span."""
        since = self.points[-1].step - stretch.share_of_run * (self.total_steps or 0)
        within = sum(point.step >= since for point in self.points)
        points = self.points[-max(stretch.readings, within) :]
        return points, points[-1].step - points[0].step

    def trend(self, name: Literal["rate", "information", "codes_met"], stretch: Stretch, floor: float = NOISE) -> Trend:
        """Return the trend of the points that have the number; the newest has."""
        points = [point for point in self.last(stretch)[0] if not math.isnan(getattr(point, name))]
        every = -(-len(points) // MOST_IN_TREND)
        points = points[::-1][::every][::-1]
        return log_trend([point.step for point in points], [getattr(point, name) for point in points], floor)

    def grows(
        self,
        name: Literal["rate", "information", "codes_met"],
        growth: float,
        stretch: Stretch = RECENT,
        floor: float = NOISE,
    ) -> bool:
        """Return whether the number became `growth` times as large, and the readings agree on that."""
        trend, (_, span) = self.trend(name, stretch, floor), self.last(stretch)
        return trend.slope * span > math.log(growth) and trend.agreement >= self.thresholds.agreement

    def falls(self, trend: Trend) -> bool:
        """Return whether a trend leads down, and the readings agree on that."""
        return trend.slope < 0 and trend.agreement >= self.thresholds.agreement

    def settles(self, rate: Trend) -> bool:
        """Return whether the rate, which fell along a trend, has slowed down of late."""
        return self.trend("rate", RECENT).slope > self.thresholds.slowing_share * rate.slope


# --- Rules --------------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """What the readings would be called if there were no others."""

    name: str
    """A verdict's."""
    reason: str
    details: str = ""
    """The numbers that it rests on, in words."""
    numbers: Mapping[str, float] = {}
    dead_by_step: int | None = None
    contradicts: bool = False
    """Whether it contradicts the decoder use that was last read."""
    decoder_matters: bool = True
    """Whether reading decoder use could change it."""
    grows: bool = False
    """Whether it is a silence that may be about to end."""
    is_use_open: bool = False
    """Whether decoder use was read, and did not decide whether the latent is used."""

    @property
    def evidence(self) -> str:
        return f"{self.reason}; {self.details}" if self.details else self.reason


def find(
    points: Sequence[Point],
    thresholds: Thresholds,
    total_steps: int | None,
    before: str,
    sees_inputs: bool | None = None,
) -> Finding:
    """Return what the points look like; `before` is the verdict in force. `sees_inputs`: the decoder gets earlier steps beside the
    latent; None: not known."""
    finding = _find(points, thresholds, total_steps, before, sees_inputs)
    if finding.name == "cannot_tell" and (early := points[-1].early):
        return finding._replace(name="warming_up", reason=early, details="")
    return finding


def _find(
    points: Sequence[Point], thresholds: Thresholds, total_steps: int | None, before: str, sees_inputs: bool | None
) -> Finding:
    """Go through the rules in their order."""
    now, t = points[-1], thresholds
    if now.posteriors and not math.isfinite(now.rate):
        return Finding("diverged", VERDICTS["diverged"].reason, decoder_matters=False)
    is_silent = is_faint(now, t)
    if now.early and not (is_silent and now.is_binding):
        return Finding("warming_up", now.early, decoder_matters=False)
    judged: list[Point] = []
    """Under the full weight, or, of a silent latent, under any weight while it was silent."""
    for point in reversed(points):
        is_comparable = not point.early or (is_silent and is_faint(point, t))
        if not (is_comparable and point.posteriors and math.isfinite(point.rate) and point.has_information):
            break
        judged.insert(0, point)
    why = None
    if not (now.posteriors and now.dimensions):
        why = "there were no posteriors to read"
    elif not now.has_information:
        why = f"the mutual information is beyond what can be computed (rate {now.rate:.4g})"
    elif total_steps is None and now.step < BEGINNING_STEPS:
        why = f"the run has only begun: step {now.step:,}"
    elif total_steps is not None and now.step < min(BEGINNING * total_steps, LONGEST_BEGINNING):
        why = f"the run has only begun: step {now.step:,} of {total_steps:,}"
    elif len(judged) < FEWEST:
        why = f"too few readings under the full KL weight so far ({len(judged)})"
    if why:
        return Finding("cannot_tell", why, decoder_matters=False)

    seen = Evidence(judged, t, total_steps, sees_inputs)
    if is_silent:
        if seen.is_used:
            return _undecided("almost no information, and yet it is used", seen)._replace(contradicts=True)
        if seen.grows("rate", t.growth) or seen.grows("rate", t.waking, MIDDLE, QUIET_NOISE):
            return _undecided("faint, but it grows", seen)._replace(grows=True)
        last, span = seen.last(LONG)
        has_long_been_faint = (
            len(judged) >= LONG.readings
            and span >= 0.9 * LONG.share_of_run * (total_steps or 0)
            and all(is_faint(point, t) for point in last)
        )
        is_going = seen.falls(seen.trend("rate", MIDDLE, QUIET_NOISE * t.faint_rate))
        if now.largest >= t.faint_dimension and not (has_long_been_faint or is_going):
            return _undecided("faint, but one dimension stands out", seen)
        return _found("collapsed", seen)
    if now.posteriors < LEAST_POSTERIORS:
        return _undecided(f"too few posteriors ({now.posteriors})", seen)
    if now.codes_met < 1 - t.many_dead_codes:
        if seen.grows("codes_met", t.growth, MIDDLE, FEWEST_CODES):
            return _undecided("few codes are in use, but more and more", seen)
        return _found("codebook_collapsed", seen)
    if (dead_by := _dead_by(seen)) is not None:
        return _found("collapsing", seen)._replace(dead_by_step=dead_by)
    if seen.is_unused:
        recent, _ = seen.last(RECENT)  # rates that free bits hold near the line go to and fro
        is_paid = seen.is_unused_for_certain or median(point.rate for point in recent) >= t.paid_rate
        if not is_paid and now.information >= t.faint_information:
            return _undecided("a small rate, and not used", seen)
        rate, (_, span) = seen.trend("rate", LONG), seen.last(LONG)
        if seen.falls(rate) and rate.steps_until(faint_rate(now, t)) <= 2 * span and not seen.settles(rate):
            return _undecided("not used, and the rate falls", seen)
        if not is_paid and seen.grows("rate", t.growth):
            return _undecided("a small rate that is not used, but grows", seen)
        if seen.grows("information", t.waking) or seen.grows("information", 1.3 * t.waking, LONG):
            return _undecided("not used so far, but the information grows", seen)
        return _found("decoder_ignores_z", seen)
    if not (seen.is_used or now.information >= t.clear_information):
        return _undecided("neither clearly there nor gone", seen)
    is_light = now.weight is None or not math.isfinite(now.weight) or now.weight < t.light_weight
    if now.variance < t.narrow_variance and is_light and not seen.is_worth_it:
        return _found("not_variational", seen)
    dead = 0.0 if now.codes is not None else (now.dimensions - now.active) / now.dimensions
    if dead > t.many_dead - (DEAD_MARGIN if before == "partly_collapsed" else 0):
        return _found("partly_collapsed", seen)
    return _found("healthy", seen)


def _dead_by(seen: Evidence) -> int | None:
    """Return the step at which rate and information will be faint, if they fall as they do, within the run and soon."""
    now, t = seen.points[-1], seen.thresholds
    if now.peak_information < t.clear_information:
        return None  # there was nothing to lose
    rate, information = seen.trend("rate", MIDDLE), seen.trend("information", MIDDLE)
    if not (seen.falls(rate) and seen.falls(information)) or rate.level > t.falling_share * now.peak:
        return None
    steps = max(rate.steps_until(faint_rate(now, t)), information.steps_until(t.faint_information))
    steps_left = math.inf if seen.total_steps is None else seen.total_steps - now.step
    if steps > min(steps_left, 2 * seen.last(LONG)[1]):
        return None
    if seen.settles(rate):
        return None
    return now.step + math.ceil(steps)


def _undecided(why: str, seen: Evidence) -> Finding:
    return Finding("cannot_tell", f"{why}: {seen.text}", numbers=seen.numbers, is_use_open=seen.is_use_open)


def _found(name: str, seen: Evidence) -> Finding:
    reason = USE_UNKNOWN_REASON if name == "healthy" and not seen.is_used else VERDICTS[name].reason
    return Finding(name, reason, seen.text, seen.numbers, is_use_open=seen.is_use_open)
