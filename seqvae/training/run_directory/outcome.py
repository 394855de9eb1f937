"""What a run came to, and what ended it: said on the console, kept in events.jsonl, read back when the run is asked for again."""

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lightning import Trainer

from seqvae.config.training_settings import TrainingSettings
from seqvae.exit_codes import DivergedError, harmless
from seqvae.reports.run_files import read_events
from seqvae.training.plan import Plan
from seqvae.training.run_directory.events import RunEvents

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
