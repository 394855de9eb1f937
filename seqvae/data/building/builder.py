"""Parquet files -> the files of a cache, in one streaming pass over the Parquet and one over what it left on disk.

Memory stays flat however large the data: blocks are bounded, raw arrays go to disk as they come, and what depends on
the whole training split (vocabulary, moments, the smallest integer type) is applied in a second pass over those arrays.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import EventEncoder, Problems, VectorEncoder, without_null_ids
from seqvae.data.building.finishing import Finished, finish_events, finish_tokens, finish_vectors
from seqvae.data.building.split_files import SplitFiles, finish_labels
from seqvae.data.building.splits import (
    make_assignment,
    refuse_leaks,
    refuse_missing_splits,
    repeated_id_notes,
    shares_by_hash,
)
from seqvae.data.building.tokens import TokenEncoder, known_tokenizer, make_tokenizer
from seqvae.data.description import DataDescription, FittedPreprocessing
from seqvae.data.parquet.discovery import POOL, DataFiles
from seqvae.data.parquet.file_check import ColumnRow, usable_files
from seqvae.data.parquet.long_table import (
    bring_together,
    first_scattered_row,
    in_order_of_time,
    sequence_starts,
    whole_sequences,
)
from seqvae.data.parquet.reader import Block, BlockReader
from seqvae.data.parquet.schema import Layout
from seqvae.errors import DataError

log = logging.getLogger(__name__)
Encoder = TokenEncoder | VectorEncoder | EventEncoder


class Built(NamedTuple):
    """What lies in the cache's directory now."""

    layout: Layout
    description: DataDescription
    splits: dict[str, dict[str, Any]]
    """Per split: its arrays as `map_flat` wants them, the table of its sequences as a file, and its counts."""
    notes: tuple[str, ...]
    """What a user should know of these data, one sentence each."""
    columns: tuple[ColumnRow, ...]
    files: Sequence[Path]
    """Those that were read, in the order by which the splits' tables number them."""
    bad_files: tuple[str, ...]
    """Why each file that was left out was left out."""


def build(data: DataFiles, source: SourceSettings, directory: Path, learnt: FittedPreprocessing | None = None) -> Built:
    first_pass = _FirstPass(data, source, directory, learnt)
    layout, encoder = first_pass.usable.layout, first_pass.encoder
    with ExitStack() as stack:
        splits = first_pass.run(stack)
        if learnt is None:
            refuse_missing_splits(splits, data, layout, source)
        elif not splits:
            raise DataError(
                f"{source.data_dir}: no sequence is left ({layout.describe()}). Check what is left out, and why."
            )
        if len(data.by_split) > 1 and (layout.id is not None or layout.form == "files"):
            refuse_leaks(splits, layout)
        finished = _finish(layout, encoder, splits, source, None if learnt is None else learnt.description)
        labelled = finish_labels(splits, layout, source)
        repeated = repeated_id_notes(splits, layout)
    usable, problems = first_pass.usable, first_pass.problems
    return Built(
        layout,
        DataDescription(kind=layout.kind, classes=labelled.classes, **finished.description),
        {split: _entry(files, finished) for split, files in splits.items()},
        (*usable.notes, *_shares(data, source, learnt), *problems.notes(), *repeated, *finished.notes, *labelled.notes),
        usable.columns,
        first_pass.reader.files,
        usable.bad_files,
    )


class _FirstPass:
    """All Parquet, once from beginning to end, encoded and dealt out to the splits."""

    def __init__(
        self, data: DataFiles, source: SourceSettings, directory: Path, learnt: FittedPreprocessing | None
    ) -> None:
        self.source = source
        self.directory = directory
        self.usable = usable_files(data, source)
        layout = self.usable.layout
        if learnt is not None:
            _refuse_other_kind(layout, learnt.description, source)
        _refuse_idle_flags(layout, source)
        self.reader = BlockReader([path for paths in self.usable.by_split.values() for path in paths], layout)
        self.problems = Problems(source.bad_values, self.reader.where)
        self.encoder = _make_encoder(layout, self.problems, source, None if learnt is None else learnt.description)
        self.assign = make_assignment(data, layout, self.reader, source, learnt)

    def run(self, stack: ExitStack) -> dict[str, SplitFiles]:
        """The splits that have sequences; their files are released when the stack is left."""
        splits: dict[str, SplitFiles] = {}
        for group, paths in self.usable.by_split.items():
            for block in self._blocks(paths):
                encoded = self.encoder(block)
                for split, keep_S in self.assign(group, block, encoded).items():
                    if keep_S.any():
                        files = splits[split] if split in splits else self._new_split(split, stack)
                        files.append(encoded.keep(keep_S), block)
                        splits[split] = files
            log.info("%s: %d file%s read", group, len(paths), "" if len(paths) == 1 else "s")
        for files in splits.values():
            files.close()
        return splits

    def _new_split(self, split: str, stack: ExitStack) -> SplitFiles:
        return stack.enter_context(SplitFiles(self.directory / split, self.reader.files, self.usable.layout.label))

    def _blocks(self, paths: Sequence[Path]) -> Iterator[Block]:
        """Blocks of whole sequences in order of time, none without rows."""
        layout, reader, problems = self.usable.layout, self.reader, self.problems
        with_ids = (without_null_ids(block, problems, layout.id) for block in reader(paths))
        blocks: Iterator[Block] = (block for block in with_ids if len(block.rows_R))
        if layout.form == "rows":
            yield from blocks
            return
        if layout.form == "table" and (place := first_scattered_row(reader, paths)):
            blocks = self._together(blocks, paths, place)
        for block in whole_sequences(blocks):
            _refuse_changing_labels(block, reader, layout)
            ordered, backwards = in_order_of_time(block, reader.where, self.source.unsorted, layout.time)
            problems.note(backwards, "row", "earlier than the row before in the same sequence: sorted by time")
            yield ordered

    def _together(self, blocks: Iterator[Block], paths: Sequence[Path], place: str) -> Iterator[Block]:
        """Bring the rows of each sequence together, as they lie apart from the given place on."""
        if self.source.unsorted == "error":
            raise DataError(
                f"{place}: the id in column {self.usable.layout.id!r} was met before, with other ids in between. Sort the rows "
                f"by id and time, or say --unsorted sort."
            )
        log.info("%s: rows of one sequence lie apart, bringing them together", place)
        rows = sum(self.usable.rows[path] for path in paths)
        self.problems.note(rows, "row", "brought together by id, as rows of one sequence lay apart")
        return bring_together(blocks, rows, self.directory / "spill")


