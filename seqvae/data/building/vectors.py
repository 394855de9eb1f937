"""Sequences of real vectors: from rows with a list each, or from long tables with a column a feature, to flat values."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from seqvae.data.building.encoded import BlockCheck, Encoded, Problems, list_lengths
from seqvae.data.parquet.column_types import is_list
from seqvae.data.parquet.layout import Layout
from seqvae.data.parquet.long_table import sequence_starts
from seqvae.data.parquet.reading import Block
from seqvae.errors import DataError


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
