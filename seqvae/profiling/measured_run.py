"""A training run in a process of its own that trains only on request, so that several can take turns on one machine.

    with MeasuredRun(Recipe("optimized", settings, train_optimized.callbacks)) as run:
        lap = run.turn(steps=20)

It is the run that the command would start: the real Trainer, the command's callbacks, the loader, a run directory, which is
thrown away. Only the order of its batches differs, unless the recipe says otherwise (every stretch holds long and short
ones alike), and it neither validates nor saves on its own.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from torch.profiler import ProfilerActivity, profile

from seqvae.config.training import TrainingSettings
from seqvae.console import set_up_output
from seqvae.data.batch import Batch, padded_steps
from seqvae.data.batching import gather_batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import DataError, DivergedError, SettingsError, StorageError, UsageError, is_out_of_memory
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.hardware import GIB, FlopCount, Machine
from seqvae.training.callbacks.checkpoint import is_between_steps
from seqvae.training.callbacks.compile import compiled_graphs, is_compiled
from seqvae.training.callbacks.memory import malloc_trim
from seqvae.training.fit import fit, make_data
from seqvae.training.module import TrainingModule, add_up, sums_of
from seqvae.training.objective import negative_elbo
from seqvae.training.schedules import Plan, plan_run

OUTPUT = "output.txt"
LONG_RUN = 1_000_000
"""Optimizer steps of a run that must not end while it is measured."""
PRELOADED = ["seqvae.profiling.measured_run", "seqvae.monitors.callback", "seqvae.monitors.throughput"]
"""What all runs import: once for all of them, where processes can be forked."""
PATIENCE_SECONDS = 10.0
"""How long a run may take to end on request."""
KILLED = -9
"""The exit code of a process for which the system had no memory left. Not every system has a name for that signal."""
MOST_FIRST_STEPS = 40
"""A GPU's 16-mixed skips steps until its loss scale is low enough; it halves each time."""

Answer = TypeVar("Answer")


class Recipe(NamedTuple):
    """The run that a command would start."""

    name: str
    settings: TrainingSettings
    callbacks: Callable[[Any], list[Callback]]
    """Settings -> the command's callbacks; a function that other processes can import."""
    is_spread: bool = True
    """Any stretch of its batches stands for all; False: they come as the command has them, which matters to what is learnt."""
    trains_requested_batches: bool = False
    """Train only the batches that `peak_memory` gets, and no others."""


class Ready(NamedTuple):
    """A run before its first step."""

    parameters: int
    plan: Plan
    """The plan of the run as requested; while it is measured it does not end."""
    accumulate: int
    precision: str
    """The precision in force."""
    device: str
    seconds: float
    """Time from the process's start to here, without what all runs import."""
    is_compiled: bool = False
    """Whether some of the network is, after its trial."""


class Lap(NamedTuple):
    """The measurements of a turn, without its lead."""

    seconds: float
    """Wall time; the run neither validates nor saves on its own."""
    steps: int
    micro_batches: int
    real_steps: int
    padded_steps: int
    sequences: int
    stages: dict[str, float]
    """Seconds of each of `STAGES`; empty where not requested."""
    cpu_seconds: float
    """CPU time of all threads of the process."""
    cores: int
    gpu_utilisation: float | None
    peak_memory_gib: float
    """The peak of the process so far, or of the GPU's memory if it trains on one."""
    recompiles: int
    """Graphs compiled in the turn, its lead included."""


class Work(NamedTuple):
    """FLOPs of some steps, forward and backward, what is computed twice counted twice."""

    flops: int
    padded_steps: int


class Validation(NamedTuple):
    """Means per sequence in nats, and how long they took."""

    elbo: float
    nll: float
    kl: float
    seconds: float


class Saved(NamedTuple):
    """A checkpoint that was written and removed again."""

    seconds: float
    bytes: int


class MemoryNeed(NamedTuple):
    """The memory that an optimizer step on one batch needed."""

    peak_bytes: int
    can_repeat: bool
    """Whether this process can measure another one: its peak can be reset."""
    least_sequences: int
    """The fewest sequences in a batch that the network can train on."""
    device_bytes: int | None
    """What a GPU has left for this process; None: the CPU computes."""


