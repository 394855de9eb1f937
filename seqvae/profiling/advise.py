"""Advice that was measured: a command's settings in, what makes its training faster out, as a command line to use.

    advice = advise(Recipe("optimized", settings, callbacks), words, prog="python train_optimized.py")
    print("\\n".join(advice_lines(advice.as_dict(), ink)))

A run as it is stays alive, and one run after another, each with a change, takes turns with it. Of the changes that were faster, the
best of each theme are put together one by one, and measured again: only what is faster then is proposed. The rule: faster is
what gains more than 2 %, and gained something in three quarters of the rounds. The gain is the median of the rounds' ratios of real
steps per second or, where batches are others or a change acts only now and then, the ratio of the sums over all rounds.
"""

import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch

from seqvae.config.training import TrainingSettings
from seqvae.config.yaml_files import values_of
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import SettingsError, UsageError
from seqvae.profiling.find_batch import available_memory
from seqvae.profiling.measured_run import ENDINGS, Lap, MeasuredRun, Ready, Recipe
from seqvae.training.distributed import cpu_has_bf16_units
from seqvae.training.fit import make_data, with_few_shapes
from seqvae.training.trainer import UNITS

RULE = "faster: by more than 2 %, and in three quarters of the rounds"
LEAST_GAIN = 1.02
SECONDS_PER_TURN, ROUNDS = 1.0, 5
FEWEST_MICRO_BATCHES = 8
"""Of a turn, so that it holds long and short sequences."""
WARM_UP_STEPS, WARM_UP_TURNS = 8, 2.0
"""At least that many steps, and as long as that many turns."""
LEAD_STEPS = 1
START_NOISE_SECONDS = 2.0
"""What two starts of the same run may differ by on a busy machine."""
WORTH_WORKERS = 0.02
"""Share of a step that it waits for data, from which on more workers could matter."""
PAD_GRID = 32
"""Shapes: few enough for what is prepared for each, at a few percent of padding."""
USUAL_LOG_STEPS = 50
REGROUPED = "as many tokens in an optimizer step, in other batches"

Value = bool | int | str | None
"""Of a setting."""
Say = Callable[[str], object]


class Runner(Protocol):
    """What is needed of a `MeasuredRun`."""

    @property
    def ready(self) -> Ready: ...

    def turn(self, steps: int = 1, seconds: float = 0.0, lead_steps: int = 2) -> Lap: ...

    def close(self) -> None: ...


class Change(NamedTuple):
    """Settings that could be otherwise."""

    name: str
    theme: str
    """Changes of one theme exclude one another."""
    values: Mapping[str, Value]
    """By the names of their flags; only what differs."""
    reason: str
    """Why it might help."""
    effect: str = ""
    """What it changes beside the speed."""
    apart: str = ""
    """Why the user has to decide; such a change is never part of a proposal."""
    by_totals: bool = False
    """Whether its turns are compared by their sums."""

    @property
    def flags(self) -> list[str]:
        return as_typed(self.values)

    def apply(self, settings: TrainingSettings) -> TrainingSettings:
        """Return changed settings. ValueError where the other settings do not go with it."""
        unknown = set(self.values)
        for name, group in values_of(settings).items():
            mine = {key: self.values[key] for key in values_of(group) if key in self.values}
            unknown -= mine.keys()
            if mine:
                settings = replace(settings, **{name: replace(group, **mine)})
        assert not unknown, f"there is no setting {', '.join(unknown)}"
        return settings


class Verdict(StrEnum):
    FASTER = "faster"
    NO_FASTER = "no faster"
    SLOWER = "slower"
    UNPAID = "does not pay"
    """Faster, but its start takes longer than the run could save."""
    FAILED = "failed"


