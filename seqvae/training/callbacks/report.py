"""The callback that keeps report.html of a run's directory up to date, written by a process of its own.

In: the run's directory, and at its end the error that ended it, if one did. Out: `report.html`, now and then and at the end. A
report that cannot be written is reported once, and never ends a run.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from lightning import Callback, Trainer

from seqvae.errors import DivergedError, SettingsError, Stopped, UsageError, harmless
from seqvae.monitors.drawing import Drawing
from seqvae.reports.run_files import REPORT
from seqvae.training.run_directory.records import RunEvents

EVERY_SECONDS = 60.0
"""Between two reports. One takes about 0.3 s of a core at the lowest priority, and 3 ms of training."""
SECONDS, HURRIED_SECONDS = 30.0, 10.0
"""That a run's end waits for its report; the second where a signal requested the end, and will not do so twice. A report takes
about 1 s of a core, several times that on a busy machine, and one that is cut off loses the run's last figures; SLURM and
Kubernetes kill a job 30 s after the signal."""
MOST_CHARACTERS = 500
"""Of an error in an event."""


class RunReport(Callback):
    """Callback and context that writes the report of a run with all its sessions, the last one when the context is left.

    Only the first process writes it.
    """

    def __init__(self, events: RunEvents, *, every_n_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`every_n_steps`: how often to look at the clock, in optimizer steps."""
        self.events = events
        self.every_n_steps = every_n_steps
        self.clock = clock
        self._drawing = Drawing("seqvae.reports")
        self._not_before = 0.0
        self._step = 0

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._write_if_due(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Write beside a new line of progress, as a run may be validated seldom, or not at all."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._step:
            self._write_if_due(step)

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Write the last report, and note an error that has no event of its own, unlike NaN, a signal and a collapse."""
        if isinstance(error, UsageError | SettingsError):  # the run never began, and leaves nothing
            return
        if isinstance(error, Exception) and not isinstance(error, DivergedError):
            with suppress(OSError):  # the disk may be what failed
                found = harmless(f"{type(error).__name__}: {error}")[:MOST_CHARACTERS]
                self.events.note("failed", self._step, said=found)
        if not self.events.writes:
            return
        self._print_failure()
        before = self._modified_at()
        self._drawing.start(self.events.directory, is_urgent=True)
        self._drawing.finish(HURRIED_SECONDS if isinstance(error, Stopped) else SECONDS)
        self._print_failure()
        if error is None and self._modified_at() != before:
            print(harmless(f"report  {self.events.directory / REPORT}"), flush=True)

    def _write_if_due(self, step: int) -> None:
        self._step = step
        now = self.clock()
        if self.events.writes and now >= self._not_before:
            self._not_before = now + EVERY_SECONDS
            self._drawing.start(self.events.directory)
            self._print_failure()

    def _modified_at(self) -> int | None:
        """Return when the report was written, by the clock of its disk; None: there is none."""
        try:
            return (self.events.directory / REPORT).stat().st_mtime_ns
        except OSError:
            return None

    def _print_failure(self) -> None:
        if (reason := self._drawing.failure()) is not None:
            message = f"note: {REPORT} cannot be written ({reason}); the run is none the worse for it"
            print(harmless(message), flush=True)
