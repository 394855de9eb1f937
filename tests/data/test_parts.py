"""A cache that is built in parts: the same bytes whoever reads the parts, and what one part alone would give."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

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
from tests.support.many_parts import SMALL_PART, WRITERS, write_events, write_tokens
from tests.support.parquet_files import write


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
