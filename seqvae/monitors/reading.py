"""A reading: what a run's posteriors say at one optimizer step, as plain numbers.

`take_reading.py` takes one; `readings_file.py` keeps them; `detector.py` judges them. No torch here, so that all who only look
at readings do without.
"""

from typing import Literal, NamedTuple

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
