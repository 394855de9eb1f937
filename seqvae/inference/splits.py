"""One split, or several of them taken together: `--split valid+test`.

In: opened data and what was asked for. Out: names of splits, and batches that go through all of them.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from seqvae.data.batches import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.exit_codes import UsageError
from seqvae.inference.data import chosen_split
from seqvae.inference.evaluation import batches_of


def chosen_splits(data: SequenceDataModule, asked: str | None) -> tuple[str, ...]:
    """The split that was asked for, or those with a + between them; else the one that training did not see."""
    names = tuple(chosen_split(data, name) for name in (asked.split("+") if asked is not None else [None]))
    if len(set(names)) < len(names):
        raise UsageError(f"--split {asked}: a split stands there twice")
    return names


def sequences_in(data: SequenceDataModule, splits: Sequence[str]) -> int:
    return sum(len(data.split(split)) for split in splits)


def joined_batches(
    data: SequenceDataModule, splits: Sequence[str], *, sequences: int | None = None, seed: int = 0
) -> Iterator[tuple[str, Batch]]:
    """Batches and the split each is of; `sequences` at random, of each split in proportion to its size."""
    for split, share in zip(splits, shares(data, splits, sequences), strict=True):
        if share:
            yield from ((split, batch) for batch in batches_of(data, split, sequences=share, seed=seed))


def shares(data: SequenceDataModule, splits: Sequence[str], sequences: int | None) -> list[int]:
    """How many sequences of each split."""
    ends = np.cumsum([len(data.split(split)) for split in splits])
    if sequences is not None and sequences < ends[-1]:
        ends = np.round(ends * sequences / ends[-1])
    return [int(share) for share in np.diff(ends, prepend=0)]
