"""Time to the default's best validation ELBO by a changed recipe, such as Muon at some learning rates, against the default.

    python -m benchmarks.quality.recipe --data moses_smiles                    # an hour or two for each set
    python -m benchmarks.quality.recipe --data demo_tokens --seeds 2 --steps 100 --only default "muon, rate x 1"

Real sets lie below SEQVAE_REAL_DATA. All recipes of a seed train one after the other, each in a process of its own, so that what
else the machine does falls on all of them. A run is validated every twentieth of it on all validation sequences; the time is that
of training without validations. The learning rate is the default's times a factor. What was measured lies in runs/recipe/ and is
not measured again until the code changes.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    code_version,
    known_figures,
    machine,
    make_parser,
    print_table,
    restart_as_commands_run,
    run_in_own_process,
)
from benchmarks.quality.variants import SETS, place_of
from seqvae.errors import UsageError, run_command

PROG = "benchmarks.quality.recipe"
DEFAULT_DIRECTORY = Path("runs/recipe")
DEFAULT = "default"
VALIDATIONS = 20
"""Of a run."""

RECIPES: dict[str, tuple[float, tuple[str, ...]]] = {
    DEFAULT: (1.0, ()),
    "muon, rate x 0.5": (0.5, ("--optimizer", "muon")),
    "muon, rate x 1": (1.0, ("--optimizer", "muon")),
    "adamw, rate x 2": (2.0, ()),
    "dropout 0": (1.0, ("--dropout", "0")),
    "average of weights": (1.0, ("--ema", "0.99")),
}
"""The factor of the default's learning rate, and further flags."""


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--data", choices=list(SETS), required=True)
    parser.add_argument("--only", metavar="NAME", nargs="+", default=list(RECIPES), help="only these recipes")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each recipe")
    parser.add_argument("--steps", type=int, help="optimizer steps in place of those of the set")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="where figures are kept")
    parser.add_argument("--any_version", action="store_true", help="take figures of older code, too")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help="train one, and print its validations")
    options = parser.parse_args()
    restart_as_commands_run()
    if unknown := [name for name in options.only if name not in RECIPES]:
        raise UsageError(f"--only: there is no recipe {', '.join(unknown)}. Choose from: {', '.join(RECIPES)}.")
    steps = options.steps or SETS[options.data].steps
    if options.one:
        print(json.dumps(measure(options.data, options.one[0], int(options.one[1]), steps)))
        return
    found = measure_all(options.data, options.only, options.seeds, steps, options.directory, options.any_version)
    rows = [{"set": options.data, **row} for row in table(found)]
    print_table(f"{options.data}, {steps} steps, validation on all sequences", rows)
    print(json.dumps({"benchmark": "recipe", "machine": machine(), "data": options.data, "steps": steps, "rows": rows}))


def measure_all(
    data: str, names: Sequence[str], seeds: int, steps: int, directory: Path, any_version: bool
) -> list[dict[str, Any]]:
    """Return what is known of each recipe and seed; measure what is not, the recipes of a seed in turns."""
    path, version = directory / "figures.jsonl", code_version("benchmarks/quality/recipe.py")
    known = known_figures(path, data, steps, None if any_version else version)
    for seed in range(seeds):
        for name in names:
            if (name, seed) in known:
                continue
            words = ("--data", data, "--steps", str(steps), "--one", name, str(seed))
            known[name, seed] = row = run_in_own_process(PROG, *words) | {"version": version}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{data}: {name}, seed {seed}: {row['seconds'][-1]:.0f} s, {max(row['elbos']):.2f}", flush=True)
    return [known[name, seed] for name in names for seed in range(seeds)]


def measure(data: str, name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train by a recipe in a directory that is gone afterwards; return its validations and the seconds of training before each."""
    from lightning import Callback, LightningModule, Trainer

    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.training import OptimizedSettings
    from seqvae.training.fit import fit, make_data
    from seqvae.training.schedules import plan_run

    class Clock(Callback):
        """The seconds of training, without validations."""

        def __init__(self) -> None:
            self.since = self.trained = 0.0
            self.rows: dict[int, tuple[float, float]] = {}

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.since = time.perf_counter()

        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.trained += time.perf_counter() - self.since

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.rows.setdefault(trainer.global_step, (self.trained, float(trainer.callback_metrics["valid_elbo"])))
            self.since = time.perf_counter()

    factor, words = RECIPES[name]
    with tempfile.TemporaryDirectory(prefix="seqvae-recipe-") as temporary:
        flags = [*place_of(data), *SETS[data].flags, *words, "--max_steps", str(steps), "--seed", str(seed)]
        flags += [
            "--output_dir",
            temporary,
            "--limit_val_batches",
            "1.0",
            "--val_check_interval",
            str(max(1, steps // VALIDATIONS)),
        ]
        settings = parse_command_line(OptimizedSettings, flags, prog=PROG, description="")
        if factor != 1:
            rate = factor * plan_run(settings, make_data(settings), 1).lr
            settings = parse_command_line(OptimizedSettings, [*flags, "--lr", str(rate)], prog=PROG, description="")
        clock = Clock()
        fit(settings, [clock])
    rows = sorted(clock.rows.items())
    return {
        "data": data,
        "name": name,
        "seed": seed,
        "steps": steps,
        "at_steps": [step for step, _ in rows],
        "seconds": [round(seconds, 2) for _, (seconds, _) in rows],
        "elbos": [round(elbo, 4) for _, (_, elbo) in rows],
    }


def seconds_to(run: Mapping[str, Any], elbo: float) -> float:
    """Return the seconds of training until validations reach an ELBO, between two of them on a line; infinity: they do not.

    >>> seconds_to({"seconds": [10.0, 20.0], "elbos": [-50.0, -40.0]}, -45.0)
    15.0
    """
    before: tuple[float, float] | None = None
    for second, value in zip(run["seconds"], run["elbos"], strict=True):
        if value >= elbo:
            if before is None or value == before[1]:
                return float(second)
            return before[0] + (second - before[0]) * (elbo - before[1]) / (value - before[1])
        before = second, max(value, -math.inf if before is None else before[1])
    return math.inf


def table(found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each recipe: its best ELBO, and its time to the default's best of the same seed."""
    default = {run["seed"]: run for run in found if run["name"] == DEFAULT}
    rows = []
    for name in dict.fromkeys(run["name"] for run in found):
        runs = [run for run in found if run["name"] == name]
        bests = [max(run["elbos"]) for run in runs]
        ratios, reached = [], 0
        for run in runs:
            if (other := default.get(run["seed"])) is None:
                continue
            best = max(other["elbos"])
            seconds = seconds_to(run, best)
            reached += math.isfinite(seconds)
            ratios.append(seconds_to(other, best) / seconds)  # 0: it does not get there
        speed = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        rows.append(
            {
                "recipe": name,
                "seeds": str(len(runs)),
                "best validation ELBO": f"{statistics.mean(bests):.2f}",
                "seconds of training": f"{statistics.mean(run['seconds'][-1] for run in runs):.0f}",
                "get to the default's best": f"{reached} of {len(ratios)}" if ratios else "",
                "times as fast there": speed,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
