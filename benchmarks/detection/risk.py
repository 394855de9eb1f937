"""What is the risk line worth, and what are its coefficients? A logistic model of settings, fitted and scored on the zoo's records.

    python -m benchmarks.detection.risk                          # fit on the tuning half, score by cross-validation
    python -m benchmarks.detection.risk --zoo DIR --half scored  # the coefficients that stand in seqvae/training/risk.py

Records come from `benchmarks.detection.collapse_zoo --record`. A run is dead where collapsed, or a decoder that ignores z, is
right at its end. Left out are altered networks, runs that diverged, and those whose end lies between the limits or cannot be told.
The terms of the model, and how they are standardised, are the product's own; only the fit needs scikit-learn, of the extra `eval`.
"""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import LeaveOneGroupOut, StratifiedKFold

from benchmarks.detection.collapse_zoo import DEFAULT_DIRECTORY, RunWithTruth, choose, known_runs
from benchmarks.detection.rescue import DEAD
from benchmarks.detection.zoo_recording import read_json, record_path
from benchmarks.detection.zoo_runs import HALVES
from benchmarks.detection.zoo_scoring import OPEN
from benchmarks.measure import machine, make_parser, print_table
from seqvae.errors import UsageError, run_command
from seqvae.training.risk import FITTED, Features, RiskModel, Term, risk_of, terms_of

PROG = "benchmarks.detection.risk"
PENALTY = 1.0
"""Variance of the prior on each coefficient of a standardised term, as scikit-learn's C."""
FOLDS, REPEATS = 5, 20
BINS = (0.0, 0.1, 0.3, 0.6, 1.0)
DRAWS = 2000


class KnownRun(NamedTuple):
    """A run whose end is known for certain."""

    name: str
    data: str
    features: Features
    is_dead: bool

    @property
    def terms(self) -> dict[str, float]:
        return terms_of(self.features)


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--zoo", metavar="DIR", default=DEFAULT_DIRECTORY, help="records of the zoo")
    parser.add_argument("--half", choices=HALVES, default="tuning", help="tuning: fit; scored: judge what was fitted")
    options = parser.parse_args()
    directory = Path(options.zoo).resolve()
    known = known_runs(choose([], options.half), directory)
    runs = [read_run(one, directory) for one in known if is_certain(one)]
    dead_N = np.array([run.is_dead for run in runs])
    if dead_N.all() or not dead_N.any():
        raise UsageError(f"--zoo {options.zoo}: of {len(runs)} runs {dead_N.sum()} are dead; it takes both kinds")
    result: dict[str, Any] = {"benchmark": "risk", "machine": machine(), "half": options.half}
    result |= {"recorded": len(known), "runs": len(runs), "dead": int(dead_N.sum())}
    if options.half == "scored":
        risks_RN = np.array([[risk_of(run.terms, FITTED) for run in runs]])
        print_table("Terms in the product", rows_of(FITTED, runs))
        result["scores"] = [score("coefficients of the product", risks_RN, dead_N)]
    else:
        model = fit(runs)
        print_table("Fitted on all of them", rows_of(model, runs))
        print(f"intercept {model.intercept:.3f}; for seqvae/training/risk.py: {model}")
        result["model"] = {"intercept": model.intercept, "terms": {n: t._asdict() for n, t in model.terms.items()}}
        # Each repeat splits the runs anew; leaving out a whole data set tells of data that the model has never seen.
        risks_RN = np.array([cross_validated(runs, seed) for seed in range(REPEATS)])
        by_data_RN = np.array([cross_validated(runs, None)])
        result["scores"] = [
            score(f"cross-validated, {FOLDS} folds", risks_RN, dead_N),
            score("each data set by the others", by_data_RN, dead_N),
        ]
    print_table(f"Scores, {options.half} half", result["scores"])
    result["calibration"] = calibration(risks_RN.mean(axis=0), dead_N)
    print_table("Calibration", result["calibration"])
    order = np.argsort(risks_RN.mean(axis=0))
    rows = [
        {"run": runs[n].name, "risk": f"{risks_RN[:, n].mean():.2f}", "end": "dead" if dead_N[n] else "alive"}
        for n in order
    ]
    print_table("Each run", rows)
    print(json.dumps(result))


