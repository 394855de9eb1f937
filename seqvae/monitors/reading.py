"""A reading: what a run's posteriors say at one optimizer step, as plain numbers, and the rows of posterior.jsonl.

`window.py` takes readings; `detector.py` judges them. No torch here, so that code which only looks at readings does without.
"""

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

from seqvae.files import read_rows, to_json
from seqvae.text import counted, percent

NAME = "posterior.jsonl"
"""The file in a run's directory: one reading a line, with the name of the verdict in force after it."""

Scope = Literal["sequence", "step"]
"""What has a posterior of its own."""


class Reading(NamedTuple):
    """Numbers in nats. One that cannot be known is NaN; one that a module does not return, or that was not read, is None."""

    step: int
    """Optimizer steps done."""
    epoch: int
    scope: Scope
    """What has a posterior: a sequence or a step. All but the NLL and the decoder use is per posterior."""
    posteriors: int
    """How many the reading is made of: the N of the mutual information."""
    rate: float
    kl_per_dim: tuple[float, ...]
    """They add up to the rate; where that is estimated of all dimensions together, each is the KL to a Gaussian with the moments of
    all posteriors: what a dimension tells at most."""
    active_units: int | None
    """None: fewer than two posteriors, or a NaN among them."""
    mutual_information: float
    mutual_information_cap: float
    """log N: more cannot be seen."""
    aggregate_kl: float
    variance_of_means: tuple[float, ...]
    """One number for each dimension, like the next."""
    mean_of_variances: tuple[float, ...]
    effective_dimensions: float
    kl_weight: float | None = None
    nll: float | None = None
    """Reconstruction NLL per sequence, over as many of the last sequences as the window holds."""
    decoder_use: float | None = None
    decoder_use_error: float | None = None
    """Its standard error over the sequences that were probed; NaN of one sequence."""
    decoder_use_sequences: int | None = None
    """How many were probed."""
    decoder_use_steps: int | None = None
    """How many steps they have together; None: the module does not say."""
    escape_threshold: float | None = None
    """The KL weight below which a collapsed posterior is unstable, with the features that the encoder has now (`escape.py`).
    Read on suspicion only; NaN where it cannot be estimated."""
    escape_threshold_error: float | None = None
    """Its standard error."""
    ideal_escape_threshold: float | None = None
    """The same for an encoder that could tell the decoder anything: what it could become at best."""
    ideal_escape_threshold_error: float | None = None
    rate_error: float | None = None
    """Standard error of a rate that is estimated, one draw for each posterior; None: it is computed from mean and variance."""
    decoder_use_wins: float | None = None
    """Share of the comparisons in which a sequence's own z gave it the lower NLL; 0.5 is chance. A few sequences that lose or gain
    very much do not move it."""
    codebook_size: int | None = None
    """Codes of a codebook, where latents are codes (`codes.py`); None: they are not, and neither is any of the numbers below. Of
    codes the mutual information is the entropy, and there are no active units, variances and effective dimensions."""
    codebooks: int | None = None
    """Codes of each latent."""
    code_latents: int | None = None
    """How many latents the next three were read on."""
    codes_in_use: float | None = None
    """Share of the codes of all codebooks that any of them got."""
    codes_in_use_expected: float | None = None
    """What that share would be if all codes were equally likely."""
    code_perplexity: float | None = None
    """Of a codebook: as many codes, equally used, would tell as much."""
    dead_codes: int | None = None
    """Codes of all codebooks that nothing has fallen to for long."""
    dead_code_steps: int | None = None
    """How long that is, in optimizer steps: the median of the dead codes; None: there is none."""
    code_idle_steps: tuple[int, ...] | None = None
    """The same for every code, one codebook after the other; None: there are more than MOST_LISTED."""


MOST_LISTED = 1024
"""Codes whose idleness stands in a reading."""


def describe_probe(sequences: int | None, steps: int | None) -> str:
    """Describe what a decoder use was read on.

    >>> describe_probe(12, 1010), describe_probe(12, None), describe_probe(None, None)
    (' (12 sequences, 1,010 steps)', ' (12 sequences)', '')
    """
    if sequences is None:
        return ""
    return f" ({counted(sequences, 'sequence')}{'' if steps is None else f', {steps:,} steps'})"


def describe_reading(reading: Reading) -> str:
    """Describe a reading in one line."""
    parts = [
        f"step {reading.step:,}",
        f"rate {reading.rate:.2f}{'' if reading.rate_error is None else f' ± {reading.rate_error:.2f}'}",
        f"MI {reading.mutual_information:.2f} of at most {reading.mutual_information_cap:.2f}",
        describe_codes(reading)
        or f"active units {'?' if reading.active_units is None else reading.active_units}/{len(reading.kl_per_dim)}",
    ]
    if reading.decoder_use is not None:
        error = "" if reading.decoder_use_error is None else f" ± {reading.decoder_use_error:.2f}"
        probed = describe_probe(reading.decoder_use_sequences, reading.decoder_use_steps)
        parts.append(f"decoder use {reading.decoder_use:.2f}{error}{probed}")
    rest = (("NLL", reading.nll), ("KL weight", reading.kl_weight))
    return "  ".join([*parts, *(f"{name} {value:.2f}" for name, value in rest if value is not None)])


def describe_codes(reading: Reading) -> str:
    """Describe how the codes are used; empty where latents are no codes."""
    if reading.codes_in_use is None or reading.codebook_size is None:
        return ""
    of = reading.codebook_size * (reading.codebooks or 1)
    perplexity = "" if reading.code_perplexity is None else f", perplexity {reading.code_perplexity:.0f}"
    return f"{percent(reading.codes_in_use)} of {of:,} codes in use{perplexity}"


def to_row(reading: Reading) -> dict[str, Any]:
    """
    >>> to_row(Reading(5, 0, "sequence", 2, 1.0, (1.0,), 1, math.nan, 0.69, math.nan, (1.0,), (1.0,), 1.0))["aggregate_kl"]
    """
    return to_json(reading._asdict())


def from_row(row: dict[str, Any]) -> Reading:
    """Return the reading that a row was made from; infinity has become NaN."""
    fields: dict[str, Any] = {"active_units": None}
    for name in Reading._fields:
        value = row.get(name, ...)
        if isinstance(value, list):
            fields[name] = tuple(math.nan if number is None else number for number in value)
        elif value is not ...:
            fields[name] = math.nan if value is None else value
    return Reading(**fields)


def read_readings(path: Path) -> list[Reading]:
    """Return all whole lines of a posterior.jsonl."""
    return [from_row(row) for row in read_rows(path)]
