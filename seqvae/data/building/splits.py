"""Which split a sequence belongs to: by its folder, by a MEDS table, or by a hash of its id; that it is in one only; and the files
of a split while they grow."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import Encoded
from seqvae.data.description import FittedPreprocessing
from seqvae.data.flat_file import OFFSETS, FlatWriter, OffsetWriter, describe_file
from seqvae.data.parquet.discovery import POOL, DataFiles
from seqvae.data.parquet.long_table import hash_ids
from seqvae.data.parquet.reader import Block, BlockReader
from seqvae.data.parquet.side_tables import ids_as_text, label_names, read_subject_splits
from seqvae.errors import DataError
from seqvae.text import counted

RAW_TYPES = {"tokens": np.int32, "values": np.float64, "variables": np.int32}
"""How values lie on disk until the training split's vocabulary and moments are known."""
FINAL_TYPES = {"gaps": np.float32}


class SplitFiles:
    """One split of a cache while it is being built: flat files that grow, and a table of its sequences."""

    def __init__(self, directory: Path, reader: BlockReader) -> None:
        directory.mkdir()
        self.directory = directory
        self.sequences = 0
        self.entries: dict[str, dict[str, Any]] = {}
        """Finished files, as `map_flat` reads them."""
        self.table_entry: dict[str, Any] = {}
        self._reader = reader
        self._writers: list[FlatWriter] = []
        self._arrays: dict[str, FlatWriter] = {}
        self._offsets: dict[str, OffsetWriter] = {}
        self.table = pa.table({})
        """id, file, row (and label, where the data have one) of each sequence; mapped, and only after `close`."""
        self._table_path = directory / "sequences.arrow"
        self._table_writer: pa.RecordBatchFileWriter | None = None

    @property
    def steps(self) -> int:
        return self._offsets["offsets"].end

    def append(self, encoded: Encoded, block: Block) -> None:
        """Add some sequences, one or more, that were encoded from this block."""
        rows_S = encoded.first_rows_S
        self.sequences += len(rows_S)
        for name, lengths in (("offsets", encoded.lengths_S), ("event_offsets", encoded.events_per_step_T)):
            if lengths is not None:
                if name not in self._offsets:
                    self._offsets[name] = OffsetWriter(self.directory / f"{name}.bin")
                    self._writers.append(self._offsets[name].flat)
                self._offsets[name].append(lengths)
        for name, array in (encoded.steps | (encoded.events or {})).items():
            if name not in self._arrays:
                file = f"{name}.bin" if name in FINAL_TYPES else f"{name}.raw"
                self._arrays[name] = self.new_writer(file, FINAL_TYPES.get(name) or RAW_TYPES[name])
            self._arrays[name].append(array)

        rows = pa.array(rows_S)
        columns = {"id": block.columns["id"].take(rows), "file": block.files_R[rows_S], "row": block.rows_R[rows_S]}
        if "label" in block.columns.schema.names:
            labels_S, label = (
                block.columns["label"].take(rows).to_numpy(zero_copy_only=False),
                self._reader.layout.label,
            )
            names_S = label_names(labels_S, lambda s: f"{self._reader.where(block, rows_S[s])}: column {label!r}")
            columns["label"] = pa.array(names_S, pa.large_string())
        table = pa.table(columns)
        if self._table_writer is None:
            self._table_writer = pa.ipc.new_file(str(self._table_path), table.schema)
        self._table_writer.write_table(table)

    def close(self) -> None:
        """Flush everything; the raw arrays still wait for their final form."""
        for name, offsets in self._offsets.items():
            self.entries[name] = offsets.close()
        for name, writer in self._arrays.items():
            entry = writer.close()
            if name in FINAL_TYPES:
                self.entries[name] = entry
        if self._table_writer is not None:
            self._table_writer.close()
            self._table_writer = None
            self.table_entry = describe_file(self._table_path)
            with pa.memory_map(str(self._table_path)) as source:
                self.table = pa.ipc.open_file(source).read_all()

    def release(self) -> None:
        """Leave no file open, whatever has happened."""
        for writer in self._writers:
            writer.abandon()
        if self._table_writer is not None:
            with suppress(OSError, pa.ArrowException):
                self._table_writer.close()
        self.table = pa.table({})  # Windows renames no directory with a mapped file in it

    def new_writer(self, file: str, dtype: Any) -> FlatWriter:
        writer = FlatWriter(self.directory / file, dtype)
        self._writers.append(writer)
        return writer

    def raw(self, name: str) -> tuple[Path, Any]:
        """Return path and type of an array that waits for its final form."""
        return self.directory / f"{name}.raw", RAW_TYPES[name]

    def finish(self, name: str, writer: FlatWriter) -> None:
        """Replace the raw array by its final form, which is in `writer`."""
        self.entries[name] = writer.close()
        self.raw(name)[0].unlink()

    def place_of(self, sequence: int) -> str:
        """Return file and row where a sequence begins, for messages."""
        where = self.table.slice(sequence, 1).to_pylist()[0]
        return f"{self._reader.files[where['file']]}: row {where['row']}"

    def place_of_step(self, step: int) -> str:
        offsets_S1 = np.fromfile(self.directory / OFFSETS, np.int64)
        return self.place_of(int(np.searchsorted(offsets_S1, step, side="right")) - 1)


