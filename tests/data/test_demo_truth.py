"""The demo processes are what they say: likelihoods against slow references, samples against their law."""

import itertools
import math

import numpy as np
import pytest

from seqvae.data import demo
from seqvae.data.demo import (
    VARIABLES,
    EventTruth,
    LengthLaw,
    TokenTruth,
    VectorTruth,
    logsumexp,
    offsets_of,
    step_numbers,
)

SHORT = LengthLaw(mean=6, longest=12, shortest=2)


@pytest.fixture(scope="module")
def token_truth():
    return TokenTruth.draw(np.random.default_rng([0, 0]), LengthLaw(mean=50))


@pytest.fixture(scope="module")
def token_sample(token_truth):
    return token_truth.sample(4_000, np.random.default_rng(1))


def estimate_mean(sums_N, counts_N=None):
    """Return sum of the sums over sum of the counts (default: the mean), and its standard error over sequences."""
    counts_N = np.ones(len(sums_N)) if counts_N is None else counts_N
    value = sums_N.sum() / counts_N.sum()
    error = (sums_N - value * counts_N).std(ddof=1) / math.sqrt(len(sums_N)) / counts_N.mean()
    return value, error


def log_posterior(given_NCG):
    """Return log p(class, factor | tokens), (N, C, G)."""
    return given_NCG - logsumexp(given_NCG, axis=(1, 2))[:, None, None]


def split(values_S, offsets_N1):
    return np.split(values_S, offsets_N1[1:-1])


def slow_log_likelihood(truth, tokens, group, level):
    """One sequence under one chain, from the formula; the first token's law by running the chain for long."""
    size = len(truth.direction_V)
    transition = np.empty((size, size))
    for previous in range(size):
        logits = truth.base_VV[previous] + truth.favour_CV[group] + truth.factors_G[level] * truth.direction_V
        transition[previous] = np.exp(logits) / np.exp(logits).sum()
    result = math.log(np.linalg.matrix_power(transition, 2_000)[0, tokens[0]])
    return result + sum(math.log(transition[pair]) for pair in itertools.pairwise(tokens))


def test_token_likelihood_is_the_sum_over_all_chains(monkeypatch):
    monkeypatch.setattr(demo, "CHUNK", 3)
    truth = TokenTruth.draw(np.random.default_rng(3), SHORT, vocabulary_size=4, classes=2)
    sample = truth.sample(8, np.random.default_rng(4))
    chains = list(itertools.product(range(2), range(16)))
    log_lengths = truth.lengths.log_probability(np.diff(sample.offsets_N1))
    for row, tokens in enumerate(split(sample.tokens_S, sample.offsets_N1)):
        slow = [math.exp(slow_log_likelihood(truth, tokens.tolist(), *chain)) for chain in chains]
        given_CG = truth.log_likelihood_given(sample.tokens_S, sample.offsets_N1)[row]
        np.testing.assert_allclose(given_CG.ravel(), np.log(slow) + log_lengths[row], rtol=1e-9)
        fast = truth.log_likelihood(sample.tokens_S, sample.offsets_N1)[row]
        assert fast == pytest.approx(math.log(np.mean(slow)) + log_lengths[row], rel=1e-9)


def test_probabilities_of_all_token_sequences_sum_to_one():
    lengths = LengthLaw(mean=2.5, longest=5, shortest=1)
    truth = TokenTruth.draw(np.random.default_rng(5), lengths, vocabulary_size=3, classes=2)
    every = [tokens for length in range(1, 6) for tokens in itertools.product(range(3), repeat=length)]
    log_p = truth.log_likelihood(np.concatenate(every), offsets_of(np.array([len(tokens) for tokens in every])))
    assert np.exp(log_p).sum() == pytest.approx(1, abs=1e-12)


