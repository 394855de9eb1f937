"""`seqvae evaluate`: what it says of a trained model, what it leaves in the run's directory, and what it refuses in which words."""

import errno
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from seqvae.cli.main import main
from seqvae.cli.use_model import models_and_flags
from seqvae.config.inference import DataChoices
from seqvae.errors import ExitCode, UsageError
from seqvae.files import JsonLines
from seqvae.inference.estimates import SequenceNLL
from seqvae.inference.evaluate import Weighted, compare, paired_difference, weighted_nll
from seqvae.inference.model import open_data, open_model
from seqvae.inference.streaming import chosen_splits, joined_batches, shares
from seqvae.reports.evaluation_report import comparison_lines, evaluation_lines
from seqvae.reports.terminal import Ink
from tests.support.parquet_files import write
from tests.support.trained_models import KINDS, SIZES, columns, make_checkpoint


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def flat(self) -> str:
        return " ".join(self.out.split())


Evaluate = Callable[..., Outcome]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def labels(tmp_path) -> Path:
    """Of most sequences: whether their number is odd."""
    ids = [f"{split}-{number:02d}" for split, size in SIZES.items() for number in range(size)]
    path = tmp_path / "labels.csv"
    pd.DataFrame({"id": ids, "odd": [int(name[-1]) % 2 for name in ids], "one": 1}).iloc[3:].to_csv(path, index=False)
    return path


@pytest.fixture
def run(monkeypatch, capsys) -> Evaluate:
    """The command, in this process."""

    def call(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["seqvae", "evaluate", *map(str, words)])
        return Outcome(main(), *capsys.readouterr())

    return call


def rows_of(record: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["value"] for row in record["rows"]}


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_prints_a_table_writes_json_and_appends_a_row(run, runs, tmp_path, kind):
    outcome = run(runs[kind], "--iw_samples", 20, "--json", tmp_path / "numbers.json")
    assert outcome.code == ExitCode.DONE, outcome.err
    record = json.loads((tmp_path / "numbers.json").read_text())
    assert json.loads((runs[kind] / "evaluation.jsonl").read_text().splitlines()[-1]) == record
    rows = rows_of(record)
    assert rows["ELBO"] == pytest.approx(-rows["NLL"] - rows["rate"])
    assert sum(record["kl_per_dim"]) == pytest.approx(rows["rate"])
    assert rows["IW-NLL"] < -rows["ELBO"]
    assert (record["split"], record["sequences"], record["step"]) == ("test", SIZES["test"], 7)
    assert record["steps"] * rows["NLL per step"] == pytest.approx(rows["NLL"] * SIZES["test"])
    assert ("perplexity" in rows) == (kind == "tokens")
    assert bool(record["features"]) == (kind != "tokens")
    assert "run/best.ckpt" in outcome.out
    step = "token" if kind == "tokens" else "time step"
    assert all(row["name"] in outcome.out for row in record["rows"])
    assert f"per step, per {step}," in outcome.out
    assert f" {record['steps']:,} {step}s ({kind})" in outcome.out
    assert str(runs[kind]) not in (runs[kind] / "evaluation.jsonl").read_text().replace(record["command"], "")


