"""Parquet files -> the files of a cache, in one streaming pass over the Parquet and one over what it left on disk.

Memory stays flat however large the data: blocks are bounded, raw arrays go to disk as they come, and what depends on
the whole training split (vocabulary, moments, the smallest integer type) is applied in a second pass over those arrays.

The split of a sequence comes from its folder, from a MEDS table, or from a hash of its id; none may be in two splits.

Shapes: R rows of a block, S sequences of a block, N sequences of a split.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import EventEncoder, TokenEncoder, VectorEncoder, make_tokenizer
from seqvae.data.building.finishing import finish_events, finish_labels, finish_tokens, finish_vectors
from seqvae.data.description import DataDescription, FittedPreprocessing
from seqvae.data.flat_file import SplitFiles
from seqvae.data.parquet.discovery import POOL, ColumnRow, DataFiles, UsableFiles, usable_files
from seqvae.data.parquet.reader import (
    Block,
    BlockReader,
    hash_ids,
    ordered_sequences,
)
from seqvae.data.parquet.schema import Layout
from seqvae.data.parquet.side_tables import ids_as_text, label_names, read_subject_splits
from seqvae.data.storage import DataFile
from seqvae.errors import DataError
from seqvae.text import counted, measure

log = logging.getLogger(__name__)
UNEVEN = 1.5
"""Longest over shortest gap between two steps, above which times say more than an order does."""
Encoder = TokenEncoder | VectorEncoder | EventEncoder


class Built(NamedTuple):
    """The contents of the cache's directory."""

    layout: Layout
    description: DataDescription
    splits: dict[str, dict[str, Any]]
    """Per split: its arrays as `map_flat` reads them, the table of its sequences as a file, and its counts."""
    notes: tuple[str, ...]
    """What a user should know of these data, one sentence each."""
    lasting_notes: tuple[str, ...]
    """Those of them that other labels and ids would leave as they are."""
    columns: tuple[ColumnRow, ...]
    files: Sequence[DataFile]
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
    every = [path for paths in usable.by_split.values() for path in paths]
    reader = BlockReader(every, layout, source.bad_values, source.codes_for_missing)
    encoder = _make_encoder(reader, source, known)
    subjects = read_subject_splits(data.subject_splits) if data.subject_splits else None
    shares = hashed_shares(data, source, preprocessing)
    with ExitStack() as stack:
        splits: dict[str, SplitFiles] = {}
        for group, paths in usable.by_split.items():
            blocks = reader(paths)
            if layout.form != "rows":
                rows_of = {path: usable.rows[path] for path in paths}
                blocks = ordered_sequences(reader, rows_of, source.unsorted, directory / "spill")
            shares_here = shares if group in (POOL, "train") else {}
            for block in blocks:
                encoded = encoder(block)
                table, masks = _assign(block, encoded.first_rows_S, group, subjects, shares_here, reader)
                for split, keep_S in masks.items():
                    if keep_S.any():
                        if split not in splits:
                            keeps_values = preprocessing is not None and preprocessing.keeps_values
                            splits[split] = SplitFiles(directory / split, reader.files, keeps_values=keeps_values)
                            stack.callback(splits[split].release)
                        kept = encoded.keep(keep_S)
                        rows = table.filter(pa.array(keep_S))
                        arrays = kept.steps | (kept.events or {})
                        splits[split].append(rows, kept.lengths_S, kept.events_per_step_T, arrays)
            log.info("%s: %s read", group, counted(len(paths), "file"))
        for files in splits.values():
            files.close()

        if known is None:
            _refuse_missing_splits(splits, data, layout, source, shares)
        elif not splits:
            raise DataError(
                f"{source.data_dir}: no sequence is left ({layout.describe()}). Check what is left out, and why."
            )
        repeated_ids = _check_ids(splits, layout, may_leak=len(data.by_split) > 1)
        if isinstance(encoder, TokenEncoder):
            finished = finish_tokens(splits, encoder.tokenizer, source, known)
        elif isinstance(encoder, VectorEncoder):
            names = layout.features or tuple(f"{layout.sequence}[{place}]" for place in range(encoder.width))
            finished = finish_vectors(splits, names, source, known)
        else:
            finished = finish_events(splits, list(encoder.number_of), layout.time_unit, source, known)
        classes, label_notes = finish_labels(splits, layout, source)
    whole = "pool" if POOL in data.by_split else "training split"
    notes = [f"{split}: {share:.0%} of the {whole}, by a hash of the sequence's id" for split, share in shares.items()]
    notes += [f"{counted(count, noun)} {what}" for (noun, what), count in reader.repairs.items()]
    if isinstance(encoder, VectorEncoder):
        notes += _note_on_times(encoder, layout)
    notes += finished.notes
    entries = {
        split: {
            "arrays": files.entries,
            "table": files.table_entry,
            "counts": {"sequences": files.sequences, "steps": files.steps} | finished.counts[split],
        }
        for split, files in splits.items()
    }
    description = DataDescription(kind=layout.kind, classes=classes, **finished.description)
    every_note = (*usable.notes, *notes, *repeated_ids, *label_notes)
    return Built(layout, description, entries, every_note, tuple(notes), usable.columns, reader.files, usable.bad_files)


