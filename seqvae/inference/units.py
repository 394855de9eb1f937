"""A batch -> a table in the data's own units: text as text, values with their scale, times added up.

Tokens: a row a sequence, `text` or `tokens`. Vectors: a row a step, with a column a feature. Events: a row an event, `time,
variable, value`. The first column, SEQUENCE, says which sequence of the batch's split a row is of.

Shapes: B sequences, T steps, D features, E events, R rows.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.description import DataDescription
from seqvae.data.records import speaker
from seqvae.inference.streaming import SEQUENCE
from seqvae.models.functional import real_steps

RESERVED = ("id", "window", "split", "place", "share", "step")
"""Columns of ours."""


def own_units(batch: Batch, description: DataDescription) -> pa.Table:
    batch = move_data_to_device(batch, torch.device("cpu"))
    match batch:
        case TokenBatch():
            return token_rows(batch, description)
        case VectorBatch():
            values_BTD = batch.values_BTD.masked_fill(~batch.observed_BTD, torch.nan)
            names = [name for (name,) in free_names(description.names, ("",))]
            return step_rows(batch, dict(zip(names, scaled(values_BTD, description).unbind(dim=2), strict=True)))
        case EventBatch():
            return event_rows(batch, description)


def free_names(names: Sequence[str], endings: Sequence[str]) -> list[tuple[str, ...]]:
    """What columns are called that belong to features: by their names, unless something else is called so already.

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


def token_rows(batch: TokenBatch, description: DataDescription) -> pa.Table:
    speak, lengths = speaker(description), batch.lengths_B.tolist()
    said = [speak(ids[:length]) for ids, length in zip(batch.tokens_BT.tolist(), lengths, strict=True)]
    name = "tokens" if description.tokenizer is None else "text"
    kind = pa.list_(pa.int64()) if description.tokenizer is None else pa.string()
    return pa.table({SEQUENCE: _numbers(batch.sequences_B), name: pa.array(said, kind)})


def step_rows(batch: VectorBatch, columns_BT: dict[str, Tensor]) -> pa.Table:
    """A row for each real step, with its number and these columns."""
    real_BT = real_steps(batch.lengths_B, batch.values_BTD.shape[1])
    sequence_BT, step_BT = torch.broadcast_tensors(
        batch.sequences_B[:, None], torch.arange(real_BT.shape[1], device=real_BT.device)
    )
    place = {SEQUENCE: _numbers(sequence_BT[real_BT]), "step": _numbers(step_BT[real_BT])}
    return pa.table(place | {name: _numbers(column_BT[real_BT]) for name, column_BT in columns_BT.items()})


def event_rows(batch: EventBatch, description: DataDescription) -> pa.Table:
    """A value is null where an event has none."""
    mean_V, std_V = moments(description, batch.values_E.device)
    values_E = batch.values_E.double() * std_V[batch.variables_E] + mean_V[batch.variables_E]
    steps = batch.gaps_BT.shape[1]
    return pa.table(
        {
            SEQUENCE: _numbers(batch.sequences_B[batch.steps_E // steps]),
            "time": _numbers(times(batch).flatten()[batch.steps_E]),
            "variable": variables(batch.variables_E, description),
            "value": pa.array(values_E.cpu().numpy(), mask=~batch.has_value_E.cpu().numpy()),
        }
    )


def variables(variables_R: Tensor, description: DataDescription) -> pa.Array:
    return pa.array(description.names, pa.string()).take(_numbers(variables_R))


def times(batch: EventBatch) -> Tensor:
    """(B, T), since a sequence's first step."""
    return batch.gaps_BT.double().cumsum(dim=1)


def scaled(values_BTD: Tensor, description: DataDescription) -> Tensor:
    mean_D, std_D = moments(description, values_BTD.device)
    return values_BTD.double() * std_D + mean_D


def moments(description: DataDescription, device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(each, dtype=torch.float64, device=device) for each in (description.mean, description.std))
    return mean, std


def _numbers(tensor: Tensor) -> pa.Array:
    numbers: np.ndarray = tensor.cpu().numpy()
    return pa.array(numbers)
