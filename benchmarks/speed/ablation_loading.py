"""Slower ways to fetch a training batch, for the ablation: Parquet read again, values normalised as they are fetched.

In: an opened cache. Out: its training sequences once more, a row each, as Parquet and as Arrow (which is mapped, not read), with
values in their own units and normalised ones; and a callback by which a run fetches its batches from there.

Shapes: B sequences of a batch, T steps (padded), D features, E events of the batch.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning import Callback, LightningModule, Trainer

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.cache import SequenceData
from seqvae.data.dataset import SequenceSet
from seqvae.data.description import DataDescription

ROWS_PER_GROUP = 1_000
"""Rows of a group, far fewer than pyarrow's own million, so that little is read in vain."""

Row = dict[str, np.ndarray]
"""One sequence: `tokens`; `values` or `raw`; of events also `variables` and `gaps`."""


class Source(NamedTuple):
    """The origin of batches."""

    directory: Path
    from_parquet: bool
    """Whether they are read from Parquet, and not from the mapped file."""
    normalise: bool
    """Whether values are read in their own units, and each sequence is normalised when it is fetched."""


def write_source(data: SequenceData, directory: Path) -> None:
    """Write the training sequences; `data` must be opened without a length cap."""
    directory.mkdir(parents=True, exist_ok=True)
    stored, description = data.splits["train"], data.description
    bounds = [*range(0, len(stored), ROWS_PER_GROUP), len(stored)]
    groups = (table_of(stored.gather(np.arange(begin, end)), description) for begin, end in pairwise(bounds))
    first = next(groups)
    with (
        pq.ParquetWriter(directory / "train.parquet", first.schema) as parquet,
        pa.ipc.new_file(directory / "train.arrow", first.schema) as arrow,
    ):
        for table in (first, *groups):
            parquet.write_table(table)
            arrow.write_table(table)


def table_of(batch: Batch, description: DataDescription) -> pa.Table:
    """Return a batch as one row for each of its sequences."""
    lengths_B = batch.lengths_B.numpy()
    real_BT = is_real(batch.lengths_B)
    mean_D, std_D = moments(description)

    def lists(flat: np.ndarray, counts_B: np.ndarray) -> pa.Array:
        offsets_B1 = np.concatenate([[0], np.cumsum(counts_B)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets_B1), pa.array(flat))

    match batch:
        case TokenBatch():
            return pa.table({"tokens": lists(batch.tokens_BT[real_BT].numpy().astype(np.int32), lengths_B)})
        case VectorBatch():
            values_XD = np.where(batch.observed_BTD, batch.values_BTD, np.float32(np.nan))[real_BT]
            both = {"values": values_XD, "raw": values_XD * std_D + mean_D}
            return pa.table({name: lists(values.ravel(), lengths_B * len(mean_D)) for name, values in both.items()})
        case EventBatch():
            variables_E, events_B = batch.variables_E.numpy(), events_of(batch)
            values_E = np.where(batch.has_value_E, batch.values_E, np.float32(np.nan))
            by_event = {
                "variables": variables_E.astype(np.int32),
                "values": values_E,
                "raw": values_E * std_D[variables_E] + mean_D[variables_E],
            }
            columns = {name: lists(array, events_B) for name, array in by_event.items()}
            return pa.table(columns | {"gaps": lists(batch.gaps_BT[real_BT].numpy(), lengths_B)})


def moments(description: DataDescription) -> tuple[np.ndarray, np.ndarray]:
    return np.array(description.mean, np.float32), np.array(description.std, np.float32)


def is_real(lengths_B: torch.Tensor) -> torch.Tensor:
    """Return which steps of the padded batch belong to a sequence, (B, T)."""
    return torch.arange(int(lengths_B.max())) < lengths_B[:, None]


