"""A monitor waits for the device at readings alone, and its benchmark runs from end to end on next to nothing.

The device here is torch's meta device, whose tensors have shapes and no values: what needs a value, or a shape that depends on
one, fails, as `.item()`, `if tensor:`, `.nonzero()` and indexing with a mask do. Only `.cpu()` returns values, and is counted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.detection import monitor_cost
from seqvae.data.demo import write_demo
from seqvae.monitors import PosteriorMetricsMonitor, StepOutputs, callback, read_readings
from seqvae.monitors.contract import step_outputs_of
from seqvae.monitors.window import take_reading
from tests.benchmarks.test_benchmarks_smoke import tiny_settings
from tests.support.tiny_vaes import Batches, TinyVAE, make_batches, make_trainer

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*", "ignore:You defined a `validation_step`")


class OnADeviceWithoutValues(TinyVAE):
    """Trains on the CPU, and tells its posteriors from elsewhere."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        elsewhere = {name: outputs[name].to("meta") for name in ("posterior_mean", "posterior_logvar", "nll")}
        mask = torch.ones(len(batch), dtype=torch.bool, device="meta")
        return outputs | elsewhere | {"posterior_mask": mask, "kl_weight": torch.ones((), device="meta")}


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what came from the device without values, which the CPU takes for ones."""
    shapes: list[torch.Size] = []

    def cpu(tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":
            shapes.append(tensor.shape)
            return torch.ones(tensor.shape)
        return tensor

    monkeypatch.setattr(Tensor, "cpu", cpu)
    monkeypatch.setattr(callback, "gathered", lambda own, trainer: own[None])
    monkeypatch.setattr(callback, "DOUBTED_READINGS", 0)  # the first, at which another module's loss is looked at
    return shapes


def train(directory: Path, steps: int, **options: Any) -> None:
    monitor = PosteriorMetricsMonitor(probe_decoder=False, plot_frequency=None, posteriors=64, **options)
    trainer = make_trainer(directory, [monitor], max_steps=steps)
    trainer.fit(OnADeviceWithoutValues(), Batches(make_batches(steps)))


def test_a_step_without_a_reading_waits_for_nothing_and_a_reading_once(tmp_path, transfers):
    train(tmp_path, steps=200)
    assert len(transfers) == len(read_readings(tmp_path / "posterior.jsonl")) == 50


def ask_for_item(mean: Tensor) -> object:
    return mean.sum().item()


def ask_for_list(mean: Tensor) -> object:
    return mean.tolist()


def ask_whether(mean: Tensor) -> object:
    return 1 if (mean > 0).any() else 0


def ask_where(mean: Tensor) -> object:
    return mean[:, 0].nonzero()


def ask_for_what_is_real(mean: Tensor) -> object:
    return mean[mean[:, 0] > 0]


def ask_for_an_array(mean: Tensor) -> object:
    return mean.numpy()


def ask_for_a_copy(mean: Tensor) -> object:
    return mean.to("cpu")


@pytest.mark.parametrize(
    "ask",
    [
        ask_for_item,
        ask_for_list,
        ask_whether,
        ask_where,
        ask_for_what_is_real,
        ask_for_an_array,
        ask_for_a_copy,
    ],
)
def test_a_hidden_wait_in_a_step_would_be_found(tmp_path, transfers, ask: Callable[[Tensor], object]):
    def hidden(module: object, outputs: object, batch: object) -> StepOutputs:
        found = step_outputs_of(module, outputs, batch)
        ask(found.posterior_mean)
        return found

    with pytest.raises((RuntimeError, TypeError), match="meta"):
        train(tmp_path, steps=100, read_outputs=hidden)


def test_a_second_wait_in_a_reading_would_be_found(tmp_path, transfers, monkeypatch: pytest.MonkeyPatch):
    def twice(window: Any, *arguments: Any) -> Any:
        window.is_finite()
        return take_reading(window, *arguments)

    monkeypatch.setattr(callback, "take_reading", twice)
    train(tmp_path, steps=3)
    assert len(transfers) == 2 * len(read_readings(tmp_path / "posterior.jsonl")) > 0


@pytest.mark.parametrize("mode", monitor_cost.MODES)
def test_the_benchmark_times_each_way_to_watch(tmp_path: Path, mode: str):
    demo = write_demo(tmp_path, "tokens", sequences=60, mean_length=5)
    report = json.loads(json.dumps(monitor_cost.run(tiny_settings(demo, "--max_steps", "8"), [mode])))
    (row,) = report["rows"]
    assert row["mode"] == mode
    assert row["readings"] == 8  # of a run so short, each step
    assert row["probes"] > 0 or mode == "fast"  # where only suspicion requests it
    assert 0 < row["hooks s"] < row["training s"]
    assert row["push, us"] > 0


def test_a_run_that_the_benchmark_ends_early_is_read_as_often_as_a_whole_one(tmp_path: Path):
    demo = write_demo(tmp_path, "tokens", sequences=60, mean_length=5)
    (row,) = monitor_cost.run(tiny_settings(demo, "--max_steps", "200"), ["fast"], stop_after=9)["rows"]
    assert row["readings"] == 9 // (200 // 50)
