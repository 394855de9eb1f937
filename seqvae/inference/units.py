"""A batch as a table in the data's own units: text as text, values in their scale, times added up.

Tokens: a row per sequence, `text` or `tokens`. Vectors: a row per step, a column per feature. Events: a row per event, `time,
variable, value`. The first column, SEQUENCE, holds the number of the sequence in the batch's split.

Shapes: B sequences, T steps, D features, E events, R rows.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch, speaker
from seqvae.data.description import DataDescription
from seqvae.inference.streaming import SEQUENCE
from seqvae.models.likelihoods import real_steps

RESERVED = ("id", "window", "split", "place", "share", "step")
"""Names of our own columns."""


def own_units(batch: Batch, description: DataDescription) -> pa.Table:
    """Return the rows of a batch in the units of the data; what was not observed is NaN or null."""
    batch = move_data_to_device(batch, torch.device("cpu"))
    match batch:
        case TokenBatch():
            decode, lengths = speaker(description), batch.lengths_B.tolist()
            texts = [decode(ids[:length]) for ids, length in zip(batch.tokens_BT.tolist(), lengths, strict=True)]
            name, kind = (
                ("text", pa.string()) if description.tokenizer is not None else ("tokens", pa.list_(pa.int64()))
            )
            return pa.table({SEQUENCE: array(batch.sequences_B), name: pa.array(texts, kind)})
        case VectorBatch():
            mean_D, std_D = moments(description)
            values_BTD = batch.values_BTD.masked_fill(~batch.observed_BTD, torch.nan).double() * std_D + mean_D
            names = [name for (name,) in free_names(description.names, ("",))]
            return step_rows(batch, dict(zip(names, values_BTD.unbind(dim=2), strict=True)))
        case EventBatch():
            mean_V, std_V = moments(description)
            values_E = batch.values_E.double() * std_V[batch.variables_E] + mean_V[batch.variables_E]
            return pa.table(
                {
                    SEQUENCE: array(batch.sequences_B[batch.steps_E // batch.gaps_BT.shape[1]]),
                    "time": array(times(batch).flatten()[batch.steps_E]),
                    "variable": pa.array(description.names, pa.string()).take(array(batch.variables_E)),
                    "value": pa.array(values_E.numpy(), mask=~batch.has_value_E.numpy()),
                }
            )


def free_names(names: Sequence[str], endings: Sequence[str]) -> list[tuple[str, ...]]:
    """Name the columns of each feature after it, with a `_` behind it where that name is taken.

    >>> free_names(["step", "pulse", "pulse_std"], ("", "_std"))
    [('step_', 'step__std'), ('pulse', 'pulse_std'), ('pulse_std_', 'pulse_std__std')]
    """
    taken = set(RESERVED)
    found = []
    for name in names:
        while any(name + ending in taken for ending in endings):
            name += "_"
        taken |= {name + ending for ending in endings}
        found.append(tuple(name + ending for ending in endings))
    return found


def step_rows(batch: VectorBatch, columns_BT: dict[str, Tensor]) -> pa.Table:
    """Return a row for each real step, with its number and these columns."""
    real_BT = real_steps(batch.lengths_B, batch.values_BTD.shape[1])
    sequence_BT, step_BT = torch.broadcast_tensors(batch.sequences_B[:, None], torch.arange(real_BT.shape[1]))
    columns = {SEQUENCE: sequence_BT, "step": step_BT} | columns_BT
    return pa.table({name: array(column_BT[real_BT]) for name, column_BT in columns.items()})


def times(batch: EventBatch) -> Tensor:
    """Return the time of each step since the first one of its sequence, (B, T)."""
    return batch.gaps_BT.double().cumsum(dim=1)


def moments(description: DataDescription) -> tuple[Tensor, Tensor]:
    """Return what normalised values are scaled back by: means and standard deviations, float64."""
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (description.mean, description.std))
    return mean, std


def array(tensor: Tensor) -> pa.Array:
    numbers: np.ndarray = tensor.numpy()
    return pa.array(numbers)
