"""From settings to a trained model in a run directory: data, plan, network, place, Trainer, header, fit, last validation.

In: the settings of a run, callbacks that the command adds, and perhaps somebody's own network. Out: `runs/<name>/`, and
what the run came to.
"""

import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, Trainer
from torch import nn

from seqvae.config.training import TrainingSettings
from seqvae.config.yaml_files import to_flat_dict, to_yaml
from seqvae.console import program, shell_word
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import DivergedError, ExitCode, Stopped, StorageError, UsageError, harmless
from seqvae.models.vae import SequenceVAE
from seqvae.reports.run_files import command_line, environment, write_environment, write_facts
from seqvae.training.callbacks.interrupt import StopOnSignal, restore_signal_handlers
from seqvae.training.callbacks.nonfinite import NonFiniteError
from seqvae.training.callbacks.progress import Progress
from seqvae.training.callbacks.report import RunReport
from seqvae.training.distributed import (
    Devices,
    ResolvedPrecision,
    decide_in_first_process,
    decide_together,
    is_first_process,
    resolve_devices,
    resolve_precision,
)
from seqvae.training.module import Probeable, ProbeableModule, TrainingModule
from seqvae.training.network import build_network, load_weights, make_ready
from seqvae.training.run_directory.checkpoint_file import HEALTHY, read_lazily
from seqvae.training.run_directory.directory import refuse_unwritable
from seqvae.training.run_directory.events import EndedBy, RunEvents, RunResult, result_of, result_of_finished
from seqvae.training.run_directory.facts import describe_monitoring, facts_of, header_lines, written
from seqvae.training.run_directory.recovery import Recovery, read_recovery, tell_of_recovery
from seqvae.training.run_directory.resume import Start, adopt_as_last, go_back, identity_of, open_run, refuse_other_run
from seqvae.training.schedules import Plan, plan_run
from seqvae.training.trainer import all_callbacks, make_trainer, previews_of

# One session of a run: a Trainer, all that watches it, training to the end or to what stops it, the last validation.
#
# In: what `run.py` has prepared. Out: what the run came to, or `NonFiniteError` where it has to go on from an earlier checkpoint; in
# events.jsonl, what happened on the way.


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
    everything = list(callbacks)
    if network is None:
        network = build_network(data, settings.model, settings.compute, devices.world)
        everything.append(previews_of(data, settings.run.seed))
    with restore_signal_handlers(), ExitStack() as held:
        start = start_of(settings, data, devices, held)
        if (result := refused_or_finished(start, settings, plan, data)) is not None:
            return result
        load_beginning(network, start, settings, data)
        if settings.run.resume not in ("auto", "never") and is_first_process():
            adopt_as_last(start)
        remark = make_ready(network, settings.compute, devices.accelerator)
        resume_command = f"python {program()} --config {shell_word(start.directory / 'config.yaml')}"
        events = RunEvents(start.directory, writes=is_first_process())
        report = RunReport(
            events, start.directory, every_n_steps=settings.run.log_every_n_steps, writes=is_first_process()
        )
        held.enter_context(report)
        run = Prepared(settings, data, devices, network, [*everything, report], events, resume_command)
        try:
            return hold_sessions(run, plan, start, remark)
        except (DivergedError, StorageError):  # of all processes alike
            if not is_first_process():
                sys.exit(0)  # with another code a launcher kills the first process, which has something to say
            raise


def load_beginning(network: nn.Module, start: Start, settings: TrainingSettings, data: SequenceDataModule) -> None:
    """The weights of --init_from; also for a run that goes on, if they are still there: it may have to go back to its beginning."""
    if settings.run.init_from is not None:
        path = Path(settings.run.init_from).expanduser()
        if start.checkpoint is None or path.exists():
            load_weights(network, path, data.description)


def refused_or_finished(
    start: Start, settings: TrainingSettings, plan: Plan, data: SequenceDataModule
) -> RunResult | None:
    """What a finished run came to; a run that cannot go on as asked is an error."""
    if start.checkpoint is None:
        return None
    refuse_other_run(start.checkpoint, origin_of(settings, data))
    refuse_other_beginning(start, settings)
    finished = result_of_finished(start.directory, settings, plan)
    if finished is None:
        refuse_run_past_its_end(start.checkpoint, plan)
        return None
    result, said = finished
    if is_first_process():
        print(said)
    return result


def hold_sessions(run: Prepared, plan: Plan, start: Start, remark: str) -> RunResult:
    """One session, or, after NaN or infinity, several, each from an earlier checkpoint and at a lower rate."""
    asked = resolve_precision(run.settings.compute.precision, run.devices.accelerator)
    recovery = read_recovery(start.directory, plan.lr)
    beginning = {name: weight.clone() for name, weight in run.network.state_dict().items()}
    is_first = True
    while True:
        plan = plan._replace(lr=recovery.lr_in_force)
        precision = recovery.precision_in_force(asked)
        module = make_module(run.network, run.settings, plan, run.data)
        began_at = step_of(start.checkpoint)  # now: the session writes another one over it
        session = make_session(run, module, plan, precision, start)
        if is_first:
            announce(session, precision, remark)
            is_first = False
        outcome = outcome_of(session)
        if isinstance(outcome, RunResult):
            return outcome
        stop_if_asked(session, run)
        del session, module
        start, recovery = roll_back(outcome, start.directory, began_at, recovery, precision, run)
        if start.checkpoint is None:
            run.network.load_state_dict(beginning)


