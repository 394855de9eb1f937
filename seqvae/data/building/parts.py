"""The first pass of a cache build, in parts: consecutive rows of the files -> raw arrays on disk.

How the files are cut into parts depends on the files alone, and a part needs nothing of another. So the parts may be read one after
the other, by several processes or on several machines, and the cache comes out the same, byte for byte.

In: the files that can be used. Out: for each part its splits, and what the second pass (`finishing`) has to know of it.

Shapes: R rows of a block, S sequences of a block.
"""

import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import EventEncoder, TokenEncoder, VectorEncoder, make_tokenizer
from seqvae.data.description import DataDescription
from seqvae.data.flat_file import Place, SplitFiles
from seqvae.data.parquet.discovery import POOL, UsableFiles
from seqvae.data.parquet.reader import (
    Block,
    BlockReader,
    Stretch,
    bring_together,
    first_scattered_row,
    hash_ids,
    ordered_sequences,
    whole_files,
)
from seqvae.data.parquet.schema import Layout, RowGroup
from seqvae.data.parquet.side_tables import ids_as_text, label_names
from seqvae.data.storage import DataFile
from seqvae.errors import DataError, StorageError

log = logging.getLogger(__name__)
PART_BYTES = 128 << 20
"""Size of a part, as its row groups are before compression."""
PARTS = "parts"
"""Name of the folder of a cache that parts lie in while it is built."""
Encoder = TokenEncoder | VectorEncoder | EventEncoder
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""Calls a function with each of some things and yields the results in their order, as `map` does; others do it side by side."""
Pieces = Iterator[tuple[np.ndarray, np.ndarray]]
"""Arrays of names (as numbers) and of their values, NaN where missing."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The settings and the files that the readings of all parts share."""

    layout: Layout
    source: SourceSettings
    files: Sequence[DataFile]
    """All of them, as the tables of sequences number them."""
    subjects: pd.Series | None
    """The split of each id, where a table tells it."""
    shares: Mapping[str, float]
    """The splits that the files lack, and the share of the training sequences (or the pool) that each gets."""
    known: DataDescription | None
    """What a trained network knows of such data."""
    keeps_values: bool
    width: int = 0
    """Values per step of lists of vectors; 0: as many as the first one has."""


class Request(NamedTuple):
    """A part to read."""

    directory: Place
    group: str
    """The split of its files, or the pool."""
    stretches: Sequence[Stretch]
    rows: int
    is_scattered: bool = False
    """Whether rows of one sequence lie apart."""


class Part(NamedTuple):
    """A part that was read."""

    splits: dict[str, SplitFiles]
    symbols: tuple[str, ...]
    """What its raw numbers of tokens or variables stand for; (): for themselves."""
    repairs: Counter[tuple[str, str]]
    """What was left out or changed: a noun, and the rest of a sentence about n of these."""
    shortest_gap: float
    longest_gap: float
    """Of vectors: between the times of two steps of a sequence."""
    width: int
    """Of vectors: values per step."""


# --- Cutting into parts -------------------------------------------------------------------------------------------------


def plan_parts(usable: UsableFiles, source: SourceSettings, directory: Place) -> list[Request]:
    """Return the parts that the files are read in: of each split, or the pool, one or more."""
    requests: list[Request] = []
    for group, paths in usable.by_split.items():
        is_scattered, cuts = False, [*_cuts(paths, usable)]
        if usable.layout.form == "table":
            place, beginnings = first_scattered_row(BlockReader(usable.paths, usable.layout), paths)
            if place is not None:
                if source.unsorted == "error":
                    raise DataError(
                        f"{place}: the id in column {usable.layout.id!r} occurred before, with other ids in between. Sort the rows "
                        f"by id and time, or say --unsorted sort."
                    )
                log.info("%s: rows of one sequence lie apart, bringing them together", place)
            is_scattered = place is not None
            cuts = _merged(cuts, set() if is_scattered else beginnings)
        requests += [Request(directory, group, *cut, is_scattered) for cut in cuts]
    if len(requests) == 1 and isinstance(directory, Path):
        return requests
    return [one._replace(directory=directory / PARTS / f"{number:06}") for number, one in enumerate(requests)]


def _cuts(paths: Sequence[DataFile], usable: UsableFiles) -> Iterator[tuple[list[Stretch], int]]:
    """Yield stretches that come to about `PART_BYTES`, and their rows; of tables, stretches are whole files."""
    stretches: list[Stretch] = []
    rows = size = 0
    for whole in whole_files(usable.rows_of(paths)):
        row_groups = usable.row_groups[whole.path]
        pieces = _group_runs(row_groups) if usable.layout.form == "rows" else [tuple(range(len(row_groups)))]
        first_row = 0
        for groups in pieces:
            stretches.append(whole._replace(first_row=first_row, groups=groups))
            first_row += (in_piece := sum(row_groups[group].rows for group in groups))
            rows, size = rows + in_piece, size + sum(row_groups[group].bytes for group in groups)
            if size >= PART_BYTES:
                yield stretches, rows
                stretches, rows, size = [], 0, 0
    if stretches:
        yield stretches, rows


def _group_runs(row_groups: Sequence[RowGroup]) -> list[tuple[int, ...]]:
    """Return consecutive row groups of a file that come to about `PART_BYTES`."""
    runs: list[tuple[int, ...]] = [()]
    size = 0
    for number, group in enumerate(row_groups):
        if size >= PART_BYTES:
            runs.append(())
            size = 0
        runs[-1] += (number,)
        size += group.bytes
    return runs


