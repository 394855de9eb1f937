"""The cache: found again, built again when it is stale or damaged, whole or not there, whatever happens to its builders."""

import json
import logging
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.data.building import builder as build_module
from seqvae.data.building.finishing import LEAST_LOG_GAP_STD, gap_moments
from seqvae.data.cache import open_cache, prepare_cache, why_unusable
from seqvae.data.dataset import cut_windows
from seqvae.data.flat_file import read_pieces
from seqvae.data.frames import path_of
from seqvae.errors import DataError, StorageError
from tests.support.parquet_files import events_of, flip_bit, ids, labels, meds_table, tokens, write, write_splits

ROOT = Path(__file__).parent.parent.parent
COLUMNS: dict[str, list] = {"id": [1, 2, 3], "tokens": [[1, 2, 3], [4], [5, 6]]}
OTHERS: dict[str, list] = {"id": [8, 9], "tokens": [[1], [2, 2]]}


@pytest.fixture
def directory(tmp_path):
    return write_splits(tmp_path / "d", train=COLUMNS, valid=OTHERS)


@pytest.fixture
def prepare(tmp_path, directory):
    def prepare_again(**source) -> Path:
        return prepare_cache(
            SourceSettings(data_dir=str(directory), **source), CacheSettings(cache_dir=str(tmp_path / "cache"))
        )

    return prepare_again


@pytest.fixture
def builds(monkeypatch):
    """How often a cache was built."""
    built = []

    def counting(*arguments):
        built.append(arguments)
        return build_module.build(*arguments)

    monkeypatch.setattr("seqvae.data.cache.build", counting)
    return built


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


# Found again, or not


def test_a_second_start_finds_the_cache(prepare, builds):
    assert prepare() == prepare()
    assert len(builds) == 1


@pytest.mark.parametrize("change", ["touched", "rewritten", "added", "renamed", "removed"])
def test_changed_files_make_a_new_cache_and_are_reported(prepare, builds, directory, change, caplog):
    write(directory / "train/b.parquet", {"id": [4], "tokens": [[7]]})
    first = prepare()
    path = directory / "train/b.parquet"
    match change:
        case "touched":
            os.utime(path, ns=(1, 1))
        case "rewritten":  # of the same size, at the same time
            status = path.stat()
            write(path, {"id": [4], "tokens": [[5]]})
            assert path.stat().st_size == status.st_size
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        case "added":
            write(directory / "train/c.parquet", {"id": [5], "tokens": [[7]]})
        case "renamed":
            path.rename(directory / "train/c.parquet")
        case "removed":
            path.unlink()
    second = prepare()
    assert second != first
    assert len(builds) == 2
    assert not first.exists()
    assert "the Parquet files have changed since their cache was built" in caplog.text


def test_other_options_have_caches_of_their_own(prepare, builds):
    assert prepare() != prepare(vocabulary_size=100)
    assert prepare() == prepare()
    assert len(builds) == 2


def test_a_label_file_belongs_to_what_a_cache_is_of(prepare, builds, tmp_path):
    path = tmp_path / "labels.csv"
    for label in ("x", "y"):
        path.write_text("id,label\n" + "".join(f"{one},{label}\n" for one in (1, 2, 3, 8, 9)))
        opened = open_cache(prepare(label_path=str(path)), LengthSettings())
        assert labels(opened.splits["train"], opened.description) == [label] * 3
    assert len(builds) == 1


