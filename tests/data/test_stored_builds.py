"""A cache that is built in a store: the bytes of a local build, by machines whose disks hold no more than a part of it."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqvae.config.data import BuildingSettings, CacheSettings, SourceSettings
from seqvae.data import storage
from seqvae.data.building import parts as parts_module
from seqvae.data.building.parts import Each, side_by_side
from seqvae.data.cache import build_in_store, prepare_cache
from seqvae.errors import StorageError, UsageError
from tests.support.launched import environment
from tests.support.many_parts import SMALL_PART, WRITERS
from tests.support.object_store import ENVIRONMENT, ObjectStore, object_store
from tests.support.parquet_files import write
from tests.support.ray_cluster import cluster

pytest.importorskip("moto", reason="moto, which plays the object store, is not installed")
SEED = 5
"""Of failures: one of the first requests fails."""
ROOT = Path(__file__).parent.parent.parent
IN_NAMESPACE = ["unshare", "--mount"] if not hasattr(os, "geteuid") or os.geteuid() == 0 else ["unshare", "-rm"]
HAS_NAMESPACES = (
    bool(shutil.which("unshare")) and subprocess.run([*IN_NAMESPACE, "true"], capture_output=True).returncode == 0
)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    monkeypatch.setattr(parts_module, "PART_BYTES", SMALL_PART)
    storage._store.cache_clear()
    server.misbehave()
    server.upload(Path(__file__), "caches/other")
    return server


def write_scattered(folder: Path, random: np.random.Generator) -> dict[str, Any]:
    """Rows of one sequence that lie apart, with labels."""
    for number in range(4):
        rows = np.arange(200)
        columns = {
            "id": rows % 40 + 40 * number,
            "time": rows + 0.5,
            "a": random.normal(size=200),
            "label": rows % 40 % 3,
        }
        write(folder / f"{number}.parquet", columns, row_group_size=33)
    return {"unsorted": "sort"}


KINDS = WRITERS | {"scattered": write_scattered}


def source_of(data_dir: str | Path, store: ObjectStore, **options: Any) -> SourceSettings:
    return SourceSettings(data_dir=str(data_dir), endpoint_url=store.url, allow_remote=True, **options)


def built_there(source: SourceSettings, shelf: str, each: Each = map) -> str:
    """Build a cache in a store, and return its bucket and key."""
    return build_in_store(source, BuildingSettings(cache_dir=shelf, launcher="ray"), each)[0].removeprefix("s3://")


def built_here(source: SourceSettings, shelf: str) -> str:
    """Build a cache on this machine, put it into a store, and return its bucket and key."""
    path = prepare_cache(source, CacheSettings(cache_dir=shelf))
    return f"{shelf.removeprefix('s3://')}/{path.name}"


# --- The same cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_built_in_a_store_is_that_of_a_local_build_also_where_requests_fail(
    kind, tmp_path, store, monkeypatch
):
    if kind == "events":  # which are worked on in many rounds
        monkeypatch.setattr(parts_module, "PART_BYTES", 3 * SMALL_PART)
    options = KINDS[kind](tmp_path / "data", np.random.default_rng(0))
    source = source_of(store.upload(tmp_path / "data", f"data/{tmp_path.name}"), store, **options)
    expected = store.content(built_here(source, f"s3://caches/{tmp_path.name}/local"))
    shelf = f"s3://caches/{tmp_path.name}/stored"
    store.misbehave(failing=0.01, seed=SEED)
    there = built_there(source, shelf, lambda function, items: map(partial(elsewhere, function), items))
    assert store.failures > 0
    store.misbehave()
    found = store.content(there)
    assert found.keys() == expected.keys()
    assert found == expected
    assert built_there(source, shelf, refuse) == there


def elsewhere(function: Callable[[Any], Any], item: Any) -> Any:
    """Call a function in a directory of its own, in which it may leave nothing behind."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        tempfile.tempdir = folder
        try:
            return function(item)
        finally:
            assert not [*Path(folder).iterdir()]
            tempfile.tempdir = None


def refuse(*_: object) -> Iterator[object]:
    raise AssertionError("nothing should be read")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moses_smiles", "japanese_vowels", "physionet2012"])
