"""Memory over a long run: 20,000 optimizer steps of a small model with everything that a run has.

    python -m benchmarks.reliability.long_run [--steps 20000] [flags of train_optimized.py]

The run is that of `train_optimized.py --fast_detection` on the demo data, in this process, with validations, checkpoints, readings
of the posterior and figures. Resident memory is read every 50 steps, with and without the pages of files that are mapped; a row is
the median of a tenth of the run. The first tenth is left out of the growth: until then not every shape of a batch has come.
"""

import json
import sys
import tempfile
from statistics import median
from typing import Any

import psutil

from benchmarks.measure import machine, make_parser, print_table, restart_as_commands_run
from seqvae.errors import run_command

EVERY_N_STEPS = 50
SMALL = ("--width", "32", "--depth", "1", "--tokens_per_batch", "1000", "--fast_detection", "--max_epochs", "1000")
TENTHS = 10


def main() -> None:
    parser = make_parser("benchmarks.reliability.long_run", __doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    options, words = parser.parse_known_args()
    restart_as_commands_run()
    with tempfile.TemporaryDirectory() as directory:
        held = record_memory(options.steps, ["--output_dir", directory, *words])
    rows = rows_of(held)
    in_all = {
        "steps": options.steps,
        "growth after the first tenth": f"{growth_of(rows[1:]):.1%}",
        "growth in the second half": f"{growth_of(rows[TENTHS // 2 :]):.1%}",
    }
    print_table("resident memory", rows)
    print_table("in all", [in_all])
    print(json.dumps({"machine": machine(), "tenths": rows, "all": in_all}))


def record_memory(steps: int, words: list[str]) -> list[tuple[int, int, int]]:
    """Train; return optimizer steps, the bytes that were resident at them, and those of them that are no files."""
    from lightning import Callback

    import train_optimized
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.training import OptimizedSettings
    from seqvae.console import set_up_output
    from seqvae.training.fit import fit

    held: list[tuple[int, int, int]] = []

    class MemoryReader(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            step = trainer.global_step
            if step % EVERY_N_STEPS == 0 and (not held or held[-1][0] != step):
                info = psutil.Process().memory_info()
                held.append((step, info.rss, info.rss - info.shared))

    settings = parse_command_line(
        OptimizedSettings,
        [*SMALL, "--max_steps", str(steps), *words],
        prog="benchmarks.reliability.long_run",
        description="",
    )
    set_up_output()
    fit(settings, [*train_optimized.callbacks(settings), MemoryReader()])
    return held


def rows_of(held: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Return the median of each tenth of a run."""
    size = len(held) // TENTHS
    parts = [held[number * size : (number + 1) * size] for number in range(TENTHS)]
    return [
        {
            "until step": part[-1][0],
            "resident MB": round(median(resident for _, resident, _ in part) / 1e6, 1),
            "without mapped files MB": round(median(own for _, _, own in part) / 1e6, 1),
        }
        for part in parts
    ]


def growth_of(rows: list[dict[str, Any]]) -> float:
    """Return by what share the highest tenth is above the lowest."""
    sizes = [row["resident MB"] for row in rows]
    return float(max(sizes) / min(sizes) - 1)


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.reliability.long_run"))
