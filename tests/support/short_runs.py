"""Training runs of a dozen steps, in memory, that can be stopped anywhere and resumed: for the tests of checkpoints.

Three epochs of 8 batches, two to an optimizer step, and a validation after every second step, so that one comes within and
one at the end of each epoch; dropout, hidden words, drawn latents and a falling learning rate.
"""

import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from lightning import Callback

from seqvae.config.data import BatchSettings, LoadingSettings, SourceSettings
from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings, OptimizerSettings
from seqvae.data.cache import SequenceData
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription
from seqvae.errors import Stopped
from seqvae.models.vae import SequenceVAE
from seqvae.reports.run_files import LAST
from seqvae.training.callbacks.checkpoint import Checkpoints
from seqvae.training.callbacks.interrupt import StopOnSignal, restore_signal_handlers
from seqvae.training.module import TrainingModule
from seqvae.training.run_directory.checkpoint_file import AtomicCheckpointIO
from seqvae.training.run_directory.resume import OptimizerAsSet, identity_of
from tests.support.fake_sequences import FakeSequences

BATCHES, STEPS_PER_EPOCH, EPOCHS = 8, 4, 3
STEPS = EPOCHS * STEPS_PER_EPOCH
VALIDATED_AT = [2, 4, 6, 8, 10, 12]
VALID_BATCHES = 3
SEQUENCES = {"train": 2 * BATCHES, "valid": 2 * VALID_BATCHES}
LENGTHS = {"train": 5, "valid": 4}
DESCRIPTION = DataDescription(kind="tokens", vocabulary_size=120)
MODEL = ModelSettings(width=8, depth=1, heads=2, latent_size=2, dropout=0.2, word_dropout=0.2)
BY_TWO = BatchSettings(batch_size=2, bucketing=False)


class ShortData(SequenceDataModule):
    """Pairs of sequences in memory."""

    def __init__(self, sequences: dict[str, int] = SEQUENCES, **options: Any) -> None:
        settings = {"batches": BY_TWO, "loading": LoadingSettings(num_workers=0), "accumulate": 2, **options}
        super().__init__(SourceSettings(), **settings)
        sets: Any = {name: FakeSequences(np.full(number, LENGTHS[name])) for name, number in sequences.items()}
        self.data = SequenceData(Path(), DESCRIPTION, sets, "tokens: in memory", (), {})

    def prepare_data(self) -> None:
        pass


class Ask(Callback):
    """Callback that raises a signal in one hook, at its `at`-th call."""

    def __init__(self, hook: str, at: int, number: int = signal.SIGTERM) -> None:
        self.calls, self.at, self.number = 0, at, number
        setattr(self, hook, self._call)

    def _call(self, *_: Any) -> None:
        if self.calls == self.at:
            self.act()
        self.calls += 1

    def act(self) -> None:
        signal.raise_signal(self.number)


class Killed(Exception):
    """In place of a SIGKILL: nothing can be saved any more."""


class Kill(Ask):
    def act(self) -> None:
        raise Killed


class Record(Callback):
    """Callback that records the result and the step of each validation."""

    def __init__(self) -> None:
        self.validations: list[tuple[int, dict[str, float]]] = []

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.validations.append((trainer.global_step, metrics))


class Run(NamedTuple):
    """A run that ended, or was ended."""

    trainer: lightning.Trainer
    validations: list[tuple[int, dict[str, float]]]
    ended_by: BaseException | None

    @property
    def validated_at(self) -> list[int]:
        return [step for step, _ in self.validations]


def short_module(
    total_steps: int = STEPS,
    objective: ObjectiveSettings | None = None,
    *,
    model: ModelSettings | None = None,
    **optimizer: Any,
) -> TrainingModule:
    torch.manual_seed(0)
    model = model or MODEL
    settings = {**asdict(model), "seed": 0}
    origin = {
        "settings": settings,
        "description": asdict(DESCRIPTION),
        "data": identity_of(np.full(SEQUENCES["train"], LENGTHS["train"]), "in memory"),
    }
    return TrainingModule(
        SequenceVAE(DESCRIPTION, model),
        objective or ObjectiveSettings(),
        OptimizerSettings(warmup=2, **optimizer),
        total_steps=total_steps,
        seed=0,
        origin=origin,
    )


def train(
    directory: Path,
    callbacks: Sequence[Callback] = (),
    *,
    checkpoint: Path | None = None,
    every_n_steps: int | None = None,
    data: SequenceDataModule | None = None,
    module: TrainingModule | None = None,
    **trainer: Any,
) -> Run:
    """Train as `seqvae.training.fit.fit` does, with its checkpoints and signals."""
    record = Record()
    checkpoints = Checkpoints(directory, every_n_steps)
    options: dict[str, Any] = {
        "plugins": [AtomicCheckpointIO()],
        "max_steps": STEPS,
        "accumulate_grad_batches": 2,
        "val_check_interval": 4,
        "num_sanity_val_steps": 0,
    }
    made = lightning.Trainer(
        **{**options, **trainer},
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        callbacks=[*callbacks, record, OptimizerAsSet(), StopOnSignal(checkpoints, "resume me"), checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=directory,
    )
    ended_by: BaseException | None = None
    try:
        with restore_signal_handlers():
            made.fit(module or short_module(), datamodule=data or ShortData(), ckpt_path=checkpoint)
    except (Stopped, Killed) as end:
        ended_by = end
    return Run(made, record.validations, ended_by)


def last_of(directory: Path) -> Path | None:
    path = directory / LAST
    return path if path.exists() else None


def state_of(run: Run) -> dict[str, Any]:
    """Return all that training resumes from, flat."""
    module, (optimizer,) = run.trainer.lightning_module, run.trainer.optimizers
    state: dict[str, Any] = dict(module.state_dict())
    for index, kept in optimizer.state_dict()["state"].items():
        state |= {f"optimizer {index} {name}": value for name, value in kept.items()}
    state |= {f"group {index}": group for index, group in enumerate(optimizer.state_dict()["param_groups"])}
    schedule = run.trainer.lr_scheduler_configs[0].scheduler
    return state | {"schedule": schedule.state_dict(), "step": run.trainer.global_step}


def assert_same(one: Run, other: Run) -> None:
    """Assert that two runs are equal to the last bit."""
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    unequal = [
        name
        for name, value in first.items()
        if not (torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name])
    ]
    assert unequal == []
