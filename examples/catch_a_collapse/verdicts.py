"""What a run was told: the last verdict in its events.jsonl, and a command line with the advised flag in it.

In: a run directory; the words of a command. Out: a `Told`; other words.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seqvae.errors import UsageError
from seqvae.reports.run_files import EVENTS, read_events


class Told(NamedTuple):
    """A verdict as it stands in the file."""

    verdict: str
    step: int
    """Of the reading that it was said at."""
    evidence: str
    advice: tuple[str, ...]
    """The most promising first: a flag, and in brackets what it does."""


def last_verdict(run: Path) -> Told:
    events = [event for event in read_events(run) if event["event"] == "verdict"]
    if not events:
        raise UsageError(f"{run / EVENTS} holds no verdict: was the run watched, and did it come to a reading?")
    last = events[-1]
    return Told(last["verdict"], last["step"], last["evidence"], tuple(last["advice"]))


def flag_of(advice: str) -> tuple[str, str]:
    """
    >>> flag_of("--free_bits 0.25 (the first nats of each dimension are free)")
    ('--free_bits', '0.25')
    """
    flag, value = advice.partition(" (")[0].split()
    return flag, value


def with_flag(words: Sequence[str], flag: str, value: str) -> list[str]:
    """The same command with one flag changed, or added.

    >>> with_flag(["--depth", "1", "--free_bits", "0"], "--free_bits", "0.25")
    ['--depth', '1', '--free_bits', '0.25']
    """
    if flag not in words:
        return [*words, flag, value]
    place = words.index(flag) + 1
    return [*words[:place], value, *words[place + 1 :]]
