"""One split of a cache while it is being built: flat files that grow, and a table of its sequences."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import Encoded
from seqvae.data.flat_file import OFFSETS, FlatWriter, OffsetWriter, describe_file
from seqvae.data.parquet.reader import Block
from seqvae.data.parquet.schema import Layout
from seqvae.data.parquet.side_tables import class_order, ids_as_text, label_names, read_labels
from seqvae.errors import DataError
from seqvae.text import counted, some

RAW_TYPES = {"tokens": np.int32, "values": np.float64, "variables": np.int32}
"""How values lie on disk until the training split's vocabulary and moments are known."""
FINAL_TYPES = {"gaps": np.float32}


class SplitFiles:
    """`with SplitFiles(...) as split_files`: leaves no file open, however the block ends."""

    def __init__(self, directory: Path, files: Sequence[Path], label_column: str | None) -> None:
        directory.mkdir()
        self.directory = directory
        self.files = files
        """The Parquet files, in the order by which blocks number them."""
        self.label_column = label_column
        self.sequences = 0
        self.arrays: dict[str, FlatWriter] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        """Finished files, as `map_flat` wants them."""
        self.table_entry: dict[str, Any] = {}
        self._writers: list[FlatWriter] = []
        self._offsets = self._offset_writer(OFFSETS)
        self._event_offsets: OffsetWriter | None = None
        self._table: pa.RecordBatchFileWriter | None = None

    def __enter__(self) -> "SplitFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers:
            writer.abandon()
        if self._table is not None:
            with suppress(OSError, pa.ArrowException):
                self._table.close()

    @property
    def steps(self) -> int:
        return self._offsets.end

    @property
    def table_path(self) -> Path:
        return self.directory / "sequences.arrow"

    def append(self, encoded: Encoded, block: Block) -> None:
        """Add some sequences that were encoded from this block."""
        if len(encoded.lengths_S) == 0:
            return
        self.sequences += len(encoded.lengths_S)
        self._offsets.append(encoded.lengths_S)
        for name, array in (encoded.steps | (encoded.events or {})).items():
            if name not in self.arrays:
                file = f"{name}.bin" if name in FINAL_TYPES else f"{name}.raw"
                self.arrays[name] = self.new_writer(file, FINAL_TYPES.get(name) or RAW_TYPES[name])
            self.arrays[name].append(array)
        if encoded.events_per_step_T is not None:
            self._event_offsets = self._event_offsets or self._offset_writer("event_offsets.bin")
            self._event_offsets.append(encoded.events_per_step_T)
        self._append_table(block, encoded.first_rows_S)

    def new_writer(self, file: str, dtype: Any) -> FlatWriter:
        writer = FlatWriter(self.directory / file, dtype)
        self._writers.append(writer)
        return writer

    def raw_path(self, name: str) -> Path:
        return self.directory / f"{name}.raw"

    def close(self) -> None:
        """Flush everything; the raw arrays still wait for their final form."""
        self.entries["offsets"] = self._offsets.close()
        if self._event_offsets is not None:
            self.entries["event_offsets"] = self._event_offsets.close()
        for name, writer in self.arrays.items():
            entry = writer.close()
            if name in FINAL_TYPES:
                self.entries[name] = entry
        if self._table is not None:
            self._table.close()
            self._table = None
            self.table_entry = describe_file(self.table_path)

    def finish(self, name: str, writer: FlatWriter) -> None:
        """The raw array has its final form in `writer`."""
        self.entries[name] = writer.close()
        self.raw_path(name).unlink()

    def table(self) -> pa.Table:
        """id, file, row (and label, where the data have one) of each sequence; only after `close`."""
        with pa.memory_map(str(self.table_path)) as source:
            return pa.ipc.open_file(source).read_all()

    def place_of(self, sequence: int) -> str:
        """File and row where a sequence begins, for messages."""
        where = self.table().slice(sequence, 1).to_pylist()[0]
        return f"{self.files[where['file']]}: row {where['row']}"

    def place_of_step(self, step: int) -> str:
        offsets_S1 = np.fromfile(self.directory / OFFSETS, np.int64)
        return self.place_of(int(np.searchsorted(offsets_S1, step, side="right")) - 1)

    def _offset_writer(self, file: str) -> OffsetWriter:
        offsets = OffsetWriter(self.directory / file)
        self._writers.append(offsets.flat)
        return offsets

    def _append_table(self, block: Block, rows_S: np.ndarray) -> None:
        rows = pa.array(rows_S)
        files_S, rows_in_file_S = block.files_R[rows_S], block.rows_R[rows_S]
        columns = {"id": block.column("id").take(rows), "file": files_S, "row": rows_in_file_S}
        if "label" in block.table.column_names:
            labels_S = block.column("label").take(rows).to_numpy(zero_copy_only=False)
            names_S = label_names(
                labels_S, lambda s: f"{self.files[files_S[s]]}: row {rows_in_file_S[s]}: column {self.label_column!r}"
            )
            columns["label"] = pa.array(names_S, pa.large_string())
        table = pa.table(columns)
        if self._table is None:
            self._table = pa.ipc.new_file(str(self.table_path), table.schema)
        self._table.write_table(table)


