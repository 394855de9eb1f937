"""From settings to a trained model in a run directory: data, plan, network, place, Trainer, header, fit, last validation.

In: the settings of a run, callbacks that the command adds, and perhaps somebody's own network. Out: `runs/<name>/`, and
what the run came to.
"""

import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import nn

from dataset import SequenceDataModule
from models.sequence_vae import SequenceVAE
from reports.run_files import append_event, command_line, environment, write_environment
from sequences.errors import SettingsError
from training.checkpoints import HEALTHY, read_lazily
from training.config_files import to_flat_dict, to_yaml
from training.console import program, shell_word
from training.devices import Devices, resolve_devices
from training.distributed import decided_by_first, is_first_process
from training.exit_codes import DivergedError, ExitCode, Stopped, UsageError, harmless
from training.header import describe_monitoring, header
from training.module import Probeable, ProbeableModule, TrainingModule
from training.network import build_network, make_ready
from training.outcome import EndedBy, RunResult, result_of, result_of_finished
from training.places import refuse_unwritable
from training.plan import Plan, plan_run
from training.precision import precision_in_force
from training.resume import Start, identity_of, load_weights, open_run, refuse_other_run
from training.settings import TrainingSettings
from training.trainer import all_callbacks, make_trainer, previews_of

RECORDED_SHAPES, CPU_SHAPES = 8, 32
"""Of batches. Each recorded graph takes memory of its own. On a CPU 32 shapes pad 0 to 4 % more, and the demo model passes 12 %
more real tokens a second, one of 7 million parameters 1.5 % (medians of five, in turns)."""


def fit(
    settings: TrainingSettings, callbacks: Sequence[Callback] = (), *, network: nn.Module | None = None
) -> RunResult:
    """Train as the settings say: the network that they describe, or one that turns a batch into a `VAEOutput` as well."""
    settings = shortened(settings) if settings.run.fast_dev_run else settings
    devices = resolve_devices(settings.compute)
    if is_first_process():
        refuse_unwritable(settings.run)
    if network is not None and settings.batches.pad_grid is None:  # it may not know sequences without steps
        settings = replace(settings, batches=replace(settings.batches, pad_grid=0))
    settings = with_few_shapes(settings)
    data = make_data(settings)
    plan = plan_run(settings, data, devices.world)
    torch.manual_seed(settings.run.seed)
    previews = []
    if network is None:
        network = build_network(data, settings.model, settings.compute, devices.world)
        previews = [previews_of(data, settings.run.seed)]
    module = make_module(network, settings, plan, data)
    start = start_of(settings, data, devices)
    with nothing_left_if_refused(start.directory):
        if start.checkpoint is not None:
            refuse_other_run(start.checkpoint, module.origin)
            refuse_other_beginning(start, settings)
            if (finished := result_of_finished(start.directory, settings, plan)) is not None:
                result, said = finished
                if is_first_process():
                    print(said)
                return result
            refuse_run_past_its_end(start.checkpoint, plan)
        elif settings.run.init_from is not None:
            load_weights(network, Path(settings.run.init_from).expanduser(), data.description)
        remark = make_ready(network, settings.compute, devices.accelerator)
        resume_command = f"python {program()} --config {shell_word(start.directory / 'config.yaml')}"
        everything = all_callbacks([*callbacks, *previews], settings, data, plan, start.directory, resume_command)
        precision = precision_in_force(settings.compute.precision, devices.accelerator)
        is_ours = isinstance(network, SequenceVAE)
        trainer = make_trainer(
            *(settings, data, plan, devices, precision, start.directory, everything), has_static_graph=is_ours
        )
    if is_first_process():
        write_files(settings, start)
        more = [
            *([("compiler", remark)] if remark else []),
            ("monitoring", describe_monitoring(callbacks, plan.total_steps)),
            ("run", str(start.directory) + (f", goes on from {start.checkpoint.name}" if start.checkpoint else "")),
            ("to go on", resume_command),
        ]
        print(harmless(header(settings, data, network, plan, devices, precision, more)), flush=True)
    if devices.nodes > 1:
        wait_for_other_machines(devices)
    return train(trainer, module, data, settings, plan, start, resume_command)


