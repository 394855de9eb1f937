"""What follows from the lengths of many sequences: the same numbers as from few, and held once by the processes of a machine."""

import errno
import io
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measure import write_token_lists
from benchmarks.speed import planning
from seqvae.config.data import BatchSettings, CacheSettings, LengthSettings, SourceSettings
from seqvae.data.batching import Limits, choose_sequences, cut_batches, grid_lengths, hashed, midpoints, plan_epoch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.dataset import SequenceSet
from seqvae.data.flat_file import map_arrays, shared_arrays
from tests.support.fake_sequences import log_normal_lengths

ROOT = Path(__file__).parent.parent.parent
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=200).map(lambda lengths: np.array(lengths, np.int32))


# --- The same numbers --------------------------------------------------------------------------------------------------


def sorted_at_once(lengths_N: np.ndarray, limits: Limits, *, bucketing: bool) -> tuple[np.ndarray, list[int]]:
    """Return the order of a cut and the bounds of its buckets, with one sort of all sequences in 64 bits."""
    if limits.grid:
        lengths_N = np.array([min(top for top in limits.grid if top >= length) for length in lengths_N])
    if not bucketing or limits.pad_to is not None:
        return np.arange(len(lengths_N)), [0, len(lengths_N)]
    sizes: list[int] = []
    bucket_of, full = {}, 0
    for length in sorted(set(lengths_N.tolist()), reverse=True):
        if not sizes or sizes[-1] >= full:
            sizes.append(0)
            full = 4 * limits.sequences_of(length)
        sizes[-1] += int((lengths_N == length).sum())
        bucket_of[length] = len(sizes) - 1
    if len(sizes) > 1 and sizes[-1] < full:
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    bucket_N = np.array([min(bucket_of[length], len(sizes) - 1) for length in lengths_N.tolist()])
    return np.argsort(bucket_N, kind="stable"), np.cumsum([0, *sizes]).tolist()