def test_other_labels_and_names_of_columns_read_no_sequence_again(prepare, builds, directory, tmp_path):
    for split, table in (("train", COLUMNS), ("valid", OTHERS)):
        odd = [number % 2 for number in table["id"]]
        write(directory / f"{split}.parquet", table | {"odd": odd, "word": [f"w{number}" for number in odd]})
    path = tmp_path / "labels.csv"
    path.write_text("id,label\n" + "".join(f"{one},{one}\n" for one in (1, 2, 3, 8, 9)))
    wanted: list[tuple[dict[str, str], list[str] | None]] = [
        ({"label_column": "odd"}, ["1", "0", "1"]),
        ({"label_column": "word"}, ["w1", "w0", "w1"]),
        ({"label_path": str(path)}, ["1", "2", "3"]),
        ({"id_column": "id"}, None),
        ({"id_column": "id", "sequence_column": "tokens", "kind": "tokens"}, None),
        ({}, None),
    ]
    for flags, found in wanted:
        opened = open_cache(prepare(**flags), LengthSettings())
        assert tokens(opened.splits["train"]) == COLUMNS["tokens"]
        assert ids(opened.splits["train"]) == COLUMNS["id"]
        if found is not None:
            assert labels(opened.splits["train"], opened.description) == found
        else:
            assert opened.description.classes == ()
        unused = [name for name in ("odd", "word") if name != flags.get("label_column")]
        assert f"columns that are not used: {', '.join(map(repr, unused))}" in opened.notes
    assert len(builds) == 1
    prepare(id_column="none", vocabulary_size=7)
    assert len(builds) == 2


def test_another_id_of_one_sequence_a_row_reads_no_sequence_again(prepare, builds, directory, tmp_path):
    rows = {"one": COLUMNS | {"name": ["a", "b", "b"]}, "two": {"id": [4], "tokens": [[7]], "name": ["d"]}}
    for name, table in rows.items():
        write(directory / "train" / f"{name}.parquet", table)
    (directory / "train.parquet").unlink()
    write(directory / "valid.parquet", OTHERS | {"name": ["y", "z"]})
    path = tmp_path / "labels.csv"
    path.write_text("name,label\n" + "".join(f"{one},{one}\n" for one in "abdyz"))
    for flags, found in (
        ({}, [1, 2, 3, 4]),
        ({"id_column": "name"}, ["a", "b", "b", "d"]),
        ({"id_column": "none"}, [0, 1, 2, 3]),
        ({"id_column": "name", "label_path": str(path)}, ["a", "b", "b", "d"]),
        ({"id_column": "id", "label_column": "name"}, [1, 2, 3, 4]),
    ):
        opened = open_cache(cache := prepare(**flags), LengthSettings())
        assert why_unusable(cache) is None
        assert tokens(opened.splits["train"]) == [*COLUMNS["tokens"], [7]]
        assert ids(opened.splits["train"]) == found
        assert any("met before" in note for note in opened.notes) == (flags.get("id_column") == "name")
        assert opened.description.classes == (("a", "b", "d", "y", "z") if len(flags) == 2 else ())
    assert len(builds) == 1
    write(directory / "valid.parquet", OTHERS | {"name": ["b", "z"]})
    prepare()
    with pytest.raises(DataError, match="1 sequence in both train and valid, such as id 'b' of column 'name'"):
        prepare(id_column="name")
    assert len(builds) == 2


@pytest.mark.parametrize("flags", [{"bad_values": "drop"}, {"test_fraction": 0.5, "vocabulary_size": 9}])
def test_an_id_that_decides_which_sequences_a_split_has_makes_a_cache_of_its_own(prepare, builds, directory, flags):
    for split, table in (("train", COLUMNS), ("valid", OTHERS)):
        write(directory / f"{split}.parquet", table | {"name": [f"{split} {one}" for one in table["id"]]})
    prepare(**flags)
    prepare(id_column="name", **flags)
    assert len(builds) == 2


def test_a_cache_that_shares_its_files_outlives_the_other(prepare, builds, directory):
    write(directory / "train.parquet", COLUMNS | {"odd": [1, 0, 1]})
    write(directory / "valid.parquet", OTHERS | {"odd": [0, 1]})
    first, second = prepare(), prepare(label_column="odd")
    shutil.rmtree(first)
    assert why_unusable(second) is None
    assert prepare() == first
    assert len(builds) == 1


def test_equal_data_elsewhere_have_a_cache_of_their_own(prepare, builds, directory, tmp_path):
    first = prepare()
    shutil.copytree(directory, tmp_path / "copy")
    settings = SourceSettings(data_dir=str(tmp_path / "copy"))
    assert prepare_cache(settings, CacheSettings(cache_dir=str(first.parent))) != first
    assert first.exists()


