"""After NaN or infinity: how a run goes on from an earlier checkpoint, a bounded number of times.

In: the requested rate and precision, and what earlier sessions decided. Out: a lower rate and, from 16-mixed, another precision.
The decision stands in events.jsonl, so that a run that is killed meanwhile goes on with it; another --lr overrides it.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from seqvae.reports.run_files import read_events
from seqvae.training.callbacks.nonfinite import NonFiniteError
from seqvae.training.distributed import DTYPES, ResolvedPrecision, cpu_has_bf16_units
from seqvae.training.run_directory.events import RunEvents
from seqvae.training.run_directory.resume import ROLLED_BACK

MOST_TIMES = 3
LOWER = 0.5
"""Factor of the rate each time."""


class Recovery(NamedTuple):
    """How a run goes on after it came to NaN or infinity."""

    requested_lr: float
    times: int = 0
    lower_lr: float | None = None
    """None: the requested rate."""
    precision: str | None = None

    @property
    def lr(self) -> float:
        return self.requested_lr if self.lower_lr is None else self.lower_lr

    @property
    def is_possible(self) -> bool:
        """Whether the run may go back once more."""
        return self.times < MOST_TIMES

    def resolve_precision(self, requested: ResolvedPrecision) -> ResolvedPrecision:
        if self.precision is None or self.precision == requested.precision:
            return requested
        return ResolvedPrecision(
            "bf16-mixed" if self.precision == "bf16-mixed" else "32-true", "16-mixed came to NaN or infinity"
        )

    def once_more(self, precision: str, device_type: str) -> "Recovery":
        """Return how to go on after another failure in this precision: at a lower rate, and out of 16-mixed."""
        if precision == "16-mixed":
            has_bf16 = torch.cuda.is_bf16_supported() if device_type == "cuda" else cpu_has_bf16_units()
            precision = "bf16-mixed" if has_bf16 and device_type in ("cuda", "cpu") else "32-true"
        return Recovery(self.requested_lr, self.times + 1, self.lr * LOWER, precision)

    def announce(self, events: RunEvents, trouble: NonFiniteError, checkpoint: Path | None) -> None:
        """Say why and from which checkpoint the run goes on; None: from its beginning."""
        place = "its beginning" if checkpoint is None else checkpoint.name
        events.survived(
            ROLLED_BACK,
            trouble.first_step,
            f"{trouble}: back to {place}, on with --lr {self.lr:g} and --precision {self.precision} ({self.times} of {MOST_TIMES})",
            asked_lr=self.requested_lr,
            lr=self.lr,
            precision=self.precision,
        )


def read_recovery(directory: Path, requested_lr: float) -> Recovery:
    """Return what earlier sessions of a run decided at the rate that is requested.

    Anyone may have written to the file, so each event is checked to be as `Recovery.announce` writes it.
    """
    decisions = [
        (lr, precision)
        for event in read_events(directory)
        if event["event"] == ROLLED_BACK
        and event.get("asked_lr") == requested_lr
        and isinstance(lr := event.get("lr"), float)
        and 0 < lr < requested_lr
        and (precision := event.get("precision")) in DTYPES
    ]
    return Recovery(requested_lr, len(decisions), *decisions[-1]) if decisions else Recovery(requested_lr)