def _merged(cuts: Sequence[tuple[list[Stretch], int]], beginnings: set[DataFile]) -> list[tuple[list[Stretch], int]]:
    """Return the cuts, each that begins within a sequence put to the one before; `beginnings` are the files that do not."""
    merged: list[tuple[list[Stretch], int]] = []
    for stretches, rows in cuts:
        if merged and stretches[0].path not in beginnings:
            before, rows_before = merged.pop()
            stretches, rows = before + stretches, rows_before + rows
        merged.append((stretches, rows))
    return merged


# --- Reading ------------------------------------------------------------------------------------------------------------


def read_parts(reading: Reading, requests: Sequence[Request], each: Each) -> list[Part]:
    """Read all parts."""
    if len(requests) > 1 and reading.layout.kind == "vectors" and not reading.layout.features and not reading.width:
        reader = make_reader(reading)
        encoder = make_encoder(reader, reading)
        assert isinstance(encoder, VectorEncoder)
        for block in reader([stretch for request in requests for stretch in request.stretches]):
            encoder(block)
            if encoder.width:
                break
        reading = replace(reading, width=encoder.width)  # of the first vector: all others have to be as long
    return list(each(partial(read_part, reading), requests))


def read_part(reading: Reading, request: Request) -> Part:
    """Write the raw arrays of a part, and the table of its sequences."""
    reader = make_reader(reading)
    encoder = make_encoder(reader, reading)
    blocks = reader(request.stretches)
    if request.is_scattered:
        reader.repairs["row", "brought together by id, as rows of one sequence lay apart"] += request.rows
        here = request.directory
        spill = here / "spill" if isinstance(here, Path) else Path(mkdtemp(prefix="seqvae-"))
        blocks = bring_together(blocks, request.rows, spill)
    if reading.layout.form != "rows":
        blocks = ordered_sequences(reader, blocks, reading.source.unsorted)
    shares = reading.shares if request.group in (POOL, "train") else {}
    splits: dict[str, SplitFiles] = {}
    with ExitStack() as stack:
        for block in blocks:
            encoded = encoder(block)
            table, masks = _assign(block, encoded.first_rows_S, request.group, reading.subjects, shares, reader)
            for split, keep_S in masks.items():
                if keep_S.any():
                    if split not in splits:
                        place = request.directory / split
                        splits[split] = SplitFiles(place, reading.files, keeps_values=reading.keeps_values)
                        stack.callback(splits[split].release)
                    kept = encoded.keep(keep_S)
                    arrays = kept.steps | (kept.events or {})
                    rows = table.filter(pa.array(keep_S))
                    splits[split].append(rows, kept.lengths_S, kept.events_per_step_T, arrays)
        for files in splits.values():
            files.close()
        stack.pop_all()
    symbols: Sequence[str] = ()
    if isinstance(encoder, EventEncoder):
        symbols = [*encoder.number_of]
    elif isinstance(encoder, TokenEncoder) and encoder.tokenizer is not None:
        symbols = encoder.tokenizer.symbols()
    of_vectors = (np.inf, 0.0, 0)
    if isinstance(encoder, VectorEncoder):
        of_vectors = encoder.shortest_gap, encoder.longest_gap, encoder.width
    return Part(splits, tuple(symbols), reader.repairs, *of_vectors)


def join_rows(parts: Sequence[Part], directory: Place, reading: Reading) -> dict[str, SplitFiles]:
    """Return the splits of all parts together, so far without arrays; those of a single part as they are."""
    if len(parts) == 1 and isinstance(directory, Path):
        return parts[0].splits
    splits: dict[str, SplitFiles] = {}
    for part in parts:
        for split, files in part.splits.items():
            if split not in splits:
                splits[split] = SplitFiles(directory / split, reading.files)
            splits[split].join_rows(files)
    for files in splits.values():
        files.close()
    return splits


def make_reader(reading: Reading) -> BlockReader:
    return BlockReader(reading.files, reading.layout, reading.source.bad_values, reading.source.codes_for_missing)


def make_encoder(reader: BlockReader, reading: Reading) -> Encoder:
    """Return the encoder of the layout's kind; refuse data of another kind than the network's, and flags that would change
    nothing, as these were meant otherwise."""
    layout, source, known = reader.layout, reading.source, reading.known
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
        return VectorEncoder(reader, width=reading.width or len(layout.features))
    if known is not None:
        tokenizer = make_tokenizer(known.tokenizer, is_content=True) if known.tokenizer else None
        return TokenEncoder(reader, tokenizer, known.vocabulary_size, "that the network was trained on")
    tokenizer = make_tokenizer(source.tokenizer) if source.tokenizer else None
    limited_by = f"of --vocabulary_size {source.vocabulary_size}"
    return TokenEncoder(reader, tokenizer, source.vocabulary_size, limited_by)


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


# --- Side by side ---------------------------------------------------------------------------------------------------------


@contextmanager
def side_by_side(workers: int) -> Iterator[Each]:
    """Yield what works on so many parts at a time; of the errors of several, that of the first part is raised."""
    if workers == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of pyarrow's threads, held or not
    with ProcessPoolExecutor(workers, context, pa.set_cpu_count, (1,)) as pool:

        def each(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            futures = [pool.submit(function, item) for item in items]
            try:
                for future in futures:
                    yield future.result()
            except BrokenProcessPool as error:
                raise StorageError(
                    f"one of {workers} processes that build the cache was killed, most often as memory ran out: lower --workers"
                ) from error
            finally:  # after an error no part is written any more, so that its directory can be removed
                for future in futures:
                    future.cancel()
                wait(futures)

        yield each
