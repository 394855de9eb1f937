"""The fit of the risk finds what made the runs die, and its calibration counts them."""

import numpy as np

from benchmarks.detection.risk import KnownRun, calibration, cross_validated, fit, score
from tests.support.risk_features import KNOWN


def made_runs(count: int) -> list[KnownRun]:
    """Return runs that die by their weight and decoder alone, half of them without a doubt."""
    rng = np.random.default_rng(0)
    runs = []
    for number in range(count):
        log2_weight = float(rng.uniform(-3, 4))
        features = KNOWN._replace(
            final_weight=2.0**log2_weight,
            is_autoregressive=bool(rng.integers(2)),
            floor=float(rng.choice([0.0, 1.5])),
        )
        log_odds = 2 * log2_weight + (1 if features.is_autoregressive else -1) - 2 * features.floor
        is_dead = bool(rng.random() < 1 / (1 + np.exp(-log_odds)))
        runs.append(KnownRun(f"run-{number}", ("one", "other")[number % 2], features, is_dead))
    return runs


def test_the_fit_finds_the_signs_and_orders_runs_that_it_has_not_seen() -> None:
    runs = made_runs(200)
    model = fit(runs)
    signs = {name: np.sign(term.coefficient) for name, term in model.terms.items()}
    assert signs == {"log2 of the weight": 1, "autoregressive decoder": 1, "floor": -1, "warm-up": 0}
    dead_N = np.array([run.is_dead for run in runs])
    for seed in (0, None):
        assert score("", np.array([cross_validated(runs, seed)]), dead_N)["AUROC"] > 0.9


def test_calibration_counts_each_run_once() -> None:
    rows = calibration(np.array([0.05, 0.1, 0.2, 0.95, 1.0]), np.array([False, False, True, True, True]))
    assert [(row["risk"], row["runs"], row["died"]) for row in rows] == [
        ("0 to 0.1", 1, "0 (0.00)"),
        ("0.1 to 0.3", 2, "1 (0.50)"),
        ("0.6 to 1", 2, "2 (1.00)"),
    ]
