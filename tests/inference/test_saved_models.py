"""Saved models: files of every version are read, the model card says what is known, and nothing foreign is taken or overwritten."""

import hashlib
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from seqvae.errors import UsageError
from seqvae.inference.model import Model
from seqvae.inference.saved import FORMAT, read_saved
from seqvae.reports.model_card import card_of
from seqvae.text import visible
from tests.support.hostile import NAMES
from tests.support.report_runs import finished, make_run
from tests.support.trained_models import KINDS, make_checkpoint

KEPT = Path(__file__).parent / "saved"
"""Models that each version of the format was written for, of a few kB."""
VECTORS = pd.DataFrame(
    {
        "id": ["a", "a", "a", "b"],
        "time": [0.0, 1.0, 2.0, 0.0],
        "pulse": [80.0, 90.0, None, 70.0],
        "heat": [37.0, None, 36.5, 38.0],
    }
)
TEXT = pd.DataFrame({"id": ["a", "b"], "text": ["abc a", "de"]})
KNOWN: dict[int, tuple[pd.DataFrame, list[list[float]], list[float]]] = {
    1: (VECTORS, [[0.7127202, -0.59577805], [0.7722255, -0.07231988]], [5.1448140144348145, 4.914875507354736]),
    2: (TEXT, [[0.20531765, 0.11500971], [0.25670773, 0.15736979]], [12.483331680297852, 5.953249454498291]),
}
"""By format: data, and the posterior means and NLLs that the version which wrote the file had of them."""
EVALUATION = {
    "step": 7,
    "data": "data",
    "split": "test",
    "sequences": 12,
    "rows": [
        {"name": "IW-NLL", "value": 12.25, "error": 0.5, "of": "-log p(x): 16 z, 12 sequences"},
        {"name": "mutual information", "value": 1.5, "error": None, "of": "of N = 12 posteriors: at most 2.48"},
        {"name": "decoder use", "value": 2.125, "error": 0.25, "of": "what another's z costs, of like length"},
    ],
    "notes": ["few samples carry the estimate"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def run_with(checkpoint_of: Path, directory: Path, **changes: Any) -> Path:
    """A run of 1,000 steps that was written by hand, with the checkpoint of another one."""
    run = make_run(directory, **changes)
    shutil.copytree(checkpoint_of / "checkpoints", run / "checkpoints")
    return run


def header_of(card: str) -> dict[str, Any]:
    _, header, _ = card.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(header)
    return found


# --- The format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_files_of_every_version_are_read_and_compute_what_they_did(number, tmp_path):
    data, means, nll = KNOWN[number]
    latents = Model.load(KEPT / f"format-{number}", device="cpu").encode(data, cache_dir=str(tmp_path))
    np.testing.assert_allclose(np.stack(latents["mean"]), means, rtol=1e-5)
    np.testing.assert_allclose(latents["nll"], nll, rtol=1e-5)


def test_a_model_of_an_older_version_is_replaced_by_one_of_this(tmp_path):
    shutil.copytree(KEPT / "format-1", tmp_path / "m")
    model = Model.load(tmp_path / "m")
    model.save(tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert Model.load(tmp_path / "m").stored._replace(weights={}) == model.stored._replace(weights={})


def test_exports_of_the_first_version_are_read(runs, tmp_path):
    """Header padded with spaces, numbers in the order of the state dict, `made_by` beside the format."""
    model = Model.load(runs["vectors"])
    model.save(tmp_path)
    (tmp_path / "README.md").unlink()
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    kept = ("made_by", "step", "settings", "data", "description")
    first = {"format": 1, "weights": "model.safetensors", **{name: about[name] for name in kept}}
    (tmp_path / "model.json").write_text(json.dumps(first))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "made_by": "SeqVAE"}}
    parts, place = [], 0
    for name, weight in model.stored.weights.items():
        data = weight.contiguous().numpy().tobytes()
        kind = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}[weight.dtype]
        header[name] = {"dtype": kind, "shape": list(weight.shape), "data_offsets": [place, place + len(data)]}
        parts.append(data)
        place += len(data)
    text = repr(header).replace("'", '"').encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    saved = Model.load(tmp_path)
    assert all(torch.equal(weight, saved.stored.weights[name]) for name, weight in model.stored.weights.items())
    np.testing.assert_array_equal(saved.encode(split="test")["nll"], model.encode(split="test")["nll"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_is_the_same_model(runs, kind, tmp_path):
    model = Model.load(runs[kind])
    saved = Model.load(model.save(tmp_path / "saved"))
    assert saved.stored._replace(weights={}) == model.stored._replace(weights={})
    pd.testing.assert_frame_equal(saved.encode(split="test"), model.encode(split="test"))


def test_weights_that_share_memory_are_saved(runs, tmp_path):
    model = Model.load(runs["tokens"])
    shared = next(iter(model.stored.weights.values()))
    twice = model.stored._replace(weights={**model.stored.weights, "again": shared})
    Model(model.network, twice, model.path, None, None).save(tmp_path)
    with pytest.raises(UsageError, match="does not hold a network"):  # read, and found to have one weight too many
        Model.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": FORMAT + 1}, f"this version reads 1 to {FORMAT}. Install a newer seqvae"),
        ({"format": "x"}, "is of format 'x'"),
        (
            {"description": {"kind": "tokens", "colour": 1}},
            "describes data by colour, which this version does not know",
        ),
        ({"settings": {}}, "no export of ours, or a damaged one"),
        ({"settings": {"width": "\u001b[2J"}}, "no export of ours, or a damaged one"),
        ({"results": [1]}, "no export of ours, or a damaged one"),
        ({"step": None}, "no export of ours, or a damaged one"),
    ],
)
def test_a_config_that_this_version_cannot_use_is_refused(changes, message, tmp_path):
    shutil.copytree(KEPT / f"format-{FORMAT}", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UsageError) as caught:
        Model.load(tmp_path / "m")
    assert message in str(caught.value)


