"""What a monitor publishes, from the first process alone: files, loggers, the console, figures.

In: a reading and the verdict after it. Out: a line of posterior.jsonl for each reading; a line of events.jsonl and one on the
console for each change of verdict; figures below plots/, drawn by a process of their own; all three as `posterior...` in the
Trainer's loggers.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from seqvae.files import DISK_FULL, JsonLines, Patience
from seqvae.monitors.codes import CodeWindow
from seqvae.monitors.contract import MovesLatents
from seqvae.monitors.drawing import PLOTS, Drawing, save_posteriors
from seqvae.monitors.loggers import log_picture, log_verdict
from seqvae.monitors.reading import NAME, Reading, describe_reading
from seqvae.monitors.window import PosteriorWindow
from seqvae.text import folded, window_width
from seqvae.verdicts import Verdict, describe_change, readable

EVENTS = "events.jsonl"
NOT_PROBED = "decoder_not_asked"
NO_METRICS = (
    "step",
    "epoch",
    "decoder_use_sequences",
    "decoder_use_steps",
    "codebook_size",
    "codebooks",
    "code_latents",
)
"""Fields of a reading that are no curves for a logger."""
REMADE = ("verdict", "stopped")
"""Events that a resumed run makes again."""


class Publisher:
    """The publisher of one run, in its directory."""

    def __init__(
        self, directory: Path, loggers: list[Logger], *, verbose: bool, draws: bool, level: str | None = None
    ) -> None:
        """`level`: what a module with several levels of latents calls the one that is read."""
        self.directory = directory
        self.subject = "posterior" if level is None else f"{level} latents"
        self.metrics = "posterior" if level is None else f"{level}_posterior"
        self.loggers = loggers
        self.verbose = verbose
        self.draws = draws
        self._readings = JsonLines(directory / NAME)
        self._events = JsonLines(directory / EVENTS)
        self._drawing = Drawing()
        self._drawn_step = 0
        self._patience = Patience(PLOTS)
        self._reported_failures: set[str] = set()

    def start_after(self, step: int, in_force: Verdict, *, unprobed: str | None, stops: bool) -> None:
        """Prepare the files of a run that starts after `step`, and print what is unusual about it.

        Readings and verdicts beyond the step will be made again; what others wrote into events.jsonl stays. Of that very step,
        too, a verdict goes that is not in force: a run found it as it broke off, behind its last checkpoint.
        `unprobed` names a module whose decoder use should be read and cannot; `stops`: the collapse in force has ended the run.
        """

        rows = [row for row in self._events.rows() if row.get("event") in REMADE and row["step"] == step]
        while rows and rows[-1].get("verdict") != in_force.name:  # a step can bring two: a collapse, and its rescue
            rows.pop()

        def will_be_remade(row: dict[str, Any]) -> bool:
            return row.get("event") in REMADE and (row["step"] > step or (row["step"] == step and row not in rows))

        self._readings.start_after(step)
        self._events.drop(will_be_remade)
        if unprobed is not None:
            message = (
                f"{unprobed} has no nll_given_z(batch, z), so decoder use is not read, and a decoder that ignores z behind a "
                "rate that something holds up will not be found"
            )
            if not any(row.get("event") == NOT_PROBED for row in self._events.rows()):  # a resumed run has this event
                self._event(NOT_PROBED, step, said=message)
            self._say(message)
        if stops:
            self._say(
                f"{readable(in_force.name)} since step {in_force.since_step:,}; the run continues nevertheless, and "
                "stops only if it collapses again after another verdict"
            )

    def reading(self, reading: Reading, verdict: Verdict) -> None:
        """Publish a reading, with the name of the verdict that is in force after it."""
        numbers = reading._asdict()
        self._readings.append(numbers | {"verdict": verdict.name})
        metrics = {
            f"{self.metrics}/{name}": value
            for name, value in numbers.items()
            if isinstance(value, int | float) and name not in NO_METRICS
        }
        for logger in self.loggers:
            logger.log_metrics(metrics, step=reading.step)
        if self.verbose:
            self._say(describe_reading(reading))
        self._log_figures()

    def change(self, verdict: Verdict, before: str, step: int) -> None:
        """Publish the verdict, if it is another one than before."""
        if verdict.name == before:
            return
        fields = verdict._asdict() | {"numbers": dict(verdict.numbers)}
        self._event("verdict", step, verdict=fields.pop("name"), was=before, **fields)
        was = None if before == "cannot_tell" else before
        sentence = describe_change(verdict, was, step)
        for logger in self.loggers:
            log_verdict(logger, self.metrics, readable(verdict.name), sentence, step)
        self._say(sentence)

    def remark(self, message: str, step: int) -> None:
        """Publish, once, what a reading cannot know, or cannot trust, of what the module hands over."""
        if message not in self._reported_failures:
            self._reported_failures.add(message)
            self._event("doubtful_outputs", step, said=message)
            self._say(message)

    def assumed(self, message: str) -> None:
        """Print what is taken for granted of a module that does not say it."""
        self._say(message)

    def stopped(self, verdict: Verdict, step: int, saved: str) -> None:
        """Publish that the collapse ends the run."""
        self._event("stopped", step, verdict=verdict.name)
        print(
            f"{self.subject}: {readable(verdict.name)}: stopped after step {step:,}, which {saved}",
            file=sys.stderr,
            flush=True,
        )

    def end(self, verdict: Verdict | None) -> None:
        """Print how a run ends (None: no step of it returned a posterior); raise an error for lines that cannot be written."""
        if verdict is None:
            self._say("nothing was read, since no training_step returned one")
        else:
            since = f"{readable(verdict.name)} since step {verdict.since_step:,}"
            self._say(f"{since}: {verdict.evidence}")
        self._readings.finish()
        self._events.finish()

    def try_again(self) -> None:
        """Write lines that still wait, if they can be written by now."""
        self._readings.try_again()
        self._events.try_again()

    def draw(
        self,
        window: PosteriorWindow | CodeWindow,
        step: int,
        moves: MovesLatents | None = None,
        *,
        is_urgent: bool = False,
    ) -> None:
        """Begin to draw, without waiting. `moves` as in a reading.

        While figures are still being drawn no others are begun, but those of the end, which are urgent.
        """
        if not self.draws:
            return
        try:
            if isinstance(window, PosteriorWindow):  # codes have no posteriors to draw
                # sync: once a drawing
                mean_NZ, logvar_NZ = window.real_posteriors() if moves is None else window.moved_posteriors(moves)
                save_posteriors(self.directory, mean_NZ.numpy(), logvar_NZ.numpy(), step)
        except OSError as error:
            if error.errno not in DISK_FULL:
                self._report_failure(str(error))
            elif not self._patience.should_retry(str(error.strerror)):
                raise
            return
        self._patience.succeeded()
        self._report_failure(self._drawing.failure())
        self._log_figures()
        if self._drawing.start(self.directory, is_urgent=is_urgent):
            self._drawn_step = step
        self._report_failure(self._drawing.failure())

    def finish(self, seconds: float) -> None:
        """Wait for figures that are being drawn."""
        self._drawing.finish(seconds)
        self._report_failure(self._drawing.failure())
        self._log_figures()

    def _log_figures(self) -> None:
        """Hand figures that were drawn since the last call to the loggers."""
        if self._drawing.has_drawn():
            for path in sorted((self.directory / PLOTS).glob("*.png")):
                for logger in self.loggers:
                    log_picture(logger, f"{self.metrics}_figures/{path.stem}", path, self._drawn_step)

    def _event(self, event: str, step: int, **fields: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._events.append({"time": time, "step": step, "event": event, **fields})

    def _report_failure(self, reason: str | None) -> None:
        """Print why there are no figures, each reason once: the next drawing often meets it again."""
        if reason is not None and reason not in self._reported_failures:
            self._reported_failures.add(reason)
            print(f"{self.subject}: figures cannot be drawn ({reason}); training continues without them", flush=True)

    def _say(self, line: str) -> None:
        print(folded(f"{self.subject}: {line}", window_width(sys.stdout)), flush=True)
