"""An opened cache and the limits of its batches -> what is worth knowing before training: numbers, and warnings.

All counts are of what is stored, before the length cap, and, unless a field says otherwise, of the training split. They come from
plain passes over a cache's flat files, a piece at a time, so that memory stays bounded. "Names": token ids, features or variables.

Rows of tables are named tuples: a field is a column, None stands where it has no meaning for this kind of sequence.

Shapes: S stored sequences, N sequences after the length cap, K batches or shown names, V names, U names that occur, E values one
behind the other, Q quantiles.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pat
from torch import Tensor

from seqvae.data.batch import Batch
from seqvae.data.batching import Cut, Limits, cut_batches, grid_steps, plan_epoch
from seqvae.data.building.finishing import FAR_OUT
from seqvae.data.building.parts import Pieces
from seqvae.data.cache import SequenceData
from seqvae.data.dataset import read_meta
from seqvae.data.description import UNKNOWN, Kind
from seqvae.data.flat_file import PIECE_ITEMS, map_flat, read_pieces
from seqvae.data.parquet.discovery import ColumnRow
from seqvae.data.parquet.schema import PEEK_ROWS, STRAY_INDEX, is_numbered, is_text
from seqvae.text import some

NO_LABEL = "(none)"
PLAIN_BATCHES = (64, 4)
"""Sequences of the random batches that the chosen ones are compared with."""
FEW_VALUES, MOST_CLASSES = 0.25, 20
"""Values of an unused column, as a share of the rows that are looked at, up to which it may be of use; and how many a label has."""
COPIED, MOST_COMPARED = 0.01, 20_000
"""Share of the training sequences that are copies of others which is worth a note, and how many are compared."""
FEW_SEQUENCES = 100
"""Training sequences below which a model is likely to learn them by heart."""
MUCH_LOST = 0.1
"""Share of the training steps lost to the length cap that is worth a warning."""
MANY_SINGLE = 0.1
"""Share of training sequences of a single step that is worth a warning."""
MOSTLY_MISSING = 0.95
"""Share of a feature's values that are missing from which on it deserves a warning."""
MOST_MISSING_NAMED = 8
"""Features of mostly missing values that are warned of by name."""
SPARSE_IDS = 0.1
"""Share of a vocabulary that occurs, below which its ids look like hashes, or like those of another vocabulary."""
LARGE_VOCABULARY = 1000
"""A smaller one costs next to nothing, however little of it occurs."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BIN = 0.02
"""Standard deviations: how fine the quantiles are."""
REACH = 5.0
"""Standard deviations from the mean beyond which all values count as equal."""
MOST_DRAWN = 20
"""Names whose values are worth a picture; the figure of the report has room for as many."""
SMALLEST_DIGIT = 1e-6
"""Of a standard deviation: less is rounding, as values are stored in float32."""
SEQUENCES_AT_ONCE = 4096


class SplitRow(NamedTuple):
    """One split as it is stored, before the length cap."""

    split: str
    sequences: int
    steps: int
    events: int | None
    mean: float
    """Steps of a sequence, and so are the next two."""
    median: float
    longest: int
    over_cap: int | None
    """Sequences longer than the cap; None: none."""
    unknown: float | None
    """Share of the tokens or events that count as <unknown>; None: none, or there is no such thing."""


class LabelRow(NamedTuple):
    label: str
    train: int
    valid: int
    test: int | None = None


class BatchRow(NamedTuple):
    """An epoch of the training split, cut into batches in one way."""

    batches: str
    per_epoch: int
    updates: int
    """Optimizer steps of an epoch."""
    sequences: float
    """In a batch, on average."""
    efficiency: float
    """Real steps / padded steps."""
    largest: int
    """Padded steps of the largest batch."""
    memory: int
    """Bytes of that batch's tensors."""


class Candidate(NamedTuple):
    """A column that is not used, and may be of use."""

    column: str
    values: int
    is_label: bool
    """Else it may be a group of sequences."""


