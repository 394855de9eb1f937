"""Parquet files -> the files of a cache, in one streaming pass over the Parquet (`parts`) and one over what it left on disk
(`finishing`).

Memory stays flat however large the data: blocks are bounded, raw arrays go to disk as they come, and what depends on
the whole training split (vocabulary, moments, the smallest integer type) is applied in a second pass over those arrays.

The split of a sequence comes from its folder, from a MEDS table, or from a hash of its id; none may be in two splits.

Shapes: N sequences of a split.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import TokenEncoder, VectorEncoder
from seqvae.data.building.finishing import SecondPass, finish_events, finish_labels, finish_tokens, finish_vectors
from seqvae.data.building.parts import (
    PARTS,
    Each,
    Part,
    Reading,
    join_rows,
    make_encoder,
    make_reader,
    plan_parts,
    read_parts,
)
from seqvae.data.building.stored_parts import read_missing_parts
from seqvae.data.description import DataDescription, FittedPreprocessing
from seqvae.data.flat_file import Place, SplitFiles
from seqvae.data.parquet.discovery import POOL, ColumnRow, DataFiles, UsableFiles, usable_files
from seqvae.data.parquet.reader import BlockReader, hash_ids, whole_files
from seqvae.data.parquet.schema import Layout
from seqvae.data.parquet.side_tables import label_names, read_code_names, read_subject_splits
from seqvae.data.storage import DataFile
from seqvae.errors import DataError
from seqvae.text import counted, measure

UNEVEN = 1.5
"""Longest over shortest gap between two steps, above which times say more than an order does."""


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
    data: DataFiles,
    source: SourceSettings,
    directory: Place,
    preprocessing: FittedPreprocessing | None = None,
    each: Each = map,
) -> Built:
    """Write the files of a cache; with `preprocessing`, data are read as a trained network understands them.

    `each` calls functions with parts of the data: one after the other, or side by side. The files come out the same. The parts
    of a cache in a store stay there.
    """
    usable = usable_files(data, source)
    layout = usable.layout
    if data.codes and any(row.part == "variable" and "int" in row.type for row in usable.columns):
        code_names = read_code_names(data.codes)
        known = () if preprocessing is None else preprocessing.description.names
        if preprocessing is None or any(name in known for _, name in code_names):  # else it was trained on the numbers
            layout = replace(layout, code_names=code_names)
    shares = hashed_shares(data, source, preprocessing)
    reading = Reading(
        layout=layout,
        source=source,
        files=usable.paths,
        subjects=read_subject_splits(data.subject_splits) if data.subject_splits else None,
        shares=shares,
        known=None if preprocessing is None else preprocessing.description,
        keeps_values=preprocessing is not None and preprocessing.keeps_values,
    )
    encoder = make_encoder(make_reader(reading), reading)  # refuses flags that change nothing before anything is read
    with ExitStack() as stack:
        read = read_parts if isinstance(directory, Path) else read_missing_parts
        parts = read(reading, plan_parts(usable, source, directory), each)
        repairs = sum((part.repairs for part in parts), Counter[tuple[str, str]]())
        splits = join_rows(parts, directory, reading)
        for files in (*splits.values(), *(files for part in parts for files in part.splits.values())):
            stack.callback(files.release)
        if reading.known is None:
            _refuse_missing_splits(splits, data, layout, source, shares)
        elif not splits:
            raise DataError(
                f"{source.data_dir}: no sequence is left ({layout.describe()}). Check what is left out, and why."
            )
        repeated_ids = _check_ids(splits, layout, may_leak=len(data.by_split) > 1)
        second = SecondPass(parts, splits, source, reading.known, each)
        if isinstance(encoder, TokenEncoder):
            finished = finish_tokens(second, encoder.tokenizer)
        elif isinstance(encoder, VectorEncoder):
            finished = finish_vectors(second, layout)
        else:
            finished = finish_events(second, layout.time_unit)
        classes, label_notes = finish_labels(splits, layout, source)
    if isinstance(directory, Path):
        shutil.rmtree(directory / PARTS, ignore_errors=True)
    whole = "pool" if POOL in data.by_split else "training split"
    notes = [f"{split}: {share:.0%} of the {whole}, by a hash of the sequence's id" for split, share in shares.items()]
    notes += [f"{counted(count, noun)} {what}" for (noun, what), count in repairs.items()]
    if isinstance(encoder, VectorEncoder):
        notes += _note_on_times(parts, layout)
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
    return Built(layout, description, entries, every_note, tuple(notes), usable.columns, usable.paths, usable.bad_files)


def relabel(twin: Path, meta: Mapping[str, Any], usable: UsableFiles, source: SourceSettings, directory: Path) -> Built:
    """Write the files of a cache that differs from another, `twin`, in nothing but labels and ids: no sequence is read again."""
    layout, paths = usable.layout, usable.paths
    has_other_ids = layout.id != meta["roles"]["id"]
    columns: dict[str, pa.ChunkedArray] = {}
    if has_other_ids or layout.label is not None:
        read = BlockReader(paths, replace(layout, sequence=None, features=(), id=layout.id if has_other_ids else None))
        groups = map(usable.rows_of, usable.by_split.values())
        blocks = [block.columns for rows_of in groups for block in read(whole_files(rows_of))]
        columns = {name: pa.chunked_array([block[name] for block in blocks]) for name in blocks[0].schema.names}
    first_rows = np.cumsum([0, *usable.rows_of(paths).values()])
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


def _note_on_times(parts: Sequence[Part], layout: Layout) -> list[str]:
    """Return what is lost of the times of vectors, which are taken as steps of equal length."""
    shortest, longest = min(part.shortest_gap for part in parts), max(part.longest_gap for part in parts)
    if longest <= UNEVEN * shortest:
        return []
    unit = f" {layout.time_unit}" if layout.time_unit == "minutes" else ""
    return [
        f"steps are {measure(shortest)} to {measure(longest)}{unit} apart (column {layout.time!r}), but vectors keep only their "
        f"order: --kind events keeps the times"
    ]


# --- Splits ---------------------------------------------------------------------------------------------------------


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