# Damage


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_flip(path: Path) -> None:
    flip_bit(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, Path.unlink])
@pytest.mark.parametrize("file", ["meta.json", "train/tokens.bin", "train/offsets.bin", "valid/sequences.arrow"])
def test_a_damaged_cache_is_built_again_and_reported(prepare, builds, caplog, damage, file):
    path = prepare() / file
    damage(path)
    assert why_unusable(prepare()) is None
    assert len(builds) == 2
    assert "cannot be used (" in caplog.text
    assert path.name in caplog.text
    assert "building it again" in caplog.text


def test_a_cache_of_another_version_is_built_again(prepare, builds, caplog):
    path = prepare() / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    prepare()
    assert len(builds) == 2
    assert "it has format 0, this version writes" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", '"meta"', '{"format": 3, "splits": 1}', "\x00"])
def test_a_description_that_is_none_is_damage(prepare, builds, content):
    (prepare() / "meta.json").write_text(content)
    prepare()
    assert len(builds) == 2


def test_no_flipped_bit_of_a_description_is_taken_for_whole(prepare):
    path = prepare()
    intact = (path / "meta.json").read_bytes()
    for position in np.random.default_rng(0).integers(0, len(intact), 50).tolist():
        flip_bit(path / "meta.json", position, bit=position % 7)
        blank = intact[position : position + 1].isspace()
        assert why_unusable(path) is not None or blank
        (path / "meta.json").write_bytes(intact)
    assert why_unusable(path) is None


def test_a_cache_too_large_to_be_read_at_every_start_is_checked_by_sizes(prepare, monkeypatch):
    path = prepare()
    flip_bit(path / "train/tokens.bin", 0)
    assert why_unusable(path) == "tokens.bin of train is damaged"
    monkeypatch.setattr("seqvae.data.cache.VERIFIED_BYTES", 0)
    assert why_unusable(path) is None


# Builders that fail


def test_data_that_are_refused_leave_nothing_behind(prepare, directory, tmp_path):
    write(directory / "train.parquet", {"id": [1, 2], "tokens": pa.array([[1], None])})
    with pytest.raises(DataError, match="row 1"):
        prepare()
    assert leftovers(tmp_path / "cache") == []


START = """
import sys
from seqvae.data.cache import prepare_cache
from seqvae.errors import DataError, StorageError
from seqvae.config.data import CacheSettings, SourceSettings
{before}
try:
    print(prepare_cache(SourceSettings(data_dir=sys.argv[1]), CacheSettings(cache_dir=sys.argv[2])))
except StorageError as error:
    sys.exit(f"StorageError {{error}}")
"""


