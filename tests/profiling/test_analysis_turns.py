"""How turns are taken and added up: scripted runs in, what `analyse` makes of them out."""

from pathlib import Path
from typing import Any

import pytest

import train_optimized
from seqvae.config.data import BatchSettings, CacheSettings, SourceSettings
from seqvae.config.profiling import MeasuringSettings
from seqvae.config.training import OptimizedSettings
from seqvae.profiling import analysis
from seqvae.profiling.analysis import analyse
from seqvae.profiling.measured_run import STAGES, Lap, Ready, Recipe, Saved, Validation, Work
from seqvae.training.schedules import Plan
from tests.support.parquet_files import write_splits

MEASURING = MeasuringSettings(num_iterations=10, warmup_iterations=3)
VALID, BATCH = 80, 4
"""Number of validation sequences, and of those in a batch."""


@pytest.fixture(scope="module")
def token_lists(tmp_path_factory) -> Path:
    lists = [[number % 7] * (1 + number % 50) for number in range(400)]
    return write_splits(tmp_path_factory.mktemp("data"), train={"tokens": lists}, valid={"tokens": lists[:VALID]})


class Scripted:
    """A run of which every optimizer step takes the same time and has 100 real steps, 10 of padding and 4 sequences."""

    calls: list[tuple[str, int, int]]

    def __init__(self, recipe: Recipe, seconds: float, calls: list[tuple[str, int, int]]) -> None:
        self.name, self.seconds, self.calls, self.is_closed = recipe.name, seconds, calls, False
        self.limit_val_batches = recipe.settings.validation.limit_val_batches
        plan = Plan(total_steps=1000, steps_per_epoch=100, tokens_per_step=100.0, sequences_per_step=4.0, lr=0.1)
        self.ready = Ready(1_000, plan, accumulate=2, precision="32-true", device="cpu", seconds=1.5)

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def turn(self, steps: int, lead_steps: int) -> Lap:
        self.calls.append((self.name, steps, lead_steps))
        seconds = steps * self.seconds
        stages = dict.fromkeys(STAGES, 0.0) | {"forward": 0.75 * seconds, "loop": 0.25 * seconds}
        return Lap(seconds, steps, 2 * steps, 100 * steps, 110 * steps, 4 * steps, stages, seconds, 2, None, 1.5, 0)

    def count(self) -> Work:
        return Work(flops=22_000, padded_steps=220)

    def validate(self) -> Validation:
        return Validation(-1.0, 1.0, 0.0, seconds=float(self.limit_val_batches))

    def save(self) -> Saved:
        return Saved(seconds=0.5, bytes=100)


class Contest:
    """An analysis of scripted runs."""

    def __init__(
        self, data_dir: Path, cache_dir: Path, seconds: dict[str, float], measuring: MeasuringSettings
    ) -> None:
        settings = OptimizedSettings(
            source=SourceSettings(data_dir=str(data_dir)),
            cache=CacheSettings(cache_dir=str(cache_dir)),
            batches=BatchSettings(batch_size=BATCH),
        )
        self.calls: list[tuple[str, int, int]] = []
        self.runs: list[Scripted] = []
        self.lines: list[str] = []

        def start(recipe: Recipe) -> Any:
            self.runs.append(Scripted(recipe, seconds[recipe.name], self.calls))
            return self.runs[-1]

        recipes = [Recipe(name, settings, train_optimized.callbacks) for name in seconds]
        self.speeds, self.comparison = analyse(recipes, measuring, self.lines.append, start=start)


@pytest.fixture
def contest(token_lists, tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "product_peak", lambda device, dtype: 1e6)

    def hold(measuring: MeasuringSettings = MEASURING, **seconds: float) -> Contest:
        return Contest(token_lists, tmp_path / "cache", seconds, measuring)

    return hold


def test_commands_take_turns_after_each_has_warmed_up(contest):
    calls = contest(MeasuringSettings(num_iterations=4, warmup_iterations=3), slow=0.4, fast=0.1).calls
    warm_up = [("slow", 1, 0), ("slow", 2, 0), ("fast", 1, 0), ("fast", 2, 0)]
    assert calls == [*warm_up, *(4 * [("slow", 1, 2), ("fast", 1, 2)])]


def test_the_turns_are_added_up_without_the_warm_up(contest):
    (speed,) = contest(MeasuringSettings(num_iterations=10, warmup_iterations=5), only=0.5).speeds
    assert (speed.steps, speed.seconds, speed.real_steps, speed.padded_steps, speed.sequences) == (
        10,
        5.0,
        1000,
        1100,
        40,
    )
    assert speed.turns == [200.0] * 5
    assert (speed.stages["forward"], speed.stages["loop"]) == (3.75, 1.25)
    assert (speed.cpu_utilisation, speed.first_step_seconds, speed.start_seconds) == (0.5, 0.5, 1.5)


def test_arithmetic_is_held_against_the_product_timed_in_between(contest):
    (speed,) = contest(only=0.5).speeds
    assert speed.flops_per_second == 100 * 200
    assert speed.share_of_peak == 0.02
    assert speed.peak_dtype == "float32"


def test_a_ratio_is_of_all_steps_in_all_seconds(contest):
    compared = contest(slow=0.4, fast=0.1).comparison
    assert (compared.faster, compared.slower) == ("fast", "slow")
    assert compared.ratio == pytest.approx(4)
    assert compared.lowest == pytest.approx(compared.highest)


def test_one_command_is_compared_with_nothing(contest):
    assert contest(only=0.5).comparison is None


def test_all_runs_are_closed_in_the_end(contest):
    assert all(run.is_closed for run in contest(slow=0.4, fast=0.1).runs)


def test_the_expected_duration_is_printed_first(contest):
    lines = contest(MeasuringSettings(num_iterations=100, warmup_iterations=2), only=0.5).lines
    assert "measuring 100 optimizer steps in 5 turns, about 55 s" in lines


def test_a_long_validation_is_reckoned_from_a_part_of_it(contest, monkeypatch):
    monkeypatch.setattr(analysis, "MOST_VALIDATION_BATCHES", 1)
    held = contest(only=0.5)
    (run,), (speed,) = held.runs, held.speeds
    on_the_way, last = 2, VALID // BATCH  # a tenth and all of them, a second each
    assert run.limit_val_batches == 1
    assert speed.run.validation_seconds == (speed.run.validations - 1) * on_the_way + last