def test_unigram_probabilities_are_those_of_the_tokens_and_end_marks(token_truth, token_sample):
    probabilities = token_truth.unigram_probabilities
    seen_V = np.bincount(token_sample.tokens_S, minlength=32) / len(token_sample.tokens_S)
    assert np.abs(seen_V - probabilities[:-1] / (1 - probabilities[-1])).max() < 0.005
    log_p_N = token_truth.unigram_log_likelihood(token_sample.tokens_S, token_sample.offsets_N1)
    measured, error = estimate_mean(-log_p_N, np.diff(token_sample.offsets_N1) + 1)
    assert abs(measured + probabilities @ np.log(probabilities)) < 4 * error


def test_token_sample_follows_its_class_and_factor(token_truth, token_sample):
    """The likelihood at the true class and factor has the mean that these chains' entropies give."""
    transitions_KVV, first_KV = token_truth.log_transitions_KVV, token_truth.log_first_KV
    first_K = -(np.exp(first_KV) * first_KV).sum(axis=1)
    later_K = -np.einsum("kv,kvw,kvw->k", np.exp(first_KV), np.exp(transitions_KVV), transitions_KVV)
    levels_N = np.searchsorted(token_truth.factors_G, token_sample.factors_N)
    chains_N = token_sample.classes_N * len(token_truth.factors_G) + levels_N
    lengths_N = np.diff(token_sample.offsets_N1)
    given_NCG = token_truth.log_likelihood_given(token_sample.tokens_S, token_sample.offsets_N1)
    chosen_N = given_NCG.reshape(len(lengths_N), -1)[np.arange(len(lengths_N)), chains_N]
    expected_N = (
        first_K[chains_N] + (lengths_N - 1) * later_K[chains_N] - token_truth.lengths.log_probability(lengths_N)
    )
    surplus, error = estimate_mean(-chosen_N - expected_N)
    assert abs(surplus) < 4 * error


@pytest.fixture(scope="module")
def given_NCG(token_truth, token_sample):
    return token_truth.log_likelihood_given(token_sample.tokens_S, token_sample.offsets_N1)


def mutual_information(given_NCG):
    """Return nats per sequence between a sequence and its class and factor."""
    log_p_NCG = log_posterior(given_NCG)
    return math.log(given_NCG[0].size) + (np.exp(log_p_NCG) * log_p_NCG).sum(axis=(1, 2)).mean()


def test_mutual_information_is_what_the_latent_saves(token_truth, token_sample, given_NCG):
    levels_N = np.searchsorted(token_truth.factors_G, token_sample.factors_N)
    chosen_N = given_NCG[np.arange(len(levels_N)), token_sample.classes_N, levels_N]
    saved_N = chosen_N - token_truth.log_likelihood(token_sample.tokens_S, token_sample.offsets_N1)
    assert saved_N.mean() == pytest.approx(mutual_information(given_NCG), abs=0.1)


def test_token_posterior_is_calibrated(token_sample, given_NCG):
    posterior_NC = np.exp(log_posterior(given_NCG)).sum(axis=2)
    on_truth_N = posterior_NC[np.arange(len(posterior_NC)), token_sample.classes_N]
    surplus, error = estimate_mean(on_truth_N - (posterior_NC**2).sum(axis=1))
    assert abs(surplus) < 4 * error


def test_default_tokens_leave_much_to_learn_and_a_reason_for_a_latent(token_truth, token_sample, given_NCG):
    data, symbols_N = (token_sample.tokens_S, token_sample.offsets_N1), np.diff(token_sample.offsets_N1) + 1
    unigram, _ = estimate_mean(-token_truth.unigram_log_likelihood(*data), symbols_N)
    true, error = estimate_mean(-token_truth.log_likelihood(*data), symbols_N)
    assert unigram == pytest.approx(3.28, abs=0.02)
    assert true == pytest.approx(2.26, abs=0.02)
    assert error < 0.01
    assert mutual_information(given_NCG) == pytest.approx(2.7, abs=0.1)
    long = [tokens[:50] for tokens in split(token_sample.tokens_S, token_sample.offsets_N1) if len(tokens) >= 50]
    open_nats = {}
    for length in (5, 20, 50):
        beginnings_S = np.concatenate([tokens[:length] for tokens in long])
        offsets_N1 = np.arange(len(long) + 1) * length
        log_p_NCG = log_posterior(token_truth.log_likelihood_given(beginnings_S, offsets_N1))
        posterior_NC = np.exp(log_p_NCG).sum(axis=2)
        open_nats[length] = -(posterior_NC * np.log(posterior_NC + 1e-300)).sum(axis=1).mean()
    assert open_nats == pytest.approx({5: 1.6, 20: 0.65, 50: 0.12}, abs=0.1)


