"""How fast a training step is: the optimized command against the plain one, against the machine, and against a bare loop.

    python -m benchmarks.speed.step [--short] [--part recipes|loop|compile]

recipes: generated tokens with log-normal lengths (mean 75), 7 million parameters; and the event model of 10 million on
physionet2012 below SEQVAE_REAL_DATA, or demo events. Runs of the real commands take turns (seqvae/profiling/measured_run.py).
Between the rounds, a square product of matrices measures what the machine can do at that hour, in the precision of the optimized
run: bf16 where the CPU has units for it, else float32. A model's FLOPs are counted by torch on its own batches, without those for
padding.
loop: the real loader against batches that lie ready, and Lightning's Trainer against a bare loop, at a step of about 10 ms. In one
process: a real run stops now and then for the bare loop's turns. In two processes, how each lies in memory was as much of the
difference as what they do.
compile: the recipe of the tokens with --compile_model and without, after its warm-up.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule, Trainer

import train_optimized
import train_with_collapse_detection
from benchmarks.measure import (
    machine,
    make_parser,
    median,
    print_table,
    restart_as_commands_run,
    spread,
    write_token_lists,
)
from benchmarks.speed.bare_loop import BareLoop, endless
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, ReferenceSettings
from seqvae.console import set_up_output
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import run_command
from seqvae.monitors.hardware import product_peak
from seqvae.profiling.measured_run import Lap, MeasuredRun, Recipe, data_of, measurable
from seqvae.training.distributed import DTYPES, Precision, resolve_precision
from seqvae.training.fit import fit, make_data


class Turn(NamedTuple):
    """The length of a stretch of training, as `MeasuredRun.turn` takes it."""

    steps: int = 1
    seconds: float = 0.0
    lead_steps: int = 2


SEQUENCES = 40_000
TOKEN_MODEL = ("--width", "256", "--depth", "3", "--vocabulary_size", "5000")
EVENT_MODEL = ("--width", "448", "--depth", "2", "--heads", "2")
SMALL_STEP = ("--width", "64", "--depth", "1", "--tokens_per_batch", "1000", "--gradient_accumulation_steps", "1")
FEW_SEQUENCES = 1_000
"""Sequences of 500 ids. A step takes about 10 ms, and a turn is an epoch, so that all turns are of the same lengths."""
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
LOOP_LEAD = 4
"""Steps at the beginning of each turn of the loops that do not count."""
CACHED, LOADED, TRAINED = "cached batches", "the loader", "the Trainer"


class Result(NamedTuple):
    """The laps of a run in all its turns."""

    laps: list[Lap]
    is_compiled: bool = False
    """Whether layers are compiled after the run's own trial of it."""

    @property
    def rate(self) -> float:
        """Real steps of sequences per second."""
        return sum(lap.real_steps for lap in self.laps) / sum(lap.seconds for lap in self.laps)

    @property
    def rates(self) -> list[float]:
        return [lap.real_steps / lap.seconds for lap in self.laps]

    @property
    def padding_efficiency(self) -> float:
        return sum(lap.real_steps for lap in self.laps) / sum(lap.padded_steps for lap in self.laps)


def main() -> None:
    parser = make_parser("benchmarks.speed.step", __doc__)
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
    real = os.environ.get("SEQVAE_REAL_DATA")
    events = ("--data_dir", f"{real}/physionet2012") if real else ("--kind", "events")
    recipes = {
        OPTIMIZED: token_recipe(directory, OPTIMIZED, "--fast_detection"),
        REFERENCE: token_recipe(directory, REFERENCE),
        BY_HAND: token_recipe(directory, REFERENCE, "--no_plain_operations"),
        RANDOM_64: token_recipe(directory, REFERENCE, "--batch_size", "64"),
        EVENTS: recipe_of(
            OPTIMIZED, [*events, "--cache_dir", str(directory / "cache"), *EVENT_MODEL, "--fast_detection"]
        ),
    }
    if short:
        del recipes[RANDOM_64]
    results, peaks, flops = take_turns(recipes, short)
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


def recipe_of(command: str, words: Sequence[str]) -> Recipe:
    module, schema = {
        OPTIMIZED: (train_optimized, OptimizedSettings),
        REFERENCE: (train_with_collapse_detection, ReferenceSettings),
    }[command]
    return Recipe(command, parse_command_line(schema, words, prog=command, description=""), module.callbacks)


