"""The detector: readings one by one in, the verdict in force out. Plain Python on numbers; no torch, no clock, no files.

It waits until the KL weight is full, tells faint readings that fall or stay from those that grow, and changes its mind only
when the readings have said something else for a while. `findings.py` says what readings look like at one moment; this module
adds memory, and the advice. The same readings give the same verdicts, also across a checkpoint.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from seqvae.monitors.detection.findings import (
    LONG,
    UNHARMED,
    Finding,
    Point,
    Verdict,
    VerdictName,
    find,
    is_faint,
    point_of,
    spoken,
)
from seqvae.monitors.detection.thresholds import OF_SEQUENCES, OF_STEPS, Thresholds
from seqvae.monitors.reading import Reading

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
    before = known[-STEADY_READINGS - 1 : -1]
    rises_slowly = len(known) > STEADY_READINGS and sorted(known) == known and known[-2] < weight
    if before and (
        weight > (1 + STEADY_SHARE) * min(before) or (rises_slowly and weight > (1 + STEADY_SHARE) * known[0])
    ):
        return f"the KL weight is {weight:.3g} and still rising"
    return None


# --- Advice: flags of the training commands, each with what it does, for those who have others --------------------

_FREE_BITS = "--free_bits 0.25 (the first nats of each dimension are free)"
_CYCLICAL = "--kl_schedule cyclical (the KL weight starts from 0 again and again)"
_WORD_DROPOUT = "--word_dropout 0.3 (what the decoder cannot look up it has to learn from the latent)"
_TARGET = "--target_kl 5 (a controller holds the KL there)"
_WEAKER = "a weaker decoder (--depth 1, a smaller --width, or --decoder parallel)"
_FULL = "--beta 1 (the full weight of the KL)"
_RISING = "--kl_schedule linear (a weight that rises and stays)"
_LOWER_TARGET = "a lower --target_kl (the controller gives the KL more weight)"
_GO_BACK = "--init_from the run's healthy.ckpt (starts from the last healthy checkpoint; with one of these)"

_REMEDIES: dict[VerdictName, tuple[str, ...]] = {
    "collapsing": (_FREE_BITS, _CYCLICAL, _WORD_DROPOUT, _TARGET),
    "collapsed": (_FREE_BITS, _CYCLICAL, _WORD_DROPOUT, _TARGET),
    "decoder_ignores_z": (_WORD_DROPOUT, _CYCLICAL, _WEAKER),
    "not_variational": (_FULL, _RISING, _LOWER_TARGET, _TARGET),
    "diverged": (
        "a lower --lr",
        "a longer --warmup",
        "a lower --gradient_clip",
        "--precision 32-true (where it is another)",
    ),
}

HEAVY = 1.05
"""A KL that weighs more than in the evidence lower bound is the first suspect."""


class Situation(NamedTuple):
    """What is known of a run beside its readings."""

    has_been_healthy: bool = False
    is_steered: bool = False
    """--target_kl is in force, and --kl_schedule and --beta have no effect."""
    is_cyclical: bool = False
    """The KL weight falls again."""
    kl_weight: float | None = None
    """The last one that is known."""


def advice_on(verdict: VerdictName, situation: Situation, active: int) -> tuple[str, ...]:
    """Return what to try, the most promising first, without what is in force already or would change nothing."""
    if verdict == "partly_collapsed":
        return (f"--latent_size {max(active, 1)} (the number of dimensions that carry something)", _FREE_BITS)
    weight = situation.kl_weight
    if situation.is_steered:
        without_effect = {_TARGET, _CYCLICAL, _RISING, _FULL}
    else:
        without_effect = {_LOWER_TARGET, _CYCLICAL if situation.is_cyclical else _RISING}
        if weight is not None and weight >= 1:
            without_effect.add(_FULL)
    remedies = tuple(remedy for remedy in _REMEDIES.get(verdict, ()) if remedy not in without_effect)
    if verdict in ("collapsing", "collapsed") and weight is not None and weight > HEAVY and not situation.is_steered:
        remedies = (f"--beta 1 (the KL weighs {weight:.3g} now)", *remedies)
    if situation.has_been_healthy and verdict in ("collapsing", "collapsed", "decoder_ignores_z"):
        return (*remedies, _GO_BACK)
    return remedies


# --- Memory ------------------------------------------------------------


class Patience(NamedTuple):
    """How long readings have to say something new before the verdict does: all of these together."""

    readings: int
    share_of_run: float = 0.0
    """Where the run's length is known. Readings that follow each other closely are made of the same posteriors."""
    share_of_past: float = 0.0
    """Share of the time under the full weight until readings began to say it. Some models fall silent while the decoder learns the
    simplest things, and come to life after it: the later that happens, the longer it takes."""
    steps: int = 0
    """However many readings that are; a tenth of a run that is shorter than ten times this."""