class Comparison(NamedTuple):
    """A change against the run as it is, in real steps per second."""

    gain: float
    ratios: list[float]
    """Of each round."""
    rate: float
    base_rate: float
    """Of the run as it is, meanwhile."""
    peak_memory_gib: float
    start_seconds: float
    """What the change takes more before it trains (compiling); below 0: less."""

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of the ratios."""
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

    def as_dict(self) -> dict[str, Any]:
        """Return it flat, in types of JSON; None where a failed trial has no number."""
        change, found = self.change, self.comparison
        lower, upper = found.quartiles if found else (None, None)
        return {
            "change": change.name,
            "theme": change.theme,
            "flags": shlex.join(change.flags),
            "values": dict(change.values),
            "reason": change.reason,
            "effect": change.effect,
            "apart": change.apart,
            "verdict": str(self.verdict),
            "remark": self.remark,
            "gain": found.gain if found else None,
            "lower": lower,
            "upper": upper,
            "ratios": found.ratios if found else [],
            "rate": found.rate if found else None,
            "base_rate": found.base_rate if found else None,
            "memory_gib": found.peak_memory_gib if found else None,
            "start_seconds": found.start_seconds if found else None,
        }


class Advice(NamedTuple):
    """What was tried, and what to type."""

    unit: str
    """What the rate counts."""
    base_rate: float
    """Real steps of sequences per second, of the run as it is."""
    base_spread: float
    """Of its turns' rates: middle half / median."""
    base_memory_gib: float
    run_seconds: float
    """How long the run as it is would train."""
    alone: list[Trial]
    together: list[Trial]
    """Those that were faster alone, measured again: the best, and then others with it."""
    best: Trial | None
    """What is proposed of `together`; None: nothing is faster."""
    command: str
    """With the best, or as it was."""
    seconds: float
    """How long it took to find out."""

    def as_dict(self) -> dict[str, Any]:
        """Return it in types of JSON."""
        return {
            **self._asdict(),
            "rule": RULE,
            "alone": [trial.as_dict() for trial in self.alone],
            "together": [trial.as_dict() for trial in self.together],
            "best": None if self.best is None else self.best.as_dict(),
        }


def advise(
    recipe: Recipe,
    words: Sequence[str],
    *,
    prog: str,
    seconds_per_turn: float = SECONDS_PER_TURN,
    rounds: int = ROUNDS,
    say: Say = print,
    start: Callable[[Recipe], Runner] = MeasuredRun,
) -> Advice:
    """Try changes and propose the best; `words` are what was typed behind `prog` for the recipe's settings."""
    begun = time.perf_counter()
    data = make_data(recipe.settings)
    unit = f"{UNITS[data.description.kind]}s"
    with closing(Contest(recipe, seconds_per_turn, rounds, start)) as contest:
        facts = facts_of(data, contest.base.ready, contest.laps[0])
        changes = list(changes_for(with_few_shapes(recipe.settings), facts))
        say(f"{_rate(contest.laps):,.0f} {unit}/s as it is; {len(changes)} changes to try")
        alone = []
        for number, change in enumerate(changes, start=1):
            alone.append(contest.compare(change))
            say(f"{number}/{len(changes)} {_line(alone[-1])}")
        together, best = best_together(alone, contest.compare, say)
        rates = [_rate([lap]) for lap in contest.laps]
        lower, middle, upper = statistics.quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (1, 1, 1)
        return Advice(
            unit=unit,
            base_rate=_rate(contest.laps),
            base_spread=(upper - lower) / middle,
            base_memory_gib=contest.laps[-1].peak_memory_gib,
            run_seconds=contest.run_seconds,
            alone=alone,
            together=together,
            best=best,
            command=f"{prog} {shlex.join(with_flags(words, best.change.values if best else {}))}",
            seconds=time.perf_counter() - begun,
        )


