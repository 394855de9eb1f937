"""The numbers behind a report on data, against ones that are counted by hand or in another way."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from seqvae.data.batching import Limits, cut_batches, plan_epoch
from seqvae.data.cache import SequenceData
from seqvae.data.demo import write_demo
from seqvae.data.inspection import QUANTILES, Inspection, batch_bytes, inspect_cache, quantiles
from tests.support.parquet_files import Load, write_splits


def inspect(
    data: SequenceData, *, cap: int = 1000, tokens: int = 100, accumulate: int = 1, most: int = 99
) -> Inspection:
    limits = Limits(None, tokens, None)
    cut = cut_batches(data.splits["train"].lengths_N, limits)
    return inspect_cache(data, cap, limits, cut, accumulate=accumulate, most=most)


@pytest.fixture
def of_lists(load: Load, tmp_path) -> Any:
    """Inspect lists of tokens or vectors."""

    def inspect_lists(
        train: list[Any], valid: list[Any], cap: int = 1000, most: int = 99, **lengths: Any
    ) -> Inspection:
        write_splits(tmp_path / "lists", train={"sequence": train}, valid={"sequence": valid})
        return inspect(load(tmp_path / "lists", max_sequence_length=cap, **lengths), cap=cap, most=most)

    return inspect_lists


def test_splits_are_described_as_they_are_stored(of_lists):
    found = of_lists([[1, 2, 3], [4], [1, 1, 1, 1, 1]], [[2, 2]], cap=3)
    train, valid = found.splits
    assert train == ("train", 3, 9, None, 3.0, 3.0, 5, 1, None)
    assert valid == ("valid", 1, 2, None, 2.0, 2.0, 2, None, None)
    assert found.lengths["train"].tolist() == [3, 1, 5]


def test_tokens_are_counted_with_the_most_frequent_first(of_lists):
    names = of_lists([[5, 5, 2], [5, 2, 0]], [[2]]).names
    assert [(row.name, row.seen, row.share) for row in names.rows] == [("5", 3, 0.5), ("2", 2, 1 / 3), ("0", 1, 1 / 6)]
    assert (names.possible, names.total, names.counts_U.tolist()) == (6, 3, [3, 2, 1])


def test_ids_as_large_as_hashes_are_counted_and_warned_of(of_lists):
    found = of_lists([[2**24 - 1, 7, 7]], [[7]])
    assert [(row.name, row.seen) for row in found.names.rows] == [("7", 2), (str(2**24 - 1), 1)]
    assert any("only 2 of them occur" in text for text in found.warnings)


def test_tokens_that_training_never_shows_are_warned_of(of_lists):
    found = of_lists([[0, 9]], [[0, 3, 3, 4]])
    assert "valid: 3 of 4 tokens are of 2 ids that never occur in the training split" in found.warnings


def test_text_knows_its_share_of_unknown_tokens(load: Load, tmp_path):
    write_splits(tmp_path / "text", train={"text": ["aab", "ab"]}, valid={"text": ["acca"]})
    found = inspect(load(tmp_path / "text", tokenizer="characters"))
    assert [split.unknown for split in found.splits] == [0.0, 0.5]
    assert [row.name for row in found.names.rows] == ["'a'", "'b'"]


def test_features_have_moments_range_and_missing_share_in_their_own_units(of_lists):
    train = [[[1.0, 10.0], [2.0, None]], [[3.0, None], [6.0, None]]]
    found = of_lists(train, [[[0.0, None]]])
    first, second = found.names.rows
    assert (first.missing, first.mean, first.min, first.max, first.far_out) == (
        0,
        3,
        pytest.approx(1),
        pytest.approx(6),
        0,
    )
    assert first.std == pytest.approx(np.std([1, 2, 3, 6]))
    assert (second.missing, second.mean, second.std, second.min, second.max) == (0.75, 10, 0, 10, 10)
    assert found.names.missing["valid"].tolist() == [0, 1]


def test_where_features_are_many_those_with_the_most_missing_values_are_shown(of_lists):
    names = of_lists([[[1.0, None, 1.0], [2.0, 5.0, None], [3.0, None, 4.0]]], [[[1.0, 1.0, 1.0]]], most=2).names
    assert [row.name for row in names.rows] == ["sequence[1]", "sequence[2]"]
    assert names.total == 3
    assert names.missing["train"].tolist() == [2 / 3, 1 / 3]


def test_features_that_are_hardly_ever_there_are_warned_of(of_lists):
    steps = [[float(step), 1.0 if step in (3, 50) else None] for step in range(100)]
    assert "sequence[1]: 98.0% of its values are missing" in of_lists([steps], [[[1.0, 1.0]]]).warnings


def test_variables_are_counted_by_event_and_by_sequence(load: Load, tmp_path):
    columns = {
        "id": [1, 1, 1, 2, 2, 3],
        "minute": [0.0, 60.0, 120.0, 0.0, 30.0, 5.0],
        "variable": ["pulse", "pulse", "fall", "pulse", "age", "age"],
        "value": [60.0, 90.0, None, 75.0, 40.0, 50.0],
    }
    write_splits(tmp_path / "events", train=columns, valid=columns | {"id": [11, 11, 11, 12, 12, 13]})
    found = inspect(load(tmp_path / "events"))
    rows = {row.name: row for row in found.names.rows}
    assert list(rows) == ["pulse", "age", "fall"]
    assert [(row.seen, row.in_sequences, row.missing) for row in rows.values()] == [
        (3, 2 / 3, 0),
        (2, 2 / 3, 0),
        (1, 1 / 3, 1),
    ]
    assert (rows["pulse"].mean, rows["pulse"].min, rows["pulse"].max) == (75, pytest.approx(60), pytest.approx(90))
    assert rows["fall"].mean is None
    assert found.time == (30.0, 50.0, "minutes")


def test_quantiles_are_those_of_numpy_to_the_width_of_a_bin():
    random = np.random.default_rng(0)
    names = random.integers(0, 3, 30_000)
    values = np.where(names == 1, random.normal(size=30_000), random.exponential(size=30_000) - 1).astype(np.float32)
    values[random.random(30_000) < 0.1] = np.nan
    found = quantiles(
        lambda: iter([(names[:20_000], values[:20_000]), (names[20_000:], values[20_000:])]), 3, np.array([2, 1])
    )
    for row, name in enumerate((2, 1)):
        assert found[row] == pytest.approx(np.nanquantile(values[names == name], QUANTILES), abs=0.03)


@pytest.mark.parametrize("kind", ["tokens", "vectors", "events"])
def test_the_memory_of_a_batch_is_that_of_its_tensors(load: Load, tmp_path, kind):
    train = load(write_demo(tmp_path / "demo", kind, sequences=50, mean_length=20)).splits["train"]
    batch = train.gather(np.arange(9))._asdict()
    steps = 9 * int(train.lengths_N[:9].max())
    events = len(batch["steps_E"]) if kind == "events" else 0
    real = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    assert batch_bytes(train.gather(np.array([3])), 9, steps, events) == real


def test_an_epoch_of_batches_is_counted_as_it_is_planned(load: Load, tmp_path):
    data = load(write_demo(tmp_path / "demo", "tokens", sequences=300, mean_length=20))
    lengths = data.splits["train"].lengths_N
    chosen, by_64, by_4 = inspect(data, tokens=200, accumulate=2).batches
    plan = plan_epoch(cut_batches(lengths, Limits(None, 200, None)), seed=0, epoch=0)
    padded = [len(plan.batch(k)) * int(lengths[plan.batch(k)].max()) for k in range(plan.batches)]
    assert chosen.per_epoch == plan.batches
    assert chosen.updates == -(-plan.batches // 2)
    assert chosen.efficiency == pytest.approx(lengths.sum() / sum(padded))
    assert chosen.largest == max(padded)
    assert (by_64.per_epoch, by_64.sequences, by_4.per_epoch, by_4.sequences) == (5, 60, 75, 4)
    assert by_64.efficiency < by_4.efficiency < chosen.efficiency


def test_what_the_length_cap_costs_and_single_steps_are_warned_of(of_lists):
    warnings = " ".join(of_lists([[1] * 10, [1], [1, 1, 1, 1]], [[1]], cap=4).warnings)
    assert "only 3 training sequences" in warnings
    assert "40% of the training steps are lost to --max_sequence_length 4" in warnings
    assert "33% of the training sequences have a single step" in warnings


def test_windows_lose_nothing(of_lists):
    assert not any("are lost" in text for text in of_lists([[1] * 10], [[1]], cap=4, long_sequences="split").warnings)


def test_labels_are_counted_and_those_a_split_lacks_are_warned_of(load: Load, tmp_path):
    train = {"sequence": [[1], [2], [3]], "label": ["a", "b", None]}
    write_splits(tmp_path / "lists", train=train, valid={"sequence": [[1]], "label": ["b"]})
    found = inspect(load(tmp_path / "lists", label_column="label", allow_missing_labels=True))
    assert found.labels == (("(none)", 1, 0, None), ("a", 1, 0, None), ("b", 1, 1, None))
    assert "valid: 1 of 2 labels do not occur there: a" in found.warnings


def test_every_column_says_what_it_is_taken_for(load: Load, tmp_path):
    columns = {"id": [1, 2], "sequence": [[1], [2]], "notes": pa.array(["x", "y"])}
    write_splits(tmp_path / "lists", train=columns, valid=columns | {"id": [3, 4]})
    found = inspect(load(tmp_path / "lists"))
    assert [(row.column, row.part, row.files) for row in found.columns] == [
        ("id", "id", 2),
        ("sequence", "sequence", 2),
        ("notes", None, 2),
    ]
