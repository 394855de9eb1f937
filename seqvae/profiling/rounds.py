"""Changes tried out: a run that stays alive, and others that take turns with it, one after another.

    with Rounds(recipe, Pace()) as rounds:
        trial = rounds.compare(change)

The rule: a change is faster where its gain is more than 2 % and three quarters of the rounds saw one. The gain is the median of
the rounds' ratios of real steps a second, or, where the two have other batches, the ratio of the sums over all rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from seqvae.errors import SettingsError, UsageError
from seqvae.profiling.changes import Change
from seqvae.profiling.contestant import ENDINGS, MeasuredRun, Recipe
from seqvae.profiling.messages import Lap, Ready

LEAST_GAIN = 1.02
FEWEST_MICRO_BATCHES = 8
"""Of a turn, so that it holds long and short sequences."""
WARM_UP_STEPS, WARM_UP_TURNS = 8, 2.0
"""At least so many steps, and as long as so many turns."""
LEAD_STEPS = 1
START_NOISE_SECONDS = 2.0
"""What two starts of the same run may differ by on a busy machine."""
RULE = "faster: by more than 2 %, and in three quarters of the rounds"


class Pace(NamedTuple):
    """How thoroughly to measure."""

    seconds_per_turn: float = 1.0
    rounds: int = 5
    """At most: fewer where a change cannot be found faster any more."""


class Runner(Protocol):
    """What is needed of a Contestant."""

    @property
    def ready(self) -> Ready: ...

    def turn(self, steps: int = 1, seconds: float = 0.0, lead_steps: int = 2) -> Lap: ...

    def close(self) -> None: ...


Start = Callable[[Recipe], Runner]


class Verdict(StrEnum):
    FASTER = "faster"
    NO_FASTER = "no faster"
    SLOWER = "slower"
    UNPAID = "does not pay"
    """Faster, but its start takes longer than the run could save."""
    FAILED = "failed"


class Comparison(NamedTuple):
    """Of a change with the run as it is."""

    gain: float
    """Real steps a second / real steps a second."""
    ratios: list[float]
    """Of each round."""
    rate: float
    """Real steps a second, with the change."""
    base_rate: float
    """Meanwhile, without."""
    peak_memory_gib: float
    start_seconds: float
    """That the change takes more before it trains (compiling); below 0: less."""

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the ratios, the lower and the upper one."""
        if len(self.ratios) < 2:
            return self.ratios[0], self.ratios[0]
        lower, _, upper = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return lower, upper


class Trial(NamedTuple):
    """What came of a change."""

    change: Change
    verdict: Verdict
    comparison: Comparison | None = None
    """None: it failed."""
    remark: str = ""

    @property
    def gain(self) -> float:
        return self.comparison.gain if self.comparison else 0.0


