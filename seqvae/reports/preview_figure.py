"""Sequences of numbers -> one figure: originals and what a model makes of them, and below what it makes up by itself.

Originals are dots and reconstructions are lines, so that they are told apart without colours. Text from data is drawn as it
is: no formula is read into a `$`.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from seqvae.reports.data_figure import DARK, FONTS, GREY, MIDDLE, STYLE
from seqvae.text import clip, visible

NAME_WIDTH = 16
SAMPLE_STYLES = ((DARK, "-"), (MIDDLE, "--"), (GREY, "-."), ("black", ":"))


class Track(NamedTuple):
    """The values of one feature along a sequence, in their own units."""

    times: list[float]
    values: list[float]


class PreviewRow(NamedTuple):
    """One feature."""

    name: str
    originals: Sequence[Track]
    """One for each sequence shown."""
    reconstructions: Sequence[Track]
    """Of the same sequences."""
    samples: Sequence[Track]
    """As many as there are, up to the number of SAMPLE_STYLES."""


def write_preview_figure(path: Path, rows: Sequence[PreviewRow], *, title: str, time_label: str) -> None:
    """A PNG: a row for each feature and a column for each sequence, and below one panel of samples for each feature."""
    fonts = [font for font in FONTS if font in font_manager.get_font_names()]
    style = STYLE | {"font.family": fonts, "font.size": 8, "axes.titlesize": 9, "axes.titlelocation": "center"}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script the font does not have
        figure = Figure(figsize=(11, 1.6 * len(rows) + 3.2), layout="constrained")
        figure.suptitle(visible(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
        heights = (1.5 * len(rows) + 0.6, 2.3)
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
        _draw_reconstructions(above, rows, time_label)
        _draw_samples(below, rows, time_label)
        figure.savefig(path, dpi=100, format="png")


def _draw_reconstructions(place: SubFigure, rows: Sequence[PreviewRow], time_label: str) -> None:
    sequences = len(rows[0].originals)
    grid = place.subplots(len(rows), sequences, sharex="col", sharey="row", squeeze=False)
    for row, line_of_axes in zip(rows, grid, strict=True):
        for axes, original, reconstruction in zip(line_of_axes, row.originals, row.reconstructions, strict=True):
            axes.plot(*original, "o", color=DARK, markersize=3.5, linestyle="none", label="original")
            axes.plot(
                *reconstruction, "-", color=MIDDLE, linewidth=1.3, marker=".", markersize=2.5, label="reconstruction"
            )
            _tidy(axes)
        line_of_axes[0].set_ylabel(clip(visible(row.name), NAME_WIDTH))
    for number, (top, bottom) in enumerate(zip(grid[0], grid[-1], strict=True), 1):
        top.set_title(f"sequence {number}")
        bottom.set_xlabel(time_label)
    place.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)


def _draw_samples(place: SubFigure, rows: Sequence[PreviewRow], time_label: str) -> None:
    place.suptitle(f"Drawn from the prior, {len(rows[0].samples)} sequences", fontsize=10, fontweight="bold")
    for axes, row in zip(place.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        for track, (colour, line) in zip(row.samples, SAMPLE_STYLES, strict=False):
            axes.plot(*track, line, color=colour, linewidth=1.1, marker=".", markersize=2.5)
        axes.set_title(clip(visible(row.name), 2 * NAME_WIDTH))
        axes.set_xlabel(time_label)
        _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
