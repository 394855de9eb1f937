"""Small Parquet data sets for tests, and what an opened split holds as plain Python."""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.data.batch import EventBatch, TokenBatch, VectorBatch
from seqvae.data.cache import SequenceData
from seqvae.data.dataset import SequenceSet
from seqvae.data.description import DataDescription

Load = Callable[..., SequenceData]
"""`load(data_dir, in_memory=False, max_sequence_length=..., kind=..., ...)`: the fixture of that name."""


def write(path: Path, columns: Mapping[str, Any] | pa.Table, **options: Any) -> Path:
    """Write one file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(dict(columns)), path, **options)
    return path


def write_splits(directory: Path, **splits: Mapping[str, Any] | pa.Table) -> Path:
    """directory/train.parquet, directory/valid.parquet, ..."""
    for split, columns in splits.items():
        write(directory / f"{split}.parquet", columns)
    return directory


def events_of(*sequences: int) -> dict[str, list]:
    """Return sequences of two steps each: hr 60 and bp 120, and five minutes later hr 70."""
    number = len(sequences)
    return {
        "ts_id": [one for one in sequences for _ in range(3)],
        "minute": [0.0, 0.0, 5.0] * number,
        "variable": ["hr", "bp", "hr"] * number,
        "value": [60.0, 120.0, 70.0] * number,
    }


TIMES = pa.array([None, dt.datetime(2020, 1, 1, 8), dt.datetime(2020, 1, 1, 8), dt.datetime(2020, 1, 1, 9)])
MEDS = {
    "subject_id": [1, 1, 1, 1],
    "time": TIMES,
    "code": ["BORN", "PULSE", "VISIT", "PULSE"],
    "numeric_value": pa.array([None, 80.0, None, 90.0], pa.float32()),
    "text_value": pa.array([None, None, "x", None], pa.string()),
}


def meds_table(*subjects: int) -> pa.Table:
    return pa.concat_tables([pa.table({**MEDS, "subject_id": [subject] * 4}) for subject in subjects])


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Flip a bit of a file; negative positions count from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def ids(split: SequenceSet) -> list[int | str]:
    return split.ids(np.arange(len(split)))


def by_id(split: SequenceSet, values: list[Any]) -> dict[int | str, Any]:
    return dict(zip(ids(split), values, strict=True))


def tokens(split: SequenceSet) -> list[list[int]]:
    """Return the tokens of each sequence."""
    batch = split.gather(np.arange(len(split)))
    assert isinstance(batch, TokenBatch)
    return [row[:length].tolist() for row, length in zip(batch.tokens_BT, batch.lengths_B, strict=True)]


def texts(split: SequenceSet, about: DataDescription, between: str = "") -> list[str]:
    """Return the text of each sequence."""
    return [between.join(about.symbols[token] for token in sequence) for sequence in tokens(split)]


def vectors(split: SequenceSet, about: DataDescription, digits: int = 4) -> list[list[list[float | None]]]:
    """Return the vectors of each sequence in their own units, None where missing."""
    batch = split.gather(np.arange(len(split)))
    assert isinstance(batch, VectorBatch)
    own_BTD = batch.values_BTD.double().numpy() * np.array(about.std) + np.array(about.mean)
    return [
        [
            [round(float(v), digits) if there else None for v, there in zip(step, observed, strict=True)]
            for step, observed in zip(own_TD[:length], observed_TD[:length], strict=True)
        ]
        for own_TD, observed_TD, length in zip(own_BTD, batch.observed_BTD, batch.lengths_B.tolist(), strict=True)
    ]


Event = tuple[str, float | None]


def events(
    split: SequenceSet, about: DataDescription, digits: int = 3, only: Sequence[int] | None = None
) -> list[list[tuple[float, list[Event]]]]:
    """Return the steps of each sequence: the gap before, and the events as (variable, value in its own units or None)."""
    batch = split.gather(np.arange(len(split)) if only is None else np.array(only))
    assert isinstance(batch, EventBatch)
    width = batch.gaps_BT.shape[1]
    sequences: list[list[tuple[float, list[Event]]]] = [
        [(round(float(gap), digits), []) for gap in gaps_T[:length]]
        for gaps_T, length in zip(batch.gaps_BT, batch.lengths_B, strict=True)
    ]
    rows = zip(batch.variables_E, batch.values_E, batch.has_value_E, batch.steps_E, strict=True)
    for variable, value, has_value, step in rows:
        own = round(float(value) * about.std[variable] + about.mean[variable], digits)
        sequences[step // width][step % width][1].append((about.names[variable], own if has_value else None))
    for sequence in sequences:
        for _, step_events in sequence:
            step_events.sort()
    return sequences


def labels(split: SequenceSet, about: DataDescription) -> list[str | None]:
    labels_B = split.gather(np.arange(len(split))).labels_B
    assert labels_B is not None
    return [about.classes[label] if label >= 0 else None for label in labels_B.tolist()]
