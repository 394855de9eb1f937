"""Seconds of training until a validation ELBO: train_optimized.py against the reference, and against other projects.

    python -m benchmarks.speed.time_to_quality [--part reference|moses|hf] [--chosen] [--short] [--seconds 9] [--rounds N]
        [--seeds 3]

Takes the flags of the model as well (--width, --depth ...). Each part puts train_optimized.py beside other trainings of as many
parameters, all with the objective NLL + KL from the first step on and with constant learning rates:

    reference  train_with_collapse_detection.py on tokens of a known process, the same network
    moses      MOSES' own VAE with its own trainer on its molecules; SequenceVAE with as many parameters
    hf         Hugging Face datasets, batches of 64 and a bare PyTorch loop on those tokens, the same network

First each side chooses among the same three learning rates, and among batches where they may differ (the reference's and
Hugging Face's are fixed), each tried for as long as the race takes: the other side takes what reaches the best ELBO, ours what
reaches it soonest. Then the chosen ones train with other seeds, in turns of --seconds, and are validated four times per turn on
the same sequences, which is not counted. What counts is the mean of four validations in a row; the target is the best that the
other side reached. --chosen takes what was chosen before; --short does, too, with one seed and a few short turns. MOSES' wheel is
downloaded if necessary (benchmarks/speed/quality_trainees.py says why it cannot be installed).
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from benchmarks.measure import machine, make_parser, median, print_table, restart_as_commands_run, spread
from benchmarks.speed.quality_trainees import (
    RATES,
    Candidate,
    Trainee,
    find_wheel,
    hugging_face,
    load_moses,
    moses_vae,
    optimized,
    read_molecules,
    reference,
    write_demo_tokens,
    write_split,
)
from seqvae.errors import run_command

PROG = "benchmarks.speed.time_to_quality"
TOKENS_MODEL = ("--width", "256", "--depth", "3", "--vocabulary_size", "5000")
"""7.3 million parameters, as in the other benchmarks. All but 32 of the ids never come, which is learnt in a few steps."""
MOLECULES_MODEL = ("--width", "304", "--depth", "2", "--latent_size", "128", "--dropout", "0", "--free_bits", "0")
"""4.6 million parameters, as MOSES' VAE; its latent's size, no dropout as in its networks, and each nat of the KL costs."""
MOLECULES = 200_000

OPTIMIZED_BATCHES = (1024, 2048)
"""Tokens per optimizer step. They are few: a network that knows nothing yet learns more from many steps."""
MOLECULE_BATCHES = (1024, 4096)
MOSES_BATCHES = (512, 64)
"""Molecules per batch; the first number is its own."""

CHOSEN = {
    "reference": (3e-4, 0),
    "optimized": (1e-3, 2048),
    "moses": (3e-3, 64),
    "molecules": (1e-3, 1024),
    "hf": (3e-3, 0),
}
"""Rate and batch of each side where nothing is chosen; a full run prints what it chooses."""
CHOOSING_SEED = 1000
"""Seed of the runs that rates and batches are chosen on; those that are compared have seeds of their own."""
LOOKS = 4
"""Validations in a turn. At a constant rate the ELBO scatters from one to the next: what counts is their mean."""


class Effort(NamedTuple):
    """The amount of training."""

    choosing: bool
    """Whether rates and batches are chosen now, and not as they were before."""
    turn_seconds: float
    rounds: int
    seeds: int


FULL = Effort(choosing=True, turn_seconds=9.0, rounds=5, seeds=3)
SHORT = Effort(choosing=False, turn_seconds=3.0, rounds=2, seeds=1)
ROUND_FACTORS = {"reference": 2}
"""Factors of the number of rounds: any recipe learns the most in its first seconds, and its worth shows after them."""


class Contest(NamedTuple):
    """A part of the benchmark, with its title and its sides."""

    title: str
    sides: Sequence[Sequence[Candidate]]
    """Ways to train to choose from, for each side; ours comes last."""


def main() -> None:
    restart_as_commands_run()
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--part", choices=tuple(PARTS), help="default: all")
    parser.add_argument("--chosen", action="store_true", help="take what was chosen before")
    parser.add_argument("--short", action="store_true", help="in a minute and a half, nothing chosen")
    parser.add_argument("--seconds", type=positive(float), help="of a turn")
    parser.add_argument("--rounds", type=positive(int), help="turns of each training, 2 or more")
    parser.add_argument("--seeds", type=positive(int), help="trainings of each side")
    options, words = parser.parse_known_args()
    if options.rounds == 1:
        parser.error("--rounds must be 2 or more: the first turn does not count for the speed")
    flags = {"turn_seconds": options.seconds, "rounds": options.rounds, "seeds": options.seeds}
    changes: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    changes |= {"choosing": False} if options.chosen else {}
    usual = SHORT if options.short else FULL
    efforts = {}
    for part in [options.part] if options.part else PARTS:
        effort = usual._replace(rounds=usual.rounds * ROUND_FACTORS.get(part, 1))
        efforts[part] = effort._replace(**changes)
    print(json.dumps(run(efforts, words)))


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parsed(word: str) -> float:
        value = kind(word)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be above 0, got {word}")
        return value

    return parsed


def run(efforts: Mapping[str, Effort], words: Sequence[str] = ()) -> dict[str, Any]:
    """Run parts with an effort each; `words` are flags of the model."""
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


# --- The parts --------------------------------------------------------------------------------------------------------


def grid(side: str, batches: Sequence[int], choosing: bool) -> list[tuple[float, int]]:
    """Return the rates and batches to choose from."""
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
    wheel = find_wheel(Path(sys.prefix))
    moses, molecules = load_moses(wheel), read_molecules(wheel, MOLECULES)
    for split, texts in molecules._asdict().items():
        write_split(directory, split, "smiles", pa.array(texts))
    flags = (*MOLECULES_MODEL, "--tokenizer", "characters", *words)
    return Contest(
        "Molecules: time to the ELBO that MOSES' VAE reaches",
        [
            [moses_vae(moses, molecules, *setting) for setting in grid("moses", MOSES_BATCHES, choosing)],
            [optimized(directory, flags, *setting) for setting in grid("molecules", MOLECULE_BATCHES, choosing)],
        ],
    )


def hf_part(directory: Path, words: Sequence[str], choosing: bool) -> Contest:
    """Prepare the part of Hugging Face; ours is as it was chosen before, which the reference's part does."""
    data, flags = write_demo_tokens(directory), (*TOKENS_MODEL, *words)
    dtypes = [torch.float32, torch.bfloat16] if choosing else [torch.bfloat16]
    return Contest(
        "Tokens: time to the ELBO that Hugging Face datasets with a bare loop reach",
        [
            *([hugging_face(data, flags, rate, dtype) for rate, _ in grid("hf", (0,), choosing)] for dtype in dtypes),
            [optimized(data, flags, *CHOSEN["optimized"])],
        ],
    )


