"""Irregular events: from long tables of (time, variable, value) to steps, each the set of the events at one time stamp.

Within a step a variable stands once: repeated measurements at one time are replaced by their mean, and counted. A null
time is a static fact and belongs to the first step; a null value means that the event is present and carries none.
"""

import numpy as np
import pyarrow.compute as pc

from seqvae.data.building.encoded import LARGEST_VALUE, BlockCheck, Encoded, Problems
from seqvae.data.parquet.layout import Layout
from seqvae.data.parquet.long_table import sequence_starts
from seqvae.data.parquet.reading import Block
from seqvae.errors import DataError


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
