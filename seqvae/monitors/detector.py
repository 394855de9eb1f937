"""The detector: readings one by one in, the verdict in force out. Plain Python on numbers; no torch, no clock, no files.

It waits until the KL weight is full, or until a silent latent has nothing to hope for from the weights to come, tells faint
readings that fall or stay from those that grow, and changes its mind only when the readings have pointed elsewhere for a while.
Where the escape threshold can be read, two readings of it tell a dead latent from one that is asleep. `rules.py` judges readings
at one moment; this module adds memory. The same readings give the same verdicts, also across a checkpoint.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from seqvae.monitors.reading import Reading, Scope
from seqvae.monitors.rules import (
    CLOSE_READINGS,
    DEAD_ERRORS,
    FEWEST,
    LONG,
    OF_SEQUENCES,
    OF_STEPS,
    Escape,
    Finding,
    Point,
    Thresholds,
    escape_of,
    find,
    is_faint,
    point_of,
)
from seqvae.verdicts import LEAST_TRAINED, VERDICTS, Circumstances, Verdict, advice_on, readable, why_paid

# --- The KL weight ------------------------------------------------------------------------------------------------------

FULL_SHARE = 0.95
"""Share of the highest weight from which on the weight counts as full: the last twentieth changes a KL by no more than that."""
LOOKS = 1000
"""Steps at which a known schedule is evaluated, to find where it settles: a thousandth of the run is exact enough."""
BINDING_WEIGHT = 0.5
"""A rising weight from which on a silent latent counts, as more weight only makes it worse; half of the highest one where that is
below 1. A constant weight of this much would count as well."""
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

    def full_from(self) -> int | None:
        """Return the step in which the weight gets to its height for the last time; None: not known beforehand."""
        if not (weights := self.steps_and_weights()):
            return None
        full = FULL_SHARE * max(weight for _, weight in weights)
        arrivals = [step for (_, before), (step, weight) in pairwise(weights) if before < full <= weight]
        return max(arrivals, default=0)

    def outlook(self) -> list[tuple[int, float, float, float]]:
        """Return (step, weight, lowest weight from it on, highest) in order; empty where that is not known beforehand."""
        if not (weights := self.steps_and_weights()):
            return []
        steps, values = zip(*weights[::-1], strict=True)
        rows = zip(steps, values, accumulate(values, min), accumulate(values, max), strict=True)
        return list(rows)[::-1]

    def steps_and_weights(self) -> list[tuple[int, float]]:
        """Evaluate the schedule; empty where it is not known beforehand."""
        if not self.total_steps or self.weight_at is None:
            return []
        last = self.total_steps - 1
        steps = sorted({round(last * look / LOOKS) for look in range(LOOKS + 1)})
        return [(step, self.weight_at(step)) for step in steps]


def why_not_full(step: int, weights: Sequence[float | None], schedule: KLSchedule, full_from: int | None) -> str | None:
    """Return why the weight does not count as full, or None. `weights` are those of the readings so far."""
    weight = weights[-1]
    if schedule.is_steered:  # by a controller whose weight is never 0
        return "the KL has no weight yet" if weight == 0 else None
    if full_from is not None:
        now = "" if weight is None else f"is {weight:.3g} and "
        return None if step > full_from else f"the KL weight {now}will be full from step {full_from:,}"
    if weight is None or not math.isfinite(weight):
        return None
    known = [one for one in weights if one is not None and math.isfinite(one)]
    highest = max(known)
    if weight < FULL_SHARE * highest:
        return f"the KL weight is {weight:.3g} and has been {highest:.3g}"
    recent = known[-STEADY_READINGS - 1 : -1]
    rises_slowly = len(known) > STEADY_READINGS and sorted(known) == known and known[-2] < weight
    lowest = known[:1] if rises_slowly else []
    if recent and weight > (1 + STEADY_SHARE) * min(recent + lowest):
        return f"the KL weight is {weight:.3g} and still rising"
    return None


def is_high_weight(weight: float, top: float) -> bool:
    """Return whether a silent latent counts under a weight, of which `top` is the highest that is known."""
    return weight >= BINDING_WEIGHT * min(1.0, top)


# --- Memory -------------------------------------------------------------------------------------------------------------

LONGEST_LEAST_STEPS = 500
"""Limit of `Patience.share_of_run`: in a long run, too, readings are soon made of other posteriors."""
MOST_OF_SHORT_RUN = 0.1
"""Share of a run that `Patience.steps` can demand at most."""
LONGEST_PATIENCE, LONGEST_ONCE_HEALTHY = 0.15, 0.06
"""Share of a run that the past can demand at most: a model that has been alive need not come to life any more."""
FEWEST_IN_WINDOW = LONG.readings
"""Readings that a detector has to remember."""

APART_SHARE, LEAST_APART, MOST_APART = 0.03, 30, 500
"""Share of the run, and steps at least and at most, between two readings of the escape threshold: the decoder moves meanwhile."""
LEAST_TRAINED_AT_FIRST = LEAST_TRAINED // 2
"""Steps before the first of the two readings: thresholds fall while a decoder learns, so that one below the weight tells early."""
EARLY_DEAD_ERRORS = 2.0
"""Standard errors by which a reading within the first LEAST_TRAINED steps must lie below the weight: of latents that woke, the
thresholds rose by a third from step 60 to step 100, as their encoders learned."""
LEAST_ASLEEP = 2 * LEAST_TRAINED
"""Steps under a weight that counts before a latent is called asleep: at 100 to 150 steps the dead, too, reach thresholds of 2.8
times the weight, because their decoder is still catching up."""
ASLEEP_SHARE, MOST_ASLEEP, ASLEEP_AT_MOST_UNTIL = 0.4, 4000, 0.9
"""Share of the run, and steps at most, that a latent may sleep, and the share of the run at which no sleep is believed any more.
The sleepers that are known woke after 38 % of their runs. One that did not wake in 4,000 steps was dead although its threshold was
above its weight."""
MOST_ASLEEP_UNPLANNED = 1000
"""The same steps where the length of the run is not known."""
CERTAIN_SHARE, CERTAIN_ONCE_HEALTHY = 0.25, 0.1
"""Share of the run that a collapse must have been in force before it ends the run, where no threshold confirms it: two runs that
were called at step 144 of 800 woke at about 450. The second where the latent had been alive: it need not come to life any more."""
CERTAIN_STEPS = 500
"""The same where the length of the run is not known."""

UNPROBED_READINGS = 10
"""A verdict that rests on the decoder's use is worth nothing once it was not probed at this many readings."""
UNDECIDED_READINGS = 5
"""While there is no verdict, the decoder is probed as often as this."""


