"""What Lightning calls to train a network: training and validation steps, optimizer, clipping.

Training logs and prints nothing: `training_step` returns all that a callback may see, detached.

Shapes: B sequences, C classes, G groups of latent dimensions.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import lightning
import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision, MulticlassStatScores

from seqvae.config.training import ObjectiveSettings, OptimizerSettings
from seqvae.data.batch import Batch, padded_steps
from seqvae.models.codes import CodePosterior
from seqvae.models.levels import StepLatents
from seqvae.models.posteriors import FlowPosterior
from seqvae.models.vae import Latents, Posterior, SequenceVAE, VAEOutput
from seqvae.monitors.contract import StepOutputs, code_outputs
from seqvae.training.callbacks.nonfinite import StepJudge, scaler_of
from seqvae.training.micro_batches import MicroBatches
from seqvae.training.objective import (
    NO_FREE_BITS,
    NO_LABEL,
    FreeBits,
    Objective,
    WholeBatch,
    classification_loss,
    commitment_loss,
    contrast_of_parts,
    contrastive_loss,
    find_above_floor,
    negative_elbo,
    resolve_free_bits,
    resolve_step_free_bits,
    share_of_contrast,
)
from seqvae.training.optimizers import WeightAverage, make_optimizer, with_own_weights
from seqvae.training.run_directory.checkpoint_file import WEIGHTS
from seqvae.training.run_directory.records import RunEvents
from seqvae.training.schedules import KLWeight, Steering, learning_rate_factor, scheduled_kl_weight, steps_of
from seqvae.training.sharding import ShardedStrategy, share_out, whole
from seqvae.verdicts import Circumstances

TRAINING, VALIDATION = 0, 1
"""Two streams of noise, so that validation is the same however often it runs."""


class Sums(NamedTuple):
    """Sums over sequences, in nats. They add up over batches and processes; means are divided at the end."""

    loss: Tensor
    nll: Tensor
    kl: Tensor
    predicted_steps: Tensor
    """With end marks."""
    real_steps: Tensor
    """Without."""
    sequences: Tensor


@runtime_checkable
class Probeable(Protocol):
    """A network that can decode a latent that is not its own."""

    def encode(self, batch: Any) -> Posterior: ...

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor: ...


class TrainingModule(lightning.LightningModule):
    """Lightning module that trains a network which turns a batch into a `VAEOutput`."""

    steering: Steering | None = None
    """What a rescue has put in place of the schedules."""
    average: WeightAverage | None = None
    """What is validated and saved in place of the weights that train."""

    def __init__(
        self,
        network: nn.Module,
        objective: ObjectiveSettings,
        optimizer: OptimizerSettings,
        *,
        total_steps: int,
        seed: int,
        origin: dict[str, Any],
        classes: int = 0,
    ) -> None:
        """`origin` goes into every checkpoint: what it takes to build the network again, in types of JSON."""
        super().__init__()
        self.network = network
        if self.codes is not None:  # codes cost the same however they are weighed
            objective = replace(objective, kl_schedule="constant", free_bits=0.0)
        self.objective = self.own_objective = objective
        """In force, and as set by the user."""
        self.optimizer = optimizer
        self.total_steps = self.planned_steps = total_steps
        """With what a rescue has added, and without."""
        self.seed = seed
        self.origin = origin
        self.kl_weight = KLWeight(objective, total_steps)
        self.label_metrics = LabelMetrics(classes if objective.weight_of_labels else 0)  # of a head that is trained
        if optimizer.ema is not None:
            self.average = WeightAverage(network, optimizer.ema)
        self.gradient_norm = torch.full((), float("nan"))
        """Before clipping, in the last optimizer step."""
        self.validated_at_step = -1
        self.judge = StepJudge()
        self.micro_batches = MicroBatches(self)
        self.events: RunEvents | None = None
        """Where it is reported what a step survived."""
        self.offers_rescue = False
        """Whether --on_collapse rescue can be advised: it is not in force."""
        if isinstance(network, Probeable):  # by these methods a monitor sees whether the decoder uses z
            self.posterior_of: Callable[[Any], Posterior | StepOutputs]
            self.posterior_of = lambda batch: network.encode(batch)  # which `configure_model` may replace
            if isinstance(network, SequenceVAE) and network.has_codes:
                self.posterior_of = lambda batch: code_outputs(*network.codes_of(batch))
            self.nll_given_z = lambda batch, z: network.nll_given_z(batch, z)
        if isinstance(network, SequenceVAE) and isinstance(network.posterior, FlowPosterior):
            family = network.posterior
            self.move_latents = lambda base, mean, logvar: family.move(base, mean, logvar)
            self.log_density_at = lambda z, mean, logvar: family.log_density_at(
                z, Posterior(mean, logvar, torch.ones(mean.shape[:-1], dtype=torch.bool))
            )
        if isinstance(network, SequenceVAE) and network.step_level is not None:
            self.nll_given_z = lambda batch, z: network.nll_given_level(batch, z, of_steps=False)
            self.latent_level = lambda name: StepLevelOfModule(self, network)
        if isinstance(network, SequenceVAE) and not (network.has_step_latents or network.has_codes):
            self.latent_scores = lambda batch, draws: network.latent_scores(batch, draws)
        self._validated: list[Sums] = []
        self._kl_of_step: list[Tensor] = []
        """The KL and the sequences that it belongs to, of each micro-batch of the present optimizer step."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the name of the hook that Lightning calls directly: it does so forty times per micro-batch, and torch would check
        each time whether that is a parameter (40 us per micro-batch together)."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def configure_model(self) -> None:
        """Share the network out among the processes, with --strategy fsdp."""
        if isinstance(self.trainer.strategy, ShardedStrategy):
            share_out(self.network, self.trainer.strategy.device_mesh)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        begins_step = batch_idx % self.trainer.accumulate_grad_batches == 0
        return self.micro_batches.forward(batch, begins_step=begins_step)

    def backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
        self.micro_batches.backward(loss)

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing: `begin_step` has done it, as `training_step` leaves gradients behind for a micro-batch in parts."""

    def begin_step(self) -> None:
        """Forget the gradients and losses of an optimizer step that begins, or begins again."""
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()
        self.judge.begin()
        self._kl_of_step.clear()
        if self.codes is not None:
            self.codes.begin_step()

    def compute(self, batch: Batch, part: int, whole: WholeBatch | None = None) -> dict[str, Any]:
        """Return the loss of a micro-batch or of a part of one, and what callbacks see, detached.

        `whole`: of a part, what `whole_batch` found in all of them.
        """
        seed_noise(self.seed, TRAINING, batch.position, part, device=batch.lengths_B.device)
        output: VAEOutput = self.network(batch)
        loss, objective = self.loss_of(batch, output, whole)
        self.judge.add(loss, batch.sequences_B)
        sums = sums_of(objective, output, batch)
        if self.kl_weight.target_kl is not None and self.global_step >= self.objective.pretrain_autoencoder:
            self._kl_of_step.append(torch.stack((sums.kl, sums.sequences.float())))
        # Lightning divides by the micro-batches of a step and averages over the processes. Both are undone here, so that
        # the loss is the sum over the whole optimizer step, divided by a constant of the epoch, however it is split up.
        parts = self.trainer.world_size * self.trainer.accumulate_grad_batches
        # A step that is not taken says nothing of the posterior.
        is_taken = loss.detach().isfinite()
        posterior_mask = output.posterior_mask & is_taken
        return {
            "loss": loss * (parts / batch.step_tokens),
            "sums": sums,
            "kl_weight": objective.kl_weight,
            **self._latents_of(output),
            "posterior_mask": posterior_mask,
            "nll": output.nll_B.detach(),
            **({} if output.kl is None else {"kl": output.kl.detach(), "kl_is_estimated": output.kl_is_estimated}),
            **({} if output.steps is None else outputs_of_steps(output.steps, is_taken)),
            "steps_B": output.steps_B,
            "real_steps": sums.real_steps,
            "padded_steps": padded_steps(batch),
            "sequences": sums.sequences,
        }

    @property
    def codes(self) -> CodePosterior | None:
        """The posterior that chooses codes; None: latents are none."""
        posterior = self.network.posterior if isinstance(self.network, SequenceVAE) else None
        return posterior if isinstance(posterior, CodePosterior) else None

    def _latents_of(self, output: VAEOutput) -> dict[str, Any]:
        """Return what a monitor reads of the latents."""
        if self.codes is not None and output.codes is not None:
            return {"codes": output.codes, "codebook_size": self.codes.codes}
        return {"posterior_mean": output.posterior_mean.detach(), "posterior_logvar": output.posterior_logvar.detach()}

    def loss_of(self, batch: Batch, output: VAEOutput, whole: WholeBatch | None = None) -> tuple[Tensor, Objective]:
        """Return what is minimised of a micro-batch or a part of one, as a sum, and the objective within it."""
        kl_weight = self.kl_weight(self.global_step)
        free_bits, shared_by, of_steps = self._free_bits(output)
        above_floor_G, contrast = (None, None) if whole is None else whole
        objective = negative_elbo(output, kl_weight, free_bits, above_floor_G, shared_by=shared_by, of_steps=of_steps)
        loss = objective.loss + commitment_loss(output)
        loss = loss + self.objective.weight_of_labels * classification_loss(output, batch.labels_B)
        if self.objective.contrastive_weight:
            if contrast is None:
                nats = contrastive_loss(output.posterior_mean, output.posterior_logvar).to(loss)
            else:
                nats = share_of_contrast(output, contrast)
            loss = loss + self.objective.contrastive_weight * nats
        return loss, objective

    def whole_batch(self, parts: Sequence[Batch]) -> WholeBatch | None:
        """Return what depends on all parts of a micro-batch together, with the noise that `compute` draws; None: nothing does.

        The encoder goes through the parts once more for this, without gradients; nothing of it stays behind.
        """
        has_contrast = self.objective.contrastive_weight > 0
        # Without any for a latent of each sequence there are none for one of each step alone, either.
        has_free_bits = resolve_free_bits(self.objective, "sequence") > 0
        if isinstance(self.network, SequenceVAE) and self.network.step_level is not None:
            has_free_bits |= resolve_step_free_bits(self.objective) > 0
        if not (has_contrast or has_free_bits):
            return None
        with torch.no_grad(), unchanged_buffers(self.network):
            outputs = []
            for number, part in enumerate(parts):
                seed_noise(self.seed, TRAINING, part.position, number, device=part.lengths_B.device)
                outputs.append(posterior_output(self.network, part))
            free_bits = self._free_bits(outputs[0])
            return WholeBatch(
                find_above_floor(outputs, *free_bits) if has_free_bits else None,
                contrast_of_parts(outputs) if has_contrast else None,
            )

    def _free_bits(self, output: VAEOutput) -> tuple[float, int, FreeBits]:
        """Return the free bits of a dimension, how many dimensions have theirs together, and both of steps below the sequence."""
        scope: Literal["sequence", "step"] = "step" if output.posterior_mean.dim() == 3 else "sequence"
        own = (
            resolve_free_bits(self.objective, scope),
            self.objective.free_bits_shared_by(output.posterior_mean.shape[-1]),
        )
        if output.steps is None:
            return *own, NO_FREE_BITS
        shared_by = self.objective.free_bits_shared_by(output.steps.drawn.shape[-1])
        return *own, FreeBits(resolve_step_free_bits(self.objective), shared_by)

    def steps_of(self, batch: Batch) -> Tensor:
        """Return how many steps each sequence has."""
        return batch.lengths_B

    def kl_weight_at(self, step: int) -> float | None:
        """Return the scheduled weight of an optimizer step; None: --target_kl decides it during training."""
        if self.kl_weight.target_kl is not None:
            return None
        return scheduled_kl_weight(step, self.total_steps, self.objective)

    def steer(self, steering: Steering) -> None:
        """Train by another objective from now on, and with a learning rate that rises and falls once more."""
        self.steering, self.objective = steering, steering.objective(self.own_objective)
        self.total_steps = self.planned_steps + steering.added_steps
        self.kl_weight = KLWeight(self.objective, self.total_steps).to(self.device)

    def learning_rate_factor(self, step: int) -> float:
        """Return the share of --lr in an optimizer step."""
        if self.steering is not None:
            return self.steering.learning_rate_factor(step, self.total_steps, self.optimizer)
        if before := self.objective.pretrain_autoencoder:  # which rises to the whole rate, and then stays there
            warmup = steps_of(self.optimizer.warmup, self.total_steps)
            if step < before:
                return min(1.0, (step + 1) / max(1, warmup))
        return learning_rate_factor(step - before, self.total_steps - before, self.optimizer)

    def takes_flags(self) -> bool:
        """Return whether the flags of the model have an effect, too, so that a monitor may advise them."""
        return isinstance(self.network, SequenceVAE)

    def circumstances(self) -> Circumstances | None:
        """Return what holds the rate up, for a monitor; None: a network of another kind does not say."""
        if not isinstance(self.network, SequenceVAE):
            return None
        settings = self.network.settings
        has_levels = self.network.step_level is not None
        return Circumstances(
            level="sequence" if has_levels else None,
            free_bits=resolve_free_bits(self.objective, settings.latent_scope),
            free_bits_by=self.objective.free_bits_by,
            has_normalised_means=settings.posterior in ("batch_norm", "du"),
            has_contrastive_loss=self.objective.contrastive_weight > 0,
            least_rate=settings.least_rate,
            has_label_loss=self.network.classifier is not None and self.objective.weight_of_labels > 0,
            sees_inputs=self.network.decoder.autoregressive,
            codebook=settings.codebook if settings.is_discrete else None,
            revives_codes=settings.revive_codes,
            offers_rescue=self.offers_rescue and not (settings.is_discrete or has_levels),
        )

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        """Take the step; then give codebooks what fell to their codes, and the controller of the KL the step's mean, over all its
        micro-batches and processes."""
        super().optimizer_step(*arguments, **named)
        if self.codes is not None:
            trainer = self.trainer
            total = partial(trainer.strategy.reduce, reduce_op="sum")
            self.codes.after_step(trainer.global_step, total, trainer.global_rank, trainer.world_size)
        if self.average is not None:
            self.average.update()
        if self._kl_of_step:
            kl, sequences = self.trainer.strategy.reduce(torch.stack(self._kl_of_step).sum(dim=0), reduce_op="sum")
            self.kl_weight.update(kl / sequences)
            self._kl_of_step.clear()

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        if self.average is not None:
            self.average.put_in_force()

    def on_validation_model_train(self) -> None:
        if self.average is not None:
            self.average.put_back()
        super().on_validation_model_train()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        for sums, class_scores_BC, labels_B in self.micro_batches.without_gradients(batch, self._validate):
            self._validated.append(sums)
            self.label_metrics.update(class_scores_BC, labels_B)

    def _validate(self, batch: Batch, part: int) -> tuple[Sums, Tensor | None, Tensor | None]:
        seed_noise(self.seed, VALIDATION, batch.position, part, device=batch.lengths_B.device)
        output: VAEOutput = self.network(batch)
        sums = sums_of(negative_elbo(output, kl_weight=1.0, free_bits=0.0), output, batch)
        return sums, output.class_scores_BC, batch.labels_B

    def on_validation_epoch_end(self) -> None:
        total = add_up(self._validated, self.trainer)
        self._validated.clear()
        metrics = {
            "valid_elbo": -total.loss / total.sequences,
            "valid_nll": total.nll / total.sequences,
            "valid_kl": total.kl / total.sequences,
            "valid_nll_per_step": total.nll / total.predicted_steps,
            "valid_sequences": total.sequences,
            **self.label_metrics.compute_and_reset(),
        }
        self.log_dict(metrics, sync_dist=True, logger=False)  # Progress passes them on to the loggers
        self.validated_at_step = self.global_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["origin"] = self.origin
        checkpoint["parts"] = self.micro_batches.parts.state_dict()
        if self.steering is not None:
            checkpoint["steering"] = self.steering._asdict()
        if self.average is not None:
            self.average.save(checkpoint, WEIGHTS)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.micro_batches.parts.load_state_dict(checkpoint.get("parts", {}))  # older ones were never split
        if "steering" in checkpoint:  # before the weights are loaded, as a controller has some of its own
            self.steer(Steering(**checkpoint["steering"]))
        if self.average is not None:
            self.average.load(checkpoint, WEIGHTS)
        with_own_weights(checkpoint, WEIGHTS)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = make_optimizer(self.network, self.optimizer)
        # No bound method: the schedule would store it in checkpoints.
        schedule = LambdaLR(optimizer, lambda step: self.learning_rate_factor(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        """Clip by hand: Lightning refuses to for a fused optimizer under mixed precision, where nothing is unscaled yet."""
        scaler = scaler_of(self.trainer)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # for others Lightning has done it
        longest = self.optimizer.gradient_clip or float("inf")
        self.gradient_norm = whole(nn.utils.clip_grad_norm_(self.network.parameters(), longest))
        self.judge.refuse_if_spoilt(optimizer, self.gradient_norm, self.trainer)


class StepLevelOfModule:
    """The latents of steps below their sequence's, as a monitor reads them: in units of their prior."""

    def __init__(self, module: TrainingModule, network: SequenceVAE) -> None:
        self.module, self.network = module, network

    def posterior_of(self, batch: Batch) -> Posterior:
        return self.network.step_posterior(batch)

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        return self.network.nll_given_level(batch, z, of_steps=True)

    def steps_of(self, batch: Batch) -> Tensor:
        return self.module.steps_of(batch)

    def circumstances(self) -> Circumstances:
        """Return what holds the rate up; a loss on labels and a contrastive one are computed from the sequence's latent."""
        return Circumstances(
            level="step",
            free_bits=resolve_step_free_bits(self.module.objective),
            free_bits_by=self.module.objective.free_bits_by,
            sees_inputs=self.network.decoder.autoregressive,
        )