PATIENCE: dict[VerdictName, Patience] = {
    "healthy": Patience(3, 0.02),
    "partly_collapsed": Patience(3, 0.02),
    "collapsing": Patience(3, 0.03),
    "collapsed": Patience(5, 0.03, 0.6, 80),
    "decoder_ignores_z": Patience(5, 0.06, 2.0, 80),
    "not_variational": Patience(4, 0.05),
    "diverged": Patience(2),
    "warming_up": Patience(1),
    "cannot_tell": Patience(8, 0.08),
}
LONGEST_LEAST_STEPS = 500
"""Limit of `share_of_run`: in a long run, too, readings are soon made of other posteriors."""
MOST_OF_SHORT_RUN = 0.1
"""Share of a run that `steps` can demand at most."""
LONGEST_PATIENCE, LONGEST_ONCE_HEALTHY = 0.15, 0.06
"""Share of a run that the past can demand at most: a model that has been alive need not come to life any more."""
FEWEST_IN_WINDOW = LONG.readings
"""Readings that a detector has to remember."""

UNPROBED_READINGS = 10
"""A verdict that rests on the decoder's use is worth nothing once it was not probed at this many readings."""
UNDECIDED_READINGS = 5
"""While there is no verdict, the decoder is probed as often as this."""


class Pending(NamedTuple):
    """What the last readings say that is not the verdict."""

    name: VerdictName
    readings: int
    """In a row."""
    since_step: int


class Detector:
    """Judges the readings of one run."""

    def __init__(
        self,
        thresholds: Thresholds | None = None,
        window_size: int = 50,
        schedule: KLSchedule | None = None,
        *,
        can_probe: bool = True,
    ) -> None:
        """`window_size` is in readings. `can_probe`: decoder use can be read; without, `decoder_ignores_z` is not offered."""
        self.thresholds = thresholds
        """None: the defaults, those for sequences or those for steps."""
        self.window_size = window_size
        self.schedule = schedule or KLSchedule()
        self.can_probe = can_probe
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
        if finding.name != "cannot_tell" and self._is_enough(self._pending_after(finding, reading.step), reading.step):
            return True
        return self._unprobed + 1 >= (UNDECIDED_READINGS if finding.name == "cannot_tell" else UNPROBED_READINGS)

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
        if finding.name == before or {finding.name, before} <= UNHARMED:
            self._upheld_at, self._unupheld = step, 0
        else:
            self._unupheld += 1
        # A verdict that no reading has agreed with for long ends, though the readings do not agree on anything else either.
        patience = PATIENCE["cannot_tell"]
        is_forsaken = self._unupheld > 2 * patience.readings and step - self._upheld_at > patience.share_of_run * (
            self.schedule.total_steps or 0
        )
        if finding.name == before:
            self._pronounce(finding, self.verdict.since_step)
        elif self._is_enough(self._pending, step):
            self._pronounce(finding, step)
        elif before != "cannot_tell" and is_forsaken:
            why = f"the last {self._unupheld} readings were not {spoken(before)}, and do not agree on anything else"
            self._pronounce(Finding("cannot_tell", f"{why}: {finding.evidence}", finding.numbers), step)
        elif before == "cannot_tell":
            why = f"perhaps {spoken(finding.name)}, but not for long enough (since step {self._pending.since_step:,})"
            self._pronounce(Finding("cannot_tell", why, finding.numbers), self.verdict.since_step)
        return self.verdict

    def diverged(self, step: int, said: str) -> Verdict:
        """Judge a run that has ended in NaN or infinity before a reading could show it; `said` becomes the evidence."""
        if self.verdict.name != "diverged":
            self._pronounce(Finding("diverged", said), step)
        return self.verdict

    def _pronounce(self, finding: Finding, since_step: int) -> None:
        self._has_been_healthy |= finding.name in UNHARMED
        active, weight = (self.points[-1].active, self.points[-1].weight) if self.points else (0, None)
        situation = Situation(self._has_been_healthy, self.schedule.is_steered, self._is_cyclical, weight)
        advice = advice_on(finding.name, situation, active)
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
        patience, since_step = PATIENCE[pending.name], pending.since_step
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
        return pending.readings >= patience.readings and step - since_step >= steps

    def state_dict(self) -> dict[str, Any]:
        """Return all that later verdicts depend on, in types of JSON."""
        return {
            "points": [list(point) for point in self.points],
            "verdict": self.verdict._asdict()
            | {"advice": list(self.verdict.advice), "numbers": dict(self.verdict.numbers)},
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
