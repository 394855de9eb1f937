"""`Model`: a trained model in Python does what the commands do, with the same words."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from seqvae.config.inference import DataChoices, DrawingSettings
from seqvae.inference.model import Model, Reading, open_data
from seqvae.inference.tables import reconstruct
from tests.support import trained_models
from tests.support.parquet_files import write
from tests.support.trained_models import KINDS, SIZES, columns, make_checkpoint


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def vectors(runs) -> Model:
    return Model.load(runs["vectors"])


def test_by_default_all_splits_are_encoded_and_one_can_be_chosen(vectors):
    assert vectors.encode()["split"].value_counts().to_dict() == SIZES
    assert set(vectors.encode(split="test")["split"]) == {"test"}
    assert len(vectors.encode(split="valid+test")) == SIZES["valid"] + SIZES["test"]


def test_other_data_are_read_by_their_path(vectors, tmp_path):
    path = write(tmp_path / "new.parquet", columns("vectors", "test"))
    latents = vectors.encode(path, cache_dir=str(tmp_path / "cache"))
    own = vectors.encode(split="test")
    pd.testing.assert_frame_equal(latents.drop(columns="split"), own.drop(columns="split"))


def test_a_network_of_the_demo_s_text_whose_settings_name_no_tokenizer_reads_other_text(runs, tmp_path):
    model = Model.load(runs["tokens"])
    path = write(tmp_path / "new.parquet", columns("tokens", "test"))
    reading: dict[str, Any] = {"cache_dir": str(tmp_path / "cache")}
    of_demo = replace(model, stored=model.stored._replace(settings=model.settings | {"tokenizer": None}))
    pd.testing.assert_frame_equal(of_demo.encode(path, **reading), model.encode(path, **reading))


def test_the_flags_of_reading_are_those_of_the_commands():
    assert {"data_dir", "split", *Reading.__annotations__} == {each.name for each in fields(DataChoices)}


def test_methods_return_what_the_commands_write(vectors):
    data = open_data(vectors, DataChoices(split="test"))
    tables = pa.concat_tables(reconstruct(vectors, data, ["test"], DrawingSettings(), seed=0))
    pd.testing.assert_frame_equal(vectors.reconstruct(split="test"), tables.to_pandas())


def test_samples_paths_and_filled_values_come_as_data_frames(vectors):
    samples = vectors.sample(5, length=4, seed=1)
    assert samples.groupby("id").size().tolist() == [4] * 5
    assert samples.equals(vectors.sample(5, length=4, seed=1))
    path = vectors.interpolate("test-00", "test-01", steps=3)
    assert sorted(path["share"].unique()) == [0, 0.5, 1]
    filled = vectors.impute(split="test", variables=["heat"])
    assert filled["heat"].notna().all()
    assert "pulse" not in filled


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_for_a_sequence_does_not_depend_on_its_batch(runs, kind, monkeypatch):
    model = Model.load(runs[kind])

    def draws() -> list[pd.DataFrame]:
        path = model.interpolate("test-00", "test-01", temperature=1.0)
        drawn = [model.reconstruct(split="test", temperature=1.0), model.sample(9), path]
        return drawn if kind == "tokens" else [*drawn, model.impute(split="test")]

    together = draws()
    monkeypatch.setattr("seqvae.inference.streaming.STEPS_AT_ONCE", 1)
    monkeypatch.setattr("seqvae.inference.tables.SAMPLES_PER_BATCH", 1)
    for one, other in zip(together, draws(), strict=True):
        pd.testing.assert_frame_equal(one, other, rtol=1e-3)


@pytest.mark.parametrize("kind", ["vectors", "events"])
def test_imputing_leaves_measured_values_as_they_are_to_the_bit(runs, kind):
    filled = Model.load(runs[kind]).impute(split="test").drop(columns="split")
    if kind == "vectors":
        measured = columns(kind, "test").to_pandas()
        found = filled[["pulse", "heat"]].where(filled[["pulse_std", "heat_std"]].to_numpy() == 0)
        assert measured["heat"].isna().any()
        pd.testing.assert_frame_equal(found, measured[["pulse", "heat"]], check_exact=True)
        return
    by_event = ["id", "time", "variable"]
    table = columns(kind, "test").to_pandas()
    table["time"] -= table.groupby("id")["time"].transform("min")
    kept = filled[filled["measured"]].set_index(by_event)["value"].sort_index()
    pd.testing.assert_series_equal(kept, table.set_index(by_event)["value"].sort_index(), check_exact=True)


def test_an_evaluation_holds_readings_and_where_they_come_from(vectors):
    record = vectors.evaluate(iw_samples=2, iw_sequences=3)
    rows = {row["name"]: row["value"] for row in record["rows"]}
    assert (record["split"], record["checkpoint"], record["data"]) == ("test", "run/best.ckpt", "data")
    assert rows["ELBO"] == pytest.approx(-rows["NLL"] - rows["rate"])
    assert "IW-NLL" in rows


@pytest.mark.parametrize(("kind", "changes"), [("tokens", {"text": "ab☃d☃"}), ("events", {"variable": "snow"})])
def test_an_evaluation_says_what_the_known_costs_without_the_unknown(runs, kind, changes, tmp_path):
    model, known = Model.load(runs[kind]), columns(kind, "test").slice(0, 9).to_pandas()
    rows = {row["name"]: row for row in model.evaluate(iw_sequences=0)["rows"]}
    assert "NLL per known step" not in rows
    strange = known.copy()
    ((column, value),) = changes.items()
    strange.loc[2, column] = value
    strange.loc[2, "id"] = "strange"
    path = write(tmp_path / "strange.parquet", pa.Table.from_pandas(strange))
    rows = {row["name"]: row for row in model.evaluate(path, iw_sequences=0, cache_dir=str(tmp_path / "c"))["rows"]}
    count = 2 if kind == "tokens" else 1
    assert f"all but <unknown> ({count}, at " in rows["NLL per known step"]["of"]
    assert np.isfinite(rows["NLL per known step"]["value"])
    assert rows["NLL per known step"]["value"] != rows["NLL per step"]["value"]


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.sample(0),
        lambda model: model.reconstruct(temperature=-1.0),
        lambda model: model.interpolate("a", "b", steps=1),
        lambda model: model.impute(draws=-1),
        lambda model: model.evaluate(iw_samples=0),
    ],
)
def test_impossible_values_are_refused(vectors, call):
    with pytest.raises(ValueError, match="must be"):
        call(vectors)


def test_a_checkpoint_from_before_heavy_tails_were_known_is_read_by_its_own_moments(tmp_path, monkeypatch):
    table_of = trained_models.columns

    def with_code(kind: str, split: str) -> pa.Table:
        table = table_of(kind, split)
        codes = np.where(np.arange(len(table)) % 40 == 3, -9999.0, table["pulse"].to_numpy())
        return table.set_column(table.column_names.index("pulse"), "pulse", pa.array(codes))

    monkeypatch.setattr(trained_models, "columns", with_code)
    run = make_checkpoint(tmp_path, "vectors", robust_scaling=False)
    before = Model.load(run).evaluate(iw_sequences=0)
    path = run / "checkpoints" / "best.ckpt"
    stored = torch.load(path, weights_only=True)
    for name in ("robust_scaling", "missing_values"):
        del stored["origin"]["settings"][name]
    del stored["origin"]["description"]["robust"]
    torch.save(stored, path)
    found = Model.load(run).evaluate(iw_sequences=0)
    assert found["rows"] == before["rows"]
    assert Model.load(run).description.std[0] > 1000


def test_a_model_says_in_a_line_what_it_is(vectors):
    text = repr(vectors)
    assert text.startswith("Model(")
    assert "vectors, step 7, " in text
    assert "3 latent dimensions for each sequence" in text
    assert "\n" not in text
