"""Caches in an object store: built by one machine, found by the others, and trained on part by part."""

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from seqvae.config.data import BatchSettings, CacheSettings, SourceSettings
from seqvae.config.flags import CommandLine
from seqvae.config.training import OptimizedSettings
from seqvae.data import cache as cache_module
from seqvae.data import storage
from seqvae.data.cache import prepare_cache
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.dataset import read_meta
from seqvae.data.demo import write_demo
from seqvae.data.frames import path_of
from seqvae.errors import DataError, ExitCode, UsageError
from tests.support.launched import ends, start
from tests.support.object_store import ENVIRONMENT, ObjectStore, object_store

pytest.importorskip("moto", reason="moto, which plays the object store, is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    storage._store.cache_clear()
    server.misbehave()
    server.upload(Path(__file__), "shelf/other")
    return server


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return write_demo(tmp_path / "data", "tokens", sequences=3000, mean_length=30)


@pytest.fixture
def shelf(store: ObjectStore, tmp_path: Path) -> str:
    """A place for caches that no other test uses."""
    return f"s3://shelf/{tmp_path.name}"


def on_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a machine of this name: one with a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


def settings(data_dir: str | Path, store: ObjectStore, shelf: str, **cache) -> tuple[SourceSettings, CacheSettings]:
    source = SourceSettings(data_dir=str(data_dir), endpoint_url=store.url, allow_remote=True)
    return source, CacheSettings(cache_dir=shelf, **cache)


def content_of(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def refuse(*_: object) -> Iterator[object]:
    raise AssertionError("nothing should be built")


def test_a_machine_fetches_what_another_has_built_also_of_a_copy_of_the_data(
    data_dir, store, shelf, tmp_path, monkeypatch
):
    on_machine("one", tmp_path, monkeypatch)
    built = prepare_cache(*settings(data_dir, store, shelf))
    on_machine("two", tmp_path, monkeypatch)
    copy = Path(shutil.copytree(data_dir, tmp_path / "other" / "place", copy_function=shutil.copy))
    fetched = prepare_cache(*settings(copy, store, shelf), each=refuse)
    assert fetched.is_relative_to(tmp_path / "two")
    assert content_of(fetched) == content_of(built)
    store.misbehave()
    assert prepare_cache(*settings(copy, store, shelf), each=refuse) == fetched
    assert sum(store.requests.values()) <= 2  # whether it is still there, no more
    local = prepare_cache(SourceSettings(data_dir=str(data_dir)), CacheSettings(cache_dir=str(tmp_path / "plain")))
    names = [name for name in content_of(local) if name != "meta.json"]
    assert {name: content_of(local)[name] for name in names} == {name: content_of(built)[name] for name in names}


def test_data_that_have_changed_get_a_cache_of_their_own(data_dir, store, shelf, tmp_path, monkeypatch):
    on_machine("one", tmp_path, monkeypatch)
    first = prepare_cache(*settings(data_dir, store, shelf))
    file = sorted(data_dir.rglob("*.parquet"))[0]
    pq.write_table(pq.read_table(file).slice(1), file)
    assert prepare_cache(*settings(data_dir, store, shelf)).name != first.name


def test_a_cache_that_was_cut_off_on_its_way_is_not_there_and_a_damaged_one_is_named(
    data_dir, store, shelf, tmp_path, monkeypatch
):
    on_machine("one", tmp_path, monkeypatch)
    built = prepare_cache(*settings(data_dir, store, shelf))
    store.remove(f"{shelf[5:]}/{built.name}/meta.json")
    on_machine("two", tmp_path, monkeypatch)
    again = prepare_cache(*settings(data_dir, store, shelf))
    assert content_of(again).keys() == content_of(built).keys()
    tokens = bytearray((again / "train" / "tokens.bin").read_bytes())
    tokens[7] ^= 1
    store.write(f"{shelf[5:]}/{built.name}/train/tokens.bin", bytes(tokens))
    on_machine("three", tmp_path, monkeypatch)
    with pytest.raises(DataError, match=r"tokens.bin of train is damaged.*Delete it there"):
        prepare_cache(*settings(data_dir, store, shelf))
    assert not [path for path in (tmp_path / "three" / "seqvae").iterdir() if path.is_dir()]


def test_files_of_the_same_size_with_other_values_get_caches_of_their_own(store, shelf, tmp_path, monkeypatch):
    """Also where the last bytes of the files, which describe a data frame, are the same."""
    on_machine("one", tmp_path, monkeypatch)
    random = np.random.default_rng(0)
    found = []
    for factor in (1.0, 10.0):
        names = [f"feature_with_a_long_name_{number}" for number in range(30)]
        frame = pd.DataFrame(factor * random.normal(size=(400, 30)), columns=names)
        frame.insert(0, "id", np.repeat(np.arange(40), 10))
        folder = tmp_path / f"times {factor}"
        folder.mkdir()
        frame.to_parquet(folder / "all.parquet", use_dictionary=False, compression=None, write_statistics=False)
        found.append((folder / "all.parquet").read_bytes())
    assert len(found[0]) == len(found[1])
    assert found[0][-4096:] == found[1][-4096:]
    paths = [prepare_cache(*settings(tmp_path / f"times {factor}", store, shelf)) for factor in (1.0, 10.0)]
    assert paths[0].name != paths[1].name
    assert paths[0].exists()  # it is of other data, not of an older state of these


@pytest.mark.parametrize("way", ["fetched", "streamed"])
@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        ("split", "is no split"),
        ("file", "is not the name of a file"),
        ("objects", "not numbers"),
        ("count", "ends after|past end of file"),
    ],
)
def test_a_cache_in_a_store_leads_nowhere_else(way, hostile, said, data_dir, store, shelf, tmp_path, monkeypatch):
    on_machine("one", tmp_path, monkeypatch)
    built = prepare_cache(*settings(data_dir, store, shelf))
    meta = read_meta(built)
    del meta["digest"]
    labels = {"file": "autostart.sh", "dtype": "|u1", "count": 4, "crc32": 0}
    if hostile == "split":
        meta["splits"]["../../escaped"] = {**meta["splits"]["train"], "arrays": {"labels": labels}}
    elif hostile == "file":
        meta["splits"]["train"]["arrays"]["labels"] = labels | {"file": "../../../escaped"}
    elif hostile == "objects":
        meta["splits"]["train"]["arrays"]["offsets"]["dtype"] = "|O"
    else:
        meta["splits"]["train"]["arrays"]["tokens"]["count"] *= 3
    text = json.dumps(meta | {"digest": cache_module._digest(json.loads(json.dumps(meta)))})
    store.write(f"{shelf[5:]}/{built.name}/meta.json", text.encode())
    store.write(f"{shelf[5:]}/{built.name}/../../escaped/autostart.sh", b"evil")
    on_machine("two", tmp_path, monkeypatch)
    before = {path for path in tmp_path.rglob("*") if "two" not in path.parts}
    source, cache = settings(data_dir, store, shelf, stream=way == "streamed", local_limit="200kB")
    with pytest.raises(DataError, match=said):
        list(SequenceDataModule(source, cache=cache).train_dataloader())
    assert {path for path in tmp_path.rglob("*") if "two" not in path.parts} == before


