"""From settings to a trained model in a run directory: data, plan, network, Trainer, header, training, last validation.

In: the settings of a run, and whatever of its parts the caller brings. Out: `runs/<name>/`, and what the run came to.
"""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning import Callback, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from seqvae.clusters import refuse_without_ray
from seqvae.config.run import RunSettings, duration_of
from seqvae.config.training import RATE_TOKENS, TrainingSettings
from seqvae.config.yaml_files import to_flat_dict, to_yaml
from seqvae.console import program, shell_word
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import DivergedError, ExitCode, Stopped, StorageError, UsageError, harmless
from seqvae.files import is_remote, replace_file
from seqvae.models.vae import SequenceVAE
from seqvae.monitors import PosteriorMetricsMonitor, ThroughputMonitor
from seqvae.reports.run_files import HEALTHY, command_line, environment, write_environment, write_facts
from seqvae.text import folded, window_width
from seqvae.training.callbacks.aggressive import AggressiveEncoder
from seqvae.training.callbacks.checkpoint import Checkpoints, ReportsHealth
from seqvae.training.callbacks.compile import COMPILER_ANSWERS, Answers, CompilerTrial
from seqvae.training.callbacks.interrupt import EarlyStopping, StopOnSignal, TimeLimit, restore_signal_handlers
from seqvae.training.callbacks.memory import FlatMemory
from seqvae.training.callbacks.nonfinite import MOST_TIMES, NonFiniteError, Recovery, SkippedSteps, read_recovery
from seqvae.training.callbacks.pretraining import EndOfPretraining
from seqvae.training.callbacks.progress import Progress
from seqvae.training.callbacks.report import RunReport
from seqvae.training.callbacks.rescue import Rescue
from seqvae.training.distributed import (
    Devices,
    ResolvedPrecision,
    connect_processes,
    launched,
    make_precision,
    make_strategy,
    refuse_strategy,
    resolve_devices,
    resolve_precision,
)
from seqvae.training.module import TrainingModule
from seqvae.training.network import build_network, go_on_as_begun, load_weights, make_ready
from seqvae.training.processes import (
    decide_in_first_process,
    decide_together,
    find_launch,
    is_first_process,
    losses_named,
    meet,
    refuse_differences,
    shared_file,
)
from seqvae.training.run_directory.checkpoint_file import MUST_BE_THE_SAME, AtomicCheckpointIO, read_lazily
from seqvae.training.run_directory.records import (
    EndedBy,
    RunEvents,
    RunResult,
    facts_of,
    header_lines,
    result_of,
    result_of_finished,
)
from seqvae.training.run_directory.resume import (
    CONFIG,
    OptimizerAsSet,
    Start,
    adopt_as_last,
    as_it_began,
    go_back,
    identity_of,
    open_run,
    refuse_other_run,
    refuse_unwritable,
    settings_it_began_with,
    shared_out,
    with_labels_as_it_began,
)
from seqvae.training.schedules import Plan, has_full_kl_weight, lengthened, plan_run
from seqvae.training.sharding import ShardedStrategy, load_whole
from seqvae.training.trainer import default_trainer_arguments, make_logger, make_pictures

RECORDED_SHAPES, CPU_SHAPES = 8, 32
"""Shapes of batches. Each recorded graph takes memory of its own. On a CPU 32 shapes pad 0 to 4 % more, and the demo model passes
12 % more real tokens per second, one of 7 million parameters 1.5 % (medians of five, in turns)."""

Settings = TypeVar("Settings", bound=TrainingSettings)