def test_real_data_make_the_local_cache_in_a_store_that_is_late_and_fails(name, tmp_path, store):
    if not (folder := Path(os.environ.get("SEQVAE_REAL_DATA", "/nowhere"), name)).is_dir():
        pytest.skip("SEQVAE_REAL_DATA has no such data")
    options: dict[str, Any] = {"tokenizer": "characters"} if name == "moses_smiles" else {}
    source = source_of(store.upload(folder, f"real/{name}"), store, **options)
    expected = store.content(built_here(source, f"s3://caches/{tmp_path.name}/local"))
    store.misbehave(delay=0.02, failing=0.01, seed=SEED)
    with side_by_side(2) as each:
        shelf = f"s3://caches/{tmp_path.name}/stored"
        there = built_there(source, shelf, lambda function, items: each(partial(elsewhere, function), items))
    assert store.failures > 0
    store.misbehave()
    assert store.content(there) == expected


# --- What it takes of a disk ------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from seqvae.config.data import BuildingSettings, SourceSettings
from seqvae.data.building import parts
from seqvae.data.cache import build_in_store
parts.PART_BYTES = 100_000
data_dir, endpoint, shelf = sys.argv[1:]
source = SourceSettings(data_dir=data_dir, endpoint_url=endpoint, allow_remote=True)
build_in_store(source, BuildingSettings(cache_dir=shelf, launcher="ray"), map)
"""


@pytest.mark.skipif(not HAS_NAMESPACES, reason="no disk can be mounted here")
def test_disks_of_a_fifth_of_a_cache_are_enough(tmp_path, store):
    random = np.random.default_rng(0)
    for number in range(10):
        lists = [random.integers(0, 60_000, 500).astype(np.int32) for _ in range(200)]
        write(tmp_path / "data" / ("train" if number else "valid") / f"{number}.parquet", {"tokens": lists})
    url = store.upload(tmp_path / "data", f"data/{tmp_path.name}")
    (disk := tmp_path / "disk").mkdir()
    own = {"TMPDIR": str(disk), "HOME": str(disk), "XDG_CACHE_HOME": str(disk / "cache")}
    shelf = f"caches/{tmp_path.name}/stored"
    mounted = f'mount -t tmpfs -o size=400k none {disk} && cd {disk} && exec "$0" "$@"'
    line = [*IN_NAMESPACE, "sh", "-c", mounted, sys.executable, "-c", PROGRAM, url, store.url, f"s3://{shelf}"]
    ended = subprocess.run(line, env=environment(own), capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert sum(map(len, store.content(shelf).values())) > 5 * 400 * 1024


# --- Interrupted ------------------------------------------------------------------------------------------------------


def each_until(limit: int) -> Each:
    """Return what ends the build after it has worked on so many items."""
    left = [limit]

    def each(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for item in islice(items, left[0]):
            left[0] -= 1
            yield function(item)
        if not left[0]:
            raise KeyboardInterrupt

    return each


@pytest.fixture
def source(tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> SourceSettings:
    """Ten files, which make ten parts."""
    monkeypatch.setattr(parts_module, "PART_BYTES", 5_000)
    random = np.random.default_rng(0)
    for number in range(10):
        lists = [random.integers(0, 300, random.integers(40, 80)).astype(np.int32) for _ in range(100)]
        write(tmp_path / "data" / ("valid" if number == 9 else "train") / f"{number}.parquet", {"tokens": lists})
    return source_of(store.upload(tmp_path / "data", f"data/{tmp_path.name}"), store)


def reads_of(store: ObjectStore) -> list[int]:
    """Return how often each of the files was read from, in their order."""
    return [
        reads for path, reads in sorted(store.reads.items()) if path.startswith("data/") and path.endswith(".parquet")
    ]


@pytest.mark.parametrize("done", [3, 12])
def test_a_build_that_was_interrupted_goes_on_with_what_it_has_not_read(done, source, tmp_path, store, caplog):
    caplog.set_level(logging.INFO)
    shelf = f"s3://caches/{tmp_path.name}/stored"
    with pytest.raises(KeyboardInterrupt):
        built_there(source, shelf, each_until(done))
    assert "reading 10 parts into the store; if that is interrupted, the same command goes on" in caplog.text
    store.misbehave()
    there = built_there(source, shelf)
    reads, known = reads_of(store), min(done, 10)
    assert f"{known} parts are there, from a build that was interrupted" in caplog.text
    assert len(reads) == 10
    assert max(reads[:known]) < min(reads[known:], default=3)
    assert store.content(there) == store.content(built_here(source, f"s3://caches/{tmp_path.name}/local"))


def test_a_store_that_dies_ends_the_build_by_its_name_and_the_next_one_goes_on(
    source, tmp_path, store, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    shelf = f"s3://caches/{tmp_path.name}/stored"
    source = replace(source, data_dir=str(tmp_path / "data"))
    store.misbehave(after=30)
    with pytest.raises(
        StorageError, match=f"{shelf}.*: cannot be reached, after 2 attempts .*start the same command again"
    ):
        built_there(source, shelf)
    store.misbehave()
    there = built_there(source, shelf)
    assert " parts are there, from" in caplog.text
    assert store.content(there) == store.content(built_here(source, f"s3://caches/{tmp_path.name}/local"))


DESCRIPTIONS = {
    "pickled": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04exit\x85R.",
    "of objects": (b'"<i8"', b'"|O"'),
    "that leads elsewhere": (b'"offsets.bin"', b'"../../offsets.bin"'),
    "of another split": (b'{"train"', b'{"../train"'),
    "of other rows": (b'"mark": "', b'"mark": "0'),
    "cut off": b'{"splits": {',
}


def test_parts_whose_descriptions_are_not_ours_are_read_again(source, tmp_path, store, caplog):
    caplog.set_level(logging.INFO)
    shelf = f"s3://caches/{tmp_path.name}/stored"
    with pytest.raises(KeyboardInterrupt):
        built_there(source, shelf, each_until(10))
    found = store.content(f"caches/{tmp_path.name}")
    places = sorted(name for name in found if name.endswith("part.json"))
    for place, change in zip(places, DESCRIPTIONS.values(), strict=False):
        changed = change if isinstance(change, bytes) else found[place].replace(*change)
        assert changed != found[place]
        store.write(f"caches/{tmp_path.name}/{place}", changed)
    store.misbehave()
    there = built_there(source, shelf)
    assert "4 parts are there, from" in caplog.text
    reads = reads_of(store)
    assert min(reads[: len(DESCRIPTIONS)]) > max(reads[len(DESCRIPTIONS) :])
    assert store.content(there) == store.content(built_here(source, f"s3://caches/{tmp_path.name}/local"))


# --- Ray --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES or find_spec("ray") is None, reason="needs the extra ray, and to mount a disk")
def test_nodes_of_ray_that_do_not_see_the_disk_of_the_command_build_it(source, tmp_path, store):
    program = (
        "import sys; from seqvae.data.building import parts; parts.PART_BYTES = 5_000; "
        "from seqvae.cli.manage_cache import build; build('build-cache', sys.argv[1:])"
    )
    (disk := tmp_path / "disk").mkdir()
    (disk / "of the nodes").touch()
    shelf = f"s3://caches/{tmp_path.name}/stored"
    words = ["--data_dir", str(source.data_dir), "--endpoint_url", store.url, "--cache_dir", shelf, "--launcher", "ray"]
    mounted = f'mount -t tmpfs none {disk} && cd {disk} && "$0" "$@" && find . -type f ! -name "*.lock" >&2'
    line = [*IN_NAMESPACE, "sh", "-c", mounted, sys.executable, "-c", program, *words]
    with cluster(2) as nodes:
        own = {"HOME": str(disk), "XDG_CACHE_HOME": str(disk), "TMPDIR": str(disk)}
        ended = subprocess.run(
            line, env=environment(nodes.variables | own), capture_output=True, text=True, timeout=200, cwd=ROOT
        )
    assert ended.returncode == 0, ended.stderr
    place = ended.stdout.splitlines()[-1]
    assert place.startswith(shelf)
    assert [path.name for path in disk.iterdir()] == ["of the nodes"]
    expected = store.content(built_here(source, f"s3://caches/{tmp_path.name}/local"))
    assert store.content(place.removeprefix("s3://")) == expected


def test_made_data_which_are_on_one_machine_are_refused(store):
    with pytest.raises(UsageError, match="--data_dir is missing"):
        build_in_store(
            SourceSettings(allow_remote=True), BuildingSettings(cache_dir="s3://caches/x", launcher="ray"), map
        )