PARTS: dict[str, Callable[[Path, Sequence[str], bool], Contest]] = {
    "reference": reference_part,
    "moses": moses_part,
    "hf": hf_part,
}
"""The parts; each takes a directory for its data, flags, and whether there is a choice."""


# --- Trainings in turns, and their curves -----------------------------------------------------------------------------


class Point(NamedTuple):
    """A point on the curve of a training."""

    seconds: float
    tokens: float
    elbo: float


Curve = Sequence[Point]


class Trial(NamedTuple):
    """The result of a candidate before the race, in as much time as the race takes."""

    candidate: Candidate
    curve: Curve
    seconds: float
    """Seconds to the target; infinite where it was not reached, or where the trials are to find it."""


def race(
    candidates: Sequence[Candidate], seeds: Sequence[int], turn_seconds: float, rounds: int
) -> tuple[list[list[Curve]], list[int]]:
    """Train each candidate with each seed, in turns of equal time.

    Return the smoothed curves by candidate and seed, and the number of parameters of each candidate. Validating is not counted.
    """
    with ExitStack() as stack:

        def start(candidate: Candidate, seed: int) -> tuple[Trainee, list[Point]]:
            trainee = candidate.start(seed)
            stack.callback(trainee.close)
            return trainee, []

        trainings = [[start(candidate, seed) for seed in seeds] for candidate in candidates]
        for _ in range(rounds):
            for trainee, curve in [training for of_seed in zip(*trainings, strict=True) for training in of_seed]:
                if not curve:
                    curve.append(Point(0.0, 0, trainee.validate()))
                for _ in range(LOOKS):
                    seconds, tokens = trainee.train(turn_seconds / LOOKS)
                    curve.append(Point(curve[-1].seconds + seconds, curve[-1].tokens + tokens, trainee.validate()))
        parameters = [of_candidate[0][0].parameters for of_candidate in trainings]
        return [[smoothed(curve) for _, curve in of_candidate] for of_candidate in trainings], parameters


