"""Exact numbers: importance weighting against likelihoods that are known in closed form, and statistics of known posteriors.

Shapes: B sequences, T steps, N sequences of a split, Z latent dimensions, K chains of the demo's process.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal

from seqvae.config.data import CacheSettings, SourceSettings
from seqvae.data.batch import Batch, TokenBatch, VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.demo import TokenTruth, read_tokens, read_truth, write_demo
from seqvae.inference.estimates import Estimate, error_bar, importance_weighted_nll, mean_of, posterior_statistics
from seqvae.inference.streaming import Pairs, Part, batches_of
from seqvae.models.vae import Posterior, VAEOutput, draw
from seqvae.monitors.formulas import logmeanexp
from tests.support.small_models import make_batch, make_vae

STEPS, LATENT = 3, 2
WEIGHT_TZ = torch.tensor([[1.0, 0.5], [-0.5, 1.0], [0.3, -0.8]])
NOISE = 0.7


class Evaluable(nn.Module):
    """The interface of a network, from a posterior and a likelihood that a test gives."""

    def posterior(self, batch: Batch) -> Posterior:
        raise NotImplementedError

    def encode(self, batch: Batch) -> Posterior:
        return self.posterior(batch)

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: Batch) -> VAEOutput:
        posterior = self.posterior(batch)
        return VAEOutput(*posterior, self.nll_given_z(batch, draw(posterior)), batch.lengths_B)


class LinearGaussian(Evaluable):
    """x = W z + noise, so that x is Gaussian. Its posterior is the true one, moved and widened as a test likes."""

    def __init__(self, moved: float = 0.0, widened: float = 1.0) -> None:
        super().__init__()
        self.moved, self.widened = moved, widened
        self.drawn: list[Tensor] = []

    def posterior(self, batch: Batch) -> Posterior:
        assert isinstance(batch, VectorBatch)
        values_BT = batch.values_BTD[..., 0]
        covariance_ZZ = torch.linalg.inv(torch.eye(LATENT) + WEIGHT_TZ.T @ WEIGHT_TZ / NOISE**2)
        mean_BZ = values_BT @ WEIGHT_TZ @ covariance_ZZ / NOISE**2 + self.moved
        logvar_BZ = covariance_ZZ.diagonal().log().expand_as(mean_BZ) + 2 * math.log(self.widened)
        return Posterior(mean_BZ, logvar_BZ, batch.lengths_B > 0)

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        assert isinstance(batch, VectorBatch)
        self.drawn.append(z)
        return -Normal(z @ WEIGHT_TZ.T, NOISE).log_prob(batch.values_BTD[..., 0]).sum(dim=1)

    @staticmethod
    def true_nll(batch: VectorBatch) -> Tensor:
        covariance_TT = WEIGHT_TZ @ WEIGHT_TZ.T + NOISE**2 * torch.eye(STEPS)
        return -MultivariateNormal(torch.zeros(STEPS), covariance_TT).log_prob(batch.values_BTD[..., 0])


def vectors(sequences: int, seed: int = 0) -> VectorBatch:
    """Drawn from the linear Gaussian model."""
    generator = torch.Generator().manual_seed(seed)
    z_BZ = torch.randn(sequences, LATENT, generator=generator)
    values_BT = z_BZ @ WEIGHT_TZ.T + NOISE * torch.randn(sequences, STEPS, generator=generator)
    return VectorBatch(
        values_BTD=values_BT[..., None],
        observed_BTD=torch.ones(sequences, STEPS, 1, dtype=torch.bool),
        lengths_B=torch.full((sequences,), STEPS),
        sequences_B=torch.arange(sequences),
        labels_B=None,
        step_tokens=0,
        position=0,
    )


def paired(*batches: VectorBatch) -> list[Pairs]:
    """Give each sequence of a batch the next one for a partner; a single one has none."""
    pairs = []
    for batch in batches:
        others = batch._replace(values_BTD=batch.values_BTD.roll(-1, dims=0))
        count = len(batch.lengths_B)
        part = Part("test", batch, np.arange(count), np.ones(count, np.bool_))
        pairs.append(Pairs(part, others, np.full(count, count > 1)))
    return pairs


class DemoProcess(Evaluable):
    """The demo's own process as a VAE: the quantile of a single normal latent says which chain a sequence comes from."""

    def __init__(self, truth: TokenTruth) -> None:
        super().__init__()
        self.truth = truth
        self.given_BK = torch.empty(0)

    def posterior(self, batch: Batch) -> Posterior:
        """The prior; and what the sequences' likelihoods are, whichever z comes afterwards."""
        assert isinstance(batch, TokenBatch)
        real_BT = torch.arange(batch.tokens_BT.shape[1]) < batch.lengths_B[:, None]
        offsets_N1 = np.concatenate([[0], np.cumsum(batch.lengths_B.numpy())])
        given_NCG = self.truth.log_likelihood_given(batch.tokens_BT[real_BT].numpy(), offsets_N1)
        self.given_BK = torch.from_numpy(given_NCG.reshape(len(given_NCG), -1))
        zeros_B1 = torch.zeros(len(batch.lengths_B), 1)
        return Posterior(zeros_B1, zeros_B1, batch.lengths_B > 0)

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        chains = self.given_BK.shape[1]
        chain_B = (Normal(0.0, 1.0).cdf(z[:, 0]) * chains).long().clamp(max=chains - 1)
        return -self.given_BK[torch.arange(len(chain_B)), chain_B]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo"), "tokens", sequences=400, mean_length=5)


