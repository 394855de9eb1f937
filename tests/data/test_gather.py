"""A gathered batch is, tensor by tensor, what a loop over its rows would make of the same data."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqvae.config.data import LengthSettings
from seqvae.data.batch import EventBatch, TokenBatch, VectorBatch
from seqvae.data.dataset import SequenceSet
from seqvae.data.description import Kind
from seqvae.data.flat_file import FlatWriter
from tests.support.parquet_files import meds_table, write_splits

WIDTH = 2

lengths_of_sequences = st.lists(st.integers(1, 7), min_size=1, max_size=6)


class Stored(NamedTuple):
    """Sequences of 3 tokens a step, so to say: what lies in the flat files, for each kind under its own names."""

    lengths: list[int]
    steps: dict[str, np.ndarray]
    events_per_step: list[int] | None = None
    events: dict[str, np.ndarray] | None = None
    labels: list[int] | None = None


@contextmanager
def split_of(stored: Stored, kind: Kind, lengths: LengthSettings) -> Iterator[SequenceSet]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        arrays = stored.steps | (stored.events or {})
        if stored.labels is not None:
            arrays = arrays | {"labels": np.array(stored.labels, np.int32)}
        entries = {part: written(directory, part, array) for part, array in arrays.items()}
        entries["offsets"] = offsets(directory, "offsets", stored.lengths)
        if stored.events_per_step is not None:
            entries["event_offsets"] = offsets(directory, "event_offsets", stored.events_per_step)
        yield SequenceSet(directory, kind, entries, lengths)


def written(directory: Path, part: str, array: np.ndarray) -> dict[str, Any]:
    writer = FlatWriter(directory / f"{part}.bin", array.dtype)
    writer.append(array)
    return writer.close()


def offsets(directory: Path, part: str, lengths: list[int]) -> dict[str, Any]:
    return written(directory, part, np.append(0, np.cumsum(lengths, dtype=np.int64)))


@st.composite
def requests(draw: st.DrawFn) -> tuple[Stored, list[int], int | None, LengthSettings]:
    """Data, rows of a batch (in any order, some twice), what to pad to, and a cap."""
    lengths = draw(lengths_of_sequences)
    steps = sum(lengths)
    seed = draw(st.integers(0, 1000))
    random = np.random.default_rng(seed)
    events_per_step = random.integers(1, 4, steps).tolist()
    number = sum(events_per_step)
    stored = Stored(
        lengths,
        {
            "tokens": random.integers(0, 200, steps).astype(np.uint8),
            "gaps": random.random(steps).astype(np.float32),
            "vectors": np.where(random.random((steps, WIDTH)) < 0.3, np.nan, random.random((steps, WIDTH))),
        },
        events_per_step,
        {
            "variables": random.integers(0, 9, number).astype(np.uint16),
            "values": np.where(random.random(number) < 0.3, np.nan, random.random(number)).astype(np.float32),
        },
        random.integers(-1, 3, len(lengths)).tolist() if draw(st.booleans()) else None,
    )
    how: Any = draw(st.sampled_from(["truncate", "keep_last", "split"]))
    settings = LengthSettings(max_sequence_length=draw(st.integers(1, 8)), long_sequences=how)
    rows = draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    pad_to = draw(st.sampled_from([None, 8, 11]))
    return stored, rows, pad_to, settings


def of_kind(stored: Stored, kind: Kind) -> Stored:
    """Only the arrays that a cache of this kind has."""
    if kind == "tokens":
        return stored._replace(steps={"tokens": stored.steps["tokens"]}, events_per_step=None, events=None)
    if kind == "vectors":
        values = stored.steps["vectors"].astype(np.float32)
        return stored._replace(steps={"values": values}, events_per_step=None, events=None)
    return stored._replace(steps={"gaps": stored.steps["gaps"]})


def slow_row(split: SequenceSet, n: int) -> range:
    """The steps of sequence n as they stand in the flat files."""
    start = int(split.windows.starts_N[n])
    return range(start, start + int(split.windows.lengths_N[n]))


def check_common(
    batch: TokenBatch | VectorBatch | EventBatch, split: SequenceSet, rows: list[int], stored: Stored
) -> None:
    assert batch.lengths_B.tolist() == [len(slow_row(split, n)) for n in rows]
    assert batch.sequences_B.tolist() == rows
    owners = split.windows.owners_N
    own = rows if owners is None else [int(owners[n]) for n in rows]
    assert (batch.labels_B is None) == (stored.labels is None)
    if stored.labels is not None and batch.labels_B is not None:
        assert batch.labels_B.tolist() == [stored.labels[n] for n in own]
    assert (batch.step_tokens, batch.position) == (0, 0)


@given(requests())
def test_tokens_are_gathered_as_a_loop_would(request):
    stored, rows, pad_to, settings = request
    stored = of_kind(stored, "tokens")
    with split_of(stored, "tokens", settings) as split:
        batch = split.gather(np.array(rows), pad_to)
        assert isinstance(batch, TokenBatch)
        check_common(batch, split, rows, stored)
        width = pad_to or max(len(slow_row(split, n)) for n in rows)
        wanted = torch.zeros(len(rows), width, dtype=torch.int64)
        for b, n in enumerate(rows):
            for t, step in enumerate(slow_row(split, n)):
                wanted[b, t] = int(stored.steps["tokens"][step])
        assert torch.equal(batch.tokens_BT, wanted)


@given(requests())
def test_a_sequence_ends_where_its_data_end_and_not_where_the_cap_cut_it(request):
    stored, rows, pad_to, settings = request
    stored = of_kind(stored, "tokens")
    ends = set(np.cumsum(stored.lengths).tolist())
    with split_of(stored, "tokens", settings) as split:
        batch = split.gather(np.array(rows), pad_to)
        assert isinstance(batch, TokenBatch)
        expected = [slow_row(split, n).stop in ends for n in rows]
        nothing_is_cut = all(slow_row(split, n).stop in ends for n in range(len(split)))
        assert (batch.ends_B is None) == nothing_is_cut
        assert expected == ([True] * len(rows) if batch.ends_B is None else batch.ends_B.tolist())


@given(requests())
def test_vectors_are_gathered_as_a_loop_would(request):
    stored, rows, pad_to, settings = request
    stored = of_kind(stored, "vectors")
    with split_of(stored, "vectors", settings) as split:
        batch = split.gather(np.array(rows), pad_to)
        assert isinstance(batch, VectorBatch)
        check_common(batch, split, rows, stored)
        width = pad_to or max(len(slow_row(split, n)) for n in rows)
        values = torch.zeros(len(rows), width, WIDTH)
        observed = torch.zeros(len(rows), width, WIDTH, dtype=torch.bool)
        for b, n in enumerate(rows):
            for t, step in enumerate(slow_row(split, n)):
                for d, value in enumerate(stored.steps["values"][step]):
                    observed[b, t, d] = not np.isnan(value)
                    values[b, t, d] = 0.0 if np.isnan(value) else float(value)
        assert torch.equal(batch.values_BTD, values)
        assert torch.equal(batch.observed_BTD, observed)


@given(requests())
def test_events_are_gathered_as_a_loop_would(request):
    stored, rows, pad_to, settings = request
    stored = of_kind(stored, "events")
    assert stored.events is not None
    assert stored.events_per_step is not None
    with split_of(stored, "events", settings) as split:
        batch = split.gather(np.array(rows), pad_to)
        assert isinstance(batch, EventBatch)
        check_common(batch, split, rows, stored)
        width = pad_to or max(len(slow_row(split, n)) for n in rows)
        gaps = torch.zeros(len(rows), width)
        variables, values, has_value, steps = [], [], [], []
        for b, n in enumerate(rows):
            for t, step in enumerate(slow_row(split, n)):
                gaps[b, t] = 0.0 if t == 0 else float(stored.steps["gaps"][step])
                first = sum(stored.events_per_step[:step])
                for event in range(first, first + stored.events_per_step[step]):
                    if stored.events["variables"][event] == 0 and 0 in stored.events["variables"][first:event]:
                        continue  # <unknown> is in the set already
                    value = float(stored.events["values"][event])
                    variables.append(int(stored.events["variables"][event]))
                    values.append(0.0 if np.isnan(value) else value)
                    has_value.append(not np.isnan(value))
                    steps.append(b * width + t)
        assert torch.equal(batch.gaps_BT, gaps)
        assert torch.equal(batch.variables_E, torch.tensor(variables))
        assert torch.equal(batch.values_E, torch.tensor(values))
        assert torch.equal(batch.has_value_E, torch.tensor(has_value))
        assert torch.equal(batch.steps_E, torch.tensor(steps))


@pytest.mark.parametrize("pad_to", [None, 5])
def test_the_empty_batch_is_one_sequence_of_length_0(tmp_path, load, pad_to):
    lists: dict[str, Any] = {"x": [[1, 2]], "label": ["a"]}
    vectors: dict[str, Any] = {"x": [[0.5, 2.0]], "label": ["a"]}
    of_events = meds_table(1).append_column("label", [["a"] * 4])
    for name, columns in (("t", lists), ("v", vectors), ("e", of_events)):
        valid = columns
        if name == "e":
            valid = meds_table(2).append_column("label", [["a"] * 4])
        data = load(write_splits(tmp_path / name, train=columns, valid=valid), label_column="label")
        batch = data.splits["train"].gather(np.zeros(0, np.int64), pad_to)
        full = data.splits["train"].gather(np.array([0]), pad_to)
        assert batch.lengths_B.tolist() == [0]
        assert batch.sequences_B.tolist() == batch.labels_B.tolist() == [-1]
        for tensor, like in zip(batch, full, strict=True):
            if isinstance(tensor, torch.Tensor):
                assert tensor.dtype == like.dtype
                assert tensor.ndim == like.ndim
                assert not tensor[tensor != -1].any()


def test_a_row_that_would_run_into_the_next_is_a_bug(tmp_path, load):
    columns = {"tokens": [[1, 2, 3], [4]]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns))
    with pytest.raises(AssertionError, match="would run into the next row"):
        data.splits["train"].gather(np.array([0, 1]), pad_to=2)


def test_threads_may_gather_at_once(tmp_path, load):
    columns = {"tokens": [[number % 97] * (1 + number % 13) for number in range(2000)]}
    data = load(write_splits(tmp_path / "d", train=columns, valid=columns))
    split = data.splits["train"]
    choices = [np.random.default_rng(seed).integers(0, 2000, 64) for seed in range(40)]
    with ThreadPoolExecutor(8) as threads:
        batches = list(threads.map(split.gather, choices))
    for batch, chosen in zip(batches, choices, strict=True):
        assert [row[:length].tolist() for row, length in zip(batch.tokens_BT, batch.lengths_B, strict=True)] == [
            columns["tokens"][number] for number in chosen
        ]
