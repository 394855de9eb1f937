"""Sequences of token ids: from integer lists as they are, or from text that a tokenizer cuts.

A text vocabulary is not known before the last training row was read: symbols are numbered as they appear, and the cache
is rewritten with their final ids (the more frequent, the smaller) when everything is in.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqvae.data.building.encoders import BlockCheck, Encoded, Problems, list_lengths
from seqvae.data.description import UNKNOWN
from seqvae.data.parquet.reader import Block
from seqvae.data.parquet.schema import Layout
from seqvae.errors import DataError

TEXTS_AT_ONCE = 1000
"""What the `tokenizers` library says of so many texts exists at a time: it is many times their size."""

LARGEST_ID = 2**31 - 1


class TokenEncoder:
    """Blocks -> flat int32 token ids (for text: numbers of symbols, final ids come from `vocabulary`)."""

    def __init__(
        self,
        layout: Layout,
        problems: Problems,
        tokenizer: "Tokenizer | None",
        vocabulary_size: int | None,
        limited_by: str | None = None,
    ) -> None:
        """`limited_by`: where the size of the vocabulary comes from."""
        self.column = str(layout.sequence)
        self.problems = problems
        self.tokenizer = tokenizer
        self.limited_by = limited_by or f"of --vocabulary_size {vocabulary_size}"
        self.largest = LARGEST_ID if vocabulary_size is None else min(vocabulary_size - 1, LARGEST_ID)

    def __call__(self, block: Block) -> Encoded:
        column = block.column("sequence")
        rows_S = np.arange(len(column))
        check = BlockCheck(self.problems, block, rows_S, len(rows_S))
        null_S = np.asarray(column.is_null())
        check.leave_out(np.flatnonzero(null_S), f"a null in column {self.column!r}")
        if self.tokenizer:
            tokens_T, lengths_S = self.tokenizer(pc.fill_null(column, ""))
        else:
            lengths_S = list_lengths(column)
            tokens_T = self._ids(check, column.flatten(), np.repeat(rows_S, lengths_S))
        check.leave_out(np.flatnonzero((lengths_S == 0) & ~null_S), f"an empty sequence in column {self.column!r}")
        return Encoded(rows_S, lengths_S, {"tokens": tokens_T}).keep(check.keep_S)

    def _ids(self, check: BlockCheck, flat: pa.Array, row_of_T: np.ndarray) -> np.ndarray:
        """The ids as int32; those of rows to be left out are any number."""
        if flat.null_count:
            null_T = np.asarray(flat.is_null())
            check.leave_out(row_of_T[null_T], f"a null inside a list of column {self.column!r}")
            flat = flat.cast(pa.int64()) if pa.types.is_null(flat.type) else flat
            flat = pc.fill_null(flat, 0)
        ids_T = flat.to_numpy(zero_copy_only=False)
        if len(ids_T) and (ids_T.min() < 0 or ids_T.max() > self.largest):
            wrong_T = (ids_T < 0) | (ids_T > self.largest)
            limit = f" {self.limited_by}" if self.largest < LARGEST_ID else ""
            check.leave_out(
                row_of_T[wrong_T],
                f"a token id outside 0 .. {self.largest}{limit} in column {self.column!r}",
                f", {ids_T[wrong_T][0]}",
            )
            ids_T = np.where(wrong_T, 0, ids_T)
        return ids_T.astype(np.int32, copy=False)


class Tokenizer(Protocol):
    """Text -> numbers of symbols."""

    name: str
    learns: bool
    """Whether its vocabulary comes from the training split."""

    def __call__(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Flat int32 numbers and the length of each text."""

    def symbols(self) -> list[str]:
        """The symbol that each number stands for."""