def test_weights_that_changed_behind_their_config_are_refused(tmp_path):
    shutil.copytree(KEPT / f"format-{FORMAT}", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors is not as it was written"):
        Model.load(tmp_path / "m")


@pytest.mark.parametrize(
    "results",
    [{"verdict": 3, "data": [], "reading": "x"}, {"evaluation": {"rows": [1, {}]}}, {"data": {"splits": [3]}}],
)
def test_forged_results_are_data(results, tmp_path):
    shutil.copytree(KEPT / f"format-{FORMAT}", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"results": results}))
    again = Model.load(tmp_path / "m").save(tmp_path / "again")
    assert header_of((again / "README.md").read_text())["library_name"] == "seqvae"


@pytest.mark.parametrize("name", ["config.json", "README.md", "model.safetensors"])
def test_files_of_others_are_not_overwritten(runs, name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=f"holds {name}, which is of no export of ours"):
        Model.load(runs["tokens"]).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


# --- The card --------------------------------------------------------------------------------------------------------


def test_the_card_says_what_the_run_came_to(runs, tmp_path):
    run = run_with(runs["vectors"], tmp_path / "mine", end=finished())
    (run / "evaluation.jsonl").write_text(json.dumps(EVALUATION) + "\n")
    card = (Model.load(run).save(tmp_path / "saved") / "README.md").read_text()
    for text in (
        *(
            "# mine",
            "**Posterior: healthy.**",
            "Finished at step 1,000 of 1,000",
            "3 latent dimensions for each sequence",
        ),
        *(
            "| IW-NLL | 12.25 ± 0.5 |",
            "at most 2.48",
            "| decoder use | 2.125 ± 0.25 |",
            "few samples carry the estimate",
        ),
        *("python train_optimized.py", "2 features: pulse, heat."),
    ):
        assert text in card, text
    metrics = header_of(card)["model-index"][0]["results"][0]["metrics"]
    assert {one["type"]: one["value"] for one in metrics} == {
        "iw_nll": 12.25,
        "mutual_information": 1.5,
        "decoder_use": 2.125,
    }


def test_without_an_evaluation_of_this_checkpoint_the_card_has_the_runs_own_numbers(runs, tmp_path):
    run = run_with(runs["vectors"], tmp_path / "mine")
    others = [EVALUATION | {"step": 8}, EVALUATION | {"data": "elsewhere"}]
    (run / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    card = (Model.load(run).save(tmp_path / "saved") / "README.md").read_text()
    assert "12.25" not in card
    assert "The IW-NLL was not measured" in card
    assert "| mutual information |" in card
    assert "| ELBO |" in card
    assert "model-index" not in header_of(card)


def test_a_saved_model_keeps_what_is_known_when_it_is_saved_again(runs, tmp_path):
    run = run_with(runs["vectors"], tmp_path / "mine")
    first = Model.load(run).save(tmp_path / "one")
    second = Model.load(first).save(tmp_path / "two")
    assert (first / "README.md").read_text() == (second / "README.md").read_text()
    assert read_saved(first).results == read_saved(second).results != {}


def test_a_card_that_somebody_edited_stays_as_it_is(runs, tmp_path):
    model = Model.load(runs["tokens"])
    card = model.save(tmp_path) / "README.md"
    card.write_text("My own words.")
    for _ in range(2):
        model.save(tmp_path)
        assert card.read_text() == "My own words."
    card.unlink()
    model.save(tmp_path)
    assert header_of(card.read_text())["library_name"] == "seqvae"


def card_with(name: str) -> str:
    """The card of a model in which one name stands wherever something comes from outside."""
    evaluation = {"split": name, "rows": [{"name": name, "value": 1.0, "of": name}], "notes": [name]}
    words = ("run", "verdict", "sentence", "why", "state", "command")
    data = {"layout": name, "notes": [name], "splits": [{"split": name}], "classes": [name]}
    results = {**dict.fromkeys(words, name), "data": data, "evaluation": evaluation}
    description = {"kind": "vectors", "names": [name], "classes": [name]}
    return card_of({"results": results, "description": description, "settings": {"encoder": name}, "version": name})


@pytest.mark.parametrize(
    "name", [*filter(None, NAMES), "|", "```", "a ````", "---", "a: [b", "![x](https://example.org/a.png)"]
)
def test_no_name_becomes_markup_of_a_card(name):
    card, plain = card_with(name), card_with("x")
    assert header_of(card).keys() == header_of(plain).keys()
    assert len(card.splitlines()) == len(plain.splitlines())
    assert all(letter.isprintable() or letter == "\n" for letter in card)
    fence = re.findall(r"^`{3,}$", card, re.MULTILINE)[-1]
    text, _, rest = card.split("---\n", 2)[2].partition(f"{fence}\n{visible(name)}\n{fence}\n")
    assert rest.startswith("\nAll ")
    for markup in ("<", "![", "](", "${", "$\\"):
        assert markup not in text.replace("\\" + markup[0], "")


def test_checksums_are_those_of_the_files(runs, tmp_path):
    Model.load(runs["tokens"]).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, sum_of in config["sha256"].items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == sum_of
    assert {"model.safetensors", "README.md"} <= config["sha256"].keys()
