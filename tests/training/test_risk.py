"""The risk of a collapse before the first step: floors under the rate, eigenvalues of sequences, and what raises or lowers it."""

from typing import Any

import numpy as np
import pytest

from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings
from seqvae.training.risk import FITTED, describe_risk, floor_of, risk_of, sequence_eigenvalues, terms_of
from tests.support.risk_features import KNOWN


@pytest.mark.parametrize(
    ("model", "objective", "floor"),
    [
        (ModelSettings(latent_size=8), ObjectiveSettings(free_bits=0.25), 2.0),
        (ModelSettings(latent_size=8), ObjectiveSettings(), 0.8),
        (ModelSettings(latent_size=8), ObjectiveSettings(target_kl=3), 0.0),
        (ModelSettings(latent_size=4, latent_scope="step"), ObjectiveSettings(), 0.04),
        (ModelSettings(latent_size=16, posterior="batch_norm"), ObjectiveSettings(free_bits=0), 2.88),
    ],
)
def test_the_floor_is_what_all_dimensions_get_together(
    model: ModelSettings, objective: ObjectiveSettings, floor: float
) -> None:
    assert floor_of(model, objective) == pytest.approx(floor)


def test_a_factor_common_to_all_steps_has_its_share_in_the_largest_eigenvalue() -> None:
    rng = np.random.default_rng(0)
    values_NTD = rng.normal(size=(20_000, 1, 1)) + rng.normal(size=(20_000, 10, 1))
    largest, second, *_ = sequence_eigenvalues(values_NTD, np.ones_like(values_NTD, dtype=bool))
    assert largest == pytest.approx(5.5, rel=0.05)
    assert second == pytest.approx(0.5, rel=0.1)


def test_values_that_are_missing_do_not_count() -> None:
    rng = np.random.default_rng(0)
    values_NTD = rng.normal(size=(5_000, 3, 2))
    observed_NTD = rng.random(values_NTD.shape) < 0.5
    spoilt_NTD = np.where(observed_NTD, values_NTD, 99.0)
    values_NTD = np.where(observed_NTD, values_NTD, 0.0)
    assert sequence_eigenvalues(spoilt_NTD, observed_NTD) == pytest.approx(
        sequence_eigenvalues(values_NTD, observed_NTD)
    )


def risk_with(**changes: Any) -> float:
    return risk_of(terms_of(KNOWN._replace(**changes)), FITTED)


def test_a_known_row_keeps_its_risk() -> None:
    line = describe_risk(KNOWN._replace(final_weight=4.0))
    assert line.startswith(
        "of collapse 0.67 with these settings (autoregressive decoder, weight 4, no floor under the rate)"
    )


def test_a_certain_end_is_never_promised() -> None:
    safe = KNOWN._replace(is_autoregressive=False, floor=2.0, final_weight=0.1)
    assert describe_risk(safe).startswith("of collapse below 0.01 ")


def test_the_risk_grows_with_the_weight() -> None:
    risks = [risk_with(final_weight=weight) for weight in (0.0, 0.2, 0.5, 1.0, 2.0, 8.0, 32.0, 100.0)]
    assert risks == sorted(risks)
    assert risks[0] < 0.1 < 0.9 < risks[-1]


@pytest.mark.parametrize(
    "remedy",
    [
        {"floor": 0.5},
        {"final_weight": None, "schedule": "steered", "target_kl": 5.0},
        {"is_autoregressive": False},
        {"schedule": "linear", "rise": 0.5},
        {"schedule": "sigmoid", "rise": 500.0},
    ],
)
def test_what_keeps_a_latent_alive_lowers_the_risk(remedy: dict[str, Any]) -> None:
    assert risk_with(**remedy) < risk_with()


def test_more_floor_is_less_risk_up_to_what_is_enough() -> None:
    risks = [risk_with(final_weight=4.0, floor=floor) for floor in (0.0, 0.5, 1.0, 1.5)]
    assert risks == sorted(risks, reverse=True)
    assert risk_with(final_weight=4.0, floor=30.0) == risks[-1]


def test_a_weight_above_the_largest_eigenvalue_is_a_risk_to_a_parallel_decoder() -> None:
    parallel = {"is_autoregressive": False, "kind": "vectors", "final_weight": 4.0}
    strong, weak = (risk_with(**parallel, eigenvalues=(largest, 1.0)) for largest in (16.0, 1.5))
    assert strong < 0.1
    assert weak > 3 * strong


def test_cycles_are_no_warm_up() -> None:
    assert risk_with(schedule="cyclical", rise=0.5) == risk_with()


def test_a_small_gaussian_cloud_of_many_values_has_no_direction_to_tell_of() -> None:
    values_NTD = np.random.default_rng(0).normal(size=(50, 400, 5))
    largest, *_ = sequence_eigenvalues(values_NTD, np.ones_like(values_NTD, dtype=bool))
    assert largest < 2


def test_a_strong_factor_is_found_in_few_sequences_of_many_values() -> None:
    rng = np.random.default_rng(0)
    values_NTD = rng.normal(size=(100, 1, 1)) + rng.normal(size=(100, 400, 1))
    largest, *_ = sequence_eigenvalues(values_NTD, np.ones_like(values_NTD, dtype=bool))
    assert largest == pytest.approx(200, rel=0.1)
