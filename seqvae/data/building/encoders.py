"""Blocks of whole sequences -> flat numbers on their way to the cache; and what is done about bad values.

Tokens come from integer lists as they are or from a tokenizer; vectors from rows with a list each or from long tables with a
column per feature; events from long tables of (time, variable, value).

Legend: S sequences, R rows of a block, T steps of all sequences one behind the other, D features, E events of all steps, X any
of them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from seqvae.data.building.tokens import Numbering, Tokenizer
from seqvae.data.parquet.long_table import sequence_starts
from seqvae.data.parquet.reader import Block
from seqvae.data.parquet.schema import Layout, is_list
from seqvae.errors import DataError
from seqvae.text import counted

LARGEST_VALUE = 1e30
"""What is larger counts as infinite: its square, or itself in other units, would not fit float32."""
LARGEST_ID = 2**31 - 1


class Encoded(NamedTuple):
    """Some whole sequences."""

    first_rows_S: np.ndarray
    """The row of the block where each sequence begins: its id, its label and its place in the files stand there."""
    lengths_S: np.ndarray
    """Steps of each sequence."""
    steps: dict[str, np.ndarray]
    """Arrays with one row per step."""
    events_per_step_T: np.ndarray | None = None
    events: dict[str, np.ndarray] | None = None
    """Arrays with one row per event; tokens and vectors have none."""

    def keep(self, keep_S: np.ndarray) -> "Encoded":
        """Return only the sequences where `keep_S` is true."""
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


@dataclass
class Problems:
    """What was wrong in any block so far, and what --bad_values says to do about it."""

    policy: str
    where: Callable[[Block, int], str]
    """Returns the place of a row of a block, for messages."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, count: int, noun: str, what: str) -> None:
        """Remember what was done to `count` things; equal sentences are added up."""
        if count:
            self.counts[noun, what] += count

    def notes(self) -> list[str]:
        return [f"{counted(count, noun)} {what}" for (noun, what), count in self.counts.items()]

    def error(self, block: Block, row: int, what: str) -> DataError:
        return DataError(
            f"{self.where(block, row)}: {what}. Correct it, or leave such sequences out with --bad_values drop."
        )


