"""Every sequence's place in the latent space, and how well the model knows it.

In: a trained model and data. Out: tables of `id, split, steps, mean, variance, nll, rate`, in the order of the data.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from torch import Tensor

from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.inference.model import Trained, at_work
from seqvae.inference.streaming import SEQUENCE, rows_of
from seqvae.models.vae import VAEOutput
from seqvae.monitors.formulas import gaussian_kl


def encode(trained: Trained, data: SequenceDataModule, splits: Sequence[str]) -> Iterator[pa.Table]:
    def compute(batch: Batch) -> pa.Table:
        return encoded(trained.network.at_mean(batch), batch)

    # A latent for each step is two lists a step; else they are few beside the sequence.
    cells = 2 * trained.settings["latent_size"] if trained.network.latent_per_step else 1
    with at_work(trained):
        for split in splits:
            yield from rows_of(data, split, trained, compute, cells_a_step=cells)


def encoded(output: VAEOutput, batch: Batch) -> pa.Table:
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


def _lists(numbers: Tensor, mask: Tensor) -> pa.Array:
    """(B, Z) -> a list of Z numbers a sequence; (B, S, Z) -> a list of such lists, one for each real step."""
    size = numbers.shape[-1]
    flat = pa.array(numbers[mask].flatten().float().cpu().numpy())
    vectors = pa.FixedSizeListArray.from_arrays(flat, size)
    if numbers.dim() == 2:
        return vectors
    ends_B = mask.sum(dim=1).cumsum(dim=0).cpu().numpy()
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends_B]).astype(np.int32)), vectors)
