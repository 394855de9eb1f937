"""An opened cache and the limits of its batches -> what a user wants to know before training: numbers, and warnings.

Rows of tables are named tuples: a field is a column, None stands where it has no meaning for this kind of sequence.

Shapes: S stored sequences, N sequences after the length cap, K batches.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from seqvae.data.batch import Batch
from seqvae.data.batching import Cut, Limits, cut_batches, padding_efficiency, plan_epoch
from seqvae.data.cache import SequenceData
from seqvae.data.dataset import read_meta
from seqvae.data.description import UNKNOWN
from seqvae.data.names import FlatSplit, Names, describe_names, time_spans
from seqvae.data.parquet.discovery import ColumnRow
from seqvae.text import some

NO_LABEL = "(none)"
PLAIN_BATCHES = (64, 4)
"""Sequences of the random batches that the chosen ones are compared with."""
FEW_SEQUENCES = 100
"""Training sequences below which a model is likely to learn them by heart."""
MUCH_LOST = 0.1
"""Share of the training steps lost to the length cap that is worth a warning."""
MANY_SINGLE = 0.1
"""Share of training sequences of a single step that is worth a warning."""


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
    test: int | None


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


class TimeSpans(NamedTuple):
    """Events of the training split, in the data's unit of time."""

    median_span: float
    """From the first to the last step of a sequence."""
    mean_gap: float
    """From step to step."""
    unit: str


class Inspection(NamedTuple):
    files: int
    bytes: int
    """Of the Parquet."""
    splits: tuple[SplitRow, ...]
    lengths: dict[str, np.ndarray]
    """Per split, int64 [S], before the cap."""
    columns: tuple[ColumnRow, ...]
    bad_files: tuple[str, ...]
    """Why each file that was left out was left out."""
    names: Names
    time: TimeSpans | None
    labels: tuple[LabelRow, ...]
    batches: tuple[BatchRow, ...]
    warnings: tuple[str, ...]
    """What may spoil a training, one sentence each."""


def inspect_cache(data: SequenceData, cap: int, limits: Limits, cut: Cut, *, accumulate: int, most: int) -> Inspection:
    """`cut` is how the training split is cut under `limits`; names (tokens, features, variables) get at most so many rows."""
    meta = read_meta(data.path)
    stored = {split: FlatSplit(data.path / split, entry["arrays"]) for split, entry in meta["splits"].items()}
    flat = {split: stored[split] for split in ("train", "valid", "test") if split in stored}
    lengths = {split: np.diff(files.map("offsets")) for split, files in flat.items()}
    names = describe_names(data, flat, most)
    labels = _label_rows(data, flat)
    sizes = [file["size"] for file in meta["files"] if file["size"] >= 0]
    return Inspection(
        files=len(sizes),
        bytes=sum(sizes),
        splits=tuple(_split_row(data, split, lengths_S, cap) for split, lengths_S in lengths.items()),
        lengths=lengths,
        columns=tuple(ColumnRow(**column) for column in meta["columns"]),
        bad_files=tuple(meta["bad_files"]),
        names=names,
        time=_time_spans(data, flat["train"], lengths["train"]),
        labels=labels,
        batches=tuple(_batch_rows(data, limits, cut, accumulate)),
        warnings=(
            *_length_warnings(lengths["train"], data.splits["train"].lengths_N, cap),
            *names.warnings,
            *_label_warnings(labels),
        ),
    )


