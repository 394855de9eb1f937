"""`seqvae profile`: where a training step's time goes. The flags of a training in; a table, figures and numbers out."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqvae.cli.command_line import parse_command_line
from seqvae.config.flags import without_flags
from seqvae.config.profiling import MeasuringSettings
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.config.yaml_files import to_flat_dict, values_of
from seqvae.console import program, say, set_up_output, share_machine
from seqvae.errors import UsageError, harmless
from seqvae.files import replace_file

if TYPE_CHECKING:
    from seqvae.data.datamodule import SequenceDataModule
    from seqvae.profiling.measured_run import Recipe
    from seqvae.reports.terminal import Ink

NUMBERS, FIGURE, TRACE = "analysis.json", "analysis.png", "trace{}.json"
DESCRIPTION = """Say where a training step's time goes, how near that is to what this machine can do, and what to change.

    seqvae profile --data_dir my_data                                 # as `seqvae train` would train
    seqvae profile --command reference --data_dir my_data             # as `seqvae train --plain` would
    seqvae profile --compare reference,optimized --data_dir my_data   # both, taking turns
    seqvae profile --advise --data_dir my_data                        # try changes, and measure each
    seqvae profile --find_batch --memory_limit 6GB                    # the largest --tokens_per_batch that fits

All flags of the training commands mean here what they mean there: the runs that they would start are started, measured and
thrown away.
"""


@dataclass(frozen=True, kw_only=True)
class ProfileOptimized(OptimizedSettings):
    """The recommended recipe, and what to measure of it."""

    measuring: MeasuringSettings = field(default_factory=MeasuringSettings)


@dataclass(frozen=True, kw_only=True)
class ProfileReference(ReferenceSettings):
    """The plain recipe, and what to measure of it."""

    measuring: MeasuringSettings = field(default_factory=partial(MeasuringSettings, command="reference"))


ProfileSettings = ProfileOptimized | ProfileReference
SCHEMAS: dict[str, type[ProfileSettings]] = {"optimized": ProfileOptimized, "reference": ProfileReference}
RECIPES: dict[str, type[TrainingSettings]] = {"optimized": OptimizedSettings, "reference": ReferenceSettings}


def run(verb: str, words: Sequence[str]) -> None:
    found = read_settings(words)
    share_machine()

    # Only now: torch and Lightning take seconds, which --help must not.
    from seqvae.profiling.measured_run import Recipe
    from seqvae.reports.terminal import ink_for
    from seqvae.training.fit import make_data, make_monitors

    set_up_output()
    recipes = [Recipe(name, training_settings(name, one), make_monitors) for name, one in found.items()]
    data = make_data(recipes[0].settings)
    for line in data.summary()[:3]:  # builds the cache, where there is none
        say(line)
    ink = ink_for(sys.stdout, os.environ)
    measuring = next(iter(found.values())).measuring
    with _new_directory(measuring.output, recipes[0].settings.run.output_dir, data.description.kind) as directory:
        if measuring.find_batch:
            content = _find_batch(recipes[0], measuring, ink)
        else:
            content = _analyse(recipes, measuring, directory, data, ink)
        _write_numbers(directory / NUMBERS, found, data, content)
        if measuring.advise:
            content["advice"] = advise(recipes[0], words, ink)
            _write_numbers(directory / NUMBERS, found, data, content)
        print(f"\nfiles: {harmless(', '.join(str(path) for path in sorted(directory.iterdir())))}")


def read_settings(words: Sequence[str]) -> dict[str, ProfileSettings]:
    """Return the settings of each command to measure: --command and --compare say whose defaults stand below the flags."""
    prog = program().removeprefix("python -m ").removeprefix("python ")
    parse = partial(parse_command_line, prog=prog, description=DESCRIPTION)
    controls = {word.lstrip("-").replace("-", "_"): word for word in words if word.startswith("-")}
    if not controls.keys().isdisjoint({"help", "h", "version"}):
        parse(ProfileOptimized, words)  # prints and ends the process
    settings = [word for word in words if word != controls.get("print_config")]
    names = parse(ProfileOptimized, settings).measuring.names
    return {name: parse(SCHEMAS[name], words) for name in names}


def training_settings(name: str, settings: ProfileSettings) -> TrainingSettings:
    """Return what the training command would make of the same flags."""
    groups = values_of(settings)
    del groups["measuring"]
    return RECIPES[name](**groups)


def _analyse(
    recipes: "Sequence[Recipe]", measuring: MeasuringSettings, directory: Path, data: "SequenceDataModule", ink: "Ink"
) -> dict[str, Any]:
    from seqvae.profiling.analysis import analyse, bottleneck_of
    from seqvae.reports.profile_report import as_dict, performance_page, write_performance_figure

    names = [recipe.name for recipe in recipes]
    suffixes = ["" if len(names) == 1 else f"-{name}" for name in names] if measuring.trace else []
    traces = [directory / TRACE.format(suffix) for suffix in suffixes]
    speeds, comparison = analyse(recipes, measuring, say, traces)
    bottlenecks = [bottleneck_of(speed, recipe.settings) for speed, recipe in zip(speeds, recipes, strict=True)]
    write_performance_figure(directory / FIGURE, speeds, comparison)
    print("\n".join(performance_page(data.summary()[:2], speeds, bottlenecks, comparison, ink)))
    if not measuring.advise:
        print("\n  --advise tries such changes, and measures each.")
    if traces:
        print("\ntrace: open it with https://ui.perfetto.dev, or with Chrome at chrome://tracing")
    return {
        "runs": [as_dict(speed, bottleneck) for speed, bottleneck in zip(speeds, bottlenecks, strict=True)],
        "comparison": None if comparison is None else comparison._asdict(),
    }


def advise(recipe: "Recipe", words: Sequence[str], ink: "Ink") -> dict[str, Any]:
    """Print the advice on the training command with the flags typed, and return it in types of JSON."""
    from seqvae.profiling import advise as advising
    from seqvae.reports.profile_report import advice_lines

    if program().endswith(" profile"):
        typed = program().removesuffix("profile") + {"optimized": "train", "reference": "train --plain"}[recipe.name]
    else:
        scripts = {"optimized": "train_optimized.py", "reference": "train_with_collapse_detection.py"}
        typed = f"python {scripts[recipe.name]}"
    training_words = without_flags(words, values_of(MeasuringSettings()))
    advice = advising.advise(recipe, training_words, prog=typed, say=say).as_dict()
    print("\n".join(advice_lines(advice, ink)))
    return advice


def _find_batch(recipe: "Recipe", measuring: MeasuringSettings, ink: "Ink") -> dict[str, Any]:
    from seqvae.profiling.find_batch import describe, find_batch

    found = find_batch(recipe.settings, memory_limit_bytes=measuring.memory_limit_bytes, say=say)
    print("\n".join(describe(found, ink)))
    tried = [one._asdict() for one in found.tried]
    return {"found_batch": {**found._asdict(), "tried": tried, "limit": found.limit._asdict()}}


@contextmanager
def _new_directory(output: str | None, output_dir: str, kind: str) -> Iterator[Path]:
    """Make the directory before anything is measured, and remove it where nothing came of it."""
    name = f"analysis-{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    directory = (Path(output) if output else Path(output_dir) / name).expanduser()
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        flag = "--output" if output else "--output_dir"
        raise UsageError(f"{flag}: {error.filename} is no directory") from error
    try:
        yield directory
    except BaseException:
        if is_new:
            with suppress(OSError):  # it holds something
                directory.rmdir()
        raise


def _write_numbers(
    path: Path, found: dict[str, ProfileSettings], data: "SequenceDataModule", content: dict[str, Any]
) -> None:
    """Write the content with machine, data, and the settings that are not the commands' defaults."""
    import torch

    from seqvae.reports.run_files import environment

    settings = {}
    for name, one in found.items():
        defaults = to_flat_dict(type(one)())
        settings[name] = {flag: value for flag, value in to_flat_dict(one).items() if value != defaults[flag]}
    everything = {
        "machine": environment(sys.argv, threads=torch.get_num_threads()),
        "data": data.summary(),
        "settings": settings,
        **content,
    }
    with replace_file(path) as partial_file:
        partial_file.write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
