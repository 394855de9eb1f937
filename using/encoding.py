"""Every sequence's place in the latent space, and how well the model knows it.

In: a trained model and data. Out: tables of `id, split, steps, mean, variance, nll, rate`, in the order of the data.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dataset import SequenceDataModule
from monitors.decoder_probe import undisturbed
from monitors.formulas import gaussian_kl
from sequences.batches import Batch
from using.streaming import Columns, rows_of
from using.trained import Trained

ABOUT = {
    "mean, variance": "of the posterior q(z | x), a Gaussian; with a latent for each step, a list for each",
    "nll": "-log p(x | z) at the posterior's mean, in nats",
    "rate": "KL from the prior to the posterior, in nats; nll + rate is the outlier score: the higher, the odder",
}


def encode(trained: Trained, data: SequenceDataModule, splits: list[str]) -> Iterator[pa.Table]:
    def compute(batch: Batch) -> Columns:
        return columns_of(trained, batch)

    autocast = torch.autocast(trained.device.type, trained.autocast, enabled=trained.autocast is not None)
    with undisturbed(trained.network, trained.device, autocast):
        for split in splits:
            for table in rows_of(data, split, trained, compute):
                yield table.add_column(1, "split", pa.array([split] * table.num_rows, pa.string()))


def columns_of(trained: Trained, batch: Batch) -> Columns:
    output = trained.network.at_mean(batch)
    mask = output.posterior_mask
    rate = gaussian_kl(output.posterior_mean, output.posterior_logvar).sum(dim=-1) * mask
    rate_B = rate.sum(dim=1) if rate.dim() == 2 else rate
    return {
        "steps": pa.array(output.steps_B.cpu().numpy().astype(np.int32)),
        "mean": _lists(output.posterior_mean, mask),
        "variance": _lists(output.posterior_logvar.exp(), mask),
        "nll": pa.array(output.nll_B.float().cpu().numpy()),
        "rate": pa.array(rate_B.float().cpu().numpy()),
    }


def _lists(numbers: Tensor, mask: Tensor) -> pa.Array:
    """(B, Z) -> a list of Z numbers a sequence; (B, S, Z) -> a list of such lists, one for each real step."""
    size = numbers.shape[-1]
    flat = pa.array(numbers[mask].flatten().float().cpu().numpy())
    vectors = pa.FixedSizeListArray.from_arrays(flat, size)
    if numbers.dim() == 2:
        return vectors
    ends_B = mask.sum(dim=1).cumsum(dim=0).cpu().numpy()
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends_B]).astype(np.int32)), vectors)
