"""What a monitor tells the world, from the first process alone: files, loggers, the console, figures.

In: a reading and the verdict after it. Out: a line of posterior.jsonl and `posterior/...` in the Trainer's loggers for each
reading; a line of events.jsonl and one on the console for each change of verdict; figures below plots/, drawn by a process of
their own.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from seqvae.files import DISK_FULL, JsonLines, Patience
from seqvae.monitors.detection.verdict import Verdict, VerdictName, spoken
from seqvae.monitors.detection.verdict import line_of as line_of_verdict
from seqvae.monitors.drawing import PLOTS, Drawing, save_posteriors
from seqvae.monitors.reading import Reading, ReadingsFile, line_of, numbers_of
from seqvae.monitors.window import PosteriorWindow

EVENTS = "events.jsonl"
NOT_ASKED = "decoder_not_asked"
REMADE = ("verdict", "stopped")
"""Events that a resumed run makes again."""


class Publisher:
    """Of one run, in its directory."""

    def __init__(self, directory: Path, loggers: list[Logger], *, verbose: bool, draws: bool) -> None:
        self.directory = directory
        self.loggers = loggers
        self.verbose = verbose
        self.draws = draws
        self._readings = ReadingsFile(directory)
        self._events = JsonLines(directory / EVENTS)
        self._drawing = Drawing()
        self._patience = Patience(PLOTS)
        self._told: set[str] = set()
        """Why there are no figures."""

    def start_after(self, step: int, in_force: VerdictName) -> None:
        """Readings and verdicts beyond a step will be made again; what others wrote into events.jsonl stays.

        Of that very step, too, a verdict goes that is not in force: a run found it as it broke off, behind its last checkpoint.
        """

        def is_undone(row: dict[str, Any]) -> bool:
            return row["step"] > step or (row["step"] == step and row.get("verdict") != in_force)

        self._readings.start_after(step)
        self._events.drop(lambda row: row.get("event") in REMADE and is_undone(row))

    def reading(self, reading: Reading, verdict: Verdict) -> None:
        self._readings.append(reading, verdict.name)
        metrics = {f"posterior/{name}": value for name, value in numbers_of(reading).items()}
        for logger in self.loggers:
            logger.log_metrics(metrics, step=reading.step)
        if self.verbose:
            print(line_of(reading), flush=True)

    def change(self, verdict: Verdict, before: VerdictName, step: int) -> None:
        told = verdict._asdict() | {"numbers": dict(verdict.numbers)}
        self.event("verdict", step, verdict=told.pop("name"), was=before, **told)
        was = None if before == "cannot_tell" else before
        print(f"posterior: {line_of_verdict(verdict, was, step)}", flush=True)

    def last(self, verdict: Verdict | None) -> None:
        """How a run ends; None: no step of it ever told a posterior."""
        if verdict is None:
            print("posterior: nothing was read, since no training_step returned one", flush=True)
        else:
            print(
                f"posterior: {spoken(verdict.name)} since step {verdict.since_step:,}: {verdict.evidence}", flush=True
            )

    def silence(self, step: int, module: str) -> None:
        """Say what is not offered."""
        said = (
            f"{module} has no nll_given_z(batch, z), so decoder use is not read, and a decoder that ignores z behind a rate that "
            "something holds up will not be found"
        )
        if not any(row.get("event") == NOT_ASKED for row in self._events.rows()):  # a resumed run has said so
            self.event(NOT_ASKED, step, said=said)
        print(f"posterior: {said}", flush=True)

    def insistence(self, verdict: Verdict) -> None:
        """Of a run that goes on although it has collapsed and was to stop then."""
        print(
            f"posterior: {spoken(verdict.name)} since step {verdict.since_step:,}; goes on all the same, and stops only if it "
            "collapses again after another verdict",
            flush=True,
        )

    def stopped(self, verdict: Verdict, step: int, saved: str) -> None:
        self.event("stopped", step, verdict=verdict.name)
        print(
            f"posterior: {spoken(verdict.name)}: stopped after step {step:,}, which {saved}",
            file=sys.stderr,
            flush=True,
        )

    def event(self, event: str, step: int, **fields: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._events.append({"time": time, "step": step, "event": event, **fields})

    def try_again(self) -> None:
        """Write lines that still wait, if they can be written by now."""
        self._readings.try_again()
        self._events.try_again()

    def finish_files(self) -> None:
        """Raise an error where lines still wait that cannot be written."""
        self._readings.finish()
        self._events.finish()

    def draw(self, window: PosteriorWindow, step: int) -> None:
        """Begin to; nothing is waited for, and while figures are still being drawn no others are begun."""
        if not self.draws:
            return
        try:
            mean_NZ, logvar_NZ = window.real_posteriors()  # sync: once a drawing
            save_posteriors(self.directory, mean_NZ.numpy(), logvar_NZ.numpy(), step)
        except OSError as error:
            if error.errno not in DISK_FULL:
                self._tell_of_failure(str(error))
            elif not self._patience.bears(str(error.strerror)):
                raise
            return
        self._patience.succeeded()
        self._drawing.start(self.directory)
        self._tell_of_failure(self._drawing.failure())

    def finish(self, seconds: float) -> None:
        """Wait for figures that are being drawn."""
        self._drawing.finish(seconds)
        self._tell_of_failure(self._drawing.failure())

    def _tell_of_failure(self, reason: str | None) -> None:
        """A run is worth more than its pictures. Each reason is told once: the next drawing often meets it again."""
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            print(f"posterior: figures cannot be drawn ({reason}); training goes on without", flush=True)
