"""Posteriors that are no Gaussian with free moments: flows by autograd and quadrature, and the variances of --posterior du.

Shapes: B sequences, Z latent dimensions, K posteriors, G places of a grid.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.models.posteriors import (
    DEVIATION,
    LARGEST_LOG_SCALE,
    LEAST_VARIANCE,
    Coupling,
    DuPosterior,
    Flow,
    FlowPosterior,
    Posterior,
    log_density,
)
from seqvae.models.priors import Prior
from seqvae.monitors.contract import MovesLatents
from seqvae.monitors.formulas import gaussian_kl, moments_of_draws, moved_information, mutual_information
from seqvae.monitors.window import PosteriorWindow, take_reading
from tests.support.short_runs import MODEL, Ask, assert_same, last_of, short_module, train
from tests.support.small_models import make_batch, make_vae

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


def bent(flow: Flow, std: float = 0.5) -> Flow:
    """Give a flow weights with which it is far from the identity."""
    torch.manual_seed(3)
    for weight in flow.parameters():
        nn.init.normal_(weight, std=std)
    return flow


def posteriors(count: int, size: int, seed: int = 0) -> Posterior:
    generator = torch.Generator().manual_seed(seed)
    mean, logvar = torch.randn((2, count, size), generator=generator)
    return Posterior(mean, logvar - 1, torch.ones(count, dtype=torch.bool))


# --- Flows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "size"), [(1, 2), (2, 3), (4, 5)])
def test_the_log_determinant_is_that_of_autograd_and_the_inverse_undoes_the_map(layers, size):
    flow = bent(Flow(layers, size)).double()
    posterior = posteriors(6, size)
    mean, logvar = posterior.mean.double(), posterior.logvar.double()
    base = torch.randn(6, size, dtype=torch.float64)
    z, log_det = flow(base, mean, logvar)
    assert (z - base).abs().max() > 0.1
    for row in range(6):
        jacobian = torch.func.jacrev(lambda one, row=row: flow(one, mean[row], logvar[row])[0])(base[row])
        torch.testing.assert_close(log_det[row], torch.linalg.slogdet(jacobian).logabsdet)
    back, same_det = flow.inverse(z, mean, logvar)
    torch.testing.assert_close(back, base)
    torch.testing.assert_close(same_det, log_det)


def test_a_flow_begins_as_the_identity_and_each_dimension_is_moved():
    base, posterior = torch.randn(4, 3), posteriors(4, 3)
    z, log_det = Flow(2, 3)(base, posterior.mean, posterior.logvar)
    assert torch.equal(z, base)
    assert not log_det.any()
    moved, _ = bent(Flow(2, 3))(base, posterior.mean, posterior.logvar)
    assert (moved != base).all()


@torch.no_grad()
@pytest.mark.slow
def test_the_density_of_a_moved_posterior_has_an_integral_of_one_and_is_that_of_its_draws():
    family = FlowPosterior(8, 2, 3)
    bent(family.flow)
    posterior = posteriors(3, 2)
    axis_G = torch.linspace(-30, 30, 1201, dtype=torch.float64)
    places = torch.cartesian_prod(axis_G, axis_G)
    density_GK = family.log_density_at(places, posterior).exp()
    torch.testing.assert_close(density_GK.sum(dim=0) * 0.05**2, torch.ones(3, dtype=torch.float64), rtol=2e-3, atol=0)
    drawn = family.draw(posterior)
    torch.testing.assert_close(family.log_density_at(drawn.z, posterior).diagonal(), log_density(posterior, drawn))


def test_a_flow_is_trained_by_the_kl_and_the_decoder_and_an_empty_batch_is_finite():
    vae = make_vae("tokens", posterior="flow", flow_layers=2).train()
    assert isinstance(vae.posterior, FlowPosterior)
    bent(vae.posterior.flow)
    output = vae(make_batch("tokens", [6, 3, 0]))
    assert output.kl is not None
    assert output.kl.shape == (3, 1)
    assert output.kl_is_estimated
    torch.where(output.posterior_mask[:, None], output.kl, 0.0).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in vae.posterior.parameters())
    empty = vae(make_batch("tokens", [0]))
    (empty.nll_B.sum() + torch.where(empty.posterior_mask[:, None], empty.kl, 0.0).sum()).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in vae.parameters())


def test_a_flow_of_one_dimension_is_refused():
    with pytest.raises(ValueError, match="--latent_size 2 or more"):
        ModelSettings(posterior="flow", latent_size=1)


# --- Readings of moved latents --------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_information_of_moved_latents_is_that_of_gaussians_where_nothing_moves_them():
    family, posterior = FlowPosterior(8, 3, 2), posteriors(300, 3)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        z = family.draw(posterior, torch.randn(300, 3, generator=generator, dtype=torch.float64).float()).z
        moved = moved_information(z, lambda one: family.log_density_at(one, posterior))
        plain = mutual_information(posterior.mean, posterior.logvar, generator.manual_seed(seed))
        torch.testing.assert_close(moved, plain, rtol=0, atol=1e-3)


@torch.no_grad()
def test_a_map_that_is_the_same_for_all_leaves_the_information_as_it_is():
    family, posterior = FlowPosterior(8, 3, 3), posteriors(300, 3)
    bent(family.flow)
    for layer in family.flow.layers:
        assert isinstance(layer, Coupling)
        nn.init.zeros_(layer.of_posterior.weight)
    torch.manual_seed(0)
    drawn = family.draw(posterior)
    before, _ = family.flow.inverse(drawn.z, posterior.mean, posterior.logvar)
    moved = moved_information(drawn.z, lambda one: family.log_density_at(one, posterior))
    gaussian = FlowPosterior(8, 3, 1)
    plain = moved_information(before, lambda one: gaussian.log_density_at(one, posterior))
    assert float(moved) == pytest.approx(float(plain), abs=1e-3)
    assert (drawn.z - before).abs().max() > 0.1


def test_moments_of_draws_are_those_of_the_gaussians_they_are_drawn_from():
    generator = torch.Generator().manual_seed(0)
    mean_NZ = torch.randn(4000, 2, generator=generator, dtype=torch.float64) * torch.tensor([0.0, 0.5])
    variance_Z = torch.tensor([1.0, 0.3], dtype=torch.float64)
    noise = torch.randn(8, 4000, 2, generator=generator, dtype=torch.float64)
    moments = moments_of_draws(mean_NZ + variance_Z.sqrt() * noise)
    torch.testing.assert_close(moments.mean_of_variances, variance_Z, rtol=0.02, atol=0)
    torch.testing.assert_close(moments.mean_logvar, variance_Z.log(), rtol=0, atol=0.02)
    torch.testing.assert_close(moments.variance_of_means, mean_NZ.var(dim=0), rtol=0.05, atol=0.01)


# --- Dropped variances ----------------------------------------------------------------------------------------------


def in_training(count: int = 2000) -> tuple[Posterior, Posterior]:
    """Return posteriors of the same batch as training and as evaluation has them."""
    torch.manual_seed(0)
    layer, hidden_BW = DuPosterior(8, 3), torch.randn(count, 8)
    real_B = torch.ones(count, dtype=torch.bool)
    with torch.no_grad():
        return layer(hidden_BW, real_B), layer.eval()(hidden_BW, real_B)


def test_a_fifth_of_the_variances_is_dropped_to_the_least_one_and_the_mean_stays():
    trained, evaluated = in_training()
    variance, own = trained.logvar.exp(), evaluated.logvar.exp()
    is_dropped = torch.isclose(variance, torch.tensor(LEAST_VARIANCE))
    assert float(is_dropped.float().mean()) == pytest.approx(0.2, abs=0.02)
    torch.testing.assert_close(variance[~is_dropped] - LEAST_VARIANCE, (own[~is_dropped] - LEAST_VARIANCE) / 0.8)
    assert float(variance.mean()) == pytest.approx(float(own.mean()), rel=0.02)
    assert float(own.min()) > LEAST_VARIANCE


def test_the_means_are_normalised_and_the_kl_has_the_floor_of_means_and_variances():
    trained, _ = in_training()
    torch.testing.assert_close(trained.mean.std(dim=0, correction=0), torch.full((3,), DEVIATION))
    least = 0.2 * 0.5 * (LEAST_VARIANCE - 1 - math.log(LEAST_VARIANCE)) + DEVIATION**2 / 2
    assert float(gaussian_kl(trained.mean, trained.logvar).mean()) > least - 0.02


def test_the_least_variance_is_that_of_no_entropy():
    entropy = 0.5 * math.log(2 * math.pi * math.e * LEAST_VARIANCE)
    assert entropy == pytest.approx(0.0, abs=1e-12)


def test_du_has_its_own_name_in_messages_and_shares_what_batch_norm_shares():
    vae = make_vae("tokens", posterior="du")
    assert vae.posterior.least_sequences == 2
    with pytest.raises(ValueError, match="--posterior du needs two sequences or more"):
        vae.train()(make_batch("tokens", [5]))


# --- In runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"posterior": "flow"}, {"posterior": "du"}, {"posterior": "flow", "prior": "vamp"}]
)
def test_a_run_goes_on_to_the_bit(settings, tmp_path):
    model = replace(MODEL, **settings)
    unbroken = train(tmp_path / "whole", module=short_module(model=model), max_steps=4)
    train(tmp_path / "cut", [Ask("on_train_batch_start", 5)], module=short_module(model=model), max_steps=4)
    checkpoint = last_of(tmp_path / "cut")
    assert_same(train(tmp_path / "cut", module=short_module(model=model), checkpoint=checkpoint, max_steps=4), unbroken)


@torch.no_grad()
def test_readings_are_of_latents_that_are_moved():
    """A flow that doubles one dimension, and shrinks another to nothing that counts."""
    family = FlowPosterior(8, 2, 2)
    for layer, scale in zip(family.flow.layers, (math.log(2), -1.999), strict=True):
        assert isinstance(layer, Coupling)
        layer.out.bias[0] = LARGEST_LOG_SCALE * math.atanh(scale / LARGEST_LOG_SCALE)
    generator = torch.Generator().manual_seed(0)
    mean_NZ, window = 0.5 * torch.randn(256, 2, generator=generator), PosteriorWindow(1024)
    posterior = Posterior(mean_NZ, torch.full_like(mean_NZ, -1.0), torch.ones(256, dtype=torch.bool))
    kl = Prior().kl(posterior, family.draw(posterior))
    window.push(*posterior, kl=kl)

    class Module:
        move_latents = staticmethod(family.move)

        @staticmethod
        def log_density_at(z: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
            return family.log_density_at(z, Posterior(mean, logvar, posterior.mask))

    assert isinstance(Module(), MovesLatents)
    plain, moved = take_reading(window, 1, 0), take_reading(window, 1, 0, moves=Module())
    assert (plain.active_units, moved.active_units) == (2, 1)
    assert moved.variance_of_means[1] == pytest.approx(4 * plain.variance_of_means[1], rel=0.2)
    assert moved.mean_of_variances[1] == pytest.approx(4 * plain.mean_of_variances[1], rel=0.1)
    assert moved.kl_per_dim == pytest.approx(plain.kl_per_dim, abs=0.05)
    assert moved.mutual_information == pytest.approx(plain.mutual_information, abs=0.1)
    assert (moved.rate, moved.rate_error) == (plain.rate, plain.rate_error)
    assert moved.rate_error is not None
