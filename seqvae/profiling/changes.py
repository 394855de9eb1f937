"""Settings that could be otherwise: applied to a run's settings, put together, and written as a command line."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import NamedTuple

from seqvae.config.training import TrainingSettings
from seqvae.config.yaml_files import values_of

Value = bool | int | str | None
"""Of a setting."""


class Change(NamedTuple):
    """Settings that could be otherwise."""

    name: str
    theme: str
    values: Mapping[str, Value]
    """By the names of their flags; only what differs."""
    reason: str
    """Why it might help here."""
    effect: str = ""
    """What it changes beside the speed."""
    apart: str = ""
    """Why it is for the user to decide and never part of a proposal."""
    by_totals: bool = False
    """Its turns are compared by their sum: batches are others, or it acts only now and then."""

    @property
    def flags(self) -> list[str]:
        return as_typed(self.values)

    def apply(self, settings: TrainingSettings) -> TrainingSettings:
        """ValueError where the other settings do not go with it."""
        unknown = set(self.values)
        for name, group in values_of(settings).items():
            mine = {key: self.values[key] for key in values_of(group) if key in self.values}
            unknown -= mine.keys()
            if mine:
                settings = replace(settings, **{name: replace(group, **mine)})
        assert not unknown, f"there is no setting {', '.join(unknown)}"
        return settings


def combined(changes: Sequence[Change]) -> Change:
    """All of them at once; they are of different themes."""
    values = reduce(or_, (dict(change.values) for change in changes))
    assert len(values) == sum(len(change.values) for change in changes), "two changes of one setting"
    return Change(
        name=" + ".join(change.name for change in changes),
        theme=" + ".join(change.theme for change in changes),
        values=values,
        reason="each was faster alone",
        effect="; ".join(dict.fromkeys(change.effect for change in changes if change.effect)),
        by_totals=any(change.by_totals for change in changes),
    )


def as_typed(values: Mapping[str, Value]) -> list[str]:
    """Words of a command line.

    >>> as_typed({"tokens_per_batch": 800, "compile_model": True, "bucketing": False, "batch_size": None})
    ['--tokens_per_batch', '800', '--compile_model', '--no_bucketing', '--batch_size', 'null']
    """
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words += [f"--{name}", "null" if value is None else str(value)]
    return words


def with_flags(words: Iterable[str], values: Mapping[str, Value]) -> list[str]:
    """What a user typed, with other values for some flags: in place of those typed, not beside them.

    >>> with_flags(["--batch-size=4", "--data_dir", "my data", "--no_bucketing"], {"batch_size": 8, "bucketing": True})
    ['--data_dir', 'my data', '--batch_size', '8', '--bucketing']
    """
    kept: list[str] = []
    is_replaced = False
    for word in words:
        if word.startswith("--"):  # no value does
            is_replaced = word[2:].partition("=")[0].replace("-", "_").removeprefix("no_") in values
        if not is_replaced:
            kept.append(word)
    return [*kept, *as_typed(values)]