class Characters:
    name, learns = "characters", True

    def __init__(self) -> None:
        self._number_of = np.full(0x110000, -1, np.int32)
        self._points: list[int] = []

    def __call__(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        lengths_S = np.asarray(pc.utf8_length(texts)).astype(np.int64)
        points_T = np.frombuffer(_joined(texts).decode("utf-8").encode("utf-32-le"), np.uint32)
        seen = np.flatnonzero(np.bincount(points_T)) if len(points_T) else np.zeros(0, np.int64)
        fresh = seen[self._number_of[seen] < 0]
        self._number_of[fresh] = np.arange(len(self._points), len(self._points) + len(fresh))
        self._points += fresh.tolist()
        return self._number_of[points_T], lengths_S

    def symbols(self) -> list[str]:
        return [chr(point) for point in self._points]


class Words:
    """Words are what stands between white space."""

    name, learns = "words", True

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}

    def __call__(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        lists = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(texts))
        lengths_S = np.where(
            np.asarray(pc.utf8_length(pc.utf8_trim_whitespace(texts))) == 0, 0, pc.list_value_length(lists)
        )
        words = lists.flatten()
        words = words.filter(pc.not_equal(words, "")).dictionary_encode()
        numbers = [self._number_of.setdefault(word, len(self._number_of)) for word in words.dictionary.to_pylist()]
        return np.array(numbers, np.int32)[words.indices.to_numpy()], lengths_S.astype(np.int64)

    def symbols(self) -> list[str]:
        return list(self._number_of)


class Bytes:
    """The bytes of the text's UTF-8: 256 symbols, none of them unknown."""

    name, learns = "bytes", False

    def __call__(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        lengths_S = np.asarray(pc.binary_length(texts)).astype(np.int64)
        return np.frombuffer(_joined(texts), np.uint8).astype(np.int32), lengths_S

    def symbols(self) -> list[str]:
        return [chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>" for byte in range(256)]


class TokenizerFile:
    """A tokenizer.json of the `tokenizers` library (extra `text`)."""

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
            some = texts.slice(start, TEXTS_AT_ONCE).to_pylist()
            for encoding in self._tokenizer.encode_batch_fast(some, add_special_tokens=False):
                tokens.append(np.array(encoding.ids, np.int32))
                lengths.append(len(encoding.ids))
        return np.concatenate(tokens), np.array(lengths, np.int64)

    def symbols(self) -> list[str]:
        """Ids may have gaps, which stand for no symbol."""
        symbol_of = {number: symbol for symbol, number in self._tokenizer.get_vocab().items()}
        return [symbol_of.get(number, UNKNOWN) for number in range(max(symbol_of, default=-1) + 1)]


SIMPLE: dict[str, type[Characters | Words | Bytes]] = {"characters": Characters, "words": Words, "bytes": Bytes}


def make_tokenizer(name: str) -> Tokenizer:
    """By the name that --tokenizer gives, or out of the file at the path that it gives."""
    if name in SIMPLE:
        return SIMPLE[name]()
    try:
        content = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wanted = "words, characters, bytes or the path of a tokenizer.json"
        raise DataError(f"--tokenizer {name}: cannot be read ({error}). Wanted: {wanted}.") from error
    return TokenizerFile(content, f"--tokenizer {name}")


def known_tokenizer(name: str) -> Tokenizer:
    """As a `DataDescription` has it: a file's content in place of its path."""
    return SIMPLE[name]() if name in SIMPLE else TokenizerFile(name, "the tokenizer that this network was trained with")


def places_in(known: tuple[str, ...], symbols: list[str]) -> np.ndarray:
    """The id that each symbol has in a vocabulary that is there already; 0, <unknown>, where it is not in it.

    >>> places_in(("<unknown>", "b", "a"), ["a", "x", "b"])
    array([2, 0, 1], dtype=int32)
    """
    place_of = {symbol: place for place, symbol in enumerate(known)}
    return np.array([place_of.get(symbol, 0) for symbol in symbols], np.int32)


def vocabulary(symbols: list[str], counts_V: np.ndarray, minimum_count: int) -> tuple[tuple[str, ...], np.ndarray]:
    """The symbols kept, <unknown> first and then the more frequent first, and the final id of each number.

    >>> vocabulary(["a", "b", "c"], np.array([1, 5, 0]), minimum_count=1)
    (('<unknown>', 'b', 'a'), array([2, 1, 0], dtype=int32))
    """
    kept = [number for number, symbol in enumerate(symbols) if counts_V[number] >= minimum_count and symbol != UNKNOWN]
    kept.sort(key=lambda number: (-counts_V[number], symbols[number]))
    final = np.zeros(len(symbols), np.int32)
    final[kept] = np.arange(1, len(kept) + 1)
    return (UNKNOWN, *(symbols[number] for number in kept)), final


def _joined(texts: pa.Array) -> bytes:
    """All texts one behind the other; one copy, no Python string per row."""
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return bytes(memoryview(texts.buffers()[2])[offsets[0] : offsets[-1]]) if offsets[-1] > offsets[0] else b""
