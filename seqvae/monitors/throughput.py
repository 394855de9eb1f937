"""The speed of a run, as a Lightning callback: real steps per second, and where the rest of the time and of the machine goes.

    Trainer(callbacks=[..., ThroughputMonitor(every_n_steps=100)])

In: how many steps each micro-batch had, from what `training_step` returns. Out: one line of throughput.jsonl per report, and
`throughput/...` in the Trainer's loggers. Between two reports nothing waits for a device.
"""

import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from seqvae.files import JsonLines
from seqvae.monitors.callback import is_due, planned_steps
from seqvae.monitors.contract import COUNTS_HELP, Counts, ReadCounts, check_counts, counts_of
from seqvae.monitors.hardware import FlopCount, Machine, Spent, difference, has_compiled_parts, product_peak

_log = logging.getLogger(__name__)

NAME = "throughput.jsonl"
DIGITS = 6
NO_STEPS = Counts(0, 0, 0)


class Throughput(NamedTuple):
    """A stretch of training, from the report before to this one.

    Training time is all time but validation, the time from the beginning of a save until training goes on, and the first
    micro-batch of a session, to which everything is new. Shares are between 0 and 1. None: not known of this machine or run.
    """

    step: int
    """Optimizer steps done."""
    seconds: float
    """Training time."""
    real_steps_per_second: float
    """Over all processes, like the next two."""
    sequences_per_second: float
    padding_share: float
    """Share of the computed steps that are padding."""
    waiting_share: float
    """Share of training time from the end of one micro-batch to the beginning of the next. That is the loader and the way to the
    device, and what callbacks behind this one, loggers and schedules do there. A GPU may be at work meanwhile. From here on
    all numbers are those of the first process."""
    cpu_utilisation: float
    """Share of the cores that the process may use, by itself; processes that it started for loading are not in it."""
    machine_cpu_utilisation: float | None
    """Share of all cores, by all processes of the machine."""
    gpu_utilisation: float | None
    peak_memory_gib: float | None
    """The most since the process began, like the next."""
    gpu_peak_memory_gib: float | None
    flops_per_second: float | None
    """Work on padding included."""
    share_of_peak: float | None
    """Share of what large products of matrices reached before training."""


