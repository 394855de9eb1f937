"""JapaneseVowels out of the sktime package as train.parquet, valid.parquet, test.parquet.

One row per utterance: `id`, `frames` (of 12 coefficients each) and `label`, the speaker. The published split stands: its 270
training utterances train; of its 370 test utterances every second one validates, so that both halves hold all speakers.

In the .ts format of time series archives, lines with # are remarks and lines with @ declare what follows. Below @data a line is a
series: its dimensions, separated by colons, each a list of numbers, and at the end its class. Time stamps and missing values,
which the vowels do not have, are refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from examples.shared import Wheel, fetch, members, write_once
from seqvae.errors import DataError

WHEEL = Wheel("sktime", "0.39.0", "4fa722866336d7f43f82c9239cd2c9d3a89aab553aa5c59ce4bfbc212d4d56bd")
MEMBERS = [f"sktime/datasets/data/JapaneseVowels/JapaneseVowels_{side}.ts" for side in ("TRAIN", "TEST")]
DIMENSIONS = 12


class Series(NamedTuple):
    """One utterance and its class."""

    values_SD: np.ndarray
    """S steps of D dimensions, float32."""
    label: str


def make_parquet(downloads: Path, target: Path) -> dict[str, int]:
    """Write the splits, and return their sizes; the wheel is in `downloads`, or downloaded there."""
    texts = members(fetch(WHEEL, downloads), MEMBERS)
    train, test = (read_ts(text.decode(), name) for text, name in zip(texts, MEMBERS, strict=True))
    splits = {"train": train, "valid": test[1::2], "test": test[::2]}
    first_id = 0
    for split, utterances in splits.items():
        write_once(target / f"{split}.parquet", table_of(utterances, first_id))
        first_id += len(utterances)
    return {split: len(utterances) for split, utterances in splits.items()}


def table_of(utterances: Sequence[Series], first_id: int) -> pa.Table:
    """Return utterances as a table; ids go on from split to split, so that an id names one utterance of all."""
    values = np.concatenate([utterance.values_SD for utterance in utterances])
    ends = np.cumsum([0, *(len(utterance.values_SD) for utterance in utterances)])
    frames = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), DIMENSIONS)
    return pa.table(
        {
            "id": np.arange(first_id, first_id + len(utterances)),
            "frames": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), frames),
            "label": pa.array([int(utterance.label) for utterance in utterances], pa.int32()),
        }
    )


# --- The .ts format -----------------------------------------------------------------------------------------------------


def read_ts(text: str, name: str) -> list[Series]:
    """Read the text of a file, whose name is for messages.

    >>> [series] = read_ts("@data\\n1,2,3:4,5,6:nine", "a.ts")
    >>> series.values_SD.tolist(), series.label
    ([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], 'nine')
    """
    lines = text.splitlines()
    begins = next((number for number, line in enumerate(lines) if line.strip().lower() == "@data"), None)
    if begins is None:
        raise DataError(f"{name}: no line @data, so this is no .ts file")
    declared = dict(line.lower().split(maxsplit=1) for line in lines[:begins] if line.startswith("@") and " " in line)
    for what in ("@timestamps", "@missing"):
        if declared.get(what, "false") != "false":
            raise DataError(
                f"{name}: {what} {declared[what]}, and this reader takes neither time stamps nor missing values"
            )
    numbered = enumerate(lines[begins + 1 :], start=begins + 2)
    return [_series_of(line, f"{name}, line {number}") for number, line in numbered if line.strip()]


def _series_of(line: str, place: str) -> Series:
    *dimensions, label = line.strip().split(":")
    lengths = {dimension.count(",") + 1 for dimension in dimensions}
    if len(lengths) != 1:
        raise DataError(f"{place}: dimensions of {sorted(lengths)} steps, and all should be of one length")
    try:
        values_DS = np.array([dimension.split(",") for dimension in dimensions], dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{place}: {error}, and a dimension should be numbers with commas between them") from None
    return Series(np.ascontiguousarray(values_DS.T), label)
