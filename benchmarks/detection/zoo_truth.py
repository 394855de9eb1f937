"""The truth about a run of the zoo: numbers of its final network on sequences that it never saw, and what they are called.

In: a trained network and a held-out split. Out: `Truth`, plain numbers in nats, and from these one of the names below or a
grey zone. Nothing here has seen a reading or a verdict.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.quality.results import WithoutLatent
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.inference.estimates import Estimate, importance_weighted_nll, mean_of, posterior_statistics
from seqvae.inference.streaming import batches_of
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.decoder_use import undisturbed
from seqvae.monitors.formulas import mean_of_variances, variance_of_means

SEQUENCES = 400
"""Of the test split, chosen once; all where there are fewer."""
SAMPLES = 32
"""For the importance-weighted NLL of each."""


class Measured(NamedTuple):
    """In nats per sequence, on held-out sequences; infinite or NaN numbers are None."""

    sequences: int
    rate: float | None
    kl_per_dim: tuple[float | None, ...]
    mutual_information: float | None
    mutual_information_cap: float
    active_units: int
    variance_of_means: tuple[float | None, ...]
    mean_of_variances: tuple[float | None, ...]
    decoder_use: float | None
    decoder_use_error: float | None
    nll_without_latent: float | None
    gain: float | None
    """Of the decoder without a latent, minus the model's own importance-weighted one, sequence by sequence."""
    gain_error: float | None


def held_out(data: SequenceDataModule) -> list[Batch]:
    return list(batches_of(data, "test", sequences=SEQUENCES))


def measure(network: SequenceVAE, batches: list[Batch], without_latent_N: np.ndarray) -> Measured:
    """`without_latent_N` are the NLLs of the decoder without a latent, of the same sequences."""
    statistics = posterior_statistics(network, batches)
    mean_NZ, logvar_NZ = posteriors(network, batches)
    own = importance_weighted_nll(network, batches, samples=SAMPLES)
    gain = mean_of(without_latent_N - own.nll_N)
    use = statistics.decoder_use or Estimate(math.nan, math.nan)
    return Measured(
        sequences=statistics.sequences,
        rate=finite(statistics.rate.value),
        kl_per_dim=tuple(finite(value) for value in statistics.kl_per_dim),
        mutual_information=finite(statistics.mutual_information),
        mutual_information_cap=math.log(statistics.posteriors),
        active_units=statistics.active_units,
        variance_of_means=tuple(finite(value) for value in variance_of_means(mean_NZ).tolist()),
        mean_of_variances=tuple(finite(value) for value in mean_of_variances(logvar_NZ).tolist()),
        decoder_use=finite(use.value),
        decoder_use_error=finite(use.error),
        nll_without_latent=finite(float(without_latent_N.mean())),
        gain=finite(gain.value),
        gain_error=finite(gain.error),
    )


def measure_without_latent(network: WithoutLatent, batches: list[Batch]) -> np.ndarray:
    return importance_weighted_nll(network, batches, samples=1).nll_N


def posteriors(network: SequenceVAE, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """Means and log-variances of all, one behind the other."""
    with undisturbed(network, torch.device("cpu"), torch.autocast("cpu", enabled=False)):
        parts = [network.encode(batch) for batch in batches]
    return torch.cat([part.mean for part in parts]), torch.cat([part.logvar for part in parts])


def finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def from_json(stored: dict[str, Any]) -> Measured:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
    return Measured(**fields)
