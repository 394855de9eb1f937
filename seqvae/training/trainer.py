"""When to validate: what the user said in, what Lightning counts out."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning import Callback, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler

from seqvae.config.run import RunSettings
from seqvae.config.training import ComputeSettings, TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import UsageError
from seqvae.training.callbacks.checkpoint import Checkpoints, ReportsHealth
from seqvae.training.callbacks.compile import CompilerTrial
from seqvae.training.callbacks.interrupt import StopOnSignal, TimeLimit
from seqvae.training.callbacks.memory import FlatMemory
from seqvae.training.callbacks.nonfinite import SkippedSteps
from seqvae.training.callbacks.previews import Previews
from seqvae.training.callbacks.progress import Progress
from seqvae.training.distributed import Devices, ResolvedPrecision, make_precision, make_strategy
from seqvae.training.module import TrainingModule
from seqvae.training.run_directory.checkpoint_file import AtomicCheckpointIO
from seqvae.training.run_directory.resume import OptimizerAsSet
from seqvae.training.schedules import Plan


class Cadence(NamedTuple):
    """Every so many batches within an epoch, in every so many epochs."""

    batches: int | None
    """Of one process; None: at the end of the epoch."""
    epochs: int


def validation_cadence(interval: float | int, *, batches_per_epoch: int, accumulate: int) -> Cadence:
    """Validation always falls between two optimizer steps, where a checkpoint holds no half-added gradients.

    Counted from the beginning of each epoch, because an epoch's last optimizer step may be of fewer batches.

    >>> validation_cadence(0.1, batches_per_epoch=100, accumulate=2)
    Cadence(batches=10, epochs=1)
    >>> validation_cadence(150, batches_per_epoch=100, accumulate=2)
    Cadence(batches=None, epochs=3)
    """
    steps_per_epoch = -(-batches_per_epoch // accumulate)
    steps = interval if isinstance(interval, int) else max(1, round(interval * steps_per_epoch))
    if steps >= steps_per_epoch or steps * accumulate > batches_per_epoch:
        return Cadence(None, max(1, round(steps / steps_per_epoch)))
    return Cadence(steps * accumulate, 1)


# Lightning's Trainer for a run, with everything that watches it, shows it and saves it.

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
    precision: ResolvedPrecision,
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
        watchers=[callback for callback in given if isinstance(callback, ReportsHealth)],
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
    stop = StopOnSignal(checkpoints, resume_command)
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


# --logger -> a logger of Lightning's, beside metrics.csv, which every run writes.
#
# Where each of them sends to is its own affair: WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are
# respected. A resumed run goes on in the same TensorBoard; in Weights & Biases and MLflow it is a new run of the same name,
# unless WANDB_RUN_ID or MLFLOW_RUN_ID says which one to continue.

PROJECT = "seqvae"
"""What runs are collected under, where the environment names nothing else."""


def make_logger(run: RunSettings, directory: Path, run_name: str) -> Logger | None:
    """None: metrics.csv is all that was asked for. `directory` is the run's, the default of --log_dir."""
    if run.logger == "csv":
        return None
    if find_spec(run.logger) is None:
        raise UsageError(f"--logger {run.logger} needs the extra 'loggers': pip install -e '.[loggers]'")
    place = Path(run.log_dir).expanduser() if run.log_dir else directory
    if run.logger == "tensorboard":
        # Runs that share a --log_dir are told apart by their folders.
        folder = run_name if run.log_dir else "tensorboard"
        return TensorBoardLogger(place, name=folder, version="", default_hp_metric=False)
    if run.logger == "wandb":
        place.mkdir(parents=True, exist_ok=True)  # where it is missing, wandb takes a temporary directory in silence
        return WandbLogger(run_name, place, project=os.environ.get("WANDB_PROJECT", PROJECT))
    tracking_uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not tracking_uri:
        tracking_uri = (place / "mlruns").absolute().as_uri()
        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # else MLflow 3 wants a database for what is but one run
    return MLFlowLogger(
        os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        run_name,
        tracking_uri=tracking_uri,
        run_id=os.environ.get("MLFLOW_RUN_ID"),
    )