def events_of(batch: EventBatch) -> np.ndarray:
    """Return the number of events of each sequence, (B,)."""
    rows, steps = batch.gaps_BT.shape
    return np.bincount(batch.steps_E.numpy() // steps, minlength=rows)


class FetchFrom(Callback):
    """Callback that lets a run fetch its training batches from a source instead of the cache."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data: SequenceData = vars(trainer)["datamodule"].data  # set by Lightning, and declared nowhere
        data.splits["train"] = Fetched(data.splits["train"], data.description, self._source)


class Fetched(SequenceSet):
    """A split whose steps come from a source; the rest of a batch is the cache's, which costs next to nothing."""

    def __init__(self, stored: SequenceSet, description: DataDescription, source: Source) -> None:
        self.__dict__.update(stored.__getstate__())
        self._description, self._source = description, source
        self._file: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_file": None}

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch:
        batch = super().gather(sequences_B, pad_to)
        return filled(batch, self._rows(sequences_B)) if len(sequences_B) else batch

    def _rows(self, sequences_B: np.ndarray) -> list[Row]:
        """Read the sequences; each group is read once for all of the batch that stand in it."""
        raw = self._source.normalise
        values = "raw" if raw else "values"
        names = {"tokens": ["tokens"], "vectors": [values], "events": [values, "variables", "gaps"]}[self.kind]
        groups = {number: self._group(number, names) for number in np.unique(sequences_B // ROWS_PER_GROUP).tolist()}
        rows = []
        for sequence in sequences_B.tolist():
            group, row = groups[sequence // ROWS_PER_GROUP], sequence % ROWS_PER_GROUP
            rows.append({name: group.column(name)[row].values.to_numpy() for name in names})
        return [self._normalised(row) for row in rows] if raw else rows

    def _group(self, number: int, names: list[str]) -> Any:
        if self._source.from_parquet:
            self._file = self._file or pq.ParquetFile(self._source.directory / "train.parquet")
            return self._file.read_row_group(number, columns=names, use_threads=False)
        self._file = self._file or pa.ipc.open_file(pa.memory_map(str(self._source.directory / "train.arrow")))
        return self._file.get_batch(number)

    def _normalised(self, row: Row) -> Row:
        mean_D, std_D = moments(self._description)
        if "variables" in row:
            return row | {"values": (row["raw"] - mean_D[row["variables"]]) / std_D[row["variables"]]}
        values_TD = row["raw"].reshape(-1, len(mean_D))
        return row | {"values": ((values_TD - mean_D) / std_D).ravel()}


def filled(batch: Batch, rows: list[Row]) -> Batch:
    """Return the batch with the values of the rows, as many steps of each as the batch has of its sequence."""
    lengths_B = batch.lengths_B.numpy()
    real_BT = is_real(batch.lengths_B)

    def joined(name: str, counts_B: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([row[name][:count] for row, count in zip(rows, counts_B, strict=True)]))

    match batch:
        case TokenBatch():
            tokens_BT = torch.zeros_like(batch.tokens_BT)
            tokens_BT[:, : real_BT.shape[1]][real_BT] = joined("tokens", lengths_B).long()
            return batch._replace(tokens_BT=tokens_BT)
        case VectorBatch():
            width = batch.values_BTD.shape[2]
            values_BTD = torch.full_like(batch.values_BTD, torch.nan)
            values_BTD[:, : real_BT.shape[1]][real_BT] = joined("values", lengths_B * width).view(-1, width)
            return batch._replace(values_BTD=values_BTD.nan_to_num(0.0), observed_BTD=~values_BTD.isnan())
        case EventBatch():
            gaps_BT, events_B = torch.zeros_like(batch.gaps_BT), events_of(batch)
            gaps_BT[:, : real_BT.shape[1]][real_BT] = joined("gaps", lengths_B)
            values_E = joined("values", events_B)
            return batch._replace(
                gaps_BT=gaps_BT,
                variables_E=joined("variables", events_B).long(),
                values_E=values_E.nan_to_num(0.0),
                has_value_E=~values_E.isnan(),
            )
