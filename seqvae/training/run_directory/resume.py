"""Where a run goes on, and in which directory: what --output_dir, --run_name, --resume and --init_from mean.

In: settings, and what lies in run directories. Out: a locked directory and the checkpoint to go on from, or an error that says
why not and what to do.
"""

import errno
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from seqvae.config.data import SourceSettings
from seqvae.config.run import RunSettings
from seqvae.config.training import ObjectiveSettings, OptimizerSettings
from seqvae.config.yaml_files import read_settings_file
from seqvae.errors import SettingsError, StorageError, UsageError
from seqvae.files import AlreadyLocked, JsonLines, take_lock
from seqvae.reports.run_files import (
    BEST,
    ENVIRONMENT,
    EVENTS,
    FACTS,
    HEALTHY,
    LAST,
    PREVIOUS,
    REPORT,
    read_events,
)
from seqvae.text import some
from seqvae.training.processes import is_first_process
from seqvae.training.run_directory.checkpoint_file import (
    ASTRAY,
    REPLACED,
    damage_of,
    differences,
    give_second_name,
    read_lazily,
)

LOCK = ".lock"
CONFIG = "config.yaml"
FOLDERS = ("checkpoints", "plots", "samples", "step_level", "tensorboard")
FILES = (CONFIG, ENVIRONMENT, FACTS, "*.csv", "*.jsonl")
"""What stands in a run's directory and is written to in place."""
ROLLED_BACK = "rolled_back"
"""The event that a run went back to an earlier checkpoint."""
_OUTPUTS = (
    *(CONFIG, ENVIRONMENT, FACTS, EVENTS, REPORT),
    *("metrics.csv", "posterior.jsonl", "throughput.jsonl", "evaluation.jsonl", "samples", "plots", "step_level"),
    "checkpoints",
)
"""What a run writes, and what one that starts over in its directory removes; nothing else is ever touched."""

QUANTILES = 101
"""Quantiles of the lengths of training sequences that are kept, from the shortest to the longest."""
ENOUGH_LENGTHS = 100_000
"""Lengths that quantiles are taken of: of more, every n-th."""
CHECKED_AT_ONCE = 2**18
"""Lengths per checksum update; all of ten million at once are copies of 160 MB, and take four times as long."""

_log = logging.getLogger(__name__)


class Start(NamedTuple):
    """The beginning of a run."""

    directory: Path
    checkpoint: Path | None
    """The checkpoint to go on from."""