def outputs_of_steps(steps: StepLatents, is_taken: Tensor) -> dict[str, Tensor]:
    """Return the posteriors of steps that have latents below their sequence's, in units of their prior, as a monitor reads them."""
    mean, logvar, mask = steps.relative
    return {
        "step_posterior_mean": mean.detach(),
        "step_posterior_logvar": logvar.detach(),
        "step_posterior_mask": mask & is_taken,
    }


def posterior_output(network: nn.Module, batch: Batch) -> VAEOutput:
    """Return what a network says of a batch's posteriors, without decoding where it can; the NLL is then 0."""
    if not isinstance(network, Probeable):
        output: VAEOutput = network(batch)
        return output
    none_B = torch.zeros_like(batch.lengths_B)
    if isinstance(network, SequenceVAE):
        latents: Latents = network.latents(batch)
        return VAEOutput(*latents.posterior, none_B, none_B, kl=latents.kl, steps=latents.steps)
    return VAEOutput(*network.encode(batch), none_B, none_B)


def sums_of(objective: Objective, output: VAEOutput, batch: Batch) -> Sums:
    """Return the sums of a batch, detached, on its device."""
    return Sums(
        loss=objective.loss.detach(),
        nll=objective.nll.detach(),
        kl=objective.kl.detach(),
        predicted_steps=output.steps_B.sum(),
        real_steps=batch.lengths_B.sum(),
        sequences=(batch.lengths_B > 0).sum(),
    )


