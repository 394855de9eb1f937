"""Likelihoods by importance weighting with every prior and every family of posteriors, held against quadrature over the latent.

Shapes: B copies of one sequence, S steps, Z latent dimensions, G places of a grid.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from seqvae.data.batch import TokenBatch
from seqvae.inference.estimates import importance_weighted_nll
from seqvae.models.posteriors import BatchNormPosterior, GaussianPosterior
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.formulas import logmeanexp
from tests.support.small_models import make_batch, make_vae

STEP: dict[str, Any] = {"latent_scope": "step"}
PRIORS: dict[str, dict[str, Any]] = {
    "standard": {},
    "mixture": {"prior": "mixture", "prior_components": 3},
    "vamp": {"prior": "vamp", "prior_components": 3},
    "by step": STEP,
    "vamp by step": {"prior": "vamp", "prior_components": 3, **STEP},
    "autoregressive": {"prior": "autoregressive", "least_rate": 0.2, **STEP},
}
POSTERIORS = ("gaussian", "batch_norm", "du", "flow")


def copies(steps: int, count: int, *, is_cut: bool = False) -> TokenBatch:
    """Return a sequence many times over; one that is cut off has no end mark, and no latent for it."""
    one: TokenBatch = make_batch("tokens", [steps])
    many = one.tokens_BT.expand(count, -1).contiguous()
    return one._replace(
        tokens_BT=many,
        lengths_B=one.lengths_B.expand(count),
        sequences_B=torch.arange(count),
        ends_B=torch.full((count,), not is_cut),
    )


def network_of(prior: str, posterior: str) -> SequenceVAE:
    """Return a network whose decoder uses z, with one dimension of it, or two for a flow. Its posteriors cover what they stand
    for, as else no number of samples would do."""
    size = 2 if posterior == "flow" else 1
    vae = make_vae("tokens", posterior=posterior, latent_size=size, **PRIORS[prior])
    torch.manual_seed(5)
    for name, weight in vae.named_parameters():
        if name.startswith(("posterior.flow.layers", "prior")):
            nn.init.normal_(weight, std=0.2)
    with torch.no_grad():
        vae.decoder.latent.weight.mul_(2)
        assert isinstance(vae.posterior, GaussianPosterior | BatchNormPosterior)
        last = vae.posterior.moments if isinstance(vae.posterior, GaussianPosterior) else vae.posterior.logvar
        last.bias[-size:] += 1.0
    return vae


@torch.no_grad()
def exact_nll(vae: SequenceVAE, steps: int, *, is_cut: bool) -> float:
    """Return -log p(x), the integral over all latents of the sequence by the rule of rectangles."""
    posterior = vae.encode(copies(steps, 1, is_cut=is_cut))
    real, size = int(posterior.mask.sum()), posterior.mean.shape[-1]
    width = 0.02 if real * size == 1 else 0.2
    axis_G = torch.arange(-7.0, 7.0 + width / 2, width)
    z_GSZ = torch.cartesian_prod(*[axis_G] * (real * size)).reshape(-1, real, size)
    log_prior_G = vae.prior.log_density(z_GSZ.double() if vae.latent_per_step else z_GSZ[:, 0].double())
    log_prior_G = log_prior_G.sum(dim=1) if vae.latent_per_step else log_prior_G
    # What stands for the end mark of a sequence that has none is looked at by nobody.
    unused = posterior.mean.shape[1] - real if vae.latent_per_step else 0
    z = functional.pad(z_GSZ, (0, 0, 0, unused)) if vae.latent_per_step else z_GSZ[:, 0]
    log_p_G = torch.cat(
        [-vae.nll_given_z(copies(steps, len(part), is_cut=is_cut), part).double() for part in z.split(4096)]
    )
    return -float(torch.logsumexp(log_p_G + log_prior_G, dim=0)) - real * size * math.log(width)


def pairs() -> Iterator[Any]:
    """Yield every prior with every posterior; most mixtures of both are left to the long tests."""
    for prior, posterior in itertools.product(PRIORS, POSTERIORS):
        is_fast = posterior == "gaussian" or prior == "standard"
        yield pytest.param(prior, posterior, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("prior", "posterior"), list(pairs()))
def test_the_likelihood_is_that_of_quadrature(prior, posterior):
    vae = network_of(prior, posterior)
    is_cut = vae.latent_per_step and posterior == "flow"  # one step of two dimensions, or two steps of one
    steps = 1 if vae.latent_per_step else 3
    truth = exact_nll(vae, steps, is_cut=is_cut)
    found = importance_weighted_nll(vae, [copies(steps, 1024, is_cut=is_cut)], samples=48)
    assert -float(logmeanexp(-torch.from_numpy(found.nll_N), dim=0)) == pytest.approx(truth, abs=0.05)
    assert float(found.nll_N.mean()) > truth - 0.05
