"""Sequences as flat numbers, on their way from a block of rows to the cache; and what is done about bad values.

Legend: S sequences, R rows of a block, T steps of all sequences one behind the other, E events of all steps, X any of them.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqvae.data.parquet.reading import Block
from seqvae.errors import DataError

LARGEST_VALUE = 1e30
"""What is larger counts as infinite: its square, or itself in other units, would not fit float32."""


class Encoded(NamedTuple):
    """Some whole sequences."""

    first_rows_S: np.ndarray
    """The row of the block where each sequence begins: its id, its label and its place in the files stand there."""
    lengths_S: np.ndarray
    """Steps of each sequence."""
    steps: dict[str, np.ndarray]
    """Arrays with one row a step."""
    events_per_step_T: np.ndarray | None = None
    events: dict[str, np.ndarray] | None = None
    """Arrays with one row an event; tokens and vectors have none."""

    def keep(self, keep_S: np.ndarray) -> "Encoded":
        """Only the sequences where `keep_S` is true."""
        if keep_S.all():
            return self
        keep_T = np.repeat(keep_S, self.lengths_S)
        steps = {name: array[keep_T] for name, array in self.steps.items()}
        events_T, events = self.events_per_step_T, self.events
        if events_T is not None and events is not None:
            keep_E = np.repeat(keep_T, events_T)
            events = {name: array[keep_E] for name, array in events.items()}
            events_T = events_T[keep_T]
        return Encoded(self.first_rows_S[keep_S], self.lengths_S[keep_S], steps, events_T, events)


class Problems:
    """What was wrong in any block so far, and what --bad_values says to do about it."""

    def __init__(self, policy: str, where: Callable[[Block, int], str]) -> None:
        self.policy = policy
        self.where = where
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, count: int, noun: str, what: str) -> None:
        """Remember what was done to so many things; the same words are added up."""
        if count:
            self._counts[noun, what] += count

    def notes(self) -> list[str]:
        return [f"{counted(count, noun)} {what}" for (noun, what), count in self._counts.items()]

    def refuse(self, block: Block, row: int, what: str) -> DataError:
        return DataError(
            f"{self.where(block, row)}: {what}. Correct it, or leave such sequences out with --bad_values drop."
        )


class BlockCheck:
    """The bad values of one block: raises at the first, or knows which sequences to leave out."""

    def __init__(self, problems: Problems, block: Block, sequence_of_R: np.ndarray, sequences: int) -> None:
        self.problems = problems
        self.block = block
        self.keep_S = np.ones(sequences, bool)
        self._sequence_of_R = sequence_of_R

    def leave_out(self, bad_rows: np.ndarray, what: str, found: str = "") -> None:
        """These rows are bad. `found` is the first bad value, where `what` does not say it."""
        if len(bad_rows) == 0:
            return
        if self.problems.policy != "drop":
            raise self.problems.refuse(self.block, int(bad_rows[0]), what + found)
        bad_S = np.zeros_like(self.keep_S)
        bad_S[self._sequence_of_R[bad_rows]] = True
        self.problems.note(int((bad_S & self.keep_S).sum()), "sequence", f"left out (--bad_values drop): {what}")
        self.keep_S &= ~bad_S

    def numbers(self, array: pa.Array, column: str, rows_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Values as float64, NaN where they are null: missing on purpose. `rows_of` finds the rows of flat indices."""
        values_X, null_X = flat_numbers(array)
        bad_X = ~(np.abs(values_X) <= LARGEST_VALUE) & ~null_X
        if not bad_X.any():
            return values_X
        bad = np.flatnonzero(bad_X)
        if self.problems.policy == "missing":
            self.problems.note(len(bad), "value", "counted as missing (--bad_values missing): NaN or infinity")
            values_X[bad] = np.nan
        elif self.problems.policy == "drop":
            self.leave_out(rows_of(bad), f"NaN or infinity in column {column!r}")
        else:
            raise DataError(
                f"{self.problems.where(self.block, int(rows_of(bad[:1])[0]))}: column {column!r} holds "
                f"{values_X[bad[0]]:g}. Correct it, treat NaN and infinity as missing with --bad_values missing, or leave "
                f"such sequences out with --bad_values drop."
            )
        return values_X


def without_null_ids(block: Block, problems: Problems, id_column: str | None) -> Block:
    """Rows whose id is null belong to no sequence."""
    null = block.column("id").is_null()
    if not null.true_count:
        return block
    null_R = np.asarray(null)
    if problems.policy != "drop":
        raise problems.refuse(block, int(np.flatnonzero(null_R)[0]), f"a null in the id column {id_column!r}")
    problems.note(int(null_R.sum()), "row", f"left out (--bad_values drop): a null in the id column {id_column!r}")
    return block.take(np.flatnonzero(~null_R))


def list_lengths(lists: pa.Array) -> np.ndarray:
    """int64; a null has length 0."""
    return np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)


def flat_numbers(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """A number column as float64 (a copy, NaN where null) and where it is null."""
    numbers = array.cast(pa.float64(), safe=False)
    return np.array(numbers.to_numpy(zero_copy_only=False), dtype=np.float64), np.asarray(array.is_null())


def counted(count: int, noun: str) -> str:
    """
    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
