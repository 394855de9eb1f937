"""How fast commands train on the user's data, where their time goes, and what holds them back: recipes in, `Speed` out.

Each command runs in a process of its own (`measured_run.py`), and they take turns, so that a busy minute of the machine hits all of
them alike. In between, this process times the product of matrices that their arithmetic is held against.
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

from seqvae.config.profiling import MeasuringSettings
from seqvae.config.run import ValidationSettings
from seqvae.config.training import TrainingSettings
from seqvae.data.batch import EventBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.monitors.hardware import Machine, difference, product_peak
from seqvae.profiling.measured_run import STAGES, Lap, MeasuredRun, Recipe
from seqvae.reports.profile_report import STAGE_NAMES, Bottleneck, Comparison, Speed, WholeRun
from seqvae.text import duration, measure, percent
from seqvae.training.distributed import DTYPES
from seqvae.training.fit import make_data, with_few_shapes
from seqvae.training.schedules import Plan
from seqvae.training.trainer import Cadence, validation_cadence

TURNS = 5
"""Number of turns that medians and spreads are taken over."""
LEAD_STEPS = 2
"""Steps at the beginning of each turn that are not counted."""
MOST_VALIDATION_BATCHES = 32
"""A validation of more is extrapolated from sequences that make as many batches."""
EVENTS_SAMPLE = 512
"""Sequences that the events of a step are counted in."""
LITTLE_OF_PEAK = 0.3
"""Below it, products of matrices are small, or what stands between them takes longer than they do."""

Say = Callable[[str], None]


class _Measured(NamedTuple):
    """A run that is warm, and its turns."""

    run: MeasuredRun
    data: SequenceDataModule
    settings: TrainingSettings
    """The settings of the command, whose validation may be larger than the measured one."""
    validation_batches: tuple[int, int, int]
    """Batches of a validation while training goes on, of all validation data, and of the validation that is measured."""
    first_step_seconds: float
    seconds_per_step: float
    """A first impression, from the warm-up."""
    laps: list[Lap]
    others_cpu_shares: list[float]
    """The share of all the machine's cores that other programs took in each turn, on systems that know it."""

    @property
    def unit(self) -> str:
        return self.data.description.unit


def analyse(
    recipes: Sequence[Recipe],
    measuring: MeasuringSettings,
    say: Say,
    traces: Sequence[Path] = (),
    start: Callable[[Recipe], MeasuredRun] = MeasuredRun,
) -> tuple[list[Speed], Comparison | None]:
    """Return the speed of each recipe and, of two, their comparison; `traces`: where to write that of each, if at all."""
    with ExitStack() as stack:
        all_measured = [_begin(stack, start, recipe, measuring.warmup_iterations, say) for recipe in recipes]
        peaks = _take_turns(all_measured, measuring.num_iterations, say)
        speeds = [_finish(measured, peaks, say) for measured in all_measured]
        for measured, path in zip(all_measured, traces, strict=False):
            say(f"{measured.run.name}: tracing a few steps")
            measured.run.trace(path)
    if len(speeds) != 2:
        return speeds, None
    # The ratio is of all steps in all seconds, its spread of the turns that stood side by side.
    slower, faster = sorted(speeds, key=lambda speed: speed.real_steps_per_second)
    ratios = [fast / slow for fast, slow in zip(faster.turns, slower.turns, strict=True)]
    ratio = faster.real_steps_per_second / slower.real_steps_per_second
    return speeds, Comparison(faster.name, slower.name, ratio, min(ratios), max(ratios))


