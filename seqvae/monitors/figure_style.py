"""How the figures look: colours, axes, and a PNG that is there as a whole or not at all.

Colours are told apart by people who do not see all of them and, through their lightness, in print; lines differ in their
strokes and marks, too.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from seqvae.monitors.figure_data import History

DARK, MIDDLE, LIGHT = "#00437a", "#d55e00", "#8ecae6"
"""Blue, vermilion and light blue: of lightness 28, 55 and 78."""
GREY = "#6b6b6b"
COLOUR_MAP = "cividis"
"""Its lightness rises evenly, and nobody's eyes see it otherwise."""
DOTS_PER_INCH = 110
STYLE = {
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "hatch.linewidth": 0.6,
    "hatch.color": "#bbbbbb",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
TITLE_POINTS = 12
OF_THE_LAST = "numbers: the last reading"
WHOLE = FuncFormatter(lambda number, _: f"{number:,.0f}")
PLAIN = FuncFormatter(lambda number, _: f"{number:,g}")
"""As matplotlib writes powers of ten, they are formulas, and those are switched off."""


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that replaces what is at `path` once it is drawn; whoever looks meanwhile sees the one before."""
    beside = path.with_name(f".{path.name}.new")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.06), dpi=DOTS_PER_INCH)
        yield figure
        try:
            FigureCanvasAgg(figure).print_png(beside)  # savefig would lay everything out twice: 1.5x the time
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def head(figure: Figure, title: str, *notes: str) -> None:
    """Say what is shown, in bold, and below it of how much."""
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=TITLE_POINTS, fontweight="bold")  # room for the notes
    below = 0.98 - 1.5 * TITLE_POINTS / 72 / figure.get_figheight()
    figure.text(0.01, below, ", ".join(note for note in notes if note), va="top", fontsize=8.5, color=GREY)


def legend_above(axes: Axes, columns: int) -> None:
    """Where it hides nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, handlelength=2.6, borderaxespad=0.2)


def over_steps(axes: Axes, history: History) -> None:
    """The axis of optimizer steps, with room behind the last reading for what it says to be seen."""
    left, last = history.starts_at, float(history.steps_R[-1])
    axes.set_xlim(left, last + 0.02 * max(last - left, 1.0))
    count_steps(axes)


def count_steps(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter(WHOLE)
    axes.set_xlabel("optimizer step")


def number(value: float, form: str = ".3g") -> str:
    """
    >>> number(0.12345), number(12.0, ",.0f"), number(float("inf"))
    ('0.123', '12', 'NaN')
    """
    return format(value, form) if math.isfinite(value) else "NaN"


def readings_drawn(history: History) -> str:
    """What a figure is made of."""
    drawn, taken = len(history.steps_R), history.readings_taken
    readings = "1 reading" if taken == 1 else f"{taken:,} readings"
    return readings if drawn == taken else f"{drawn:,} of {readings}"
