"""Lightning modules of a few weights that share nothing with ours, for monitors; and a run of one in two processes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Callback
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.monitors.reading import to_row

SIZE, LATENT = 4, 3


class Batches:
    """A loader with a position, so that a run can be resumed within an epoch. Process r takes every world-th batch."""

    def __init__(self, batches: Sequence[Tensor], rank: int = 0, world: int = 1) -> None:
        self.batches = batches[rank::world]
        self.delivered = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        start, self.delivered = self.delivered % len(self), self.delivered % len(self)
        for batch in self.batches[start:]:
            self.delivered += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.delivered = state["delivered"]


def make_batches(count: int, size: int = 16, steps: int | None = None) -> list[Tensor]:
    shape = (count, size, SIZE) if steps is None else (count, size, steps, SIZE)
    return list(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


class TinyVAE(lightning.LightningModule):
    """One posterior for each row of a batch. `dead`: neither encoder nor decoder uses its input."""

    def __init__(self, *, dead: bool = False) -> None:
        super().__init__()
        self.encoder, self.dropout, self.decoder = nn.Linear(SIZE, 2 * LATENT), nn.Dropout(0.3), nn.Linear(LATENT, SIZE)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            if dead:
                return
            self.decoder.weight.copy_(torch.eye(SIZE, LATENT))
            self.encoder.weight[:LATENT] = 2 * torch.eye(LATENT, SIZE)
            self.encoder.bias[LATENT:] = -3.0

    def posterior_of(self, batch: Tensor) -> tuple[Tensor, ...]:
        mean, logvar = self.encoder(batch).chunk(2, dim=-1)
        return mean, logvar

    def nll_given_z(self, batch: Tensor, z: Tensor) -> Tensor:
        return 0.5 * (batch - self.decoder(self.dropout(z))).square().flatten(1).sum(dim=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        mean, logvar = self.posterior_of(batch)[:2]
        nll_B = self.nll_given_z(batch, mean + (0.5 * logvar).exp() * torch.randn_like(mean))
        return {
            "loss": nll_B.mean(),
            "posterior_mean": mean,
            "posterior_logvar": logvar,
            "nll": nll_B,
            "kl_weight": 0.6,
        }

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=1e-3)


class TinyStepVAE(TinyVAE):
    """One posterior for each step; the steps of the n-th sequence of a batch are 1 + n % S, the others padding."""

    def posterior_of(self, batch: Tensor) -> tuple[Tensor, ...]:
        return *super().posterior_of(batch), mask_of(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        mean, logvar, mask = self.posterior_of(batch)
        padding = torch.nan * torch.ones_like(mean)  # padding that is read shows up
        posterior = {"posterior_mean": torch.where(mask[..., None], mean, padding), "posterior_logvar": logvar}
        return {"loss": self.nll_given_z(batch, mean).mean(), "posterior_mask": mask} | posterior


class FrozenVAE(TinyVAE):
    """A VAE that does not learn and draws the same noise for the same batch: only what a monitor has seen differs."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        torch.manual_seed(int(1e6 * batch[0, 0].abs()))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.0)


class SilentVAE(TinyVAE):
    """A VAE that returns its loss and nothing else."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"]


class OpaqueVAE(lightning.LightningModule):
    """A VAE that returns its posterior, and offers no way to try another z."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = TinyVAE()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.vae.training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Optimizer:
        return self.vae.configure_optimizers()


def mask_of(batch: Tensor) -> Tensor:
    lengths_B1 = 1 + torch.arange(len(batch))[:, None] % batch.shape[1]
    return torch.arange(batch.shape[1]) < lengths_B1


def make_trainer(directory: Path, callbacks: list[Callback], max_steps: int, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        callbacks=callbacks,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **({"devices": 1, "logger": False, "max_epochs": -1, "enable_checkpointing": False} | options),
    )


class SaveAt(Callback):
    """Callback that saves after a micro-batch, possibly in the middle of an accumulation."""

    def __init__(self, path: Path, micro_batch: int) -> None:
        self.path, self.micro_batch = path, micro_batch

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.micro_batch:
            trainer.save_checkpoint(self.path)


class Notes(Callback):
    """Callback that writes the last reading of each process."""

    def __init__(self, monitor: PosteriorMetricsMonitor, directory: Path) -> None:
        self.monitor, self.directory = monitor, directory

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert self.monitor.reading is not None
        torch.save(to_row(self.monitor.reading), self.directory / f"process{trainer.global_rank}.pt")


class SharedData(lightning.LightningDataModule):
    """Eight batches, distributed over the processes, and one to validate on, for all of them."""

    def train_dataloader(self) -> Batches:
        assert self.trainer is not None
        return Batches(make_batches(8), self.trainer.global_rank, self.trainer.world_size)

    def val_dataloader(self) -> Batches:
        return Batches(make_batches(1))


def train_shared(directory: Path, *, posteriors: int, ckpt_path: Path | None = None, **options: Any) -> None:
    """Take four optimizer steps of two batches each, whatever the processes, and save after the second."""
    monitor = PosteriorMetricsMonitor(posteriors=posteriors)
    callbacks = [monitor, Notes(monitor, directory), SaveAt(directory / "saved.ckpt", micro_batch=1)]
    trainer = make_trainer(directory, callbacks, 4, **options)
    trainer.fit(FrozenVAE(), datamodule=SharedData(), ckpt_path=ckpt_path, weights_only=True)
