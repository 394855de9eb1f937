"""Whatever is wrong with data is said with file, column and row, what was found and what to do; nothing is dropped in silence."""

import contextlib
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqvae.data.parquet import reader as reading
from seqvae.errors import DataError
from tests.support.parquet_files import Load, by_id, events, flip_bit, ids, tokens, vectors, write, write_splits

SKIP = "--on_bad_files skip"


def refusal(load: Load, data_dir: Path | str, **flags: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(data_dir, **flags)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message


def assert_says(message: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in message, message


# Files that are no Parquet, or damaged Parquet


def good_and_bad(tmp_path: Path) -> Path:
    """d/train with two good files and room for a bad one between them, and d/valid."""
    write(tmp_path / "d/train/a.parquet", {"tokens": [[1], [2]]})
    write(tmp_path / "d/train/z.parquet", {"tokens": [[3]]})
    write(tmp_path / "d/valid.parquet", {"tokens": [[1]]})
    return tmp_path / "d/train/bad.parquet"


def write_truncated(path: Path) -> None:
    write(path, {"tokens": [[9]] * 50})
    path.write_bytes(path.read_bytes()[:-40])


def write_with_flipped_footer(path: Path) -> None:
    write(path, {"tokens": [[9]]})
    flip_bit(path, -60, bit=6)


def write_with_flipped_page(path: Path) -> None:
    columns = {"other": [0] * 4000, "tokens": [[number, 9] for number in range(4000)]}
    write(path, columns, row_group_size=1000, write_page_checksum=True, use_dictionary=False, compression=None)
    flip_bit(path, pq.read_metadata(path).row_group(2).column(1).data_page_offset + 1000)


BAD_FILES = {
    "empty": (lambda path: path.touch(), "is not a readable Parquet file: it is empty (0 bytes)"),
    "html": (lambda path: path.write_text("<!DOCTYPE html><h1>404</h1>"), "it begins with b'<!DOCTYPE html><'"),
    "short": (lambda path: path.write_bytes(b"PAR1"), "is not a readable Parquet file"),
    "truncated": (write_truncated, "its end is missing (truncated while it was written or copied)"),
    "footer": (write_with_flipped_footer, "its footer is damaged ("),
    "page": (write_with_flipped_page, "column 'tokens' in row group 2 cannot be read, the file is damaged"),
    "link": (lambda path: path.symlink_to("nowhere.parquet"), "it is gone"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_cannot_be_read_is_refused_or_left_out_and_counted(tmp_path, load, what):
    bad = good_and_bad(tmp_path)
    make, reason = BAD_FILES[what]
    make(bad)
    assert_says(refusal(load, tmp_path / "d"), bad, reason, "Write it again, or leave such files out with", SKIP)
    data = load(tmp_path / "d", on_bad_files="skip")
    assert tokens(data.splits["train"]) == [[1], [2], [3]]
    assert f"1 of 4 files left out that cannot be used ({SKIP})" in data.notes
    assert [note for note in data.notes if note.startswith(f"left out: {bad}: ") and reason in note]


def test_a_file_that_was_repaired_is_read_again(tmp_path, load):
    bad = good_and_bad(tmp_path)
    write_truncated(bad)
    assert len(load(tmp_path / "d", on_bad_files="skip").splits["train"]) == 3
    write(bad, {"tokens": [[4]]})
    assert len(load(tmp_path / "d", on_bad_files="skip").splits["train"]) == 4


def test_several_bad_files_are_counted_and_the_first_is_named(tmp_path, load):
    for number in range(8):
        good_and_bad(tmp_path).with_stem(f"bad{number}").write_text("?")
    assert_says(refusal(load, tmp_path / "d"), "bad0.parquet: is not", "7 more files cannot be used")
    notes = load(tmp_path / "d", on_bad_files="skip").notes
    assert f"8 of 11 files left out that cannot be used ({SKIP})" in notes
    assert sum(note.startswith("left out: ") for note in notes) == 5


def test_when_every_file_is_bad_there_is_nothing_to_skip_to(tmp_path, load):
    for split in ("train", "valid"):
        path = tmp_path / f"d/{split}/a.parquet"
        path.parent.mkdir(parents=True)
        path.write_text("?")
    assert_says(
        refusal(load, tmp_path / "d", on_bad_files="skip"), "none of its Parquet files", "a.parquet: is not a readable"
    )


def test_a_split_whose_files_are_all_bad_is_refused(tmp_path, load):
    good_and_bad(tmp_path)
    (tmp_path / "d/valid.parquet").write_text("?")
    assert_says(refusal(load, tmp_path / "d", on_bad_files="skip"), "no sequence is left for the valid split")


@pytest.mark.parametrize("seed", range(3))
def test_no_flipped_bit_in_a_footer_ends_in_a_traceback(tmp_path, load, seed):
    directory = write_splits(tmp_path / "d", train={"tokens": [[1, 2]]}, valid={"tokens": [[1]]})
    path = directory / "train.parquet"
    intact = path.read_bytes()
    footer = int.from_bytes(intact[-8:-4], "little") + 8
    random = np.random.default_rng(seed)
    for position, bit in zip(random.integers(1, footer, 40).tolist(), random.integers(0, 8, 40).tolist(), strict=True):
        path.write_bytes(intact)
        flip_bit(path, -position, bit)
        with contextlib.suppress(DataError):
            load(directory)


UNPRIVILEGED = 65534
TRY_TO_LOAD = """
import os, sys
import filelock  # imported when it is needed, which may be a place that somebody else cannot read
from seqvae.data.cache import prepare_cache
from seqvae.errors import DataError, StorageError
from seqvae.config.data import CacheSettings, SourceSettings
os.setgid({uid}); os.setuid({uid})
try:
    prepare_cache(SourceSettings(data_dir=sys.argv[1], on_bad_files=sys.argv[3]), CacheSettings(cache_dir=sys.argv[2]))
except (DataError, StorageError) as error:
    print(type(error).__name__, error)
"""


def load_without_privileges(data_dir: Path, cache_dir: Path, on_bad_files: str = "error") -> str:
    """What another user reads who loads these data; root may read and write anything."""
    if os.name != "posix" or os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    code = TRY_TO_LOAD.format(uid=UNPRIVILEGED)
    command = [sys.executable, "-c", code, str(data_dir), str(cache_dir), on_bad_files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent.parent, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may read and write; not pytest's own, which each of its sessions closes to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_a_file_that_may_not_be_read_is_refused_or_left_out(shared):
    bad = good_and_bad(shared)
    write(bad, {"tokens": [[9]]})
    bad.chmod(0)
    said = load_without_privileges(shared / "d", shared / "cache")
    assert_says(said, "DataError", bad, "permission denied", "Change its permissions", SKIP)
    assert load_without_privileges(shared / "d", shared / "cache", "skip") == ""


def test_a_folder_that_may_not_be_entered_is_refused_and_not_passed_over(shared):
    good_and_bad(shared)
    closed = shared / "d/train/closed"
    write(closed / "a.parquet", {"tokens": [[1]]})
    closed.chmod(0)
    said = load_without_privileges(shared / "d", shared / "cache")
    assert_says(said, "DataError", closed, "cannot be listed (Permission denied)", "Check the path and its permissions")


def test_a_cache_directory_that_cannot_be_written_is_a_matter_of_storage(shared):
    good_and_bad(shared)
    (shared / "cache").mkdir(mode=0o755)
    said = load_without_privileges(shared / "d", shared / "cache")
    assert_says(said, "StorageError", shared / "cache", "cannot be written (Permission denied)", "another --cache_dir")


# Places


def test_an_empty_folder_is_refused(tmp_path, load):
    (tmp_path / "d").mkdir()
    assert_says(refusal(load, tmp_path / "d"), tmp_path / "d", "holds no Parquet file", "Wanted: train/, valid/, test/")


def test_a_folder_of_hidden_files_alone_is_refused_with_their_number(tmp_path, load):
    write(tmp_path / "d/_part.parquet", {"tokens": [[1]]})
    assert_says(refusal(load, tmp_path / "d"), "holds no Parquet file", "beside 1 whose names begin with . or _")


def test_an_empty_split_is_refused(tmp_path, load):
    write(tmp_path / "d/train/a.parquet", {"tokens": [[1]]})
    (tmp_path / "d/valid").mkdir()
    assert_says(
        refusal(load, tmp_path / "d"), tmp_path / "d/valid", "but a valid split was expected there. Fill or remove it"
    )


def test_splits_without_a_training_split_are_refused(tmp_path, load):
    write(tmp_path / "d/test/a.parquet", {"tokens": [[1]]})
    assert_says(refusal(load, tmp_path / "d"), "has test but no train/ or train.parquet to learn from")


def test_a_path_that_does_not_exist_is_refused_with_what_is_there(tmp_path, load):
    write(tmp_path / "molecules/a.parquet", {"tokens": [[1]]})
    said = refusal(load, tmp_path / "molecule")
    assert_says(said, "--data_dir", tmp_path / "molecule", "does not exist", "is there and holds cache, molecules")


def test_a_glob_without_matches_is_refused(tmp_path, load):
    assert_says(refusal(load, f"{tmp_path}/runs_*"), "runs_*: no directory or Parquet file matches this pattern")


def test_splits_and_pools_under_one_glob_are_refused(tmp_path, load):
    write(tmp_path / "runs_1/train.parquet", {"tokens": [[1]]})
    write(tmp_path / "runs_2/a.parquet", {"tokens": [[1]]})
    assert_says(refusal(load, f"{tmp_path}/runs_*"), "others are pools (the first:", "runs_2/a.parquet")


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_split_without_rows_is_refused(tmp_path, load, split):
    splits = {name: {"tokens": [[1]]} for name in ("train", "valid", "test")}
    splits[split] = {"tokens": pa.array([], pa.list_(pa.int64()))}
    said = refusal(load, write_splits(tmp_path / "d", **splits))
    assert_says(said, f"no sequence is left for the {split} split", "Check that its files have rows")


def test_files_without_any_rows_are_refused(tmp_path, load):
    empty = {"tokens": pa.array([], pa.list_(pa.int64()))}
    said = refusal(load, write_splits(tmp_path / "d", train=empty, valid=empty))
    assert_says(said, tmp_path / "d", "none of its Parquet files has rows", "Fill them")


def test_a_pool_too_small_to_be_split_is_refused(tmp_path, load):
    write(tmp_path / "d/a.parquet", {"tokens": [[1]]})
    assert_says(refusal(load, tmp_path / "d"), "no sequence is left for the valid split", "Raise --validation_fraction")


def test_a_table_without_an_id_column_is_one_sequence_and_said_so(tmp_path, load):
    write(tmp_path / "d/a.parquet", {"pid": [1, 1], "time": [0, 1], "x": [1.0, 2.0]})
    said = refusal(load, tmp_path / "d")
    assert_says(said, "Each file counts as one sequence, as no id column was recognised: name one with --id_column")


@pytest.mark.parametrize(("one", "other"), [("7", "7.0"), ("7", "007")])
def test_two_files_of_one_name_are_refused(tmp_path, load, one, other):
    columns = {"minute": [0.0], "variable": ["a"], "value": [1.0]}
    for stem in (one, other):
        write(tmp_path / f"d/train/{stem}.parquet", columns)
    write(tmp_path / "d/valid/8.parquet", columns)
    assert_says(refusal(load, tmp_path / "d"), "two files with the same sequence id 7, their name. Rename one")


# Columns


def test_a_column_missing_in_one_file_of_many_is_refused_or_the_file_left_out(tmp_path, load):
    bad = good_and_bad(tmp_path)
    write(bad, {"token": [[9]]})
    said = refusal(load, tmp_path / "d")
    assert_says(said, bad, "column 'tokens' is missing, but a.parquet has it; did you mean 'token'?", SKIP)
    data = load(tmp_path / "d", on_bad_files="skip")
    assert tokens(data.splits["train"]) == [[1], [2], [3]]
    assert f"1 of 4 files left out that cannot be used ({SKIP})" in data.notes


def test_a_column_missing_in_the_first_file_is_refused(tmp_path, load):
    columns = {"id": [1], "time": [0], "x": [1.0], "y": [2.0]}
    write(tmp_path / "d/train/0.parquet", {name: columns[name] for name in ("id", "time", "x")})
    write(tmp_path / "d/train/1.parquet", columns)
    write(tmp_path / "d/valid.parquet", {**columns, "id": [2]})
    assert_says(refusal(load, tmp_path / "d"), "0.parquet", "column 'y' is missing, but 1.parquet has it")


def test_files_of_which_none_has_all_columns_are_refused(tmp_path, load):
    write(tmp_path / "d/train/0.parquet", {"id": [1], "time": [0]})
    write(tmp_path / "d/train/1.parquet", {"variable": ["a"], "value": [1.0]})
    assert_says(refusal(load, tmp_path / "d"), "0.parquet", "is missing, but 1.parquet has it")


def test_a_column_that_stands_twice_in_a_file_is_refused(tmp_path, load):
    bad = good_and_bad(tmp_path)
    write(bad, pa.table([[[1]], [[2]]], names=["tokens", "tokens"]))
    assert_says(refusal(load, tmp_path / "d"), bad, "column 'tokens' stands there 2 times. Rename all but one", SKIP)


@pytest.mark.parametrize(("odd_one", "first"), [("0.parquet", True), ("5.parquet", False)])
def test_text_among_numbers_is_refused_wherever_it_stands(tmp_path, load, odd_one, first):
    columns = {"id": [1], "time": [0], "x": [1.0]}
    for number in (1, 2, 3):
        write(tmp_path / f"d/train/{number}.parquet", {**columns, "id": [number]})
    write(tmp_path / f"d/train/{odd_one}", {**columns, "x": ["high"]})
    write(tmp_path / "d/valid.parquet", {**columns, "id": [9]})
    said = refusal(load, tmp_path / "d")
    assert_says(said, odd_one, "column 'x' is string, but double in 1.parquet. Convert one of them", SKIP)
    assert len(load(tmp_path / "d", on_bad_files="skip").splits["train"]) == 3


def test_ids_that_are_numbers_in_one_file_and_text_in_another_are_refused(tmp_path, load):
    columns = {"time": [0], "x": [1.0]}
    write(tmp_path / "d/train.parquet", {"id": [1], **columns})
    write(tmp_path / "d/valid.parquet", {"id": ["1"], **columns})
    assert_says(refusal(load, tmp_path / "d"), "valid.parquet", "column 'id' is string, but int64 in train.parquet")


def test_numbers_of_different_types_are_widened(tmp_path, load):
    types = [pa.int8(), pa.int64(), pa.float32(), pa.float64(), pa.uint16(), pa.bool_(), pa.decimal128(5, 2)]
    for number, kind in enumerate(types):
        column = pa.array([Decimal(1), Decimal(0)] if pa.types.is_decimal(kind) else [1, 0]).cast(kind)
        write(tmp_path / f"d/train/{number}.parquet", {"id": [number] * 2, "time": [0, 1], "x": column})
    write(tmp_path / "d/valid.parquet", {"id": [99], "time": [0.5], "x": [0.5]})
    data = load(tmp_path / "d")
    assert vectors(data.splits["train"], data.description) == [[[1.0], [0.0]]] * len(types)


def test_a_file_whose_column_is_nulls_throughout_fits_the_others(tmp_path, load):
    columns = {"id": [1], "time": [0], "x": [1.0]}
    write(tmp_path / "d/train/0.parquet", {**columns, "x": pa.nulls(1)})
    write(tmp_path / "d/train/1.parquet", {**columns, "id": [2]})
    write(tmp_path / "d/valid.parquet", {**columns, "id": [3]})
    data = load(tmp_path / "d")
    assert vectors(data.splits["train"], data.description) == [[[None]], [[1.0]]]


EVENTS = {"id": [1], "time": [0], "variable": ["a"], "value": [1.0]}


@pytest.mark.parametrize(
    ("flag", "given", "meant", "columns"),
    [
        ("sequence_column", "token", "tokens", {"tokens": [[1]]}),
        ("id_column", "idd", "id", EVENTS),
        ("time_column", "tim", "time", EVENTS),
        ("variable_column", "variables", "variable", EVENTS),
        ("value_column", "valu", "value", EVENTS),
        ("feature_columns", "x, why", "x1", {"id": [1], "time": [0], "x": [1.0], "why1": [1.0]}),
        ("label_column", "lable", "label", {"tokens": [[1]], "label": [1]}),
    ],
)
def test_a_wrong_column_name_is_refused_with_the_closest_one(tmp_path, load, flag, given, meant, columns):
    directory = write_splits(tmp_path / "d", train=columns, valid=columns)
    said = refusal(load, directory, **{flag: given})
    wrong, meant = ("why", "why1") if flag == "feature_columns" else (given, meant)
    assert_says(said, "train.parquet", f"--{flag} '{wrong}' is not one of its columns", f"did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("columns", "flags", "parts"),
    [
        (
            {"name": ["x"], "n": [1]},
            {"sequence_column": "n"},
            ["column 'n' is int64, but sequences must be lists of numbers, or lists of such lists, or text"],
        ),
        (
            {"words": [["a", "b"]]},
            {},
            ["'words' holds lists of text", "join them to one text a row for --tokenizer words"],
        ),
        (
            {"id": [1], "time": ["noon"], "x": [1.0]},
            {"time_column": "time"},
            ["column 'time' is string, but must hold numbers or"],
        ),
        (
            {"id": [1], "time": ["noon"], "variable": ["a"], "value": [1.0]},
            {"kind": "events"},
            ["'time' is text: convert it"],
        ),
        (
            {"id": [1], "time": [0], "variable": ["a"], "val": [1.0]},
            {"kind": "events"},
            ["but their value is not found: name --value"],
        ),
        (
            {"id": [1], "time": [0], "x": ["a"]},
            {"feature_columns": "x"},
            ["'x' is string, but must hold numbers", "with --feature_columns"],
        ),
        (
            {**EVENTS, "set_index": ["a"]},
            {},
            ["column 'set_index' is string, but must hold whole numbers", "or rename it"],
        ),
        (
            {"a": [[1]], "b": [[2]]},
            {},
            ["several columns could be the sequence ('a', 'b'); choose with --sequence_column"],
        ),
        ({"x": [[0.5]]}, {"sequence_column": "x", "kind": "tokens"}, ["column 'x' is list<", "lists of whole numbers"]),
        (
            {"x": ["a"]},
            {"sequence_column": "x", "kind": "vectors"},
            ["column 'x' is string, but sequences of vectors must be lists"],
        ),
    ],
)
def test_columns_that_cannot_play_their_part_are_refused(tmp_path, load, columns, flags, parts):
    said = refusal(load, write_splits(tmp_path / "d", train=columns, valid=columns), **flags)
    assert_says(said, "train.parquet", *parts)


@pytest.mark.parametrize(
    ("columns", "flags", "parts"),
    [
        (
            {"tokens": [[1]]},
            {"tokenizer": "words"},
            ["--tokenizer is for text, but these are tokens: one sequence a row"],
        ),
        (
            {"text": ["a"]},
            {"tokenizer": "words", "vocabulary_size": 9},
            ["--vocabulary_size is for lists of token ids", "--minimum_count"],
        ),
        ({"x": [[0.5]]}, {"vocabulary_size": 9}, ["--vocabulary_size is for lists of token ids"]),
        ({"tokens": [[1]]}, {"params_map_path": "stats.csv"}, ["--params_map_path is for vectors and events"]),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(tmp_path, load, columns, flags, parts):
    assert_says(refusal(load, write_splits(tmp_path / "d", train=columns, valid=columns), **flags), *parts)


# Bad values: error, or the sequence is left out and counted

OTHER = {"tokens": [[0, 1, 2, 3]]}
TOKENS = pa.list_(pa.int64())

BAD_TOKENS: dict[str, tuple[list, pa.DataType, str]] = {
    "null row": ([[1], None, [2]], TOKENS, "a null in column 'tokens'"),
    "null inside": ([[1], [2, None], [2]], TOKENS, "a null inside a list of column 'tokens'"),
    "empty": ([[1], [], [2]], TOKENS, "an empty sequence in column 'tokens'"),
    "negative": ([[1], [2, -5], [2]], TOKENS, "a token id outside 0 .. 2147483647 in column 'tokens', -5"),
    "too large": ([[1], [2**31], [2]], TOKENS, "a token id outside 0 .. 2147483647 in column 'tokens', 2147483648"),
    "over 2^63": (
        [[1], [2**63 + 1], [2]],
        pa.list_(pa.uint64()),
        "a token id outside 0 .. 2147483647 in column 'tokens', 9223372036854775809",
    ),
    "null row, fixed": ([[1, 1], None, [2, 2]], pa.list_(pa.int8(), 2), "a null in column 'tokens'"),
}


@pytest.mark.parametrize("what", BAD_TOKENS)
@pytest.mark.parametrize("rows_per_block", [1, 1000])
def test_bad_tokens_are_refused_or_their_sequence_left_out(tmp_path, load, monkeypatch, what, rows_per_block):
    monkeypatch.setattr(reading, "BLOCK_ROWS", rows_per_block)
    values, kind, found = BAD_TOKENS[what]
    directory = write_splits(tmp_path / "d", train={"tokens": pa.array(values, kind)}, valid=OTHER)
    said = refusal(load, directory, vocabulary_size=None)
    assert_says(said, f"{directory}/train.parquet: row 1: {found}", "Correct it", "--bad_values drop")
    assert refusal(load, directory, bad_values="missing") == said
    write_splits(directory, valid={"tokens": [[1]]})
    data = load(directory, bad_values="drop")
    assert tokens(data.splits["train"]) == [value for value in values if value in ([1], [2], [1, 1], [2, 2])]
    what_was_left_out = found.rpartition(", ")[0] if "outside" in found else found
    [note] = [note for note in data.notes if "left out" in note]
    assert_says(note, "1 sequence left out (--bad_values drop): ", what_was_left_out)


def test_a_list_without_anything_but_nulls_has_no_type(tmp_path, load):
    directory = write_splits(tmp_path / "d", train={"tokens": pa.array([[None], [None]])}, valid={"tokens": [[1]]})
    assert_says(refusal(load, directory), "row 0: a null inside a list of column 'tokens'")
    write(directory / "train.parquet", {"tokens": pa.array([[], []])})
    assert_says(refusal(load, directory), "row 0: an empty sequence in column 'tokens'")


def test_ids_past_a_given_vocabulary_are_refused_or_left_out(tmp_path, load):
    directory = write_splits(tmp_path / "d", train={"tokens": [[1], [7, 5], [2]]}, valid={"tokens": [[1]]})
    said = refusal(load, directory, vocabulary_size=5)
    assert_says(said, "train.parquet: row 1: a token id outside 0 .. 4 of --vocabulary_size 5 in column 'tokens', 7")
    assert tokens(load(directory, vocabulary_size=5, bad_values="drop").splits["train"]) == [[1], [2]]


def test_a_validation_id_that_training_never_saw_is_refused_with_its_place(tmp_path, load, monkeypatch):
    write(tmp_path / "d/valid/a.parquet", {"tokens": [[1], [1, 2]]})
    write(tmp_path / "d/valid/b.parquet", {"tokens": [[1], [0, 3]]})
    write(tmp_path / "d/train.parquet", {"tokens": [[1, 2]]})
    for piece in (1, 2, 1 << 21):
        monkeypatch.setattr("seqvae.data.flat_file.read_pieces.__defaults__", (piece,))
        said = refusal(load, tmp_path / "d")
        assert_says(
            said, "valid/b.parquet: row 1: holds token id 3, which is past the vocabulary of 3 ids", "--vocabulary_size"
        )
    assert load(tmp_path / "d", vocabulary_size=4).description.vocabulary_size == 4


@pytest.mark.parametrize("tokenizer", ["words", "characters", "bytes"])
@pytest.mark.parametrize(
    ("bad", "found"), [(None, "a null in column 'text'"), ("", "an empty sequence in column 'text'")]
)
def test_bad_text_is_refused_or_left_out(tmp_path, load, tokenizer, bad, found):
    directory = write_splits(tmp_path / "d", train={"text": ["ab", bad, "ba"]}, valid={"text": ["a"]})
    assert_says(refusal(load, directory, tokenizer=tokenizer), f"train.parquet: row 1: {found}")
    data = load(directory, tokenizer=tokenizer, bad_values="drop")
    assert len(data.splits["train"]) == 2
    assert f"1 sequence left out (--bad_values drop): {found}" in data.notes


def test_a_text_of_white_space_has_no_words(tmp_path, load):
    directory = write_splits(tmp_path / "d", train={"text": ["ab", " \n\t"]}, valid={"text": ["a"]})
    assert_says(refusal(load, directory, tokenizer="words"), "row 1: an empty sequence in column 'text'")
    assert len(load(directory, tokenizer="characters").splits["train"]) == 2


def test_bytes_that_are_no_text_are_refused(tmp_path, load):
    offsets = pa.py_buffer(np.array([0, 1, 2, 4], np.int32))
    column = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"ab\xff\xfe"))
    directory = write_splits(tmp_path / "d", train={"text": column}, valid={"text": ["a"]})
    for tokenizer in ("words", "characters", "bytes"):
        said = refusal(load, directory, tokenizer=tokenizer)
        assert_says(said, "train.parquet: row 2: column 'text' holds bytes that are not UTF-8", SKIP)


FLOATS = pa.list_(pa.list_(pa.float64()))
GOOD = [[1.0, 2.0], [3.0, 4.0]]
BAD_VECTORS: dict[str, tuple[Any, str]] = {
    "null row": (None, "a null in column 'x'"),
    "empty": ([], "an empty sequence in column 'x'"),
}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("what", BAD_VECTORS)
@pytest.mark.parametrize("kind", [FLOATS, pa.list_(pa.list_(pa.float32(), 2))], ids=["list", "fixed"])
def test_bad_sequences_of_vectors_are_refused_or_left_out(tmp_path, load, what, kind):
    bad, found = BAD_VECTORS[what]
    directory = write_splits(
        tmp_path / "d", train={"x": pa.array([bad, GOOD, bad], kind)}, valid={"x": pa.array([GOOD], kind)}
    )
    assert_says(refusal(load, directory), f"train.parquet: row 0: {found}", "--bad_values drop")
    data = load(directory, bad_values="drop")
    assert vectors(data.splits["train"], data.description) == [GOOD]
    assert f"2 sequences left out (--bad_values drop): {found}" in data.notes


@pytest.mark.parametrize(
    ("bad", "shown"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf"), (1e39, "1e+39"), (-1e300, "-1e+300")]
)
@pytest.mark.parametrize("nested", [True, False], ids=["vectors", "numbers"])
def test_numbers_that_are_none_are_refused_left_out_or_missing(tmp_path, load, bad, shown, nested):
    train: list[Any] = [[1.0, 2.0], [3.0, bad, None], [bad]]
    wanted: list[Any] = [[1.0, 2.0], [3.0, None, None], [None]]
    if nested:
        train, wanted = ([[[v, 1.0] for v in sequence] for sequence in one] for one in (train, wanted))
    else:
        wanted = [[[v] for v in sequence] for sequence in wanted]
    kind = FLOATS if nested else pa.list_(pa.float64())
    directory = write_splits(tmp_path / "d", train={"x": pa.array(train, kind)}, valid={"x": pa.array(train[:1], kind)})
    said = refusal(load, directory)
    assert_says(said, f"train.parquet: row 1: column 'x' holds {shown}.", "--bad_values missing", "--bad_values drop")
    dropped = load(directory, bad_values="drop")
    assert vectors(dropped.splits["train"], dropped.description) == wanted[:1]
    assert "2 sequences left out (--bad_values drop): NaN or infinity in column 'x'" in dropped.notes
    missing = load(directory, bad_values="missing")
    assert vectors(missing.splits["train"], missing.description) == wanted
    assert "2 values counted as missing (--bad_values missing): NaN or infinity" in missing.notes


def test_a_sequence_with_several_faults_is_left_out_and_counted_once(tmp_path, load):
    columns = {
        "id": [1, 1, 2, 3],
        "time": pa.array([0.0, None, 0.0, 0.0]),
        "x": [NAN, NAN, 1.0, NAN],
        "y": [NAN, 1.0, 1.0, 1.0],
    }
    directory = write_splits(tmp_path / "d", train=columns, valid={"id": [9], "time": [0.0], "x": [1.0], "y": [1.0]})
    data = load(directory, bad_values="drop")
    assert ids(data.splits["train"]) == [2]
    assert [note for note in data.notes if "left out" in note] == [
        "1 sequence left out (--bad_values drop): no time (null, NaN or infinite) in column 'time'",
        "1 sequence left out (--bad_values drop): NaN or infinity in column 'x'",
    ]


@pytest.mark.parametrize(
    ("vectors_found", "message"),
    [
        (
            [[[1.0, 2.0]], [[1.0, 2.0], [3.0]]],
            "row 1: column 'x' holds a vector of 1 values, but those before it hold 2",
        ),
        ([[[1.0, 2.0]], [[1.0], [3.0]]], "row 1: column 'x' holds a vector of 1 values, but those before it hold 2"),
        ([[[]]], "row 0: column 'x' holds a vector without values"),
        ([[None, None], [None]], "row 0: column 'x' begins with nulls in place of vectors"),
        ([[[1.0]], [None], [[]]], "row 2: column 'x' holds a vector of 0 values, but those before it hold 1"),
    ],
)
@pytest.mark.parametrize("rows_per_block", [1, 1000])
def test_vectors_of_different_lengths_are_refused(tmp_path, load, monkeypatch, vectors_found, message, rows_per_block):
    monkeypatch.setattr(reading, "BLOCK_ROWS", rows_per_block)
    column = pa.array(vectors_found, FLOATS)
    directory = write_splits(tmp_path / "d", train={"x": column}, valid={"x": column})
    said = refusal(load, directory)
    assert_says(said, f"train.parquet: {message}" if "row 2" not in message else "row 2: column 'x' holds a vector")


def test_vectors_of_different_lengths_across_files_are_refused(tmp_path, load):
    two, three = (pa.array([[[1.0] * width]], pa.list_(pa.list_(pa.float32(), width))) for width in (2, 3))
    directory = write_splits(tmp_path / "d", train={"x": two}, valid={"x": three})
    assert_says(
        refusal(load, directory),
        "valid.parquet: row 0: column 'x' holds a vector of 3 values, but those before it hold 2",
    )


# Long tables


def table_with(**changes: Any) -> dict[str, Any]:
    return {
        "id": [1, 1, 2, 2],
        "time": [0.0, 1.0, 0.0, 1.0],
        "variable": list("abab"),
        "value": [1.0, 2.0, 3.0, 4.0],
    } | changes


VALID = {"id": [9, 9], "time": [0.0, 1.0], "variable": list("ab"), "value": [1.0, 2.0]}
BAD_ROWS = {
    "null id": ({"id": [1, 1, None, 2]}, "a null in the id column 'id'", "1 row left out", [1, 2]),
    "NaN id": ({"id": pa.array([1.0, 1.0, NAN, 2.0])}, "a null in the id column 'id'", "1 row left out", [1, 2]),
    "null variable": (
        {"variable": ["a", "b", None, "b"]},
        "a null in the variable column 'variable'",
        "1 sequence left out",
        [1],
    ),
    "NaN time": (
        {"time": [0.0, 1.0, NAN, 1.0]},
        "a time that is NaN or infinite in column 'time'",
        "1 sequence left out",
        [1],
    ),
    "infinite time": (
        {"time": [0.0, 1.0, INF, 1.0]},
        "a time that is NaN or infinite in column 'time'",
        "1 sequence left out",
        [1],
    ),
    "null set": ({"set_index": [0, 1, None, 1]}, "a null in column 'set_index'", "1 sequence left out", [1]),
}


@pytest.mark.parametrize("what", BAD_ROWS)
@pytest.mark.parametrize("rows_per_block", [1, 3, 1000])
def test_bad_rows_of_events_are_refused_or_left_out(tmp_path, load, monkeypatch, what, rows_per_block):
    monkeypatch.setattr(reading, "BLOCK_ROWS", rows_per_block)
    changes, found, count, left = BAD_ROWS[what]
    valid = VALID | ({"set_index": [0, 1]} if "set_index" in changes else {})
    directory = write_splits(tmp_path / "d", train=table_with(**changes), valid=valid)
    for policy in ("error", "missing"):
        said = refusal(load, directory, bad_values=policy)
        assert_says(said, f"train.parquet: row 2: {found}", "--bad_values drop")
    data = load(directory, bad_values="drop")
    assert ids(data.splits["train"]) == left
    assert f"{count} (--bad_values drop): {found}" in data.notes


def test_a_value_that_is_nan_or_infinite_is_refused_left_out_or_missing(tmp_path, load):
    directory = write_splits(tmp_path / "d", train=table_with(value=[1.0, None, NAN, -INF]), valid=VALID)
    said = refusal(load, directory)
    assert_says(said, "train.parquet: row 2: column 'value' holds nan.", "--bad_values missing", "--bad_values drop")
    dropped = load(directory, bad_values="drop")
    assert events(dropped.splits["train"], dropped.description) == [[(0.0, [("a", 1.0)]), (1.0, [("b", None)])]]
    assert "1 sequence left out (--bad_values drop): NaN or infinity in column 'value'" in dropped.notes
    missing = load(directory, bad_values="missing")
    assert by_id(missing.splits["train"], events(missing.splits["train"], missing.description))[2] == [
        (0.0, [("a", None)]),
        (1.0, [("b", None)]),
    ]
    assert "2 values counted as missing (--bad_values missing): NaN or infinity" in missing.notes


@pytest.mark.parametrize("missing", [None, NAN])
def test_a_vector_without_a_time_is_refused(tmp_path, load, missing):
    columns = {"id": [1, 1], "time": pa.array([0.0, missing]), "x": [1.0, 2.0]}
    directory = write_splits(tmp_path / "d", train=columns, valid={"id": [2], "time": [0.0], "x": [1.0]})
    assert_says(refusal(load, directory), "train.parquet: row 1: no time (null, NaN or infinite) in column 'time'")


@pytest.mark.parametrize(
    ("id_column", "shown"),
    [
        (pa.array([1.0, 1.5, 2.0, 2.0]), "1.5, which is not a signed 64-bit whole number"),
        (pa.array([1, 2**63, 2, 2], pa.uint64()), "9223372036854775808, which is not a signed 64-bit whole number"),
        (pa.array([1.0, INF, 2.0, 2.0]), "inf, which is not a signed 64-bit whole number"),
    ],
)
@pytest.mark.parametrize("rows_per_block", [1, 1000])
def test_ids_that_are_no_whole_numbers_are_refused(tmp_path, load, monkeypatch, id_column, shown, rows_per_block):
    monkeypatch.setattr(reading, "BLOCK_ROWS", rows_per_block)
    directory = write_splits(tmp_path / "d", train=table_with(id=id_column), valid=VALID)
    said = refusal(load, directory, bad_values="drop")
    assert_says(said, f"train.parquet: row 1: column 'id' holds {shown}", "Correct it", SKIP)


def test_a_table_of_null_ids_alone_leaves_nothing(tmp_path, load):
    directory = write_splits(tmp_path / "d", train=table_with(id=pa.array([None] * 4, pa.int64())), valid=VALID)
    assert_says(refusal(load, directory), "train.parquet: row 0: a null in the id column 'id'")
    assert_says(refusal(load, directory, bad_values="drop"), "no sequence is left for the train split")


@pytest.mark.parametrize("rows_per_block", [1, 2, 3, 1000])
def test_interleaved_ids_can_be_refused_with_the_first_row_that_is_apart(tmp_path, load, monkeypatch, rows_per_block):
    monkeypatch.setattr(reading, "BLOCK_ROWS", rows_per_block)
    columns = {"time": [0.0, 1.0], "variable": ["a", "b"], "value": [1.0, 2.0]}
    write(tmp_path / "d/train/a.parquet", {"id": pa.array([None, 1], pa.int64()), **columns})
    write(tmp_path / "d/train/b.parquet", {"id": [1, 2], **columns})
    write(tmp_path / "d/train/c.parquet", {"id": [3, 1], **columns})
    write(tmp_path / "d/valid.parquet", VALID)
    said = refusal(load, tmp_path / "d", unsorted="error", bad_values="drop")
    assert_says(
        said,
        "c.parquet: row 1: the id in column 'id' occurred before",
        "Sort the rows by id and time",
        "--unsorted sort",
    )


def test_time_that_goes_backwards_can_be_refused(tmp_path, load):
    directory = write_splits(tmp_path / "d", train=table_with(time=[0.0, 1.0, 5.0, 2.5]), valid=VALID)
    said = refusal(load, directory, unsorted="error")
    assert_says(said, "train.parquet: row 3: time goes backwards in column 'time', from 5 to 2.5", "--unsorted sort")
    assert "1 row earlier than the row before in the same sequence: sorted by time" in load(directory).notes


def test_sets_that_are_not_numbered_in_order_of_time_are_refused(tmp_path, load):
    directory = write_splits(
        tmp_path / "d", train=table_with(set_index=[0, 1, 1, 0]), valid={**VALID, "set_index": [0, 1]}
    )
    said = refusal(load, directory)
    assert_says(
        said, "train.parquet: row 2: the set that column 'set_index' numbers here begins 1 before", "column 'time'"
    )


def test_a_bad_time_does_not_hide_behind_the_order_of_sets(tmp_path, load):
    train = table_with(set_index=[0, 1, 0, 1], time=[0.0, 1.0, 5.0, NAN])
    directory = write_splits(tmp_path / "d", train=train, valid={**VALID, "set_index": [0, 1]})
    assert ids(load(directory, bad_values="drop").splits["train"]) == [1]


def test_a_label_that_changes_within_a_sequence_is_refused(tmp_path, load):
    directory = write_splits(
        tmp_path / "d", train=table_with(label=["u", "u", "v", "w"]), valid={**VALID, "label": ["u", "u"]}
    )
    said = refusal(load, directory, label_column="label")
    assert_says(
        said, "train.parquet: row 3: column 'label' holds 'w', but 'v' where the same sequence begins", "--label_path"
    )


# Splits that overlap


@pytest.mark.parametrize("form", ["table", "rows", "files"])
def test_a_sequence_in_two_splits_is_refused_with_both_places(tmp_path, load, form):
    if form == "table":
        directory = write_splits(tmp_path / "d", train=table_with(), valid={**VALID, "id": [2, 2]})
        places = ["id 2 of column 'id'", "train.parquet: row 2", "valid.parquet: row 0"]
    elif form == "rows":
        one, other = {"id": ["p", "q"], "tokens": [[1], [2]]}, {"id": ["r", "q"], "tokens": [[1], [2]]}
        directory = write_splits(tmp_path / "d", train=one, valid=other)
        places = ["id 'q' of column 'id'", "train.parquet: row 1", "valid.parquet: row 1"]
    else:
        directory = tmp_path / "d"
        for path in ("train/7.parquet", "train/8.parquet", "valid/7.0.parquet"):
            write(directory / path, {"minute": [0.0], "variable": ["a"], "value": [1.0]})
        places = ["id 7 (", "train/7.parquet: row 0", "valid/7.0.parquet: row 0"]
    said = refusal(load, directory)
    assert_says(said, "1 sequence in both train and valid, such as", *places, "seen in training", "--id_column")


def test_a_leak_between_validation_and_test_is_refused_too(tmp_path, load):
    columns = {"tokens": [[1], [1]]}
    directory = write_splits(
        tmp_path / "d", train={"id": [1, 2], **columns}, valid={"id": [3, 4], **columns}, test={"id": [4, 5], **columns}
    )
    assert_says(refusal(load, directory), "1 sequence in both", "valid", "test", "id 4")


# MEDS


def meds(directory: Path, splits: dict[str, Any], *, subjects: tuple[int, ...] = (1, 2, 3)) -> Path:
    time = [dt.datetime(2020, 1, 1)] * len(subjects)
    columns = {
        "subject_id": list(subjects),
        "time": time,
        "code": ["a"] * len(subjects),
        "numeric_value": [1.0] * len(subjects),
    }
    write(directory / "data/0.parquet", columns)
    write(directory / "metadata/subject_splits.parquet", splits)
    return directory


@pytest.mark.parametrize(
    ("splits", "parts"),
    [
        (
            {"subject_id": [1, 2], "split": ["train", "tuning"]},
            ["0.parquet: row 2: subject 3 is missing in", "Add it there"],
        ),
        (
            {"subject_id": [1, 2, 3], "split": ["train", "tuning", "x"]},
            ["row 2: split 'x' is unknown", "tuning, held_out"],
        ),
        ({"subject_id": [1, 2, 2], "split": ["train"] * 3}, ["subject 2 occurs more than once"]),
        ({"subject": [1, 2], "split": ["train"] * 2}, ["has no column 'subject_id'; did you mean 'subject'?"]),
        ({"subject_id": [1, 2, 3], "split": ["train"] * 3}, ["no sequence is left for the valid split"]),
    ],
)
def test_faults_of_the_meds_table_of_splits_are_refused(tmp_path, load, splits, parts):
    assert_says(refusal(load, meds(tmp_path / "d", splits)), *parts)


# Names that would command a terminal or break a format


@pytest.mark.parametrize("name", ["$x$", "{tokens}", "größe 変", "a b", "\x1b[2J"])
def test_odd_names_come_through_in_messages_and_notes(tmp_path, load, name):
    columns = {name: pa.array([[1], None, [2, 3]], TOKENS)}
    directory = write_splits(tmp_path / "d", train=columns, valid={name: [[1]]})
    assert_says(refusal(load, directory), f"row 1: a null in column {name!r}")
    assert (
        f"1 sequence left out (--bad_values drop): a null in column {name!r}"
        in load(directory, bad_values="drop").notes
    )


def test_notes_are_kept_with_the_cache(tmp_path, load):
    columns = {"tokens": pa.array([[1], None], TOKENS)}
    directory = write_splits(tmp_path / "d", train=columns, valid={"tokens": [[1]]})
    first, second = load(directory, bad_values="drop"), load(directory, bad_values="drop")
    assert first.notes == second.notes == tuple(json.loads((second.path / "meta.json").read_text())["notes"])
    assert len(first.notes) == 1


def test_a_data_frame_with_missing_lists_is_refused_with_the_row(tmp_path, load):
    frame = pd.DataFrame({"tokens": [[1], None, [2]]})
    (tmp_path / "d").mkdir()
    for split in ("train", "valid"):
        frame.to_parquet(tmp_path / f"d/{split}.parquet")
    assert_says(refusal(load, tmp_path / "d"), "row 1: a null in column 'tokens'")


def test_float_ids_that_stand_for_several_numbers_are_refused(tmp_path, load):
    ids = pa.array([1.0, 16_777_216.0], pa.float32())
    write(tmp_path / "train.parquet", {"id": ids, "tokens": [[1], [2]]})
    with pytest.raises(DataError, match=r"train.parquet: row 1: column 'id' holds 16777216.0, but float is exact only"):
        load(tmp_path)


def test_a_value_that_float32_cannot_hold_once_normalised_is_refused(tmp_path, load):
    write(tmp_path / "train.parquet", {"id": [1, 2], "values": [[1e-15], [2e-15]]})
    write(tmp_path / "valid.parquet", {"id": [3], "values": [[1e26]]})
    with pytest.raises(DataError, match=r"valid: 'values\[0\]' is 1e\+26 once, 2e\+41 standard deviations"):
        load(tmp_path)


def test_running_out_of_memory_is_not_the_files_fault(tmp_path, load, monkeypatch):
    write(tmp_path / "train.parquet", {"id": [1, 2], "tokens": [[1], [2]]})
    monkeypatch.setattr(reading, "_rows_per_batch", lambda *_: (_ for _ in ()).throw(pa.ArrowMemoryError("malloc")))
    with pytest.raises(MemoryError):
        load(tmp_path, on_bad_files="skip")
