"""Training whose numbers are known in advance: a module for a real Trainer, a Trainer for single hooks, clocks, a logger."""

import csv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from seqvae.training.callbacks.progress import COLUMNS, LABEL_COLUMNS
from seqvae.training.micro_batches import MicroBatches
from seqvae.training.module import Sums, TrainingModule


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def second_by_second() -> Any:
    """Return a clock that advances by a second with every call: the bar is always due."""
    clock = Clock()

    def now() -> float:
        clock.seconds += 1
        return clock.seconds

    return now


class Scripted(TrainingModule):
    """A module that learns nothing; the results of its steps follow from their numbers alone."""

    def __init__(self) -> None:
        lightning.LightningModule.__init__(self)
        self.network = nn.Linear(1, 1)
        self.origin = {"settings": {"lr": 0.1}}
        self.gradient_norm = torch.tensor(0.0)
        self.micro_batches = MicroBatches(self)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        number = torch.tensor(1000.0 * self.current_epoch + batch_idx)
        self.gradient_norm = number.cos()
        counts = [torch.tensor(batch_idx % 7 + extra) for extra in (3, 2, 1)]
        sums = Sums(number.sin() + 2, number.sin() + 1, number.cos(), *counts)
        return {"loss": 0 * self.network(torch.ones(1)).sum(), "sums": sums, "kl_weight": number.tan()}

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        lightning.LightningModule.optimizer_step(self, *arguments, **named)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing to add up."""

    def on_validation_epoch_end(self) -> None:
        names = [name for name in (*COLUMNS, *LABEL_COLUMNS) if name.startswith("valid_")]
        self.log_dict({name: torch.tensor(self.global_step / 3) for name in names}, logger=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_gradient_clipping(self, *arguments: Any, **named: Any) -> None:
        """Nothing to clip."""


class Loader:
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(12))

    def state_dict(self) -> dict[str, int]:
        return {"delivered": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """What the steps come to does not depend on the batches."""


class Recorder(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.hyperparameters: list[Any] = []
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, params: Any) -> None:
        self.hyperparameters.append(params)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, metrics))


def fake_trainer(**changes: Any) -> Any:
    """Return as much of a Trainer as the callback uses."""
    facts: dict[str, Any] = {
        "global_step": 0,
        "current_epoch": 0,
        "is_global_zero": True,
        "sanity_checking": False,
        "world_size": 1,
        "global_rank": 0,
        "loggers": [],
        "callback_metrics": {},
        "optimizers": [SimpleNamespace(param_groups=[{"lr": 0.1}])],
        "strategy": SimpleNamespace(reduce=lambda tensor, reduce_op: tensor, all_gather=lambda tensor: tensor),
        "state": SimpleNamespace(fn=TrainerFn.FITTING),
    }
    return SimpleNamespace(**facts | changes)


def outputs(loss: float = 6.0) -> dict[str, Any]:
    """Return the outputs of a micro-batch of 3 steps of 1 sequence, 2 of them real."""
    counts = [torch.tensor(count) for count in (3, 2, 1)]
    return {"sums": Sums(torch.tensor(loss), torch.tensor(3.0), torch.tensor(0.5), *counts), "kl_weight": 0.25}


def step_through(progress: Any, trainer: Any, steps: int, **changes: Any) -> None:
    module, batch = Scripted(), torch.zeros(1)
    for _ in range(steps):
        trainer.global_step += 1
        progress.on_train_batch_end(trainer, module, outputs(**changes), batch, 0)