def test_the_report_of_the_run_is_written_again_or_a_note_gives_the_reason(run, runs, monkeypatch):
    report = runs["tokens"] / "report.html"
    words = (runs["tokens"], "--iw_sequences", 0)
    assert run(*words).code == ExitCode.DONE
    assert not report.exists()
    report.write_text("old")
    assert run(*words).code == ExitCode.DONE
    assert "Measured on whole splits" in report.read_text(encoding="utf-8")

    def fail(directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("seqvae.inference.evaluate.write_report", fail)
    outcome = run(*words)
    assert outcome.code == ExitCode.DONE
    assert f"note: {report} cannot be written (No space left on device)" in outcome.out
    report.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_end_drew_no_latents_gets_them(run, runs, tmp_path, kind):
    directory = tmp_path / "run"
    shutil.copytree(runs[kind], directory)
    latents, report = directory / "latents.json", directory / "report.html"
    latents.unlink(missing_ok=True)
    report.unlink(missing_ok=True)
    assert run(directory, "--iw_sequences", "0").code == 0
    assert not latents.exists(), "there is no report that would show them"
    report.touch()
    assert run(directory, "--iw_sequences", "0").code == 0
    picture = json.loads(latents.read_text(encoding="utf-8"))
    assert picture["sequences"] == SIZES["valid"]
    assert "What it learned" in report.read_text(encoding="utf-8")
    latents.write_text(json.dumps(picture | {"step": 0}), encoding="utf-8")
    assert run(directory, "--iw_sequences", "0").code == 0
    assert json.loads(latents.read_text(encoding="utf-8"))["step"] == 0  # those of the run's own end stay


def test_the_same_seed_gives_the_same_numbers(run, runs, tmp_path):
    records = []
    for number, seed in enumerate((0, 0, 1)):
        words = ("--iw_samples", 3, "--iw_sequences", 5, "--seed", seed, "--json", tmp_path / f"{number}.json")
        assert run(runs["events"], *words).code == ExitCode.DONE
        records.append(rows_of(json.loads((tmp_path / f"{number}.json").read_text())))
    assert records[0] == records[1]
    assert records[0]["IW-NLL"] != records[2]["IW-NLL"]


def test_perplexity_is_that_of_a_token_with_the_end_mark(run, runs, tmp_path):
    assert run(runs["tokens"], "--iw_samples", 5, "--json", tmp_path / "a.json").code == ExitCode.DONE
    record = json.loads((tmp_path / "a.json").read_text())
    rows = rows_of(record)
    assert rows["perplexity"] == pytest.approx(math.exp(rows["IW-NLL"] * record["sequences"] / record["steps"]))
    assert rows["perplexity, ELBO"] == pytest.approx(math.exp(-rows["ELBO"] * record["sequences"] / record["steps"]))
    assert rows["perplexity"] < rows["perplexity, ELBO"]


def test_without_sequences_there_is_no_importance_weighting(run, runs):
    outcome = run(runs["tokens"], "--iw_sequences", 0)
    assert outcome.code == ExitCode.DONE
    assert "IW-NLL" not in outcome.out
    assert "perplexity, ELBO" in outcome.out


def test_splits_go_together(runs):
    data = open_data(open_model(str(runs["vectors"])), DataChoices())
    both = chosen_splits(data, "valid+test")
    assert shares(data, both, None) == [9, 12]
    assert shares(data, both, 7) == [3, 4]
    assert chosen_splits(data, None) == ("test",)
    found = [(split, int(number)) for split, batch, *_ in joined_batches(data, both) for number in batch.sequences_B]
    assert sorted(found) == [("test", number) for number in range(12)] + [("valid", number) for number in range(9)]
    with pytest.raises(UsageError, match="twice"):
        chosen_splits(data, "test+test")


# --- Probe ------------------------------------------------------------------------------------------------------------


def test_the_probe_stands_beside_simple_summaries(run, runs, labels, tmp_path):
    words = ("--iw_sequences", 0, "--probe", "odd", "--label_path", labels, "--split", "valid+test")
    for kind, sets in (("tokens", 3), ("vectors", 5)):
        outcome = run(runs[kind], *words, "--json", tmp_path / "a.json")
        assert outcome.code == ExitCode.DONE, outcome.err
        probe = json.loads((tmp_path / "a.json").read_text())["probe"]
        assert (probe["metric"], probe["scored_on"], probe["trained_on"], probe["without_label"]) == (
            "AUROC",
            21,
            37,
            3,
        )
        assert len(probe["rows"]) == sets
        assert all(low <= high for row in probe["rows"] for _, low, high in [row["score"]])
        scores = {row["features"]: row["score"][0] for row in probe["rows"]}
        difference = next(one for one in probe["differences"] if one["of"] == "summaries + latents - summaries")
        assert difference["score"][0] == pytest.approx(scores["summaries + latents"] - scores["summaries"])
        assert "3 without a label were left out" in outcome.flat


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--probe", "odd", "--split", "train"], ExitCode.USAGE, "choose another --split"),
        (["--probe", "one"], ExitCode.DATA, "nothing to tell apart"),
        (["--probe", "even"], ExitCode.DATA, "even"),
        (["--probe", "odd", "--split", "tset"], ExitCode.USAGE, "these data have test and train and valid"),
        ([], ExitCode.USAGE, "--label_path needs --probe"),
    ],
)
def test_what_cannot_be_probed_is_refused(run, runs, labels, words, code, message):
    done = run(runs["tokens"], *words, "--iw_sequences", 0, "--label_path", labels)
    assert (done.code, done.out) == (code, "")
    assert message in done.err.splitlines()[-1]


