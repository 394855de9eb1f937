"""Seconds of training until a given validation ELBO: train_optimized.py against the reference, and against what others have.

    python -m benchmarks.speed.time_to_quality [--part reference|moses|hf] [--chosen] [--short] [--seconds 9] [--rounds N]
        [--seeds 3]

Takes the flags of the model as well (--width, --depth ...). Each part puts train_optimized.py beside other trainings of as many
parameters, all with the objective NLL + KL from the first step on and with constant learning rates:

    reference  train_with_collapse_detection.py on tokens of a known process, the same network
    moses      MOSES' own VAE with its own trainer on its molecules; SequenceVAE with as many parameters
    hf         Hugging Face datasets, batches of 64 and a bare PyTorch loop on those tokens, the same network

First each side chooses among the same three learning rates, and among batches where they may differ (the reference's and
Hugging Face's are what they are), each tried for as long as the race takes: the other side what comes to the best ELBO, ours
what is there soonest. Then the chosen ones train anew with other seeds, in turns of --seconds, and are validated four times a
turn on the same sequences, which is not counted. What counts is the mean of four validations in a row; the target is the best
that the other side reached. --chosen takes what was chosen before; --short does, too, with one seed and a few short turns.
MOSES' wheel is downloaded where it is not there (benchmarks/speed/quality_moses.py says why it cannot be installed).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import machine, restart_as_commands_run
from benchmarks.speed import quality_moses
from benchmarks.speed.quality_contest import Candidate, best_elbo, race, try_all, try_all_against
from benchmarks.speed.quality_data import write_demo_tokens, write_molecules
from benchmarks.speed.quality_hf import hugging_face
from benchmarks.speed.quality_ours import RATES, optimized, reference
from benchmarks.speed.quality_report import Side, report_choice, report_race
from seqvae.errors import run_command

PROG = "benchmarks.speed.time_to_quality"
TOKENS_MODEL = ("--width", "256", "--depth", "3", "--vocabulary_size", "5000")
"""7.3 million parameters, the network of the other benchmarks. All but 32 of the ids never come, which is learnt in a few steps."""
MOLECULES_MODEL = ("--width", "304", "--depth", "2", "--latent_size", "128", "--dropout", "0", "--free_bits", "0")
"""4.6 million, as MOSES' VAE; its latent's size, no dropout as in its networks, and each nat of the KL costs."""
MOLECULES = 200_000

OPTIMIZED_BATCHES = (1024, 2048)
"""Tokens of an optimizer step. Few: a network that knows nothing yet learns more from many steps."""
MOLECULE_BATCHES = (1024, 4096)
MOSES_BATCHES = (512, 64)
"""Molecules; the first is its own."""

CHOSEN = {
    "reference": (3e-4, 0),
    "optimized": (1e-3, 2048),
    "moses": (3e-3, 64),
    "molecules": (1e-3, 1024),
    "hf": (3e-3, 0),
}
"""Rate and batch of each side where nothing is chosen; a full run says what it chooses."""


class Effort(NamedTuple):
    """How long everything takes."""

    choosing: bool
    """Or else take what was chosen before."""
    turn_seconds: float
    rounds: int
    seeds: int


FULL = Effort(choosing=True, turn_seconds=9.0, rounds=5, seeds=3)
SHORT = Effort(choosing=False, turn_seconds=3.0, rounds=2, seeds=1)
LONGER = {"reference": 2}
"""Times as many rounds. The first seconds teach anybody the most; what a recipe is worth shows after them."""


class Contest(NamedTuple):
    """What a part is about."""

    title: str
    sides: Sequence[Sequence[Candidate]]
    """Ways to train to choose from, for each side; ours comes last."""


Prepare = Callable[[Path, Sequence[str], bool], Contest]
"""Directory for its data, flags, whether to choose -> the contest."""


def main() -> None:
    restart_as_commands_run()
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--part", choices=tuple(PARTS), help="default: all")
    parser.add_argument("--chosen", action="store_true", help="nothing is chosen anew")
    parser.add_argument("--short", action="store_true", help="in a minute and a half, nothing chosen")
    parser.add_argument("--seconds", type=positive(float), help="of a turn")
    parser.add_argument("--rounds", type=positive(int), help="turns of each training, 2 or more")
    parser.add_argument("--seeds", type=positive(int), help="trainings of each side")
    options, words = parser.parse_known_args()
    if options.rounds == 1:
        parser.error("--rounds must be 2 or more: the first turn does not count for the speed")
    asked = {"turn_seconds": options.seconds, "rounds": options.rounds, "seeds": options.seeds}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if options.chosen:
        given["choosing"] = False
    parts = [options.part] if options.part else list(PARTS)
    print(json.dumps(run({part: usual_effort(part, options.short)._replace(**given) for part in parts}, words)))


def usual_effort(part: str, short: bool) -> Effort:
    effort = SHORT if short else FULL
    return effort._replace(rounds=effort.rounds * LONGER.get(part, 1))


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parsed(word: str) -> float:
        value = kind(word)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be above 0, got {word}")
        return value

    return parsed


def run(efforts: Mapping[str, Effort], words: Sequence[str] = ()) -> dict[str, Any]:
    """Effort by part; `words`: flags of the model."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="seqvae-bench-") as directory:
        for part, effort in efforts.items():
            contest = PARTS[part](Path(directory) / part, words, effort.choosing)
            results[part] = run_contest(contest, effort)
    return {
        "benchmark": "time_to_quality",
        "machine": machine(),
        "effort": {part: effort._asdict() for part, effort in efforts.items()},
        "rows": {part: result["rows"] for part, result in results.items()},
        "chosen_from": {part: result["chosen_from"] for part, result in results.items()},
        "ratio": {part: [row["times as long"] for row in result["rows"][:-1]] for part, result in results.items()},
    }


