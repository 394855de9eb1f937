"""How long train_optimized.py takes from its imports to the first batch and the first optimizer step, and how much memory.

    python -m benchmarks.speed.scaling_start [--until batch] [flags of train_optimized.py]

A real run, with the command's settings and callbacks, that ends there. The last line is JSON. Where the cache exists, this is what
a second start takes; the clock starts when everything is imported. A process of its own, so that its memory is a command's.
"""

import json
import pkgutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

from lightning import Callback, LightningModule, Trainer

import train_optimized
from benchmarks.measure import make_parser, peak_mb
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, TrainingSettings
from seqvae.console import set_up_output
from seqvae.training.fit import fit

PROG = "benchmarks.speed.scaling_start"

STAGES = {
    "open": ("seqvae.data.datamodule.prepare_cache", "seqvae.data.datamodule.open_cache"),
    "cut": (
        "seqvae.data.datamodule.grid_lengths",
        "seqvae.data.datamodule.cut_batches",
    ),
    "plan": ("seqvae.data.datamodule.plan_epoch",),
    "padding": ("seqvae.data.datamodule.padding_efficiency", "seqvae.data.datamodule.grid_efficiency"),
    "checksum": ("seqvae.training.fit.identity_of",),
}
"""Stages that grow with the number of sequences, by the names under which the run calls them."""


class Reached(Exception):
    """Raised to end the run when the first batch or step has come."""


class Stopwatch(Callback):
    """Callback that notes when the first batch and the first optimizer step come, and times the stages before them."""

    def __init__(self, until: str) -> None:
        self.until = until
        self.calls: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self.marks: dict[str, float] = {}
        """Seconds and peak memory of each mark."""
        self._start = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._mark("batch")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1:
            self._mark("step")

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **named)
            self.calls[stage].append(time.perf_counter() - start)
            return result

        return timed_call

    def _mark(self, what: str) -> None:
        self.marks[f"first_{what}_seconds"] = time.perf_counter() - self._start
        self.marks[f"first_{what}_mb"] = peak_mb()
        if what == self.until:
            raise Reached


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--until", choices=("batch", "step"), default="step", help="the first batch or optimizer step")
    options, words = parser.parse_known_args()
    settings = parse_command_line(OptimizedSettings, words, prog=PROG, description=__doc__ or "")
    set_up_output(quiet=True)
    print(json.dumps(start_once(settings, options.until)))


def start_once(settings: TrainingSettings, until: str) -> dict[str, Any]:
    """Return seconds since the imports, and peak megabytes of the process."""
    callbacks = train_optimized.callbacks(settings)  # which imports the monitors
    imported_mb = peak_mb()
    watch = Stopwatch(until)
    with ExitStack() as stack:
        for stage, names in STAGES.items():
            for name in names:
                stack.enter_context(patch(name, watch.timed(stage, pkgutil.resolve_name(name))))
        stack.enter_context(suppress(Reached))
        fit(settings, [watch, *callbacks])
    return {
        "imported_mb": imported_mb,
        **watch.marks,
        "stages": {stage: sum(seconds) for stage, seconds in watch.calls.items()},
        "epoch_plan_seconds": max(watch.calls["plan"]),
    }


if __name__ == "__main__":
    main()
