"""Importance weighting against the exact likelihood: a latent of one dimension is integrated out by quadrature.

Shapes: B sequences, G points of the grid.
"""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from models.sequence_vae import SequenceVAE
from monitors.formulas import gaussian_kl
from sequences.batches import Batch
from tests.small_models import KINDS, make_batch, make_vae
from training.evaluation import importance_weighted_nll, mean_of

LENGTHS = [2, 3, 4, 3, 2, 4, 3, 4]


def exact_nll(network: SequenceVAE, batch: Batch) -> np.ndarray:
    """-log of the integral of p(z) p(x | z) over z, by the trapezoid rule, (B,)."""
    grid_G = torch.linspace(-8, 8, 321)
    with torch.no_grad():
        log_p_GB = torch.stack([-network.nll_given_z(batch, z.expand(len(LENGTHS), 1)).double() for z in grid_G])
    log_joint_GB = log_p_GB + Normal(0.0, 1.0).log_prob(grid_G.double())[:, None]
    exact_B: np.ndarray = -(torch.logsumexp(log_joint_GB, dim=0) + math.log(16 / 320)).numpy()
    return exact_B


def trained(kind: str) -> tuple[SequenceVAE, Batch]:
    """A posterior that tells the sequences apart, and a decoder that listens."""
    network, batch = make_vae(kind, latent_size=1, depth=1), make_batch(kind, LENGTHS)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    torch.manual_seed(0)
    for _ in range(40):
        output = network.train()(batch)
        loss = output.nll_B.mean() + 0.2 * gaussian_kl(output.posterior_mean, output.posterior_logvar).sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval(), batch


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_it_is_the_exact_likelihood(kind):
    network, batch = make_vae(kind, latent_size=1, depth=1), make_batch(kind, LENGTHS)
    found_B = importance_weighted_nll(network, [batch], samples=500).nll_N
    np.testing.assert_allclose(found_B, exact_nll(network, batch), atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_it_tightens_to_the_exact_likelihood(kind):
    network, batch = trained(kind)
    exact_B = exact_nll(network, batch)
    gaps = []
    for samples, seeds in ((1, 40), (10, 20), (600, 1)):
        runs = [importance_weighted_nll(network, [batch], samples=samples, seed=seed) for seed in range(seeds)]
        gaps.append(float(np.mean([run.nll_N - exact_B for run in runs])))
    assert gaps[0] > 0.1, "the posterior is not exact, so that there is something to tighten"
    assert gaps[0] > gaps[1] > gaps[2] - 0.01
    assert abs(gaps[2]) < 0.03


def test_the_samples_that_carry_an_estimate_are_counted():
    same = make_vae("tokens", latent_size=1, depth=1)
    batch = make_batch("tokens", LENGTHS)
    far, _ = trained("tokens")
    few = importance_weighted_nll(far, [batch], samples=50)
    many = importance_weighted_nll(same, [batch], samples=50)
    assert ((few.effective_N >= 1) & (few.effective_N <= 50.001)).all()
    assert mean_of(few.effective_N).value < mean_of(many.effective_N).value
