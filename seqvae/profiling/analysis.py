"""How fast commands train on somebody's data, and where their time goes: what they would run in, `Speed` out.

Each runs in a process of its own (`contestant.py`), and they take turns, so that a busy minute of the machine hits all of them
alike. In between, this process times the product of matrices that their arithmetic is held against.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from seqvae.config.training import TrainingSettings
from seqvae.data.batch import EventBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.monitors.hardware import Machine, difference, product_peak
from seqvae.profiling.contestant import MeasuredRun, Recipe
from seqvae.profiling.messages import Lap, Validation
from seqvae.profiling.stages import STAGES
from seqvae.profiling.whole_run import Costs, whole_run
from seqvae.reports.performance_numbers import STAGE_NAMES, Comparison, Speed
from seqvae.reports.performance_table import span
from seqvae.training.distributed import DTYPES
from seqvae.training.fit import make_data
from seqvae.training.trainer import UNITS

TURNS = 5
"""Medians and spreads are of so many."""
LEAD_STEPS = 2
"""At the beginning of each turn, not counted."""
MOST_VALIDATION_BATCHES = 32
"""A validation of more is reckoned from so many of its batches, chosen at random."""
EVENTS_SAMPLE = 512
"""Sequences that are looked at for the events of a step."""

Say = Callable[[str], None]
Start = Callable[[Recipe], MeasuredRun]


class Effort(NamedTuple):
    """How much to measure, in optimizer steps of each command."""

    num_iterations: int
    warmup_iterations: int
    """Before, not counted."""


class Analysis(NamedTuple):
    speeds: list[Speed]
    """In the order of the recipes."""
    comparison: Comparison | None
    """Of two."""


class ValidationSize(NamedTuple):
    """In batches."""

    asked: int
    """While training goes on."""
    all: int
    measured: int


class SharedLap(NamedTuple):
    lap: Lap
    others_cpu_share: float | None
    """Of all the machine's cores, what other programs took meanwhile; None: it does not tell."""


class Begun(NamedTuple):
    """A run that is warm."""

    contestant: MeasuredRun
    data: SequenceDataModule
    settings: TrainingSettings
    """As the command would run."""
    validation: ValidationSize
    first_step_seconds: float
    seconds_per_step: float
    """A first impression."""


def analyse(
    recipes: Sequence[Recipe], effort: Effort, say: Say, traces: Sequence[Path] = (), start: Start = MeasuredRun
) -> Analysis:
    """`traces`: where to write that of each recipe, if they are wanted."""
    with ExitStack() as stack:
        begun = [begin(stack, start, recipe, effort, say) for recipe in recipes]
        turns, peaks = take_turns(begun, effort, say)
        speeds = [finish(run, turns[run.contestant.name], peaks, say) for run in begun]
        for run, path in zip(begun, traces, strict=False):
            say(f"{run.contestant.name}: tracing a few steps")
            run.contestant.trace(path)
    return Analysis(speeds, compare(*speeds) if len(speeds) == 2 else None)


def begin(stack: ExitStack, start: Start, recipe: Recipe, effort: Effort, say: Say) -> Begun:
    """Start a run and warm it up."""
    data = make_data(recipe.settings)
    size = validation_size(data, recipe.settings)
    limited = replace(recipe.settings.validation, limit_val_batches=size.measured)
    say(f"{recipe.name}: starting")
    contestant = stack.enter_context(start(recipe._replace(settings=replace(recipe.settings, validation=limited))))
    ready, unit = contestant.ready, UNITS[data.description.kind]
    model = f"{ready.parameters / 1e6:.2f} M parameters, {ready.precision}"
    portion = f"{ready.plan.tokens_per_step:,.0f} {unit}s to an optimizer step"
    say(f"{recipe.name}: {model}, {portion}; {effort.warmup_iterations} of them to warm up")
    first = contestant.turn(steps=1, lead_steps=0)
    others = effort.warmup_iterations - 1
    later = contestant.turn(steps=others, lead_steps=0) if others else first
    seconds_per_step = later.seconds / later.steps
    return Begun(contestant, data, recipe.settings, size, first.seconds, seconds_per_step)


def validation_size(data: SequenceDataModule, settings: TrainingSettings) -> ValidationSize:
    asked = len(data.val_dataloader()) if settings.validation.limit_val_batches else 0
    data.limit_val_batches = 1.0
    everything = len(data.val_dataloader())
    return ValidationSize(asked, everything, measured=min(asked or everything, MOST_VALIDATION_BATCHES))


# --- Turns -------------------------------------------------------------------------------------------------------------


