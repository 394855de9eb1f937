"""--find_batch: the worst batches, the search over all lengths, processes that die, what is said, and the real thing."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import BatchSettings
from seqvae.config.training import ComputeSettings, OptimizedSettings, TrainingSettings
from seqvae.data.batching import Cut, cut_batches, plan_epoch, resolve_limits
from seqvae.data.demo.demo import write_demo
from seqvae.errors import DataError
from seqvae.profiling.find_batch import FoundBatch, Limit, Search, Tried, describe, find_batch, what_helps
from seqvae.profiling.trials import Ready, Trials, Try
from seqvae.profiling.worst_batches import LengthRange, WorstBatches, most_events
from seqvae.text import Ink
from tests.support.fake_sequences import FakeSequences, log_normal_lengths
from tests.support.mortal_processes import answer, die_at_once
from tests.support.small_models import make_batch

ROOT = Path(__file__).parent.parent.parent


# --- The worst batches -------------------------------------------------------------------------------------------------

CAP = 1000
LENGTHS = log_normal_lengths(5000)
BY_DEFAULT = BatchSettings()


def worst_batches(settings: BatchSettings = BY_DEFAULT, lengths_N: np.ndarray = LENGTHS) -> WorstBatches:
    return WorstBatches(
        lengths_N,
        lambda tokens: cut_at(tokens, settings, lengths_N),
        FakeSequences(lengths_N).gather,
        pad_to=None if settings.use_dynamic_padding else CAP,
        batch_size=settings.batch_size,
    )


def cut_at(tokens: int, settings: BatchSettings = BY_DEFAULT, lengths_N: np.ndarray = LENGTHS) -> Cut:
    limits = resolve_limits(lengths_N, replace(settings, tokens_per_batch=tokens), CAP)
    return cut_batches(lengths_N, limits, bucketing=settings.bucketing)


@pytest.mark.parametrize("settings", [BatchSettings(), BatchSettings(batch_size=7), BatchSettings(bucketing=False)])
@pytest.mark.parametrize("tokens", [1000, 1999, 4096, 30_000])
def test_no_batch_of_an_epoch_is_worse_than_the_worst_of_its_range(settings, tokens):
    worst = worst_batches(settings)
    batches = [worst.at(tokens, lengths) for lengths in worst.ranges(32)]
    plan = plan_epoch(cut_at(tokens, settings), seed=3, epoch=1)
    for k in range(plan.batches):
        lengths_B = LENGTHS[plan.batch(k)]
        longest, steps = lengths_B.max(), lengths_B.max() * len(lengths_B)
        assert any(one.length >= 0.8 * longest and one.steps >= 0.95 * steps for one in batches)


def test_a_worst_batch_is_made_of_the_longest_sequences_of_its_bucket():
    cut = cut_at(8000)
    buckets = [np.sort(LENGTHS[cut.order_N[begin:end]])[::-1] for begin, end in pairwise(cut.bucket_starts)]
    by_top = {bucket[0]: bucket.tolist() for bucket in buckets}
    for lengths in worst_batches().ranges(8):
        batch = worst_batches().at(8000, lengths)
        of_bucket = by_top[batch.length][: len(batch.sequences_B)]
        assert LENGTHS[batch.sequences_B][: len(of_bucket)].tolist() == of_bucket


def test_no_worst_batch_exceeds_its_budget():
    worst = worst_batches()
    assert all(worst.at(tokens, one).steps <= tokens for tokens in (1000, 5000) for one in worst.ranges(32))


def test_ranges_go_from_the_longest_to_the_shortest_and_leave_no_length_out():
    ranges = worst_batches().ranges(8)
    inside = sum(np.count_nonzero((one.above < LENGTHS) & (one.up_to >= LENGTHS)) for one in ranges)
    assert (len(ranges), ranges[0].up_to, inside) == (8, LENGTHS.max(), len(LENGTHS))


def test_equal_lengths_have_one_range():
    assert worst_batches(lengths_N=np.full(9, 5)).ranges(8) == [LengthRange(4, 5)]


def test_under_the_highest_budget_all_sequences_make_one_batch():
    worst = worst_batches()
    assert len(worst.at(worst.highest, worst.ranges(8)[0]).sequences_B) == len(LENGTHS)


def test_without_dynamic_padding_all_batches_are_of_one_shape():
    worst = worst_batches(BatchSettings(use_dynamic_padding=False))
    assert {(one.length, len(one.sequences_B)) for one in (worst.at(5000, r) for r in worst.ranges(8))} == {(CAP, 5)}


def test_of_a_bucket_the_sequences_with_the_most_events_are_worst():
    batch = make_batch("events", [4, 4, 4, 4, 4])
    events_B = np.bincount(batch.steps_E.numpy() // 4, minlength=5)
    chosen = most_events(np.arange(10, 15), 3, lambda sequences_B: batch)
    others = np.argsort(-events_B[1:], kind="stable")[:2] + 1
    assert chosen.tolist() == [10, *(10 + others)]


# --- The search over all lengths ---------------------------------------------------------------------------------------


class FakeTrials:
    """Memory by a rule of lengths."""

    def __init__(self, need: Any) -> None:
        self.need, self.most = need, 0

    def peak_bytes(self, wanted: Try) -> int | None:
        lengths_B = LENGTHS[wanted.sequences_B]
        peak = int(1e6 + self.need(int(lengths_B.max())) * lengths_B.max() * len(lengths_B))
        self.most = max(self.most, peak)
        return peak


def attention(length: int) -> float:
    """Of each step: written out for short sequences, fused for long ones."""
    return 100 + (length if length <= 512 else 0)


def end_marks(length: int) -> float:
    """Of each step: one more for each sequence."""
    return 100 * (length + 1) / length


@pytest.mark.parametrize("need", [attention, end_marks, lambda length: 100 + length])
def test_the_size_found_fits_all_lengths_and_a_tenth_more_does_not(need):
    worst = worst_batches()
    trials: Any = FakeTrials(need)
    result = Search(worst, trials, 1e7, lambda line: None).run(lowest=1000)
    assert result is not None
    tokens, tried = result
    assert max(one.peak for one in tried) <= 1e7
    assert trials.most < 1.2 * 1e7

    def peak_of(lengths_B):
        return 1e6 + need(int(lengths_B.max())) * lengths_B.max() * len(lengths_B)

    def worst_of_an_epoch(budget):
        plan = plan_epoch(cut_at(budget), seed=0, epoch=0)
        return max(peak_of(LENGTHS[plan.batch(k)]) for k in range(plan.batches))

    assert worst_of_an_epoch(tokens) <= 1.1e7  # the margin is for lengths between those that were tried
    assert worst_of_an_epoch(int(1.15 * tokens)) > 1e7


def test_where_nothing_fits_there_is_no_result():
    worst = worst_batches()
    trials: Any = FakeTrials(attention)
    assert Search(worst, trials, 1e6, lambda line: None).run(lowest=1000) is None


# --- Processes that die ------------------------------------------------------------------------------------------------


def some(number: int) -> Try:
    return Try(np.arange(number), tokens_per_batch=number)


@pytest.mark.parametrize("ending", ["killed", "out of memory"])
def test_a_process_that_found_no_memory_is_replaced_and_its_batch_does_not_fit(ending):
    with Trials(answer, 3, ending) as trials:
        assert [trials.peak_bytes(some(number)) for number in (2, 4, 3)] == [200, None, 300]


def test_a_process_that_dies_of_a_bug_is_an_error():
    with Trials(answer, 3, "bug") as trials, pytest.raises(RuntimeError, match="ended with exit code 1"):
        trials.peak_bytes(some(4))


def test_what_the_user_can_mend_is_raised_as_what_it_was():
    with Trials(answer, 3, "data") as trials, pytest.raises(DataError, match=r"train\.parquet is gone"):
        trials.peak_bytes(some(4))


def test_where_the_network_alone_finds_no_memory_nothing_is_ready():
    with Trials(die_at_once) as trials:
        assert trials.ready() is None


def test_where_a_peak_cannot_be_reset_each_try_has_a_process_of_its_own():
    with Trials(answer, 3, "killed", False) as trials:
        trials.peak_bytes(some(1))
        first = trials.ready()
        trials.peak_bytes(some(1))
        second = trials.ready()
    assert isinstance(first, Ready)
    assert isinstance(second, Ready)
    assert first.device_bytes != second.device_bytes  # here: the id of the process


# --- What is said ------------------------------------------------------------------------------------------------------


def found(**changes: Any) -> FoundBatch:
    tried = [Tried(900, 26, 23_400, 5_000_000_000), Tried(90, 260, 23_400, 4_000_000_000)]
    about = FoundBatch(23456, tried, 5_000_000_000, Limit(6_000_000_000, "--memory_limit"), 0.1, "memory", 42.0)
    return about._replace(**changes)


def test_the_flag_can_be_copied():
    text = "\n".join(describe(found(), Ink()))
    assert "largest that fits: --tokens_per_batch 23456\n" in text
    assert "--advise" in text
    assert "data end" not in text


def test_it_is_said_where_the_data_end_the_search():
    assert "The data end the search" in "\n".join(describe(found(ended_by="data"), Ink()))


def test_what_helps_is_what_is_not_in_force_already():
    limit = Limit(10**9, "--memory_limit")
    plain = what_helps(TrainingSettings(), 1000, limit, 0.1)
    assert "--gradient_checkpointing" in plain
    assert "--precision 16-mixed" in plain
    frugal = TrainingSettings(compute=ComputeSettings(gradient_checkpointing=True, precision="16-mixed"))
    assert "give" not in what_helps(frugal, 1000, limit, 0.1)
    assert "--max_sequence_length" in what_helps(frugal, 1000, limit, 0.1)


# --- The real thing ----------------------------------------------------------------------------------------------------

FEW = "--max_steps 3 --limit_val_batches 1 --width 64 --depth 1 --heads 2 --max_sequence_length 60 --disable_metrics_monitoring"
on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere each try is a process of its own, which takes minutes"
)


def words_for(tmp_path: Path, sequences: int, mean_length: float) -> list[str]:
    folder = write_demo(tmp_path, "vectors", sequences=sequences, mean_length=mean_length)
    places = ["--data_dir", folder, "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path]
    return [*FEW.split(), *map(str, places)]


def settings_of(words: list[str]) -> OptimizedSettings:
    return parse_command_line(OptimizedSettings, words, prog="", description="")


@on_linux
def test_where_memory_is_plenty_the_data_end_the_search(tmp_path):
    lines: list[str] = []
    result = find_batch(settings_of(words_for(tmp_path, 40, 6)), memory_limit_bytes=4 * 10**9, say=lines.append)
    assert result.ended_by == "data"
    assert result.tokens_per_batch == 40 * result.tried[0].length
    assert result.tried[0].sequences == 40
    assert result.limit == (4 * 10**9, "--memory_limit")
    assert result.peak_bytes == max(one.peak for one in result.tried) > 10**8


@on_linux
@pytest.mark.slow
def test_training_with_the_size_found_stays_below_the_limit(tmp_path, monkeypatch):
    limit = 1_600_000_000
    words = words_for(tmp_path, 20_000, 30)
    result = find_batch(settings_of(words), memory_limit_bytes=limit, say=lambda line: None)
    assert result.ended_by == "memory"
    assert 0.8 * limit < result.peak_bytes <= 0.9 * limit
    run = subprocess.Popen([sys.executable, ROOT / "train_optimized.py", *words, *result.flag.split()], cwd=tmp_path)
    _, status, usage = os.wait4(run.pid, 0)
    run.returncode = os.waitstatus_to_exitcode(status)
    assert run.returncode == 0
    assert 1024 * usage.ru_maxrss < limit
