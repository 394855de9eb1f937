"""The risk that a run ends with a collapsed posterior, before its first step: its settings and opened data in, a probability out.

A logistic model of four numbers, fitted by `python -m benchmarks.detection.risk` on half of the zoo's runs: of 94 those 72 whose
end is certain and follows from their settings. It is no verdict. A term is kept where ten runs or more have it and
cross-validation is no worse with it: the decoder (55 autoregressive, of which 18 died; 17 parallel, of which none), the weight (10
values), floor or target (13 runs), the warm-up (12). Left out are word dropout (3 runs), a loss on labels (3) and latents of each
step (4), which are too few, and latent size, width, kind of data, and numbers of sequences and of steps, with which the log loss
was no better. Eigenvalues enter as the unit of the weight, without a coefficient: 8 runs have them, all alive.

Shapes: N sequences, T steps, D features, P values of a sequence, T x D.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings, TrainingSettings
from seqvae.data.batch import VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.models.posteriors import DEVIATION
from seqvae.text import percent
from seqvae.training.objective import resolve_free_bits
from seqvae.training.schedules import Plan

SEQUENCES = 1000
"""Sequences of the training split that eigenvalues are taken of."""
VALUES = 4_000_000
"""Values that all of them hold at most, padding included: a tenth of a second."""
EIGENVALUES = 10
SMALLEST_EXCESS, LARGEST_EXCESS = 0.25, 32.0
"""Beyond these the weight makes no difference: no run of the zoo died below the first, and none had more than the second."""
ENOUGH_FLOOR = 1.5
"""Nats in all that hold up a posterior as well as more of them do."""


class Features(NamedTuple):
    """Settings of a run, as far as a collapse may depend on them, and the eigenvalues of its vectors."""

    kind: str
    is_autoregressive: bool
    floor: float
    """Nats that hold up the rate of a posterior in all: free bits, or what batch-normalised means cannot go below."""
    word_dropout: float
    """0 where the decoder does not see the data's steps."""
    final_weight: float | None
    """None: steered."""
    schedule: str
    """`steered` with a target KL."""
    rise: float
    """Share of the run, or of each cycle, in which the weight rises; more than 1: optimizer steps."""
    latent_size: int
    is_per_step: bool
    target_kl: float | None
    label_weight: float
    """0 where there are no labels."""
    total_steps: int
    sequences_per_step: float
    training_sequences: int
    mean_length: float
    width: int
    depth: int
    eigenvalues: tuple[float, ...] | None
    """The largest of the covariance of whole sequences of vectors, each value in units of its own deviation at its step, where
    the decoder is parallel: the weight below which a factorised Gaussian decoder that knows each step's moments comes to life."""


# --- The model --------------------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """A number of `terms_of`, how it is standardised, and what one standard deviation of it adds to the log odds."""

    mean: float
    deviation: float
    coefficient: float


class RiskModel(NamedTuple):
    """A logistic model."""

    intercept: float
    terms: Mapping[str, Term]


def terms_of(features: Features) -> dict[str, float]:
    """Return the numbers that the risk is computed from."""
    weight = 1.0 if features.final_weight is None else features.final_weight
    # A parallel decoder can do without a latent only where the weight exceeds what the data's directions are worth.
    excess = weight / (features.eigenvalues[0] if features.eigenvalues else 1.0)
    return {
        "log2 of the weight": math.log2(min(max(excess, SMALLEST_EXCESS), LARGEST_EXCESS)),
        "autoregressive decoder": float(features.is_autoregressive),
        "floor": min(max(features.floor, features.target_kl or 0.0), ENOUGH_FLOOR),
        "warm-up": warmup_share(features),
    }


def warmup_share(features: Features) -> float:
    """Return the share of the run in which the weight rises once; cycles, which kill as a constant weight does, count as none."""
    if features.schedule not in ("linear", "sigmoid"):
        return 0.0
    return min(1.0, features.rise if features.rise <= 1 else features.rise / features.total_steps)


def risk_of(terms: Mapping[str, float], model: RiskModel) -> float:
    """Return the probability of a collapse.

    >>> risk_of({"log2 of the weight": 3.0}, RiskModel(0.0, {"log2 of the weight": Term(1.0, 2.0, math.log(4))}))
    0.8
    """
    log_odds = model.intercept + sum(
        term.coefficient * (terms[name] - term.mean) / term.deviation for name, term in model.terms.items()
    )
    return 1 / (1 + math.exp(-log_odds))


FITTED = RiskModel(
    intercept=-2.188,
    terms={
        "log2 of the weight": Term(mean=0.388, deviation=1.836, coefficient=1.883),
        "autoregressive decoder": Term(mean=0.764, deviation=0.425, coefficient=1.26),
        "floor": Term(mean=0.198, deviation=0.484, coefficient=-0.881),
        "warm-up": Term(mean=0.099, deviation=0.234, coefficient=-0.46),
    },
)
"""Fitted on 72 runs of the zoo's tuning half, of which 18 died (`python -m benchmarks.detection.risk`). Area under the ROC curve in
cross-validation 0.919 (95 % interval 0.84 to 0.98), with whole data sets left out 0.873 (0.78 to 0.95)."""


