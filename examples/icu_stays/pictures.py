"""A stay with what the model fills in, and how well a score tells who dies: two PNGs.

Shapes: N stays, M measurements of a variable, I times at which it is filled in, P points of a curve.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from seqvae.errors import DataError
from seqvae.reports.figures import DARK, GREY, LIGHT, MIDDLE, head, new_figure

MINUTES = 60
MARK_HOURS = 12


class Filled(NamedTuple):
    """One variable of a stay, in its own unit; times are minutes since admission."""

    name: str
    measured_minutes_M: np.ndarray
    measured_M: np.ndarray
    filled_minutes_I: np.ndarray
    mean_I: np.ndarray
    std_I: np.ndarray


class Curve(NamedTuple):
    """Receiver operating characteristic: a point for each place where a line can be drawn between scores."""

    false_positive_rate_P: np.ndarray
    true_positive_rate_P: np.ndarray
    area: float


def roc_of(scores_N: np.ndarray, died_N: np.ndarray) -> Curve:
    """Equal scores make one point: no line can be drawn between them.

    >>> roc_of(np.array([0.9, 0.8, 0.3, 0.3]), np.array([1, 0, 1, 0])).area
    0.625
    """
    if len(set(died_N.tolist())) < 2:
        raise DataError("all stays ended alike, so that there is nothing to tell apart: take more of them")
    order_N = np.argsort(-scores_N, kind="stable")
    is_last_N = np.append(np.diff(scores_N[order_N]) != 0, True)
    died = np.cumsum(died_N[order_N])[is_last_N]
    lived = np.cumsum(1 - died_N[order_N])[is_last_N]
    true, false = np.append(0, died / died[-1]), np.append(0, lived / lived[-1])
    return Curve(false, true, float(np.trapezoid(true, false)))


def draw_roc(path: Path, curves: dict[str, Curve], note: str) -> None:
    """`curves` by what the scores were made from, the most important first."""
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
    """A row for each variable: at each time of the stay it was either measured, or the model says what to expect."""
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
