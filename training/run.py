"""From settings to a trained model in a run directory: data, network, Trainer, header, fit, last validation.

In: the settings of a run, callbacks that the command adds, and perhaps somebody's own network. Out: `runs/<name>/`, and
what the run came to.
"""

import math
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, Trainer
from torch import nn

from dataset import SequenceDataModule
from reports.run_files import append_event, environment, read_events, write_environment
from training.config_files import to_flat_dict, to_yaml
from training.console import program
from training.devices import Devices, resolve_devices
from training.distributed import decided_by_first, is_first_process
from training.exit_codes import DivergedError, Stopped, harmless
from training.header import header
from training.module import Probeable, ProbeableModule, TrainingModule
from training.network import build_network, make_ready
from training.plan import Plan, plan_run
from training.precision import precision_in_force
from training.resume import Start, identity_of, load_weights, open_run, refuse_other_run
from training.settings import TrainingSettings
from training.trainer import all_callbacks, make_trainer, previews_of

UNMONITORED = "off: a posterior collapse will neither be seen nor named, and there will be no posterior.jsonl"


class RunResult(NamedTuple):
    """What a run came to."""

    directory: Path
    valid_elbo: float
    """In nats per sequence, at weight 1, with one sample for each sequence of the whole validation split."""
    valid_kl: float


def fit(
    settings: TrainingSettings, callbacks: Sequence[Callback] = (), *, network: nn.Module | None = None
) -> RunResult:
    """Train as the settings say: the network that they describe, or one that turns a batch into a `VAEOutput` as well."""
    settings = shortened(settings) if settings.run.fast_dev_run else settings
    devices = resolve_devices(settings.compute)
    data = make_data(settings)
    plan = plan_run(settings, data, devices.world)
    torch.manual_seed(settings.run.seed)
    previews = []
    if network is None:
        network = build_network(data, settings.model, settings.compute)
        previews = [previews_of(data, settings.run.seed)]
    module = make_module(network, settings, plan, data)
    start = start_of(settings, data, devices)  # not before all that could be refused without a run
    if (result := result_of_finished(start, settings, plan)) is not None:
        return result
    if start.checkpoint is not None:
        refuse_other_run(start.checkpoint, module.origin)
    elif settings.run.init_from is not None:
        load_weights(network, Path(settings.run.init_from).expanduser(), data.description)
    remark = make_ready(network, settings.compute)
    resume_command = f"python {program()} --config {shlex.quote(str(start.directory / 'config.yaml'))}"
    everything = all_callbacks([*callbacks, *previews], settings, data, plan, start.directory, resume_command)
    precision = precision_in_force(settings.compute.precision, devices.accelerator)
    trainer = make_trainer(settings, data, plan, devices, precision, start.directory, everything)
    if is_first_process():
        write_files(settings, start)
        more = [
            *([("compiler", remark)] if remark else []),
            ("monitoring", "; ".join(str(callback) for callback in callbacks) or UNMONITORED),
            ("run", str(start.directory) + (f", goes on from {start.checkpoint.name}" if start.checkpoint else "")),
            ("to go on", resume_command),
        ]
        print(harmless(header(settings, data, network, plan, devices, precision, more)), flush=True)
    return train(trainer, module, data, settings, plan, start)


def shortened(settings: TrainingSettings) -> TrainingSettings:
    """Two optimizer steps and one validation batch (--fast_dev_run)."""
    return replace(
        settings,
        run=replace(settings.run, max_steps=2, log_every_n_steps=1),
        validation=replace(settings.validation, limit_val_batches=1, val_check_interval=1.0),
    )


def make_data(settings: TrainingSettings) -> SequenceDataModule:
    return SequenceDataModule(
        *(settings.source, settings.lengths, settings.cache, settings.batches, settings.loading),
        seed=settings.run.seed,
        accumulate=settings.optimizer.gradient_accumulation_steps,
        limit_val_batches=settings.validation.limit_val_batches or 1,
    )


def start_of(settings: TrainingSettings, data: SequenceDataModule, devices: Devices) -> Start:
    """Where the run begins: the same place for all its processes."""

    def decide() -> dict[str, str | None]:
        directory, checkpoint = open_run(settings.run, data.description.kind)
        return {"directory": str(directory), "checkpoint": None if checkpoint is None else str(checkpoint)}

    place = decided_by_first(decide, devices)
    directory, checkpoint = place["directory"], place["checkpoint"]
    assert directory is not None
    return Start(Path(directory), None if checkpoint is None else Path(checkpoint))