# The class of each sequence, from a column of the data or from a file beside them, on its way into the cache.

SHOWN_CLASSES = 10


class Labelled(NamedTuple):
    classes: tuple[str, ...]
    """What the labels 0, 1, ... stand for."""
    notes: list[str]


class Codes:
    """Numbers texts in order of appearance; -1 stands for none."""

    def __init__(self) -> None:
        self.number_of: dict[str, int] = {}

    def __call__(self, texts: pa.Array) -> np.ndarray:
        encoded = texts.dictionary_encode()
        numbers = [self.number_of.setdefault(text, len(self.number_of)) for text in encoded.dictionary.to_pylist()]
        return np.array([*numbers, -1], np.int32)[np.asarray(encoded.indices.fill_null(-1))]


def finish_labels(splits: dict[str, SplitFiles], layout: Layout, source: SourceSettings) -> Labelled:
    """Write labels.bin for each split: the number of the class, -1 where there is none."""
    if source.label_path is None and layout.label is None:
        return Labelled((), [])
    notes: list[str] = []
    codes = Codes()
    if source.label_path is None:
        coded = {split: _concat([codes(c) for c in files.table()["label"].chunks]) for split, files in splits.items()}
    else:
        coded, notes = _from_file(source.label_path, codes, splits, layout, source)
    where = f"--label_path {source.label_path}" if source.label_path else f"column {layout.label!r}"
    notes += _missing_notes(coded, splits, where, source)
    counts = {
        split: np.bincount(coded_S[coded_S >= 0], minlength=len(codes.number_of)) for split, coded_S in coded.items()
    }
    in_use = np.flatnonzero(sum(counts.values()))
    if not len(in_use):
        raise DataError(
            f"{where}: no sequence has a label there. Check the ids, or leave --label_path and --label_column out."
        )
    names = list(codes.number_of)
    classes = class_order([names[code] for code in in_use])
    final = np.full(len(names) + 1, -1, np.int32)  # the last one stands for code -1
    final[[codes.number_of[name] for name in classes]] = np.arange(len(classes))
    for split, files in splits.items():
        writer = files.new_writer("labels.bin", np.int32)
        writer.append(final[coded[split]])
        files.entries["labels"] = writer.close()
    if "train" not in counts:  # data that a trained network is used on
        return Labelled(tuple(classes), notes)
    counts_C = [int(counts["train"][codes.number_of[name]]) for name in classes]
    return Labelled(tuple(classes), [*notes, *_class_notes(classes, counts_C)])


def _from_file(
    path: str, codes: Codes, splits: dict[str, SplitFiles], layout: Layout, source: SourceSettings
) -> tuple[dict[str, np.ndarray], list[str]]:
    table = read_labels(path, source.label_column, layout.id or source.id_column)
    code_L = np.append(codes(pa.array(table.labels, pa.large_string())), -1)
    coded, used_L = {}, np.zeros(len(code_L), bool)
    for split, files in splits.items():
        ids = files.table()["id"].chunks
        row_S = _concat([table.ids.get_indexer(ids_as_text(chunk.to_numpy(zero_copy_only=False))) for chunk in ids])
        coded[split] = code_L[row_S]
        used_L[row_S] = True
    unused = int((~used_L[:-1]).sum())
    return coded, [f"--label_path {path}: {counted(unused, 'row')} without a sequence in the data"] if unused else []


def _missing_notes(
    coded: dict[str, np.ndarray], splits: dict[str, SplitFiles], where: str, source: SourceSettings
) -> list[str]:
    notes = []
    for split, coded_S in coded.items():
        missing = np.flatnonzero(coded_S < 0)
        if not len(missing):
            continue
        how_many = f"{len(missing):,} of {counted(len(coded_S), 'sequence')} have no label"
        if not source.allow_missing_labels:
            files, first = splits[split], int(missing[0])
            raise DataError(
                f"{files.place_of(first)}: id {files.table()['id'][first].as_py()!r} has no label in {where}; in "
                f"{split} {how_many}. Add them, or accept that with --allow_missing_labels."
            )
        notes.append(f"{split}: {how_many}")
    return notes


def _concat(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *pieces])


def _class_notes(classes: list[str], counts_C: list[int]) -> list[str]:
    if len(classes) == 1:
        return [f"warning: all labels are {classes[0]!r}, so that there is nothing to tell apart"]
    shown = ", ".join(
        f"{name!r}: {count:,}" for name, count in list(zip(classes, counts_C, strict=True))[:SHOWN_CLASSES]
    )
    notes = [f"labels have {len(classes)} classes (in train {shown}{', ...' if len(classes) > SHOWN_CLASSES else ''})"]
    absent = [repr(name) for name, count in zip(classes, counts_C, strict=True) if count == 0]
    if absent:
        notes.append(f"warning: no sequence of the training split has the label {some(absent)}")
    return notes
