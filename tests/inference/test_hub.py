"""Models on the hub: what is pushed is loaded, by name and by commit, without paths of a machine; errors take a line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import seqvae
from seqvae.cli.main import main
from seqvae.errors import ExitCode, SeqVAEError, StorageError, UsageError
from seqvae.inference.hub import _without_places
from seqvae.inference.model import Model
from tests.support.model_hub import TOKEN, ModelHub, model_hub

huggingface_hub = pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
ROOT = Path(__file__).parent.parent.parent
KEPT = Path(__file__).parent / "saved" / "format-2"
TEXT = pd.DataFrame({"id": ["a", "b"], "text": ["abc a", "de"]})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    constants = import_module("huggingface_hub.constants")
    for name, value in (("HF_HUB_CACHE", "cache"), ("HF_TOKEN_PATH", "token"), ("HF_STORED_TOKENS_PATH", "tokens")):
        monkeypatch.setattr(constants, name, str(tmp_path / "hf" / value))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with model_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def model() -> Model:
    return Model.load(KEPT, device="cpu")


def test_what_is_pushed_is_loaded_by_name_and_by_commit(hub, model, tmp_path):
    first = model.push_to_hub("words")
    assert first.startswith("hf://ann/words@")
    model.stored.weights["likelihood.scores.weight"].mul_(2.0)
    second = model.push_to_hub("hf://ann/words")
    assert hub.private == {"ann/words"}
    means = {}
    for place in ("hf://words", "hf://ann/words", first, second):
        loaded = seqvae.load(place, device="cpu")
        assert loaded.run is None
        means[place] = np.asarray(loaded.encode(TEXT, cache_dir=str(tmp_path / "c"))["nll"])
    np.testing.assert_array_equal(means["hf://words"], means[second])
    np.testing.assert_array_equal(means["hf://ann/words"], means[second])
    assert not np.allclose(means[first], means[second])
    kept = model.encode(TEXT, cache_dir=str(tmp_path / "c"))["nll"]
    assert not np.allclose(means[second], kept)  # the network at hand was built before its weights changed
    np.testing.assert_allclose(means[first], kept)


def test_the_card_on_the_hub_says_how_to_load_it_and_stays_once_it_is_edited(hub, model):
    model.push_to_hub("words", private=False)
    assert hub.private == set()
    found = hub.files("ann/words")
    assert found is not None
    card = found[1]["README.md"].decode()
    assert 'seqvae.load("hf://ann/words")' in card
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "seqvae"
    assert huggingface_hub.ModelCard(card).data.library_name == "seqvae"
    hub.put("ann/words", {"README.md": b"My own words."})
    for _ in range(2):
        model.push_to_hub("words")
        found = hub.files("ann/words")
        assert found is not None
        assert found[1]["README.md"] == b"My own words."


def test_nothing_but_a_models_files_is_fetched(hub, model):
    model.push_to_hub("words")
    hub.put("ann/words", {"pytorch_model.bin": b"pickle", "setup.py": b"import os"})
    seqvae.load("hf://ann/words")
    fetched = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /ann/words/resolve/")}
    assert fetched == {"config.json", "model.safetensors"}


def test_what_was_fetched_once_is_there_without_the_hub(hub, model, monkeypatch):
    model.push_to_hub("words")
    seqvae.load("hf://ann/words")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert seqvae.load("hf://ann/words").step == 7


def test_no_place_of_a_machine_is_published_or_taken_from_others(hub, model, tmp_path):
    settings = {
        "data_dir": "/home/ann/stays/train", "cache_dir": "/scratch/ann", "endpoint_url": "http://inside:9000",
        "label_path": "C:\\\\Users\\ann\\labels.csv", "output_dir": "~/runs", "feature_columns": "/s,b",
    }  # fmt: skip
    model.stored.settings.update(settings)
    results = {
        "command": "seqvae train --data_dir '/home/ann/my data/stays' --cache_dir=/scratch/ann",
        "why": "rate 1 / 2",
    }
    Model(model.network, model.stored, model.path, None, None, results).push_to_hub("words")
    found = hub.files("ann/words")
    assert found is not None
    config = json.loads(found[1]["config.json"])
    shown = {name: config["settings"][name] for name in settings}
    assert shown == {
        "data_dir": "train", "cache_dir": None, "endpoint_url": None, "label_path": "labels.csv", "output_dir": "runs",
        "feature_columns": "/s,b",
    }  # fmt: skip
    assert config["results"]["command"] == "seqvae train --data_dir 'stays' --cache_dir=ann"
    assert config["results"]["why"] == "rate 1 / 2"
    for content in found[1].values():
        assert b"/home/ann" not in content
        assert b"scratch" not in content
    config["settings"] |= settings
    hub.put("ann/words", {"config.json": json.dumps(config).encode()})
    loaded = seqvae.load("hf://ann/words").settings
    assert (loaded["cache_dir"], loaded["data_dir"]) == (None, "train")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("s3://bucket/data and hf://datasets/a/b", "s3://bucket/data and hf://datasets/a/b"),
        ("a/b 1/2 m/s ~ 5 KL / n", "a/b 1/2 m/s ~ 5 KL / n"),
        ("/a/b /c", "b c"),
        ("(/a/b.csv)", "(b.csv)"),
        ("~ann/x D:/y/z", "x z"),
    ],
)
def test_paths_are_told_from_other_texts(text, kept):
    assert _without_places(text) == kept


@pytest.mark.parametrize(("words", "private"), [((), {"ann/words"}), (("--public", "--message", "the first"), set())])
def test_the_command_pushes_and_prints_the_address_to_load_by(words, private, hub, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["seqvae", "push", str(KEPT), "ann/words", *words])
    assert main() == 0
    address = capsys.readouterr().out.splitlines()[-1]
    assert address.startswith("hf://ann/words@")
    assert seqvae.load(address).step == 7
    assert hub.private == private


def test_the_command_without_a_name_says_what_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["seqvae", "push", str(KEPT)])
    assert main() == ExitCode.USAGE
    assert "CHECKPOINT USER/NAME" in capsys.readouterr().err


# --- What goes wrong -------------------------------------------------------------------------------------------------


def end_of(call: Callable[[], object]) -> SeqVAEError:
    with pytest.raises(SeqVAEError) as caught:
        call()
    error = caught.value
    assert "\n" not in str(error)
    assert TOKEN not in str(error)
    assert not type(error.__cause__).__module__.startswith(
        ("huggingface_hub", "httpx")
    )  # a traceback would show its words
    return error


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("hf://ann/nothing", "there is no such model, or it is private"),
        ("hf://ann/words@nowhere", "there is no such revision"),
        ("hf://ann/empty", "holds no model of ours: config.json and model.safetensors is not there"),
        ("hf://datasets/ann/words", "hf://datasets/... is no model"),
        ("hf://ann/a b", "is no name of a model"),
        ("hf://", "must be hf://user/name"),
        ("hf://ann/words@", "must be hf://user/name"),
        ("hf://user:password@host/x", "credentials never stand in it"),
    ],
)
def test_what_is_not_there_is_said(hub, model, place, message):
    model.push_to_hub("words")
    hub.put("ann/empty", {"README.md": b"nothing"})
    error = end_of(lambda: seqvae.load(place))
    assert isinstance(error, UsageError)
    assert message in str(error)
    assert "password" not in str(error)


def test_a_damaged_or_hostile_model_on_the_hub_is_refused(hub, model):
    model.push_to_hub("words")
    hub.put("ann/words", {"model.safetensors": b"\x80\x04K\x01."})
    assert "no export of ours, or a damaged one" in str(end_of(lambda: seqvae.load("hf://ann/words")))


def test_without_a_token_or_with_the_wrong_one_the_remedy_is_named(hub, model, monkeypatch):
    model.push_to_hub("words")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for call in (lambda: model.push_to_hub("ann/words"), lambda: model.push_to_hub("words")):
        assert "hf auth login" in str(end_of(call))
    monkeypatch.delenv("HF_TOKEN")
    for call in (
        lambda: model.push_to_hub("words"),
        lambda: model.push_to_hub("ann/words"),
        lambda: seqvae.load("hf://ann/words"),
    ):
        assert "hf auth login" in str(end_of(call))


def test_a_name_of_somebody_else_and_a_revision_are_refused(hub, model):
    error = end_of(lambda: model.push_to_hub("bob/words"))
    assert isinstance(error, StorageError)
    assert "access was denied (You may not write there not yours)" in str(error)
    assert "a revision is what comes of it" in str(end_of(lambda: model.push_to_hub("ann/words@main")))


def test_a_hub_out_of_reach_and_one_in_trouble_are_told_apart(hub, model, monkeypatch):
    hub.fails_with, hub.repeats_token = 403, True
    error = end_of(lambda: model.push_to_hub("ann/words"))
    assert "access was denied" in str(error)
    assert "***" in str(error)
    hub.fails_with = 500
    assert "the hub answered 500" in str(end_of(lambda: seqvae.load("hf://ann/words")))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for call in (lambda: model.push_to_hub("ann/words"), lambda: seqvae.load("hf://ann/words")):
        error = end_of(call)
        assert isinstance(error, StorageError)
        assert "the hub cannot be reached (ConnectError)" in str(error)


def test_without_the_library_the_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    assert 'pip install "seqvae[hub]"' in str(end_of(lambda: model.push_to_hub("ann/words")))


@pytest.mark.slow
def test_commands_take_an_address_that_was_typed(hub, model, tmp_path):
    model.push_to_hub("words")
    TEXT.to_parquet(tmp_path / "new.parquet")
    variables = {
        **os.environ,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
    }
    words = ["encode", "hf://ann/words", "--data_dir", "new.parquet", "--output", "latents.parquet"]
    command = [sys.executable, "-m", "seqvae", *words]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert len(pd.read_parquet(tmp_path / "latents.parquet")) == 2
