"""The formulas on posteriors, against torch.distributions, slow loops and closed forms, and at their edges."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from seqvae.monitors.formulas import (
    count_active,
    effective_dimensions,
    gaussian_kl,
    kl_per_dim,
    logmeanexp,
    mean_of_variances,
    mutual_information,
    variance_of_means,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_posteriors(count: int = 40, size: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    mean_NZ = torch.randn(count, size, generator=generator, dtype=torch.float64)
    return mean_NZ, torch.randn(count, size, generator=generator, dtype=torch.float64) - 1


def test_the_kl_is_that_of_torch_distributions():
    mean_NZ, logvar_NZ = some_posteriors()
    posterior, prior = Normal(mean_NZ, (0.5 * logvar_NZ).exp()), Normal(torch.zeros(3).double(), torch.ones(3).double())
    torch.testing.assert_close(gaussian_kl(mean_NZ, logvar_NZ), kl_divergence(posterior, prior))
    torch.testing.assert_close(kl_per_dim(mean_NZ, logvar_NZ), kl_divergence(posterior, prior).mean(dim=0))


def test_the_kl_keeps_a_tiny_difference_from_the_prior_in_float32():
    logvar_N = torch.tensor([1e-3, -1e-3])
    torch.testing.assert_close(gaussian_kl(torch.zeros(2), logvar_N), torch.full((2,), 2.5e-7), rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_kl_of_the_prior_itself_is_exactly_zero(dtype):
    assert gaussian_kl(torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype)).tolist() == [0.0, 0.0, 0.0]


def test_the_kl_of_half_precision_does_not_overflow():
    """300 squared and exp(12) are no numbers of float16."""
    kl_Z = gaussian_kl(torch.tensor([300.0, 0.0]).half(), torch.tensor([0.0, 12.0]).half())
    assert kl_Z.tolist() == pytest.approx([45_000, 0.5 * (math.exp(12) - 13)])
    assert mean_of_variances(torch.full((2, 1), 12.0).half()).item() == pytest.approx(math.exp(12))
    assert variance_of_means(torch.tensor([[300.0], [-300.0]]).half()).item() == pytest.approx(180_000)


def test_the_rate_is_the_sum_over_dimensions():
    mean_NZ, logvar_NZ = some_posteriors()
    expected = sum(gaussian_kl(mean_NZ[i], logvar_NZ[i]).sum() for i in range(40)) / 40
    torch.testing.assert_close(kl_per_dim(mean_NZ, logvar_NZ).sum(), expected)


def slow_mutual_information(mean_NZ: Tensor, logvar_NZ: Tensor, generator: torch.Generator) -> float:
    """The definition, one pair at a time."""
    noise_NZ = torch.randn(mean_NZ.shape, generator=generator, dtype=torch.float64)
    deviation_NZ = (0.5 * logvar_NZ).exp()
    total = 0.0
    for i in range(len(mean_NZ)):
        z_Z = mean_NZ[i] + deviation_NZ[i] * noise_NZ[i]
        log_q = [Normal(m, s).log_prob(z_Z).sum().item() for m, s in zip(mean_NZ, deviation_NZ, strict=True)]
        total += log_q[i] - math.log(sum(math.exp(value) for value in log_q) / len(log_q))
    return total / len(mean_NZ)


def test_mutual_information_is_its_definition():
    mean_NZ, logvar_NZ = some_posteriors()
    expected = slow_mutual_information(mean_NZ, logvar_NZ, seeded(5))
    assert mutual_information(mean_NZ, logvar_NZ, seeded(5)).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 1e3])
@pytest.mark.parametrize("logvar", [3.0, 0.0, -12.0])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_mutual_information_is_its_definition_however_narrow_and_far_apart_the_posteriors_are(spread, logvar, offset):
    mean_NZ = offset + spread * some_posteriors(count=20)[0]
    logvar_NZ = torch.full_like(mean_NZ, logvar)
    expected = slow_mutual_information(mean_NZ, logvar_NZ, seeded(5))
    assert mutual_information(mean_NZ, logvar_NZ, seeded(5)).item() == pytest.approx(expected, abs=1e-5)


def test_mutual_information_is_the_closed_form_where_the_aggregate_is_a_gaussian():
    """Means spread as N(0, 1 - v) and variances of v make q(z) = N(0, 1): I = -0.5 log v a dimension."""
    variance = 0.3
    mean_NZ = torch.randn(4000, 2, generator=seeded(), dtype=torch.float64) * math.sqrt(1 - variance)
    logvar_NZ = torch.full_like(mean_NZ, math.log(variance))
    assert mutual_information(mean_NZ, logvar_NZ, seeded(1)).item() == pytest.approx(-math.log(variance), abs=0.04)


@pytest.mark.parametrize("rows_at_once", [1, 7, 39, 40, 41])
def test_mutual_information_is_the_same_in_chunks_of_any_size(rows_at_once):
    mean_NZ, logvar_NZ = some_posteriors()
    whole = mutual_information(mean_NZ, logvar_NZ, seeded())
    chunked = mutual_information(mean_NZ, logvar_NZ, seeded(), rows_at_once=rows_at_once)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e3])
@pytest.mark.parametrize("logvar", [0.0, -12.0, 12.0])
def test_mutual_information_is_zero_where_all_posteriors_are_one_wherever_it_lies(offset, logvar):
    mean_NZ, logvar_NZ = torch.full((300, 8), offset), torch.full((300, 8), logvar)
    assert mutual_information(mean_NZ, logvar_NZ, seeded()).item() == pytest.approx(0, abs=1e-11)


@given(
    count=st.integers(1, 30),
    size=st.integers(1, 6),
    spread=st.floats(0, 100),
    logvar=st.floats(-20, 5),
    seed=st.integers(0, 1000),
)
def test_mutual_information_is_never_above_its_cap(count, size, spread, logvar, seed):
    mean_NZ = spread * torch.randn(count, size, generator=seeded(seed))
    information = mutual_information(mean_NZ, torch.full((count, size), logvar), seeded(seed))
    assert information.item() <= math.log(count)


def test_mutual_information_of_posteriors_far_apart_is_its_cap():
    mean_NZ = 100.0 * torch.arange(64.0)[:, None]
    information = mutual_information(mean_NZ, torch.full((64, 1), -12.0), seeded())
    assert information.item() == pytest.approx(math.log(64), abs=1e-12)


def test_mutual_information_of_one_posterior_is_zero():
    assert mutual_information(torch.ones(1, 2), torch.zeros(1, 2), seeded()).item() == 0


def test_mutual_information_draws_from_its_own_generator():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    mutual_information(*some_posteriors(), seeded())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("where", ["mean", "logvar"])
def test_a_nan_makes_information_nan_and_the_kl_of_its_dimension_alone(where):
    mean_NZ, logvar_NZ = some_posteriors()
    (mean_NZ if where == "mean" else logvar_NZ)[3, 1] = math.nan
    assert mutual_information(mean_NZ, logvar_NZ, seeded()).isnan()
    assert kl_per_dim(mean_NZ, logvar_NZ).isnan().tolist() == [False, True, False]


def test_the_aggregate_kl_is_what_the_rate_has_beyond_the_information():
    """All posteriors one: they tell nothing, and all of the rate is the distance of q(z) from the prior."""
    mean_NZ, logvar_NZ = torch.full((50, 2), 2.0), torch.zeros(50, 2)
    paid = kl_per_dim(mean_NZ, logvar_NZ).sum()
    assert (paid - mutual_information(mean_NZ, logvar_NZ, seeded())).item() == pytest.approx(4.0)


def test_the_aggregate_kl_is_the_integral_over_the_mixture():
    """Four posteriors, a thousand times each, in one dimension."""
    mean_N1 = torch.tensor([-2.0, -0.5, 0.0, 1.5], dtype=torch.float64).repeat(1000)[:, None]
    logvar_N1 = torch.tensor([-3.0, -1.0, 0.5, -2.0], dtype=torch.float64).repeat(1000)[:, None]
    z_G1 = torch.linspace(-12, 12, 20_001, dtype=torch.float64)[:, None]
    log_q_G4 = Normal(mean_N1[:4, 0], (0.5 * logvar_N1[:4, 0]).exp()).log_prob(z_G1)
    log_q_G, log_p_G = logmeanexp(log_q_G4, dim=1), Normal(0.0, 1.0).log_prob(z_G1[:, 0])
    integral = torch.trapezoid(log_q_G.exp() * (log_q_G - log_p_G), z_G1[:, 0])
    paid = kl_per_dim(mean_N1, logvar_N1).sum()
    found = paid - mutual_information(mean_N1, logvar_N1, seeded())
    assert found.item() == pytest.approx(integral.item(), abs=0.03)


def test_infinity_shows_in_its_dimension_and_leaves_the_information_unknown():
    mean_NZ, logvar_NZ = some_posteriors()
    mean_NZ[3, 1] = math.inf
    assert kl_per_dim(mean_NZ, logvar_NZ).isinf().tolist() == [False, True, False]
    assert variance_of_means(mean_NZ).isnan().tolist() == [False, True, False]
    assert mutual_information(mean_NZ, logvar_NZ, seeded()).isnan()
    assert effective_dimensions(kl_per_dim(mean_NZ, logvar_NZ)).isnan()


def test_the_variances_are_those_of_means_and_the_mean_of_those_of_posteriors():
    mean_NZ, logvar_NZ = some_posteriors()
    for z in range(3):
        means, center = mean_NZ[:, z].tolist(), mean_NZ[:, z].mean().item()
        assert variance_of_means(mean_NZ)[z].item() == pytest.approx(sum((m - center) ** 2 for m in means) / 39)
        expected = sum(math.exp(value) for value in logvar_NZ[:, z].tolist()) / 40
        assert mean_of_variances(logvar_NZ)[z].item() == pytest.approx(expected)


def test_the_variance_of_one_mean_is_not_known():
    assert variance_of_means(torch.ones(1, 3)).isnan().all()


def test_active_units_count_dimensions_whose_mean_has_the_threshold_or_more():
    alternating_N1 = torch.tensor([1.0, -1.0]).repeat(50)[:, None] * math.sqrt(99 / 100)  # a variance of 1
    deviations_Z = torch.tensor([0.0, 0.0999, 0.1001, 1.0])
    assert count_active(variance_of_means(alternating_N1 * deviations_Z)).item() == 2
    assert count_active(variance_of_means(alternating_N1 * deviations_Z), threshold=0.5).item() == 1


def test_active_units_are_none_at_collapse_however_wide_the_posteriors_are():
    assert count_active(variance_of_means(torch.zeros(100, 4))).item() == 0


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ([2.0, 2.0, 2.0], 3.0),
        ([5.0, 0.0, 0.0], 1.0),
        ([3.0, 1.0], 16 / 10),
        ([0.0, 0.0], 0.0),
        ([1e-30, 1e-30], 2.0),
    ],
)
def test_effective_dimensions_are_the_participation_ratio_of_the_rate(kl, expected):
    assert effective_dimensions(torch.tensor(kl)).item() == pytest.approx(expected)


def test_effective_dimensions_of_a_nan_are_not_known():
    assert effective_dimensions(torch.tensor([1.0, math.nan])).isnan()


def gaussian_log_weights(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """z ~ N(0, 1), x | z ~ N(z, 1), so that x ~ N(0, 2); and a proposal that is not the true posterior N(x/2, 1/2)."""
    x_N = torch.tensor([0.0, 1.5], dtype=torch.float64)
    proposal = Normal(0.4 * x_N, torch.full_like(x_N, 0.8))
    z_KN = proposal.mean + proposal.stddev * torch.randn(samples, 2, generator=seeded(seed), dtype=torch.float64)
    prior = Normal(torch.zeros_like(x_N), torch.ones_like(x_N))
    log_weight_KN = prior.log_prob(z_KN) + Normal(z_KN, torch.ones_like(z_KN)).log_prob(x_N) - proposal.log_prob(z_KN)
    return log_weight_KN, -Normal(torch.zeros_like(x_N), torch.full_like(x_N, math.sqrt(2))).log_prob(x_N)


def test_logmeanexp_is_the_log_of_the_mean_and_does_not_overflow():
    values = torch.tensor([[0.1, -2.0, 3.0]], dtype=torch.float64)
    expected = math.log(sum(math.exp(value) for value in (0.1, -2.0, 3.0)) / 3)
    assert logmeanexp(values, dim=1).item() == pytest.approx(expected)
    assert logmeanexp(values + 5000, dim=1).item() == pytest.approx(expected + 5000)


@pytest.mark.parametrize("nth", [2, 3, 7])
def test_the_information_from_every_nth_sample_is_that_of_all_but_for_scatter(nth):
    mean_NZ, logvar_NZ = torch.randn(600, 4, generator=torch.Generator().manual_seed(1)), torch.full((600, 4), -2.0)
    every, all_of_them = (
        mutual_information(mean_NZ, logvar_NZ, torch.Generator().manual_seed(2), every_nth_sample=one)
        for one in (nth, 1)
    )
    assert every != all_of_them
    assert float(every) == pytest.approx(float(all_of_them), abs=0.25)


def test_the_information_from_every_nth_sample_is_the_mean_of_their_terms():
    """Against the definition, term by term."""
    generator = torch.Generator().manual_seed(3)
    mean_NZ = torch.randn(11, 2, generator=generator, dtype=torch.float64)
    logvar_NZ = torch.randn(11, 2, generator=generator, dtype=torch.float64)
    noise_NZ = torch.randn(11, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    z_NZ = mean_NZ + (0.5 * logvar_NZ).exp() * noise_NZ
    l_NN = torch.distributions.Normal(mean_NZ, (0.5 * logvar_NZ).exp()).log_prob(z_NZ[:, None]).sum(dim=2)
    terms_N = l_NN.diagonal() - l_NN.logsumexp(dim=1) + math.log(11)
    found = mutual_information(mean_NZ, logvar_NZ, torch.Generator().manual_seed(4), every_nth_sample=3, rows_at_once=2)
    torch.testing.assert_close(found, terms_N[::3].mean())
