"""The settings of a run: how it is validated and saved, how long it is and where it goes.

Imports nothing heavy, since `--help` imports it.
"""

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from seqvae.files import refuse_no_paths, why_no_path

_DURATION = re.compile(r"(?:(\d+):)?(\d+):(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Validation and checkpoints"""

    val_check_interval: int | float = 1.0
    """How often to validate: a fraction of an epoch (0.1, 1.0), but at least 25 optimizer steps or an epoch that has fewer, or
    a whole number of optimizer steps (500), which is counted from the beginning of each epoch; more than an epoch counts as the
    nearest number of whole ones."""

    limit_val_batches: int | float = 1.0
    """How much to validate on while training goes on: a fraction of the validation sequences (0.1), or as many as a number of
    batches holds (10). They stand for all lengths and are the same for every seed; 0: not at all. At its end a run
    validates on all."""

    sanity_checks: int = 0
    """Validation batches to try before the first training step."""

    early_stopping_patience: int | None = None
    """Stop after this many validations in a row without a better ELBO, counted from the full weight of the KL on (with
    --target_kl: once --kl_warmup is over); default: never."""

    checkpoint_every_n_steps: int | None = None
    """Optimizer steps between two checkpoints; default: one after each validation."""

    def __post_init__(self) -> None:
        refuse_below(0, self, "val_check_interval", "limit_val_batches", "sanity_checks")
        for name in ("val_check_interval", "limit_val_batches"):
            value = getattr(self, name)
            if isinstance(value, float) and value > 1:
                raise ValueError(f"--{name} is a fraction up to 1.0 or a whole number, got {value}")
        if self.val_check_interval == 0:
            raise ValueError("--val_check_interval must be above 0, got 0; --limit_val_batches 0 validates not at all")
        if self.limit_val_batches == 0 and self.early_stopping_patience is not None:
            raise ValueError("--early_stopping_patience needs validations, but --limit_val_batches is 0")
        refuse_below(1, self, "early_stopping_patience", "checkpoint_every_n_steps")

    @property
    def is_on_all(self) -> bool:
        """Return whether each validation goes through all batches; the whole number 1 is one batch."""
        return isinstance(self.limit_val_batches, float) and self.limit_val_batches == 1


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Run"""

    max_epochs: int | None = None
    """Passes over the training data; default: as --max_steps says, or else enough for 3 million steps of sequences, at most
    30 passes."""

    max_steps: int | None = None
    """Optimizer steps; with --max_epochs whichever ends first; default: no limit."""

    max_time: str | None = None
    """Longest time that a run may train, as hours:minutes:seconds or days:hours:minutes:seconds; default: no limit."""

    fast_dev_run: bool = False
    """Two optimizer steps and one validation batch, to see whether everything works."""

    seed: int = 0
    """Seed of the weights, the order of the data and the noise: the same seed gives the same run."""

    output_dir: str = "runs"
    """Where the directories of runs are made."""

    run_name: str | None = None
    """Name of the run's directory; default: the kind of sequence and the time."""

    resume: str = "auto"
    """auto: a run with this name goes on where it stopped; never: refuse a name that is taken; or the path of the checkpoint
    to go on from."""

    init_from: str | None = None
    """Checkpoint to take the weights from, and nothing else."""

    log_every_n_steps: int = 50
    """Optimizer steps between two lines of progress and of metrics.csv."""

    logger: Literal["csv", "tensorboard", "wandb", "mlflow"] = "csv"
    """Where metrics, verdicts, figures and samples go; the run's directory has them in any case."""

    log_dir: str | None = None
    """Directory for what --logger writes; default: the run's directory."""

    def __post_init__(self) -> None:
        refuse_below(1, self, "max_epochs", "max_steps", "log_every_n_steps")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be 0 or more and below 2^32, got {self.seed}")
        if (name := self.run_name) is not None:
            if not name.strip(". ") or set(name) & set("/\\\0"):
                raise ValueError(f"--run_name must be the name of a directory, not a path, got {name!r}")
            if name[0] in "-~":  # as a path it would be a flag, or a home directory
                raise ValueError(f"--run_name must not begin with - or ~, got {name!r}")
            if reason := why_no_path(name):
                raise ValueError(f"--run_name {reason}")
            if len(name.encode()) > 255:
                raise ValueError("--run_name is longer than the 255 bytes that a directory's name may have")
        refuse_no_paths(self, "output_dir", "resume", "init_from", "log_dir")
        if self.init_from is not None and self.resume not in ("auto", "never"):
            raise ValueError("--init_from and --resume with a path exclude each other: weights alone, or the whole run")
        if self.max_time is not None and not self.time_limit:
            raise ValueError(f"--max_time must be a time like 0:45:00 or 2:12:00:00, got {self.max_time!r}")

    @property
    def time_limit(self) -> timedelta | None:
        """--max_time as a duration; None also for what is no time."""
        return duration_of(self.max_time)


def duration_of(text: str | None) -> timedelta | None:
    """Return a time like 0:45:00 or 2:12:00:00 as a duration; None also for what is no time."""
    found = _DURATION.fullmatch(text or "")
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def refuse_below(least: int, group: object, *names: str) -> None:
    """Refuse values of these fields that are below `least` or not finite, in the words of the flags."""
    for name in names:
        value = getattr(group, name)
        if value is not None and not least <= value < float("inf"):
            raise ValueError(f"--{name} must be {least} or more, got {value}")
