"""How fast a run goes: the time of training alone for its speed, all time for what is left of it."""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import TypeGuard


class Stopwatch:
    """Two clocks that outlive interruptions: one of the whole run, one of the present lap, which can be paused."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` counts seconds from anywhere, and never backwards."""
        self._now = now
        self._started = self._lap_started = now()
        self._paused_at: float | None = None
        self._anchor: tuple[float, int] | None = None

    def start(self, *, seconds: float = 0.0, lap_seconds: float = 0.0) -> None:
        """Begin, or go on where another stopwatch stood."""
        now = self._now()
        self._started, self._lap_started = now - seconds, now - lap_seconds
        self._paused_at = self._anchor = None

    @property
    def seconds(self) -> float:
        """Of the run, interruptions left out."""
        return self._now() - self._started

    @property
    def lap_seconds(self) -> float:
        """Since the last lap, pauses left out."""
        return (self._now() if self._paused_at is None else self._paused_at) - self._lap_started

    def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self._now()

    def unpause(self) -> None:
        if self._paused_at is not None:
            self._lap_started += self._now() - self._paused_at
            self._paused_at = None

    def end_lap(self) -> float:
        """How long the lap was; the next one begins."""
        seconds = self.lap_seconds
        self._lap_started += seconds
        return seconds

    def begin_pace(self, step: int) -> None:
        """From here on the pace counts. The very first step is slow, because everything is new to it."""
        if self._anchor is None:
            self._anchor = (self._now(), step)

    def seconds_left(self, step: int, total_steps: int) -> float | None:
        """At the pace so far of this session, pauses included; None: there is none yet."""
        if self._anchor is None or step == self._anchor[1]:
            return None
        since, first_step = self._anchor
        return (self._now() - since) / (step - first_step) * (total_steps - step)


# How far a run is, for whoever watches: a bar on a terminal, elsewhere a line for each row of metrics.csv.
#
# In: the rows, and at every step the number of it. Out: text on stdout.

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


# One line at the bottom of a terminal that says how far a run is; all other output appears above it, undamaged.
#
# In: the share that is done and a few texts. Out: the line, drawn anew at most five times a second. It asks nothing of the
# device: what it shows, somebody else has measured.

REFRESH_SECONDS = 0.2
WIDEST_BAR, NARROWEST_BAR = 30, 8
"""Characters. Below the least, texts are left out, the last ones first."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
CLEAR = "\r\x1b[K"
"""To the first column, and everything to the right of it away."""


def can_show_bar(stream: object, environment: Mapping[str, str]) -> TypeGuard[io.TextIOWrapper]:
    """Whether a line can be drawn over and over: not in a file, a pipe or a notebook."""
    able = environment.get("TERM") != "dumb" and (sys.platform != "win32" or "WT_SESSION" in environment)
    return able and isinstance(stream, io.TextIOWrapper) and stream.isatty()


def compose(share: float, texts: Sequence[str], width: int, *, blocks: bool) -> str:
    """Percentage, bar, and as many of the texts as there is room for.

    >>> compose(0.42, ["84/200", "loss 1.25"], 40, blocks=False)
    ' 42% [######.........] 84/200  loss 1.25'
    """
    percent = f"{int(100 * share):3}%"
    rest = list(texts)
    while rest and width - _width_of(percent, rest) < NARROWEST_BAR:
        rest.pop()
    room = min(width - _width_of(percent, rest), WIDEST_BAR)
    parts = [percent, _bar(share, room, blocks)] if room >= NARROWEST_BAR else [percent]
    return " ".join([*parts, "  ".join(rest)]).rstrip()[:width]


def _width_of(percent: str, texts: Sequence[str]) -> int:
    """Of everything but the bar: the spaces on both its sides and its ends count."""
    return len(percent) + 4 + len("  ".join(texts))


def _bar(share: float, room: int, blocks: bool) -> str:
    if not blocks:
        return f"[{'#' * int(share * room):.<{room}}]"
    whole, eighths = divmod(int(share * room * 8), 8)
    return f"▕{EIGHTHS[8] * whole + EIGHTHS[eighths]:<{room}.{room}}▏"


class ProgressBar:
    """Draws on a terminal. While it is up, `sys.stdout`, `sys.stderr` and the root logger write above it."""

    def __init__(self, stream: io.TextIOWrapper, now: Callable[[], float] = time.perf_counter) -> None:
        self._stream = stream
        self._now = now
        self._blocks = _can_encode(stream, f"{EIGHTHS}▕")
        self._line = ""
        self._next_draw = float("-inf")
        self._foreign_line_open = False
        self._lock = threading.RLock()
        """Figures are drawn and data loaded in threads, which may have something to say."""
        self._redirected = ExitStack()

    def open(self) -> None:
        if isinstance(sys.stdout, _Above):
            return
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty():
            self._redirected.enter_context(redirect_stdout(_Above(sys.stdout, self)))
        if (
            isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.isatty()
        ):  # else what goes there does not meet the bar
            above = _Above(sys.stderr, self)
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                    self._redirected.callback(handler.setStream, handler.stream)
                    handler.setStream(above)
            self._redirected.enter_context(redirect_stderr(above))

    def is_due(self) -> bool:
        return self._now() >= self._next_draw

    def show(self, share: float, texts: Sequence[str]) -> None:
        self._next_draw = self._now() + REFRESH_SECONDS
        # One column stays free: a line that fills the last one wraps on some terminals.
        self._line = compose(share, texts, _columns(self._stream) - 1, blocks=self._blocks)
        self._draw()

    def close(self) -> None:
        """Leave the bar where it is and go on below it. Closing what is closed does nothing."""
        with self._lock:
            if self._line:
                self._draw()
                self._stream.write("\n")
                self._stream.flush()
                self._line = ""
        self._redirected.close()

    def write_above(self, text: str, write: Callable[[str], int]) -> int:
        """Let somebody else write; the bar comes back when the line is complete."""
        with self._lock:
            if not self._foreign_line_open and self._line:
                self._stream.write(CLEAR)
                self._stream.flush()
            written = write(text)
            if text:
                self._foreign_line_open = not text.endswith("\n")
            self._draw()
            return written

    def _draw(self) -> None:
        with self._lock:
            if self._line and not self._foreign_line_open:
                self._stream.write(f"\r{self._line}\x1b[K")
                self._stream.flush()


class _Above(io.TextIOWrapper):
    """Stands in for a stream while a bar is up; whoever still has it afterwards can go on using it."""

    def __init__(self, stream: io.TextIOWrapper, bar: ProgressBar) -> None:
        stream.flush()
        super().__init__(stream.buffer, encoding=stream.encoding, errors=stream.errors, write_through=True)
        self._bar = bar

    def write(self, text: str) -> int:
        return self._bar.write_above(text, self._write_through)

    def close(self) -> None:
        """The stream below is not ours to close."""

    def _write_through(self, text: str) -> int:
        written = super().write(text)
        self.flush()
        return written


def _columns(stream: io.TextIOWrapper) -> int:
    """Of the window as it is now; a terminal that does not know is taken for 80 wide."""
    return os.get_terminal_size(stream.fileno()).columns or 80


def _can_encode(stream: io.TextIOWrapper, text: str) -> bool:
    try:
        text.encode(stream.encoding)
    except UnicodeEncodeError:
        return False
    return True
