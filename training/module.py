"""A network and its settings -> what Lightning calls: training and validation steps, optimizer, clipping.

Training logs and prints nothing: `training_step` hands out all that a callback may see, detached.
"""

from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from models.sequence_vae import VAEOutput
from sequences.batches import Batch
from training.objective import Objective, kl_weight_at, negative_elbo
from training.schedules import cosine_with_warmup, steps_of
from training.settings import ObjectiveSettings, OptimizerSettings

TRAINING, VALIDATION = 0, 1
"""Two streams of noise, so that validation is the same however often it runs."""


class Sums(NamedTuple):
    """Sums over sequences, in nats. They add up over batches and processes; whoever wants a mean divides at the end."""

    loss: Tensor
    nll: Tensor
    kl: Tensor
    predicted_steps: Tensor
    """With end marks."""
    real_steps: Tensor
    """Without."""
    sequences: Tensor


class TrainingModule(lightning.LightningModule):
    """Trains a network that turns a batch into a `VAEOutput`."""

    def __init__(
        self,
        network: nn.Module,
        objective: ObjectiveSettings,
        optimizer: OptimizerSettings,
        *,
        total_steps: int,
        seed: int,
        origin: dict[str, Any],
    ) -> None:
        """`origin` goes into every checkpoint: what it takes to build the network again, in types of JSON."""
        super().__init__()
        self.network = network
        self.objective = objective
        self.optimizer = optimizer
        self.total_steps = total_steps
        self.seed = seed
        self.origin = origin
        self.gradient_norm = torch.full((), float("nan"))
        """Before clipping, in the last optimizer step."""
        self._validated: list[Sums] = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        torch.manual_seed(noise_seed(self.seed, TRAINING, batch.position))
        output: VAEOutput = self.network(batch)
        kl_weight = kl_weight_at(self.global_step, self.total_steps, self.objective)
        objective = negative_elbo(output, kl_weight, self.objective.free_bits)
        # Lightning divides by the micro-batches of a step and averages over the processes. Both are undone here, so that
        # the loss is the sum over the whole optimizer step divided by its number of steps, however it is split up.
        parts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return {
            "loss": objective.loss * (parts / batch.step_tokens),
            "sums": sums_of(objective, output, batch),
            "kl_weight": kl_weight,
            "posterior_mean": output.posterior_mean_BZ.detach(),
            "posterior_logvar": output.posterior_logvar_BZ.detach(),
            "nll_B": output.nll_B.detach(),
            "steps_B": output.steps_B,
        }

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(noise_seed(self.seed, VALIDATION, batch.position))
        output: VAEOutput = self.network(batch)
        self._validated.append(sums_of(negative_elbo(output, kl_weight=1.0, free_bits=0.0), output, batch))

    def on_validation_epoch_end(self) -> None:
        total = add_up(self._validated, self.trainer)
        self._validated.clear()
        self.log_dict(
            {
                "valid_elbo": -total.loss / total.sequences,
                "valid_nll": total.nll / total.sequences,
                "valid_kl": total.kl / total.sequences,
                "valid_nll_per_step": total.nll / total.predicted_steps,
            },
            sync_dist=True,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["origin"] = self.origin

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        settings = self.optimizer
        weights = [p for p in self.network.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in weights if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=True)
        warmup, total_steps = steps_of(settings.warmup, self.total_steps), self.total_steps
        schedule = LambdaLR(optimizer, lambda step: cosine_with_warmup(step, warmup, total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """By hand: Lightning refuses to clip for a fused optimizer under mixed precision, where nobody has unscaled yet."""
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            plugin.scaler.unscale_(optimizer)
        longest = self.optimizer.gradient_clip or float("inf")
        self.gradient_norm = nn.utils.clip_grad_norm_(self.network.parameters(), longest)


def sums_of(objective: Objective, output: VAEOutput, batch: Batch) -> Sums:
    """What a batch adds, detached; stays on the device."""
    return Sums(
        loss=objective.loss.detach(),
        nll=objective.nll.detach(),
        kl=objective.kl.detach(),
        predicted_steps=output.steps_B.sum(),
        real_steps=batch.lengths_B.sum(),
        sequences=(batch.lengths_B > 0).sum(),
    )


def add_up(parts: list[Sums], trainer: lightning.Trainer) -> Sums:
    """Over batches, then over processes."""
    total = torch.stack([torch.stack([value.float() for value in part]) for part in parts]).sum(dim=0)
    return Sums(*trainer.strategy.reduce(total, reduce_op="sum"))


def noise_seed(seed: int, stream: int, position: int) -> int:
    """A seed for each micro-batch. Mixed into 32 bits, because a CPU generator ignores the rest."""
    return int(np.random.SeedSequence((seed, stream, position)).generate_state(1)[0])
