"""One session of a run: a Trainer, all that watches it, training to the end or to what stops it, the last validation.

In: what `run.py` has prepared. Out: what the run came to, or `NonFiniteError` where it has to go on from an earlier checkpoint; in
events.jsonl, what happened on the way.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning import Callback, Trainer
from torch import nn

from seqvae.config.training import TrainingSettings
from seqvae.console import shell_word
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import ExitCode, Stopped, harmless
from seqvae.models.vae import SequenceVAE
from seqvae.reports.run_files import command_line
from seqvae.training.callbacks.progress import Progress
from seqvae.training.devices import Devices, ResolvedPrecision
from seqvae.training.module import TrainingModule
from seqvae.training.run_directory.checkpoint_file import HEALTHY, read_lazily
from seqvae.training.run_directory.events import EndedBy, RunEvents, RunResult, result_of
from seqvae.training.run_directory.resume import Start
from seqvae.training.schedules import Plan
from seqvae.training.trainer import all_callbacks, make_trainer


class Prepared(NamedTuple):
    """What all sessions of a run share."""

    settings: TrainingSettings
    data: SequenceDataModule
    devices: Devices
    network: nn.Module
    callbacks: Sequence[Callback]
    """Beside those that belong to every run."""
    events: RunEvents
    resume_command: str


class Session(NamedTuple):
    """Ready to train."""

    run: Prepared
    trainer: Trainer
    callbacks: Sequence[Callback]
    module: TrainingModule
    plan: Plan
    start: Start


def make_session(
    run: Prepared, module: TrainingModule, plan: Plan, precision: ResolvedPrecision, start: Start
) -> Session:
    module.events = run.events
    run.data.on_trouble = lambda said: run.events.survived("loader_restarted", module.global_step, said)
    everything = all_callbacks(run.callbacks, run.settings, run.data, plan, module, start.directory, run.resume_command)
    trainer = make_trainer(
        *(run.settings, run.data, plan, run.devices, precision, start.directory, everything),
        has_static_graph=isinstance(run.network, SequenceVAE),
    )
    return Session(run, trainer, everything, module, plan, start)


def train(session: Session) -> RunResult:
    """Fit, validate on everything, say what it came to."""
    run, trainer, start = session.run, session.trainer, session.start
    try:
        with warnings.catch_warnings():
            # Lightning 2.6.6 asks torch 2.13 in ways that torch calls deprecated.
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
            warnings.filterwarnings("ignore", message=r".*torch.distributed.nn.functional.\w+ is deprecated.*")
            trainer.fit(session.module, datamodule=run.data, ckpt_path=start.checkpoint)
            validate_on_all(trainer, session.module, run.data, run.settings)
        finish_metrics(session)
        by = ended_by(trainer, session.plan)
        result = result_of(trainer, session.plan, run.settings, start.directory, by, run.events)
    except Stopped as stop:
        run.events.note("interrupted", trainer.global_step)
        if not stop.said:  # in the last validation, when all that was trained was saved
            raise Stopped(stop.number, f" in the last validation. To go on:\n{run.resume_command}") from stop
        raise
    except SystemExit as stop:
        if stop.code == ExitCode.COLLAPSED:
            print(harmless(after_collapse(start.directory, run.resume_command)), file=sys.stderr)
        raise
    run.events.finish()
    return result


def note_beginning(session: Session) -> None:
    checkpoint = session.start.checkpoint
    if checkpoint is None:
        session.run.events.note("started", 0)
    else:
        step = read_lazily(checkpoint)["global_step"]
        session.run.events.note("resumed", step, checkpoint=checkpoint.name, command=command_line(sys.argv))


def finish_metrics(session: Session) -> None:
    """A run that could not write down all it came to has not ended well."""
    for callback in session.callbacks:
        if isinstance(callback, Progress):
            callback.finish()


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
    if not is_partial and module.validated_at_step == trainer.global_step:
        return
    limit = data.limit_val_batches
    data.limit_val_batches = 1.0 if is_partial else limit
    trainer.limit_val_batches = 1.0  # with --limit_val_batches 0 there was none so far
    if trainer.is_global_zero and is_partial:
        print(f"last validation, on all {len(data.split('valid')):,} sequences", flush=True)
    try:
        trainer.validate(module, datamodule=data, verbose=False)
    finally:
        data.limit_val_batches = limit  # should the run go back from here
