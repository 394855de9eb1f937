"""The loader: the same batches whatever makes them, turns of several processes, exact positions, nothing left running."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqvae.config.data import LoadingSettings
from seqvae.data.batch import TokenBatch
from seqvae.data.batching import Cut, Limits, cut_batches, plan_epoch
from seqvae.data.loader import BatchLoader, Workers, make_pinned, resolve_loading
from seqvae.errors import DataError
from tests.support.fake_sequences import FakeSequences, log_normal_lengths

ROOT = Path(__file__).parent.parent.parent
WAYS = {
    "in process": LoadingSettings(num_workers=0),
    "one thread": LoadingSettings(),
    "three threads": LoadingSettings(num_workers=3, prefetch_factor=1),
    "one process": LoadingSettings(worker_type="process"),
    "two processes": LoadingSettings(worker_type="process", num_workers=2, persistent_workers=False),
}
LENGTHS = log_normal_lengths(300, cap=200)
LIMITS = Limits(None, 800, None)
CUT = cut_batches(LENGTHS, LIMITS)


def make_loader(loading: LoadingSettings | None = None, cut: Cut = CUT, **options) -> Any:
    """A BatchLoader (whose batches are TokenBatches, which the type does not say)."""
    sequences = options.pop("sequences", FakeSequences(LENGTHS))
    limits = options.pop("limits", LIMITS)
    loading = loading or LoadingSettings(num_workers=0)
    return BatchLoader(
        sequences, limits, lambda epoch: plan_epoch(cut, 0, epoch), cut.batches, resolve_loading(loading), **options
    )


def content(batch: TokenBatch) -> tuple:
    """A batch in values that can be compared."""
    return tuple(value.tolist() if isinstance(value, torch.Tensor) else value for value in batch)


def epoch_of(loader: Any, epoch: int = 0) -> list[tuple]:
    loader.set_epoch(epoch)
    return [content(batch) for batch in loader]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_batches_in_the_same_order(way):
    plain, other = make_loader(), make_loader(WAYS[way])
    assert [epoch_of(other, epoch) for epoch in range(2)] == [epoch_of(plain, epoch) for epoch in range(2)]
    other.close()


def test_spawned_processes_give_the_same_batches(monkeypatch):
    spawning = multiprocessing.get_context("spawn")
    monkeypatch.setattr("multiprocessing.get_context", lambda *_: spawning)
    loader = make_loader(WAYS["one process"])
    assert epoch_of(loader) == epoch_of(make_loader())
    loader.close()


def test_a_batch_holds_the_sequences_of_its_plan():
    plan = plan_epoch(CUT, 0, epoch=4)
    loader = make_loader()
    loader.set_epoch(4)
    for k, batch in enumerate(loader):
        assert batch.sequences_B.tolist() == plan.batch(k).tolist()
        assert batch.lengths_B.tolist() == LENGTHS[plan.batch(k)].tolist()
        assert batch.tokens_BT.shape[1] == batch.lengths_B.max()


def test_padding_to_a_fixed_length_gives_one_shape():
    loader = make_loader(limits=LIMITS._replace(pad_to=200))
    assert {batch.tokens_BT.shape[1] for batch in loader} == {200}


def test_positions_count_the_batches_of_all_epochs():
    loader = make_loader()
    positions = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        positions += [batch.position for batch in loader]
    assert positions == list(range(3 * CUT.batches))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_processes_together_give_every_batch_once_and_fill_up_with_empty_ones(world):
    alone = epoch_of(make_loader(), epoch=1)
    ranks = [epoch_of(make_loader(rank=rank, world=world), epoch=1) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    together = [batch for turn in zip(*ranks, strict=True) for batch in turn]
    empty = together[len(alone) :]
    assert [batch[:4] for batch in together[: len(alone)]] == [batch[:4] for batch in alone]
    assert all(batch[:4] == ([[0]], [0], [-1], None) for batch in empty)
    assert len(empty) == -len(alone) % world


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4))
def test_every_batch_is_divided_by_the_mean_steps_of_an_optimizer_step(world, accumulate):
    loaders = [make_loader(rank=rank, world=world, accumulate=accumulate) for rank in range(world)]
    turns = list(zip(*loaders, strict=True))
    steps = -(-len(turns) // accumulate)
    batches = [batch for turn in turns for batch in turn]
    (divisor,) = {batch.step_tokens for batch in batches}
    assert divisor == sum(int(batch.lengths_B.sum()) for batch in batches) / steps


def test_two_processes_and_two_accumulated_batches_are_divided_by_the_same():
    accumulated, together = make_loader(accumulate=2), make_loader(world=2)
    assert {batch.step_tokens for batch in accumulated} == {batch.step_tokens for batch in together}


@pytest.mark.parametrize("way", ["in process", "one thread", "two processes"])
@pytest.mark.parametrize("delivered", [1, 5, CUT.batches - 1])
def test_a_loader_goes_on_exactly_where_another_stopped(way, delivered):
    unbroken = epoch_of(make_loader(accumulate=2), epoch=2)
    first, second = make_loader(WAYS[way], accumulate=2), make_loader(WAYS[way], accumulate=2)
    first.set_epoch(2)
    head = [content(batch) for batch in itertools.islice(first, delivered)]
    second.load_state_dict(first.state_dict())
    second.set_epoch(2)
    assert head + [content(batch) for batch in second] == unbroken
    assert epoch_of(second, 3) == epoch_of(make_loader(accumulate=2), 3)


def test_prepared_batches_do_not_count_as_delivered():
    loader = make_loader(LoadingSettings(num_workers=2, prefetch_factor=4))
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["delivered"] == 1
    batches.close()


def test_after_an_epochs_last_batch_the_next_epoch_begins():
    first, second = make_loader(), make_loader()
    epoch_of(first, 2)
    second.load_state_dict(first.state_dict())
    assert (second.epoch, second.delivered) == (3, 0)
    assert [content(batch) for batch in second] == epoch_of(make_loader(), 3)


def test_the_state_before_the_first_batch_is_the_position_that_was_loaded():
    loader = make_loader()
    loader.load_state_dict({"epoch": 2, "delivered": 3, "batches": CUT.batches, "world": 1})
    assert loader.state_dict() == {"epoch": 2, "delivered": 3, "batches": CUT.batches, "world": 1}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 4), (3, 2), (4, 3)])
def test_another_number_of_processes_goes_on_at_the_same_global_batch(before, after):
    ranks = [make_loader(rank=rank, world=before) for rank in range(before)]
    heads = [list(itertools.islice(loader, 3)) for loader in ranks]
    state = ranks[0].state_dict()
    tails = []
    for rank in range(after):
        loader = make_loader(rank=rank, world=after)
        loader.load_state_dict(state)
        tails.append(list(loader))
        assert loader.delivered == CUT.batches
    seen = [batch for batches in [*heads, *tails] for batch in batches if batch.lengths_B[0] > 0]
    assert sorted(batch.position for batch in seen) == list(range(CUT.batches))
    assert sorted(torch.cat([batch.sequences_B for batch in seen]).tolist()) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_rounds_that_are_done_leave_as_many_as_are_needed(world):
    for delivered in range(CUT.batches):
        loader = make_loader(world=world)
        loader.load_state_dict({"epoch": 0, "delivered": delivered, "batches": CUT.batches, "world": 1})
        assert sum(1 for _ in loader) == len(loader) - loader_rounds(delivered, world)


def loader_rounds(delivered: int, world: int) -> int:
    return -(-CUT.batches // world) - -(-(CUT.batches - delivered) // world)


def test_a_position_within_an_epoch_that_was_cut_otherwise_is_refused():
    with pytest.raises(ValueError, match="within an epoch of 7 batches"):
        make_loader().load_state_dict({"epoch": 0, "delivered": 3, "batches": 7, "world": 1})


def test_set_epoch_keeps_the_position_in_the_same_epoch_and_resets_it_in_another():
    loader = make_loader()
    loader.load_state_dict({"epoch": 2, "delivered": 3, "batches": CUT.batches, "world": 1})
    loader.set_epoch(2)
    assert loader.delivered == 3
    loader.set_epoch(3)
    assert loader.delivered == 0
    assert len(list(loader)) == len(loader)


def test_lightning_finds_set_epoch_on_a_training_loader_only():
    training, evaluation = make_loader(reshuffled=True), make_loader()
    assert training.sampler is training
    assert not hasattr(evaluation, "sampler")


@pytest.mark.parametrize("way", ["one thread", "three threads"])
def test_no_thread_starts_before_the_first_batch_nor_outlives_the_last(way):
    before = threading.active_count()
    batches = iter(make_loader(WAYS[way]))
    assert threading.active_count() == before
    next(batches)
    assert threading.active_count() > before
    list(batches)
    assert threading.active_count() == before


def test_no_thread_outlives_a_consumer_that_stops_early():
    before = threading.active_count()
    for _ in make_loader(WAYS["three threads"]):
        break
    assert threading.active_count() == before


@pytest.mark.parametrize("way", ["one process", "two processes"])
def test_no_process_outlives_a_closed_loader(way):
    loader = make_loader(WAYS[way])
    next(iter(loader))
    loader.close()
    assert not multiprocessing.active_children()


def test_kept_processes_serve_the_next_epoch():
    loader = make_loader(WAYS["one process"])
    epoch_of(loader, 0)
    before = multiprocessing.active_children()
    epoch_of(loader, 1)
    assert multiprocessing.active_children() == before
    assert len(before) == 1
    loader.close()


def test_kept_processes_forget_what_a_consumer_did_not_take():
    loader = make_loader(WAYS["one process"])
    for _ in loader:
        break
    assert epoch_of(loader, 1) == epoch_of(make_loader(), 1)
    loader.close()


@pytest.mark.parametrize("way", ["in process", "three threads", "one process"])
def test_an_error_reaches_the_consumer_with_the_number_of_the_batch(way):
    broken = int(plan_epoch(CUT, 0, epoch=1).batch(4)[0])
    loader = make_loader(WAYS[way], sequences=FakeSequences(LENGTHS, broken=broken))
    loader.set_epoch(1)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    with pytest.raises(DataError, match=f"sequence {broken} cannot be read") as caught:
        next(batches)
    assert caught.value.__notes__ == [f"while making batch {CUT.batches + 4:,} (counted through all epochs)"]
    loader.close()


@pytest.mark.parametrize("way", WAYS)
def test_loading_does_not_touch_the_random_numbers_of_the_run(way):
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    loader = make_loader(WAYS[way])
    epoch_of(loader)
    loader.close()
    assert torch.rand(3).tolist() == expected


def test_worker_processes_outlive_signals_that_are_meant_for_the_parent():
    loader = make_loader(WAYS["one process"])
    batches = iter(loader)
    head = [content(next(batches))]
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    assert head + [content(batch) for batch in batches] == epoch_of(make_loader())
    loader.close()


LEAVING = """
import tests.data.test_loader as t