def outcome_of(session: Session) -> RunResult | NonFiniteError:
    """Without the error's traceback, which would keep the session's gradients in memory."""
    try:
        return train(session)
    except NonFiniteError as error:
        return error.with_traceback(None)


def stop_if_asked(session: Session, run: Prepared) -> None:
    """A signal that came while a session broke off ends the run all the same."""
    own = max(callback.asked for callback in session.callbacks if isinstance(callback, StopOnSignal))
    number = decide_together(lambda: own)
    if number:
        run.events.note("interrupted", session.trainer.global_step)
        if not is_first_process():
            sys.exit(0)
        raise Stopped(number, f" after a step that came to NaN. To go on:\n{run.resume_command}")


def roll_back(
    trouble: NonFiniteError,
    directory: Path,
    began_at: int,
    recovery: Recovery,
    precision: ResolvedPrecision,
    run: Prepared,
) -> tuple[Start, Recovery]:
    """To before the trouble; a checkpoint that led into it at once is no place to go back to."""
    if not recovery.is_possible:
        run.events.note("diverged", trouble.first_step, said=str(trouble))
        raise DivergedError(
            f"{trouble}, and so it was from earlier checkpoints, at last with --lr {recovery.lr_in_force:g}. Lower --lr or raise "
            "--warmup; the sequences that the steps were made of stand in events.jsonl"
        )
    led_into_it = trouble.first_step <= began_at + 1
    run.data.teardown("fit")  # Lightning does not, when a session breaks off
    before = min(began_at, trouble.first_step) if led_into_it else trouble.first_step
    back_to = decide_together(lambda: go_back(directory, before))
    recovery = recovery.once_more(precision.precision, run.devices.accelerator)
    tell_of_recovery(run.events, trouble, back_to, recovery)
    return Start(directory, back_to), recovery


def step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(read_lazily(checkpoint)["global_step"])


def announce(session: Session, precision: ResolvedPrecision, remark: str) -> None:
    """Write what the run is, and say it."""
    run, start = session.run, session.start
    if is_first_process():
        write_files(run.settings, start)
        note_beginning(session)
        more = [
            *([("compiler", remark)] if remark else []),
            ("monitoring", describe_monitoring(run.callbacks, session.plan.total_steps)),
            ("run", str(start.directory) + (f", goes on from {start.checkpoint.name}" if start.checkpoint else "")),
            ("to go on", run.resume_command),
        ]
        lines = header_lines(run.settings, run.data, run.network, session.plan, run.devices, precision, more)
        write_facts(start.directory, facts_of(run.settings, run.data, session.plan, lines, run.resume_command))
        print(harmless(written(lines)), flush=True)
    if run.devices.nodes > 1:
        wait_for_other_machines(run.devices)


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
    elif accelerator == "cpu" and resolve_precision(compute.precision, accelerator).precision == "bf16-mixed":
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


def start_of(settings: TrainingSettings, data: SequenceDataModule, devices: Devices, held: ExitStack) -> Start:
    """Where the run begins: the same place for all its processes."""

    def decide() -> dict[str, str | None]:
        directory, checkpoint = open_run(settings.run, data.description.kind, held)
        return {"directory": str(directory), "checkpoint": None if checkpoint is None else str(checkpoint)}

    place = decide_in_first_process(decide, devices)
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
    kind = ProbeableModule if isinstance(network, Probeable) else TrainingModule
    return kind(
        network,
        settings.objective,
        replace(settings.optimizer, lr=plan.lr, scale_lr=False),
        total_steps=plan.total_steps,
        seed=settings.run.seed,
        origin=origin_of(settings, data),
        classes=len(data.description.classes),
    )


def origin_of(settings: TrainingSettings, data: SequenceDataModule) -> dict[str, Any]:
    """What tells a run from others."""
    split = data.split("train")
    return {
        "settings": to_flat_dict(settings),
        "description": asdict(data.description),
        "data": identity_of(split.lengths_N, split.content),
    }


def write_files(settings: TrainingSettings, start: Start) -> None:
    """What another person needs to run the same, and the same command to go on: both with the name that the run got."""
    run = replace(settings.run, run_name=start.directory.name, output_dir=str(start.directory.parent), resume="auto")
    beside = start.directory / "config.yaml.new"
    beside.write_text(to_yaml(replace(settings, run=run)), encoding="utf-8")
    beside.replace(start.directory / "config.yaml")
    if start.checkpoint is None:  # the command of a later session stands in events.jsonl
        write_environment(start.directory, environment(sys.argv, threads=torch.get_num_threads()))
