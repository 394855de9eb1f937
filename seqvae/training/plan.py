"""How long a run is, and in what portions: settings and data in, numbers out."""

from typing import NamedTuple

import numpy as np

from seqvae.config.training_settings import TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.training.schedules import planned_steps


class Plan(NamedTuple):
    """Of a whole run."""

    total_steps: int
    """Optimizer steps."""
    steps_per_epoch: int
    tokens_per_step: float
    """Real steps of sequences in an optimizer step, on average; a token is one step of a sequence."""
    sequences_per_step: float
    """On average."""
    lr: float
    """Highest learning rate."""


def plan_run(settings: TrainingSettings, data: SequenceDataModule, world: int) -> Plan:
    lengths_N = data.split("train").lengths_N
    steps_per_epoch = data.steps_per_epoch(world)
    tokens = int(lengths_N.sum(dtype=np.int64))
    tokens_per_step = tokens / steps_per_epoch
    return Plan(
        total_steps=planned_steps(
            settings.run.max_epochs,
            settings.run.max_steps,
            optimizer_steps_per_epoch=steps_per_epoch,
            sequence_steps_per_epoch=tokens,
        ),
        steps_per_epoch=steps_per_epoch,
        tokens_per_step=tokens_per_step,
        sequences_per_step=len(lengths_N) / steps_per_epoch,
        lr=settings.optimizer.rate(tokens_per_step),
    )
