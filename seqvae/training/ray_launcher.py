"""Ray as a launcher: `fit` in each of the processes that Ray Train starts, as many as there is room for, again where one is lost.

In: the settings of a run. Out: what `fit` returns or raises in the first process. The run's directory is that of any run; without
a shared disk `--storage_path` gets a copy.
"""

import asyncio
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.exceptions
import ray.train
import torch
from lightning import Callback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seqvae.clusters import connected
from seqvae.config.run import duration_of
from seqvae.config.training import TrainingSettings
from seqvae.console import named_command, program, say, set_up_output
from seqvae.errors import ProcessesError, SeqVAEError, Stopped, StorageError, UsageError
from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.reports.run_files import LAST
from seqvae.training.callbacks.checkpoint import Checkpoints, is_between_steps
from seqvae.training.callbacks.interrupt import StopOnSignal
from seqvae.training.fit import fit, make_monitors
from seqvae.training.processes import LAUNCHER, LOST, decide_together
from seqvae.training.run_directory.checkpoint_file import read_lazily
from seqvae.training.run_directory.records import RunResult
from seqvae.training.run_directory.resume import CONFIG, settings_it_began_with

REPORT_SECONDS = 5.0
"""Between two reports at least: Ray fetches them every 2 s, and the next one waits for that."""
LOST_ONES = (WorkerHealthCheckFailedError, ray.exceptions.RayError, ProcessesError)
"""What Ray reports of a process that has gone, and what the others then end with."""
NOT_STORED = shutil.ignore_patterns("plots", "previous.ckpt", "healthy.ckpt", "*.lock", "*.new.ckpt")
"""What is not needed to go on elsewhere."""


class Order(NamedTuple):
    """The order that each process gets from the command that was typed."""

    settings: TrainingSettings
    words: list[str]
    """The command as it was typed, for the records of the run."""
    program: str
    folder: str
    """Where it was typed, which relative paths begin at."""
    desk: Any


# --- The command --------------------------------------------------------------------------------------------------------


def fit_on_ray(settings: TrainingSettings) -> RunResult:
    """Train in the processes of a Ray cluster: the one of RAY_ADDRESS or of this machine, else one that ends with the run."""
    run, compute = settings.run, settings.compute
    if run.run_name is None or run.resume != "auto":
        raise UsageError(
            "--launcher ray starts the processes again after a failure, and only a run with --run_name goes on then: give it one, "
            "and no --resume"
        )
    fewest, most = compute.ray_bounds
    optimizer, began = settings.optimizer, settings_it_began_with(run).get("batches_per_step", "")
    of_all = optimizer.batches_per_step or int(began if began.isdecimal() else 0)
    of_all = of_all or optimizer.gradient_accumulation_steps * most
    worlds = worlds_within(fewest, most, of_all)
    settings = replace(settings, optimizer=replace(optimizer, batches_per_step=of_all))
    timeout = duration_of(compute.distributed_timeout)
    assert timeout is not None
    with connected(), tempfile.TemporaryDirectory(prefix="seqvae-") as nowhere:
        resources = ray.cluster_resources()
        has_gpus = compute.accelerator == "gpu" or (compute.accelerator == "auto" and resources.get("GPU", 0) > 0)
        places = int(resources.get("GPU" if has_gpus else "CPU", 0))
        if places < worlds[0]:
            say(
                f"Ray has room for {places} processes, waiting until it has for {worlds[0]} (--ray_workers {compute.ray_workers})"
            )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        desk = ray.remote(num_cpus=0, scheduling_strategy=here)(Desk).remote()
        storage = compute.storage_path
        if storage is not None and "://" not in storage:
            storage = str(Path(storage).expanduser().absolute())
        trainer = _Trainer(
            work,
            worlds,
            train_loop_config={"order": Order(settings, sys.argv, program(), str(Path.cwd()), desk)},
            torch_config=TorchConfig(timeout_s=int(timeout.total_seconds())),
            scaling_config=ray.train.ScalingConfig(num_workers=(worlds[0], worlds[-1]), use_gpu=has_gpus),
            run_config=ray.train.RunConfig(
                name=run.run_name,
                storage_path=storage or nowhere,
                failure_config=ray.train.FailureConfig(max_failures=compute.max_restarts),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
                logging_config=ray.train.LoggingConfig(log_level="WARNING"),
            ),
        )
        return _wait_for(trainer, desk)


def worlds_within(fewest: int, most: int, batches_per_step: int) -> list[int]:
    """Return how many processes there may be: those numbers within the bounds that share the batches of a step evenly.

    >>> worlds_within(2, 8, 16)
    [2, 4, 8]
    """
    worlds = [world for world in range(fewest, most + 1) if batches_per_step % world == 0]
    if not worlds:
        raise UsageError(
            f"--batches_per_step {batches_per_step}: no number of processes within --ray_workers {fewest}:{most} shares them "
            "evenly. Give a multiple of one of these numbers, or other bounds"
        )
    return worlds


