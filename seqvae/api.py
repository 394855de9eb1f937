"""The commands as functions: `fit` trains, `load` opens what was trained; their arguments are the flags.

    run = seqvae.fit("my_data.parquet", fast_detection=True, max_steps=200)
    run.verdict, run.metrics, run.directory
    latents = run.model.encode()

Errors are the one- or two-line messages of the commands, as exceptions below `SeqVAEError`. Nothing heavy is imported until it
is needed.
"""

import inspect
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from seqvae.config.flags import CommandLine
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.config.yaml_files import values_of
from seqvae.console import library_output, named_command
from seqvae.errors import CollapsedError, Stopped, UsageError, storage_error

if TYPE_CHECKING:
    import pandas as pd
    from lightning import Callback

    from seqvae.data.frames import Data
    from seqvae.inference.model import Model
    from seqvae.reports.story import Story

FRAME_HEIGHT = "42rem"
"""Height of the report in a notebook."""


def fit(
    data: "Data | None" = None,
    *,
    plain: bool = False,
    callbacks: "Sequence[Callback]" = (),
    **flags: Any,
) -> "Run":
    """Train a model as `seqvae train` does, and return its run.

    `data`: a path as for `--data_dir`, a pandas or polars DataFrame, a pyarrow Table, or a list of sequences (lists of ints:
    tokens; lists of lists of floats: vectors; strings, which need `tokenizer="characters"` or the like). None: demo data.
    `flags`: the flags of `seqvae train --help` by name, `preset` and `config` among them (`max_steps=200, precision="32-true"`).
    `plain`: the reference recipe of `--plain`. `callbacks`: callbacks of Lightning, beside those of the recipe.

    A run with the same `run_name` goes on where it stopped. Data in memory are written to the cache directory, by content, so that
    this holds for them, too. Raises a `SeqVAEError`: `UsageError`, `SettingsError`, `DataError`, `DivergedError`, `StorageError`,
    or, with `on_collapse="stop"`, `CollapsedError`. Ctrl-C saves a checkpoint and raises KeyboardInterrupt.
    """
    if data is not None:
        if flags.get("data_dir") is not None:
            raise UsageError("data and data_dir are the same: give one of them")
        from seqvae.data.frames import path_of

        flags |= {"data_dir": path_of(data, flags.get("cache_dir"))}
    schema: type[TrainingSettings] = ReferenceSettings if plain else OptimizedSettings
    line = CommandLine(schema)
    settings = line.settings(line.read_values(flags))
    # before the output is set up: Lightning sets the levels of its loggers when it is imported
    from seqvae.training.fit import fit as train
    from seqvae.training.fit import make_monitors

    with _errors_of_a_call(), library_output(), named_command("seqvae train --plain" if plain else "seqvae train"):
        watching = [*make_monitors(settings), *callbacks] if callbacks else None
        return Run(train(settings, watching).directory)


def _signature_with_flags() -> inspect.Signature:
    """Return the signature of `fit` with each flag by its name, which notebooks complete and `help` shows."""
    *own, others = inspect.signature(fit).parameters.values()
    flags = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("preset", "config")
    }
    for group in values_of(OptimizedSettings()).values():
        for setting in fields(group):
            value = getattr(group, setting.name)
            flags[setting.name] = flags["preset"].replace(name=setting.name, default=value, annotation=setting.type)
    return inspect.Signature([*own, *flags.values(), others], return_annotation="Run")


vars(fit)["__signature__"] = _signature_with_flags()


def load(
    path: str | Path,
    *,
    device: Literal["auto", "cpu", "gpu"] = "auto",
    precision: Literal["32-true", "bf16-mixed"] = "32-true",
) -> "Model":
    """Open a checkpoint, the directory of a run (its best checkpoint) or what `Model.save` or `seqvae export` wrote."""
    from seqvae.inference.model import Model

    return Model.load(path, device=device, precision=precision)


@dataclass(frozen=True)
class Run:
    """A training run, read from its directory: finished or not, of this process or of another."""

    directory: Path
    """With report.html, metrics.csv, checkpoints/ and plots/."""

    @property
    def verdict(self) -> str:
        """Return the verdict on the posterior: `healthy`, `collapsed`, `decoder ignores z`, `not watched`, ..."""
        return self.story.verdict

    @property
    def story(self) -> "Story":
        """The verdict with its reason (`sentence`, `why`), what to do (`next`), and how far the run got (`state`)."""
        from seqvae.reports.read_run import read_run
        from seqvae.reports.story import story_of

        return story_of(read_run(self.directory), time.time())

    @property
    def metrics(self) -> "pd.DataFrame":
        """The rows of metrics.csv: training and validation by step."""
        import pandas as pd

        return pd.read_csv(self.directory / "metrics.csv")

    @property
    def readings(self) -> "pd.DataFrame":
        """The rows of posterior.jsonl: what the posterior looked like by step, with decoder use and escape threshold where they
        were read; empty where the run was not watched."""
        import pandas as pd

        from seqvae.files import read_rows
        from seqvae.monitors.reading import NAME

        return pd.DataFrame(read_rows(self.directory / NAME))

    @cached_property
    def model(self) -> "Model":
        """The model of the best checkpoint."""
        return load(self.directory)

    def __repr__(self) -> str:
        story = self.story
        return f"Run({str(self.directory)!r}: {story.verdict}. {story.sentence}. {story.state})"

    def _repr_html_(self) -> str:
        """The report, for notebooks."""
        from seqvae.reports.__main__ import write_report

        report = write_report(self.directory)
        head = f"<p><b>{escape(self.verdict)}</b> &nbsp; <code>{escape(str(report))}</code></p>"
        page = escape(report.read_text(encoding="utf-8"))
        return f'{head}<iframe sandbox srcdoc="{page}" style="width: 100%; height: {FRAME_HEIGHT}; border: 0"></iframe>'


@contextmanager
def _errors_of_a_call() -> Iterator[None]:
    """Turn what ends a command into what a caller can handle."""
    try:
        yield
    except SystemExit as end:
        from seqvae.monitors import PosteriorCollapsed
        from seqvae.verdicts import describe_change

        if not isinstance(end, PosteriorCollapsed):
            raise
        raise CollapsedError(describe_change(end.verdict, None, end.verdict.since_step)) from end
    except Stopped as stop:
        if stop.number == signal.SIGINT:
            raise KeyboardInterrupt(str(stop)) from stop
        signal.raise_signal(stop.number)  # with the caller's own handler
        raise
    except (OSError, RuntimeError) as error:
        if (reported := storage_error(error)) is not None:
            raise reported from error
        raise
