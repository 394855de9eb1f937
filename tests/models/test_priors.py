"""The priors: densities that are densities, KLs by quadrature, by sampling and by minimisation, and what a network makes of them.

Shapes: B sequences, S steps, Z latent dimensions, K components, G places of a grid, N draws.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqvae.config.model import LARGEST_LEAST_RATE, ModelSettings
from seqvae.data.batch import part_of
from seqvae.models.noise import Noise
from seqvae.models.posteriors import Draw, GaussianPosterior, Posterior, PosteriorFamily, draw
from seqvae.models.priors import (
    AutoregressivePrior,
    MixturePrior,
    Prior,
    VampPrior,
    least_alpha,
    least_kl,
    step_before,
)
from seqvae.models.sampling import sample_prior
from seqvae.models.vae import SequenceVAE
from tests.support.short_runs import MODEL, Ask, assert_same, last_of, short_module, train
from tests.support.small_models import KINDS, make_batch, make_vae

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")
STEP = {"latent_scope": "step"}
OF_EACH: tuple[dict[str, Any], ...] = (
    {"prior": "mixture", "prior_components": 3},
    {"prior": "vamp", "prior_components": 3},
    {"prior": "vamp", "prior_components": 20, **STEP},
    {"prior": "autoregressive", "least_rate": 0.2, **STEP},
)


def one_dimensional(prior: str) -> tuple[Prior, PosteriorFamily]:
    """Return a prior of one dimension with components that differ, in float64."""
    torch.manual_seed(1)
    if prior == "mixture":
        found = MixturePrior(4, 1).double()
        for weight in found.parameters():
            nn.init.normal_(weight)
        return found, PosteriorFamily()
    vae = make_vae("tokens", prior="vamp", prior_components=4, latent_size=1)
    assert isinstance(vae.posterior, GaussianPosterior)
    nn.init.normal_(vae.posterior.moments.weight, std=0.5)
    return vae.prior, vae.posterior


def grid(reach: float = 40.0, places: int = 400_001) -> tuple[Tensor, float]:
    z_G1 = torch.linspace(-reach, reach, places, dtype=torch.float64)[:, None]
    return z_G1, 2 * reach / (places - 1)


# --- Mixtures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixture", "vamp"])
@torch.no_grad()
def test_a_density_has_an_integral_of_one_and_draws_have_its_moments(name):
    prior, _ = one_dimensional(name)
    z_G1, width = grid()
    density_G = prior.log_density(z_G1).exp()
    assert float(density_G.sum() * width) == pytest.approx(1.0, abs=1e-6)
    mean = float((density_G * z_G1[:, 0]).sum() * width)
    variance = float((density_G * z_G1[:, 0].square()).sum() * width) - mean**2
    drawn_N = prior.sample((100_000, 1), Noise(0, torch.arange(100_000)))[:, 0]
    assert abs(float(drawn_N.mean()) - mean) < 5 * math.sqrt(variance / 100_000)
    assert float(drawn_N.var()) == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize("name", ["mixture", "vamp"])
@torch.no_grad()
def test_the_kl_of_a_mixture_is_that_of_quadrature(name):
    prior, _ = one_dimensional(name)
    mean, logvar = torch.tensor([[0.7]], dtype=torch.float64), torch.tensor([[-1.3]], dtype=torch.float64)
    z_G1, width = grid()
    log_q_G = -0.5 * ((z_G1 - mean).square() / logvar.exp() + logvar + math.log(2 * math.pi))[:, 0]
    truth = float((log_q_G.exp() * (log_q_G - prior.log_density(z_G1))).sum() * width)
    many = Posterior(mean.expand(200_000, 1), logvar.expand(200_000, 1), torch.ones(200_000, dtype=torch.bool))
    base = draw(many, torch.randn(200_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    kl = prior.kl(many, Draw(base, base))
    assert kl is not None
    assert kl.shape == (200_000, 1)
    assert abs(float(kl.mean()) - truth) < 5 * float(kl.std()) / math.sqrt(200_000)


@torch.no_grad()
def test_the_components_of_a_vamp_prior_are_posteriors_of_the_networks_own_encoder():
    vae = make_vae("tokens", prior="vamp", prior_components=5)
    assert isinstance(vae.prior, VampPrior)
    batch = make_batch("tokens", [16])
    nn.init.zeros_(vae.prior.inputs_NLW)
    vae.prior.inputs_NLW[2] = vae.embedding(batch)[0]
    components = vae.prior.posteriors()
    assert components.mean.shape == (5, 3)
    of_data = vae.encode(batch)
    torch.testing.assert_close(components.mean[2:3], of_data.mean)
    torch.testing.assert_close(components.logvar[2:3], of_data.logvar)
    by_step = make_vae("tokens", prior="vamp", prior_components=20, **STEP).prior
    assert isinstance(by_step, VampPrior)
    assert by_step.posteriors().mean.shape == (20, 3)
    assert len(by_step.inputs_NLW) == 2


@torch.no_grad()
def test_a_fixed_prior_computes_its_components_once_and_forgets_them_afterwards(monkeypatch):
    vae = make_vae("tokens", prior="vamp", prior_components=5)
    calls, z_BZ, compute = [], torch.randn(7, 3), vae.posteriors_of_steps

    def counted(steps_NLW: Tensor) -> Posterior:
        calls.append(len(steps_NLW))
        return compute(steps_NLW)

    monkeypatch.setattr(vae, "posteriors_of_steps", counted)
    expected_B = vae.prior.log_density(z_BZ)
    with vae.prior.fixed(), vae.prior.fixed():
        for _ in range(3):
            assert torch.equal(vae.prior.log_density(z_BZ), expected_B)
    assert len(calls) == 2
    assert isinstance(vae.prior, VampPrior)
    nn.init.zeros_(vae.prior.inputs_NLW)
    assert not torch.equal(vae.prior.log_density(z_BZ), expected_B)


def test_a_copy_of_a_network_with_a_vamp_prior_has_the_encoder_of_the_copy():
    vae = make_vae("tokens", prior="vamp", prior_components=5)
    twin = copy.deepcopy(vae)
    assert set(twin.state_dict()) == set(vae.state_dict())
    assert "prior.inputs_NLW" in vae.state_dict()
    z_BZ = torch.randn(2, 3)
    before_B = vae.prior.log_density(z_BZ)
    with torch.no_grad():
        for weight in twin.encoder.parameters():
            weight.mul_(2)
    assert torch.equal(vae.prior.log_density(z_BZ), before_B)
    assert not torch.equal(twin.prior.log_density(z_BZ), before_B)


def test_pseudo_inputs_leave_the_statistics_of_batch_norm_alone():
    vae = make_vae("tokens", prior="vamp", posterior="batch_norm").train()
    before = {name: value.clone() for name, value in vae.posterior.named_buffers()}
    vae.prior.log_density(torch.zeros(2, 3)).sum().backward()
    torch.testing.assert_close(dict(vae.posterior.named_buffers()), before, rtol=0, atol=0)
    assert isinstance(vae.prior, VampPrior)
    assert vae.prior.inputs_NLW.grad is not None
    assert vae.prior.inputs_NLW.grad.abs().sum() > 0


# --- From step to step ----------------------------------------------------------------------------------------------


def autoregressive(alpha: float, latent_size: int = 1) -> AutoregressivePrior:
    prior = AutoregressivePrior(0.0, latent_size)
    nn.init.constant_(prior.raw_Z, math.log(alpha / 0.99) - math.log1p(-alpha / 0.99))
    return prior


def independent_steps(seed: int = 0, steps: int = 4) -> Posterior:
    generator = torch.Generator().manual_seed(seed)
    mean, logvar = torch.randn((2, 2, steps, 3), generator=generator)
    return Posterior(mean, logvar, torch.ones(2, steps, dtype=torch.bool))


def covariance(alpha: float, steps: int) -> Tensor:
    places_S = torch.arange(steps, dtype=torch.float64)
    return alpha ** (places_S[:, None] - places_S).abs()


@torch.no_grad()
def test_an_autoregressive_density_is_that_of_the_joint_gaussian_and_draws_have_its_covariance():
    prior, alpha = autoregressive(0.8, latent_size=2), 0.8
    z_BSZ = torch.randn(3, 5, 2, dtype=torch.float64)
    joint = torch.distributions.MultivariateNormal(torch.zeros(5, dtype=torch.float64), covariance(alpha, 5))
    expected_B = sum(joint.log_prob(z_BSZ[..., dimension]) for dimension in range(2))
    torch.testing.assert_close(prior.log_density(z_BSZ).sum(dim=1), expected_B, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prior.log_density(z_BSZ[:, :3]), prior.log_density(z_BSZ)[:, :3])
    drawn_BSZ = prior.sample((50_000, 5, 2), Noise(0, torch.arange(50_000)))
    torch.testing.assert_close(drawn_BSZ[..., 1].T.cov().double(), covariance(alpha, 5), rtol=0, atol=0.03)


@torch.no_grad()
def test_the_kl_of_independent_steps_is_the_joint_closed_form_and_that_of_draws():
    prior, posterior = autoregressive(0.7, latent_size=3), independent_steps()
    unused = draw(posterior)
    kl_BSZ = prior.kl(posterior, Draw(unused, unused))
    assert kl_BSZ is not None
    assert kl_BSZ.shape == posterior.mean.shape
    assert not prior.estimates_kl(Draw(unused, unused))
    joint = torch.distributions.MultivariateNormal(torch.zeros(4, dtype=torch.float64), covariance(0.7, 4))
    for row in range(2):
        for dimension in range(3):
            mean_S, variance_S = (part[row, :, dimension].double() for part in (posterior.mean, posterior.logvar.exp()))
            own = torch.distributions.MultivariateNormal(mean_S, torch.diag(variance_S))
            truth = torch.distributions.kl_divergence(own, joint)
            torch.testing.assert_close(kl_BSZ[row, :, dimension].sum().double(), truth, rtol=1e-5, atol=1e-5)
    many = Posterior(*(part.repeat_interleave(40_000, dim=0) for part in posterior))
    base = draw(many, torch.randn(many.mean.shape, generator=torch.Generator().manual_seed(0)))
    entropy_NS = 0.5 * (many.logvar + math.log(2 * math.pi * math.e)).sum(dim=-1)
    estimates_BNS = (-entropy_NS - prior.log_density(base)).unflatten(0, (2, 40_000))
    error_BS = estimates_BNS.std(dim=1) / math.sqrt(40_000)
    assert ((estimates_BNS.mean(dim=1) - kl_BSZ.sum(dim=-1)).abs() < 5 * error_BS).all()


def test_what_is_padded_has_no_part_in_the_kl_of_what_is_real():
    prior, posterior = autoregressive(0.7, latent_size=3), independent_steps(steps=6)
    drawn = draw(posterior)
    cut = Posterior(*(part[:, :4] for part in posterior))
    whole_kl, cut_kl = prior.kl(posterior, Draw(drawn, drawn)), prior.kl(cut, Draw(drawn[:, :4], drawn[:, :4]))
    assert whole_kl is not None
    torch.testing.assert_close(whole_kl[:, :4], cut_kl)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 3, 12])
def test_no_posterior_with_independent_steps_comes_below_the_least_kl(alpha, steps):
    """By minimisation over all means and variances; those of the closed form reach it."""
    prior = autoregressive(alpha).double()
    mean = torch.randn(1, steps, 1, dtype=torch.float64, requires_grad=True)
    logvar = torch.randn(1, steps, 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([mean, logvar], max_iter=200, line_search_fn="strong_wolfe")

    def total() -> Tensor:
        optimizer.zero_grad()
        kl = prior.kl(Posterior(mean, logvar, torch.ones(1, steps, dtype=torch.bool)), Draw(mean, mean))
        assert kl is not None
        kl.sum().backward()
        return kl.sum().detach()

    for _ in range(3):
        optimizer.step(total)
    assert float(total()) == pytest.approx(least_kl(alpha, steps), abs=1e-6)


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.2, LARGEST_LEAST_RATE])
def test_the_least_alpha_holds_every_length_to_the_rate_and_no_more(rate):
    alpha = least_alpha(rate)
    assert alpha < 0.99
    per_step = [least_kl(alpha, steps) / steps for steps in (*range(2, 200), 10**7)]
    assert min(per_step) == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize("raw", [-100.0, 0.0, 100.0])
def test_a_learned_alpha_never_leaves_its_range(raw):
    prior = AutoregressivePrior(0.5, 4)
    nn.init.constant_(prior.raw_Z, raw)
    assert prior.alpha_Z.min() >= least_alpha(0.5 / 4) - 1e-6
    assert prior.alpha_Z.max() <= 0.99 + 1e-6


def test_a_step_before_the_first_is_zero():
    z_BSZ = torch.randn(2, 3, 2)
    torch.testing.assert_close(step_before(z_BSZ), torch.cat((torch.zeros(2, 1, 2), z_BSZ[:, :2]), dim=1))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prior": "autoregressive"}, "needs --latent_scope step"),
        ({"least_rate": 0.1}, "needs --prior autoregressive"),
        ({"prior": "autoregressive", "least_rate": 9.0, "latent_size": 4, **STEP}, "1.36 in all"),
        ({"prior": "autoregressive", "least_rate": -1.0, **STEP}, "from 0"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        ModelSettings(**settings)


# --- In a network ---------------------------------------------------------------------------------------------------


def networks(kind: str) -> Iterator[SequenceVAE]:
    for settings in OF_EACH:
        yield make_vae(kind, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_trains_every_weight_of_its_prior_and_draws_from_it(kind):
    for vae in networks(kind):
        output = vae.train()(make_batch(kind, [6, 3, 0]))
        assert output.kl is not None
        assert output.kl_is_estimated == (output.kl.shape[-1] == 1)
        torch.where(output.posterior_mask[..., None], output.kl, 0.0).sum().backward()
        for name, weight in vae.prior.named_parameters():
            assert weight.grad is not None, name
            assert weight.grad.isfinite().all()
            assert weight.grad.abs().sum() > 0, name
        lengths_B = torch.tensor([4, 2])
        drawn = sample_prior(vae.eval(), lengths_B, noise=Noise(0, torch.arange(2)))
        alone = sample_prior(vae, lengths_B[:1], noise=Noise(0, torch.arange(1)))
        assert drawn.lengths_B[0] == alone.lengths_B[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_of_parts_is_that_of_the_whole(kind):
    batch = make_batch(kind, [6, 3, 0, 5])
    for vae in networks(kind):
        whole, one, other = (vae(part, at_mean=True) for part in (batch, part_of(batch, 0, 2), part_of(batch, 2, 4)))
        torch.testing.assert_close(torch.cat((one.kl, other.kl)), whole.kl)


def test_a_run_with_a_learned_prior_goes_on_to_the_bit(tmp_path):
    for number, settings in enumerate(OF_EACH[1:]):
        folder = tmp_path / str(number)
        model = replace(MODEL, **settings)
        unbroken = train(folder / "whole", module=short_module(model=model), max_steps=4)
        train(folder, [Ask("on_train_batch_start", 5)], module=short_module(model=model), max_steps=4)
        resumed = train(folder, module=short_module(model=model), checkpoint=last_of(folder), max_steps=4)
        assert_same(resumed, unbroken)


def test_an_empty_batch_has_finite_gradients():
    for vae in networks("tokens"):
        output = vae.train()(make_batch("tokens", [0]))
        assert output.kl is not None
        (output.nll_B.sum() + torch.where(output.posterior_mask[..., None], output.kl, 0.0).sum()).backward()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in vae.parameters())
