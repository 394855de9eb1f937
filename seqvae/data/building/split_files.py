"""One split of a cache while it is being built: flat files that grow, and a table of its sequences."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from seqvae.data.building.encoded import Encoded
from seqvae.data.flat_file import OFFSETS, FlatWriter, OffsetWriter, describe_file
from seqvae.data.parquet.reading import Block
from seqvae.data.parquet.side_tables import label_names

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
