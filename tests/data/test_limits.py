"""How much goes into a batch: defaults, refusals and hints."""

import numpy as np
import pytest

from seqvae.config.data import BatchSettings
from seqvae.data.batching import Limits, cut_batches, resolve_evaluation_limits, resolve_limits
from tests.support.fake_sequences import log_normal_lengths

MANY = log_normal_lengths(100_000)
FEW = log_normal_lengths(1_000)


def test_default_is_the_memory_of_four_sequences_of_full_length():
    assert resolve_limits(MANY, BatchSettings(), 1000) == Limits(batch_size=None, tokens_per_batch=4000, pad_to=None)


@pytest.mark.parametrize("accumulate", [1, 2, 8])
@pytest.mark.parametrize("settings", [BatchSettings(), BatchSettings(bucketing=False)])
def test_an_epoch_of_a_small_set_has_fifty_optimizer_steps(settings, accumulate):
    lengths = np.full(5_000, 20, dtype=np.int32)
    limits = resolve_limits(lengths, settings, 1000, accumulate)
    cut = cut_batches(lengths, limits, bucketing=settings.bucketing)
    assert 50 <= cut.batches / accumulate <= 55


def test_the_budget_of_a_small_set_still_holds_its_longest_sequence():
    lengths = np.array([900, 3, 3, 3], dtype=np.int32)
    assert resolve_limits(lengths, BatchSettings(), 1000).tokens_per_batch == 900


def test_an_explicit_budget_is_not_lowered_for_a_small_set():
    assert resolve_limits(FEW, BatchSettings(tokens_per_batch=4096), 1000).tokens_per_batch == 4096


def test_an_explicit_batch_size_is_what_every_full_batch_has():
    limits = resolve_limits(FEW, BatchSettings(batch_size=4), 1000)
    assert np.diff(cut_batches(FEW, limits).starts_K1).tolist() == [4] * 250


def test_an_explicit_batch_size_comes_with_a_hint_what_the_memory_would_hold():
    lengths = np.array([1000] + [75] * 100_000, dtype=np.int32)
    assert resolve_limits(lengths, BatchSettings(batch_size=4), 1000).hint == (
        "--batch_size 4: the same memory holds 53 sequences of mean length in a batch of 4,000 steps "
        "(--tokens_per_batch 4000 in its place)"
    )


@pytest.mark.parametrize(
    "settings",
    [
        BatchSettings(),
        BatchSettings(batch_size=4, tokens_per_batch=5000),
        BatchSettings(batch_size=4, bucketing=False),
        BatchSettings(batch_size=4, use_dynamic_padding=False),
    ],
)
def test_no_hint_without_a_gain(settings):
    assert resolve_limits(MANY, settings, 1000).hint == ""


def test_no_hint_where_all_sequences_are_equally_long():
    assert resolve_limits(np.full(1000, 50), BatchSettings(batch_size=4), 1000).hint == ""


def test_a_budget_below_the_longest_sequence_is_refused_in_words_of_flags():
    with pytest.raises(ValueError, match="less than the longest sequence") as refusal:
        resolve_limits(np.array([3, 1000]), BatchSettings(tokens_per_batch=500), 1000)
    assert str(refusal.value) == (
        "--tokens_per_batch 500 is less than the longest sequence (1000 steps): raise it or lower --max_sequence_length"
    )


def test_a_budget_of_exactly_the_longest_sequence_is_accepted():
    lengths = np.array([3, 999, 1000])
    limits = resolve_limits(lengths, BatchSettings(tokens_per_batch=1000), 1000)
    assert cut_batches(lengths, limits).tokens_K.max() == 1000


def test_a_budget_below_the_cap_is_refused_where_all_are_padded_to_it():
    with pytest.raises(ValueError, match="is less than --max_sequence_length 1000, to which"):
        resolve_limits(np.array([3, 10]), BatchSettings(tokens_per_batch=500, use_dynamic_padding=False), 1000)


def test_without_dynamic_padding_every_sequence_costs_the_cap():
    limits = resolve_limits(MANY, BatchSettings(use_dynamic_padding=False), 1000)
    assert limits == Limits(batch_size=None, tokens_per_batch=4000, pad_to=1000)
    assert np.diff(cut_batches(MANY, limits).starts_K1).tolist() == [4] * 25_000


def test_evaluation_takes_the_default_budget_however_small_the_set():
    assert resolve_evaluation_limits(FEW, BatchSettings(), 1000).tokens_per_batch == 4000


def test_evaluation_has_room_for_sequences_longer_than_those_of_training():
    settings = BatchSettings(tokens_per_batch=500)
    assert resolve_evaluation_limits(np.array([600]), settings, 1000).tokens_per_batch == 600


def test_evaluation_keeps_an_explicit_batch_size():
    assert resolve_evaluation_limits(FEW, BatchSettings(batch_size=2), 1000).batch_size == 2
