"""What a trained model is used for: latents, reconstructions, samples, paths, imputed values and exports that can be trusted."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from seqvae.cli.main import main
from seqvae.config.inference import DataChoices
from seqvae.config.model import ModelSettings
from seqvae.data.batch import TokenBatch
from seqvae.errors import DataError, ExitCode, UsageError
from seqvae.inference import streaming
from seqvae.inference.model import Model, open_data, open_model
from seqvae.inference.saved import read_saved
from seqvae.inference.streaming import evaluating
from seqvae.inference.tables import encode, impute
from seqvae.training.objective import negative_elbo
from tests.support.parquet_files import write
from tests.support.trained_models import KINDS, SIZES, TINY, columns, make_checkpoint


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def latents(trained: Model, *splits: str, **choices: Any) -> pa.Table:
    data = open_data(trained, DataChoices(**choices))
    return pa.concat_tables(encode(trained, data, splits or list(data.data.splits)))


def use(monkeypatch, *words: object) -> ExitCode | int:
    monkeypatch.setattr(sys, "argv", ["seqvae", *map(str, words)])
    return main()


# --- CSV -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["encode", "reconstruct", "sample", "impute"])
def test_an_output_that_ends_in_csv_is_csv_with_the_same_values(run, action, tmp_path, monkeypatch):
    if action == "impute" and open_model(str(run)).description.kind == "tokens":
        return
    for name in ("a.parquet", "a.csv"):
        assert use(monkeypatch, action, run, "--output", tmp_path / name) == 0
    whole, read = pd.read_parquet(tmp_path / "a.parquet"), pd.read_csv(tmp_path / "a.csv")
    assert len(read) == len(whole)
    for name, values in whole.items():
        if name not in read:  # the latents
            columns = [f"{name}_{place}" for place in range(len(values[0]))]
            np.testing.assert_allclose(read[columns], np.stack(values), rtol=1e-6)
        elif pd.api.types.is_numeric_dtype(values):
            np.testing.assert_allclose(read[name].astype(float), values.astype(float), rtol=1e-6)
        else:
            assert read[name].fillna("").astype(str).tolist() == values.astype(str).tolist()


def test_lists_of_any_length_are_json_in_csv(tmp_path, monkeypatch):
    run = make_checkpoint(
        tmp_path, "vectors", model=ModelSettings(width=16, depth=1, heads=2, latent_size=3, latent_scope="step")
    )
    for name in ("a.parquet", "a.csv"):
        assert use(monkeypatch, "encode", run, "--output", tmp_path / name) == 0
    read = pd.read_csv(tmp_path / "a.csv")["mean"].map(json.loads)
    for one, other in zip(read, pd.read_parquet(tmp_path / "a.parquet")["mean"], strict=True):
        np.testing.assert_allclose(np.array(one), np.stack(other), rtol=1e-6)


def test_a_csv_that_is_there_is_never_overwritten(runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.csv").write_text("mine\n")
    assert use(monkeypatch, "sample", runs["tokens"], "--output", tmp_path / "a.csv") == ExitCode.USAGE
    assert "is there already, and CSV does not say whose it is; remove it, or choose another" in capsys.readouterr().err
    assert (tmp_path / "a.csv").read_text() == "mine\n"


def test_an_output_that_may_not_be_written_is_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "a.csv").write_text("mine\n")
    code = (
        "import sys; from seqvae.cli.main import main; "
        f"sys.argv = ['seqvae', 'sample', 'a.ckpt', '--output', {str(tmp_path / 'a.csv')!r}]; "
        "print(int(main()), 'torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == f"{ExitCode.USAGE} False\n"
    )


# --- Latents ---------------------------------------------------------------------------------------------------------


def test_each_sequence_is_encoded_as_it_is_alone_and_in_the_order_of_the_data(run):
    trained = open_model(str(run))
    data = open_data(trained, DataChoices())
    table = latents(trained, "train", "test").to_pandas()
    assert table["id"].tolist() == [*data.split("train").ids(np.arange(40)), *data.split("test").ids(np.arange(12))]
    for place, row in enumerate(table.itertuples()):
        first = 0 if row.split == "train" else SIZES["train"]
        with evaluating(trained.network, None):
            alone = trained.network(data.split(row.split).gather(np.array([place - first])), at_mean=True)
        np.testing.assert_allclose(row.mean, alone.posterior_mean[0], atol=1e-5)
        np.testing.assert_allclose(row.variance, alone.posterior_logvar[0].exp(), rtol=1e-4)
        assert (row.nll, row.steps) == (pytest.approx(float(alone.nll_B[0]), rel=1e-4), int(alone.steps_B[0]))
        kl = 0.5 * (np.square(row.mean) + row.variance - 1 - np.log(row.variance)).sum()
        assert row.rate == pytest.approx(kl, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_splits_that_were_cut_out_of_the_data_are_put_back_into_its_order(kind, pools, tmp_path, monkeypatch):
    trained = open_model(str(make_checkpoint(tmp_path, kind, pools=pools)))
    data = open_data(trained, DataChoices())
    monkeypatch.setattr(streaming, "WINDOW", 7)
    table = latents(trained).to_pandas()
    assert table["id"].tolist() == [f"{split}-{n:02d}" for split, size in SIZES.items() for n in range(size)]
    assert set(table["split"]) == {"train", "valid"}
    for split, rows in table.groupby("split"):
        assert rows["id"].tolist() == data.split(str(split)).ids(np.arange(len(rows)))
        alone = latents(trained, str(split)).to_pandas()
        np.testing.assert_allclose(np.stack(rows["mean"]), np.stack(alone["mean"]), atol=1e-5)
    if kind != "tokens":
        filled = pa.concat_tables(
            impute(trained, open_data(trained, DataChoices(), keeps_values=True), ("train", "valid"), 1, None, 0)
        ).to_pandas()
        assert filled["id"].drop_duplicates().tolist() == table["id"].tolist()


def test_rows_that_lie_apart_come_in_the_order_in_which_their_sequences_begin(tmp_path):
    trained = open_model(str(make_checkpoint(tmp_path, "events")))
    whole = columns("events", "test").sort_by([("time", "ascending"), ("id", "descending")])
    one = write(tmp_path / "new.parquet", whole)
    table = latents(trained, data_dir=str(one), cache_dir=str(tmp_path / "cache")).to_pandas()
    assert table["id"].tolist() == whole.to_pandas()["id"].drop_duplicates().tolist()


def test_a_sequence_is_found_again_by_its_row_where_ids_repeat(runs, tmp_path):
    one = write(tmp_path / "new.parquet", pa.table({"id": ["b", "a", "b"], "text": ["abc", "d", "abcde"]}))
    choices = {"data_dir": str(one), "cache_dir": str(tmp_path / "cache")}
    table = latents(open_model(str(runs["tokens"])), **choices).to_pandas()
    assert [*zip(table["id"], table["row"], table["steps"], strict=True)] == [("b", 0, 4), ("a", 1, 2), ("b", 2, 6)]
    assert "file" not in table


def test_of_several_files_a_row_has_the_name_of_its_own(tmp_path):
    table = latents(open_model(str(make_checkpoint(tmp_path, "tokens", pools=2)))).to_pandas()
    files = [str(tmp_path / "data" / name) for name in ("0.parquet", "1.parquet")]
    for file, rows in table.groupby("file"):
        assert rows["id"].tolist() == pq.read_table(file)["id"].take(rows["row"].to_list()).to_pylist()
    assert table["file"].unique().tolist() == files


def test_windows_of_long_sequences_are_numbered(tmp_path):
    run = make_checkpoint(tmp_path, "vectors", max_sequence_length=4, long_sequences="split")
    table, whole = latents(open_model(str(run)), "test").to_pandas(), columns("vectors", "test").to_pandas()
    assert not table[["id", "window"]].duplicated().any()
    assert table.groupby("id", sort=False)["steps"].sum().to_dict() == whole["id"].value_counts(sort=False).to_dict()


def test_a_feature_may_be_called_like_a_column_of_ours(tmp_path, monkeypatch):
    run = make_checkpoint(tmp_path, "vectors", rename={"pulse": "step", "heat": "step__std"})
    for action in ("sample", "reconstruct", "impute"):
        assert use(monkeypatch, action, run, "--output", tmp_path / action) == 0
        assert not pd.Index(pq.read_schema(tmp_path / action).names).has_duplicates


def test_the_wrong_kind_of_data_is_named_as_that(runs, tmp_path):
    choices = DataChoices(data_dir=str(runs["vectors"].parent / "data"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="but the network was trained on events"):
        open_data(open_model(str(runs["events"])), choices).split("train")


def test_windows_change_nothing(run, monkeypatch):
    trained = open_model(str(run))
    whole = latents(trained, "train").to_pandas()
    monkeypatch.setattr(streaming, "WINDOW", 7)
    pieces = latents(trained, "train").to_pandas()
    assert whole["id"].tolist() == pieces["id"].tolist()
    for name in ("nll", "rate"):
        np.testing.assert_allclose(whole[name], pieces[name], rtol=1e-4)


def test_other_data_are_read_with_the_models_own_vocabulary_and_moments(run, tmp_path):
    """The same rows in a file of their own, which would have other moments and another vocabulary by themselves."""
    kind = open_model(str(run)).description.kind
    one = write(tmp_path / "new.parquet", columns(kind, "test"))
    trained = open_model(str(run))
    own, other = latents(trained, "test"), latents(trained, data_dir=str(one), cache_dir=str(tmp_path / "cache"))
    assert other.column("split").unique().to_pylist() == ["pool"]
    assert own.drop_columns(["split"]).equals(other.drop_columns(["split"]))


def test_what_training_never_saw_is_unknown_and_counted(runs, tmp_path):
    one = write(tmp_path / "new.parquet", pa.table({"id": ["x"], "text": ["ab☃d"]}))
    data = open_data(open_model(str(runs["tokens"])), DataChoices(data_dir=str(one), cache_dir=str(tmp_path / "cache")))
    batch = data.split("pool").gather(np.array([0]))
    assert isinstance(batch, TokenBatch)
    assert batch.tokens_BT[0, 2] == 0
    assert "pool: 1 of 4 tokens count as <unknown>" in data.data.notes


def test_other_features_are_refused(runs, tmp_path):
    table = columns("vectors", "test").rename_columns(["id", "time", "pulse", "cold"])
    one = write(tmp_path / "new.parquet", table)
    choices = DataChoices(data_dir=str(one), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="'heat'"):
        open_data(open_model(str(runs["vectors"])), choices).split("pool")


def test_the_runs_own_data_are_opened_from_the_cache_of_the_training(run):
    trained = open_model(str(run))
    caches = set((run.parent / "cache").iterdir())
    assert latents(trained, "valid").num_rows == SIZES["valid"]
    assert set((run.parent / "cache").iterdir()) == caches


def test_data_that_changed_since_are_read_as_the_model_knows_them(tmp_path):
    run = make_checkpoint(tmp_path, "vectors")
    before = latents(open_model(str(run)), "test")
    table = columns("vectors", "train")
    write(tmp_path / "data" / "train.parquet", table.set_column(2, "pulse", pa.array(np.arange(len(table)) * 1e3)))
    assert latents(open_model(str(run)), "test").equals(before)


def test_a_latent_for_each_step_comes_as_a_list_for_each(tmp_path):
    model = ModelSettings(width=16, depth=1, heads=2, latent_size=3, latent_scope="step")
    run = make_checkpoint(tmp_path, "vectors", model)
    table = latents(open_model(str(run)), "test").to_pandas()
    assert [len(mean) for mean in table["mean"]] == table["steps"].tolist()
    assert {len(step) for mean in table["mean"] for step in mean} == {3}


@pytest.mark.parametrize("kind", ["tokens", "vectors", "events"])
def test_latents_of_two_levels_stand_beside_each_other_and_every_verb_takes_them(kind, tmp_path, monkeypatch):
    model = replace(TINY, latent_scope="both", step_latent_size=2)
    run = make_checkpoint(tmp_path, kind, model)
    trained = open_model(str(run))
    table = latents(trained, "test").to_pandas()
    assert {len(mean) for mean in table["mean"]} == {3}
    for name in ("step_mean", "step_variance"):
        assert [len(steps) for steps in table[name]] == table["steps"].tolist()
        assert {len(step) for steps in table[name] for step in steps} == {2}
    batch = open_data(trained, DataChoices()).split("test").gather(np.arange(12))
    with evaluating(trained.network, None):
        output = trained.network(batch, at_mean=True)
        rate_B = negative_elbo(output, 1.0, 0.0).kl
    np.testing.assert_allclose(table["rate"].sum(), float(rate_B), rtol=1e-4)
    ids = table["id"][:2].tolist()
    verbs: list[tuple[str, ...]] = [("reconstruct",), ("sample", "--count", "5"), ("interpolate", *ids)]
    for verb, *words in [*verbs, ("impute",)] if kind != "tokens" else verbs:
        places = words if verb == "interpolate" else []
        flags = words if verb == "sample" else ["--split", "test"]
        out = tmp_path / f"{verb}.parquet"
        assert use(monkeypatch, verb, run, *places, *flags, "--output", out) == 0
        assert len(pd.read_parquet(out)) > 0
    assert use(monkeypatch, "export", run, "--output", tmp_path / "exported") == 0
    assert "3 latent dimensions for each sequence, 2 below it for each step" in (
        (tmp_path / "exported" / "README.md").read_text()
    )
    assert latents(open_model(str(tmp_path / "exported")), "test").equals(latents(trained, "test"))


# --- Own units -------------------------------------------------------------------------------------------------------


def test_imputing_leaves_what_was_there_and_fills_the_rest(runs, monkeypatch, tmp_path):
    out = tmp_path / "filled.parquet"
    assert use(monkeypatch, "impute", runs["vectors"], "--split", "test", "--output", out) == 0
    filled, data = pd.read_parquet(out), columns("vectors", "test").to_pandas()
    there = data["heat"].notna()
    assert filled["id"].tolist() == data["id"].tolist()
    np.testing.assert_allclose(filled["heat"][there], data["heat"][there], rtol=1e-5)
    assert (filled["heat_std"][there] == 0).all()
    assert (filled["heat_std"][~there] > 0).all()
    assert filled["heat"].notna().all()


def test_every_variable_of_every_time_is_imputed(runs, monkeypatch, tmp_path):
    out = tmp_path / "filled.parquet"
    assert use(monkeypatch, "impute", runs["events"], "--split=test", "--variables=rain,heat", "--output", out) == 0
    filled, data = pd.read_parquet(out), columns("events", "test").to_pandas()
    assert len(filled) == 2 * len(data)  # one event a time
    both = filled[filled["measured"]].merge(data, on=["id", "time", "variable"], suffixes=("", "_data"))
    assert len(both) == data["variable"].isin(["rain", "heat"]).sum()
    np.testing.assert_allclose(both["value"], both["value_data"], rtol=1e-5)


def test_tokens_have_nothing_to_impute(runs, monkeypatch, capsys):
    assert use(monkeypatch, "impute", runs["tokens"]) == ExitCode.USAGE
    assert "tokens have no missing values" in capsys.readouterr().err


def test_reconstructions_stand_beside_the_text_or_at_the_times_of_the_originals(runs, monkeypatch, tmp_path):
    for kind in ("tokens", "events"):
        assert use(monkeypatch, "reconstruct", runs[kind], "--split", "test", "--output", tmp_path / kind) == 0
    text, data = pd.read_parquet(tmp_path / "tokens"), columns("tokens", "test").to_pandas()
    assert text["text"].tolist() == data["text"].tolist()
    assert text["reconstruction"].map(type).eq(str).all()
    events = pd.read_parquet(tmp_path / "events")
    merged = events.merge(columns("events", "test").to_pandas(), on=["id", "time", "variable"])
    assert len(merged) == len(events) == len(columns("events", "test"))


def test_samples_are_as_many_as_requested_of_lengths_like_the_trainings_and_the_same_for_a_seed(
    runs, monkeypatch, tmp_path
):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        words = ("sample", runs["vectors"], "--count", 700, "--seed", seed, "--output", tmp_path / name)
        assert use(monkeypatch, *words) == 0
    one, same, other = (pd.read_parquet(tmp_path / name) for name in "abc")
    lengths = one.groupby("id").size()
    assert lengths.index.tolist() == list(range(700))
    assert (lengths.min(), lengths.max()) == (1, 9)
    assert one.equals(same)
    assert not one.equals(other)
    assert one["pulse"].mean() == pytest.approx(80, abs=40)  # own units: normalised, it would be near 0


def test_a_path_leads_from_one_reconstruction_to_the_other(runs, monkeypatch, tmp_path):
    ids = columns("vectors", "test").column("id").to_pylist()
    ends = (ids[0], ids[-1])
    assert use(monkeypatch, "interpolate", runs["vectors"], *ends, "--steps=5", "--output", tmp_path / "path") == 0
    assert use(monkeypatch, "reconstruct", runs["vectors"], "--split=test", "--output", tmp_path / "all") == 0
    path, each = pd.read_parquet(tmp_path / "path"), pd.read_parquet(tmp_path / "all")
    assert sorted(path["share"].unique()) == [0, 0.25, 0.5, 0.75, 1]
    for share, end in zip((0, 1), ends, strict=True):
        here, there = path[path["share"] == share], each[each["id"] == end]
        np.testing.assert_allclose(here["pulse"], there["pulse"], rtol=1e-4)


def test_an_unknown_id_is_named_with_some_that_are_there(runs, monkeypatch, capsys):
    assert use(monkeypatch, "interpolate", runs["vectors"], "nobody", "test-00") == ExitCode.USAGE
    assert "no sequence has the id 'nobody'; there are such as 'train-00'" in capsys.readouterr().err


# --- Exports ---------------------------------------------------------------------------------------------------------


def test_an_export_is_the_same_model(run, monkeypatch, tmp_path):
    assert use(monkeypatch, "export", run, "--output", tmp_path / "exported") == 0
    trained, exported = open_model(str(run)), open_model(str(tmp_path / "exported"))
    assert exported.stored._replace(weights={}) == trained.stored._replace(weights={})
    assert latents(exported, "test").equals(latents(trained, "test"))


def test_its_weights_are_safetensors_as_the_formats_own_library_reads_them(run, monkeypatch, tmp_path):
    assert use(monkeypatch, "export", run, "--output", tmp_path) == 0
    weights, read = open_model(str(run)).stored.weights, load_file(tmp_path / "model.safetensors")
    assert weights.keys() == read.keys()
    assert all(torch.equal(weight, read[name]) for name, weight in weights.items())


@pytest.mark.parametrize("damage", ["short", "long header", "no json", "other sizes", "no weights", "no settings"])
def test_a_damaged_export_is_refused_in_words(runs, damage, monkeypatch, tmp_path):
    assert use(monkeypatch, "export", runs["tokens"], "--output", tmp_path) == 0
    weights, about = tmp_path / "model.safetensors", tmp_path / "config.json"
    content = weights.read_bytes()
    match damage:
        case "short":
            weights.write_bytes(content[:-10])
        case "long header":
            weights.write_bytes(struct.pack("<Q", 2**62) + content[8:])
        case "no json":
            about.write_text("{")
        case "other sizes":
            weights.write_bytes(content.replace(b'"shape":[', b'"shape":[9', 1))
        case "no weights":
            weights.unlink()
        case "no settings":
            about.write_text(json.dumps({"format": 1, "description": {"kind": "tokens"}}))
    with pytest.raises(UsageError, match=r"model\.safetensors|no export of ours, or a damaged one"):
        read_saved(tmp_path)


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("enkode", "x"), "'enkode' is no command; did you mean encode?"),
        (("encode",), "CHECKPOINT is missing"),
        (("encode", "a.ckpt", "b.ckpt"), "'b.ckpt': nothing more may stand before the flags"),
        (("encode", "nowhere.ckpt"), "CHECKPOINT nowhere.ckpt: there is no such file"),
        (("encode", "s3://bucket/a.ckpt"), "URLs are not fetched"),
        (("sample", "a.ckpt", "--count", "0"), "--count must be 1 or more"),
        (("encode", "a.ckpt", "--output", "nowhere/at/all.parquet"), "is no directory; make it first"),
        (("encode", "a.ckpt", "--output", "/"), "is a directory; give the name of a file"),
        (("encode", "a.ckpt", "--output", __file__), "is there already, and is no output of SeqVAE"),
        (("export", "a.ckpt", "--output", __file__), "is a file; export writes a directory"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(words, message, monkeypatch, capsys):
    assert use(monkeypatch, *words) == ExitCode.USAGE
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_a_split_that_is_not_there_is_named_with_those_that_are(runs, monkeypatch, capsys):
    assert use(monkeypatch, "encode", runs["tokens"], "--split", "tset") == ExitCode.USAGE
    assert "--split tset: these data have" in capsys.readouterr().err


def test_what_goes_wrong_leaves_the_file_that_was_there(runs, monkeypatch, tmp_path):
    out = tmp_path / "latents.parquet"
    assert use(monkeypatch, "encode", runs["tokens"], "--split", "test", "--output", out) == 0
    before = out.read_bytes()
    monkeypatch.setattr(pq.ParquetWriter, "write_table", lambda *_: full_disk())
    assert use(monkeypatch, "encode", runs["tokens"], "--output", out) == ExitCode.STORAGE
    assert [path.name for path in tmp_path.iterdir()] == ["latents.parquet"]
    assert out.read_bytes() == before


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def test_of_a_directory_without_checkpoints_the_message_says_what_to_give(tmp_path):
    with pytest.raises(
        UsageError, match=r"it holds no checkpoint\. Give a \.ckpt file, a run's directory, or an export"
    ):
        open_model(str(tmp_path))
