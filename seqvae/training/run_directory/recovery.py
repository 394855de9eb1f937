"""After NaN or infinity: how a run goes on from an earlier checkpoint, a bounded number of times.

In: what was asked for, and what earlier sessions decided. Out: a lower rate and, from 16-mixed, other numbers to compute with. It
stands in events.jsonl, so that a run that is killed meanwhile goes on with it; whoever gives another --lr means that.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from seqvae.reports.run_files import read_events
from seqvae.training.callbacks.nonfinite import NonFiniteError
from seqvae.training.distributed import DTYPES, ResolvedPrecision, cpu_has_bf16_units
from seqvae.training.run_directory.events import RunEvents
from seqvae.training.run_directory.resume import ROLLED_BACK

MOST_TIMES = 3
LOWER = 0.5
"""Times the rate before."""


class Recovery(NamedTuple):
    """How a run goes on after it came to NaN or infinity."""

    asked_lr: float
    times: int = 0
    lr: float | None = None
    """None: what was asked for."""
    precision: str | None = None

    def precision_in_force(self, asked: ResolvedPrecision) -> ResolvedPrecision:
        if self.precision is None or self.precision == asked.precision:
            return asked
        return ResolvedPrecision(
            "bf16-mixed" if self.precision == "bf16-mixed" else "32-true", "16-mixed came to NaN or infinity"
        )

    @property
    def lr_in_force(self) -> float:
        return self.asked_lr if self.lr is None else self.lr

    @property
    def is_possible(self) -> bool:
        return self.times < MOST_TIMES

    def once_more(self, precision: str, device_type: str) -> "Recovery":
        other = precision
        if precision == "16-mixed":
            other = "bf16-mixed" if computes_bf16(device_type) else "32-true"
        return Recovery(self.asked_lr, self.times + 1, self.lr_in_force * LOWER, other)


def read_recovery(directory: Path, asked_lr: float) -> Recovery:
    """What earlier sessions of a run decided at the rate that is asked for."""
    told = [event for event in read_events(directory) if _is_of(event, asked_lr)]
    if not told:
        return Recovery(asked_lr)
    return Recovery(asked_lr, len(told), told[-1]["lr"], told[-1]["precision"])


def _is_of(event: dict[str, Any], asked_lr: float) -> bool:
    """As `tell_of_recovery` writes it: what lies in a run's directory may be anybody's."""
    lr, precision = event.get("lr"), event.get("precision")
    is_lower = isinstance(lr, float) and 0 < lr < asked_lr
    return event["event"] == ROLLED_BACK and event.get("asked_lr") == asked_lr and is_lower and precision in DTYPES


def tell_of_recovery(events: RunEvents, trouble: NonFiniteError, back_to: Path | None, by: Recovery) -> None:
    place = "its beginning" if back_to is None else back_to.name
    assert by.precision is not None
    events.survived(
        ROLLED_BACK,
        trouble.first_step,
        f"{trouble}: back to {place}, on with --lr {by.lr_in_force:g} and --precision {by.precision} ({by.times} of {MOST_TIMES})",
        asked_lr=by.asked_lr,
        lr=by.lr_in_force,
        precision=by.precision,
    )


def computes_bf16(device_type: str) -> bool:
    return torch.cuda.is_bf16_supported() if device_type == "cuda" else device_type == "cpu" and cpu_has_bf16_units()