@losses_named()
def fit(
    settings: TrainingSettings,
    callbacks: Sequence[Callback] | None = None,
    *,
    network: nn.Module | None = None,
    data: SequenceDataModule | None = None,
    trainer_arguments: Mapping[str, Any] | None = None,
) -> RunResult:
    """Train as the settings say; what the caller does not bring is built from them.

    `callbacks`: in place of the monitors of the recipe (`make_monitors`). `network`: turns a batch into a `VAEOutput`; one that is
    brought comes without previews. `data`: from settings that `prepare_settings` has prepared. `trainer_arguments`: in place of
    `default_trainer_arguments`.
    """
    if settings.compute.launcher == "ray" and data is None and find_launch() is None:
        if callbacks is not None or network is not None or trainer_arguments is not None:
            raise UsageError("--launcher ray trains with the recipe's own callbacks and network: leave yours out")
        refuse_without_ray("--launcher ray")
        from seqvae.training.ray_launcher import fit_on_ray

        return fit_on_ray(settings)
    is_foreign = network is not None and not isinstance(network, SequenceVAE)
    if is_foreign and data is None and settings.batches.pad_grid is None:  # it may not know sequences without steps
        settings = replace(settings, batches=replace(settings.batches, pad_grid=0))
    if data is not None:
        open_data(data)
    settings = prepare_settings(settings)
    devices = resolve_devices(settings.compute)
    is_own = data is None
    if data is None:
        data = make_data(settings)
        open_data(data)
    plan = plan_run(settings, data, devices.world)
    if (before := settings.objective.pretrain_autoencoder) >= plan.total_steps:
        raise UsageError(
            f"--pretrain_autoencoder {before:,} leaves nothing of a run of {plan.total_steps:,} optimizer steps: raise --max_steps "
            "or --max_epochs, or pretrain for fewer"
        )
    split = data.split("train")
    origin = {
        "settings": to_flat_dict(settings),
        "description": asdict(data.description),
        "data": identity_of(split.lengths_N, split.content),
    }
    refuse_other_data_or_settings(data, origin)
    torch.manual_seed(settings.run.seed)
    callbacks = make_monitors(settings) if callbacks is None else callbacks
    if network is None:
        network = build_network(data, settings.model, settings.compute, devices.world)
        callbacks = [*callbacks, *make_pictures(data, settings)]
    with restore_signal_handlers(), ExitStack() as held:
        if is_own:
            held.callback(data.close)

        def decide() -> dict[str, str | None]:
            directory, checkpoint = open_run(settings.run, data.description.kind, held)
            return {"directory": str(directory), "checkpoint": None if checkpoint is None else str(checkpoint)}

        place = decide_in_first_process(decide, devices.world)  # the same place for all processes
        checkpoint = None if place["checkpoint"] is None else shared_file(Path(place["checkpoint"]))
        start = Start(Path(str(place["directory"])), checkpoint)
        if start.checkpoint is not None:
            finished = go_on(start.directory, start.checkpoint, network, origin, settings, plan)
            if finished is not None:
                return finished
        if settings.run.init_from is not None:
            path = Path(settings.run.init_from).expanduser()
            # Also where the run goes on, if the file still exists: the run may have to go back to its beginning.
            if start.checkpoint is None or decide_together(path.exists):
                load_weights(network, shared_file(path), data.description)
        if settings.run.resume not in ("auto", "never"):
            decide_together(lambda: adopt_as_last(start) if is_first_process() else None)
        compiler_remark = make_ready(network, settings.compute, devices.accelerator)
        events = RunEvents(start.directory, writes=is_first_process())
        report = RunReport(events, every_n_steps=settings.run.log_every_n_steps)
        held.enter_context(report)
        held.enter_context(losses_named())  # within, so that the report says it
        run = _Run(
            *(settings, data, devices, network, origin, [*callbacks, report], trainer_arguments, events),
            *(
                start.directory,
                start.checkpoint,
                plan,
                compiler_remark,
                command_to_go_on(settings, devices, start.directory),
            ),
        )
        try:
            return run.train()
        except (DivergedError, StorageError):  # raised in all processes alike
            if not is_first_process():
                sys.exit(0)  # another code would make the launcher kill the first process before its message
            raise


