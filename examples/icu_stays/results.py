"""What `seqvae` writes about stays -> pictures: how well latents tell who dies, and a stay with what the model fills in."""

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from examples.icu_stays.meds import LABEL
from examples.icu_stays.pictures import Curve, Filled, draw_roc, draw_stay, roc_of
from examples.latents import Latents, read_latents
from seqvae.errors import DataError
from seqvae.inference.probe import fit_classifier

HELD_OUT = ("valid", "test")
VARIABLES = ("HR", "SysABP", "Temp", "RespRate", "GCS")
OFTEN = 8
"""Measurements that each of these has in the stay that is shown, so that there is something to see."""


def show_deaths(latents: Path, labels: Path, picture: Path) -> dict[str, Curve]:
    """`latents`: of `seqvae encode`; `labels`: as `meds.py` wrote them.

    The probe is that of `seqvae evaluate`; the outlier score was told nothing of deaths.
    """
    train, held_out = (read_latents(latents, splits) for splits in (("train",), HELD_OUT))
    died = _deaths(labels)
    died_N = _outcomes(held_out, died)
    probe = fit_classifier(train.mean_NZ, _outcomes(train, died), classes=2)
    curves = {
        "linear probe on the latents": roc_of(probe.scores(held_out.mean_NZ)[:, 1], died_N),
        "outlier score (NLL + rate)": roc_of(held_out.surprise_N, died_N),
    }
    draw_roc(picture, curves, f"{len(died_N):,} stays that were held out, of which {died_N.sum():,} died")
    return curves


def show_stay(filled: Path, picture: Path) -> None:
    """`filled`: of `seqvae impute --split test --variables ...`. The first stay is shown that has enough of all of them."""
    table = pq.read_table(filled)
    measured = table.filter(pc.and_(table["measured"], pc.is_in(table["variable"], pa.array(VARIABLES))))
    counts = measured.group_by(["id", "variable"], use_threads=False).aggregate([("value", "count")])
    often = counts.filter(pc.greater_equal(counts["value_count"], OFTEN))["id"].to_pylist()
    shown = next((one for one in dict.fromkeys(often) if often.count(one) == len(VARIABLES)), None)
    if shown is None:
        raise DataError(f"{filled}: no stay has {OFTEN} measurements of each of {', '.join(VARIABLES)}")
    rows = table.filter(pc.equal(table["id"], shown))
    draw_stay(picture, [_filled(rows, name) for name in VARIABLES], f"stay {shown}, of the test split")


def _filled(rows: pa.Table, name: str) -> Filled:
    own = rows.filter(pc.equal(rows["variable"], name))
    time, value, std = (own[column].to_numpy() for column in ("time", "value", "std"))
    is_measured = own["measured"].to_numpy()
    return Filled(
        name, time[is_measured], value[is_measured], time[~is_measured], value[~is_measured], std[~is_measured]
    )


def _deaths(labels: Path) -> dict[int, int]:
    with labels.open(newline="", encoding="utf-8") as file:
        return {int(row["subject_id"]): int(row[LABEL]) for row in csv.DictReader(file)}


def _outcomes(latents: Latents, died: dict[int, int]) -> np.ndarray:
    return np.array([died[int(one)] for one in latents.ids])
