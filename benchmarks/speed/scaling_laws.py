"""Costs that were measured at several sizes -> the power law through them, and a picture with its exponent in the legend."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.measure import median
from seqvae.reports.figures import DARK, GREY, MIDDLE, head, new_figure

STROKES = ((DARK, "o"), (MIDDLE, "s"), ("#2a9d8f", "^"), (GREY, "D"), ("#9b5de5", "v"))
TICKS = ((1.0,), (1.0, 2.0, 5.0))
"""Of each power of ten: on a long axis, and on one of less than two powers."""
MOST_X_TICKS = 8
PLAIN = FuncFormatter(lambda number, _: f"{number:,.0f}" if number >= 1000 else f"{number:g}")
ROOM = 1.25
"""Above and below the curves."""


class PowerLaw(NamedTuple):
    """cost = factor * size ** exponent"""

    factor: float
    exponent: float


class Curve(NamedTuple):
    """A cost, measured several times at each of several sizes."""

    name: str
    sizes: Sequence[float]
    costs: Sequence[Sequence[float]]

    @property
    def medians(self) -> list[float]:
        return [median(values) for values in self.costs]

    @property
    def law(self) -> PowerLaw:
        """Through all the medians."""
        return fit_power_law(self.sizes, self.medians)

    @property
    def end(self) -> float:
        """The exponent between the two largest sizes, where what every size costs alike counts least."""
        return fit_power_law(self.sizes[-2:], self.medians[-2:]).exponent


class Panel(NamedTuple):
    x_label: str
    y_label: str
    curves: Sequence[Curve]


def fit_power_law(sizes: Sequence[float], costs: Sequence[float]) -> PowerLaw:
    """The straight line of least squares through the logarithms.

    >>> law = fit_power_law([1, 10, 100], [2, 20, 200])
    >>> round(law.factor, 9), round(law.exponent, 9)
    (2.0, 1.0)
    """
    if len(sizes) < 2 or min(*sizes, *costs) <= 0:
        raise ValueError(f"a power law needs two sizes or more, and sizes and costs above 0, got {sizes} and {costs}")
    exponent, offset = np.polyfit(np.log(sizes), np.log(costs), 1)
    return PowerLaw(math.exp(offset), float(exponent))


def draw_panels(path: Path, title: str, note: str, panels: Sequence[Panel]) -> None:
    """One PNG, the panels side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_figure(path, 6 * len(panels), 4.8) as figure:
        head(figure, title, note)
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel)


def _draw(axes: Axes, panel: Panel) -> None:
    for curve, (colour, marker) in zip(panel.curves, STROKES, strict=False):
        law, medians = curve.law, curve.medians
        below = [middle - min(values) for middle, values in zip(medians, curve.costs, strict=True)]
        above = [max(values) - middle for middle, values in zip(medians, curve.costs, strict=True)]
        name = f"{curve.name}: exponent {law.exponent:.2f}, {curve.end:.2f} at the end"
        axes.errorbar(curve.sizes, medians, (below, above), fmt=marker, color=colour, ms=5, capsize=2.5, label=name)
        fitted = [law.factor * size**law.exponent for size in curve.sizes]
        axes.plot(curve.sizes, fitted, "--", color=colour, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    _number_axes(axes, panel)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), handlelength=1.2, borderaxespad=0.2)


def _number_axes(axes: Axes, panel: Panel) -> None:
    """Along x the sizes themselves; along y round numbers, more than one of them."""
    sizes = sorted({size for curve in panel.curves for size in curve.sizes})
    costs = [cost for curve in panel.curves for values in curve.costs for cost in values]
    low, high = min(costs) / ROOM, max(costs) * ROOM
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=TICKS[high < 100 * low]))
    crowded = len(sizes) > MOST_X_TICKS or min(b / a for a, b in pairwise(sizes)) < 1.5
    axes.xaxis.set_major_locator(LogLocator() if crowded else FixedLocator(sizes))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PLAIN)
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
