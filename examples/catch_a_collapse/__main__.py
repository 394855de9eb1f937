"""Catch a collapse: train a model whose posterior dies, read the verdict, apply its advice, see it healed.

python -m examples.catch_a_collapse                     # no data and no network needed; two short runs
"""

import argparse
import sys
from pathlib import Path

from examples.catch_a_collapse.results import LastVerdict, draw, flag_of, last_verdict, with_flag
from examples.shared import run, say
from seqvae.data.demo import write_demo
from seqvae.errors import UsageError, run_command

PROG = "python -m examples.catch_a_collapse"
SEQUENCES, MEAN_LENGTH, LONGEST = 4000, 8, 24
"""Short sequences: they hold little that a decoder could not predict from one token to the next."""
STEPS = 600
RECIPE = {
    "--free_bits": "0",  # the default, 0.1, would prevent what we want to see
    "--beta": "2",
    "--kl_schedule": "linear",
    "--kl_warmup": "0.3",
    "--width": "32",
    "--depth": "1",
    "--latent_size": "8",
    "--batch_size": "32",
    "--gradient_accumulation_steps": "1",
    "--max_sequence_length": str(LONGEST),
    "--max_steps": str(STEPS),
    "--precision": "32-true",
    "--label_weight": "0",  # labels would keep the means moving, whatever the decoder does
    "--limit_val_batches": "0",
    "--monitor_every_n_steps": "6",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/catch_a_collapse"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, help="of both runs (default: %(default)s)")
    options = parser.parse_args()
    folder: Path = options.output_dir
    data_dir = write_demo(folder / "data", "tokens", sequences=SEQUENCES, mean_length=MEAN_LENGTH)
    places = {"--data_dir": data_dir, "--cache_dir": folder / "cache", "--output_dir": folder}
    words = [str(word) for pair in (places | RECIPE | {"--seed": options.seed}).items() for word in pair]

    say("1. Train, with the KL weight rising to 2 over the first third: by itself no protection.")
    run("train_optimized.py", *words, "--run_name", "first")

    caught = last_verdict(folder / "first")
    if caught.name != "collapsed":
        raise UsageError(
            f"the run in {folder / 'first'} ended as {caught.name}: there is nothing to heal. Try another --seed"
        )
    flag, value = flag_of(caught.advice[0])
    say(f"2. Read the verdict in {folder / 'first' / 'events.jsonl'}:")
    _print_verdict(caught)

    say(f"3. Follow its first advice, {flag} {value}, and change nothing else.")
    run("train_optimized.py", *with_flag(words, flag, value), "--run_name", "second")

    say(f"4. And now? {folder / 'second' / 'events.jsonl'} says:")
    _print_verdict(last_verdict(folder / "second"))
    picture = folder / "collapse_caught.png"
    draw(picture, folder / "first", folder / "second", f"{flag} {value}")
    say(f"Both runs side by side: {picture}")


def _print_verdict(verdict: LastVerdict) -> None:
    print(f"   at step {verdict.step}: {verdict.name.replace('_', ' ')}\n   because {verdict.evidence}")
    for one in verdict.advice:
        print(f"   advice: {one}")


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