@contextmanager
def nothing_left_if_refused(directory: Path) -> Iterator[None]:
    """A directory that was made for a run that then could not be is removed again."""
    try:
        yield
    except (UsageError, SettingsError):
        with suppress(OSError):  # it holds something, so it was there before
            directory.rmdir()
        raise


def shortened(settings: TrainingSettings) -> TrainingSettings:
    """Two optimizer steps and one validation batch (--fast_dev_run)."""
    return replace(
        settings,
        run=replace(settings.run, max_steps=2, log_every_n_steps=1),
        validation=replace(settings.validation, limit_val_batches=1, val_check_interval=1.0),
    )


def with_few_shapes(settings: TrainingSettings) -> TrainingSettings:
    """What --pad_grid stands for where it is not given. A GPU that replays recorded graphs records one for each shape; a CPU's
    products of matrices in bf16 are compiled for each, which takes longer than small products themselves."""
    compute, batches = settings.compute, settings.batches
    if batches.pad_grid is not None or not (batches.use_dynamic_padding and batches.bucketing):
        return settings
    accelerator = resolve_devices(compute).accelerator
    shapes = 0
    if accelerator == "cuda" and compute.compile_model and compute.compile_mode == "reduce-overhead":
        shapes = RECORDED_SHAPES
    elif accelerator == "cpu" and precision_in_force(compute.precision, accelerator).precision == "bf16-mixed":
        shapes = CPU_SHAPES
    return replace(settings, batches=replace(batches, pad_grid=shapes))


