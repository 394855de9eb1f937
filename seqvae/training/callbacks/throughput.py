"""How fast a run goes: the time of training alone for its speed, all time for what is left of it."""

import time
from collections.abc import Callable


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
