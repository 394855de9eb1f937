"""Text becomes tokens and can be read back; the vocabulary is that of the training split."""

import json
import string
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqvae.data.building.encoders import SimpleTokenizer
from seqvae.errors import DataError
from tests.support.parquet_files import texts, tokens, write_splits

TRAIN = ["a rose is a rose", "é変 is"]


def as_column(values: list[str]) -> pa.Array:
    return pa.array(values, pa.large_string())


def decoded(tokenizer: SimpleTokenizer, column: list[str]) -> list[list[str]]:
    numbers_T, lengths_S = tokenizer(as_column(column))
    symbols = np.array(tokenizer.symbols() or [""], object)
    return [part.tolist() for part in np.split(symbols[numbers_T], np.cumsum(lengths_S)[:-1])]


@given(st.lists(st.text(), min_size=1))
def test_characters_are_the_code_points(column):
    assert decoded(SimpleTokenizer("characters"), column) == [list(text) for text in column]


PYTHON_ALONE = "\x1c\x1d\x1e\x1f"
"""Separators of records that Python takes for white space, and Unicode does not."""


@given(
    st.lists(
        st.text(
            st.one_of(st.sampled_from(" \t\n\u3000ab"), st.characters(codec="utf-8", exclude_characters=PYTHON_ALONE))
        ),
        min_size=1,
    )
)
def test_words_are_what_stands_between_white_space(column):
    assert decoded(SimpleTokenizer("words"), column) == [text.split() for text in column]


@given(st.lists(st.text(), min_size=1))
def test_bytes_are_those_of_utf_8(column):
    numbers_T, lengths_S = SimpleTokenizer("bytes")(as_column(column))
    assert bytes(numbers_T.astype(np.uint8)) == "".join(column).encode()
    assert lengths_S.tolist() == [len(text.encode()) for text in column]


@given(st.lists(st.lists(st.text(string.ascii_letters), min_size=1), min_size=1))
def test_numbers_do_not_depend_on_how_the_column_was_cut_into_blocks(blocks):
    in_blocks, at_once = SimpleTokenizer("characters"), SimpleTokenizer("characters")
    assert [decoded(in_blocks, block) for block in blocks] == [decoded(at_once, block) for block in blocks]
    together = decoded(SimpleTokenizer("characters"), [text for block in blocks for text in block])
    assert together == [list(text) for block in blocks for text in block]


@pytest.mark.parametrize(("tokenizer", "between"), [("characters", ""), ("words", " ")])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_text_can_be_read_back(tmp_path, load, tokenizer, between, kind):
    column = {"text": pa.array(TRAIN, kind)}
    data = load(write_splits(tmp_path / "d", train=column, valid=column), tokenizer=tokenizer)
    assert texts(data.splits["train"], data.description, between) == TRAIN
    assert data.description.symbols[0] == "<unknown>"
    assert data.description.vocabulary_size == len(data.description.symbols)
    assert data.description.tokenizer == tokenizer


def test_the_more_frequent_word_has_the_smaller_id_and_equals_go_by_the_alphabet(tmp_path, load):
    column = {"text": ["b b b c a", "a a d"]}
    data = load(write_splits(tmp_path / "d", train=column, valid=column), tokenizer="words")
    assert data.description.symbols == ("<unknown>", "a", "b", "c", "d")


@pytest.mark.parametrize(
    ("column", "options", "share"),
    [
        (["b b b c a", "a a d"], {"tokenizer": "words"}, 2 / 8),
        (["b b b c a", "a a d"], {"tokenizer": "words", "minimum_count": 2}, 0.0),  # training shows <unknown> twice
        (["bb", "aab"], {"tokenizer": "characters"}, 0.0),
        (["bb", "aac"], {"tokenizer": "characters"}, 1 / 5),
        (["a b", "c"], {"tokenizer": "words"}, 0.5),  # all of them, which would leave nothing for the known
        (["bb", "aac"], {"tokenizer": "bytes"}, 0.0),
        ([[0, 0, 1]], {}, 0.0),
    ],
)
def test_new_symbols_are_expected_as_often_as_training_shows_symbols_only_once(tmp_path, load, column, options, share):
    data = load(write_splits(tmp_path / "d", train={"x": column}, valid={"x": column}), **options)
    assert data.description.unknown_share == pytest.approx(share)


