"""The prior over codes against enumeration, a Markov chain whose entropy is known, and what it draws.

Shapes: B sequences, S steps, H codebooks, K codes of each, X codes of a split.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seqvae.config.inference import PriorSettings
from seqvae.models import code_prior
from seqvae.models.code_prior import PSEUDO_COUNT, CodeSet, RecurrentCodes, batches, fit_codes, mean_nll
from seqvae.models.codes import UniformCodes
from seqvae.models.noise import Noise
from seqvae.models.sampling import sample_prior
from tests.support.small_models import make_batch, make_vae

CPU = torch.device("cpu")


def random_prior(codes: int = 3, codebooks: int = 2, width: int = 4) -> RecurrentCodes:
    torch.manual_seed(0)
    prior = RecurrentCodes(codes, codebooks, width)
    for parameter in prior.parameters():
        nn.init.normal_(parameter)
    return prior.eval()


def all_codes(codes: int, *shape: int) -> Tensor:
    """Return all codes that there can be, each a row of this shape."""
    return torch.tensor(list(itertools.product(range(codes), repeat=math.prod(shape)))).view(-1, *shape)


def chain(sequences: int, seed: int) -> CodeSet:
    """Return codes of which each next one is the same as the one before in nine of ten cases, of 2 to 6 steps."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 7, sequences)
    codes = []
    for length in lengths.tolist():
        moves = np.where(random.random(length) < 0.9, 0, random.integers(1, 4, length))
        moves[0] = random.integers(4)
        codes.append(np.cumsum(moves)[:, None] % 4)
    return CodeSet.of([np.concatenate(codes).astype(np.int32)], [lengths])


# --- Probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codes", "shape"), [(3, (2,)), (3, (2, 2)), (2, (3, 2)), (5, (1,)), (2, (4, 1))])
def test_the_probabilities_of_all_codes_sum_to_one(codes, shape):
    prior = random_prior(codes, shape[-1])
    every = all_codes(codes, *shape)
    nll = prior.nll(every)
    assert nll.shape == every.shape[:-1]
    log_p = -(nll if nll.dim() == 1 else nll.sum(dim=1)).detach().double()
    assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert float(log_p.std()) > 0.5


def test_what_is_drawn_is_as_frequent_as_it_is_likely():
    prior, every, draws = random_prior(2, 2), all_codes(2, 2, 2), 20_000
    drawn = prior.sample_codes((draws, 2), Noise(3, torch.arange(draws)))
    places = (drawn.flatten(1) * torch.tensor([8, 4, 2, 1])).sum(dim=1)
    shares = torch.bincount(places, minlength=16).double() / draws
    p = (-prior.nll(every).sum(dim=1).detach().double()).exp()
    assert ((shares - p).abs() < 5 * (p * (1 - p) / draws).sqrt() + 1e-6).all()


def test_later_steps_change_neither_the_probability_nor_the_draw_of_earlier_ones():
    prior = random_prior()
    codes = torch.randint(3, (5, 7, 2))
    torch.testing.assert_close(prior.nll(codes)[:, :4], prior.nll(codes[:, :4]))
    numbers = torch.arange(5)
    longer, shorter = (prior.sample_codes((5, steps), Noise(1, numbers)) for steps in (7, 4))
    assert longer[:, :4].equal(shorter)
    alone = prior.sample_codes((1, 7), Noise(1, numbers[2:3]))
    assert longer[2:3].equal(alone)


def test_probabilities_are_the_same_when_they_are_computed_in_parts(monkeypatch):
    prior, codes = random_prior(), torch.randint(3, (9, 5, 2))
    whole = prior.nll(codes)
    monkeypatch.setattr(code_prior, "LOGITS_AT_ONCE", 3 * 10 * 2)
    torch.testing.assert_close(prior.nll(codes), whole)


@pytest.mark.parametrize("scope", ["sequence", "step"])
def test_the_rate_of_a_network_is_that_of_its_prior(scope):
    vae = make_vae("tokens", latent="discrete", codes=3, codebooks=2, latent_size=4, latent_scope=scope)
    batch = make_batch("tokens", [4, 1, 3])
    even = vae(batch)
    assert isinstance(vae.prior, UniformCodes)
    torch.testing.assert_close(even.kl, torch.full_like(even.kl, 2 * math.log(3)))
    vae.prior = random_prior(3, 2)
    fitted = vae(batch)
    assert fitted.codes.equal(even.codes)
    assert not fitted.kl_is_estimated
    torch.testing.assert_close(fitted.kl.squeeze(-1), vae.prior.nll(fitted.codes))


