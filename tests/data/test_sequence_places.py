"""Where sequences came from: ids, files and row groups, whatever has become of the files since."""

from pathlib import Path

import numpy as np
import pytest

from seqvae.data.dataset import origin_of
from tests.support.parquet_files import Load, write


def write_two_files(directory: Path) -> Path:
    """Eleven sequences of training in two files, the second with row groups of two; one sequence to validate."""
    for name, first, number in (("a", 0, 5), ("b", 5, 6)):
        rows = {"id": [f"s{one}" for one in range(first, first + number)], "tokens": [[1, 2, 3]] * number}
        write(directory / "train" / f"{name}.parquet", rows, row_group_size=2 if name == "b" else 5)
    write(directory / "valid" / "c.parquet", {"id": ["v0"], "tokens": [[3, 2]]})
    return directory


def test_sequences_are_named_with_their_files_and_row_groups(load: Load, tmp_path):
    train = load(write_two_files(tmp_path / "data")).splits["train"]
    assert origin_of(train, np.array([10, 0, 6])) == (
        f"sequences s10, s0, s6 of the train split ({tmp_path}/data/train/a.parquet: row group 0; "
        f"{tmp_path}/data/train/b.parquet: row groups 0, 2)"
    )
    assert origin_of(train, np.array([7])) == (
        f"sequence s7 of the train split ({tmp_path}/data/train/b.parquet: row group 1)"
    )


def test_an_empty_batch_holds_no_sequences(load: Load, tmp_path):
    assert origin_of(load(write_two_files(tmp_path / "data")).splits["train"], np.empty(0, np.int64)) == "no sequences"


def test_windows_are_named_by_the_sequence_that_they_were_cut_from(load: Load, tmp_path):
    data = load(write_two_files(tmp_path / "data"), max_sequence_length=2, long_sequences="split")
    assert origin_of(data.splits["train"], np.array([11])).startswith("sequence s5 of the train split")


def test_rows_stand_for_row_groups_where_a_file_is_gone_or_damaged_or_another(load: Load, tmp_path):
    directory = write_two_files(tmp_path / "data")
    train = load(directory).splits["train"]
    (directory / "train" / "a.parquet").write_bytes(b"PAR1 no more")
    write(directory / "train" / "b.parquet", {"id": ["s5"], "tokens": [[1, 2]]})
    expected = f"({directory}/train/a.parquet: row 4; {directory}/train/b.parquet: rows 1, 5)"
    assert origin_of(train, np.array([4, 6, 10])).endswith(expected)
    (directory / "train" / "a.parquet").unlink()
    assert origin_of(train, np.array([4, 6, 10])).endswith(expected)


def test_files_that_were_skipped_do_not_shift_the_names_of_others(load: Load, tmp_path):
    directory = write_two_files(tmp_path / "data")
    (directory / "train" / "Z.parquet").write_bytes(b"no Parquet")  # the first by name
    write(directory / "train" / "aa.parquet", {"id": ["s0"], "tokens": [[1]]}, row_group_size=1)
    (directory / "train" / "aa.parquet").write_bytes(b"no Parquet either")
    train = load(directory, on_bad_files="skip").splits["train"]
    assert origin_of(train, np.array([0, 6])).endswith(
        f"({directory}/train/a.parquet: row group 0; {directory}/train/b.parquet: row group 0)"
    )


def test_many_sequences_of_many_files_stay_one_short_line(load: Load, tmp_path):
    for file in range(9):
        write(tmp_path / f"data/train/{file}.parquet", {"tokens": [[1, 2, 3]] * 20}, row_group_size=1)
    write(tmp_path / "data/valid/0.parquet", {"tokens": [[1, 2]]})
    place = origin_of(load(tmp_path / "data").splits["train"], np.arange(180))
    assert place.startswith("sequences 0, 1, 2, 3, 4, ... (180 in all) of the train split (")
    assert "/0.parquet: row groups 0, 1, 2, 3, 4, ... (20 in all); " in place
    assert place.endswith("; and 6 more files)")


@pytest.mark.parametrize("gone", ["train/sequences.arrow", "meta.json"])
def test_sequences_have_numbers_where_the_cache_cannot_be_read(gone, load: Load, tmp_path):
    train = load(write_two_files(tmp_path / "data")).splits["train"]
    (train.directory.parent / gone).unlink()
    assert origin_of(train, np.array([3, 8])).startswith("sequences 3, 8 of the train split by number, as ")
