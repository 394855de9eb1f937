"""Intensive care: from the published text files to latents of stays that predict how patients fare.

python -m examples.icu_stays --from physionet2012       # a directory with set-a/ and Outcomes-a.txt, as published
"""

import argparse
import sys
from pathlib import Path

from examples.icu_stays.data import LABEL, make_meds
from examples.icu_stays.results import VARIABLES, show_deaths, show_stay
from examples.shared import run, say
from seqvae.errors import run_command

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
    data, labels, model = folder / "data", folder / "labels.csv", folder / "model"

    say("1. Text files into MEDS.")
    folder.mkdir(parents=True, exist_ok=True)
    counts = make_meds(options.source, data, labels)
    print(f"{data}: " + ", ".join(f"{count:,} {split}" for split, count in counts.stays.items()))
    print(
        f"{counts.events:,} events; {counts.unknown:,} rows of unknown values left out; {counts.deaths:,} died in hospital"
    )

    say("2. Train without the outcomes.")
    run("train_optimized.py", *train_words(folder))

    say("3. Do the latents predict who died? A linear probe, beside one on plain means of the variables.")
    probe = ["--probe", LABEL, "--label_path", labels, "--split", "valid+test"]
    run("seqvae evaluate", model, *probe, "--iw_sequences", 0)

    say("4. The same as a curve, from the latents and outlier scores of all stays.")
    latents, picture = folder / "latents.parquet", folder / "deaths.png"
    run("seqvae encode", model, "--output", latents)
    show_deaths(latents, labels, picture)
    print(f"{picture}: deaths found, and survivors taken for deaths")

    say("5. What was not measured?")
    filled, picture = folder / "filled.parquet", folder / "stay.png"
    run("seqvae impute", model, "--split", "test", "--variables", ",".join(VARIABLES), "--output", filled)
    show_stay(filled, picture)
    print(f"{picture}: one stay, and what the model fills in")


def train_words(folder: Path) -> list[object]:
    places = ["--data_dir", folder / "data", "--cache_dir", folder / "cache", "--output_dir", folder]
    return ["--fast_detection", *places, "--run_name", "model"]


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
