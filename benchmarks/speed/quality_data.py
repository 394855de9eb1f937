"""What time_to_quality trains on, as Parquet with a training and a validation file: tokens of a known process, and molecules.

Shapes: N sequences.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.data.demo.processes import LengthLaw, TokenTruth

TRAINED_ON, VALIDATED_ON = 20_000, 64
"""Sequences. Few to validate on, as that is done often, and on the same ones by all."""
MEAN_LENGTH = 75.0
MOLECULES_VALIDATED_ON = 256


def write_demo_tokens(
    directory: Path, trained_on: int = TRAINED_ON, validated_on: int = VALIDATED_ON, mean_length: float = MEAN_LENGTH
) -> Path:
    """The demo process of tokens with the log-normal lengths of the other benchmarks: it can be learnt, unlike noise."""
    truth = TokenTruth.draw(np.random.default_rng(0), LengthLaw(mean=mean_length))
    for number, (split, count) in enumerate({"train": trained_on, "valid": validated_on}.items(), start=1):
        sample = truth.sample(count, np.random.default_rng([0, number]))
        lists = pa.ListArray.from_arrays(pa.array(sample.offsets_N1, pa.int32()), pa.array(sample.tokens_S))
        write_split(directory, split, "tokens", lists)
    return directory


def write_molecules(directory: Path, trained_on: Sequence[str], validated_on: Sequence[str]) -> Path:
    """A text column, to be cut into characters."""
    write_split(directory, "train", "smiles", pa.array(trained_on))
    write_split(directory, "valid", "smiles", pa.array(validated_on))
    return directory


def write_split(directory: Path, split: str, column: str, sequences_N: pa.Array) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: sequences_N}), directory / f"{split}.parquet")
