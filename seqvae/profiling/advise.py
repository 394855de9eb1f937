"""Advice that was measured: a run's settings in; what makes it train faster out, as a command line to use.

The run as it is stays alive and takes turns with one changed run after another. Faster is what gains more than 2 %, and gained
something in three quarters of the rounds. What was faster is measured again, all of it together and the best alone, since a
first gain may be luck; only what is faster then is proposed.
"""

import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from seqvae.config.flags import without_flags
from seqvae.config.training import TrainingSettings
from seqvae.config.yaml_files import to_flat_dict, values_of
from seqvae.errors import SettingsError, UsageError
from seqvae.monitors.hardware import GIB
from seqvae.profiling.find_batch import available_memory
from seqvae.profiling.measured_run import ENDINGS, Lap, MeasuredRun, Recipe
from seqvae.training.distributed import cpu_has_bf16_units
from seqvae.training.fit import make_data, with_few_shapes

RULE = "faster: by more than 2 %, and in three quarters of the rounds"
LEAST_GAIN = 1.02
SECONDS_PER_TURN, ROUNDS = 1.0, 5
FEWEST_MICRO_BATCHES = 8
"""The least of a turn, so that it holds long and short sequences."""
WARM_UP_STEPS, WARM_UP_TURNS = 8, 2.0
"""A warm-up is at least that many steps, and as long as that many turns."""
LEAD_STEPS = 1
START_NOISE_SECONDS = 2.0
"""What two starts of the same run may differ by on a busy machine."""
WORTH_WORKERS = 0.02
"""Share of a step that it waits for data, from which on more workers could matter."""
PAD_GRID = 32
"""Shapes: few enough for what is prepared for each, at a few percent of padding."""
REGROUPED = "as many tokens in an optimizer step, in other batches"

Value = bool | int | str | None


class Change(NamedTuple):
    """Settings that could be otherwise."""

    name: str
    theme: str
    """Changes of one theme exclude one another."""
    values: Mapping[str, Value]
    """What differs, by the names of the flags."""
    reason: str
    """Why it might help."""
    effect: str = ""
    """What it changes beside the speed."""
    by_totals: bool = False
    """Compare the sums over all rounds, not the median of the rounds: its batches are others, or it acts only now and then."""

    def apply(self, settings: TrainingSettings) -> TrainingSettings:
        """Return changed settings. ValueError where the other settings do not go with it."""
        unknown = self.values.keys() - to_flat_dict(settings)
        assert not unknown, f"there is no setting {', '.join(unknown)}"
        for name, group in values_of(settings).items():
            if mine := {key: self.values[key] for key in values_of(group) if key in self.values}:
                settings = replace(settings, **{name: replace(group, **mine)})
        return settings


class Verdict(StrEnum):
    """The outcome of a trial."""

    FASTER = "faster"
    NO_FASTER = "no faster"
    SLOWER = "slower"
    UNPAID = "does not pay"
    """Faster, but its start takes longer than the run could save."""
    FAILED = "failed"


class Trial(NamedTuple):
    """The gain of a change, in real steps of sequences per second against the run as it is; without ratios, none was measured."""

    change: Change
    verdict: Verdict
    remark: str = ""
    gain: float = 0.0
    ratios: Sequence[float] = ()
    """The gain in each round."""
    rate: float = 0.0
    base_rate: float = 0.0
    """The rate of the run as it is, meanwhile."""
    memory_gib: float = 0.0
    start_seconds: float = 0.0
    """What the change takes more before it trains (compiling); below 0: less."""

    def as_dict(self) -> dict[str, Any]:
        """Return it flat, in types of JSON; None where nothing was measured."""
        change, numbers = self.change, ("gain", "rate", "base_rate", "memory_gib", "start_seconds")
        lower, upper = middle_half(self.ratios) if self.ratios else (None, None)
        return {
            "change": change.name,
            "theme": change.theme,
            "values": dict(change.values),
            "reason": change.reason,
            "effect": change.effect,
            "flags": shlex.join(as_typed(change.values)),
            "verdict": str(self.verdict),
            "remark": self.remark,
            "ratios": list(self.ratios),
            "lower": lower,
            "upper": upper,
            **{name: getattr(self, name) if self.ratios else None for name in numbers},
        }


