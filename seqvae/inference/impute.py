"""What is missing in vectors and events, filled by what a trained model expects, with how sure it is.

In: a trained model and data. Out: tables in the data's own units. Vectors: a row a step, each feature beside its deviation (0: the
value was there). Events: a row for each variable at each time, `time, variable, value, std, measured`.

Shapes: B sequences, T steps, D features, V variables, R rows.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from lightning.fabric.utilities import move_data_to_device

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.inference.model import Trained, at_work
from seqvae.inference.streaming import SEQUENCE, rows_of
from seqvae.inference.units import free_names, moments, scaled, step_rows, times
from seqvae.models.functional import real_steps
from seqvae.models.imputation import Imputed, impute

CPU = torch.device("cpu")


def imputed(
    trained: Trained,
    data: SequenceDataModule,
    splits: Sequence[str],
    *,
    draws: int,
    variables: Sequence[str] | None,
    seed: int,
) -> Iterator[pa.Table]:
    """`variables`: only these features or variables."""
    description = trained.description
    if description.kind == "tokens":
        raise UsageError("impute is for vectors and events: tokens have no missing values")
    chosen = chosen_names(description, variables)
    generator = torch.Generator(trained.device).manual_seed(seed)

    def compute(batch: Batch) -> pa.Table:
        assert not isinstance(batch, TokenBatch)
        filled = impute(trained.network, batch, draws=draws, generator=generator)
        filled = move_data_to_device(filled, CPU)
        match batch:
            case VectorBatch():
                return filled_steps(move_data_to_device(batch, CPU), filled, description, chosen)
            case EventBatch():
                return filled_sets(move_data_to_device(batch, CPU), filled, description, chosen)

    with at_work(trained):
        for split in splits:
            yield from rows_of(data, split, trained, compute, cells_a_step=6 * len(chosen))


def chosen_names(description: DataDescription, asked: Sequence[str] | None) -> list[int]:
    """Places of the features or variables to fill: all of which training saw values, or those that were asked for."""
    usable = [place for place, is_valued in enumerate(description.valued) if is_valued]
    if asked is None:
        return usable
    names = {description.names[place]: place for place in usable}
    for name in asked:
        if name not in names:
            shown = ", ".join(list(names)[:20])
            raise UsageError(f"--variables: {name!r} is none that training saw values of; there are {shown}")
    return [names[name] for name in asked]


def filled_steps(batch: VectorBatch, filled: Imputed, description: DataDescription, chosen: Sequence[int]) -> pa.Table:
    values_BTD, std_D = scaled(filled.mean_BTD, description), torch.tensor(description.std, dtype=torch.float64)
    names = free_names([description.names[place] for place in chosen], ("", "_std"))
    columns = {}
    for place, (value, deviation) in zip(chosen, names, strict=True):
        columns[value] = values_BTD[..., place]
        columns[deviation] = filled.std_BTD[..., place].double() * std_D[place]
    return step_rows(batch, columns)


def filled_sets(batch: EventBatch, filled: Imputed, description: DataDescription, chosen: Sequence[int]) -> pa.Table:
    mean_V, std_V = (each[list(chosen)] for each in moments(description, filled.mean_BTD.device))
    real_BT = real_steps(batch.lengths_B, batch.gaps_BT.shape[1])
    rows = int(real_BT.sum())

    def each(table_BTV: torch.Tensor) -> np.ndarray:
        flat: np.ndarray = table_BTV[..., list(chosen)][real_BT].flatten().numpy()
        return flat

    sequence_BT = batch.sequences_B[:, None].expand_as(real_BT)
    names = pa.array([description.names[place] for place in chosen], pa.string())
    return pa.table(
        {
            SEQUENCE: np.repeat(sequence_BT[real_BT].numpy(), len(chosen)),
            "time": np.repeat(times(batch)[real_BT].numpy(), len(chosen)),
            "variable": names.take(pa.array(np.tile(np.arange(len(chosen)), rows))),
            "value": each(filled.mean_BTD.double()) * np.tile(std_V.numpy(), rows) + np.tile(mean_V.numpy(), rows),
            "std": each(filled.std_BTD.double()) * np.tile(std_V.numpy(), rows),
            "measured": each(filled.observed_BTD),
        }
    )
