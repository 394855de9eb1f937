"""Where training time goes, as one picture: a stacked bar for each command, and below it every stage with its number.

Of one command in milliseconds of an optimizer step; of several in microseconds of a real step of a sequence, since their
optimizer steps are of different sizes. Large type: it should be readable on a phone. Nothing of it is text from data.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from seqvae.reports.performance_numbers import STAGE_NAMES, Comparison, Speed
from seqvae.text import measure, percent

COLOURS = {
    "data": "#d55e00",
    "transfer": "#e69f00",
    "forward": "#8ecae6",
    "backward": "#00437a",
    "optimizer": "#009e73",
    "monitoring": "#cc79a7",
    "loop": "#8a8a8a",
}
"""Told apart by people who do not see all colours; those that lie side by side differ in lightness, too."""
ON_DARK = {"backward"}
"""Colours that are written on in white."""
GREY = "#5a5a5a"
STYLE = {
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "hatch.linewidth": 1.2,
    "hatch.color": "white",
}
WIDTH, DOTS_PER_INCH = 9.0, 120
LETTER = 0.0125
"""Width of one as a share of the axis: a segment is written on where its name has room."""
HATCHES = ("", "///", "...")
"""Of the commands, where there are several."""


class Column(NamedTuple):
    """A command's bar: what each stage takes, in the unit of the picture."""

    speed: Speed
    values: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.values.values())


def write_performance_figure(path: Path, speeds: Sequence[Speed], comparison: Comparison | None) -> None:
    several = len(speeds) > 1
    columns = [_per_real_step(speed) if several else _per_optimizer_step(speed) for speed in speeds]
    stacks, rows = 0.75 * len(speeds) + 0.55, len(STAGE_NAMES) * (0.62 if several else 0.42) + 0.2
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.08, hspace=0.04)
        figure = Figure(figsize=(WIDTH, stacks + rows + 1.3), layout=layout)
        above, below = figure.subplots(2, 1, height_ratios=(stacks, rows))
        title, notes = _words(speeds, comparison)
        above.set_title(f"{title}\n", loc="left", x=0, fontsize=16, fontweight="bold")
        above.annotate(notes, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=GREY)
        _draw_stacks(above, columns, f"µs for a real {speeds[0].unit}" if several else "ms")
        _draw_stages(below, columns, "µs" if several else "ms")
        figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def _per_optimizer_step(speed: Speed) -> Column:
    return Column(speed, {stage: 1e3 * speed.stages[stage] / speed.steps for stage in STAGE_NAMES})


def _per_real_step(speed: Speed) -> Column:
    return Column(speed, {stage: 1e6 * speed.stages[stage] / speed.real_steps for stage in STAGE_NAMES})


def _words(speeds: Sequence[Speed], comparison: Comparison | None) -> tuple[str, str]:
    """Title, and what stands below it."""
    first = speeds[0]
    if comparison is not None:
        title = f"{comparison.faster}: {comparison.ratio:.2f}x the real {first.unit}s a second"
        spread = f"{comparison.lowest:.2f}x to {comparison.highest:.2f}x in {len(first.turns)} turns"
        return title, spread
    title = f"Where an optimizer step of {measure(1e3 * first.seconds_per_step)} ms goes"
    return title, (
        f"{first.real_steps_per_second:,.0f} real {first.unit}s/s, {percent(first.padding_share)} padding, {first.precision}, "
        f"{percent(first.share_of_peak)} of the peak, {first.peak_memory_gib:.1f} GiB"
    )


def _draw_stacks(axes: Axes, columns: Sequence[Column], unit: str) -> None:
    longest = max(column.total for column in columns)
    several = len(columns) > 1
    for place, (column, hatch) in enumerate(zip(columns, HATCHES, strict=False)):
        left = 0.0
        for stage, value in column.values.items():
            axes.barh(place, value, 0.62, left, color=COLOURS[stage], hatch=hatch, edgecolor="white", linewidth=0.8)
            if not several and value > LETTER * len(STAGE_NAMES[stage]) * longest:
                text = f"{STAGE_NAMES[stage]}\n{percent(value / column.total)}"
                colour = "white" if stage in ON_DARK else "black"
                axes.text(left + value / 2, place, text, ha="center", va="center", color=colour)
            left += value
    names = [
        f"{column.speed.name}\n{column.speed.real_steps_per_second:,.0f} {column.speed.unit}s/s" for column in columns
    ]
    axes.set_yticks(range(len(columns)), names if several else [""])
    axes.set_ylim(len(columns) - 0.55, -0.45)
    axes.set_xlim(0, longest)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit, loc="right", labelpad=1)


def _draw_stages(axes: Axes, columns: Sequence[Column], unit: str) -> None:
    """A row for each stage; its colour is what the stack is read by."""
    places, height = np.arange(len(STAGE_NAMES)), 0.78 / len(columns)
    highest = max(max(column.values.values()) for column in columns)
    for number, (column, hatch) in enumerate(zip(columns, HATCHES, strict=False)):
        offsets = places + (number - (len(columns) - 1) / 2) * height
        values = [column.values[stage] for stage in STAGE_NAMES]
        colours = [COLOURS[stage] for stage in STAGE_NAMES]
        axes.barh(offsets, values, 0.92 * height, color=colours, hatch=hatch, edgecolor="white", linewidth=0)
        for offset, value in zip(offsets, values, strict=True):
            text = f"{_number(value)} {unit}, {percent(value / column.total)}"
            axes.annotate(text, (value, offset), (7, 0), textcoords="offset points", va="center", fontsize=11)
    for place, stage in enumerate(STAGE_NAMES):  # where a bar is too short to show its colour
        axes.vlines(0, place - 0.39, place + 0.39, color=COLOURS[stage], linewidth=5)
    axes.set_yticks(places, list(STAGE_NAMES.values()))
    axes.set_ylim(len(STAGE_NAMES) - 0.5, -0.5)
    axes.set_xlim(0, 1.4 * highest)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _number(value: float) -> str:
    """
    >>> _number(446.23), _number(3.14159), _number(0.004)
    ('446', '3.1', '<0.1')
    """
    if 0 < value < 0.05:
        return "<0.1"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