class _BaseEnded(Exception):
    """The run that all others are compared with is gone."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Rounds:
    """The base waits while another trains, so that two processes are alive at most and one of them works."""

    def __init__(
        self,
        recipe: Recipe,
        pace: Pace,
        start: Start = MeasuredRun,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._recipe, self._pace, self._start, self._now = recipe, pace, start, now
        self._base = start(recipe)
        self._laps: list[Lap] = []
        """All that the base did after its warm-up."""

    def __enter__(self) -> Self:
        try:
            self._base_warm_up = self._warm_up(self._base)
            self._laps.append(self._turn(self._base))
        except BaseException:
            self._base.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._base.close()

    @property
    def ready(self) -> Ready:
        return self._base.ready

    @property
    def first_lap(self) -> Lap:
        return self._laps[0]

    @property
    def base_rate(self) -> float:
        """Real steps a second over all that was measured."""
        return _rate(self._laps)

    @property
    def base_memory_gib(self) -> float:
        return self._laps[-1].peak_memory_gib

    @property
    def base_spread(self) -> float:
        """How far its turns lie apart, the upper quartile from the lower one, as a share of the median."""
        rates = [_rate([lap]) for lap in self._laps]
        if len(rates) < 2:
            return 0.0
        lower, middle, upper = statistics.quantiles(rates, n=4, method="inclusive")
        return (upper - lower) / middle

    @property
    def run_seconds(self) -> float:
        """That the whole run would train for as it is."""
        planned = self.ready.plan.total_steps * _seconds_per_step(self._laps)
        limit = self._recipe.settings.run.time_limit
        return planned if limit is None else min(planned, limit.total_seconds())

    def compare(self, change: Change) -> Trial:
        """What goes wrong with the change is its verdict; what goes wrong with the base is raised."""
        try:
            recipe = self._recipe._replace(name=change.name, settings=change.apply(self._recipe.settings))
        except ValueError as error:
            return Trial(change, Verdict.FAILED, remark=str(error))
        runner = self._start(recipe)
        try:
            return self._measure(change, runner)
        except _BaseEnded as ended:
            raise ended.error from None
        except (*ENDINGS, UsageError, SettingsError) as error:
            return Trial(change, Verdict.FAILED, remark=_in_a_line(error, change.name))
        finally:
            runner.close()

    def _measure(self, change: Change, runner: Runner) -> Trial:
        warm_up = self._warm_up(runner)
        if change.values.get("compile_model") and not runner.ready.is_compiled:
            return Trial(change, Verdict.NO_FASTER, remark="the run tried it itself, and went on uncompiled")
        ours, theirs = self._take_turns(runner)
        ratios = _ratios(ours, theirs)
        comparison = Comparison(
            gain=_rate(ours) / _rate(theirs) if change.by_totals else statistics.median(ratios),
            ratios=ratios,
            rate=_rate(ours),
            base_rate=_rate(theirs),
            peak_memory_gib=ours[-1].peak_memory_gib,
            start_seconds=warm_up.cost(ours) - self._base_warm_up.cost(self._laps),
        )
        return judged(change, comparison, self.run_seconds)

    def _take_turns(self, runner: Runner) -> tuple[list[Lap], list[Lap]]:
        """Of the change and of the base, round by round. Now one goes first, now the other: neither finds the better machine."""
        ours: list[Lap] = []
        theirs: list[Lap] = []
        while len(ours) < self._pace.rounds and not is_hopeless(_ratios(ours, theirs), self._pace.rounds):
            if len(ours) % 2 == 0:
                theirs.append(self._base_turn())
                ours.append(self._turn(runner))
            else:
                ours.append(self._turn(runner))
                theirs.append(self._base_turn())
        return ours, theirs

    def _base_turn(self) -> Lap:
        try:
            lap = self._turn(self._base)
        except ENDINGS as error:
            raise _BaseEnded(error) from error
        self._laps.append(lap)
        return lap

    def _turn(self, runner: Runner) -> Lap:
        steps = -(-FEWEST_MICRO_BATCHES // runner.ready.accumulate)
        return runner.turn(steps, self._pace.seconds_per_turn, LEAD_STEPS)

    def _warm_up(self, runner: Runner) -> "_WarmUp":
        ready, begun = runner.ready, self._now()
        lap = runner.turn(WARM_UP_STEPS, WARM_UP_TURNS * self._pace.seconds_per_turn, LEAD_STEPS)
        seconds = ready.seconds + self._now() - begun
        return _WarmUp(seconds, lap.steps + LEAD_STEPS)


class _WarmUp(NamedTuple):
    seconds: float
    """From the process's start to its first turn."""
    steps: int

    def cost(self, laps: Sequence[Lap]) -> float:
        """What is left of it without the steps that it made."""
        return self.seconds - self.steps * _seconds_per_step(laps)


def judged(change: Change, comparison: Comparison, run_seconds: float) -> Trial:
    lower, upper = comparison.quartiles
    if comparison.gain > LEAST_GAIN and lower > 1:
        saved, paid = run_seconds * (1 - 1 / comparison.gain), comparison.start_seconds
        if saved < paid and paid > START_NOISE_SECONDS:
            remark = f"its start takes {paid:.0f} s, and in this run of {run_seconds:.0f} s it saves {saved:.0f} s"
            return Trial(change, Verdict.UNPAID, comparison, remark)
        return Trial(change, Verdict.FASTER, comparison)
    is_slower = comparison.gain < 1 / LEAST_GAIN and upper < 1
    return Trial(change, Verdict.SLOWER if is_slower else Verdict.NO_FASTER, comparison)


def is_hopeless(ratios: Sequence[float], rounds: int) -> bool:
    """Whether so many rounds saw no gain that the lower quartile of all cannot come out above 1.

    >>> is_hopeless([0.9, 1.2, 1.3], 5), is_hopeless([0.9, 1.2, 0.95], 5)
    (False, True)
    """
    return sum(ratio <= 1 for ratio in ratios) > -(-(rounds - 1) // 4)


def _ratios(ours: Sequence[Lap], theirs: Sequence[Lap]) -> list[float]:
    return [_rate([mine]) / _rate([base]) for mine, base in zip(ours, theirs, strict=True)]


def _rate(laps: Sequence[Lap]) -> float:
    return sum(lap.real_steps for lap in laps) / sum(lap.seconds for lap in laps)


def _seconds_per_step(laps: Sequence[Lap]) -> float:
    return sum(lap.seconds for lap in laps) / sum(lap.steps for lap in laps)


def _in_a_line(error: Exception, name: str) -> str:
    """What went wrong, without the traceback that may be behind it."""
    if isinstance(error, MemoryError):
        return "out of memory"
    return str(error).removeprefix(f"{name}: ").partition("\n")[0]