@pytest.fixture(scope="module")
def data(demo: Path) -> SequenceDataModule:
    return SequenceDataModule(SourceSettings(data_dir=str(demo)), cache=CacheSettings(cache_dir=str(demo / "cache")))


def test_with_many_samples_the_estimate_is_the_exact_likelihood():
    batch = vectors(300)
    error_N = (
        importance_weighted_nll(LinearGaussian(0.1, 1.3), [batch], samples=500).nll_N
        - LinearGaussian.true_nll(batch).numpy()
    )
    mean = mean_of(error_N)
    assert mean.error < 0.005
    assert abs(mean.value) < 4 * mean.error


def test_the_estimate_tightens_with_the_number_of_samples():
    network, batch = LinearGaussian(0.3, 1.5), vectors(2_000)
    estimates = [importance_weighted_nll(network, [batch], samples=k).per_sequence.value for k in (1, 4, 16, 64)]
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[-1] > LinearGaussian.true_nll(batch).mean().item() - 0.01


def test_no_more_samples_are_drawn_than_bring_the_error_bar_down():
    batch = vectors(300)
    true = LinearGaussian.true_nll(batch).mean().item()
    drawn = []
    for moved in (0.0, 0.5, 3.0):
        found = importance_weighted_nll(LinearGaussian(moved, 1.1), [batch, batch], within=0.2)
        (samples,) = set(found.samples_N.tolist())
        assert found.per_sequence.value < true + 0.3 or samples == 500
        drawn.append(samples)
    assert drawn[0] == 16
    assert drawn == sorted(drawn)
    assert drawn[-1] == 500


def test_a_number_of_samples_that_is_given_is_exact():
    assert set(importance_weighted_nll(LinearGaussian(), [vectors(5)], samples=40).samples_N.tolist()) == {40}


def test_the_error_bar_is_what_samples_still_change():
    """Of many networks' estimates few are farther from one of 16 times as many samples than the bar says."""
    beyond = 0
    for seed in range(20):
        network, batch = LinearGaussian(0.4, 1.4), vectors(30, seed)
        few, many = (importance_weighted_nll(network, [batch], samples=k, seed=seed) for k in (64, 1024))
        weights_KB = log_weights(network, batch, 64, seed)
        np.testing.assert_allclose(-logmeanexp(weights_KB, dim=0).numpy(), few.nll_N)
        beyond += abs(few.per_sequence.value - many.per_sequence.value) > error_bar(weights_KB)
    assert beyond <= 8


def log_weights(network: LinearGaussian, batch: VectorBatch, samples: int, seed: int) -> Tensor:
    """Draw as `importance_weighted_nll` does."""
    posterior = network.posterior(batch)
    deviation_BZ = (0.5 * posterior.logvar).exp()
    torch.manual_seed(seed)
    network(batch)
    rounds = []
    for _ in range(samples):
        z_BZ = draw(posterior)
        log_p_over_q_BZ = Normal(0.0, 1.0).log_prob(z_BZ) - Normal(posterior.mean, deviation_BZ).log_prob(z_BZ)
        rounds.append((log_p_over_q_BZ.sum(dim=1) - network.nll_given_z(batch, z_BZ)).double())
    return torch.stack(rounds)


