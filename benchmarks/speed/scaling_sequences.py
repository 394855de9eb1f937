"""What more sequences cost: building the cache, starting again, an epoch's plan, an optimizer step, memory.

In: how many, as a few numbers. Out: two tables, a picture, and a curve of each cost. Generated token lists, 75 steps on average.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.generated import write_token_lists
from benchmarks.measure import in_own_process, interleaved_seconds, median, print_table, spread
from benchmarks.speed.bare_loop import BareLoop
from benchmarks.speed.scaling_laws import Curve, Panel, draw_panels
from benchmarks.speed.scaling_steps import BASE, token_training
from seqvae.config.data import CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.config.model import ModelSettings
from seqvae.data.batching import Limits, choose_batches, cut_batches, plan_epoch
from seqvae.data.cache import open_cache, prepare_cache
from seqvae.data.loader import BatchLoader, resolve_loading

STEPS = 4
"""Optimizer steps that are timed together: batches of long sequences and of short ones."""


class Timings(NamedTuple):
    """Of one number of sequences: what each round took."""

    build_seconds: list[float]
    starts: list[dict[str, Any]]
    """What `benchmarks.speed.scaling_start` says."""
    step_seconds: list[float]

    def of_start(self, name: str) -> list[float]:
        """Of those starts that came so far."""
        return [start[name] for start in self.starts if name in start]

    def of_stage(self, name: str) -> float:
        return median([start["stages"][name] for start in self.starts])


def run_sequences(
    directory: Path,
    output: Path,
    numbers: Sequence[int],
    model: ModelSettings,
    words: Sequence[str] = (),
    rounds: int = 5,
) -> tuple[list[dict[str, Any]], list[Curve]]:
    """Builds and starts of all sizes take turns, then the steps of all sizes do."""
    folders = {number: directory / f"{number}" for number in numbers}
    for number, folder in folders.items():
        write_token_lists(folder / "data" / "all.parquet", number)
    builds: dict[int, list[float]] = {number: [] for number in numbers}
    starts: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    for turn in range(rounds):
        for number, folder in folders.items():
            builds[number].append(build_anew(folder))
            starts[number].append(start_again(folder, "batch" if turn else "step", words))
    steps = time_steps(folders, model, rounds)
    measured = {number: Timings(builds[number], starts[number], steps[number]) for number in numbers}
    rows = report(measured, rounds)
    seconds, megabytes = curves_of(measured)
    panels = [Panel("sequences", "seconds", seconds), Panel("sequences", "MB", megabytes)]
    draw_panels(output / "sequences.png", "Cost against the number of sequences", "75 steps on average", panels)
    return rows, [*seconds, *megabytes]


def build_anew(folder: Path) -> float:
    shutil.rmtree(folder / "cache", ignore_errors=True)
    start = time.perf_counter()
    cache_of(folder)
    return time.perf_counter() - start


def cache_of(folder: Path) -> Path:
    return prepare_cache(SourceSettings(data_dir=str(folder / "data")), CacheSettings(cache_dir=str(folder / "cache")))


def start_again(folder: Path, until: str, words: Sequence[str]) -> dict[str, Any]:
    places = ("--data_dir", folder / "data", "--cache_dir", folder / "cache", "--output_dir", folder / "runs")
    return in_own_process("benchmarks.speed.scaling_start", "--until", until, *map(str, places), *words)


def time_steps(folders: Mapping[int, Path], model: ModelSettings, rounds: int) -> dict[int, list[float]]:
    """Seconds of an optimizer step, its batch fetched from the cache; the same network sees the data of all sizes."""
    training = token_training(model)
    candidates: dict[str, Callable[[], object]] = {
        str(number): partial(train_on, training, chosen_batches(folder)) for number, folder in folders.items()
    }
    seconds = interleaved_seconds(candidates, rounds)
    return {int(number): [one / STEPS for one in values] for number, values in seconds.items()}


def chosen_batches(folder: Path) -> BatchLoader:
    """Evenly spaced from long to short, so that they cost alike however many there are to choose from."""
    train = open_cache(cache_of(folder), LengthSettings()).splits["train"]
    cut = cut_batches(train.lengths_N, Limits(None, BASE.tokens, None))
    plan = choose_batches(plan_epoch(cut, seed=0, epoch=0), STEPS, seed=0)
    return BatchLoader(train, lambda epoch: plan, plan.batches, resolve_loading(LoadingSettings()))


def train_on(training: BareLoop, batches: BatchLoader) -> None:
    for batch in batches:
        training.step([batch])


def report(measured: Mapping[int, Timings], rounds: int) -> list[dict[str, Any]]:
    costs = [
        {
            "sequences": number,
            "cache s": round(median(timings.build_seconds), 3),
            "spread": spread(timings.build_seconds),
            "epoch's plan ms": round(1e3 * median(timings.of_start("epoch_plan_seconds")), 2),
            "optimizer step ms": round(1e3 * median(timings.step_seconds), 1),
            "its spread": spread(timings.step_seconds),
        }
        for number, timings in measured.items()
    ]
    print_table(f"Cost against the number of sequences, medians of {rounds} rounds in turns", costs)
    starts = [
        {
            "sequences": number,
            "s to the first batch": round(median(timings.of_start("first_batch_seconds")), 3),
            "spread": spread(timings.of_start("first_batch_seconds")),
            **{f"{stage} ms": round(1e3 * timings.of_stage(stage), 1) for stage in timings.starts[0]["stages"]},
            "MB imported": round(median(timings.of_start("imported_mb"))),
            "at the first batch": round(median(timings.of_start("first_batch_mb"))),
            "at the first step, once": round(median(timings.of_start("first_step_mb"))),
        }
        for number, timings in measured.items()
    ]
    print_table(
        "A second start of train_optimized.py, from the end of its imports; memory of the process at most", starts
    )
    return [cost | {"start": start} for cost, start in zip(costs, starts, strict=True)]


def curves_of(measured: Mapping[int, Timings]) -> tuple[list[Curve], list[Curve]]:
    """Seconds, and megabytes."""
    sizes, all_timings = list(measured), list(measured.values())
    seconds = [
        Curve("cache", sizes, [timings.build_seconds for timings in all_timings]),
        Curve("second start to the first batch", sizes, [one.of_start("first_batch_seconds") for one in all_timings]),
        Curve("an epoch's plan", sizes, [one.of_start("epoch_plan_seconds") for one in all_timings]),
        Curve("an optimizer step", sizes, [timings.step_seconds for timings in all_timings]),
    ]
    megabytes = [
        Curve("second start, at the first batch", sizes, [one.of_start("first_batch_mb") for one in all_timings]),
        Curve("of it not there after the imports", sizes, [added_mb(one) for one in all_timings]),
    ]
    return seconds, megabytes


def added_mb(timings: Timings) -> list[float]:
    pairs = zip(timings.of_start("first_batch_mb"), timings.of_start("imported_mb"), strict=True)
    return [first_batch - imported for first_batch, imported in pairs]
