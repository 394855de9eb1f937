"""What training costs against the size of things, with the exponent of each: sequences, their length, width, tokens of a batch.

    python -m benchmarks.speed.scaling [--short] [--output runs/scaling] [--sequences 10000 100000 ...] [--width 256 ...]

Takes the flags of train_optimized.py for the model, too. Against the number of sequences (generated, up to ten million, 75 steps on
average): seconds for the cache, for a second start until the first batch, for an epoch's plan and for an optimizer step, and the
memory of that start. Ten million take 8 GB of disk where temporary files lie (TMPDIR). Against the others: an optimizer step
(forward, backward, clipping, fused AdamW) without a Trainer, on token batches without padding; where one number grows, the others
stay as `BASE` says. Pictures go to --output; the last line is JSON.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import (
    interleaved_seconds,
    machine,
    make_parser,
    median,
    print_table,
    restart_as_commands_run,
    run_in_own_process,
    spread,
    write_token_lists,
)
from benchmarks.speed.bare_loop import BareLoop
from benchmarks.speed.scaling_laws import Curve, Panel, draw_panels
from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.config.model import ModelSettings
from seqvae.config.training import OptimizedSettings
from seqvae.data.batch import TokenBatch
from seqvae.data.batching import Limits, cut_batches, plan_epoch, some_batches
from seqvae.data.cache import open_cache, prepare_cache
from seqvae.data.description import DataDescription
from seqvae.data.loader import BatchLoader, resolve_loading
from seqvae.errors import run_command

PROG = "benchmarks.speed.scaling"
SEQUENCES = (10_000, 100_000, 1_000_000, 10_000_000)
SHORT_SEQUENCES = SEQUENCES[:3]
LENGTHS, SHORT_LENGTHS = (16, 32, 64, 128, 256, 512, 1024), (16, 64, 256, 1024)
WIDTHS, SHORT_WIDTHS = (32, 64, 128, 256, 512), (32, 64, 128, 256)
TOKENS, SHORT_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384), (256, 1024, 4096)
VOCABULARY = 5000
ROUNDS = 5
STEPS = 4
"""Number of optimizer steps that are timed together: batches of long sequences and of short ones."""


class Shape(NamedTuple):
    """The shape of a training step."""

    length: int
    """Steps of each sequence."""
    width: int
    tokens: int
    """Tokens of the batch."""


BASE = Shape(length=64, width=128, tokens=4096)


class Sweep(NamedTuple):
    """One number that grows."""

    name: str
    label: str
    """Label of its axis."""
    fixed: str
    """The numbers that stay."""
    shapes: Sequence[Shape]
    sizes: Sequence[int]
    """The number that grows, in each of the shapes."""


def main() -> None:
    restart_as_commands_run()
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--short", action="store_true", help="up to a million sequences, and fewer points")
    parser.add_argument("--sequences", type=int, nargs="+", help="two numbers or more, ascending")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling"), help="directory for the pictures")
    options, words = parser.parse_known_args()
    model = parse_command_line(OptimizedSettings, words, prog=PROG, description=__doc__ or "").model
    numbers = options.sequences or (SHORT_SEQUENCES if options.short else SEQUENCES)
    print(json.dumps(run(options.output, numbers, sweeps(short=options.short), model, words)))


def run(
    output: Path,
    numbers: Sequence[int],
    steps: Sequence[Sweep],
    model: ModelSettings,
    words: Sequence[str] = (),
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Measure and draw everything; `words` are the flags of train_optimized.py for `model`."""
    with tempfile.TemporaryDirectory(prefix="seqvae-bench-") as folder:
        rows, curves = run_sequences(Path(folder), output, numbers, model, words, rounds)
    by_size: dict[str, Any] = {"sequences": rows}
    for sweep in steps:
        by_size[sweep.name], per_step, per_token = run_sweep(sweep, rounds, model)
        title = f"An optimizer step against the {sweep.label} ({sweep.fixed})"
        panels = [Panel(sweep.label, "milliseconds", [per_step]), Panel(sweep.label, "microseconds", [per_token])]
        draw_panels(output / f"{sweep.name}.png", title, panels)
        curves += [curve._replace(name=f"{sweep.name}: {curve.name}") for curve in (per_step, per_token)]
    exponents = [
        {"cost": curve.name, "exponent": round(curve.law.exponent, 2), "at the end": round(curve.end, 2)}
        for curve in curves
    ]
    print_table("Exponents, through all sizes and between the last two", exponents)
    print(f"\npictures: {output}")
    return {
        "benchmark": "scaling",
        "machine": machine(),
        **by_size,
        "exponents": exponents,
    }


