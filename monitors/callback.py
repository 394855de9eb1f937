"""The monitor as a Lightning callback: takes in every micro-batch's posteriors, reads them every few optimizer steps.

    Trainer(callbacks=[PosteriorMetricsMonitor(update_frequency=100)])

In: what `training_step` returns (`contract.py` says what). Out: one line of posterior.jsonl a reading, `posterior/...` in the
Trainer's loggers, and with `verbose` a line on the console. Training itself is the same with and without it.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from .contract import ReadOutputs, checked, from_training_step
from .decoder_probe import DecoderUse, Probeable, choose_batch, decoder_use, undisturbed
from .reading import Reading, line_of, numbers_of
from .readings_file import ReadingsFile
from .take_reading import Moment, take_reading
from .window import PosteriorWindow

FEWEST_READINGS = 50
"""Of a run whose length is known: a short one is read more often than `update_frequency` says."""


class PosteriorMetricsMonitor(Callback):
    """Reads the posterior while a model trains.

    Under several processes all see the same reading, made of `posteriors` posteriors of all of them, and the first one writes.
    """

    def __init__(
        self,
        *,
        update_frequency: int = 100,
        log_dir: str | Path | None = None,
        verbose: bool = False,
        posteriors: int = 1024,
        probe_decoder: bool = True,
        probe_every_n_readings: int = 1,
        probe_batch: Any = None,
        read_outputs: ReadOutputs = from_training_step,
    ) -> None:
        """`update_frequency` is in optimizer steps, however many micro-batches make one.

        `log_dir` is where posterior.jsonl goes, by default the Trainer's default_root_dir. It belongs to one run: a run that
        starts at step 0 starts the file anew.
        `probe_decoder` reads decoder use, where the module is `Probeable`, at every n-th reading and the last; on
        `probe_batch`, or one that is chosen from the first validation batches and then kept.
        """
        counts = (
            ("update_frequency", update_frequency),
            ("posteriors", posteriors),
            ("probe_every_n_readings", probe_every_n_readings),
        )
        for name, value in counts:
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        self.update_frequency = update_frequency
        self.log_dir = log_dir
        self.verbose = verbose
        self.posteriors = posteriors
        self.probe_decoder = probe_decoder
        self.probe_every_n_readings = probe_every_n_readings
        self.probe_batch = probe_batch
        self.read_outputs = read_outputs
        self.reading: Reading | None = None
        """The latest."""
        self._forget()

    def describe(self, total_steps: int) -> str:
        """For the header of a run of so many optimizer steps."""
        every = steps_between_readings(self.update_frequency, total_steps)
        steps = "step" if every == 1 else f"{every:,} steps"
        reading = f"a reading of up to {self.posteriors:,} posteriors every {steps}"
        if not self.probe_decoder:
            return f"{reading}, without decoder use"
        nth = "each" if self.probe_every_n_readings == 1 else f"one in {self.probe_every_n_readings}"
        return f"{reading}, decoder use at {nth}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self._forget(trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = planned_steps(trainer)
        self._every_n_steps = steps_between_readings(self.update_frequency, self._last_step)
        self._step_read = trainer.global_step  # a checkpoint is saved after the reading of its step
        self._file = ReadingsFile(Path(self.log_dir or trainer.default_root_dir))
        if trainer.is_global_zero:
            self._file.start_after(trainer.global_step)
            if self.verbose and self.probe_decoder and not isinstance(pl_module, Probeable):
                name = type(pl_module).__name__
                print(f"posterior: no decoder use, since {name} has no posterior_of(batch) and nll_given_z(batch, z)")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        told = checked(pl_module, self.read_outputs(pl_module, outputs, batch))
        self._window.push(told.posterior_mean, told.posterior_logvar, told.posterior_mask, told.nll)
        step = trainer.global_step
        if step == self._step_read or (step % self._every_n_steps and step != self._last_step):
            return
        self._step_read = step
        moment = Moment(step, trainer.current_epoch, told.kl_weight, self._probe(trainer, pl_module, step))
        self.reading = take_reading(self._window, moment, lambda own: gathered(own, trainer))
        if trainer.is_global_zero:
            self._publish(trainer, self.reading)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the windows of all processes. All take part in saving anyway: Lightning has a barrier there."""
        own = self._window.state_dict()
        if own:
            checkpoint["callbacks"][self.state_key] = {name: gathered(value, trainer) for name, value in own.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with the window of this process; among another number of processes windows begin empty and fill up anew."""
        windows = checkpoint["callbacks"].get(self.state_key)
        expected = (trainer.world_size, self._window.posteriors.capacity)
        if windows is not None and windows["posteriors"].shape[:2] == expected:
            self._window.load_state_dict({name: value[trainer.global_rank] for name, value in windows.items()})

    def _forget(self, world_size: int = 1) -> None:
        """Begin a run. The capacity is shared out, so that N, and with it log N, is the same for any number of processes."""
        self._window = PosteriorWindow(-(-self.posteriors // world_size))
        self._chosen_batch: Any = None
        self._has_chosen = False
        self.reading = None

    def _probe(self, trainer: Trainer, module: LightningModule, step: int) -> DecoderUse | None:
        due = step // self._every_n_steps % self.probe_every_n_readings == 0 or step == self._last_step
        if not (due and self.probe_decoder and isinstance(module, Probeable)):
            return None
        with undisturbed(module, trainer.strategy.root_device, trainer.precision_plugin.forward_context()):
            if not self._has_chosen and (self.probe_batch is not None or trainer.val_dataloaders is not None):
                self._chosen_batch = choose_batch(module, self._candidates(trainer))
                self._has_chosen = True
            return None if self._chosen_batch is None else decoder_use(module, self._chosen_batch)

    def _candidates(self, trainer: Trainer) -> Iterator[Any]:
        """Batches to probe on, where the model is."""
        batches = (
            CombinedLoader(trainer.val_dataloaders).flattened[0] if self.probe_batch is None else [self.probe_batch]
        )
        for batch in batches:
            yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))

    def _publish(self, trainer: Trainer, reading: Reading) -> None:
        self._file.append(reading)
        metrics = {f"posterior/{name}": value for name, value in numbers_of(reading).items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=reading.step)
        if self.verbose:
            print(line_of(reading), flush=True)


def gathered(own: Tensor, trainer: Trainer) -> Tensor:
    """Return the tensors of all processes in a new first dimension; all have the same shape.

    As a sum, in which every process fills its own row: Lightning's `all_gather` goes through what torch 2.13 calls deprecated.
    """
    rows = own.new_zeros((trainer.world_size, *own.shape), device=trainer.strategy.root_device)
    rows[trainer.global_rank] = own
    return trainer.strategy.reduce(rows, reduce_op="sum")


def planned_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps that the whole run will have, where that is known."""
    known = [trainer.max_steps] if trainer.max_steps > 0 else []
    epochs, batches = trainer.max_epochs or -1, trainer.num_training_batches
    if epochs > 0 and math.isfinite(batches):
        known.append(epochs * math.ceil(batches / trainer.accumulate_grad_batches))
    return min(known, default=None)


def steps_between_readings(update_frequency: int, last_step: int | None) -> int:
    """
    >>> steps_between_readings(100, None), steps_between_readings(100, 1_000), steps_between_readings(100, 20)
    (100, 20, 1)
    """
    if last_step is None:
        return update_frequency
    return max(1, min(update_frequency, last_step // FEWEST_READINGS))
