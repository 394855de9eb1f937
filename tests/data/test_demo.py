"""The demo's files: schemas and contents, equal for equal seeds, written once, whole or not at all, in seconds."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.data import cache, demo
from seqvae.data.cache import open_cache, prepare_cache
from seqvae.data.demo import (
    ALPHABET,
    ILLNESSES,
    LANGUAGES,
    SHAPES,
    VARIABLES,
    LengthLaw,
    read_tokens,
    read_truth,
    write_demo,
)
from seqvae.data.description import FittedPreprocessing, Kind

ROOT = Path(demo.__file__).parents[2]
KINDS: tuple[Kind, ...] = ("tokens", "vectors", "events")
FILES = ["test.parquet", "train.parquet", "truth.json", "valid.parquet"]
SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Small demo data of each kind."""
    directory = tmp_path_factory.mktemp("demo")
    return {kind: write_demo(directory, kind, sequences=300, mean_length=12) for kind in KINDS}


def drawn_again(folder, number):
    """The sample that a split of `folders` was written from."""
    return read_truth(folder).sample({1: 300, 2: 30, 3: 30}[number], np.random.default_rng([0, number]))


def in_new_process(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, check=False)


def test_tokens_read_back_with_the_documented_schema(folders):
    wanted = {"id": pa.int64(), "text": pa.string(), "tokens": pa.list_(pa.uint8()), "label": pa.string()}
    for number, split in enumerate(SPLITS, start=1):
        path = folders["tokens"] / f"{split}.parquet"
        schema = pq.read_schema(path)
        assert {name: schema.field(name).type for name in schema.names} == wanted | {"factor": pa.float64()}
        for read, drawn in zip(read_tokens(path), drawn_again(folders["tokens"], number), strict=True):
            np.testing.assert_array_equal(read, drawn)


def test_texts_are_the_tokens_in_letters_and_labels_their_languages(folders):
    table = pq.read_table(folders["tokens"] / "valid.parquet")
    texts = ["".join(ALPHABET[token] for token in tokens) for tokens in table["tokens"].to_pylist()]
    assert table["text"].to_pylist() == texts
    drawn = drawn_again(folders["tokens"], 2)
    assert table["label"].to_pylist() == [LANGUAGES[one] for one in drawn.classes_N]


def test_drawings_read_back_as_a_long_table_with_nulls_where_missing(folders):
    table = pq.read_table(folders["vectors"] / "valid.parquet").combine_chunks()
    wanted = {"id": pa.int64(), "step": pa.int64()} | dict.fromkeys(("x", "y", "pressure"), pa.float32())
    assert {field.name: field.type for field in table.schema} == wanted | {"label": pa.string()}
    values_SD = np.stack([table[name].to_numpy(zero_copy_only=False) for name in ("x", "y", "pressure")], axis=1)
    drawn = drawn_again(folders["vectors"], 2)
    nulls = sum(table[name].null_count for name in ("x", "y", "pressure"))
    assert nulls == np.isnan(drawn.values_SD).sum() > 0
    np.testing.assert_array_equal(values_SD, drawn.values_SD)
    lengths_N = np.diff(drawn.offsets_N1)
    np.testing.assert_array_equal(table["id"], np.repeat(np.arange(300, 330), lengths_N))
    np.testing.assert_array_equal(table["step"], np.concatenate([np.arange(length) for length in lengths_N]))
    assert table["label"].to_pylist() == [SHAPES[one] for one in np.repeat(drawn.classes_N, lengths_N)]


def test_events_read_back_as_a_long_table(folders):
    table = pq.read_table(folders["events"] / "valid.parquet")
    wanted = {"ts_id": pa.int64(), "minute": pa.float64(), "variable": pa.string(), "value": pa.float32()}
    assert {field.name: field.type for field in table.schema} == wanted | {"label": pa.string()}
    drawn = drawn_again(folders["events"], 2)
    frame = table.to_pandas()
    assert len(frame) == drawn.present_SV.sum()
    steps = frame.groupby(["ts_id", "minute"], sort=False)
    assert steps.ngroups == len(drawn.gaps_S)
    minutes = steps.size().reset_index()
    gaps = minutes.groupby("ts_id")["minute"].diff().fillna(0.0)
    np.testing.assert_allclose(gaps, drawn.gaps_S, rtol=1e-6)
    present = frame["variable"].to_numpy()[:, None] == np.array(VARIABLES)
    np.testing.assert_array_equal(np.add.reduceat(present, steps.ngroup().drop_duplicates().index), drawn.present_SV)
    np.testing.assert_array_equal(frame["value"], drawn.values_SV[drawn.present_SV])
    assert set(frame["variable"][frame["value"].isna()]) == set(VARIABLES[-3:])


def test_each_event_names_the_illness_of_its_patient(folders):
    frame = pq.read_table(folders["events"] / "valid.parquet").to_pandas()
    drawn = drawn_again(folders["events"], 2)
    assert (frame.groupby("ts_id")["label"].nunique() == 1).all()
    assert frame.groupby("ts_id")["label"].first().tolist() == [ILLNESSES[one] for one in drawn.classes_N]