def test_length_probabilities_are_those_of_the_sampled_lengths():
    law = LengthLaw(mean=12, longest=40)
    probabilities = law.probabilities()
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    lengths_N = law.sample(200_000, np.random.default_rng(0))
    seen = np.bincount(lengths_N, minlength=41)[3:] / len(lengths_N)
    assert np.abs(seen - probabilities).max() < 0.004
    assert lengths_N.mean() == pytest.approx(probabilities @ np.arange(3, 41), rel=0.01)


def test_impossible_lengths_have_no_probability():
    log_p = LengthLaw(mean=12, longest=40).log_probability(np.array([2, 3, 40, 41]))
    assert np.isneginf(log_p).tolist() == [True, False, False, True]


def test_lengths_have_the_stated_mean_and_bounds():
    lengths_N = LengthLaw().sample(100_000, np.random.default_rng(0))
    assert lengths_N.mean() == pytest.approx(75, rel=0.02)
    assert (lengths_N.min(), lengths_N.max()) == (3, 1000)
    assert np.log(lengths_N).std() == pytest.approx(0.8, rel=0.02)


@pytest.mark.parametrize("wrong", [{"mean": 2}, {"mean": 2000}, {"spread": 0}, {"shortest": 0}, {"longest": 3}])
def test_impossible_length_laws_are_refused(wrong):
    with pytest.raises(ValueError, match="length"):
        LengthLaw(**wrong)


def log_p_given(truth, sample):
    """Return log p(x, length | class, factors) at the class and factors that each sequence was drawn with."""
    terms = truth.factor_terms(sample)
    constant_N, linear_NF, curvature_NFF = (
        term_NC[np.arange(len(sample.classes_N)), sample.classes_N] for term_NC in terms
    )
    bent_N = np.einsum("nf,nfg,ng->n", sample.factors_NF, curvature_NFF, sample.factors_NF)
    return constant_N + (linear_NF * sample.factors_NF).sum(axis=1) - bent_N / 2


def normal_log_density(values, mean, covariance):
    rest = values - mean
    _, log_determinant = np.linalg.slogdet(covariance)
    return -0.5 * (rest @ np.linalg.solve(covariance, rest) + log_determinant + len(values) * math.log(2 * math.pi))


CURVES = {
    "circle": lambda a: (math.cos(a), math.sin(a)),
    "clover": lambda a: (math.cos(3 * a) * math.cos(a), math.cos(3 * a) * math.sin(a)),
    "eight": lambda a: (math.cos(a), 0.7 * math.sin(2 * a)),
    "heart": lambda a: (
        math.sin(a) ** 3,
        (13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)) / 16,
    ),
}


@pytest.mark.parametrize(("group", "name"), list(enumerate(demo.SHAPES)))
def test_a_shape_is_the_curve_of_its_name(group, name):
    truth = VectorTruth.draw(np.random.default_rng(1), SHORT)
    steps = np.arange(24)
    wanted = [CURVES[name](truth.frequency * step) for step in steps]
    drawn_SD = truth.curve(group, steps)
    np.testing.assert_allclose(drawn_SD[:, :2], wanted, atol=1e-9)
    small = 1e-6
    risen_S = (truth.curve(group, steps + small) - truth.curve(group, steps - small))[:, 1] / (2 * small)
    assert np.corrcoef(risen_S, drawn_SD[:, 2])[0, 1] == pytest.approx(
        -1, abs=1e-6
    )  # the pen is pressed on its way down


