"""The sequences of splits in batches that waste little, and what is computed of them as tables in the order of the data.

In: opened data, names of splits, and a function from a batch to a table. Out: tables, and a Parquet or CSV file that is complete
or absent. A window of sequences at a time is sorted by length, cut into batches, computed, and brought back into its order:
memory is that of one window, however many sequences there are.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.dataset import SequenceSet, same_content
from seqvae.errors import StorageError, UsageError
from seqvae.files import MADE_BY, is_csv, replace_file
from seqvae.models.vae import latents_of
from seqvae.monitors.decoder_use import undisturbed

if TYPE_CHECKING:
    from seqvae.inference.model import Model

WINDOW = 8192
"""Sequences that are sorted together: 98 to 99 % of what a batch then holds is real."""
WINDOW_CELLS = 2**22
"""Most numbers of an output; where a step has many of them, or sequences are long, windows are smaller."""
STEPS_AT_ONCE = 4096
"""Most steps of a batch, padding included; a sequence that is longer makes a batch of its own. Measured on two cores: importance
weighting goes through 10 to 25 % fewer steps per second with 1,024 of them, and through 35 % fewer with 16,384."""
BINS_PER_OCTAVE = 16
"""Lengths are alike in the same bin of this scale: up to 22 steps they are equal, above they differ by at most 4.4 %."""
SEQUENCE = "(sequence)"
"""Column with the number of the sequence that a row belongs to."""
SPLITS = ("train", "valid", "test", "pool")
"""Splits in the order in which an output holds them; `pool` is data without splits."""


@contextmanager
def evaluating(network: nn.Module, autocast: torch.dtype | None) -> Iterator[torch.device]:
    """Compute without gradients and dropout, the decoder in `autocast`; yield the network's device.

    The network's mode and torch's random numbers are left as they were.
    """
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    _, prior = latents_of(network)
    precision = torch.autocast(device.type, autocast, enabled=autocast is not None)
    with undisturbed(network, device, precision), prior.fixed():
        yield device


# --- Splits ------------------------------------------------------------------------------------------------------------


def chosen_split(data: SequenceDataModule, requested: str | None) -> str:
    """Return the requested split; by default the one that training did not see."""
    names = list(data.data.splits)
    if requested is None:
        return next((name for name in ("test", "valid", "pool", "train") if name in names), names[0])
    if requested not in names:
        raise UsageError(f"--split {requested}: these data have {' and '.join(names)}")
    return requested


def chosen_splits(data: SequenceDataModule, requested: str | None) -> tuple[str, ...]:
    """Return the requested splits, as in `valid+test`; by default the one that training did not see."""
    parts = [None] if requested is None else requested.split("+")
    names = tuple(chosen_split(data, part) for part in parts)
    if len(set(names)) < len(names):
        raise UsageError(f"--split {requested}: names a split twice")
    return names


def all_splits(data: SequenceDataModule) -> list[str]:
    """Return the names of all splits in the order of an output."""
    return [name for name in SPLITS if name in data.data.splits]


def shares(data: SequenceDataModule, splits: Sequence[str], sequences: int | None) -> list[int]:
    """Return how many sequences to take from each split, in proportion to its size."""
    ends = np.cumsum([len(data.split(split)) for split in splits])
    if sequences is not None and sequences < ends[-1]:
        ends = np.round(ends * sequences / ends[-1])
    return [int(share) for share in np.diff(ends, prepend=0)]


# --- Batches -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A batch of a split, and what its sequences are parts of."""

    split: str
    batch: Batch
    owners_B: np.ndarray
    """int64, the stored sequence that each is a part of: with --long_sequences split one may have many. No two splits share one."""
    is_whole_B: np.ndarray
    """Whether no other sequence of the split has the same owner."""


class Pairs(NamedTuple):
    """A part, and for each of its sequences another one of the split, whose latent it may get in place of its own."""

    part: Part
    others: Batch
    """Row by row; a sequence itself where there is no other one."""
    has_other_B: np.ndarray


