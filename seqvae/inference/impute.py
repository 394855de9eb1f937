"""Missing values of vectors and events, filled by what a trained model expects, with how sure it is.

In: a trained model and data. Out: tables in the data's own units. Vectors: a row per step, each feature beside its deviation (0:
the value was there). Events: a row for each variable at each time, `time, variable, value, std, measured`.

Shapes: B sequences, T steps, D features, V variables, R rows.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from lightning.fabric.utilities import move_data_to_device

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.inference.streaming import SEQUENCE, rows_of
from seqvae.inference.units import free_names, moments, step_rows, times
from seqvae.models.imputation import Imputed, impute
from seqvae.models.likelihoods import real_steps

if TYPE_CHECKING:
    from seqvae.inference.model import Model


def imputed(
    model: "Model",
    data: SequenceDataModule,
    splits: Sequence[str],
    *,
    draws: int,
    variables: Sequence[str] | None,
    seed: int,
) -> Iterator[pa.Table]:
    """Yield the data with missing values filled; `variables`: only these features or variables."""
    description = model.description
    if description.kind == "tokens":
        raise UsageError("impute is for vectors and events: tokens have no missing values")
    valued = {name: place for place, name in enumerate(description.names) if description.valued[place]}
    for name in variables or ():
        if name not in valued:
            shown = ", ".join(list(valued)[:20])
            raise UsageError(f"--variables: {name!r} is none that training saw values of; there are {shown}")
    places = list(valued.values()) if variables is None else [valued[name] for name in variables]
    generator = torch.Generator(model.device).manual_seed(seed)

    def compute(batch: Batch) -> pa.Table:
        assert not isinstance(batch, TokenBatch)
        filled = impute(model.network, batch, draws=draws, generator=generator)
        batch, filled = (move_data_to_device(each, torch.device("cpu")) for each in (batch, filled))
        if isinstance(batch, VectorBatch):
            return _vector_rows(batch, filled, description, places)
        assert isinstance(batch, EventBatch)
        return _event_rows(batch, filled, description, places)

    return rows_of(data, splits, model, compute, cells_per_step=6 * len(places))


def _vector_rows(batch: VectorBatch, filled: Imputed, description: DataDescription, places: list[int]) -> pa.Table:
    mean_D, std_D = moments(description)
    values_BTD = filled.mean_BTD.double() * std_D + mean_D
    names = free_names([description.names[place] for place in places], ("", "_std"))
    columns = {}
    for place, (value, deviation) in zip(places, names, strict=True):
        columns[value] = values_BTD[..., place]
        columns[deviation] = filled.std_BTD[..., place].double() * std_D[place]
    return step_rows(batch, columns)


def _event_rows(batch: EventBatch, filled: Imputed, description: DataDescription, places: list[int]) -> pa.Table:
    mean_V, std_V = (each[places] for each in moments(description))
    real_BT = real_steps(batch.lengths_B, batch.gaps_BT.shape[1])
    rows = int(real_BT.sum())
    mean_RV, deviation_RV, observed_RV = (table_BTV[..., places][real_BT] for table_BTV in filled)
    names = pa.array([description.names[place] for place in places], pa.string())
    sequence_BT = batch.sequences_B[:, None].expand_as(real_BT)
    return pa.table(
        {
            SEQUENCE: np.repeat(sequence_BT[real_BT].numpy(), len(places)),
            "time": np.repeat(times(batch)[real_BT].numpy(), len(places)),
            "variable": names.take(pa.array(np.tile(np.arange(len(places)), rows))),
            "value": (mean_RV.double() * std_V + mean_V).flatten().numpy(),
            "std": (deviation_RV.double() * std_V).flatten().numpy(),
            "measured": observed_RV.flatten().numpy(),
        }
    )
