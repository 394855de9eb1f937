"""--find_batch: the worst batches, the search over all lengths, runs that die, messages, memory, and the real thing."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import BatchSettings
from seqvae.config.training import ComputeSettings, OptimizedSettings, TrainingSettings
from seqvae.data.batching import Cut, cut_batches, plan_epoch, resolve_limits
from seqvae.data.demo import write_demo
from seqvae.errors import DataError, UsageError
from seqvae.profiling.find_batch import (
    RESOLUTION,
    FoundBatch,
    LengthRange,
    Limit,
    Trials,
    Tried,
    WorstBatch,
    WorstBatches,
    available_memory,
    describe,
    find_batch,
    largest_that_fits,
    most_events,
    search,
    what_helps,
)
from seqvae.profiling.measured_run import MeasuredRunError, MemoryNeed
from seqvae.reports.terminal import Ink
from seqvae.text import parse_size
from tests.support.fake_sequences import FakeSequences, log_normal_lengths
from tests.support.small_models import make_batch

ROOT = Path(__file__).parent.parent.parent
on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere each try is a process of its own, which takes minutes"
)


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


def steps_of(batch: WorstBatch) -> int:
    """Return the steps of a batch, padding included."""
    return batch.length * len(batch.sequences_B)


@pytest.mark.parametrize("settings", [BatchSettings(), BatchSettings(batch_size=7), BatchSettings(bucketing=False)])
@pytest.mark.parametrize("tokens", [1000, 1999, 4096, 30_000])
def test_no_batch_of_an_epoch_is_worse_than_the_worst_of_its_range(settings, tokens):
    worst = worst_batches(settings)
    batches = [worst.at(tokens, lengths) for lengths in worst.ranges(32)]
    plan = plan_epoch(cut_at(tokens, settings), seed=3, epoch=1)
    for k in range(plan.batches):
        lengths_B = LENGTHS[plan.batch(k)]
        longest, steps = lengths_B.max(), lengths_B.max() * len(lengths_B)
        assert any(one.length >= 0.8 * longest and steps_of(one) >= 0.95 * steps for one in batches)


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
    assert all(steps_of(worst.at(tokens, one)) <= tokens for tokens in (1000, 5000) for one in worst.ranges(32))


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
    """Trials in which memory follows a rule of lengths."""

    def __init__(self, bytes_per_step: Any) -> None:
        self.bytes_per_step, self.most = bytes_per_step, 0

    def need(self, sequences_B: np.ndarray, tokens_per_batch: int, *, trims: bool) -> MemoryNeed:
        lengths_B = LENGTHS[sequences_B]
        peak = int(1e6 + self.bytes_per_step(int(lengths_B.max())) * lengths_B.max() * len(lengths_B))
        self.most = max(self.most, peak)
        return MemoryNeed(peak, can_repeat=True, least_sequences=1, device_bytes=None)


def attention(length: int) -> float:
    """Return the bytes of each step, written out for short sequences and fused for long ones."""
    return 100 + (length if length <= 512 else 0)


def end_marks(length: int) -> float:
    """Return the bytes of each step, with one step more for each sequence."""
    return 100 * (length + 1) / length


@pytest.mark.parametrize("need", [attention, end_marks, lambda length: 100 + length])
def test_the_size_found_fits_all_lengths_and_a_tenth_more_does_not(need):
    worst = worst_batches()
    trials: Any = FakeTrials(need)
    result = search(worst, trials, lowest=1000, usable_bytes=1e7, unit="token", say=lambda line: None)
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
    assert search(worst, trials, lowest=1000, usable_bytes=1e6, unit="token", say=lambda line: None) is None


# --- Runs that die -----------------------------------------------------------------------------------------------------


class FakeRun:
    """A run that needs 100 bytes per sequence, and dies of more than three."""

    started = 0

    def __init__(self, ending: Exception, can_repeat: bool = True) -> None:
        self.ending, self.can_repeat, self.is_closed = ending, can_repeat, False
        FakeRun.started += 1

    def peak_memory(self, sequences: list[int], tokens_per_batch: int, *, trims: bool) -> MemoryNeed:
        assert not self.is_closed
        if len(sequences) > 3:
            raise self.ending
        return MemoryNeed(100 * len(sequences), self.can_repeat, least_sequences=1, device_bytes=None)

    def close(self) -> None:
        self.is_closed = True


def needs_of(numbers: list[int], ending: Exception, can_repeat: bool = True) -> tuple[list[int | None], int]:
    """Return what batches of these numbers of sequences needed, and how many runs were started."""
    FakeRun.started = 0
    start: Any = partial(FakeRun, ending, can_repeat)
    trials = Trials(start)
    needs = [trials.need(np.arange(number), number) for number in numbers]
    return [None if need is None else need.peak_bytes for need in needs], FakeRun.started


def test_a_run_that_found_no_memory_is_replaced_and_its_batch_does_not_fit():
    assert needs_of([2, 4, 3], MemoryError("killed")) == ([200, None, 300], 2)


@pytest.mark.parametrize("error", [MeasuredRunError("ended with code 1"), DataError("train.parquet is gone")])
def test_any_other_end_of_a_run_is_an_error(error):
    with pytest.raises(type(error)):
        needs_of([4], error)


def test_where_a_peak_cannot_be_reset_each_batch_has_a_run_of_its_own():
    assert needs_of([1, 1, 1], MemoryError(), can_repeat=False)[1] == 3


@on_linux
def test_no_memory_for_the_network_alone_is_an_error_with_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(Trials, "need", lambda *_, **__: None)
    with pytest.raises(UsageError, match="no memory for the network alone"):
        find_batch(settings_of(words_for(tmp_path, 40, 6)), say=lambda line: None)


# --- The messages ------------------------------------------------------------------------------------------------------


def found(**changes: Any) -> FoundBatch:
    tried = [Tried(900, 26, 23_400, 5_000_000_000), Tried(90, 260, 23_400, 4_000_000_000)]
    about = FoundBatch(
        23456, tried, 5_000_000_000, Limit(6_000_000_000, "--memory_limit"), 0.1, "memory", 42.0, "token"
    )
    return about._replace(**changes)


def test_the_flag_can_be_copied():
    text = "\n".join(describe(found(), Ink()))
    assert "largest that fits: --tokens_per_batch 23456\n" in text
    assert "--advise" in text
    assert "data end" not in text


def test_a_note_says_that_the_data_end_the_search():
    assert "The data end the search" in "\n".join(describe(found(ended_by="data"), Ink()))


def test_the_advice_leaves_out_what_is_in_force_already():
    limit = Limit(10**9, "--memory_limit")
    plain = what_helps(TrainingSettings(), "1,000 tokens", limit)
    assert "--gradient_checkpointing" in plain
    assert "--precision 16-mixed" in plain
    frugal = TrainingSettings(compute=ComputeSettings(gradient_checkpointing=True, precision="16-mixed"))
    assert "give" not in what_helps(frugal, "1,000 tokens", limit)
    assert "--max_sequence_length" in what_helps(frugal, "1,000 tokens", limit)


# --- The real thing ----------------------------------------------------------------------------------------------------

FEW = "--max_steps 3 --limit_val_batches 1 --width 64 --depth 1 --heads 2 --max_sequence_length 60 --disable_metrics_monitoring"


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
    size = ["--tokens_per_batch", str(result.tokens_per_batch)]
    # The peak that `getrusage` tells of a child begins at that of its parent, which the tests before made large.
    program = (
        "import atexit, runpy, sys; from benchmarks.measure import peak_mb; atexit.register(lambda: print(peak_mb())); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    line = [sys.executable, "-c", program, str(ROOT / "train_optimized.py"), *words, *size]
    place = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(line, cwd=tmp_path, env=place, stdout=subprocess.PIPE, text=True, check=True)
    assert 2**20 * float(run.stdout.splitlines()[-1]) < limit


# --- Sizes of memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9),
        ("6GiB", 6 * 2**30),
        ("6g", 6 * 10**9),
        ("900MB", 9 * 10**8),
        ("1.5 TiB", 3 * 2**39),
        ("6e9", 6 * 10**9),
        ("512", 512),
        ("512B", 512),
    ],
)
def test_sizes_of_memory_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "6 gigs", "-6GB", "0GB", "6,5GB", "inf", "nan", "1e40"])
def test_other_text_than_a_size_of_memory_is_refused_by_the_name_of_the_flag(text):
    with pytest.raises(ValueError, match=r"^--memory_limit must be "):
        parse_size(text)


def make_machine(root: Path, groups: str, **files: str) -> Path:
    """Write the files of control groups; in the names of the arguments __ stands for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("memory_", "memory.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_is_that_of_the_machine(tmp_path):
    there = psutil.virtual_memory().available
    left = available_memory(make_machine(tmp_path, "0::/\n"))
    assert left.source == "available now"
    assert left.bytes == pytest.approx(there, rel=0.2)


@pytest.mark.parametrize("group", ["/", "/outer/inner"])
def test_a_container_has_what_its_limit_leaves_without_files_that_can_be_dropped(tmp_path, group):
    files = {"memory_max": "5000\n", "memory_current": "3000", "memory_stat": "anon 5\ninactive_file 1000"}
    files |= {
        "outer__inner__memory_max": "max",
        "outer__inner__memory_current": "1",
        "outer__inner__memory_stat": "anon 1",
    }
    left = available_memory(make_machine(tmp_path, f"0::{group}\n", **files))
    assert left == (3000, "left of the limit of its control group")


def test_an_older_control_group_counts_as_well(tmp_path):
    old = {"memory__memory_limit_in_bytes": "5000", "memory__memory_usage_in_bytes": "4000"}
    left = available_memory(make_machine(tmp_path, "4:memory:/\n", memory__memory_stat="total_inactive_file 7", **old))
    assert left.bytes == 1007


# --- The search --------------------------------------------------------------------------------------------------------


class Machine:
    """A machine whose need of memory follows a rule, and which remembers what was tried."""

    def __init__(self, base: float, per_step: float, curvature: float = 0.0, deadly: float = float("inf")) -> None:
        self.base, self.per_step, self.curvature, self.deadly = base, per_step, curvature, deadly
        self.sizes: list[int] = []

    def need(self, size: int) -> int:
        return round(self.base + self.per_step * size + self.curvature * size * size)

    def peak_bytes(self, size: int) -> int | None:
        self.sizes.append(size)
        return None if self.need(size) > self.deadly else self.need(size)


@given(
    base=st.floats(1, 1e6),
    per_step=st.floats(0.1, 1e3),
    curvature=st.floats(0, 0.1),
    lowest=st.integers(1, 1000),
    times=st.floats(1, 1e4),
    deadly=st.floats(1, 4),
)
def test_the_largest_that_fits_is_found_to_the_resolution(base, per_step, curvature, lowest, times, deadly):
    machine = Machine(base, per_step, curvature)
    usable = machine.need(int(lowest * times))
    machine.deadly = deadly * usable
    found = largest_that_fits(machine.peak_bytes, lowest=lowest, highest=10**9, usable_bytes=usable)
    assert found is not None
    assert machine.need(found) <= usable < machine.need(int(found * (1 + RESOLUTION)) + 1)
    assert len(machine.sizes) == len(set(machine.sizes)) < 60


def test_no_try_is_more_than_twice_what_fitted_before():
    machine = Machine(base=1e6, per_step=1)
    largest_that_fits(machine.peak_bytes, lowest=100, highest=10**9, usable_bytes=9e6)
    fitted = [size for size in machine.sizes if machine.need(size) <= 9e6]
    assert all(
        size <= 2 * max(one for one in fitted if one < size or one == 100)
        for number, size in enumerate(machine.sizes)
        if number
    )


def test_where_need_is_linear_the_limit_is_hardly_passed():
    machine = Machine(base=1e6, per_step=10)
    largest_that_fits(machine.peak_bytes, lowest=100, highest=10**9, usable_bytes=9e6)
    assert max(map(machine.need, machine.sizes)) < 9e6 * (1 + 2 * RESOLUTION)


def test_nothing_is_found_where_the_lowest_does_not_fit():
    machine = Machine(base=10, per_step=1)
    assert largest_that_fits(machine.peak_bytes, lowest=100, highest=1000, usable_bytes=99) is None
    assert machine.sizes == [100]


def test_the_data_can_end_the_search():
    machine = Machine(base=10, per_step=1)
    assert largest_that_fits(machine.peak_bytes, lowest=100, highest=777, usable_bytes=1e6) == 777
    assert max(machine.sizes) == 777
