"""The measures between a plain training and the recommended one, each a pure function of what a run does.

In: the settings of both training commands, and what the data are. Out: the ladder (the measures one after the other), the
recommended recipe without each of them, and the run that a variant stands for. Processes that train import this module before
they set up their threads, so nothing here imports torch on its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import train_optimized
import train_with_collapse_detection
from seqvae.config.training import TrainingSettings
from seqvae.profiling.measured_run import Recipe

if TYPE_CHECKING:
    from lightning import Callback

VALIDATIONS_PER_EPOCH = 10


class Variant(NamedTuple):
    """A way to train."""

    settings: TrainingSettings
    closest_watch: bool
    """Whether readings are as frequent as in train_with_collapse_detection.py, and not as in train_optimized.py."""
    from_parquet: bool
    """Whether Parquet is read again for each batch, instead of the cache."""
    normalise: bool
    """Whether values are normalised each time they are fetched, instead of once."""


class Goal(NamedTuple):
    """The settings that the measures lead to."""

    settings: TrainingSettings
    """The recommended settings, those of `train_optimized.py --fast_detection`."""
    tokens_per_batch: int
    """The budget that these resolve to with these data."""


class Measure(NamedTuple):
    """One step of the ladder."""

    name: str
    apply: Callable[[Variant, Goal], Variant]


def plain_variant(reference: TrainingSettings, *, longest: int, has_values: bool) -> Variant:
    """Return the recipe before all measures: one sequence per batch, Parquet read again, everything validated each time.

    `longest`: steps of the longest sequence.
    """
    plain = Variant(reference, closest_watch=True, from_parquet=True, normalise=has_values)
    plain = changed(plain, "batches", batch_size=1, pad_grid=0)
    plain = changed(plain, "loading", worker_type="process", num_workers=2, prefetch_factor=2)  # torch's own
    plain = changed(plain, "lengths", max_sequence_length=max(longest, reference.lengths.max_sequence_length))
    return changed(plain, "validation", val_check_interval=1 / VALIDATIONS_PER_EPOCH, limit_val_batches=1.0)


def ladder(plain: Variant, measures: Sequence[Measure], goal: Goal) -> list[Variant]:
    """Return the plain variant, and what it is after each of the measures."""
    rungs = [plain]
    for measure in measures:
        rungs.append(measure.apply(rungs[-1], goal))
    return rungs


def without(plain: Variant, measures: Sequence[Measure], goal: Goal, left_out: Measure) -> Variant:
    """Return the end of the ladder with one measure less; where another supersedes it, that is the same."""
    return ladder(plain, [measure for measure in measures if measure is not left_out], goal)[-1]


def changed(variant: Variant, group: str, **values: Any) -> Variant:
    """Return the variant with other values in one group of the settings."""
    new_group = replace(getattr(variant.settings, group), **values)
    return variant._replace(settings=replace(variant.settings, **{group: new_group}))


def as_recommended(group: str, setting: str, variant: Variant, goal: Goal) -> Variant:
    return changed(variant, group, **{setting: getattr(getattr(goal.settings, group), setting)})


def token_budget(variant: Variant, goal: Goal) -> Variant:
    return changed(variant, "batches", batch_size=None, tokens_per_batch=goal.tokens_per_batch)


def prefetch_thread(variant: Variant, goal: Goal) -> Variant:
    return variant._replace(settings=replace(variant.settings, loading=goal.settings.loading))


def throttled_readings(variant: Variant, goal: Goal) -> Variant:
    settings = replace(variant.settings, monitoring=goal.settings.monitoring)
    return variant._replace(settings=settings, closest_watch=False)


MEASURES = (
    Measure("4 sequences per batch, not 1", lambda it, _: changed(it, "batches", batch_size=4)),
    Measure("8 worker processes, not 2", lambda it, _: changed(it, "loading", num_workers=8)),
    Measure("bucketing: similar lengths together", partial(as_recommended, "batches", "bucketing")),
    Measure("a budget of tokens, not of sequences", token_budget),
    Measure("16-mixed, not 32-true", partial(as_recommended, "compute", "precision")),
    Measure("32 shapes of batches (--pad_grid)", lambda it, _: changed(it, "batches", pad_grid=None)),
    Measure("operations written out by hand", partial(as_recommended, "compute", "plain_operations")),
    Measure("fused AdamW", partial(as_recommended, "optimizer", "fused_optimizer")),
    Measure("2 batches per optimizer step", partial(as_recommended, "optimizer", "gradient_accumulation_steps")),
    Measure("a thread that prefetches, not processes", prefetch_thread),
    Measure("a cache, not Parquet read again", lambda it, _: it._replace(from_parquet=False)),
    Measure("values normalised once, not at each fetch", lambda it, _: it._replace(normalise=False)),
    Measure("readings throttled (--fast_detection)", throttled_readings),
    Measure("validating a tenth each time, not all", partial(as_recommended, "validation", "limit_val_batches")),
    Measure("a length cap", partial(as_recommended, "lengths", "max_sequence_length")),
)
"""All measures, in the order of the ladder. One may supersede another: with a token budget, a number of sequences has no effect."""

COMPILED = Measure("compiled (--compile_model)", lambda it, _: changed(it, "compute", compile_model=True))
"""The measure that is tried on top of the recommended recipe, which leaves it out."""

MAIN = (
    "4 sequences per batch, not 1",
    "bucketing: similar lengths together",
    "a budget of tokens, not of sequences",
    "16-mixed, not 32-true",
    "32 shapes of batches (--pad_grid)",
    "operations written out by hand",
    "fused AdamW",
)
"""The measures of the short form, in which the others are in force from the beginning."""


def recipe_of(variant: Variant, val_batches: int, source: Path) -> Recipe:
    """Return the run of a variant, which validates on a number of batches; `source` is where `write_source` wrote."""
    validation = replace(variant.settings.validation, limit_val_batches=val_batches)
    settings = replace(variant.settings, validation=validation)
    return Recipe("a variant", settings, partial(callbacks, *variant[1:], source))


def callbacks(
    closest_watch: bool, from_parquet: bool, normalise: bool, directory: Path, settings: TrainingSettings
) -> "list[Callback]":
    """Return what watches the run, and what it fetches its batches from where that is not the cache."""
    from benchmarks.speed.ablation_loading import FetchFrom, Source

    watching = (train_with_collapse_detection if closest_watch else train_optimized).callbacks(settings)
    if from_parquet or normalise:
        return [FetchFrom(Source(directory, from_parquet, normalise)), *watching]
    return watching