loader = t.make_loader(t.WAYS["{way}"], sequences=t.Laborious(t.LENGTHS))
batches = iter(loader)
next(batches)
held = [batches]
held.append(held)  # a cycle that is not collected
{ending}
"""


class Laborious(FakeSequences):
    """Works in torch for so long that a program ends in the midst of it."""

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> TokenBatch:
        for _ in range(30_000):
            torch.ones(2_000).add(1)
        return super().gather(sequences_B, pad_to)


@pytest.mark.parametrize("way", ["two processes", "three threads"])
@pytest.mark.parametrize(("ending", "code"), [("", 0), ("raise KeyboardInterrupt", -signal.SIGINT)])
def test_a_program_that_ends_without_closing_its_loader_does_end(way, ending, code):
    program = [sys.executable, "-c", LEAVING.format(way=way, ending=ending)]
    assert subprocess.run(program, cwd=ROOT, capture_output=True, timeout=60).returncode == code


class ThreadReporting(FakeSequences):
    """Gives the number of the maker's torch threads in the place of tokens."""

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> TokenBatch:
        return super().gather(sequences_B)._replace(tokens_BT=torch.tensor(torch.get_num_threads()))


def test_a_worker_process_computes_with_one_thread():
    loader = make_loader(WAYS["one process"], sequences=ThreadReporting(LENGTHS))
    assert next(iter(loader)).tokens_BT == 1
    loader.close()


