"""Previews of what a model does: originals beside their reconstructions, and samples below; as text, or of numbers as a figure.

Text from data goes through `visible`: nothing in it can steer the terminal that shows the page.
"""

import textwrap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from seqvae.reports.figures import DARK, FONTS, GREY, INK, MIDDLE, STYLE
from seqvae.text import clip, visible

WIDTH = 110
INDENT = 22
NAME_WIDTH = 16
SAMPLE_STYLES = ((DARK, "-"), (MIDDLE, "--"), (GREY, "-."), (INK, ":"))


class Preview(NamedTuple):
    """A preview as text, read back."""

    title: str
    pairs: tuple[tuple[str, str], ...]
    """Originals and their reconstructions."""
    samples: tuple[str, ...]


def preview_page(title: str, originals: Sequence[str], reconstructions: Sequence[str], samples: Sequence[str]) -> str:
    """Return a preview as text.

    >>> print(preview_page("step 10", ["CCO"], ["CCN"], ["C"]), end="")
    step 10
    <BLANKLINE>
       1  original        CCO
          reconstruction  CCN
    <BLANKLINE>
    Drawn from the prior
    <BLANKLINE>
       1                  C
    """

    def entry(label: str, text: str) -> list[str]:
        """The text behind its label, in as many lines as it takes, each blank of it kept."""
        parts = textwrap.wrap(
            visible(text), WIDTH, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
        )
        labels = [label, *[""] * len(parts)]
        lines = [f"{begin:<{INDENT}}{part}" for begin, part in zip(labels, parts or [""], strict=False)]
        return [*lines[:-1], lines[-1].rstrip()]  # a blank between two lines is one of the text

    lines = [visible(title), ""]
    for number, (original, reconstruction) in enumerate(zip(originals, reconstructions, strict=True), 1):
        lines += [*entry(f"{number:>4}  original", original), *entry("      reconstruction", reconstruction), ""]
    lines += ["Drawn from the prior", ""]
    for number, sample in enumerate(samples, 1):
        lines += entry(f"{number:>4}", sample)
    return "\n".join(lines) + "\n"


def read_preview(path: Path) -> Preview | None:
    """Read what `preview_page` wrote; None where it cannot be read. A blank at the end of a text is lost."""
    try:
        title, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return None
    entries: list[tuple[str, str]] = []
    for line in lines:
        label, part = line[:INDENT].strip(), line[INDENT:]
        if label:
            entries.append((label, part))
        elif part and entries:
            entries[-1] = (entries[-1][0], entries[-1][1] + part)
    originals = [text for label, text in entries if label.endswith("original")]
    reconstructions = [text for label, text in entries if label == "reconstruction"]
    samples = tuple(text for label, text in entries if label.isdecimal())
    return Preview(title, tuple(zip(originals, reconstructions, strict=False)), samples)


class Track(NamedTuple):
    """The values of one feature along a sequence, in their own units."""

    times: list[float]
    values: list[float]


class PreviewRow(NamedTuple):
    """One feature in several sequences."""

    name: str
    is_drawing: bool
    """The tracks are curves in the plane, whose times are their x."""
    originals: Sequence[Track]
    reconstructions: Sequence[Track]
    """Of the same sequences."""
    samples: Sequence[Track]
    """As many as there are, up to the number of SAMPLE_STYLES."""


def write_preview_figure(path: Path, rows: Sequence[PreviewRow], *, title: str, time_label: str) -> None:
    """Draw a PNG: a row for each feature, a column for each sequence, and below a panel of samples for each feature, or for each
    drawing.

    Originals are dots and reconstructions are lines, so that they differ without colours, too.
    """
    fonts = [font for font in FONTS if font in font_manager.get_font_names()]
    style = STYLE | {"font.family": fonts, "font.size": 8, "axes.titlesize": 9, "axes.titlelocation": "center"}
    heights = [2.6 if row.is_drawing else 1.5 for row in rows]
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script the font does not have
        figure = Figure(figsize=(11, 1.05 * sum(heights) + 3.2), layout="constrained")
        figure.suptitle(visible(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(sum(heights) + 0.6, 2.3))[:, 0]
        grid = above.subplots(len(rows), len(rows[0].originals), sharey="row", squeeze=False, height_ratios=heights)
        for row, line_of_axes in zip(rows, grid, strict=True):
            for axes, original, reconstruction in zip(line_of_axes, row.originals, row.reconstructions, strict=True):
                axes.plot(*original, "o", color=DARK, markersize=3.5, linestyle="none", label="original")
                (line,) = axes.plot(*reconstruction, "-", color=MIDDLE, linewidth=1.3, label="reconstruction")
                line.set(marker=".", markersize=2.5)
            line_of_axes[0].set_ylabel(clip(visible(row.name), NAME_WIDTH))
            if row.is_drawing:
                _same_plane(line_of_axes, [*row.originals, *row.reconstructions])
        timed = [line_of_axes for row, line_of_axes in zip(rows, grid, strict=True) if not row.is_drawing]
        for number, column in enumerate(grid.T, 1):
            column[0].set_title(f"sequence {number}")
        for line_of_axes in timed[:-1]:
            for axes, lowest in zip(line_of_axes, timed[-1], strict=True):
                axes.sharex(lowest)
                axes.tick_params(labelbottom=False)
        for axes in timed[-1] if timed else ():
            axes.set_xlabel(time_label)
        above.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
        below.suptitle(f"Drawn from the prior, {len(rows[0].samples)} sequences", fontsize=10, fontweight="bold")
        panels = [(row, [one]) for row in rows if row.is_drawing for one in row.samples]
        panels += [(row, list(row.samples)) for row in rows if not row.is_drawing]
        for axes, (row, samples) in zip(below.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for track, (colour, stroke) in zip(samples, SAMPLE_STYLES, strict=False):
                axes.plot(*track, stroke, color=colour, linewidth=1.1, marker=".", markersize=2.5)
            axes.set_title(clip(visible(row.name), 2 * NAME_WIDTH))
            axes.set_xlabel("" if row.is_drawing else time_label)
            if row.is_drawing:
                _same_plane([axes], row.samples)
        for axes in figure.axes:
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
        figure.savefig(path, dpi=100, format="png")


def _same_plane(line_of_axes: Iterable[Axes], tracks: Sequence[Track]) -> None:
    """Give the axes of drawings one scale for both directions, and limits within which all these tracks lie."""
    for each in range(2):
        values = [value for track in tracks for value in track[each]] or [0.0]
        room = 0.06 * (max(values) - min(values)) or 1.0
        for axes in line_of_axes:
            (axes.set_ylim if each else axes.set_xlim)(min(values) - room, max(values) + room)
            axes.set_aspect("equal")