class TrainingTime:
    """Sums of what training spends, lap by lap, and of the time that it waits for data. Pauses count for nothing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._sum = Spent()
        self._waited = 0.0
        self._running_since: Spent | None = None
        self._waiting_since: float | None = None
        self._is_paused = False

    def begin(self) -> None:
        """Start the clock, if it does not run."""
        if self._running_since is None:
            self._running_since = self._machine.spent()
            self._is_paused = False

    def go_on(self) -> None:
        """End a pause or a wait, if there is one."""
        if self._is_paused:
            self.begin()
        if self._waiting_since is not None:
            self._waited += self._machine.now() - self._waiting_since
            self._waiting_since = None

    def wait(self) -> None:
        """Count the time from here on as waiting, if training has begun."""
        if self._running_since is not None:
            self._waiting_since = self._machine.now()

    def pause(self) -> None:
        if self._running_since is None:
            return
        self.go_on()
        stretch = difference(self._machine.spent(), self._running_since)
        self._sum = Spent(*(before + more for before, more in zip(self._sum, stretch, strict=True)))
        self._running_since, self._is_paused = None, True

    def end_lap(self) -> tuple[Spent, float]:
        """Return what the lap spent, and the seconds of it that were waited; begin the next lap."""
        self.pause()
        lap, waited = self._sum, self._waited
        self._sum, self._waited = Spent(), 0.0
        self.begin()
        return lap, waited


class ThroughputMonitor(Callback):
    """Measures the speed of a run. It stands last among the callbacks, so that what others do in a step counts as the step."""

    def __init__(
        self,
        *,
        every_n_steps: int = 100,
        log_dir: str | Path | None = None,
        measure_peak: bool = True,
        count: ReadCounts | None = None,
        machine: Machine | None = None,
    ) -> None:
        """`every_n_steps` is in optimizer steps, however many micro-batches make one.

        `log_dir` is where throughput.jsonl goes, by default the Trainer's default_root_dir. It belongs to one run: a run that
        starts at step 0 begins a new file.
        `measure_peak`: time products of matrices before training (0.3 s), and count the FLOPs of a few micro-batches. Where parts
        of the module are compiled, their FLOPs cannot be counted, and there is no share of the peak.
        """
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.log_dir = log_dir
        self.measure_peak = measure_peak
        self.count = count or counts_of
        self.machine = machine or Machine()
        self.throughput: Throughput | None = None
        """The latest."""
        self._peak: float | None = None
        self._time = TrainingTime(self.machine)
        self._flop_count = FlopCount()

    def describe(self, total_steps: int) -> str:
        """Describe the monitor for the header of a run of `total_steps` optimizer steps."""
        every = min(self.every_n_steps, total_steps)
        steps = "step" if every == 1 else f"{every:,} steps"
        peak = ", beside the peak of the machine" if self.measure_peak else ""
        return f"speed, waiting, padding and memory every {steps}{peak}"

    # --- Hooks ------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._peak = None
        if trainer.is_global_zero and (package := self.machine.missing_package(trainer.strategy.root_device)):
            _log.info("note: how busy the GPU is will not be measured, for want of a package: pip install %s", package)
        if self.measure_peak and not has_compiled_parts(pl_module):
            device = trainer.strategy.root_device
            with trainer.precision_plugin.forward_context():
                one = torch.ones(1, 1, device=device)
                dtype = (one @ one).dtype
            self._peak = product_peak(device, dtype)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.throughput = None
        if has_compiled_parts(pl_module):  # since the fit started
            self._peak = None
        self._time = TrainingTime(self.machine)
        self._micro_batches = 0
        self._has_counted = False
        self._sum = NO_STEPS
        self._flops, self._flops_of_batch = 0, 0
        self._steps_of_flops: Tensor | int = 0
        self._last_step = planned_steps(trainer)
        self._step_reported = trainer.global_step
        self._file = JsonLines(Path(self.log_dir or trainer.default_root_dir) / NAME)
        if trainer.is_global_zero:
            self._file.start_after(trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._time.go_on()
        self._micro_batches += 1
        # Count the 4th micro-batch of a session, the 16th, the 64th ..., so that counting costs ever less: a micro-batch of
        # 400 ms takes 50 ms more, as it goes through Python operation by operation.
        number = self._micro_batches
        if self._peak is not None and number > 1 and number.bit_count() == 1 and number.bit_length() % 2 == 1:
            self._flop_count.begin()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:  # else there may be more to come
            self._flops_of_batch += self._flop_count.end() or 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        flops, self._flops_of_batch = self._flops_of_batch + (self._flop_count.end() or 0), 0
        if outputs or not self._has_counted:
            counts = check_counts(pl_module, self.count(pl_module, outputs, batch))
            self._has_counted = True
        else:
            counts = NO_STEPS  # training_step left this batch out
        if self._micro_batches == 1:
            self._time.begin()
        else:
            self._time.go_on()
            self._sum = Counts(*(total + more for total, more in zip(self._sum, counts, strict=True)))  # on its device
            if flops:
                self._flops += flops
                self._steps_of_flops = self._steps_of_flops + counts.real
            if is_due(trainer.global_step, self._step_reported, self.every_n_steps, self._last_step):
                self._report(trainer)
        self._time.wait()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._time.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._time.go_on()
        self._time.wait()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._time.pause()  # no hook is called when a save is done
        if trainer.is_global_zero:
            self._file.try_again()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._flop_count.end()  # a module may end an epoch before a micro-batch that has begun

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._file.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._flop_count.end()

    # --- Reports ----------------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer) -> None:
        step = self._step_reported = trainer.global_step
        device, machine = trainer.strategy.root_device, self.machine
        values = [*self._sum, self._steps_of_flops]
        own = torch.stack([torch.as_tensor(value, dtype=torch.int64, device=device) for value in values])
        of_all = trainer.strategy.reduce(own[:3].clone(), reduce_op="sum")
        numbers = torch.cat((of_all, own)).tolist()  # sync: one per report, before the clock is read
        real, padded, sequences, own_real, _, _, steps_of_flops = numbers
        if real > padded:
            raise ValueError(f"{real:,} real steps among {padded:,} with padding cannot be. {COUNTS_HELP}")
        self._sum = NO_STEPS
        lap, waited = self._time.end_lap()
        flops = own_real / lap.wall * self._flops / steps_of_flops if self._flops and steps_of_flops else None
        exact = Throughput(
            step=step,
            seconds=lap.wall,
            real_steps_per_second=real / lap.wall,
            sequences_per_second=sequences / lap.wall,
            padding_share=1 - real / padded if padded else math.nan,
            waiting_share=waited / lap.wall,
            cpu_utilisation=lap.process / lap.wall / machine.cores(),
            machine_cpu_utilisation=lap.machine_busy / lap.machine_total if lap.machine_total else None,
            gpu_utilisation=machine.gpu_utilisation(device),
            peak_memory_gib=machine.peak_memory_gib(),
            gpu_peak_memory_gib=machine.gpu_peak_memory_gib(device),
            flops_per_second=flops,
            share_of_peak=None if flops is None or self._peak is None else flops / self._peak,
        )
        rounded: dict[str, Any] = {
            name: float(f"{value:.{DIGITS}g}")
            for name, value in exact._asdict().items()
            if name != "step" and value is not None
        }
        self.throughput = exact._replace(**rounded)
        if trainer.is_global_zero:
            self._file.append({"step": step, **rounded})
            for logger in trainer.loggers:
                logger.log_metrics({f"throughput/{name}": value for name, value in rounded.items()}, step=step)
