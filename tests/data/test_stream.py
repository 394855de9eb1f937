"""Training on a cache of which only a part lies on this disk: the same sequences, each once an epoch, within the limit."""

import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqvae.config.data import BatchSettings, CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.data import stream as stream_module
from seqvae.data.batch import checksum_of
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.loader import BatchLoader
from seqvae.data.stored_caches import clear_caches
from seqvae.data.stream import GROUPS, REQUEST_BYTES, STREAMED, draw_groups, joined_ranges, punch_hole
from seqvae.errors import DataError, ExitCode, SettingsError, UsageError
from tests.support.launched import COLUMNS, ends, start, wait_for_step
from tests.support.parquet_files import write

SEQUENCES = 4000


def write_data(folder: Path, kind: str) -> Path:
    """Write a pool of a few megabytes, of which 10 % validate."""
    random = np.random.default_rng(0)
    lengths_S = random.integers(20, 120, SEQUENCES)
    if kind == "tokens":
        lists = [random.integers(0, 600, length).astype(np.int32) for length in lengths_S]
        return write(folder / "all.parquet", {"tokens": lists}).parent
    if kind == "vectors":
        values = pa.FixedSizeListArray.from_arrays(random.normal(size=4 * lengths_S.sum()).astype(np.float32), 4)
        steps = pa.ListArray.from_arrays(np.append(0, np.cumsum(lengths_S)).astype(np.int32), values)
        return write(folder / "all.parquet", {"values": steps}).parent
    ids = np.repeat(np.arange(SEQUENCES), lengths_S)
    columns = {
        "id": ids,
        "minute": np.arange(len(ids)) * 0.5,
        "variable": np.array(["hr", "bp", "temperature"])[random.integers(0, 3, len(ids))],
        "value": random.normal(size=len(ids)),
    }
    return write(folder / "all.parquet", columns).parent


def module(data_dir: Path, folder: Path, *, limit: str | None, **more) -> SequenceDataModule:
    cache = CacheSettings(cache_dir=str(folder), stream=limit is not None, local_limit=limit or "1GB")
    batches = BatchSettings(tokens_per_batch=2000, pad_grid=0)
    return SequenceDataModule(SourceSettings(data_dir=str(data_dir)), LengthSettings(), cache, batches, **more)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what was fetched lies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "scratch"))
    return tmp_path / "scratch" / "seqvae"


def bytes_on_disk(scratch: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in scratch.glob(f"{STREAMED}-*/*/*.bin"))


@pytest.mark.parametrize("kind", ["tokens", "vectors", "events"])
def test_each_sequence_comes_once_an_epoch_as_it_is_and_the_limit_holds(kind, tmp_path, scratch):
    data_dir = write_data(tmp_path / "data", kind)
    local = module(data_dir, tmp_path / "cache", limit=None)
    whole = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.bin")) if local.data else 0
    streamed = module(data_dir, tmp_path / "cache", limit=f"{whole // 5}B")
    loader, most = streamed.train_dataloader(), 0
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        seen = []
        for number, batch in enumerate(loader):
            seen += batch.sequences_B.tolist()
            expected = local.split("train").gather(batch.sequences_B.numpy(), batch[0].shape[1])
            assert checksum_of(batch) == checksum_of(expected)
            if number % 10 == 0:
                most = max(most, bytes_on_disk(scratch))
        assert sorted(seen) == list(range(len(local.split("train"))))
    assert whole // 40 < most < whole // 5 + 2**19  # beginnings of pages, and blocks that are given back late
    for batches in ("probe_batches", "score_batches"):
        found = [[checksum_of(batch) for batch in getattr(one, batches)()] for one in (local, streamed)]
        assert found[0] == found[1]
    validated = [
        sorted(n for batch in one.val_dataloader() for n in batch.sequences_B.tolist()) for one in (local, streamed)
    ]
    assert validated[0] == validated[1]


def positions(loader: BatchLoader) -> list[tuple[int, int]]:
    return [(batch.position, checksum_of(batch, without=())) for batch in loader]


def test_an_epoch_goes_on_in_its_middle_in_any_number_of_processes_and_under_another_limit(tmp_path, scratch):
    data_dir = write_data(tmp_path / "data", "tokens")
    begun = module(data_dir, tmp_path / "cache", limit="200kB").train_dataloader()
    begun.set_epoch(1)
    expected = positions(begun)
    for number, _ in enumerate(begun, start=1):
        if number == 31:
            state = begun.state_dict()
            break
    for limit in ("120kB", "1GB"):
        goes_on = module(data_dir, tmp_path / "cache", limit=limit).train_dataloader()
        goes_on.load_state_dict(state)
        assert positions(goes_on) == expected[31:]
    turns = []
    for rank in range(2):
        one = module(data_dir, tmp_path / "cache", limit="200kB").train_dataloader()
        one.rank, one.world = rank, 2
        one.load_state_dict(state)
        turns += positions(one)
    own = {position for position, _ in expected}
    assert sorted(turn for turn in turns if turn[0] in own) == expected[31:]


