"""Spoken vowels: from the published recordings to a model whose latents tell the speakers apart.

python -m examples.spoken_vowels                        # fetches 36 MB once (the sktime package, for its data)
"""

import argparse
import sys
from pathlib import Path

from examples.shared import run, say
from examples.spoken_vowels.data import WHEEL, make_parquet
from examples.spoken_vowels.results import ends_of, show_speakers, show_way
from seqvae.errors import run_command

PROG = "python -m examples.spoken_vowels"
LARGE_LATENT = ("--target_kl", 20, "--latent_size", 32)
"""The default leaves 5 nats, which predict the speaker a little worse than the raw means of the coefficients do."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/spoken_vowels"), metavar="DIR")
    parser.add_argument(
        "--downloads", type=Path, default=Path("demo_data/wheels"), metavar="DIR", help=f"where {WHEEL.file_name} lies"
    )
    options = parser.parse_args()
    folder: Path = options.output_dir
    data, model = folder / "data", folder / "model"

    say("1. Published recordings into Parquet.")
    counts = make_parquet(options.downloads, data)
    print(f"{data}: " + ", ".join(f"{count} {split}" for split, count in counts.items()))

    say("2. Train without the speakers.")
    run("train_optimized.py", *train_words(folder))

    say("3. Where does each utterance lie in the latent space?")
    latents, picture = folder / "latents.parquet", folder / "speakers.png"
    run("seqvae encode", model, "--output", latents)
    show_speakers(latents, data, picture)
    print(f"{picture}: the held-out utterances by speaker")

    say("4. Do the latents predict who spoke? A linear probe, beside one on plain means of the coefficients.")
    run("seqvae evaluate", model, "--split", "valid+test", "--probe", "label", "--iw_sequences", 0)

    ends = ends_of(data)
    say(f"5. What lies between utterance {ends[0]} and utterance {ends[1]}, of two speakers?")
    between, picture = folder / "between.parquet", folder / "between.png"
    run("seqvae interpolate", model, *ends, "--steps", 7, "--output", between)
    show_way(between, data, ends, picture)
    print(f"{picture}: from one speaker to another")


def train_words(folder: Path) -> list[object]:
    places = ["--data_dir", folder / "data", "--cache_dir", folder / "cache", "--output_dir", folder]
    return ["--fast_detection", *places, *LARGE_LATENT, "--run_name", "model"]


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
