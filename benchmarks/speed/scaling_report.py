"""The parts of `benchmarks.speed.scaling` in order: tables, pictures, and the line of JSON."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, print_table
from benchmarks.speed.scaling_laws import Curve, Panel, draw_panels
from benchmarks.speed.scaling_sequences import run_sequences
from benchmarks.speed.scaling_steps import BASE, Sweep, run_sweep
from seqvae.config.model import ModelSettings

ROUNDS = 5


def run(
    output: Path,
    numbers: Sequence[int],
    steps: Sequence[Sweep],
    model: ModelSettings,
    words: Sequence[str] = (),
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """`words`: flags of train_optimized.py that say what `model` says."""
    with tempfile.TemporaryDirectory(prefix="seqvae-bench-") as folder:
        rows, curves = run_sequences(Path(folder), output, numbers, model, words, rounds)
    by_size: dict[str, Any] = {"sequences": rows}
    for sweep in steps:
        by_size[sweep.name], per_step, per_token = run_sweep(sweep, rounds, model)
        draw_sweep(output, sweep, per_step, per_token)
        curves += [per_step._replace(name=f"{sweep.name}: a step"), per_token._replace(name=f"{sweep.name}: a token")]
    exponents = [
        {"cost": curve.name, "exponent": round(curve.law.exponent, 2), "at the end": round(curve.end, 2)}
        for curve in curves
    ]
    print_table("Exponents, through all sizes and between the last two", exponents)
    print(f"\npictures: {output}")
    return {
        "benchmark": "scaling",
        "machine": machine(),
        "command": " ".join(["python -m benchmarks.speed.scaling", *sys.argv[1:]]),
        **by_size,
        "exponents": exponents,
    }


def draw_sweep(output: Path, sweep: Sweep, per_step: Curve, per_token: Curve) -> None:
    fixed = {
        "length": f"sequences of {BASE.length} steps",
        "width": f"width {BASE.width}",
        "batch": f"batches of {BASE.tokens:,} tokens",
    }
    del fixed[sweep.name]
    draw_panels(
        output / f"{sweep.name}.png",
        f"An optimizer step against the {sweep.label}",
        ", ".join(fixed.values()),
        [Panel(sweep.label, "milliseconds", [per_step]), Panel(sweep.label, "microseconds", [per_token])],
    )
