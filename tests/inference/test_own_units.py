"""Likelihoods in the data's own units: a change of units moves them by the factor's logarithm for each value, and nothing else."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seqvae.inference.model import Model
from tests.support.trained_models import columns, make_checkpoint


def rescaled(table: pa.Table, kind: str) -> pa.Table:
    """The same data with pulse in thousandths of its unit."""
    if kind == "vectors":
        place = table.column_names.index("pulse")
        return table.set_column(place, "pulse", pa.array(table["pulse"].to_numpy() * 1000))
    is_pulse = table["variable"].to_numpy(zero_copy_only=False) == "pulse"
    values = table["value"].to_numpy()
    place = table.column_names.index("value")
    return table.set_column(
        place, "value", pa.array([1000 * v if p else v for v, p in zip(values, is_pulse, strict=True)])
    )


@pytest.mark.parametrize("kind", ["vectors", "events"])
def test_other_units_of_a_column_move_the_nll_in_own_units_alone(tmp_path: Path, kind, monkeypatch):
    records: list[dict[str, Any]] = []
    for name in ("before", "after"):
        if name == "after":
            monkeypatch.setattr(
                "tests.support.trained_models.columns", lambda kind, split: rescaled(columns(kind, split), kind)
            )
        model = Model.load(make_checkpoint(tmp_path / name, kind))
        records.append(model.evaluate(iw_samples=5))
    before, after = ({row["name"]: row for row in record["rows"]} for record in records)
    table = columns(kind, "test")
    measured = len(table) if kind == "vectors" else table.group_by(["id", "time", "variable"]).aggregate([])["variable"]
    count = measured if isinstance(measured, int) else sum(one == "pulse" for one in measured.to_pylist())
    moved = count * math.log(1000)
    sequences, steps = records[0]["sequences"], records[0]["steps"]
    for reading in ("ELBO", "NLL", "NLL per step", "IW-NLL", "rate"):
        assert after[reading]["value"] == pytest.approx(before[reading]["value"], abs=1e-4)
    for reading, expected in (
        ("NLL, own units", moved / sequences),
        ("NLL per step, own units", moved / steps),
        ("ELBO, own units", -moved / sequences),
        ("IW-NLL, own units", moved / sequences),
    ):
        assert after[reading]["value"] - before[reading]["value"] == pytest.approx(expected, abs=2e-4)


def test_the_nll_in_own_units_is_the_normalised_one_and_the_logarithm_of_each_deviation(tmp_path: Path):
    model = Model.load(make_checkpoint(tmp_path, "vectors"))
    record = model.evaluate(iw_sequences=0)
    rows = {row["name"]: row["value"] for row in record["rows"]}
    table = columns("vectors", "test")
    pulse, heat = map(math.log, model.description.std)
    risen = (len(table) * pulse + (len(table) - table["heat"].null_count) * heat) / record["sequences"]
    assert rows["NLL, own units"] == pytest.approx(rows["NLL"] + risen, rel=1e-6)
    assert "IW-NLL, own units" not in rows


def test_tokens_have_no_units(tmp_path: Path):
    record = Model.load(make_checkpoint(tmp_path, "tokens")).evaluate(iw_samples=2)
    assert not [row["name"] for row in record["rows"] if "own units" in row["name"]]
