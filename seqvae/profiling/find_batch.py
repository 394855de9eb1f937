"""The largest --tokens_per_batch that fits: a run's settings in, the size, what it was found on and what it needs out.

    found = find_batch(settings, memory_limit_bytes=parse_size("6GB"), say=print)
    print("\\n".join(describe(found, ink)))

A size fits if the worst batch of every range of lengths can be trained under it, one after another: forward, backward, optimizer
step, in a run of its own that may die of it. What a batch of as many steps needs depends on their lengths: attention grows with
the square of a length, an end mark or a latent costs more where sequences are short, and kernels change at some length.

Shapes: N sequences, K batches, B sequences of one batch, E events of the whole batch.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import psutil
from lightning import Callback

from seqvae.config.run import ValidationSettings
from seqvae.config.training import TrainingSettings
from seqvae.data.batch import Batch, EventBatch
from seqvae.data.batching import Cut
from seqvae.errors import UsageError
from seqvae.profiling.measured_run import MeasuredRun, MemoryNeed, Recipe, with_budget
from seqvae.reports.terminal import Ink, heading, note, table
from seqvae.text import counted, size
from seqvae.training.distributed import Devices, resolve_devices
from seqvae.training.fit import make_data

RANGES = 8
"""Ranges of lengths in which the worst batch is looked for at each size."""
FINER = 4
"""Parts of each range that are compared once, at a small size: attention changes its way at some length."""
SMALL = 16
"""The part of the first size found at which they are compared: large enough to distinguish them, and quick."""
BEGINNING = 8
"""The part of the first size found at which the search with all ranges in turn begins."""
MARGIN = 0.1
"""Share of the limit that is kept free."""
RESOLUTION = 0.05
"""Share by which the size found may be below the largest that fits."""
FASTEST_GROWTH = 2
"""Largest factor from one size to the next, so that no try needs much more than what is known to be there."""
NEARLY_FULL = 0.95
"""A batch with this share of the most steps counts as full, and of those the one with the longest sequences is worst."""
CHOICE = 4
"""The batch with the most events is chosen from this many times as many sequences."""


class Limit(NamedTuple):
    """Memory for training."""

    bytes: int
    source: str
    """The origin of the number, in words that go on after it."""


class Tried(NamedTuple):
    """The worst batch of a range of lengths."""

    length: int
    """Steps that its sequences are padded to."""
    sequences: int
    steps: int
    """Steps of the batch, padding included."""
    peak: int
    """Peak of memory in bytes."""


class FoundBatch(NamedTuple):
    """The result of a search."""

    tokens_per_batch: int
    tried: list[Tried]
    """The worst batches at this size."""
    peak_bytes: int
    limit: Limit
    margin: float
    ended_by: Literal["memory", "data"]
    """data: a larger size would cut the same batches."""
    seconds: float
    unit: str
    """What a step of a sequence is called: token or time step."""


def find_batch(
    settings: TrainingSettings, *, memory_limit_bytes: int | None = None, say: Callable[[str], None]
) -> FoundBatch:
    """Return the largest size that fits; raise a `UsageError` if there is none. `say` gets a line for every try."""
    begun = time.perf_counter()
    devices = resolve_devices(settings.compute)
    if devices.accelerator == "mps" or sys.platform == "win32":
        name = "an Apple GPU does" if devices.accelerator == "mps" else "Windows does"
        raise UsageError(f"--find_batch needs to know what a batch needed at most, which {name} not tell")
    data = make_data(settings)
    train = data.split("train")
    worst = WorstBatches(
        train.lengths_N,
        lambda tokens: with_budget(data, settings, tokens).cut,
        train.gather,
        pad_to=None if settings.batches.use_dynamic_padding else settings.lengths.max_sequence_length,
        batch_size=settings.batches.batch_size,
    )
    available = available_memory()
    # A run by one process that needs as much memory as each of the processes would. Gradients that wait for more micro-batches, or
    # stand in the buckets of a parallel run, are there while the next micro-batch is computed. Two micro-batches need what any
    # number of them does. A run that compiles may go on uncompiled, which needs more.
    waits = devices.world > 1 or settings.optimizer.gradient_accumulation_steps > 1
    alone = replace(
        settings,
        batches=replace(settings.batches, tokens_per_batch=worst.highest, drop_last=False),
        optimizer=replace(settings.optimizer, gradient_accumulation_steps=2 if waits else 1),
        compute=replace(settings.compute, devices=1, num_nodes=1, strategy="auto", compile_model=False),
        validation=ValidationSettings(limit_val_batches=0),
    )
    recipe = Recipe("the run that tries batches", alone, _no_callbacks, trains_requested_batches=True)
    trials = Trials(lambda: MeasuredRun(recipe))
    try:
        shortest = np.argsort(train.lengths_N, kind="stable")[:2]
        first = trials.need(shortest, worst.highest)
        if first is None:
            raise UsageError(
                f"there is no memory for the network alone: {size(available.bytes)} are {available.source}"
            )
        limit = limit_of(memory_limit_bytes, available, first.device_bytes, devices)
        say(f"memory: {size(limit.bytes)} ({limit.source}), of which {MARGIN:.0%} are kept free")
        lowest = worst.longest * first.least_sequences
        result = search(
            worst, trials, lowest=lowest, usable_bytes=(1 - MARGIN) * limit.bytes, unit=data.description.unit, say=say
        )
    finally:
        trials.close()
    if result is None:
        raise UsageError(what_helps(settings, counted(lowest, data.description.unit), limit))
    tokens, tried = result
    return FoundBatch(
        tokens_per_batch=tokens,
        tried=tried,
        peak_bytes=max(one.peak for one in tried),
        limit=limit,
        margin=MARGIN,
        ended_by="data" if tokens >= worst.highest else "memory",
        seconds=time.perf_counter() - begun,
        unit=data.description.unit,
    )


def _no_callbacks(settings: TrainingSettings) -> list[Callback]:
    return []


def describe(found: FoundBatch, ink: Ink) -> list[str]:
    """Return the result as lines for people."""
    limit = f"{size(found.limit.bytes)}, {found.limit.source}, {found.margin:.0%} kept free"
    lines = [
        *heading("Worst batches at the largest size that fits: forward, backward, optimizer step", ink),
        *note(f"length, steps: {found.unit}s of each sequence and of the batch, padding included", ink, mark=""),
        *table(found.tried, ink, {"peak": size}),
        "",
        ink.bold(f"largest that fits: --tokens_per_batch {found.tokens_per_batch}"),
        f"  peak {size(found.peak_bytes)} (limit: {limit}), found in {found.seconds:.0f} s",
    ]
    if found.ended_by == "data":
        lines += note("The data end the search, not memory: a larger budget would cut the same batches.", ink)
    return lines + note("The fastest batch may be smaller: --advise measures that.", ink)


def what_helps(settings: TrainingSettings, lowest: str, limit: Limit) -> str:
    """Return the message for settings of which not even one sequence fits; `lowest`: what it takes, with its unit."""
    advice = [f"lower --max_sequence_length (now {settings.lengths.max_sequence_length})"]
    if not settings.compute.gradient_checkpointing:
        advice.append("give --gradient_checkpointing")
    if settings.compute.precision in ("32", "32-true"):
        advice.append("give --precision 16-mixed")
    return (
        f"not even a batch of {lowest} fits, which the longest sequence needs, into {size(limit.bytes)} ({limit.source}), "
        f"of which {MARGIN:.0%} are kept free: {', '.join(advice)}, or lower --width or --depth"
    )


class Trials:
    """Batches that are tried in a run, which is started when it is first needed, and again after one died for lack of memory."""

    def __init__(self, start: Callable[[], MeasuredRun]) -> None:
        self._start = start
        self._run: MeasuredRun | None = None

    def need(self, sequences_B: np.ndarray, tokens_per_batch: int, *, trims: bool = True) -> MemoryNeed | None:
        """Return what a batch of these sequences needed; None: memory ran out."""
        self._run = self._run or self._start()
        try:
            need = self._run.peak_memory(sequences_B.tolist(), tokens_per_batch, trims=trims)
        except MemoryError:
            need = None
        if need is None or not need.can_repeat:
            self.close()
        return need

    def close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None


# --- Memory ------------------------------------------------------------------------------------------------------------


def available_memory(root: Path = Path("/")) -> Limit:
    """Return what is left of this machine or, if that is less, of a control group (a container) around this process."""
    found = [Limit(psutil.virtual_memory().available, "available now")]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = mount / name.lstrip("/")
        for group in (inner, *inner.parents):
            files = [group / file for file in (*names[:2], "memory.stat")]
            if not group.is_relative_to(mount) or not all(file.exists() for file in files):
                continue
            limit, used, statistics = (file.read_text(encoding="utf-8").strip() for file in files)
            if limit != "max":
                # Files in the page cache can be dropped: they are no need of memory.
                droppable = int(dict(line.split() for line in statistics.splitlines()).get(names[2], 0))
                left = max(0, int(limit) - int(used) + droppable)
                found.append(Limit(left, "left of the limit of its control group"))
    return min(found, key=lambda one: one.bytes)


def limit_of(requested: int | None, available: Limit, device_bytes: int | None, devices: Devices) -> Limit:
    """Return the limit for one process: what the user requested or, if that is less, what there is."""
    there = available if device_bytes is None else Limit(device_bytes, "free on the GPU")
    sharing = devices.per_node if device_bytes is None else 1
    shared = f", shared by {sharing} processes" if sharing > 1 else ""
    if requested is not None and requested <= there.bytes:
        return Limit(requested // sharing, f"--memory_limit{shared}")
    more = "" if requested is None else f"; --memory_limit {size(requested)} is more than that"
    return Limit(there.bytes // sharing, f"{there.source}{shared}{more}")


# --- Worst batches -----------------------------------------------------------------------------------------------------


class LengthRange(NamedTuple):
    """Lengths of sequences in steps."""

    above: int
    up_to: int


class WorstBatch(NamedTuple):
    """The batch of a range of lengths that needs the most at one size."""

    length: int
    """Steps that its sequences are padded to."""
    sequences_B: np.ndarray
    """int64; numbers of these sequences in the split."""


class WorstBatches:
    """The batches of each length that need the most memory under any budget, in the cut that training would have."""

    def __init__(
        self,
        lengths_N: np.ndarray,
        cut_at: Callable[[int], Cut],
        gather: Callable[[np.ndarray], Batch],
        *,
        pad_to: int | None,
        batch_size: int | None,
    ) -> None:
        """`cut_at` takes the steps of a batch, `gather` makes one of sequences; the rest is as in `Limits`."""
        self._longest_first_N = np.argsort(-lengths_N, kind="stable")
        self._sorted_lengths_N = lengths_N[self._longest_first_N]
        self._cut_at, self._gather, self._pad_to, self._batch_size = cut_at, gather, pad_to, batch_size
        self._last_cut: tuple[int, Cut] | None = None

    @property
    def longest(self) -> int:
        """Steps that the longest sequence is padded to."""
        return self._pad_to or int(self._sorted_lengths_N[0])

    @property
    def highest(self) -> int:
        """The budget beyond which nothing changes: all sequences in one batch, or as many as --batch_size lets in."""
        number = len(self._sorted_lengths_N)
        return self.longest * min(number, self._batch_size or number)

    def ranges(self, number: int) -> list[LengthRange]:
        """Return at most that many ranges, each a constant factor below the one before; all hold sequences."""
        longest, shortest = int(self._sorted_lengths_N[0]), int(self._sorted_lengths_N[-1])
        edges = np.unique(np.geomspace(longest, max(1, shortest), number + 1).round().astype(np.int64))[::-1].tolist()
        tops = edges[: max(1, len(edges) - 1)]
        found = [LengthRange(above, up_to) for up_to, above in zip(tops, [*tops[1:], shortest - 1], strict=True)]
        present_L = np.bincount(self._sorted_lengths_N) > 0
        return [one for one in found if present_L[one.above + 1 : one.up_to + 1].any()]

    def at(self, tokens_per_batch: int, lengths: LengthRange) -> WorstBatch:
        """Return, of the batches that this budget cuts for sequences of these lengths, the one that needs the most."""
        if self._last_cut is None or self._last_cut[0] != tokens_per_batch:
            self._last_cut = tokens_per_batch, self._cut_at(tokens_per_batch)
        cut = self._last_cut[1]
        starts_K, sizes_K = cut.starts_K1[:-1], np.diff(cut.starts_K1)
        tops_K = cut.tokens_K // sizes_K
        shortest_K = self._sorted_lengths_N[cut.starts_K1[1:] - 1] if self._pad_to is None else np.zeros_like(tops_K)
        concerned = np.flatnonzero((tops_K > lengths.above) & (shortest_K <= lengths.up_to))
        tokens = cut.tokens_K[concerned]
        batch = concerned[np.flatnonzero(tokens >= NEARLY_FULL * tokens.max())[0]]  # they come from long to short
        # Which sequences of its bucket make up a batch differs from epoch to epoch: the longest can come together.
        bucket = np.searchsorted(cut.bucket_starts, starts_K[batch], side="right") - 1
        begin, end = cut.bucket_starts[bucket], cut.bucket_starts[bucket + 1]
        number = int(sizes_K[batch])
        candidates = self._longest_first_N[begin : max(begin + number, min(end, begin + CHOICE * number))]
        return WorstBatch(self._pad_to or int(tops_K[batch]), most_events(candidates, number, self._gather))


def most_events(candidates: np.ndarray, number: int, gather: Callable[[np.ndarray], Batch]) -> np.ndarray:
    """Return the first, which is the longest, and of the others those with the most events; without events, the first ones."""
    batch = gather(candidates[:1])
    if not isinstance(batch, EventBatch) or number == len(candidates):
        return candidates[:number]
    batch = gather(candidates)
    assert isinstance(batch, EventBatch)
    rows_E = batch.steps_E.numpy() // batch.gaps_BT.shape[1]
    events_B = np.bincount(rows_E, minlength=len(candidates))
    events_B[0] = events_B.max() + 1
    return candidates[np.argsort(-events_B, kind="stable")[:number]]


# --- The search --------------------------------------------------------------------------------------------------------


def search(
    worst: WorstBatches, trials: Trials, *, lowest: int, usable_bytes: float, unit: str, say: Callable[[str], None]
) -> tuple[int, list[Tried]] | None:
    """Return the largest size under which the worst batches of all ranges fit, and these; None: there is none."""
    tried_at: dict[int, list[Tried]] = {}

    def peak_bytes(ranges: Sequence[LengthRange], tokens: int, *, aloud: bool = True) -> int | None:
        """Return the peak of the worst batches at this size, up to the first that does not fit; None: memory ran out.

        They are trained one after another as in a run, where the heap keeps the holes that batches of other shapes left: only
        before the first are they given back.
        """
        if aloud and len(ranges) > 1:
            say(f"all lengths in turn, at {tokens:,} {unit}s per batch")
        tried: dict[tuple[int, int, int], Tried] = {}
        for lengths in ranges:
            batch = worst.at(tokens, lengths)
            number, first = len(batch.sequences_B), int(batch.sequences_B[0])
            if (batch.length, number, first) in tried:  # the same batch
                continue
            need = trials.need(batch.sequences_B, tokens, trims=not tried)
            is_too_much = need is not None and need.peak_bytes > usable_bytes
            if aloud:
                outcome = "memory ran out" if need is None else f"peak {size(need.peak_bytes)}"
                say(f"  {number:,} x {batch.length:,} {unit}s: {outcome}{', too much' if is_too_much else ''}")
            if need is None:
                return None
            tried[batch.length, number, first] = Tried(batch.length, number, batch.length * number, need.peak_bytes)
            if is_too_much:
                break
        tried_at[tokens] = sorted(tried.values(), reverse=True)
        return max(one.peak for one in tried.values())

    def largest(ranges: Sequence[LengthRange], lowest: int, highest: int) -> int | None:
        peak_bytes_at = partial(peak_bytes, ranges)
        return largest_that_fits(peak_bytes_at, lowest=lowest, highest=highest, usable_bytes=usable_bytes)

    parts = worst.ranges(RANGES * FINER)
    # All lengths come first: a CPU keeps kernels for each shape (10 MB and more of them in bf16), which are needed before any size
    # matters.
    say(f"batches of {lowest:,} {unit}s, all lengths")
    peak = peak_bytes(parts, lowest, aloud=False)
    if peak is None or peak > usable_bytes:
        return None
    found = largest(parts[:1], lowest, worst.highest)
    if found is None:
        return None
    small = max(lowest, found // SMALL)
    say(f"which lengths need the most, at {small:,} {unit}s per batch")
    peaks = {part: peak_bytes([part], small, aloud=False) or sys.maxsize for part in parts}
    number = -(-len(parts) // RANGES)
    ranges = [max(parts[begin : begin + number], key=peaks.__getitem__) for begin in range(0, len(parts), number)]
    ranges.sort(key=peaks.__getitem__, reverse=True)
    # What the longest sequences allow is likely to fit, but other lengths may need many times as much.
    begin, highest = max(lowest, found // BEGINNING), found
    found = largest(ranges, begin, highest)
    if found is None and begin > lowest:
        found = largest(ranges, lowest, begin)
    return None if found is None else (found, tried_at[found])


def largest_that_fits(
    peak_bytes: Callable[[int], int | None], *, lowest: int, highest: int, usable_bytes: float
) -> int | None:
    """Return the largest size up to `highest` whose need is usable, to `RESOLUTION`; None: not even `lowest`.

    `peak_bytes` returns None where memory ran out. What a size needs grows with it, nearly along a line: the next try is where the
    line through the last two meets what is usable, within the bounds that keep the search safe (at most twice the last that
    fitted) and going on.
    """
    fitting: list[tuple[int, int]] = []  # sizes and their needs
    too_large: tuple[int, int | None] | None = None
    tokens = lowest
    while True:
        need = peak_bytes(tokens)
        if need is not None and need <= usable_bytes:
            fitting.append((tokens, need))
        elif not fitting:
            return None
        else:
            too_large = (tokens, need)
        last, last_need = fitting[-1]
        a_little_more = int(last * (1 + RESOLUTION))
        if last >= highest or (too_large is not None and too_large[0] <= a_little_more + 1):
            return last
        if too_large is not None and too_large[1] is None:
            likely = math.sqrt(last * too_large[0])
        elif too_large is None and len(fitting) == 1:  # nothing needs more than its share and what is always needed
            likely = last * usable_bytes / last_need
        else:
            (one, one_need), (other, other_need) = fitting[-2:] if too_large is None else (fitting[-1], too_large)
            assert other_need is not None
            slope = (other_need - one_need) / (other - one)
            likely = other + (usable_bytes - other_need) / slope if slope > 0 else math.inf
        most = FASTEST_GROWTH * last if too_large is None else too_large[0] / (1 + RESOLUTION)
        tokens = min(highest, max(last + 1, a_little_more, int(min(likely, most))))