def test_one_sample_gives_the_negative_elbo_of_that_sample():
    network, batch = LinearGaussian(0.3, 1.5), vectors(5)
    result = importance_weighted_nll(network, [batch], samples=1)
    z_BZ, (mean_BZ, logvar_BZ, _) = network.drawn[-1], network.posterior(batch)
    log_q_B = Normal(mean_BZ, (0.5 * logvar_BZ).exp()).log_prob(z_BZ).sum(dim=1)
    log_p_B = Normal(0.0, 1.0).log_prob(z_BZ).sum(dim=1)
    expected_B = network.nll_given_z(batch, z_BZ) + log_q_B - log_p_B
    np.testing.assert_allclose(result.nll_N, expected_B.numpy(), rtol=1e-5)


class PerStep(LinearGaussian):
    """A latent for each step, which the likelihood does not look at."""

    def posterior(self, batch: Batch) -> Posterior:
        shape = (len(batch.lengths_B), STEPS, LATENT)
        return Posterior(torch.full(shape, 0.5), torch.zeros(shape), torch.arange(STEPS) < batch.lengths_B[:, None])

    def nll_given_z(self, batch: Batch, z: Tensor) -> Tensor:
        self.drawn.append(z)
        return torch.zeros(len(batch.lengths_B))


def test_a_latent_for_each_step_counts_where_the_step_is_real():
    network, lengths_B = PerStep(), torch.tensor([3, 1, 2, 3])
    result = importance_weighted_nll(network, [vectors(4)._replace(lengths_B=lengths_B)], samples=1)
    log_q_over_p_BTZ = 0.5 * network.drawn[-1] - 0.125  # Normal(0.5, 1) against Normal(0, 1)
    expected_B = (log_q_over_p_BTZ.sum(dim=-1) * (torch.arange(STEPS) < lengths_B[:, None])).sum(dim=1)
    np.testing.assert_allclose(result.nll_N, expected_B.numpy(), rtol=1e-5, atol=1e-6)


def test_the_sequence_of_an_empty_batch_is_left_out():
    batch = vectors(3)._replace(lengths_B=torch.tensor([STEPS, 0, STEPS]))
    assert importance_weighted_nll(LinearGaussian(), [batch], samples=2).sequences_N.tolist() == [0, 2]
    assert posterior_statistics(LinearGaussian(), paired(batch)).sequences == 2


def test_the_demo_s_own_process_reaches_its_entropy_from_above(demo: Path, data: SequenceDataModule):
    sample = read_tokens(demo / "test.parquet")
    truth = read_truth(demo)
    assert isinstance(truth, TokenTruth)
    network = DemoProcess(truth)
    true_N = -truth.log_likelihood(sample.tokens_S, sample.offsets_N1)
    few, many = (importance_weighted_nll(network, batches_of(data, "test"), samples=k) for k in (1, 2_000))
    assert sorted(many.sequences_N) == list(range(len(true_N)))
    gap = mean_of(many.nll_N - true_N[many.sequences_N])
    assert few.per_sequence.value > true_N.mean() + 0.5
    assert -4 * gap.error < gap.value < 0.05


