"""The linear probe: what it says of data whose answer is known, and that its scores are what they are called.

Shapes: N sequences, P features, C classes.
"""

import sys
import tracemalloc

import numpy as np
import pytest
import torch

from seqvae.errors import UsageError
from seqvae.inference.probe import (
    STRENGTHS,
    Bag,
    auroc,
    chosen_rows,
    fit_classifier,
    frequent_tokens,
    interval,
    mean_of_windows,
    one_below_the_other,
    score_with_draws,
    side_by_side,
    summary,
)
from tests.support.small_models import make_batch


def blobs(count: int, apart: float, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Round clouds of points, their centres on the axes."""
    generator = np.random.default_rng(seed)
    classes_N = generator.integers(0, classes, count)
    return generator.normal(size=(count, classes + 2)) + apart * np.eye(classes + 2)[classes_N], classes_N


# --- Regression -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
def test_clouds_far_apart_are_separated_and_noise_is_not(classes):
    for apart, low, high in ((10.0, 1.0, 1.0), (0.0, 0.0, 0.65)):
        features_NP, classes_N = blobs(80, apart, classes)
        others_NP, others_N = blobs(200, apart, classes, seed=1)
        classifier = fit_classifier(features_NP, classes_N, classes)
        assert low <= score_with_draws(classifier.scores(others_NP), others_N, draws=10)[0] <= high


def test_features_that_say_nothing_get_the_strongest_penalty():
    features_NP, classes_N = blobs(60, 0.0)
    assert fit_classifier(features_NP, classes_N, 2).strength == max(STRENGTHS)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_fit_is_where_the_loss_has_no_slope(classes):
    features_NP, classes_N = blobs(100, 1.0, classes)
    fitted = fit_classifier(features_NP, classes_N, classes)
    x_NP, one_hot_NC = fitted.standardise(features_NP), np.eye(classes)[classes_N]
    wrong_NC = np.exp(fitted.scores(features_NP)) - one_hot_NC
    coefficients_CP = fitted.regression.coef_
    weights_CP = np.vstack((-coefficients_CP, coefficients_CP)) / 2 if classes == 2 else coefficients_CP
    slope_PC = x_NP.T @ wrong_NC / 100 + fitted.strength * weights_CP.T
    assert np.abs(slope_PC).max() < 1e-4
    assert np.abs(wrong_NC.mean(axis=0)).max() < 1e-4


def test_the_same_data_give_the_same_fit():
    features_NP, classes_N = blobs(30, 1.0, 3)
    one, same = (fit_classifier(features_NP, classes_N, 3).scores(features_NP) for _ in range(2))
    assert np.array_equal(one, same)


def test_missing_numbers_count_as_the_mean_and_constant_ones_as_zero():
    features_NP = np.array([[1.0, 5.0, np.nan], [3.0, 5.0, np.nan], [np.nan, 5.0, np.nan], [np.nan, 5.0, np.nan]])
    standard_NP = fit_classifier(features_NP, np.array([0, 1, 0, 1]), 2).standardise(features_NP)
    assert standard_NP.tolist() == [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_class_of_a_single_sequence_can_be_fitted():
    features_NP, classes_N = blobs(40, 3.0, 3)
    classes_N[classes_N == 2] = 1
    classes_N[0] = 2
    assert fit_classifier(features_NP, classes_N, 4).scores(features_NP).shape == (40, 4)


def test_without_scikit_learn_the_message_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(UsageError, match=r'pip install "seqvae\[eval\]"'):
        fit_classifier(*blobs(20, 1.0), 2)


def test_windows_of_a_sequence_are_one_row():
    nan = np.nan
    numbers_NP = np.array([[1.0, nan], [5.0, nan], [3.0, 2.0], [9.0, nan]])
    np.testing.assert_array_equal(mean_of_windows(numbers_NP, np.array([4, 2, 4, 2])), [[7.0, nan], [2.0, 2.0]])


# --- Scores -----------------------------------------------------------------------------------------------------------


def test_auroc_is_the_share_of_pairs_in_order_however_often_each_counts():
    generator = np.random.default_rng(0)
    scores_N, positive_N = generator.integers(0, 6, 40).astype(float), generator.random(40) < 0.4
    weights_RN = generator.integers(0, 3, (5, 40))
    for weights_N, found in zip(weights_RN, auroc(scores_N, positive_N, weights_RN), strict=True):
        expanded_N = np.repeat(np.arange(40), weights_N)
        above, below = (scores_N[expanded_N[positive_N[expanded_N] == is_positive]] for is_positive in (True, False))
        wins = (above[:, None] > below).mean() + 0.5 * (above[:, None] == below).mean()
        assert found == pytest.approx(wins)


def test_auroc_of_one_class_alone_is_not_a_number():
    assert np.isnan(auroc(np.array([0.1, 0.2]), np.array([True, True]), np.ones((1, 2)))).all()


def test_the_interval_of_an_accuracy_is_that_of_its_binomial():
    log_p_NC = np.log(np.tile([0.8, 0.1, 0.1], (400, 1)))
    classes_N = np.repeat([0, 1], [300, 100])
    value, low, high = interval(score_with_draws(log_p_NC, classes_N))
    assert value == 0.75
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert (low, high) == pytest.approx((0.75 - half, 0.75 + half), abs=0.006)


def test_intervals_cover_the_truth_as_often_as_they_say():
    covered = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        classes_N = (generator.random(100) < 0.3).astype(int)
        score_N = generator.normal(size=100) + classes_N  # P(above) = Phi(1 / sqrt 2)
        drawn = score_with_draws(np.column_stack((np.zeros(100), score_N)), classes_N, draws=300)
        _, low, high = interval(drawn)
        covered += low <= 0.7602 <= high
    assert 88 <= covered <= 99


def test_methods_are_compared_on_the_same_draws():
    features_NP, classes_N = blobs(50, 1.0)
    score = score_with_draws(features_NP[:, :2], classes_N, draws=50)
    assert interval(score - score_with_draws(features_NP[:, :2], classes_N, draws=50)) == (0.0, 0.0, 0.0)


# --- Summaries --------------------------------------------------------------------------------------------------------


def test_summaries_of_vectors():
    batch = make_batch("vectors", [3, 2])
    values_BTD = torch.tensor(
        [[[1.0, 0.0, 2.0], [2.0, 0.0, 0.0], [6.0, 0.0, 4.0]], [[5.0, 7.0, 0.0], [9.0, 0, 0], [0, 0, 0]]]
    )
    observed_BTD = torch.tensor([[[1, 0, 1], [1, 0, 0], [1, 0, 1]], [[1, 1, 0], [1, 0, 0], [0, 0, 0]]]).bool()
    found = summary(batch._replace(values_BTD=values_BTD, observed_BTD=observed_BTD), 3)
    nan = np.nan
    np.testing.assert_allclose(found["means"], [[3, nan, 3], [7, 7, nan]])
    std, first, last = np.split(found["rest"], 3, axis=1)
    np.testing.assert_allclose(std, [[np.sqrt(14 / 3), nan, 1], [2, 0, nan]])
    np.testing.assert_allclose(first, [[1, nan, 2], [5, 7, nan]])
    np.testing.assert_allclose(last, [[6, nan, 4], [9, 7, nan]])


def test_summaries_of_events():
    batch = make_batch("events", [2, 2])._replace(
        steps_E=torch.tensor([0, 0, 1, 3]),
        variables_E=torch.tensor([1, 2, 2, 1]),
        values_E=torch.tensor([0.0, 2.0, 4.0, 0.0]),
        has_value_E=torch.tensor([False, True, True, False]),
    )
    found = summary(batch, 3)
    np.testing.assert_allclose(found["means"], [[np.nan, np.nan, 3], [np.nan, np.nan, np.nan]])
    np.testing.assert_allclose(found["rest"], [[0, 1, 1, 0, np.log(2), np.log(3)], [0, 1, 0, 0, np.log(2), 0]])


def test_summaries_of_tokens_are_shares_of_the_frequent_ones():
    batch = make_batch("tokens", [4, 1])._replace(tokens_BT=torch.tensor([[3, 3, 1, 4], [1, 0, 0, 0]]))
    assert frequent_tokens([batch], 5).tolist() == [0, 1, 2, 3, 4]
    found = summary(batch, 0, np.array([1, 3]))
    assert list(found) == ["rest"]
    np.testing.assert_allclose(found["rest"], [[0.25, 0.5, np.log(5)], [1, 0, np.log(2)]])


# --- Many variables ---------------------------------------------------------------------------------------------------


def dense(bag: Bag) -> np.ndarray:
    assert isinstance(bag, Bag)
    numbers_NP = np.tile(bag.background_P, (bag.sequences, 1))
    numbers_NP[bag.rows_E, bag.columns_E] = bag.values_E
    return numbers_NP


@pytest.fixture
def summaries(monkeypatch) -> list[tuple[dict, dict]]:
    """The summaries of three batches of events, dense and as bags."""
    batches = [make_batch("events", [4, 2, 0, 3], seed=seed) for seed in range(3)]
    whole = [summary(batch, 3) for batch in batches]
    monkeypatch.setattr("seqvae.inference.probe.DENSE_VARIABLES", 2)
    return [(one, summary(batch, 3)) for one, batch in zip(whole, batches, strict=True)]


def test_bags_hold_the_same_numbers(summaries):
    owners_N, chosen_N = np.array([3, 1, 1, 0] * 3), np.arange(12) % 5 > 0
    sides = [
        {name: one_below_the_other([both[side][name] for both in summaries]) for name in ("means", "rest")}
        for side in (0, 1)
    ]
    for name in ("means", "rest"):
        whole, bag = (side[name] for side in sides)
        np.testing.assert_allclose(dense(bag), whole)
        np.testing.assert_allclose(dense(mean_of_windows(bag, owners_N)), mean_of_windows(whole, owners_N))
        np.testing.assert_allclose(dense(chosen_rows(bag, chosen_N)), chosen_rows(whole, chosen_N))
    latents = np.random.default_rng(0).normal(size=(12, 2))
    whole, bag = (side_by_side([side["means"], side["rest"], latents]) for side in sides)
    np.testing.assert_allclose(dense(bag), whole)


@pytest.mark.parametrize("classes", [2, 3])
def test_bags_give_the_same_fit(classes):
    generator = np.random.default_rng(0)
    classes_N = generator.integers(0, classes, 120)
    counts_NP = generator.poisson(np.where(np.arange(6) == classes_N[:, None], 2.0, 0.3)).astype(float)
    counts_NP[:, 5] = np.where(np.arange(120) == 7, 0, 1)  # lacked once: its deviation is cut at ten
    means_NP = np.where(counts_NP > 0, generator.normal(size=(120, 6)) + classes_N[:, None], np.nan)
    features_NP = np.concatenate((means_NP, counts_NP), axis=1)
    rows_E, columns_E = (~np.isnan(features_NP) & (features_NP != 0)).nonzero()
    background_P = np.repeat([np.nan, 0.0], 6)
    bag = Bag(120, background_P, rows_E, columns_E, features_NP[rows_E, columns_E])
    whole, sparse = (fit_classifier(features, classes_N, classes) for features in (features_NP, bag))
    assert sparse.strength == whole.strength
    np.testing.assert_allclose(sparse.scores(bag), whole.scores(features_NP), atol=2e-3)


def test_tens_of_thousands_of_codes_take_the_memory_of_those_that_came():
    """Dense, one set of numbers of these sequences would be 64 MB, and the fit would hold several."""
    generator = np.random.default_rng(0)
    batch = make_batch("events", [1] * 200)._replace(
        steps_E=torch.arange(200).repeat_interleave(5),
        variables_E=torch.from_numpy(generator.integers(0, 40_000, 1000)),
        values_E=torch.ones(1000),
        has_value_E=torch.ones(1000, dtype=torch.bool),
    )
    tracemalloc.start()
    bag = side_by_side([*summary(batch, 40_000).values(), np.zeros((200, 2))])
    built = tracemalloc.get_traced_memory()[1]
    standard_NP = fit_classifier(bag, np.arange(200) % 2, 2).standardise(bag)
    fitted = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert standard_NP.shape == (200, 120_002)
    assert standard_NP.nnz <= 3 * 1000 + 400
    assert built < 8e6
    assert fitted < 80e6
