"""Text to numbers of symbols, and the vocabulary that is made of them.

A text vocabulary is not known before the last training row was read: symbols are numbered as they appear, and the cache
is rewritten with their final ids (the more frequent, the smaller) when everything is in.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqvae.data.description import UNKNOWN
from seqvae.errors import DataError

SIMPLE = ("words", "characters", "bytes")
TEXTS_AT_ONCE = 1000
"""The encodings that the `tokenizers` library returns take many times the memory of their texts; this many exist at a time."""


class Numbering:
    """Numbers texts in order of appearance."""

    def __init__(self) -> None:
        self.number_of: dict[str, int] = {}

    def __call__(self, texts: pa.Array) -> np.ndarray:
        """Return the int32 number of each text, -1 for a null."""
        encoded = texts.dictionary_encode()
        numbers = [self.number_of.setdefault(text, len(self.number_of)) for text in encoded.dictionary.to_pylist()]
        return np.array([*numbers, -1], np.int32)[np.asarray(encoded.indices.fill_null(-1))]


class SimpleTokenizer:
    """Text -> numbers of its words (between white space), characters (code points) or UTF-8 bytes, none of which is unknown."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.learns = name != "bytes"
        """Whether its vocabulary comes from the training split."""
        self._numbering = Numbering()

    def __call__(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return flat int32 numbers and the length of each text; no Python string per row."""
        if self.name == "words":
            trimmed = pc.utf8_trim_whitespace(texts)
            lists = pc.utf8_split_whitespace(trimmed)
            lengths_S = np.where(np.asarray(pc.utf8_length(trimmed)) == 0, 0, pc.list_value_length(lists))
            words = lists.flatten()
            return self._numbering(words.filter(pc.not_equal(words, ""))), lengths_S.astype(np.int64)
        offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
        joined = bytes(memoryview(texts.buffers()[2])[offsets[0] : offsets[-1]]) if offsets[-1] > offsets[0] else b""
        if self.name == "bytes":
            return np.frombuffer(joined, np.uint8).astype(np.int32), np.diff(offsets)
        lengths_S = np.asarray(pc.utf8_length(texts)).astype(np.int64)
        points_T = np.frombuffer(joined.decode("utf-8").encode("utf-32-le"), np.uint32)
        occur_P = np.flatnonzero(np.bincount(points_T)) if len(points_T) else np.zeros(0, np.int64)
        number_of_point = np.zeros(occur_P.max(initial=0) + 1, np.int32)
        number_of_point[occur_P] = self._numbering(pa.array(map(chr, occur_P.tolist()), pa.large_string()))
        return number_of_point[points_T], lengths_S

    def symbols(self) -> list[str]:
        """Return the symbol of each number."""
        if self.name == "bytes":
            return [chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>" for byte in range(256)]
        return list(self._numbering.number_of)


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
            some = texts.slice(start, TEXTS_AT_ONCE).to_pylist()
            for encoding in self._tokenizer.encode_batch_fast(some, add_special_tokens=False):
                tokens.append(np.array(encoding.ids, np.int32))
                lengths.append(len(encoding.ids))
        return np.concatenate(tokens), np.array(lengths, np.int64)

    def symbols(self) -> list[str]:
        """Ids may have gaps, which stand for no symbol."""
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


def vocabulary(
    symbols: list[str], counts_V: np.ndarray, minimum_count: int, *, by_name: bool = False
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the symbols kept, <unknown> first and then the more frequent first (or by name), and the final id of each number.

    >>> vocabulary(["a", "b", "c"], np.array([1, 5, 0]), minimum_count=1)
    (('<unknown>', 'b', 'a'), array([2, 1, 0], dtype=int32))
    >>> vocabulary(["pulse", "age", "rare"], np.array([3, 2, 1]), minimum_count=2, by_name=True)
    (('<unknown>', 'age', 'pulse'), array([2, 1, 0], dtype=int32))
    """
    kept = [number for number, symbol in enumerate(symbols) if counts_V[number] >= minimum_count and symbol != UNKNOWN]
    kept.sort(key=lambda number: (0 if by_name else -counts_V[number], symbols[number]))
    final_V = np.zeros(len(symbols), np.int32)
    final_V[kept] = np.arange(1, len(kept) + 1)
    return (UNKNOWN, *(symbols[number] for number in kept)), final_V


def places_in(known: tuple[str, ...], symbols: list[str]) -> np.ndarray:
    """Return the id that each symbol has in an existing vocabulary; 0, <unknown>, where it is not in it.

    >>> places_in(("<unknown>", "b", "a"), ["a", "x", "b"])
    array([2, 0, 1], dtype=int32)
    """
    place_of = {symbol: place for place, symbol in enumerate(known)}
    return np.array([place_of.get(symbol, 0) for symbol in symbols], np.int32)