def _wait_for(trainer: TorchTrainer, desk: Any) -> RunResult:
    """Return the result of the first process. Ctrl-C and SIGTERM go to all of them, which save and end."""
    ended: list[Any] = []
    is_over = threading.Event()  # a signal in Thread.join lets Python 3.11 think that the thread is over

    def run() -> None:  # not in the main thread, where Ray would take Ctrl-C to end the processes at once
        try:
            ended.append(trainer.fit().return_value)
        except Exception as error:
            ended.append(error)
        is_over.set()

    threading.Thread(target=run, name="seqvae-ray", daemon=True).start()
    while not is_over.is_set():
        try:
            is_over.wait()
        except (Stopped, KeyboardInterrupt) as stop:
            say("\nstopping after this step; a second signal ends the command at once")
            ray.get(desk.signal.remote(stop.number if isinstance(stop, Stopped) else 2))
    (result,) = ended
    if not isinstance(result, Exception):
        return RunResult(*result)
    if (own := error_of_workers(result)) is not None:
        raise own from result
    if isinstance(result, ray.train.TrainingFailedError):
        raise ProcessesError(
            f"processes were lost more often than --max_restarts says ({str(result).strip().splitlines()[-1]}). All that was saved "
            "is whole: type the same command, and the run goes on"
        ) from result
    raise result


class Desk:
    """An actor where the command is, which outlives the processes of a run: they and the command leave notes at it."""

    def __init__(self) -> None:
        self._number = 0
        self._has_signal = asyncio.Event()
        self._began_at = ""

    async def signal(self, number: int) -> None:
        self._number = number
        self._has_signal.set()

    async def wait_for_signal(self) -> int:
        await self._has_signal.wait()
        return self._number

    async def began_at(self, host: str) -> None:
        self._began_at = self._began_at or host

    async def where_it_began(self) -> str:
        return self._began_at


# --- What Ray decides by -------------------------------------------------------------------------------------------------


class _Trainer(TorchTrainer):
    """Ray's trainer, but for worlds that share a step evenly, and for errors that another start would meet again."""

    def __init__(self, train_loop: Callable[[dict[str, Any]], Any], worlds: Sequence[int], **arguments: Any) -> None:
        super().__init__(train_loop, **arguments)
        self._worlds = worlds

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        arguments["scaling_policy"] = EvenShares(self.scaling_config, self._worlds)
        arguments["failure_policy"] = LostOnly(self.run_config.failure_config)
        arguments["callbacks"] = [  # it asks the dashboard every second, and warns that there is none
            one for one in arguments["callbacks"] if not isinstance(one, PlacementGroupCleanerCallback)
        ]
        return super()._initialize_and_run_controller(**arguments)


class EvenShares(ElasticScalingPolicy):
    """As many processes as there is room for, of those numbers that share the batches of a step evenly."""

    def __init__(self, scaling_config: ray.train.ScalingConfig, worlds: Sequence[int]) -> None:
        super().__init__(scaling_config)
        self._worlds = worlds

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        possible = super()._count_possible_workers(reserved_resources)
        return max((world for world in self._worlds if world <= possible), default=0)


class LostOnly(DefaultFailurePolicy):
    """Another start where a process was lost; none where one has ended by an error of its own."""

    def make_decision(self, training_failed_error: Exception) -> Any:
        is_own = error_of_workers(training_failed_error) is not None
        return FailureDecision.RAISE if is_own else super().make_decision(training_failed_error)


def error_of_workers(failure: Exception) -> BaseException | None:
    """Return the error that the processes ended by; None: one of them was lost, and the others say so, if anything."""
    if not isinstance(failure, ray.train.WorkerGroupError):
        return None
    found: list[Any] = [failure.worker_failures[rank] for rank in sorted(failure.worker_failures)]
    said = [
        one
        for one in found
        if isinstance(one, SeqVAEError | SystemExit | Stopped) and not isinstance(one, ProcessesError)
    ]
    is_lost = any(isinstance(one, LOST_ONES) or LOST.search(str(one)) for one in found)
    return next(iter(said or ([] if is_lost else found)), None)


# --- A process ------------------------------------------------------------------------------------------------------------


def work(config: dict[str, Any]) -> RunResult:
    """Train as one of the processes that Ray has started."""
    order: Order = config["order"]
    settings, run = order.settings, order.settings.run
    Path(order.folder).mkdir(parents=True, exist_ok=True)
    os.chdir(order.folder)
    sys.argv = order.words
    set_up_output()
    logging.getLogger().setLevel(logging.WARNING)  # Ray's own reports of what it does
    logging.getLogger("seqvae").setLevel(logging.INFO)
    logging.getLogger("ray.train.v2._internal.util").setLevel(
        logging.CRITICAL
    )  # tracebacks of errors that the command tells
    assert run.run_name is not None
    os.environ[LAUNCHER] = "Ray"
    _place_processes()
    directory = Path(run.output_dir).expanduser() / run.run_name
    if ray.train.get_context().get_world_rank() == 0:
        _fetch(directory, order.desk)
    reports = Reports(order.desk, directory if settings.compute.storage_path else None)
    try:
        with named_command(order.program):
            result = fit(settings, [*make_monitors(settings), reports])
    except SystemExit as end:
        if end.code:
            raise
        return RunResult(directory, float("nan"), float("nan"))  # the first process has more to say
    reports.report({})
    return result