class MeasuredRunError(Exception):
    """A training process failed or ended, for a reason that the user is not known to be able to mend."""


ENDINGS = (MeasuredRunError, DivergedError, MemoryError)
"""What ends a training process that settings and data did not refuse."""


class MeasuredRun:
    """A training process that works on request. What goes wrong there is raised here."""

    def __init__(self, recipe: Recipe) -> None:
        self.name = recipe.name
        self.directory = Path(tempfile.mkdtemp(prefix="seqvae-measured-"))
        """The directory that the run writes to; `close` removes it."""
        # Forked, where the system can, from a process that has imported everything; or else started from nothing.
        can_fork = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if can_fork else "spawn")
        if can_fork:
            context.set_forkserver_preload(PRELOADED)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, recipe, str(self.directory)), daemon=True)
        # The process that others are forked from imports before it gets this one's sys.path. PYTHONPATH lets it import this code,
        # and not another version that is installed.
        before = os.environ.get("PYTHONPATH")
        root = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = root if before is None else f"{root}{os.pathsep}{before}"
        try:
            self._process.start()
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        theirs.close()
        self._ready: Ready | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:  # do not wait for the end of a turn
            self._process.kill()
        self.close()

    @property
    def ready(self) -> Ready:
        """Return what is known before the first step, and wait for it."""
        if self._ready is None:
            self._ready = self._answer(Ready)
        return self._ready

    def turn(self, steps: int = 1, seconds: float = 0.0, lead_steps: int = 2, *, by_stage: bool = True) -> Lap:
        """Train until that many optimizer steps are done and that many seconds over, and return what it came to.

        `lead_steps` come first and are not counted: the caches belong to another run, and the loader has had time to work ahead.
        `by_stage` measures where the time goes, which takes a tenth of a millisecond per step.
        """
        return self._request(Lap, "turn", steps, seconds, lead_steps, by_stage)

    def count(self, steps: int = 4) -> Work:
        """Count the FLOPs of the next optimizer steps."""
        return self._request(Work, "count", steps)

    def validate(self) -> Validation:
        """Go through the validation batches that the settings choose, as a validation would."""
        return self._request(Validation, "validate")

    def save(self) -> Saved:
        """Save a checkpoint, and remove it."""
        return self._request(Saved, "save")

    def trace(self, path: Path, steps: int = 3) -> int:
        """Write what torch.profiler sees of some optimizer steps, and return the size of the file in bytes."""
        return self._request(int, "trace", str(path.absolute()), steps)

    def peak_memory(self, sequences: Sequence[int], tokens_per_batch: int, *, trims: bool = True) -> MemoryNeed:
        """Train a batch of these sequences: forward, backward, optimizer step. A lack of memory is a MemoryError.

        `tokens_per_batch` is the budget that it was cut by: with --pad_grid it says how many rows the batch has. `trims`: what the
        heap kept of earlier batches is given back first, so that it does not count for this one.
        """
        return self._request(MemoryNeed, "peak_memory", list(sequences), tokens_per_batch, trims)

    def close(self) -> None:
        """End the process, whatever it does, and remove its directory."""
        if self._process.is_alive():
            with suppress(BrokenPipeError):  # it is ending already
                self._connection.send(None)
            self._process.join(PATIENCE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _request(self, kind: type[Answer], activity: str, *arguments: Any) -> Answer:
        _ = self.ready
        return self._answer(kind, (activity, arguments))

    def _answer(self, kind: type[Answer], request: tuple[str, tuple[Any, ...]] | None = None) -> Answer:
        """Send a request, if there is one, and return the next answer; raise what the process failed or died of."""
        try:
            if request is not None:
                self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self._process.join(PATIENCE_SECONDS)
            path = self.directory / OUTPUT
            output = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
            code = self._process.exitcode
            message = f"{self.name}: its process ended with code {code}{f': {output[-1]}' if output else ''}"
            raise MemoryError(f"({message})") if code == KILLED else MeasuredRunError(message) from None
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, kind)
        return answer


# --- In the other process ----------------------------------------------------------------------------------------------


