"""The largest --tokens_per_batch that fits: a run's settings in, the size, what it was found on and what it needs out.

    found = find_batch(settings, memory_limit_bytes=parse_size("6GB"), say=print)
    print("\\n".join(describe(found, ink)))

A size fits where the worst batch of every range of lengths can be trained under it: the search runs on the range that needs
the most, and what it finds has to hold for all of them, one after another.
"""

import sys
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from seqvae.config.training import TrainingSettings
from seqvae.errors import UsageError
from seqvae.profiling.memory import Available, available_memory
from seqvae.profiling.size_search import largest_that_fits
from seqvae.profiling.trial_run import settings_of_trials, train_what_is_asked, with_budget
from seqvae.profiling.trials import Ready, Trials, Try
from seqvae.profiling.worst_batches import LengthRange, WorstBatch, WorstBatches
from seqvae.text import Ink, heading, note, size, table
from seqvae.training.distributed import Devices, resolve_devices
from seqvae.training.fit import make_data

RANGES = 8
"""Of lengths, in which the worst batch is looked for under each budget."""

FINER = 4
"""Of each range, so many parts are compared at a small budget: attention changes its way at some length."""

SMALL_BUDGET = 16
"""One part in so many of the first size found: large enough to tell the parts apart, and soon done."""

BEGINNING = 8
"""With all lengths in turn, the search begins at one part in so many of it, and doubles from there."""


class Limit(NamedTuple):
    """Memory for training."""

    bytes: int
    source: str


class Tried(NamedTuple):
    """The worst batch of a range of lengths."""

    length: int
    """Steps that its sequences are padded to."""
    sequences: int
    steps: int
    """Padding included."""
    peak: int
    """Bytes."""


class FoundBatch(NamedTuple):
    """What a search came to."""

    tokens_per_batch: int
    tried: list[Tried]
    """At the size found."""
    peak_bytes: int
    limit: Limit
    margin: float
    """Share of the limit that is kept free."""
    ended_by: Literal["memory", "data"]
    """data: a larger size would cut the same batches."""
    seconds: float

    @property
    def flag(self) -> str:
        return f"--tokens_per_batch {self.tokens_per_batch}"


def find_batch(
    settings: TrainingSettings,
    *,
    memory_limit_bytes: int | None = None,
    margin: float = 0.1,
    say: Callable[[str], None],
) -> FoundBatch:
    """`say` hears of every try. Raises a `UsageError` where not even the longest sequence fits."""
    begun = time.perf_counter()
    devices = resolve_devices(settings.compute)
    refuse_what_cannot_be_measured(devices)
    data = make_data(settings)
    worst = WorstBatches(
        data.split("train").lengths_N,
        lambda tokens: with_budget(data, settings, tokens).cut,
        data.split("train").gather,
        pad_to=None if settings.batches.use_dynamic_padding else settings.lengths.max_sequence_length,
        batch_size=settings.batches.batch_size,
    )
    for_trials = settings_of_trials(settings, worst.highest, devices.world)
    left = available_memory()
    with Trials(train_what_is_asked, for_trials) as trials:
        ready = trials.ready()
        if ready is None:
            raise UsageError(f"there is no memory for the network alone: {size(left.bytes)} are {left.source}")
        limit = limit_of(memory_limit_bytes, left, ready, devices)
        say(f"memory: {size(limit.bytes)} ({limit.source}), of which {margin:.0%} are kept free")
        search = Search(worst, trials, (1 - margin) * limit.bytes, say)
        lowest = worst.longest * ready.least_sequences
        result = search.run(lowest)
    if result is None:
        raise UsageError(what_helps(settings, lowest, limit, margin))
    tokens, tried = result
    return FoundBatch(
        tokens_per_batch=tokens,
        tried=tried,
        peak_bytes=max(one.peak for one in tried),
        limit=limit,
        margin=margin,
        ended_by="data" if tokens >= worst.highest else "memory",
        seconds=time.perf_counter() - begun,
    )


def describe(found: FoundBatch, ink: Ink) -> list[str]:
    """For people."""
    limit = f"{size(found.limit.bytes)}, {found.limit.source}, {found.margin:.0%} kept free"
    lines = [
        *heading("Worst batches at the largest size that fits: forward, backward, optimizer step", ink),
        *table(found.tried, ink, {"peak": size}),
        "",
        ink.bold(f"largest that fits: {found.flag}"),
        f"  peak {size(found.peak_bytes)} (limit: {limit}), found in {found.seconds:.0f} s",
    ]
    if found.ended_by == "data":
        lines += note("The data end the search, not memory: a larger budget would cut the same batches.", ink)
    return lines + note("The fastest batch may be smaller: --advise measures that.", ink)


def refuse_what_cannot_be_measured(devices: Devices) -> None:
    if devices.accelerator == "mps" or sys.platform == "win32":
        name = "an Apple GPU does" if devices.accelerator == "mps" else "Windows does"
        raise UsageError(f"--find_batch needs to know what a batch needed at most, which {name} not tell")