def start(directory: Path, cache: Path, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", START.format(before=before), str(directory), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


SLOW_BUILD = """
import time
from pathlib import Path
from seqvae.data import cache
build = cache.build
def slow(*arguments):
    built = build(*arguments)
    with Path(sys.argv[2], "builds").open("a") as file:
        file.write("built ")
    Path(sys.argv[2], "started").touch()
    time.sleep({seconds})
    return built
cache.build = slow
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def test_two_processes_that_start_together_build_one_cache(directory, tmp_path):
    cache = tmp_path / "cache"
    both = [start(directory, cache, SLOW_BUILD.format(seconds=0.5)) for _ in range(2)]
    (one, errors_one), (other, errors_other) = [process.communicate(timeout=60) for process in both]
    assert errors_one == errors_other == ""
    assert one == other
    assert (cache / "builds").read_text() == "built "


def test_what_a_killed_builder_left_is_cleared_away(prepare, directory, tmp_path):
    cache = tmp_path / "cache"
    builder = start(directory, cache, SLOW_BUILD.format(seconds=60))
    wait_for(cache / "started")
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    assert [name for name in leftovers(cache) if ".building-" in name]
    path = prepare()
    assert leftovers(cache) == ["builds", path.name, "started"]
    assert why_unusable(path) is None


FULL_DISK = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes}, {bytes}))"


@pytest.mark.skipif(os.name != "posix", reason="file sizes cannot be limited here")
@pytest.mark.parametrize(
    ("kind", "limit"), [("tokens", 0), ("tokens", 20_000), ("scattered events", 100), ("scattered events", 100_000)]
)
def test_a_disk_that_fills_up_while_building_is_reported_and_leaves_nothing(tmp_path, kind, limit):
    if kind == "tokens":
        rows = [[number % 1000] * 20 for number in range(5000)]
        directory = write_splits(tmp_path / "d", train={"tokens": rows}, valid={"tokens": rows[:5]})
    else:
        train = {name: values * 20_000 for name, values in events_of(1, 2).items()}
        directory = write_splits(tmp_path / "d", train=train, valid=events_of(3))
    process = start(directory, tmp_path / "cache", FULL_DISK.format(bytes=limit))
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1
    assert message.startswith(f"StorageError {tmp_path}/cache: the disk is full (")
    assert message.endswith("Free some space or choose another --cache_dir.\n")
    assert message.count("\n") == 1
    assert leftovers(tmp_path / "cache") == []


def test_a_cache_directory_that_is_a_file_is_a_matter_of_storage(directory, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(StorageError, match=r"cache: cannot be written .* Choose another --cache_dir"):
        prepare_cache(SourceSettings(data_dir=str(directory)), CacheSettings(cache_dir=str(tmp_path / "cache")))


def test_without_a_home_there_must_be_a_cache_dir(directory, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(StorageError, match=r"there is no home directory\. Choose a directory with --cache_dir"):
        prepare_cache(SourceSettings(data_dir=str(directory)), CacheSettings())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no such place")
def test_a_home_that_cannot_be_written_is_named_with_the_flag_for_another_place(directory, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")  # where even root can make nothing
    message = r"^/proc/nowhere/.cache/seqvae: cannot be written \(.*another --cache_dir"
    with pytest.raises(StorageError, match=message):
        prepare_cache(SourceSettings(data_dir=str(directory)), CacheSettings())
    with pytest.raises(StorageError, match=message):
        path_of([[1, 2, 3]])


def test_the_default_is_in_the_users_cache_directory(directory, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepare_cache(SourceSettings(data_dir=str(directory)), CacheSettings()).parent == tmp_path / "xdg/seqvae"


# Opened


def test_a_second_start_is_quick_whatever_the_size(tmp_path, load):
    rng = np.random.default_rng(0)
    offsets = np.arange(0, 4_000_001, 20, dtype=np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(rng.integers(0, 50, 4_000_000, dtype=np.int32)))
    directory = write_splits(tmp_path / "d", train={"tokens": column}, valid={"tokens": column.slice(0, 10)})
    load(directory)
    began = time.perf_counter()
    data = load(directory)
    data.splits["train"].gather(np.array([0]))
    assert time.perf_counter() - began < 0.5
    assert len(data.splits["train"]) == 200_000


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_split_can_be_pickled_and_leaves_the_data_behind(load, tmp_path, in_memory):
    columns = {"id": list(range(10_000)), "tokens": [[1] * 50] * 10_000}
    other = {"id": [-1], "tokens": [[1]]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=other), in_memory=in_memory)
    split = data.splits["train"]
    before = tokens(split)
    pickled = pickle.dumps(split)
    assert len(pickled) < 5000
    copy = pickle.loads(pickled)
    assert tokens(copy) == before
    assert ids(copy) == ids(split)


def test_in_memory_the_files_are_needed_no_more(prepare):
    path = prepare()
    mapped = open_cache(path, LengthSettings())
    held = open_cache(path, LengthSettings(), in_memory=True)
    wanted = tokens(mapped.splits["train"])
    assert tokens(held.splits["train"]) == wanted
    assert isinstance(mapped.splits["train"]._arrays["tokens"].base, np.memmap)
    assert not isinstance(held.splits["train"]._arrays["tokens"].base, np.memmap)
    shutil.rmtree(path)
    assert tokens(held.splits["train"]) == wanted


def test_an_open_cache_survives_that_it_is_replaced(prepare, directory):
    opened = open_cache(prepare(), LengthSettings())
    before = tokens(opened.splits["train"])
    write(directory / "train.parquet", {"id": [1], "tokens": [[9]]})
    prepare()
    assert tokens(opened.splits["train"]) == before


def test_a_replaced_cache_is_deleted_unless_a_process_has_it_open(prepare, directory):
    held = prepare()
    opened = open_cache(held, LengthSettings())
    write(directory / "train.parquet", {"id": [1], "tokens": [[9]]})
    free = prepare()
    assert held.exists()
    assert tokens(pickle.loads(pickle.dumps(opened.splits["train"]))) == tokens(opened.splits["train"])
    del opened
    write(directory / "train.parquet", {"id": [1], "tokens": [[8]]})
    prepare()
    assert not held.exists()
    assert not free.exists()


def test_nothing_is_logged_above_information_when_all_is_well(prepare, caplog):
    with caplog.at_level(logging.INFO):
        prepare()
        prepare()
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert "building the cache" in caplog.text


# The length cap


def slow_windows(lengths: list[int], cap: int, how: str, stride: int | None) -> list[tuple[int, int, int]]:
    """(sequence, first step within it, steps), one at a time."""
    windows = []
    for sequence, steps in enumerate(lengths):
        if steps <= cap:
            windows.append((sequence, 0, steps))
        elif how == "truncate":
            windows.append((sequence, 0, cap))
        elif how == "keep_last":
            windows.append((sequence, steps - cap, cap))
        elif how == "split":
            start = 0
            while True:
                windows.append((sequence, start, min(cap, steps - start)))
                if start + cap >= steps:
                    break
                start += stride or cap
    return windows


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from(["truncate", "keep_last", "drop", "split"]),
    st.data(),
)
def test_windows_of_the_length_cap(lengths, cap, how, data):
    stride = data.draw(st.none() | st.integers(1, cap)) if how == "split" else None
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    settings = LengthSettings(max_sequence_length=cap, long_sequences=how, window_stride=stride)
    windows = cut_windows(offsets, settings)
    owners = np.arange(len(lengths)) if windows.owners_N is None else windows.owners_N
    found = zip(owners, windows.starts_N - offsets[owners], windows.lengths_N, strict=True)
    assert [tuple(map(int, window)) for window in found] == slow_windows(lengths, cap, how, stride)
    assert windows.over_cap == sum(steps > cap for steps in lengths)
    assert windows.lengths_N.dtype == np.int32


LONG = {"id": [1, 2, 3], "tokens": [[1, 2, 3, 4, 5], [1], [5, 4, 3]], "label": ["x", "y", "z"]}


@pytest.mark.parametrize(
    ("how", "stride", "wanted", "done"),
    [
        ("truncate", None, {1: [[1, 2]], 2: [[1]], 3: [[5, 4]]}, "only their first 2 are used"),
        ("keep_last", None, {1: [[4, 5]], 2: [[1]], 3: [[4, 3]]}, "only their last 2 are used"),
        ("drop", None, {2: [[1]]}, "they are left out"),
        (
            "split",
            None,
            {1: [[1, 2], [3, 4], [5]], 2: [[1]], 3: [[5, 4], [3]]},
            "they are cut into windows, 6 sequences in all",
        ),
        (
            "split",
            1,
            {1: [[1, 2], [2, 3], [3, 4], [4, 5]], 2: [[1]], 3: [[5, 4], [4, 3]]},
            "they are cut into windows, 7 sequences in all",
        ),
    ],
)
def test_long_sequences_are_cut_as_requested_and_counted(tmp_path, load, how, stride, wanted, done):
    directory = write_splits(tmp_path / "d", train=LONG, valid={"id": [9], "tokens": [[1]], "label": ["x"]})
    data = load(directory, max_sequence_length=2, long_sequences=how, window_stride=stride, label_column="label")
    found: dict[int | str, list[list[int]]] = {}
    for id_, sequence in zip(ids(data.splits["train"]), tokens(data.splits["train"]), strict=True):
        found.setdefault(id_, []).append(sequence)
    assert found == wanted
    assert f"train: 2 of 3 sequences longer than 2 tokens: {done} (--long_sequences {how})" in data.notes
    assert not [note for note in data.notes if note.startswith("valid: ")]
    label_of: dict[int | str, str] = {1: "x", 2: "y", 3: "z"}
    assert labels(data.splits["train"], data.description) == [label_of[id_] for id_ in ids(data.splits["train"])]


def test_a_split_of_which_nothing_is_left_is_refused(tmp_path, load):
    directory = write_splits(tmp_path / "d", train={"tokens": [[1]]}, valid={"tokens": [[1, 1]]})
    with pytest.raises(
        DataError,
        match="drop leaves nothing of the valid split: all 1 sequences have more than --max_sequence_length 1",
    ):
        load(directory, max_sequence_length=1, long_sequences="drop")


def timed(*sequences: list[float]) -> dict[str, list]:
    """Sequences of one variable at these times."""
    rows = [(number, time) for number, times in enumerate(sequences) for time in times]
    return {
        "id": [f"{len(rows)}-{number}" for number, _ in rows],
        "time": [time for _, time in rows],
        "variable": ["x"] * len(rows),
        "value": [1.0] * len(rows),
    }


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e9])
def test_gaps_are_measured_over_the_later_steps_of_the_training_split_in_any_unit(tmp_path, load, monkeypatch, unit):
    monkeypatch.setattr("seqvae.data.building.finishing.read_pieces", partial(read_pieces, items=2))
    train = [[0, 2, 10], [5], [0, 32]]
    columns = timed(*([unit * time for time in times] for times in train))
    found = load(write_splits(tmp_path / "d", train=columns, valid=timed([0.0, 1e5]))).description
    log_gaps = np.log(unit * np.array([2.0, 8.0, 32.0]))
    assert found.log_gap_mean == pytest.approx(log_gaps.mean(), rel=1e-6)
    assert found.log_gap_std == pytest.approx(log_gaps.std(), rel=1e-6)
    assert found.shortest_gap == pytest.approx(unit)


def test_gaps_of_nothing_or_all_alike_have_a_scale_nevertheless():
    assert gap_moments(iter, [[np.zeros(3), np.zeros(0)]]) == (0.0, 1.0, 1.0)
    assert gap_moments(iter, [[]]) == (0.0, 1.0, 1.0)
    assert gap_moments(iter, [[np.full(3, math.e)]]) == pytest.approx((1.0, LEAST_LOG_GAP_STD, math.e / 2))


def test_a_gap_of_zero_counts_as_the_shortest():
    found = gap_moments(iter, [[np.array([0.0, 2 * math.e**2])]])
    assert found.shortest_gap == pytest.approx(math.e**2)
    assert found.log_gap_mean == pytest.approx(2 + math.log(2) / 2)


def test_it_is_known_which_variables_have_values_in_the_training_split(tmp_path, load):
    columns = events_of(1, 2)
    columns["value"] = [60.0, None, 70.0] * 2
    description = load(write_splits(tmp_path / "d", train=columns, valid=events_of(3))).description
    assert dict(zip(description.names, description.valued, strict=True)) == {
        "<unknown>": False,
        "bp": False,
        "hr": True,
    }


def test_the_share_of_the_training_steps_that_hold_a_variable_is_known(tmp_path, load):
    data = load(write_splits(tmp_path / "d", train=events_of(1, 2), valid=events_of(3)))
    steps, number_V = data.counts["train"]["steps"], data.counts["train"]["per_name"]
    assert data.description.presence_rates == tuple((number + 0.5) / (steps + 1) for number in number_V)
    assert all(0 < rate < 1 for rate in data.description.presence_rates)


def test_a_window_of_events_begins_without_a_gap(tmp_path, load):
    directory = write_splits(tmp_path / "d", train=meds_table(1), valid=meds_table(2))
    for how in ("split", "keep_last"):
        data = load(directory, max_sequence_length=1, long_sequences=how)
        batch = data.splits["train"].gather(np.arange(len(data.splits["train"])))
        assert torch.equal(batch.gaps_BT, torch.zeros_like(batch.gaps_BT))