class _Closed(BaseException):
    """The run is not needed any more. No Exception, so that nothing on the way takes it for a fault."""


def _run(connection: Connection, recipe: Recipe, directory: str) -> None:
    """Train as a command would, but on request; whatever goes wrong is sent to the process that measures."""
    started = time.perf_counter()
    # The loader's worker processes (--worker_type process): a daemon may have none, and they must start as they do in a command.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    output = os.open(Path(directory, OUTPUT), os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    try:
        set_up_output()
        settings = measurable(recipe.settings, directory)
        plan = plan_run(recipe.settings, make_data(recipe.settings), world=1)
        measurement = MeasurementCallback(connection, recipe, plan, started)
        fit(settings, [*recipe.callbacks(settings), measurement])
    except _Closed:
        pass
    except BaseException as error:
        connection.send(_failure(error, recipe.name))


def _failure(error: BaseException, name: str) -> Exception:
    """Return what the user can mend as what it was, and the rest with where it happened."""
    if is_out_of_memory(error):
        return MemoryError(f"({name}: {error})")
    if isinstance(error, DivergedError):
        return DivergedError(f"{name}: {error}")
    for kind in (UsageError, SettingsError, DataError, StorageError):
        if isinstance(error, kind):
            return kind(str(error))
    return MeasuredRunError(f"{name}: {type(error).__name__}: {error}\n{traceback.format_exc()}")


def measurable(settings: TrainingSettings, directory: str) -> TrainingSettings:
    """Return the settings of the same run in another directory and on one device, which does not end and only trains."""
    run = replace(settings.run, output_dir=directory, run_name="run", resume="never", fast_dev_run=False)
    return replace(
        settings,
        compute=replace(settings.compute, devices=1, num_nodes=1),
        run=replace(run, max_steps=LONG_RUN, max_epochs=None, max_time=None, logger="csv"),
        validation=replace(
            settings.validation,
            limit_val_batches=0,
            sanity_checks=0,
            early_stopping_patience=None,
            checkpoint_every_n_steps=LONG_RUN,
        ),
    )


Activity = Generator[None, None, Any]
"""A generator that trains on for one optimizer step with each `yield`, and returns the answer."""


