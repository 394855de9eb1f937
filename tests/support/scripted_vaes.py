"""Modules whose posterior and decoder follow a script over the optimizer steps, so that verdicts come where a test needs them;
runs of them, in this process or in one of their own, and what they wrote.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning import Callback
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from seqvae.files import read_rows
from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.training.callbacks.checkpoint import is_between_steps
from tests.support.tiny_vaes import LATENT, Batches, make_batches, make_trainer

ROOT = Path(__file__).parent.parent.parent
LONG = 240
"""Steps in which a run can be healthy, die slowly, be found dead, and be found dead for so long that it is ended."""


def dies(step: int) -> float:
    """Return the strength of a latent that dies slowly."""
    return 1.0 if step < 50 else math.exp((50 - step) / 40)


def lives(step: int) -> float:
    return 1.0


class ScriptedVAE(lightning.LightningModule):
    """At strength 1 the means follow the input and the decoder uses z; at 0 neither. Its one weight never moves."""

    def __init__(self, strength: Callable[[int], float] = dies) -> None:
        super().__init__()
        self.strength = strength
        self.weight = nn.Parameter(torch.ones(()))

    def posterior_of(self, batch: Tensor) -> tuple[Tensor, ...]:
        strength, x = self.strength(self.global_step), batch[:, :LATENT]
        return 2 * strength * x, -3 * strength * torch.ones_like(x)

    def nll_given_z(self, batch: Tensor, z: Tensor) -> Tensor:
        return 0.5 * (2 * batch[:, :LATENT] - self.strength(self.global_step) * z).square().sum(dim=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        mean, logvar = self.posterior_of(batch)
        nll_B = self.nll_given_z(batch, mean)
        outputs = {"posterior_mean": mean, "posterior_logvar": logvar, "nll": nll_B, "kl_weight": 1.0}
        return {"loss": self.weight * nll_B.mean()} | outputs

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.0)


class ScriptedData(lightning.LightningDataModule):
    """Data that are distributed over the processes, with one batch to validate on, for all of them."""

    def __init__(self, batches: int = 40) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Batches:
        assert self.trainer is not None
        return Batches(make_batches(self.batches, size=8), self.trainer.global_rank, self.trainer.world_size)

    def val_dataloader(self) -> Batches:
        return Batches(make_batches(1, size=32))


def quiet(**options: Any) -> PosteriorMetricsMonitor:
    """Return a monitor with a small window, since a script moves fast, and without figures."""
    return PosteriorMetricsMonitor(**({"posteriors": 64, "plot_frequency": None} | options))


def verdicts_of(directory: Path) -> list[dict[str, Any]]:
    """Return the changes of verdict, without their times."""
    rows = read_rows(directory / "events.jsonl")
    return [{k: v for k, v in row.items() if k != "time"} for row in rows if row["event"] == "verdict"]


def events_of(directory: Path) -> list[str]:
    return [row["event"] for row in read_rows(directory / "events.jsonl")]


def step_of(verdict: str, directory: Path) -> int:
    """Return the step of the first such verdict on a run."""
    return next(row["step"] for row in verdicts_of(directory) if row["verdict"] == verdict)


def watch(
    directory: Path,
    monitor: PosteriorMetricsMonitor,
    *callbacks: Callback,
    module: lightning.LightningModule | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> lightning.Trainer:
    """Run a script in a directory; the options are the Trainer's."""
    trainer = make_trainer(directory, [monitor, *callbacks], **({"max_steps": LONG} | options))
    trainer.fit(module or ScriptedVAE(), datamodule=ScriptedData(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


class SaveAtSteps(Callback):
    """Callback that saves after the requested steps."""

    def __init__(self, directory: Path, steps: set[int]) -> None:
        self.directory, self.steps = directory, steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in self.steps and is_between_steps(trainer):
            trainer.save_checkpoint(self.directory / f"{trainer.global_step}.ckpt")


def script(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `main` in a process of its own. Words: draw, two (processes)."""
    line = [sys.executable, "-W", "ignore", "-m", "tests.support.scripted_vaes", str(directory), *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=120)


def main(directory: str, *words: str) -> None:
    """Run as a user's own script would."""
    monitor = PosteriorMetricsMonitor(on_collapse="stop", posteriors=64, plot_frequency=40 if "draw" in words else None)
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp_spawn"} if "two" in words else {}
    watch(Path(directory), monitor, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
