"""Whose latent a sequence gets when the decoder's use is measured: that of a random other one of like length, never of its owner.

Shapes: N sequences, B sequences of a batch, T steps.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.data.batch import Batch, VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.inference.estimates import posterior_statistics
from seqvae.inference.streaming import paired_batches, partners
from seqvae.models.vae import Posterior, VAEOutput
from tests.support.parquet_files import write_splits

WINDOW = 10


class TellsTheLevel(nn.Module):
    """Its latent is a sequence's mean, for certain, and its decoder says what is off by that much in each step."""

    def encode(self, batch: Batch) -> Posterior:
        assert isinstance(batch, VectorBatch)
        mean_B1 = batch.values_BTD.sum(dim=1) / batch.lengths_B[:, None]
        return Posterior(mean_B1, torch.full_like(mean_B1, -30.0), batch.lengths_B > 0)

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        assert isinstance(batch, VectorBatch)
        off_BT = (batch.values_BTD[..., 0] - z) * batch.observed_BTD[..., 0]
        return off_BT.square().sum(dim=1)

    def forward(self, batch: Batch) -> VAEOutput:
        posterior = self.encode(batch)
        return VAEOutput(*posterior, self.nll_given_z(batch, posterior.mean), batch.lengths_B)


def open_levels(directory: Path, levels: list[float], steps: int) -> SequenceDataModule:
    """Sequences that keep to a level each, cut into windows of 10 steps."""
    table = {"values": [[[level]] * steps for level in levels]}
    data_dir = write_splits(directory / "data", train=table, valid=table, test=table)
    lengths = LengthSettings(max_sequence_length=WINDOW, long_sequences="split")
    return SequenceDataModule(
        SourceSettings(data_dir=str(data_dir)), lengths, CacheSettings(cache_dir=str(directory / "cache"))
    )


@pytest.mark.parametrize("steps", [100, 105])
def test_decoder_use_is_that_of_random_pairs_though_windows_and_classes_are_stored_together(tmp_path, steps):
    levels = sorted(np.random.default_rng(0).normal(size=20).tolist())
    data = open_levels(tmp_path, levels, steps)
    statistics = posterior_statistics(TellsTheLevel(), paired_batches(data, ["test"]))
    level_N = np.array(levels) / data.description.std[0]
    pairs_NN = (level_N[:, None] - level_N) ** 2
    expected = steps / np.ceil(steps / WINDOW) * pairs_NN.sum() / (20 * 19)
    assert statistics.decoder_use is not None
    assert statistics.decoder_use.value == pytest.approx(expected, rel=0.25)
    assert (statistics.owners, statistics.without_partner) == (20, 0)


def test_sequences_of_the_same_content_are_no_partners(tmp_path):
    data = open_levels(tmp_path, [1.0] * 30 + [2.0] * 30, WINDOW)
    for pairs in paired_batches(data, ["test"]):
        own_BTD, other_BTD = pairs.part.batch.values_BTD, pairs.others.values_BTD  # type: ignore[union-attr]
        assert pairs.has_other_B.all()
        assert (own_BTD != other_BTD).all()


def test_windows_of_a_single_sequence_have_no_partner(tmp_path):
    data = open_levels(tmp_path, [1.0], 40)
    statistics = posterior_statistics(TellsTheLevel(), paired_batches(data, ["test"]))
    assert (statistics.sequences, statistics.without_partner, statistics.decoder_use) == (4, 4, None)


@given(
    sequences=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), min_size=1, max_size=60),
    seed=st.integers(0, 3),
)
def test_a_partner_is_never_of_the_same_owner_and_as_near_in_length_as_others_are(sequences, seed):
    length_N, owner_N = np.array(sequences).T
    partner_N = partners(length_N, owner_N, seed)
    for length, owner, partner in zip(length_N, owner_N, partner_N, strict=True):
        elsewhere_N = length_N[owner_N != owner]
        if len(elsewhere_N) == 0:
            assert partner == -1
            continue
        assert owner_N[partner] != owner
        nearest = np.abs(elsewhere_N - length).min()
        assert abs(length_N[partner] - length) <= nearest + 0.05 * max(length, length_N[partner])
    assert np.array_equal(partner_N, partners(length_N, owner_N, seed))


def test_each_sequence_of_like_length_is_as_likely_a_partner():
    length_N, owner_N = np.full(12, 40), np.array([0] * 4 + [1] * 2 + [2, 3, 4, 5, 6, 7])
    drawn_N = [partners(length_N, owner_N, seed)[0] for seed in range(2000)]
    counts_N = np.bincount(drawn_N, minlength=12)
    assert counts_N[:4].tolist() == [0] * 4
    assert np.abs(counts_N[4:] - 250).max() < 4.5 * np.sqrt(250)
