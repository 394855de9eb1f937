"""What a detector says of a run: the verdict's name, what it rests on, and what to do about it.

Plain Python: whoever shows or stores a verdict needs no torch.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

VerdictName = Literal[
    "healthy",
    "warming_up",
    "collapsing",
    "collapsed",
    "decoder_ignores_z",
    "partly_collapsed",
    "not_variational",
    "diverged",
    "cannot_tell",
]

ALARMS: frozenset[VerdictName] = frozenset(
    ("collapsing", "collapsed", "decoder_ignores_z", "not_variational", "diverged")
)
"""What somebody should be woken for. Partly collapsed is often as it should be."""

COLLAPSES: frozenset[VerdictName] = frozenset(("collapsed", "decoder_ignores_z"))
"""The latent carries nothing that is used, whether or not a remedy keeps the rate up."""

UNHARMED: frozenset[VerdictName] = frozenset(("healthy", "partly_collapsed"))
"""What is worth going back to."""


NO_NUMBERS: Mapping[str, float] = {}


class Verdict(NamedTuple):
    """In force from a reading on until the evidence says otherwise."""

    name: VerdictName
    since_step: int
    """Of the reading that it was first said of."""
    evidence: str
    """One sentence, with the numbers."""
    advice: tuple[str, ...] = ()
    """What to try, the most promising first: a flag, and in brackets what it does."""
    numbers: Mapping[str, float] = NO_NUMBERS
    """What the evidence rests on, by the names of `Reading`."""
    dead_by_step: int | None = None
    """Of a run that is collapsing: when nothing will be left if nothing changes."""


def line_of(verdict: Verdict, before: VerdictName | None, step: int) -> str:
    """Say a change of verdict in one line.

    >>> line_of(Verdict("collapsing", 90, "the rate fell from 4 to 1", ("--free_bits 0.25 (why)",), {}, 300), "healthy", 90)
    'step 90: collapsing, dead by step 300 (was healthy): the rate fell from 4 to 1. Try --free_bits 0.25'
    """
    dead_by = "" if verdict.dead_by_step is None else f", dead by step {verdict.dead_by_step:,}"
    was = "" if before is None else f" (was {spoken(before)})"
    flags = [one.partition(" (")[0] for one in verdict.advice]
    advice = f". Try {' or '.join(flags)}" if flags else ""
    return f"step {step:,}: {spoken(verdict.name)}{dead_by}{was}: {verdict.evidence}{advice}"


def spoken(name: VerdictName) -> str:
    """
    >>> spoken("decoder_ignores_z")
    'decoder ignores z'
    """
    return name.replace("_", " ")
