"""JapaneseVowels out of the sktime package -> train.parquet, valid.parquet, test.parquet.

One row an utterance: `id`, `frames` (of 12 coefficients each) and `label`, the speaker. The published split stands: its 270
training utterances train; of its 370 test utterances every second one validates, so that both halves hold all speakers.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from examples.download import Wheel, fetch, members
from examples.parquet import write_once
from examples.spoken_vowels.ts_files import Series, read_ts

WHEEL = Wheel("sktime", "0.39.0", "4fa722866336d7f43f82c9239cd2c9d3a89aab553aa5c59ce4bfbc212d4d56bd")
MEMBERS = [f"sktime/datasets/data/JapaneseVowels/JapaneseVowels_{side}.ts" for side in ("TRAIN", "TEST")]
DIMENSIONS = 12


def make_parquet(downloads: Path, target: Path) -> dict[str, int]:
    """How many utterances each split has. The wheel is looked for in `downloads`, and put there."""
    texts = members(fetch(WHEEL, downloads), MEMBERS)
    train, test = (read_ts(text.decode(), name) for text, name in zip(texts, MEMBERS, strict=True))
    splits = {"train": train, "valid": test[1::2], "test": test[::2]}
    first_id = 0
    for split, utterances in splits.items():
        write_once(target / f"{split}.parquet", table_of(utterances, first_id))
        first_id += len(utterances)
    return {split: len(utterances) for split, utterances in splits.items()}


def table_of(utterances: Sequence[Series], first_id: int) -> pa.Table:
    """Ids go on from split to split, so that an id names one utterance of all."""
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
