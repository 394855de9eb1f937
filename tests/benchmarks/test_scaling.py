"""What `benchmarks.speed.scaling` concludes from what it measures, and its pieces on next to nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.measure import write_token_lists
from benchmarks.speed import scaling
from benchmarks.speed.scaling import (
    Shape,
    chosen_batches,
    prepare_folder,
    random_batch,
    start_again,
    sweeps,
    token_training,
)
from benchmarks.speed.scaling_laws import Curve, Panel, draw_panels, fit_power_law
from seqvae.config.data import CacheSettings, SourceSettings
from seqvae.config.model import ModelSettings
from seqvae.data.batching import Limits, cut_batches, padding_efficiency, plan_epoch, some_batches
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.demo import LengthLaw

TINY = ModelSettings(width=16, depth=1, heads=2, latent_size=2)
TINY_WORDS = ("--width", "16", "--depth", "1", "--heads", "2", "--latent_size", "2", "--num_workers", "0")
TINY_SHAPE = Shape(length=4, width=16, tokens=64)
SIZES = (10, 100, 1000, 10_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_token_lists(tmp_path / "data" / "all.parquet", 200)
    prepare_folder(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("factor", "exponent"), [(3e-6, 1.0), (0.5, 2.0), (7.0, 0.0), (40.0, -0.5)])
def test_a_power_law_is_recovered(factor: float, exponent: float):
    law = fit_power_law(SIZES, [factor * size**exponent for size in SIZES])
    assert law.factor == pytest.approx(factor)
    assert law.exponent == pytest.approx(exponent, abs=1e-12)


def test_the_exponent_at_the_end_is_that_of_a_cost_that_begins_flat():
    curve = Curve("start", SIZES, [[1 + 0.01 * size] for size in SIZES])
    assert curve.law.exponent < 0.7
    assert curve.end == pytest.approx(np.log10(101 / 11))


def test_the_exponent_is_that_of_the_medians():
    curve = Curve("one slow round", SIZES, [[size, size, 1000 * size if size == 10 else size] for size in SIZES])
    assert curve.law.exponent == pytest.approx(1.0)


@pytest.mark.parametrize(("sizes", "costs"), [([10], [1.0]), ([10, 100], [1.0, 0.0])])
def test_costs_without_logarithm_or_slope_are_refused(sizes: list[float], costs: list[float]):
    with pytest.raises(ValueError, match="two sizes or more"):
        fit_power_law(sizes, costs)


def test_a_picture_is_drawn_of_costs_over_many_powers_of_ten_and_over_less_than_one(tmp_path: Path):
    far = Curve("far", SIZES, [[size * 0.9, size, size * 1.2] for size in SIZES])
    near = Curve("near", SIZES, [[5.0], [5.1], [5.2], [5.3]])
    draw_panels(tmp_path / "new" / "x.png", "Title", [Panel("x", "s", [far, near]), Panel("x", "s", [near])])
    assert (tmp_path / "new" / "x.png").read_bytes().startswith(b"\x89PNG")


def test_each_sweep_varies_one_number_alone():
    for sweep in sweeps(short=True, base=TINY_SHAPE):
        varied = [name for name in Shape._fields if len({getattr(shape, name) for shape in sweep.shapes}) > 1]
        assert len(varied) == 1
        assert [getattr(shape, varied[0]) for shape in sweep.shapes] == list(sweep.sizes)


def test_batches_of_one_length_have_no_padding():
    batch = random_batch(Shape(length=7, width=16, tokens=64))
    assert batch.tokens_BT.shape == (9, 7)
    assert batch.lengths_B.tolist() == [7] * 9
    assert batch.step_tokens == 63


def test_a_step_changes_the_network_and_leaves_no_gradient():
    training = token_training(TINY)
    before = [weight.detach().clone() for weight in training.network.parameters()]
    training.step([random_batch(TINY_SHAPE)])
    assert all(weight.grad is None for weight in training.network.parameters())
    assert any((new != old).any() for new, old in zip(training.network.parameters(), before, strict=True))


def test_the_same_batches_are_timed_in_each_round(folder: Path):
    batches = chosen_batches(folder)
    rounds = [[batch.sequences_B.tolist() for batch in batches] for _ in range(2)]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == 4


def test_a_start_reports_when_the_first_batch_came_and_the_time_of_its_stages(folder: Path):
    start = start_again(folder, "batch", TINY_WORDS)
    assert 0 < sum(start["stages"].values()) < start["first_batch_seconds"]
    assert all(seconds > 0 for seconds in start["stages"].values())
    assert start["imported_mb"] < start["first_batch_mb"]
    assert "first_step_mb" not in start


def test_everything_is_reported_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = []

    def start(folder: Path, until: str, words: Any) -> dict[str, Any]:
        started.append((int(folder.name), until))
        step = {"first_step_mb": 30.0} if until == "step" else {}
        stages = {"open": 0.1, "plan": 0.2}
        return {"imported_mb": 10.0, "first_batch_mb": 20.0, "first_batch_seconds": 1.0, "stages": stages} | {
            "epoch_plan_seconds": 0.2,
            **step,
        }

    monkeypatch.setattr("benchmarks.speed.scaling.start_again", start)
    steps = [
        sweep._replace(shapes=sweep.shapes[:2], sizes=sweep.sizes[:2]) for sweep in sweeps(short=True, base=TINY_SHAPE)
    ]
    report = json.loads(json.dumps(scaling.run(tmp_path, (100, 200), steps, TINY, rounds=2)))
    assert started == [(100, "step"), (200, "step"), (100, "batch"), (200, "batch")]
    assert [row["sequences"] for row in report["sequences"]] == [100, 200]
    assert report["sequences"][0]["start"]["at the first step, once"] == 30
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.png" for name in ("sequences", "length", "width", "batch")
    }
    exponents = {row["cost"]: row["exponent"] for row in report["exponents"]}
    assert exponents["second start to the first batch"] == 0.0
    assert exponents["batch: step"] == pytest.approx(1 + exponents["batch: token"], abs=0.02)


def test_header_and_loader_share_the_plan_of_the_first_epoch(folder: Path, monkeypatch: pytest.MonkeyPatch):
    planned = []

    def note(cut: Any, seed: int, epoch: int, **named: Any) -> Any:
        planned.append(epoch)
        return plan_epoch(cut, seed, epoch, **named)

    monkeypatch.setattr("seqvae.data.datamodule.plan_epoch", note)
    source = SourceSettings(data_dir=str(folder / "data"))
    data = SequenceDataModule(source, cache=CacheSettings(cache_dir=str(folder / "cache")))
    data.summary()
    loader = data.train_dataloader()
    for _ in range(2):
        assert len(list(loader)) == len(loader)
        loader.set_epoch(loader.epoch + 1)
    assert planned == [0, 1]


def test_some_batches_are_padded_as_all_are():
    lengths_N = LengthLaw().sample(20_000, np.random.default_rng(0)).astype(np.int32)
    plan = plan_epoch(cut_batches(lengths_N, Limits(None, 1000, None)), seed=0, epoch=0)
    some = some_batches(plan, 200)
    assert plan.batches > 1000
    assert some.batches == 200
    assert len(some.order_N) == some.starts_K1[-1] < len(lengths_N)
    assert padding_efficiency(lengths_N, some) == pytest.approx(padding_efficiency(lengths_N, plan), abs=0.01)


def test_a_plan_with_few_batches_is_looked_at_as_a_whole():
    lengths_N = np.arange(1, 101, dtype=np.int32)
    plan = plan_epoch(cut_batches(lengths_N, Limits(None, 300, None)), seed=0, epoch=0)
    some = some_batches(plan, 1000)
    assert sorted(some.order_N) == list(range(100))
    assert padding_efficiency(lengths_N, some) == padding_efficiency(lengths_N, plan)