def relabel(twin: Path, meta: Mapping[str, Any], usable: UsableFiles, source: SourceSettings, directory: Path) -> Built:
    """Write the files of a cache that differs from another, `twin`, in nothing but labels and ids: no sequence is read again."""
    layout, paths = usable.layout, [path for group in usable.by_split.values() for path in group]
    has_other_ids = layout.id != meta["roles"]["id"]
    columns: dict[str, pa.ChunkedArray] = {}
    if has_other_ids or layout.label is not None:
        read = BlockReader(paths, replace(layout, sequence=None, features=(), id=layout.id if has_other_ids else None))
        blocks = [block.columns for group in usable.by_split.values() for block in read(group)]
        columns = {name: pa.chunked_array([block[name] for block in blocks]) for name in blocks[0].schema.names}
    first_rows = np.cumsum([0, *(usable.rows[path] for path in paths)])
    with ExitStack() as stack:
        splits: dict[str, SplitFiles] = {}
        for split, entry in meta["splits"].items():
            files = splits[split] = SplitFiles(directory / split, paths)
            stack.callback(files.release)
            files.adopt(twin / split, entry, with_table=not has_other_ids)
            files_N, rows_N = (files.table[name].to_numpy() for name in ("file", "row"))
            chosen = {name: column.take(pa.array(first_rows[files_N] + rows_N)) for name, column in columns.items()}
            if has_other_ids:
                files.write_table(files.table.set_column(0, "id", chosen["id"]))
            if layout.label is not None:

                def place(row: int, files: SplitFiles = files) -> str:
                    return f"{files.place_of(row)}: column {layout.label!r}"

                texts = label_names(chosen["label"].to_numpy(), place, layout.label_names)
                without = files.table.drop_columns([name for name in files.table.column_names if name == "label"])
                files.table = without.append_column("label", pa.chunked_array([pa.array(texts, pa.large_string())]))
        repeated_ids = _check_ids(splits, layout, may_leak=len(usable.by_split) > 1)
        classes, label_notes = finish_labels(splits, layout, source)
        entries = {
            split: meta["splits"][split] | {"arrays": files.entries, "table": files.table_entry}
            for split, files in splits.items()
        }
    description = DataDescription(**meta["description"] | {"classes": classes})
    lasting = tuple(meta["lasting_notes"])
    every_note = (*usable.notes, *lasting, *repeated_ids, *label_notes)
    return Built(layout, description, entries, every_note, lasting, usable.columns, paths, usable.bad_files)


def hashed_shares(
    data: DataFiles, source: SourceSettings, preprocessing: FittedPreprocessing | None
) -> dict[str, float]:
    """Return the splits that the files lack, and the share of the training sequences (or the pool) that each gets by a hash of the
    id."""
    if data.subject_splits or (preprocessing is not None and preprocessing.pools_are_whole):
        return {}
    fractions = {"valid": source.validation_fraction, "test": source.test_fraction}
    return {split: share for split, share in fractions.items() if share and split not in data.by_split}


def _note_on_times(encoder: VectorEncoder, layout: Layout) -> list[str]:
    """Return what is lost of the times of vectors, which are taken as steps of equal length."""
    shortest, longest = encoder.shortest_gap, encoder.longest_gap
    if longest <= UNEVEN * shortest:
        return []
    unit = f" {layout.time_unit}" if layout.time_unit == "minutes" else ""
    return [
        f"steps are {measure(shortest)} to {measure(longest)}{unit} apart (column {layout.time!r}), but vectors keep only their "
        f"order: --kind events keeps the times"
    ]


def _make_encoder(reader: BlockReader, source: SourceSettings, known: DataDescription | None) -> Encoder:
    """Return the encoder of the layout's kind; refuse data of another kind than the network's, and flags that would change
    nothing, as these were meant otherwise."""
    layout = reader.layout
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
        ("--missing_values", "vectors and events"): source.missing_values is not None and layout.kind == "tokens",
    }
    for (flag, purpose), is_idle in idle.items():
        if is_idle:
            raise DataError(
                f"{source.data_dir}: {flag} is for {purpose}, but these are {layout.describe()}. Leave it out, or choose "
                f"another column."
            )
    if layout.kind == "events":
        return EventEncoder(reader)
    if layout.kind == "vectors":
        return VectorEncoder(reader, width=len(layout.features))
    if known is not None:
        tokenizer = make_tokenizer(known.tokenizer, is_content=True) if known.tokenizer else None
        return TokenEncoder(reader, tokenizer, known.vocabulary_size, "that the network was trained on")
    tokenizer = make_tokenizer(source.tokenizer) if source.tokenizer else None
    limited_by = f"of --vocabulary_size {source.vocabulary_size}"
    return TokenEncoder(reader, tokenizer, source.vocabulary_size, limited_by)