def test_data_in_memory_do_not_care_where_caches_lie(tmp_path, monkeypatch):
    on_machine("one", tmp_path, monkeypatch)
    path = path_of(pd.DataFrame({"tokens": [[1, 2], [3]]}), "s3://bucket/caches")
    assert Path(path).is_relative_to(tmp_path / "one")


def test_another_process_repeats_requests_as_often(store):
    opened, _ = storage.open_store("s3://bucket/x", store.url)
    assert pickle.loads(pickle.dumps(opened)) is opened


def test_streaming_from_a_store_gives_the_sequences_of_the_cache(data_dir, store, shelf, tmp_path, monkeypatch):
    on_machine("one", tmp_path, monkeypatch)
    source, cache = settings(data_dir, store, shelf, stream=True, local_limit="200kB")
    with pytest.raises(DataError, match=r"there is no cache of these data yet.*seqvae build-cache"):
        _ = SequenceDataModule(source, cache=cache).data
    built = prepare_cache(*settings(data_dir, store, shelf))
    on_machine("two", tmp_path, monkeypatch)
    store.misbehave(delay=0.005, failing=0.2, seed=1)
    streamed = SequenceDataModule(source, cache=cache, batches=BatchSettings(tokens_per_batch=2000, pad_grid=0))
    local = SequenceDataModule(source, cache=CacheSettings(cache_dir=str(built.parent)))
    seen = []
    for batch in streamed.train_dataloader():
        seen += batch.sequences_B.tolist()
        expected = local.split("train").gather(batch.sequences_B.numpy(), batch[0].shape[1])
        assert (batch[0] == expected[0]).all()
    assert sorted(seen) == list(range(len(local.split("train"))))
    assert store.failures
    assert not [*(tmp_path / "two" / "seqvae").glob(built.name)]


def test_a_cache_in_a_store_that_a_file_names_needs_consent(tmp_path):
    named = "s3://shelf/caches"
    (tmp_path / "config.yaml").write_text(f"cache_dir: {named}\n")
    words = ["--config", str(tmp_path / "config.yaml")]
    line = CommandLine(OptimizedSettings)
    with pytest.raises(UsageError, match="--allow_remote"):
        line.settings(line.read_words(words))
    assert line.settings(line.read_words([*words, "--allow_remote"])).cache.cache_dir == named
    assert line.settings(line.read_words(["--cache_dir", named])).source.allow_remote


@pytest.mark.slow
def test_training_from_a_store_by_commands(data_dir, store, shelf, tmp_path):
    words = f"--data_dir {data_dir} --cache_dir {shelf} --endpoint_url {store.url} --stream --local_limit 200kB --run_name streamed"
    variables = {"XDG_CACHE_HOME": str(tmp_path / "home"), **ENVIRONMENT}
    (refused,) = ends([start(tmp_path, words, variables)])
    assert refused.code == ExitCode.DATA
    assert "seqvae build-cache" in refused.errors
    prepare_cache(*settings(data_dir, store, shelf))
    (trained,) = ends([start(tmp_path, words, variables)])
    assert trained.code == 0, trained.errors
    assert "secret-of-a-test" not in trained.errors + trained.output