@dataclass
class BlockCheck:
    """The bad values of one block: raises at the first, or knows which sequences to leave out."""

    problems: Problems
    block: Block
    sequence_of_R: np.ndarray
    keep_S: np.ndarray

    def leave_out(self, bad_rows: np.ndarray, what: str, found: str = "") -> None:
        """Leave out the sequences of these rows. `found` is the first bad value, where `what` does not say it."""
        if len(bad_rows) == 0:
            return
        if self.problems.policy != "drop":
            raise self.problems.error(self.block, int(bad_rows[0]), what + found)
        bad_S = np.zeros_like(self.keep_S)
        bad_S[self.sequence_of_R[bad_rows]] = True
        self.problems.note(int((bad_S & self.keep_S).sum()), "sequence", f"left out (--bad_values drop): {what}")
        self.keep_S &= ~bad_S

    def numbers(self, array: pa.Array, column: str, rows_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return values as float64 (a copy), NaN where they are null: missing on purpose. `rows_of` finds the rows of flat
        indices."""
        values_X = np.array(array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
        bad_X = ~(np.abs(values_X) <= LARGEST_VALUE) & ~np.asarray(array.is_null())
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


@dataclass
class TokenEncoder:
    """Blocks -> flat int32 token ids (for text: numbers of symbols, final ids come from `vocabulary`)."""

    layout: Layout
    problems: Problems
    tokenizer: Tokenizer | None
    vocabulary_size: int | None
    limited_by: str
    """Where the size of the vocabulary comes from, for messages."""

    def __call__(self, block: Block) -> Encoded:
        column, name = block.columns["sequence"], self.layout.sequence
        rows_S = np.arange(len(column))
        check = BlockCheck(self.problems, block, rows_S, np.ones(len(column), bool))
        null_S = np.asarray(column.is_null())
        check.leave_out(np.flatnonzero(null_S), f"a null in column {name!r}")
        if self.tokenizer:
            tokens_T, lengths_S = self.tokenizer(pc.fill_null(column, ""))
        else:
            lengths_S = np.asarray(pc.list_value_length(column).fill_null(0)).astype(np.int64)
            flat = column.flatten()
            row_of_T = np.repeat(rows_S, lengths_S)
            if flat.null_count:
                check.leave_out(row_of_T[np.asarray(flat.is_null())], f"a null inside a list of column {name!r}")
                flat = pc.fill_null(flat.cast(pa.int64()) if pat.is_null(flat.type) else flat, 0)
            tokens_T = flat.to_numpy(zero_copy_only=False)
            largest = min((self.vocabulary_size or LARGEST_ID + 1) - 1, LARGEST_ID)
            if len(tokens_T) and (tokens_T.min() < 0 or tokens_T.max() > largest):
                wrong_T = (tokens_T < 0) | (tokens_T > largest)
                limit = f" {self.limited_by}" if largest < LARGEST_ID else ""
                check.leave_out(
                    row_of_T[wrong_T],
                    f"a token id outside 0 .. {largest}{limit} in column {name!r}",
                    f", {tokens_T[wrong_T][0]}",
                )
                tokens_T = np.where(wrong_T, 0, tokens_T)  # their sequences are left out
            tokens_T = tokens_T.astype(np.int32, copy=False)
        check.leave_out(np.flatnonzero((lengths_S == 0) & ~null_S), f"an empty sequence in column {name!r}")
        return Encoded(rows_S, lengths_S, {"tokens": tokens_T}).keep(check.keep_S)


@dataclass
class VectorEncoder:
    """Blocks -> flat [T, D] float64 values in the data's own units, NaN where missing."""

    layout: Layout
    problems: Problems
    width: int
    """Values per step; of lists it is known with the first vector, and 0 before."""

    def names(self) -> tuple[str, ...]:
        return self.layout.features or tuple(f"{self.layout.sequence}[{d}]" for d in range(self.width))

    def __call__(self, block: Block) -> Encoded:
        if self.layout.form == "rows":
            return self._encode_lists(block)
        starts_S = sequence_starts(block.columns["id"])
        lengths_S = np.diff(starts_S, append=len(block.rows_R))
        sequence_R = np.repeat(np.arange(len(starts_S)), lengths_S)
        check = BlockCheck(self.problems, block, sequence_R, np.ones(len(starts_S), bool))
        if self.layout.time is not None:
            timeless = np.flatnonzero(~np.isfinite(block.numbers("time")))
            check.leave_out(timeless, f"no time (null, NaN or infinite) in column {self.layout.time!r}")
        values_TD = np.empty((len(block.rows_R), self.width))
        for number, column in enumerate(self.layout.features):
            values_TD[:, number] = check.numbers(block.columns[str(number)], column, lambda rows: rows)
        return Encoded(starts_S, lengths_S, {"values": values_TD}).keep(check.keep_S)

    def _encode_lists(self, block: Block) -> Encoded:
        """The steps are numbers (D = 1), lists, or lists of fixed size; a null vector is NaN throughout."""
        lists, column = block.columns["sequence"], str(self.layout.sequence)
        rows_S = np.arange(len(lists))
        check = BlockCheck(self.problems, block, rows_S, np.ones(len(lists), bool))
        null_S = np.asarray(lists.is_null())
        lengths_S = np.asarray(pc.list_value_length(lists).fill_null(0)).astype(np.int64)
        check.leave_out(np.flatnonzero(null_S), f"a null in column {column!r}")
        check.leave_out(np.flatnonzero((lengths_S == 0) & ~null_S), f"an empty sequence in column {column!r}")
        row_of_T = np.repeat(rows_S, lengths_S)
        steps = lists.flatten()
        present_T = np.flatnonzero(steps.is_valid()) if is_list(steps.type) else np.arange(len(steps))
        if len(steps):
            self._check_widths(steps, present_T, block, row_of_T)
        width = self.width
        flat = steps.flatten() if is_list(steps.type) else steps  # without the null vectors
        values_X = check.numbers(flat, column, lambda items: row_of_T[present_T[items // width]])
        values_TD = values_X.reshape(len(present_T), width)
        if len(present_T) < len(steps):
            every_TD = np.full((len(steps), width), np.nan)
            every_TD[present_T] = values_TD
            values_TD = every_TD
        return Encoded(rows_S, lengths_S, {"values": values_TD}).keep(check.keep_S)

    def _check_widths(self, steps: pa.Array, present_T: np.ndarray, block: Block, row_of_T: np.ndarray) -> None:
        """Refuse vectors that are not as long as the first one."""

        def where(step: int) -> str:
            return f"{self.problems.where(block, int(row_of_T[step]))}: column {self.layout.sequence!r}"

        if len(present_T) == 0 and self.width == 0:
            raise DataError(
                f"{where(0)} begins with nulls in place of vectors, so that their length is not known. Put a sequence with "
                f"values first, or make it list<fixed_size_list>."
            )
        if not is_list(steps.type):
            widths = np.ones(1, np.int64)
        elif pat.is_fixed_size_list(steps.type):
            widths = np.full(1, steps.type.list_size)
        else:
            widths = np.asarray(pc.list_value_length(steps.drop_null()))
        if len(widths) and widths[0] == 0:
            raise DataError(f"{where(present_T[0])} holds a vector without values. Fill or remove it.")
        self.width = self.width or int(widths[0])
        wrong = np.flatnonzero(widths != self.width)
        if len(wrong):
            raise DataError(
                f"{where(present_T[wrong[0]] if len(present_T) else 0)} holds a vector of {widths[wrong[0]]} values, but those "
                f"before it hold {self.width}. All vectors must be of one length."
            )


@dataclass
class EventEncoder:
    """Blocks of whole sequences in order of time -> steps, each the set of the events at one time stamp: a gap per step, and a
    variable number and a value (own units) per event.

    Within a step a variable stands once: repeated measurements at one time are replaced by their mean, and counted. A null
    time is a static fact and belongs to the first step; a null value means that the event is present and carries none.
    """

    layout: Layout
    problems: Problems
    numbering: Numbering = field(default_factory=Numbering)
    """Of the variables."""

    def __call__(self, block: Block) -> Encoded:
        layout = self.layout
        starts_S = sequence_starts(block.columns["id"])
        sequence_R = np.repeat(np.arange(len(starts_S)), np.diff(starts_S, append=len(block.rows_R)))
        check = BlockCheck(self.problems, block, sequence_R, np.ones(len(starts_S), bool))

        names = block.columns["variable"]
        check.leave_out(np.flatnonzero(names.is_null()), f"a null in the variable column {layout.variable!r}")
        variables_R = self.numbering(pc.fill_null(names, ""))
        values_R = np.full(len(names), np.nan)
        if layout.value is not None:
            values_R = check.numbers(block.columns["value"], layout.value, lambda rows: rows)

        time_R, static_R = block.numbers("time"), np.asarray(block.columns["time"].is_null())
        timed_R = np.abs(time_R) <= LARGEST_VALUE
        check.leave_out(
            np.flatnonzero(~timed_R & ~static_R), f"a time that is NaN or infinite in column {layout.time!r}"
        )
        key_R = time_R = _filled_with_first(time_R, timed_R, starts_S)
        if layout.set_index is not None:
            key_R = block.numbers("set_index")
            null_R = np.isnan(key_R) & ~static_R
            check.leave_out(np.flatnonzero(null_R), f"a null in column {layout.set_index!r}")
            key_R = _filled_with_first(key_R, ~(static_R | null_R), starts_S)

        # A step is what has one key; its events are in the order of their variables.
        order = np.lexsort((variables_R, key_R, sequence_R))
        variables_R, values_R = variables_R[order], values_R[order]
        sequence_R, key_R, time_R = sequence_R[order], key_R[order], time_R[order]
        new_step_R = _changes(sequence_R) | _changes(key_R)
        step_R = np.cumsum(new_step_R) - 1
        starts_E = np.flatnonzero(new_step_R | _changes(variables_R))
        if repeated := len(step_R) - len(starts_E):
            what = "merged with another of the same variable at the same time: the mean is kept"
            self.problems.note(repeated, "event", what)
            present_R = np.isfinite(values_R)
            sums_E = np.add.reduceat(np.where(present_R, values_R, 0.0), starts_E)
            counts_E = np.add.reduceat(present_R.astype(np.int64), starts_E)
            values_R = np.where(counts_E > 0, sums_E / np.maximum(counts_E, 1), np.nan)
            variables_R, step_R = variables_R[starts_E], step_R[starts_E]

        first_T = np.flatnonzero(new_step_R)
        sequence_T, time_T = sequence_R[first_T], np.minimum.reduceat(time_R, first_T)
        gaps_T = np.diff(time_T, prepend=time_T[:1])
        gaps_T[_changes(sequence_T)] = 0.0
        backwards = np.flatnonzero((gaps_T < 0) & check.keep_S[sequence_T])
        if len(backwards):
            step = int(backwards[0])
            raise DataError(
                f"{self.problems.where(block, int(order[first_T[step]]))}: the set that column {layout.set_index!r} numbers "
                f"here begins {-gaps_T[step]:g} before the set with the next smaller number (column {layout.time!r}). "
                f"Number the sets in order of time, or leave that column out."
            )
        return Encoded(
            starts_S,
            np.bincount(sequence_T, minlength=len(starts_S)).astype(np.int64),
            {"gaps": gaps_T.astype(np.float32)},
            np.bincount(step_R, minlength=len(first_T)).astype(np.int32),
            {"variables": variables_R, "values": values_R},
        ).keep(check.keep_S)


def _filled_with_first(values_R: np.ndarray, known_R: np.ndarray, starts_S: np.ndarray) -> np.ndarray:
    """Return the values, and where they are not known the smallest of their sequence, or 0 where it has none."""
    first_S = np.minimum.reduceat(np.where(known_R, values_R, np.inf), starts_S)
    first_S[~np.isfinite(first_S)] = 0.0
    return np.where(known_R, values_R, np.repeat(first_S, np.diff(starts_S, append=len(values_R))))


def _changes(keys_R: np.ndarray) -> np.ndarray:
    """Return true for the first row and wherever a row differs from the one before."""
    return np.concatenate([np.ones(min(1, len(keys_R)), bool), keys_R[1:] != keys_R[:-1]])