def test_defaults_are_one_thread_that_keeps_eight_batches_ready():
    loading = resolve_loading(LoadingSettings())
    assert (loading.worker_type, loading.workers, loading.prefetch_factor, loading.hint) == ("thread", 1, 8, "")


def test_each_of_several_processes_keeps_as_many_batches_ready_as_there_are_processes():
    assert resolve_loading(LoadingSettings(worker_type="process", num_workers=4)).prefetch_factor == 4
    assert resolve_loading(LoadingSettings(worker_type="process", num_workers=1)).prefetch_factor == 2
    assert (
        resolve_loading(LoadingSettings(worker_type="process", num_workers=4, prefetch_factor=1)).prefetch_factor == 1
    )


def test_a_thread_makes_batches_in_one_go_when_half_of_those_ahead_are_gone():
    requested: list[int] = []

    def requests():
        for number in range(20):
            requested.append(number)
            yield np.array([number % len(LENGTHS)])

    workers = Workers(FakeSequences(LENGTHS), LIMITS, resolve_loading(LoadingSettings(prefetch_factor=4)))
    batches = workers.make(requests())
    counts = []
    for _ in range(6):
        next(batches)
        counts.append(len(requested))
    batches.close()
    assert counts == [4, 4, 6, 6, 8, 8]