def test_the_label_file_of_the_training_is_probed_without_naming_it(run, runs, labels, monkeypatch):
    monkeypatch.setattr(
        "seqvae.inference.model.Model.settings",
        property(lambda model: model.stored.settings | {"label_path": str(labels)}),
    )
    outcome = run(runs["tokens"], "--iw_sequences", 0, "--probe", "odd", "--split", "test")
    assert outcome.code == ExitCode.DONE, outcome.err
    assert "AUROC" in outcome.out


def test_a_wrong_name_is_said_of_the_probe_with_the_columns_that_there_are(run, runs):
    outcome = run(runs["tokens"], "--iw_sequences", 0, "--probe", "txet")
    assert outcome.code == ExitCode.DATA
    assert "--probe 'txet' is not one of its columns" in outcome.err
    assert "text" in outcome.err
    assert "--label_column" not in outcome.err


def test_without_scikit_learn_a_probe_is_refused_before_data_are_read(run, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    monkeypatch.setattr("seqvae.inference.model.SequenceDataModule", None)
    outcome = run(runs["tokens"], "--probe", "odd")
    assert outcome.code == ExitCode.USAGE
    assert "--probe needs scikit-learn" in outcome.err


def test_a_probe_needs_a_training_split(run, runs, labels, tmp_path):
    one = write(tmp_path / "new.parquet", columns("tokens", "test"))
    words = ("--data_dir", one, "--cache_dir", tmp_path / "cache", "--probe", "odd", "--label_path", labels)
    done = run(runs["tokens"], *words)
    assert done.code == ExitCode.DATA
    assert "only pool" in done.err


# --- Comparison -------------------------------------------------------------------------------------------------------


def test_runs_side_by_side_are_compared_on_the_same_sequences(run, runs, tmp_path):
    other = make_checkpoint(tmp_path, "vectors")
    words = ("--compare", runs["vectors"], other, "--iw_samples", 4, "--json", tmp_path / "both.json")
    outcome = run(*words)
    assert outcome.code == ExitCode.DONE, outcome.err
    content = json.loads((tmp_path / "both.json").read_text())
    assert content["same_data"]
    (difference,) = content["differences"]
    assert (difference["of"], difference["value"]) == ("A - B", 0.0)  # twins
    assert "no difference shown" in outcome.out
    assert (other / "evaluation.jsonl").exists()


def test_by_default_one_model_gets_the_samples_that_decide_and_models_side_by_side_get_500(run, runs, tmp_path):
    def drawn(content: dict[str, Any]) -> str:
        return next(row["of"] for row in content["rows"] if row["name"] == "IW-NLL")

    one, both = tmp_path / "one.json", tmp_path / "both.json"
    assert run(runs["tokens"], "--json", one).code == ExitCode.DONE
    assert run("--compare", runs["tokens"], runs["tokens"], "--json", both).code == ExitCode.DONE
    assert drawn(json.loads(one.read_text())).startswith("-log p(x): 32 z, 12 sequences")
    assert not any("not tight" in note for note in json.loads(one.read_text())["notes"])
    assert drawn(json.loads(both.read_text())["records"][0]).startswith("-log p(x): 500 z, 12 sequences")


def test_runs_of_other_data_do_not_compare(run, runs):
    outcome = run("--compare", runs["vectors"], runs["events"], "--iw_samples", 2)
    assert outcome.code == ExitCode.DONE
    assert "not data of the same kind" in outcome.flat
    assert "these numbers do not compare" in outcome.flat
    assert "A - B" not in outcome.out


def test_only_what_is_of_the_same_content_in_the_same_units_compares():
    record = {"kind": "vectors", "split": "test", "units": "a", "content": "b", "data": "x"}
    assert compare([(record, None), (record | {"data": "a copy"}, None)])["same_data"]
    found = compare([(record, None), (record, None), (record | {"units": "c", "content": "d"}, None)])
    assert not found["same_data"]
    assert [text[:30] for text in found["unlike"]] == [
        f"{pair}: not in the same units" for pair in ("A and C", "B and C")
    ]
    (reason,) = compare([(record, None), (record | {"content": "d"}, None)])["unlike"]
    assert "not the same sequences" in reason


def test_a_network_that_was_trained_with_labels_compares_with_one_that_was_not(runs):
    trained = open_model(str(runs["vectors"]))
    described = replace(trained.description, classes=("no", "yes"))
    labelled = replace(trained, stored=trained.stored._replace(description=described))
    data = open_data(trained, DataChoices())
    one, other = (weighted_nll(each, data, ["test"], samples=1, sequences=3, seed=0) for each in (trained, labelled))
    assert paired_difference(one, other) == (0.0, 0.0)


def test_a_run_that_cannot_be_written_to_loses_no_numbers(run, runs, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "evaluation.jsonl")

    monkeypatch.setattr(JsonLines, "finish", refuse)
    outcome = run(runs["vectors"], "--iw_sequences", 0, "--json", tmp_path / "a.json")
    assert (outcome.code, outcome.err) == (
        ExitCode.STORAGE,
        "seqvae evaluate: evaluation.jsonl: Read-only file system\n",
    )
    assert "ELBO" in outcome.out
    assert (tmp_path / "a.json").exists()


def test_the_difference_is_paired_by_id(runs):
    description = open_model(str(runs["vectors"])).description

    def weighted(nll: list[float], names: tuple[str, ...], steps: tuple[int, ...]) -> Weighted:
        counts = np.array(steps)
        return Weighted(
            SequenceNLL(np.array(nll), counts, np.arange(3), np.ones(3), np.full(3, 5)), 5, names, description
        )

    one = weighted([1.0, 2.0, 6.0], ("a", "b", "c"), (1, 2, 3))
    other = weighted([5.0, 0.0, 1.5], ("c", "a", "b"), (3, 1, 2))
    difference = paired_difference(one, other)
    assert difference is not None
    assert difference.value == pytest.approx((1 + 0.5 + 1) / 3)
    assert difference.error == pytest.approx(np.std([1, 0.5, 1], ddof=1) / math.sqrt(3))
    assert paired_difference(one, weighted([5.0, 0.0, 1.5], ("c", "a", "d"), (3, 1, 2))) is None
    assert paired_difference(one, weighted([5.0, 0.0, 1.5], ("c", "a", "b"), (9, 1, 2))) is None
    assert paired_difference(one, None) is None


def test_the_error_of_a_difference_is_that_over_the_sequences_that_windows_are_cut_from(runs):
    description = open_model(str(runs["vectors"])).description

    def weighted(nll: list[float]) -> Weighted:
        counts = np.ones(4, np.int64)
        measured = SequenceNLL(np.array(nll), counts, np.arange(4), np.ones(4), np.full(4, 5), np.array([0, 0, 1, 1]))
        return Weighted(measured, 5, ("a", "a", "b", "b"), description)

    difference = paired_difference(weighted([3.0, 3.0, 5.0, 5.0]), weighted([1.0, 1.0, 1.0, 1.0]))
    assert difference == (3.0, 1.0)


# --- Words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "CHECKPOINT is missing"),
        (["--compare", "a"], "two runs or more"),
        (["x", "--compare", "a", "b"], "all runs stand behind it"),
        (["a", "b"], "nothing more may stand"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        models_and_flags(words)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("iw_samples", "0"), ("iw_sequences", "-1"), ("json", "s3://a/b"), ("seed", "-1"), ("accelerator", "mps")],
)
def test_impossible_settings_are_refused(run, flag, value):
    done = run("anything", f"--{flag}", value)
    assert done.code == ExitCode.USAGE
    assert f"--{flag}" in done.err