def test_epochs_have_other_orders_and_the_first_begins_with_the_dearest_batch(tmp_path, scratch):
    data = module(write_data(tmp_path / "data", "tokens"), tmp_path / "cache", limit="200kB")
    plans = [data.plan_of_epoch(epoch) for epoch in range(3)]
    assert data.cut.tokens_K[plans[0].turns_K[0]] == data.cut.tokens_K.max()
    assert len({plan.order_N.tobytes() for plan in plans}) == len({plan.turns_K.tobytes() for plan in plans}) == 3
    for plan in plans:
        assert np.array_equal(np.sort(plan.turns_K), np.arange(data.cut.batches))


def test_validation_on_a_part_is_on_the_same_sequences_as_with_all_data_here(tmp_path, scratch):
    data_dir = write_data(tmp_path / "data", "tokens")
    checksums = [
        sorted(
            checksum_of(batch)
            for batch in module(data_dir, tmp_path / "cache", limit=limit, limit_val_batches=0.2).val_dataloader()
        )
        for limit in (None, "200kB")
    ]
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize(
    ("limit", "words", "error", "message"),
    [
        ("1kB", {}, UsageError, "--local_limit 1kB: these data need .* at least"),
        ("100kB", {"limit_val_batches": 0.99}, SettingsError, "lower --limit_val_batches"),
        ("200kB", {"loading": LoadingSettings(num_workers=2)}, SettingsError, "--stream goes with one thread"),
    ],
)
def test_what_cannot_be_streamed_is_refused(limit, words, error, message, tmp_path, scratch):
    data = module(write_data(tmp_path / "data", "tokens"), tmp_path / "cache", limit=limit, **words)
    with pytest.raises(error, match=message):
        data.val_dataloader()


def test_a_part_that_cannot_be_fetched_is_named_and_comes_when_it_can(tmp_path, scratch):
    data = module(write_data(tmp_path / "data", "tokens"), tmp_path / "cache", limit="200kB")
    loader = data.train_dataloader()
    troubles: list[str] = []
    loader._on_trouble = troubles.append
    stream = data.split("train").stream
    assert stream is not None
    read, failures = stream._read, [OSError("the server went away")] * 2

    def failing(name: str, begin: int, number: int) -> bytes:
        if failures:
            raise failures.pop()
        return read(name, begin, number)

    stream._read = failing
    seen = [n for batch in loader for n in batch.sequences_B.tolist()]
    assert sorted(seen) == list(range(len(data.split("train"))))
    assert troubles
    assert all("the server went away" in trouble for trouble in troubles)


def test_a_file_that_is_shorter_than_it_was_is_no_zeros(tmp_path, scratch):
    data = module(write_data(tmp_path / "data", "tokens"), tmp_path / "cache", limit="200kB")
    loader = data.train_dataloader()
    (file,) = (tmp_path / "cache").glob("*/train/tokens.bin")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(DataError, match=r"train/tokens\.bin of the cache ends after"):
        for _ in loader:
            pass


def test_damaged_beginnings_of_sequences_are_refused(tmp_path, scratch, monkeypatch):
    data_dir = write_data(tmp_path / "data", "tokens")
    _ = module(data_dir, tmp_path / "cache", limit=None).data
    (file,) = (tmp_path / "cache").glob("*/train/offsets.bin")
    flipped = bytearray(file.read_bytes())
    flipped[800] ^= 1
    read = stream_module.read_bytes

    def damaged(folder: Path, name: str, begin: int, number: int) -> bytes:
        content = read(folder, name, begin, number)
        return bytes(flipped[begin : begin + number]) if name == file.name and folder == file.parent else content

    monkeypatch.setattr("seqvae.data.cache.read_bytes", damaged)
    data = module(data_dir, tmp_path / "cache", limit="200kB")
    with pytest.raises(DataError, match=r"train/offsets\.bin of the cache is damaged"):
        _ = data.data


def test_a_disk_that_keeps_all_is_refused(tmp_path, scratch, monkeypatch):
    data = module(write_data(tmp_path / "data", "tokens"), tmp_path / "cache", limit="200kB")
    monkeypatch.setattr(stream_module, "punch_hole", lambda *_: None)
    with pytest.raises(UsageError, match=r"cannot give back parts of a file.*XDG_CACHE_HOME"):
        _ = data.data


