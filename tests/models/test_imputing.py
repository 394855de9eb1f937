"""Missing values are filled with what the network expects, and with how sure it is; what came stays.

Shapes: B sequences, T steps, D features or variables, Z latent dimensions, W width, K draws.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.data.batch import VectorBatch, part_of
from seqvae.data.demo import LengthLaw, VectorTruth
from seqvae.data.description import DataDescription
from seqvae.models.imputation import Imputed, impute, mixture
from seqvae.models.noise import Noise
from seqvae.models.posteriors import Posterior, PosteriorFamily
from seqvae.models.vae import SequenceVAE
from tests.support.small_models import make_batch, make_vae

NUMBERS = ["vectors", "events"]


def noise(count: int, seed: int = 0) -> Noise:
    return Noise(seed, torch.arange(count))


def dense(batch: Any, name: str) -> Tensor:
    """A field of the events of a batch of three variables, (B, T, 3)."""
    grid_BTV = torch.zeros(*batch.gaps_BT.shape, 3, dtype=getattr(batch, name).dtype)
    for step, variable, number in zip(batch.steps_E, batch.variables_E, getattr(batch, name), strict=True):
        grid_BTV.flatten(0, 1)[step, variable] = number
    return grid_BTV


# --- What stays and what is filled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["sequence", "step"])
@pytest.mark.parametrize("decoder", ["transformer", "lstm", "tcn", "parallel"])
def test_observed_values_of_vectors_stay_and_all_others_of_real_steps_are_filled(decoder, scope):
    vae, batch = make_vae("vectors", decoder=decoder, latent_scope=scope), make_batch("vectors", [6, 3, 0], steps=8)
    filled = impute(vae, batch, draws=3, noise=noise(3))
    assert torch.equal(filled.observed_BTD, batch.observed_BTD)
    assert torch.equal(filled.mean_BTD[batch.observed_BTD], batch.values_BTD[batch.observed_BTD])
    real_BT = torch.arange(8) < batch.lengths_B[:, None]
    missing_BTD = real_BT[..., None] & ~batch.observed_BTD
    assert torch.equal(filled.std_BTD > 0, missing_BTD)
    assert (filled.mean_BTD[missing_BTD] != 0).all()
    assert not filled.mean_BTD[~real_BT].any()


def test_events_are_filled_at_every_step_for_every_variable_that_has_values():
    """A variable that is there without a value is filled; one that never had any in training is not made up."""
    vae, batch = make_vae("events"), make_batch("events", [6, 3], steps=7)
    present_without_E = (batch.variables_E == 2) & (torch.arange(len(batch.variables_E)) % 2 == 0)
    assert present_without_E.any()
    batch = batch._replace(
        has_value_E=batch.has_value_E & ~present_without_E, values_E=batch.values_E.masked_fill(present_without_E, 0.0)
    )
    filled = impute(vae, batch, draws=3, noise=noise(2))
    assert torch.equal(filled.observed_BTD, dense(batch, "has_value_E"))
    assert torch.equal(filled.mean_BTD[filled.observed_BTD], dense(batch, "values_E")[filled.observed_BTD])
    real_BT = torch.arange(7) < batch.lengths_B[:, None]
    assert filled.mean_BTD[real_BT][:, 1].isnan().all()
    assert filled.std_BTD[real_BT][:, 1].isnan().all()
    valued_BTD = real_BT[..., None] & torch.tensor([True, False, True])
    assert torch.equal(filled.std_BTD > 0, valued_BTD & ~filled.observed_BTD)
    assert filled.mean_BTD[valued_BTD].isfinite().all()
    assert not filled.mean_BTD[~real_BT].any()


def test_a_feature_that_training_never_saw_is_not_made_up():
    vae, batch = make_vae("vectors"), make_batch("vectors", [6])
    likelihood: Any = vae.likelihood
    likelihood.valued_D[1] = False
    filled = impute(vae, batch, noise=noise(len(batch.lengths_B)))
    assert torch.equal(filled.mean_BTD[..., 1].isnan(), ~batch.observed_BTD[..., 1])
    assert not filled.mean_BTD[..., [0, 2]].isnan().any()


# --- The numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["sequence", "step"])
@pytest.mark.parametrize("kind", NUMBERS)
def test_mean_and_deviation_are_those_of_the_mixture_over_the_latents(kind, scope):
    vae, batch = make_vae(kind, latent_scope=scope), make_batch(kind, [5, 5])
    filled = impute(vae, batch, draws=4, noise=noise(2, seed=3))
    means_KBTD, variances_KBTD = (torch.stack(parts) for parts in zip(*by_hand(vae, batch, 4), strict=True))
    second_BTD = (variances_KBTD.double() + means_KBTD.double().square()).mean(dim=0)
    std_BTD = (second_BTD - means_KBTD.double().mean(dim=0).square()).sqrt().float()
    missing_BTD = filled.std_BTD > 0
    assert missing_BTD.any()
    torch.testing.assert_close(filled.mean_BTD[missing_BTD], means_KBTD.mean(dim=0)[missing_BTD])
    torch.testing.assert_close(filled.std_BTD[missing_BTD], std_BTD[missing_BTD])


@torch.no_grad()
def by_hand(vae: Any, batch: Any, draws: int) -> list[tuple[Tensor, Tensor]]:
    """Means and variances of all values for each latent of the noise with seed 3."""
    drawn, parts = noise(2, seed=3), []
    for _ in range(draws):
        posterior = vae.encode(batch)
        z = posterior.mean + (0.5 * posterior.logvar).exp() * drawn.normal(posterior.mean.shape)
        inputs_BTW = torch.cat((vae.begin_W.expand(len(z), 1, -1), vae.embedding(batch)[:, :-1]), dim=1)
        hidden_BTW = vae.decoder(inputs_BTW, z)
        if isinstance(batch, VectorBatch):
            mean_BTD, logvar_BTD = vae.likelihood.predict(hidden_BTW)
        else:
            hidden_BTW = vae.likelihood.condition_on_gaps(hidden_BTW, batch.gaps_BT)
            mean_BTD, raw_BTD = vae.likelihood.value_moments.of_all(hidden_BTW).unbind(dim=-1)
            logvar_BTD = 7 * (raw_BTD / 7).tanh()
        parts.append((mean_BTD, logvar_BTD.exp()))
    return parts


class Repeats(nn.Module):
    """A decoder that returns z, whatever its inputs."""

    def forward(self, inputs_BTW: Tensor, z_BZ: Tensor) -> Tensor:
        return torch.nn.functional.pad(z_BZ, (0, 13))[:, None].expand(inputs_BTW.shape)


class Fixed(PosteriorFamily):
    """A posterior of mean 2 and deviation 0.5 in each dimension."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Posterior:
        mean = torch.full((len(hidden), 3), 2.0)
        return Posterior(mean, torch.full_like(mean, math.log(0.25)), mask)


