"""The measures between a plain training and the recommended one, each a pure function of what a run does.

In: the settings of both training commands, and what the data are. Out: the ladder (the measures one after the other), and the
recommended recipe without each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from seqvae.config.training import TrainingSettings

VALIDATIONS_PER_EPOCH = 10


class Variant(NamedTuple):
    """A way to train."""

    settings: TrainingSettings
    closest_watch: bool
    """Readings as often as train_with_collapse_detection.py takes them, or as train_optimized.py does."""
    from_parquet: bool
    """Parquet is read again for each batch, or the cache is."""
    normalise: bool
    """Values are normalised whenever they are fetched, or once."""


class Goal(NamedTuple):
    """What the measures lead to."""

    settings: TrainingSettings
    """The recommended ones, by `train_optimized.py --fast_detection`."""
    tokens_per_batch: int
    """That these resolve to with these data."""


class Measure(NamedTuple):
    name: str
    apply: Callable[[Variant, Goal], Variant]


def plain_variant(reference: TrainingSettings, *, longest: int, has_values: bool) -> Variant:
    """Before all measures: the reference recipe, one sequence a batch, Parquet as it lies there, all validated each time.

    `longest`: steps of the longest sequence.
    """
    plain = Variant(reference, closest_watch=True, from_parquet=True, normalise=has_values)
    plain = changed(plain, "batches", batch_size=1, pad_grid=0)
    plain = changed(plain, "loading", worker_type="process", num_workers=2, prefetch_factor=2)  # torch's own
    plain = changed(plain, "lengths", max_sequence_length=max(longest, reference.lengths.max_sequence_length))
    return changed(plain, "validation", val_check_interval=1 / VALIDATIONS_PER_EPOCH, limit_val_batches=1.0)


def ladder(plain: Variant, taken: Sequence[Measure], goal: Goal) -> list[Variant]:
    """The plain variant, and what it is after each of the measures."""
    rungs = [plain]
    for measure in taken:
        rungs.append(measure.apply(rungs[-1], goal))
    return rungs


def without(plain: Variant, taken: Sequence[Measure], goal: Goal, left_out: Measure) -> Variant:
    """The end of the ladder with one measure less; where another supersedes it, that is the same."""
    return ladder(plain, [measure for measure in taken if measure is not left_out], goal)[-1]


def as_recommended(group: str, setting: str, variant: Variant, goal: Goal) -> Variant:
    return changed(variant, group, **{setting: getattr(getattr(goal.settings, group), setting)})


def token_budget(variant: Variant, goal: Goal) -> Variant:
    return changed(variant, "batches", batch_size=None, tokens_per_batch=goal.tokens_per_batch)


def prefetch_thread(variant: Variant, goal: Goal) -> Variant:
    return variant._replace(settings=replace(variant.settings, loading=goal.settings.loading))


def throttled_readings(variant: Variant, goal: Goal) -> Variant:
    settings = replace(variant.settings, monitoring=goal.settings.monitoring)
    return variant._replace(settings=settings, closest_watch=False)


def changed(variant: Variant, group: str, **values: Any) -> Variant:
    """With other values in one group of the settings."""
    group_of = getattr(variant.settings, group)
    return variant._replace(settings=replace(variant.settings, **{group: replace(group_of, **values)}))


MEASURES = (
    Measure("4 sequences a batch, not 1", lambda it, _: changed(it, "batches", batch_size=4)),
    Measure("8 worker processes, not 2", lambda it, _: changed(it, "loading", num_workers=8)),
    Measure("bucketing: similar lengths together", partial(as_recommended, "batches", "bucketing")),
    Measure("a budget of tokens, not of sequences", token_budget),
    Measure("16-mixed, not 32-true", partial(as_recommended, "compute", "precision")),
    Measure("32 shapes of batches (--pad_grid)", lambda it, _: changed(it, "batches", pad_grid=None)),
    Measure("operations written out by hand", partial(as_recommended, "compute", "plain_operations")),
    Measure("fused AdamW", partial(as_recommended, "optimizer", "fused_optimizer")),
    Measure("2 batches an optimizer step", partial(as_recommended, "optimizer", "gradient_accumulation_steps")),
    Measure("a thread that prefetches, not processes", prefetch_thread),
    Measure("a cache, not Parquet read again", lambda it, _: it._replace(from_parquet=False)),
    Measure("values normalised once, not at each fetch", lambda it, _: it._replace(normalise=False)),
    Measure("readings throttled (--fast_detection)", throttled_readings),
    Measure("validating a tenth each time, not all", partial(as_recommended, "validation", "limit_val_batches")),
    Measure("a length cap", partial(as_recommended, "lengths", "max_sequence_length")),
)
"""In the order of the ladder. One may supersede another: with a token budget, nobody asks for a number of sequences."""

COMPILED = Measure("compiled (--compile_model)", lambda it, _: changed(it, "compute", compile_model=True))
"""On top of the recommended recipe, which leaves it out."""

MAIN = (
    "4 sequences a batch, not 1",
    "bucketing: similar lengths together",
    "a budget of tokens, not of sequences",
    "16-mixed, not 32-true",
    "32 shapes of batches (--pad_grid)",
    "operations written out by hand",
    "fused AdamW",
)
"""Those of the short form; the others are in force from the beginning there."""
