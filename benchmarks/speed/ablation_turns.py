"""Variants of one training -> how fast each is in real tokens a second, validations included, and how much memory it takes.

They are real runs in processes of their own (seqvae/profiling/measured_run.py) and take turns. Not all of them
fit into memory at a time:
neighbours run in groups, and one variant runs in all groups. What is said of another one's speed is its ratio to that one in
the same group, so that an hour at which the machine is slower hits both.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import train_optimized
import train_with_collapse_detection
from benchmarks.measure import median, spread
from benchmarks.speed.ablation_measures import Variant
from seqvae.config.data import LoadingSettings
from seqvae.config.run import ValidationSettings
from seqvae.config.training import TrainingSettings
from seqvae.data.loader import resolve_loading
from seqvae.profiling.measured_run import Lap, MeasuredRun, Recipe
from seqvae.training.fit import make_data

if TYPE_CHECKING:
    from lightning import Callback

VALIDATED_SHARE, FEWEST_VALIDATED = 0.01, 2
"""Of the validation batches: what a validation is timed on in each round."""


LEAD_SECONDS = 1.0
"""What a loader made ready while others had their turn is used up before the clock runs, unless that takes longer."""


class Turns(NamedTuple):
    """How long everybody trains."""

    rounds: int = 5
    seconds: float = 0.7
    """In each round, and at least one optimizer step."""
    warm_up_seconds: float = 2.0
    together: int = 5
    """Variants in a group, beside the one that is in all of them; a run of width 256 takes 1 to 2 GiB."""


class Measured(NamedTuple):
    """What became of a variant."""

    rate: float
    """Real tokens a second over a whole epoch with its validations."""
    spread: str
    """Of the ratios to the common variant, from round to round."""
    peak_gib: float
    """Of the training process, without worker processes."""


class ValidationSample(NamedTuple):
    """What a validation is timed on."""

    batches: int
    share: float
    """Of all tokens there are to validate on."""
    of_batches: int


class Timed(NamedTuple):
    """One variant in one group."""

    laps: list[Lap]
    validation_seconds: float
    """Of an epoch, all validations."""
    tokens: float
    """Of an epoch."""

    def rate(self, laps: Sequence[Lap]) -> float:
        training = sum(lap.seconds for lap in laps) / sum(lap.real_steps for lap in laps)
        return 1 / (training + self.validation_seconds / self.tokens)


def measure_variants(
    variants: Sequence[Variant], common: Variant, source: Path, turns: Turns
) -> dict[Variant, Measured]:
    """`source`: where `write_source` wrote the sequences."""
    others = [variant for variant in dict.fromkeys(variants) if variant != common]
    groups = [others[begin : begin + turns.together] for begin in range(0, len(others), turns.together)]
    timed = [time_group([common, *group], source, turns) for group in groups or [[]]]
    rate = median([group[common].rate(group[common].laps) for group in timed])
    measured = {}
    for group in timed:
        base = group[common]
        for variant, one in group.items():
            ratios = [one.rate([lap]) / base.rate([other]) for lap, other in zip(one.laps, base.laps, strict=True)]
            peak = max(lap.peak_memory_gib for lap in one.laps)
            measured[variant] = Measured(rate * one.rate(one.laps) / base.rate(base.laps), spread(ratios), peak)
    own_rates = [group[common].rate([lap]) for group in timed for lap in group[common].laps]
    peak = max(lap.peak_memory_gib for group in timed for lap in group[common].laps)
    return measured | {common: Measured(rate, spread(own_rates), peak)}


def time_group(variants: Sequence[Variant], source: Path, turns: Turns) -> dict[Variant, Timed]:
    """All start together; each warms up; then they take turns."""
    samples = {variant: validation_sample(variant.settings) for variant in variants}
    laps: dict[Variant, list[Lap]] = {variant: [] for variant in variants}
    validations: dict[Variant, list[float]] = {variant: [] for variant in variants}
    with ExitStack() as stack:
        runs = {
            variant: stack.enter_context(MeasuredRun(recipe_of(variant, samples[variant].batches, source)))
            for variant in variants
        }
        lead = {}
        for variant, run in runs.items():
            warm_up = run.turn(steps=2, seconds=turns.warm_up_seconds, lead_steps=0)
            lead[variant] = lead_steps(variant.settings, warm_up.seconds / warm_up.steps)
            run.validate()
        for _ in range(turns.rounds):
            for variant, run in runs.items():
                laps[variant].append(run.turn(seconds=turns.seconds, lead_steps=lead[variant]))
                validations[variant].append(run.validate().seconds)
        plans = {variant: run.ready.plan for variant, run in runs.items()}
    return {
        variant: Timed(
            laps[variant],
            validation_seconds(median(validations[variant]), variant.settings.validation, samples[variant]),
            plan.tokens_per_step * plan.steps_per_epoch,
        )
        for variant, plan in plans.items()
    }


def lead_steps(settings: TrainingSettings, step_seconds: float) -> int:
    loading = resolve_loading(settings.loading)
    ready = loading.workers * loading.prefetch_factor / settings.optimizer.gradient_accumulation_steps
    return min(math.ceil(ready), int(LEAD_SECONDS / step_seconds))


def validation_sample(settings: TrainingSettings) -> ValidationSample:
    """What a contestant with so many validation batches goes through."""
    data = make_data(replace(settings, loading=LoadingSettings(num_workers=0)))
    data.limit_val_batches = 1.0
    every = len(data.val_dataloader())
    data.limit_val_batches = min(every, max(FEWEST_VALIDATED, round(every * VALIDATED_SHARE)))
    tokens = sum(int(batch.lengths_B.sum()) for batch in data.val_dataloader())
    return ValidationSample(data.limit_val_batches, tokens / int(data.split("valid").lengths_N.sum()), every)


def validation_seconds(timed: float, settings: ValidationSettings, sample: ValidationSample) -> float:
    """Of an epoch: as often, and on as much, as the settings say."""
    assert isinstance(settings.val_check_interval, float)
    assert isinstance(settings.limit_val_batches, float)
    validated = max(settings.limit_val_batches, 1 / sample.of_batches)
    return timed / sample.share * validated / settings.val_check_interval


def recipe_of(variant: Variant, validated: int, source: Path) -> Recipe:
    settings = variant.settings
    settings = replace(settings, validation=replace(settings.validation, limit_val_batches=validated))
    watched = partial(callbacks, variant.closest_watch, variant.from_parquet, variant.normalise, source)
    return Recipe("a variant", settings, watched)


def callbacks(
    closest_watch: bool, from_parquet: bool, normalise: bool, directory: Path, settings: TrainingSettings
) -> "list[Callback]":
    """What watches the run, and what it fetches its batches from where that is not the cache."""
    from benchmarks.speed.ablation_loading import FetchFrom, Source  # torch and Lightning, where they are there already

    command = train_with_collapse_detection if closest_watch else train_optimized
    watching = command.callbacks(settings)
    if from_parquet or normalise:
        return [FetchFrom(Source(directory, from_parquet, normalise)), *watching]
    return watching
