"""Checkpoints: when a run is saved, and as what.

In: a Trainer between two optimizer steps. Out: `last.ckpt`, `previous.ckpt` (the last one before it), `best.ckpt` and
`healthy.ckpt` (the last one whose posterior was not found harmed) in one directory, from which a run goes on exactly. Where one
cannot be written the run goes on, tries again when the next is due, and gives up after a while.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from seqvae.errors import StorageError
from seqvae.files import Patience, sync_directory
from seqvae.monitors.callback import own_part
from seqvae.reports.run_files import BEST, HEALTHY, LAST, PREVIOUS
from seqvae.training.callbacks.progress import STATE
from seqvae.training.run_directory.checkpoint_file import give_second_name

_NEW = ".new.ckpt"
"""Written in full before it takes the place of another."""

_log = logging.getLogger(__name__)


@runtime_checkable
class ReportsHealth(Protocol):
    """A callback that knows whether the posterior is worth going back to."""

    def is_unharmed(self) -> bool: ...


class Checkpoints(Checkpoint):
    """Callback that saves after each validation, or every `every_n_steps` steps, and when a run ends; the best by `valid_elbo`.

    The best is that of the validations on the same sequences: where a run goes on with another share of them, the search begins
    again, and the last validation of a run, which is on all of them, takes no part.
    Lightning puts a `Checkpoint` behind all other callbacks, so that what they keep is in the file. A checkpoint always
    stands right behind an optimizer step, with a note if a validation was due there and had not ended: Lightning would go on
    without it, so it is made up for when the run is resumed. Weights that are not finite are not saved.
    """

    def __init__(
        self,
        directory: Path,
        every_n_steps: int | None = None,
        *,
        watchers: Sequence[ReportsHealth] = (),
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        """`say` gets a message when a checkpoint cannot be written, and when one can again."""
        self.directory = directory
        self._patience = Patience("the checkpoint", say=say)
        self.watchers = watchers
        self.every_n_steps = every_n_steps
        self._epochs_done = 0
        self._validated_at_step: int | None = None
        self._owes_validation = False
        """Whether the checkpoint that was resumed owes one."""
        self._saved: tuple[int, bool] | None = None
        """The step that last.ckpt stands at, and whether it owes a validation."""
        self._best_elbo: float | None = None
        self._best_of_sequences: int | None = None
        """How many sequences the best was validated on."""

    def state_dict(self) -> dict[str, Any]:
        return {"best_elbo": self._best_elbo, "best_of_sequences": self._best_of_sequences}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best_elbo = state_dict["best_elbo"]
        self._best_of_sequences = state_dict.get("best_of_sequences", self._best_of_sequences)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let the loops be saved as they are in `on_train_batch_end`, wherever the checkpoint is saved after the batch.

        Lightning tells from its counters where a checkpoint was saved, and goes on in a different way for each place: from behind
        a validation not exactly, where validations then come at other times; from within one, it can hang.
        From here it goes on with the next batch, and after an epoch's last one with the next epoch.
        """
        checkpoint["owes_validation"] = self._is_validation_owed(trainer)
        fit_loop, done = checkpoint["loops"]["fit_loop"], self._epochs_done
        for counts in fit_loop["epoch_progress"].values():
            counts.update(ready=done + 1, started=done + 1, processed=done, completed=done)
        for counts in (fit_loop["epoch_loop.batch_progress"][name] for name in ("total", "current")):
            counts["completed"] = counts["ready"] - 1

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._owes_validation = checkpoint["owes_validation"]
        # Older checkpoints say it beside the rows of metrics.csv alone. It is loaded before `load_state_dict` is called.
        self._best_of_sequences = checkpoint.get(STATE, {}).get("validated", (-1, None))[1]
        self._epochs_done = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.strategy.broadcast((self.directory / BEST).exists()):
            self._best_elbo = None  # resumed in another directory
        if self._owes_validation:  # before the first step, what Lightning does between two steps
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False
            trainer.validating = True
            loop.run()
            trainer.training = True

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._epochs_done = trainer.fit_loop.epoch_progress.current.completed

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if is_between_steps(trainer) and self._is_last_due(trainer) and not is_validation_due(trainer):
            self.save_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Try once more if the last try failed; a run whose end is not on disk has not ended well."""
        if self._patience.has_failed and not self.save_last(trainer):
            raise StorageError(
                f"{self.directory}: the end of the run, step {trainer.global_step:,}, could not be saved; {LAST} is of an earlier "
                "step, and whole. Make room and type the same command again."
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING and trainer.is_global_zero:
            last, best = self.directory / LAST, self.directory / BEST
            if last.exists() and not best.exists():  # a run that was too short for a validation has its end as its best
                give_second_name(last, best)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or not is_between_steps(trainer):
            return
        self._validated_at_step, self._owes_validation = trainer.global_step, False
        metrics = trainer.callback_metrics
        elbo, sequences = float(metrics["valid_elbo"]), int(metrics["valid_sequences"])  # sync: one for each validation
        if sequences != self._best_of_sequences:
            self._best_elbo, self._best_of_sequences = None, sequences
        is_best = math.isfinite(elbo) and (self._best_elbo is None or elbo > self._best_elbo)
        is_last = self.every_n_steps is None or self._is_last_due(trainer)
        if is_best or is_last:
            before, self._best_elbo = self._best_elbo, elbo if is_best else self._best_elbo
            if not self._save(trainer, as_best=is_best, as_last=is_last):
                self._best_elbo = before

    def save_last(self, trainer: Trainer) -> bool:
        """Save, unless this very state lies in last.ckpt already; return whether it lies there.

        All processes call it alike, between two optimizer steps: after one, or anywhere in the validation that follows it.
        """
        if self._saved == (trainer.global_step, self._is_validation_owed(trainer)):
            return True
        return self._save(trainer, as_best=False, as_last=True)

    @property
    def saved_step(self) -> int | None:
        """Return the step that this session saved last, in all processes alike."""
        return None if self._saved is None else self._saved[0]

    def forget_best(self) -> None:
        """Search for the best again, as a rescue has changed what is trained: a dead latent often has the better ELBO."""
        self._best_elbo = None

    def _is_last_due(self, trainer: Trainer) -> bool:
        """Return whether the run ends here, or it is time; without validations and a number of steps, after each epoch."""
        if trainer.should_stop or trainer.global_step >= trainer.max_steps:
            return True
        if self.every_n_steps is not None:
            return trainer.global_step % self.every_n_steps == 0
        return trainer.is_last_batch and not trainer.enable_validation

    def _is_validation_owed(self, trainer: Trainer) -> bool:
        is_validated = self._validated_at_step == trainer.global_step
        return self._owes_validation or (not is_validated and is_validation_due(trainer))

    def _save(self, trainer: Trainer, *, as_best: bool, as_last: bool) -> bool:
        """Write one file, which is never changed afterwards, so that best, last and healthy may be names of the same one.

        Return whether it is written: weights that are not finite are not saved, and a full disk may be in the way. All processes
        know, and all give up together.
        """
        module = trainer.lightning_module
        found = [own_part(w).isfinite().all() for w in module.parameters() if w.is_floating_point()]
        found += [~b.isnan().any() for b in module.buffers() if b.is_floating_point()]  # a mask may well hold infinity
        is_finite = bool(torch.stack(found).all())  # sync: one for each checkpoint
        if not trainer.strategy.reduce_boolean_decision(is_finite):
            if trainer.is_global_zero:
                _log.warning("step %d: the weights are not finite, so no checkpoint is written", trainer.global_step)
            return False
        new, last = self.directory / _NEW, self.directory / LAST
        failure: StorageError | None = None
        try:
            trainer.save_checkpoint(new, weights_only=False)
        except (StorageError, OSError) as error:
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the other processes wait
            failure = StorageError(str(error))
        if failure is None and trainer.is_global_zero:
            try:
                if self.watchers and all(watcher.is_unharmed() for watcher in self.watchers):
                    give_second_name(new, self.directory / HEALTHY)
                if as_best:
                    give_second_name(new, self.directory / BEST)
                if as_last:
                    if last.exists():
                        last.replace(self.directory / PREVIOUS)
                    new.replace(last)
                else:
                    new.unlink()
                sync_directory(self.directory)
            except OSError as error:
                with suppress(OSError):
                    new.unlink(missing_ok=True)  # its room is needed
                failure = StorageError(f"{error.filename or self.directory}: cannot be written ({error.strerror})")
        several = trainer.world_size > 1
        failure = trainer.strategy.broadcast(failure) if several else failure
        if failure is not None:
            goes_on = self._patience.should_retry(str(failure))
            if not (trainer.strategy.broadcast(goes_on) if several else goes_on):
                raise failure
            return False
        self._patience.succeeded()
        if as_last:
            self._saved = (trainer.global_step, self._is_validation_owed(trainer))
        return True


def is_between_steps(trainer: Trainer) -> bool:
    """Return whether the present batch was the last one of an optimizer step, so that no gradients are half added up."""
    return not trainer.fit_loop._should_accumulate()


def is_validation_due(trainer: Trainer) -> bool:
    """Return whether Lightning validates behind the present batch, by the check that it makes next."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