def _split_row(data: SequenceData, split: str, lengths_S: np.ndarray, cap: int) -> SplitRow:
    counts, about = data.counts[split], data.description
    unknown = None
    if about.symbols[:1] == (UNKNOWN,):
        unknown = counts["unknown"] / counts["steps"]
    elif about.kind == "events":
        unknown = counts["per_name"][0] / counts["events"] or None
    return SplitRow(
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


def _time_spans(data: SequenceData, train: FlatSplit, lengths_S: np.ndarray) -> TimeSpans | None:
    if data.description.kind != "events":
        return None
    spans_S = time_spans(train)
    gaps = int(lengths_S.sum()) - len(lengths_S)
    return TimeSpans(float(np.median(spans_S)), float(spans_S.sum() / max(1, gaps)), data.description.time_unit)


def _label_rows(data: SequenceData, flat: dict[str, FlatSplit]) -> tuple[LabelRow, ...]:
    classes = data.description.classes
    if not classes:
        return ()
    counts = {split: np.bincount(files.map("labels") + 1, minlength=len(classes) + 1) for split, files in flat.items()}
    rows = [
        LabelRow(
            label,
            int(counts["train"][k]),
            int(counts["valid"][k]),
            int(counts["test"][k]) if "test" in counts else None,
        )
        for k, label in enumerate((NO_LABEL, *classes))
    ]
    return tuple(row for row in rows if row.label != NO_LABEL or row.train or row.valid or row.test)


def _batch_rows(data: SequenceData, limits: Limits, cut: Cut, accumulate: int) -> Iterator[BatchRow]:
    train = data.splits["train"]
    lengths_N = train.lengths_N
    events_per_step = data.counts["train"].get("events", 0) / data.counts["train"]["steps"]
    ways = [("as chosen", limits, cut)]
    for number in PLAIN_BATCHES:
        plain = Limits(number, number * int(lengths_N.max()), None)
        ways.append((f"random {number}", plain, cut_batches(lengths_N, plain, bucketing=False)))
    one = train.gather(np.zeros(1, np.int64))
    for name, way, its_cut in ways:
        plan = plan_epoch(its_cut, seed=0, epoch=0)
        begins_K = plan.starts_K1[:-1]
        ordered_N = lengths_N[plan.order_N[: plan.starts_K1[-1]]]
        rows_K = np.diff(plan.starts_K1)
        padded_K = rows_K * (way.pad_to or np.maximum.reduceat(ordered_N, begins_K))
        largest = int(padded_K.argmax())
        events = round(events_per_step * int(np.add.reduceat(ordered_N, begins_K, dtype=np.int64)[largest]))
        yield BatchRow(
            batches=name,
            per_epoch=plan.batches,
            updates=-(-plan.batches // accumulate),
            sequences=float(rows_K.mean()),
            efficiency=padding_efficiency(lengths_N, plan, way.pad_to),
            largest=int(padded_K[largest]),
            memory=batch_bytes(one, int(rows_K[largest]), int(padded_K[largest]), events),
        )


def batch_bytes(one: Batch, rows: int, padded_steps: int, events: int) -> int:
    """Bytes of the tensors of a batch of so many sequences, told from one of a single sequence.

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


def _length_warnings(lengths_S: np.ndarray, lengths_N: np.ndarray, cap: int) -> list[str]:
    warnings = []
    if len(lengths_S) < FEW_SEQUENCES:
        warnings.append(f"only {len(lengths_S)} training sequences: a model is likely to learn them by heart")
    lost = 1 - float(lengths_N.sum(dtype=np.int64) / lengths_S.sum())
    if lost > MUCH_LOST:
        warnings.append(
            f"{lost:.0%} of the training steps are lost to --max_sequence_length {cap}: raise it, or keep them as windows "
            f"with --long_sequences split"
        )
    single = float((lengths_S == 1).mean())
    if single > MANY_SINGLE:
        warnings.append(f"{single:.0%} of the training sequences have a single step: is the id column the right one?")
    return warnings


def _label_warnings(labels: tuple[LabelRow, ...]) -> list[str]:
    warnings = []
    named = [row for row in labels if row.label != NO_LABEL]
    for split in ("train", "valid", "test"):
        absent = [row.label for row in named if getattr(row, split) == 0]
        if absent:
            warnings.append(f"{split}: {len(absent)} of {len(named)} labels do not occur there: {some(absent)}")
    return warnings