def shares_by_hash(
    data: DataFiles, source: SourceSettings, preprocessing: FittedPreprocessing | None
) -> dict[str, float]:
    """Return the splits that the directory lacks, and the share of the training sequences (or the pool) that each gets."""
    if data.subject_splits or (preprocessing is not None and preprocessing.pools_are_whole):
        return {}
    shares = {"valid": source.validation_fraction, "test": source.test_fraction}
    return {split: share for split, share in shares.items() if share and split not in data.by_split}


def make_assignment(
    data: DataFiles, reader: BlockReader, shares: Mapping[str, float]
) -> Callable[[str, Block, np.ndarray], dict[str, np.ndarray]]:
    """Return a function of a group of files (a split or the pool), a block and the rows where its sequences begin, which returns a
    mask of the sequences for each split."""
    subjects = read_subject_splits(data.subject_splits) if data.subject_splits else None
    ids_are_rows = reader.layout.form == "rows" and reader.layout.id is None

    def assign(group: str, block: Block, rows_S: np.ndarray) -> dict[str, np.ndarray]:
        if subjects is None and (group not in (POOL, "train") or not shares):
            return {group: np.ones(len(rows_S), bool)}
        ids_S = block.columns["id"].take(pa.array(rows_S))
        if subjects is not None:
            names = ids_as_text(ids_S.to_numpy(zero_copy_only=False))
            split_S = subjects.reindex(names).to_numpy(dtype=object)
            unknown = np.flatnonzero(pd.isna(split_S))
            if len(unknown):
                raise DataError(
                    f"{reader.where(block, int(rows_S[unknown[0]]))}: subject {names[unknown[0]]} is missing in "
                    f"metadata/subject_splits.parquet. Add it there."
                )
            return {split: split_S == split for split in ("train", "valid", "test")}
        if ids_are_rows:  # the name of the file and the row in it stand for an id: more files do not change them
            names = hash_ids(pa.array([path.name for path in reader.files], pa.large_string()))
            row_hashes_S = hash_ids(pa.array(block.rows_R[rows_S]))
            ids_S = pa.array((names[block.files_R[rows_S]] ^ row_hashes_S).view(np.int64))
        # The split of a sequence depends on its id alone, so it never changes.
        place_S, start = hash_ids(ids_S) / 2.0**64, 0.0
        masks = {}
        for split, share in shares.items():
            masks[split] = (place_S >= start) & (place_S < start + share)
            start += share
        return {"train": place_S >= start} | masks

    return assign


def refuse_missing_splits(
    splits: Mapping[str, SplitFiles],
    data: DataFiles,
    reader: BlockReader,
    source: SourceSettings,
    shares: Mapping[str, float],
) -> None:
    for split in ("train", "valid", "test"):
        if split in splits or (split == "test" and split not in data.by_split):
            continue
        advice = "Check that its files have rows that are not left out."
        if split in shares:
            advice = f"Raise --{'validation' if split == 'valid' else split}_fraction, or add files."
        if reader.layout.form == "files":
            advice += " Each file counts as one sequence, as no id column was recognised: name one with --id_column."
        raise DataError(
            f"{source.data_dir}: no sequence is left for the {split} split ({reader.layout.describe()}). {advice}"
        )


def check_ids(splits: Mapping[str, SplitFiles], reader: BlockReader, *, may_leak: bool) -> list[str]:
    """Refuse sequences that stand in two splits; return notes on ids that stand in several rows of one sequence each: nothing is
    wrong with them, but they may not be meant."""
    layout = reader.layout
    has_ids = layout.id is not None or layout.form == "files"
    notes: list[str] = []
    hashes: dict[str, np.ndarray] = {}
    for split, files in splits.items():
        if has_ids and (may_leak or layout.form == "rows"):
            hashes_N = hash_ids(files.table["id"])
            hashes_N.sort()  # `np.unique` puts them into a table of many times their size
            hashes_N = hashes_N[np.append(True, hashes_N[1:] != hashes_N[:-1])]
            if layout.form == "rows" and (repeated := files.sequences - len(hashes_N)):
                rows = counted(repeated, "row")
                notes.append(
                    f"{split}: {rows} whose id (column {layout.id!r}) was met before: each is a sequence of its own"
                )
            if may_leak:
                hashes[split] = hashes_N

    def first_with(files: SplitFiles, hashes_N: np.ndarray) -> tuple[int | str, str]:
        ids = files.table["id"]
        sequence = int(np.flatnonzero(np.isin(hash_ids(ids), hashes_N))[0])
        return ids[sequence].as_py(), files.place_of(sequence)

    for one, other in combinations(hashes, 2):
        shared = np.intersect1d(hashes[one], hashes[other], assume_unique=True)
        if len(shared):
            id_, here = first_with(splits[one], shared)
            _, there = first_with(splits[other], hash_ids(pa.array([id_])))
            column = f" of column {layout.id!r}" if layout.id else ""
            raise DataError(
                f"{counted(len(shared), 'sequence')} in both {one} and {other}, such as id {id_!r}{column} ({here}; {there}): "
                f"the evaluation would be of data seen in training. Remove them from one of the two, or name the column "
                f"that tells sequences apart with --id_column (none: ids start again in each split, rows are sequences)."
            )
    return notes
