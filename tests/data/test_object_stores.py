"""Data in an object store give the cache, byte for byte, of the same data on this machine, whatever the network does."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqvae.config.data import CacheSettings, SourceSettings
from seqvae.config.flags import CommandLine
from seqvae.config.training import OptimizedSettings
from seqvae.data import storage
from seqvae.data.cache import prepare_cache
from seqvae.data.demo import write_demo
from seqvae.data.parquet.discovery import find_files
from seqvae.errors import DataError, StorageError, UsageError
from tests.support.object_store import ENVIRONMENT, KEYS, ObjectStore, object_store
from tests.support.parquet_files import events_of, meds_table, write

pytest.importorskip("moto", reason="moto, which plays the object store, is not installed")
ROOT = Path(__file__).parent.parent.parent
SECRET = KEYS["AWS_SECRET_ACCESS_KEY"]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch) -> ObjectStore:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    storage._store.cache_clear()
    server.misbehave()
    return server


def source_of(place: str | Path, store: ObjectStore, **options) -> SourceSettings:
    return SourceSettings(data_dir=str(place), endpoint_url=store.url, allow_remote=True, **options)


def build(place: str | Path, cache_dir: Path, store: ObjectStore, **options) -> Path:
    return prepare_cache(source_of(place, store, **options), CacheSettings(cache_dir=str(cache_dir)))


def content(cache: Path) -> dict[str, bytes]:
    """Every file of a cache but meta.json, which names the places of the data."""
    files = (path for path in sorted(cache.rglob("*")) if path.is_file() and path.name != "meta.json")
    return {str(path.relative_to(cache)): path.read_bytes() for path in files}


def write_tokens(folder: Path, files: int = 3, rows: int = 700) -> Path:
    rng = np.random.default_rng(0)
    for number in range(files):
        lists = [rng.integers(0, 50, rng.integers(1, 20)).tolist() for _ in range(rows)]
        write(
            folder / f"part-{number}.parquet",
            {"id": np.arange(rows) + number * rows, "tokens": lists},
            row_group_size=97,
        )
    return folder


def write_vectors(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    lists = [rng.normal(size=(length, 3)).tolist() for length in rng.integers(1, 9, 600)]
    for split, share in {"train": lists[:400], "tuning": lists[400:]}.items():
        write(folder / split / "0.parquet", {"values": share, "label": ["a"] * len(share)}, row_group_size=50)
    return folder


def write_events(folder: Path) -> Path:
    write(folder / "train.parquet", events_of(*range(300)), row_group_size=64)
    write(folder / "valid.parquet", events_of(*range(300, 340)), row_group_size=7)
    return folder


def write_meds(folder: Path) -> Path:
    write(folder / "data" / "0.parquet", meds_table(*range(40)), row_group_size=13)
    write(folder / "data" / "sub" / "1.parquet", meds_table(*range(40, 60)))
    splits = ["train"] * 40 + ["tuning"] * 10 + ["held_out"] * 10
    write(folder / "metadata" / "subject_splits.parquet", {"subject_id": range(60), "split": splits})
    return folder


def write_scattered(folder: Path) -> Path:
    """Rows of one sequence that lie apart."""
    for number in range(4):
        steps = np.arange(200)
        columns = {"id": steps % 40 + 40 * number, "time": steps + 0.5, "a": steps * 0.1, "b": np.ones(200)}
        write(folder / f"{number}.parquet", columns, row_group_size=33)
    return folder


WRITERS = (write_tokens, write_vectors, write_events, write_meds, write_scattered)
KINDS = {each.__name__.removeprefix("write_"): each for each in WRITERS}


# --- The same cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_out_of_a_store_is_that_of_the_same_files_here_byte_for_byte(kind, tmp_path, store):
    folder = KINDS[kind](tmp_path / "data")
    here, there = (
        build(folder, tmp_path / "here", store),
        build(store.upload(folder, f"same/{kind}"), tmp_path / "there", store),
    )
    assert content(there) == content(here) != {}


def test_late_and_failing_answers_change_nothing(tmp_path, store):
    folder = write_tokens(tmp_path / "data", files=12)
    url = store.upload(folder, "late/data")
    store.misbehave(delay=0.05, failing=0.1, seed=3)
    begin = time.monotonic()
    there = build(url, tmp_path / "there", store)
    assert store.failures >= 3
    requests = sum(store.requests.values())
    assert time.monotonic() - begin < 0.05 * requests + 10  # retries pause for seconds
    assert content(there) == content(build(folder, tmp_path / "here", store))


def test_files_are_asked_for_in_parallel(tmp_path, store):
    url = store.upload(write_tokens(tmp_path / "data", files=40, rows=20), "many/data")
    store.misbehave(delay=0.1)
    begin = time.monotonic()
    build(url, tmp_path / "cache", store)
    took, requests = time.monotonic() - begin, sum(store.requests.values())
    assert requests > 100
    assert took < 0.4 * 0.1 * requests


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moses_smiles", "japanese_vowels", "physionet2012"])
def test_real_data_out_of_a_store_that_is_late_and_fails_give_the_local_cache(name, tmp_path, store):
    if not (folder := Path(os.environ.get("SEQVAE_REAL_DATA", "/nowhere"), name)).is_dir():
        pytest.skip("SEQVAE_REAL_DATA has no such data")
    options = {"tokenizer": "characters"} if name == "moses_smiles" else {}
    url = store.upload(folder, f"real/{name}")
    store.misbehave(delay=0.05, failing=0.01)
    there = build(url, tmp_path / "there", store, **options)
    assert content(there) == content(build(folder, tmp_path / "here", store, **options))
    assert store.failures or sum(store.requests.values()) < 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "vectors", "events"])
def test_demo_data_of_many_row_groups_give_the_local_cache(kind, tmp_path, store):
    folder = write_demo(tmp_path, kind)
    there = build(store.upload(folder, f"demo/{kind}"), tmp_path / "there", store)
    assert content(there) == content(build(folder, tmp_path / "here", store))


# --- Changed and unchanged objects ----------------------------------------------------------------------------------


def test_unchanged_objects_are_recognised_without_reading_them_and_a_changed_one_makes_a_new_cache(tmp_path, store):
    folder = write_tokens(tmp_path / "data")
    url = store.upload(folder, "marks/data")
    first = build(url, tmp_path / "cache", store)
    store.misbehave()
    assert build(f"{url}/", tmp_path / "cache", store) == first
    assert store.requests["HEAD"] <= 4
    assert store.requests["GET"] <= 2  # what is there, and the listing
    path = folder / "part-1.parquet"
    table = pq.read_table(path)
    changed = pa.BufferOutputStream()
    pq.write_table(table.set_column(0, "id", pa.array(table["id"].to_numpy() + 9000)), changed, row_group_size=97)
    content_after = changed.getvalue().to_pybytes()
    store.write("marks/data/part-1.parquet", content_after)
    second = build(url, tmp_path / "cache", store)
    assert second != first
    assert second.name.rpartition("-")[0] == first.name.rpartition("-")[0]
    store.write("marks/data/part-1.parquet", path.read_bytes())
    assert build(url, tmp_path / "cache", store) == first


# --- Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["part-*.parquet", "*", "a?/", "**/x-[01].parquet", "a*/x-*", "a1/**", "[ab]?/x-0.parquet"]
)
def test_a_pattern_finds_the_files_that_it_finds_here(pattern, tmp_path, store):
    for name in (
        "part-0.parquet",
        "part-1.parquet",
        "a1/x-0.parquet",
        "a2/x-1.parquet",
        "b1/c/x-0.parquet",
        "a1/.h.parquet",
    ):
        write(tmp_path / "data" / name, {"tokens": [[1, 2]]})
    url = store.upload(tmp_path / "data", "globs/data")

    def names(place: str, root: str) -> list[list[str]]:
        found = find_files(source_of(place, store), to_learn_from=False)
        return [[str(path).removeprefix(root) for path in files] for files in (found.paths, found.hidden, found.beside)]

    assert names(f"{url}/{pattern}", url) == names(f"{tmp_path}/data/{pattern}", f"{tmp_path}/data")
    assert names(f"{url}/{pattern}", url)[0]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://names/dota", r"--data_dir s3://names/dota: does not exist. s3://names is there and holds data, other."),
        ("s3://names/data/x/y", r"s3://names/data is there and holds a.parquet."),
        (
            "s3://nobody/data",
            "s3://nobody.*: there is no such bucket or container. Check the name, and --endpoint_url.",
        ),
        ("s3://names/o*/*.parquet", r"s3://names/o\*/\*.parquet: no folder or Parquet file matches this pattern."),
        ("s3://names/other", "holds no Parquet file"),
        ("s3://nam*/data", "a pattern may stand behind the bucket only"),
    ],
)
def test_what_is_not_there_is_said_and_what_is(place, message, tmp_path, store):
    write(tmp_path / "data" / "a.parquet", {"tokens": [[1]]})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    store.upload(tmp_path, "names")
    with pytest.raises(DataError, match=message):
        find_files(source_of(place, store))


def test_a_file_that_is_no_parquet_is_named_by_its_url(tmp_path, store):
    (tmp_path / "a.parquet").write_text("id,tokens\n")
    url = store.upload(tmp_path, "wrong/data")
    with pytest.raises(DataError, match=f"{url}/a.parquet: is not a readable Parquet file: it begins with b'id,tokens"):
        build(url, tmp_path / "cache", store)


# --- What the network does ------------------------------------------------------------------------------------------


def test_a_store_that_dies_during_a_build_ends_it_with_its_name_and_the_next_build_succeeds(
    tmp_path, store, monkeypatch
):
    monkeypatch.setattr(storage, "ATTEMPTS", 3)
    folder = write_tokens(tmp_path / "data", files=6)
    url = store.upload(folder, "dies/data")
    store.misbehave(after=20)
    begin = time.monotonic()
    with pytest.raises(
        StorageError, match=r"s3://dies/data.*: cannot be reached, after 3 attempts .*start the same command again"
    ):
        build(url, tmp_path / "cache", store)
    assert store.failures > 0
    assert time.monotonic() - begin < 30
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    store.misbehave()
    assert content(build(url, tmp_path / "cache", store)) == content(build(folder, tmp_path / "here", store))


def test_a_server_that_is_gone_is_given_up_soon(tmp_path, store, monkeypatch):
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    with object_store() as other:
        other.kill()
        with pytest.raises(StorageError, match="s3://bucket/data: cannot be reached") as caught:
            find_files(source_of("s3://bucket/data", other))
    assert SECRET not in str(caught.value)


def test_a_refused_key_is_told_with_the_variables_to_set(tmp_path, store):
    url = store.upload(write_tokens(tmp_path / "data"), "denied/data")
    store.misbehave(denied=1)
    with pytest.raises(StorageError, match=r"access was denied .*AWS_ACCESS_KEY_ID") as caught:
        build(url, tmp_path / "cache", store)
    assert SECRET not in str(caught.value)


# --- Consent, and what stays secret ---------------------------------------------------------------------------------


def settings_of(**values) -> OptimizedSettings:
    line = CommandLine(OptimizedSettings)
    return line.settings(line.read_values(values))


def test_nothing_is_fetched_because_a_file_or_a_setting_of_another_says_so(tmp_path, store):
    config = tmp_path / "theirs.yaml"
    config.write_text("data_dir: s3://bucket/data\n")
    with pytest.raises(UsageError, match=r"line 1: data_dir leads to a store .*add --allow_remote"):
        settings_of(config=str(config))
    assert settings_of(config=str(config), allow_remote=True).source.allow_remote
    assert not settings_of(config=str(config), data_dir="here").source.allow_remote
    assert settings_of(data_dir="s3://bucket/data").source.allow_remote
    config.write_text(f"endpoint_url: {store.url}\n")
    with pytest.raises(UsageError, match=r"line 1: endpoint_url leads to a store"):
        settings_of(config=str(config), data_dir="s3://bucket/data")
    config.write_text("allow_remote: true\n")
    with pytest.raises(UsageError, match=r"line 1: allow_remote is no setting of a file; give --allow_remote"):
        settings_of(config=str(config))
    with pytest.raises(UsageError, match="Say --allow_remote"):
        prepare_cache(SourceSettings(data_dir="s3://bucket/data"), CacheSettings(cache_dir=str(tmp_path)))
    assert store.requests == {}


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://key:hidden@bucket/data",
            "s3://hidden@bucket/data",
            "s3://bucket/data?secret_key=hidden",
            "gs://hidden@bucket/a",
        ),
        *("abfs://container:hidden@account/a", "abfss://c@a.net/x?sig=hidden", "s3://bucket/a&access_key=hidden"),
    ],
)
def test_a_url_with_a_password_is_refused_without_printing_it(url):
    with pytest.raises(UsageError) as caught:
        settings_of(data_dir=url)
    assert (
        str(caught.value)
        == "data_dir holds a password or options: leave them out, credentials are taken from the environment"
    )


@pytest.mark.parametrize(
    "url", ["http://me:hidden@host:9000", "http://host/?key=hidden", "localhost:9000", "file:///etc/hidden"]
)
def test_an_endpoint_with_a_password_is_refused_without_printing_it(url):
    with pytest.raises(UsageError, match=r"^endpoint_url must be an address") as caught:
        settings_of(endpoint_url=url)
    assert "hidden" not in str(caught.value)


def test_hugging_face_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    storage._store.cache_clear()
    with pytest.raises(UsageError, match="pip install huggingface_hub"):
        storage.open_store("hf://datasets/me/data")


@pytest.mark.slow
def test_a_run_trains_out_of_a_store_goes_on_by_its_config_and_keeps_no_secret(tmp_path, store):
    url = store.upload(write_tokens(tmp_path / "data"), "train/data")
    variables = {**os.environ, **ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def seqvae(words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "seqvae", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
        assert SECRET not in done.stdout + done.stderr
        return done.returncode, done.stdout + done.stderr

    small = "--width 32 --heads 2 --depth 1 --max_sequence_length 30 --num_workers 0 --run_name first"
    code, said = seqvae(f"train --data_dir {url} --endpoint_url {store.url} --max_steps 3 {small}")
    assert code == 0, said
    assert "--config runs/first/config.yaml --allow_remote" in said
    code, said = seqvae("train --config runs/first/config.yaml")
    assert (code, "--allow_remote" in said) == (2, True)
    code, said = seqvae("train --config runs/first/config.yaml --allow_remote --max_steps 5")
    assert code == 0, said
    store.misbehave()
    code, said = seqvae("evaluate runs/first --split valid --iw_sequences 0")
    assert (code, "--allow_remote" in said) == (2, True), said
    assert store.requests == {}
    code, said = seqvae("evaluate runs/first --split valid --iw_sequences 0 --allow_remote")
    assert code == 0, said
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


# --- Bounded memory -------------------------------------------------------------------------------------------------


def test_no_more_is_held_ahead_than_the_bound_and_results_keep_their_order(monkeypatch):
    monkeypatch.setattr(storage, "READ_AHEAD_BYTES", 100)
    lock, held, most = threading.Lock(), 0, 0

    def task(number: int, size: int) -> tuple[int, int]:
        nonlocal held, most
        with lock:
            held += size
            most = max(most, held)
        time.sleep(0.001 * (number % 3))
        return number, size

    sizes = [40, 60, 10, 250, 30, 30, 30, 90, 1, 1] * 5
    order = []
    for number, size in storage.ahead((size, partial(task, number, size)) for number, size in enumerate(sizes)):
        order.append(number)
        with lock:
            held -= size
    assert order == list(range(len(sizes)))
    assert most <= 100 + 250  # the one in use is beside the bound
    assert most > 60


def test_a_row_group_beyond_the_bound_is_streamed(tmp_path, store, monkeypatch):
    from seqvae.data.parquet import reader

    folder = write_tokens(tmp_path / "data")
    here, url = build(folder, tmp_path / "here", store), store.upload(folder, "large/data")
    monkeypatch.setattr(reader, "READ_AHEAD_BYTES", 100)
    monkeypatch.setattr(reader, "SMALL_BYTES", 1000)
    assert content(build(url, tmp_path / "there", store)) == content(here)
