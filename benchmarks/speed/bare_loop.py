"""A command's training step on a CPU in a plain loop: no Trainer, no callbacks, no logging."""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import nn

from seqvae.config.training import TrainingSettings
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription
from seqvae.models.vae import SequenceVAE
from seqvae.training.callbacks.memory import keep_freed_memory
from seqvae.training.distributed import DTYPES, resolve_precision
from seqvae.training.module import TRAINING, seed_noise
from seqvae.training.network import make_ready
from seqvae.training.objective import negative_elbo, resolve_free_bits
from seqvae.training.optimizers import make_optimizer


class BareLoop:
    """The network and the optimizer that the settings describe, and the step that a run would take."""

    def __init__(self, settings: TrainingSettings, description: DataDescription) -> None:
        keep_freed_memory()  # as a run does
        self.settings = settings
        self.precision = resolve_precision(settings.compute.precision, "cpu").precision
        torch.manual_seed(settings.run.seed)
        self.network: nn.Module = SequenceVAE(description, settings.model)
        make_ready(self.network, settings.compute)
        self.optimizer = make_optimizer(self.network, settings.optimizer)
        self.free_bits = resolve_free_bits(settings.objective, settings.model.latent_scope)

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step of these micro-batches."""
        dtype = DTYPES[self.precision]
        for batch in batches:
            seed_noise(self.settings.run.seed, TRAINING, batch.position, device=batch.lengths_B.device)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                objective = negative_elbo(self.network(batch), 1.0, self.free_bits)
            (objective.loss / batch.step_tokens).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.optimizer.gradient_clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, batches: Iterator[Batch], count: int) -> list[Batch]:
        """Take some optimizer steps, and return the batches that they were of."""
        used = []
        for _ in range(count):
            parts = list(islice(batches, self.settings.optimizer.gradient_accumulation_steps))
            self.step(parts)
            used.extend(parts)
        return used


def endless(data: SequenceDataModule) -> Iterator[Batch]:
    """Yield the training batches, epoch after epoch."""
    loader = data.train_dataloader()
    while True:
        yield from loader
        loader.set_epoch(loader.epoch + 1)
