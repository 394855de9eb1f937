"""The detector: readings one by one in, the verdict in force out. Plain Python on numbers; no torch, no clock, no files.

It waits until the KL weight is full, tells faint readings that fall or stay from those that grow, and changes its mind only
when the readings have pointed elsewhere for a while. `rules.py` judges readings at one moment; this module adds memory. The same
readings give the same verdicts, also across a checkpoint.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from seqvae.monitors.reading import Reading
from seqvae.monitors.rules import (
    LONG,
    OF_SEQUENCES,
    OF_STEPS,
    Finding,
    Point,
    Thresholds,
    find,
    is_faint,
    point_of,
)
from seqvae.verdicts import VERDICTS, Verdict, advice_on, readable

# --- The KL weight ------------------------------------------------------------------------------------------------------

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

    def full_from(self) -> int | None:
        """Return the step in which the weight gets to its height for the last time; None: not known beforehand."""
        if not (weights := self.steps_and_weights()):
            return None
        full = FULL_SHARE * max(weight for _, weight in weights)
        arrivals = [step for (_, before), (step, weight) in pairwise(weights) if before < full <= weight]
        return max(arrivals, default=0)

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
    recent = known[-STEADY_READINGS - 1 : -1]
    rises_slowly = len(known) > STEADY_READINGS and sorted(known) == known and known[-2] < weight
    lowest = known[:1] if rises_slowly else []
    if recent and weight > (1 + STEADY_SHARE) * min(recent + lowest):
        return f"the KL weight is {weight:.3g} and still rising"
    return None


# --- Memory -------------------------------------------------------------------------------------------------------------

LONGEST_LEAST_STEPS = 500
"""Limit of `Patience.share_of_run`: in a long run, too, readings are soon made of other posteriors."""
MOST_OF_SHORT_RUN = 0.1
"""Share of a run that `Patience.steps` can demand at most."""
LONGEST_PATIENCE, LONGEST_ONCE_HEALTHY = 0.15, 0.06
"""Share of a run that the past can demand at most: a model that has been alive need not come to life any more."""
FEWEST_IN_WINDOW = LONG.readings
"""Readings that a detector has to remember."""

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


class Detector:
    """The judge of one run's readings."""

    def __init__(
        self,
        thresholds: Thresholds | None = None,
        window_size: int = 50,
        schedule: KLSchedule | None = None,
        *,
        can_probe: bool = True,
        advises_flags: bool = False,
    ) -> None:
        """`window_size` is in readings. `can_probe`: decoder use can be read; without, `decoder_ignores_z` is not offered.
        `advises_flags`: advice names the flags of the training commands; else it is in words.
        """
        self.thresholds = thresholds
        """None: the defaults, those for sequences or those for steps."""
        self.window_size = window_size
        self.schedule = schedule or KLSchedule()
        self.can_probe = can_probe
        self.advises_flags = advises_flags
        self.verdict = Verdict("cannot_tell", 0, "there is no reading yet")
        self.points: list[Point] = []
        """What is remembered of the last readings, oldest first."""
        self._full_from = self.schedule.full_from()
        weights = self.schedule.steps_and_weights()
        self._is_cyclical = any(later < earlier for (_, earlier), (_, later) in pairwise(weights))
        self._has_been_healthy = False
        self._pending = Pending("cannot_tell", 0, 0)
        self._upheld_at = 0
        """The step of the last reading that agreed with the verdict; partly collapsed agrees with healthy."""
        self._unupheld = 0
        """Readings since."""
        self._early_until = 0
        """The last step whose KL weight was not full."""
        self._faint_since: int | None = None
        """The step from which all readings were faint, also those under a smaller weight: under the full one it is no better."""
        self._unprobed = 0
        """Readings since the decoder was last probed."""

    def wants_decoder_use(self, reading: Reading) -> bool:
        """Whether the decoder should be probed before this reading is judged: because the verdict is about to change, because
        there is none, or because the last probe is too old."""
        if not self.can_probe or reading.decoder_use is not None:
            return False
        _, finding = self._look_at(reading)
        if not finding.decoder_matters:
            return False
        if finding.contradicts:
            return True
        if finding.name == "cannot_tell":
            return self._unprobed + 1 >= UNDECIDED_READINGS
        is_enough = self._is_enough(self._pending_after(finding, reading.step), reading.step)
        return is_enough or self._unprobed + 1 >= UNPROBED_READINGS

    def judge(self, reading: Reading) -> Verdict:
        """Take in a reading; return the verdict now in force."""
        step = reading.step
        self._unprobed = 0 if reading.decoder_use is not None else self._unprobed + 1
        self.points, finding = self._look_at(reading)
        if self.points[-1].early:
            self._early_until = step
        if not is_faint(self.points[-1], self._thresholds_for(reading)):
            self._faint_since = None
        elif self._faint_since is None:
            self._faint_since = step
        self._pending = self._pending_after(finding, step)
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
            self._pronounce(finding, self.verdict.since_step)
        elif self._is_enough(self._pending, step):
            self._pronounce(finding, step)
        elif before != "cannot_tell" and is_forsaken:
            why = f"the last {self._unupheld} readings were not {readable(before)}, and do not agree on anything else"
            self._pronounce(Finding("cannot_tell", f"{why}: {finding.evidence}", finding.numbers), step)
        elif before == "cannot_tell":
            trained, least = step - self._early_until, VERDICTS[finding.name].patience.under_full_weight
            why = f"perhaps {readable(finding.name)}, but not for long enough (since step {self._pending.since_step:,})"
            if trained < least:
                few = f"only {trained:,} of the {least:,} steps under the full KL weight that it takes to tell"
                why = f"perhaps {readable(finding.name)}, but trained for {few}"
            self._pronounce(Finding("cannot_tell", why, finding.numbers), self.verdict.since_step)
        return self.verdict

    def diverged(self, step: int, evidence: str) -> Verdict:
        """Judge a run that has ended in NaN or infinity before a reading could show it."""
        if self.verdict.name != "diverged":
            self._pronounce(Finding("diverged", evidence), step)
        return self.verdict

    def _pronounce(self, finding: Finding, since_step: int) -> None:
        self._has_been_healthy |= VERDICTS[finding.name].is_unharmed
        advice = advice_on(
            finding.name,
            active=self.points[-1].active if self.points else 0,
            kl_weight=self.points[-1].weight if self.points else None,
            is_steered=self.schedule.is_steered,
            is_cyclical=self._is_cyclical,
            has_been_healthy=self._has_been_healthy,
            as_flags=self.advises_flags,
        )
        self.verdict = Verdict(
            finding.name, since_step, finding.evidence, advice, finding.numbers, finding.dead_by_step
        )

    def _look_at(self, reading: Reading) -> tuple[list[Point], Finding]:
        """Return the last points with that of the reading, and what they look like.

        A reading takes the place of those that were taken at its step or later: a run may have gone back.
        """
        thresholds = self._thresholds_for(reading)
        points = [point for point in self.points if point.step < reading.step]
        weights = [*(point.weight for point in points), reading.kl_weight]
        early = why_not_full(reading.step, weights, self.schedule, self._full_from)
        before = points[-1] if points else None
        points = [*points, point_of(reading, early, thresholds, before)][-self.window_size :]
        return points, find(points, thresholds, self.schedule.total_steps, self.verdict.name)

    def _thresholds_for(self, reading: Reading) -> Thresholds:
        return self.thresholds or (OF_STEPS if reading.scope == "step" else OF_SEQUENCES)

    def _pending_after(self, finding: Finding, step: int) -> Pending:
        if finding.name == self.verdict.name:
            return Pending(finding.name, 0, step)
        before = self._pending
        if before.name == finding.name and before.readings:
            return Pending(finding.name, before.readings + 1, before.since_step)
        return Pending(finding.name, 1, step)

    def _is_enough(self, pending: Pending, step: int) -> bool:
        """Whether the verdict should change to what is pending."""
        if pending.name == self.verdict.name:
            return False
        if pending.name == "cannot_tell" and self.verdict.name == "warming_up":
            return True
        patience, since_step = VERDICTS[pending.name].patience, pending.since_step
        if pending.name == "collapsed" and self._faint_since is not None and self._faint_since <= self._early_until:
            since_step = self._faint_since
        steps = patience.share_of_past * max(0, since_step - self._early_until)
        if not (total_steps := self.schedule.total_steps):
            steps = max(steps, patience.steps)
        else:
            least = max(
                min(patience.share_of_run * total_steps, LONGEST_LEAST_STEPS),
                min(patience.steps, MOST_OF_SHORT_RUN * total_steps),
            )
            longest = LONGEST_ONCE_HEALTHY if self._has_been_healthy else LONGEST_PATIENCE
            steps = max(least, min(steps, longest * total_steps))
        is_trained = step - self._early_until >= patience.under_full_weight
        return is_trained and pending.readings >= patience.readings and step - since_step >= steps

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
            "faint_since": self._faint_since,
            "unheard": self._unprobed,
            "has_been_healthy": self._has_been_healthy,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.points = [Point(*point) for point in state["points"]][-self.window_size :]
        self.verdict = Verdict(**state["verdict"] | {"advice": tuple(state["verdict"]["advice"])})
        self._pending = Pending(*state["pending"])
        self._upheld_at, self._unupheld = state["upheld_at"], state["unupheld"]
        self._early_until = state["early_until"]
        self._faint_since = state["faint_since"]
        self._unprobed = state["unheard"]
        self._has_been_healthy = state["has_been_healthy"]
