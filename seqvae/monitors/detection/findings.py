"""What readings look like at one moment: points in, a `Finding` out, with its evidence in words and numbers. No memory.

The rules in their order: NaN (diverged); a weight that is not full (warming up); nothing to judge yet; faint (collapsed, unless
it grows); paid for and unused (the decoder ignores z, unless that changes); used, or so clear that it may well be, and then next
to points (not variational), falling (collapsing), mostly dead dimensions (partly collapsed) or none of these (healthy). What lies
between is "cannot tell", with the reason.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seqvae.monitors.detection.advice import REASONS, UNHEARD
from seqvae.monitors.detection.thresholds import Thresholds
from seqvae.monitors.detection.trends import LONG, RECENT, Point, Seen, points_to_judge, seen_in, tells_information
from seqvae.monitors.detection.verdict import NO_NUMBERS, VerdictName

BEGINNING, LONGEST_BEGINNING = 0.03, 500
"""Share of a run, and steps at most, in which everything moves: the learning rate rises, and the window of posteriors fills up."""
BEGINNING_STEPS = 50
"""The same where nobody knows how long the run will be."""
FEWEST = 3
"""Readings under the full weight that a finding takes."""
DEAD_MARGIN = 0.1
"""Share of dimensions that have to come back to life before a partly collapsed latent is none."""


class Finding(NamedTuple):
    """What the readings would be called if there were no others."""

    name: VerdictName
    evidence: str
    numbers: Mapping[str, float] = NO_NUMBERS
    dead_by_step: int | None = None
    contradicts: bool = False
    """It does not go together with what the decoder last said."""
    decoder_matters: bool = True
    """Whether an answer of the decoder's could make it another."""


def find(points: Sequence[Point], thresholds: Thresholds, total_steps: int | None, before: VerdictName) -> Finding:
    """Go through the rules in their order; `before` is the verdict in force."""
    now = points[-1]
    if now.posteriors and not math.isfinite(now.rate):
        return Finding("diverged", REASONS["diverged"], decoder_matters=False)
    if now.early:
        return Finding("warming_up", now.early, decoder_matters=False)
    full = points_to_judge(points)
    nothing_yet = _why_nothing_to_judge(now, full, total_steps)
    if nothing_yet:
        return Finding("cannot_tell", nothing_yet, decoder_matters=False)
    seen = seen_in(full, thresholds, total_steps)
    if seen.is_faint:
        return _of_faint(seen)
    if seen.is_few:
        return _undecided(f"too few posteriors ({now.posteriors})", seen)
    if seen.is_unused:
        return _of_unused(seen)
    if seen.is_used or now.information >= thresholds.clear_information:
        return _of_used(seen, before)
    return _undecided("neither clear nor gone", seen)


def _why_nothing_to_judge(now: Point, full: Sequence[Point], total_steps: int | None) -> str | None:
    if not (now.posteriors and now.dimensions):
        return "there were no posteriors to read"
    if not tells_information(now):
        return f"the mutual information is beyond what can be computed (rate {now.rate:.4g})"
    if total_steps is None and now.step < BEGINNING_STEPS:
        return f"the run has only begun: step {now.step:,}"
    if total_steps is not None and now.step < min(BEGINNING * total_steps, LONGEST_BEGINNING):
        return f"the run has only begun: step {now.step:,} of {total_steps:,}"
    if len(full) < FEWEST:
        return f"too few readings under the full KL weight so far ({len(full)})"
    return None


def _of_faint(seen: Seen) -> Finding:
    if seen.is_used:
        return _undecided("next to no information, and yet it is used", seen)._replace(contradicts=True)
    if seen.grows("rate", seen.t.growth):
        return _undecided("faint, but it grows", seen)
    if seen.now.largest >= seen.t.faint_dimension and not seen.has_long_been_faint:
        return _undecided("faint, but one dimension stands out", seen)
    return _verdict("collapsed", seen)


def _of_unused(seen: Seen) -> Finding:
    if seen.now.rate < seen.t.paid_rate:
        return _undecided("little, and not used", seen)
    if _rate_is_going(seen):
        return _undecided("not used, and the rate falls", seen)
    if seen.grows("information", seen.t.waking) or seen.grows("information", 1.3 * seen.t.waking, LONG):
        return _undecided("not used so far, but the information grows", seen)
    return _verdict("decoder_ignores_z", seen)


def _rate_is_going(seen: Seen) -> bool:
    """Whether it will soon be faint."""
    trend = seen.trend("rate", LONG)
    return seen.leads_down(trend) and trend.steps_until(seen.faint_rate) <= 2 * seen.span(LONG)


def _of_used(seen: Seen, before: VerdictName) -> Finding:
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


def _dead_by(seen: Seen) -> int | None:
    """The step at which rate and information will be faint, if they fall as they do, within the run and soon."""
    rate, information = seen.trend("rate", LONG), seen.trend("information", LONG)
    if not (seen.leads_down(rate) and seen.leads_down(information)):
        return None
    if rate.level > seen.t.falling_share * seen.now.peak:
        return None
    steps = max(rate.steps_until(seen.faint_rate), information.steps_until(seen.t.faint_information))
    if steps > min(seen.steps_left, 2 * seen.span(LONG)):
        return None
    if seen.trend("rate", RECENT).slope > seen.t.slowing_share * rate.slope:
        return None  # it settles
    return seen.now.step + math.ceil(steps)


def _undecided(why: str, seen: Seen) -> Finding:
    return Finding("cannot_tell", f"{why}: {seen.said}", seen.numbers)


def _verdict(name: VerdictName, seen: Seen) -> Finding:
    """With the reason and the numbers."""
    reason = UNHEARD if name == "healthy" and not seen.is_used else REASONS[name]
    return Finding(name, f"{reason}; {seen.said}", seen.numbers)