@pytest.mark.parametrize(
    ("path", "message"), [(".", "is a directory"), ("nowhere/a.json", "there is no directory nowhere")]
)
def test_json_that_has_no_place_is_refused_at_once(run, path, message):
    done = run("anything", "--json", path)
    assert (done.code, done.err.count("\n")) == (ExitCode.USAGE, 1)
    assert f"--json {path}" in done.err
    assert message in done.err


@pytest.mark.parametrize("origin", [{}, [], {"description": [], "settings": {}, "data": {}}])
def test_a_checkpoint_of_something_else_is_refused(run, tmp_path, origin):
    torch.save({"state_dict": {}, "origin": origin, "global_step": 1}, tmp_path / "a.ckpt")
    done = run(tmp_path / "a.ckpt")
    assert done.code == ExitCode.USAGE
    assert "holds no network of this product" in done.err


def test_names_in_the_data_cannot_steer_the_terminal():
    name = "\x1b[2Jpulse"
    feature = {
        "name": name,
        "values": 3,
        "rmse": 1.0,
        "rmse_error": 0.1,
        "mae": 1.0,
        "mae_error": 0.1,
        "rmse_of_mean": 2.0,
    }
    record = {
        "checkpoint": "a\x1b[2J/best.ckpt",
        "step": 1,
        "parameters": 2,
        "split": "test",
        "data": name,
        "sequences": 3,
        "steps": 4,
        "kind": "vectors",
        "rows": [{"name": "ELBO", "value": 1.0, "error": None, "of": ""}],
        "kl_per_dim": [0.0, 1.0],
        "features": [feature],
        "notes": [name],
    }
    page = "\n".join(evaluation_lines(record, Ink()))
    assert "\x1b" not in page
    assert page.count("\\x1b[2J") == 4


def test_the_best_run_is_bold_and_of_equals_none():
    about = {"checkpoint": "a/best.ckpt", "step": 1, "parameters": 2, "split": "test", "data": "x", "sequences": 3}

    def record(elbo: float, iw_nll: float, use: float) -> dict[str, Any]:
        values = {"ELBO": elbo, "IW-NLL": iw_nll, "decoder use": use}
        rows = [{"name": name, "value": value, "error": None, "of": ""} for name, value in values.items()]
        return about | {"rows": rows, "features": [], "notes": []}

    records = [record(-5.0, 4.0, 1.0), record(-6.0, 4.0, 2.0)]
    page = comparison_lines({"records": records, "same_data": True, "unlike": [], "differences": []}, Ink(colour=True))
    table = [line for line in page if "ELBO" in line or "IW-NLL" in line or "decoder" in line]
    assert ["\x1b[1m" in line for line in table] == [True, False, False]
    assert "\x1b[1m-5" in table[0]
    page = comparison_lines(
        {"records": records, "same_data": False, "unlike": ["x"], "differences": []}, Ink(colour=True)
    )
    assert not any("\x1b[1m" in line for line in page if "ELBO" in line)
