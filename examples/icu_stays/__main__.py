"""Intensive care: from the published text files to latents of stays that say how patients fare.

python -m examples.icu_stays --from physionet2012       # a directory with set-a/ and Outcomes-a.txt, as published
"""

import argparse
import sys
from pathlib import Path

from examples.icu_stays.meds import make_meds
from examples.steps import run, say
from training.exit_codes import run_command

PROG = "python -m examples.icu_stays"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        required=True,
        metavar="DIR",
        help="the challenge's files: set-a/ and Outcomes-a.txt, and those of sets b and c if you have them",
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/icu_stays"), metavar="DIR")
    options = parser.parse_args()
    folder: Path = options.output_dir

    say("1. Text files into MEDS.")
    folder.mkdir(parents=True, exist_ok=True)
    made = make_meds(options.source, folder / "data", folder / "labels.csv")
    print(f"{folder / 'data'}: " + ", ".join(f"{count:,} {split}" for split, count in made.stays.items()))
    print(f"{made.events:,} events; {made.unknown:,} rows of unknown values left out; {made.deaths:,} died in hospital")

    say("2. Train, without telling who died.")
    run("train_optimized.py", *train_words(folder))


def train_words(folder: Path) -> list[object]:
    places = ["--data_dir", folder / "data", "--cache_dir", folder / "cache", "--output_dir", folder]
    return ["--fast_detection", *places, "--run_name", "model"]


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
