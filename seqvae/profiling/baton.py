"""The training process's end of the pipe: a Lightning callback that trains on when asked, and says what it came to."""

import tempfile
import time
from collections.abc import Generator, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

from seqvae.data.batch import Batch, padded_steps
from seqvae.data.datamodule import SequenceDataModule
from seqvae.monitors.hardware import FlopCount, Machine
from seqvae.profiling import messages
from seqvae.profiling.messages import Lap, Ready, Saved, Traced, Validation, Work
from seqvae.profiling.stages import StageClock
from seqvae.training.callbacks.checkpoint import is_between_steps
from seqvae.training.callbacks.compile import compiled_graphs, is_compiled
from seqvae.training.module import TrainingModule, add_up, sums_of
from seqvae.training.objective import negative_elbo
from seqvae.training.schedules import Plan

Activity = Generator[None, None, Lap | Work | Traced]
"""Trains on for one optimizer step with each `yield`, and ends with what there is to say."""


class Closed(BaseException):
    """The run is not wanted any more. No Exception, so that nothing on the way takes it for a fault."""


class MeasurementCallback(Callback):
    """Stands last among the callbacks that a command gives; holds the run before its first step and after each request."""

    def __init__(
        self, connection: Connection, plan: Plan, limit_val_batches: float | int, is_spread: bool, started: float
    ) -> None:
        """`plan` and `limit_val_batches` are those of the run as it was asked for, `started` is when its process did."""
        self._connection = connection
        self._plan = plan
        self._limit_val_batches = limit_val_batches
        self._is_spread = is_spread
        self._started = started
        self._machine = Machine()
        self._validation_batches: Iterable[Batch] | None = None
        self._sizes: list[tuple[int, int, int]] = []
        """Real steps, padded steps and sequences of each micro-batch of the present request."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A stretch of training should stand for all of it, and not begin with the dearest batches."""
        data = data_of(trainer)
        data.order = "spread" if self._is_spread else "shuffled"
        data.limit_val_batches = self._limit_val_batches or 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        self._clock = StageClock(torch.cuda.synchronize if on_gpu else None)
        self._no_clock = vars(trainer)["profiler"]
        self._connection.send(
            Ready(
                parameters=sum(p.numel() for p in pl_module.parameters()),
                plan=self._plan,
                accumulate=trainer.accumulate_grad_batches,
                precision=str(trainer.precision),
                device=str(trainer.strategy.root_device),
                seconds=time.perf_counter() - self._started,
                is_compiled=is_compiled(pl_module),
            )
        )
        self._obey(trainer, pl_module)

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
            self._obey(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise RuntimeError("the run ended before it was measured")

    def _obey(self, trainer: Trainer, module: LightningModule) -> None:
        """Do what is asked, until that is to train on."""
        assert isinstance(module, TrainingModule)
        while True:
            match request := self._connection.recv():
                case messages.Turn():
                    self._activity = self._turn(trainer, request)
                case messages.Count():
                    self._activity = self._count(request)
                case messages.Trace():
                    self._activity = self._trace(request)
                case messages.Validate():
                    if self._validation_batches is None:  # once, as Lightning does: worker processes stay
                        self._validation_batches = data_of(trainer).val_dataloader()
                    self._connection.send(validate(trainer, module, self._validation_batches))
                    continue
                case messages.Save():
                    self._connection.send(save(trainer))
                    continue
                case messages.Close():
                    raise Closed
            next(self._activity)
            return

    # --- Activities -------------------------------------------------------------------------------------------------

    def _turn(self, trainer: Trainer, request: messages.Turn) -> Activity:
        graphs = compiled_graphs()
        for _ in range(request.lead_steps):
            yield
        vars(trainer)["profiler"] = self._clock if request.by_stage else self._no_clock  # asked for anew at each action
        self._sizes.clear()
        steps_begun, cpu_begun, begun = trainer.global_step, time.process_time(), time.perf_counter()
        self._clock.restart()
        while trainer.global_step - steps_begun < request.steps or time.perf_counter() - begun < request.seconds:
            yield
        seconds = time.perf_counter() - begun
        device = trainer.strategy.root_device
        return Lap(
            seconds=seconds,
            steps=trainer.global_step - steps_begun,
            micro_batches=len(self._sizes),
            **self._sums(),
            stages=self._clock.seconds() if request.by_stage else {},
            cpu_seconds=time.process_time() - cpu_begun,
            cores=self._machine.cores(),
            gpu_utilisation=self._machine.gpu_utilisation(device),
            peak_memory_gib=self._machine.gpu_peak_memory_gib(device) or self._machine.peak_memory_gib() or 0.0,
            recompiles=compiled_graphs() - graphs,
        )

    def _count(self, request: messages.Count) -> Activity:
        count = FlopCount()
        self._sizes.clear()
        torch.compiler.set_stance("force_eager")  # what is compiled cannot be counted
        count.begin()
        for _ in range(request.steps):
            yield
        flops = count.end() or 0
        torch.compiler.set_stance("default")
        sums = self._sums()
        return Work(flops, sums["real_steps"], sums["padded_steps"])

    def _trace(self, request: messages.Trace) -> Activity:
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
            for _ in range(request.steps):
                yield
        profiler.export_chrome_trace(request.path)
        return Traced(Path(request.path).stat().st_size)

    def _sums(self) -> dict[str, int]:
        real, padded, sequences = (sum(column) for column in zip(*self._sizes, strict=True))
        return {"real_steps": real, "padded_steps": padded, "sequences": sequences}


def data_of(trainer: Trainer) -> SequenceDataModule:
    data = vars(trainer)["datamodule"]
    assert isinstance(data, SequenceDataModule)
    return data


def validate(trainer: Trainer, module: TrainingModule, batches: Iterable[Batch]) -> Validation:
    """On the batches that the settings choose; neither counters nor loggers hear of it."""
    start = time.perf_counter()
    parts = []
    module.eval()
    with torch.no_grad(), trainer.precision_plugin.val_step_context():
        for batch in batches:
            here = trainer.strategy.batch_to_device(batch)
            torch.manual_seed(here.position)
            output = module.network(here)
            parts.append(sums_of(negative_elbo(output, kl_weight=1.0, free_bits=0.0), output, here))
    module.train()
    total = add_up(parts, trainer)
    elbo, nll, kl = (float(value / total.sequences) for value in (-total.loss, total.nll, total.kl))
    return Validation(elbo, nll, kl, sequences=int(total.sequences), seconds=time.perf_counter() - start)


def save(trainer: Trainer) -> Saved:
    with tempfile.TemporaryDirectory(dir=trainer.default_root_dir) as directory:
        path = Path(directory) / "measured.ckpt"
        start = time.perf_counter()
        trainer.save_checkpoint(path)
        return Saved(time.perf_counter() - start, path.stat().st_size)
