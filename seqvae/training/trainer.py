"""Lightning's Trainer of a run: its arguments, its callbacks, its logger.

In: settings, data, plan and devices. Out: a Trainer with everything that watches a run, shows it and saves it.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
from seqvae.config.training import TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import UsageError
from seqvae.training.callbacks.checkpoint import Checkpoints, ReportsHealth
from seqvae.training.callbacks.compile import CompilerTrial
from seqvae.training.callbacks.interrupt import StopOnSignal, TimeLimit
from seqvae.training.callbacks.memory import FlatMemory
from seqvae.training.callbacks.nonfinite import SkippedSteps
from seqvae.training.callbacks.previews import MOST_SEQUENCES, Previews
from seqvae.training.callbacks.progress import Progress
from seqvae.training.distributed import Devices, ResolvedPrecision, make_precision, make_strategy
from seqvae.training.module import TrainingModule
from seqvae.training.run_directory.checkpoint_file import AtomicCheckpointIO
from seqvae.training.run_directory.resume import OptimizerAsSet
from seqvae.training.schedules import Plan

UNITS = {"tokens": "token", "vectors": "step", "events": "step"}
"""The name of one step of a sequence."""

PROJECT = "seqvae"
"""The project that loggers file runs under, where the environment names no other."""


class NoProfiler(PassThroughProfiler):
    """A profiler that does nothing. Lightning enters its profiler around each of fifty hooks per micro-batch, and its own that
    does nothing takes 30 us for that."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> Any:
        return self._nothing


class Cadence(NamedTuple):
    """How often Lightning validates."""

    batches: int | None
    """Batches of one process between two validations within an epoch; None: at the end of the epoch."""
    epochs: int
    """Epochs between two epochs with validations."""


def validation_cadence(interval: float | int, *, batches_per_epoch: int, accumulate: int) -> Cadence:
    """Convert --val_check_interval, a share of an epoch or optimizer steps, into Lightning's batches and epochs.

    Validation always falls between two optimizer steps, where a checkpoint holds no half-added gradients. It is counted from the
    beginning of each epoch, because an epoch's last optimizer step may be of fewer batches.

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


def default_trainer_arguments(settings: TrainingSettings, data: SequenceDataModule, devices: Devices) -> dict[str, Any]:
    """Return the Trainer's arguments that the settings decide; the training scripts spell them out."""
    validation, compute = settings.validation, settings.compute
    cadence = validation_cadence(
        validation.val_check_interval,
        batches_per_epoch=data.batches_per_epoch(devices.world),
        accumulate=data.accumulate,
    )
    return {
        "accelerator": devices.accelerator,
        "devices": devices.per_node,
        "num_nodes": devices.nodes,
        "accumulate_grad_batches": data.accumulate,
        "val_check_interval": cadence.batches or 1.0,
        "check_val_every_n_epoch": cadence.epochs,
        "limit_val_batches": 1.0 if validation.limit_val_batches else 0,
        "num_sanity_val_steps": validation.sanity_checks,
        "benchmark": wants_benchmark(settings),
        "deterministic": compute.deterministic,
        "detect_anomaly": compute.detect_anomaly,
        "profiler": NoProfiler(),
    }


def wants_benchmark(settings: TrainingSettings) -> bool:
    """Return whether a GPU tries several algorithms for each shape, by default where the same shape comes again and again."""
    requested = settings.compute.cudnn_benchmark
    return not settings.batches.use_dynamic_padding if requested is None else requested


def make_trainer(
    settings: TrainingSettings,
    data: SequenceDataModule,
    plan: Plan,
    devices: Devices,
    precision: ResolvedPrecision,
    directory: Path,
    callbacks: Sequence[Callback],
    *,
    arguments: Mapping[str, Any] | None = None,
    has_static_graph: bool = False,
) -> Trainer:
    """Build the Trainer from `arguments`, by default `default_trainer_arguments`, and from what a run itself decides.

    Everything that matters is passed: PL_TRAINER_* variables of the environment could change what is left out.
    `has_static_graph`: the network uses all its weights in the same way, whatever the batch.
    """
    compute = settings.compute
    if arguments is None:
        arguments = default_trainer_arguments(settings, data, devices)
    precision_plugin = make_precision(precision, devices, compute.initial_loss_scale)
    logger = make_logger(settings.run, directory)
    strategy = make_strategy(compute.strategy, devices, static_graph=has_static_graph and data.accumulate == 1)
    try:
        return Trainer(
            **arguments,
            strategy=strategy,
            precision=None if precision_plugin else precision.precision,
            plugins=[AtomicCheckpointIO(), *([precision_plugin] if precision_plugin else [])],
            sync_batchnorm=compute.sync_batchnorm and devices.world > 1,
            max_epochs=-1,
            max_steps=plan.total_steps,
            limit_train_batches=1.0,
            callbacks=list(callbacks),
            logger=logger or False,
            log_every_n_steps=settings.run.log_every_n_steps,
            enable_progress_bar=False,  # Progress shows it
            enable_model_summary=False,  # the header does
            enable_checkpointing=True,
            use_distributed_sampler=False,  # the data module deals out batches by itself
            gradient_clip_val=None,  # TrainingModule clips, and keeps the norm
            default_root_dir=directory,
        )
    except (ValueError, MisconfigurationException) as error:
        if compute.strategy in ("auto", "ddp"):
            raise
        raise UsageError(f"--strategy {compute.strategy}: {error}") from error


