"""Where each sequence lies in the latent space, and how well the model knows it.

In: a trained model and data. Out: tables of `id, split, steps, mean, variance, nll, rate`, in the order of the data.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from torch import Tensor

from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.inference.streaming import SEQUENCE, rows_of
from seqvae.monitors.formulas import gaussian_kl

if TYPE_CHECKING:
    from seqvae.inference.model import Model


def encode(model: "Model", data: SequenceDataModule, splits: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the posterior, the NLL and the rate of each sequence, computed at the posterior's mean."""

    def compute(batch: Batch) -> pa.Table:
        output = model.network(batch, at_mean=True)
        mask = output.posterior_mask
        rate = gaussian_kl(output.posterior_mean, output.posterior_logvar).sum(dim=-1) * mask
        rate_B = rate.sum(dim=1) if rate.dim() == 2 else rate
        return pa.table(
            {
                SEQUENCE: pa.array(batch.sequences_B.cpu().numpy()),
                "steps": pa.array(output.steps_B.cpu().numpy()),
                "mean": _lists(output.posterior_mean, mask),
                "variance": _lists(output.posterior_logvar.exp(), mask),
                "nll": pa.array(output.nll_B.float().cpu().numpy()),
                "rate": pa.array(rate_B.float().cpu().numpy()),
            }
        )

    # A latent for each step makes two lists per step; otherwise they are few beside the sequence.
    cells = 2 * model.settings["latent_size"] if model.network.latent_per_step else 1
    return rows_of(data, splits, model, compute, cells_per_step=cells)


def _lists(numbers: Tensor, mask: Tensor) -> pa.Array:
    """Turn (B, Z) into a list of Z numbers per sequence, and (B, S, Z) into a list of such lists, one for each real step."""
    flat = pa.array(numbers[mask].flatten().float().cpu().numpy())
    vectors = pa.FixedSizeListArray.from_arrays(flat, numbers.shape[-1])
    if numbers.dim() == 2:
        return vectors
    ends_B = mask.sum(dim=1).cumsum(dim=0).cpu().numpy()
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends_B]).astype(np.int32)), vectors)