def _place_processes() -> None:
    """Tell Lightning where this process is. It knows machines with equally many, so unequal ones are machines of one each."""
    context = ray.train.get_context()
    own, sizes = context.get_local_world_size(), [0] * context.get_world_size()
    torch.distributed.all_gather_object(sizes, own)
    os.environ["GROUP_RANK"] = os.environ["NODE_RANK"]
    if len(set(sizes)) == 1:
        return
    if torch.cuda.is_available():
        raise UsageError(
            f"Ray has placed {' and '.join(map(str, sorted(set(sizes))))} processes on machines with GPUs: give a --ray_workers "
            "that is a multiple of the GPUs of each"
        )
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}


def _fetch(directory: Path, desk: Any) -> None:
    """Bring what is stored of the run into its directory, where that has not come as far."""
    stored = ray.train.get_checkpoint()
    if stored is not None:
        with stored.as_directory() as folder:
            if _step_of(Path(folder)) > _step_of(directory):
                shutil.copytree(folder, directory, dirs_exist_ok=True)
    began_at, here = ray.get(desk.where_it_began.remote()), socket.gethostname()
    if began_at and not (directory / CONFIG).exists():
        raise StorageError(
            f"{directory} is not on {here}, where the first process is now; the run began on {began_at}. Machines without a shared "
            "disk need --storage_path"
        )


def _step_of(directory: Path) -> int:
    last = directory / "checkpoints" / LAST
    return int(read_lazily(last)["global_step"]) if last.exists() else -1


class Reports(Callback):
    """Callback that tells Ray how the run goes, stores what it would go on from elsewhere, and hears of signals."""

    def __init__(self, desk: Any, stored: Path | None) -> None:
        """`stored`: the run's directory, where it is to be stored after each checkpoint."""
        self.desk, self.stored = desk, stored
        self._reported_at = time.monotonic()
        self._saved_step: int | None = None
        self._number = 0
        threading.Thread(target=self._listen, name="seqvae-signals", daemon=True).start()

    def _listen(self) -> None:
        with suppress(ray.exceptions.RayError):  # the command itself was lost
            self._number = ray.get(self.desk.wait_for_signal.remote())

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            self.desk.began_at.remote(socket.gethostname())

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._store(trainer)  # what was saved behind the step before

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not is_between_steps(trainer):
            return
        if self._number:
            next(one for one in trainer.callbacks if isinstance(one, StopOnSignal)).signal_number = self._number
        is_due = trainer.global_step % trainer.log_every_n_steps == 0
        if is_due and decide_together(lambda: time.monotonic() - self._reported_at > REPORT_SECONDS):
            self.report(_numbers_of(trainer))

    def on_exception(self, trainer: Any, _: Any, exception: BaseException) -> None:
        if isinstance(exception, Stopped) or (isinstance(exception, SystemExit) and not exception.code):
            self._store(trainer)  # all processes end here alike

    def _store(self, trainer: Any) -> None:
        saved = next(one for one in trainer.callbacks if isinstance(one, Checkpoints)).saved_step
        if self.stored is not None and saved != self._saved_step:
            self._saved_step = saved
            self.report(_numbers_of(trainer))

    def report(self, numbers: dict[str, float]) -> None:
        """Report to Ray, which waits for all processes, and, where a run is stored, store it as it is now."""
        self._reported_at = time.monotonic()
        if self.stored is None or ray.train.get_context().get_world_rank() > 0:
            ray.train.report(numbers)
            return
        with tempfile.TemporaryDirectory(prefix=".seqvae-", dir=self.stored.parent) as folder:
            copy = Path(folder) / "run"
            shutil.copytree(self.stored, copy, copy_function=os.link, ignore=NOT_STORED)
            ray.train.report(numbers, ray.train.Checkpoint.from_directory(copy))


def _numbers_of(trainer: Any) -> dict[str, float]:
    """Return the newest metrics, and the newest reading of the posterior."""
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for monitor in trainer.callbacks:
        if isinstance(monitor, PosteriorMetricsMonitor) and monitor.reading is not None:
            read = monitor.reading._asdict()
            of = "posterior" if monitor.level is None else f"{monitor.level}_posterior"
            numbers |= {f"{of}_{name}": float(value) for name, value in read.items() if isinstance(value, Real)}
    return numbers | {"step": trainer.global_step}