class MeasurementCallback(Callback):
    """Holds a run before its first step and after each request. Stands last among the callbacks that a command gives."""

    def __init__(self, connection: Connection, recipe: Recipe, plan: Plan, started: float) -> None:
        """`plan` is that of the run as requested, `started` is when its process did."""
        self._connection, self._recipe, self._plan, self._started = connection, recipe, plan, started
        self._machine = Machine()
        self._validation_batches: Iterable[Batch] | None = None
        self._requested: deque[Batch] = deque()
        self._sizes: list[tuple[int, int, int]] = []
        """Real steps, padded steps and sequences of each micro-batch of the present request."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = data_of(trainer)
        # A stretch of training should stand for all of it, and not begin with the most expensive batches.
        data.order = "spread" if self._recipe.is_spread else "shuffled"
        data.limit_val_batches = self._recipe.settings.validation.limit_val_batches or 1
        if self._recipe.trains_requested_batches:
            vars(data)["train_dataloader"] = lambda: _RequestedBatches(self._requested)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._trainer, self._module, self._device = trainer, pl_module, trainer.strategy.root_device
        self._stage_clock = StageClock(torch.cuda.synchronize if self._device.type == "cuda" else None)
        self._no_clock = vars(trainer)["profiler"]
        ready = Ready(
            parameters=sum(parameter.numel() for parameter in pl_module.parameters()),
            plan=self._plan,
            accumulate=trainer.accumulate_grad_batches,
            precision=str(trainer.precision),
            device=str(self._device),
            seconds=time.perf_counter() - self._started,
            is_compiled=is_compiled(pl_module),
        )
        self._connection.send(ready)
        self._serve()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._sizes.append((int(batch.lengths_B.sum()), padded_steps(batch), int((batch.lengths_B > 0).sum())))
        if not is_between_steps(trainer):
            return
        try:
            next(self._activity)
        except StopIteration as done:
            self._connection.send(done.value)
            self._serve()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise RuntimeError("the run ended before it was measured")

    def _serve(self) -> None:
        """Do what is requested, until that is to train on."""
        while (request := self._connection.recv()) is not None:
            activity, arguments = request
            answer = getattr(self, f"_{activity}")(*arguments)
            if isinstance(answer, Generator):
                self._activity = answer
                next(answer)
                return
            self._connection.send(answer)
        raise _Closed

    def _turn(self, steps: int, seconds: float, lead_steps: int, by_stage: bool) -> Activity:
        trainer, graphs = self._trainer, compiled_graphs()
        for _ in range(lead_steps):
            yield
        vars(trainer)["profiler"] = self._stage_clock if by_stage else self._no_clock  # looked up at each action
        self._sizes.clear()
        first_step, cpu_begun, begun = trainer.global_step, time.process_time(), time.perf_counter()
        self._stage_clock.restart()
        while trainer.global_step - first_step < steps or time.perf_counter() - begun < seconds:
            yield
        spent = time.perf_counter() - begun
        real_steps, padded, sequences = np.sum(self._sizes, axis=0).tolist()
        gpu_peak = self._machine.gpu_peak_memory_gib(self._device)
        return Lap(
            seconds=spent,
            steps=trainer.global_step - first_step,
            micro_batches=len(self._sizes),
            real_steps=real_steps,
            padded_steps=padded,
            sequences=sequences,
            stages=self._stage_clock.seconds() if by_stage else {},
            cpu_seconds=time.process_time() - cpu_begun,
            cores=self._machine.cores(),
            gpu_utilisation=self._machine.gpu_utilisation(self._device),
            peak_memory_gib=gpu_peak or self._machine.peak_memory_gib() or 0.0,
            recompiles=compiled_graphs() - graphs,
        )

    def _count(self, steps: int) -> Activity:
        count = FlopCount()
        self._sizes.clear()
        torch.compiler.set_stance("force_eager")  # what is compiled cannot be counted
        count.begin()
        for _ in range(steps):
            yield
        flops = count.end() or 0
        torch.compiler.set_stance("default")
        return Work(flops, sum(padded for _, padded, _ in self._sizes))

    def _trace(self, path: str, steps: int) -> Activity:
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
            for _ in range(steps):
                yield
        profiler.export_chrome_trace(path)
        return Path(path).stat().st_size

    def _validate(self) -> Validation:
        """Validate without any counter or logger taking part."""
        trainer, module = self._trainer, self._module
        if self._validation_batches is None:  # once, as Lightning does: worker processes stay
            self._validation_batches = data_of(trainer).val_dataloader()
        start = time.perf_counter()
        parts = []
        module.eval()
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            for batch in self._validation_batches:
                here = trainer.strategy.batch_to_device(batch)
                torch.manual_seed(here.position)
                output = module.network(here)
                parts.append(sums_of(negative_elbo(output, kl_weight=1.0, free_bits=0.0), output, here))
        module.train()
        total = add_up(parts, trainer)
        elbo, nll, kl = (float(value / total.sequences) for value in (-total.loss, total.nll, total.kl))
        return Validation(elbo, nll, kl, seconds=time.perf_counter() - start)

    def _save(self) -> Saved:
        with tempfile.TemporaryDirectory(dir=self._trainer.default_root_dir) as directory:
            path = Path(directory) / "measured.ckpt"
            start = time.perf_counter()
            self._trainer.save_checkpoint(path)
            return Saved(time.perf_counter() - start, path.stat().st_size)

    def _peak_memory(self, sequences: list[int], tokens_per_batch: int, trims: bool) -> Activity:
        data, network, on_gpu = data_of(self._trainer), self._module.network, self._device.type == "cuda"
        assert isinstance(network, SequenceVAE)
        self._module.micro_batches.may_split = False  # the question is whether a whole batch fits
        if (give_back := malloc_trim()) is not None and trims:
            give_back(0)
        other = with_budget(data, self._recipe.settings, tokens_per_batch)
        can_repeat = _reset_peak(on_gpu)
        batch = gather_batch(other.split("train"), other.limits, np.array(sequences))
        tokens = int(batch.lengths_B.sum()) * data.accumulate
        for _ in range(MOST_FIRST_STEPS):
            self._requested.extend(batch._replace(step_tokens=tokens, position=k) for k in range(data.accumulate))
            yield
            if self._trainer.optimizers[0].state:  # it has its moments
                break
        else:
            raise RuntimeError(
                f"the optimizer made no step in {MOST_FIRST_STEPS}: all had gradients that are not finite"
            )
        del batch
        peak_gib = self._machine.peak_memory_gib() or 0.0
        return MemoryNeed(
            peak_bytes=torch.cuda.max_memory_reserved() if on_gpu else round(peak_gib * GIB),
            can_repeat=can_repeat,
            least_sequences=network.posterior.least_sequences,
            device_bytes=torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if on_gpu else None,
        )


class _RequestedBatches:
    """A loader of the batches in a queue; when the loop comes for the next one, the step of the last one is done.

    It knows its length: without one, Lightning would fetch a batch ahead.
    """

    def __init__(self, queue: deque[Batch]) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return LONG_RUN**2

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._queue.popleft()


def data_of(trainer: Trainer) -> SequenceDataModule:
    """Return the data module of a trainer."""
    data = vars(trainer)["datamodule"]
    assert isinstance(data, SequenceDataModule)
    return data


def with_budget(data: SequenceDataModule, settings: TrainingSettings, tokens_per_batch: int) -> SequenceDataModule:
    """Return the same opened data, cut by another budget."""
    batches = replace(settings.batches, tokens_per_batch=tokens_per_batch, drop_last=False)
    other = make_data(replace(settings, batches=batches))
    other.data = data.data
    return other


def _reset_peak(on_gpu: bool) -> bool:
    """Measure the peak of memory from here on; False: it is that of the process's whole life."""
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5: the peak becomes what is resident now
    except OSError:  # not on Linux, or in a container that does not let a process do this
        return False
    return True


