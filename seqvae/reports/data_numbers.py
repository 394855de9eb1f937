"""What a report on data is made of: the shape of the numbers it is handed, wherever they were counted.

Rows are named tuples; in a table a field is a column.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


class Heading(NamedTuple):
    """What a report says before any number."""

    name: str
    kind: str
    """tokens, vectors or events."""
    layout: str
    """What was detected, in one line."""
    command: str
    """What would train on these data."""
    cache: str
    """Where the converted data lie."""
    cap: int
    """--max_sequence_length."""
    accumulate: int
    """Batches of an optimizer step."""
    notes: tuple[str, ...]
    """What a user should know; those that begin with "warning: " come first."""


class Distributions(Protocol):
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def values_KQ(self) -> np.ndarray: ...


class NameNumbers(Protocol):
    """Tokens, features or variables."""

    @property
    def possible(self) -> int:
        """How many a model has to reckon with."""

    @property
    def total(self) -> int:
        """How many of them occur."""

    @property
    def rows(self) -> Sequence[Any]:
        """Fields name, seen, share, in_sequences, missing, mean, std, min, max, far_out."""

    @property
    def counts_U(self) -> np.ndarray | None: ...
    @property
    def missing(self) -> Mapping[str, np.ndarray]: ...
    @property
    def distributions(self) -> Distributions | None: ...


class DataNumbers(Protocol):
    @property
    def files(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def warnings(self) -> Sequence[str]: ...
    @property
    def bad_files(self) -> Sequence[str]: ...
    @property
    def columns(self) -> Sequence[Any]: ...
    @property
    def splits(self) -> Sequence[Any]: ...
    @property
    def lengths(self) -> Mapping[str, np.ndarray]: ...
    @property
    def time(self) -> Any:
        """Fields median_span, mean_gap, unit; or None."""

    @property
    def names(self) -> NameNumbers: ...
    @property
    def labels(self) -> Sequence[Any]: ...
    @property
    def batches(self) -> Sequence[Any]:
        """Fields batches, updates, sequences, efficiency, memory and others."""


class FileNumbers(Protocol):
    """Of data that cannot be used as they are."""

    @property
    def files(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def columns(self) -> Sequence[Any]: ...
    @property
    def refused(self) -> Sequence[str]: ...