def take_turns(begun: Sequence[Begun], effort: Effort, say: Say) -> tuple[dict[str, list[SharedLap]], dict[str, float]]:
    """The turns of each run by name, and the peaks of products by precision."""
    portions = portions_of(effort.num_iterations)
    steps = effort.num_iterations + LEAD_STEPS * len(portions)
    seconds = sum(run.seconds_per_step * steps for run in begun)
    say(f"measuring {effort.num_iterations:,} optimizer steps in {len(portions)} turns, about {span(seconds)}")
    turns: dict[str, list[SharedLap]] = {run.contestant.name: [] for run in begun}
    places = {(run.contestant.ready.device, run.contestant.ready.precision) for run in begun}
    peaks: dict[str, list[float]] = {precision: [] for _, precision in places}
    for number, portion in enumerate(portions, start=1):
        said = []
        for run in begun:
            turn = take_one(run.contestant, portion)
            turns[run.contestant.name].append(turn)
            rate = turn.lap.real_steps / turn.lap.seconds
            said.append(f"{run.contestant.name} {rate:,.0f} {UNITS[run.data.description.kind]}s/s")
        for device, precision in sorted(places):
            peaks[precision].append(product_peak(torch.device(device), DTYPES[precision]))
        say(f"  turn {number} of {len(portions)}: {', '.join(said)}")
    return turns, {precision: statistics.median(values) for precision, values in peaks.items()}


def take_one(contestant: MeasuredRun, steps: int) -> SharedLap:
    machine = Machine()
    before = machine.spent()
    lap = contestant.turn(steps=steps, lead_steps=LEAD_STEPS)
    spent = difference(machine.spent(), before)
    if not spent.machine_total:
        return SharedLap(lap, None)
    own = lap.cpu_seconds / lap.seconds / (os.cpu_count() or 1)
    return SharedLap(lap, max(0.0, spent.machine_busy / spent.machine_total - own))


def portions_of(steps: int) -> list[int]:
    """
    >>> portions_of(100), portions_of(7), portions_of(2)
    ([20, 20, 20, 20, 20], [2, 2, 1, 1, 1], [1, 1])
    """
    turns = min(TURNS, steps)
    return [steps // turns + (number < steps % turns) for number in range(turns)]


# --- What it comes to --------------------------------------------------------------------------------------------------


def finish(run: Begun, turns: Sequence[SharedLap], peaks: dict[str, float], say: Say) -> Speed:
    """With what is measured once: arithmetic, a validation, a checkpoint."""
    laps = [turn.lap for turn in turns]
    others = [turn.others_cpu_share for turn in turns if turn.others_cpu_share is not None]
    ready, contestant = run.contestant.ready, run.contestant
    say(f"{contestant.name}: counting the arithmetic of a step, validating, saving")
    work = contestant.count()
    validation, saved = contestant.validate(), contestant.save()
    seconds, steps = sum(lap.seconds for lap in laps), sum(lap.steps for lap in laps)
    costs = Costs(seconds / steps, *seconds_of_validations(validation, run.validation), saved.seconds)
    return Speed(
        name=contestant.name,
        unit=UNITS[run.data.description.kind],
        device=ready.device,
        precision=ready.precision,
        parameters=ready.parameters,
        steps=steps,
        seconds=seconds,
        stages={stage: sum(lap.stages[stage] for lap in laps) for stage in STAGES if stage in STAGE_NAMES},
        real_steps=sum(lap.real_steps for lap in laps),
        padded_steps=sum(lap.padded_steps for lap in laps),
        sequences=sum(lap.sequences for lap in laps),
        events_per_step=events_per_step(run.data),
        turns=[lap.real_steps / lap.seconds for lap in laps],
        first_step_seconds=run.first_step_seconds,
        start_seconds=ready.seconds,
        cpu_utilisation=sum(lap.cpu_seconds for lap in laps) / seconds / laps[-1].cores,
        cores=laps[-1].cores,
        others_cpu_share=statistics.mean(others) if others else None,
        gpu_utilisation=laps[-1].gpu_utilisation,
        peak_memory_gib=laps[-1].peak_memory_gib,
        flops_per_padded_step=work.flops / work.padded_steps,
        peak_flops_per_second=peaks[ready.precision],
        peak_dtype=str(DTYPES[ready.precision]).removeprefix("torch."),
        recompiles=sum(lap.recompiles for lap in laps),
        run=whole_run(
            run.settings.validation,
            ready.plan,
            costs,
            batches_per_epoch=run.data.batches_per_epoch(),
            accumulate=ready.accumulate,
        ),
    )


def seconds_of_validations(validation: Validation, size: ValidationSize) -> tuple[float, float]:
    """Of one as it comes while training goes on, and of the one on all that a run ends with."""
    per_batch = validation.seconds / size.measured
    return per_batch * size.asked, per_batch * size.all


def events_per_step(data: SequenceDataModule) -> float | None:
    """Of training sequences, over a sample; None: they are no events."""
    if data.description.kind != "events":
        return None
    train = data.split("train")
    chosen = np.random.default_rng(0).permutation(len(train))[:EVENTS_SAMPLE]
    batch = train.gather(np.sort(chosen))
    assert isinstance(batch, EventBatch)
    return len(batch.variables_E) / int(batch.lengths_B.sum())


def compare(one: Speed, other: Speed) -> Comparison:
    """Ratio of all steps in all seconds; the spread is of the turns that stood side by side."""
    slower, faster = sorted((one, other), key=lambda speed: speed.real_steps_per_second)
    ratios = [fast / slow for fast, slow in zip(faster.turns, slower.turns, strict=True)]
    ratio = faster.real_steps_per_second / slower.real_steps_per_second
    return Comparison(faster.name, slower.name, ratio, min(ratios), max(ratios))
