"""Blocks of whole sequences -> flat numbers on their way to the cache; and what is done about bad values.

Tokens come from integer lists as they are or from text through a tokenizer; vectors from rows with a list each or from long
tables with a column per feature; events from long tables of (time, variable, value). Names that make up a vocabulary are numbered
as they appear: the final numbers are known when the last training row was read.

Legend: S sequences, R rows of a block, T steps of all sequences one behind the other, D features, E events of all steps, X any
of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from seqvae.data.description import UNKNOWN
from seqvae.data.parquet.reader import Block, BlockReader, sequences_of
from seqvae.data.parquet.schema import is_list
from seqvae.errors import DataError

LARGEST_VALUE = 1e30
"""A larger value counts as infinite: its square, or itself in other units, would not fit float32."""
LARGEST_ID = 2**31 - 1
SIMPLE = ("words", "characters", "bytes")
TEXTS_AT_ONCE = 1000
"""The encodings that the `tokenizers` library returns take many times the memory of their texts; this many exist at a time."""


class Encoded(NamedTuple):
    """Whole sequences as flat arrays."""

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
        kept = self._replace(
            first_rows_S=self.first_rows_S[keep_S],
            lengths_S=self.lengths_S[keep_S],
            steps={name: array[keep_T] for name, array in self.steps.items()},
        )
        if self.events_per_step_T is None or self.events is None:
            return kept
        keep_E = np.repeat(keep_T, self.events_per_step_T)
        events = {name: array[keep_E] for name, array in self.events.items()}
        return kept._replace(events_per_step_T=self.events_per_step_T[keep_T], events=events)


@dataclass
class BlockCheck:
    """The check of one block for bad values: it raises at the first, or notes which sequences to leave out."""

    reader: BlockReader
    block: Block
    sequence_R: np.ndarray
    """The number of the sequence that each row belongs to."""
    keep_S: np.ndarray

    def leave_out(self, bad_rows: np.ndarray, what: str, found: str = "") -> None:
        """Leave out the sequences of these rows. `found` is the first bad value, where `what` does not say it."""
        if len(bad_rows) == 0:
            return
        if self.reader.bad_values != "drop":
            raise self.reader.bad_value(self.block, int(bad_rows[0]), what + found)
        bad_S = np.zeros_like(self.keep_S)
        bad_S[self.sequence_R[bad_rows]] = True
        if count := int((bad_S & self.keep_S).sum()):
            self.reader.repairs["sequence", f"left out (--bad_values drop): {what}"] += count
        self.keep_S &= ~bad_S

    def numbers(self, array: pa.Array, column: str, rows_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return values as float64 (a copy), NaN where they are null: missing on purpose. `rows_of` finds the rows of flat
        indices."""
        values_X = np.array(array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
        if len(self.reader.missing_values):
            is_code_X = np.isin(values_X, self.reader.missing_values)
            values_X[is_code_X] = np.nan
            if count := int(is_code_X.sum()):
                self.reader.repairs["value", "counted as missing (--missing_values)"] += count
            array = pc.if_else(pa.array(is_code_X), pa.scalar(None, array.type), array) if count else array
        bad = np.flatnonzero(~(np.abs(values_X) <= LARGEST_VALUE) & ~np.asarray(array.is_null()))
        if len(bad) == 0:
            return values_X
        if self.reader.bad_values == "missing":
            self.reader.repairs["value", "counted as missing (--bad_values missing): NaN or infinity"] += len(bad)
            values_X[bad] = np.nan
        elif self.reader.bad_values == "drop":
            self.leave_out(rows_of(bad), f"NaN or infinity in column {column!r}")
        else:
            raise DataError(
                f"{self.reader.where(self.block, int(rows_of(bad[:1])[0]))}: column {column!r} holds "
                f"{values_X[bad[0]]:g}. Correct it, treat NaN and infinity as missing with --bad_values missing, or leave "
                f"such sequences out with --bad_values drop."
            )
        return values_X


# --- Tokens ---------------------------------------------------------------------------------------------------------


def number_texts(texts: pa.Array, number_of: dict[str, int]) -> np.ndarray:
    """Return the int32 number of each text, -1 for a null; `number_of` gets those that are new, in their order.

    >>> number_texts(pa.array(["b", None, "a", "b"]), {"a": 0}).tolist()
    [1, -1, 0, 1]
    """
    encoded = texts.dictionary_encode()
    numbers = [number_of.setdefault(text, len(number_of)) for text in encoded.dictionary.to_pylist()]
    return np.array([*numbers, -1], np.int32)[np.asarray(encoded.indices.fill_null(-1))]


class SimpleTokenizer:
    """Text -> numbers of its words (between white space), characters (code points) or UTF-8 bytes, none of which is unknown."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.learns = name != "bytes"
        """Whether its vocabulary comes from the training split."""
        self._number_of: dict[str, int] = {}

    def __call__(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return flat int32 numbers and the length of each text; no Python string per row."""
        if self.name == "words":
            trimmed = pc.utf8_trim_whitespace(texts)
            lists = pc.utf8_split_whitespace(trimmed)
            lengths_S = np.where(np.asarray(pc.utf8_length(trimmed)) == 0, 0, pc.list_value_length(lists))
            words = lists.flatten()
            return number_texts(words.filter(pc.not_equal(words, "")), self._number_of), lengths_S.astype(np.int64)
        offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
        joined = bytes(memoryview(texts.buffers()[2])[offsets[0] : offsets[-1]]) if offsets[-1] > offsets[0] else b""
        if self.name == "bytes":
            return np.frombuffer(joined, np.uint8).astype(np.int32), np.diff(offsets)
        lengths_S = np.asarray(pc.utf8_length(texts)).astype(np.int64)
        points_T = np.frombuffer(joined.decode("utf-8").encode("utf-32-le"), np.uint32)
        occur_P = np.flatnonzero(np.bincount(points_T)) if len(points_T) else np.zeros(0, np.int64)
        number_of_point = np.zeros(occur_P.max(initial=0) + 1, np.int32)
        characters = pa.array(map(chr, occur_P.tolist()), pa.large_string())
        number_of_point[occur_P] = number_texts(characters, self._number_of)
        return number_of_point[points_T], lengths_S

    def symbols(self) -> list[str]:
        """Return the symbol of each number."""
        if self.name == "bytes":
            return [chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>" for byte in range(256)]
        return list(self._number_of)


class TokenizerFile:
    """A tokenizer.json of the `tokenizers` library (extra `text`), used like a SimpleTokenizer."""

    learns = False

    def __init__(self, content: str, where: str) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise DataError(f"{where} needs the extra 'text': pip install -e '.[text]'.") from error
        self.name = content
        try:
            self._tokenizer = Loaded.from_str(content)
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise DataError(f"{where}: is no tokenizer.json ({error}).") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def __call__(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = [np.zeros(0, np.int32)], []
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            piece = texts.slice(start, TEXTS_AT_ONCE).to_pylist()
            for encoding in self._tokenizer.encode_batch_fast(piece, add_special_tokens=False):
                tokens.append(np.array(encoding.ids, np.int32))
                lengths.append(len(encoding.ids))
        return np.concatenate(tokens), np.array(lengths, np.int64)

    def symbols(self) -> list[str]:
        """Return the symbol of each id; ids that stand for none are <unknown>."""
        symbol_of = {number: symbol for symbol, number in self._tokenizer.get_vocab().items()}
        return [symbol_of.get(number, UNKNOWN) for number in range(max(symbol_of, default=-1) + 1)]


Tokenizer = SimpleTokenizer | TokenizerFile


def make_tokenizer(name: str, *, is_content: bool = False) -> Tokenizer:
    """Return the tokenizer of this name, or that of a tokenizer.json at this path; or with this content, as a `DataDescription`
    has it."""
    if name in SIMPLE:
        return SimpleTokenizer(name)
    if is_content:
        return TokenizerFile(name, "the tokenizer that this network was trained with")
    try:
        content = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"{', '.join(SIMPLE)} or the path of a tokenizer.json"
        raise DataError(f"--tokenizer {name}: cannot be read ({error}). Wanted: {expected}.") from error
    return TokenizerFile(content, f"--tokenizer {name}")


@dataclass
class TokenEncoder:
    """Blocks -> flat int32 token ids (for text: numbers of symbols, their final ids come with the vocabulary)."""

    reader: BlockReader
    tokenizer: Tokenizer | None
    vocabulary_size: int | None
    limited_by: str
    """Where the size of the vocabulary comes from, for messages."""

    def __call__(self, block: Block) -> Encoded:
        column, name = block.columns["sequence"], self.reader.layout.sequence
        rows_S = np.arange(len(column))
        check = BlockCheck(self.reader, block, rows_S, np.ones(len(column), bool))
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


# --- Vectors and events ---------------------------------------------------------------------------------------------


@dataclass
class VectorEncoder:
    """Blocks -> flat [T, D] float64 values in the data's own units, NaN where missing."""

    reader: BlockReader
    width: int
    """Values per step; of lists it is known with the first vector, and 0 before."""
    shortest_gap: float = np.inf
    longest_gap: float = 0.0
    """Between the times of two steps of a sequence, in long tables; vectors keep the order of times alone."""

    def __call__(self, block: Block) -> Encoded:
        if self.reader.layout.form == "rows":
            return self._encode_lists(block)
        starts_S, sequence_R = sequences_of(block)
        check = BlockCheck(self.reader, block, sequence_R, np.ones(len(starts_S), bool))
        if self.reader.layout.time is not None:
            time_R = block.numbers("time")
            timeless = np.flatnonzero(~np.isfinite(time_R))
            check.leave_out(timeless, f"no time (null, NaN or infinite) in column {self.reader.layout.time!r}")
            gaps = np.diff(time_R)[(sequence_R[1:] == sequence_R[:-1]) & check.keep_S[sequence_R[1:]]]
            self.shortest_gap = min(self.shortest_gap, float(gaps.min(initial=np.inf)))
            self.longest_gap = max(self.longest_gap, float(gaps.max(initial=0.0)))
        values_TD = np.empty((len(block.rows_R), self.width))
        for number, column in enumerate(self.reader.layout.features):
            values_TD[:, number] = check.numbers(block.columns[str(number)], column, lambda rows: rows)
        return Encoded(starts_S, np.bincount(sequence_R), {"values": values_TD}).keep(check.keep_S)

    def _encode_lists(self, block: Block) -> Encoded:
        """Encode steps that are numbers (D = 1), lists, or lists of fixed size; a null vector becomes NaN throughout."""
        lists, column = block.columns["sequence"], str(self.reader.layout.sequence)
        rows_S = np.arange(len(lists))
        check = BlockCheck(self.reader, block, rows_S, np.ones(len(lists), bool))
        null_S = np.asarray(lists.is_null())
        lengths_S = np.asarray(pc.list_value_length(lists).fill_null(0)).astype(np.int64)
        check.leave_out(np.flatnonzero(null_S), f"a null in column {column!r}")
        check.leave_out(np.flatnonzero((lengths_S == 0) & ~null_S), f"an empty sequence in column {column!r}")
        row_of_T = np.repeat(rows_S, lengths_S)
        steps = lists.flatten()
        are_lists = is_list(steps.type)
        present_T = np.flatnonzero(steps.is_valid()) if are_lists else np.arange(len(steps))

        def where(step: int) -> str:
            return f"{self.reader.where(block, int(row_of_T[step]))}: column {column!r}"

        # All vectors must be as long as the first one.
        if not are_lists:
            widths = np.ones(min(1, len(steps)), np.int64)
        elif pat.is_fixed_size_list(steps.type):
            widths = np.full(min(1, len(steps)), steps.type.list_size)
        else:
            widths = np.asarray(pc.list_value_length(steps.drop_null()))
        if len(steps) and len(present_T) == 0 and self.width == 0:
            raise DataError(
                f"{where(0)} begins with nulls in place of vectors, so that their length is not known. Put a sequence with "
                f"values first, or make it list<fixed_size_list>."
            )
        if len(widths) and widths[0] == 0:
            raise DataError(f"{where(present_T[0])} holds a vector without values. Fill or remove it.")
        if self.width == 0 and len(widths):
            self.width = int(widths[0])
        wrong = np.flatnonzero(widths != self.width)
        if len(wrong):
            raise DataError(
                f"{where(present_T[wrong[0]] if len(present_T) else 0)} holds a vector of {widths[wrong[0]]} values, but those "
                f"before it hold {self.width}. All vectors must be of one length."
            )

        width = self.width
        flat = steps.flatten() if are_lists else steps  # without the null vectors
        values_X = check.numbers(flat, column, lambda items: row_of_T[present_T[items // width]])
        values_TD = values_X.reshape(len(present_T), width)
        if len(present_T) < len(steps):
            every_TD = np.full((len(steps), width), np.nan)
            every_TD[present_T] = values_TD
            values_TD = every_TD
        return Encoded(rows_S, lengths_S, {"values": values_TD}).keep(check.keep_S)


@dataclass
class EventEncoder:
    """Blocks of whole sequences in order of time -> steps, each the set of the events at one time stamp: a gap per step, and a
    variable number and a value (own units) per event.

    Within a step a variable stands once: repeated measurements at one time are replaced by their mean, and counted. A null
    time is a static fact and belongs to the first step; a null value means that the event is present and carries none. In a
    table with a column for each variable a null is nothing at all.
    """

    reader: BlockReader
    number_of: dict[str, int] = field(default_factory=dict)
    """The variables, numbered as they appear."""

    def __call__(self, block: Block) -> Encoded:
        layout = self.reader.layout
        starts_S, sequence_R = sequences_of(block)
        check = BlockCheck(self.reader, block, sequence_R, np.ones(len(starts_S), bool))

        time_R, static_R = block.numbers("time"), np.asarray(block.columns["time"].is_null())
        timed_R = np.abs(time_R) <= LARGEST_VALUE
        check.leave_out(
            np.flatnonzero(~timed_R & ~static_R), f"a time that is NaN or infinite in column {layout.time!r}"
        )
        key_R = time_R = _filled_with_first(time_R, timed_R, starts_S, sequence_R)
        if layout.set_index is not None:
            key_R = block.numbers("set_index")
            null_R = np.isnan(key_R) & ~static_R
            check.leave_out(np.flatnonzero(null_R), f"a null in column {layout.set_index!r}")
            key_R = _filled_with_first(key_R, ~(static_R | null_R), starts_S, sequence_R)

        row_R, variables_R, values_R = self._measurements(block, check)
        sequence_R, key_R, time_R = sequence_R[row_R], key_R[row_R], time_R[row_R]
        empty_S = np.bincount(sequence_R, minlength=len(starts_S)) == 0
        check.leave_out(starts_S[empty_S], "a sequence without any value")

        # A step is what has one key; its events are in the order of their variables.
        order = np.lexsort((variables_R, key_R, sequence_R))
        variables_R, values_R = variables_R[order], values_R[order]
        sequence_R, key_R, time_R = sequence_R[order], key_R[order], time_R[order]
        new_step_R = _changes(sequence_R) | _changes(key_R)
        step_R = np.cumsum(new_step_R) - 1
        starts_E = np.flatnonzero(new_step_R | _changes(variables_R))
        if repeated := len(step_R) - len(starts_E):
            what = "merged with another of the same variable at the same time: the mean is kept"
            self.reader.repairs["event", what] += repeated
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
                f"{self.reader.where(block, int(row_R[order[first_T[step]]]))}: the set that column {layout.set_index!r} numbers "
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

    def _measurements(self, block: Block, check: BlockCheck) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the row, the variable's number and the value of each event of a block."""
        layout = self.reader.layout
        if layout.features:
            numbers = number_texts(pa.array(layout.features, pa.large_string()), self.number_of)
            columns = [
                check.numbers(block.columns[str(place)], name, lambda rows: rows)
                for place, name in enumerate(layout.features)
            ]
            values_RV = np.stack(columns, axis=1)
            row_E, place_E = np.nonzero(~np.isnan(values_RV))
            return row_E, numbers[place_E], values_RV[row_E, place_E]
        names = block.columns["variable"]
        check.leave_out(np.flatnonzero(names.is_null()), f"a null in the variable column {layout.variable!r}")
        values_R = np.full(len(names), np.nan)
        if layout.value is not None:
            values_R = check.numbers(block.columns["value"], layout.value, lambda rows: rows)
        return np.arange(len(names)), number_texts(pc.fill_null(names, ""), self.number_of), values_R


def _filled_with_first(
    values_R: np.ndarray, known_R: np.ndarray, starts_S: np.ndarray, sequence_R: np.ndarray
) -> np.ndarray:
    """Return the values, and where they are not known the smallest of their sequence, or 0 where it has none."""
    first_S = np.minimum.reduceat(np.where(known_R, values_R, np.inf), starts_S)
    first_S[~np.isfinite(first_S)] = 0.0
    return np.where(known_R, values_R, first_S[sequence_R])


def _changes(keys_R: np.ndarray) -> np.ndarray:
    """Return true for the first row and wherever a row differs from the one before."""
    return np.concatenate([np.ones(min(1, len(keys_R)), bool), keys_R[1:] != keys_R[:-1]])
