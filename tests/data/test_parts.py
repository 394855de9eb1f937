"""A cache that is built in parts: the same bytes whoever reads the parts, and what one part alone would give."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqvae.config.data import CacheSettings, SourceSettings
from seqvae.data.building import parts as parts_module
from seqvae.data.building.parts import PARTS, Each, Part, Reading, Request, side_by_side
from seqvae.data.cache import prepare_cache
from seqvae.data.dataset import read_meta
from seqvae.errors import DataError, StorageError
from tests.support.parquet_files import write

SMALL_PART = 20_000


def write_tokens(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    for number in range(3):
        lists = [random.integers(0, 300, random.integers(1, 40)).astype(np.int32) for _ in range(700)]
        write(folder / f"{number}.parquet", {"tokens": lists}, row_group_size=100)
    return {}


def write_text(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    words = np.array([f"word{number}" for number in range(500)])
    for number in range(3):
        texts = [" ".join(random.choice(words, random.integers(1, 12))) for _ in range(700)]
        write(
            folder / f"{number}.parquet",
            {"id": [f"{number}-{row}" for row in range(700)], "text": texts},
            row_group_size=100,
        )
    return {"tokenizer": "words", "minimum_count": 2, "test_fraction": 0.1}


def write_vectors(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    for number in range(3):
        lists = [random.normal(number, 1 + number, (random.integers(1, 9), 3)).tolist() for _ in range(400)]
        lists[5][0][1] = float("nan")
        write(folder / f"{number}.parquet", {"values": lists}, row_group_size=100)
    return {"bad_values": "missing"}


def write_events(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    """Two sequences that go on from one file to the next, and a variable that comes in the last file alone."""
    ids = np.repeat(np.arange(900), random.integers(1, 20, 900))
    variables = np.array(["hr", "bp", "rare"])[np.minimum(random.integers(0, 2, len(ids)) + (ids > 890), 2)]
    minutes = np.arange(len(ids)) * 1.5
    table = pa.table({"id": ids, "minute": minutes, "variable": variables, "value": random.gamma(2.0, 30.0, len(ids))})
    cuts = [int(np.searchsorted(ids, first)) + (first in (300, 500)) for first in range(0, 1000, 100)]
    for number, (start, stop) in enumerate(pairwise(cuts)):
        write(folder / f"{number}.parquet", table.slice(start, stop - start))
    return {}


WRITERS = {"tokens": write_tokens, "text": write_text, "vectors": write_vectors, "events": write_events}


@pytest.fixture(params=WRITERS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> SourceSettings:
    options = WRITERS[request.param](tmp_path / "data", np.random.default_rng(0))
    return SourceSettings(data_dir=str(tmp_path / "data"), **options)


def built(source: SourceSettings, folder: Path, workers: int = 1) -> Path:
    with side_by_side(workers) as each:
        return prepare_cache(source, CacheSettings(cache_dir=str(folder)), each=each)


def content_of(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*")) if path.is_file()}


def test_parts_make_the_same_bytes_whoever_reads_them(source, tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_BYTES", SMALL_PART)
    requests: list[Sequence[Request]] = []

    def read_parts(reading: Reading, planned: Sequence[Request], each: Each) -> list[Part]:
        requests.append(planned)
        return parts_module.read_parts(reading, planned, each)

    monkeypatch.setattr("seqvae.data.building.builder.read_parts", read_parts)
    one, two = built(source, tmp_path / "one"), built(source, tmp_path / "two", workers=2)
    assert len(requests[0]) > 3
    assert one.name == two.name
    assert content_of(one) == content_of(two)
    assert not (one / PARTS).exists()


def test_parts_hold_what_a_single_one_would(source, tmp_path, monkeypatch):
    whole = built(source, tmp_path / "whole")
    monkeypatch.setattr(parts_module, "PART_BYTES", SMALL_PART)
    joined = built(source, tmp_path / "joined")
    metas = [read_meta(cache) for cache in (whole, joined)]
    descriptions = [meta.pop("description") for meta in metas]
    for name, expected in descriptions[0].items():
        is_rounded = name in ("mean", "std", "log_gap_mean", "log_gap_std")
        assert descriptions[1][name] == (pytest.approx(expected, rel=1e-12) if is_rounded else expected), name
    assert metas[0]["notes"] == metas[1]["notes"]
    for split, parts in metas[0]["splits"].items():
        other = metas[1]["splits"][split]
        assert other["counts"] == parts["counts"]
        tables = [pa.ipc.open_file(str(cache / split / "sequences.arrow")).read_all() for cache in (whole, joined)]
        assert tables[0].equals(tables[1])
        for name, entry in parts["arrays"].items():
            arrays = [np.fromfile(cache / split / entry["file"], entry["dtype"]) for cache in (whole, joined)]
            np.testing.assert_allclose(arrays[1], arrays[0], rtol=1e-6 if entry["dtype"] == "<f4" else 0, err_msg=name)


def test_a_bad_value_in_a_late_part_is_named_by_its_row_and_the_first_one_ends_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_BYTES", SMALL_PART)
    write_tokens(tmp_path / "data", np.random.default_rng(0))
    for number, row in ((1, 650), (2, 3)):
        path = tmp_path / "data" / f"{number}.parquet"
        lists = pq.read_table(path)["tokens"].to_pylist()
        lists[row] = [7, -1]
        write(path, {"tokens": pa.array(lists, pa.list_(pa.int32()))}, row_group_size=100)
    source = SourceSettings(data_dir=str(tmp_path / "data"))
    said = []
    for workers in (1, 2):
        with pytest.raises(DataError) as raised:
            built(source, tmp_path / "cache", workers)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert "1.parquet: row 650:" in said[0]
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def end_the_process(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_was_killed_is_said_and_ends_the_build():
    with side_by_side(2) as each, pytest.raises(StorageError, match="lower --workers"):
        list(each(end_the_process, range(3)))


def refuse(*_: object) -> Iterator[object]:
    raise AssertionError("nothing should be built")


def test_the_command_builds_what_training_finds(tmp_path, capsys, monkeypatch):
    from seqvae.cli.manage_cache import build

    write_events(tmp_path / "data", np.random.default_rng(0))
    words = ["--data_dir", str(tmp_path / "data"), "--cache_dir", str(tmp_path / "cache")]
    build("build-cache", [*words, "--workers", "2"])
    lines = capsys.readouterr().out.splitlines()
    found = prepare_cache(SourceSettings(data_dir=words[1]), CacheSettings(cache_dir=words[3]), each=refuse)
    assert lines[-1] == str(found)
    assert "sequences" in lines[0]
    assert json.loads((found / "meta.json").read_text())["splits"]["train"]["counts"]["sequences"] > 700


def test_vectors_of_another_length_are_refused_in_whichever_part_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_BYTES", SMALL_PART)
    monkeypatch.setattr("seqvae.data.parquet.reader.BLOCK_ROWS", 100)
    empty: list[list[list[float]]] = [[] for _ in range(300)]
    write(tmp_path / "data" / "0.parquet", {"values": empty + [[[1.0, 2.0]]] * 300}, row_group_size=100)
    for number in (1, 2):
        write(tmp_path / "data" / f"{number}.parquet", {"values": [[[1.0, 2.0, 3.0]]] * 600}, row_group_size=100)
    source = SourceSettings(data_dir=str(tmp_path / "data"), bad_values="drop")
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"1\.parquet: row 0: column 'values' holds a vector of 3 values"):
            built(source, tmp_path / "cache", workers)
