"""Parquet files -> the files of a cache, in one streaming pass over the Parquet and one over what it left on disk.

Memory stays flat however large the data: blocks are bounded, raw arrays go to disk as they come, and what depends on
the whole training split (vocabulary, moments, the smallest integer type) is applied in a second pass over those arrays.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import EventEncoder, Problems, TokenEncoder, VectorEncoder
from seqvae.data.building.finishing import finish_events, finish_labels, finish_tokens, finish_vectors
from seqvae.data.building.splits import SplitFiles, check_ids, make_assignment, refuse_missing_splits, shares_by_hash
from seqvae.data.building.tokens import make_tokenizer
from seqvae.data.description import DataDescription, FittedPreprocessing
from seqvae.data.parquet.discovery import POOL, ColumnRow, DataFiles, usable_files
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
    """Per split: its arrays as `map_flat` reads them, the table of its sequences as a file, and its counts."""
    notes: tuple[str, ...]
    """What a user should know of these data, one sentence each."""
    columns: tuple[ColumnRow, ...]
    files: Sequence[Path]
    """Those that were read, in the order by which the splits' tables number them."""
    bad_files: tuple[str, ...]
    """Why each file that was left out was left out."""


def build(
    data: DataFiles, source: SourceSettings, directory: Path, preprocessing: FittedPreprocessing | None = None
) -> Built:
    """Write the files of a cache; with `preprocessing`, data are read as a trained network understands them."""
    known = None if preprocessing is None else preprocessing.description
    usable = usable_files(data, source)
    layout = usable.layout
    reader = BlockReader([path for paths in usable.by_split.values() for path in paths], layout)
    problems = Problems(source.bad_values, reader.where)
    encoder = _make_encoder(layout, problems, source, known)
    shares = shares_by_hash(data, source, preprocessing)
    assign = make_assignment(data, reader, shares)
    with ExitStack() as stack:
        splits: dict[str, SplitFiles] = {}
        for group, paths in usable.by_split.items():
            blocks = _blocks_with_ids(reader, paths, problems)
            if layout.form != "rows":
                rows_of = {path: usable.rows[path] for path in paths}
                blocks = _ordered_sequences(blocks, reader, rows_of, problems, source.unsorted, directory / "spill")
            for block in blocks:
                encoded = encoder(block)
                for split, keep_S in assign(group, block, encoded.first_rows_S).items():
                    if keep_S.any():
                        if split not in splits:
                            splits[split] = SplitFiles(directory / split, reader)
                            stack.callback(splits[split].release)
                        splits[split].append(encoded.keep(keep_S), block)
            log.info("%s: %d file%s read", group, len(paths), "" if len(paths) == 1 else "s")
        for files in splits.values():
            files.close()

        if known is None:
            refuse_missing_splits(splits, data, reader, source, shares)
        elif not splits:
            raise DataError(
                f"{source.data_dir}: no sequence is left ({layout.describe()}). Check what is left out, and why."
            )
        repeated_ids = check_ids(splits, reader, may_leak=len(data.by_split) > 1)
        if isinstance(encoder, TokenEncoder):
            finished = finish_tokens(splits, encoder.tokenizer, source, known)
        elif isinstance(encoder, VectorEncoder):
            finished = finish_vectors(splits, encoder.names(), source, known)
        else:
            finished = finish_events(splits, list(encoder.numbering.number_of), layout.time_unit, source, known)
        classes, label_notes = finish_labels(splits, layout, source)
    whole = "pool" if POOL in data.by_split else "training split"
    notes = [*usable.notes]
    notes += [f"{split}: {share:.0%} of the {whole}, by a hash of the sequence's id" for split, share in shares.items()]
    notes += [*problems.notes(), *repeated_ids, *finished.notes, *label_notes]
    entries = {
        split: {
            "arrays": files.entries,
            "table": files.table_entry,
            "counts": {"sequences": files.sequences, "steps": files.steps} | finished.counts[split],
        }
        for split, files in splits.items()
    }
    description = DataDescription(kind=layout.kind, classes=classes, **finished.description)
    return Built(layout, description, entries, tuple(notes), usable.columns, reader.files, usable.bad_files)


