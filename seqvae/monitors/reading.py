"""A reading: what a run's posteriors say at one optimizer step, as plain numbers.

`take_reading.py` takes one; `readings_file.py` keeps them; `detector.py` judges them. No torch here, so that all who only look
at readings do without.
"""

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from seqvae.files import JsonLines, read_rows, to_json
from seqvae.monitors.detection.verdict import VerdictName

Scope = Literal["sequence", "step"]
"""What has a posterior of its own."""


class Reading(NamedTuple):
    """In nats. A number that cannot be known is NaN; what a module does not tell, or was not asked for, is None."""

    step: int
    """Optimizer steps done."""
    epoch: int
    scope: Scope
    """What has a posterior: a sequence or a step. All but the NLL and the decoder use is per posterior."""
    posteriors: int
    """How many the reading is made of: the N of the mutual information."""
    rate: float
    kl_per_dim: tuple[float, ...]
    active_units: int | None
    """None: fewer than two posteriors, or a NaN among them."""
    mutual_information: float
    mutual_information_cap: float
    """log N: more cannot be seen."""
    aggregate_kl: float
    variance_of_means: tuple[float, ...]
    """Of each dimension, like the next."""
    mean_of_variances: tuple[float, ...]
    effective_dimensions: float
    kl_weight: float | None = None
    nll: float | None = None
    """Reconstruction NLL per sequence, over as many of the last sequences as the window holds."""
    decoder_use: float | None = None
    decoder_use_error: float | None = None
    """Its standard error over the sequences that were probed; NaN of one sequence."""


def numbers_of(reading: Reading) -> dict[str, float]:
    """Return what a logger can draw: the single numbers that were told, without the place in the run."""
    values = reading._asdict().items()
    return {name: value for name, value in values if isinstance(value, int | float) and name not in ("step", "epoch")}


def line_of(reading: Reading) -> str:
    """Say a reading in one line."""
    parts = [
        f"step {reading.step:,}",
        f"rate {reading.rate:.2f}",
        f"MI {reading.mutual_information:.2f} of at most {reading.mutual_information_cap:.2f}",
        f"active units {'?' if reading.active_units is None else reading.active_units}/{len(reading.kl_per_dim)}",
    ]
    if reading.decoder_use is not None:
        error = "" if reading.decoder_use_error is None else f" ± {reading.decoder_use_error:.2f}"
        parts.append(f"decoder use {reading.decoder_use:.2f}{error}")
    told = (("NLL", reading.nll), ("KL weight", reading.kl_weight))
    return "posterior: " + "  ".join([*parts, *(f"{name} {value:.2f}" for name, value in told if value is not None)])


# posterior.jsonl: one reading a line, as `json_lines.py` has it.

NAME = "posterior.jsonl"


class ReadingsFile:
    """Written by one process."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._lines = JsonLines(self.path)

    def start_after(self, step: int) -> None:
        """Drop the rows beyond a step: those readings will be taken again."""
        self._lines.start_after(step)

    def append(self, reading: Reading, verdict: VerdictName) -> None:
        """With the name of the verdict that is in force after it."""
        self._lines.append(reading._asdict() | {"verdict": verdict})

    def try_again(self) -> None:
        """Write rows that still wait, if they can be written by now."""
        self._lines.try_again()

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._lines.finish()


def to_row(reading: Reading) -> dict[str, Any]:
    """
    >>> to_row(Reading(5, 0, "sequence", 2, 1.0, (1.0,), 1, math.nan, 0.69, math.nan, (1.0,), (1.0,), 1.0))["aggregate_kl"]
    """
    return to_json(reading._asdict())


def from_row(row: dict[str, Any]) -> Reading:
    """The reading that a row was made from; infinity has become NaN."""
    told = {name: _from_json(row[name]) for name in Reading._fields if name in row}
    return Reading(**({"active_units": None} | told))


def read_readings(path: Path) -> list[Reading]:
    """Return all whole lines of a posterior.jsonl."""
    return [from_row(row) for row in read_rows(path)]


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(part) for part in value)
    return math.nan if value is None else value
