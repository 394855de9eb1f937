"""Lightning's Trainer for a run, with everything that watches it, shows it and saves it."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Callback, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.profilers import PassThroughProfiler

from seqvae.config.training_settings import ComputeSettings, TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.exit_codes import UsageError
from seqvae.training.callbacks.checkpoints import Checkpoints, KnowsHealth
from seqvae.training.callbacks.compiling import CompilerTrial
from seqvae.training.callbacks.interrupts import StopWhenAsked
from seqvae.training.callbacks.memory import FlatMemory
from seqvae.training.callbacks.nonfinite import SkippedSteps
from seqvae.training.callbacks.previews import Previews
from seqvae.training.callbacks.progress import Progress
from seqvae.training.callbacks.time_limit import TimeLimit
from seqvae.training.devices import Devices, make_precision, make_strategy
from seqvae.training.loggers import make_logger
from seqvae.training.module import TrainingModule
from seqvae.training.plan import Plan
from seqvae.training.precision import InForce
from seqvae.training.run_directory.checkpoint_files import AtomicCheckpointIO
from seqvae.training.run_directory.resume import OptimizerAsSet
from seqvae.training.validation import validation_cadence

PREVIEWED_SEQUENCES = 6

UNITS = {"tokens": "token", "vectors": "step", "events": "step"}
"""What a step of a sequence is called."""


class NoProfiler(PassThroughProfiler):
    """Lightning enters its profiler around each of fifty hooks a micro-batch. Its own that does nothing takes 30 us for that."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> Any:
        return self._nothing


def make_trainer(
    settings: TrainingSettings,
    data: SequenceDataModule,
    plan: Plan,
    devices: Devices,
    precision: InForce,
    directory: Path,
    callbacks: Sequence[Callback],
    *,
    has_static_graph: bool = False,
) -> Trainer:
    """Everything that matters is passed: what is left out, PL_TRAINER_* variables of the environment may change.

    `has_static_graph`: the network uses all its weights in the same way, whatever the batch.
    """
    compute, validation = settings.compute, settings.validation
    cadence = validation_cadence(
        validation.val_check_interval,
        batches_per_epoch=data.batches_per_epoch(devices.world),
        accumulate=data.accumulate,
    )
    own_precision = make_precision(precision, devices, compute.initial_loss_scale)
    made_by_lightning = partial(
        Trainer,
        accelerator=devices.accelerator,
        devices=devices.per_node,
        num_nodes=devices.nodes,
        precision=None if own_precision else precision.precision,
        plugins=[AtomicCheckpointIO(), *([own_precision] if own_precision else [])],
        sync_batchnorm=compute.sync_batchnorm and devices.world > 1,
        max_epochs=-1,
        max_steps=plan.total_steps,
        accumulate_grad_batches=data.accumulate,
        check_val_every_n_epoch=cadence.epochs,
        val_check_interval=cadence.batches or 1.0,
        limit_train_batches=1.0,
        limit_val_batches=1.0 if validation.limit_val_batches else 0,
        num_sanity_val_steps=validation.sanity_checks,
        callbacks=list(callbacks),
        logger=make_logger(settings.run, directory, directory.name) or False,
        log_every_n_steps=settings.run.log_every_n_steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=True,
        use_distributed_sampler=False,
        gradient_clip_val=None,
        deterministic=compute.deterministic,
        benchmark=wants_benchmark(compute, settings.batches.use_dynamic_padding),
        detect_anomaly=compute.detect_anomaly,
        profiler=NoProfiler(),
        default_root_dir=directory,
    )
    strategy = make_strategy(compute.strategy, devices, static_graph=has_static_graph and data.accumulate == 1)
    try:
        return made_by_lightning(strategy=strategy)
    except (ValueError, MisconfigurationException) as error:
        if compute.strategy in ("auto", "ddp"):
            raise
        raise UsageError(f"--strategy {compute.strategy}: {error}") from error


def all_callbacks(
    given: Sequence[Callback],
    settings: TrainingSettings,
    data: SequenceDataModule,
    plan: Plan,
    module: TrainingModule,
    directory: Path,
    resume_command: str,
) -> list[Callback]:
    """Those given and what belongs to every run. First what shows how a step went, last what writes it into a checkpoint."""
    validation, description = settings.validation, data.description
    progress = Progress(
        directory / "metrics.csv",
        every_n_steps=settings.run.log_every_n_steps,
        total_steps=plan.total_steps,
        unit=UNITS[description.kind],
        has_labels=len(description.classes) >= 2,
        time_limit=settings.run.time_limit,
    )
    events = module.events
    assert events is not None
    checkpoints = Checkpoints(
        directory / "checkpoints",
        validation.checkpoint_every_n_steps,
        watchers=[callback for callback in given if isinstance(callback, KnowsHealth)],
        say=lambda said: events.survived("not_saved", module.global_step, said),
    )
    early: list[Callback] = []
    if settings.run.time_limit is not None:
        early.append(TimeLimit(settings.run.time_limit))
    if validation.early_stopping_patience is not None:
        early.append(
            EarlyStopping(
                "valid_elbo", mode="max", patience=validation.early_stopping_patience, check_on_train_epoch_end=False
            )
        )
    stop = StopWhenAsked(checkpoints, resume_command)
    first = [CompilerTrial(data, plan.total_steps)] if settings.compute.compile_model else []
    skipped = SkippedSteps(module.judge, events, data.split("train").ids)
    return [*first, OptimizerAsSet(), progress, *given, FlatMemory(), *early, skipped, stop, checkpoints]


def previews_of(data: SequenceDataModule, seed: int) -> Previews:
    """Of a few sequences of the validation split, chosen once."""
    split = data.split("valid")
    chosen = np.random.default_rng(seed).choice(len(split), min(PREVIEWED_SEQUENCES, len(split)), replace=False)
    return Previews(data.description, batch=split.gather(np.sort(chosen)), seed=seed)


def wants_benchmark(compute: ComputeSettings, use_dynamic_padding: bool) -> bool:
    """Trying out algorithms pays where the same shape comes again and again."""
    return not use_dynamic_padding if compute.cudnn_benchmark is None else compute.cudnn_benchmark