def try_all(candidates: Sequence[Candidate], effort: Effort, target: float | None = None) -> list[Trial]:
    """Try candidates in turns, the best first: what reaches the target soonest, then what comes closest to it.

    Without a target, what reaches the best ELBO.
    """
    curves, _ = race(candidates, [CHOOSING_SEED], effort.turn_seconds, effort.rounds)
    trials = [
        Trial(candidate, curve, math.inf if target is None else seconds_to(curve, target))
        for candidate, (curve,) in zip(candidates, curves, strict=True)
    ]
    return sorted(trials, key=lambda trial: (trial.seconds, -best_elbo(trial.curve)))


def best_elbo(curve: Curve) -> float:
    return max((point.elbo for point in curve if math.isfinite(point.elbo)), default=-math.inf)


def smoothed(curve: Curve, looks: int = LOOKS) -> list[Point]:
    """Return means of all numbers over this many points in a row: one lucky validation does not count.

    An ELBO rises ever more slowly, so its mean over some time lies below what it is in the middle of it.

    >>> smoothed([Point(0, 0, -90.0), Point(1, 9, -50.0), Point(2, 18, -60.0)], 2)[1]
    Point(seconds=1.5, tokens=13.5, elbo=-55.0)
    """
    return [Point(*map(mean, zip(*curve[end - looks : end], strict=True))) for end in range(looks, len(curve) + 1)]


def seconds_to(curve: Curve, elbo: float) -> float:
    """Return the seconds until the ELBO was first reached, on a straight line between two validations; infinite: never.

    A curve that rises ever more slowly lies above that line, so that where validations are far apart the answer is rather too
    late than too early.

    >>> seconds_to([Point(0, 0, -90.0), Point(10, 0, -50.0), Point(20, 0, -40.0)], -45.0)
    15.0
    """
    if curve[0].elbo >= elbo:
        return curve[0].seconds
    for before, after in pairwise(curve):
        if after.elbo >= elbo:
            return before.seconds + (after.seconds - before.seconds) * (elbo - before.elbo) / (after.elbo - before.elbo)
    return math.inf


def tokens_per_second(curve: Curve) -> float:
    """Return the speed of a smoothed curve, without the first turn, in which everything is done for the first time."""
    first, last = curve[LOOKS], curve[-1]
    return (last.tokens - first.tokens) / (last.seconds - first.seconds)


# --- Contest and report -----------------------------------------------------------------------------------------------


