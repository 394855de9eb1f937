"""The power law through costs that were measured at several sizes, and a picture with its exponent in the legend."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.measure import median

STROKES = (("#00437a", "o"), ("#d55e00", "s"), ("#2a9d8f", "^"), ("#6b6b6b", "D"), ("#9b5de5", "v"))
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
TICKS = ((1.0,), (1.0, 2.0, 5.0))
"""Ticks of each power of ten: on a long axis, and on one of less than two powers."""
MAX_X_TICKS = 8
PLAIN = FuncFormatter(lambda number, _: f"{number:,.0f}" if number >= 1000 else f"{number:g}")
ROOM = 1.25
"""Factor of the room above and below the curves."""


class PowerLaw(NamedTuple):
    """The law cost = factor * size ** exponent."""

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
        """The power law through all the medians."""
        return fit_power_law(self.sizes, self.medians)

    @property
    def end(self) -> float:
        """The exponent between the two largest sizes, where a cost that is the same for every size counts least."""
        return fit_power_law(self.sizes[-2:], self.medians[-2:]).exponent


class Panel(NamedTuple):
    """One pair of axes."""

    x_label: str
    y_label: str
    curves: Sequence[Curve]


def fit_power_law(sizes: Sequence[float], costs: Sequence[float]) -> PowerLaw:
    """Fit a straight line through the logarithms, by least squares.

    >>> law = fit_power_law([1, 10, 100], [2, 20, 200])
    >>> round(law.factor, 9), round(law.exponent, 9)
    (2.0, 1.0)
    """
    if len(sizes) < 2 or min(*sizes, *costs) <= 0:
        raise ValueError(f"a power law needs two sizes or more, and sizes and costs above 0, got {sizes} and {costs}")
    exponent, offset = np.polyfit(np.log(sizes), np.log(costs), 1)
    return PowerLaw(math.exp(offset), float(exponent))


def draw_panels(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels side by side into one PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6 * len(panels), 4.8), layout="constrained", dpi=110)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for curve, (colour, marker) in zip(panel.curves, STROKES, strict=False):
                law, medians = curve.law, curve.medians
                below = [middle - min(values) for middle, values in zip(medians, curve.costs, strict=True)]
                above = [max(values) - middle for middle, values in zip(medians, curve.costs, strict=True)]
                label = f"{curve.name}: exponent {law.exponent:.2f}, {curve.end:.2f} at the end"
                style = {"fmt": marker, "color": colour, "ms": 5, "capsize": 2.5, "label": label}
                axes.errorbar(curve.sizes, medians, (below, above), **style)
                fitted = [law.factor * size**law.exponent for size in curve.sizes]
                axes.plot(curve.sizes, fitted, "--", color=colour, linewidth=1)
            # Along x the sizes themselves; along y round numbers, more than one of them.
            sizes = sorted({size for curve in panel.curves for size in curve.sizes})
            costs = [cost for curve in panel.curves for values in curve.costs for cost in values]
            low, high = min(costs) / ROOM, max(costs) * ROOM
            is_crowded = len(sizes) > MAX_X_TICKS or min(b / a for a, b in pairwise(sizes)) < 1.5
            axes.set(xscale="log", yscale="log", xlabel=panel.x_label, ylabel=panel.y_label, ylim=(low, high))
            axes.yaxis.set_major_locator(LogLocator(subs=TICKS[high < 100 * low]))
            axes.xaxis.set_major_locator(LogLocator() if is_crowded else FixedLocator(sizes))
            axes.xaxis.set_minor_locator(NullLocator())
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(PLAIN)
                axis.set_minor_formatter(NullFormatter())
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), handlelength=1.2, borderaxespad=0.2)
        figure.savefig(path)