@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_samples_are_decoded_from_codes_that_the_prior_draws(kind, monkeypatch):
    vae = make_vae(kind, latent="discrete", codes=3, codebooks=2, latent_size=4, latent_scope="step")
    vae.prior = random_prior(3, 2)
    drawn: list[Tensor] = []
    sample = vae.prior.sample_codes

    def recorded(*words: Any) -> Tensor:
        drawn.append(sample(*words))
        return drawn[-1]

    monkeypatch.setattr(vae.prior, "sample_codes", recorded)
    lengths_B = torch.tensor([3, 5])
    made = sample_prior(vae, lengths_B, noise=Noise(0, torch.arange(2)))
    assert drawn[0].shape == (2, 5 + (kind == "tokens"), 2)
    assert (made.lengths_B <= lengths_B).all()


# --- Training ---------------------------------------------------------------------------------------------------------


def test_a_fitted_prior_comes_near_to_the_entropy_of_a_chain():
    train, valid = chain(1500, 0), chain(400, 1)
    seen: list[tuple[int, float]] = []
    settings = PriorSettings(width=16, max_epochs=12, lr=0.01)
    fitted = fit_codes(train, valid, 4, settings, 0, CPU, lambda *epoch: seen.append(epoch))
    assert fitted.valid == min(nll for _, nll in seen)
    assert (fitted.epochs, fitted.valid) in seen
    counts = np.bincount(train.codes_XH[:, 0], minlength=4) + PSEUDO_COUNT
    by_hand = -np.log(counts / counts.sum())[valid.codes_XH[:, 0]].mean()
    assert fitted.frequencies == pytest.approx(by_hand, abs=1e-5)
    assert fitted.even == pytest.approx(math.log(4))
    moves = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / 3))
    firsts = len(valid.lengths_B) / len(valid.codes_XH)
    entropy = firsts * math.log(4) + (1 - firsts) * moves
    assert abs(fitted.valid - entropy) < 0.06
    assert fitted.valid < fitted.frequencies - 0.4
    assert mean_nll(fitted.prior, valid) == pytest.approx(fitted.valid)


def test_the_same_seed_fits_the_same_prior_and_leaves_random_numbers_alone():
    train, valid = chain(60, 0), chain(30, 1)
    settings, before = PriorSettings(width=8, max_epochs=2), torch.random.get_rng_state()
    one, same, other = (fit_codes(train, valid, 4, settings, seed, CPU).prior.state_dict() for seed in (0, 0, 1))
    assert torch.random.get_rng_state().equal(before)
    assert all(weight.equal(same[name]) for name, weight in one.items())
    assert not one["memory.weight_hh_l0"].equal(other["memory.weight_hh_l0"])


def test_a_prior_that_cannot_learn_more_is_that_of_the_frequencies():
    random = np.random.default_rng(0)
    train, valid = (
        CodeSet.of([random.choice(3, (size, 1), p=[0.7, 0.2, 0.1]).astype(np.int32)], [np.ones(size, np.int64)])
        for size in (4000, 500)
    )
    fitted = fit_codes(train, valid, 3, PriorSettings(width=4, max_epochs=3), 0, CPU)
    assert fitted.valid == pytest.approx(fitted.frequencies, abs=0.01)
    p = (-fitted.prior.nll(torch.arange(3)[:, None])).exp()
    torch.testing.assert_close(p, torch.tensor([0.7, 0.2, 0.1]), rtol=0, atol=0.05)


def test_batches_hold_each_sequence_once_and_little_padding():
    lengths = np.random.default_rng(0).integers(1, 50, 3000)
    for random in (None, np.random.default_rng(1)):
        found = list(batches(lengths, 2, random))
        assert sorted(np.concatenate(found).tolist()) == list(range(3000))
        padded = [len(one) * lengths[one].max() for one in found]
        assert max(padded) <= code_prior.CODES_AT_ONCE / 2
        assert sum(padded) < 1.1 * lengths.sum()


def test_a_set_gives_back_the_codes_of_its_sequences():
    codes = np.arange(12, dtype=np.int32).reshape(6, 2)
    found, is_real = CodeSet.of([codes[:4], codes[4:]], [np.array([1, 3]), np.array([2])]).gather(np.array([2, 1]))
    assert found[is_real].tolist() == [[8, 9], [10, 11], [2, 3], [4, 5], [6, 7]]
    assert is_real.tolist() == [[True, True, False], [True, True, True]]
