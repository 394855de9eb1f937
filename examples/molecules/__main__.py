"""Molecules: from the published SMILES strings to new ones.

python -m examples.molecules                                    # fetches 52 MB once (the molsets package, for its data)
python -m examples.molecules --limit 20000 --max_steps 300      # a first look
"""

import argparse
import sys
from pathlib import Path

from examples.molecules.data import WHEEL, make_parquet, make_tokenizer
from examples.molecules.results import ends_of, judge, latent_line, show_way
from examples.shared import run, say
from seqvae.errors import run_command

PROG = "python -m examples.molecules"
STEPS = 8300
"""Optimizer steps of 4,000 tokens each, which are 470 molecules."""
SETTINGS = {
    "--width": 192,
    "--depth": 2,
    "--gradient_accumulation_steps": 1,
    "--dropout": 0,  # no molecule comes more than three times: there is nothing to memorise
    "--free_bits": 0.2,  # of 16 dimensions: a molecule may cost at least 3 nats
    "--limit_val_batches": 0.2,  # some 2,000 molecules
}
SAMPLES = 10_000


def main() -> None:
    options = _options()
    folder: Path = options.output_dir
    data, model, tokenizer = folder / "data", folder / "model", folder / "tokenizer.json"

    say("1. Published strings into Parquet, and a tokenizer learnt from them.")
    counts = make_parquet(options.downloads, data, options.limit)
    print(f"{data}: " + ", ".join(f"{count:,} {split}" for split, count in counts.items()), flush=True)
    print(f"{tokenizer}: {make_tokenizer(data, tokenizer):.1f} tokens per molecule; all are decoded to the same string")

    say("2. Train.")
    run("train_optimized.py", *train_words(folder, options.max_steps, options.max_time))

    say("3. New molecules: samples from the prior.")
    samples, picture = folder / "samples.parquet", folder / "samples.png"
    run("seqvae sample", model, "--count", SAMPLES, "--output", samples)
    print("\n".join([*judge(samples, data, picture).lines(), latent_line(model)]))
    print(f"{picture}: the first of them")

    say("4. What lies between two molecules of the test split?")
    between, picture = folder / "between.parquet", folder / "between.png"
    ends = ends_of(data)
    run("seqvae interpolate", model, *ends, "--steps", 8, "--output", between)
    show_way(between, data, ends, picture)
    print(f"{picture}: the way from one to the other")


def train_words(folder: Path, max_steps: int, max_time: str | None) -> list[object]:
    places = ["--data_dir", folder / "data", "--cache_dir", folder / "cache", "--output_dir", folder]
    settings = [word for pair in SETTINGS.items() for word in pair]
    limit = ["--max_steps", max_steps, *(["--max_time", max_time] if max_time else [])]
    tokenizer = ["--tokenizer", folder / "tokenizer.json"]
    return ["--fast_detection", *places, *tokenizer, *settings, *limit, "--run_name", "model"]


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
