"""Which split a sequence belongs to: by its folder, by a MEDS table, or by a hash of its id; and that it is in one only."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import Encoded
from seqvae.data.building.split_files import SplitFiles
from seqvae.data.description import FittedPreprocessing
from seqvae.data.hashing import distinct, hash_ids
from seqvae.data.parquet.discovery import POOL, DataFiles
from seqvae.data.parquet.reader import Block, BlockReader
from seqvae.data.parquet.schema import Layout
from seqvae.data.parquet.side_tables import ids_as_text, read_subject_splits
from seqvae.errors import DataError
from seqvae.text import counted

Assignment = Callable[[str, Block, Encoded], dict[str, np.ndarray]]
"""A group of files (a split or the pool), a block, its sequences -> for each split, which of them are its own."""


def make_assignment(
    data: DataFiles,
    layout: Layout,
    reader: BlockReader,
    source: SourceSettings,
    learnt: FittedPreprocessing | None = None,
) -> Assignment:
    subjects = read_subject_splits(data.subject_splits) if data.subject_splits else None
    fractions = shares_by_hash(data, source, learnt)

    def assign(group: str, block: Block, encoded: Encoded) -> dict[str, np.ndarray]:
        rows_S = encoded.first_rows_S
        if subjects is not None:
            return _by_table(block, rows_S, subjects, reader)
        if group not in (POOL, "train") or not fractions:
            return {group: np.ones(len(rows_S), bool)}
        if layout.form == "rows" and layout.id is None:
            return _by_hash(_hash_places(block, rows_S, reader.files), fractions)
        return _by_hash(hash_ids(block.column("id").take(pa.array(rows_S))), fractions)

    return assign


def shares_by_hash(
    data: DataFiles, source: SourceSettings, learnt: FittedPreprocessing | None = None
) -> dict[str, float]:
    """The splits that the directory lacks, and the share of the training sequences (or the pool) that each gets."""
    if data.subject_splits or (learnt is not None and learnt.pools_are_whole):
        return {}
    wanted = {"valid": source.validation_fraction, "test": source.test_fraction}
    return {split: share for split, share in wanted.items() if share and split not in data.by_split}


def _by_hash(hashes_S: np.ndarray, fractions: Mapping[str, float]) -> dict[str, np.ndarray]:
    """A sequence's side depends on its id alone, so it never changes."""
    place_S = hashes_S / 2.0**64
    sides, start = {}, 0.0
    for split, fraction in fractions.items():
        sides[split] = (place_S >= start) & (place_S < start + fraction)
        start += fraction
    return {"train": place_S >= start} | sides


def _hash_places(block: Block, rows_S: np.ndarray, files: Sequence[Path]) -> np.ndarray:
    """Without ids the place stands for one: the name of the file and the row in it, which more files do not change."""
    names = hash_ids(pa.array([path.name for path in files], pa.large_string()))
    return hash_ids(pa.array((names[block.files_R[rows_S]] ^ hash_ids(pa.array(block.rows_R[rows_S]))).view(np.int64)))


def _by_table(block: Block, rows_S: np.ndarray, subjects: pd.Series, reader: BlockReader) -> dict[str, np.ndarray]:
    names = ids_as_text(block.column("id").take(pa.array(rows_S)).to_numpy(zero_copy_only=False))
    split_S = subjects.reindex(names).to_numpy(dtype=object)
    unknown = np.flatnonzero(pd.isna(split_S))
    if len(unknown):
        raise DataError(
            f"{reader.where(block, int(rows_S[unknown[0]]))}: subject {names[unknown[0]]} does not stand in "
            f"metadata/subject_splits.parquet. Add it there."
        )
    return {split: split_S == split for split in ("train", "valid", "test")}


def refuse_missing_splits(
    splits: Mapping[str, SplitFiles], data: DataFiles, layout: Layout, source: SourceSettings
) -> None:
    for split in ("train", "valid", "test"):
        if split in splits or (split == "test" and split not in data.by_split):
            continue
        advice = "Check that its files have rows that are not left out."
        if split in shares_by_hash(data, source):
            advice = f"Raise --{'validation' if split == 'valid' else split}_fraction, or add files."
        if layout.form == "files":
            advice += " Each file counts as one sequence, as no id column was recognised: name one with --id_column."
        raise DataError(f"{source.data_dir}: no sequence is left for the {split} split ({layout.describe()}). {advice}")


def refuse_leaks(splits: Mapping[str, SplitFiles], layout: Layout) -> None:
    """A sequence must not stand in two splits."""
    hashes = {split: distinct(hash_ids(_ids(files))) for split, files in splits.items()}
    names = list(hashes)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            shared = np.intersect1d(hashes[one], hashes[other], assume_unique=True)
            if len(shared):
                id_, here = _find(splits[one], shared)
                _, there = _find(splits[other], hash_ids(pa.array([id_])))
                column = f" of column {layout.id!r}" if layout.id else ""
                raise DataError(
                    f"{counted(len(shared), 'sequence')} in both {one} and {other}, such as id {id_!r}{column} ({here}; {there}): "
                    f"the evaluation would be of data seen in training. Remove them from one of the two, or name the column "
                    f"that tells sequences apart with --id_column (none: ids start anew in each split, rows are sequences)."
                )


def repeated_id_notes(splits: Mapping[str, SplitFiles], layout: Layout) -> list[str]:
    """With one sequence a row nothing is wrong with an id that stands in several rows, but it may not be what was meant."""
    if layout.form != "rows" or layout.id is None:
        return []
    return [
        f"{split}: {counted(repeated, 'row')} whose id (column {layout.id!r}) was met before: each is a sequence of its own"
        for split, files in splits.items()
        if (repeated := files.sequences - len(distinct(hash_ids(_ids(files)))))
    ]


def _find(files: SplitFiles, hashes: np.ndarray) -> tuple[int | str, str]:
    """Id and place of the first sequence with one of these hashes."""
    ids = _ids(files)
    sequence = int(np.flatnonzero(np.isin(hash_ids(ids), hashes))[0])
    return ids[sequence].as_py(), files.place_of(sequence)


def _ids(files: SplitFiles) -> pa.ChunkedArray:
    return files.table()["id"]


# A 64-bit hash of sequence ids that is the same on every machine and in every run: for splits and for spotting duplicates.