def add_up(parts: list[Sums], trainer: lightning.Trainer) -> Sums:
    """Add sums up over batches, then over processes."""
    total = torch.stack([torch.stack(column).sum().float() for column in zip(*parts, strict=True)])
    return Sums(*trainer.strategy.reduce(total, reduce_op="sum"))


def seed_noise(seed: int, stream: int, position: int, part: int = 0, *, device: torch.device) -> None:
    """Seed the noise of a part of a micro-batch, mixed into 32 bits, because a CPU generator ignores the rest.

    `torch.manual_seed` seeds all kinds of devices there could be, and keeps a stack trace for each kind that has not been used so
    far: 0.4 ms from within a Trainer, before every micro-batch. Here the one device that draws is seeded.
    """
    entropy = (seed, stream, position, part) if part else (seed, stream, position)
    mixed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
    elif device.type == "mps":
        torch.mps.manual_seed(mixed)


@contextmanager
def unchanged_buffers(network: nn.Module) -> Iterator[None]:
    """Restore running statistics and the like."""
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


class LabelMetrics(nn.Module):
    """AUROC and AUPRC of the supervised head over a whole validation, by torchmetrics.

    Of two classes they are those of the second; of more, the mean over the classes that occur, and are not the only one to occur:
    the others have neither. With fewer than two classes there are none.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.metrics: MetricCollection | None = None
        if classes >= 2:
            options: dict[str, Any] = {"num_classes": classes, "average": None, "ignore_index": NO_LABEL}
            self.metrics = MetricCollection(
                {
                    "valid_auroc": MulticlassAUROC(**options),
                    "valid_auprc": MulticlassAveragePrecision(**options),
                    "counts": MulticlassStatScores(**options),
                },
                compute_groups=False,
            )

    def update(self, scores_BC: Tensor | None, labels_B: Tensor | None) -> None:
        if self.metrics is not None and scores_BC is not None and labels_B is not None:
            self.metrics.update(scores_BC.float().softmax(dim=-1), labels_B)

    def compute_and_reset(self) -> dict[str, Tensor]:
        """Return the metrics since the last call; NaN where all labels are of one class."""
        if self.metrics is None:
            return {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torchmetrics")  # of classes that did not come, which are left out
            values = self.metrics.compute()
        self.metrics.reset()
        counts_C = values.pop("counts")[:, -1]  # the last of its columns: how often each class came
        told_apart_C = (counts_C > 0) & (counts_C < counts_C.sum())
        if len(counts_C) == 2:
            told_apart_C[0] = False
        return {name: value_C.float()[told_apart_C].mean() for name, value_C in values.items()}