def _begin(
    stack: ExitStack, start: Callable[[Recipe], MeasuredRun], recipe: Recipe, warmup_iterations: int, say: Say
) -> _Measured:
    """Start a run and warm it up."""
    data, settings = make_data(recipe.settings), recipe.settings
    on_the_way = len(data.val_dataloader()) if settings.validation.limit_val_batches else 0
    data.limit_val_batches = 1.0
    all_batches = len(data.val_dataloader())
    sample = min(on_the_way or all_batches, MOST_VALIDATION_BATCHES)
    data.limit_val_batches = sample
    limited = replace(settings, validation=replace(settings.validation, limit_val_batches=sample))
    sample = len(data.val_dataloader())
    say(f"{recipe.name}: starting")
    run = stack.enter_context(start(recipe._replace(settings=limited)))
    ready, unit = run.ready, data.description.unit
    model = f"{ready.parameters / 1e6:.2f} M parameters, {ready.precision}"
    portion = f"{ready.plan.tokens_per_step:,.0f} {unit}s to an optimizer step"
    say(f"{recipe.name}: {model}, {portion}; {warmup_iterations} of them to warm up")
    first = run.turn(steps=1, lead_steps=0)
    later = run.turn(steps=warmup_iterations - 1, lead_steps=0) if warmup_iterations > 1 else first
    batches = (on_the_way, all_batches, sample)
    return _Measured(run, data, settings, batches, first.seconds, later.seconds / later.steps, [], [])


def _take_turns(all_measured: Sequence[_Measured], num_iterations: int, say: Say) -> dict[str, float]:
    """Let each run take its turns, and return the peaks of products by precision."""
    turns = min(TURNS, num_iterations)
    seconds = sum(measured.seconds_per_step * (num_iterations + LEAD_STEPS * turns) for measured in all_measured)
    say(f"measuring {num_iterations:,} optimizer steps in {turns} turns, about {duration(seconds)}")
    places = sorted({(measured.run.ready.device, measured.run.ready.precision) for measured in all_measured})
    peaks: dict[str, list[float]] = {precision: [] for _, precision in places}
    machine = Machine()
    for number in range(turns):
        steps = num_iterations // turns + (number < num_iterations % turns)
        rates = []
        for measured in all_measured:
            before = machine.spent()
            lap = measured.run.turn(steps=steps, lead_steps=LEAD_STEPS)
            spent = difference(machine.spent(), before)
            measured.laps.append(lap)
            if spent.machine_total:
                own = lap.cpu_seconds / lap.seconds / (os.cpu_count() or 1)
                measured.others_cpu_shares.append(max(0.0, spent.machine_busy / spent.machine_total - own))
            rates.append(f"{measured.run.name} {lap.real_steps / lap.seconds:,.0f} {measured.unit}s/s")
        for device, precision in places:
            peaks[precision].append(product_peak(torch.device(device), DTYPES[precision]))
        say(f"  turn {number + 1} of {turns}: {', '.join(rates)}")
    return {precision: statistics.median(values) for precision, values in peaks.items()}


def _finish(measured: _Measured, peaks: dict[str, float], say: Say) -> Speed:
    """Measure what is measured once (arithmetic, a validation, a checkpoint), and put everything together."""
    run, data, laps, ready = measured.run, measured.data, measured.laps, measured.run.ready
    say(f"{run.name}: counting the arithmetic of a step, validating, saving")
    work = run.count()
    validation, saved = run.validate(), run.save()
    seconds, steps = sum(lap.seconds for lap in laps), sum(lap.steps for lap in laps)
    on_the_way, all_batches, sample = measured.validation_batches
    per_batch = validation.seconds / sample
    costs = Costs(seconds / steps, per_batch * on_the_way, per_batch * all_batches, saved.seconds)
    events_per_step = None
    if data.description.kind == "events":
        train = data.split("train")
        chosen = np.random.default_rng(0).permutation(len(train))[:EVENTS_SAMPLE]
        batch = train.gather(np.sort(chosen))
        assert isinstance(batch, EventBatch)
        events_per_step = len(batch.variables_E) / int(batch.lengths_B.sum())
    return Speed(
        name=run.name,
        unit=measured.unit,
        device=ready.device,
        precision=ready.precision,
        parameters=ready.parameters,
        steps=steps,
        seconds=seconds,
        stages={stage: sum(lap.stages[stage] for lap in laps) for stage in STAGES if stage in STAGE_NAMES},
        real_steps=sum(lap.real_steps for lap in laps),
        padded_steps=sum(lap.padded_steps for lap in laps),
        sequences=sum(lap.sequences for lap in laps),
        events_per_step=events_per_step,
        turns=[lap.real_steps / lap.seconds for lap in laps],
        first_step_seconds=measured.first_step_seconds,
        start_seconds=ready.seconds,
        cpu_utilisation=sum(lap.cpu_seconds for lap in laps) / seconds / laps[-1].cores,
        cores=laps[-1].cores,
        others_cpu_share=statistics.mean(measured.others_cpu_shares) if measured.others_cpu_shares else None,
        gpu_utilisation=laps[-1].gpu_utilisation,
        peak_memory_gib=laps[-1].peak_memory_gib,
        flops_per_padded_step=work.flops / work.padded_steps,
        peak_flops_per_second=peaks[ready.precision],
        peak_dtype=str(DTYPES[ready.precision]).removeprefix("torch."),
        recompiles=sum(lap.recompiles for lap in laps),
        run=whole_run(
            measured.settings.validation,
            ready.plan,
            costs,
            batches_per_epoch=data.batches_per_epoch(),
            accumulate=ready.accumulate,
        ),
    )


