"""The benchmarks run from end to end on next to nothing, which says nothing of what they measure.

Shapes: V variables.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench import DATA_SETS
from benchmarks.quality import results
from benchmarks.speed import event_throughput
from benchmarks.speed.set_loop_reference import SetLoopVAE
from seqvae.cli.command_line import parse_command_line
from seqvae.config.model import ModelSettings
from seqvae.config.training import OptimizedSettings
from seqvae.data.batch import EventBatch, TokenBatch
from seqvae.data.demo import write_demo
from seqvae.data.description import DataDescription
from seqvae.models.vae import SequenceVAE

TINY = ("--width", "16", "--depth", "1", "--heads", "2", "--latent_size", "2", "--max_steps", "3", "--num_workers", "0")


def tiny_settings(folder: Path, *words: str) -> OptimizedSettings:
    places = ("--data_dir", str(folder), "--cache_dir", str(folder / "cache"), "--output_dir", str(folder / "runs"))
    return parse_command_line(OptimizedSettings, [*TINY, *places, *words], prog="test", description="")


def two_patients() -> EventBatch:
    """The first with sets of 2 and 1 events, the second, which is padded, with one set of 1."""
    return EventBatch(
        gaps_BT=torch.tensor([[0.0, 30.0], [0.0, 0.0]]),
        lengths_B=torch.tensor([2, 1]),
        variables_E=torch.tensor([1, 2, 1, 3]),
        values_E=torch.tensor([0.5, -0.5, 1.0, 2.0]),
        has_value_E=torch.ones(4, dtype=torch.bool),
        steps_E=torch.tensor([0, 0, 1, 2]),
        sequences_B=torch.tensor([0, 1]),
        labels_B=None,
        step_tokens=3,
        position=0,
    )


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return write_demo(tmp_path, "tokens", sequences=60, mean_length=5)


def figures(report: dict[str, Any]) -> dict[str, float]:
    return {row["figure"]: row["value"] for row in report["rows"]}


def test_results_trains_measures_and_compares(demo: Path, capsys: pytest.CaptureFixture[str]):
    options = results.Options("demo", evaluate=None, without_latent=True, samples=3, sequences=4)
    report = results.run(tiny_settings(demo), options)
    found = figures(json.loads(json.dumps(report)))
    difference = found["IW-NLL (3 samples), nats per sequence"] - found["NLL of the decoder without a latent"]
    assert found["IW-NLL minus that"] == pytest.approx(difference, abs=1e-3)
    assert found["true entropy, nats per symbol"] < found["unigram entropy, nats per symbol"]
    assert "share of the gap closed, %" in capsys.readouterr().out
    (likelihood,), (latent,), (truth,) = report["likelihood"], report["latent"], report["truth"]
    assert likelihood["training"].endswith("passes: 1")
    assert likelihood["IW-NLL per sequence"].startswith(f"{found['IW-NLL (3 samples), nats per sequence']:.1f}"[:-1])
    assert likelihood["difference"][0] in "+-"
    assert latent["active units"].endswith(" of 2")
    assert float(truth["true entropy"]) == pytest.approx(found["true entropy, nats per symbol"], abs=1e-4)


def test_the_runner_measures_all_data_sets_of_results():
    assert set(DATA_SETS) == {results.DEMO, *results.REAL}


def test_results_of_a_checkpoint_are_those_of_its_run(demo: Path):
    options = results.Options("demo", evaluate=None, without_latent=False, samples=3, sequences=4)
    trained = results.run(tiny_settings(demo, "--run_name", "one"), options)
    checkpoint = str(demo / "runs" / "one" / "checkpoints" / "last.ckpt")
    again = results.run(tiny_settings(demo), options._replace(evaluate=checkpoint))
    assert figures(again) == figures(trained)
    assert again["training_seconds"] is None


def test_a_decoder_without_its_latent_sees_z_of_0():
    torch.manual_seed(0)
    settings = ModelSettings(width=16, depth=1, heads=2, latent_size=2)
    vae = SequenceVAE(DataDescription(kind="tokens", vocabulary_size=5), settings).eval()
    batch = TokenBatch(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]), torch.arange(2), None, 4, 0)
    output = results.WithoutLatent(vae, latent_size=2)(batch)
    assert output.posterior_mean.abs().sum() == output.posterior_logvar.abs().sum() == 0
    assert output.steps_B.tolist() == vae(batch).steps_B.tolist() == [4, 2]
    torch.testing.assert_close(output.nll_B, vae.nll_given_z(batch, torch.zeros(2, 2)))


def test_event_throughput_compares_both(tmp_path: Path):
    folder = write_demo(tmp_path, "events", sequences=30, mean_length=4)
    report = event_throughput.run(tiny_settings(folder), rounds=1, steps=1, patients=1)
    rates = [row["events/s"] for row in report["rows"]]
    assert len(rates) == 4
    assert min(rates) > 0
    assert report["ratio"] == pytest.approx(rates[0] / rates[2], rel=0.1)


def test_the_loop_sees_each_set_of_each_patient(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def note(variables: tuple[Tensor, ...], values: tuple[Tensor, ...], times_S: Tensor) -> Tensor:
        seen.append(([one.tolist() for one in variables], [one.tolist() for one in values], times_S.tolist()))
        return torch.zeros(())

    loop = SetLoopVAE(variables=4, lean=False)
    monkeypatch.setattr(loop, "patient_loss", note)
    loop(two_patients())
    assert seen == [([[1, 2], [1]], [[0.5, -0.5], [1.0]], [0.0, 30.0]), ([[3]], [[2.0]], [0.0])]


def test_the_loop_has_ten_million_weights_and_trains_all_but_those_of_the_unused_half():
    loop = SetLoopVAE(variables=4, lean=False)
    loss = loop(two_patients())
    loss.backward()
    untrained = {name.split(".")[1] for name, weight in loop.named_parameters() if weight.grad is None}
    assert loss.isfinite()
    assert 10e6 < sum(weight.numel() for weight in loop.parameters()) < 11e6
    assert untrained == {"decoder"}
    assert all(weight.grad is None for weight in loop.set_vae.decoder.parameters())
