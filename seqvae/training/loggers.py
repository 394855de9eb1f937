"""--logger -> a logger of Lightning's, beside metrics.csv, which every run writes.

Where each of them sends to is its own affair: WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are
respected. A resumed run goes on in the same TensorBoard; in Weights & Biases and MLflow it is a new run of the same name,
unless WANDB_RUN_ID or MLFLOW_RUN_ID says which one to continue.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from seqvae.config.run_settings import RunSettings
from seqvae.exit_codes import UsageError

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