def _refuse_other_kind(layout: Layout, known: DataDescription, source: SourceSettings) -> None:
    if (layout.kind, layout.is_text) != (known.kind, known.tokenizer is not None):
        wanted = "text" if known.tokenizer is not None else {"tokens": "lists of token ids"}.get(known.kind, known.kind)
        raise DataError(
            f"{source.data_dir}: holds {layout.describe()}, but the network was trained on {wanted}. Give it such data."
        )


def _refuse_idle_flags(layout: Layout, source: SourceSettings) -> None:
    """A flag that would change nothing was meant otherwise."""
    idle = {
        "--tokenizer": source.tokenizer is not None and not layout.is_text,
        "--vocabulary_size": source.vocabulary_size is not None and (layout.is_text or layout.kind != "tokens"),
        "--params_map_path": source.params_map_path is not None and layout.kind == "tokens",
    }
    meant_for = {
        "--tokenizer": "text",
        "--vocabulary_size": "lists of token ids (--minimum_count limits the vocabulary of text)",
        "--params_map_path": "vectors and events",
    }
    for flag, is_idle in idle.items():
        if is_idle:
            raise DataError(
                f"{source.data_dir}: {flag} is for {meant_for[flag]}, but these are {layout.describe()}. Leave it out, or "
                f"choose another column."
            )


def _make_encoder(layout: Layout, problems: Problems, source: SourceSettings, known: DataDescription | None) -> Encoder:
    if layout.kind == "events":
        return EventEncoder(layout, problems)
    if layout.kind == "vectors":
        return VectorEncoder(layout, problems)
    if known is not None:
        tokenizer = known_tokenizer(known.tokenizer) if known.tokenizer else None
        return TokenEncoder(layout, problems, tokenizer, known.vocabulary_size, "that the network was trained on")
    tokenizer = make_tokenizer(source.tokenizer) if source.tokenizer else None
    return TokenEncoder(layout, problems, tokenizer, source.vocabulary_size)


def _refuse_changing_labels(block: Block, reader: BlockReader, layout: Layout) -> None:
    """In a long table, all rows of a sequence must say the same label."""
    if layout.label is None:
        return
    codes_R = block.column("label").dictionary_encode("encode").indices.to_numpy()
    starts = sequence_starts(block.column("id"))
    first_R = np.repeat(starts, np.diff(starts, append=len(codes_R)))
    changed = np.flatnonzero(codes_R != codes_R[first_R])
    if len(changed):
        row = int(changed[0])
        found, before = (block.column("label")[at].as_py() for at in (row, int(first_R[row])))
        raise DataError(
            f"{reader.where(block, row)}: column {layout.label!r} holds {found!r}, but {before!r} where the same sequence "
            f"begins. A label is of a whole sequence: choose another --label_column, or put the labels into --label_path."
        )


def _finish(
    layout: Layout,
    encoder: Encoder,
    splits: dict[str, SplitFiles],
    source: SourceSettings,
    known: DataDescription | None,
) -> Finished:
    if isinstance(encoder, TokenEncoder):
        return finish_tokens(splits, encoder.tokenizer, source, known)
    if isinstance(encoder, VectorEncoder):
        return finish_vectors(splits, encoder.names(), source, known)
    return finish_events(splits, encoder.symbols(), layout.time_unit, source, known)


def _entry(files: SplitFiles, finished: Finished) -> dict[str, Any]:
    counts = {"sequences": files.sequences, "steps": files.steps} | finished.counts[files.directory.name]
    return {"arrays": files.entries, "table": files.table_entry, "counts": counts}


def _shares(data: DataFiles, source: SourceSettings, learnt: FittedPreprocessing | None) -> list[str]:
    """How splits came about that the directory lacks."""
    whole = "pool" if POOL in data.by_split else "training split"
    return [
        f"{split}: {share:.0%} of the {whole}, by a hash of the sequence's id"
        for split, share in shares_by_hash(data, source, learnt).items()
    ]