@settings(deadline=None)
@given(
    LENGTHS,
    st.none() | st.integers(1, 20),
    st.integers(60, 500),
    st.sampled_from([None, None, 60]),
    st.sampled_from([None, 100.0]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.integers(1, 50),
)
def test_a_cut_made_in_pieces_is_that_of_one_sort(
    lengths, batch_size, tokens, pad_to, quadratic, shapes, bucketing, piece
):
    grid = grid_lengths(lengths, shapes) if shapes and pad_to is None else ()
    limits = Limits(batch_size, tokens, pad_to, quadratic=quadratic, grid=grid)
    with patch("seqvae.data.batching.PIECE", piece):
        cut = cut_batches(lengths, limits, bucketing=bucketing)
    order, starts = sorted_at_once(lengths, limits, bucketing=bucketing)
    assert cut.order_N.tolist() == order.tolist()
    assert cut.bucket_starts.tolist() == starts


@settings(deadline=None)
@given(LENGTHS, st.integers(60, 500), st.integers(0, 2**63), st.integers(0, 100), st.booleans())
def test_numbers_of_half_the_size_are_shuffled_as_those_of_64_bits_are(lengths, tokens, seed, epoch, drop_last):
    lengths = np.resize(lengths, 501)
    cut = cut_batches(lengths, Limits(None, tokens, None), drop_last=drop_last)
    assert cut.order_N.dtype == np.int32
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    shuffled = cut.order_N.astype(np.int64)
    for begin, end in pairwise(cut.bucket_starts.tolist()):
        random.shuffle(shuffled[begin:end])
    plan, wide = (
        plan_epoch(cut, seed, epoch),
        plan_epoch(cut._replace(order_N=cut.order_N.astype(np.int64)), seed, epoch),
    )
    assert plan.order_N.tolist() == shuffled.tolist()
    assert [plan.batch(k).tolist() for k in range(plan.batches)] == [
        wide.batch(k).tolist() for k in range(plan.batches)
    ]


def test_the_plan_of_these_lengths_is_what_it_has_always_been():
    """A run goes on in the middle of an epoch that another version began."""
    lengths = (np.arange(1000) * 7919 % 97 + 3).astype(np.int32)
    plan = plan_epoch(cut_batches(lengths, Limits(None, 500, None)), seed=3, epoch=2)
    assert (plan.batches, plan.batch(0).tolist(), plan.batch(77).tolist()) == PLANNED_BEFORE


PLANNED_BEFORE = (115, [117, 505, 638, 929, 760, 469], [458, 882, 724, 397, 652, 591])


@settings(deadline=None)
@given(LENGTHS, st.data(), st.integers(1, 50), st.sampled_from([1, 4, 1024]))
def test_sequences_are_chosen_as_by_sorting_all(lengths, data, piece, parts):
    number = data.draw(st.integers(1, len(lengths)))
    owners = data.draw(st.none() | st.integers(1, 4).map(lambda windows: np.arange(len(lengths)) // windows))
    stored = np.arange(len(lengths)) if owners is None else owners
    by_all = np.lexsort((hashed(stored), lengths))[midpoints(len(lengths), number)]
    with patch("seqvae.data.batching.PIECE", piece), patch("seqvae.data.batching.PARTS_PER_CHOICE", parts):
        assert choose_sequences(lengths, owners, number).tolist() == sorted(by_all.tolist())


def test_sequences_are_chosen_from_many_as_by_sorting_all():
    lengths = log_normal_lengths(200_000)
    for number in (1, 256, 20_000, 199_999):
        by_all = np.lexsort((hashed(np.arange(200_000)), lengths))[midpoints(200_000, number)]
        assert choose_sequences(lengths, None, number).tolist() == sorted(by_all.tolist())


# --- Once per machine --------------------------------------------------------------------------------------------------


@contextmanager
def sharing(from_sequences: int = 0) -> Iterator[None]:
    with patch("seqvae.data.dataset.SHARED_FROM", from_sequences):
        yield


def shared_files(directory: Path) -> dict[str, list[Path]]:
    return {name: sorted(directory.rglob(f"{name}-*.shared")) for name in ("lengths", "cut", "plan")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    write_token_lists(folder / "data" / "all.parquet", 3_500, longest=200)
    return folder


def make_data(folder: Path, cache: str, **options: Any) -> SequenceDataModule:
    """The data with a cache of their own."""
    batches = BatchSettings(**{"tokens_per_batch": 1000, **options.pop("batches", {})})
    source = SourceSettings(data_dir=str(folder / "data"), validation_fraction=0.15)
    lengths = options.pop("lengths", LengthSettings())
    return SequenceDataModule(source, lengths, CacheSettings(cache_dir=str(folder / cache)), batches, **options)


def everything_planned(data: SequenceDataModule) -> list[Any]:
    """All batches of two epochs and of validation and prediction, and what else is chosen by length."""
    loaders = [data.val_dataloader(), data.predict_dataloader()]
    plans = [data.plan_of_epoch(0), data.plan_of_epoch(1), *(loader._plan_of_epoch(0) for loader in loaders)]
    batches = [[plan.batch(k).tolist() for k in range(plan.batches)] for plan in plans]
    chosen = [batch.sequences_B.tolist() for batch in (*data.score_batches(), *data.probe_batches())]
    return [batches, chosen, data.limits, data.fewest_sequences, data.summary(), [*map(len, loaders)]]


@pytest.mark.parametrize(
    "options",
    [
        {"batches": {"pad_grid": 3, "drop_last": True}, "limit_val_batches": 3},
        {"batches": {"bucketing": False}, "limit_val_batches": 0.3},
        {"lengths": LengthSettings(max_sequence_length=50, long_sequences="split")},
        {"lengths": LengthSettings(max_sequence_length=50, long_sequences="keep_last")},
        {"lengths": LengthSettings(max_sequence_length=50, long_sequences="drop")},
        {"lengths": LengthSettings(max_sequence_length=50)},
    ],
    ids=lambda options: str(next(iter(options.values()))),
)
def test_shared_plans_are_those_of_a_process_on_its_own(folder, options):
    options = {"predict_split": "valid", **options}
    alone = everything_planned(make_data(folder, "alone", **options))
    assert not any(shared_files(folder / "alone").values())
    with sharing():
        made = everything_planned(make_data(folder, "shared", **options))
        assert all(shared_files(folder / "shared").values())
        with patch("seqvae.data.flat_file.wait_for_lock", side_effect=AssertionError("it is there already")):
            data = make_data(folder, "shared", **options)
            windows = [data.split(name).windows for name in ("train", "valid")]
    assert made == alone
    for own, mapped in zip(
        [data.split(name).windows for name in ("train", "valid") for data in [make_data(folder, "alone", **options)]],
        windows,
        strict=True,
    ):
        assert [np.array(one).tolist() for one in own] == [np.array(one).tolist() for one in mapped]


def test_plans_of_epochs_that_are_over_are_removed(folder):
    with sharing():
        data = make_data(folder, "epochs")
        for epoch in range(6):
            plan = data.plan_of_epoch(epoch)
            first = plan.batch(0).tolist()
        data = make_data(folder, "epochs")
        assert data.plan_of_epoch(5).batch(0).tolist() == first
    assert len(shared_files(folder / "epochs")["plan"]) == 2
    assert not list(folder.rglob("*.partial"))


ONE_OF_TWO = """
import sys, time
from pathlib import Path
import numpy as np
from seqvae.data.flat_file import shared_arrays

def make():
    print("made")
    time.sleep(2)
    return [np.arange(1000, dtype=np.int32)]

[array] = shared_arrays(Path(sys.argv[1]), "cut", ("key",), make)
assert array.tolist() == list(range(1000))
for line in open("/proc/self/maps"):
    if ".shared" in line:
        print(*line.split()[1:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps")
def test_of_processes_that_start_together_one_makes_what_both_map(tmp_path):
    lines = of_two_processes(ONE_OF_TWO, tmp_path)
    assert sorted(map(len, lines)) == [1, 2]
    assert lines[0][-1] == lines[1][-1]
    assert lines[0][-1].startswith("r--")


A_DATA_MODULE = """
import sys
from pathlib import Path
from tests.data.test_shared_plan import make_data, sharing

with sharing():
    data = make_data(Path(sys.argv[1]), "processes")
    plan = data.plan_of_epoch(0)
    for line in open("/proc/self/maps"):
        if ".shared" in line:
            print(*line.split()[2:])
    print([plan.batch(k).tolist() for k in range(plan.batches)])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps")
def test_data_modules_of_two_processes_map_the_same_lengths_cut_and_plan(folder):
    make_data(folder, "processes").prepare_data()
    lines = of_two_processes(A_DATA_MODULE, folder)
    assert sorted(lines[0]) == sorted(lines[1])
    names = {Path(line.split()[-1]).name.split("-")[0] for line in lines[0][:-1]}
    assert names == {"lengths", "cut", "plan"}


def of_two_processes(program: str, folder: Path) -> list[list[str]]:
    """Return the lines of two processes that begin together."""
    command = [sys.executable, "-c", program, str(folder)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    lines = [process.communicate(timeout=120)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    return lines


def test_a_loader_process_gets_a_split_without_its_lengths_and_maps_them(folder):
    with sharing():
        train = make_data(folder, "pickled").split("train")
        lengths = train.lengths_N.tolist()
        sent = pickle.dumps(train)
        assert len(sent) < 2_000
        with patch("seqvae.data.dataset.cut_windows", side_effect=AssertionError("cut again")):
            theirs: SequenceSet = pickle.loads(sent)
            assert theirs.lengths_N.tolist() == lengths


KILLED = """
import os, signal, sys
from pathlib import Path
from unittest.mock import patch
import numpy as np
from seqvae.data.flat_file import shared_arrays

def write_half(file, array):
    file.write(array.tobytes()[: array.nbytes // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

with patch("numpy.save", write_half):
    shared_arrays(Path(sys.argv[1]), "plan", (sys.argv[2],), lambda: [np.arange(1000)])
"""


@pytest.mark.skipif(os.name != "posix", reason="kills")
def test_a_writer_that_is_killed_leaves_nothing_that_a_later_one_trips_over(tmp_path):
    for key in ("one", "other"):  # the second is never asked for again
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), key], cwd=ROOT, timeout=60)
        assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*.partial"))) == 2
    [array] = shared_arrays(tmp_path, "plan", ("one",), lambda: [np.arange(1000)])
    assert array.tolist() == list(range(1000))
    assert not list(tmp_path.glob(".*.partial"))
    assert [path.name.split("-")[0] for path in tmp_path.glob("*.shared")] == ["plan"]


@pytest.mark.parametrize("kept", [0, 5, 100, 1000])
def test_a_file_that_was_cut_short_is_written_again(tmp_path, kept):
    wanted: list[np.ndarray] = [np.arange(3), np.arange(1001, dtype=np.int32), np.zeros(0, np.int64), np.arange(7)]
    shared_arrays(tmp_path, "cut", (), lambda: wanted)
    [path] = tmp_path.glob("*.shared")
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    assert map_arrays(path) is None
    found = shared_arrays(tmp_path, "cut", (), lambda: wanted)
    assert path.read_bytes() == whole
    assert [array.tolist() for array in found] == [array.tolist() for array in wanted]
    assert all(array.flags.aligned and not array.flags.writeable for array in found)


def test_a_file_of_what_is_no_numbers_is_not_mapped(tmp_path):
    with (tmp_path / "cut-1.shared").open("wb") as file:
        np.save(file, np.array([None, {}]))
    assert map_arrays(tmp_path / "cut-1.shared") is None


@pytest.mark.skipif(sys.platform != "linux", reason="a directory where not even root may write")
def test_where_nothing_may_be_written_a_process_has_its_own():
    assert [array.tolist() for array in shared_arrays(Path("/sys/kernel"), "cut", (), lambda: [np.arange(3)])] == [
        [0, 1, 2]
    ]


def test_a_full_disk_costs_neither_the_work_nor_the_run(tmp_path):
    calls = []

    def make() -> list[np.ndarray]:
        calls.append(1)
        return [np.arange(3)]

    with patch("numpy.save", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        assert [array.tolist() for array in shared_arrays(tmp_path, "cut", (), make)] == [[0, 1, 2]]
    assert len(calls) == 1
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_other_contents_and_settings_have_other_files(tmp_path):
    for number, key in enumerate((("a", 1), ("a", 2), ("b", 1))):
        [array] = shared_arrays(tmp_path, "lengths", key, partial(list, [np.full(2, number)]))
        assert array.tolist() == [number, number]


# --- Its benchmark -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps_rollup")
def test_the_benchmark_lets_a_second_process_map_what_the_first_one_made(tmp_path, monkeypatch, capsys):
    np.arange(0, 50_001, 5).tofile(tmp_path / "offsets.bin")
    files = []
    for process in ("on its own", "first", "second"):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
        planning.start(tmp_path, process)
        seconds, memory = map(json.loads, capsys.readouterr().out.splitlines())
        assert seconds["to the first batch s"] >= seconds["plan s"] >= 0
        assert set(memory) == {"own MB", "mapped MB"}
        files.append({path.name: path.stat().st_ino for path in tmp_path.glob("*.shared")})
    assert not files[0]
    assert files[1] == files[2]
    assert len(files[1]) == 5
