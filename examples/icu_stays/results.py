"""Pictures from what `seqvae` writes about stays: how well latents predict who dies, and a stay with what the model fills in.

Shapes: N stays, M measurements of a variable, I times at which it is filled in, P points of a curve.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.axes import Axes

from examples.icu_stays.data import LABEL
from examples.shared import Latents, read_latents
from seqvae.errors import DataError
from seqvae.inference.probe import fit_classifier
from seqvae.reports.figures import DARK, GREY, LIGHT, MIDDLE, head, new_figure

HELD_OUT = ("valid", "test")
VARIABLES = ("HR", "SysABP", "Temp", "RespRate", "GCS")
OFTEN = 8
"""Measurements of each of these in the stay that is shown, so that there is something to see."""


class Filled(NamedTuple):
    """One variable of a stay, in its own unit; times are minutes since admission."""

    name: str
    measured_minutes_M: np.ndarray
    measured_M: np.ndarray
    filled_minutes_I: np.ndarray
    mean_I: np.ndarray
    std_I: np.ndarray


class Curve(NamedTuple):
    """Receiver operating characteristic: a point for each threshold between scores."""

    false_positive_rate_P: np.ndarray
    true_positive_rate_P: np.ndarray
    area: float


def show_deaths(latents: Path, labels: Path, picture: Path) -> dict[str, Curve]:
    """Draw the curves of a probe and of the outlier score, which knows nothing of deaths.

    `latents` are those of `seqvae encode`, `labels` those of `data.py`; the probe is that of `seqvae evaluate`.
    """
    train, held_out = (read_latents(latents, splits) for splits in (("train",), HELD_OUT))
    with labels.open(newline="", encoding="utf-8") as file:
        died = {int(row["subject_id"]): int(row[LABEL]) for row in csv.DictReader(file)}
    died_N = _outcomes(held_out, died)
    probe = fit_classifier(train.mean_NZ, _outcomes(train, died), classes=2)
    curves = {
        "linear probe on the latents": roc_of(probe.scores(held_out.mean_NZ)[:, 1], died_N),
        "outlier score (NLL + rate)": roc_of(held_out.surprise_N, died_N),
    }
    draw_roc(picture, curves, f"{len(died_N):,} stays that were held out, of which {died_N.sum():,} died")
    return curves


def show_stay(filled: Path, picture: Path) -> None:
    """Draw the first stay that has enough of all variables; `filled` is of `seqvae impute --split test --variables ...`."""
    table = pq.read_table(filled)
    measured = table.filter(pc.and_(table["measured"], pc.is_in(table["variable"], pa.array(VARIABLES))))
    counts = measured.group_by(["id", "variable"], use_threads=False).aggregate([("value", "count")])
    often = counts.filter(pc.greater_equal(counts["value_count"], OFTEN))["id"].to_pylist()
    shown = next((one for one in dict.fromkeys(often) if often.count(one) == len(VARIABLES)), None)
    if shown is None:
        raise DataError(f"{filled}: no stay has {OFTEN} measurements of each of {', '.join(VARIABLES)}")
    rows = table.filter(pc.equal(table["id"], shown))
    variables = []
    for name in VARIABLES:
        own = rows.filter(pc.equal(rows["variable"], name))
        time, value, std = (own[column].to_numpy() for column in ("time", "value", "std"))
        known = own["measured"].to_numpy()
        variables.append(Filled(name, time[known], value[known], time[~known], value[~known], std[~known]))
    draw_stay(picture, variables, f"stay {shown}, of the test split")


def _outcomes(latents: Latents, died: dict[int, int]) -> np.ndarray:
    return np.array([died[int(one)] for one in latents.ids])


# --- Pictures -----------------------------------------------------------------------------------------------------------


MINUTES = 60
MARK_HOURS = 12


def roc_of(scores_N: np.ndarray, died_N: np.ndarray) -> Curve:
    """Return the curve of scores; equal scores make one point, as no threshold separates them.

    >>> roc_of(np.array([0.9, 0.8, 0.3, 0.3]), np.array([1, 0, 1, 0])).area
    0.625
    """
    if len(set(died_N.tolist())) < 2:
        raise DataError("all stays ended alike, so that there is nothing to predict: take more of them")
    order_N = np.argsort(-scores_N, kind="stable")
    is_last_N = np.append(np.diff(scores_N[order_N]) != 0, True)
    died = np.cumsum(died_N[order_N])[is_last_N]
    lived = np.cumsum(1 - died_N[order_N])[is_last_N]
    true, false = np.append(0, died / died[-1]), np.append(0, lived / lived[-1])
    return Curve(false, true, float(np.trapezoid(true, false)))


def draw_roc(path: Path, curves: dict[str, Curve], note: str) -> None:
    """Draw curves by the source of their scores, the most important first."""
    looks = ((DARK, "-", 2.2), (MIDDLE, "--", 1.6), (GREY, "-.", 1.4))
    with new_figure(path, 5.6, 5.6) as figure:
        axes = figure.subplots()
        axes.plot((0, 1), (0, 1), color="#bbbbbb", linewidth=1, linestyle=":")
        for (name, curve), (colour, stroke, width) in zip(curves.items(), looks, strict=False):
            axes.plot(
                curve.false_positive_rate_P,
                curve.true_positive_rate_P,
                color=colour,
                linestyle=stroke,
                linewidth=width,
                label=f"{name}: area {curve.area:.3f}",
            )
        axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
        axes.set_xlabel("survivors taken for deaths")
        axes.set_ylabel("deaths found")
        axes.legend(loc="lower right")
        head(figure, "Who dies in hospital", note)


def draw_stay(path: Path, variables: Sequence[Filled], note: str) -> None:
    """Draw a row for each variable: each time of the stay has a measurement, or the model's expectation."""
    with new_figure(path, 9, 1.35 * len(variables) + 1.3) as figure:
        places = figure.subplots(len(variables), 1, sharex=True, squeeze=False)[:, 0]
        for axes, variable in zip(places, variables, strict=True):
            _draw_variable(axes, variable)
        places[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
        places[-1].set_xlabel("hours since admission")
        hours = max(float(one.filled_minutes_I.max(initial=0)) for one in variables) / MINUTES
        places[-1].set_xticks(np.arange(0, max(hours, MARK_HOURS) + 1, MARK_HOURS))
        figure.align_ylabels(places)
        head(figure, "One stay, and what the model fills in", note)


def _draw_variable(axes: Axes, variable: Filled) -> None:
    filled = variable.filled_minutes_I / MINUTES, variable.mean_I
    look: dict[str, Any] = {"color": DARK, "ecolor": LIGHT, "elinewidth": 3, "markersize": 3.5, "linestyle": "none"}
    axes.errorbar(*filled, yerr=1.96 * variable.std_I, fmt="_", label="filled in, with 95 %", **look)
    measured = variable.measured_minutes_M / MINUTES, variable.measured_M
    axes.plot(*measured, "o", color="black", markersize=3, label="measured")
    axes.set_ylabel(variable.name)