def linear_gaussian() -> SequenceVAE:
    """x = 3 z + noise of variance 1, feature by feature."""
    vae: Any = make_vae("vectors")
    vae.add_module("decoder", Repeats())
    vae.add_module("posterior", Fixed())
    with torch.no_grad():
        vae.likelihood.moments.weight.copy_(nn.functional.pad(3 * torch.eye(3), (0, 13, 0, 3)))
        vae.likelihood.moments.bias.zero_()
    return vae


def test_the_deviation_is_that_of_the_noise_and_of_the_latent_together():
    batch = make_batch("vectors", [4])
    missing_BTD = ~batch.observed_BTD
    filled = impute(linear_gaussian(), batch, draws=1000, noise=noise(1))
    torch.testing.assert_close(filled.mean_BTD[missing_BTD].mean(), torch.tensor(6.0), rtol=0, atol=0.15)
    expected = torch.full((int(missing_BTD.sum()),), math.sqrt(1 + (3 * 0.5) ** 2))
    torch.testing.assert_close(filled.std_BTD[missing_BTD], expected, rtol=0.06, atol=0)


def test_without_draws_the_posterior_mean_stands_for_all():
    batch = make_batch("vectors", [4])
    filled = impute(linear_gaussian(), batch, draws=0, noise=noise(1))
    assert filled.mean_BTD[~batch.observed_BTD].unique().tolist() == [6.0]
    assert filled.std_BTD[~batch.observed_BTD].unique().tolist() == [1.0]


def test_small_deviations_around_large_means_are_not_lost():
    parts = [(torch.tensor([1e4 + away]), torch.tensor([1e-4])) for away in (-0.125, 0.125)]
    mean_1, variance_1 = mixture(parts)
    assert mean_1.item() == 1e4
    assert variance_1.item() == pytest.approx(1e-4 + 0.125**2, rel=1e-5)


