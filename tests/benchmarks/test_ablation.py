"""The ablation: its ladder ends in the command's recipe, and slower loading makes the same batches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.speed import ablation
from benchmarks.speed.ablation import (
    Measured,
    Timed,
    Turns,
    ValidationSample,
    lead_steps,
    measure_variants,
    validation_sample,
    validation_seconds,
)
from benchmarks.speed.ablation_loading import Fetched, Source, write_source
from benchmarks.speed.ablation_measures import MAIN, MEASURES, Goal, Variant, ladder, plain_variant, without
from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.config.monitoring import MonitoringSettings
from seqvae.config.run import ValidationSettings
from seqvae.config.training import OptimizedSettings, OptimizerSettings, ReferenceSettings, TrainingSettings
from seqvae.config.yaml_files import to_flat_dict
from seqvae.data.cache import SequenceData, open_cache, prepare_cache
from seqvae.data.dataset import LONGEST
from seqvae.data.demo import write_demo
from seqvae.data.description import Kind
from seqvae.profiling.measured_run import Lap
from seqvae.training.fit import make_data

TINY = ("--width", "16", "--depth", "1", "--heads", "2", "--latent_size", "2")
GOAL = Goal(OptimizedSettings(monitoring=MonitoringSettings(fast_detection=True)), tokens_per_batch=4000)
PLAIN = plain_variant(ReferenceSettings(), longest=1500, has_values=True)
NAMES = [measure.name for measure in MEASURES]


def test_the_ladder_ends_in_what_train_optimized_does():
    last = ladder(PLAIN, MEASURES, GOAL)[-1]
    batches = replace(GOAL.settings.batches, tokens_per_batch=GOAL.tokens_per_batch)
    assert to_flat_dict(last.settings) == to_flat_dict(replace(GOAL.settings, batches=batches))
    assert last[1:] == (False, False, False)


def test_every_measure_changes_something():
    rungs = ladder(PLAIN, MEASURES, GOAL)
    assert len(set(rungs)) == len(MEASURES) + 1


def test_what_a_later_measure_supersedes_makes_no_difference_to_the_whole():
    whole = ladder(PLAIN, MEASURES, GOAL)[-1]
    superseded = [measure.name for measure in MEASURES if without(PLAIN, MEASURES, GOAL, measure) == whole]
    assert superseded == ["4 sequences per batch, not 1", "8 worker processes, not 2"]


def test_the_short_form_knows_its_measures():
    assert set(MAIN) < set(NAMES)


@pytest.fixture(scope="module", params=["tokens", "vectors", "events"])
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    kind: Kind = request.param
    folder = write_demo(directory, kind, sequences=1200, mean_length=10)
    path = prepare_cache(SourceSettings(data_dir=str(folder)), CacheSettings(cache_dir=str(directory)))
    write_source(opened(path, LONGEST), path / "source")
    return path


def opened(path: Path, cap: int) -> SequenceData:
    return open_cache(path, LengthSettings(max_sequence_length=cap))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("from_parquet", [False, True])
def test_a_batch_is_the_same_whatever_it_is_fetched_from(cache, from_parquet, normalise):
    data = opened(cache, 12)
    train, has_values = data.splits["train"], data.description.kind != "tokens"
    slow = Fetched(train, data.description, Source(cache / "source", from_parquet, has_values and normalise))
    chosen_B = np.array([1150, 3, 999, 1000, 3])
    for pad_to in (None, 20):
        for expected, found in zip(train.gather(chosen_B, pad_to), slow.gather(chosen_B, pad_to), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def lap(seconds: float, real_steps: int) -> Lap:
    return Lap(seconds, 1, 1, real_steps, real_steps, 1, {}, seconds, 2, None, 1.0, 0)


def test_a_rate_is_that_of_all_laps_with_the_validations_of_an_epoch():
    timed = Timed([lap(1.0, 100), lap(3.0, 100)], validation_seconds=20.0, tokens=1000)
    assert timed.rate(timed.laps) == pytest.approx(1000 / (1000 * 4 / 200 + 20))


@pytest.mark.parametrize(("limit", "seconds"), [(1.0, 10 * 0.2 * 50), (0.1, 10 * 0.2 * 5)])
def test_validations_count_as_often_and_as_long_as_the_settings_say(limit, seconds):
    settings = ValidationSettings(val_check_interval=0.1, limit_val_batches=limit)
    sample = ValidationSample(batches=4, share=0.02)
    assert validation_seconds(0.2, settings, sample) == pytest.approx(seconds)


def test_a_validation_is_timed_on_a_known_share_of_the_tokens(tmp_path):
    folder = write_demo(tmp_path, "tokens", sequences=300, mean_length=6)
    words = ("--data_dir", str(folder), "--cache_dir", str(tmp_path / "cache"), "--batch_size", "10")
    settings = parse_command_line(ReferenceSettings, words, prog="test", description="")
    data = make_data(replace(settings, validation=replace(settings.validation, limit_val_batches=2)))
    steps = sum(int(batch.lengths_B.sum()) for batch in data.val_dataloader())
    share = steps / int(data.split("valid").lengths_N.sum())
    assert validation_sample(settings) == ValidationSample(batches=2, share=share)


@pytest.mark.parametrize(
    ("loading", "accumulate", "step_seconds", "expected"),
    [
        (LoadingSettings(), 1, 0.01, 8),
        (LoadingSettings(), 2, 0.01, 4),
        (LoadingSettings(worker_type="process", num_workers=8, prefetch_factor=2), 1, 0.01, 16),
        (LoadingSettings(worker_type="process", num_workers=8, prefetch_factor=2), 1, 0.3, 3),
        (LoadingSettings(), 1, 2.0, 0),
    ],
)
def test_batches_prepared_during_the_turns_of_others_are_used_up_first(loading, accumulate, step_seconds, expected):
    optimizer = OptimizerSettings(gradient_accumulation_steps=accumulate)
    assert lead_steps(TrainingSettings(loading=loading, optimizer=optimizer), step_seconds) == expected


def test_rows_say_what_adding_and_removing_a_measure_did():
    rungs = ladder(PLAIN, MEASURES, GOAL)
    lacking = [without(PLAIN, MEASURES, GOAL, measure) for measure in MEASURES]
    reference = Variant(ReferenceSettings(), closest_watch=True, from_parquet=False, normalise=False)
    comparison = ablation.Comparison(PLAIN, MEASURES, rungs[1:], lacking, None, reference)
    rates = {variant: 100.0 * 2**number for number, variant in enumerate(rungs)}
    measured = {variant: Measured(rates.get(variant, 50.0), "1.00-1.00", 1.0) for variant in comparison.variants}
    rows = ablation.rows_of(comparison, measured)
    by_name = {row["measure"]: row for row in rows}
    assert [row["measure"] for row in rows[1:-2]] == [f"+ {name}" for name in NAMES]
    assert {row["gain by adding"] for row in rows[1:-2]} == {2.0}
    assert by_name["+ fused AdamW"]["lost by removing"] == round(rates[rungs[-1]] / 50, 2)
    assert by_name["+ 4 sequences per batch, not 1"]["lost by removing"] == ablation.NOT_APPLICABLE


def test_real_runs_take_turns_with_the_one_that_is_in_all_groups(tmp_path):
    """The plain variant has worker processes that read Parquet, the recommended one a thread that reads the cache."""
    folder = write_demo(tmp_path, "vectors", sequences=60, mean_length=6)
    words = ("--data_dir", str(folder), "--cache_dir", str(tmp_path / "cache"), *TINY)
    reference, recommended = (
        parse_command_line(schema, words, prog="test", description="")
        for schema in (ReferenceSettings, OptimizedSettings)
    )
    comparison = ablation.prepare(reference, recommended, tmp_path / "source", short=False)
    turns = Turns(rounds=1, seconds=0.0, warm_up_seconds=0.0, group_size=1)
    measured = measure_variants([comparison.plain], comparison.recommended, tmp_path / "source", turns)
    assert measured.keys() == {comparison.plain, comparison.recommended}
    assert all(one.rate > 0 and one.peak_gib > 0 for one in measured.values())


@pytest.mark.slow
def test_the_short_form_measures_each_of_its_measures():
    turns = Turns(rounds=1, seconds=0.0, warm_up_seconds=0.0, group_size=8)
    report = ablation.run(["tokens"], TINY, turns, short=True, sequences=100)
    names = [row["measure"] for row in report["tokens"]]
    assert names[1:-2] == [f"+ {name}" for name in MAIN]
    assert all(row["real tokens/s"] > 0 for row in report["tokens"])
