"""Checkpoints: when a run is saved and as what, how that gets to disk whole, and how it is read.

In: a Trainer between two optimizer steps. Out: `last.ckpt`, `previous.ckpt` (the last one before it), `best.ckpt` and
`healthy.ckpt` (the last one whose posterior was not found harmed) in one directory, from which a run goes on exactly; damage
is noticed, and nothing that lies in them is run.
"""

import logging
import math
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from sequences.errors import StorageError

BEST, LAST, PREVIOUS, HEALTHY = "best.ckpt", "last.ckpt", "previous.ckpt", "healthy.ckpt"
_NEW = ".new.ckpt"
"""Written in full before it takes the place of another."""

_DAMAGE = (
    *(OSError, ValueError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile, pickle.UnpicklingError),
    *(LookupError, TypeError, AttributeError),
)
"""What reading a damaged or hostile file comes to; ValueError holds undecodable names, RuntimeError what torch finds, and the
last three are what torch's own unpickler stumbles over."""

_log = logging.getLogger(__name__)


@runtime_checkable
class KnowsHealth(Protocol):
    """A callback that knows whether the posterior is worth going back to."""

    def is_unharmed(self) -> bool: ...


class Checkpoints(Checkpoint):
    """Saves after each validation, or every `every_n_steps` optimizer steps, and when a run ends; the best by `valid_elbo`.

    Lightning puts a `Checkpoint` behind all other callbacks, so that what they keep is in the file. A checkpoint always
    stands right behind an optimizer step, with a note if a validation was due there and had not ended: Lightning would go on
    without it, so it is made up for when the run is resumed. Nothing is saved of weights that are not finite.
    """

    def __init__(
        self, directory: Path, every_n_steps: int | None = None, *, watchers: Sequence[KnowsHealth] = ()
    ) -> None:
        self.directory = directory
        self.watchers = watchers
        self.every_n_steps = every_n_steps
        self._epochs_done = 0
        self._validated_at_step: int | None = None
        self._owes_validation = False
        """Of the checkpoint that was resumed."""
        self._saved: tuple[int, bool] | None = None
        """The step that last.ckpt stands at, and whether it owes a validation."""
        self._best_elbo: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"best_elbo": self._best_elbo}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best_elbo = state_dict["best_elbo"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["owes_validation"] = self._is_validation_owed(trainer)
        stand_behind_batch(checkpoint["loops"]["fit_loop"], self._epochs_done)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._owes_validation = checkpoint["owes_validation"]
        self._epochs_done = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.strategy.broadcast((self.directory / BEST).exists()):
            self._best_elbo = None  # resumed in another directory
        if self._owes_validation:
            validate_now(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._epochs_done = trainer.fit_loop.epoch_progress.current.completed

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_between_steps(trainer) and self._is_last_due(trainer) and not is_validation_due(trainer):
            self.save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._have_best(trainer)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or not is_between_steps(trainer):
            return
        self._validated_at_step, self._owes_validation = trainer.global_step, False
        elbo = float(trainer.callback_metrics["valid_elbo"])  # sync: one for each validation
        is_best = math.isfinite(elbo) and (self._best_elbo is None or elbo > self._best_elbo)
        is_last = self.every_n_steps is None or self._is_last_due(trainer)
        if (is_best or is_last) and self._has_finite_weights(trainer):
            self._best_elbo = elbo if is_best else self._best_elbo
            self._save(trainer, as_best=is_best, as_last=is_last)

    def _have_best(self, trainer: Trainer) -> None:
        """A run that was too short for a validation has at least its end to offer."""
        last, best = self.directory / LAST, self.directory / BEST
        if trainer.is_global_zero and last.exists() and not best.exists():
            _give_second_name(last, best)

    def save_last(self, trainer: Trainer) -> bool:
        """Save, unless this very state lies in last.ckpt already or the weights are not finite; tells whether it lies there.

        For all processes alike, between two optimizer steps: after one, or anywhere in the validation that follows it.
        """
        if self._saved == (trainer.global_step, self._is_validation_owed(trainer)):
            return True
        if not self._has_finite_weights(trainer):
            return False
        self._save(trainer, as_best=False, as_last=True)
        return True

    def _is_last_due(self, trainer: Trainer) -> bool:
        """The run ends here, or it is time; without validations and a number of steps, that is after each epoch."""
        if trainer.should_stop or trainer.global_step >= trainer.max_steps:
            return True
        if self.every_n_steps is not None:
            return trainer.global_step % self.every_n_steps == 0
        return trainer.is_last_batch and not trainer.enable_validation

    def _is_validation_owed(self, trainer: Trainer) -> bool:
        is_validated = self._validated_at_step == trainer.global_step
        return self._owes_validation or (not is_validated and is_validation_due(trainer))

    def _has_finite_weights(self, trainer: Trainer) -> bool:
        weights = [w for w in trainer.lightning_module.state_dict().values() if w.is_floating_point()]
        is_finite = bool(torch.stack([w.isfinite().all() for w in weights]).all())  # sync: one for each checkpoint
        is_finite = trainer.strategy.reduce_boolean_decision(is_finite)
        if not is_finite and trainer.is_global_zero:
            _log.warning("step %d: the weights are not finite, so no checkpoint is written", trainer.global_step)
        return is_finite

    def _save(self, trainer: Trainer, *, as_best: bool, as_last: bool) -> None:
        """Written once. A checkpoint is never changed afterwards, so best, last and healthy may be one file with several names."""
        new = self.directory / _NEW
        trainer.save_checkpoint(new, weights_only=False)
        if as_last:
            self._saved = (trainer.global_step, self._is_validation_owed(trainer))
        if not trainer.is_global_zero:
            return
        if any(watcher.is_unharmed() for watcher in self.watchers):
            _give_second_name(new, self.directory / HEALTHY)
        if as_best and as_last:
            _give_second_name(new, self.directory / BEST)
        elif as_best:
            new.replace(self.directory / BEST)
        if as_last:
            if (self.directory / LAST).exists():
                (self.directory / LAST).replace(self.directory / PREVIOUS)
            new.replace(self.directory / LAST)
        _sync_directory(self.directory)


def is_between_steps(trainer: Trainer) -> bool:
    """Whether the present batch was the last one of an optimizer step, so that no gradients are half added up."""
    return not trainer.fit_loop._should_accumulate()


def is_validation_due(trainer: Trainer) -> bool:
    """Whether Lightning validates behind the present batch: the question that it asks itself next."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def validate_now(trainer: Trainer) -> None:
    """Before the first step of a resumed run, what Lightning does between two steps."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False
    trainer.validating = True
    loop.run()
    trainer.training = True


def stand_behind_batch(fit_loop: dict[str, Any], epochs_done: int) -> None:
    """Let a checkpoint's loops say what they say in `on_train_batch_end`, wherever it was saved after the batch.

    Lightning tells from its counters where a checkpoint was saved, and goes on in a different way for each place: from behind
    a validation not exactly, where validations then come at other times; from within one, it can hang.
    From here it goes on with the next batch, and after an epoch's last one with the next epoch.
    """
    for counts in fit_loop["epoch_progress"].values():
        counts.update(ready=epochs_done + 1, started=epochs_done + 1, processed=epochs_done, completed=epochs_done)
    batches = fit_loop["epoch_loop.batch_progress"]
    for counts in (batches["total"], batches["current"]):
        counts["completed"] = counts["ready"] - 1


class AtomicCheckpointIO(CheckpointIO):
    """A checkpoint is under its name in full or not at all, and what it holds is data."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """In the same directory, as a move from another file system would not be atomic."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if damage := _damage_of_archive(partial):
                raise StorageError(f"{target}: what was written reads back differently ({damage})")
            partial.replace(target)
            _sync_directory(target.parent)
        except (OSError, RuntimeError) as error:  # torch wraps what the file system says
            raise StorageError(f"{target} cannot be written ({error}); what was there before is whole") from error
        finally:
            partial.unlink(missing_ok=True)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: Any = None) -> Any:
        """Whoever asks for more than weights and plain values does not get it."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)


def damage_of(path: Path) -> str | None:
    """Why a file is no checkpoint that could be resumed, or None."""
    try:
        if damage := _damage_of_archive(path):
            return damage
        read_lazily(path)
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return error.strerror or "cannot be read"
    except _DAMAGE:
        return "no checkpoint of ours, or a damaged one"
    return None


def read_lazily(path: Path) -> dict[str, Any]:
    """Return a checkpoint whose tensors are read only where they are looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of foreign files torch says at length what damage_of says in a word
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(checkpoint, dict) or not {"state_dict", "origin", "global_step"} <= checkpoint.keys():
        raise ValueError(f"{path} holds no checkpoint of ours")
    return checkpoint


def _damage_of_archive(path: Path) -> str | None:
    """Torch writes a checksum with every tensor but does not look at it when it reads."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type for entry in archive.infolist()):
                return "no checkpoint of ours, or a damaged one"  # torch compresses nothing; it could swell to any size
            bad = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error):
        return "damaged"
    return None if bad is None else f"damaged at {bad}"


def _give_second_name(path: Path, name: Path) -> None:
    link = name.with_name(f".{name.name}.partial")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links
        shutil.copyfile(path, link)
        with link.open("rb") as file:
            os.fsync(file.fileno())
    link.replace(name)


def _sync_directory(directory: Path) -> None:
    """So that a name, too, outlives a power cut. Windows cannot open a directory, and needs no such thing."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
