"""Posteriors at constant memory: all of them where they are few, a fair choice where they are many, and an exact variance."""

import torch
from torch import Tensor

from seqvae.inference.estimates import AllPosteriors


def added(mean_NZ: Tensor, most: int, seed: int = 0) -> AllPosteriors:
    posteriors = AllPosteriors(most, seed)
    for mean_PZ in mean_NZ.split(7):
        posteriors.add(mean_PZ, -mean_PZ)
    return posteriors


def test_few_are_all_there_in_their_order():
    mean_NZ = torch.randn(30, 2)
    mean_RZ, logvar_RZ = added(mean_NZ, most=30).chosen
    assert torch.equal(mean_RZ, mean_NZ)
    assert torch.equal(logvar_RZ, -mean_NZ)


def test_of_many_each_is_as_likely_chosen_and_none_twice():
    mean_NZ, counts_N = torch.arange(60.0)[:, None], torch.zeros(60)
    for seed in range(400):
        mean_RZ, logvar_RZ = added(mean_NZ, most=15, seed=seed).chosen
        assert torch.equal(logvar_RZ, -mean_RZ)
        assert len(set(mean_RZ[:, 0].tolist())) == 15
        counts_N[mean_RZ[:, 0].long()] += 1
    assert (counts_N - 100).abs().max() < 4.5 * (400 * 0.25 * 0.75) ** 0.5
    assert torch.equal(added(mean_NZ, 15, seed=3).chosen[0], added(mean_NZ, 15, seed=3).chosen[0])


def test_the_variance_is_that_of_all_however_far_from_zero():
    mean_NZ = torch.randn(50, 3) + torch.tensor([0.0, 1e3, -1e4])
    torch.testing.assert_close(added(mean_NZ, most=5).variance_of_means_Z, mean_NZ.double().var(dim=0))
    assert added(mean_NZ[:1], most=5).variance_of_means_Z.isnan().all()
