"""What a run says of itself while it goes on: a Lightning callback that looks every few steps and only then syncs.

In: what `TrainingModule.training_step` returns. Out: a row every n steps and after each validation, to metrics.csv, to the
loggers and, as text, to whoever watches.
"""

import csv
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from seqvae.data.batch import Batch
from seqvae.files import PatientFile
from seqvae.training.callbacks.display import Display, Stopwatch
from seqvae.training.callbacks.nonfinite import NonFiniteError
from seqvae.training.module import Sums, TrainingModule

COLUMNS = (
    *("step", "epoch", "seconds", "loss", "nll_per_step", "kl", "kl_weight", "lr", "gradient_norm", "steps_per_second"),
    *("valid_elbo", "valid_nll", "valid_kl", "valid_nll_per_step", "valid_sequences"),
)
"""Of metrics.csv. Training: means since the last row, in nats, loss and NLL per step of a sequence, KL per sequence, without
micro-batches that came to NaN or infinity (nan, where all did); the KL's
weight, the learning rate and the gradient's norm (before clipping) are those of the row's own step.
`seconds`: of the whole run; only the time between an interruption and its resumption does not count.
`valid_sequences`: how many sequences a validation was on; the last one of a run is on all.
`steps_per_second`: real steps of sequences (tokens), of all processes, in a second of training. Waiting for data counts,
validation does not."""
LABEL_COLUMNS = ("valid_auroc", "valid_auprc")
"""More of them, where the data have labels."""
STATE = "progress"
"""Where a checkpoint has the state. Not among those of `state_dict`, which cannot ask the other processes."""


