"""Data of other libraries, each with the real one: they become the same Parquet as the same rows in a file, in bounded memory."""

from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from seqvae.data import frames
from seqvae.data.frames import path_of
from seqvae.errors import DataError

TABLE = pa.table({"id": [f"s{row}" for row in range(50)], "tokens": [[row % 7] * (1 + row % 5) for row in range(50)]})


@pytest.fixture(scope="session")
def polars() -> Any:
    return pytest.importorskip("polars", reason="polars is not installed")


@pytest.fixture(scope="session")
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="the library datasets is not installed (extra bench)")


@pytest.fixture
def stored(tmp_path):
    """Return the table that data are stored as."""

    def store(data: Any) -> pa.Table:
        return pq.read_table(path_of(data, str(tmp_path / "cache")))

    return store


# --- pyarrow -------------------------------------------------------------------------------------------------------------


def test_a_pyarrow_dataset_of_several_files_and_a_scanner_of_it_are_read(tmp_path, stored):
    for start in range(0, 50, 20):
        pq.write_table(TABLE.slice(start, 20), tmp_path / f"{start:02d}.parquet")
    dataset = pads.dataset(tmp_path, format="parquet")
    assert stored(dataset).equals(TABLE)
    filtered = dataset.scanner(filter=pads.field("id") == "s7", columns=["tokens"])
    assert stored(filtered).to_pylist() == [{"tokens": [0, 0, 0]}]
    assert stored(pads.dataset(TABLE)).equals(TABLE)


def test_the_same_rows_are_the_same_file_however_they_were_cut(tmp_path):
    whole = path_of(TABLE, str(tmp_path))
    reader = pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches(max_chunksize=7))
    assert path_of(reader, str(tmp_path)) == whole
    assert path_of(pads.dataset(TABLE), str(tmp_path)) == whole


def test_a_table_in_batches_passes_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "GROUP_BYTES", 1 << 16)
    batch = pa.record_batch({"tokens": [list(range(100))] * 100})
    alive = []

    def batches():
        for _ in range(200):
            alive.append(pa.total_allocated_bytes())
            yield pa.record_batch({"tokens": pa.array([list(range(100))] * 100)})

    before = pa.total_allocated_bytes()
    path = path_of(pa.RecordBatchReader.from_batches(batch.schema, batches()), str(tmp_path))
    assert pq.ParquetFile(path).metadata.num_rows == 20_000
    assert max(alive) - before < 3 * (1 << 20)  # of 16 MB


def test_row_groups_end_at_their_bounds(monkeypatch, tmp_path):
    monkeypatch.setattr(frames, "GROUP_ROWS", 20)
    metadata = pq.ParquetFile(path_of(TABLE, str(tmp_path))).metadata
    assert [metadata.row_group(place).num_rows for place in range(metadata.num_row_groups)] == [20, 20, 10]


def test_a_dataset_without_rows_and_one_whose_file_is_gone_are_refused(tmp_path):
    with pytest.raises(DataError, match="the data hold no rows"):
        path_of(pads.dataset(TABLE.slice(0, 0)), str(tmp_path / "cache"))
    pq.write_table(TABLE, tmp_path / "one.parquet")
    dataset = pads.dataset(tmp_path / "one.parquet")
    (tmp_path / "one.parquet").unlink()
    with pytest.raises(DataError, match="data of type FileSystemDataset cannot be read as a table"):
        path_of(dataset, str(tmp_path / "cache"))
    assert list((tmp_path / "cache" / "frames").iterdir()) == []


# --- Splits --------------------------------------------------------------------------------------------------------------


def test_tables_by_split_are_splits(tmp_path, load):
    splits = {"train": TABLE.slice(0, 30), "validation": TABLE.slice(30, 10).to_pandas(), "test": TABLE.slice(40)}
    path = path_of(splits, str(tmp_path))
    assert path_of(dict(reversed(splits.items())), str(tmp_path)) == path
    assert path_of(splits | {"test": TABLE.slice(41)}, str(tmp_path)) != path
    assert {name: len(split) for name, split in load(path).splits.items()} == {"train": 30, "valid": 10, "test": 10}


def test_columns_by_name_are_a_table(stored):
    assert stored({"tokens": [[1], [2, 3]]}).to_pylist() == [{"tokens": [1]}, {"tokens": [2, 3]}]


# --- polars --------------------------------------------------------------------------------------------------------------


def test_a_lazy_frame_is_computed_and_stored_as_its_rows(tmp_path, polars):
    frame = polars.from_arrow(TABLE)
    path = path_of(frame.lazy(), str(tmp_path))
    assert path_of(frame.lazy(), str(tmp_path)) == path
    assert pq.read_table(path).to_pylist() == TABLE.to_pylist()
    pq.write_table(TABLE, tmp_path / "one.parquet")
    scanned = polars.scan_parquet(tmp_path / "one.parquet").filter(polars.col("id") != "s3")
    rows = [row for row in TABLE.to_pylist() if row["id"] != "s3"]
    assert pq.read_table(path_of(scanned, str(tmp_path))).to_pylist() == rows
    assert len(list((tmp_path / "frames").iterdir())) == 2


def test_lists_of_text_and_categories_of_polars_are_stored(stored, polars):
    words = polars.DataFrame({"code": ["a", "b", "a"], "words": [["x"], ["y", "z"], []]})
    words = words.with_columns(
        polars.col("code").cast(polars.Categorical), kind=polars.col("code").cast(polars.Enum(["a", "b"]))
    )
    assert stored(words).to_pylist() == stored(words.lazy()).to_pylist() == words.rows(named=True)


# --- datasets ------------------------------------------------------------------------------------------------------------


def test_a_dataset_keeps_its_rows_in_their_order_and_the_names_of_its_classes(tmp_path, load, datasets):
    features = datasets.Features(
        {"tokens": datasets.Sequence(datasets.Value("int64")), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {"tokens": TABLE["tokens"].to_pylist(), "label": [row % 2 for row in range(50)]}
    data = datasets.Dataset.from_dict(rows, features=features)
    shuffled = data.shuffle(seed=1).with_format("numpy")
    cached = load(path_of(shuffled, str(tmp_path)), label_column="label")
    assert cached.description.classes == ("cat", "dog")
    table = pq.read_table(path_of(shuffled, str(tmp_path)))
    assert table["tokens"].to_pylist() == [row["tokens"] for row in data.shuffle(seed=1)]
    assert table["tokens"].to_pylist() != rows["tokens"]
    by_split = load(path_of(data.train_test_split(0.2, seed=1), str(tmp_path)))
    assert {name: len(split) for name, split in by_split.splits.items()} == {"train": 37, "valid": 3, "test": 10}


def test_an_iterable_dataset_is_read_once_and_in_pieces(stored, datasets, monkeypatch):
    monkeypatch.setattr(frames, "BATCH_ROWS", 7)

    def rows():
        yield from TABLE.to_pylist()

    assert stored(datasets.IterableDataset.from_generator(rows)).to_pylist() == TABLE.to_pylist()
    assert stored(datasets.Dataset.from_dict(TABLE.to_pydict()).to_iterable_dataset()).to_pylist() == TABLE.to_pylist()


def test_splits_of_other_names_are_refused(tmp_path, datasets):
    data = datasets.Dataset.from_dict(TABLE.to_pydict())
    with pytest.raises(DataError, match="'unsupervised' is the name of no split"):
        path_of(datasets.DatasetDict({"train": data, "unsupervised": data}), str(tmp_path))