def go_on(
    directory: Path,
    checkpoint: Path,
    network: nn.Module,
    origin: dict[str, Any],
    settings: TrainingSettings,
    plan: Plan,
) -> RunResult | None:
    """Prepare a network to go on from a run's checkpoint, or refuse to; return the result of a run that has finished already."""
    refuse_other_run(checkpoint, origin)
    stored = read_lazily(checkpoint)
    go_on_as_begun(network, origin, stored["origin"])
    began_from, step = stored["origin"]["settings"].get("init_from"), int(stored["global_step"])
    if settings.run.init_from not in (None, began_from):  # else other weights would be ignored silently
        raise UsageError(
            f"--init_from {settings.run.init_from}: {directory} goes on from its own {checkpoint.name}; "
            "give another --run_name to start over with these weights"
        )
    whole = plan._replace(total_steps=lengthened(plan.total_steps, stored.get("steering")))
    finished = decide_together(lambda: result_of_finished(directory, settings, whole))
    if finished is None and step > whole.total_steps:
        raise UsageError(
            f"{checkpoint} is at step {step:,}, but --max_steps and --max_epochs make a run of "
            f"{whole.total_steps:,}: raise them, or start over with another --run_name"
        )
    return finished


def refuse_other_data_or_settings(data: SequenceDataModule, origin: Mapping[str, Any]) -> None:
    """Refuse to train where other processes found other data, or were given other flags that have to be the same."""
    valid = data.split("valid")
    refuse_differences("data", origin["data"] | {"validation": (len(valid), valid.content)}, "files")
    names = (*MUST_BE_THE_SAME, "max_steps", "max_epochs", "bucket_megabytes", "compress_gradients")
    refuse_differences("settings", {name: origin["settings"].get(name) for name in names}, "flags")


def command_to_go_on(settings: TrainingSettings, devices: Devices, directory: Path) -> str:
    """Return what to type to go on with a run. Where machines share no disk, only the first has its settings file; there, what was
    typed goes on."""
    again = f"{program()} --config {shell_word(directory / CONFIG)}"
    again += " --allow_remote" if settings.source.allow_remote else ""
    if devices.nodes > 1:
        again = command_line(sys.argv)
        again += "" if settings.run.run_name else f" --run_name {shell_word(directory.name)}"
    return launched(devices, again)


def open_data(data: SequenceDataModule) -> None:
    """Open the data in all processes, however long one of them builds a cache.

    One that lies in a store is put there by the first process, before the others look for it.
    """
    is_shared = is_remote(data.cache.cache_dir or "")
    if is_shared and not is_first_process():
        meet("the cache was in its store")
    _ = data.data
    if is_shared and is_first_process():
        meet("the cache was in its store")
    meet("training")


