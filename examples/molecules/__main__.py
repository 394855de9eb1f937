"""Molecules: from the published SMILES strings to new ones that nobody wrote down.

python -m examples.molecules                                    # fetches 52 MB once (the molsets package, for its data)
python -m examples.molecules --limit 20000 --max_steps 300      # a first look
"""

import argparse
import sys
from pathlib import Path

from examples.molecules.data import WHEEL, make_parquet
from examples.steps import run, say
from training.exit_codes import run_command

PROG = "python -m examples.molecules"
STEPS = 4000
"""Of 8,000 characters each."""


def main() -> None:
    options = _options()
    folder: Path = options.output_dir

    say("1. Published strings into Parquet.")
    counts = make_parquet(options.downloads, folder / "data", options.limit)
    print(f"{folder / 'data'}: " + ", ".join(f"{count:,} {split}" for split, count in counts.items()))

    say("2. Train on characters.")
    run("train_optimized.py", *train_words(folder, options.max_steps, options.max_time))


def train_words(folder: Path, max_steps: int, max_time: str | None) -> list[object]:
    places = ["--data_dir", folder / "data", "--cache_dir", folder / "cache", "--output_dir", folder]
    limit = ["--max_steps", max_steps, *(["--max_time", max_time] if max_time else [])]
    return ["--fast_detection", "--tokenizer", "characters", *places, *limit, "--run_name", "model"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/molecules"), metavar="DIR")
    parser.add_argument(
        "--downloads", type=Path, default=Path("demo_data/wheels"), metavar="DIR", help=f"where {WHEEL.file_name} lies"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N molecules of each published file")
    parser.add_argument("--max_steps", type=int, default=STEPS, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--max_time", metavar="TIME", help="of training, as hours:minutes:seconds; default: no limit")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
