"""Readings -> kl_per_dim.png and active_units.png: which latent dimensions are alive, when, and how many.

Shapes: R readings, Z latent dimensions, G groups of dimensions, C columns of pixels.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from seqvae.monitors.figure_data import History
from seqvae.monitors.figure_style import (
    COLOUR_MAP,
    DARK,
    GREY,
    MIDDLE,
    OF_THE_LAST,
    PLAIN,
    WHOLE,
    count_steps,
    head,
    legend_above,
    new_figure,
    number,
    over_steps,
    readings_drawn,
)

KL_FLOOR, LEAST_TOP, MOST_TOP = 1e-4, 1.0, 1e3
"""Nats, of the scale of colours: all below is dead, and what a dimension that lives has is always far up."""
MOST_ROWS = 400
"""As many as the figure has pixels for."""
COLUMNS = 1000
NAMED_ROWS = 32
MANY_DIMENSIONS = 64
"""From here on a count of active ones is drawn on a logarithmic axis."""


class HeatMap(NamedTuple):
    """KL of groups of dimensions, the greatest last KL first."""

    kl_GR: np.ndarray
    last_kl_Z: np.ndarray
    order_Z: np.ndarray
    per_row: int


def draw_kl_per_dim(path: Path, history: History) -> None:
    """Columns of a picture are as wide as the steps that a reading stands for."""
    found = heat_map(history.kl_RZ)
    dimensions = len(found.order_Z)
    height = np.clip(0.19 * dimensions, 1.6, 4.8)
    with new_figure(path, 10, height + 1.35) as figure:
        picture, profile = figure.subplots(1, 2, sharey=True, width_ratios=(6, 1))
        mean_of = f"each row the mean of up to {found.per_row} neighbours" if found.per_row > 1 else ""
        many = "1 dimension" if dimensions == 1 else f"{dimensions:,} dimensions"
        head(figure, "KL of each latent dimension, sorted by its last value", many, mean_of, readings_drawn(history))
        image = _draw_picture(picture, history, found)
        _draw_profile(profile, found)
        extend = "max" if np.nanmax(found.kl_GR, initial=0.0) > MOST_TOP else "neither"
        bar = figure.colorbar(image, ax=[picture, profile], extend=extend, pad=0.01, aspect=15)
        bar.set_label(f"KL in nats\n(darkest: {KL_FLOOR:g} and less)")
        bar.ax.yaxis.set_major_formatter(PLAIN)


def heat_map(kl_RZ: np.ndarray, most_rows: int = MOST_ROWS) -> HeatMap:
    """Sort dimensions by their last KL that is a number, and where there are too many take the mean of neighbours.

    >>> heat_map(np.array([[3.0, 2.0, 1.0], [0.0, 5.0, np.nan]])).order_Z
    array([1, 2, 0])
    """
    last_kl_Z = np.full(kl_RZ.shape[1], np.nan)
    for kl_Z in kl_RZ:
        last_kl_Z = np.where(np.isfinite(kl_Z), kl_Z, last_kl_Z)
    order_Z = np.argsort(-np.nan_to_num(last_kl_Z, nan=-np.inf), kind="stable")
    per_row = -(-len(order_Z) // most_rows)
    starts_G = np.arange(0, len(order_Z), per_row)
    sizes_G = np.diff([*starts_G, len(order_Z)])
    kl_GR = np.add.reduceat(kl_RZ[:, order_Z], starts_G, axis=1).T / sizes_G[:, None]
    return HeatMap(kl_GR, last_kl_Z[order_Z], order_Z, per_row)


def columns_of(steps_R: np.ndarray, starts_at: float, columns: int = COLUMNS) -> np.ndarray:
    """Return the index of the reading of each column of pixels: the first at or after the middle of the column.

    >>> columns_of(np.array([1.0, 2.0, 4.0]), 0.0, columns=4)
    array([0, 1, 2, 2])
    """
    middles_C = starts_at + (np.arange(columns) + 0.5) / columns * (steps_R[-1] - starts_at)
    return np.searchsorted(steps_R, middles_C)


def _draw_picture(axes: Axes, history: History, found: HeatMap) -> AxesImage:
    dimensions, last = len(found.order_Z), float(history.steps_R[-1])
    kl_GC = found.kl_GR[:, columns_of(history.steps_R, history.starts_at)]
    finite = kl_GC[np.isfinite(kl_GC)]
    top = min(finite.max(initial=LEAST_TOP), MOST_TOP)
    axes.patch.set(facecolor="white", hatch="xxx", edgecolor="#999999")
    image = axes.imshow(
        np.ma.masked_invalid(np.maximum(kl_GC, KL_FLOOR)),
        cmap=colormaps[COLOUR_MAP],
        norm=LogNorm(KL_FLOOR, top),
        aspect="auto",
        interpolation="nearest",
        extent=(history.starts_at, last, found.per_row * len(kl_GC), 0),
    )
    axes.set_ylim(dimensions, 0)
    if len(finite) < kl_GC.size:
        axes.plot([], [], "s", markerfacecolor="white", markeredgecolor=GREY, label="crosshatched: not a number")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), handlelength=1, borderaxespad=0.2)
    count_steps(axes)
    _name_rows(axes, found.order_Z)
    axes.grid(visible=False)
    return image


def _draw_profile(axes: Axes, found: HeatMap) -> None:
    """The numbers behind the last column."""
    dimensions = len(found.order_Z)
    edges = np.arange(dimensions + 1)
    shown_Z = np.maximum(np.nan_to_num(found.last_kl_Z, nan=KL_FLOOR), KL_FLOOR)
    axes.stairs(shown_Z, edges, baseline=KL_FLOOR, orientation="horizontal", fill=True, color="#c9c9c9")
    axes.stairs(shown_Z, edges, baseline=KL_FLOOR, orientation="horizontal", color=DARK, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xticks([0.001, 0.1, 10.0])
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlim(KL_FLOOR, 2 * max(LEAST_TOP, shown_Z.max()))
    axes.set_xlabel("last KL, nats")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _name_rows(axes: Axes, order_Z: np.ndarray) -> None:
    if len(order_Z) > NAMED_ROWS:
        axes.yaxis.set_major_formatter(WHOLE)
        axes.set_ylabel("rank by last KL")
    else:
        axes.set_yticks(np.arange(len(order_Z)) + 0.5, [str(dimension) for dimension in order_Z], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.set_ylabel("dimension")


def draw_active_units(path: Path, history: History) -> None:
    """How many dimensions are active, and over how many the rate is spread."""
    dimensions = history.kl_RZ.shape[1]
    counts_R, effective_R, steps_R = history.active_units_R, history.effective_dimensions_R, history.steps_R
    alone = "." if len(steps_R) == 1 else None
    with new_figure(path, 10, 3.4) as figure:
        axes = figure.subplots()
        head(figure, f"Active units, of {dimensions:,}", readings_drawn(history), OF_THE_LAST)
        over_steps(axes, history)
        label = f"active units (whose mean moves with the input): {number(counts_R[-1], ',.0f')}"
        axes.plot(steps_R, counts_R, color=DARK, linewidth=1.8, drawstyle="steps-post", marker=alone, label=label)
        label = f"effective dimensions (that share the rate, however small): {number(effective_R[-1], ',.1f')}"
        axes.plot(steps_R, effective_R, "--", color=MIDDLE, linewidth=1.4, marker=alone, label=label)
        axes.axhline(dimensions, color=GREY, linewidth=1, linestyle=":")
        if dimensions > MANY_DIMENSIONS:
            axes.set_yscale("symlog", linthresh=1, linscale=0.4)
            axes.set_ylim(-0.1, 1.5 * dimensions)
            axes.set_ylabel("dimensions, logarithmic")
        else:
            axes.set_ylim(-0.02 * dimensions, 1.06 * dimensions)
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.set_ylabel("dimensions")
        axes.yaxis.set_major_formatter(WHOLE)
        legend_above(axes, columns=2)
