"""What is a judge worth? Histories of verdicts and truths in; recall, false alarms, right kind, and how early, out.

Every figure is of one half of the zoo at one cadence. Runs whose truth is grey have no part in any.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.detection.zoo_limits import Truth
from benchmarks.detection.zoo_replay import Record, Replayed, schedule_of
from seqvae.monitors.detection.findings import ALARMS, VerdictName


class Outcome(NamedTuple):
    """Of one run under one judge at one cadence."""

    name: str
    truth: Truth
    replayed: Replayed
    total_steps: int
    full_from: int | None
    """The step from which the KL weight is full; None: steered."""


class Score(NamedTuple):
    """Counts, and medians of what the right calls took."""

    runs: int
    sick: int
    """Collapsed, ignored, not variational or diverged in truth."""
    found: int
    """Of these: some alarm is in force at the end, of whatever kind."""
    well: int
    false_alarms: int
    """Of the well: any alarm was ever in force."""
    right_kind: int
    """Of all runs: the last verdict."""
    median_readings: float | None
    """Before the first right alarm that stayed, with its own."""
    median_share: float | None
    """Of the run that had passed by then."""
    dead_at_start: int
    """Collapsed in truth, under a constant weight."""
    most_readings_dead_at_start: int | None
    """That a right call took; None: there is a run without one, or no such run."""
    annealed: int
    """Collapsed in truth, under a weight that rises."""
    most_readings_after_annealing: int | None
    """After the weight was full, 0 where the call was earlier."""
    asked_share: float
    """Of all readings: those with decoder use."""


def outcome_of(record: Record, truth: Truth, replayed: Replayed) -> Outcome:
    return Outcome(record.name, truth, replayed, record.total_steps, schedule_of(record).full_from())


def score(outcomes: Sequence[Outcome]) -> Score:
    scored = [one for one in outcomes if one.truth.right]
    sick = [one for one in scored if is_sick(one.truth)]
    well = [one for one in scored if not is_sick(one.truth)]
    firsts = [(one, first) for one in sick if (first := first_right(one)) is not None]
    collapsed = [one for one in sick if one.truth.right == ("collapsed",) and one.full_from is not None]
    dead_at_start = [one for one in collapsed if one.full_from == 0]
    annealed = [one for one in collapsed if one.full_from != 0]
    readings = sum(len(one.replayed.calls) for one in scored)
    return Score(
        runs=len(scored),
        sick=len(sick),
        found=sum(is_alarmed_at_end(one) for one in sick),
        well=len(well),
        false_alarms=sum(bool(alarms_of(one)) for one in well),
        right_kind=sum(is_right_at_end(one) for one in scored),
        median_readings=statistics.median(first + 1 for _, first in firsts) if firsts else None,
        median_share=statistics.median(share_at(one, first) for one, first in firsts) if firsts else None,
        dead_at_start=len(dead_at_start),
        most_readings_dead_at_start=most([readings_to_call(one) for one in dead_at_start]),
        annealed=len(annealed),
        most_readings_after_annealing=most([readings_to_call(one) for one in annealed]),
        asked_share=sum(one.replayed.asked for one in scored) / readings if readings else 0.0,
    )


def is_sick(truth: Truth) -> bool:
    return any(name in ALARMS for name in truth.right)


def is_right_at_end(outcome: Outcome) -> bool:
    return bool(outcome.replayed.calls) and outcome.replayed.calls[-1].name in outcome.truth.right


def is_alarmed_at_end(outcome: Outcome) -> bool:
    return bool(outcome.replayed.calls) and outcome.replayed.calls[-1].name in ALARMS


def alarms_of(outcome: Outcome) -> list[VerdictName]:
    return [call.name for call in outcome.replayed.calls if call.name in ALARMS]


def right_calls(truth: Truth) -> tuple[VerdictName, ...]:
    """At its end a run has collapsed; on the way there, collapsing is right, too."""
    return (*truth.right, "collapsing") if "collapsed" in truth.right else truth.right


def first_right(outcome: Outcome) -> int | None:
    """The place of the first right call after which none was wrong."""
    names = [call.name in right_calls(outcome.truth) for call in outcome.replayed.calls]
    if not names or not names[-1]:
        return None
    return len(names) - next((back for back, right in enumerate(reversed(names)) if not right), len(names))


def share_at(outcome: Outcome, place: int) -> float:
    return outcome.replayed.calls[place].step / outcome.total_steps


def readings_to_call(outcome: Outcome) -> int | None:
    """Those with the full weight, up to the first right call that stayed; None: there is no such call."""
    first = first_right(outcome)
    if first is None:
        return None
    full_from = outcome.full_from or 0
    return sum(call.step > full_from for call in outcome.replayed.calls[: first + 1])


def most(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return max(known) if known and len(known) == len(counts) else None


def changes(outcome: Outcome) -> str:
    """The history of verdicts in one line."""
    parts, before = [], None
    for call in outcome.replayed.calls:
        if call.name != before:
            parts.append(f"{call.step} {call.name}")
        before = call.name
    return ", ".join(parts)
