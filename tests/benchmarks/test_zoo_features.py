"""What is known of a run before its first step: floors under the rate, and eigenvalues of its sequences."""

import numpy as np
import pytest

from benchmarks.detection.zoo_features import floor_of, sequence_eigenvalues
from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings


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