def test_a_cache_that_is_streamed_is_not_cleared(tmp_path, scratch):
    data = module(write_data(tmp_path / "data", "tokens"), tmp_path / "cache", limit="200kB")
    _ = data.data
    removed, left = clear_caches(tmp_path / "cache")
    assert (len(removed), len(left)) == (0, 1)


def test_windows_of_a_sequence_to_validate_on_are_counted_once(tmp_path, scratch):
    data_dir = write_data(tmp_path / "data", "tokens")
    cache = CacheSettings(cache_dir=str(tmp_path / "cache"), stream=True, local_limit="150kB")
    windows = LengthSettings(max_sequence_length=20, long_sequences="split")
    data = SequenceDataModule(SourceSettings(data_dir=str(data_dir)), windows, cache, limit_val_batches=0.2)
    assert sum(len(batch.sequences_B) for batch in data.val_dataloader()) > 200


def test_ids_are_fetched_when_they_are_asked_for(tmp_path, scratch):
    data_dir = write_data(tmp_path / "data", "tokens")
    splits = [module(data_dir, tmp_path / "cache", limit=limit).split("valid") for limit in (None, "200kB")]
    assert splits[0].ids(np.arange(50)) == splits[1].ids(np.arange(50))


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, scratch):
    left = scratch / f"{STREAMED}-left" / "train"
    left.mkdir(parents=True)
    (left.parent / ".in-use-1-2.lock").touch()
    data = module(write_data(tmp_path / "data", "tokens"), tmp_path / "cache", limit="200kB")
    _ = data.data
    assert not left.exists()
    other = module(tmp_path / "data", tmp_path / "cache", limit="200kB")
    _ = next(iter(data.train_dataloader())), next(iter(other.train_dataloader()))
    assert len([*scratch.glob(f"{STREAMED}-*")]) == 2


def test_groups_hold_each_sequence_once_and_as_many_steps():
    offsets_S1 = np.append(0, np.cumsum(np.random.default_rng(0).integers(1, 50, 10_000)))
    groups = draw_groups(offsets_S1, GROUPS, 16)
    members = np.concatenate([np.arange(*stretch) for stretches in groups for stretch in stretches])
    assert np.array_equal(np.sort(members), np.arange(10_000))
    steps = [sum(offsets_S1[behind] - offsets_S1[first] for first, behind in stretches) for stretches in groups]
    assert max(steps) < 1.1 * min(steps)
    assert draw_groups(np.array([0, 3]), GROUPS, 16) == [[(0, 1)]]


@given(st.lists(st.tuples(st.integers(0, 10**8), st.integers(1, 10**8)), min_size=1, max_size=20))
def test_requests_are_bounded_and_hold_all_that_is_wanted(ranges):
    wanted = [(begin, begin + length) for begin, length in ranges]
    requests = joined_ranges(wanted)
    assert all(request[-1][1] - request[0][0] <= REQUEST_BYTES for request in requests)
    pieces = [piece for request in requests for piece in request]
    assert sum(end - begin for begin, end in pieces) == sum(end - begin for begin, end in wanted)
    assert {begin for begin, _ in wanted} <= {begin for begin, _ in pieces}


def test_a_hole_takes_no_room_and_spares_its_neighbours(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"x" * 100_000)
        file.flush()
        punch_hole(file.fileno(), 10, 90_000)
        file.seek(0)
        assert file.read() == b"x" * 10 + bytes(90_000) + b"x" * 9_990
        assert os.fstat(file.fileno()).st_blocks * 512 < 30_000


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_bit(tmp_path):
    data_dir = write_data(tmp_path / "data", "tokens")
    words = (
        f"--data_dir {data_dir} --cache_dir cache --max_steps 60 --checkpoint_every_n_steps 10 --val_check_interval 30"
    )
    stream = f"{words} --stream --local_limit 200kB"
    variables = {"XDG_CACHE_HOME": str(tmp_path / "scratch")}
    assert [one.code for one in ends([start(tmp_path, f"{stream} --run_name whole", variables)])] == [0]
    killed = start(tmp_path, f"{stream} --run_name killed", variables)
    wait_for_step(tmp_path / "runs" / "killed", 25, [killed])
    killed.send_signal(signal.SIGKILL)
    again = ends([killed, start(tmp_path, f"{stream} --run_name killed", variables)])[1]
    assert again.code == 0, again.errors
    rows = [pd.read_csv(tmp_path / "runs" / name / "metrics.csv")[COLUMNS] for name in ("whole", "killed")]
    pd.testing.assert_frame_equal(rows[0], rows[1], check_exact=True)
    (other,) = ends([start(tmp_path, f"{words} --run_name killed", variables)])
    assert other.code == ExitCode.USAGE
    assert "--stream True there, False here" in other.errors