# --- Against the number of sequences ----------------------------------------------------------------------------------


class Timings(NamedTuple):
    """The times of each round with one number of sequences."""

    build_seconds: list[float]
    starts: list[dict[str, Any]]
    """Reports of `benchmarks.speed.scaling_start`."""
    step_seconds: list[float]

    def of_start(self, name: str) -> list[float]:
        """Return a number of those starts that came so far."""
        return [start[name] for start in self.starts if name in start]


def run_sequences(
    directory: Path,
    output: Path,
    numbers: Sequence[int],
    model: ModelSettings,
    words: Sequence[str],
    rounds: int,
) -> tuple[list[dict[str, Any]], list[Curve]]:
    """Let builds and starts of all sizes take turns, then the steps of all sizes."""
    folders = {number: directory / f"{number}" for number in numbers}
    for number, folder in folders.items():
        write_token_lists(folder / "data" / "all.parquet", number)
    builds: dict[int, list[float]] = {number: [] for number in numbers}
    starts: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    for turn in range(rounds):
        for number, folder in folders.items():
            shutil.rmtree(folder / "cache", ignore_errors=True)
            begun = time.perf_counter()
            prepare_folder(folder)
            builds[number].append(time.perf_counter() - begun)
            starts[number].append(start_again(folder, "batch" if turn else "step", words))
    training = token_training(model)
    candidates: dict[str, Callable[[], object]] = {
        str(number): partial(train_on, training, chosen_batches(folder)) for number, folder in folders.items()
    }
    seconds = interleaved_seconds(candidates, rounds)
    steps = {number: [one / STEPS for one in seconds[str(number)]] for number in numbers}
    measured = {number: Timings(builds[number], starts[number], steps[number]) for number in numbers}
    by_seconds, by_megabytes = curves_of(measured)
    panels = [Panel("sequences", "seconds", by_seconds), Panel("sequences", "MB", by_megabytes)]
    draw_panels(output / "sequences.png", "Cost against the number of sequences (75 steps on average)", panels)
    return report_sequences(measured, rounds), [*by_seconds, *by_megabytes]


def prepare_folder(folder: Path) -> Path:
    """Build the cache of the data in a folder, unless it is there, and return its path."""
    return prepare_cache(SourceSettings(data_dir=str(folder / "data")), CacheSettings(cache_dir=str(folder / "cache")))


def start_again(folder: Path, until: str, words: Sequence[str]) -> dict[str, Any]:
    places = ("--data_dir", folder / "data", "--cache_dir", folder / "cache", "--output_dir", folder / "runs")
    return run_in_own_process("benchmarks.speed.scaling_start", "--until", until, *map(str, places), *words)


def chosen_batches(folder: Path) -> BatchLoader:
    """Return batches evenly spaced from long to short, so that they cost the same out of however many."""
    train = open_cache(prepare_folder(folder), LengthSettings()).splits["train"]
    limits = Limits(None, BASE.tokens, None)
    cut = cut_batches(train.lengths_N, limits)
    plan = some_batches(plan_epoch(cut, seed=0, epoch=0), STEPS)
    return BatchLoader(train, limits, lambda epoch: plan, plan.batches, resolve_loading(LoadingSettings()))


def train_on(training: BareLoop, batches: BatchLoader) -> None:
    for batch in batches:
        training.step([batch])


def report_sequences(measured: Mapping[int, Timings], rounds: int) -> list[dict[str, Any]]:
    costs, starts = [], []
    for number, timings in measured.items():
        costs.append(
            {
                "sequences": number,
                "cache s": round(median(timings.build_seconds), 3),
                "spread": spread(timings.build_seconds),
                "epoch's plan ms": round(1e3 * median(timings.of_start("epoch_plan_seconds")), 2),
                "optimizer step ms": round(1e3 * median(timings.step_seconds), 1),
                "spread of the step": spread(timings.step_seconds),
            }
        )
        stages = {
            f"{stage} ms": round(1e3 * median([start["stages"][stage] for start in timings.starts]), 1)
            for stage in timings.starts[0]["stages"]
        }
        starts.append(
            {
                "sequences": number,
                "s to the first batch": round(median(timings.of_start("first_batch_seconds")), 3),
                "spread": spread(timings.of_start("first_batch_seconds")),
                **stages,
                "MB imported": round(median(timings.of_start("imported_mb"))),
                "at the first batch": round(median(timings.of_start("first_batch_mb"))),
                "at the first step, once": round(median(timings.of_start("first_step_mb"))),
            }
        )
    print_table(f"Cost against the number of sequences, medians of {rounds} rounds in turns", costs)
    print_table("A second start of train_optimized.py, from the end of its imports; peak memory of the process", starts)
    return [cost | {"start": start} for cost, start in zip(costs, starts, strict=True)]