def test_what_the_training_split_lacks_is_unknown_and_counted(tmp_path, load):
    directory = write_splits(tmp_path / "d", train={"text": ["ab"]}, valid={"text": ["abz", "zz"]})
    data = load(directory, tokenizer="characters")
    assert texts(data.splits["valid"], data.description) == ["ab<unknown>", "<unknown><unknown>"]
    assert "valid: 3 of 5 tokens count as <unknown>" in data.notes
    assert data.counts["valid"]["unknown"] == 3


def test_what_is_rare_in_the_training_split_is_unknown_and_counted(tmp_path, load):
    column = {"text": ["b b c"]}
    data = load(write_splits(tmp_path / "d", train=column, valid=column), tokenizer="words", minimum_count=2)
    assert data.description.symbols == ("<unknown>", "b")
    assert tokens(data.splits["train"]) == [[1, 1, 0]]
    assert "train: 1 of 3 tokens count as <unknown>" in data.notes


def test_a_minimum_count_that_nothing_reaches_is_refused(tmp_path, load):
    column = {"text": ["b b c"]}
    directory = write_splits(tmp_path / "d", train=column, valid=column)
    with pytest.raises(
        DataError, match=r"no symbol .* --minimum_count 3 times, the most frequent one 2 times. Lower it"
    ):
        load(directory, tokenizer="words", minimum_count=3)


def test_a_word_that_is_spelled_like_the_unknown_mark_is_unknown(tmp_path, load):
    column = {"text": ["<unknown> <unknown> a"]}
    data = load(write_splits(tmp_path / "d", train=column, valid=column), tokenizer="words")
    assert data.description.symbols == ("<unknown>", "a")
    assert tokens(data.splits["train"]) == [[0, 0, 1]]


def test_bytes_have_256_symbols_whatever_occurs(tmp_path, load):
    column = {"text": ["aé"]}
    data = load(write_splits(tmp_path / "d", train=column, valid=column), tokenizer="bytes")
    assert tokens(data.splits["train"]) == [[0x61, 0xC3, 0xA9]]
    assert data.description.vocabulary_size == 256
    assert data.description.symbols[0x61] == "a"
    assert data.description.symbols[0xC3] == "<0xC3>"


WORD_LEVEL: dict[str, Any] = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "rose": 1, "is": 2, "a": 5}, "unk_token": "[UNK]"},
}


def test_a_tokenizer_file_brings_its_own_vocabulary_and_does_not_cut(tmp_path, load):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(WORD_LEVEL))
    directory = write_splits(tmp_path / "d", train={"text": TRAIN}, valid={"text": ["rose"]})
    data = load(directory, tokenizer=str(path))
    assert tokens(data.splits["train"]) == [[5, 1, 2, 5, 1], [0, 2]]
    assert data.description.symbols == ("[UNK]", "rose", "is", "<unknown>", "<unknown>", "a")
    assert json.loads(str(data.description.tokenizer))["model"] == WORD_LEVEL["model"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read"), ("{", "is no tokenizer.json"), ("{}", "is no tokenizer.json")],
)
def test_a_tokenizer_file_that_is_none_is_refused(tmp_path, load, content, reason):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    directory = write_splits(tmp_path / "d", train={"text": TRAIN}, valid={"text": TRAIN})
    with pytest.raises(DataError, match=reason) as caught:
        load(directory, tokenizer=str(path))
    assert f"--tokenizer {path}" in str(caught.value)


def test_text_beside_lists_is_taken_where_a_tokenizer_is_named(tmp_path, load):
    columns = {"embedding": [[0.5]], "text": ["ab"]}
    directory = write_splits(tmp_path / "d", train=columns, valid=columns)
    assert load(directory).description.kind == "vectors"
    assert load(directory, tokenizer="bytes").description.kind == "tokens"


def test_text_without_a_tokenizer_is_refused(tmp_path, load):
    directory = write_splits(tmp_path / "d", train={"text": TRAIN}, valid={"text": TRAIN})
    with pytest.raises(
        DataError, match=r"column 'text' is text: say how to cut it with --tokenizer words, characters, bytes"
    ):
        load(directory)