def _make_encoder(layout: Layout, problems: Problems, source: SourceSettings, known: DataDescription | None) -> Encoder:
    """Return the encoder of the layout's kind; refuse data of another kind than the network's, and flags that would change
    nothing, as these were meant otherwise."""
    if known is not None and (layout.kind, layout.is_text) != (known.kind, known.tokenizer is not None):
        trained = (
            "text" if known.tokenizer is not None else {"tokens": "lists of token ids"}.get(known.kind, known.kind)
        )
        raise DataError(
            f"{source.data_dir}: holds {layout.describe()}, but the network was trained on {trained}. Give it such data."
        )
    idle = {
        ("--tokenizer", "text"): source.tokenizer is not None and not layout.is_text,
        ("--vocabulary_size", "lists of token ids (--minimum_count limits the vocabulary of text)"): (
            source.vocabulary_size is not None and (layout.is_text or layout.kind != "tokens")
        ),
        ("--params_map_path", "vectors and events"): source.params_map_path is not None and layout.kind == "tokens",
    }
    for (flag, purpose), is_idle in idle.items():
        if is_idle:
            raise DataError(
                f"{source.data_dir}: {flag} is for {purpose}, but these are {layout.describe()}. Leave it out, or choose "
                f"another column."
            )
    if layout.kind == "events":
        return EventEncoder(layout, problems)
    if layout.kind == "vectors":
        return VectorEncoder(layout, problems, width=len(layout.features))
    if known is not None:
        tokenizer = make_tokenizer(known.tokenizer, is_content=True) if known.tokenizer else None
        return TokenEncoder(layout, problems, tokenizer, known.vocabulary_size, "that the network was trained on")
    tokenizer = make_tokenizer(source.tokenizer) if source.tokenizer else None
    limited_by = f"of --vocabulary_size {source.vocabulary_size}"
    return TokenEncoder(layout, problems, tokenizer, source.vocabulary_size, limited_by)


def _blocks_with_ids(reader: BlockReader, paths: Sequence[Path], problems: Problems) -> Iterator[Block]:
    """Yield blocks of one row or more, without the rows whose id is null: they belong to no sequence."""
    for block in reader(paths):
        null_R = np.asarray(block.columns["id"].is_null())
        if null_R.any():
            what = f"a null in the id column {reader.layout.id!r}"
            if problems.policy != "drop":
                raise problems.error(block, int(np.flatnonzero(null_R)[0]), what)
            problems.note(int(null_R.sum()), "row", f"left out (--bad_values drop): {what}")
            block = block.take(np.flatnonzero(~null_R))
        if len(block.rows_R):
            yield block


def _ordered_sequences(
    blocks: Iterator[Block],
    reader: BlockReader,
    rows_of: Mapping[Path, int],
    problems: Problems,
    unsorted: str,
    spill: Path,
) -> Iterator[Block]:
    """Yield blocks of whole sequences in order of time from blocks of long tables; `rows_of` are the files that they come from."""
    layout = reader.layout
    if layout.form == "table" and (place := first_scattered_row(reader, [*rows_of])):
        if unsorted == "error":
            raise DataError(
                f"{place}: the id in column {layout.id!r} occurred before, with other ids in between. Sort the rows by id and "
                f"time, or say --unsorted sort."
            )
        log.info("%s: rows of one sequence lie apart, bringing them together", place)
        rows = sum(rows_of.values())
        problems.note(rows, "row", "brought together by id, as rows of one sequence lay apart")
        blocks = bring_together(blocks, rows, spill)
    for block in whole_sequences(blocks):
        if layout.label is not None:
            labels = block.columns["label"]
            codes_R = labels.dictionary_encode("encode").indices.to_numpy()
            starts = sequence_starts(block.columns["id"])
            first_R = np.repeat(starts, np.diff(starts, append=len(codes_R)))
            changed = np.flatnonzero(codes_R != codes_R[first_R])
            if len(changed):
                row = int(changed[0])
                found, before = (labels[at].as_py() for at in (row, int(first_R[row])))
                raise DataError(
                    f"{reader.where(block, row)}: column {layout.label!r} holds {found!r}, but {before!r} where the same "
                    f"sequence begins. A label is of a whole sequence: choose another --label_column, or put the labels into "
                    f"--label_path."
                )
        ordered, backwards = in_order_of_time(block, reader, unsorted)
        problems.note(backwards, "row", "earlier than the row before in the same sequence: sorted by time")
        yield ordered
