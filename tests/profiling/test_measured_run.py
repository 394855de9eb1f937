"""A run in a process of its own that trains only on request."""

import json
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

import train_optimized
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings
from seqvae.errors import DamagedFileError, DataError, DivergedError, ExitCode, StorageError, UsageError, run_command
from seqvae.profiling.measured_run import STAGES, MeasuredRun, MeasuredRunError, Recipe
from tests.support.parquet_files import write

SMALL = ("--width", "8", "--depth", "1", "--heads", "2", "--latent_size", "2", "--tokens_per_batch", "100")


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    directory = tmp_path_factory.mktemp("contest")
    random = np.random.default_rng(0)
    write(
        directory / "tokens" / "all.parquet",
        {"tokens": [random.integers(0, 9, n) for n in random.integers(3, 30, 300)]},
    )
    return ["--data_dir", str(directory / "tokens"), "--cache_dir", str(directory / "cache"), *SMALL]


def recipe(words: list[str], *more: str) -> Recipe:
    settings = parse_command_line(OptimizedSettings, [*words, *more], prog="test", description="")
    return Recipe("test", settings, train_optimized.callbacks)


@pytest.fixture(scope="module")
def run(words):
    with MeasuredRun(recipe(words)) as contestant:
        yield contestant


def test_a_turn_trains_the_requested_steps_and_each_moment_has_its_stage(run):
    lap = run.turn(steps=6, lead_steps=1)
    assert (lap.steps, lap.micro_batches) == (6, 12)
    assert set(lap.stages) == set(STAGES)
    assert lap.seconds == pytest.approx(sum(lap.stages.values()), rel=1e-2)
    assert all(lap.stages[stage] > 0 for stage in ("data", "forward", "backward", "optimizer", "monitoring", "loop"))
    assert lap.real_steps <= lap.padded_steps <= 12 * 100
    assert lap.sequences >= 12


def test_a_turn_lasts_the_requested_seconds(run):
    assert sum(run.turn(steps=1, seconds=0.3, lead_steps=0).stages.values()) >= 0.3


def test_counted_work_is_of_the_batches_that_were_trained_on(run):
    work = run.count(steps=2)
    weights = run.ready.parameters
    assert 0.2 < work.flops / (6 * weights * work.padded_steps) < 5  # six for each weight and step, roughly


def test_a_validation_is_the_same_again_as_long_as_nothing_was_trained(run):
    first, second = run.validate(), run.validate()
    assert first._replace(seconds=0) == second._replace(seconds=0)
    assert first.elbo == pytest.approx(-first.nll - first.kl, rel=1e-5)
    run.turn(steps=3)
    assert run.validate().elbo != first.elbo


def test_saving_and_tracing_leave_nothing_behind_but_the_trace(run, tmp_path):
    assert run.save().bytes > 4 * run.ready.parameters
    path = tmp_path / "trace.json"
    assert run.trace(path, steps=1) == path.stat().st_size
    assert any("mm" in event.get("name", "") for event in json.loads(path.read_text())["traceEvents"])


def test_a_run_is_as_long_as_it_is_measured_and_tells_how_long_it_was_meant_to_be(words):
    with MeasuredRun(recipe(words, "--max_steps", "5")) as run:
        assert run.ready.plan.total_steps == 5
        assert run.turn(steps=8, lead_steps=0).steps == 8


def test_errors_that_the_user_can_mend_keep_their_type(words):
    with MeasuredRun(recipe(words, "--posterior", "batch_norm", "--batch_size", "1")) as run, pytest.raises(UsageError):
        _ = run.ready
    with MeasuredRun(recipe([*words, "--data_dir", "/nowhere"])) as run, pytest.raises(DataError):
        _ = run.ready


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DivergedError("step 3: the loss is nan"), ExitCode.DIVERGED),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ExitCode.OUT_OF_MEMORY),
        (StorageError("/runs: no space left"), ExitCode.STORAGE),
        (DamagedFileError("a.parquet: damaged"), ExitCode.DATA),
    ],
)
def test_what_ends_a_training_process_ends_the_command_as_it_would_a_training(words, error, code, capsys):
    def main() -> None:
        failing = recipe(words)._replace(callbacks=partial(fail_with, error))
        with MeasuredRun(failing) as run:
            _ = run.ready

    assert run_command(main, "analyze_performance.py") == code
    assert str(error) in capsys.readouterr().err


def test_a_bug_in_a_training_process_shows_where_it_was(words):
    failing = recipe(words)._replace(callbacks=partial(fail_with, KeyError("x")))
    with MeasuredRun(failing) as run, pytest.raises(MeasuredRunError, match="in fail_with"):
        _ = run.ready


def fail_with(error: Exception, settings: Any) -> list[Any]:
    raise error


def test_a_killed_process_counts_as_a_lack_of_memory(words):
    with MeasuredRun(recipe(words)) as run:
        _ = run.ready
        run._process.kill()
        with pytest.raises(MemoryError, match="ended with code -9"):
            run.turn()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak cannot be reset")
def test_the_peak_of_memory_is_that_of_the_requested_batch(words):
    requested = recipe(words, "--tokens_per_batch", "9000", "--width", "64", "--disable_metrics_monitoring")
    with MeasuredRun(requested._replace(trains_requested_batches=True)) as run:
        first = run.peak_memory([0, 1], 100)
        large = run.peak_memory(list(range(250)), 9000)
        small = run.peak_memory([0, 1], 100)
    assert first.can_repeat
    assert (first.least_sequences, first.device_bytes) == (1, None)
    assert large.peak_bytes > small.peak_bytes + 10**6
    assert small.peak_bytes > 10**8


def test_a_closed_run_leaves_no_process_and_no_directory(words):
    run = MeasuredRun(recipe(words))
    _ = run.ready
    run.close()
    assert not run._process.is_alive()
    assert not run.directory.exists()
