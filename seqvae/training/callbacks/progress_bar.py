"""One line at the bottom of a terminal that says how far a run is; all other output appears above it, undamaged.

In: the share that is done and a few texts. Out: the line, drawn anew at most five times a second. It asks nothing of the
device: what it shows, somebody else has measured.
"""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import TypeGuard

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