def result_of_finished(start: Start, settings: TrainingSettings, plan: Plan) -> RunResult | None:
    """What a run came to that has nothing left to do; None for one that has."""
    events = read_events(start.directory) if start.checkpoint is not None else []
    if not events or events[-1]["event"] != "finished":
        return None
    last = events[-1]
    if last["extent"] != extent_of(settings) or plan.total_steps > last["total_steps"]:
        return None
    if is_first_process():
        print(
            f"{start.directory} is finished (step {last['step']:,} of {last['total_steps']:,}, validation ELBO "
            f"{last['valid_elbo']:.3f}): nothing left to do. A larger --max_epochs or --max_steps goes on, another "
            "--run_name begins anew."
        )
    return RunResult(start.directory, last["valid_elbo"], last["valid_kl"])


def extent_of(settings: TrainingSettings) -> dict[str, Any]:
    """What else than its steps can end a run."""
    return {
        "max_time": settings.run.max_time,
        "early_stopping_patience": settings.validation.early_stopping_patience,
    }


def make_module(network: nn.Module, settings: TrainingSettings, plan: Plan, data: SequenceDataModule) -> TrainingModule:
    description = data.description
    kind = ProbeableModule if isinstance(network, Probeable) else TrainingModule
    return kind(
        network,
        settings.objective,
        replace(settings.optimizer, lr=plan.lr),
        total_steps=plan.total_steps,
        seed=settings.run.seed,
        origin={
            "settings": to_flat_dict(settings),
            "description": asdict(description),
            "data": identity_of(data.split("train").lengths_N),
        },
        classes=len(description.classes),
        latent_scope=settings.model.latent_scope,
    )


def write_files(settings: TrainingSettings, start: Start) -> None:
    """What another person needs to run the same, and the same command to go on: both with the name that the run got."""
    run = replace(settings.run, run_name=start.directory.name, output_dir=str(start.directory.parent), resume="auto")
    (start.directory / "config.yaml").write_text(to_yaml(replace(settings, run=run)), encoding="utf-8")
    write_environment(start.directory, environment(sys.argv, threads=torch.get_num_threads()))


def train(
    trainer: Trainer,
    module: TrainingModule,
    data: SequenceDataModule,
    settings: TrainingSettings,
    plan: Plan,
    start: Start,
) -> RunResult:
    """Fit, validate on everything, say what it came to; what happens on the way goes into events.jsonl."""

    def note(event: str, **fields: Any) -> None:
        if trainer.is_global_zero:
            append_event(start.directory, event, step=trainer.global_step, **fields)

    note("started" if start.checkpoint is None else "resumed")
    try:
        with warnings.catch_warnings():
            # Lightning 2.6.6 asks torch 2.13 in ways that torch calls deprecated.
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
            warnings.filterwarnings("ignore", message=".*functional.all_gather is deprecated.*")
            trainer.fit(module, datamodule=data, ckpt_path=start.checkpoint, weights_only=True)
            validate_on_all(trainer, module, data, settings)
        result = result_of(trainer, start.directory)
    except Stopped:
        note("interrupted")
        raise
    except DivergedError as error:
        note("diverged", said=str(error))
        raise
    ended = {"valid_elbo": result.valid_elbo, "valid_kl": result.valid_kl, "extent": extent_of(settings)}
    note("finished", total_steps=plan.total_steps, **ended)
    return result


def validate_on_all(
    trainer: Trainer, module: TrainingModule, data: SequenceDataModule, settings: TrainingSettings
) -> None:
    """Unless that is what the last validation was."""
    is_partial = settings.validation.limit_val_batches != 1.0 and not settings.run.fast_dev_run
    if is_partial:
        data.limit_val_batches = 1.0
    if is_partial or module.validated_at_step != trainer.global_step:
        trainer.limit_val_batches = 1.0  # with --limit_val_batches 0 there was none so far
        trainer.validate(module, datamodule=data, verbose=False)


def result_of(trainer: Trainer, directory: Path) -> RunResult:
    """Say what the run came to."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if not math.isfinite(metrics["valid_elbo"]):
        raise DivergedError(f"the validation ELBO is {metrics['valid_elbo']}: training diverged. Lower --lr.")
    if trainer.is_global_zero:
        print(
            f"done: validation ELBO {metrics['valid_elbo']:.3f} nats per sequence "
            f"(NLL {metrics['valid_nll']:.3f}, KL {metrics['valid_kl']:.3f}); {directory / 'checkpoints' / 'last.ckpt'}",
            flush=True,
        )
    return RunResult(directory, metrics["valid_elbo"], metrics["valid_kl"])
