"""What a training script hands to Lightning's Trainer: arguments, the cadence of validations, previews, a logger.

In: settings, data and devices. Out: the Trainer's arguments; `seqvae/training/fit.py` adds what every run needs.
"""

import os
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning import Callback
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler

from seqvae.config.run import RunSettings
from seqvae.config.training import TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import UsageError
from seqvae.training.callbacks.latents import LatentPicture
from seqvae.training.callbacks.previews import MOST_SEQUENCES, Previews
from seqvae.training.distributed import Devices

LEAST_STEPS = 25
"""Optimizer steps between two validations at a share of an epoch, at least. Epochs of small sets have 50: a set of 600 was
validated every 5 steps, 300 times in a run."""

PROJECT = "seqvae"
"""The project that loggers file runs under, where the environment names no other."""


class NoProfiler(PassThroughProfiler):
    """A profiler that does nothing. Lightning enters its profiler around each of fifty hooks per micro-batch, and its own that
    does nothing takes 30 us for that."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> Any:
        return self._nothing


class Cadence(NamedTuple):
    """The cadence of Lightning's validations."""

    batches: int | None
    """Batches of one process between two validations within an epoch; None: at the end of the epoch."""
    epochs: int
    """Epochs between two epochs with validations."""


def validation_cadence(interval: float | int, *, batches_per_epoch: int, accumulate: int) -> Cadence:
    """Convert --val_check_interval, a share of an epoch or optimizer steps, into Lightning's batches and epochs.

    A share is LEAST_STEPS at least, or an epoch that has fewer. Validation always falls between two optimizer steps, where a
    checkpoint holds no half-added gradients. It is counted from the beginning of each epoch, because an epoch's last optimizer
    step may be of fewer batches.

    >>> validation_cadence(0.1, batches_per_epoch=1000, accumulate=2)
    Cadence(batches=100, epochs=1)
    >>> validation_cadence(0.1, batches_per_epoch=100, accumulate=2)
    Cadence(batches=50, epochs=1)
    >>> validation_cadence(150, batches_per_epoch=100, accumulate=2)
    Cadence(batches=None, epochs=3)
    """
    steps_per_epoch = -(-batches_per_epoch // accumulate)
    if isinstance(interval, int):
        steps = interval
    else:
        least = steps_per_epoch // max(1, steps_per_epoch // LEAST_STEPS)  # divides the epoch evenly
        steps = max(least, round(interval * steps_per_epoch))
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


def make_pictures(data: SequenceDataModule, settings: TrainingSettings) -> list[Callback]:
    """Return the callbacks that show what the network makes of a few validation sequences, which are chosen once, and at the end,
    in a run that is monitored, what the latents look like."""
    split, seed = data.split("valid"), settings.run.seed
    chosen = np.random.default_rng(seed).choice(len(split), min(MOST_SEQUENCES, len(split)), replace=False)
    tokens = int(data.split("train").lengths_N.sum(dtype=np.int64)) / data.cut.batches
    batch = split.gather(np.sort(chosen))
    previews = Previews(data.description, batch=batch, seed=seed, tokens_per_batch=tokens)
    if settings.monitoring.disable_metrics_monitoring:
        return [previews]
    return [previews, LatentPicture(data.description, sequences=split, seed=seed, tokens_per_batch=tokens)]


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
        try:
            logger = WandbLogger(directory.name, place, project=os.environ.get("WANDB_PROJECT", PROJECT))
            _ = logger.experiment  # without a key it refuses here, and not at the first row of figures
        except import_module("wandb.errors").Error as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise UsageError(
                f"--logger wandb: {reason}. Type `wandb login` once, or set WANDB_MODE=offline to keep the run on this machine"
            ) from error
        return logger
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
