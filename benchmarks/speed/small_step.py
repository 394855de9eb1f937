"""Where steps are short: the loader against batches that lie ready, and Lightning's Trainer against a bare loop.

One process: a real run stops now and then for the bare loop's turns. In two processes, how each lies in memory was as much of
the difference as what they do.
"""

import os
import time
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from benchmarks.speed.bare_loop import BareLoop, endless
from seqvae.console import set_up_output
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.profiling.measured_run import Recipe, data_of, measurable
from seqvae.training.fit import fit, make_data

LEAD = 4
"""Steps of each turn that do not count."""
CACHED, LOADED, TRAINED = "cached batches", "the loader", "the Trainer"


class Turns(Callback):
    """Milliseconds of a step, round by round. A turn is as many steps as an epoch, in the order that has long and short batches
    alike in every stretch."""

    def __init__(self, bare: BareLoop, data: SequenceDataModule, rounds: int) -> None:
        self.milliseconds: dict[str, list[float]] = {CACHED: [], LOADED: [], TRAINED: []}
        self._bare, self._rounds = bare, rounds
        self._steps = data.batches_per_epoch()
        self._loaded, self._ahead = endless(data), endless(data)
        self._begun_at, self._begun = self._steps, 0.0
        """Step and time; what comes before is warm-up."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data_of(trainer).order = "spread"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step == self._begun_at:
            self._begun = time.perf_counter()
        if trainer.global_step < self._begun_at + self._steps:
            return
        self.milliseconds[TRAINED].append((time.perf_counter() - self._begun) / self._steps * 1e3)
        same = list(islice(self._ahead, LEAD + self._steps))
        for name, batches in ((CACHED, iter(same)), (LOADED, self._loaded)):
            self._bare.steps(batches, LEAD)
            start = time.perf_counter()
            self._bare.steps(batches, self._steps)
            self.milliseconds[name].append((time.perf_counter() - start) / self._steps * 1e3)
        self._begun_at = trainer.global_step + LEAD
        trainer.should_stop = len(self.milliseconds[TRAINED]) == self._rounds


def time_small_steps(recipe: Recipe, directory: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step with each, round by round. The run writes into the directory, and prints nothing."""
    settings = measurable(recipe.settings, str(directory))
    data = make_data(settings)
    assert data.accumulate == 1  # a batch is a step
    data.order = "spread"
    turns = Turns(BareLoop(settings, data.description), data, rounds)
    set_up_output()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        fit(settings, [*recipe.callbacks(settings), turns])
    return turns.milliseconds