class Pending(NamedTuple):
    """What the last readings point to that is not the verdict."""

    name: str
    readings: int
    """In a row."""
    since_step: int


Dip = Literal["none", "not yet", "the fall", "all of it"]
"""How far a silence has outlasted a fall of the KL weight: begun under a high weight, it went on under a low one, and on to a high
one again."""


class Memory(NamedTuple):
    """What is known once a reading is added."""

    thresholds: Thresholds
    points: list[Point]
    """What is remembered of the last readings, oldest first."""
    finding: Finding
    """What they look like."""
    pending: Pending
    faint_since: int | None
    early_until: int
    unbinding_until: int
    slept_through: Dip
    escapes: list[Point]
    """The last points of the silence that lasts still at which the escape threshold was read, oldest first."""
    is_certain: bool = False
    """Whether the finding needs no patience: the escape threshold has confirmed it."""


MOST_ESCAPES = 8
"""Readings of the escape threshold that are remembered, of which two count."""


def describe_threshold(points: Sequence[Point]) -> str:
    """Compare the KL weight with the escape threshold that was read last; empty where none was, or none could be estimated."""
    for point in reversed(points):
        threshold, error, weight = point.threshold, point.threshold_error, point.weight
        if threshold is not None and error is not None and math.isfinite(threshold) and math.isfinite(error):
            weighs = "" if weight is None else f"the weight is {_two_digits(weight)}; "
            return f"{weighs}this latent could live below {_two_digits(threshold)} ± {_two_digits(error)}"
    return ""


