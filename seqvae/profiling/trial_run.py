"""What a process of `Trials` does: it trains as a run would, but only the batches it is asked for.

It is the run's own network, objective, precision, clipping and optimizer, in Lightning's loop; only the loader differs.
"""

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from lightning import Trainer

from seqvae.config.run import ValidationSettings
from seqvae.config.training import TrainingSettings
from seqvae.console import set_up_output
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import DataError, ExitCode, SettingsError, StorageError, UsageError, is_out_of_memory
from seqvae.profiling.memory import Meter, process_meter
from seqvae.profiling.trials import Ready, Try
from seqvae.training.callbacks.memory import keep_freed_memory, malloc_trim
from seqvae.training.distributed import Devices, resolve_devices, resolve_precision
from seqvae.training.fit import make_data, make_module
from seqvae.training.network import build_network, make_ready
from seqvae.training.schedules import plan_run
from seqvae.training.trainer import make_trainer

ENDLESS = 1_000_000_000
"""Steps of a run that ends when nobody asks any more. Its learning rate hardly leaves 0."""

MOST_FIRST_STEPS = 40
"""A GPU's 16-mixed skips steps until its loss scale is low enough; it halves each time."""


class GpuMemory:
    """What torch holds of a GPU for tensors, with the gaps between them."""

    can_reset = True

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved()


def train_what_is_asked(connection: Connection, directory: str, settings: TrainingSettings) -> None:
    """Until the other end of the pipe is closed. Exits with ExitCode.OUT_OF_MEMORY where memory runs out and the system lets
    the process live."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, and closes the pipe
    set_up_output(quiet=True)
    warnings.simplefilter("ignore")  # the run that follows will say them
    try:
        train(connection, Path(directory), settings)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody asks any more
    except (UsageError, SettingsError, DataError, StorageError) as error:
        connection.send(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(ExitCode.OUT_OF_MEMORY)


def train(connection: Connection, directory: Path, settings: TrainingSettings) -> None:
    devices = resolve_devices(settings.compute)._replace(per_node=1, nodes=1)
    data = make_data(settings)
    plan = plan_run(settings, data, devices.world)._replace(total_steps=ENDLESS)
    torch.manual_seed(settings.run.seed)
    network = build_network(data, settings.model, settings.compute)
    module = make_module(network, settings, plan, data)
    module.micro_batches.may_split = False  # whether a whole batch fits is what is asked
    make_ready(network, settings.compute, devices.accelerator)
    if devices.accelerator == "cpu":
        keep_freed_memory()  # as a run does
    precision = resolve_precision(settings.compute.precision, devices.accelerator)
    trainer = make_trainer(settings, data, plan, devices, precision, directory, [])
    meter = GpuMemory() if devices.accelerator == "cuda" else process_meter()
    loader = AskedBatches(
        connection,
        lambda tokens: with_budget(data, settings, tokens),
        meter,
        lambda: tell_ready(trainer, meter, network.least_sequences, devices),
        micro_batches=data.accumulate,
        first=data.split("train").gather(np.argsort(data.split("train").lengths_N, kind="stable")[:2]),
    )
    trainer.fit(module, train_dataloaders=loader)


def with_budget(data: SequenceDataModule, settings: TrainingSettings, tokens_per_batch: int) -> SequenceDataModule:
    """The same opened data, cut by another budget."""
    batches = replace(settings.batches, tokens_per_batch=tokens_per_batch, drop_last=False)
    other = make_data(replace(settings, batches=batches))
    other.data = data.data
    return other


def settings_of_trials(settings: TrainingSettings, tokens_per_batch: int, processes: int) -> TrainingSettings:
    """Of a run by one process that needs as much memory as each of the `processes`.

    Gradients that wait for more micro-batches, or stand in the buckets of a parallel run, are there while the next micro-batch
    is computed. Two micro-batches need what any number of them does.
    """
    waits = processes > 1 or settings.optimizer.gradient_accumulation_steps > 1
    return replace(
        settings,
        batches=replace(settings.batches, tokens_per_batch=tokens_per_batch, drop_last=False),
        optimizer=replace(settings.optimizer, gradient_accumulation_steps=2 if waits else 1),
        compute=replace(settings.compute, devices=1, num_nodes=1, strategy="auto"),
        validation=ValidationSettings(limit_val_batches=0),
        run=replace(settings.run, logger="csv"),
    )


def tell_ready(trainer: Trainer, meter: Meter, least_sequences: int, devices: Devices) -> Ready | None:
    """None: the optimizer has made no step so far."""
    if not trainer.optimizers[0].state:
        return None
    on_gpu = devices.accelerator == "cuda"
    left = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if on_gpu else None
    return Ready(meter.can_reset, least_sequences, left)


class AskedBatches:
    """A loader of the batches that come through the pipe; when the loop comes for the next one, this one's step is done.

    It knows its length: without one, Lightning would fetch a batch ahead.
    """

    def __init__(
        self,
        connection: Connection,
        data_at: Callable[[int], SequenceDataModule],
        meter: Meter,
        ready: Callable[[], Ready | None],
        *,
        micro_batches: int,
        first: Batch,
    ) -> None:
        """`ready` is asked after each step on the `first` batch, until it knows."""
        self._connection, self._data_at, self._meter, self._ready = connection, data_at, meter, ready
        self._micro_batches, self._first = micro_batches, first

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        yield from self._first_steps()
        give_back = malloc_trim()
        while True:
            wanted: Try = self._connection.recv()
            if wanted.after_trimming and give_back is not None:
                give_back(0)
            data = self._data_at(wanted.tokens_per_batch)
            self._meter.reset()
            yield from self._step(data.gathering("train", data.limits).gather(wanted.sequences_B, data.limits.pad_to))
            self._connection.send(self._meter.peak_bytes())

    def _first_steps(self) -> Iterator[Batch]:
        for _ in range(MOST_FIRST_STEPS):
            yield from self._step(self._first)
            if (ready := self._ready()) is not None:
                self._connection.send(ready)
                return
        raise RuntimeError(f"the optimizer made no step in {MOST_FIRST_STEPS}: all had gradients that are not finite")

    def _step(self, batch: Batch) -> Iterator[Batch]:
        """All micro-batches of an optimizer step."""
        for position in range(self._micro_batches):
            tokens = int(batch.lengths_B.sum()) * self._micro_batches
            yield batch._replace(step_tokens=tokens, position=position)
