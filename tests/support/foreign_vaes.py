"""Two VAEs that share nothing with ours, each as its field writes them, and data for them in which one factor varies.

In their steps they do what a monitor must not repeat: count, collect, log, draw random numbers of three kinds.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning import Callback
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

from seqvae.monitors import PosteriorMetricsMonitor, Reading, StepOutputs
from tests.support.tiny_vaes import make_trainer

PICTURE, STEPS, TOKENS = 8, 6, 9
QUIET = [
    # Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
    # Runs this small want no workers, some want no validation, and some want a strange one.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero"),
]


class ImageVAE(lightning.LightningModule):
    """Black and white pictures as (x, y), batch normalisation, a Bernoulli likelihood, and a KL weight counted up by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
            *(nn.Dropout(0.1), nn.Linear(8 * 16, 4)),
        )
        self.decoder = nn.Sequential(
            *(nn.Linear(2, 8 * 16), nn.Unflatten(1, (8, 4, 4)), nn.BatchNorm2d(8), nn.ReLU()),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        )
        self.register_buffer("pixels_seen", torch.zeros(()))
        self.steps_taken = 0
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        brighter = 0.1 * np.random.rand() * (random.random() < 0.5)
        if self.training:
            x = (x + brighter).clamp(max=1.0)
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        nll = self.likelihood(x, mean + torch.randn_like(mean) * torch.exp(logvar / 2))
        kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(dim=1)
        self.steps_taken += 1
        weight = min(1.0, self.steps_taken / 40)
        loss = (nll + weight * kl).mean()
        self.pixels_seen += x.numel()
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"kl": kl.mean(), "weight": weight})
        return {"loss": loss, "posterior_mean": mean, "posterior_logvar": logvar, "nll": nll, "kl_weight": weight}

    def likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="none").sum(dim=(1, 2, 3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid_mean", self.encoder(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ProbeableImageVAE(ImageVAE):
    """An image VAE whose decoder can be evaluated at any z."""

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
        return self.likelihood(batch[0], z)


class PosteriorImageVAE(ProbeableImageVAE):
    """An image VAE whose encoder can be evaluated, too."""

    def posterior_of(self, batch: Any) -> tuple[Tensor, ...]:
        return tuple(self.encoder(batch[0]).chunk(2, dim=1))


class LSTMVAE(lightning.LightningModule):
    """Token sequences as a dict, teacher forcing, a loss of its own; a latent for each sequence, or for each step."""

    def __init__(self, *, per_step: bool = False) -> None:
        super().__init__()
        self.per_step = per_step
        self.embed, self.listen = nn.Embedding(TOKENS, 8), nn.LSTM(8, 16, batch_first=True)
        self.q, self.speak, self.head = nn.Linear(16, 6), nn.LSTM(8 + 3, 16, batch_first=True), nn.Linear(16, TOKENS)

    def infer(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.listen(self.embed(batch["tokens"]))[0]
        last = hidden[torch.arange(len(hidden)), batch["lengths"] - 1]
        mean, rho = self.q(hidden if self.per_step else last).chunk(2, dim=-1)
        return mean, F.softplus(rho)

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        mean, sigma = self.infer(batch)
        kl = kl_divergence(Normal(mean, sigma), Normal(0.0, 1.0))
        kl = (kl * real(batch)[..., None]).sum(dim=(1, 2)) if self.per_step else kl.sum(dim=1)
        loss = 0.3 * kl.mean() + self.nll_given_z(batch, mean + sigma * torch.randn_like(mean)).mean()
        self.log("objective", loss)
        return {"loss": loss, "q": (mean, sigma)}

    def nll_given_z(self, batch: dict[str, Tensor], z: Tensor) -> Tensor:
        before = F.pad(self.embed(batch["tokens"])[:, :-1], (0, 0, 1, 0))
        z = z if self.per_step else z[:, None].expand(-1, before.shape[1], -1)
        logits = self.head(self.speak(torch.cat((before, z), dim=2))[0])
        return (F.cross_entropy(logits.mT, batch["tokens"], reduction="none") * real(batch)).sum(dim=1)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def q_of(module: LSTMVAE, outputs: Any, batch: dict[str, Tensor]) -> StepOutputs:
    """Return what the monitor needs, out of what the LSTM returns."""
    mean, sigma = outputs["q"]
    return StepOutputs(mean, 2 * sigma.log(), real(batch) if module.per_step else None, None, 0.3)


def real(batch: dict[str, Tensor]) -> Tensor:
    return torch.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]


def pictures(count: int, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    """Return pictures of a bright bar on black; the factor, and the label, is its place."""
    place = torch.randint(PICTURE - 1, (count,), generator=torch.Generator().manual_seed(0))
    column = torch.arange(PICTURE)
    bar = (column == place[:, None]) | (column == place[:, None] + 1)
    x = bar[:, None, None, :].expand(-1, 1, PICTURE, -1).float()
    return DataLoader(TensorDataset(x, place), batch_size, shuffle=shuffle)


class Sentences:
    """A loader of token sequences of 1 to 6 steps that count up; the factor is where they begin."""

    def __init__(self, batches: int, batch_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (batches, batch_size)
        begin = torch.randint(TOKENS, shape, generator=generator)
        self.tokens = (begin[..., None] + torch.arange(STEPS)) % TOKENS
        self.lengths = torch.randint(1, STEPS + 1, shape, generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for tokens, lengths in zip(self.tokens, self.lengths, strict=True):
            yield {"tokens": tokens, "lengths": lengths}


def watched(directory: Path, module: Any, loaders: Sequence[Any], *callbacks: Callback, **options: Any) -> Reading:
    """Run a module, and return the last reading."""
    (monitor,) = (one for one in callbacks if isinstance(one, PosteriorMetricsMonitor))
    trainer = make_trainer(directory, list(callbacks), **({"max_steps": 5} | options))
    trainer.fit(module, *loaders)
    assert monitor.reading is not None
    return monitor.reading