def _two_digits(value: float) -> str:
    """
    >>> _two_digits(1.0), _two_digits(0.536), _two_digits(31.6)
    ('1.0', '0.54', '32')
    """
    return f"{value:#.2g}" if abs(value) < 9.5 else f"{value:,.0f}"


def _with_threshold(numbers: Mapping[str, float], points: Sequence[Point]) -> dict[str, float]:
    """Add the last escape threshold to the numbers of a finding."""
    read = [point for point in points if point.threshold is not None and math.isfinite(point.threshold)]
    if not read:
        return dict(numbers)
    rounded = {
        "escape_threshold": read[-1].threshold,
        "escape_threshold_error": read[-1].threshold_error,
        "ideal_escape_threshold": read[-1].ideal_threshold,
    }
    known = {name: value for name, value in rounded.items() if value is not None and math.isfinite(value)}
    return {**numbers, **{name: float(f"{value:.3g}") for name, value in known.items()}}


class Detector:
    """The judge of one run's readings."""

    def __init__(
        self,
        thresholds: Thresholds | None = None,
        window_size: int = 50,
        schedule: KLSchedule | None = None,
        *,
        can_probe: bool = True,
        can_read_threshold: bool = False,
        advises_flags: bool = False,
        circumstances: Circumstances | None = None,
    ) -> None:
        """`window_size` is in readings. `can_probe`: decoder use can be read; without, `decoder_ignores_z` is not offered.
        `can_read_threshold`: the escape threshold can; `collapsed` is then not said before it was read twice.
        `advises_flags`: advice names the flags of the training commands; else it is in words. `circumstances`: what is in force,
        where that is known.
        """
        self.thresholds = thresholds
        """None: the defaults, those for sequences or those for steps."""
        self.window_size = window_size
        self.schedule = schedule or KLSchedule()
        self.can_probe = can_probe
        self.can_read_threshold = can_read_threshold
        self.advises_flags = advises_flags
        self.circumstances = circumstances
        self.verdict = Verdict("cannot_tell", 0, "there is no reading yet")
        self.points: list[Point] = []
        """What is remembered of the last readings, oldest first."""
        self._learn_schedule()
        self.has_been_healthy = False
        self._pending = Pending("cannot_tell", 0, 0)
        self._upheld_at = 0
        """The step of the last reading that agreed with the verdict; partly collapsed agrees with healthy."""
        self._unupheld = 0
        """Readings since."""
        self._scope: Scope = "sequence"
        self._early_until = 0
        """The last step whose KL weight was not full."""
        self._unbinding_until = 0
        """The last step under whose weight a silent latent did not count."""
        self._faint_since: int | None = None
        """The step from which all readings were faint, also those under a smaller weight: under the full one it is no better."""
        self._slept_through: Dip = "none"
        """How far the silence has outlasted a fall of the weight, which may wake a latent."""
        self._escapes: list[Point] = []
        """The last points of that silence at which the escape threshold was read."""
        self._asleep_since: int | None = None
        """The step at which this silence was called sleep."""
        self._is_confirmed = False
        """Whether the verdict is a collapse that the escape threshold, or a sleep without end, has confirmed."""
        self._last_found = "cannot_tell"
        """What the last reading looked like by itself."""
        self._unprobed = UNPROBED_READINGS
        """Readings since the decoder was last probed, where that could have decided something."""
        self._not_looked_closely = CLOSE_READINGS
        """Readings since that was done on many sequences."""
        self._foreseen: tuple[Reading, Memory] | None = None
        """What would be known with a reading that is not taken in so far."""

    def expect(self, total_steps: int) -> None:
        """Judge by another length of the run from now on: that which it will probably reach."""
        if total_steps != self.schedule.total_steps:
            self.schedule = self.schedule._replace(total_steps=total_steps)
            self._learn_schedule()
            self._foreseen = None

    def start_at(self, step: int, why: str, *, has_been_healthy: bool) -> None:
        """Count from a step on, at which a run begins again under another objective."""
        self._early_until = self._unbinding_until = step
        self.has_been_healthy = has_been_healthy
        self.verdict = Verdict("cannot_tell", step, why)

    def _learn_schedule(self) -> None:
        """Find out where the KL weight is full, whether it falls again, and what is to come from each step on."""
        self._full_from = self.schedule.full_from()
        weights = self.schedule.steps_and_weights()
        self._has_warm_up = any(earlier < later for (_, earlier), (_, later) in pairwise(weights))
        self._is_cyclical = any(later < earlier for (_, earlier), (_, later) in pairwise(weights))
        self._outlook = [] if self.schedule.is_steered else self.schedule.outlook()

    def wants_decoder_use(self, reading: Reading) -> bool:
        """Whether the decoder should be probed before this reading is judged: because the verdict is about to change, because
        there is none, or because the last probe is too old."""
        if not self.can_probe or reading.decoder_use is not None:
            return False
        memory = self._with(reading)
        if not memory.finding.decoder_matters:
            return False
        if memory.finding.contradicts:
            return True
        if memory.finding.name == "cannot_tell":
            return self._unprobed + 1 >= UNDECIDED_READINGS
        return self._is_enough(memory, reading.step) or self._unprobed + 1 >= UNPROBED_READINGS

    def wants_closer_look(self, reading: Reading) -> bool:
        """Whether decoder use, which was read on a few sequences, should be read on many: because it decides nothing, and has not
        been read on many lately."""
        if not self.can_probe or reading.decoder_use is None or self._not_looked_closely + 1 < CLOSE_READINGS:
            return False
        finding = self._with(reading).finding
        return finding.decoder_matters and finding.is_use_open

    def wants_escape_threshold(self, reading: Reading) -> bool:
        """Whether the escape threshold should be read before this reading is judged: because its latent is silent, not known to be
        dead, and the last reading of the threshold is old."""
        if not self.can_read_threshold or reading.escape_threshold is not None:
            return False
        memory = self._with(reading)
        point, apart = memory.points[-1], self._steps_apart()
        if memory.faint_since is None or memory.finding.contradicts or self.verdict.name == "collapsed":
            return False
        if not point.is_binding and not point.lowest_ahead:
            return False
        if not memory.escapes:
            return reading.step >= LEAST_TRAINED_AT_FIRST
        is_waiting = self.verdict.name == "asleep" or not point.is_binding
        if is_waiting and escape_of(memory.escapes[-1]) != "dead":
            apart *= 2
        return reading.step >= LEAST_TRAINED and reading.step - memory.escapes[-1].step >= apart

    def judge(self, reading: Reading, *, looked_closely: bool = False) -> Verdict:
        """Take in a reading; return the verdict now in force. `looked_closely`: its decoder use was read on all there is."""
        step = reading.step
        memory, self._foreseen = self._with(reading), None
        finding, self._scope = memory.finding, reading.scope
        is_probed = reading.decoder_use is not None and finding.decoder_matters
        self._unprobed = 0 if is_probed else self._unprobed + 1
        self._not_looked_closely = 0 if looked_closely else self._not_looked_closely + 1
        self.points, self._pending, self._last_found = memory.points, memory.pending, finding.name
        self._early_until, self._unbinding_until = memory.early_until, memory.unbinding_until
        self._faint_since, self._slept_through = memory.faint_since, memory.slept_through
        self._escapes = memory.escapes
        if self._faint_since is None:
            self._asleep_since = None
        elif finding.name == "asleep" and self._asleep_since is None:
            self._asleep_since = step
        before = self.verdict.name
        if finding.name == before or (VERDICTS[finding.name].is_unharmed and VERDICTS[before].is_unharmed):
            self._upheld_at, self._unupheld = step, 0
        else:
            self._unupheld += 1
        # A verdict that no reading has agreed with for long ends, though the readings do not agree on anything else either.
        patience = VERDICTS["cannot_tell"].patience
        longest = patience.share_of_run * (self.schedule.total_steps or 0)
        is_forsaken = self._unupheld > 2 * patience.readings and step - self._upheld_at > longest
        if finding.name == before:
            self._is_confirmed |= memory.is_certain
            self._pronounce(finding, self.verdict.since_step)
        elif self._is_enough(memory, step):
            self._is_confirmed = memory.is_certain
            self._pronounce(finding, step)
        elif self._is_refuted_by(memory):
            self._pronounce(
                Finding("cannot_tell", f"the information is back: {finding.evidence}", numbers=finding.numbers), step
            )
        elif before != "cannot_tell" and is_forsaken:
            why = f"the last {self._unupheld} readings were not {readable(before)}, and do not agree on anything else"
            self._pronounce(Finding("cannot_tell", f"{why}: {finding.evidence}", numbers=finding.numbers), step)
        elif before == "cannot_tell":
            trained, least = self._trained(memory, step), VERDICTS[finding.name].patience.under_full_weight
            why = f"perhaps {readable(finding.name)}, but not for long enough (since step {self._pending.since_step:,})"
            if trained < least:
                weight = "the full KL weight"
                if finding.name == "collapsed" and memory.unbinding_until < memory.early_until:
                    weight = "enough KL weight"
                few = f"only {trained:,} of the {least:,} steps under {weight} that it takes to tell"
                why = f"perhaps {readable(finding.name)}, but trained for {few}"
            elif finding.name == "collapsed" and self._awaits_threshold(memory):
                why = "silent, dead or asleep: the escape threshold is read twice before that is called"
                if known := describe_threshold(memory.escapes):
                    why = f"{why}; {known}"
            self._pronounce(Finding("cannot_tell", why, numbers=finding.numbers), self.verdict.since_step)
        return self.verdict

    def is_unharmed(self) -> bool:
        """Return whether a checkpoint saved now is worth going back to: by the verdict in force, and by the last reading alone."""
        return VERDICTS[self.verdict.name].is_unharmed and VERDICTS[self._last_found].is_unharmed

    def is_certain(self) -> bool:
        """Return whether a collapse is in force that may end the run: because the escape threshold confirms it, or for long.

        To go on with a dead run costs time; to end one that would have come to life costs the run.
        """
        if not VERDICTS[self.verdict.name].is_collapse:
            return False
        share = CERTAIN_ONCE_HEALTHY if self.has_been_healthy else CERTAIN_SHARE
        least = share * self.schedule.total_steps if self.schedule.total_steps else CERTAIN_STEPS
        step = self.points[-1].step if self.points else 0
        return self._is_confirmed or step - self.verdict.since_step >= least

    def diverged(self, step: int, evidence: str) -> Verdict:
        """Judge a run that has ended in NaN or infinity before a reading could show it."""
        if self.verdict.name != "diverged":
            self._pronounce(Finding("diverged", evidence), step)
        return self.verdict

    def _pronounce(self, finding: Finding, since_step: int) -> None:
        self.has_been_healthy |= VERDICTS[finding.name].is_unharmed
        numbers = finding.numbers
        advice = advice_on(
            finding.name,
            active=self.points[-1].active if self.points else 0,
            dimensions=self.points[-1].dimensions if self.points else 0,
            scope=self._scope,
            kl_weight=self.points[-1].weight if self.points else None,
            threshold=numbers.get("escape_threshold"),
            ideal_threshold=numbers.get("ideal_escape_threshold"),
            is_steered=self.schedule.is_steered,
            is_cyclical=self._is_cyclical,
            has_warm_up=self._has_warm_up,
            has_been_healthy=self.has_been_healthy,
            codes=self.points[-1].codes if self.points else None,
            perplexity=self.points[-1].perplexity if self.points else None,
            circumstances=self.circumstances,
            as_flags=self.advises_flags,
        )
        if finding.name == "decoder_ignores_z":
            finding = finding._replace(reason=why_paid(self.circumstances))
        self.verdict = Verdict(
            finding.name, since_step, finding.evidence, advice, finding.numbers, finding.dead_by_step
        )

    def _with(self, reading: Reading) -> "Memory":
        """Return what is known with this reading, without taking it in."""
        if self._foreseen is None or self._foreseen[0] is not reading:
            self._foreseen = reading, self._foresee(reading)
        return self._foreseen[1]

    def _foresee(self, reading: Reading) -> "Memory":
        """Find out what is known with this reading.

        It takes the place of those that were taken at its step or later: a run may have gone back.
        """
        thresholds = self.thresholds or (OF_STEPS if reading.scope == "step" else OF_SEQUENCES)
        points = [point for point in self.points if point.step < reading.step]
        weights = [*(point.weight for point in points), reading.kl_weight]
        early = why_not_full(reading.step, weights, self.schedule, self._full_from)
        before = points[-1] if points else None
        point = point_of(reading, early, thresholds, before)
        is_silent = is_faint(point, thresholds)
        known = [weight for weight in weights if weight is not None and math.isfinite(weight)]
        weight = known[-1] if known and reading.kl_weight == known[-1] else None
        lowest: float | None
        highest: float | None
        if self._outlook:
            place = max(0, bisect_right(self._outlook, reading.step, key=itemgetter(0)) - 1)
            _, scheduled, lowest, highest = self._outlook[place]
            weight, top = scheduled if weight is None else weight, self._outlook[0][3]
        else:  # what is to come is what is; a weight that rises may become that of the evidence lower bound, or more
            lowest = highest = weight
            top = max([1.0, *known])
        # A weight that falls again may wake a latent, unless it has been silent through such a fall before.
        is_high = weight is not None and is_high_weight(weight, top)
        slept_through: Dip = self._slept_through if is_silent and self._faint_since is not None else "none"
        if slept_through == "not yet" and before is not None and self._fell_between(before.step, reading.step, top):
            slept_through = "the fall"
        if is_silent and is_high:
            slept_through = "all of it" if slept_through in ("the fall", "all of it") else "not yet"
        elif is_silent and slept_through == "not yet":
            slept_through = "the fall"
        falls_again = lowest is not None and weight is not None and lowest < FULL_SHARE * weight
        is_binding = early is None or slept_through == "all of it" or (is_high and not falls_again)
        point = point._replace(is_binding=is_binding, lowest_ahead=lowest, highest_ahead=highest)
        points = [*points, point][-self.window_size :]
        faint_since, escapes = None, []
        if is_silent:
            escapes = [earlier for earlier in self._escapes if earlier.step < reading.step]
            escapes = [*escapes, *([point] if point.threshold is not None else [])][-MOST_ESCAPES:]
            faint_since = reading.step if self._faint_since is None else min(self._faint_since, reading.step)
        sees_inputs = None if self.circumstances is None else self.circumstances.sees_inputs
        memory = Memory(
            thresholds=thresholds,
            points=points,
            finding=find(points, thresholds, self.schedule.total_steps, self.verdict.name, sees_inputs),
            pending=self._pending,
            faint_since=faint_since,
            early_until=reading.step if early else self._early_until,
            unbinding_until=self._unbinding_until if is_binding else reading.step,
            slept_through=slept_through,
            escapes=escapes,
        )
        memory = self._with_fate(memory)
        return memory._replace(pending=self._pending_after(memory.finding, reading.step))

    def _fell_between(self, before: int, step: int, top: float) -> bool:
        """Whether the weight fell between two readings, as far as it is known beforehand: a fall may be shorter than that."""
        first = max(0, bisect_right(self._outlook, before, key=itemgetter(0)) - 1)
        end = bisect_right(self._outlook, step, key=itemgetter(0))
        are_high = [is_high_weight(weight, top) for _, weight, _, _ in self._outlook[first:end]]
        return any(earlier and not later for earlier, later in pairwise(are_high))

    def _with_fate(self, memory: "Memory") -> "Memory":
        """Tell death from sleep, where a latent is silent and the escape threshold was read."""
        step, finding = memory.points[-1].step, memory.finding
        # Readings that are noise, or say that they grow, leave a number no say.
        if finding.contradicts or finding.grows or finding.name not in ("collapsed", "cannot_tell", "warming_up"):
            return memory
        known, fates = describe_threshold(memory.escapes), self._last_escapes(memory)
        numbers = _with_threshold(finding.numbers, memory.escapes)
        silence = [
            point for point in memory.points if memory.faint_since is not None and point.step >= memory.faint_since
        ]
        # Nats that cost nothing make silence unstable under any weight: there the number confirms no death.
        floor = 0.0 if self.circumstances is None else self.circumstances.free_bits
        is_free = floor * memory.points[-1].dimensions > memory.points[-1].rate
        # So does a loss that pays for telling sequences apart, for which there is no threshold.
        is_free |= self.circumstances is not None and self.circumstances.has_contrastive_loss
        if fates == ["dead", "dead"] and not is_free and len(silence) >= FEWEST and step >= LEAST_TRAINED:
            details = f"{known}: it will not come back by itself"
            if finding.name == "collapsed":
                details = f"{finding.details}; {details}"
            dead = Finding("collapsed", VERDICTS["collapsed"].reason, details, numbers)
            return memory._replace(finding=dead, is_certain=True)
        if finding.name != "collapsed":
            return memory
        if known:
            finding = finding._replace(details=f"{finding.details}; {known}", numbers=numbers)
        is_late = step >= ASLEEP_AT_MOST_UNTIL * self._total_steps
        if self._asleep_since is not None:
            slept, longest = step - self._asleep_since, MOST_ASLEEP_UNPLANNED
            if total_steps := self.schedule.total_steps:
                longest = min(round(ASLEEP_SHARE * total_steps), MOST_ASLEEP)
            if slept > longest or is_late:
                details = f"{finding.details}, and has not come to life in {slept:,} steps"
                return memory._replace(finding=finding._replace(details=details), is_certain=True)
        elif (
            fates != ["asleep", "asleep"]
            or is_late
            or self.verdict.name == "collapsed"
            or self._trained(memory, step) < LEAST_ASLEEP
        ):
            return memory._replace(finding=finding)
        asleep = Finding("asleep", VERDICTS["asleep"].reason, finding.details, numbers)
        return memory._replace(finding=asleep)

    def _last_escapes(self, memory: "Memory") -> list[Escape | None]:
        """Return what the last two readings of the threshold say that lie far enough apart, the later one first."""
        later, apart = memory.escapes[-1:], self._steps_apart()
        earlier = [point for point in memory.escapes[:-1] if later[0].step - point.step >= apart]
        return [
            escape_of(point, dead_errors=EARLY_DEAD_ERRORS if point.step < LEAST_TRAINED else DEAD_ERRORS)
            for point in (*later, *earlier[-1:])
        ]

    @property
    def _total_steps(self) -> float:
        return self.schedule.total_steps or math.inf

    def _steps_apart(self) -> float:
        """Return the steps between two readings of the escape threshold."""
        return min(max(APART_SHARE * (self.schedule.total_steps or 0), LEAST_APART), MOST_APART)

    def _awaits_threshold(self, memory: "Memory") -> bool:
        """Return whether the escape threshold is still to be read before a silent latent may be called collapsed.

        One that lies above the weight means to wait, also early on.
        """
        if not self.can_read_threshold or memory.points[-1].step >= ASLEEP_AT_MOST_UNTIL * self._total_steps:
            return False
        fates = self._last_escapes(memory)
        if len(fates) < 2 or fates[0] == "asleep":
            return True
        # The estimate is a lower bound: one that is not below the weight means to wait, for no longer than a sleep is believed.
        point, longest = memory.escapes[-1], MOST_ASLEEP_UNPLANNED
        if total_steps := self.schedule.total_steps:
            longest = min(round(ASLEEP_SHARE * total_steps), MOST_ASLEEP)
        is_new = memory.faint_since is None or memory.points[-1].step - memory.faint_since <= longest
        return is_new and escape_of(point, dead_errors=0.0) != "dead" and math.isfinite(point.threshold or math.nan)

    def _is_refuted_by(self, memory: "Memory") -> bool:
        """Return whether the last reading alone ends the verdict in force: there is information where there was none."""
        point, name = memory.points[-1], memory.finding.name
        is_there = point.information >= memory.thresholds.clear_information and memory.faint_since is None
        is_silence = self.verdict.name in ("collapsed", "asleep")
        if self.verdict.name == "decoder_ignores_z":
            is_used = point.use is not None and not memory.finding.is_use_open
            return is_there and is_used and VERDICTS[name].is_unharmed
        return is_silence and is_there and name != "decoder_ignores_z"

    def _trained(self, memory: "Memory", step: int) -> int:
        """Return the steps that count for what the reading looks like."""
        if memory.finding.name not in ("collapsed", "asleep"):
            return step - memory.early_until
        if memory.slept_through == "all of it" and memory.faint_since is not None:
            return step - memory.faint_since
        return step - memory.unbinding_until

    def _pending_after(self, finding: Finding, step: int) -> Pending:
        if finding.name == self.verdict.name:
            return Pending(finding.name, 0, step)
        before = self._pending
        if before.name == finding.name and before.readings:
            return Pending(finding.name, before.readings + 1, before.since_step)
        return Pending(finding.name, 1, step)

    def _is_enough(self, memory: "Memory", step: int) -> bool:
        """Return whether the verdict should change to what is pending."""
        pending = memory.pending
        if pending.name == self.verdict.name:
            return False
        if pending.name == "cannot_tell" and self.verdict.name == "warming_up":
            return True
        if pending.name == "warming_up" and VERDICTS[self.verdict.name].is_collapse and memory.faint_since is not None:
            return False
        if pending.name == "asleep":
            return True  # it is the threshold that has been patient
        if pending.name == "collapsed":
            if memory.is_certain:
                return True
            if self._awaits_threshold(memory):
                return False
        patience, since_step, past = VERDICTS[pending.name].patience, pending.since_step, self._early_until
        if pending.name == "collapsed" and memory.faint_since is not None:
            past = memory.unbinding_until
            if memory.faint_since <= past:
                since_step = memory.faint_since
        steps = patience.share_of_past * max(0, since_step - past)
        if not (total_steps := self.schedule.total_steps):
            steps = max(steps, patience.steps)
        else:
            least = max(
                min(patience.share_of_run * total_steps, LONGEST_LEAST_STEPS),
                min(patience.steps, MOST_OF_SHORT_RUN * total_steps),
            )
            longest = LONGEST_ONCE_HEALTHY if self.has_been_healthy else LONGEST_PATIENCE
            steps = max(least, min(steps, longest * total_steps))
        is_trained = self._trained(memory, step) >= patience.under_full_weight
        is_seen = pending.readings >= patience.readings or (
            pending.name == "collapsed" and memory.slept_through == "all of it"  # many were seen, under other weights
        )
        return is_trained and is_seen and step - since_step >= steps

    def state_dict(self) -> dict[str, Any]:
        """Return all that later verdicts depend on, in types of JSON."""
        numbers, advice = dict(self.verdict.numbers), list(self.verdict.advice)
        return {
            "points": [list(point) for point in self.points],
            "verdict": self.verdict._asdict() | {"advice": advice, "numbers": numbers},
            "pending": list(self._pending),
            "upheld_at": self._upheld_at,
            "unupheld": self._unupheld,
            "early_until": self._early_until,
            "unbinding_until": self._unbinding_until,
            "faint_since": self._faint_since,
            "slept_through": self._slept_through,
            "escapes": [list(point) for point in self._escapes],
            "asleep_since": self._asleep_since,
            "is_confirmed": self._is_confirmed,
            "last_found": self._last_found,
            "unheard": self._unprobed,
            "not_looked_closely": self._not_looked_closely,
            "has_been_healthy": self.has_been_healthy,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._foreseen = None
        self.points = [Point(*point) for point in state["points"]][-self.window_size :]
        self.verdict = Verdict(**state["verdict"] | {"advice": tuple(state["verdict"]["advice"])})
        self._pending = Pending(*state["pending"])
        self._upheld_at, self._unupheld = state["upheld_at"], state["unupheld"]
        self._early_until = state["early_until"]
        self._faint_since = state["faint_since"]
        # Those of earlier versions say no more of a silence, and are as good as a new one there.
        self._unbinding_until = state.get("unbinding_until", self._early_until)
        self._slept_through = state.get("slept_through", "none")
        self._escapes = [Point(*point) for point in state.get("escapes", [])]
        self._asleep_since = state.get("asleep_since")
        self._is_confirmed = state.get("is_confirmed", False)
        self._last_found = state.get("last_found", self.verdict.name)
        self._unprobed = state["unheard"]
        self._not_looked_closely = state.get("not_looked_closely", CLOSE_READINGS)
        self.has_been_healthy = state["has_been_healthy"]