def describe_risk(features: Features) -> str:
    """Return the risk and the settings that it follows from, as a sentence without its subject."""
    risk = risk_of(terms_of(features), FITTED)
    figure = "below 0.01" if risk < 0.01 else "above 0.99" if risk > 0.99 else f"{risk:.2f}"
    known = ["autoregressive decoder" if features.is_autoregressive else "parallel decoder"]
    if features.eigenvalues:
        known.append(f"largest eigenvalue of the data {features.eigenvalues[0]:.3g}")
    if features.target_kl is not None:
        known.append(f"steered to {features.target_kl:g} nats")
    else:
        share = warmup_share(features)
        known.append(f"weight {features.final_weight:g}" + (f" after {percent(share)} of the run" if share else ""))
    unit = "step" if features.is_per_step else "sequence"
    known.append(f"a floor of {features.floor:.2g} nats per {unit}" if features.floor else "no floor under the rate")
    return f"of collapse {figure} with these settings ({', '.join(known)}): see docs/monitoring.md"


# --- What is known before the first step ------------------------------------------------------------------------------


def features_of(
    model: ModelSettings,
    objective: ObjectiveSettings,
    data: SequenceDataModule,
    total_steps: int,
    sequences_per_step: float,
) -> Features:
    is_autoregressive = model.decoder != "parallel"
    is_steered = objective.target_kl is not None
    lengths_N = np.asarray(data.split("train").lengths_N)
    has_eigenvalues = data.description.kind == "vectors" and not is_autoregressive
    return Features(
        kind=data.description.kind,
        is_autoregressive=is_autoregressive,
        floor=floor_of(model, objective),
        word_dropout=model.word_dropout if is_autoregressive else 0.0,
        final_weight=None if is_steered else objective.beta,
        schedule="steered" if is_steered else objective.kl_schedule,
        rise=0.0 if is_steered or objective.kl_schedule == "constant" else objective.kl_warmup,
        latent_size=model.latent_size,
        is_per_step=model.latent_scope == "step",
        target_kl=objective.target_kl,
        label_weight=objective.weight_of_labels if data.description.classes else 0.0,
        total_steps=total_steps,
        sequences_per_step=sequences_per_step,
        training_sequences=len(lengths_N),
        mean_length=float(lengths_N.mean()),
        width=model.width,
        depth=model.depth,
        eigenvalues=sequence_eigenvalues(*some_vectors(data)) if has_eigenvalues else None,
    )


def features_before(settings: TrainingSettings, data: SequenceDataModule, plan: Plan) -> Features:
    """Return what is known of a planned run."""
    return features_of(settings.model, settings.objective, data, plan.total_steps, plan.sequences_per_step)


def floor_of(model: ModelSettings, objective: ObjectiveSettings) -> float:
    """Return the nats in all dimensions of a posterior that cost nothing, or that it cannot do without."""
    floor = model.latent_size * resolve_free_bits(objective, model.latent_scope)
    if model.posterior in ("batch_norm", "du"):
        floor = max(floor, model.latent_size * DEVIATION**2 / 2)
    return max(floor, model.least_rate)


def some_vectors(data: SequenceDataModule) -> tuple[np.ndarray, np.ndarray]:
    """Return values and which of them are real of some training sequences, (N, T, D) each."""
    split = data.split("train")
    values = max(1, int(np.max(split.lengths_N)) * len(data.description.names))
    count = min(SEQUENCES, max(2, VALUES // values))
    chosen_N = np.random.default_rng(0).permutation(len(split))[:count]
    batch = split.gather(np.sort(chosen_N))
    assert isinstance(batch, VectorBatch)
    return batch.values_BTD.numpy(), batch.observed_BTD.numpy()


def sequence_eigenvalues(values_NTD: np.ndarray, observed_NTD: np.ndarray) -> tuple[float, ...]:
    """Return the largest eigenvalues, largest first, of the covariance of sequences in units of each value's own deviation.

    What is missing counts as its mean, so that a step which few sequences have weighs as much as it does in a loss. Few sequences
    of many values look correlated by chance; that part is taken away (`without_chance`).

    >>> values = np.broadcast_to(np.array([-1.0, 1.0])[:, None, None], (2000, 2, 1, 1)).reshape(-1, 1, 1).repeat(3, axis=1)
    >>> [abs(round(one, 2)) for one in sequence_eigenvalues(values, np.ones_like(values, dtype=bool))]
    [3.0, 0.0, 0.0]
    """
    count_TD = observed_NTD.sum(axis=0).clip(min=1)
    mean_TD = np.where(observed_NTD, values_NTD, 0.0).sum(axis=0) / count_TD
    rest_NTD = np.where(observed_NTD, values_NTD - mean_TD, 0.0).astype(np.float64)
    variance_TD = np.square(rest_NTD).sum(axis=0) / count_TD
    scaled_NP = (rest_NTD / np.sqrt(np.maximum(variance_TD, 1e-12))).reshape(len(rest_NTD), -1)
    rows, columns = scaled_NP.shape
    # Both products have the same eigenvalues, apart from zeros.
    product = scaled_NP.T @ scaled_NP if columns <= rows else scaled_NP @ scaled_NP.T
    found = np.linalg.eigvalsh(product / rows)[::-1][:EIGENVALUES]
    return tuple(float(one) for one in without_chance(found, columns / rows))


def without_chance(eigenvalues: np.ndarray, values_per_sequence: float) -> np.ndarray:
    """Return what the eigenvalues would be of endless sequences, for noise of variance 1 beside them (Baik and Silverstein 2006).

    Those that noise alone reaches are 1 or less.

    >>> float(round(without_chance(np.array([7.5]), 2.0)[0], 3))
    5.0
    """
    reached_by_noise = (1 + math.sqrt(values_per_sequence)) ** 2
    half = (eigenvalues + 1 - values_per_sequence) / 2
    spiked = half + np.sqrt(np.maximum(np.square(half) - eigenvalues, 0.0))
    return np.where(eigenvalues > reached_by_noise, spiked, np.minimum(eigenvalues, 1.0))
