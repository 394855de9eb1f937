"""What values are normalised by, and which are not used: names that training has nothing of, heavy tails, codes for "missing".

Shapes: N values of a feature.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from seqvae.config.data import SourceSettings
from seqvae.data.building.tails import measure_tails
from seqvae.data.cache import SequenceData
from seqvae.models.vae import SequenceVAE
from tests.support.parquet_files import Load, events_of, write_splits
from tests.support.small_models import SMALL


def validation_elbo(data: SequenceData) -> float:
    """The ELBO of one and the same untrained network on all validation sequences."""
    torch.manual_seed(0)
    network = SequenceVAE(data.description, SMALL).eval()
    split = data.splits["valid"]
    with torch.no_grad():
        output = network(split.gather(np.arange(len(split))), at_mean=True)
    return -float(output.nll_B.double().sum())


def rows(first_id: int, y: pa.Array) -> dict[str, Any]:
    return {"id": [first_id] * 4, "time": [0, 1, 2, 3], "x": [1.0, 2.0, 4.0, 3.0], "y": y}


def stays(first_id: int, pressure: float | None) -> dict[str, Any]:
    """Events of which `bp` has this value."""
    columns = events_of(first_id, first_id + 1)
    return columns | {"value": pa.array([60.0, pressure, 70.0] * 2)}


@pytest.mark.parametrize("kind", ["vectors", "events"])
def test_values_of_names_that_training_never_saw_a_value_of_move_no_validation_elbo(tmp_path: Path, load: Load, kind):
    nothing = pa.nulls(4, pa.float64())
    train = rows(1, nothing) if kind == "vectors" else stays(1, None)
    found = {}
    for name, filled in (("empty", False), ("filled", True)):
        if kind == "vectors":
            valid = rows(7, pa.array([1e5] * 4) if filled else nothing)
        else:
            valid = stays(7, 1e5 if filled else None)
        found[name] = load(write_splits(tmp_path / name, train=train, valid=valid))
    assert validation_elbo(found["filled"]) == validation_elbo(found["empty"])
    assert not [note for note in found["empty"].notes if "count as missing" in note]
    name, count = ("y", 4) if kind == "vectors" else ("bp", 2)
    expected = f"warning: valid: {count} values count as missing, as training saw no value of theirs: {name} ({count})"
    assert expected in found["filled"].notes


# --- Heavy tails, and codes -------------------------------------------------------------------------------------------


def long(values_N: np.ndarray, first_id: int = 0, **others: np.ndarray) -> dict[str, Any]:
    """A long table of sequences of ten steps with a feature x, and others."""
    steps = np.arange(len(values_N))
    return {"id": first_id + steps // 10, "time": steps % 10, "x": values_N} | others


ORDINARY = {
    "normal": lambda random: random.normal(5, 2, 10_000),
    "exponential": lambda random: random.exponential(3, 10_000),
    "log-normal": lambda random: random.lognormal(0, 1, 10_000),
    "laplace": lambda random: random.laplace(0, 1, 10_000),
    "a tenth are 1": lambda random: (random.random(10_000) < 0.1).astype(float),
    "one of 500 is 1": lambda random: (random.random(10_000) < 0.002).astype(float),
    "4 % pulses over noise": lambda random: random.normal(0, 0.01, 10_000) + (random.random(10_000) < 0.04),
    "bursts": lambda random: random.normal(0, 1, 10_000) * np.where(random.random(10_000) < 0.2, 1, 0.01),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_tails_leave_the_moments_as_they_were_to_the_bit(tmp_path: Path, load: Load, name):
    values_N = ORDINARY[name](np.random.default_rng(0))
    data = load(write_splits(tmp_path / "d", train=long(values_N), valid=long(values_N[:10], 5000)))
    plain = load(tmp_path / "d", robust_scaling=False)
    assert data.description == plain.description
    assert data.description.robust == ()
    assert data.description.mean == pytest.approx((values_N.mean(),), rel=1e-12)
    assert data.description.std == pytest.approx((values_N.std(),), rel=1e-12)
    assert not [note for note in data.notes if "heavy" in note or "missing_values" in note]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_sentinels_spoil_no_scale_and_are_named_with_their_number_and_the_flag(tmp_path: Path, load: Load, share):
    random = np.random.default_rng(0)
    clean_N = random.normal(400, 10, 20_000)
    is_code_N = random.permutation(len(clean_N)) < share * len(clean_N)
    table = long(np.where(is_code_N, -9999.0, clean_N), y=clean_N)
    directory = write_splits(tmp_path / "d", train=table, valid=long(clean_N[:10], 5000, y=clean_N[:10]))
    data, plain = load(directory), load(directory, robust_scaling=False)
    assert plain.description.std[0] > 25 * clean_N.std()
    assert data.description.std[0] == pytest.approx(clean_N.std(), rel=0.1)
    assert data.description.mean[0] == pytest.approx(clean_N.mean(), rel=0.001)
    assert data.description.robust == (True, False)
    assert data.description.std[1] == plain.description.std[1]
    [said] = [note for note in data.notes if "--missing_values" in note]
    assert said == (
        f"warning: repeated, and far from all other values: -9999 in x ({is_code_N.sum():,}). If it means that nothing was "
        f"measured: --missing_values -9999"
    )
    assert [
        note for note in data.notes if note.startswith("heavy tails: scaled by the values between their 1% and 99%")
    ]
    mended = load(directory, missing_values="-9999")
    assert mended.description.std[0] == pytest.approx(clean_N[~is_code_N].std())
    assert mended.description.robust == ()
    assert mended.counts["train"]["missing"] == [is_code_N.sum(), 0]
    assert f"{is_code_N.sum():,} values counted as missing (--missing_values)" in mended.notes


def test_a_heavy_tail_without_any_code_is_scaled_by_the_values_within(tmp_path: Path, load: Load):
    values_N = np.random.default_rng(0).standard_cauchy(20_000)
    data = load(write_splits(tmp_path / "d", train=long(values_N), valid=long(values_N[:10], 5000)))
    low, high = np.quantile(values_N, (0.01, 0.99))
    within_N = values_N[(values_N >= low) & (values_N <= high)]
    assert data.description.mean == pytest.approx((within_N.mean(),))
    assert data.description.std == pytest.approx((within_N.std(),))
    assert not [note for note in data.notes if "--missing_values" in note]


def test_rain_with_a_code_is_scaled_like_rain(tmp_path: Path, load: Load):
    random = np.random.default_rng(0)
    rain_N = np.where(random.random(20_000) < 0.8, 0.0, random.exponential(5, 20_000))
    table = long(np.where(np.arange(20_000) % 1000 == 7, -9999.0, rain_N))
    data = load(write_splits(tmp_path / "d", train=table, valid=long(rain_N[:10], 5000)))
    assert 0.5 * rain_N.std() < data.description.std[0] < 1.1 * rain_N.std()


def test_quantiles_of_many_values_are_of_a_sample_that_is_the_same_in_every_build():
    values_N = np.random.default_rng(0).normal(size=50_000)
    names_N = np.arange(50_000) % 2

    def pieces(size: int):
        return lambda: ((names_N[at : at + size], values_N[at : at + size]) for at in range(0, 50_000, size))

    counts_V = np.array([25_000, 25_000])
    whole, one, other = (
        measure_tails(lambda read: read(), counts_V, [pieces(size)], at_most=at_most)
        for size, at_most in ((50_000, 10**6), (50_000, 10_000), (777, 10_000))
    )
    assert (one.inner_std_V == other.inner_std_V).all()
    assert one.inner_std_V == pytest.approx(whole.inner_std_V, rel=0.05)
    assert (one.inner_std_V != whole.inner_std_V).all()


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.int32()])
def test_codes_of_missing_values_are_found_in_any_type_of_column(tmp_path: Path, load: Load, kind):
    code = -999 if pa.types.is_integer(kind) else -999.9
    column = pa.array([code, 1, 2, 1e30 if pa.types.is_floating(kind) else 5], pa.float64()).cast(kind)
    train = {"id": [1] * 4, "time": [0, 1, 2, 3], "x": column}
    data = load(
        write_splits(tmp_path / "d", train=train, valid=train | {"id": [2] * 4}), missing_values=f"{code},1e30,5"
    )
    assert data.counts["train"]["missing"] == [2]


def test_events_without_a_measured_value_are_there_all_the_same(tmp_path: Path, load: Load):
    table = stays(1, -9999.0)
    data = load(write_splits(tmp_path / "d", train=table, valid=stays(7, -9999.0)), missing_values="-9999")
    assert data.counts["train"] == {"sequences": 2, "steps": 4, "events": 6, "per_name": [0, 2, 4], "valued": [0, 0, 4]}


def test_codes_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match=r"--missing_values must be numbers separated by commas, got 'NA'"):
        SourceSettings(missing_values="NA")
