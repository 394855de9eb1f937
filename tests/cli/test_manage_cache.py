"""`seqvae cache`: what the cache holds, and what is removed from it and what is not."""

import sys

import pytest

from seqvae.cli.main import main
from seqvae.data.flat_file import META
from seqvae.data.frames import path_of
from seqvae.files import take_lock
from tests.support.parquet_files import write_splits


@pytest.fixture
def cache(tmp_path, monkeypatch, capsys):
    """The command in this process, on the cache that `load` builds: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["seqvae", "cache", *words, "--cache_dir", str(tmp_path / "cache")])
        return (main(), *capsys.readouterr())

    return run


@pytest.fixture
def build(load, tmp_path):
    """Build the cache of a small set and return its path; nothing keeps it open."""

    def build_one(name: str):
        columns = {"tokens": [[1, 2], [3]]}
        return load(write_splits(tmp_path / name, train=columns, valid=columns)).path

    return build_one


def test_an_empty_cache_is_a_line(cache, tmp_path):
    assert cache("list") == (0, f"{tmp_path / 'cache'}: 0 caches, 0 B\n", "")
    assert cache("clear") == (0, f"{tmp_path / 'cache'}: 0 caches removed, 0 B freed\n", "")


def test_the_list_names_each_cache_with_its_size_and_its_data(cache, build, tmp_path, monkeypatch):
    monkeypatch.setattr("seqvae.reports.terminal.WIDEST", 300)
    paths = [build("ants"), build("bees")]
    code, out, _ = cache("list")
    assert code == 0
    assert out.startswith(f"{tmp_path / 'cache'}: 2 caches, ")
    for path in paths:
        (line,) = [line for line in out.splitlines() if path.name in line]
        assert line.split()[1:3] == ["tokens", "4"]


def test_a_cache_of_another_version_is_listed_as_outdated_and_can_be_removed(cache, build):
    path = build("ants")
    (path / META).write_text('{"format": 0}')
    assert "outdated" in cache("list")[1]
    assert " 1 cache removed" in cache("clear")[1]
    assert not path.exists()


def test_clearing_removes_what_can_be_built_again_and_nothing_else(cache, build, load, tmp_path):
    path = build("ants")
    kept = [
        tmp_path / "cache" / "precious-0123456789ab-0123456789ab",
        tmp_path / "cache" / "notes.txt",
    ]
    kept[0].mkdir()
    kept[1].touch()
    frames = path_of([[1, 2], [3]], str(tmp_path / "cache"))
    leftover = tmp_path / "cache" / f".{path.name}.building-x"
    leftover.mkdir()
    code, out, _ = cache("clear")
    assert (code, path.exists(), leftover.exists()) == (0, False, False)
    assert " 1 cache removed" in out
    assert "frames: " in out
    assert all(one.exists() for one in kept)
    assert (tmp_path / "cache" / "frames" / frames.rpartition("/")[2]).exists()
    assert load(tmp_path / "ants").path == path  # built again


def test_clearing_names_removes_these(cache, build):
    ants, bees = build("ants"), build("bees")
    assert cache("clear", ants.name)[0] == 0
    assert (ants.exists(), bees.exists()) == (False, True)
    code, _, err = cache("clear", "wasps")
    assert (code, bees.exists()) == (2, True)
    assert err.startswith("seqvae cache: 'wasps' is no cache in ")


def test_a_cache_that_is_open_or_being_built_stays(cache, load, build, tmp_path):
    columns = {"tokens": [[1, 2], [3]]}
    data = load(write_splits(tmp_path / "ants", train=columns, valid=columns))  # held open
    being_built = build("bees")
    with take_lock(tmp_path / "cache" / f".{being_built.name}.lock"):
        out = cache("clear")[1]
    assert " 0 caches removed" in out
    assert out.count("stays: a run uses it, or is building it") == 2
    assert data.path.exists()
    assert being_built.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "list or clear is missing. Usage: "),
        (("lst",), "'lst' is neither list nor clear; did you mean list?"),
        (("list", "x"), "'x': list takes no name."),
        (("clear", "--all"), "--all is not a flag; --help lists them"),
    ],
)
def test_other_words_are_refused(cache, words, message):
    code, out, err = cache(*words)
    assert (code, out) == (2, "")
    assert message in err