class Advice(NamedTuple):
    """The changes that were tried, and the command to type."""

    unit: str
    """What the rate counts."""
    base_rate: float
    """Real steps of sequences per second, of the run as it is."""
    base_spread: float
    """Middle half of its turns' rates / their median."""
    base_memory_gib: float
    run_seconds: float
    """How long the run as it is would train."""
    alone: list[Trial]
    together: list[Trial]
    """Measured again: all that were faster, and the best of them alone."""
    best: Trial | None
    """What is proposed of `together`; None: nothing is faster."""
    command: str
    """The command line with the best, or as it was."""
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
    say: Callable[[str], object] = print,
    start: Callable[[Recipe], MeasuredRun] = MeasuredRun,
) -> Advice:
    """Try changes and propose the best; `words` are what was typed behind `prog` for the recipe's settings."""
    begun = time.perf_counter()
    data = make_data(recipe.settings)
    unit = f"{data.description.unit}s"
    with start(recipe) as base:
        contest = Contest(recipe, base, seconds_per_turn, rounds, start)
        ready, first = base.ready, contest.laps[0]
        on_gpu = ready.device.startswith("cuda")
        available = torch.cuda.mem_get_info()[0] if on_gpu else available_memory().bytes
        facts = Facts(
            device=ready.device.partition(":")[0],
            precision=ready.precision,
            has_bf16=torch.cuda.is_bf16_supported() if on_gpu else ready.device == "cpu" and cpu_has_bf16_units(),
            tokens=int(data.split("train").lengths_N.sum(dtype="int64")),
            longest=data.longest,
            tokens_per_batch=data.limits.tokens_per_batch,
            waiting_share=first.stages["data"] / first.seconds,
            has_room=2 * first.peak_memory_gib * GIB <= available,
        )
        changes = changes_for(with_few_shapes(recipe.settings), facts)
        say(f"{rate_of(contest.laps):,.0f} {unit}/s as it is; {len(changes)} changes to try")

        def compare(change: Change, title: str) -> Trial:
            trial = contest.compare(change)
            ratios = ", ".join(f"{ratio:.2f}" for ratio in trial.ratios)
            gain = f" {trial.gain:.2f} ({ratios})" if ratios else ""
            say(f"{title} {change.name}:{gain} {trial.verdict}{f': {trial.remark}' if trial.remark else ''}")
            return trial

        alone = [compare(change, f"{number}/{len(changes)}") for number, change in enumerate(changes, start=1)]
        together = [compare(change, "again:") for change in worth_measuring_again(alone)]
        faster = [trial for trial in together if trial.verdict is Verdict.FASTER]
        best = max(faster, key=lambda trial: trial.gain, default=None)
        rates = [rate_of([lap]) for lap in contest.laps]
        lower, upper = middle_half(rates)
        return Advice(
            unit=unit,
            base_rate=rate_of(contest.laps),
            base_spread=(upper - lower) / statistics.median(rates),
            base_memory_gib=contest.laps[-1].peak_memory_gib,
            run_seconds=contest.run_seconds,
            alone=alone,
            together=together,
            best=best,
            command=f"{prog} {shlex.join(with_flags(words, best.change.values if best else {}))}",
            seconds=time.perf_counter() - begun,
        )


def worth_measuring_again(alone: Iterable[Trial]) -> list[Change]:
    """Return all that were faster as one change, the best of each theme, and the best of all alone."""
    strongest: dict[str, Change] = {}
    faster = [trial for trial in alone if trial.verdict is Verdict.FASTER]
    for trial in sorted(faster, key=lambda trial: trial.gain, reverse=True):
        strongest.setdefault(trial.change.theme, trial.change)
    changes = list(strongest.values())
    if len(changes) < 2:
        return changes
    values = {name: value for change in changes for name, value in change.values.items()}
    assert len(values) == sum(len(change.values) for change in changes), "two changes of one setting"
    together = Change(
        name=" + ".join(change.name for change in changes),
        theme=" + ".join(strongest),
        values=values,
        reason="each was faster alone",
        effect="; ".join(dict.fromkeys(change.effect for change in changes if change.effect)),
        by_totals=any(change.by_totals for change in changes),
    )
    return [together, changes[0]]