def run_contest(contest: Contest, effort: Effort) -> dict[str, Any]:
    chosen, chosen_from = (
        choose(contest.sides, effort) if effort.choosing else ([only for (only,) in contest.sides], [])
    )
    curves, parameters = race(chosen, range(effort.seeds), effort.turn_seconds, effort.rounds)
    sides = [Side(*facts) for facts in zip(chosen, parameters, curves, strict=True)]
    return {"rows": report_race(contest.title, sides), "chosen_from": chosen_from}


def choose(sides: Sequence[Sequence[Candidate]], effort: Effort) -> tuple[list[Candidate], list[list[dict[str, Any]]]]:
    """The best of each side, and a table of each that had a choice."""
    *others, ours = sides
    trials = [try_all(candidates, effort.turn_seconds, effort.rounds) for candidates in others]
    chosen = [of_side[0].candidate for of_side in trials]
    if len(ours) == 1:
        return [*chosen, *ours], [report_choice(of_side) for of_side in trials]
    target = max(best_elbo(of_side[0].curve) for of_side in trials)
    of_ours = try_all_against(ours, target, effort.turn_seconds, effort.rounds)
    return [*chosen, of_ours[0].candidate], [report_choice(of_side) for of_side in (*trials, of_ours)]


def grid(side: str, batches: Sequence[int], choosing: bool) -> list[tuple[float, int]]:
    """Rates and batches to choose from."""
    return [(rate, batch) for batch in batches for rate in RATES] if choosing else [CHOSEN[side]]


def reference_part(directory: Path, words: Sequence[str], choosing: bool) -> Contest:
    data, flags = write_demo_tokens(directory), (*TOKENS_MODEL, *words)
    return Contest(
        "Tokens: time to the ELBO that the reference reaches",
        [
            [reference(data, flags, rate) for rate, _ in grid("reference", (0,), choosing)],
            [optimized(data, flags, *setting) for setting in grid("optimized", OPTIMIZED_BATCHES, choosing)],
        ],
    )


def moses_part(directory: Path, words: Sequence[str], choosing: bool) -> Contest:
    wheel = quality_moses.wheel(Path(sys.prefix))
    moses, molecules = quality_moses.load(wheel), quality_moses.read_molecules(wheel, MOLECULES)
    data = write_molecules(directory, *molecules)
    flags = (*MOLECULES_MODEL, "--tokenizer", "characters", *words)
    return Contest(
        "Molecules: time to the ELBO that MOSES' VAE reaches",
        [
            [quality_moses.candidate(moses, molecules, *setting) for setting in grid("moses", MOSES_BATCHES, choosing)],
            [optimized(data, flags, *setting) for setting in grid("molecules", MOLECULE_BATCHES, choosing)],
        ],
    )


def hf_part(directory: Path, words: Sequence[str], choosing: bool) -> Contest:
    """Ours as it was chosen before: it is the reference's part that chooses it."""
    data, flags = write_demo_tokens(directory), (*TOKENS_MODEL, *words)
    dtypes = [torch.float32, torch.bfloat16] if choosing else [torch.bfloat16]
    return Contest(
        "Tokens: time to the ELBO that Hugging Face datasets with a bare loop reach",
        [
            *([hugging_face(data, flags, rate, dtype) for rate, _ in grid("hf", (0,), choosing)] for dtype in dtypes),
            [optimized(data, flags, *CHOSEN["optimized"])],
        ],
    )


PARTS: dict[str, Prepare] = {"reference": reference_part, "moses": moses_part, "hf": hf_part}


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
