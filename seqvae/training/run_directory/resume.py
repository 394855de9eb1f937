"""Where a run goes on: what --run_name, --resume and --init_from mean.

In: settings, and what lies in run directories. Out: a directory and the checkpoint to go on from, or a `UsageError` that says
why not and what to do.
"""

import logging
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from seqvae.config.run import RunSettings
from seqvae.errors import SettingsError, StorageError, UsageError
from seqvae.files import JsonLines
from seqvae.reports.run_files import EVENTS, read_events
from seqvae.training.distributed import is_first_process
from seqvae.training.run_directory.checkpoint_file import (
    ASTRAY,
    BEST,
    HEALTHY,
    LAST,
    PREVIOUS,
    REPLACED,
    damage_of,
    differences,
    give_second_name,
    read_lazily,
    some_of,
)
from seqvae.training.run_directory.directory import CONFIG, LOCK, lock_run_directory

ROLLED_BACK = "rolled_back"
"""The event that a run went back to an earlier checkpoint."""
_OUTPUTS = (
    *(CONFIG, "environment.json", "run.json", "metrics.csv", "posterior.jsonl", "throughput.jsonl", "events.jsonl"),
    *("evaluation.jsonl", "report.html"),
    *("samples", "plots", "checkpoints"),
)
"""What a run writes, and what one that begins anew in its directory removes; nothing else is ever touched."""

QUANTILES = 101
"""Quantiles of the lengths of training sequences that are kept, from the shortest to the longest."""
ENOUGH_LENGTHS = 100_000
"""Lengths that quantiles are taken of: of more, every n-th."""
CHECKED_AT_ONCE = 2**18
"""Lengths per checksum update; all of ten million at once are copies of 160 MB, and take four times as long."""

_log = logging.getLogger(__name__)


class Start(NamedTuple):
    """Where a run begins."""

    directory: Path
    checkpoint: Path | None
    """The checkpoint to go on from."""


def open_run(run: RunSettings, kind: str, held: ExitStack) -> Start:
    """Make or find the directory of a run and lock it until `held` is left. Only the first process does this, for all."""
    if run.resume not in ("auto", "never"):
        return _resume_from(Path(run.resume).expanduser(), run, kind, held)
    if run.run_name is None:
        return Start(_make_unnamed(run, kind, held), None)
    directory = Path(run.output_dir).expanduser() / run.run_name
    if not _exists(directory):
        return Start(_make(directory, held), None)
    if run.resume == "never" and _is_used(directory):
        raise UsageError(f"--run_name {run.run_name}: {directory} is there already; --resume auto goes on with it")
    _lock_existing(directory, held)
    checkpoint = find_checkpoint(directory)
    if checkpoint is None:
        _clear(directory)
    return Start(directory, checkpoint)


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
        raise UsageError(f"nothing to go on from: {'; '.join(damaged)}. Choose another --run_name to begin anew.")
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
            f"{checkpoint} is of another run: {some_of(found)}. Give what it was made with, or another --run_name, or "
            f"take its weights alone with --init_from"
        )


class OptimizerAsSet(Callback):
    """Lets the present settings of the optimizer hold when a run goes on: Lightning restores those of the checkpoint."""

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


def _resume_from(path: Path, run: RunSettings, kind: str, held: ExitStack) -> Start:
    """Return the start for --resume PATH: in the checkpoint's own run, or in the directory of --run_name."""
    if path.is_dir():
        path = find_checkpoint(path) or path / "checkpoints" / LAST
    if damage := damage_of(path):
        raise UsageError(f"--resume {path}: {damage}")
    own = path.absolute().parent.parent
    is_in_run = path.absolute().parent.name == "checkpoints" and (own / CONFIG).is_file()
    if run.run_name is None and not is_in_run:
        return Start(_make_unnamed(run, kind, held), path)
    directory = own if run.run_name is None else Path(run.output_dir).expanduser() / run.run_name
    if not _exists(directory):
        return Start(_make(directory, held), path)
    _lock_existing(directory, held)
    if is_in_run and directory.samefile(own):
        return Start(directory, path)
    if find_checkpoint(directory) is not None:
        raise UsageError(
            f"--run_name {run.run_name}: {directory} holds checkpoints of its own; leave out --resume to go on from "
            "them, or choose another name"
        )
    _clear(directory)
    return Start(directory, path)


def _make_unnamed(run: RunSettings, kind: str, held: ExitStack) -> Path:
    """Make a directory named by kind and time; runs that start in the same second get a number, too."""
    name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        try:
            return _make(Path(run.output_dir).expanduser() / (name if number == 1 else f"{name}-{number}"), held)
        except FileExistsError:
            number += 1


def _make(directory: Path, held: ExitStack) -> Path:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(f"{directory}: cannot be made ({error.strerror}). Choose another --output_dir.") from error
    held.enter_context(_removed_if_refused(directory))
    _lock(directory, held)
    return directory


@contextmanager
def _removed_if_refused(directory: Path) -> Iterator[None]:
    """Remove a directory again that was made for a run that is then refused."""
    try:
        yield
    except (UsageError, SettingsError):
        with suppress(OSError):  # not empty: something else was put there
            directory.rmdir()
        raise


def _exists(directory: Path) -> bool:
    return directory.exists() or directory.is_symlink()  # a link to nowhere does not exist


def _is_used(directory: Path) -> bool:
    return not directory.is_dir() or any(not path.name.startswith(LOCK) for path in directory.iterdir())


def _lock(directory: Path, held: ExitStack) -> None:
    if is_first_process():  # not by the first processes of other machines, which find the same directory
        held.enter_context(lock_run_directory(directory))


def _lock_existing(directory: Path, held: ExitStack) -> None:
    """Lock a directory that exists, unless it is no run's, in which nothing must be put."""
    if not directory.is_dir():
        raise UsageError(f"--run_name {directory.name}: {directory} is not a directory, choose another name")
    if _is_used(directory) and not (directory / CONFIG).is_file():
        raise UsageError(
            f"--run_name {directory.name}: {directory} is there already and is no run, choose another name"
        )
    _lock(directory, held)


def _clear(directory: Path) -> None:
    """Remove what a run left that never came to its first checkpoint, but for its decisions after NaN."""
    if directory.is_symlink() and _is_used(directory):
        raise UsageError(f"--run_name {directory.name}: {directory} is a link; what it leads to is not cleared")
    decisions = [event for event in read_events(directory) if event["event"] == ROLLED_BACK]
    for path in (directory / name for name in _OUTPUTS):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for event in decisions:
        JsonLines(directory / EVENTS).append(event)
