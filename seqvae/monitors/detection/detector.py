"""The detector: readings one by one in, the verdict in force out. Plain Python on numbers; no torch, no clock, no files.

It waits until the KL weight is full, tells faint readings that fall or stay from those that grow, and changes its mind only
when the readings have said something else for a while. `findings.py` says what readings look like at one moment; this module
adds memory. The same readings give the same verdicts, also across a checkpoint.
"""

from typing import Any, NamedTuple

from seqvae.monitors.detection.advice import Situation, advice_on
from seqvae.monitors.detection.findings import Finding, find
from seqvae.monitors.detection.thresholds import OF_SEQUENCES, OF_STEPS, Thresholds
from seqvae.monitors.detection.trends import LONG, KLSchedule, Point, is_faint, point_of, why_not_full
from seqvae.monitors.detection.verdict import UNHARMED, Verdict, VerdictName, spoken
from seqvae.monitors.reading import Reading, Scope


class Patience(NamedTuple):
    """How long readings have to say something new before the verdict does: all of these together."""

    readings: int
    share_of_run: float = 0.0
    """Where the run's length is known. Readings that follow each other closely are made of the same posteriors."""
    share_of_past: float = 0.0
    """Of the time under the full weight until readings began to say it. Some models fall silent while their decoder learns the
    simplest things, and come to life after it: the later that happens, the longer it takes."""
    steps: int = 0
    """However many readings that are; a tenth of a run that is too short for so many."""


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
"""That `share_of_run` can demand at most: in a long run, too, readings are soon made of other posteriors."""
MOST_OF_SHORT_RUN = 0.1
"""Share of a run that `steps` can demand at most."""
LONGEST_PATIENCE, LONGEST_ONCE_HEALTHY = 0.15, 0.06
"""Share of a run that the past can demand at most: a model that has been alive need not come to life any more."""
FEWEST_IN_WINDOW = LONG.readings
"""Readings that a detector has to remember."""

UNHEARD_READINGS = 10
"""A verdict that rests on the decoder's use is worth nothing once nobody has asked the decoder for so many readings."""
UNDECIDED_READINGS = 5
"""And while there is no verdict, the decoder is asked as often as this."""


class Pending(NamedTuple):
    """What the last readings say that is not the verdict."""

    name: VerdictName
    readings: int
    """In a row."""
    since_step: int