@dataclass
class _Run:
    """A run from its opened directory on: one session, or, after NaN or infinity, several."""

    settings: TrainingSettings
    data: SequenceDataModule
    devices: Devices
    network: nn.Module
    origin: dict[str, Any]
    """What tells the run from others, and what its network is built from again."""
    callbacks: Sequence[Callback]
    trainer_arguments: Mapping[str, Any] | None
    events: RunEvents
    directory: Path
    checkpoint: Path | None
    """The checkpoint that the next session goes on from."""
    planned: Plan
    """As the settings say."""
    compiler_remark: str
    resume_command: str
    began_at: int = 0
    """The step that the present session began at."""
    plan: Plan = field(init=False)
    """That of the present session: at its rate, and with what a rescue added to it before."""
    progress: Progress = field(init=False)
    stop_on_signal: StopOnSignal = field(init=False)
    """Those of the present session."""

    def train(self) -> RunResult:
        """Hold sessions, each after the first from an earlier checkpoint and at a lower rate, until one ends well."""
        settings = self.settings
        requested = resolve_precision(settings.compute.precision, self.devices.accelerator)
        recovery = decide_together(lambda: read_recovery(self.directory, self.planned.lr))
        beginning = {name: weight.clone() for name, weight in self.network.state_dict().items()}
        is_announced = False
        while True:
            # Read before the session overwrites the file.
            stored: dict[str, Any] = {"global_step": 0} if self.checkpoint is None else read_lazily(self.checkpoint)
            self.began_at = int(stored["global_step"])
            total_steps = lengthened(self.planned.total_steps, stored.get("steering"))
            plan = self.plan = self.planned._replace(lr=recovery.lr, total_steps=total_steps)
            precision = recovery.resolve_precision(requested)
            module = TrainingModule(
                self.network,
                settings.objective,
                replace(settings.optimizer, lr=plan.lr, scale_lr=False, lr_base_tokens=RATE_TOKENS),
                total_steps=self.planned.total_steps,
                seed=settings.run.seed,
                origin=self.origin,
                classes=len(self.data.description.classes),
            )
            module.events = self.events
            module.offers_rescue = settings.monitoring.on_collapse != "rescue"
            trainer = self._make_trainer(module, precision)
            if not is_announced:
                self._announce(precision)
                is_announced = True
            try:
                return self._hold_session(trainer, module)
            except NonFiniteError as error:
                trouble = error.with_traceback(None)  # which would keep the session's gradients in memory
            step = trainer.global_step
            del trainer, module
            recovery = self._roll_back(trouble, step, recovery, precision)
            if self.checkpoint is None:
                load_whole(self.network, beginning)

    def _callbacks_around(self, module: TrainingModule) -> list[Callback]:
        """Return the caller's own callbacks among those of every run: first what shows a step, last what saves a checkpoint."""
        run, validation, data, events = self.settings.run, self.settings.validation, self.data, self.events
        checkpoints = Checkpoints(
            self.directory / "checkpoints",
            validation.checkpoint_every_n_steps,
            watchers=[callback for callback in self.callbacks if isinstance(callback, ReportsHealth)],
            say=lambda message: events.survived("not_saved", module.global_step, message),
        )
        self.progress = Progress(
            self.directory / "metrics.csv",
            every_n_steps=run.log_every_n_steps,
            total_steps=self.plan.total_steps,
            unit=data.description.unit,
            valid_sequences=len(data.split("valid")),
            has_labels=len(data.description.classes) >= 2 and self.settings.objective.weight_of_labels > 0,
            time_limit=run.time_limit,
        )
        callbacks: list[Callback] = [OptimizerAsSet(), self.progress, *self.callbacks, FlatMemory()]
        if self.settings.compute.compile_model:
            answers = Answers(data.data.path.parent / COMPILER_ANSWERS)
            callbacks.insert(0, CompilerTrial(data, self.plan.total_steps, self.settings.compute.compile_mode, answers))
        if run.time_limit is not None:
            callbacks.append(TimeLimit(run.time_limit))
        if (patience := validation.early_stopping_patience) is not None:
            total_steps, objective = self.plan.total_steps, self.settings.objective
            rescues = [callback for callback in self.callbacks if isinstance(callback, Rescue)]

            def is_counted(step: int) -> bool:
                if module.steering is not None:
                    return not any(rescue.is_active for rescue in rescues)
                return has_full_kl_weight(step, total_steps, objective)

            callbacks.append(EarlyStopping(patience, is_counted))
        monitors = [callback for callback in self.callbacks if isinstance(callback, PosteriorMetricsMonitor)]
        if steps := self.settings.objective.pretrain_autoencoder:
            resets_decoder = self.settings.objective.reset_decoder
            callbacks.append(EndOfPretraining(monitors, steps, resets_decoder=resets_decoder))
        if self.settings.objective.aggressive_encoder:
            budget = self.settings.objective.aggressive_budget
            callbacks.append(AggressiveEncoder(data, next(iter(monitors), None), budget))
        skipped = SkippedSteps(module.judge, events, data.split("train").ids)
        self.stop_on_signal = StopOnSignal(checkpoints, self.resume_command)
        return [*callbacks, skipped, self.stop_on_signal, checkpoints]

    def _make_trainer(self, module: TrainingModule, precision: ResolvedPrecision) -> Trainer:
        """Build the Trainer from the caller's arguments, by default `default_trainer_arguments`, and what a run itself decides.

        Everything that matters is passed: PL_TRAINER_* variables of the environment could change what is left out.
        """
        compute, devices, arguments = self.settings.compute, self.devices, self.trainer_arguments
        if arguments is None:
            arguments = default_trainer_arguments(self.settings, self.data, devices)
        precision_plugin = make_precision(precision, devices, compute.initial_loss_scale)
        # A SequenceVAE uses all its weights in the same way, whatever the batch.
        is_static = isinstance(self.network, SequenceVAE) and self.data.accumulate == 1
        logger = make_logger(self.settings.run, self.directory)
        timeout = duration_of(compute.distributed_timeout)
        assert timeout is not None
        strategy = make_strategy(compute, devices, timeout=timeout, static_graph=is_static)
        launch = find_launch() if devices.launcher else None
        try:
            return Trainer(
                **arguments,
                strategy=strategy,
                precision=None if precision_plugin else precision.precision,
                plugins=[
                    AtomicCheckpointIO(),
                    *([precision_plugin] if precision_plugin else []),
                    *([launch.environment] if launch else []),
                ],
                sync_batchnorm=compute.sync_batchnorm and devices.world > 1,
                max_epochs=-1,
                max_steps=self.plan.total_steps,
                limit_train_batches=1.0,
                inference_mode=not isinstance(
                    strategy, ShardedStrategy
                ),  # weights gathered in it could not go backward
                callbacks=self._callbacks_around(module),
                logger=logger or False,
                log_every_n_steps=self.settings.run.log_every_n_steps,
                enable_progress_bar=False,  # Progress shows it
                enable_model_summary=False,  # the header does
                enable_checkpointing=True,
                use_distributed_sampler=False,  # the data module deals out batches by itself
                gradient_clip_val=None,  # TrainingModule clips, and keeps the norm
                default_root_dir=self.directory,
            )
        except (ValueError, MisconfigurationException) as error:
            if compute.strategy in ("auto", "ddp"):
                raise
            raise UsageError(f"--strategy {compute.strategy}: {error}") from error

    def _announce(self, precision: ResolvedPrecision) -> None:
        """Write the files that describe the run, and print the header."""
        if is_first_process():
            settings, directory, checkpoint, devices = self.settings, self.directory, self.checkpoint, self.devices
            # The settings with the name that the run got: what another person needs, and what the command to go on reads.
            named = replace(settings.run, run_name=directory.name, output_dir=str(directory.parent), resume="auto")
            began = (
                settings_it_began_with(named).get("gradient_accumulation_steps", "") if checkpoint is not None else ""
            )
            optimizer = settings.optimizer  # as typed at first, since --batches_per_step says what it comes to
            if began.isdecimal():
                optimizer = replace(optimizer, gradient_accumulation_steps=int(began))
            with replace_file(directory / CONFIG) as partial:
                partial.write_text(to_yaml(replace(settings, run=named, optimizer=optimizer)), encoding="utf-8")
            if checkpoint is None:
                write_environment(directory, environment(sys.argv, threads=torch.get_num_threads()))
                self.events.note("started", 0, processes=devices.world, launcher=devices.launcher)
            else:
                self.events.note(
                    "resumed",
                    self.began_at,
                    checkpoint=checkpoint.name,
                    command=launched(devices, command_line(sys.argv)),
                    processes=devices.world,
                    launcher=devices.launcher,
                )
            *lines, monitoring = header_lines(
                settings, self.data, self.network, self.plan, self.devices, precision, self.callbacks
            )
            lines += [("compiler", self.compiler_remark)] if self.compiler_remark else []
            goes_on = f", goes on from {checkpoint.name}" if checkpoint else ""
            lines += [monitoring, ("run", f"{directory}{goes_on}"), ("to go on", self.resume_command)]
            defaults = defaults_of(settings)
            write_facts(directory, facts_of(settings, self.data, self.plan, lines, self.resume_command, defaults))
            width = window_width(sys.stdout)
            for name, text in lines:  # a command stays in one piece, to be copied
                line = harmless(f"{name:<11} {text}")
                print(line if name in ("run", "to go on") else folded(line, width, indent=12), flush=True)

    def _hold_session(self, trainer: Trainer, module: TrainingModule) -> RunResult:
        """Train, validate on everything, and return the result."""
        self.data.on_trouble = lambda message: self.events.survived("loader_restarted", module.global_step, message)
        try:
            with warnings.catch_warnings():
                # Lightning 2.6.6 calls torch 2.13 in ways that torch calls deprecated.
                warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
                warnings.filterwarnings("ignore", message=r".*torch.distributed.nn.functional.\w+ is deprecated.*")
                # Of --strategy fsdp: nothing is written into what the network returns.
                warnings.filterwarnings("ignore", message=".*returned a view tensor. An in-place op.*")
                trainer.fit(module, datamodule=self.data, ckpt_path=self.checkpoint)
                self._validate_on_all(trainer, module)
            self.progress.finish()
            ended_by: EndedBy = "steps"
            plan = self.plan._replace(total_steps=module.total_steps)  # with what a rescue added
            if trainer.global_step < plan.total_steps:
                early = trainer.early_stopping_callback
                is_early = early is not None and early.wait_count >= early.patience
                ended_by = "early_stopping_patience" if is_early else "max_time"
            result = result_of(trainer, plan, self.settings, ended_by, self.events)
        except Stopped as stop:
            self.events.note("interrupted", trainer.global_step)
            if not stop.message:  # in the last validation, when all that was trained was saved
                raise Stopped(stop.number, f" in the last validation. To go on:\n{self.resume_command}") from stop
            raise
        except SystemExit as stop:
            if stop.code == ExitCode.COLLAPSED:
                healthy, name, go_on = (
                    self.directory / "checkpoints" / HEALTHY,
                    self.directory.name,
                    self.resume_command,
                )
                if healthy.exists():
                    begin = "From when it was last well, healing itself if it collapses again"
                    other_run = f"--init_from {shell_word(healthy)} --run_name {shell_word(f'{name}-rescue')}"
                else:
                    begin = "It was never well. Begin again, healing itself"
                    other_run = f"--run_name {shell_word(f'{name}-2')}"
                advice = f"{begin}:\n{go_on} {other_run} --on_collapse rescue\nTo go on all the same:\n{go_on}"
                print(harmless(advice), file=sys.stderr)
            raise
        self.events.finish()
        return result

    def _validate_on_all(self, trainer: Trainer, module: TrainingModule) -> None:
        """Validate on all sequences, unless the last validation was on all of them at this step."""
        is_partial = not self.settings.validation.is_on_all and not self.settings.run.fast_dev_run
        if not is_partial and module.validated_at_step == trainer.global_step:
            return
        limit = self.data.limit_val_batches
        self.data.limit_val_batches = 1.0 if is_partial else limit
        trainer.limit_val_batches = 1.0  # with --limit_val_batches 0 there was none so far
        if trainer.is_global_zero and is_partial:
            print(f"last validation, on all {len(self.data.split('valid')):,} sequences", flush=True)
        try:
            trainer.validate(module, datamodule=self.data, verbose=False)
        finally:
            self.data.limit_val_batches = limit  # the run may go back from here

    def _roll_back(
        self, trouble: NonFiniteError, step: int, recovery: Recovery, precision: ResolvedPrecision
    ) -> Recovery:
        """Go back to a checkpoint from before the trouble, and not to one that led into it at once.

        Where a signal came while the session broke off at `step`, or the run went back too often, it ends here.
        """
        if number := decide_together(lambda: self.stop_on_signal.signal_number):
            self.events.note("interrupted", step)
            if not is_first_process():
                sys.exit(0)
            raise Stopped(number, f" after a step that came to NaN. To go on:\n{self.resume_command}")
        if recovery.times >= MOST_TIMES:
            self.events.note("diverged", trouble.first_step, said=str(trouble))
            raise DivergedError(
                f"{trouble}, and so it was from earlier checkpoints, at last with --lr {recovery.lr:g}. Lower --lr or raise "
                "--warmup; the sequences that the steps were made of stand in events.jsonl"
            )
        self.data.teardown("fit")  # Lightning leaves it out when a session breaks off
        led_into_it = trouble.first_step <= self.began_at + 1
        before = min(self.began_at, trouble.first_step) if led_into_it else trouble.first_step
        checkpoint = decide_together(lambda: go_back(self.directory, before))
        self.checkpoint = None if checkpoint is None else shared_file(checkpoint)
        recovery = recovery.once_more(precision.precision, self.devices.accelerator)
        recovery.announce(self.events, trouble, self.checkpoint)
        return recovery