def all_callbacks(
    own: Sequence[Callback],
    settings: TrainingSettings,
    data: SequenceDataModule,
    plan: Plan,
    module: TrainingModule,
    directory: Path,
    resume_command: str,
) -> list[Callback]:
    """Return the caller's own callbacks among those of every run: first what shows a step, last what saves a checkpoint."""
    run, validation, events = settings.run, settings.validation, module.events
    assert events is not None
    checkpoints = Checkpoints(
        directory / "checkpoints",
        validation.checkpoint_every_n_steps,
        watchers=[callback for callback in own if isinstance(callback, ReportsHealth)],
        say=lambda message: events.survived("not_saved", module.global_step, message),
    )
    progress = Progress(
        directory / "metrics.csv",
        every_n_steps=run.log_every_n_steps,
        total_steps=plan.total_steps,
        unit=UNITS[data.description.kind],
        has_labels=len(data.description.classes) >= 2,
        time_limit=run.time_limit,
    )
    callbacks: list[Callback] = [OptimizerAsSet(), progress, *own, FlatMemory()]
    if settings.compute.compile_model:
        callbacks.insert(0, CompilerTrial(data, plan.total_steps))
    if run.time_limit is not None:
        callbacks.append(TimeLimit(run.time_limit))
    if (patience := validation.early_stopping_patience) is not None:
        callbacks.append(EarlyStopping("valid_elbo", mode="max", patience=patience, check_on_train_epoch_end=False))
    skipped = SkippedSteps(module.judge, events, data.split("train").ids)
    return [*callbacks, skipped, StopOnSignal(checkpoints, resume_command), checkpoints]


def make_previews(data: SequenceDataModule, seed: int) -> Previews:
    """Return the callback that shows what the network makes of a few validation sequences, which are chosen once."""
    split = data.split("valid")
    chosen = np.random.default_rng(seed).choice(len(split), min(MOST_SEQUENCES, len(split)), replace=False)
    return Previews(data.description, batch=split.gather(np.sort(chosen)), seed=seed)


def make_logger(run: RunSettings, directory: Path) -> Logger | None:
    """Return the logger of --logger beside metrics.csv; None: there is none. `directory` is the run's, the default of --log_dir.

    WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are respected. A resumed run goes on in the same
    TensorBoard; in Weights & Biases and MLflow it is a new run of the same name, unless WANDB_RUN_ID or MLFLOW_RUN_ID says which
    one to continue.
    """
    if run.logger == "csv":
        return None
    if find_spec(run.logger) is None:
        raise UsageError(f"--logger {run.logger} needs the extra 'loggers': pip install -e '.[loggers]'")
    place = Path(run.log_dir).expanduser() if run.log_dir else directory
    if run.logger == "tensorboard":
        # Runs that share a --log_dir are told apart by their folders.
        folder = directory.name if run.log_dir else "tensorboard"
        return TensorBoardLogger(place, name=folder, version="", default_hp_metric=False)
    if run.logger == "wandb":
        place.mkdir(parents=True, exist_ok=True)  # without it wandb silently takes a temporary directory
        return WandbLogger(directory.name, place, project=os.environ.get("WANDB_PROJECT", PROJECT))
    tracking_uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not tracking_uri:
        tracking_uri = (place / "mlruns").absolute().as_uri()
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 wants a database for a single run otherwise
    return MLFlowLogger(
        os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        directory.name,
        tracking_uri=tracking_uri,
        run_id=os.environ.get("MLFLOW_RUN_ID"),
    )