# --- Arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NUMBERS)
def test_the_same_seed_fills_the_same_and_the_network_is_left_as_it_was(kind):
    vae, batch = make_vae(kind, dropout=0.5, word_dropout=0.5).train(), make_batch(kind, [5, 2])
    vae.encoder.eval()
    modes, state = [module.training for module in vae.modules()], torch.get_rng_state()
    one, other, third = (impute(vae, batch, draws=2, noise=noise(2, seed)) for seed in (1, 1, 2))
    assert [module.training for module in vae.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(one, other, strict=True))
    assert not torch.allclose(one.mean_BTD, third.mean_BTD, equal_nan=True)
    assert not one.mean_BTD.requires_grad


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="draws must be 0 or more, got -1"):
        impute(make_vae("vectors"), make_batch("vectors", [3]), draws=-1, noise=noise(1))
    with pytest.raises(ValueError, match="TokenLikelihood cannot fill a TokenBatch"):
        impute(make_vae("tokens"), make_batch("tokens", [3]), noise=noise(1))


# --- What it is good for --------------------------------------------------------------------------------------------


def demo_vectors(sequences: int) -> VectorBatch:
    """All in one batch, normalised."""
    truth = VectorTruth.draw(np.random.default_rng(0), LengthLaw(mean=20, longest=40))
    sample = truth.sample(sequences, np.random.default_rng(1))
    raw_SD, lengths_B = torch.from_numpy(sample.values_SD), torch.from_numpy(np.diff(sample.offsets_N1))
    mean_D = raw_SD.nanmean(dim=0)
    std_D = (raw_SD - mean_D).square().nanmean(dim=0).sqrt()
    values_BTD = nn.utils.rnn.pad_sequence(((raw_SD - mean_D) / std_D).split(lengths_B.tolist()), True, math.nan)
    common: dict[str, Any] = {"sequences_B": torch.arange(sequences), "labels_B": None, "step_tokens": 1, "position": 0}
    return VectorBatch(values_BTD.nan_to_num(nan=0.0), ~values_BTD.isnan(), lengths_B, **common)


def trained(batch: VectorBatch) -> SequenceVAE:
    torch.manual_seed(0)
    features = batch.values_BTD.shape[-1]
    names, valued = tuple(map(str, range(features))), (True,) * features
    description = DataDescription(kind="vectors", names=names, valued=valued)
    vae = SequenceVAE(description, ModelSettings(width=32, depth=1, heads=2, latent_size=4, dropout=0.0))
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    for step in range(200):
        weight = min(1.0, step / 100)
        chosen = part_of(batch, first := 48 * step % (len(batch.lengths_B) - 48), first + 48)
        assert isinstance(chosen, VectorBatch)
        kept_BTD = chosen.observed_BTD & (torch.rand(chosen.values_BTD.shape) > 0.2)
        output = vae(chosen._replace(observed_BTD=kept_BTD, values_BTD=chosen.values_BTD * kept_BTD))
        mean, logvar = output.posterior_mean, output.posterior_logvar
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum()
        optimizer.zero_grad()
        ((output.nll_B.sum() + weight * kl) / 48).backward()
        optimizer.step()
    return vae.eval()


@pytest.mark.slow
def test_filled_values_of_the_demo_are_nearer_than_means_and_as_far_off_as_they_say():
    """A fifth of the values that came is hidden from a model that learned from other sequences, in which as many were missing.

    One whose encoder has never met a gap is too sure of itself: errors are 1.25 of what it says.
    """
    batch = demo_vectors(1500)
    learned_from = part_of(batch, 0, 1200)
    assert isinstance(learned_from, VectorBatch)
    vae = trained(learned_from)
    torch.manual_seed(1)
    held_out = part_of(batch, 1200, 1500)
    assert isinstance(held_out, VectorBatch)
    hidden_BTD = held_out.observed_BTD & (torch.rand(held_out.values_BTD.shape) < 0.2)
    kept_BTD = held_out.observed_BTD & ~hidden_BTD
    reduced = held_out._replace(observed_BTD=kept_BTD, values_BTD=held_out.values_BTD * kept_BTD)
    filled: Imputed = impute(vae, reduced, draws=16, noise=noise(300))
    truth = held_out.values_BTD[hidden_BTD]
    errors = filled.mean_BTD[hidden_BTD] - truth
    assert errors.square().mean().sqrt() < 0.9 * truth.square().mean().sqrt()
    assert (errors / filled.std_BTD[hidden_BTD]).square().mean().sqrt().item() == pytest.approx(1, abs=0.08)