class TimeSpans(NamedTuple):
    """Events of the training split, in the data's unit of time."""

    median_span: float
    """From the first to the last step of a sequence."""
    mean_gap: float
    """From step to step."""
    unit: str


class NameRow(NamedTuple):
    """A token, feature or variable; values in their own units. None where a field has no meaning for the kind."""

    name: str
    seen: int | None = None
    """How often it occurs."""
    share: float | None = None
    in_sequences: float | None = None
    """Share of the sequences that have it."""
    missing: float | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    far_out: int | None = None


class Names(NamedTuple):
    """The tokens, features or variables."""

    possible: int
    """How many a model has to reckon with."""
    total: int
    """How many of them occur."""
    rows: tuple[NameRow, ...]
    """Of tokens and variables the most frequent; of features all, or those with the most missing values."""
    warnings: tuple[str, ...] = ()
    counts_U: np.ndarray | None = None
    """Tokens: how often each one occurs, descending."""
    missing: dict[str, np.ndarray] | None = None
    """Features: per split the share of missing values of each row."""
    quantiles_KQ: np.ndarray | None = None
    """Features and variables: `QUANTILES` of the first `MOST_DRAWN` rows, in standard deviations from the mean."""


class FlatSplit(NamedTuple):
    """The flat files of one split: the sequences as they are in the Parquet, whatever the length cap."""

    directory: Path
    arrays: dict[str, dict[str, Any]]
    """The entries that `map_flat` reads."""

    def map(self, name: str) -> np.ndarray:
        return map_flat(self.directory, self.arrays[name])

    def pieces(self, name: str, items: int = PIECE_ITEMS) -> Iterator[np.ndarray]:
        entry = self.arrays[name]
        return read_pieces(self.directory / entry["file"], np.dtype(entry["dtype"]), items)


class Inspection(NamedTuple):
    """The contents of a cache, and what would become of them in training."""

    kind: Kind
    layout: str
    """What was detected, in one line."""
    cache: str
    """The directory of the converted data."""
    cap: int
    """--max_sequence_length."""
    accumulate: int
    """Batches of an optimizer step."""
    notes: tuple[str, ...]
    """What a user should know; those that begin with "warning: " are the gravest."""
    files: int
    """Parquet files that were found."""
    bytes: int
    """Size of those files."""
    splits: tuple[SplitRow, ...]
    lengths: dict[str, np.ndarray]
    """Per split, int64 [S], before the cap."""
    columns: tuple[ColumnRow, ...]
    bad_files: tuple[str, ...]
    """Why each file that was left out was left out."""
    names: Names
    time: TimeSpans | None
    labels: tuple[LabelRow, ...]
    candidates: tuple[Candidate, ...]
    batches: tuple[BatchRow, ...]
    warnings: tuple[str, ...]
    """What may spoil a training, one sentence each."""