def best_together(
    alone: Sequence[Trial], compare: Callable[[Change], Trial], say: Say = print
) -> tuple[list[Trial], Trial | None]:
    """Return what was tried, one after the other, and the fastest of it.

    The best alone of each theme is measured again, as the first time it may have been lucky; then the next is added, and stays
    where both together are faster by more than 2 %.
    """
    strongest: dict[str, Trial] = {}
    faster = [trial for trial in alone if trial.verdict is Verdict.FASTER and not trial.change.apart]
    for trial in sorted(faster, key=lambda trial: trial.gain, reverse=True):
        strongest.setdefault(trial.change.theme, trial)
    chosen: list[Change] = []
    tried: list[Trial] = []
    best: Trial | None = None
    for trial in strongest.values():
        tried.append(compare(combined([*chosen, trial.change])))
        say(f"together: {_line(tried[-1])}")
        if tried[-1].verdict is Verdict.FASTER and (best is None or tried[-1].gain > best.gain * LEAST_GAIN):
            best = tried[-1]
            chosen.append(trial.change)
    return tried, best


def _line(trial: Trial) -> str:
    """Return a trial as a line while others are still to be tried."""
    ratios = "" if trial.comparison is None else f" ({', '.join(f'{ratio:.2f}' for ratio in trial.comparison.ratios)})"
    gain = "" if trial.comparison is None else f" {trial.gain:.2f}{ratios}"
    remark = f": {trial.remark}" if trial.remark else ""
    return f"{trial.change.name}:{gain} {trial.verdict}{remark}"


# --- Measuring ---------------------------------------------------------------------------------------------------------


