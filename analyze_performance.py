"""Say where a training step's time goes, how near that is to what this machine can do, and what to change.

    python analyze_performance.py --data_dir my_data                                 # as train_optimized.py would train
    python analyze_performance.py --command reference --data_dir my_data             # as train_with_collapse_detection.py would
    python analyze_performance.py --compare reference,optimized --data_dir my_data   # both, taking turns
    python analyze_performance.py --advise --data_dir my_data                        # try changes, and measure each
    python analyze_performance.py --find_batch --memory_limit 6GB                    # the largest --tokens_per_batch that fits

All flags of the training commands mean here what they mean there: the runs that they would start are started, measured and
thrown away.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import train_optimized
import train_with_collapse_detection
from seqvae.cli.command_line import parse_command_line
from seqvae.config.flags import values_of
from seqvae.config.profiling import MeasuringSettings
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.config.yaml_files import to_flat_dict
from seqvae.console import set_up_output, share_machine
from seqvae.errors import UsageError, harmless, run_command

if TYPE_CHECKING:
    from lightning import Callback

    from seqvae.data.datamodule import SequenceDataModule
    from seqvae.profiling.contestant import Recipe
    from seqvae.text import Ink

PROG = "analyze_performance.py"
NUMBERS, FIGURE, TRACE = "analysis.json", "analysis.png", "trace{}.json"


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptimized(OptimizedSettings):
    """The recommended recipe, and what to measure of it."""

    measuring: MeasuringSettings = field(default_factory=MeasuringSettings)


@dataclass(frozen=True, kw_only=True)
class AnalyzeReference(ReferenceSettings):
    """The plain recipe, and what to measure of it."""

    measuring: MeasuringSettings = field(default_factory=partial(MeasuringSettings, command="reference"))


Asked = AnalyzeOptimized | AnalyzeReference


class Command(NamedTuple):
    """A training command, as it is measured."""

    prog: str
    schema: type[Asked]
    settings: type[TrainingSettings]
    callbacks: "Callable[[Any], list[Callback]]"


COMMANDS = {
    "optimized": Command(train_optimized.PROG, AnalyzeOptimized, OptimizedSettings, train_optimized.callbacks),
    "reference": Command(
        train_with_collapse_detection.PROG, AnalyzeReference, ReferenceSettings, train_with_collapse_detection.callbacks
    ),
}


def main() -> None:
    asked = read_settings(sys.argv[1:])
    share_machine()

    from seqvae.profiling.contestant import Recipe  # only now: torch and Lightning take seconds, which --help must not
    from seqvae.text import ink_for
    from seqvae.training.fit import make_data

    set_up_output()
    recipes = [Recipe(name, training_settings(name, one), COMMANDS[name].callbacks) for name, one in asked.items()]
    data = make_data(recipes[0].settings)
    for line in data.summary()[:3]:  # builds the cache, where there is none
        say(line)
    ink = ink_for(sys.stdout, os.environ)
    measuring = next(iter(asked.values())).measuring
    place = new_directory(measuring.output, recipes[0].settings.run.output_dir, data.description.kind)
    with place as directory:
        measure = find_batch if measuring.find_batch else analyse
        content = measure(recipes, measuring, directory, data, ink)
        write_numbers(directory / NUMBERS, asked, data, content)
        if measuring.advise:
            content["advice"] = advise(recipes[0], ink)
            write_numbers(directory / NUMBERS, asked, data, content)
        print(f"\nfiles: {harmless(', '.join(str(path) for path in sorted(directory.iterdir())))}")


# --- What the user typed -----------------------------------------------------------------------------------------------


def read_settings(words: Sequence[str]) -> dict[str, Asked]:
    """Of each command to measure: --command and --compare say whose defaults stand below all else that was given."""
    parse = partial(parse_command_line, prog=PROG, description=__doc__ or "")
    controls = {word.lstrip("-").replace("-", "_"): word for word in words if word.startswith("-")}
    if not controls.keys().isdisjoint({"help", "h", "version"}):
        parse(AnalyzeOptimized, words)  # prints and leaves
    settings = [word for word in words if word != controls.get("print_config")]
    names = parse(AnalyzeOptimized, settings).measuring.names
    return {name: parse(COMMANDS[name].schema, words) for name in names}


def training_settings(name: str, asked: Asked) -> TrainingSettings:
    """What the training command would make of the same flags."""
    groups = values_of(asked)
    del groups["measuring"]
    return COMMANDS[name].settings(**groups)


def training_words(words: Sequence[str]) -> list[str]:
    """What was typed, without what the training commands do not know.

    >>> training_words(["--advise", "--lr", "0.1", "--num-iterations", "20", "--output=x", "--no_trace", "--pin_memory"])
    ['--lr', '0.1', '--pin_memory']
    """
    kept: list[str] = []
    is_ours = False
    for word in words:
        if word.startswith("--"):  # no value does
            is_ours = word[2:].partition("=")[0].replace("-", "_").removeprefix("no_") in values_of(MeasuringSettings())
        if not is_ours:
            kept.append(word)
    return kept


# --- What is asked for -------------------------------------------------------------------------------------------------


def analyse(
    recipes: "Sequence[Recipe]", measuring: MeasuringSettings, directory: Path, data: "SequenceDataModule", ink: "Ink"
) -> dict[str, Any]:
    from seqvae.profiling import analysis
    from seqvae.profiling.bottleneck import bottleneck_of
    from seqvae.reports.performance_figure import write_performance_figure
    from seqvae.reports.performance_numbers import as_dict
    from seqvae.reports.performance_table import performance_page

    effort = analysis.Effort(measuring.num_iterations, measuring.warmup_iterations)
    names = [recipe.name for recipe in recipes]
    suffixes = ["" if len(names) == 1 else f"-{name}" for name in names] if measuring.trace else []
    traces = [directory / TRACE.format(suffix) for suffix in suffixes]
    speeds, comparison = analysis.analyse(recipes, effort, say, traces)
    held_back = [bottleneck_of(speed, recipe.settings) for speed, recipe in zip(speeds, recipes, strict=True)]
    write_performance_figure(directory / FIGURE, speeds, comparison)
    print("\n".join(performance_page(data.summary()[:2], speeds, held_back, comparison, ink)))
    if not measuring.advise:
        print("\n  --advise tries such changes, and measures each.")
    if traces:
        print("\ntrace: open it with https://ui.perfetto.dev, or with Chrome at chrome://tracing")
    return {
        "runs": [as_dict(speed, bottleneck) for speed, bottleneck in zip(speeds, held_back, strict=True)],
        "comparison": None if comparison is None else comparison._asdict(),
    }


def advise(recipe: "Recipe", ink: "Ink") -> dict[str, Any]:
    from seqvae.profiling import advise as trying
    from seqvae.reports.advice_table import advice_lines

    words = training_words(sys.argv[1:])
    advice = trying.advise(recipe, words, prog=COMMANDS[recipe.name].prog, say=say).as_dict()
    print("\n".join(advice_lines(advice, ink)))
    return advice


def find_batch(
    recipes: "Sequence[Recipe]", measuring: MeasuringSettings, directory: Path, data: "SequenceDataModule", ink: "Ink"
) -> dict[str, Any]:
    from seqvae.profiling import find_batch as search

    found = search.find_batch(recipes[0].settings, memory_limit_bytes=measuring.memory_limit_bytes, say=say)
    print("\n".join(search.describe(found, ink)))
    tried = [one._asdict() for one in found.tried]
    return {"found_batch": {**found._asdict(), "tried": tried, "limit": found.limit._asdict()}}


def say(line: str) -> None:
    """What is under way."""
    print(harmless(line), file=sys.stderr, flush=True)


# --- What it leaves behind ---------------------------------------------------------------------------------------------


@contextmanager
def new_directory(given: str | None, output_dir: str, kind: str) -> Iterator[Path]:
    """Made before anything is measured; where nothing comes of it, it is removed again."""
    name = f"analysis-{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    directory = (Path(given) if given else Path(output_dir) / name).expanduser()
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        flag = "--output" if given else "--output_dir"
        raise UsageError(f"{flag}: {error.filename} is no directory") from error
    try:
        yield directory
    except BaseException:
        if is_new:
            with suppress(OSError):  # it holds something
                directory.rmdir()
        raise


def write_numbers(path: Path, asked: dict[str, Asked], data: "SequenceDataModule", content: dict[str, Any]) -> None:
    import torch

    from seqvae.reports.run_files import environment

    everything = {
        "machine": environment(sys.argv, threads=torch.get_num_threads()),
        "data": data.summary(),
        "settings": {name: differences(one) for name, one in asked.items()},
        **content,
    }
    path.write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def differences(asked: Asked) -> dict[str, object]:
    """The settings that are not the command's defaults."""
    defaults = to_flat_dict(type(asked)())
    return {name: value for name, value in to_flat_dict(asked).items() if value != defaults[name]}


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