class Detector:
    """Of one run."""

    def __init__(
        self,
        thresholds: Thresholds | None = None,
        window_size: int = 50,
        schedule: KLSchedule | None = None,
        *,
        can_probe: bool = True,
    ) -> None:
        """`window_size` is in readings. `can_probe`: decoder use can be had; without, `decoder_ignores_z` is not offered."""
        self.thresholds = thresholds
        """None: the defaults, those for sequences or those for steps."""
        self.window_size = window_size
        self.schedule = schedule or KLSchedule()
        self.can_probe = can_probe
        self.verdict = Verdict("cannot_tell", 0, "there is no reading yet")
        self._full_from = self.schedule.full_from()
        self._is_cyclical = self.schedule.falls()
        self._has_been_healthy = False
        self._points: list[Point] = []
        """The last ones, oldest first."""
        self._pending = Pending("cannot_tell", 0, 0)
        self._upheld_at = 0
        """The step of the last reading that said what the verdict says, or for healthy the like."""
        self._unupheld = 0
        """Readings since."""
        self._early_until = 0
        """The last step whose KL weight was not full."""
        self._faint_since: int | None = None
        """The step from which all readings were faint, also those under a smaller weight: under the full one it is no better."""
        self._unheard = 0
        """Readings since the decoder was last asked."""

    @property
    def has_begun(self) -> bool:
        """Whether there was a reading."""
        return bool(self._points)

    def wants_decoder_use(self, reading: Reading) -> bool:
        """Whether the decoder should be asked before this reading is judged: because the verdict is about to change, because
        there is none, or because nobody has asked for long."""
        if not self.can_probe or reading.decoder_use is not None:
            return False
        finding = self._find(self._points_with(reading), reading.scope)
        if not finding.decoder_matters:
            return False
        if finding.contradicts:
            return True
        if finding.name != "cannot_tell" and self._is_enough(self._pending_after(finding, reading.step), reading.step):
            return True
        return self._unheard + 1 >= (UNDECIDED_READINGS if finding.name == "cannot_tell" else UNHEARD_READINGS)

    def judge(self, reading: Reading) -> Verdict:
        """Take in a reading; return the verdict now in force."""
        self._unheard = 0 if reading.decoder_use is not None else self._unheard + 1
        self._points = self._points_with(reading)
        if self._points[-1].early:
            self._early_until = reading.step
        if not is_faint(self._points[-1], self._thresholds(reading.scope)):
            self._faint_since = None
        elif self._faint_since is None:
            self._faint_since = reading.step
        finding = self._find(self._points, reading.scope)
        self._pending = self._pending_after(finding, reading.step)
        if finding.name == self.verdict.name or {finding.name, self.verdict.name} <= UNHARMED:
            self._upheld_at, self._unupheld = reading.step, 0
        else:
            self._unupheld += 1
        if finding.name == self.verdict.name:
            self._pronounce(finding, self.verdict.since_step)
        elif self._is_enough(self._pending, reading.step):
            self._pronounce(finding, reading.step)
        elif self.verdict.name != "cannot_tell" and self._is_forsaken(reading.step):
            said = (
                f"for {self._unupheld} readings it was no longer {spoken(self.verdict.name)}, and nothing else for long"
            )
            self._pronounce(Finding("cannot_tell", f"{said}: {finding.evidence}", finding.numbers), reading.step)
        elif self.verdict.name == "cannot_tell":
            said = f"perhaps {spoken(finding.name)}, but not for long enough (since step {self._pending.since_step:,})"
            self._pronounce(Finding("cannot_tell", said, finding.numbers), self.verdict.since_step)
        return self.verdict

    def diverged(self, step: int, said: str) -> Verdict:
        """A run has ended in NaN or infinity before a reading could show it."""
        if self.verdict.name != "diverged":
            self._pronounce(Finding("diverged", said), step)
        return self.verdict

    def _pronounce(self, finding: Finding, since_step: int) -> None:
        self._has_been_healthy |= finding.name in UNHARMED
        active, weight = (self._points[-1].active, self._points[-1].weight) if self._points else (0, None)
        situation = Situation(self._has_been_healthy, self.schedule.is_steered, self._is_cyclical, weight)
        advice = advice_on(finding.name, situation, active)
        self.verdict = Verdict(
            finding.name, since_step, finding.evidence, advice, finding.numbers, finding.dead_by_step
        )

    def _find(self, points: list[Point], scope: Scope) -> Finding:
        return find(points, self._thresholds(scope), self.schedule.total_steps, self.verdict.name)

    def _points_with(self, reading: Reading) -> list[Point]:
        """The last ones and that of the reading, which takes the place of those that were taken at its step or later: a run may
        have gone back."""
        points = [point for point in self._points if point.step < reading.step]
        weights = [*(point.weight for point in points), reading.kl_weight]
        early = why_not_full(reading.step, weights, self.schedule, self._full_from)
        before = points[-1] if points else None
        return [*points, point_of(reading, early, self._thresholds(reading.scope), before)][-self.window_size :]

    def _thresholds(self, scope: Scope) -> Thresholds:
        return self.thresholds or (OF_STEPS if scope == "step" else OF_SEQUENCES)

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

    def _is_forsaken(self, step: int) -> bool:
        """Whether no reading has said for long what the verdict says, though they do not agree on anything else either."""
        patience = PATIENCE["cannot_tell"]
        steps = patience.share_of_run * (self.schedule.total_steps or 0)
        return self._unupheld > 2 * patience.readings and step - self._upheld_at > steps

    def state_dict(self) -> dict[str, Any]:
        """All that later verdicts depend on, in types of JSON."""
        return {
            "points": [list(point) for point in self._points],
            "verdict": self.verdict._asdict()
            | {"advice": list(self.verdict.advice), "numbers": dict(self.verdict.numbers)},
            "pending": list(self._pending),
            "upheld_at": self._upheld_at,
            "unupheld": self._unupheld,
            "early_until": self._early_until,
            "faint_since": self._faint_since,
            "unheard": self._unheard,
            "has_been_healthy": self._has_been_healthy,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._points = [Point(*point) for point in state["points"]][-self.window_size :]
        self.verdict = Verdict(**state["verdict"] | {"advice": tuple(state["verdict"]["advice"])})
        self._pending = Pending(*state["pending"])
        self._upheld_at, self._unupheld = state["upheld_at"], state["unupheld"]
        self._early_until = state["early_until"]
        self._faint_since = state["faint_since"]
        self._unheard = state["unheard"]
        self._has_been_healthy = state["has_been_healthy"]
