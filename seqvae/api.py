"""The commands as functions: `fit` trains, `tune` searches for settings, `load` opens what was trained; arguments are the flags.

    run = seqvae.fit("my_data.parquet", fast_detection=True, max_steps=200)
    run.verdict, run.metrics, run.directory
    latents = run.model.encode()

Errors are the one- or two-line messages of the commands, as exceptions below `SeqVAEError`. Nothing heavy is imported until it
is needed.
"""

import inspect
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from seqvae.config.flags import CommandLine
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.config.tuning import StudySettings, TuneSettings
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
    flags |= _data_as_flag(data, flags)
    schema: type[TrainingSettings] = ReferenceSettings if plain else OptimizedSettings
    line = CommandLine(schema)
    settings = line.settings(line.read_values(flags))
    # before the output is set up: Lightning sets the levels of its loggers when it is imported
    from seqvae.training.fit import fit as train
    from seqvae.training.fit import make_monitors

    with _errors_of_a_call(), library_output(), named_command("seqvae train --plain" if plain else "seqvae train"):
        watching = [*make_monitors(settings), *callbacks] if callbacks else None
        return Run(train(settings, watching).directory)


def tune(
    data: "Data | None" = None,
    *,
    space: str | Mapping[str, str | Sequence[object]] = TuneSettings().space,
    trials: int = TuneSettings().trials,
    probe: str | None = None,
    **flags: Any,
) -> "Study":
    """Run trials with different settings as `seqvae tune` does, and return the study.

    `data`: as for `fit`. `space`: the text of --space, or a dict like `{"lr": "1e-4:1e-2", "latent_size": [8, 16, 32]}`. `probe`: a
    label whose linear probe is the second objective, in place of the mutual information. `flags`: what all trials share;
    `run_name` is the name of the study, by which it goes on.
    """
    flags |= _data_as_flag(data, flags)
    if not isinstance(space, str):
        parts = {
            name: values
            if isinstance(values, str)
            else "|".join(str(one).lower() if one in (True, False) else str(one) for one in values)
            for name, values in space.items()
        }
        space = ",".join(f"{name}={values}" for name, values in parts.items())
    line = CommandLine(StudySettings)
    settings = line.settings(line.read_values({**flags, "space": space, "trials": trials, "probe": probe}))
    from seqvae.tuning import tune as run_trials

    with _errors_of_a_call(), library_output(), named_command("seqvae tune"):
        return Study(run_trials(settings))


def _data_as_flag(data: "Data | None", flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the flag that stands for data; those in memory are written to the cache directory."""
    if data is None:
        return {}
    if not isinstance(flags.get("label_path"), str | Path | None):
        raise UsageError(
            f"label_path is a {type(flags['label_path']).__name__}: give the path of a CSV or Parquet file, or merge the labels "
            "into the data as a column, and name it by label_column"
        )
    if flags.get("data_dir") is not None:
        raise UsageError("data and data_dir are the same: give one of them")
    from seqvae.data.frames import path_of

    return {"data_dir": path_of(data, flags.get("cache_dir"))}


def _signature_with_flags(function: Callable[..., Any], settings: TrainingSettings) -> inspect.Signature:
    """Return the signature of a function with each flag by its name, which notebooks complete and `help` shows."""
    signature = inspect.signature(function)
    *own, others = signature.parameters.values()
    flags = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("preset", "config")
    }
    for group in values_of(settings).values():
        for setting in fields(group):
            value = getattr(group, setting.name)
            flags[setting.name] = flags["preset"].replace(name=setting.name, default=value, annotation=setting.type)
    for one in own:
        flags.pop(one.name, None)
    return signature.replace(parameters=[*own, *flags.values(), others])


vars(fit)["__signature__"] = _signature_with_flags(fit, OptimizedSettings())
vars(tune)["__signature__"] = _signature_with_flags(tune, StudySettings())


def load(
    path: str | Path,
    *,
    device: Literal["auto", "cpu", "gpu"] = "auto",
    precision: Literal["32-true", "bf16-mixed"] = "32-true",
) -> "Model":
    """Open a checkpoint, the directory of a run (its best checkpoint), what `Model.save` or `seqvae export` wrote, or a model on
    the Hugging Face Hub (`hf://user/name`, `hf://user/name@revision`)."""
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

    @property
    def step_readings(self) -> "pd.DataFrame":
        """The same of the latents of steps below their sequence's (`latent_scope="both"`); empty in other runs."""
        import pandas as pd

        from seqvae.files import read_rows
        from seqvae.monitors.reading import NAME
        from seqvae.reports.read_run import STEP_LEVEL

        return pd.DataFrame(read_rows(self.directory / STEP_LEVEL / NAME))

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

        return _framed(self.verdict, write_report(self.directory))


@dataclass(frozen=True)
class Study:
    """A search for settings, read from its directory: finished or not, of this process or of another."""

    directory: Path
    """With index.html, study.db, and a run's directory for each trial."""

    @property
    def trials(self) -> "pd.DataFrame":
        """A row for each trial: its settings, both objectives, `state`, `verdict`, `is_on_front`, `seconds`."""
        import pandas as pd

        from seqvae.reports.study_page import read_study

        study = read_study(self.directory)
        rows = []
        for one in study.trials:
            values = {name: _number(value) for name, value in one.values.items()}
            objectives = dict(zip(study.objectives, one.objectives, strict=False))
            rest = {name: getattr(one, name) for name in ("state", "verdict", "is_on_front", "seconds")}
            rows.append({"trial": one.name, **values, **objectives, **rest})
        columns = ["trial", *study.space, *study.objectives, "state", "verdict", "is_on_front", "seconds"]
        return pd.DataFrame(rows, columns=columns).set_index("trial")

    @property
    def front(self) -> "pd.DataFrame":
        """The trials that no other one surpasses in both objectives, the highest ELBO first."""
        trials = self.trials
        return trials[trials["is_on_front"].astype(bool)].sort_values("ELBO", ascending=False)

    def run(self, trial: str) -> Run:
        """Return the run of a trial, by its name in `trials`."""
        if trial not in self.trials.index:
            raise UsageError(f"{trial!r} is no trial of {self.directory}; there are {', '.join(self.trials.index)}")
        return Run(self.directory / trial)

    def __repr__(self) -> str:
        return f"Study({str(self.directory)!r}: {len(self.trials)} trials, {len(self.front)} on the front)"

    def _repr_html_(self) -> str:
        """The page, for notebooks."""
        return _framed(repr(self), self.directory / "index.html")


def _number(text: str) -> int | float | str:
    """Return what a value means that was typed.

    >>> _number("8"), _number("1e-3"), _number("lstm")
    (8, 0.001, 'lstm')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _framed(title: str, page: Path) -> str:
    """Return a page as part of a notebook, in a frame of its own."""
    head = f"<p><b>{escape(title)}</b> &nbsp; <code>{escape(str(page))}</code></p>"
    content = escape(page.read_text(encoding="utf-8"))
    return f'{head}<iframe sandbox srcdoc="{content}" style="width: 100%; height: {FRAME_HEIGHT}; border: 0"></iframe>'


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