def slow_vectors(truth, values_TD, group):
    """Observed values, their mean and noise covariance, and what each factor adds; all steps and features in one."""
    curve_TD = truth.curve(group, np.arange(len(values_TD)))
    mean = truth.offset_D + truth.scale_D * curve_TD
    larger = truth.scale_D * curve_TD / 4
    leaning = np.zeros_like(larger)
    leaning[:, 0] = 0.3 * truth.scale_D[0] * curve_TD[:, 1]
    noise = np.kron(np.eye(len(values_TD)), truth.covariance_DD * np.outer(truth.scale_D, truth.scale_D))
    seen = ~np.isnan(values_TD.ravel())
    added = np.stack([larger.ravel()[seen], leaning.ravel()[seen]])
    return values_TD.ravel()[seen].astype(float), mean.ravel()[seen], noise[np.ix_(seen, seen)], added


def test_vector_likelihood_is_that_of_one_large_gaussian():
    truth = VectorTruth.draw(np.random.default_rng(1), SHORT)
    sample = truth.sample(40, np.random.default_rng(2))
    assert np.isnan(sample.values_SD).sum() > 10
    marginal_N = truth.factor_terms(sample).marginal()
    given_N = log_p_given(truth, sample)
    log_lengths_N = truth.lengths.log_probability(np.diff(sample.offsets_N1))
    for row, values_TD in enumerate(split(sample.values_SD, sample.offsets_N1)):
        values, mean, noise, added = slow_vectors(truth, values_TD, sample.classes_N[row])
        slow = normal_log_density(values, mean + sample.factors_NF[row] @ added, noise) + log_lengths_N[row]
        assert given_N[row] == pytest.approx(slow, rel=1e-8)
        slow_C = []
        for group in range(len(truth.class_names)):
            values, mean, noise, added = slow_vectors(truth, values_TD, group)
            slow_C.append(normal_log_density(values, mean, noise + added.T @ added))
        slow = np.logaddexp.reduce(slow_C) - math.log(len(slow_C)) + log_lengths_N[row]
        assert marginal_N[row] == pytest.approx(slow, rel=1e-8)


def test_vector_sample_follows_its_truth():
    truth = VectorTruth.draw(np.random.default_rng(1), LengthLaw(mean=50))
    sample = truth.sample(1_000, np.random.default_rng(2))
    means = []
    for row, length in enumerate(np.diff(sample.offsets_N1)):
        curve_TD = truth.curve(sample.classes_N[row], np.arange(length))
        size, slant = sample.factors_NF[row]
        mean_TD = (1 + size / 4) * curve_TD
        mean_TD[:, 0] += 0.3 * slant * curve_TD[:, 1]
        means.append(mean_TD)
    noise_SD = (sample.values_SD - truth.offset_D) / truth.scale_D - np.concatenate(means)
    complete_SD = noise_SD[~np.isnan(noise_SD).any(axis=1)]
    np.testing.assert_allclose(np.cov(complete_SD.T), truth.covariance_DD, atol=0.0004)
    np.testing.assert_allclose(complete_SD.mean(axis=0), 0, atol=0.002)
    assert np.isnan(sample.values_SD).mean() == pytest.approx(truth.missing, rel=0.05)