# --- Stages of a step --------------------------------------------------------------------------------------------------

STAGES = ("data", "transfer", "forward", "backward", "optimizer", "monitoring", "checkpoint", "loop")
"""Waiting for a batch; its way to the device; network and objective; gradients; clipping, step and zeroing; callbacks and
loggers; saving; what is left is Lightning's own loop."""
_STAGE_OF = {
    "train_dataloader_next": "data",
    "batch_to_device": "transfer",
    "transfer_batch_to_device": "transfer",
    "on_before_batch_transfer": "transfer",
    "on_after_batch_transfer": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": "checkpoint",
}
"""The stage of an action, by the last part of its name."""


class StageClock(Profiler):
    """Seconds of each stage, from the beginnings and ends of Lightning's actions.

    Each moment belongs to one stage, the innermost that is under way, so that stages add up to the whole. Actions without a
    stage of their own count for the one around them.
    """

    def __init__(
        self, synchronise: Callable[[], object] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`synchronise` waits for the device before each look at the clock, so that its work counts where it was requested."""
        super().__init__()
        self._synchronise, self._now = synchronise, now
        self._open = ["loop"]
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = now()

    def start(self, action_name: str) -> None:
        stage = stage_of(action_name) or self._open[-1]
        if stage != self._open[-1]:
            self._charge()
        self._open.append(stage)

    def stop(self, action_name: str) -> None:
        if self._open[-1] != self._open[-2]:
            self._charge()
        self._open.pop()

    def restart(self) -> None:
        """Forget what was counted; what is under way goes on."""
        self._charge()
        self._seconds.clear()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage since the restart."""
        self._charge()
        return {stage: self._seconds.get(stage, 0.0) for stage in STAGES}

    def _charge(self) -> None:
        if self._synchronise is not None:
            self._synchronise()
        now = self._now()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now


def stage_of(action: str) -> str | None:
    """Return the stage of a Lightning action, if it has one of its own.

    >>> stage_of("[Strategy]SingleDeviceStrategy.training_step"), stage_of("[Callback]Progress.on_train_batch_end")
    ('forward', 'monitoring')
    >>> stage_of("run_training_batch")
    """
    hook = action.rpartition(".")[2]
    if action.startswith("[Callback]"):
        return "checkpoint" if hook == "on_save_checkpoint" else "monitoring"
    return _STAGE_OF.get(hook)
