"""The batch plan: every sequence once, a constant count, no limit exceeded, one order for any number of processes."""

import time
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqvae.config.data import BatchSettings
from seqvae.config.model import ModelSettings
from seqvae.data.batch import with_rows
from seqvae.data.batching import (
    Cut,
    Limits,
    Plan,
    choose_and_cut,
    choose_sequences,
    cut_batches,
    gather_batch,
    grid_efficiency,
    grid_lengths,
    padding_efficiency,
    plan_epoch,
    plan_in_order,
    some_batches,
    with_last_shape,
)
from tests.support.fake_sequences import FakeSequences, log_normal_lengths
from tests.support.short_runs import ShortData
from tests.support.small_models import KINDS, make_batch, make_vae

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=300).map(lambda lengths: np.array(lengths, dtype=np.int32))
LIMITS = st.builds(
    Limits,
    batch_size=st.none() | st.integers(1, 20),
    tokens_per_batch=st.integers(60, 500),
    pad_to=st.none() | st.just(60),
    hint=st.just(""),
    quadratic=st.sampled_from([None, 100.0]),
    grid=st.just(()),
)
BUCKETING = st.booleans()


def batches_of(plan: Plan) -> list[list[int]]:
    return [plan.batch(k).tolist() for k in range(plan.batches)]


def sequences_of(plan: Plan) -> list[int]:
    return [sequence for batch in batches_of(plan) for sequence in batch]


@settings(deadline=None)
@given(LENGTHS, LIMITS, BUCKETING, st.integers(0, 3))
def test_every_sequence_appears_exactly_once_per_epoch(lengths, limits, bucketing, epoch):
    plan = plan_epoch(cut_batches(lengths, limits, bucketing=bucketing), seed=0, epoch=epoch)
    assert sorted(sequences_of(plan)) == list(range(len(lengths)))


@settings(deadline=None)
@given(LENGTHS, LIMITS, BUCKETING, st.booleans())
def test_no_limit_is_exceeded_and_every_epoch_has_the_same_number_of_batches(lengths, limits, bucketing, drop_last):
    if drop_last and len(lengths) < 500:  # too few may leave no batch at all: a test of its own
        lengths = np.resize(lengths, 501)
    cut = cut_batches(lengths, limits, bucketing=bucketing, drop_last=drop_last)
    for epoch in range(3):
        batches = batches_of(plan_epoch(cut, seed=1, epoch=epoch))
        assert len(batches) == cut.batches
        for batch in batches:
            longest = limits.pad_to or lengths[batch].max()
            cost = longest + (longest**2 / limits.quadratic if limits.quadratic else 0)
            assert 1 <= len(batch) <= (limits.batch_size or len(lengths))
            assert len(batch) == 1 or len(batch) * cost <= limits.tokens_per_batch


@settings(deadline=None)
@given(LENGTHS, LIMITS, BUCKETING)
def test_the_planned_cost_of_a_batch_holds_in_every_epoch(lengths, limits, bucketing):
    cut = cut_batches(lengths, limits, bucketing=bucketing)
    for epoch in range(3):
        plan = plan_epoch(cut, seed=0, epoch=epoch)
        for place, turn in enumerate(plan.turns_K):
            batch = plan.batch(place)
            assert len(batch) * (limits.pad_to or lengths[batch].max()) <= cut.tokens_K[turn]


@settings(deadline=None)
@given(LENGTHS, LIMITS, st.integers(0, 2**63), st.integers(0, 1000))
def test_the_same_seed_and_epoch_give_the_same_plan(lengths, limits, seed, epoch):
    first, again = (plan_epoch(cut_batches(lengths, limits), seed, epoch) for _ in range(2))
    assert batches_of(first) == batches_of(again)


