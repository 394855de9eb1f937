"""Sequences as flat numbers, on their way from a block of rows to the cache; and what is done about bad values.

Legend: S sequences, R rows of a block, T steps of all sequences one behind the other, E events of all steps, X any of them.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from seqvae.data.parquet.long_table import sequence_starts
from seqvae.data.parquet.reader import Block
from seqvae.data.parquet.schema import Layout, is_list
from seqvae.errors import DataError
from seqvae.text import counted

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


# Sequences of real vectors: from rows with a list each, or from long tables with a column a feature, to flat values.


class VectorEncoder:
    """Blocks -> flat [T, D] float64 values in the data's own units, NaN where missing."""

    def __init__(self, layout: Layout, problems: Problems) -> None:
        self.layout = layout
        self.problems = problems
        self.width = len(layout.features)
        """Values a step; of lists it is known with the first vector."""

    def __call__(self, block: Block) -> Encoded:
        if self.layout.form == "rows":
            return self._from_lists(block)
        return self._from_columns(block)

    def names(self) -> tuple[str, ...]:
        return self.layout.features or tuple(f"{self.layout.sequence}[{d}]" for d in range(self.width))

    def _from_columns(self, block: Block) -> Encoded:
        starts_S = sequence_starts(block.column("id"))
        lengths_S = np.diff(starts_S, append=len(block.rows_R))
        check = BlockCheck(self.problems, block, np.repeat(np.arange(len(starts_S)), lengths_S), len(starts_S))
        if self.layout.time is not None:
            timeless = np.flatnonzero(~np.isfinite(block.numbers("time")))
            check.leave_out(timeless, f"no time (null, NaN or infinite) in column {self.layout.time!r}")
        values_TD = np.empty((len(block.rows_R), self.width))
        for number, column in enumerate(self.layout.features):
            values_TD[:, number] = check.numbers(block.column(str(number)), column, lambda rows: rows)
        return Encoded(starts_S, lengths_S, {"values": values_TD}).keep(check.keep_S)

    def _from_lists(self, block: Block) -> Encoded:
        lists, column = block.column("sequence"), self.layout.sequence
        rows_S = np.arange(len(lists))
        check = BlockCheck(self.problems, block, rows_S, len(rows_S))
        null_S, lengths_S = np.asarray(lists.is_null()), list_lengths(lists)
        check.leave_out(np.flatnonzero(null_S), f"a null in column {column!r}")
        check.leave_out(np.flatnonzero((lengths_S == 0) & ~null_S), f"an empty sequence in column {column!r}")
        values_TD = self._step_values(lists.flatten(), check, np.repeat(rows_S, lengths_S))
        return Encoded(rows_S, lengths_S, {"values": values_TD}).keep(check.keep_S)

    def _step_values(self, steps: pa.Array, check: BlockCheck, row_of_T: np.ndarray) -> np.ndarray:
        """[T, D] from the inner arrays: numbers (D = 1), lists, or lists of fixed size; a null vector is NaN throughout."""
        present_T = np.flatnonzero(steps.is_valid()) if is_list(steps.type) else np.arange(len(steps))
        self._check_widths(steps, present_T, check, row_of_T)
        flat = steps.flatten() if is_list(steps.type) else steps  # without the null vectors
        column, width = str(self.layout.sequence), self.width
        values = check.numbers(flat, column, lambda items: row_of_T[present_T[items // width]])
        if len(present_T) == len(steps):
            return values.reshape(len(steps), width)
        values_TD = np.full((len(steps), width), np.nan)
        values_TD[present_T] = values.reshape(len(present_T), width)
        return values_TD

    def _check_widths(self, steps: pa.Array, present_T: np.ndarray, check: BlockCheck, row_of_T: np.ndarray) -> None:
        """All vectors must be as long as the first one was."""
        if len(steps) == 0:
            return
        column, where = self.layout.sequence, lambda step: self.problems.where(check.block, int(row_of_T[step]))
        if len(present_T) == 0 and self.width == 0:
            raise DataError(
                f"{where(0)}: column {column!r} begins with so many nulls in place of vectors that their length is not "
                f"known. Put a sequence with values first, or make it list<fixed_size_list>."
            )
        if not is_list(steps.type):
            widths = np.ones(1, np.int64)
        elif pat.is_fixed_size_list(steps.type):
            widths = np.full(1, steps.type.list_size)
        else:
            widths = np.asarray(pc.list_value_length(steps.drop_null()))
        if len(widths) and widths[0] == 0:
            raise DataError(
                f"{where(present_T[0])}: column {column!r} holds a vector without values. Fill or remove it."
            )
        self.width = self.width or int(widths[0])
        wrong = np.flatnonzero(widths != self.width)
        if len(wrong):
            raise DataError(
                f"{where(present_T[wrong[0]] if len(present_T) else 0)}: column {column!r} holds a vector of "
                f"{widths[wrong[0]]} values, but those before it hold {self.width}. All vectors must be of one length."
            )


# Irregular events: from long tables of (time, variable, value) to steps, each the set of the events at one time stamp.
#
# Within a step a variable stands once: repeated measurements at one time are replaced by their mean, and counted. A null
# time is a static fact and belongs to the first step; a null value means that the event is present and carries none.


class EventEncoder:
    """Blocks of whole sequences in order of time -> gaps a step; variable numbers and values (own units) an event."""

    def __init__(self, layout: Layout, problems: Problems) -> None:
        self.layout = layout
        self.problems = problems
        self._number_of: dict[str, int] = {}

    def symbols(self) -> list[str]:
        """The variable that each number stands for, in order of appearance."""
        return list(self._number_of)

    def __call__(self, block: Block) -> Encoded:
        starts_S = sequence_starts(block.column("id"))
        sequence_R = np.repeat(np.arange(len(starts_S)), np.diff(starts_S, append=len(block.rows_R)))
        check = BlockCheck(self.problems, block, sequence_R, len(starts_S))
        variables_R = self._variables(block, check)
        values_R = self._values(block, check)
        time_R, static_R = self._times(block, check, starts_S, sequence_R)
        key_R = self._step_keys(block, check, time_R, static_R, starts_S)
        order = np.lexsort((variables_R, key_R, sequence_R))
        sequence_R, key_R, time_R = sequence_R[order], key_R[order], time_R[order]
        new_step_R = _changes(sequence_R) | _changes(key_R)
        variables_E, values_E, step_E = self._merge_repeats(variables_R[order], values_R[order], new_step_R)

        first_T = np.flatnonzero(new_step_R)
        sequence_T = sequence_R[first_T]
        gaps_T = self._gaps(check, np.minimum.reduceat(time_R, first_T), sequence_T, order[first_T])
        events_T = np.bincount(step_E, minlength=len(first_T)).astype(np.int32)
        lengths_S = np.bincount(sequence_T, minlength=len(starts_S)).astype(np.int64)
        encoded = Encoded(
            starts_S, lengths_S, {"gaps": gaps_T}, events_T, {"variables": variables_E, "values": values_E}
        )
        return encoded.keep(check.keep_S)

    def _variables(self, block: Block, check: BlockCheck) -> np.ndarray:
        column = block.column("variable")
        check.leave_out(np.flatnonzero(column.is_null()), f"a null in the variable column {self.layout.variable!r}")
        names = pc.fill_null(column, "").dictionary_encode()
        numbers = [self._number_of.setdefault(name, len(self._number_of)) for name in names.dictionary.to_pylist()]
        return np.array(numbers, np.int32)[names.indices.to_numpy()]

    def _values(self, block: Block, check: BlockCheck) -> np.ndarray:
        if self.layout.value is None:
            return np.full(len(block.rows_R), np.nan)
        return check.numbers(block.column("value"), self.layout.value, lambda rows: rows)

    def _times(
        self, block: Block, check: BlockCheck, starts_S: np.ndarray, sequence_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Times, with those of static facts set to their sequence's first; and which rows are static."""
        static_R = np.asarray(block.column("time").is_null())
        time_R = block.numbers("time")
        timed_R = np.abs(time_R) <= LARGEST_VALUE
        check.leave_out(
            np.flatnonzero(~timed_R & ~static_R), f"a time that is NaN or infinite in column {self.layout.time!r}"
        )
        first_S = np.minimum.reduceat(np.where(timed_R, time_R, np.inf), starts_S)
        first_S[~np.isfinite(first_S)] = 0.0
        return np.where(timed_R, time_R, first_S[sequence_R]), static_R

    def _step_keys(
        self, block: Block, check: BlockCheck, time_R: np.ndarray, static_R: np.ndarray, starts_S: np.ndarray
    ) -> np.ndarray:
        """What is equal within a step and ascends with the steps: the time, or set_index where there is one."""
        if self.layout.set_index is None:
            return time_R
        key_R = block.numbers("set_index")
        null_R = np.isnan(key_R) & ~static_R
        check.leave_out(np.flatnonzero(null_R), f"a null in column {self.layout.set_index!r}")
        keyless_R = static_R | null_R
        first_S = np.minimum.reduceat(np.where(keyless_R, np.inf, key_R), starts_S)
        first_S[~np.isfinite(first_S)] = 0.0
        return np.where(keyless_R, np.repeat(first_S, np.diff(starts_S, append=len(key_R))), key_R)

    def _gaps(self, check: BlockCheck, time_T: np.ndarray, sequence_T: np.ndarray, rows_T: np.ndarray) -> np.ndarray:
        """Time since the step before; 0 for a sequence's first."""
        gaps_T = np.diff(time_T, prepend=time_T[:1])
        gaps_T[_changes(sequence_T)] = 0.0
        backwards = np.flatnonzero((gaps_T < 0) & check.keep_S[sequence_T])
        if len(backwards):
            step = int(backwards[0])
            raise DataError(
                f"{self.problems.where(check.block, int(rows_T[step]))}: the set that column {self.layout.set_index!r} numbers "
                f"here begins {-gaps_T[step]:g} before the set with the next smaller number (column {self.layout.time!r}). "
                f"Number the sets in order of time, or leave that column out."
            )
        return gaps_T.astype(np.float32)

    def _merge_repeats(
        self, variables_R: np.ndarray, values_R: np.ndarray, new_step_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Variable, mean value and step of each distinct (step, variable); rows are sorted by both."""
        step_R = np.cumsum(new_step_R) - 1
        first_R = new_step_R | _changes(variables_R)
        if first_R.all():
            return variables_R, values_R, step_R
        self.problems.note(
            int((~first_R).sum()),
            "event",
            "merged with another of the same variable at the same time: the mean is kept",
        )
        starts_E = np.flatnonzero(first_R)
        present_R = np.isfinite(values_R)
        sums_E = np.add.reduceat(np.where(present_R, values_R, 0.0), starts_E)
        counts_E = np.add.reduceat(present_R.astype(np.int64), starts_E)
        means_E = np.where(counts_E > 0, sums_E / np.maximum(counts_E, 1), np.nan)
        return variables_R[starts_E], means_E, step_R[starts_E]


def _changes(keys_R: np.ndarray) -> np.ndarray:
    """True for the first row and wherever a row differs from the one before."""
    return np.concatenate([np.ones(min(1, len(keys_R)), bool), keys_R[1:] != keys_R[:-1]])