@losses_named()
def prepare_settings(settings: Settings) -> Settings:
    """Refuse what cannot be written, and fill in what depends on this machine, all before data are read."""
    devices, timeout = resolve_devices(settings.compute), duration_of(settings.compute.distributed_timeout)
    assert timeout is not None
    refuse_unnamed(settings.run, devices)
    refuse_strategy(settings.compute, devices)
    connect_processes(devices, timeout)
    decide_together(lambda: refuse_unwritable(settings.run) if is_first_process() else None)
    began = decide_together(lambda: settings_it_began_with(settings.run))
    default = type(settings)().optimizer.gradient_accumulation_steps
    optimizer = shared_out(settings.optimizer, began, devices.world, default)
    objective = with_labels_as_it_began(settings.objective, began)
    return filled_in(
        replace(settings, source=as_it_began(settings.source, began), optimizer=optimizer, objective=objective)
    )


def refuse_unnamed(run: RunSettings, devices: Devices) -> None:
    """Refuse a run without a name where it could not go on by itself."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) if devices.launcher == "torchrun" else 0
    if restarts > 0 and (run.run_name is None or run.resume != "auto"):
        raise UsageError(
            f"torchrun --max_restarts {restarts} starts the command again after a failure, and only a run with --run_name goes on "
            "then: give it one, and no --resume"
        )


def filled_in(settings: Settings) -> Settings:
    """Set what follows from other flags and from this machine."""
    if settings.run.fast_dev_run:  # two optimizer steps and one validation batch
        settings = replace(
            settings,
            run=replace(settings.run, max_steps=2, log_every_n_steps=1),
            validation=replace(settings.validation, limit_val_batches=1, val_check_interval=1.0),
            objective=replace(settings.objective, pretrain_autoencoder=min(1, settings.objective.pretrain_autoencoder)),
        )
    return with_few_shapes(settings)


def defaults_of(settings: TrainingSettings) -> dict[str, Any]:
    """Return the recipe's defaults by flag, with what a run sets by itself, which is no choice of its user."""
    plain = type(settings)()
    untouched = replace(
        plain,
        run=replace(plain.run, fast_dev_run=settings.run.fast_dev_run),
        batches=replace(settings.batches, pad_grid=None),
        optimizer=replace(plain.optimizer, batches_per_step=settings.optimizer.batches_per_step),
        compute=settings.compute,
    )
    before, after = to_flat_dict(untouched), to_flat_dict(filled_in(untouched))
    found = {name: value for name, value in after.items() if value != before[name]}
    return to_flat_dict(plain) | found | {"batches_per_step": settings.optimizer.batches_per_step}