def is_certain(one: RunWithTruth) -> bool:
    """Return whether it is certain that the run is dead or alive, of its settings alone."""
    right = set(one.truth.right)
    is_decided = right <= DEAD or not right & DEAD
    return bool(right) and is_decided and not right & {"diverged", *OPEN} and one.run.alteration == "none"


def read_run(one: RunWithTruth, directory: Path) -> KnownRun:
    stored = read_json(record_path(one.run, directory))["features"]
    return KnownRun(one.run.name, one.run.data, Features(**stored), set(one.truth.right) <= DEAD)


def fit(runs: Sequence[KnownRun]) -> RiskModel:
    """Return the model of the highest posterior probability."""
    names = list(runs[0].terms)
    terms_NK = np.array([[run.terms[name] for name in names] for run in runs])
    mean_K, deviation_K = terms_NK.mean(axis=0), terms_NK.std(axis=0)
    deviation_K[deviation_K == 0] = 1.0  # of a term that is the same for all
    fitted = LogisticRegression(C=PENALTY).fit((terms_NK - mean_K) / deviation_K, [run.is_dead for run in runs])
    numbers = np.stack([mean_K, deviation_K, fitted.coef_[0]], axis=1).round(3).tolist()
    terms = {name: Term(*of_term) for name, of_term in zip(names, numbers, strict=True)}
    return RiskModel(round(float(fitted.intercept_[0]), 3), terms)


def cross_validated(runs: Sequence[KnownRun], seed: int | None) -> list[float]:
    """Return the risk of each run by a model that has not seen it; without a seed, none of its data set."""
    dead, sets = [run.is_dead for run in runs], [run.data for run in runs]
    if seed is None:
        parts = LeaveOneGroupOut().split(runs, dead, sets)
    else:
        parts = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(dead, dead)
    risks = [0.0] * len(runs)
    for seen, unseen in parts:
        model = fit([runs[n] for n in seen])
        for n in unseen:
            risks[n] = risk_of(runs[n].terms, model)
    return risks


def score(title: str, risks_RN: np.ndarray, dead_N: np.ndarray) -> dict[str, Any]:
    """Return the area under the ROC curve, with its interval over other runs, and the Brier score; means over repeats R."""
    area = float(np.mean([roc_auc_score(dead_N, risks_N) for risks_N in risks_RN]))
    rng = np.random.default_rng(0)
    drawn: list[float] = []
    while len(drawn) < DRAWS:
        chosen_N = rng.integers(len(dead_N), size=len(dead_N))
        if 0 < dead_N[chosen_N].sum() < len(dead_N):
            risks_N = risks_RN[len(drawn) % len(risks_RN)]
            drawn.append(roc_auc_score(dead_N[chosen_N], risks_N[chosen_N]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {
        "how": title,
        "runs": len(dead_N),
        "dead": int(dead_N.sum()),
        "AUROC": round(area, 3),
        "95 % interval": f"{low:.2f} to {high:.2f}",
        "Brier score": round(float(np.mean(np.square(risks_RN - dead_N))), 3),
        "Brier score of the share": round(float(np.var(dead_N)), 3),
    }


def calibration(risks_N: np.ndarray, dead_N: np.ndarray) -> list[dict[str, Any]]:
    """Return for each bin of risks the share that died, with Wilson's 95 % interval."""
    rows = []
    for low, high in pairwise(BINS):
        within_N = (risks_N >= low) & ((risks_N < high) | (high == BINS[-1]))
        if not within_N.any():
            continue
        runs, dead = int(within_N.sum()), int(dead_N[within_N].sum())
        interval = binomtest(dead, runs).proportion_ci(method="wilson")
        rows.append(
            {
                "risk": f"{low:g} to {high:g}",
                "runs": runs,
                "mean risk": round(float(risks_N[within_N].mean()), 2),
                "died": f"{dead} ({dead / runs:.2f})",
                "95 % interval": f"{interval.low:.2f} to {interval.high:.2f}",
            }
        )
    return rows


def rows_of(model: RiskModel, runs: Sequence[KnownRun]) -> list[dict[str, Any]]:
    return [
        {"term": name, **term._asdict(), "values among the runs": len({run.terms[name] for run in runs})}
        for name, term in model.terms.items()
    ]


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
