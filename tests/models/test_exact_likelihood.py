"""Importance weighting against the exact likelihood: a latent of one dimension is integrated out by quadrature.

Shapes: B sequences, R copies of each of them, G points of the grid.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from seqvae.data.batch import Batch, EventBatch
from seqvae.inference.estimates import importance_weighted_nll
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.formulas import gaussian_kl
from tests.support.small_models import KINDS, make_batch, make_vae

LENGTHS = [2, 3, 4, 3]
GRID_G = torch.linspace(-8, 8, 321)
COPIES = 400


def copies(batch: Batch, count: int) -> Batch:
    """Repeat the whole batch, so that one pass of the network is many."""
    tensors = {name: value for name, value in batch._asdict().items() if isinstance(value, torch.Tensor)}
    repeated: dict[str, Any] = {name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in tensors.items()}
    if isinstance(batch, EventBatch):
        further = torch.arange(count).repeat_interleave(len(batch.steps_E)) * batch.gaps_BT.numel()
        repeated["steps_E"] = repeated["steps_E"] + further
    return batch._replace(**repeated)


def exact_nll(network: SequenceVAE, batch: Batch) -> np.ndarray:
    """-log of the integral of p(z) p(x | z) over z, by the trapezoid rule, (B,)."""
    z = GRID_G.repeat_interleave(len(LENGTHS))[:, None]
    with torch.no_grad():
        log_p_GB = -network.nll_given_z(copies(batch, len(GRID_G)), z).double().view(len(GRID_G), -1)
    log_joint_GB = log_p_GB + Normal(0.0, 1.0).log_prob(GRID_G.double())[:, None]
    exact_B: np.ndarray = -(torch.logsumexp(log_joint_GB, dim=0) + math.log(16 / 320)).numpy()
    return exact_B


def weighted_nll(network: SequenceVAE, batch: Batch, samples: int) -> np.ndarray:
    """(R, B), each from samples of its own."""
    nll_N = importance_weighted_nll(network, [copies(batch, COPIES)], samples=samples).nll_N
    return nll_N.reshape(COPIES, -1)


def make(kind: str, *, trained: bool) -> tuple[SequenceVAE, Batch]:
    network, batch = make_vae(kind, latent_size=1, depth=1), make_batch(kind, LENGTHS)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    torch.manual_seed(0)
    for _ in range(60 if trained else 0):
        output = network.train()(batch)
        loss = output.nll_B.mean() + gaussian_kl(output.posterior_mean, output.posterior_logvar).sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval(), batch


@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_quadrature_and_tightens_with_the_samples(kind, trained):
    network, batch = make(kind, trained=trained)
    exact_B = exact_nll(network, batch)
    gaps = {samples: weighted_nll(network, batch, samples) - exact_B for samples in (1, 8, 64)}
    means = {samples: float(gap_RB.mean()) for samples, gap_RB in gaps.items()}
    assert means[1] > means[8] > means[64] > -0.01
    assert means[64] < 0.4 * means[1]
    likelihood_B = np.exp(-gaps[64]).mean(axis=0)  # relative to the exact one: its mean has no bias at any K
    np.testing.assert_allclose(likelihood_B, 1, atol=0.06)


def test_the_samples_that_carry_an_estimate_are_counted():
    network, batch = make("tokens", trained=True)
    effective_N = importance_weighted_nll(network, [batch], samples=50).effective_N
    assert ((effective_N >= 1) & (effective_N < 50)).all()
    with torch.no_grad():
        for parameter in network.posterior.parameters():
            parameter.zero_()
        for block in network.decoder.parameters():
            block.zero_()
    # The posterior is the prior and the decoder deaf: every sample carries as much as any other.
    np.testing.assert_allclose(importance_weighted_nll(network, [batch], samples=50).effective_N, 50, rtol=1e-6)
