"""events.jsonl: what happened to a run, one line each, and on the console what it survived.

In: an event, the step, and what there is to say. Out: a line that anybody can read at any time. The posterior's verdicts stand in
the same file; the monitor writes them itself.
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
"""Of one kind: what goes wrong at every other step for days shall not fill a disk."""

_log = logging.getLogger(__name__)


class RunEvents:
    """Of one run. Only the first process writes; the others say nothing, either."""

    def __init__(self, directory: Path, *, writes: bool = True) -> None:
        self._lines = JsonLines(directory / EVENTS) if writes else None
        self._told: dict[str, int] = {}

    def note(self, event: str, step: int, **fields: Any) -> None:
        """Write `time`, `step`, `event` and whatever else there is to say, in types of JSON."""
        if self._lines is not None:
            self._lines.append({"time": utc_now(), "step": step, "event": event, **fields})

    def survived(self, event: str, step: int, said: str, **fields: Any) -> None:
        """Note what did not end the run, and say it."""
        told = self._told[event] = self._told.get(event, 0) + 1
        if told > MOST_TOLD:
            return
        self.note(event, step, said=said, **fields)
        if self._lines is not None:
            more = " (the last time that this is said)" if told == MOST_TOLD else ""
            _log.warning("step %s: %s%s", f"{step:,}", said, more)

    def finish(self) -> None:
        """Raise an error where lines still wait that cannot be written."""
        if self._lines is not None:
            self._lines.finish()


# What a run came to, and what ended it: said on the console, kept in events.jsonl, read back when the run is asked for again.

FINISHED = "finished"
EndedBy = Literal["steps", "max_time", "early_stopping_patience"]


class RunResult(NamedTuple):
    """What a run came to."""

    directory: Path
    valid_elbo: float
    """In nats per sequence, at weight 1, with one sample for each sequence of the whole validation split."""
    valid_kl: float


def result_of(
    trainer: Trainer,
    plan: Plan,
    settings: TrainingSettings,
    directory: Path,
    ended_by: EndedBy,
    events: RunEvents,
) -> RunResult:
    """After the last validation."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if not math.isfinite(metrics["valid_elbo"]):
        said = f"the validation ELBO is {metrics['valid_elbo']}"
        events.note("diverged", trainer.global_step, said=said)
        raise DivergedError(f"{said}: training diverged. Lower --lr.")
    result = RunResult(directory, metrics["valid_elbo"], metrics["valid_kl"])
    if trainer.is_global_zero:
        early = f" after step {trainer.global_step:,} of {plan.total_steps:,}, as --{ended_by} says"
        said = (
            f"done{'' if ended_by == 'steps' else early}: validation ELBO {result.valid_elbo:.3f} nats per sequence "
            f"(NLL {metrics['valid_nll']:.3f}, KL {result.valid_kl:.3f}); {directory / 'checkpoints' / 'last.ckpt'}"
        )
        print(harmless(said), flush=True)
        events.note(
            FINISHED,
            trainer.global_step,
            total_steps=plan.total_steps,
            ended_by=ended_by,
            limit=limit_of(settings, ended_by),
            valid_elbo=result.valid_elbo,
            valid_kl=result.valid_kl,
        )
    return result


def result_of_finished(directory: Path, settings: TrainingSettings, plan: Plan) -> tuple[RunResult, str] | None:
    """What a run came to that has nothing left to do, and words for that; None for a run that has."""
    events = read_events(directory)
    if not events or not _is_finish(events[-1]):
        return None
    last = events[-1]
    ended_by: EndedBy = last["ended_by"]
    is_longer = plan.total_steps > last["total_steps"]
    if is_longer if ended_by == "steps" else last.get("limit") != limit_of(settings, ended_by):
        return None
    flag = "larger --max_epochs or --max_steps" if ended_by == "steps" else f"larger --{ended_by}"
    said = (
        f"{directory} is finished (step {last['step']:,} of {last['total_steps']:,}, validation ELBO "
        f"{last['valid_elbo']:.3f}): nothing left to do. A {flag} goes on, another --run_name begins anew."
    )
    return RunResult(directory, last["valid_elbo"], last["valid_kl"]), harmless(said)


def _is_finish(event: dict[str, Any]) -> bool:
    """As `result_of` writes it: what lies in a run's directory may be anybody's."""
    counts, measures = ("step", "total_steps"), ("valid_elbo", "valid_kl")
    return (
        event["event"] == FINISHED
        and event.get("ended_by") in get_args(EndedBy)
        and all(isinstance(event.get(name), int) for name in counts)
        and all(isinstance(event.get(name), float) for name in measures)
    )


def limit_of(settings: TrainingSettings, ended_by: EndedBy) -> str | int | None:
    """What the flag said that ended a run before its last step."""
    if ended_by == "max_time":
        return settings.run.max_time
    return settings.validation.early_stopping_patience if ended_by == "early_stopping_patience" else None