def make_data(settings: TrainingSettings) -> SequenceDataModule:
    settings = with_few_shapes(settings)
    return SequenceDataModule(
        *(settings.source, settings.lengths, settings.cache, settings.batches, settings.loading),
        seed=settings.run.seed,
        accumulate=settings.optimizer.gradient_accumulation_steps,
        limit_val_batches=settings.validation.limit_val_batches or 1,
        attention_steps=settings.model.attention_steps,
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


def refuse_other_beginning(start: Start, settings: TrainingSettings) -> None:
    """A run that goes on has its weights: others would be left aside in silence."""
    assert start.checkpoint is not None
    began_from = read_lazily(start.checkpoint)["origin"]["settings"].get("init_from")
    if settings.run.init_from is not None and settings.run.init_from != began_from:
        raise UsageError(
            f"--init_from {settings.run.init_from}: {start.directory} goes on from its own {start.checkpoint.name}; give another "
            "--run_name to begin anew with these weights"
        )


def refuse_run_past_its_end(checkpoint: Path, plan: Plan) -> None:
    step = read_lazily(checkpoint)["global_step"]
    if step > plan.total_steps:
        raise UsageError(
            f"{checkpoint} is at step {step:,}, but --max_steps and --max_epochs make a run of {plan.total_steps:,}: "
            "raise them, or begin anew with another --run_name"
        )


def wait_for_other_machines(devices: Devices) -> None:
    """Training begins when all processes are there. Until then nothing can be lost, and torch waits where no handler of
    Python's is called: a signal ends the process at once."""
    if is_first_process():
        print(f"waiting for the processes of {devices.nodes} machines", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def make_module(network: nn.Module, settings: TrainingSettings, plan: Plan, data: SequenceDataModule) -> TrainingModule:
    description = data.description
    kind = ProbeableModule if isinstance(network, Probeable) else TrainingModule
    return kind(
        network,
        settings.objective,
        replace(settings.optimizer, lr=plan.lr, scale_lr=False),
        total_steps=plan.total_steps,
        seed=settings.run.seed,
        origin={
            "settings": to_flat_dict(settings),
            "description": asdict(description),
            "data": identity_of(data.split("train").lengths_N),
        },
        classes=len(description.classes),
    )


def write_files(settings: TrainingSettings, start: Start) -> None:
    """What another person needs to run the same, and the same command to go on: both with the name that the run got."""
    run = replace(settings.run, run_name=start.directory.name, output_dir=str(start.directory.parent), resume="auto")
    (start.directory / "config.yaml").write_text(to_yaml(replace(settings, run=run)), encoding="utf-8")
    if start.checkpoint is None:  # the command of a later session stands in events.jsonl
        write_environment(start.directory, environment(sys.argv, threads=torch.get_num_threads()))


def train(
    trainer: Trainer,
    module: TrainingModule,
    data: SequenceDataModule,
    settings: TrainingSettings,
    plan: Plan,
    start: Start,
    resume_command: str,
) -> RunResult:
    """Fit, validate on everything, say what it came to; what happens on the way goes into events.jsonl."""

    def note(event: str, step: int, **fields: Any) -> None:
        if trainer.is_global_zero:
            append_event(start.directory, event, step=step, **fields)

    if start.checkpoint is None:
        note("started", 0)
    else:
        note("resumed", read_lazily(start.checkpoint)["global_step"], command=command_line(sys.argv))
    try:
        with warnings.catch_warnings():
            # Lightning 2.6.6 asks torch 2.13 in ways that torch calls deprecated.
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
            warnings.filterwarnings("ignore", message=r".*torch.distributed.nn.functional.\w+ is deprecated.*")
            trainer.fit(module, datamodule=data, ckpt_path=start.checkpoint)
            validate_on_all(trainer, module, data, settings)
        return result_of(trainer, plan, settings, start.directory, ended_by(trainer, plan))
    except Stopped as stop:
        note("interrupted", trainer.global_step)
        if not stop.said:  # in the last validation, when all that was trained was saved
            raise Stopped(stop.number, f" in the last validation. To go on:\n{resume_command}") from stop
        raise
    except SystemExit as stop:
        if stop.code == ExitCode.COLLAPSED:
            print(after_collapse(start.directory, resume_command), file=sys.stderr)
        raise
    except DivergedError as error:
        note("diverged", trainer.global_step, said=str(error))
        raise


def after_collapse(directory: Path, resume_command: str) -> str:
    """What to type next."""
    healthy = directory / "checkpoints" / HEALTHY
    if healthy.exists():
        rescue = f"--init_from {shell_word(healthy)} --run_name {shell_word(f'{directory.name}-rescue')}"
        begin = f"From when it was last well, with a remedy of your choice:\n{resume_command} {rescue} --free_bits 0.25"
    else:
        anew = f"--run_name {shell_word(f'{directory.name}-2')}"
        begin = f"It was never well. Anew, with a remedy of your choice:\n{resume_command} {anew} --free_bits 0.25"
    return f"{begin}\nTo go on all the same:\n{resume_command}"


def ended_by(trainer: Trainer, plan: Plan) -> EndedBy:
    if trainer.global_step >= plan.total_steps:
        return "steps"
    early = trainer.early_stopping_callback
    return "early_stopping_patience" if early is not None and early.wait_count >= early.patience else "max_time"


def validate_on_all(
    trainer: Trainer, module: TrainingModule, data: SequenceDataModule, settings: TrainingSettings
) -> None:
    """Unless that is what the last validation was."""
    is_partial = not settings.validation.is_on_all and not settings.run.fast_dev_run
    if is_partial:
        data.limit_val_batches = 1.0
    if is_partial or module.validated_at_step != trainer.global_step:
        trainer.limit_val_batches = 1.0  # with --limit_val_batches 0 there was none so far
        if trainer.is_global_zero and is_partial:
            print(f"last validation, on all {len(data.split('valid')):,} sequences", flush=True)
        trainer.validate(module, datamodule=data, verbose=False)
