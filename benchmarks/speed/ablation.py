"""What each measure brings: from a plain training to the recommended one, measure by measure, and the recommended one without each.

    python -m benchmarks.speed.ablation [--short] [--kind tokens|vectors|events] [--rounds 5] [--sequences 40000]

Takes the flags of train_optimized.py for the model, too (default: width 256, depth 3). All variants are real runs with the same
seed and the same model, take turns, and differ in nothing but the measure. Tokens: generated, log-normal lengths (mean 75),
vocabulary 5,000. Events: physionet2012 below SEQVAE_REAL_DATA, or generated; vectors: generated. A token is one step of a
sequence, padding not counted; speeds are those of whole epochs, validations included. A dash: the measure makes no difference
there, because a later one takes its place or the data give no cause for it. The last line is JSON.

The runs are processes (seqvae/profiling/measured_run.py), of which not all fit into memory at a time: neighbours run in groups, and
one variant runs in all groups. A variant's speed is its ratio to that one in the same group, so that an hour at which the machine
is slower hits both.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

from benchmarks.measure import machine, make_parser, median, print_table, spread, write_token_lists
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
    recipe_of,
    without,
)
from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import LoadingSettings
from seqvae.config.run import ValidationSettings
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.console import share_machine
from seqvae.data.dataset import LONGEST
from seqvae.data.demo import write_demo
from seqvae.data.description import Kind
from seqvae.data.loader import resolve_loading
from seqvae.errors import run_command
from seqvae.profiling.measured_run import Lap, MeasuredRun
from seqvae.training.fit import make_data

PROG = "benchmarks.speed.ablation"
MODEL = ("--width", "256", "--depth", "3")
SEQUENCES: dict[Kind, int] = {"tokens": 40_000, "vectors": 20_000, "events": 4_000}
MEAN_LENGTH, LONGEST_TOKENS = 75, 4000
VOCABULARY = 5000
PHYSIONET = "physionet2012"
NOT_APPLICABLE = "-"
VALIDATED_SHARE, MIN_VALIDATED = 0.01, 2
"""The share and the least number of validation batches that a validation is timed on in each round."""
LEAD_SECONDS = 1.0
"""The most time to use up what a loader prepared during the turns of others, before the clock runs."""


class Turns(NamedTuple):
    """The training time of each variant."""

    rounds: int = 5
    seconds: float = 0.7
    """Training time in each round; at least one optimizer step."""
    warm_up_seconds: float = 2.0
    group_size: int = 5
    """Variants in a group, beside the one that is in all of them; a run of width 256 takes 1 to 2 GiB."""


SHORT_TURNS = Turns(rounds=3, seconds=0.5, warm_up_seconds=1.0, group_size=9)


class Measured(NamedTuple):
    """The speed and the memory of a variant."""

    rate: float
    """Real tokens per second over a whole epoch with its validations."""
    spread: str
    """Spread of the ratios to the common variant, from round to round."""
    peak_gib: float
    """Peak memory of the training process, without worker processes."""


class Comparison(NamedTuple):
    """The variants that are compared for one kind of sequence."""

    plain: Variant
    measures: Sequence[Measure]
    rungs: list[Variant]
    """The plain variant with the measures up to each."""
    lacking: list[Variant]
    """The recommended recipe without each measure."""
    compiled: Variant | None
    reference: Variant

    @property
    def recommended(self) -> Variant:
        return self.rungs[-1]

    @property
    def variants(self) -> list[Variant]:
        """All variants; neighbours in the ladder are neighbours here."""
        compiled = [self.compiled] if self.compiled else []
        return [self.reference, self.plain, *self.rungs, *compiled, *self.lacking]


def main() -> None:
    parser = make_parser(PROG, __doc__)
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
            source = Path(folder) / "source"
            flags = write_data(kind, Path(folder), sequences or SEQUENCES[kind])
            flags += ["--cache_dir", f"{folder}/cache", *MODEL, *words]
            reference = parse_command_line(ReferenceSettings, flags, prog=PROG, description=__doc__ or "")
            flags = ["--fast_detection", *flags]
            recommended = parse_command_line(OptimizedSettings, flags, prog=PROG, description=__doc__ or "")
            comparison = prepare(reference, recommended, source, short=short)
            measured = measure_variants(comparison.variants, comparison.recommended, source, turns)
        tables[kind] = rows_of(comparison, measured)
        print_table(f"{kind}: each measure on top of those above it, and the whole without it", tables[kind])
    return {
        "benchmark": "ablation",
        "machine": machine(),
        "data": f"events of {PHYSIONET}" if "events" in kinds and real_events() else "generated data",
        **tables,
    }


def write_data(kind: Kind, directory: Path, sequences: int) -> list[str]:
    """Write the data where none are on disk, and return the flags that name them."""
    if kind == "tokens":
        write_token_lists(directory / "tokens" / "all.parquet", sequences, VOCABULARY, longest=LONGEST_TOKENS)
        return ["--data_dir", str(directory / "tokens"), "--vocabulary_size", str(VOCABULARY)]
    if kind == "events" and (real := real_events()):
        return ["--data_dir", real]
    return ["--data_dir", str(write_demo(directory, kind, sequences=sequences, mean_length=MEAN_LENGTH))]


def real_events() -> str | None:
    folder = os.environ.get("SEQVAE_REAL_DATA")
    return str(Path(folder) / PHYSIONET) if folder else None


def prepare(reference: TrainingSettings, recommended: TrainingSettings, source: Path, *, short: bool) -> Comparison:
    """Read the data, and write them to `source`, from where the plain variant reads them."""
    uncapped = make_data(replace(recommended, lengths=replace(recommended.lengths, max_sequence_length=LONGEST)))
    write_source(uncapped.data, source)
    longest = int(uncapped.split("train").lengths_N.max())
    goal = Goal(recommended, max(longest, make_data(recommended).limits.tokens_per_batch))
    plain = plain_variant(reference, longest=longest, has_values=uncapped.description.kind != "tokens")
    measures = [measure for measure in MEASURES if not short or measure.name in MAIN]
    plain = ladder(plain, [measure for measure in MEASURES if measure not in measures], goal)[-1]
    rungs = ladder(plain, measures, goal)
    return Comparison(
        plain=plain,
        measures=measures,
        rungs=rungs[1:],
        lacking=[without(plain, measures, goal, measure) for measure in measures],
        compiled=None if short else COMPILED.apply(rungs[-1], goal),
        reference=Variant(reference, closest_watch=True, from_parquet=False, normalise=False),
    )


def rows_of(comparison: Comparison, measured: Mapping[Variant, Measured]) -> list[dict[str, Any]]:
    """Return a row for each measure, with the variants that it is compared with around them."""
    plain, whole, compiled = comparison.plain, comparison.recommended, comparison.compiled

    def times(variant: Variant, base: Variant) -> float:
        return round(measured[variant].rate / measured[base].rate, 2)

    def row(
        name: str, variant: Variant, before: Variant | None = None, lacking: Variant | None = None
    ) -> dict[str, Any]:
        return {
            "measure": name,
            "real tokens/s": round(measured[variant].rate),
            "spread": measured[variant].spread,
            "times the plain": times(variant, plain),
            "gain by adding": times(variant, before) if before else NOT_APPLICABLE,
            "lost by removing": times(whole, lacking) if lacking else NOT_APPLICABLE,
            "peak GiB": round(measured[variant].peak_gib, 2),
            "without it": round(measured[lacking].peak_gib, 2) if lacking else NOT_APPLICABLE,
        }

    rows = [row("(plain)" if compiled else "(all but these)", plain)]
    steps = zip(comparison.measures, pairwise([plain, *comparison.rungs]), comparison.lacking, strict=True)
    for measure, (before, after), lacking in steps:
        added, needed = after != before, lacking != whole
        rows.append(row(f"+ {measure.name}", after, before if added else None, lacking if needed else None))
    rows.append(row("= train_optimized.py --fast_detection", whole))
    if compiled:
        rows.append(row(f"+ {COMPILED.name}", compiled, before=whole))
    return [*rows, row("train_with_collapse_detection.py", comparison.reference)]


# --- In turns ---------------------------------------------------------------------------------------------------------


class ValidationSample(NamedTuple):
    """The part of the validation data that a validation is timed on."""

    batches: int
    """The most that it may come to."""
    share: float
    """Its share of all tokens there are to validate on."""


class Timed(NamedTuple):
    """One variant in one group."""

    laps: list[Lap]
    validation_seconds: float
    """Seconds of all validations of an epoch."""
    tokens: float
    """Tokens of an epoch."""

    def rate(self, laps: Sequence[Lap]) -> float:
        training = sum(lap.seconds for lap in laps) / sum(lap.real_steps for lap in laps)
        return 1 / (training + self.validation_seconds / self.tokens)


def measure_variants(
    variants: Sequence[Variant], common: Variant, source: Path, turns: Turns
) -> dict[Variant, Measured]:
    """Measure all variants in groups, with the common one in each; `source` is where `write_source` wrote."""
    others = [variant for variant in dict.fromkeys(variants) if variant != common]
    groups = [others[begin : begin + turns.group_size] for begin in range(0, len(others), turns.group_size)]
    timed = [time_group([common, *group], source, turns) for group in groups or [[]]]
    rate = median([group[common].rate(group[common].laps) for group in timed])
    measured = {}
    for group in timed:
        base = group[common]
        for variant, one in group.items():
            ratios = [one.rate([lap]) / base.rate([other]) for lap, other in zip(one.laps, base.laps, strict=True)]
            peak = max(lap.peak_memory_gib for lap in one.laps)
            measured[variant] = Measured(rate * one.rate(one.laps) / base.rate(base.laps), spread(ratios), peak)
    own_rates = [group[common].rate([lap]) for group in timed for lap in group[common].laps]
    peak = max(lap.peak_memory_gib for group in timed for lap in group[common].laps)
    return measured | {common: Measured(rate, spread(own_rates), peak)}


def time_group(variants: Sequence[Variant], source: Path, turns: Turns) -> dict[Variant, Timed]:
    """Start all together, let each warm up, then let them take turns."""
    samples = {variant: validation_sample(variant.settings) for variant in variants}
    laps: dict[Variant, list[Lap]] = {variant: [] for variant in variants}
    validations: dict[Variant, list[float]] = {variant: [] for variant in variants}
    with ExitStack() as stack:
        runs = {
            variant: stack.enter_context(MeasuredRun(recipe_of(variant, samples[variant].batches, source)))
            for variant in variants
        }
        lead = {}
        for variant, run in runs.items():
            warm_up = run.turn(steps=2, seconds=turns.warm_up_seconds, lead_steps=0)
            lead[variant] = lead_steps(variant.settings, warm_up.seconds / warm_up.steps)
            run.validate()
        for _ in range(turns.rounds):
            for variant, run in runs.items():
                laps[variant].append(run.turn(seconds=turns.seconds, lead_steps=lead[variant]))
                validations[variant].append(run.validate().seconds)
        plans = {variant: run.ready.plan for variant, run in runs.items()}
    return {
        variant: Timed(
            laps[variant],
            validation_seconds(median(validations[variant]), variant.settings.validation, samples[variant]),
            plan.tokens_per_step * plan.steps_per_epoch,
        )
        for variant, plan in plans.items()
    }


def lead_steps(settings: TrainingSettings, step_seconds: float) -> int:
    """Return the steps that use up what a loader prepared during the turns of others."""
    loading = resolve_loading(settings.loading)
    ready = loading.workers * loading.prefetch_factor / settings.optimizer.gradient_accumulation_steps
    return min(math.ceil(ready), int(LEAD_SECONDS / step_seconds))


def validation_sample(settings: TrainingSettings) -> ValidationSample:
    data = make_data(replace(settings, loading=LoadingSettings(num_workers=0)))
    data.limit_val_batches = 1.0
    every = len(data.val_dataloader())
    data.limit_val_batches = min(every, max(MIN_VALIDATED, round(every * VALIDATED_SHARE)))
    tokens = sum(int(batch.lengths_B.sum()) for batch in data.val_dataloader())
    return ValidationSample(data.limit_val_batches, tokens / int(data.split("valid").lengths_N.sum()))


def validation_seconds(seconds: float, settings: ValidationSettings, sample: ValidationSample) -> float:
    """Return the seconds of an epoch's validations, as often and on as much as the settings say."""
    assert isinstance(settings.val_check_interval, float)
    assert isinstance(settings.limit_val_batches, float)
    return seconds / sample.share * settings.limit_val_batches / settings.val_check_interval


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
