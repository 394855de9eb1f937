"""What each measure brings: from a plain training to the recommended one, measure by measure, and the recommended one without each.

    python -m benchmarks.speed.ablation [--short] [--kind tokens|vectors|events] [--rounds 5] [--sequences 40000]

Takes the flags of train_optimized.py for the model, too (default: width 256, depth 3). All variants are real runs with the same
seed and the same model, take turns, and differ in nothing but the measure. Tokens: generated, log-normal lengths (mean 75),
vocabulary 5,000. Events: physionet2012 below SEQVAE_REAL_DATA, or generated; vectors: generated. A token is one step of a
sequence, padding not counted; speeds are those of whole epochs, validations included. A dash: the measure makes no difference
there, because a later one takes its place or the data give no cause for it. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

from benchmarks.generated import write_token_lists
from benchmarks.measure import machine, print_table
from benchmarks.speed.ablation_loading import write_source
from benchmarks.speed.ablation_measures import (
    COMPILED,
    MAIN,
    MEASURES,
    Goal,
    Measure,
    Variant,
    ladder,
    plain_variant,
    without,
)
from benchmarks.speed.ablation_turns import Measured, Turns, measure_variants
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.console import share_machine
from seqvae.data.dataset import LONGEST
from seqvae.data.demo.write import write_demo
from seqvae.data.description import Kind
from seqvae.errors import run_command
from seqvae.training.fit import make_data

PROG = "benchmarks.speed.ablation"
MODEL = ("--width", "256", "--depth", "3")
SEQUENCES: dict[Kind, int] = {"tokens": 40_000, "vectors": 20_000, "events": 4_000}
MEAN_LENGTH, LONGEST_TOKENS = 75, 4000
VOCABULARY = 5000
PHYSIONET = "physionet2012"
SHORT_TURNS = Turns(rounds=3, seconds=0.5, warm_up_seconds=1.0, together=9)
NOT_APPLICABLE = "-"


class Question(NamedTuple):
    """What is to be compared, for one kind of sequence."""

    plain: Variant
    measures: Sequence[Measure]
    rungs: list[Variant]
    """The plain variant with the measures up to each."""
    lacking: list[Variant]
    """The recommended recipe without each."""
    compiled: Variant | None
    reference: Variant

    @property
    def recommended(self) -> Variant:
        return self.rungs[-1]

    @property
    def variants(self) -> list[Variant]:
        """Neighbours in the ladder are neighbours here."""
        compiled = [self.compiled] if self.compiled else []
        return [self.reference, self.plain, *self.rungs, *compiled, *self.lacking]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--short", action="store_true", help="tokens alone, and the main measures")
    parser.add_argument("--kind", choices=get_args(Kind), help="default: all three")
    parser.add_argument("--rounds", type=int, help="turns of each variant")
    parser.add_argument("--sequences", type=int, help="of the generated data")
    options, words = parser.parse_known_args()
    kinds: list[Kind] = [options.kind] if options.kind else ["tokens"] if options.short else list(SEQUENCES)
    turns = SHORT_TURNS if options.short else Turns()
    turns = turns._replace(rounds=options.rounds or turns.rounds)
    share_machine()  # of the processes that are started here
    print(json.dumps(run(kinds, words, turns, short=options.short, sequences=options.sequences)))


def run(
    kinds: Sequence[Kind], words: Sequence[str], turns: Turns, *, short: bool, sequences: int | None = None
) -> dict[str, Any]:
    tables: dict[str, list[dict[str, Any]]] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="seqvae-bench-") as folder:
            tables[kind] = run_kind(kind, Path(folder), sequences or SEQUENCES[kind], words, turns, short=short)
        print_table(f"{kind}: each measure on top of those above it, and the whole without it", tables[kind])
    return {
        "benchmark": "ablation",
        "machine": machine(),
        "command": " ".join([f"python -m {PROG}", *sys.argv[1:]]),
        "data": f"events of {PHYSIONET}" if "events" in kinds and real_events() else "generated data",
        **tables,
    }


def run_kind(
    kind: Kind, directory: Path, sequences: int, words: Sequence[str], turns: Turns, *, short: bool
) -> list[dict[str, Any]]:
    flags = [*write_data(kind, directory, sequences), "--cache_dir", str(directory / "cache"), *MODEL, *words]
    reference = parse_command_line(ReferenceSettings, flags, prog=PROG, description=__doc__ or "")
    recommended = parse_command_line(
        OptimizedSettings, ["--fast_detection", *flags], prog=PROG, description=__doc__ or ""
    )
    source = directory / "source"
    question = question_of(reference, recommended, source, short=short)
    return rows_of(question, measure_variants(question.variants, question.recommended, source, turns))


def write_data(kind: Kind, directory: Path, sequences: int) -> list[str]:
    """The flags with which a command finds them."""
    if kind == "tokens":
        write_token_lists(directory / "tokens" / "all.parquet", sequences, VOCABULARY, longest=LONGEST_TOKENS)
        return ["--data_dir", str(directory / "tokens"), "--vocabulary_size", str(VOCABULARY)]
    if kind == "events" and (real := real_events()):
        return ["--data_dir", real]
    return ["--data_dir", str(write_demo(directory, kind, sequences=sequences, mean_length=MEAN_LENGTH))]


def real_events() -> str | None:
    """Their directory, where the environment names one."""
    folder = os.environ.get("SEQVAE_REAL_DATA")
    return str(Path(folder) / PHYSIONET) if folder else None


def question_of(reference: TrainingSettings, recommended: TrainingSettings, source: Path, *, short: bool) -> Question:
    """Looks at the data, and writes them to `source`, from where the plain variant reads them."""
    uncapped = make_data(replace(recommended, lengths=replace(recommended.lengths, max_sequence_length=LONGEST)))
    write_source(uncapped.data, source)
    longest = int(uncapped.split("train").lengths_N.max())
    goal = Goal(recommended, max(longest, make_data(recommended).limits.tokens_per_batch))
    plain = plain_variant(reference, longest=longest, has_values=uncapped.description.kind != "tokens")
    taken = [measure for measure in MEASURES if not short or measure.name in MAIN]
    plain = ladder(plain, [measure for measure in MEASURES if measure not in taken], goal)[-1]
    rungs = ladder(plain, taken, goal)
    return Question(
        plain=plain,
        measures=taken,
        rungs=rungs[1:],
        lacking=[without(plain, taken, goal, measure) for measure in taken],
        compiled=None if short else COMPILED.apply(rungs[-1], goal),
        reference=Variant(reference, closest_watch=True, from_parquet=False, normalise=False),
    )


def rows_of(question: Question, measured: Mapping[Variant, Measured]) -> list[dict[str, Any]]:
    """One for each measure, those that are compared with it around them."""
    plain, whole, compiled = question.plain, question.recommended, question.compiled

    def row(
        name: str, variant: Variant, before: Variant | None = None, lacking: Variant | None = None
    ) -> dict[str, Any]:
        mine = measured[variant]
        return {
            "measure": name,
            "real tokens/s": round(mine.rate),
            "spread": mine.spread,
            "times the plain": times(mine.rate, measured[plain].rate),
            "gain by adding": times(mine.rate, measured[before].rate) if before else NOT_APPLICABLE,
            "lost by removing": times(measured[whole].rate, measured[lacking].rate) if lacking else NOT_APPLICABLE,
            "peak GiB": round(mine.peak_gib, 2),
            "without it": round(measured[lacking].peak_gib, 2) if lacking else NOT_APPLICABLE,
        }

    rows = [row("(plain)" if compiled else "(all but these)", plain)]
    steps = zip(question.measures, pairwise([plain, *question.rungs]), question.lacking, strict=True)
    for measure, (before, after), lacking in steps:
        added, needed = after != before, lacking != whole
        rows.append(row(f"+ {measure.name}", after, before if added else None, lacking if needed else None))
    rows.append(row("= train_optimized.py --fast_detection", whole))
    if compiled:
        rows.append(row(f"+ {COMPILED.name}", compiled, before=whole))
    return [*rows, row("train_with_collapse_detection.py", question.reference)]


def times(one: float, other: float) -> float:
    return round(one / other, 2)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