class Contest:
    """The run as it is, which takes turns with changed ones. It waits while they train: two processes are alive at most."""

    def __init__(
        self,
        recipe: Recipe,
        base: MeasuredRun,
        seconds_per_turn: float,
        rounds: int,
        start: Callable[[Recipe], MeasuredRun],
    ) -> None:
        """Warm up the base. `rounds` is a maximum: there are fewer where a change cannot be found faster any more."""
        self._recipe, self._base, self._start = recipe, base, start
        self._seconds_per_turn, self._rounds = seconds_per_turn, rounds
        base.turn(WARM_UP_STEPS, WARM_UP_TURNS * seconds_per_turn, LEAD_STEPS)
        self.laps = [self._turn(base)]
        """All turns of the base after its warm-up."""

    @property
    def run_seconds(self) -> float:
        """Return how long the whole run would train as it is."""
        steps = sum(lap.steps for lap in self.laps)
        planned = self._base.ready.plan.total_steps * sum(lap.seconds for lap in self.laps) / steps
        limit = self._recipe.settings.run.time_limit
        return planned if limit is None else min(planned, limit.total_seconds())

    def compare(self, change: Change) -> Trial:
        """Try a change. What goes wrong with it is its verdict; what goes wrong with the base is raised."""
        try:
            recipe = self._recipe._replace(name=change.name, settings=change.apply(self._recipe.settings))
        except ValueError as error:
            return Trial(change, Verdict.FAILED, str(error))
        ours: list[Lap] = []
        theirs: list[Lap] = []
        ratios: list[float] = []
        with self._start(recipe) as run:
            training = run
            try:
                run.turn(WARM_UP_STEPS, WARM_UP_TURNS * self._seconds_per_turn, LEAD_STEPS)
                if change.values.get("compile_model") and not run.ready.is_compiled:
                    return Trial(change, Verdict.NO_FASTER, "the run tried it itself, and went on uncompiled")
                # Given up when enough rounds saw no gain that the lower quartile of all cannot come out above 1.
                most_without = -(-(self._rounds - 1) // 4)
                while len(ratios) < self._rounds and sum(ratio <= 1 for ratio in ratios) <= most_without:
                    # Now one goes first, now the other: neither finds the better machine.
                    for training in (self._base, run) if len(ratios) % 2 == 0 else (run, self._base):
                        (ours if training is run else theirs).append(self._turn(training))
                    ratios.append(rate_of(ours[-1:]) / rate_of(theirs[-1:]))
            except (*ENDINGS, UsageError, SettingsError) as error:
                if training is self._base:
                    raise
                in_a_line = str(error).removeprefix(f"{change.name}: ").partition("\n")[0]  # a traceback may follow
                return Trial(change, Verdict.FAILED, "out of memory" if isinstance(error, MemoryError) else in_a_line)
            start_seconds = run.ready.seconds - self._base.ready.seconds
        self.laps += theirs
        gain = rate_of(ours) / rate_of(theirs) if change.by_totals else statistics.median(ratios)
        lower, upper = middle_half(ratios)
        remark, saved = "", self.run_seconds * (1 - 1 / gain)
        if gain < 1 / LEAST_GAIN and upper < 1:
            verdict = Verdict.SLOWER
        elif gain <= LEAST_GAIN or lower <= 1:
            verdict = Verdict.NO_FASTER
        elif saved < start_seconds and start_seconds > START_NOISE_SECONDS:
            verdict = Verdict.UNPAID
            remark = f"its start takes {start_seconds:.0f} s, and in this run of {self.run_seconds:.0f} s it saves {saved:.0f} s"
        else:
            verdict = Verdict.FASTER
        memory_gib = ours[-1].peak_memory_gib
        return Trial(change, verdict, remark, gain, ratios, rate_of(ours), rate_of(theirs), memory_gib, start_seconds)

    def _turn(self, run: MeasuredRun) -> Lap:
        return run.turn(-(-FEWEST_MICRO_BATCHES // run.ready.accumulate), self._seconds_per_turn, LEAD_STEPS)


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def rate_of(laps: Sequence[Lap]) -> float:
    """Return the real steps per second."""
    return sum(lap.real_steps for lap in laps) / sum(lap.seconds for lap in laps)


# --- Changes worth trying ----------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """The facts that a first look at a run and its data shows."""

    device: str
    """cpu, cuda or mps."""
    precision: str
    """The precision in force."""
    has_bf16: bool
    """The device computes with it faster than with float32."""
    tokens: int
    """Steps of all training sequences."""
    longest: int
    """Steps of the longest, as it is padded."""
    tokens_per_batch: int
    """The limit in force."""
    waiting_share: float
    """Share of a step that waits for data."""
    has_room: bool
    """Memory is left for a run that needs twice as much beside this one."""


def changes_for(settings: TrainingSettings, facts: Facts) -> list[Change]:
    """Return the changes worth trying, in that order. Each keeps the size of an optimizer step: the run learns as before."""
    present = to_flat_dict(settings)
    batches, compute, loading = settings.batches, settings.compute, settings.loading
    accumulate = settings.optimizer.gradient_accumulation_steps
    changes: list[Change] = []

    def propose(
        name: str, theme: str, values: Mapping[str, Value], reason: str, effect: str = "", by_totals: bool = False
    ) -> None:
        """Add a change unless all of it is in force already."""
        if differing := {key: value for key, value in values.items() if present[key] != value}:
            changes.append(Change(name, theme, differing, reason, effect, by_totals))

    def propose_batches(name: str, factor: float, reason: str) -> None:
        budget = facts.tokens_per_batch * factor // 1
        values: dict[str, float] = {}
        if batches.batch_size is not None:
            values["batch_size"] = batches.batch_size * factor
        if batches.batch_size is None or batches.tokens_per_batch is not None:
            values["tokens_per_batch"] = budget
        values["gradient_accumulation_steps"] = accumulate / factor
        if all(value % 1 == 0 for value in values.values()) and facts.longest <= budget <= facts.tokens:
            whole = {key: int(value) for key, value in values.items()}
            propose(name, "batches", whole, reason, REGROUPED, by_totals=True)

    if facts.has_room:
        propose_batches("batches 2 times as large", 2, "larger products of matrices")
    propose_batches("batches half as large", 0.5, "half as much stays in the caches")
    if not (batches.bucketing and batches.use_dynamic_padding):
        number = max(1, facts.tokens_per_batch // facts.longest)
        number = number if batches.batch_size is None else min(number, batches.batch_size)
        by_length = {"bucketing": True, "use_dynamic_padding": True, "batch_size": number}
        effect = "as many sequences in an optimizer step, those of similar length together"
        propose("similar lengths together", "batches", by_length, "less padding", effect, by_totals=True)
    elif batches.pad_grid:
        propose("any shape", "shapes", {"pad_grid": 0}, "less padding", REGROUPED, by_totals=True)
    else:
        reason = "libraries prepare themselves for every shape"
        propose(f"at most {PAD_GRID} shapes", "shapes", {"pad_grid": PAD_GRID}, reason, REGROUPED, by_totals=True)
    precisions = {"32-true": True, "bf16-mixed": facts.has_bf16, "16-mixed": facts.device != "cpu"}
    for name, helps in precisions.items():
        if helps and name != facts.precision:
            effect = f"numbers are rounded {'less' if name == '32-true' else 'more'}"
            changes.append(Change(name, "precision", {"precision": name}, "other arithmetic", effect))
    if compute.compile_model:
        propose("not compiled", "compiler", {"compile_model": False}, "compiling has to pay")
    else:
        propose("compiled", "compiler", {"compile_model": True}, "less memory traffic")
    propose("no gradient checkpointing", "memory", {"gradient_checkpointing": False}, "nothing computed twice")
    if facts.device == "cpu":
        propose("operations by hand", "operations", {"plain_operations": False}, "less memory traffic")
    propose("fused optimizer", "optimizer", {"fused_optimizer": True}, "one pass over the weights")
    if facts.device == "cuda":
        propose("pinned memory", "transfer", {"pin_memory": True}, "batches copied meanwhile")
    waits = f"a step waits {facts.waiting_share:.1%} of its time for data"
    if loading.worker_type != "thread" or loading.num_workers not in ("auto", 1):
        propose("1 loader thread", "loading", {"worker_type": "thread", "num_workers": 1}, waits)
    if facts.waiting_share >= WORTH_WORKERS:
        propose("2 loader threads", "loading", {"worker_type": "thread", "num_workers": 2}, waits)
    if not settings.monitoring.disable_metrics_monitoring:
        effect = "the posterior is read half as often or less"
        propose("watching less", "watching", {"fast_detection": True}, "fewer readings", effect, by_totals=True)
    return changes


# --- Command lines -----------------------------------------------------------------------------------------------------


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


def with_flags(words: Sequence[str], values: Mapping[str, Value]) -> list[str]:
    """Return what a user typed, with other values for some flags: in place of those typed, not beside them.

    >>> with_flags(["--batch-size=4", "--data_dir", "my data", "--no_bucketing"], {"batch_size": 8, "bucketing": True})
    ['--data_dir', 'my data', '--batch_size', '8', '--bucketing']
    """
    return [*without_flags(words, values), *as_typed(values)]
