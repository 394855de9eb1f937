"""Advice that was measured: a command's settings in, what makes its training faster out, as a command line to use.

    advice = advise(Recipe("optimized", settings, callbacks), words, prog="python train_optimized.py")
    print("\\n".join(advice_lines(advice.as_dict(), ink)))

Each change is tried alone. Of those that were faster, the best of each theme are put together one by one, and measured anew: only
what is faster then is proposed.
"""

import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from seqvae.data.datamodule import SequenceDataModule
from seqvae.profiling.candidates import Facts, changes_for
from seqvae.profiling.changes import Change, combined, with_flags
from seqvae.profiling.contestant import MeasuredRun, Recipe
from seqvae.profiling.memory import available_memory
from seqvae.profiling.messages import Lap, Ready
from seqvae.profiling.rounds import LEAST_GAIN, RULE, Pace, Rounds, Start, Trial, Verdict
from seqvae.training.distributed import cpu_has_bf16_units
from seqvae.training.fit import make_data, with_few_shapes
from seqvae.training.trainer import UNITS

GIB = 2**30

Compare = Callable[[Change], Trial]


class Advice(NamedTuple):
    """What was tried, and what to type."""

    unit: str
    """What the rate counts."""
    base_rate: float
    """Real steps of sequences a second, of the run as it is."""
    base_spread: float
    """Of its turns' rates: middle half / median."""
    base_memory_gib: float
    run_seconds: float
    """That the run as it is would train for."""
    alone: list[Trial]
    together: list[Trial]
    """Those that were faster alone, measured anew: the best, and then others with it."""
    best: Trial | None
    """What is proposed of `together`; None: nothing is faster."""
    command: str
    """With the best, or as it was."""
    seconds: float
    """That it took to find out."""

    def as_dict(self) -> dict[str, Any]:
        """In types of JSON."""
        return {
            **self._asdict(),
            "rule": RULE,
            "alone": [_told(trial) for trial in self.alone],
            "together": [_told(trial) for trial in self.together],
            "best": None if self.best is None else _told(self.best),
        }


def advise(
    recipe: Recipe,
    words: Sequence[str],
    *,
    prog: str,
    seconds_per_turn: float = Pace().seconds_per_turn,
    rounds: int = Pace().rounds,
    say: Callable[[str], object] = print,
    start: Start = MeasuredRun,
) -> Advice:
    """`words` are what was typed behind `prog` for the recipe's settings; `say` hears what is under way."""
    begun = time.perf_counter()
    data = make_data(recipe.settings)
    unit = f"{UNITS[data.description.kind]}s"
    with Rounds(recipe, Pace(seconds_per_turn, rounds), start) as contest:
        changes = changes_for(with_few_shapes(recipe.settings), facts_of(data, contest.ready, contest.first_lap))
        say(f"{contest.base_rate:,.0f} {unit}/s as it is; {len(changes)} changes to try")
        alone = []
        for number, change in enumerate(changes, start=1):
            alone.append(contest.compare(change))
            say(f"{number}/{len(changes)} {in_words(alone[-1])}")
        together, best = best_together(alone, contest.compare, say)
        return Advice(
            unit=unit,
            base_rate=contest.base_rate,
            base_spread=contest.base_spread,
            base_memory_gib=contest.base_memory_gib,
            run_seconds=contest.run_seconds,
            alone=alone,
            together=together,
            best=best,
            command=f"{prog} {shlex.join(with_flags(words, best.change.values if best else {}))}",
            seconds=time.perf_counter() - begun,
        )


def best_together(
    alone: Sequence[Trial], compare: Compare, say: Callable[[str], object] = print
) -> tuple[list[Trial], Trial | None]:
    """What was tried, one after the other, and the fastest of it. The best alone is measured anew, as the first time it may have
    been lucky; then the next is added, and stays where both together are faster by more than 2 %."""
    chosen: list[Change] = []
    tried: list[Trial] = []
    best: Trial | None = None
    for change in [trial.change for trial in strongest_of_each_theme(alone)]:
        tried.append(compare(combined([*chosen, change])))
        say(f"together: {in_words(tried[-1])}")
        if tried[-1].verdict is Verdict.FASTER and (best is None or tried[-1].gain > best.gain * LEAST_GAIN):
            best = tried[-1]
            chosen.append(change)
    return tried, best


def strongest_of_each_theme(trials: Sequence[Trial]) -> list[Trial]:
    """Of those that were faster and may be proposed; the strongest first."""
    best: dict[str, Trial] = {}
    faster = [trial for trial in trials if trial.verdict is Verdict.FASTER and not trial.change.apart]
    for trial in sorted(faster, key=lambda trial: trial.gain, reverse=True):
        best.setdefault(trial.change.theme, trial)
    return list(best.values())


def facts_of(data: SequenceDataModule, ready: Ready, lap: Lap) -> Facts:
    on_gpu = ready.device.startswith("cuda")
    available = torch.cuda.mem_get_info()[0] if on_gpu else available_memory().bytes
    return Facts(
        device=ready.device.partition(":")[0],
        cores=lap.cores,
        precision=ready.precision,
        has_bf16=torch.cuda.is_bf16_supported() if on_gpu else ready.device == "cpu" and cpu_has_bf16_units(),
        tokens=int(data.split("train").lengths_N.sum(dtype="int64")),
        longest=data.longest,
        tokens_per_batch=data.limits.tokens_per_batch,
        waiting_share=lap.stages["data"] / lap.seconds,
        peak_memory_gib=lap.peak_memory_gib,
        available_memory_gib=available / GIB,
    )


def in_words(trial: Trial) -> str:
    """A line while others are still to be tried."""
    ratios = "" if trial.comparison is None else f" ({', '.join(f'{ratio:.2f}' for ratio in trial.comparison.ratios)})"
    gain = "" if trial.comparison is None else f" {trial.gain:.2f}{ratios}"
    remark = f": {trial.remark}" if trial.remark else ""
    return f"{trial.change.name}:{gain} {trial.verdict}{remark}"


def _told(trial: Trial) -> dict[str, Any]:
    """Flat, in types of JSON; what a failed trial does not know is None."""
    change, comparison = trial.change, trial.comparison
    lower, upper = comparison.quartiles if comparison else (None, None)
    return {
        "change": change.name,
        "theme": change.theme,
        "flags": shlex.join(change.flags),
        "values": dict(change.values),
        "reason": change.reason,
        "effect": change.effect,
        "apart": change.apart,
        "verdict": str(trial.verdict),
        "remark": trial.remark,
        "gain": comparison.gain if comparison else None,
        "lower": lower,
        "upper": upper,
        "ratios": comparison.ratios if comparison else [],
        "rate": comparison.rate if comparison else None,
        "base_rate": comparison.base_rate if comparison else None,
        "memory_gib": comparison.peak_memory_gib if comparison else None,
        "start_seconds": comparison.start_seconds if comparison else None,
    }