def inspect_cache(data: SequenceData, cap: int, limits: Limits, cut: Cut, *, accumulate: int, most: int) -> Inspection:
    """Look at an opened cache.

    `cut` is how the training split is cut under `limits`; names (tokens, features, variables) get at most `most` rows.
    """
    meta, about = read_meta(data.path), data.description
    stored = {split: FlatSplit(data.path / split, entry["arrays"]) for split, entry in meta["splits"].items()}
    flat = {split: stored[split] for split in ("train", "valid", "test") if split in stored}
    lengths = {split: np.diff(files.map("offsets")) for split, files in flat.items()}
    names = {"tokens": _tokens, "vectors": _features, "events": _variables}[about.kind](data, flat, most)
    labels: list[LabelRow] = []
    if about.classes:
        named = (NO_LABEL, *about.classes)
        counts_of = {
            split: np.bincount(files.map("labels") + 1, minlength=len(named)).tolist() for split, files in flat.items()
        }
        for k, label in enumerate(named):
            row = LabelRow(label, **{split: of_split[k] for split, of_split in counts_of.items()})
            if label != NO_LABEL or row.train or row.valid or row.test:
                labels.append(row)
    sizes = [file["size"] for file in meta["files"] if file["size"] >= 0]
    splits = []
    for split, lengths_S in lengths.items():
        counts, unknown = data.counts[split], None
        if about.symbols[:1] == (UNKNOWN,):
            unknown = counts["unknown"] / counts["steps"]
        elif about.kind == "events":
            unknown = counts["per_name"][0] / counts["events"] or None
        splits.append(
            SplitRow(
                split=split,
                sequences=counts["sequences"],
                steps=counts["steps"],
                events=counts.get("events"),
                mean=float(lengths_S.mean()),
                median=float(np.median(lengths_S)),
                longest=int(lengths_S.max()),
                over_cap=int((lengths_S > cap).sum()) or None,
                unknown=unknown,
            )
        )
    time = None
    if about.kind == "events":
        train, lengths_S = flat["train"], lengths["train"]
        spans_S = np.add.reduceat(train.map("gaps"), train.map("offsets")[:-1], dtype=np.float64)
        gaps = int(lengths_S.sum()) - len(lengths_S)
        time = TimeSpans(float(np.median(spans_S)), float(spans_S.sum() / max(1, gaps)), about.time_unit)
    return Inspection(
        kind=about.kind,
        layout=data.layout,
        cache=str(data.path),
        cap=cap,
        accumulate=accumulate,
        notes=(
            *data.notes,
            *_copies(flat["train"], lengths["train"], about.kind),
            *([limits.hint] if limits.hint else ()),
        ),
        files=len(sizes),
        bytes=sum(sizes),
        splits=tuple(splits),
        lengths=lengths,
        columns=tuple(ColumnRow(**column) for column in meta["columns"]),
        bad_files=tuple(meta["bad_files"]),
        names=names,
        time=time,
        labels=tuple(labels),
        candidates=tuple(_candidates(meta)),
        batches=tuple(_batch_rows(data, limits, cut, accumulate)),
        warnings=tuple(_warnings(lengths["train"], data.splits["train"].lengths_N, cap, names, labels)),
    )


def _candidates(meta: dict[str, Any]) -> Iterator[Candidate]:
    """Yield the unused columns that the first rows of one file show to have few values, as labels and groups have."""
    path, roles = Path(meta["files"][meta["sources"][0]]["path"]), meta["roles"]
    unused = [row["column"] for row in meta["columns"] if row["part"] is None]
    if not path.is_file():  # it is in a store
        return
    try:
        with pq.ParquetFile(path) as file:
            types = {field.name: field.type for field in file.schema_arrow if field.name in unused}
            names = [name for name, of in types.items() if is_text(of) or pat.is_integer(of) or pat.is_boolean(of)]
            names = [name for name in names if not STRAY_INDEX.fullmatch(name)]
            identity = [roles["id"]] if roles["form"] == "table" else []
            batch = next(file.iter_batches(batch_size=PEEK_ROWS, columns=[*identity, *names]), None) if names else None
    except (pa.ArrowException, OSError, UnicodeDecodeError):  # what is not used may be damaged
        return
    if batch is None:
        return
    table = batch.to_pandas()
    for name in names:
        if identity and (table.groupby(identity[0], observed=True)[name].nunique() > 1).any():
            continue  # it changes within a sequence
        rows = table[identity[0]].nunique() if identity else len(table)
        values = int(table[name].nunique())
        if values < 2 or values > FEW_VALUES * rows:
            continue
        is_label = values <= MOST_CLASSES and not is_numbered(name)
        if (is_label and roles["label"] is None) or (not is_label and roles["form"] == "rows" and roles["id"] is None):
            yield Candidate(name, values, is_label)


