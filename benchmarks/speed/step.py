"""How fast a training step is: the optimized command against the plain one, against the machine, and against a bare loop.

    python -m benchmarks.speed.step [--short] [--part recipes|loop|compile]

recipes: generated tokens with log-normal lengths (mean 75), 7 million parameters; and the event model of 10 million on
physionet2012 below SEQVAE_REAL_DATA, or demo events. Runs of the real commands take turns (seqvae/profiling/contestant.py);
in between, a square product of matrices says what the machine can do at that hour,
in the precision of the optimized run: bf16 where the CPU
has units for it, else float32. A model's FLOPs are counted by torch on its own batches; those for padding are left out.
loop: the real loader against batches that lie ready, and Lightning's Trainer against a bare loop, at a step of about 10 ms.
compile: the recipe of the tokens with --compile_model and without, after its warm-up.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

import train_optimized
import train_with_collapse_detection
from benchmarks.measure import machine, median, print_table, restart_as_commands_run, spread, write_token_lists
from benchmarks.speed.small_step import CACHED, LOADED, TRAINED, time_small_steps
from seqvae.cli.command_line import parse_command_line
from seqvae.errors import run_command
from seqvae.monitors.hardware import product_peak
from seqvae.profiling.contestant import MeasuredRun, Recipe
from seqvae.profiling.messages import Lap, Turn
from seqvae.training.devices import DTYPES, Precision, precision_in_force

SEQUENCES = 40_000
TOKEN_MODEL = ("--width", "256", "--depth", "3", "--vocabulary_size", "5000")
EVENT_MODEL = ("--width", "448", "--depth", "2", "--heads", "2")
SMALL_STEP = ("--width", "64", "--depth", "1", "--tokens_per_batch", "1000", "--gradient_accumulation_steps", "1")
FEW_SEQUENCES = 1_000
"""Of 500 ids. A step takes about 10 ms, and a turn is an epoch, so that all turns are of the same lengths."""
OPTIMIZED, REFERENCE, RANDOM_64 = "train_optimized.py", "train_with_collapse_detection.py", "random batches of 64"
BY_HAND = "the same, operations by hand"
EVENTS, COMPILED = "train_optimized.py, events", "train_optimized.py --compile_model"
TURNS = {
    OPTIMIZED: Turn(steps=8, seconds=6),
    REFERENCE: Turn(seconds=6),
    BY_HAND: Turn(seconds=6),
    RANDOM_64: Turn(steps=2, lead_steps=0),
}
SHORT_TURN = Turn(steps=2, seconds=3, lead_steps=1)


class Result(NamedTuple):
    """What a contestant came to in all its turns."""

    laps: list[Lap]
    is_compiled: bool = False
    """After the run's own trial of it."""

    @property
    def rate(self) -> float:
        """Real steps of sequences a second."""
        return sum(lap.real_steps for lap in self.laps) / sum(lap.seconds for lap in self.laps)

    @property
    def rates(self) -> list[float]:
        return [lap.real_steps / lap.seconds for lap in self.laps]

    @property
    def padding_efficiency(self) -> float:
        return sum(lap.real_steps for lap in self.laps) / sum(lap.padded_steps for lap in self.laps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--short",
        action="store_true",
        help="three rounds instead of five, of short turns; no random batches of 64, nothing compiled",
    )
    parser.add_argument("--part", choices=tuple(PARTS), help="this one alone")
    options = parser.parse_args()
    restart_as_commands_run()
    result: dict[str, Any] = {"benchmark": "step", "machine": machine(), "short": options.short}
    with tempfile.TemporaryDirectory(prefix="seqvae-bench-") as name:
        directory = Path(name)
        write_token_lists(directory / "tokens" / "all.parquet", SEQUENCES)
        write_token_lists(directory / "few" / "all.parquet", FEW_SEQUENCES, vocabulary=500)
        for part in (options.part,) if options.part else SHORT_PARTS if options.short else PARTS:
            result[part] = PARTS[part](directory, options.short)
    print(json.dumps(result))


# --- The recipes, and what the machine could do ----------------------------------------------------------------------


def report_recipes(directory: Path, short: bool) -> dict[str, Any]:
    recipes = {
        OPTIMIZED: token_recipe(directory, OPTIMIZED, "--fast_detection"),
        REFERENCE: token_recipe(directory, REFERENCE),
        BY_HAND: token_recipe(directory, REFERENCE, "--no_plain_operations"),
        RANDOM_64: token_recipe(directory, REFERENCE, "--batch_size", "64"),
        EVENTS: event_recipe(directory),
    }
    if short:
        del recipes[RANDOM_64]
    results, peaks, flops = compete(recipes, short)
    peak, first, precision = median(peaks), results[OPTIMIZED].rate, precision_of(recipes[OPTIMIZED])
    rows = [
        {
            "run": name,
            "real tokens/s": round(result.rate),
            "spread": spread(result.rates),
            "padding efficiency": round(result.padding_efficiency, 3),
            "the first is faster by": round(first / result.rate, 2) if name != EVENTS else "",
            "share of the GEMM peak": round(result.rate * flops[name] / peak, 3),
            "peak memory GiB": round(result.laps[-1].peak_memory_gib, 2),
        }
        for name, result in results.items()
    ]
    print_table(
        f"Training, in turns; GEMM peak {peak / 1e9:,.0f} GFLOP/s in {precision}, spread {spread(peaks)}; for events, a token is "
        "a step in time",
        rows,
    )
    return {"rows": rows, "peak_precision": precision, "peak_gflops": round(peak / 1e9), "peak_spread": spread(peaks)}