def with_few_shapes(settings: Settings) -> Settings:
    """Fill in --pad_grid where it is not given.

    A GPU that replays recorded graphs records one for each shape; a CPU's bf16 matrix products are compiled for each, which takes
    longer than small products themselves.
    """
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
        batches_per_step=settings.optimizer.batches_per_step,
        limit_val_batches=settings.validation.limit_val_batches or 1,
        attention_steps=settings.model.attention_steps,
    )


def make_monitors(settings: TrainingSettings) -> list[Callback]:
    """Return the monitors of the recipe; none where the settings watch nothing."""
    watch = settings.watch
    if watch is None:
        return []
    monitors = [
        PosteriorMetricsMonitor(
            update_frequency=watch.monitor_every_n_steps,
            plot_frequency=watch.plot_every_n_steps,
            window_size=watch.monitor_window,
            probe_every_n_readings=watch.probe_every_n_readings,
            on_collapse=settings.monitoring.monitor_on_collapse,
            verbose=settings.VERBOSE_WATCH and not settings.monitoring.fast_detection,
            level=level,
        )
        for level in settings.model.watched_levels
    ]
    speed = ThroughputMonitor(every_n_steps=settings.run.log_every_n_steps)
    if settings.monitoring.on_collapse == "rescue":
        return [*monitors, Rescue(monitors[0], settings.monitoring.rescue_budget), speed]
    return [*monitors, speed]