# --- Splits ---------------------------------------------------------------------------------------------------------


def _assign(
    block: Block,
    rows_S: np.ndarray,
    group: str,
    subjects: pd.Series | None,
    shares: Mapping[str, float],
    reader: BlockReader,
) -> tuple[pa.Table, dict[str, np.ndarray]]:
    """Return a table (id, file, row and, where the data have one, label) of the sequences that begin in these rows, and for each
    split a mask of them: by `subjects` (the split of each id), else by `shares`, else all in the group of files that they come
    from (a split or the pool)."""
    layout, rows = reader.layout, pa.array(rows_S)
    ids_S, files_S = block.columns["id"].take(rows), block.files_R[rows_S]
    columns = {"id": ids_S, "file": files_S, "row": block.rows_R[rows_S]}
    if layout.label is not None:
        labels_S = block.columns["label"].take(rows).to_numpy(zero_copy_only=False)
        texts_S = label_names(
            labels_S, lambda s: f"{reader.where(block, rows_S[s])}: column {layout.label!r}", layout.label_names
        )
        columns["label"] = pa.array(texts_S, pa.large_string())
    table = pa.table(columns)
    if subjects is not None:
        subjects_S = ids_as_text(ids_S.to_numpy(zero_copy_only=False))
        split_S = subjects.reindex(subjects_S).to_numpy(dtype=object)
        unknown = np.flatnonzero(pd.isna(split_S))
        if len(unknown):
            raise DataError(
                f"{reader.where(block, int(rows_S[unknown[0]]))}: subject {subjects_S[unknown[0]]} is missing in "
                f"metadata/subject_splits.parquet. Add it there."
            )
        return table, {split: split_S == split for split in ("train", "valid", "test")}
    if not shares:
        return table, {group: np.ones(len(rows_S), bool)}
    if layout.form == "rows" and (layout.id is None or layout.id_names_rows):
        # The name of the file and the row in it stand for an id: more files do not change them.
        names = hash_ids(pa.array([path.name for path in reader.files], pa.large_string()))
        ids_S = pa.array((names[files_S] ^ hash_ids(pa.array(columns["row"]))).view(np.int64))
    # The split of a sequence depends on its id alone, so it never changes.
    place_S, start = hash_ids(ids_S) / 2.0**64, 0.0
    masks = {}
    for split, share in shares.items():
        masks[split] = (place_S >= start) & (place_S < start + share)
        start += share
    return table, {"train": place_S >= start} | masks


def _refuse_missing_splits(
    splits: Mapping[str, SplitFiles],
    data: DataFiles,
    layout: Layout,
    source: SourceSettings,
    shares: Mapping[str, float],
) -> None:
    """Refuse a build without sequences to train or validate on, or without any from test files that there are."""
    for split in ("train", "valid", "test"):
        if split in splits or (split == "test" and split not in data.by_split):
            continue
        advice = "Check that its files have rows that are not left out."
        if split in shares:
            advice = f"Raise --{'validation' if split == 'valid' else split}_fraction, or add files."
        if layout.form == "files":
            advice += " Each file counts as one sequence, as no id column was recognised: name one with --id_column."
        raise DataError(f"{source.data_dir}: no sequence is left for the {split} split ({layout.describe()}). {advice}")


def _check_ids(splits: Mapping[str, SplitFiles], layout: Layout, *, may_leak: bool) -> list[str]:
    """Refuse sequences that are in two splits; return notes on ids that several rows of one sequence each share, which is allowed
    but may not be meant."""
    has_ids = (layout.id is not None and not layout.id_names_rows) or layout.form == "files"
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

    for one, other in combinations(hashes, 2):
        shared = np.intersect1d(hashes[one], hashes[other], assume_unique=True)
        if len(shared):
            ids, other_ids = splits[one].table["id"], splits[other].table["id"]
            hashes_N = hash_ids(ids)
            first = int(np.flatnonzero(np.isin(hashes_N, shared))[0])
            twin = int(np.flatnonzero(hash_ids(other_ids) == hashes_N[first])[0])
            id_, here, there = ids[first].as_py(), splits[one].place_of(first), splits[other].place_of(twin)
            column = f" of column {layout.id!r}" if layout.id else ""
            raise DataError(
                f"{counted(len(shared), 'sequence')} in both {one} and {other}, such as id {id_!r}{column} ({here}; {there}): "
                f"the evaluation would be of data seen in training. Remove them from one of the two, or name the column "
                f"that tells sequences apart with --id_column (none: ids start again in each split, rows are sequences)."
            )
    return notes