def _copies(train: FlatSplit, lengths_S: np.ndarray, kind: Kind) -> Iterator[str]:
    """Yield a note where many sequences of tokens or vectors are the same."""
    count = min(MOST_COMPARED, len(lengths_S))
    if kind == "events":
        return
    flat = train.map(kind.replace("vectors", "values"))
    width = len(flat) // int(lengths_S.sum())
    ends_S = width * np.cumsum(lengths_S[:count])
    distinct = len({flat[end - width * steps : end].tobytes() for end, steps in zip(ends_S, lengths_S, strict=False)})
    if count - distinct > COPIED * count:
        yield f"{count - distinct:,} of the first {count:,} training sequences are exact copies of others"


def _batch_rows(data: SequenceData, limits: Limits, cut: Cut, accumulate: int) -> Iterator[BatchRow]:
    train = data.splits["train"]
    lengths_N = train.lengths_N
    events_per_step = data.counts["train"].get("events", 0) / data.counts["train"]["steps"]
    ways = [("as chosen", limits, cut)]
    if limits.grid:
        ungridded = limits._replace(grid=(), last_shape=None)
        ways.append(("--pad_grid 0", ungridded, cut_batches(lengths_N, ungridded)))
    for number in PLAIN_BATCHES:
        plain = Limits(number, number * int(lengths_N.max()), None)
        ways.append((f"random {number}", plain, cut_batches(lengths_N, plain, bucketing=False)))
    one = train.gather(np.zeros(1, np.int64))
    for name, way, its_cut in ways:
        plan = plan_epoch(its_cut, seed=0, epoch=0)
        begins_K = plan.starts_K1[:-1]
        ordered_N = lengths_N[plan.order_N[: plan.starts_K1[-1]]]
        rows_K = np.diff(plan.starts_K1)
        if way.grid:
            padded_K = grid_steps(its_cut, way)
        else:
            padded_K = rows_K * (way.pad_to or np.maximum.reduceat(ordered_N, begins_K))
        largest = int(padded_K.argmax())
        events = round(events_per_step * int(np.add.reduceat(ordered_N, begins_K, dtype=np.int64)[largest]))
        yield BatchRow(
            batches=name,
            per_epoch=plan.batches,
            updates=-(-plan.batches // accumulate),
            sequences=float(rows_K.mean()),
            efficiency=float(ordered_N.sum(dtype=np.int64) / padded_K.sum()),
            largest=int(padded_K[largest]),
            memory=batch_bytes(one, int(rows_K[largest]), int(padded_K[largest]), events),
        )


def batch_bytes(one: Batch, rows: int, padded_steps: int, events: int) -> int:
    """Return the bytes of the tensors of a larger batch, judged by one of a single sequence.

    What a tensor grows with is the end of its name: padded steps (_BT, _BTD), sequences (_B) or events (_E).
    """
    total = 0
    for name, tensor in one._asdict().items():
        if isinstance(tensor, Tensor):
            shape = name.rpartition("_")[2]
            items = padded_steps if shape.startswith("BT") else rows if shape == "B" else events
            per_item = tensor[0, 0] if shape.startswith("BT") else tensor[0]
            total += items * per_item.numel() * per_item.element_size()
    return total


def _warnings(
    lengths_S: np.ndarray, lengths_N: np.ndarray, cap: int, names: Names, labels: list[LabelRow]
) -> Iterator[str]:
    if len(lengths_S) < FEW_SEQUENCES:
        yield f"only {len(lengths_S)} training sequences: a model is likely to learn them by heart"
    lost = 1 - float(lengths_N.sum(dtype=np.int64) / lengths_S.sum())
    if lost > MUCH_LOST:
        yield (
            f"{lost:.0%} of the training steps are lost to --max_sequence_length {cap}: raise it, or keep them as windows "
            f"with --long_sequences split"
        )
    single = float((lengths_S == 1).mean())
    if single > MANY_SINGLE:
        yield f"{single:.0%} of the training sequences have a single step: is the id column the right one?"
    yield from names.warnings
    named = [row for row in labels if row.label != NO_LABEL]
    for split in ("train", "valid", "test"):
        if absent := [row.label for row in named if getattr(row, split) == 0]:
            yield f"{split}: {len(absent)} of {len(named)} labels do not occur there: {some(absent)}"


# --- The tokens, features or variables ---------------------------------------------------------------------------------


def _tokens(data: SequenceData, flat: dict[str, FlatSplit], most: int) -> Names:
    symbols, size = data.description.symbols, data.description.vocabulary_size
    ids_U, counts_U = _count_ids(flat["train"])
    total = int(counts_U.sum())
    rows = [
        NameRow(f"'{symbols[token]}'" if symbols else str(token), count, count / total)
        for token, count in zip(ids_U[:most].tolist(), counts_U[:most].tolist(), strict=True)
    ]
    warnings = []
    if symbols[:1] != (UNKNOWN,):  # or what training never shows counts as <unknown>
        for name in [name for name in flat if name != "train"]:
            found_U, found_counts_U = _count_ids(flat[name])
            unseen_U = ~np.isin(found_U, ids_U)
            if unseen_U.any():
                warnings.append(
                    f"{name}: {found_counts_U[unseen_U].sum():,} of {found_counts_U.sum():,} tokens are of {unseen_U.sum():,} ids "
                    f"that never occur in the training split"
                )
    if size > LARGE_VOCABULARY and len(ids_U) < SPARSE_IDS * size and not symbols:
        warnings.append(
            f"the ids go up to {size - 1:,}, but only {len(ids_U):,} of them occur: the model's vocabulary would be "
            f"{size / len(ids_U):,.0f} times as large as it need be. Number them 0, 1, 2, ..."
        )
    return Names(size, len(ids_U), tuple(rows), tuple(warnings), counts_U=counts_U)


def _count_ids(split: FlatSplit) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids that occur, the most frequent first, and how often they do. The largest may be a hash."""
    total = pd.Series(dtype=np.int64)
    for ids_T in split.pieces("tokens"):
        counts = pd.Series(ids_T).value_counts()
        total = counts if total.empty else pd.concat([total, counts]).groupby(level=0).sum()
    ids_U, counts_U = total.index.to_numpy(np.int64), total.to_numpy(np.int64)
    order = np.lexsort((ids_U, -counts_U))
    return ids_U[order], counts_U[order]


def _features(data: SequenceData, flat: dict[str, FlatSplit], most: int) -> Names:
    about, width = data.description, len(data.description.names)

    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for values_E in flat["train"].pieces("values", max(1, PIECE_ITEMS // width) * width):
            yield np.tile(np.arange(width), len(values_E) // width), values_E

    rows = _value_rows(data, pieces)
    missing = {name: np.array(data.counts[name]["missing"]) / data.counts[name]["steps"] for name in flat}
    shown_K = np.arange(width)
    if width > most:
        far_V = np.array([row.far_out for row in rows])
        shown_K = np.lexsort((-far_V, -missing["train"]))[:most]
    shown = [rows[v]._replace(missing=float(missing["train"][v])) for v in shown_K.tolist()]
    empty = [v for v in np.flatnonzero(missing["train"] > MOSTLY_MISSING).tolist() if rows[v].mean is not None]
    named = empty[:MOST_MISSING_NAMED]
    warnings = [f"{about.names[v]}: {missing['train'][v]:.1%} of its values are missing" for v in named]
    if len(empty) > len(named):
        warnings.append(f"{len(empty) - len(named)} more features are as empty")
    shown_missing = {name: share_V[shown_K] for name, share_V in missing.items()}
    drawn_KQ = quantiles(pieces, width, shown_K[:MOST_DRAWN])
    return Names(width, width, tuple(shown), tuple(warnings), missing=shown_missing, quantiles_KQ=drawn_KQ)


def _variables(data: SequenceData, flat: dict[str, FlatSplit], most: int) -> Names:
    counts, size, train = data.counts["train"], len(data.description.names), flat["train"]

    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return zip(train.pieces("variables"), train.pieces("values"), strict=True)

    rows = _value_rows(data, pieces)
    number_V, valued_V = np.array(counts["per_name"]), np.array(counts["valued"])
    sequences_V = np.zeros(size, np.int64)  # in how many each variable occurs
    ends_S1, variables_E = train.map("event_offsets")[train.map("offsets")], train.map("variables")
    at_once = max(1, min(SEQUENCES_AT_ONCE, (1 << 26) // size))
    for begin in range(0, len(ends_S1) - 1, at_once):
        bounds = ends_S1[begin : begin + at_once + 1]
        sequence_E = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        seen_SV = np.zeros((len(bounds) - 1, size), bool)
        seen_SV[sequence_E, variables_E[bounds[0] : bounds[-1]]] = True
        sequences_V += seen_SV.sum(axis=0)
    order_V = np.argsort(-number_V, kind="stable")
    order_U = order_V[number_V[order_V] > 0]
    shown = [
        rows[v]._replace(
            seen=int(number_V[v]),
            in_sequences=float(sequences_V[v] / counts["sequences"]),
            missing=float(1 - valued_V[v] / number_V[v]),
        )
        for v in order_U[:most].tolist()
    ]
    drawn_KQ = quantiles(pieces, size, order_U[:most][:MOST_DRAWN])
    return Names(size, len(order_U), tuple(shown), quantiles_KQ=drawn_KQ)


def _value_rows(data: SequenceData, pieces: Callable[[], Pieces]) -> list[NameRow]:
    """Return mean, standard deviation, range and outliers of each feature or variable; None where it has no value."""
    about, size = data.description, len(data.description.names)
    far_V, lowest_V, highest_V = np.zeros(size, np.int64), np.full(size, np.nan), np.full(size, np.nan)
    for names_E, values_E in pieces():
        far_V += np.bincount(names_E[np.abs(values_E) > FAR_OUT], minlength=size)
        np.fmin.at(lowest_V, names_E, values_E)
        np.fmax.at(highest_V, names_E, values_E)

    def own_units(value: float, mean: float, std: float) -> float:
        own = value * std + mean
        return 0.0 if abs(own) < SMALLEST_DIGIT * std * max(1.0, abs(value)) else own

    rows = []
    columns = (about.names, about.mean, about.std, lowest_V.tolist(), highest_V.tolist(), far_V.tolist())
    for name, mean, std, lowest, highest, far_out in zip(*columns, strict=True):
        row = NameRow(name, far_out=far_out)
        if not np.isnan(lowest):
            low, high = own_units(lowest, mean, std), own_units(highest, mean, std)
            row = row._replace(mean=mean, std=std if high > low else 0.0, min=low, max=high)
        rows.append(row)
    return rows


def quantiles(pieces: Callable[[], Pieces], size: int, chosen_K: np.ndarray) -> np.ndarray:
    """Return the quantiles of the chosen names, [K, Q], in standard deviations from the mean; NaN where one has no value."""
    edges = np.arange(-REACH, REACH + BIN / 2, BIN)
    place_V = np.full(size, -1)
    place_V[chosen_K] = np.arange(len(chosen_K))
    counts_KB = np.zeros((len(chosen_K), len(edges) + 1), np.int64)
    for names_E, values_E in pieces():
        chosen_E = (place_V[names_E] >= 0) & ~np.isnan(values_E)
        bins_E = np.searchsorted(edges, values_E[chosen_E])
        flat_E = place_V[names_E[chosen_E]] * counts_KB.shape[1] + bins_E
        counts_KB += np.bincount(flat_E, minlength=counts_KB.size).reshape(counts_KB.shape)
    totals_K = counts_KB.sum(axis=1)
    reached_KQB = counts_KB.cumsum(axis=1)[:, None, :] >= np.array(QUANTILES)[:, None] * totals_K[:, None, None]
    middles_B = np.concatenate([[-REACH], edges[1:] - BIN / 2, [REACH]])
    return np.where(totals_K[:, None] > 0, middles_B[reached_KQB.argmax(axis=2)], np.nan)