# --- The whole run -----------------------------------------------------------------------------------------------------


class Costs(NamedTuple):
    """Seconds that one optimizer step, validation or checkpoint takes."""

    step: float
    validation: float
    """A validation while training goes on."""
    last_validation: float
    """The last validation, on all validation data."""
    checkpoint: float


def whole_run(
    settings: ValidationSettings, plan: Plan, costs: Costs, *, batches_per_epoch: int, accumulate: int
) -> WholeRun:
    """Return how often validations and checkpoints come in the run as requested, by one process, and what they take."""
    cadence = validation_cadence(
        settings.val_check_interval, batches_per_epoch=batches_per_epoch, accumulate=accumulate
    )

    def until(step: int) -> int:
        return validations_until(step, cadence, plan.steps_per_epoch, batches_per_epoch, accumulate)

    validates = settings.limit_val_batches > 0
    on_the_way = until(plan.total_steps) if validates else 0
    ends_with_one = validates and on_the_way > until(plan.total_steps - 1)
    needs_another = not (ends_with_one and settings.is_on_all)
    # A checkpoint stands at the end of a run in any case. A best one, where they come by steps, is not counted.
    if settings.checkpoint_every_n_steps is not None:
        checkpoints = -(-plan.total_steps // settings.checkpoint_every_n_steps)
    elif not validates:
        checkpoints = -(-plan.total_steps // plan.steps_per_epoch)
    else:
        checkpoints = on_the_way + (not ends_with_one)
    return WholeRun(
        steps=plan.total_steps,
        epochs=plan.total_steps / plan.steps_per_epoch,
        training_seconds=plan.total_steps * costs.step,
        validations=on_the_way + needs_another,
        validation_seconds=on_the_way * costs.validation + needs_another * costs.last_validation,
        checkpoints=checkpoints,
        checkpoint_seconds=checkpoints * costs.checkpoint,
    )


def validations_until(
    step: int, cadence: Cadence, steps_per_epoch: int, batches_per_epoch: int, accumulate: int
) -> int:
    """Return the validations in that many optimizer steps. They are counted from the beginning of each epoch.

    >>> validations_until(25, Cadence(batches=3, epochs=1), steps_per_epoch=10, batches_per_epoch=10, accumulate=1)
    7
    >>> validations_until(25, Cadence(batches=None, epochs=2), steps_per_epoch=10, batches_per_epoch=10, accumulate=1)
    1
    """
    epochs, rest = divmod(step, steps_per_epoch)
    if cadence.batches is None:
        return epochs // cadence.epochs
    return epochs * (batches_per_epoch // cadence.batches) + rest * accumulate // cadence.batches


# --- What holds it back ------------------------------------------------------------------------------------------------


class _Loss(NamedTuple):
    """Time that goes into something other than the products of a training step."""

    name: str
    share: float
    """Its share of the time."""
    notable: float
    """The share from which on a change is worth it."""
    evidence: str
    tries: dict[str, bool]
    """Flags against it, and whether each is not in force already."""


def bottleneck_of(speed: Speed, settings: TrainingSettings) -> Bottleneck:
    """Return the costliest loss that is notable, with evidence and flags to try; if there is none, the products themselves."""
    if speed.recompiles:
        evidence = f"{speed.recompiles} graphs were compiled after warm-up, each of which takes seconds."
        return Bottleneck("recompiling", evidence, ("--no_compile_model",))
    run, computing = speed.run, speed.share("forward", "backward")
    waiting, padding = speed.share("data"), speed.padding_share * computing
    optimizing, overhead = speed.share("optimizer"), speed.share("monitoring", "loop")
    batches, loading = with_few_shapes(settings).batches, settings.loading
    batch_flag = f"--{'tokens_per_batch' if batches.batch_size is None else 'batch_size'}"
    is_by_length = batches.bucketing and batches.use_dynamic_padding
    larger_batch = f"a larger {batch_flag}"
    losses = [
        _Loss(
            "waiting for data",
            waiting,
            0.05,
            f"{percent(waiting)} of the time goes by until the loader has the next batch.",
            {
                "--num_workers 2": loading.num_workers in ("auto", 0, 1),
                "--worker_type process": loading.worker_type == "thread",
                "--cache_data": not settings.cache.cache_data,
            },
        ),
        _Loss(
            "padding",
            padding,
            0.10,
            f"{percent(padding)} of the time is spent on padding, {percent(speed.padding_share)} of all that is computed on.",
            {
                "--bucketing": not batches.bucketing,
                "--use_dynamic_padding": not batches.use_dynamic_padding,
                "a lower --max_sequence_length": not batches.use_dynamic_padding,
                "--pad_grid 0": bool(batches.pad_grid),
                f"a smaller {batch_flag}": is_by_length,
            },
        ),
        _Loss(
            "clipping and optimizer",
            optimizing,
            0.15,
            f"{percent(optimizing)} of the time goes into them: as much for a small batch as for a large one.",
            {
                "--fused_optimizer": not settings.optimizer.fused_optimizer,
                larger_batch: True,
                "more --gradient_accumulation_steps": True,
            },
        ),
        _Loss(
            "monitoring and loop",
            overhead,
            0.10,
            f"{percent(overhead)} of the time goes into callbacks and Lightning's loop: optimizer steps of "
            f"{measure(1000 * speed.seconds_per_step)} ms are short.",
            {larger_batch: True, "--fast_detection": not settings.monitoring.fast_detection},
        ),
        _Loss(
            "validation",
            run.validation_share,
            0.10,
            f"{percent(run.validation_share)} of the whole run goes into {run.validations:,} validations.",
            {"--limit_val_batches 0.1": settings.validation.is_on_all, "a larger --val_check_interval": True},
        ),
        _Loss(
            "checkpoints",
            run.checkpoint_share,
            0.05,
            f"{percent(run.checkpoint_share)} of the whole run goes into {run.checkpoints:,} checkpoints.",
            {"a larger --checkpoint_every_n_steps": True},
        ),
    ]
    notable = [loss for loss in losses if loss.share > loss.notable]
    if notable:
        worst = max(notable, key=lambda loss: loss.share)
        return Bottleneck(worst.name, worst.evidence, tuple(flag for flag, is_new in worst.tries.items() if is_new))
    of_peak = (
        f"{percent(computing)} of the time goes into forward and backward, at {percent(speed.share_of_peak)} of what large "
        f"products of {speed.peak_dtype} matrices reach here"
    )
    tries = ("--precision 16-mixed",) if settings.compute.precision in ("32", "32-true") else ()
    if speed.share_of_peak < LITTLE_OF_PEAK:
        return Bottleneck(
            "small operations", f"{of_peak}: too little at once to fill the machine.", (*tries, larger_batch)
        )
    return Bottleneck("the products themselves", f"{of_peak}.", tries)