@pytest.mark.parametrize(("kind", "names"), [("vectors", ["id", "size", "slant"]), ("events", ["ts_id", "severity"])])
def test_factors_stand_beside_long_tables(folders, kind, names):
    factors = pd.read_csv(folders[kind] / "factors.csv")
    assert list(factors) == names
    samples = [drawn_again(folders[kind], number) for number in (1, 2, 3)]
    np.testing.assert_array_equal(factors[names[0]], np.arange(360))
    np.testing.assert_allclose(factors[names[1:]], np.concatenate([sample.factors_NF for sample in samples]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_is_in_two_splits(folders, kind):
    tables = [pq.read_table(folders[kind] / f"{split}.parquet") for split in SPLITS]
    ids = [set(table.column(0).to_pylist()) for table in tables]
    assert [len(one) for one in ids] == [300, 30, 30]
    assert len(set.union(*ids)) == 360


def test_a_flipped_bit_in_a_page_is_noticed(folders, tmp_path):
    damaged = bytearray((folders["tokens"] / "train.parquet").read_bytes())
    place = pq.read_metadata(folders["tokens"] / "train.parquet").row_group(0).column(2).data_page_offset
    damaged[place + 200] ^= 1
    (tmp_path / "train.parquet").write_bytes(damaged)
    with pytest.raises(OSError, match="CRC"):
        read_tokens(tmp_path / "train.parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_the_truth_comes_back_from_its_file(folders, kind):
    truth = demo.TRUTHS[kind].draw(np.random.default_rng([0, 0]), LengthLaw(mean=12))
    samples = [process.sample(50, np.random.default_rng(7)) for process in (truth, read_truth(folders[kind]))]
    for one, other in zip(*samples, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_every_byte(folders, tmp_path, kind):
    again = write_demo(tmp_path, kind, sequences=300, mean_length=12)
    other = write_demo(tmp_path, kind, sequences=300, mean_length=12, seed=1)
    for file in folders[kind].iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
    assert (other / "train.parquet").read_bytes() != (again / "train.parquet").read_bytes()


def test_a_second_call_returns_what_exists(tmp_path, monkeypatch):
    first = write_demo(tmp_path, "tokens", sequences=20)
    monkeypatch.setattr(demo, "_write_files", lambda *_: pytest.fail("written again"))
    assert write_demo(tmp_path, "tokens", sequences=20) == first


def test_a_new_version_of_the_generator_writes_new_data(tmp_path, monkeypatch):
    first = write_demo(tmp_path, "tokens", sequences=20)
    monkeypatch.setattr(demo, "VERSION", demo.VERSION + 1)
    assert write_demo(tmp_path, "tokens", sequences=20) != first


def test_a_killed_generator_leaves_nothing_half_written(tmp_path):
    """Killed when the first file is written; the next call starts again and removes the remains."""
    code = "import os, sys, pathlib; from seqvae.data import demo\n"
    code += "write_table = demo.pq.write_table\n"
    code += "demo.pq.write_table = lambda *a, **k: (write_table(*a, **k), os.kill(os.getpid(), 9))\n"
    code += "demo.write_demo(pathlib.Path(sys.argv[1]), 'tokens', sequences=20)"
    assert in_new_process(code, tmp_path).returncode != 0
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    folder = write_demo(tmp_path, "tokens", sequences=20)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_a_failing_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_demo(tmp_path, "tokens", sequences=20)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_simultaneous_calls_write_the_data_once(tmp_path, monkeypatch):
    calls = []
    write_files = demo._write_files

    def counting(*arguments):
        calls.append(arguments)
        write_files(*arguments)

    monkeypatch.setattr(demo, "_write_files", counting)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: write_demo(tmp_path, "tokens", sequences=2_000), range(4)))
    assert len(calls) == len(folders) == 1
    assert sorted(path.name for path in folders.pop().iterdir()) == FILES


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_data_are_written_in_seconds(tmp_path, kind):
    start = time.perf_counter()
    folder = write_demo(tmp_path, kind)
    assert time.perf_counter() - start < 10
    sequences = pq.read_metadata(folder / "train.parquet").num_rows
    assert sequences == 20_000 or kind != "tokens"


@pytest.mark.parametrize("wrong", [{"sequences": 0}, {"mean_length": 1}])
def test_impossible_sizes_are_refused_before_anything_is_written(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"sequence|length"):
        write_demo(tmp_path / "new", "tokens", **wrong)
    assert not (tmp_path / "new").exists()


def test_demo_data_need_no_torch():
    assert in_new_process("import sys, seqvae.data.demo; sys.exit('torch' in sys.modules)").returncode == 0


def test_a_demo_of_text_is_read_letter_by_letter_or_as_the_numbers_of_its_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "write_demo", partial(write_demo, sequences=100, mean_length=10))

    def description_of(preprocessing=None, **flags):
        path = prepare_cache(SourceSettings(**flags), CacheSettings(cache_dir=str(tmp_path)), preprocessing)
        return open_cache(path, LengthSettings()).description

    letters, numbers = description_of(label_column="label"), description_of(sequence_column="tokens")
    assert letters.tokenizer == "characters"
    assert set(letters.symbols[1:]) <= set(ALPHABET)
    assert letters.classes == LANGUAGES
    assert (numbers.tokenizer, numbers.vocabulary_size) == (None, 32)
    # What a network was trained on, on which the form of the data depends that it is given.
    for known in (letters, numbers):
        assert description_of(FittedPreprocessing(known, pools_are_whole=False)).symbols == known.symbols
