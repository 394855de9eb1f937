"""Steps of the encoder alone before each step of all weights (--aggressive_encoder), as `seqvae/training/remedies.py` plans them.

In: training batches, chosen by the step alone, and the monitor's readings. Out: an encoder that has caught up with the decoder, and
at the end of the phase a line on the console and an event with its cost. Resumes to the bit.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from seqvae.data.batch import Batch
from seqvae.data.batching import gather_batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import UsageError
from seqvae.models.vae import SequenceVAE
from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.training.callbacks.checkpoint import is_between_steps
from seqvae.training.callbacks.nonfinite import scaler_of
from seqvae.training.micro_batches import run_or_none_on_oom
from seqvae.training.module import TrainingModule, seed_noise
from seqvae.training.remedies import EVERY_N_STEPS, MOST_IN_A_ROW, WINDOW, AggressivePlan, brings_nothing

ENCODER_STEPS = 2
"""The stream of noise beside those of training and validation."""
AGGRESSIVE = "aggressive_encoder"
"""The event that the phase is over."""


class AggressiveEncoder(Callback):
    """Callback that lets the encoder learn alone before each step, behind the monitors and before what saves checkpoints."""

    def __init__(self, data: SequenceDataModule, monitor: PosteriorMetricsMonitor | None, budget: float) -> None:
        """`budget`: encoder steps in all, as a share of the run's steps. Without a monitor it alone ends the phase."""
        self.data, self.monitor, self.budget = data, monitor, budget
        self._plan: AggressivePlan | None = None
        self._loaded: dict[str, Any] | None = None
        self._step_seen = -1

    @property
    def plan(self) -> AggressivePlan:
        assert self._plan is not None
        return self._plan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        assert isinstance(pl_module, TrainingModule)
        if not isinstance(pl_module.network, SequenceVAE):
            raise UsageError(
                f"--aggressive_encoder: {type(pl_module.network).__name__} has no encoder of ours; leave it out"
            )
        if stage == "fit":  # a checkpoint is loaded after this
            self._plan = self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._step_seen = trainer.global_step
        self._plan = AggressivePlan(int(self.budget * pl_module.planned_steps))
        if self._loaded is not None:
            self._plan.load_state_dict(self._loaded)
        if pl_module.events is not None:
            pl_module.events.start_after(AGGRESSIVE, trainer.global_step)
        self._read_often()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        assert isinstance(pl_module, TrainingModule)
        if self.plan.is_over or batch_idx % trainer.accumulate_grad_batches:
            return
        if trainer.global_step < pl_module.objective.pretrain_autoencoder:
            return
        if pl_module.steering is not None:
            self.plan.end("a rescue has begun")
        else:
            self._learn(trainer, pl_module, batch.step_tokens)
        self._report_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        reading = None if self.monitor is None else self.monitor.reading
        if reading is None or self.plan.is_over or not is_between_steps(trainer):
            return
        if reading.step == trainer.global_step != self._step_seen and self.plan.state.steps:
            self._step_seen = reading.step
            self.plan.take_in(reading.mutual_information)
            self._report_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        if not self.plan.is_over:
            self.plan.end("the run has ended")
            self._report_end(trainer, pl_module)

    def _read_often(self) -> None:
        if self.monitor is not None:
            self.monitor.read_at_least_every(None if self.plan.is_over else EVERY_N_STEPS)

    def _report_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if not self.plan.is_over:
            return
        self._read_often()
        if module.events is not None:
            cost = self.plan.state_dict() | {"budget_steps": self.plan.budget_steps}
            module.events.survived(AGGRESSIVE, trainer.global_step, self.plan.describe(), **cost)

    # --- Encoder steps ------------------------------------------------------------------------------------------------

    def _learn(self, trainer: Trainer, module: TrainingModule, step_tokens: float) -> None:
        """Take encoder steps until a round of them brings nothing; all processes take as many."""
        began, plan, before, taken = time.perf_counter(), self.plan, None, 0
        batches = self._choose(trainer, module)
        most = min(MOST_IN_A_ROW, plan.left)
        while taken < most:
            losses = []
            for number in range(min(len(batches), most - taken)):
                if not plan.take_step():
                    break
                arguments = (trainer, module, batches[number], step_tokens, taken)
                loss = self._step(*arguments) if trainer.world_size > 1 else run_or_none_on_oom(self._step, *arguments)
                if loss is None:
                    plan.end("there is no room in memory for steps of the encoder alone")
                    break
                losses.append(loss)
                taken += 1
            if plan.is_over or len(losses) < len(batches):
                break
            mean = float(
                trainer.strategy.reduce(torch.stack(losses).mean(), reduce_op="mean")
            )  # sync: one for each round
            if brings_nothing(mean, before):
                break
            before = mean
        plan.end_steps(time.perf_counter() - began)

    def _choose(self, trainer: Trainer, module: TrainingModule) -> list[Batch]:
        """Return this process's training batches for the encoder before this step: a few of the cut's, by the step alone."""
        cut = self.data.cut
        draw = np.random.default_rng((module.seed, ENCODER_STEPS, trainer.global_step))
        each, world = min(WINDOW, max(1, cut.batches // trainer.world_size)), trainer.world_size
        chosen = draw.choice(cut.batches, each * world, replace=cut.batches < world)
        own = chosen[trainer.global_rank :: world]
        train, limits = self.data.split("train"), self.data.limits
        batches = [gather_batch(train, limits, cut.order_N[cut.starts_K1[k] : cut.starts_K1[k + 1]]) for k in own]
        return [trainer.strategy.batch_to_device(batch, dataloader_idx=0) for batch in batches]

    def _step(self, trainer: Trainer, module: TrainingModule, batch: Batch, step_tokens: float, number: int) -> Tensor:
        """Take one step of the encoder by a batch; return its loss, per step of a sequence."""
        weights, (optimizer,), scaler = encoder_weights(module.network), trainer.optimizers, scaler_of(trainer)
        position = trainer.global_step * MOST_IN_A_ROW + number
        seed_noise(module.seed, ENCODER_STEPS, position, trainer.global_rank, device=batch.lengths_B.device)
        with trainer.precision_plugin.train_step_context():
            loss, _ = module.loss_of(batch, module.network(batch))
        # As large as the gradient of a whole optimizer step, with which it shares the optimizer's memory.
        scaled = loss * (trainer.world_size * trainer.accumulate_grad_batches / step_tokens)
        scale = 1.0 if scaler is None else scaler.get_scale()
        gradients = torch.autograd.grad(scaled * scale, weights, materialize_grads=True)
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / scale
        if trainer.world_size > 1:
            flat = trainer.strategy.reduce(flat, reduce_op="mean")
        optimizer.zero_grad()
        for weight, gradient in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = gradient.view_as(weight)
        norm = nn.utils.clip_grad_norm_(weights, module.optimizer.gradient_clip or float("inf"))
        if bool(norm.isfinite()):  # sync: a step that is not finite is left out
            vars(optimizer).pop("found_inf", None)  # what the last step of all has left there
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach() / batch.lengths_B.sum()


def encoder_weights(network: nn.Module) -> Sequence[nn.Parameter]:
    """Return the weights that only the posterior depends on; embeddings are the decoder's, too."""
    assert isinstance(network, SequenceVAE)
    parts = [*network.encoder.parameters(), *network.posterior.parameters(), network.end_W]
    return [weight for weight in parts if weight.requires_grad]