def joined_batches(
    data: SequenceDataModule, splits: Sequence[str], *, sequences: int | None = None, seed: int = 0
) -> Iterator[Part]:
    """Yield batches of several splits; `sequences`: how many in all, chosen at random."""
    for number, (split, share) in enumerate(zip(splits, shares(data, splits, sequences), strict=True)):
        if not share:
            continue
        owners_N = data.split(split).windows.owners_N
        windows_S = None if owners_N is None else np.bincount(owners_N)
        for batch in batches_of(data, split, sequences=share, seed=seed):
            owners_B = owners_of(data.split(split), batch.sequences_B.numpy())
            is_whole_B = np.ones(len(owners_B), np.bool_) if windows_S is None else windows_S[owners_B] == 1
            yield Part(split, batch, (number << 48) + owners_B, is_whole_B)


def paired_batches(
    data: SequenceDataModule, splits: Sequence[str], *, sequences: int | None = None, seed: int = 0
) -> Iterator[Pairs]:
    """Yield the batches of `joined_batches`, each sequence with its partner (see `partners`) out of all of its split.

    A partner is no window of the same sequence, or, where sequences are whole, is not of the same content.
    """
    found: dict[str, np.ndarray] = {}
    for part in joined_batches(data, splits, sequences=sequences, seed=seed):
        stored = data.split(part.split)
        if part.split not in found:
            owners_N = stored.windows.owners_N
            # The latent of a sequence of the same content is no other one.
            alike_N = same_content(stored, np.arange(len(stored))) if owners_N is None else owners_N
            found = {part.split: partners(np.asarray(stored.lengths_N), alike_N, seed)}
        sequences_B = part.batch.sequences_B.numpy()
        others_B = found[part.split][sequences_B]
        yield Pairs(part, stored.gather(np.where(others_B >= 0, others_B, sequences_B)), others_B >= 0)


def owners_of(stored: SequenceSet, sequences_B: np.ndarray) -> np.ndarray:
    """Return the stored sequence that each sequence is a part of."""
    owners_N = stored.windows.owners_N
    return sequences_B if owners_N is None else owners_N[sequences_B]