def slow_events(truth, sample, row, group):
    """log p of which variables are present; and values and log gaps in own units with mean, variances, slopes, Jacobian."""
    first, last = sample.offsets_N1[row : row + 2]
    log_presence, jacobian, parts = 0.0, 0.0, []
    for step in range(first, last):
        presence_V = truth.presence_CV[group]
        log_presence += np.log(np.where(sample.present_SV[step], presence_V, 1 - presence_V)).sum()
        log_presence -= math.log(1 - np.prod(1 - presence_V))
        for v in np.flatnonzero(sample.present_SV[step] & truth.has_value_V):
            mean, size = truth.location_V[v] + truth.scale_V[v] * truth.level_CV[group, v], truth.scale_V[v]
            parts.append((sample.values_SV[step, v], mean, (size * truth.noise_V[v]) ** 2, size * truth.slope_V[v]))
        if step > first:
            log_gap = math.log(sample.gaps_S[step])
            parts.append((log_gap, truth.pace_C[group], truth.pace_noise**2, truth.pace_slope))
            jacobian -= log_gap
    values, mean, variances, slopes = np.array(parts, dtype=float).T
    return values, mean, np.diag(variances), slopes, log_presence + jacobian


def test_event_likelihood_is_presence_times_one_large_gaussian():
    truth = EventTruth.draw(np.random.default_rng(1), SHORT)
    sample = truth.sample(40, np.random.default_rng(2))
    marginal_N = truth.factor_terms(sample).marginal()
    given_N = log_p_given(truth, sample)
    log_lengths_N = truth.lengths.log_probability(np.diff(sample.offsets_N1))
    for row, (group, (factor,)) in enumerate(zip(sample.classes_N, sample.factors_NF, strict=True)):
        values, mean, noise, slopes, rest = slow_events(truth, sample, row, group)
        slow = normal_log_density(values, mean + factor * slopes, noise) + rest + log_lengths_N[row]
        assert given_N[row] == pytest.approx(slow, rel=1e-9)
        slow_C = []
        for other in range(len(truth.pace_C)):
            values, mean, noise, slopes, rest = slow_events(truth, sample, row, other)
            slow_C.append(normal_log_density(values, mean, noise + np.outer(slopes, slopes)) + rest)
        slow = np.logaddexp.reduce(slow_C) - math.log(len(slow_C)) + log_lengths_N[row]
        assert marginal_N[row] == pytest.approx(slow, rel=1e-9)


def test_presence_probabilities_of_all_sets_but_the_empty_one_sum_to_one():
    truth = EventTruth.draw(np.random.default_rng(1), SHORT)
    sets_SV = np.array(list(itertools.product([False, True], repeat=len(VARIABLES)))[1:])
    np.testing.assert_allclose(np.exp(truth.log_presence(sets_SV)).sum(axis=0), 1, rtol=1e-12)


def test_event_sample_follows_its_truth():
    truth = EventTruth.draw(np.random.default_rng(1), LengthLaw(mean=50))
    sample = truth.sample(2_000, np.random.default_rng(2))
    classes_S, factors_S = (
        np.repeat(x, np.diff(sample.offsets_N1)) for x in (sample.classes_N, sample.factors_NF[:, 0])
    )
    given_one_CV = truth.presence_CV / (1 - np.prod(1 - truth.presence_CV, axis=1, keepdims=True))
    seen_CV = np.array([sample.present_SV[classes_S == group].mean(axis=0) for group in range(4)])
    np.testing.assert_allclose(seen_CV, given_one_CV, atol=0.015)
    mean_SV = truth.level_CV[classes_S] + factors_S[:, None] * truth.slope_V
    noise_SV = ((sample.values_SV - truth.location_V) / truth.scale_V - mean_SV)[:, truth.has_value_V]
    np.testing.assert_allclose(np.nanmean(noise_SV, axis=0), 0, atol=0.03)
    np.testing.assert_allclose(np.nanstd(noise_SV, axis=0), truth.noise_V[truth.has_value_V], rtol=0.03)
    later_S = step_numbers(sample.offsets_N1) > 0
    gap_noise_S = np.log(sample.gaps_S[later_S]) - truth.pace_C[classes_S[later_S]]
    gap_noise_S -= truth.pace_slope * factors_S[later_S]
    assert gap_noise_S.mean() == pytest.approx(0, abs=0.01)
    assert gap_noise_S.std() == pytest.approx(truth.pace_noise, rel=0.01)
