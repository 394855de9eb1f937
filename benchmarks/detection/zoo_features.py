"""What is known of a run before its first step: what a line about the risk of a collapse may be learned from.

In: the settings of a run and its opened data. Out: `Features`, plain numbers that JSON holds. Nothing of a network, a reading or a
truth is in them.

Shapes: N sequences, T steps, D features.
"""

from typing import NamedTuple

import numpy as np

from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings
from seqvae.data.batch import VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.models.posteriors import DEVIATION
from seqvae.training.objective import resolve_free_bits

SEQUENCES = 1000
"""Sequences of the training split that eigenvalues are taken of."""
EIGENVALUES = 10


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
        label_weight=objective.label_weight if data.description.classes else 0.0,
        total_steps=total_steps,
        sequences_per_step=sequences_per_step,
        training_sequences=len(lengths_N),
        mean_length=float(lengths_N.mean()),
        width=model.width,
        depth=model.depth,
        eigenvalues=sequence_eigenvalues(*some_vectors(data)) if has_eigenvalues else None,
    )


def floor_of(model: ModelSettings, objective: ObjectiveSettings) -> float:
    """Return the nats in all dimensions of a posterior that cost nothing, or that it cannot do without."""
    floor = model.latent_size * resolve_free_bits(objective, model.latent_scope)
    if model.posterior == "batch_norm":
        floor = max(floor, model.latent_size * DEVIATION**2 / 2)
    return floor


def some_vectors(data: SequenceDataModule) -> tuple[np.ndarray, np.ndarray]:
    """Return values and which of them are real of some training sequences, (N, T, D) each."""
    split = data.split("train")
    chosen_N = np.random.default_rng(0).permutation(len(split))[:SEQUENCES]
    batch = split.gather(np.sort(chosen_N))
    assert isinstance(batch, VectorBatch)
    return batch.values_BTD.numpy(), batch.observed_BTD.numpy()


def sequence_eigenvalues(values_NTD: np.ndarray, observed_NTD: np.ndarray) -> tuple[float, ...]:
    """Return the largest eigenvalues, largest first, of the covariance of sequences in units of each value's own deviation.

    What is missing counts as its mean, so that a step which few sequences have weighs as much as it does in a loss.

    >>> values = np.broadcast_to(np.array([-1.0, 1.0])[:, None, None], (2, 3, 1))
    >>> [abs(round(one, 3)) for one in sequence_eigenvalues(values, np.ones_like(values, dtype=bool))]
    [3.0, 0.0, 0.0]
    """
    count_TD = observed_NTD.sum(axis=0).clip(min=1)
    mean_TD = np.where(observed_NTD, values_NTD, 0.0).sum(axis=0) / count_TD
    rest_NTD = np.where(observed_NTD, values_NTD - mean_TD, 0.0).astype(np.float64)
    variance_TD = np.square(rest_NTD).sum(axis=0) / count_TD
    scaled_NP = (rest_NTD / np.sqrt(np.maximum(variance_TD, 1e-12))).reshape(len(rest_NTD), -1)
    eigenvalues = np.linalg.eigvalsh(scaled_NP.T @ scaled_NP / len(scaled_NP))
    return tuple(float(one) for one in eigenvalues[::-1][:EIGENVALUES])