def test_the_same_seed_gives_the_same_numbers_and_leaves_torchs_own_alone():
    network, batch = LinearGaussian(0.3, 1.5).train(), vectors(20)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, same, other = (importance_weighted_nll(network, [batch], samples=3, seed=s).nll_N for s in (5, 5, 6))
    assert posterior_statistics(network, paired(batch), seed=2) == posterior_statistics(network, paired(batch), seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert network.training


def test_a_random_choice_is_part_of_the_split_and_the_same_for_a_seed(data: SequenceDataModule):
    def chosen(seed: int) -> list[int]:
        batches = batches_of(data, "train", sequences=50, seed=seed, steps=60)
        return [int(number) for batch in batches for number in batch.sequences_B]

    assert len(set(chosen(0))) == 50
    assert chosen(0) == chosen(0)
    assert set(chosen(0)) != set(chosen(1))


def test_batches_hold_every_sequence_once_and_keep_to_their_budget(data: SequenceDataModule):
    batches = list(batches_of(data, "train", steps=60))
    assert sorted(int(number) for batch in batches for number in batch.sequences_B) == list(range(400))
    costs = [len(batch.lengths_B) * int(batch.lengths_B.max()) for batch in batches]
    assert all(cost <= 60 or len(batch.lengths_B) == 1 for cost, batch in zip(costs, batches, strict=True))
    assert np.mean(costs) > 40


def test_statistics_of_a_linear_gaussian_model_are_the_known_ones():
    statistics = posterior_statistics(LinearGaussian(), paired(*(vectors(500, seed) for seed in range(8))))
    covariance_ZZ = torch.linalg.inv(torch.eye(LATENT) + WEIGHT_TZ.T @ WEIGHT_TZ / NOISE**2)
    # Means vary by what the posterior leaves of the prior's variance: E KL = -1/2 sum log of the posterior's variances.
    expected_Z = -0.5 * covariance_ZZ.diagonal().log()
    assert statistics.sequences == statistics.posteriors == 4_000
    assert statistics.kl_per_dim == pytest.approx(expected_Z.tolist(), rel=0.05)
    assert statistics.rate.value == pytest.approx(sum(statistics.kl_per_dim))
    assert statistics.elbo.value == pytest.approx(-statistics.nll.value - statistics.rate.value)
    assert statistics.nll_per_step.value == pytest.approx(statistics.nll.value / STEPS)
    assert statistics.active_units == LATENT
    assert 0.5 < statistics.mutual_information < statistics.rate.value + 0.05
    assert statistics.decoder_use is not None
    assert statistics.decoder_use.value > 10 * statistics.decoder_use.error > 0


def test_perplexity_counts_no_end_mark_of_a_sequence_that_is_cut_off():
    network = make_vae("tokens")
    batch = make_batch("tokens", [6, 4])._replace(ends_B=torch.tensor([False, True]))
    part = Part("test", batch, np.arange(2), np.ones(2, np.bool_))
    assert posterior_statistics(network, [Pairs(part, batch, np.zeros(2, np.bool_))]).steps == 6 + 5
    assert importance_weighted_nll(network, [batch], samples=2).steps_N.tolist() == [6, 5]


def test_a_decoder_that_ignores_its_latent_has_no_use():
    statistics = posterior_statistics(PerStep(), paired(vectors(10)))
    assert statistics.decoder_use == Estimate(0.0, 0.0)
    assert statistics.active_units == 0
    assert statistics.mutual_information == pytest.approx(0.0, abs=1e-6)
    assert statistics.posteriors == 10 * STEPS
    assert statistics.rate.value == pytest.approx(0.125 * LATENT * STEPS)


def test_a_single_sequence_says_nothing_of_the_decoder_s_use():
    statistics = posterior_statistics(LinearGaussian(), paired(vectors(1)))
    assert (statistics.decoder_use, statistics.without_partner) == (None, 1)


def test_the_error_over_windows_is_that_of_a_bootstrap_over_the_sequences_they_are_cut_from():
    generator = np.random.default_rng(0)
    windows_O = generator.integers(1, 20, 300)
    owners_N = generator.permutation(np.repeat(np.arange(300), windows_O))
    nll_N = 5 * generator.normal(size=300)[owners_N] + generator.normal(size=len(owners_N))
    steps_N = generator.integers(5, 10, len(owners_N))
    sums_3O = np.stack([np.bincount(owners_N, weights=part) for part in (nll_N, steps_N, np.ones(len(owners_N)))])
    drawn_3R = sums_3O[:, generator.integers(0, 300, (4000, 300))].sum(axis=2)
    per_sequence, per_step = mean_of(nll_N, owners_N=owners_N), mean_of(nll_N, steps_N, owners_N)
    assert per_sequence.error == pytest.approx((drawn_3R[0] / drawn_3R[2]).std(), rel=0.08)
    assert per_step.error == pytest.approx((drawn_3R[0] / drawn_3R[1]).std(), rel=0.08)
    assert per_sequence.error > 2.5 * mean_of(nll_N).error
    assert (per_sequence.value, per_step.value) == (mean_of(nll_N).value, mean_of(nll_N, steps_N).value)


def test_the_error_over_whole_sequences_is_the_same_to_the_bit_whatever_their_order():
    generator = np.random.default_rng(0)
    nll_N, steps_N, owners_N = generator.normal(size=50), generator.integers(1, 9, 50), generator.permutation(50)
    assert mean_of(nll_N, owners_N=owners_N) == mean_of(nll_N)
    assert mean_of(nll_N, steps_N, owners_N) == mean_of(nll_N, steps_N)


def test_the_windows_of_a_single_sequence_have_no_error_that_could_be_known():
    assert mean_of(np.array([1.0, 3.0]), owners_N=np.array([7, 7])) == Estimate(2.0, math.inf)


def test_a_mean_per_step_weighs_sequences_by_their_steps():
    assert mean_of(np.array([2.0, 6.0]), np.array([1, 3])) == Estimate(2.0, 0.0)
    assert mean_of(np.array([1.0, 3.0])) == Estimate(2.0, 1.0)