def open_run(run: RunSettings, kind: str, held: ExitStack) -> Start:
    """Make or find the directory of a run and lock it until `held` is left. Only the first process does this, for all."""
    directory = None if run.run_name is None else Path(run.output_dir).expanduser() / run.run_name
    named: Path | None = None
    own: Path | None = None
    if run.resume not in ("auto", "never"):  # a checkpoint, of its own run or to be taken into another directory
        named = Path(run.resume).expanduser()
        if named.is_dir():
            named = find_checkpoint(named) or named / "checkpoints" / LAST
        if damage := damage_of(named):
            raise UsageError(f"--resume {named}: {damage}")
        folder = named.absolute().parent
        own = folder.parent if folder.name == "checkpoints" and (folder.parent / CONFIG).is_file() else None
        directory = directory or own
    if directory is None:  # named by kind and time; runs that start in the same second get a number, too
        name, number = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}", 1
        while True:
            with suppress(FileExistsError):
                unused = Path(run.output_dir).expanduser() / (name if number == 1 else f"{name}-{number}")
                return Start(_make(unused, held), named)
            number += 1
    if not directory.exists() and not directory.is_symlink():  # a link to nowhere does not exist
        return Start(_make(directory, held), named)
    is_used = not directory.is_dir() or any(not path.name.startswith(LOCK) for path in directory.iterdir())
    flag = f"--run_name {directory.name}"
    if run.resume == "never" and is_used:
        raise UsageError(f"{flag}: {directory} is there already; --resume auto goes on with it")
    if not directory.is_dir():
        raise UsageError(f"{flag}: {directory} is not a directory, choose another name")
    if is_used and not (directory / CONFIG).is_file():
        raise UsageError(f"{flag}: {directory} is there already and is no run, choose another name")
    held.enter_context(lock_run_directory(directory))
    if own is not None and directory.samefile(own):
        return Start(directory, named)
    checkpoint = find_checkpoint(directory)
    if checkpoint is not None and named is not None:
        raise UsageError(
            f"{flag}: {directory} holds checkpoints of its own; leave out --resume to go on from them, or choose another name"
        )
    if checkpoint is None:
        # The run never came to its first checkpoint: what it left goes, but for its decisions after NaN.
        if directory.is_symlink() and is_used:
            raise UsageError(f"{flag}: {directory} is a link; what it leads to is not cleared")
        decisions = [event for event in read_events(directory) if event["event"] == ROLLED_BACK]
        for path in (directory / name for name in _OUTPUTS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for event in decisions:
            JsonLines(directory / EVENTS).append(event)
    return Start(directory, checkpoint or named)


def settings_it_began_with(run: RunSettings) -> dict[str, str]:
    """Return the settings that stand in the directory of a run that goes on, by their names, as texts; none of a new run."""
    places = [] if run.run_name is None else [Path(run.output_dir).expanduser() / run.run_name]
    if run.resume not in ("auto", "never"):
        named = Path(run.resume).expanduser().absolute()
        places.insert(0, named if named.is_dir() else named.parent.parent)
    for path in (place / CONFIG for place in places):
        if path.is_file():
            with suppress(UsageError):  # damaged; the checkpoint knows what its data were
                return {entry.name: entry.text or "" for entry in read_settings_file(path, str(path))}
            break
    return {}


def as_it_began(source: SourceSettings, began: Mapping[str, str]) -> SourceSettings:
    """Return how a run reads its data where it goes on: by all values, where it began so or before there was --robust_scaling."""
    return (
        replace(source, robust_scaling=False) if began and began.get("robust_scaling", "false") == "false" else source
    )


def with_labels_as_it_began(objective: ObjectiveSettings, began: Mapping[str, str]) -> ObjectiveSettings:
    """Return the objective of a run, whose labels weigh what they did when it began, where no flag says otherwise."""
    weight = began.get("label_weight", "")
    return replace(objective, label_weight=float(weight)) if objective.label_weight is None and weight else objective


def shared_out(optimizer: OptimizerSettings, began: Mapping[str, str], world: int, default: int) -> OptimizerSettings:
    """Return how many batches of each process make up a step, and how many of all.

    A run that goes on keeps how many of all it began with, unless --gradient_accumulation_steps, whose default is `default`, says
    something else, which is refused later.
    """
    of_all, then, own = (
        optimizer.batches_per_step,
        began.get("batches_per_step", ""),
        optimizer.gradient_accumulation_steps,
    )
    if of_all is None and then.isdecimal():
        known = (str(default), began.get("gradient_accumulation_steps"), str(int(then) // world))
        of_all = int(then) if str(own) in known else None
    if of_all is None:
        return replace(optimizer, batches_per_step=own * world)
    if of_all % world:
        fitting = ", ".join(str(count) for count in range(1, of_all + 1) if of_all % count == 0)
        raise UsageError(
            f"--batches_per_step {of_all}: {world} processes cannot share them evenly. Start as many as divide it ({fitting}), or, "
            f"for a new run, give a multiple of {world}"
        )
    return replace(optimizer, gradient_accumulation_steps=of_all // world, batches_per_step=of_all)


def _make(directory: Path, held: ExitStack) -> Path:
    """Make and lock a directory, which is removed again if the run is then refused."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(f"{directory}: cannot be made ({error.strerror}). Choose another --output_dir.") from error

    def remove_if_refused(_: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, UsageError | SettingsError):
            with suppress(OSError):  # not empty: something else was put there
                directory.rmdir()

    held.push(remove_if_refused)
    held.enter_context(lock_run_directory(directory))
    return directory


def lock_run_directory(directory: Path) -> ExitStack:
    """Lock the directory until the stack is left, or raise an error that names the process that holds it.

    First processes of other machines, which find the same directory, lock nothing.
    """
    if not is_first_process():
        return ExitStack()
    try:
        return take_lock(directory / LOCK)
    except AlreadyLocked as error:
        raise UsageError(
            f"{directory} is in use by another run{f' (process {error.holder})' if error.holder else ''}: wait until it ends, or "
            "choose another --run_name"
        ) from None
    except OSError as error:
        raise StorageError(
            f"{directory / LOCK}: cannot be written ({error.strerror}). Choose another --output_dir."
        ) from error


def find_checkpoint(directory: Path) -> Path | None:
    """Return the newest whole checkpoint of a run, or else the best one; None where it has none yet."""
    damaged: list[str] = []
    for path in (directory / "checkpoints" / name for name in (LAST, PREVIOUS, BEST)):
        if not path.exists():
            continue
        damage = damage_of(path)
        if damage is None:
            for line in damaged:
                _log.warning("%s; going on from %s instead", line, path.name)
            return path
        damaged.append(f"{path}: {damage}")
    if damaged:
        raise UsageError(f"nothing to go on from: {'; '.join(damaged)}. Choose another --run_name to start over.")
    return None


def go_back(directory: Path, before_step: int) -> Path | None:
    """Let last.ckpt be the newest whole checkpoint from before a step, and return it; None where there is none.

    What led astray is kept under other names, for a later look at what went wrong.
    """
    candidates = [directory / "checkpoints" / name for name in (LAST, PREVIOUS, HEALTHY, BEST)]
    steps = {path: read_lazily(path)["global_step"] for path in candidates if damage_of(path) is None}
    newest = max((path for path, step in steps.items() if step < before_step), key=steps.__getitem__, default=None)
    last = candidates[0]
    if newest == last:
        return last
    for path in candidates if newest is None else [last]:
        if path.exists():
            path.replace(path.with_name(ASTRAY + path.name))
    if newest is None:
        return None
    give_second_name(newest, last)
    return last


def adopt_as_last(start: Start) -> None:
    """Make the checkpoint of --resume PATH this run's last one, so that the run goes on from there however soon it is killed."""
    assert start.checkpoint is not None
    last = start.directory / "checkpoints" / LAST
    if last.exists() and last.samefile(start.checkpoint):
        return
    last.parent.mkdir(exist_ok=True)
    if last.exists():
        last.replace(last.with_name(REPLACED))
    give_second_name(start.checkpoint, last)


def identity_of(lengths_N: np.ndarray, content: str) -> dict[str, Any]:
    """Return what tells training data from others, whatever their path; the part "data" of a checkpoint's origin.

    The quantiles are those that samples take their lengths from.
    """
    checksum = 0
    for piece_N in np.array_split(lengths_N, len(lengths_N) // CHECKED_AT_ONCE + 1):
        checksum = zlib.crc32(piece_N.astype("<i8").tobytes(), checksum)
    sorted_N = np.sort(lengths_N[:: len(lengths_N) // ENOUGH_LENGTHS + 1])
    ranks = np.linspace(0, len(sorted_N) - 1, QUANTILES).round().astype(np.int64)
    return {
        "sequences": len(lengths_N),
        "steps": int(lengths_N.sum(dtype=np.int64)),
        "checksum": checksum,
        "content": content,
        "length_quantiles": [*sorted_N[ranks[:-1]].tolist(), int(lengths_N.max())],
    }


def refuse_other_run(checkpoint: Path, own_origin: dict[str, Any]) -> None:
    """Refuse to go on where the data, the network or the batches are others than those of the checkpoint."""
    found = differences(read_lazily(checkpoint)["origin"], own_origin)
    if found:
        raise UsageError(
            f"{checkpoint} is of another run: {some(found, separator='; ')}. Give what it was made with, or another --run_name, or "
            f"take its weights alone with --init_from"
        )


class OptimizerAsSet(Callback):
    """Callback that keeps the present settings of the optimizer when a run goes on: Lightning restores those of the checkpoint."""

    def __init__(self) -> None:
        self._settings: list[dict[str, Any]] = []
        self._base_rates: list[list[float | Tensor]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the settings before the checkpoint's state is loaded."""
        self._settings = [
            {name: value for name, value in group.items() if name not in ("params", "lr")}
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ]
        self._base_rates = [list(config.scheduler.base_lrs) for config in trainer.lr_scheduler_configs]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for group, settings in zip(groups, self._settings, strict=True):
            group.update(settings)
        for config, rates in zip(trainer.lr_scheduler_configs, self._base_rates, strict=True):
            schedule = config.scheduler
            assert isinstance(schedule, LambdaLR)
            schedule.base_lrs = rates
            now = [rate * factor(schedule.last_epoch) for rate, factor in zip(rates, schedule.lr_lambdas, strict=True)]
            for group, rate in zip(schedule.optimizer.param_groups, now, strict=True):
                group["lr"] = rate


def refuse_unwritable(run: RunSettings) -> None:
    """Raise an error for the first path that a run cannot write to: its directory, what it has there, and --log_dir.

    It tries, as a file system may not grant what the permissions say; nothing is made, and nothing that exists is changed.
    """
    directory, flag = Path(run.output_dir).expanduser(), "--output_dir"
    if run.run_name is not None:
        directory /= run.run_name
    elif run.resume not in ("auto", "never"):
        resumed = Path(run.resume).expanduser().absolute()
        resumed = resumed if resumed.is_dir() else resumed.parent.parent
        if (resumed / CONFIG).is_file():
            directory, flag = resumed, "--run_name"
    places = [(directory, flag, True)]
    if run.log_dir is not None and run.logger != "csv":
        places.append((Path(run.log_dir).expanduser(), "--log_dir", False))
    for directory, flag, is_of_run in places:
        path = directory
        try:
            if is_of_run and directory.exists() and not directory.is_dir():
                continue  # it is no run, which is reported where runs are opened
            absolute = directory.absolute()
            path = nearest = next(above for above in (absolute, *absolute.parents) if above.exists())
            if not nearest.is_dir():
                path = directory
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            tempfile.TemporaryFile(dir=nearest).close()
            if not is_of_run or not (directory / CONFIG).exists():
                continue  # what lies there is not the run's
            for path in (folder for name in FOLDERS if (folder := directory / name).is_dir()):
                tempfile.TemporaryFile(dir=path).close()
            for path in (file for pattern in FILES for file in sorted(directory.glob(pattern)) if file.is_file()):
                path.open("rb+").close()
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be written ({error.strerror}). Make it writable, or choose another {flag}."
            ) from error