def take_turns(recipes: dict[str, Recipe], short: bool) -> tuple[dict[str, Result], list[float], dict[str, float]]:
    """Return the laps of each run, the machine's peak after each round, and each one's FLOPs for a real step."""
    peaks, dtype = [], DTYPES[precision_of(recipes[OPTIMIZED])]
    with ExitStack() as stack:
        runs = {name: stack.enter_context(MeasuredRun(recipe)) for name, recipe in recipes.items()}

        def lap_of(name: str) -> Lap:
            turn = SHORT_TURN if short else TURNS.get(name, TURNS[OPTIMIZED])
            return runs[name].turn(turn.steps, turn.seconds, turn.lead_steps, by_stage=False)

        results = {name: Result([], run.ready.is_compiled) for name, run in runs.items()}
        # Of all steps that were computed on, padding included, each cost as much.
        work = {name: run.count(steps=4) for name, run in runs.items()}
        for name in runs:
            lap_of(name)
        for _ in range(3 if short else 5):
            for name in runs:
                results[name].laps.append(lap_of(name))
            peaks.append(product_peak(torch.device("cpu"), dtype))
    return results, peaks, {name: one.flops / one.padded_steps for name, one in work.items()}


def precision_of(recipe: Recipe) -> Precision:
    return resolve_precision(recipe.settings.compute.precision, "cpu").precision


# --- Loader and Trainer ----------------------------------------------------------------------------------------------


class LoopTurns(Callback):
    """Callback that stops a run for the turns of a bare loop, and notes the milliseconds per step, round by round.

    A turn is as many steps as an epoch, in the order that has long and short batches alike in every stretch.
    """

    def __init__(self, bare: BareLoop, data: SequenceDataModule, rounds: int) -> None:
        self.milliseconds: dict[str, list[float]] = {CACHED: [], LOADED: [], TRAINED: []}
        self._bare, self._rounds = bare, rounds
        self._steps = data.batches_per_epoch()
        self._loaded, self._ahead = endless(data), endless(data)
        self._begun_at, self._begun = self._steps, 0.0
        """Step and time; what comes before is warm-up."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data_of(trainer).order = "spread"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step == self._begun_at:
            self._begun = time.perf_counter()
        if trainer.global_step < self._begun_at + self._steps:
            return
        self.milliseconds[TRAINED].append((time.perf_counter() - self._begun) / self._steps * 1e3)
        same = list(islice(self._ahead, LOOP_LEAD + self._steps))
        for name, batches in ((CACHED, iter(same)), (LOADED, self._loaded)):
            self._bare.steps(batches, LOOP_LEAD)
            start = time.perf_counter()
            self._bare.steps(batches, self._steps)
            self.milliseconds[name].append((time.perf_counter() - start) / self._steps * 1e3)
        self._begun_at = trainer.global_step + LOOP_LEAD
        trainer.should_stop = len(self.milliseconds[TRAINED]) == self._rounds


def report_loop(directory: Path, short: bool) -> dict[str, Any]:
    """Time the same steps in all three ways; the ratios are medians over rounds."""
    words = ["--data_dir", str(directory / "few"), "--cache_dir", str(directory / "cache")]
    recipe = recipe_of(OPTIMIZED, [*words, *SMALL_STEP, "--disable_metrics_monitoring"])
    settings = measurable(recipe.settings, str(directory / "runs"))
    data = make_data(settings)
    assert data.accumulate == 1  # a batch is a step
    data.order = "spread"
    turns = LoopTurns(BareLoop(settings, data.description), data, rounds=5 if short else 30)
    set_up_output()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        fit(settings, [*recipe.callbacks(settings), turns])
    milliseconds = turns.milliseconds

    def ratio(name: str, other: str) -> float:
        pairs = zip(milliseconds[name], milliseconds[other], strict=True)
        return round(median([value / base for value, base in pairs]), 3)

    rows = [
        {"step with": name, "ms": round(median(values), 2), "spread": spread(values)}
        for name, values in milliseconds.items()
    ]
    ratios = {"loader ratio": ratio(CACHED, LOADED), "Trainer / bare loop": ratio(TRAINED, LOADED)}
    print_table(f"A small step; loader ratio {ratios['loader ratio']}, Trainer {ratios['Trainer / bare loop']}", rows)
    return {"rows": rows, "ratios": ratios}


# --- Compiled --------------------------------------------------------------------------------------------------------


def report_compile(directory: Path, short: bool) -> dict[str, Any]:
    recipes = {
        OPTIMIZED: token_recipe(directory, OPTIMIZED, "--fast_detection"),
        COMPILED: token_recipe(directory, OPTIMIZED, "--fast_detection", "--compile_model"),
    }
    results, _, _ = take_turns(recipes, short)
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
"""Parts of the short form; compiling would take longer than all of them."""


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.speed.step"))