@pytest.mark.parametrize("bucketing", [True, False])
def test_epochs_and_seeds_differ_in_what_lies_together(bucketing):
    lengths = log_normal_lengths(2_000, cap=200)
    cut = cut_batches(lengths, Limits(None, 1000, None), bucketing=bucketing)
    plans = [plan_epoch(cut, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    compositions = [{frozenset(batch) for batch in batches_of(plan)} for plan in plans]
    for one, other in pairwise(compositions):
        assert len(one & other) < 0.05 * len(one)


def test_a_plan_does_not_depend_on_the_epochs_planned_before():
    cut = cut_batches(log_normal_lengths(1_000), Limits(None, 1000, None))
    alone = batches_of(plan_epoch(cut, seed=0, epoch=5))
    for epoch in range(5):
        plan_epoch(cut, seed=0, epoch=epoch)
    assert batches_of(plan_epoch(cut, seed=0, epoch=5)) == alone


def test_bucketing_puts_sequences_of_similar_length_together():
    lengths = log_normal_lengths(10_000)
    plan = plan_epoch(cut_batches(lengths, Limits(None, 4096, None)), seed=0, epoch=0)
    spreads = [np.ptp(lengths[plan.batch(k)]) / lengths[plan.batch(k)].max() for k in range(plan.batches)]
    assert np.median(spreads) < 0.1


def test_without_bucketing_a_batch_is_a_random_handful_of_fixed_size():
    lengths = log_normal_lengths(10_000)
    cut = cut_batches(lengths, Limits(None, 4 * int(lengths.max()), None), bucketing=False)
    plan = plan_epoch(cut, seed=0, epoch=1)
    assert {len(batch) for batch in batches_of(plan)} == {4}
    means = [lengths[plan.batch(k)].mean() for k in range(plan.batches)]
    assert np.std(means) == pytest.approx(lengths.std() / 2, rel=0.1)  # as for four independent draws


def test_drop_last_leaves_out_other_sequences_in_other_epochs():
    lengths = np.full(103, 10, dtype=np.int32)
    cut = cut_batches(lengths, Limits(10, 1000, None), drop_last=True)
    seen = [set(sequences_of(plan_epoch(cut, 0, epoch))) for epoch in range(2)]
    assert [len(sequences) for sequences in seen] == [100, 100]
    assert seen[0] != seen[1]


def test_drop_last_leaves_out_other_sequences_even_where_few_are_short():
    lengths = np.array([50 + n % 10 for n in range(400)] + [1, 1, 2, 2, 3])
    cut = cut_batches(lengths, Limits(8, 8 * 60, None), drop_last=True)
    seen = {n for epoch in range(30) for k in range(cut.batches) for n in plan_epoch(cut, 0, epoch).batch(k).tolist()}
    assert seen == set(range(405))


def test_drop_last_keeps_a_last_batch_that_is_full():
    lengths = np.full(100, 10, dtype=np.int32)
    assert cut_batches(lengths, Limits(10, 1000, None), drop_last=True).batches == 10


def test_drop_last_is_refused_where_it_would_leave_nothing():
    with pytest.raises(ValueError, match="--drop_last leaves out the only batch"):
        cut_batches(np.array([5, 5]), Limits(10, 1000, None), drop_last=True)


@pytest.mark.parametrize("seed", range(5))
def test_the_dearest_batches_come_first_in_the_first_epoch(seed):
    lengths = np.concatenate([[300], np.full(5_000, 299), np.full(30_000, 90)]).astype(np.int32)
    cut = cut_batches(lengths, Limits(None, 500, None))  # one sequence of 300 steps, but five of 90
    first = cut.tokens_K[plan_epoch(cut, seed, epoch=0).turns_K[:32]]
    assert first[0] == 300
    assert first.max() == cut.tokens_K.max() == 450


def test_batches_that_processes_take_at_the_same_time_cost_the_same():
    lengths = log_normal_lengths(50_000)
    cut = cut_batches(lengths, Limits(None, 4096, None))
    plan = plan_epoch(cut, seed=0, epoch=1)
    longest_K = np.array([lengths[plan.batch(k)].max() for k in range(plan.batches // 16 * 16)])
    spread = np.ptp(longest_K.reshape(-1, 16), axis=1) / longest_K.reshape(-1, 16).max(axis=1)
    assert np.median(spread) < 0.05
    assert np.ptp(longest_K) > 500  # while an epoch is made of all lengths


@pytest.mark.parametrize(("total", "rest"), [(1_032, 1), (8_432, 15)])
def test_an_epoch_does_not_always_end_with_the_shortest_batches(total, rest):
    lengths = log_normal_lengths(total)
    cut = cut_batches(lengths, Limits(16 if rest > 1 else 32, 10**6, None))
    assert cut.batches % (16 if rest > 1 else 2) == rest
    ends = [plan_epoch(cut, seed=0, epoch=epoch).turns_K[-1] / cut.batches for epoch in range(200)]
    assert np.histogram(ends, bins=4, range=(0, 1))[0].min() > 25
    for epoch in range(3):
        turns = plan_epoch(cut, seed=0, epoch=epoch).turns_K
        assert sorted(turns) == list(range(cut.batches))
    assert (
        plan_epoch(cut, 0, 1, shortest_last=True).turns_K[-rest:] == np.arange(cut.batches - rest, cut.batches)
    ).all()


def test_long_and_short_batches_alternate_in_a_small_set():
    lengths = log_normal_lengths(1_000)
    plan = plan_epoch(cut_batches(lengths, Limits(None, 1440, None)), seed=0, epoch=1)
    longest = [lengths[plan.batch(k)].max() for k in range(plan.batches)]
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.6


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_processes_that_take_turns_see_every_sequence_once(world):
    lengths = log_normal_lengths(3_000)
    plan = plan_epoch(cut_batches(lengths, Limits(None, 4000, None)), seed=0, epoch=2)
    ranks = [batches_of(plan)[rank::world] for rank in range(world)]
    assert sorted(sequence for batches in ranks for batch in batches for sequence in batch) == list(range(3_000))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


# --- Sequences to validate on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [200, 1_000, 2_000, 50_000])
@pytest.mark.parametrize("seed", range(5))
def test_the_sequences_chosen_for_validation_stand_for_all_lengths(total, seed):
    lengths = log_normal_lengths(total, seed)
    chosen = lengths[choose_sequences(lengths, np.arange(total), total // 10)]
    strata = np.sort(lengths).reshape(len(chosen), -1)
    error = np.sqrt(strata.var(axis=1, ddof=1).sum()) / len(chosen)
    assert abs(chosen.mean() - lengths.mean()) < error < lengths.std() / np.sqrt(len(chosen)) / 2


def test_which_sequences_of_one_length_are_chosen_has_nothing_to_do_with_the_stored_order():
    """Of sequences whose classes take turns, every tenth in stored order would be of one class."""
    lengths = np.full(5_000, 9, np.int32)
    chosen = choose_sequences(lengths, np.arange(5_000), 500)
    assert len(np.unique(chosen)) == 500
    assert np.bincount(chosen % 10) == pytest.approx(50, abs=4 * np.sqrt(45))


def test_the_choice_follows_the_stored_sequences_and_not_their_places():
    lengths = log_normal_lengths(1_000)
    stored = np.arange(1_000)
    before = choose_sequences(lengths, stored, 100)
    in_other_order = np.random.default_rng(0).permutation(1_000)
    same = choose_sequences(lengths[in_other_order], stored[in_other_order], 100)
    assert sorted(in_other_order[same].tolist()) == before.tolist()


@settings(deadline=None)
@given(LENGTHS, LIMITS, BUCKETING, st.integers(1, 30))
def test_a_number_limits_the_batches_and_a_share_the_sequences(lengths, limits, bucketing, most):
    stored = np.arange(len(lengths))
    every = cut_batches(lengths, limits, bucketing=bucketing).batches
    cut = choose_and_cut(lengths, stored, most, limits, bucketing=bucketing)
    assert 1 <= cut.batches <= most
    assert (len(cut.order_N) == len(lengths)) == (most >= every)
    cut = choose_and_cut(lengths, stored, 0.3, limits, bucketing=bucketing)
    assert len(np.unique(cut.order_N)) == max(1, round(0.3 * len(lengths)))


@settings(deadline=None)
@given(LENGTHS, LIMITS, BUCKETING)
def test_a_limit_of_one_is_everything(lengths, limits, bucketing):
    cut = choose_and_cut(lengths, np.arange(len(lengths)), 1.0, limits, bucketing=bucketing)
    assert cut.order_N.tolist() == cut_batches(lengths, limits, bucketing=bucketing).order_N.tolist()


def test_some_batches_are_spread_over_all_lengths():
    lengths = log_normal_lengths(50_000)
    plan = plan_epoch(cut_batches(lengths, Limits(None, 4096, None)), seed=0, epoch=0)
    some = some_batches(plan, 100)
    assert some.batches == 100
    assert lengths[sequences_of(some)].mean() == pytest.approx(lengths.mean(), rel=0.1)
    assert {frozenset(batch) for batch in batches_of(some)} < {frozenset(batch) for batch in batches_of(plan)}
    assert some_batches(plan, 10**6).batches == plan.batches


@settings(deadline=None)
@given(LENGTHS, LIMITS)
def test_the_plan_in_order_is_the_stored_order(lengths, limits):
    plan = plan_in_order(lengths, limits)
    assert sequences_of(plan) == list(range(len(lengths)))
    assert all(len(batch) * lengths[batch].max() <= limits.tokens_per_batch for batch in batches_of(plan))


@settings(deadline=None)
@given(LENGTHS, LIMITS, BUCKETING)
def test_padding_efficiency_is_real_steps_over_padded_steps(lengths, limits, bucketing):
    plan = plan_epoch(cut_batches(lengths, limits, bucketing=bucketing), seed=0, epoch=0)
    padded = sum(len(batch) * (limits.pad_to or lengths[batch].max()) for batch in batches_of(plan))
    assert padding_efficiency(lengths, plan, limits.pad_to) == pytest.approx(lengths.sum() / padded)


@pytest.mark.parametrize(("tokens", "wanted"), [(4_096, 0.95), (16_384, 0.97)])
def test_padding_efficiency_reaches_its_targets(tokens, wanted):
    lengths = log_normal_lengths(100_000)
    plan = plan_epoch(cut_batches(lengths, Limits(None, tokens, None)), seed=0, epoch=1)
    assert padding_efficiency(lengths, plan) >= wanted


def test_lengths_beyond_sixteen_bits_and_more_buckets_than_bytes_hold_are_planned():
    lengths = np.arange(1, 100_001, 100, dtype=np.int32)
    cut: Cut = cut_batches(lengths, Limits(1, 100_000, None))
    assert cut.batches == 1_000
    assert sorted(sequences_of(plan_epoch(cut, 0, 0))) == list(range(1_000))


def test_a_plan_for_a_million_sequences_takes_less_than_half_a_second():
    lengths = log_normal_lengths(1_000_000)
    begin = time.perf_counter()
    plan_epoch(cut_batches(lengths, Limits(None, 4_096, None)), seed=0, epoch=0)
    assert time.perf_counter() - begin < 0.5  # 0.02 s on a quiet machine


def test_with_the_quadratic_term_batches_of_short_and_long_sequences_cost_the_same():
    lengths, quadratic = log_normal_lengths(20_000), 6 * 128.0

    def spread_of_cost(limits: Limits) -> float:
        cut = cut_batches(lengths, limits)
        rows_K = np.diff(cut.starts_K1)[:-1]
        tops_K = cut.tokens_K[:-1] / rows_K
        cost_K = rows_K * (tops_K + tops_K**2 / quadratic)
        return float(cost_K.std() / cost_K.mean())

    level = spread_of_cost(Limits(None, 16_384, None, quadratic=quadratic))
    assert level < 0.05 < 0.15 < spread_of_cost(Limits(None, 16_384, None))


@pytest.mark.parametrize(
    ("encoder", "decoder", "expected"),
    [
        ("transformer", "parallel", 96.0),
        ("tcn", "transformer", 192.0),
        ("transformer", "lstm", 192.0),
        ("tcn", "lstm", None),
    ],
)
def test_the_quadratic_term_follows_from_the_model(encoder, decoder, expected):
    assert ModelSettings(width=16, heads=2, encoder=encoder, decoder=decoder).attention_steps == expected


def test_a_data_module_counts_attention_only_with_level_cost():
    for level_cost, expected in ((False, None), (True, 48.0)):
        data = ShortData(batches=BatchSettings(level_cost=level_cost), attention_steps=48.0)
        assert data.limits.quadratic == expected


# --- A grid of few shapes ----------------------------------------------------------------------------------------------


def padded_steps_on(lengths: list[int], grid: tuple[int, ...]) -> int:
    return sum(min(padded for padded in grid if padded >= length) for length in lengths)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(1, 4))
def test_a_grid_pads_with_as_few_steps_as_any_of_its_size(lengths, shapes):
    grid = grid_lengths(np.array(lengths), shapes)
    present = sorted(set(lengths))
    size = min(shapes, len(present))
    rivals = ((*shorter, present[-1]) for shorter in combinations(present[:-1], size - 1))
    assert len(grid) == size
    assert padded_steps_on(lengths, grid) == min(padded_steps_on(lengths, rival) for rival in rivals)


@settings(deadline=None)
@given(LENGTHS, LIMITS, BUCKETING, st.integers(1, 8))
def test_on_a_grid_every_batch_has_one_of_few_shapes_and_no_sequence_is_left_out(lengths, limits, bucketing, shapes):
    limits = limits._replace(pad_to=None, grid=grid_lengths(lengths, shapes))
    sequences = FakeSequences(lengths)
    cut = cut_batches(lengths, limits, bucketing=bucketing)
    limits = with_last_shape(limits, cut)
    plan = plan_epoch(cut, seed=0, epoch=0)
    batches: list[Any] = [gather_batch(sequences, limits, plan.batch(k)) for k in range(plan.batches)]
    assert len({tuple(batch.tokens_BT.shape) for batch in batches}) <= shapes + (limits.last_shape is not None)
    numbers = torch.cat([batch.sequences_B for batch in batches])
    assert sorted(numbers[numbers >= 0].tolist()) == list(range(len(lengths)))
    assert torch.equal(torch.cat([batch.lengths_B > 0 for batch in batches]), numbers >= 0)
    for batch in batches:
        assert len(batch.lengths_B) == 1 or batch.tokens_BT.numel() <= limits.tokens_per_batch


def test_the_empty_batch_of_a_grid_has_one_of_its_shapes():
    lengths = np.array([3, 3, 8])
    limits = Limits(None, 16, None, grid=grid_lengths(lengths, 2))
    empty: Any = gather_batch(FakeSequences(lengths), limits, np.empty(0, np.int64))
    assert empty.tokens_BT.shape == (5, 3)
    assert not empty.lengths_B.any()


def test_a_last_batch_of_few_sequences_is_not_filled_up_to_a_full_one():
    """Of 520 sequences at 512 to a batch, 8 became 512 rows: a padding efficiency of 0.29 instead of 0.56."""
    lengths = log_normal_lengths(520)
    by_itself = Limits(512, 512 * int(lengths.max()), None)
    on_grid = by_itself._replace(grid=grid_lengths(lengths, 32))
    cut = cut_batches(lengths, on_grid)
    limits = with_last_shape(on_grid, cut)
    assert limits.last_shape == (8, int(lengths.max()))
    shapes = set()
    for epoch in range(5):
        plan = plan_epoch(cut, seed=0, epoch=epoch)
        batches: list[Any] = [gather_batch(FakeSequences(lengths), limits, plan.batch(k)) for k in range(2)]
        assert sorted(len(batch.lengths_B) for batch in batches) == [8, 512]
        shapes |= {tuple(batch.tokens_BT.shape) for batch in batches}
    assert len(shapes) <= 4
    free = padding_efficiency(lengths, plan_epoch(cut_batches(lengths, by_itself), seed=0, epoch=0))
    assert grid_efficiency(lengths, cut, limits) > 0.95 * free > 1.5 * grid_efficiency(lengths, cut, on_grid)


def test_a_full_last_batch_adds_no_shape():
    lengths = np.full(1024, 9)
    limits = Limits(512, 10**6, None, grid=(9,))
    assert with_last_shape(limits, cut_batches(lengths, limits)).last_shape is None


def test_the_efficiency_of_a_grid_counts_rows_that_are_filled_up():
    lengths = np.array([4, 4, 3, 8])
    limits = Limits(None, 16, None, grid=grid_lengths(lengths, 2))
    cut = cut_batches(lengths, limits)
    assert grid_efficiency(lengths, cut, limits) == 19 / 32


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_batch_is_filled_up_with_changes_nothing(kind):
    vae = make_vae(kind)
    batch = make_batch(kind, [4, 2, 6], steps=8)
    torch.manual_seed(0)
    posterior = vae.encode(batch)
    filled = with_rows(batch, 5)
    same = vae.encode(filled)
    torch.testing.assert_close(same.mean[:3], posterior.mean)
    assert same.mask.flatten()[:5].tolist() == [True] * 3 + [False] * 2
    nll, nll_filled = vae.nll_given_z(batch, posterior.mean), vae.nll_given_z(filled, same.mean)
    torch.testing.assert_close(nll_filled[:3], nll)
    assert nll_filled[3:].tolist() == [0.0, 0.0]