def partners(lengths_N: np.ndarray, owners_N: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return for each sequence another one of like length and of another owner, drawn at random; -1: all are of one owner.

    Where all of like length are of the same owner, it is one of another owner that is as near in length as there is.

    >>> partners(np.array([7, 7, 3, 9]), np.array([0, 1, 2, 2]))
    array([1, 0, 0, 1])
    """
    bins_N = np.floor(BINS_PER_OCTAVE * np.log2(np.maximum(lengths_N, 1))).astype(np.int64)
    order_N = np.lexsort((lengths_N, owners_N, bins_N))
    begins_bin_N = np.diff(bins_N[order_N], prepend=-1) != 0
    begins_owner_N = np.diff(owners_N[order_N], prepend=-1) != 0
    first_N, end_N = _runs(begins_bin_N)
    own_first_N, own_end_N = _runs(begins_bin_N | begins_owner_N)
    own_N = own_end_N - own_first_N
    others_N = end_N - first_N - own_N
    place_N = first_N + (np.random.default_rng(seed).random(len(lengths_N)) * others_N).astype(np.int64)
    place_N += np.where(place_N >= own_first_N, own_N, 0)  # beyond the sequences of the same owner

    # Where bins that follow each other hold one owner alone, its sequences form a run, and the nearest others stand around it.
    below_N, above_N = _runs(begins_owner_N)
    sorted_N = lengths_N[order_N].astype(np.float64)
    around_N2 = np.pad(sorted_N, 1, constant_values=np.inf)[np.stack((below_N, above_N + 1), axis=1)]
    is_below_N = np.abs(around_N2 - sorted_N[:, None]).argmin(axis=1) == 0
    place_N = np.where(others_N > 0, place_N, np.where(is_below_N, below_N - 1, above_N))
    partners_N = np.full(len(lengths_N), -1)
    if (owners_N != owners_N[0]).any():
        partners_N[order_N] = order_N[place_N]
    return partners_N


def _runs(begins_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each place the first place of its run and the first one behind it."""
    bounds = np.append(np.flatnonzero(begins_N), len(begins_N))
    run_N = np.cumsum(begins_N) - 1
    return bounds[run_N], bounds[run_N + 1]


def batches_of(
    data: SequenceDataModule, split: str, *, sequences: int | None = None, seed: int = 0, steps: int = STEPS_AT_ONCE
) -> Iterator[Batch]:
    """Yield batches of a split, short sequences first; `sequences`: how many, chosen at random, the same for the same seed."""
    stored = data.split(split)
    chosen_N = np.arange(len(stored))
    if sequences is not None and sequences < len(stored):
        chosen_N = np.sort(np.random.default_rng(seed).choice(len(stored), sequences, replace=False))
    lengths_N = np.asarray(stored.lengths_N)[chosen_N]
    order_N = np.argsort(lengths_N, kind="stable")
    for part in cut_ascending(lengths_N[order_N], steps):
        yield stored.gather(chosen_N[order_N[part]])


def cut_ascending(lengths_N: np.ndarray, steps: int) -> Iterator[slice]:
    """Cut ascending lengths into slices of at most `steps` steps, padding included."""
    first = 0
    for place, length in enumerate(lengths_N.tolist()):
        if place > first and (place + 1 - first) * length > steps:
            yield slice(first, place)
            first = place
    yield slice(first, len(lengths_N))


# --- Tables in the order of the data -----------------------------------------------------------------------------------


def rows_of(
    data: SequenceDataModule,
    splits: Sequence[str],
    model: "Model",
    compute: Callable[[SequenceSet, Batch], pa.Table],
    *,
    cells_per_step: int = 1,
    with_origin: bool = False,
) -> Iterator[pa.Table]:
    """Yield a table for each window, in the order of the data: `id, split`, and the columns that `compute` makes of a batch.

    `compute` makes one row per sequence, or several one after the other, with the sequence's number in a column SEQUENCE
    (`sequences_B`). A column `window` numbers the windows of longer sequences. `with_origin`: a column `row` with the row of the
    file that each begins in, and where there are several, a column `file`.
    """
    sets = [data.split(split) for split in splits]
    starts = np.cumsum([0, *map(len, sets)])
    origins = [stored.origins(np.arange(len(stored))) for stored in sets]
    several_files = len({int(file) for file_N, _ in origins for file in (file_N.min(), file_N.max())}) > 1
    files = pa.array(sets[0].files, pa.string()) if with_origin and several_files else None
    number_N = numbers_in_order(origins)
    del origins  # as long as the data
    lengths_N = np.concatenate([stored.lengths_N for stored in sets])[number_N]
    with evaluating(model.network, model.autocast) as device:
        for first, end in windows(lengths_N, max(1, WINDOW_CELLS // cells_per_step)):
            number_W, lengths_W = number_N[first:end], lengths_N[first:end]
            split_W = np.searchsorted(starts, number_W, side="right") - 1
            tables, names, places = [], [], []
            for split in np.unique(split_W).tolist():
                stored, places_P = sets[split], np.flatnonzero(split_W == split)
                sequences_P = number_W[places_P] - starts[split]
                order_P = np.argsort(lengths_W[places_P], kind="stable")
                for part in cut_ascending(lengths_W[places_P][order_P], STEPS_AT_ONCE):
                    batch = move_data_to_device(stored.gather(sequences_P[order_P[part]]), device)
                    tables.append(_with_places(compute(stored, batch), sequences_P, places_P))
                names.append(_names_of(stored, splits[split], sequences_P, files, with_row=with_origin))
                places.append(places_P)
            yield in_order(
                pa.concat_tables(tables), pa.concat_tables(names).take(pa.array(np.argsort(np.concatenate(places))))
            )


def numbers_in_order(origins: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the sequences of splits, numbered one split after the other, in the order of the data; `origins`: of each split.

    Splits of different files come one after the other; those that were cut out of the same files go through these together.
    """
    ranges = [(file_N.min(), file_N.max()) for file_N, _ in origins]
    block_S = np.arange(len(origins), dtype=np.int8)  # the first of the splits whose files lie among each other
    for one, (first, last) in enumerate(ranges):
        for other, (other_first, other_last) in enumerate(ranges[:one]):
            if first <= other_last and other_first <= last:
                block_S[np.isin(block_S, block_S[[one, other]])] = block_S[[one, other]].min()
    file_N, row_N = map(np.concatenate, zip(*origins, strict=True))
    return np.lexsort((row_N, file_N, block_S.repeat([len(row_N) for _, row_N in origins])))


def _names_of(
    stored: SequenceSet, split: str, sequences_P: np.ndarray, files: pa.Array | None, *, with_row: bool
) -> pa.Table:
    """Return the columns that say which sequence of the data each is; `files`: the names for a column of them."""
    columns = {"id": pa.array(stored.ids(sequences_P))}
    if (window_P := stored.window_of(sequences_P)) is not None:
        columns["window"] = pa.array(window_P)
    columns["split"] = pa.array([split] * len(sequences_P), pa.string())
    file_P, row_P = stored.origins(sequences_P)
    if files is not None:
        columns["file"] = files.take(pa.array(file_P))
    if with_row:
        columns["row"] = pa.array(row_P)
    return pa.table(columns)


def _with_places(table: pa.Table, sequences_P: np.ndarray, places_P: np.ndarray) -> pa.Table:
    """Return a table with the places of sequences in a window in place of their numbers."""
    order_P = np.argsort(sequences_P)
    found_R = np.searchsorted(sequences_P, table.column(SEQUENCE).to_numpy(), sorter=order_P)
    return table.set_column(table.column_names.index(SEQUENCE), SEQUENCE, pa.array(places_P[order_P[found_R]]))


def windows(lengths_N: np.ndarray, most_steps: int = WINDOW_CELLS) -> Iterator[tuple[int, int]]:
    """Yield the first sequence of each window and the one after its last.

    >>> list(windows(np.full(3, 5), 10))
    [(0, 2), (2, 3)]
    """
    first = 0
    while first < len(lengths_N):
        steps_W = np.cumsum(lengths_N[first : first + WINDOW], dtype=np.int64)
        end = first + max(1, int(np.searchsorted(steps_W, most_steps, side="right")))
        yield first, end
        first = end


def in_order(table: pa.Table, names: pa.Table) -> pa.Table:
    """Sort rows by their sequence, and put the row of `names` that SEQUENCE counts in place of its number."""
    table = table.combine_chunks()
    sequence_R = table.column(SEQUENCE).to_numpy()
    order_R = np.argsort(sequence_R, kind="stable")
    named = names.take(pa.array(sequence_R[order_R]))
    ordered = table.drop_columns([SEQUENCE]).take(pa.array(order_R))
    return pa.table(dict(zip(named.column_names + ordered.column_names, named.columns + ordered.columns, strict=True)))


# --- Files -------------------------------------------------------------------------------------------------------------


def write_tables(path: Path, tables: Iterable[pa.Table], about: Mapping[str, str]) -> int:
    """Write tables one after the other and return the number of rows.

    A path that ends in .csv becomes CSV. Any other becomes Parquet, each table a row group, with `about` in the file's metadata.
    """
    rows = 0
    with new_file(path) as partial, ExitStack() as stack:
        writer: pq.ParquetWriter | pc.CSVWriter | None = None
        for table in tables:
            if is_csv(path):
                table = without_lists(table)
                writer = writer or stack.enter_context(pc.CSVWriter(str(partial), table.schema))
            else:
                table = table.replace_schema_metadata({"made_by": MADE_BY, **about})
                writer = writer or stack.enter_context(pq.ParquetWriter(partial, table.schema, compression="zstd"))
            writer.write_table(table)
            rows += table.num_rows
    return rows


def without_lists(table: pa.Table) -> pa.Table:
    """Return a table that CSV can hold: a list of fixed size becomes columns `mean_0`, `mean_1`, ..., any other list JSON."""
    columns: dict[str, pa.Array] = {}
    for name, values in zip(table.column_names, table.combine_chunks().columns, strict=True):
        if pa.types.is_fixed_size_list(values.type):
            numbers = values.combine_chunks().flatten().to_numpy().reshape(len(values), -1)
            columns |= {f"{name}_{place}": pa.array(numbers[:, place]) for place in range(numbers.shape[1])}
        elif pa.types.is_list(values.type):
            columns[name] = pa.array([json.dumps(one) for one in values.to_pylist()], pa.string())
        else:
            columns[name] = values
    return pa.table(columns)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path beside the real one to write to, which replaces the real one if nothing goes wrong."""
    try:
        with replace_file(path) as partial:
            yield partial
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}). What was there before is whole; choose another path."
        ) from error