def curves_of(measured: Mapping[int, Timings]) -> tuple[list[Curve], list[Curve]]:
    """Return the curves of seconds, and those of megabytes."""
    sizes, timings = list(measured), list(measured.values())
    added_mb = [
        [
            mb - imported
            for mb, imported in zip(one.of_start("first_batch_mb"), one.of_start("imported_mb"), strict=True)
        ]
        for one in timings
    ]
    seconds = [
        Curve("cache", sizes, [one.build_seconds for one in timings]),
        Curve("second start to the first batch", sizes, [one.of_start("first_batch_seconds") for one in timings]),
        Curve("plan of an epoch", sizes, [one.of_start("epoch_plan_seconds") for one in timings]),
        Curve("optimizer step", sizes, [one.step_seconds for one in timings]),
    ]
    megabytes = [
        Curve("second start, at the first batch", sizes, [one.of_start("first_batch_mb") for one in timings]),
        Curve("of it not there after the imports", sizes, added_mb),
    ]
    return seconds, megabytes


# --- Against the shape of a step --------------------------------------------------------------------------------------


def token_training(model: ModelSettings) -> BareLoop:
    settings = replace(OptimizedSettings(), model=model)
    return BareLoop(settings, DataDescription(kind="tokens", vocabulary_size=VOCABULARY))


def sweeps(*, short: bool, base: Shape = BASE) -> list[Sweep]:
    lengths, widths, tokens = (SHORT_LENGTHS, SHORT_WIDTHS, SHORT_TOKENS) if short else (LENGTHS, WIDTHS, TOKENS)
    length, width, batch = f"steps: {base.length}", f"width: {base.width}", f"tokens per batch: {base.tokens:,}"
    by_length, by_width, by_batch = (
        [base._replace(**{name: number}) for number in numbers]
        for name, numbers in (("length", lengths), ("width", widths), ("tokens", tokens))
    )
    return [
        Sweep("length", "length of the sequences", f"{width}, {batch}", by_length, lengths),
        Sweep("width", "width of the network", f"{length}, {batch}", by_width, widths),
        Sweep("batch", "tokens per batch", f"{length}, {width}", by_batch, tokens),
    ]


def run_sweep(sweep: Sweep, rounds: int, model: ModelSettings) -> tuple[list[dict[str, Any]], Curve, Curve]:
    """Return the table, and two curves: milliseconds of a step, and microseconds of it for each token."""
    trainings = {
        width: token_training(replace(model, width=width)) for width in {shape.width for shape in sweep.shapes}
    }
    candidates: dict[str, Callable[[], object]] = {
        str(size): partial(trainings[shape.width].step, [random_batch(shape)])
        for size, shape in zip(sweep.sizes, sweep.shapes, strict=True)
    }
    seconds = list(interleaved_seconds(candidates, rounds).values())
    tokens = [shape.tokens // shape.length * shape.length for shape in sweep.shapes]
    step_ms = [[1e3 * one for one in values] for values in seconds]
    token_us = [[1e6 * one / number for one in values] for values, number in zip(seconds, tokens, strict=True)]
    rows = [
        {
            sweep.label: size,
            "ms per step": round(median(step), 1),
            "us per token": round(median(token), 2),
            "spread": spread(step),
        }
        for size, step, token in zip(sweep.sizes, step_ms, token_us, strict=True)
    ]
    print_table(f"An optimizer step against the {sweep.label}, medians of {rounds} rounds in turns", rows)
    return rows, Curve("step", sweep.sizes, step_ms), Curve("token", sweep.sizes, token_us)


def random_batch(shape: Shape) -> TokenBatch:
    """Return as many sequences as fit, none of them padded."""
    rows = shape.tokens // shape.length
    tokens_BT = torch.randint(VOCABULARY, (rows, shape.length), generator=torch.Generator().manual_seed(0))
    lengths_B = torch.full((rows,), shape.length)
    return TokenBatch(tokens_BT, lengths_B, torch.arange(rows), None, rows * shape.length, 0)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
