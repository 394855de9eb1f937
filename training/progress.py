"""What a run prints and what it writes to metrics.csv: a Lightning callback that looks every few steps and only then syncs.

In: what `TrainingModule.training_step` returns. Out: one line and one row every n steps and after each validation.
"""

import csv
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

from sequences.batches import Batch
from training.exit_codes import DivergedError
from training.module import Sums, TrainingModule, add_up

COLUMNS = (
    *("step", "epoch", "seconds", "loss", "nll_per_step", "kl", "kl_weight", "lr", "gradient_norm", "steps_per_second"),
    *("valid_elbo", "valid_nll", "valid_kl", "valid_nll_per_step"),
)
"""Of metrics.csv. Training: means since the last row, in nats, loss and NLL per step of a sequence, KL per sequence."""


class Progress(Callback):
    """Prints plain lines and appends rows to metrics.csv."""

    def __init__(self, metrics_path: Path, *, every_n_steps: int, total_steps: int, unit: str) -> None:
        self.metrics_path = metrics_path
        self.every_n_steps = every_n_steps
        self.total_steps = total_steps
        self.unit = unit
        """What a step of a sequence is called: token or step."""
        self._since_row: list[Sums] = []
        self._row_step = 0
        self._row_time = self._start_time = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._row_time = self._start_time = time.perf_counter()
        if trainer.is_global_zero:
            with self.metrics_path.open("w", newline="") as file:
                csv.writer(file).writerow(COLUMNS)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._since_row.append(outputs["sums"])
        step = trainer.global_step
        if step == self._row_step or (step % self.every_n_steps and step < self.total_steps):
            return
        now = time.perf_counter()
        assert isinstance(pl_module, TrainingModule)
        row = self._training_row(trainer, now - self._row_time)
        row |= {"kl_weight": outputs["kl_weight"], "gradient_norm": pl_module.gradient_norm.item()}
        self._since_row.clear()
        self._row_step, self._row_time = step, now
        if trainer.is_global_zero:
            self._append(trainer, row)
            print(self._training_line(step, row), flush=True)
        if not math.isfinite(row["loss"]):  # on all processes alike, as the sums are of all of them
            raise DivergedError(f"step {step}: the loss is {row['loss']}. Lower --lr, or raise --warmup.")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        row = {name: float(value) for name, value in trainer.callback_metrics.items() if name in COLUMNS}
        if trainer.is_global_zero:
            self._append(trainer, row)
            print(self._validation_line(trainer.global_step, row), flush=True)

    def _training_row(self, trainer: Trainer, seconds: float) -> dict[str, float]:
        total = Sums(
            *torch.stack(add_up(self._since_row, trainer)).cpu()
        )  # sync: with the gradient's norm, two for each row
        return {
            "loss": float(total.loss / total.predicted_steps),
            "nll_per_step": float(total.nll / total.predicted_steps),
            "kl": float(total.kl / total.sequences),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "steps_per_second": float(total.real_steps) / seconds,
        }

    def _append(self, trainer: Trainer, row: dict[str, float]) -> None:
        seconds = time.perf_counter() - self._start_time
        place = {"step": trainer.global_step, "epoch": trainer.current_epoch, "seconds": f"{seconds:.2f}"}
        with self.metrics_path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(place | {name: f"{value:.6g}" for name, value in row.items()})

    def _training_line(self, step: int, row: dict[str, float]) -> str:
        seconds_left = (time.perf_counter() - self._start_time) / step * (self.total_steps - step)
        return (
            f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  loss {row['loss']:.4f}  "
            f"nll/{self.unit} {row['nll_per_step']:.4f}  kl {row['kl']:.2f} (weight {row['kl_weight']:.2f})  "
            f"{row['steps_per_second']:,.0f} {self.unit}s/s  {clock(seconds_left)} left"
        )

    def _validation_line(self, step: int, row: dict[str, float]) -> str:
        return (
            f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  validation: elbo {row['valid_elbo']:.3f}  "
            f"nll {row['valid_nll']:.3f}  kl {row['valid_kl']:.2f}  nll/{self.unit} {row['valid_nll_per_step']:.4f}"
        )


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
