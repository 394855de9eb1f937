"""events.jsonl: what happened to a run, one line each; and what a finished run came to.

In: an event, its step and its details. Out: a line that anyone can read at any time, and on the console what the run survived. The
monitor writes its verdicts into the same file by itself.
"""

import logging
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lightning import Trainer

from seqvae.config.training import TrainingSettings
from seqvae.errors import DivergedError, harmless
from seqvae.files import JsonLines
from seqvae.reports.run_files import EVENTS, read_events, utc_now
from seqvae.training.schedules import Plan

MOST_TOLD = 100
"""Events of one kind in a session: what goes wrong at every other step for days shall not fill a disk."""
FINISHED = "finished"
EndedBy = Literal["steps", "max_time", "early_stopping_patience"]

_log = logging.getLogger(__name__)


class RunEvents:
    """Writer of a run's events. Only the first process writes and logs."""

    def __init__(self, directory: Path, *, writes: bool = True) -> None:
        self._lines = JsonLines(directory / EVENTS) if writes else None
        self._counts: dict[str, int] = {}

    def note(self, event: str, step: int, **fields: Any) -> None:
        """Write an event; `fields` are in types of JSON."""
        if self._lines is not None:
            self._lines.append({"time": utc_now(), "step": step, "event": event, **fields})

    def survived(self, event: str, step: int, message: str, **fields: Any) -> None:
        """Write and log something that did not end the run."""
        count = self._counts[event] = self._counts.get(event, 0) + 1
        if count > MOST_TOLD:
            return
        self.note(event, step, said=message, **fields)
        if self._lines is not None:
            more = " (the last time that this is said)" if count == MOST_TOLD else ""
            _log.warning("step %s: %s%s", f"{step:,}", message, more)

    def finish(self) -> None:
        """Raise an error where lines still wait that cannot be written."""
        if self._lines is not None:
            self._lines.finish()


class RunResult(NamedTuple):
    """What a run came to."""

    directory: Path
    valid_elbo: float
    """In nats per sequence, at weight 1, with one sample for each sequence of the whole validation split."""
    valid_kl: float


def result_of(
    trainer: Trainer, plan: Plan, settings: TrainingSettings, directory: Path, ended_by: EndedBy, events: RunEvents
) -> RunResult:
    """Return the result after the last validation; print and note it."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if not math.isfinite(metrics["valid_elbo"]):
        found = f"the validation ELBO is {metrics['valid_elbo']}"
        events.note("diverged", trainer.global_step, said=found)
        raise DivergedError(f"{found}: training diverged. Lower --lr.")
    result = RunResult(directory, metrics["valid_elbo"], metrics["valid_kl"])
    if trainer.is_global_zero:
        early = f" after step {trainer.global_step:,} of {plan.total_steps:,}, as --{ended_by} says"
        message = (
            f"done{'' if ended_by == 'steps' else early}: validation ELBO {result.valid_elbo:.3f} nats per sequence "
            f"(NLL {metrics['valid_nll']:.3f}, KL {result.valid_kl:.3f}); {directory / 'checkpoints' / 'last.ckpt'}"
        )
        print(harmless(message), flush=True)
        events.note(
            FINISHED,
            trainer.global_step,
            total_steps=plan.total_steps,
            ended_by=ended_by,
            limit=_limit_of(settings, ended_by),
            valid_elbo=result.valid_elbo,
            valid_kl=result.valid_kl,
        )
    return result


def result_of_finished(directory: Path, settings: TrainingSettings, plan: Plan) -> tuple[RunResult, str] | None:
    """Return the result of a run that has nothing left to do, and a message; None for a run that goes on.

    Anyone may have written to the file, so the event is checked to be as `result_of` writes it.
    """
    events = read_events(directory)
    last = events[-1] if events else {}
    if (
        last.get("event") != FINISHED
        or last.get("ended_by") not in get_args(EndedBy)
        or not all(isinstance(last.get(name), int) for name in ("step", "total_steps"))
        or not all(isinstance(last.get(name), float) for name in ("valid_elbo", "valid_kl"))
    ):
        return None
    ended_by: EndedBy = last["ended_by"]
    if ended_by == "steps":
        is_extended, flag = plan.total_steps > last["total_steps"], "larger --max_epochs or --max_steps"
    else:
        is_extended, flag = last.get("limit") != _limit_of(settings, ended_by), f"larger --{ended_by}"
    if is_extended:
        return None
    message = (
        f"{directory} is finished (step {last['step']:,} of {last['total_steps']:,}, validation ELBO "
        f"{last['valid_elbo']:.3f}): nothing left to do. A {flag} goes on, another --run_name begins anew."
    )
    return RunResult(directory, last["valid_elbo"], last["valid_kl"]), harmless(message)


def _limit_of(settings: TrainingSettings, ended_by: EndedBy) -> str | int | None:
    """Return the value of the flag that ended a run before its last step."""
    if ended_by == "max_time":
        return settings.run.max_time
    return settings.validation.early_stopping_patience if ended_by == "early_stopping_patience" else None