class Progress(Callback):
    """Stands before whatever saves checkpoints: a row that a checkpoint counts has to be written by then."""

    def __init__(
        self,
        metrics_path: Path,
        *,
        every_n_steps: int,
        total_steps: int,
        unit: str,
        has_labels: bool = False,
        time_limit: timedelta | None = None,
        quiet: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`unit`: what a step of a sequence is called. `quiet`: print nothing."""
        self.every_n_steps = every_n_steps
        self.total_steps = total_steps
        self._file = MetricsFile(metrics_path, COLUMNS + LABEL_COLUMNS if has_labels else COLUMNS)
        self._watch = Stopwatch(now)
        display = Display(self._watch, total_steps=total_steps, unit=unit, time_limit=time_limit, now=now)
        self._display = None if quiet else display
        self._since_row: list[Sums] = []
        self._row_step = self._first_step = 0
        self._epoch = 0
        """Of the last step: behind the last one of a run, Lightning counts another."""
        self._validated = (-1, 0)
        """The last row of a validation: its step, and on how many sequences."""
        self._loaded: dict[str, Any] | None = None
        self._has_begun = False

    # --- From the beginning to the end ------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module)
        if trainer.is_global_zero and self._display is not None:
            self._display.open()
            self._display.refresh(trainer.global_step, trainer.current_epoch, at_once=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._display is not None:
            self._display.refresh(trainer.global_step, trainer.current_epoch, "training done", at_once=True)
            self._display.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._display is not None:
            self._display.close()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """With the sums of all processes, so that a resumed run writes the very same rows."""
        checkpoint[STATE] = {
            "sums": _of_all_processes(self._since_row, trainer),
            "file": self._file.state(),
            "seconds": self._watch.seconds,
            "lap_seconds": self._watch.lap_seconds,
            "epoch": self._epoch,
            "validated": list(self._validated),
        }
        if trainer.is_global_zero:
            self._file.sync()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # and not to validate some other checkpoint
            self._loaded = checkpoint[STATE]
            self._has_begun = False

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        if self._has_begun:
            self._file.finish()

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once in a session: with training or, where nothing is left to train, with the last validation."""
        if self._has_begun:
            return
        self._has_begun = True
        self._row_step = self._first_step = trainer.global_step
        state, self._loaded = self._loaded, None
        if state is None:
            self._watch.start()
        else:
            self._epoch = state.get("epoch", 0)  # older checkpoints do not tell
            self._validated = tuple(state.get("validated", (-1, 0)))
            self._since_row = _share_of_this_process(state["sums"], trainer, pl_module.device)
            self._watch.start(seconds=state["seconds"], lap_seconds=state["lap_seconds"])
        if not trainer.is_global_zero:
            return
        if state is None:
            self._file.begin()
        else:
            self._file.go_on(state["file"])
        assert isinstance(pl_module, TrainingModule)
        for logger in trainer.loggers:
            logger.log_hyperparams(pl_module.origin["settings"])

    # --- Training ---------------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._since_row.append(outputs["sums"])
        step, self._epoch = trainer.global_step, trainer.current_epoch
        if step == self._first_step + 1:
            self._watch.begin_pace(step)
        if self._display is not None:
            self._display.refresh(step, trainer.current_epoch)
        if step == self._row_step or (step % self.every_n_steps and step < self.total_steps):
            return
        assert isinstance(pl_module, TrainingModule)
        row = self._training_row(trainer, outputs["kl_weight"], pl_module.gradient_norm)
        self._since_row.clear()
        self._row_step = step
        if trainer.is_global_zero:
            self._write(trainer, row)
            if self._display is not None:
                self._display.training(step, row)

    def _training_row(self, trainer: Trainer, kl_weight: Tensor | float, gradient_norm: Tensor) -> dict[str, float]:
        sums: Tensor = trainer.strategy.reduce(_sum_of_finite(self._since_row), reduce_op="sum")
        others = [torch.as_tensor(value, dtype=sums.dtype, device=sums.device) for value in (kl_weight, gradient_norm)]
        values = torch.cat((sums, torch.stack(others))).tolist()  # sync: one for each row
        loss, nll, kl, predicted_steps, real_steps, sequences, weight, norm = values
        return {
            "loss": _ratio(loss, predicted_steps),
            "nll_per_step": _ratio(nll, predicted_steps),
            "kl": _ratio(kl, sequences),
            "kl_weight": weight,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": norm,
            "steps_per_second": real_steps / self._watch.end_lap(),
        }

    # --- Validation -------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.pause()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._display is not None:
            self._display.refresh(trainer.global_step, trainer.current_epoch, f"validation {batch_idx + 1:,}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.unpause()
        if trainer.sanity_checking:
            return
        self._begin(trainer, pl_module)
        names = [name for name in self._file.columns if name in trainer.callback_metrics]
        values = torch.stack([trainer.callback_metrics[name].float() for name in names])
        row = dict(zip(names, values.tolist(), strict=True))  # sync: one for each validation
        validated = trainer.global_step, int(row.get("valid_sequences", 0))
        if trainer.is_global_zero:
            if validated != self._validated:  # else it is done again by a run that was ended right behind it
                self._write(trainer, row)
            if self._display is not None:
                self._display.validation(trainer.global_step, row)
        self._validated = validated
        if not math.isfinite(row["valid_elbo"]):
            step = trainer.global_step
            raise NonFiniteError(f"step {step:,}: the validation ELBO is {row['valid_elbo']}", first_step=step)

    def _write(self, trainer: Trainer, row: dict[str, float]) -> None:
        place = {"step": trainer.global_step, "epoch": self._epoch, "seconds": f"{self._watch.seconds:.2f}"}
        self._file.append(place | {name: f"{value:.6g}" for name, value in row.items()})
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.global_step)


def _sum_of_finite(parts: list[Sums]) -> Tensor:
    """What came to NaN or infinity was not learnt from, and counts as nothing."""
    parts_N = torch.stack([torch.stack([value.float() for value in part]) for part in parts])
    return torch.where(parts_N.isfinite().all(dim=1, keepdim=True), parts_N, 0.0).sum(dim=0)


def _ratio(value: float, count: float) -> float:
    return value / count if count else math.nan


def _of_all_processes(parts: list[Sums], trainer: Trainer) -> dict[str, Tensor]:
    """Each field of the N sums of W processes, (W, N); nothing where there are none, which is so in all processes alike."""
    if not parts:
        return {}
    fields = {name: torch.stack([getattr(part, name) for part in parts]) for name in Sums._fields}
    gathered = {name: trainer.strategy.all_gather(values_N) for name, values_N in fields.items()}
    return {name: values.reshape(trainer.world_size, -1).cpu() for name, values in gathered.items()}


def _share_of_this_process(fields_WN: dict[str, Tensor], trainer: Trainer, device: torch.device) -> list[Sums]:
    """Everything goes to somebody, also where there are more or fewer processes than there were."""
    if not fields_WN:
        return []
    mine = slice(trainer.global_rank, None, trainer.world_size)
    columns = [fields_WN[name][mine].flatten().to(device).unbind() for name in Sums._fields]
    return [Sums(*values) for values in zip(*columns, strict=True)]


# metrics.csv: one file for a whole run, one header, a row at a time, however often the run is interrupted.
#
# In: rows as mappings from column to value. Out: CSV that another program may read at any time. A checkpoint takes along what
# `state` says; after `go_on` with it the file holds exactly the rows that had been written when the checkpoint was made.


class MetricsState(TypedDict):
    """Where a file stands, in types of JSON."""

    rows: int
    """On the disk."""
    unwritten: list[str]
    """Lines that did not get there."""


class MetricsFile:
    """Appends rows."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self._heading = self._lines([dict(zip(columns, columns, strict=True))])
        self._file = PatientFile(path, self._heading)
        self._appended = 0
        """Rows, with those that wait."""

    def begin(self) -> None:
        """A new file with nothing but the header."""
        self._replace([])

    def go_on(self, state: MetricsState) -> None:
        """Keep the rows that the state knows; those written after it will be written once more.

        In a directory without the file a new one begins: a run can go on elsewhere.
        """
        if not self.path.exists():
            self.begin()
            return
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = list(_readable(islice(csv.DictReader(file), state["rows"])))
        self._replace(rows)
        self._file.waiting.extend(state["unwritten"])
        self._appended += len(state["unwritten"])

    def append(self, row: Mapping[str, object]) -> None:
        """Columns that the row lacks stay empty."""
        self._appended += 1
        self._file.append(self._lines([row]))

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._file.finish()

    def state(self) -> MetricsState:
        waiting = list(self._file.waiting)
        return {"rows": self._appended - len(waiting), "unwritten": waiting}

    def sync(self) -> None:
        """Make sure that what a checkpoint will count on survives a loss of power, too."""
        with suppress(OSError), self.path.open("rb+") as file:  # the next row says what is wrong
            os.fsync(file.fileno())

    def _replace(self, rows: Sequence[Mapping[str, object]]) -> None:
        """The whole file at once: a reader sees the old one or the new one."""
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_bytes((self._heading + self._lines(rows)).encode())
        beside.replace(self.path)
        self._appended = len(rows)
        self._file.waiting.clear()

    def _lines(self, rows: Sequence[Mapping[str, object]]) -> str:
        text = io.StringIO(newline="")
        # A file of another version may have other columns: those it has in common with this one are kept.
        csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue()


def _readable(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Up to what is no row of ours: somebody else may have written here."""
    with suppress(csv.Error):
        yield from rows
