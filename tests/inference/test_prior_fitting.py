"""Priors over codes in models: fitted, kept in checkpoints and saved models, and what is made of them."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from seqvae.cli.main import main
from seqvae.config.inference import PriorSettings
from seqvae.errors import DataError, ExitCode, UsageError
from seqvae.inference.model import Model
from seqvae.inference.prior_fitting import codes_of, store_prior
from seqvae.models.code_prior import RecurrentCodes
from seqvae.models.codes import UniformCodes
from seqvae.models.vae import SequenceVAE
from seqvae.training.network import CODE_PRIOR, load_weights
from tests.support.trained_models import TINY, columns, make_checkpoint

CODES = replace(TINY, latent="discrete", codes=4, codebooks=2, latent_size=4)
QUICK: dict[str, Any] = {"width": 4, "max_epochs": 2}


def run_of(directory: Path, kind: str = "tokens", **changes: Any) -> Path:
    return make_checkpoint(directory, kind, replace(CODES, **changes))


def use(monkeypatch, *words: object) -> ExitCode | int:
    monkeypatch.setattr(sys, "argv", ["seqvae", *map(str, words)])
    return main()


def rows(record: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["value"] for row in record["rows"]}


@pytest.mark.parametrize(("kind", "scope"), [("tokens", "sequence"), ("tokens", "step"), ("events", "step")])
def test_the_rate_is_the_sum_over_the_codes_of_the_split(tmp_path, kind, scope):
    model = Model.load(run_of(tmp_path, kind, latent_scope=scope)).fit_prior(**QUICK)
    assert isinstance(model.network.prior, RecurrentCodes)
    found = model.evaluate(split="test", iw_sequences=12)
    total, encoded = 0.0, model.encode(split="test")
    for row in encoded.itertuples():
        steps = [row.codes] if scope == "sequence" else list(row.codes)
        before, state, of_this = 0, None, 0.0
        for step in steps:
            for book, code in enumerate(step):
                remembered, state = model.network.prior.memory(
                    model.network.prior.before(torch.tensor([[before]])), state
                )
                logits = model.network.prior.weight_HKW[book] @ remembered[0, 0] + model.network.prior.bias_HK[book]
                of_this -= float(logits.detach().log_softmax(dim=0)[int(code)])
                before = 1 + 4 * book + int(code)
        assert row.rate == pytest.approx(of_this, rel=1e-4)
        total += of_this
    values = rows(found)
    assert values["rate"] == pytest.approx(total / len(encoded), rel=1e-4)
    assert values["ELBO"] == pytest.approx(-values["rate"] - values["NLL"], rel=1e-6)
    assert values["IW-NLL"] == pytest.approx(values["rate"] + values["NLL"], rel=1e-4)
    assert next(row["of"] for row in found["rows"] if row["name"] == "rate") == "-log p(codes), by the fitted prior"


def test_a_saved_model_keeps_its_prior(tmp_path):
    fitted = Model.load(run_of(tmp_path)).fit_prior(**QUICK)
    loaded = Model.load(fitted.save(tmp_path / "saved"))
    assert isinstance(loaded.network.prior, RecurrentCodes)
    pd.testing.assert_frame_equal(loaded.sample(20), fitted.sample(20))
    pd.testing.assert_frame_equal(loaded.encode(split="test"), fitted.encode(split="test"))


def test_the_command_puts_a_prior_into_the_checkpoint_and_samples_are_drawn_from_it(
    tmp_path, monkeypatch, caplog, capsys
):
    run = run_of(tmp_path)
    path = run / "checkpoints" / "best.ckpt"
    assert use(monkeypatch, "sample", run, "--count", 5, "--output", tmp_path / "even.parquet") == 0
    assert "codes are drawn evenly" in caplog.text
    caplog.clear()
    before = torch.load(path, weights_only=True)
    words = ("fit-prior", run, "--width", 4, "--max_epochs", 2)
    assert use(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert f"{path}: prior fitted in" in out
    assert f"all equally likely {2 * math.log(4):.3f}" in out
    first = torch.load(path, weights_only=True)
    assert first.keys() - before.keys() == {CODE_PRIOR}
    assert first["state_dict"].keys() == before["state_dict"].keys()
    assert all(weight.equal(before["state_dict"][name]) for name, weight in first["state_dict"].items())
    for verb in ("sample", "encode"):
        assert use(monkeypatch, verb, run, "--output", tmp_path / f"{verb}.parquet") == 0
    assert use(monkeypatch, "evaluate", run, "--iw_sequences", 3) == 0
    assert "by the fitted prior" in capsys.readouterr().out
    assert not caplog.text
    assert use(monkeypatch, *words) == 0  # in place of the first one
    second = torch.load(path, weights_only=True)[CODE_PRIOR]
    assert all(weight.equal(second[name]) for name, weight in first[CODE_PRIOR].items())
    assert not list(run.glob(".lock"))


def test_the_command_puts_a_prior_into_a_saved_model(tmp_path, monkeypatch):
    saved = Model.load(run_of(tmp_path)).save(tmp_path / "saved")
    assert isinstance(Model.load(saved).network.prior, UniformCodes)
    assert use(monkeypatch, "fit-prior", saved, "--max_epochs", 1) == 0
    assert isinstance(Model.load(saved).network.prior, RecurrentCodes)


def test_a_model_without_codes_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    run = make_checkpoint(tmp_path, "vectors")
    assert use(monkeypatch, "fit-prior", run) == ExitCode.USAGE
    assert "its latents are no codes" in capsys.readouterr().err
    with pytest.raises(UsageError, match="trained with --latent discrete"):
        Model.load(run).fit_prior()


def test_a_model_on_the_hub_is_refused_before_it_is_fetched(monkeypatch, capsys):
    assert use(monkeypatch, "fit-prior", "hf://ann/codes") == ExitCode.USAGE
    assert "`seqvae export` the model first" in capsys.readouterr().err


def test_data_without_the_splits_that_it_takes_are_refused(tmp_path):
    model = Model.load(run_of(tmp_path))
    with pytest.raises(DataError, match="no train split"):
        model.fit_prior(columns("tokens", "test").to_pandas())


def test_a_checkpoint_that_changed_meanwhile_is_left_alone(tmp_path):
    run = run_of(tmp_path)
    path = run / "checkpoints" / "best.ckpt"
    fitted = Model.load(run).fit_prior(**QUICK)
    content = torch.load(path, weights_only=True)
    content["state_dict"]["network.begin_W"] = content["state_dict"]["network.begin_W"] + 1
    path.unlink()
    torch.save(content, path)
    with pytest.raises(UsageError, match="has changed while the prior was fitted"):
        store_prior(fitted)
    assert CODE_PRIOR not in torch.load(path, weights_only=True)


def test_a_new_run_takes_the_weights_but_not_the_prior(tmp_path):
    run = run_of(tmp_path)
    model = Model.load(run).fit_prior(**QUICK)
    store_prior(model)
    network = SequenceVAE(model.description, CODES)
    load_weights(network, model.path, model.description)
    assert isinstance(network.prior, UniformCodes)
    assert network.begin_W.equal(model.network.begin_W)


def test_codes_are_those_of_every_real_latent(tmp_path):
    model = Model.load(run_of(tmp_path, latent_scope="step"))
    data, _ = model._opened(None, "test", {})
    found = codes_of(model, data, "test", 0)
    encoded = model.encode(split="test")
    assert sorted(found.lengths_B.tolist()) == sorted(encoded["steps"].tolist())
    assert found.codes_XH.shape == (int(encoded["steps"].sum()), 2)


@pytest.mark.parametrize(("changes", "message"), [({"width": 0}, "--width"), ({"lr": 0.0}, "--lr")])
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PriorSettings(**changes)
