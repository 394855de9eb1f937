"""From settings to a trained model in a run directory: data, network, Trainer, header, fit, last validation.

In: the settings of a run, and callbacks that the command adds. Out: `runs/<name>/` with config.yaml, metrics.csv and
checkpoints/last.ckpt, and the validation ELBO.
"""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import NamedTuple

import lightning
import numpy as np
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from dataset import SequenceDataModule
from models.embeddings import GivenVectors
from models.sequence_vae import SequenceVAE
from sequences.description import DataDescription
from sequences.errors import StorageError
from training.config_files import to_flat_dict, to_yaml
from training.exit_codes import DivergedError, UsageError, harmless
from training.module import TrainingModule
from training.precision import InForce, precision_in_force
from training.progress import Progress
from training.schedules import planned_steps
from training.settings import RunSettings, TrainingSettings

UNITS = {"tokens": "token", "vectors": "step", "events": "step"}
"""What a step of a sequence is called."""


class RunResult(NamedTuple):
    """What a run came to."""

    directory: Path
    valid_elbo: float
    """In nats per sequence, at weight 1, with one sample for each sequence."""
    valid_kl: float


def fit(settings: TrainingSettings, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Train as the settings say."""
    run = settings.run
    data = SequenceDataModule(
        *(settings.source, settings.lengths, settings.cache, settings.batches, settings.loading),
        seed=run.seed,
        accumulate=run.gradient_accumulation_steps,
    )
    description = data.description
    steps_per_epoch = data.steps_per_epoch()
    total_steps = planned_steps(
        run.max_epochs,
        run.max_steps,
        optimizer_steps_per_epoch=steps_per_epoch,
        sequence_steps_per_epoch=int(data.split("train").lengths_N.sum(dtype=np.int64)),
    )
    torch.manual_seed(run.seed)
    module = TrainingModule(
        SequenceVAE(description, settings.model, given_vectors(data)),
        settings.objective,
        settings.optimizer,
        total_steps=total_steps,
        seed=run.seed,
        origin={"settings": to_flat_dict(settings), "description": asdict(description)},
    )
    directory = make_run_directory(run, description)
    (directory / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
    precision = precision_in_force(run.precision, device_type())
    progress = Progress(
        directory / "metrics.csv",
        every_n_steps=run.log_every_n_steps,
        total_steps=total_steps,
        unit=UNITS[description.kind],
    )
    trainer = make_trainer(run, precision, total_steps, directory, [*callbacks, progress])
    print(harmless(header(settings, data, module, precision, directory)), flush=True)
    with warnings.catch_warnings():
        # Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
        trainer.fit(module, datamodule=data)
        if total_steps % steps_per_epoch:  # the last epoch was cut short, and so was its validation
            trainer.validate(module, datamodule=data, verbose=False)
    return finish(trainer, directory)


def given_vectors(data: SequenceDataModule) -> GivenVectors | None:
    """What --variable_embeddings_path says."""
    vectors_VG = data.variable_vectors()
    if vectors_VG is None:
        return None
    return GivenVectors(torch.from_numpy(vectors_VG), data.source.freeze_variable_embeddings)


def make_run_directory(run: RunSettings, description: DataDescription) -> Path:
    """A new directory; runs are never written over. Runs without a name that start in one second get a number, too."""
    name = run.run_name or f"{description.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = Path(run.output_dir).expanduser() / name
    if not run.run_name:
        numbered = (directory.with_name(f"{name}-{number}") for number in count(2))
        while directory.exists():
            directory = next(numbered)
    try:
        directory.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError(f"--run_name {name}: {directory} is there already, choose another name") from error
    except OSError as error:
        raise StorageError(f"{directory}: cannot be made ({error.strerror}). Choose another --output_dir.") from error
    return directory


def make_trainer(
    run: RunSettings, precision: InForce, total_steps: int, directory: Path, callbacks: list[Callback]
) -> lightning.Trainer:
    """Everything that matters is passed: what is left out, PL_TRAINER_* variables of the environment may change."""
    last = ModelCheckpoint(
        directory / "checkpoints", filename="last", save_on_train_epoch_end=True, enable_version_counter=False
    )
    return lightning.Trainer(
        accelerator=device_type(),
        strategy="auto",
        devices=1,
        num_nodes=1,
        precision=precision.precision,
        max_epochs=-1,
        max_steps=total_steps,
        accumulate_grad_batches=run.gradient_accumulation_steps,
        check_val_every_n_epoch=1,
        val_check_interval=1.0,
        limit_train_batches=1.0,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, last],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=None,
        deterministic=False,
        benchmark=False,
        default_root_dir=directory,
    )


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def header(
    settings: TrainingSettings, data: SequenceDataModule, module: TrainingModule, precision: InForce, directory: Path
) -> str:
    """What will run, in a few lines."""
    run, model = settings.run, settings.model
    first, *more = data.summary()
    parameters = sum(p.numel() for p in module.network.parameters())
    reason = f" instead of {run.precision}: {precision.reason}" if precision.reason else ""
    lines = [
        ("data", first),
        *(("", line) for line in more),
        ("model", f"{parameters / 1e6:.2f} M parameters, width {model.width}, {model.latent_size} latent dimensions"),
        (
            "training",
            f"{module.total_steps:,} steps of {run.gradient_accumulation_steps} batch(es), lr {settings.optimizer.lr:g}",
        ),
        ("precision", f"{precision.precision} on {device_type()}{reason}"),
        ("run", str(directory)),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in lines)


def finish(trainer: lightning.Trainer, directory: Path) -> RunResult:
    """Say what the run came to."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if not math.isfinite(metrics["valid_elbo"]):
        raise DivergedError(f"the validation ELBO is {metrics['valid_elbo']}: training diverged. Lower --lr.")
    print(
        f"done: validation ELBO {metrics['valid_elbo']:.3f} nats per sequence "
        f"(NLL {metrics['valid_nll']:.3f}, KL {metrics['valid_kl']:.3f}); {directory / 'checkpoints' / 'last.ckpt'}",
        flush=True,
    )
    return RunResult(directory, metrics["valid_elbo"], metrics["valid_kl"])