class Contest:
    """The run as it is, and others that take turns with it. It waits while another trains: two processes are alive at most."""

    def __init__(
        self,
        recipe: Recipe,
        seconds_per_turn: float,
        rounds: int,
        start: Callable[[Recipe], Runner] = MeasuredRun,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`rounds`: at most; fewer where a change cannot be found faster any more."""
        self._recipe, self._start, self._now = recipe, start, now
        self._seconds_per_turn, self._rounds = seconds_per_turn, rounds
        self._base_error: Exception | None = None
        self.base = start(recipe)
        try:
            self._base_warm_up = self._warm_up(self.base)
            self.laps = [self._turn(self.base)]
            """All that the base did after its warm-up."""
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.base.close()

    @property
    def run_seconds(self) -> float:
        """How long the whole run would train as it is."""
        planned = self.base.ready.plan.total_steps * _seconds_per_step(self.laps)
        limit = self._recipe.settings.run.time_limit
        return planned if limit is None else min(planned, limit.total_seconds())

    def compare(self, change: Change) -> Trial:
        """Try a change. What goes wrong with it is its verdict; what goes wrong with the base is raised."""
        try:
            recipe = self._recipe._replace(name=change.name, settings=change.apply(self._recipe.settings))
        except ValueError as error:
            return Trial(change, Verdict.FAILED, remark=str(error))
        with closing(self._start(recipe)) as run:
            try:
                return self._measure(change, run)
            except (*ENDINGS, UsageError, SettingsError) as error:
                if error is self._base_error:
                    raise
                in_a_line = str(error).removeprefix(f"{change.name}: ").partition("\n")[0]  # a traceback may follow
                remark = "out of memory" if isinstance(error, MemoryError) else in_a_line
                return Trial(change, Verdict.FAILED, remark=remark)

    def _measure(self, change: Change, run: Runner) -> Trial:
        seconds, steps = self._warm_up(run)
        if change.values.get("compile_model") and not run.ready.is_compiled:
            return Trial(change, Verdict.NO_FASTER, remark="the run tried it itself, and went on uncompiled")
        ours: list[Lap] = []
        theirs: list[Lap] = []
        ratios: list[float] = []
        # Given up when enough rounds saw no gain that the lower quartile of all cannot come out above 1.
        most_without = -(-(self._rounds - 1) // 4)
        while len(ours) < self._rounds and sum(ratio <= 1 for ratio in ratios) <= most_without:
            if len(ours) % 2 == 0:  # now one goes first, now the other: neither finds the better machine
                theirs.append(self._base_turn())
                ours.append(self._turn(run))
            else:
                ours.append(self._turn(run))
                theirs.append(self._base_turn())
            ratios.append(_rate(ours[-1:]) / _rate(theirs[-1:]))
        # What is left of the starts without the steps that were made in them.
        seconds -= steps * _seconds_per_step(ours)
        base_seconds = self._base_warm_up[0] - self._base_warm_up[1] * _seconds_per_step(self.laps)
        comparison = Comparison(
            gain=_rate(ours) / _rate(theirs) if change.by_totals else statistics.median(ratios),
            ratios=ratios,
            rate=_rate(ours),
            base_rate=_rate(theirs),
            peak_memory_gib=ours[-1].peak_memory_gib,
            start_seconds=seconds - base_seconds,
        )
        return judged(change, comparison, self.run_seconds)

    def _base_turn(self) -> Lap:
        try:
            self.laps.append(self._turn(self.base))
        except ENDINGS as error:
            self._base_error = error
            raise
        return self.laps[-1]

    def _turn(self, run: Runner) -> Lap:
        return run.turn(-(-FEWEST_MICRO_BATCHES // run.ready.accumulate), self._seconds_per_turn, LEAD_STEPS)

    def _warm_up(self, run: Runner) -> tuple[float, int]:
        """Return the seconds from the process's start to the first turn, and the steps trained in them."""
        ready, begun = run.ready, self._now()
        lap = run.turn(WARM_UP_STEPS, WARM_UP_TURNS * self._seconds_per_turn, LEAD_STEPS)
        return ready.seconds + self._now() - begun, lap.steps + LEAD_STEPS


def judged(change: Change, comparison: Comparison, run_seconds: float) -> Trial:
    """Return the verdict on a change in a run of that length."""
    lower, upper = comparison.quartiles
    if comparison.gain > LEAST_GAIN and lower > 1:
        saved, paid = run_seconds * (1 - 1 / comparison.gain), comparison.start_seconds
        if saved < paid and paid > START_NOISE_SECONDS:
            remark = f"its start takes {paid:.0f} s, and in this run of {run_seconds:.0f} s it saves {saved:.0f} s"
            return Trial(change, Verdict.UNPAID, comparison, remark)
        return Trial(change, Verdict.FASTER, comparison)
    is_slower = comparison.gain < 1 / LEAST_GAIN and upper < 1
    return Trial(change, Verdict.SLOWER if is_slower else Verdict.NO_FASTER, comparison)


def _rate(laps: Sequence[Lap]) -> float:
    return sum(lap.real_steps for lap in laps) / sum(lap.seconds for lap in laps)


def _seconds_per_step(laps: Sequence[Lap]) -> float:
    return sum(lap.seconds for lap in laps) / sum(lap.steps for lap in laps)


# --- Changes worth trying ----------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What a first look at a run tells."""

    device: str
    """cpu, cuda or mps."""
    precision: str
    """In force."""
    has_bf16: bool
    """The device computes with it faster than with float32."""
    tokens: int
    """Steps of all training sequences."""
    longest: int
    """Steps of the longest, as it is padded."""
    tokens_per_batch: int
    """At most, in force."""
    waiting_share: float
    """Of a step, for data."""
    peak_memory_gib: float
    available_memory_gib: float
    """For one more run beside this one."""


def facts_of(data: SequenceDataModule, ready: Ready, lap: Lap) -> Facts:
    """Look at the data and at the first lap of the run as it is."""
    on_gpu = ready.device.startswith("cuda")
    available = torch.cuda.mem_get_info()[0] if on_gpu else available_memory().bytes
    return Facts(
        device=ready.device.partition(":")[0],
        precision=ready.precision,
        has_bf16=torch.cuda.is_bf16_supported() if on_gpu else ready.device == "cpu" and cpu_has_bf16_units(),
        tokens=int(data.split("train").lengths_N.sum(dtype="int64")),
        longest=data.longest,
        tokens_per_batch=data.limits.tokens_per_batch,
        waiting_share=lap.stages["data"] / lap.seconds,
        peak_memory_gib=lap.peak_memory_gib,
        available_memory_gib=available / 2**30,
    )


def changes_for(settings: TrainingSettings, facts: Facts) -> Iterator[Change]:
    """Yield the changes worth trying, in that order.

    A change of batches keeps the tokens of an optimizer step, so that the run goes on learning as before; what would learn
    differently, or gives something up, is measured and stands apart.
    """
    present = {name: value for group in values_of(settings).values() for name, value in values_of(group).items()}

    def change(name: str, theme: str, values: Mapping[str, Value], reason: str, **about: Any) -> Iterator[Change]:
        """Yield it unless all of it is in force already."""
        if differing := {key: value for key, value in values.items() if present[key] != value}:
            yield Change(name, theme, differing, reason, **about)

    batches, compute, watch = settings.batches, settings.compute, settings.monitoring
    accumulate, by_length = (
        settings.optimizer.gradient_accumulation_steps,
        batches.bucketing and batches.use_dynamic_padding,
    )
    regrouped: dict[str, Any] = {"effect": REGROUPED, "by_totals": True}
    larger, smaller = (_batches_times(factor, settings, facts) for factor in (2, 0.5))
    has_room = 2 * facts.peak_memory_gib <= facts.available_memory_gib or compute.gradient_checkpointing
    fitting: dict[str, Value] = {} if has_room else {"gradient_checkpointing": True}
    if larger and accumulate % 2 == 0:
        values = {**larger, **fitting, "gradient_accumulation_steps": accumulate // 2}
        yield from change("batches 2 times as large", "batches", values, "larger products of matrices", **regrouped)
    if smaller:
        values = {**smaller, "gradient_accumulation_steps": 2 * accumulate}
        yield from change("batches half as large", "batches", values, "half as much stays in the caches", **regrouped)
    if larger and not fitting and 2 * accumulate * facts.tokens_per_batch <= facts.tokens:
        apart = {"apart": "another size of optimizer step learns differently", "by_totals": True}
        values = {**larger, "gradient_accumulation_steps": accumulate}
        yield from change("twice the batch", "step size", values, "fewer optimizer steps", **apart)
    if not by_length:
        number = max(1, facts.tokens_per_batch // facts.longest)
        number = number if batches.batch_size is None else min(number, batches.batch_size)
        values = {"bucketing": True, "use_dynamic_padding": True, "batch_size": number}
        effect = "as many sequences in an optimizer step, those of similar length together"
        yield from change("similar lengths together", "batches", values, "less padding", effect=effect, by_totals=True)
    elif batches.pad_grid:
        yield from change("any shape", "shapes", {"pad_grid": 0}, "less padding", **regrouped)
    else:
        reason = "libraries prepare themselves for every shape"
        yield from change(f"at most {PAD_GRID} shapes", "shapes", {"pad_grid": PAD_GRID}, reason, **regrouped)
    precisions = {"32-true": True, "bf16-mixed": facts.has_bf16, "16-mixed": facts.device != "cpu"}
    for name, helps in precisions.items():
        if helps and name != facts.precision:
            effect = f"numbers are rounded {'less' if name == '32-true' else 'more'}"
            yield Change(name, "precision", {"precision": name}, "other arithmetic", effect)
    if compute.compile_model:
        yield from change("not compiled", "compiler", {"compile_model": False}, "compiling has to pay")
    else:
        yield from change("compiled", "compiler", {"compile_model": True}, "less memory traffic")
    if compute.gradient_checkpointing:
        values = {"gradient_checkpointing": False}
        yield from change("no gradient checkpointing", "memory", values, "nothing computed twice")
    if facts.device == "cpu":
        values = {"plain_operations": False}
        yield from change("operations by hand", "operations", values, "less memory traffic")
    yield from change("fused optimizer", "optimizer", {"fused_optimizer": True}, "one pass over the weights")
    if facts.device == "cuda":
        yield from change("pinned memory", "transfer", {"pin_memory": True}, "batches copied meanwhile")
    waits = f"a step waits {facts.waiting_share:.1%} of its time for data"
    loaders: dict[str, dict[str, Value]] = {
        "1 loader thread": {"worker_type": "thread", "num_workers": 1},
        "no loader thread": {"num_workers": 0},
        "2 loader processes": {"worker_type": "process", "num_workers": 2},
    }
    if facts.waiting_share >= WORTH_WORKERS:
        loaders["2 loader threads"] = {"worker_type": "thread", "num_workers": 2}
    is_one_thread = settings.loading.worker_type == "thread" and settings.loading.num_workers in ("auto", 1)
    for name, values in loaders.items():
        if name != "1 loader thread" or not is_one_thread:
            yield from change(name, "loading", values, waits)
    if not watch.disable_metrics_monitoring:
        effect = "the posterior is read half as often or less"
        values = {"fast_detection": True}
        yield from change("watching less", "watching", values, "fewer readings", effect=effect, by_totals=True)
    if settings.run.log_every_n_steps < USUAL_LOG_STEPS:
        values = {"log_every_n_steps": USUAL_LOG_STEPS}
        effect = "metrics.csv is coarser"
        yield from change("logging less", "logging", values, "fewer lines", effect=effect, by_totals=True)


def _batches_times(factor: float, settings: TrainingSettings, facts: Facts) -> dict[str, Value]:
    """Return what makes batches larger or smaller; nothing where the data do not allow it."""
    number, budget = settings.batches.batch_size, settings.batches.tokens_per_batch
    values: dict[str, Value] = {}
    if number is not None:
        values["batch_size"] = int(number * factor)
    if number is None or budget is not None:
        values["tokens_per_batch"] = int(facts.tokens_per_batch * factor)
    is_whole = number is None or number * factor % 1 == 0
    return values if is_whole and facts.longest <= facts.tokens_per_batch * factor <= facts.tokens else {}


def combined(changes: Sequence[Change]) -> Change:
    """Return all of them as one change; they are of different themes."""
    values = {name: value for change in changes for name, value in change.values.items()}
    assert len(values) == sum(len(change.values) for change in changes), "two changes of one setting"
    return Change(
        name=" + ".join(change.name for change in changes),
        theme=" + ".join(change.theme for change in changes),
        values=values,
        reason="each was faster alone",
        effect="; ".join(dict.fromkeys(change.effect for change in changes if change.effect)),
        by_totals=any(change.by_totals for change in changes),
    )


def as_typed(values: Mapping[str, Value]) -> list[str]:
    """Return settings as words of a command line.

    >>> as_typed({"tokens_per_batch": 800, "compile_model": True, "bucketing": False, "batch_size": None})
    ['--tokens_per_batch', '800', '--compile_model', '--no_bucketing', '--batch_size', 'null']
    """
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words += [f"--{name}", "null" if value is None else str(value)]
    return words


def with_flags(words: Iterable[str], values: Mapping[str, Value]) -> list[str]:
    """Return what a user typed, with other values for some flags: in place of those typed, not beside them.

    >>> with_flags(["--batch-size=4", "--data_dir", "my data", "--no_bucketing"], {"batch_size": 8, "bucketing": True})
    ['--data_dir', 'my data', '--batch_size', '8', '--bucketing']
    """
    kept: list[str] = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):  # no value does
            is_replaced = word[2:].partition("=")[0].replace("-", "_").removeprefix("no_") in values
        if not is_replaced:
            kept.append(word)
    return [*kept, *as_typed(values)]
