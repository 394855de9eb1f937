"""Two levels of latents: the KL between them, the likelihood under both, and that a decoder gets each where it should.

Shapes: B sequences, S steps, Z dimensions of the sequence's latent, Y of a step's, G points of a grid.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from seqvae.data.batch import VectorBatch, part_of
from seqvae.inference.estimates import importance_weighted_nll, posterior_statistics
from seqvae.inference.streaming import evaluating
from seqvae.inference.tables import between
from seqvae.models.imputation import impute
from seqvae.models.levels import StepLatents, StepPrior, side_by_side
from seqvae.models.noise import Noise
from seqvae.models.posteriors import BatchNormPosterior, GaussianPosterior, Posterior
from seqvae.models.sampling import reconstruct, sample_prior
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.formulas import gaussian_kl
from seqvae.training.objective import FreeBits, find_above_floor, negative_elbo
from tests.inference.test_evaluation import paired
from tests.support.small_models import KINDS, make_batch, make_vae


def make_levels(kind: str, **changes: Any) -> SequenceVAE:
    """Return a small network whose prior of the steps depends on z and on where they stand."""
    vae = make_vae(kind, **{"latent_scope": "both", "step_latent_size": 2, **changes})
    assert vae.step_level is not None
    with torch.no_grad():
        for weight in vae.step_level.prior_moments.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        vae.step_level.of_sequence.weight.mul_(5)
    return vae


def steps_of(vae: SequenceVAE, batch: Any) -> StepLatents:
    steps = vae(batch).steps
    assert isinstance(steps, StepLatents)
    return steps


# --- One step below a sequence --------------------------------------------------------------------------------------


def test_the_kl_of_a_step_is_that_between_its_posterior_and_the_prior_that_z_gives_it():
    vae, batch = make_levels("vectors"), make_batch("vectors", [4, 2])
    steps = steps_of(vae, batch)
    posterior, prior = steps.posterior, steps.prior
    expected = kl_divergence(
        Normal(posterior.mean, (0.5 * posterior.logvar).exp()), Normal(prior.mean, (0.5 * prior.logvar).exp())
    )
    torch.testing.assert_close(gaussian_kl(*steps.relative[:2]), expected, rtol=1e-4, atol=1e-5)


def test_the_kl_of_a_step_is_the_mean_of_what_its_draws_say():
    torch.manual_seed(0)
    relative = Posterior(
        torch.tensor([[[0.7, -1.2]]]), torch.tensor([[[-1.0, 0.3]]]), torch.ones(1, 1, dtype=torch.bool)
    )
    prior = StepPrior(torch.tensor([[[3.0, -2.0]]]), torch.tensor([[[1.5, -4.0]]]))
    many = relative.mean + torch.exp(0.5 * relative.logvar) * torch.randn(200_000, 1, 2)
    everywhere = torch.ones(200_000, 1, dtype=torch.bool)
    wide = Posterior(relative.mean.expand_as(many), relative.logvar.expand_as(many), everywhere)
    estimates = -StepLatents(wide, prior, many).log_p_over_q()
    error = float(estimates.std() / len(estimates) ** 0.5)
    assert abs(float(estimates.mean()) - float(gaussian_kl(*relative[:2]).sum())) < 4 * error < 0.02


def test_a_posterior_that_adds_nothing_is_the_prior_whatever_z_says():
    vae, batch = make_levels("vectors"), make_batch("vectors", [4, 2])
    assert vae.step_level is not None
    with torch.no_grad():
        for weight in vae.step_level.posterior_moments.parameters():
            weight.zero_()
        steps = steps_of(vae, batch)
    assert float(gaussian_kl(*steps.relative[:2]).abs().max()) == 0
    torch.testing.assert_close(steps.posterior.mean, steps.prior.mean)
    assert float(steps.prior.mean.std()) > 0.1


def test_at_first_the_prior_of_each_step_is_the_standard_normal_one():
    vae = make_vae("vectors", latent_scope="both")
    assert vae.step_level is not None
    with torch.no_grad():
        prior = vae.step_level.prior(torch.randn(3, 3), 5)
    assert prior.mean.shape == (3, 5, 16)
    assert float(prior.mean.abs().max()) == float(prior.logvar.abs().max()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_both_levels_and_padding_has_none(kind):
    vae = make_levels(kind).train()
    batch = make_batch(kind, [6, 3, 0])
    output = vae(batch)
    negative_elbo(output, 1.0, 0.0).loss.backward()
    names = ("posterior.", "step_level.", "encoder.", "decoder.latent.")
    learning = {name: weight.grad for name, weight in vae.named_parameters() if name.startswith(names)}
    assert not [name for name, gradient in learning.items() if gradient is None or not gradient.any()]
    with torch.no_grad():
        wider = vae.eval()(make_batch(kind, [6, 3, 0], steps=9), at_mean=True)
        narrow = vae(batch, at_mean=True)
    torch.testing.assert_close(wider.nll_B, narrow.nll_B)
    both = [negative_elbo(one, 1.0, 0.0).kl for one in (wider, narrow)]
    torch.testing.assert_close(*both)
    assert not output.steps.relative.mask[2].any()


def test_a_step_s_latent_is_seen_at_its_step_and_not_before():
    vae, batch = make_levels("vectors"), make_batch("vectors", [5])
    z = vae.latents(batch, at_mean=True).z
    moved = z.clone()
    moved[:, 3, 3:] += 1.0
    with torch.no_grad():
        before, after = vae.decode(batch, z), vae.decode(batch, moved)
    assert torch.equal(before[:, :3], after[:, :3])
    assert float((before[:, 3:] - after[:, 3:]).abs().min()) > 0


# --- The objective --------------------------------------------------------------------------------------------------


def test_the_objective_holds_the_kl_of_both_levels_each_above_a_floor_of_its_own():
    vae, batch = make_levels("tokens"), make_batch("tokens", [6, 3])
    with torch.no_grad():
        output = vae(batch)
    own = gaussian_kl(output.posterior_mean, output.posterior_logvar)[output.posterior_mask].sum(dim=0)
    mean, logvar, mask = output.steps.relative
    below = gaussian_kl(mean, logvar)[mask].sum(dim=0)
    plain = negative_elbo(output, 0.5, 0.0)
    torch.testing.assert_close(plain.kl, own.sum() + below.sum())
    torch.testing.assert_close(plain.loss, output.nll_B.sum() + 0.5 * plain.kl)
    raised = negative_elbo(output, 1.0, 100.0, of_steps=FreeBits(0.0))
    torch.testing.assert_close(raised.loss - raised.nll, 3 * 2 * 100.0 + below.sum())
    raised = negative_elbo(output, 1.0, 0.0, of_steps=FreeBits(100.0))
    torch.testing.assert_close(raised.loss - raised.nll, own.sum() + 2 * int(mask.sum()) * 100.0)
    torch.testing.assert_close(raised.kl, plain.kl)


@pytest.mark.parametrize(("free_bits", "step_free_bits"), [(0.0, 0.0), (0.3, 0.05), (5.0, 0.05), (0.1, 0.6)])
def test_losses_and_gradients_of_parts_add_up_to_the_whole(free_bits, step_free_bits):
    vae, batch = make_levels("vectors"), make_batch("vectors", [6, 3, 5, 1])

    def at_mean(part: Any) -> Any:
        return vae(part, at_mean=True)

    whole = negative_elbo(at_mean(batch), 0.7, free_bits, of_steps=FreeBits(step_free_bits))
    whole.loss.backward()
    gradients = [weight.grad.clone() for weight in vae.parameters() if weight.grad is not None]
    vae.zero_grad()
    outputs = [at_mean(part_of(batch, first, last)) for first, last in ((0, 1), (1, 4))]
    above = find_above_floor(outputs, free_bits, of_steps=FreeBits(step_free_bits))
    parts = [negative_elbo(one, 0.7, free_bits, above, of_steps=FreeBits(step_free_bits)) for one in outputs]
    loss = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(loss, whole.loss)
    loss.backward()
    for own, expected in zip((w.grad for w in vae.parameters() if w.grad is not None), gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


# --- The likelihood under both levels -------------------------------------------------------------------------------


def copies(batch: Any, count: int) -> Any:
    """Return a batch of one sequence, many times."""
    return type(batch)(*(each.expand(count, *each.shape[1:]) if isinstance(each, Tensor) else each for each in batch))


def exact_nll(vae: SequenceVAE, batch: Any) -> float:
    """Return -log of the integral of p(z) p(s | z) p(x | z, s) of one sequence of one step, on a grid of z, and of s where it lies
    for each z."""
    assert vae.step_level is not None
    size = vae.settings.latent_size
    one_G = torch.linspace(-7, 7, 121 if size == 1 else 51, dtype=torch.float64)
    places_G = torch.linspace(-6, 6, 121 if size == 1 else 61, dtype=torch.float64)
    z_GZ = torch.cartesian_prod(*[one_G] * size).view(-1, size)
    prior = vae.step_level.prior(z_GZ.float(), 1)
    mean_G1, deviation_G1 = prior.mean[:, 0].double(), (0.5 * prior.logvar[:, 0].double()).exp()
    s_GG = mean_G1 + deviation_G1 * places_G
    log_p_GG = vae.prior.log_density(z_GZ)[:, None] + Normal(mean_G1, deviation_G1).log_prob(s_GG)
    points = side_by_side(z_GZ.repeat_interleave(len(places_G), dim=0), s_GG.view(-1, 1, 1)).float()
    log_p_GG = log_p_GG - vae.nll_given_z(copies(batch, len(points)), points).double().view(log_p_GG.shape)
    cell_G1 = (one_G[1] - one_G[0]) ** size * (places_G[1] - places_G[0]) * deviation_G1
    return -float(torch.logsumexp((log_p_GG + cell_G1.log()).flatten(), dim=0))


@pytest.mark.parametrize(
    ("posterior", "prior", "size"),
    [
        ("gaussian", "standard", 1),
        pytest.param("batch_norm", "mixture", 1, marks=pytest.mark.slow),
        pytest.param("du", "vamp", 1, marks=pytest.mark.slow),
        pytest.param("flow", "mixture", 2, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_importance_weighting_over_both_levels_agrees_with_quadrature(posterior, prior, size):
    own = {"latent_size": size, "step_latent_size": 1, "posterior": posterior, "prior": prior}
    components = {} if prior == "standard" else {"prior_components": 3}
    vae, batch = make_levels("vectors", **own, **components), make_batch("vectors", [1], seed=3)
    vae.decoder.latent.weight.mul_(2)
    assert isinstance(vae.posterior, GaussianPosterior | BatchNormPosterior)
    last = vae.posterior.moments if isinstance(vae.posterior, GaussianPosterior) else vae.posterior.logvar
    assert vae.step_level is not None
    # Posteriors that do not cover what they stand for would take more samples.
    last.bias[-size:] += 1.0
    vae.step_level.posterior_moments.weight.mul_(0.15)
    vae.step_level.posterior_moments.bias[1:] = 0.3
    vae.step_level.prior_moments.weight.mul_(0.4)
    with evaluating(vae, None):
        exact = exact_nll(vae, batch)
    weights_N = np.exp(exact - importance_weighted_nll(vae, [copies(batch, 2000)], samples=40).nll_N)
    error = weights_N.std() / len(weights_N) ** 0.5
    assert abs(weights_N.mean() - 1) < 4 * error < 0.03
    assert importance_weighted_nll(vae, [copies(batch, 2000)], samples=1).nll_N.mean() > exact + 0.02, (
        "the negative ELBO"
    )


@torch.no_grad()
def test_the_rate_and_the_information_are_read_of_each_level():
    vae, batch = make_levels("vectors"), make_batch("vectors", [5] * 40)
    read = posterior_statistics(vae, paired(batch))
    own, below = read.levels["sequence"], read.levels["step"]
    assert abs(own.rate.value + below.rate.value - read.rate.value) < 1e-4
    assert abs(sum(below.kl_per_dim) - below.rate.value) < 1e-4
    assert abs(-read.elbo.value - read.nll.value - read.rate.value) < 1e-4
    assert (len(own.kl_per_dim), len(below.kl_per_dim)) == (3, 2)
    assert (own.posteriors, below.posteriors) == (40, 200)
    assert own.decoder_use is not None
    assert below.decoder_use is not None
    with (
        torch.no_grad()
    ):  # a decoder that sees neither the steps' latents nor, through them, what their prior says of z
        vae.decoder.latent.weight[:, 3:] = 0
    deaf = posterior_statistics(vae, paired(batch)).levels
    assert deaf["step"].decoder_use == (0.0, 0.0)
    use = deaf["sequence"].decoder_use
    assert use is not None
    assert use.value != 0


# --- From the top down ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_sampled_reconstructed_and_imputed_with_latents_of_both_levels(kind):
    vae, lengths_B = make_levels(kind), torch.tensor([4, 1, 6])
    drawn = sample_prior(vae, lengths_B, noise=Noise(0, torch.arange(3)))
    alone = sample_prior(vae, lengths_B[:2], noise=Noise(0, torch.arange(2)))
    assert len(drawn.lengths_B) == 3
    if isinstance(drawn, VectorBatch) and isinstance(alone, VectorBatch):
        assert drawn.lengths_B.tolist() == [4, 1, 6]
        torch.testing.assert_close(alone.values_BTD[:, :4], drawn.values_BTD[:2, :4])
    batch = make_batch(kind, [5, 2, 3])
    again = reconstruct(vae, batch, noise=Noise(0, torch.arange(3)))
    assert (again.lengths_B <= batch.lengths_B).all()
    if kind != "tokens":
        many, none = (impute(vae, batch, draws=draws, noise=Noise(0, torch.arange(3))) for draws in (8, 0))
        missing = ~many.observed_BTD & many.mean_BTD.isfinite() & (many.std_BTD > 0)
        assert (many.std_BTD[missing] >= 0.5 * none.std_BTD[missing]).all()
        assert not torch.equal(many.mean_BTD[missing], none.mean_BTD[missing])


def test_both_ends_of_a_path_are_the_latents_of_the_sequences_themselves():
    vae = make_levels("vectors")
    ends = [make_batch("vectors", [4], seed=1), make_batch("vectors", [6], seed=2)]
    with torch.no_grad():
        z = between(vae, ends, torch.linspace(0, 1, 5), steps=6)
        first, last = (vae.latents(one, at_mean=True).z for one in ends)
    assert z.shape == (5, 6, 5)
    torch.testing.assert_close(z[:1, :4], first)
    torch.testing.assert_close(z[-1:], last)


def test_a_draw_from_the_prior_follows_what_z_says_of_each_step():
    vae = make_levels("vectors")
    assert vae.step_level is not None
    z_BZ = torch.tensor([[2.0, 0.0, -1.0]])
    with torch.no_grad():
        drawn = vae.with_steps(z_BZ.expand(4000, 3), torch.randn(4000, 7, 2))
        prior = vae.step_level.prior(z_BZ, 7)
    assert torch.equal(drawn[:, :, :3], z_BZ.expand(4000, 7, 3))
    deviation = (0.5 * prior.logvar[0]).exp()
    assert float(((drawn[:, :, 3:].mean(dim=0) - prior.mean[0]) / deviation).abs().max()) < 4.5 / 4000**0.5
    torch.testing.assert_close(drawn[:, :, 3:].std(dim=0), deviation, rtol=0.06, atol=0)
