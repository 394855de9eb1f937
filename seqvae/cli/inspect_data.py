"""`seqvae inspect`: Parquet files in; a report, maybe a figure, and an exit code that says whether they would train out."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import BatchSettings, CacheSettings, LengthSettings, SourceSettings
from seqvae.config.flags import set_by_presets
from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings, OptimizedSettings, OptimizerSettings, TrainingSettings
from seqvae.config.yaml_files import lasting_values_of
from seqvae.console import program, set_up_output, shell_word
from seqvae.errors import DamagedFileError, DataError, ExitCode, StorageError, harmless
from seqvae.files import refuse_no_paths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DESCRIPTION = """Say what Parquet files hold, and whether they would train. Nothing is trained and the files stay as they are.

    seqvae inspect --data_dir my_data                            # a report in the terminal
    seqvae inspect --data_dir my_data --plot_path my_data.png    # and a figure
    seqvae inspect --data_dir smiles --tokenizer characters
    seqvae inspect --data_dir my_data --check_only               # for scripts: one line, exit code 0 or 3

The flags of data, batches, model and objective are those of the training commands, so that what is inspected is what would be
trained on, and the risk of a collapse that of these settings.
The first look at some data builds their cache, which the training then finds.
"""


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Report"""

    check_only: bool = False
    """Only say in one line whether these data would train, with exit code 0 or 3."""

    rows: int = 15
    """Longest table of tokens, features, variables, columns or labels; 0: all of them."""

    plot_path: str | None = None
    """Draw a figure, too: lengths, values and padding, as PNG, to this path."""

    gradient_accumulation_steps: int = 2
    """Batches that will make up one optimizer step; a small set gets smaller batches for it."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, "plot_path")
        if self.rows < 0:
            raise ValueError(f"--rows must be 0 or more, got {self.rows}")
        if self.gradient_accumulation_steps < 1:
            raise ValueError(f"--gradient_accumulation_steps must be 1 or more, got {self.gradient_accumulation_steps}")


@dataclass(frozen=True, kw_only=True)
class InspectSettings:
    """All settings of the command."""

    source: SourceSettings = field(default_factory=SourceSettings)
    lengths: LengthSettings = field(default_factory=LengthSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    report: ReportSettings = field(default_factory=ReportSettings)

    @property
    def name(self) -> str:
        """The name of the data in the report."""
        return Path(self.source.data_dir).expanduser().absolute().name if self.source.data_dir else "demo data"

    @property
    def training(self) -> OptimizedSettings:
        """The settings of the recommended recipe on these data."""
        optimizer = OptimizerSettings(gradient_accumulation_steps=self.report.gradient_accumulation_steps)
        return OptimizedSettings(
            source=self.source,
            lengths=self.lengths,
            cache=self.cache,
            batches=self.batches,
            model=self.model,
            objective=self.objective,
            optimizer=optimizer,
        )


def run(verb: str, words: Sequence[str]) -> ExitCode:
    settings = parse_command_line(
        InspectSettings, words, prog=f"seqvae {verb}", description=DESCRIPTION, config_of=TrainingSettings
    )
    set_up_output(quiet=settings.report.check_only)

    # only now: torch and others take seconds, which --help must not
    from seqvae.data.batching import cut_batches, resolve_limits
    from seqvae.data.cache import open_cache, prepare_cache, with_parquet
    from seqvae.data.inspection import inspect_cache
    from seqvae.data.parquet.discovery import survey_files
    from seqvae.data.parquet.side_tables import read_variable_embeddings
    from seqvae.reports.data_report import data_page, refusal_page, write_data_figure
    from seqvae.reports.terminal import ink_for

    own, batches, cap = settings.report, settings.batches, settings.lengths.max_sequence_length
    ink = ink_for(sys.stdout, os.environ)
    try:
        data = open_cache(prepare_cache(settings.source, settings.cache), settings.lengths, settings.cache.cache_data)
        if settings.source.variable_embeddings_path and data.description.kind == "events":
            read_variable_embeddings(settings.source.variable_embeddings_path, data.description.names)
    except DataError as error:
        if own.check_only:
            raise
        files = None
        with suppress(DataError):  # a plain file may be what cannot be read
            source = with_parquet(settings.source, settings.cache)
            files = survey_files(source, read_pages=isinstance(error, DamagedFileError))
        print("\n".join(refusal_page(settings.name, str(error), files, ink, own.rows)))
        return ExitCode.DATA
    if own.check_only:
        lengths_N = data.splits["train"].lengths_N
        limits = resolve_limits(lengths_N, batches, cap, own.gradient_accumulation_steps)
        cut_batches(
            lengths_N, limits, bucketing=batches.bucketing, drop_last=batches.drop_last
        )  # refuses what cannot be
        splits = (name for name in ("train", "valid", "test") if name in data.splits)
        counts = ", ".join(f"{len(data.splits[name]):,} {name}" for name in splits)
        print(f"ready to train: {data.description.kind}, {counts} sequences")
        return ExitCode.DONE

    # only now: Lightning takes two seconds, which a script need not wait for
    from seqvae.training.fit import make_data
    from seqvae.training.risk import describe_risk, features_before
    from seqvae.training.schedules import plan_run

    module = make_data(settings.training)  # which cuts batches as a training on this machine does
    module.data = data
    limits, cut, accumulate = module.limits, module.cut, module.accumulate
    if "batch_size" in set_by_presets(settings):  # which has its reasons
        limits = limits._replace(hint="")
    found = inspect_cache(data, cap, limits, cut, accumulate=accumulate, most=own.rows or sys.maxsize)
    training = settings.training
    risk = f"risk {describe_risk(features_before(training, module, plan_run(training, module, world=1)))}"
    remark = f"{risk}; {defaults_in(settings)}"
    print("\n".join(data_page(settings.name, found, training_command(settings), remark, ink, own.rows)))
    if own.plot_path is not None:
        path = Path(own.plot_path).expanduser()
        try:
            write_data_figure(path, settings.name, found)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be written ({error.strerror}). Choose another place with --plot_path."
            ) from error
        print(f"\nfigure: {harmless(str(path))}")
    return ExitCode.DONE


def defaults_in(settings: InspectSettings) -> str:
    """Return which of the settings that the risk rests on are the training command's defaults."""
    model, objective = settings.model, settings.objective
    steering = ("target_kl",) if objective.target_kl is not None else ("kl_schedule", "beta")
    rests_on: list[tuple[DataclassInstance, tuple[str, ...]]] = [
        (model, ("decoder", "latent_size", "latent_scope")),
        (objective, ("free_bits", *steering)),
    ]
    names = []
    for group, fields in rests_on:
        for name in fields:
            value = getattr(group, name)
            if value == getattr(type(group), name):
                names.append(f"--{name}" if value is None else f"--{name} {value}")
    return f"defaults among them: {', '.join(names)}" if names else "none of them a default"


def training_command(settings: InspectSettings) -> str:
    """Return the command that trains on the same data: every setting of theirs that is not the default."""
    words: list[str] = []
    groups: list[DataclassInstance] = [
        *(settings.source, settings.lengths, settings.cache, settings.batches),
        *(settings.model, settings.objective),
    ]
    flags = [
        (name, value, getattr(type(group), name))
        for group in groups
        for name, value in lasting_values_of(group).items()
    ]
    accumulate = settings.report.gradient_accumulation_steps
    flags.append(("gradient_accumulation_steps", accumulate, ReportSettings.gradient_accumulation_steps))
    for name, value, default in flags:
        if value == default:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words += [f"--{name}={value}"] if str(value).startswith("--") else [f"--{name}", str(value)]
    return " ".join([program().removesuffix(" inspect"), "train", *map(shell_word, words)])
