"""What training costs against the size of things, with the exponent of each: sequences, their length, width, tokens of a batch.

    python -m benchmarks.speed.scaling [--short] [--output runs/scaling] [--sequences 10000 100000 ...] [--width 256 ...]

Takes the flags of train_optimized.py for the model, too. Against the number of sequences (generated, up to ten million): seconds
for the cache, for a second start until the first batch, for an epoch's plan and for an optimizer step, and the memory of that
start. Ten million take 8 GB of disk where temporary files lie (TMPDIR). Pictures go to --output; the last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings
from seqvae.console import share_machine
from seqvae.errors import run_command

PROG = "benchmarks.speed.scaling"
SEQUENCES = (10_000, 100_000, 1_000_000, 10_000_000)
SHORT_SEQUENCES = SEQUENCES[:3]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--short", action="store_true", help="up to a million sequences, and fewer points")
    parser.add_argument("--sequences", type=int, nargs="+", help="two numbers or more, ascending")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling"), help="directory for the pictures")
    options, words = parser.parse_known_args()
    model = parse_command_line(OptimizedSettings, words, prog=PROG, description=__doc__ or "").model
    numbers = options.sequences or (SHORT_SEQUENCES if options.short else SEQUENCES)
    share_machine()

    from benchmarks.speed.scaling_report import run  # only now: torch's threads read on import how they shall wait
    from benchmarks.speed.scaling_steps import sweeps

    print(json.dumps(run(options.output, numbers, sweeps(short=options.short), model, words)))


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