def test_each_of_several_threads_always_has_something_to_do():
    requested: list[int] = []

    def requests():
        for number in range(20):
            requested.append(number)
            yield np.array([number % len(LENGTHS)])

    workers = Workers(
        FakeSequences(LENGTHS), LIMITS, resolve_loading(LoadingSettings(num_workers=4, prefetch_factor=1))
    )
    with closing(workers.make(requests())) as batches:
        for taken in range(6):
            next(batches)
            assert len(requested) == taken + 4


def test_more_workers_than_cores_are_honoured_with_a_hint(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    loading = resolve_loading(LoadingSettings(num_workers=12))
    assert loading.workers == 12
    assert loading.hint == "--num_workers 12: more than this machine's 2 cores brings nothing"


@pytest.mark.parametrize("gpu", [True, False])
def test_memory_is_pinned_by_default_where_there_is_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert resolve_loading(LoadingSettings()).pin_memory is gpu
    assert not resolve_loading(LoadingSettings(pin_memory=False)).pin_memory


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_made_in_process_or_by_threads_are_pinned(workers, monkeypatch):
    pinned = []

    def pin_memory(tensor):
        pinned.append(tensor.shape)
        return tensor

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.Tensor.pin_memory", pin_memory)
    epoch_of(make_loader(LoadingSettings(num_workers=workers, pin_memory=True)))
    assert len(pinned) == 3 * CUT.batches


def test_pinning_keeps_what_is_no_tensor(monkeypatch):
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda tensor: tensor + 1)
    batch = FakeSequences(LENGTHS).gather(np.array([3]))._replace(step_tokens=7, position=5)
    pinned = make_pinned(lambda _: batch, np.array([3]))
    assert pinned.sequences_B.tolist() == [4]
    assert (pinned.labels_B, pinned.step_tokens, pinned.position) == (None, 7, 5)
