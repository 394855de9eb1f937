"""What watching the posterior costs: the recommended run, once for each way to watch it, with all hooks of the monitor timed.

    python -m benchmarks.detection.monitor_cost [--modes fast] [--stop_after 100] [flags of train_optimized.py]

Without flags that is the run of `make train`, on the demo data, three times; --stop_after ends each early, at the cadence of the
whole. Hooks and training are timed in the same run, so that a busy machine slows both. Training is the time from its first hook
to its last, without validations; the time of figures, which a process of their own draws, is counted apart.
`--max_steps` makes another, shorter run, which is read more often.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from lightning import Callback, LightningModule, Trainer

from benchmarks.measure import machine, make_parser, median, print_table
from seqvae.cli.command_line import parse_command_line
from seqvae.config.monitoring import OPTIMIZED_FAST_WATCH, OPTIMIZED_WATCH, REFERENCE_WATCH, Watch
from seqvae.config.training import OptimizedSettings, TrainingSettings
from seqvae.console import set_up_output, share_machine
from seqvae.errors import run_command
from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.monitors.publish import Publisher
from seqvae.training.fit import fit

PROG = "benchmarks.detection.monitor_cost"

CallKind = Literal["push", "reading", "reading with probe", "other"]
UNITS: dict[CallKind, tuple[str, float]] = {
    "push": ("us", 1e6),
    "reading": ("ms", 1e3),
    "reading with probe": ("ms", 1e3),
}


class Mode(NamedTuple):
    """A way to watch, as a command does, and the share of the training time that it may take."""

    watch: Watch
    limit_percent: float


MODES = {
    "default": Mode(OPTIMIZED_WATCH, 1.0),
    "fast": Mode(OPTIMIZED_FAST_WATCH, 0.5),
    "closest": Mode(REFERENCE_WATCH, 5.0),
}


class Call(NamedTuple):
    """One call of a hook."""

    hook: str
    kind: CallKind
    seconds: float


class Clock(Callback):
    """Callback that times the hooks of a monitor, and training; it stands before the monitor among a Trainer's callbacks."""

    def __init__(self, monitor: PosteriorMetricsMonitor, stop_after: int | None = None) -> None:
        self.monitor = monitor
        self.stop_after = stop_after
        self.calls: list[Call] = []
        """The calls from the beginning of training to its end."""
        self.training_seconds = 0.0
        self.figure_seconds = 0.0
        self._trains = False
        self._since = 0.0
        for hook in dir(Callback):
            if hook.startswith("on_") and getattr(type(monitor), hook) is not getattr(Callback, hook):
                setattr(monitor, hook, self._timed(hook, getattr(monitor, hook)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trains, self._since = True, time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._trains:
            self.training_seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.stop_after

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trains = False
        self.training_seconds += time.perf_counter() - self._since

    def figures(self, method: Callable[..., None]) -> Callable[..., None]:
        """Return a method of a publisher with its time counted apart."""

        def timed(*arguments: Any, **named: Any) -> None:
            start = time.perf_counter()
            method(*arguments, **named)
            self.figure_seconds += time.perf_counter() - start

        return timed

    def _timed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            reading, figures, start = self.monitor.reading, self.figure_seconds, time.perf_counter()
            result = call(*arguments, **named)
            seconds = time.perf_counter() - start - (self.figure_seconds - figures)
            if self._trains or hook == "on_train_end":  # which comes after the clock's
                self.calls.append(Call(hook, self._kind_of(hook, reading), seconds))
            return result

        return timed

    def _kind_of(self, hook: str, reading_before: object) -> CallKind:
        reading = self.monitor.reading
        if hook != "on_train_batch_end":
            return "other"
        if reading is None or reading is reading_before:
            return "push"
        return "reading" if reading.decoder_use is None else "reading with probe"


def main() -> None:
    share_machine()
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--stop_after", type=int, help="optimizer steps of each run; default: all")
    options, words = parser.parse_known_args()
    settings = parse_command_line(OptimizedSettings, words, prog=PROG, description=__doc__ or "")
    set_up_output(quiet=True)
    print(json.dumps(run(settings, options.modes, options.stop_after)))


def run(settings: TrainingSettings, modes: Sequence[str], stop_after: int | None = None) -> dict[str, Any]:
    rows = []
    for mode in modes:
        clock = Clock(PosteriorMetricsMonitor(**MODES[mode].watch.monitor_arguments()), stop_after)
        with (
            patch.object(Publisher, "draw", clock.figures(Publisher.draw)),
            patch.object(Publisher, "finish", clock.figures(Publisher.finish)),
        ):
            fit(settings, [clock, clock.monitor])
        rows.append(row_of(mode, clock))
    print_table(
        "Time in the monitor's hooks, medians of a push and a reading; the highest is the most expensive call", rows
    )
    return {
        "benchmark": "monitor_cost",
        "machine": machine(),
        "rows": rows,
    }


def row_of(mode: str, clock: Clock) -> dict[str, Any]:
    seconds = {kind: [call.seconds for call in clock.calls if call.kind == kind] for kind in UNITS}
    hooks = sum(call.seconds for call in clock.calls)
    return {
        "mode": mode,
        "training s": round(clock.training_seconds, 1),
        "hooks s": round(hooks, 3),
        "share %": round(100 * hooks / clock.training_seconds, 2),
        "at most %": MODES[mode].limit_percent,
        **{
            f"{kind}, {unit}": round(scale * median(seconds[kind]), 2) if seconds[kind] else None
            for kind, (unit, scale) in UNITS.items()
        },
        "readings": len(seconds["reading"]) + len(seconds["reading with probe"]),
        "probes": len(seconds["reading with probe"]),
        "highest, ms": round(1e3 * max(call.seconds for call in clock.calls), 1),
        "figures s, apart": round(clock.figure_seconds, 2),
    }


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
