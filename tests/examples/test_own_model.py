"""A network of one's own goes through the same pipeline, as the example shows."""

import json
import sys

import pytest
import torch

from examples.own_model.__main__ import main
from seqvae.data.demo import write_demo
from seqvae.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


def run(monkeypatch, folder, kind, name, *words):
    data_dir = write_demo(folder, kind, sequences=200, mean_length=12)
    places = ["--data_dir", str(data_dir), "--cache_dir", str(folder / "cache"), "--output_dir", str(folder)]
    limits = ["--max_steps", "6", "--tokens_per_batch", "500", "--log_every_n_steps", "1", "--run_name", name]
    monkeypatch.setattr(sys, "argv", ["own_model", *places, *limits, *words])
    main()


def test_it_trains_with_readings_and_decoder_use(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "tokens", "own")
    rows = [json.loads(line) for line in (tmp_path / "own" / "posterior.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 6
    assert "decoder_use" in rows[-1]


def test_it_trains_without_monitoring(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "tokens", "own", "--disable_metrics_monitoring")
    assert not (tmp_path / "own" / "posterior.jsonl").exists()


def test_the_seed_holds_for_its_weights_too(monkeypatch, tmp_path):
    weights = []
    for name in ("first", "second"):
        run(monkeypatch, tmp_path, "tokens", name)
        weights.append(torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_data_of_another_kind_are_refused(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="model of tokens, but these are vectors"):
        run(monkeypatch, tmp_path, "vectors", "own")