def token_recipe(directory: Path, command: str, *words: str) -> Recipe:
    data = ("--data_dir", str(directory / "tokens"), "--cache_dir", str(directory / "cache"))
    return recipe_of(command, [*data, *TOKEN_MODEL, *words])


def event_recipe(directory: Path) -> Recipe:
    real = os.environ.get("SEQVAE_REAL_DATA")
    data = ("--data_dir", f"{real}/physionet2012") if real else ("--kind", "events")
    cache = ("--cache_dir", str(directory / "cache"))
    return recipe_of(OPTIMIZED, [*data, *cache, *EVENT_MODEL, "--fast_detection"])


def recipe_of(command: str, words: Sequence[str]) -> Recipe:
    module, schema = {
        OPTIMIZED: (train_optimized, train_optimized.OptimizedSettings),
        REFERENCE: (train_with_collapse_detection, train_with_collapse_detection.ReferenceSettings),
    }[command]
    settings = parse_command_line(schema, words, prog=command, description="")
    return Recipe(command, settings, module.callbacks)


def compete(recipes: dict[str, Recipe], short: bool) -> tuple[dict[str, Result], list[float], dict[str, float]]:
    """Each one's laps, the machine's peak after each round, and each one's FLOPs for a real step."""
    peaks, dtype = [], DTYPES[precision_of(recipes[OPTIMIZED])]
    with ExitStack() as stack:
        runs = {name: stack.enter_context(MeasuredRun(recipe)) for name, recipe in recipes.items()}
        results = {name: Result([], run.ready.is_compiled) for name, run in runs.items()}
        flops = {name: flops_of_a_step(run) for name, run in runs.items()}
        for name, run in runs.items():
            take_turn(run, name, short)
        for _ in range(3 if short else 5):
            for name, run in runs.items():
                results[name].laps.append(take_turn(run, name, short))
            peaks.append(product_peak(torch.device("cpu"), dtype))
    return results, peaks, flops


def precision_of(recipe: Recipe) -> Precision:
    return precision_in_force(recipe.settings.compute.precision, "cpu").precision


def take_turn(run: MeasuredRun, name: str, short: bool) -> Lap:
    turn = SHORT_TURN if short else TURNS.get(name, TURNS[OPTIMIZED])
    return run.turn(turn.steps, turn.seconds, turn.lead_steps, by_stage=False)


def flops_of_a_step(run: MeasuredRun) -> float:
    """Of one real step of a sequence: of those that were computed on, each cost as much."""
    work = run.count(steps=4)
    return work.flops / work.padded_steps


# --- Loader and Trainer ----------------------------------------------------------------------------------------------


def report_loop(directory: Path, short: bool) -> dict[str, Any]:
    """Steps are the same in all three; the ratios are medians over rounds."""
    words = ["--data_dir", str(directory / "few"), "--cache_dir", str(directory / "cache")]
    recipe = recipe_of(OPTIMIZED, [*words, *SMALL_STEP, "--disable_metrics_monitoring"])
    milliseconds = time_small_steps(recipe, directory / "runs", rounds=5 if short else 30)
    rows = [
        {"step with": name, "ms": round(median(values), 2), "spread": spread(values)}
        for name, values in milliseconds.items()
    ]
    ratios = {
        "loader ratio": ratio_by_round(milliseconds[CACHED], milliseconds[LOADED]),
        "Trainer / bare loop": ratio_by_round(milliseconds[TRAINED], milliseconds[LOADED]),
    }
    print_table(f"A small step; loader ratio {ratios['loader ratio']}, Trainer {ratios['Trainer / bare loop']}", rows)
    return {"rows": rows, "ratios": ratios}


def ratio_by_round(values: Sequence[float], others: Sequence[float]) -> float:
    return round(median([value / other for value, other in zip(values, others, strict=True)]), 3)


# --- Compiled --------------------------------------------------------------------------------------------------------


def report_compile(directory: Path, short: bool) -> dict[str, Any]:
    recipes = {
        OPTIMIZED: token_recipe(directory, OPTIMIZED, "--fast_detection"),
        COMPILED: token_recipe(directory, OPTIMIZED, "--fast_detection", "--compile_model"),
    }
    results, _, _ = compete(recipes, short)
    eager, compiled = results[OPTIMIZED], results[COMPILED]
    by_round = [after / before for before, after in zip(eager.rates, compiled.rates, strict=True)]
    rows = [
        {
            "run": name,
            "real tokens/s": round(result.rate),
            "spread": spread(result.rates),
            "compiled layers kept": result.is_compiled,
            "recompiles": sum(lap.recompiles for lap in result.laps),
        }
        for name, result in results.items()
    ]
    print_table(f"Compiled, after the warm-up: {median(by_round):.3f} times as fast, {spread(by_round)}", rows)
    return {"rows": rows, "ratio": round(median(by_round), 3), "ratio_spread": spread(by_round)}


PARTS = {"recipes": report_recipes, "loop": report_loop, "compile": report_compile}
SHORT_PARTS = ("recipes", "loop")
"""Compiling takes longer than the rest of the short form."""


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.speed.step"))