def limit_of(asked_bytes: int | None, left: Available, ready: Ready, devices: Devices) -> Limit:
    """For one process: what the user says or, where that is less, what there is."""
    there = left if ready.device_bytes is None else Available(ready.device_bytes, "free on the GPU")
    sharing = devices.per_node if ready.device_bytes is None else 1
    shared = f", shared by {sharing} processes" if sharing > 1 else ""
    if asked_bytes is None:
        return Limit(there.bytes // sharing, there.source + shared)
    if asked_bytes <= there.bytes:
        return Limit(asked_bytes // sharing, f"--memory_limit{shared}")
    return Limit(
        there.bytes // sharing, f"{there.source}{shared}; --memory_limit {size(asked_bytes)} is more than that"
    )


def what_helps(settings: TrainingSettings, lowest: int, limit: Limit, margin: float) -> str:
    advice = [f"lower --max_sequence_length (now {settings.lengths.max_sequence_length})"]
    if not settings.compute.gradient_checkpointing:
        advice.append("give --gradient_checkpointing")
    if settings.compute.precision in ("32", "32-true"):
        advice.append("give --precision 16-mixed")
    return (
        f"not even a batch of {lowest} steps fits, which the longest sequence needs, into {size(limit.bytes)} ({limit.source}), "
        f"of which {margin:.0%} are kept free: {', '.join(advice)}, or lower --width or --depth"
    )


class Search:
    """Over sizes and ranges of lengths."""

    def __init__(self, worst: WorstBatches, trials: Trials, usable_bytes: float, say: Callable[[str], None]) -> None:
        self._worst, self._trials, self._usable_bytes, self._say = worst, trials, usable_bytes, say
        self._peaks: dict[tuple[int, int, int], int | None] = {}
        """What is known of single batches."""
        self._in_turn: dict[int, list[Tried]] = {}
        """The last tries of all ranges, by size."""

    def run(self, lowest: int) -> tuple[int, list[Tried]] | None:
        """The largest size, and the worst batches under it; None: there is none.

        All lengths come first, at a small budget: a CPU keeps kernels for each shape (10 MB and more of them in bf16), which
        belong to what is needed before any size matters.
        """
        parts = self._worst.ranges(RANGES * FINER)
        self._say(f"batches of {lowest:,} steps, all lengths")
        if not self._fits(self._peak_of_all(parts, lowest)):
            return None
        found = self._largest(parts[0], lowest, self._worst.highest)
        if found is None:
            return None
        ranges = self._dearest_first(parts, max(lowest, found // SMALL_BUDGET))
        found = self._largest_in_turn(ranges, lowest, found)
        return None if found is None else (found, self._in_turn[found])

    def _largest(self, lengths: LengthRange, lowest: int, highest: int) -> int | None:
        """For one range."""

        def peak_bytes(tokens: int) -> int | None:
            return self._peak(tokens, lengths)

        return largest_that_fits(peak_bytes, lowest=lowest, highest=highest, usable_bytes=self._usable_bytes)

    def _largest_in_turn(self, ranges: list[LengthRange], lowest: int, highest: int) -> int | None:
        """For all ranges, where `highest` is likely to fit; other lengths may need many times as much."""

        def peak_bytes(tokens: int) -> int | None:
            self._say(f"all lengths in turn, at {tokens:,} steps a batch")
            return self._peak_of_all(ranges, tokens)

        begin = max(lowest, highest // BEGINNING)
        found = largest_that_fits(peak_bytes, lowest=begin, highest=highest, usable_bytes=self._usable_bytes)
        if found is None and begin > lowest:
            return largest_that_fits(peak_bytes, lowest=lowest, highest=begin, usable_bytes=self._usable_bytes)
        return found

    def _dearest_first(self, parts: list[LengthRange], tokens: int) -> list[LengthRange]:
        """The dearest part of each range."""
        self._say(f"which lengths need the most, at {tokens:,} steps a batch")
        peaks = {part: self._peak(tokens, part, aloud=False) or sys.maxsize for part in parts}
        number = -(-len(parts) // RANGES)
        kept = [max(parts[begin : begin + number], key=peaks.__getitem__) for begin in range(0, len(parts), number)]
        return sorted(kept, key=peaks.__getitem__, reverse=True)

    def _peak_of_all(self, ranges: list[LengthRange], tokens: int) -> int | None:
        """Of the worst batches at this size, up to the first that does not fit.

        They are trained one after another as in a run, where the heap keeps the holes that batches of other shapes left.
        """
        tried: dict[tuple[int, int, int], Tried] = {}
        peak_bytes: int | None = 0
        for lengths in ranges:
            batch = self._worst.at(tokens, lengths)
            if batch.name in tried:
                continue
            peak_bytes = self._measure(batch, tokens, trims=not tried, aloud=len(ranges) <= RANGES)
            if peak_bytes is None:
                break
            tried[batch.name] = Tried(batch.length, len(batch.sequences_B), batch.steps, peak_bytes)
            if peak_bytes > self._usable_bytes:
                break
        self._in_turn[tokens] = sorted(tried.values(), reverse=True)
        return None if peak_bytes is None else max(one.peak for one in tried.values())

    def _peak(self, tokens: int, lengths: LengthRange, aloud: bool = True) -> int | None:
        """What was tried alone is not tried again."""
        batch = self._worst.at(tokens, lengths)
        if batch.name not in self._peaks:
            self._peaks[batch.name] = self._measure(batch, tokens, trims=True, aloud=aloud)
        return self._peaks[batch.name]

    def _measure(self, batch: WorstBatch, tokens: int, trims: bool, aloud: bool) -> int | None:
        peak_bytes = self._trials.peak_bytes(Try(batch.sequences_B, tokens, trims))
        if aloud:
            outcome = "memory ran out" if peak_bytes is None else f"peak {size(peak_bytes)}"
            too_much = "" if peak_bytes is None or self._fits(peak_bytes) else ", too much"
            self._say(f"  {len(batch.sequences_B):,} x {batch.length:,} steps: {outcome}{too_much}")
        return peak_bytes

    def _fits(self, peak_bytes: int | None) -> bool:
        return peak_bytes is not None and peak_bytes <= self._usable_bytes
