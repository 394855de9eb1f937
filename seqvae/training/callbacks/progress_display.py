"""How far a run is, for whoever watches: a bar on a terminal, elsewhere a line for each row of metrics.csv.

In: the rows, and at every step the number of it. Out: text on stdout.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from seqvae.training.callbacks.progress_bar import ProgressBar, can_show_bar
from seqvae.training.callbacks.throughput import Stopwatch

LABELS = ("valid_auroc", "valid_auprc")
"""Shown where they are there."""


class Display:
    """Prints; validations are lines on a terminal, too, above the bar."""

    def __init__(
        self,
        watch: Stopwatch,
        *,
        total_steps: int,
        unit: str,
        time_limit: timedelta | None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`watch` says how much time is left, `unit` what a step of a sequence is called."""
        self.watch = watch
        self.total_steps = total_steps
        self.unit = unit
        self.time_limit = time_limit
        self._now = now
        self._bar: ProgressBar | None = None
        self._newest: dict[str, float] = {}

    def open(self) -> None:
        if can_show_bar(sys.stdout, os.environ):
            self._bar = ProgressBar(sys.stdout, self._now)
            self._bar.open()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def refresh(self, step: int, epoch: int, doing: str | None = None, *, at_once: bool = False) -> None:
        """To be called as often as one likes: it costs next to nothing where nothing is due, and never asks the device."""
        if self._bar is None or not (at_once or self._bar.is_due()):
            return
        seconds, newest = self._seconds_left(step), self._newest
        # The most important first: a narrow window shows as many as it can.
        texts = [f"{step:,}/{self.total_steps:,}"]
        texts += [] if seconds is None else [f"{clock(seconds)} left"]
        if "loss" in newest:
            texts += [f"loss {newest['loss']:.4f}", f"{newest['steps_per_second']:,.0f} {self.unit}s/s"]
        texts.append(doing or f"epoch {epoch + 1}")
        if "valid_elbo" in newest:
            texts.append(f"elbo {newest['valid_elbo']:.2f}")
        self._bar.show(step / self.total_steps, texts)

    def training(self, step: int, row: Mapping[str, float]) -> None:
        self._newest |= row
        if self._bar is not None:
            return
        seconds = self._seconds_left(step)
        print(
            f"{self._place(step)}  loss {row['loss']:.4f}  nll/{self.unit} {row['nll_per_step']:.4f}  "
            f"kl {row['kl']:.2f} (weight {row['kl_weight']:.2f})  {row['steps_per_second']:,.0f} {self.unit}s/s"
            + ("" if seconds is None else f"  {clock(seconds)} left"),
            flush=True,
        )

    def validation(self, step: int, row: Mapping[str, float]) -> None:
        self._newest |= row
        labels = "".join(f"  {name.removeprefix('valid_')} {row[name]:.3f}" for name in LABELS if name in row)
        print(
            f"{self._place(step)}  validation on {row['valid_sequences']:,.0f}: elbo {row['valid_elbo']:.3f}  "
            f"nll {row['valid_nll']:.3f}  kl {row['valid_kl']:.2f}  nll/{self.unit} {row['valid_nll_per_step']:.4f}{labels}",
            flush=True,
        )

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _seconds_left(self, step: int) -> float | None:
        seconds = self.watch.seconds_left(step, self.total_steps)
        if seconds is None or self.time_limit is None:
            return seconds
        return min(seconds, max(0.0, self.time_limit.total_seconds() - self.watch.seconds))


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
