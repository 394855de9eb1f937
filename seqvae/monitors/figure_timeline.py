"""Readings -> timeline.png: rate, mutual information and decoder use over the whole run, the verdicts and the KL weight.

Verdicts stand in rows by name, so that the shortest one can be read; behind the curves only where there is trouble.

Shapes: R readings, P readings at which the decoder was probed.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, SymmetricalLogLocator

from seqvae.monitors.figure_data import History
from seqvae.monitors.figure_style import (
    DARK,
    GREY,
    LIGHT,
    MIDDLE,
    OF_THE_LAST,
    PLAIN,
    head,
    legend_above,
    new_figure,
    number,
    over_steps,
    readings_drawn,
)

LINEAR_BELOW = 0.1
"""Nats. Estimates scatter around 0 by about as much once a posterior has collapsed; what is healthy stands decades above."""
LEAST_BOTTOM, LEAST_TOP, MOST_TOP = -0.12, 10.0, 1e5
"""Of the axis of nats: figures of different runs can be compared, and one that explodes still shows how it began."""
FEW_PROBES, MARKS = 60, 24
"""Up to so many probes are marked one by one, of more about so many."""
NAME_WIDTH = 24


class Look(NamedTuple):
    """Of a verdict."""

    bar: str
    hatch: str | None
    behind: str | None
    """The band behind the curves; darker is worse."""


FINE, WAITING = Look(LIGHT, None, None), Look("#dddddd", None, None)
THREATENED, LOST = Look("#f0a35e", "///", "#fcefe4"), Look("#8f3e00", None, "#f1d7c4")
LOOKS = {
    "cannot_tell": WAITING,
    "warming_up": WAITING,
    "healthy": FINE,
    "partly_collapsed": THREATENED,
    "collapsing": THREATENED,
    "collapsed": LOST,
    "decoder_ignores_z": LOST,
    "not_variational": LOST,
    "diverged": LOST,
}


class Band(NamedTuple):
    verdict: str
    start: float
    end: float


def draw_timeline(path: Path, history: History) -> None:
    bands = bands_of(history.steps_R, history.verdicts)
    met = dict.fromkeys(band.verdict for band in bands)
    rows = [*(name for name in LOOKS if name in met), *(name for name in met if name not in LOOKS)]
    is_weighted = bool(np.isfinite(history.kl_weight_R).any())
    heights = [3.4] + [0.21 * len(rows) + 0.08] * bool(rows) + [0.75] * is_weighted
    with new_figure(path, 10, sum(heights) + 1.1) as figure:
        places = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        curves, *below = places
        probed = len(history.probed_steps_P) > 0
        title = "Rate, mutual information and decoder use" if probed else "Rate and mutual information"
        notes = (readings_drawn(history), OF_THE_LAST, "±: standard error" if probed else "")
        head(figure, f"{title} over the run", *notes)
        over_steps(curves, history)
        _draw_bands_behind(curves, bands)
        _draw_curves(curves, history)
        if rows:
            _draw_verdicts(below.pop(0), bands, rows)
        if is_weighted:
            _draw_weight(below.pop(0), history)
        curves.set_xlabel("")
        places[-1].set_xlabel("optimizer step")


def bands_of(steps_R: np.ndarray, verdicts: Sequence[str | None]) -> list[Band]:
    """A verdict is in force from its reading to the next one, the last one to the end of the axis.

    >>> bands_of(np.array([10.0, 20.0, 30.0]), ["healthy", "healthy", "collapsed"])
    [Band(verdict='healthy', start=10.0, end=30.0), Band(verdict='collapsed', start=30.0, end=inf)]
    """
    ends = [*steps_R[1:].tolist(), np.inf]
    bands = []
    for name, group in groupby(zip(verdicts, steps_R.tolist(), ends, strict=True), key=lambda row: row[0]):
        rows = list(group)
        if name is not None:
            bands.append(Band(name, rows[0][1], rows[-1][2]))
    return bands


def span_of(*curves: np.ndarray) -> tuple[float, float]:
    """Bottom and top of the axis of nats. Error bars may leave it: wide ones would take half of the figure.

    >>> span_of(np.array([0.5, np.nan, 20.0]))
    (-0.12, 32.0)
    """
    seen = np.concatenate(curves)
    seen = seen[np.isfinite(seen)]
    bottom = max(min(LEAST_BOTTOM, 1.6 * seen.min(initial=0.0)), -MOST_TOP)
    return float(bottom), float(min(max(LEAST_TOP, 1.6 * seen.max(initial=0.0)), MOST_TOP))


def _draw_curves(axes: Axes, history: History) -> None:
    steps_R, rate_R, information_R = history.steps_R, history.rate_R, history.mutual_information_R
    alone = "." if len(steps_R) == 1 else None
    axes.plot(steps_R, rate_R, color=DARK, linewidth=1.8, marker=alone, label=f"rate (KL): {number(rate_R[-1])}")
    label = f"mutual information: {number(information_R[-1])}"
    axes.plot(steps_R, information_R, "--", color=MIDDLE, linewidth=1.6, marker=alone, label=label)
    axes.plot(
        steps_R, history.cap_R, ":", color=MIDDLE, linewidth=1.1, label=f"its cap, log N: {number(history.cap_R[-1])}"
    )
    if len(history.probed_steps_P):
        _draw_decoder_use(axes, history)
    axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.8)
    axes.set_ylim(*span_of(rate_R, information_R, history.decoder_use_P))
    axes.yaxis.set_major_locator(SymmetricalLogLocator(linthresh=LINEAR_BELOW, base=10))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_ylabel(f"nats, logarithmic\n(linear below {LINEAR_BELOW:g})")
    legend_above(axes, columns=4)


def _draw_decoder_use(axes: Axes, history: History) -> None:
    steps_P, use_P, error_P = history.probed_steps_P, history.decoder_use_P, history.decoder_use_error_P
    few = len(steps_P) <= FEW_PROBES
    label = f"decoder use: {number(use_P[-1])} ± {number(error_P[-1], '.2g')}"
    (line,) = axes.plot(steps_P, use_P, "-o", color="black", linewidth=0.9, markersize=4.5, zorder=3, label=label)
    line.set(markerfacecolor="white", markevery=1 if few else len(steps_P) // MARKS)
    if few:
        axes.errorbar(steps_P, use_P, np.nan_to_num(error_P), fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
    else:
        axes.fill_between(steps_P, use_P - error_P, use_P + error_P, color="black", alpha=0.18, linewidth=0)


def _draw_bands_behind(axes: Axes, bands: Sequence[Band]) -> None:
    right = axes.get_xlim()[1]
    for band in bands:
        behind = LOOKS.get(band.verdict, WAITING).behind
        if behind:
            axes.axvspan(band.start, min(band.end, right), color=behind, linewidth=0, zorder=0)


def _draw_verdicts(axes: Axes, bands: Sequence[Band], rows: Sequence[str]) -> None:
    right = axes.get_xlim()[1]
    for place, name in enumerate(rows):
        look = LOOKS.get(name, WAITING)
        spans = [(band.start, min(band.end, right) - band.start) for band in bands if band.verdict == name]
        axes.broken_barh(
            spans, (place - 0.36, 0.72), facecolor=look.bar, edgecolor="#555555", linewidth=0.5, hatch=look.hatch
        )
    axes.set_yticks(range(len(rows)), [name.replace("_", " ")[:NAME_WIDTH] for name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _draw_weight(axes: Axes, history: History) -> None:
    weight_R = history.kl_weight_R
    axes.fill_between(history.steps_R, weight_R, color="#d9d9d9", linewidth=0)
    axes.plot(history.steps_R, weight_R, color=GREY, linewidth=1.2, marker="." if len(weight_R) == 1 else None)
    axes.set_ylim(0, 1.12 * (np.nanmax(weight_R) or 1.0))
    axes.set_ylabel("KL weight")
