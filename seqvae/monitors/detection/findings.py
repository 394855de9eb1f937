"""What readings look like at one moment: points in, a `Finding` out, with its evidence in words and numbers. No memory.

The rules in their order: NaN (diverged); a weight that is not full (warming up); nothing to judge yet; faint (collapsed, unless
it grows); paid for and unused (the decoder ignores z, unless that changes); used, or so clear that it may well be, and then nearly
points (not variational), falling (collapsing), mostly dead dimensions (partly collapsed) or none of these (healthy). What lies
between is "cannot tell", with the reason.

The names of the verdicts and the `Verdict` itself stand here, too: plain Python, so that no torch is needed to show or store one.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

from seqvae.monitors.detection.thresholds import Thresholds
from seqvae.monitors.detection.trends import (
    LEAST_POSTERIORS,
    LONG,
    RECENT,
    Evidence,
    Point,
    is_faint,
    tells_information,
)

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
    judged = list(takewhile(_can_be_judged, reversed(points)))[::-1]
    nothing_yet = _why_nothing_to_judge(now, len(judged), total_steps)
    if nothing_yet:
        return Finding("cannot_tell", nothing_yet, decoder_matters=False)
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


def _can_be_judged(point: Point) -> bool:
    return not point.early and point.posteriors > 0 and math.isfinite(point.rate) and tells_information(point)


def _why_nothing_to_judge(now: Point, judged: int, total_steps: int | None) -> str | None:
    if not (now.posteriors and now.dimensions):
        return "there were no posteriors to read"
    if not tells_information(now):
        return f"the mutual information is beyond what can be computed (rate {now.rate:.4g})"
    if total_steps is None and now.step < BEGINNING_STEPS:
        return f"the run has only begun: step {now.step:,}"
    if total_steps is not None and now.step < min(BEGINNING * total_steps, LONGEST_BEGINNING):
        return f"the run has only begun: step {now.step:,} of {total_steps:,}"
    if judged < FEWEST:
        return f"too few readings under the full KL weight so far ({judged})"
    return None


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