def run_contest(contest: Contest, effort: Effort) -> dict[str, Any]:
    chosen = [candidates[0] for candidates in contest.sides]
    tables: list[list[dict[str, Any]]] = []
    if effort.choosing:
        *others, ours = contest.sides
        trials = [try_all(candidates, effort) for candidates in others]
        if len(ours) > 1:
            trials.append(try_all(ours, effort, max(best_elbo(of_side[0].curve) for of_side in trials)))
        chosen[: len(trials)] = [of_side[0].candidate for of_side in trials]
        tables = [report_choice(of_side) for of_side in trials]
    curves, parameters = race(chosen, range(effort.seeds), effort.turn_seconds, effort.rounds)
    sides = [Side(*facts) for facts in zip(chosen, parameters, curves, strict=True)]
    return {"rows": report_race(contest.title, sides), "chosen_from": tables}


def report_choice(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    rows = [
        {
            "training": trial.candidate.name,
            "rate": trial.candidate.rate,
            "batch": trial.candidate.batch,
            "seconds": round(trial.curve[-1].seconds, 1),
            "tokens/s": round(tokens_per_second(trial.curve)),
            "best ELBO": round(best_elbo(trial.curve), 2),
            "at the target after s": round(trial.seconds, 1) if math.isfinite(trial.seconds) else "",
        }
        for trial in trials
    ]
    print_table(f"{trials[0].candidate.name}: the first one is taken", rows)
    return rows


class Side(NamedTuple):
    """The results of one way to train, with each seed."""

    candidate: Candidate
    parameters: int
    curves: Sequence[Curve]


class Comparison(NamedTuple):
    """A side beside ours, seed by seed."""

    targets: list[float]
    """The best ELBO of the other side."""
    theirs: list[float]
    """Seconds of the other side to each target."""
    ours: list[float]
    """Our seconds to each target; infinite where it was not reached."""

    @property
    def ratios(self) -> list[float]:
        """Time of the other side / ours; 0 where ours did not reach the target."""
        return [their / our for their, our in zip(self.theirs, self.ours, strict=True)]


def compare(theirs: Sequence[Curve], ours: Sequence[Curve]) -> Comparison:
    targets = [best_elbo(curve) for curve in theirs]
    return Comparison(targets, list(map(seconds_to, theirs, targets)), list(map(seconds_to, ours, targets)))


def report_race(title: str, sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Return the rows of all sides; ours comes last, and the others are compared with it."""
    rows: list[dict[str, Any]] = []
    ours = sides[-1]
    for side in sides:
        speeds = [tokens_per_second(curve) for curve in side.curves]
        row: dict[str, Any] = {
            "training": side.candidate.name,
            "rate": side.candidate.rate,
            "batch": side.candidate.batch,
            "M parameters": round(side.parameters / 1e6, 2),
            "seeds": len(side.curves),
            "tokens/s": round(median(speeds)),
            "spread": spread(speeds),
            "ELBO at the end": round(median([curve[-1].elbo for curve in side.curves]), 2),
        }
        if side is ours:
            rows.append(dict.fromkeys(rows[0], "") | row)
            continue
        targets, theirs, our_seconds = found = compare(side.curves, ours.curves)
        speed_ratios = [tokens_per_second(our) / speed for our, speed in zip(ours.curves, speeds, strict=True)]
        after = median(our_seconds)
        rows.append(
            row
            | {
                "best ELBO": round(median(targets), 2),
                "after s": round(median(theirs), 1),
                "train_optimized.py after s": round(after, 1) if math.isfinite(after) else "never",
                "times as long": round(median(found.ratios), 2),
                "from-to": f"{min(found.ratios):.2f}-{max(found.ratios):.2f}",
                "tokens/s, ratio": round(median(speed_ratios), 2),
            }
        )
    print_table(title, rows)
    print(f"\n  validation ELBO by seconds of training, means of {LOOKS} in a row, first seed")
    for side in sides:
        points = "  ".join(f"{point.seconds:.0f}:{point.elbo:.1f}" for point in side.curves[0])
        print(f"  {side.candidate.name}  {points}")
    return rows


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
