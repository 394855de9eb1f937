"""How figures look, and how they become a PNG file or an SVG inside a page.

A chart is a function `draw(medium, ...) -> Chart`. Drawn for a FILE it carries its title, notes and legends; drawn for a PAGE these
are text around the SVG, which wraps on a phone. On a page the palette's colours become CSS variables, so that they follow the page
into the dark and onto paper.

Colours are told apart by people who do not see all of them and, through their lightness, in print; lines differ in strokes and
marks, too. Text from data is drawn as it is: no formula is read into a `$`.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias
from xml.etree import ElementTree

import matplotlib
from cycler import cycler
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from seqvae.files import replace_file
from seqvae.text import tick_label

DARK, MIDDLE, LIGHT = "#00437a", "#d55e00", "#8ecae6"
"""Blue, vermilion and light blue: of lightness 28, 55 and 78."""
INK, GREY, FAINT, RULE = "#1d2430", "#6b6b6b", "#aaaaaa", "#dddddd"
MORE_COLOURS = ("#2f8f83", "#8a4fa3", "#9a7b00")
THREATENED, THREATENED_BEHIND, LOST, LOST_BEHIND = "#f0a35e", "#fcefe4", "#8f3e00", "#f1d7c4"
CSS_VARIABLES = {
    DARK: "c1",
    MIDDLE: "c2",
    INK: "c3",
    **dict(zip(MORE_COLOURS, ("c4", "c5", "c6"), strict=True)),
    LIGHT: "light",
    GREY: "soft",
    FAINT: "faint",
    RULE: "rule",
    "#ffffff": "paper",
    THREATENED: "threatened",
    THREATENED_BEHIND: "threatened-behind",
    LOST: "lost",
    LOST_BEHIND: "lost-behind",
}
"""The palette, and the style sheet's name for each colour."""
COLOUR_MAP = "cividis"
"""Its lightness rises evenly, and all eyes see it alike."""
DOTS_PER_INCH = 110
STYLE: dict[str, Any] = {
    "text.parse_math": False,
    "text.usetex": False,
    "text.color": INK,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=[DARK, MIDDLE, INK, *MORE_COLOURS]),
    "axes.labelcolor": GREY,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": GREY,
    "ytick.labelcolor": GREY,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Hiragino Sans", "Yu Gothic", "Microsoft YaHei", "Arial Unicode MS")
"""For names from data: the first one comes with matplotlib; the others write what it cannot, where they are installed."""
TITLE_POINTS = 12
TICKS = FuncFormatter(lambda value, _: tick_label(value))
"""As matplotlib writes powers of ten, they are formulas, and those are switched off."""


class Medium(NamedTuple):
    """The place that a chart goes to."""

    width: float
    """Inches."""
    font_size: float
    row: float
    """Inches that a row with a name takes."""
    has_words: bool
    """Whether title, notes and legends are drawn."""


FILE = Medium(10.0, 9.0, 0.21, has_words=True)
PAGE = Medium(500 / 72, 16.5, 0.3, has_words=False)
"""500 units wide. The page's style writes text in 13 of them, on a phone in 16: there is room for more than it takes."""


class Key(NamedTuple):
    """An entry of a page's legend."""

    look: str
    """Class names of its swatch; empty for none."""
    name: str
    value: str = ""


class Chart:
    """A figure with its title, notes and legends."""

    def __init__(self, medium: Medium, height: float, title: str, *notes: str) -> None:
        self.medium = medium
        self.title = title
        self.notes = tuple(note for note in notes if note)
        self.keys: list[Key] = []
        layout = ConstrainedLayoutEngine(h_pad=0.06)
        self.figure = Figure(figsize=(medium.width, height), layout=layout, dpi=DOTS_PER_INCH)
        if medium.has_words:
            head(self.figure, title, *notes)
        else:
            self.figure.patch.set_visible(False)

    def legend(self, axes: Axes, columns: int) -> None:
        """Explain what is drawn in `axes`: above it, where it hides nothing, or on the page."""
        if self.medium.has_words:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, handlelength=2.6, borderaxespad=0.2)
            return
        strokes = {"--": " dashed", "dashed": " dashed", ":": " dotted", "dotted": " dotted", "None": " dotted"}
        handle: Any
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if isinstance(handle, Line2D):
                colour, look = handle.get_color(), strokes.get(handle.get_linestyle(), "")
            elif handle.get_fill():
                colour, look = handle.get_facecolor(), " block"
            else:
                colour, look = handle.get_edgecolor(), strokes.get(handle.get_linestyle(), "")
            found = re.fullmatch(r"(.*): (\S*\d\S*(?: ± \S+)?)", label)
            name, value = found.groups() if found else (label, "")
            self.keys.append(Key(CSS_VARIABLES[to_hex(colour)] + look, name, value))


P = ParamSpec("P")
Draw: TypeAlias = Callable[Concatenate[Medium, P], Chart | str]


def save_png(path: Path, draw: Draw[P], *data: P.args, **more: P.kwargs) -> str | None:
    """Draw a chart into a PNG file that is there as a whole or not at all. Return why there is no chart, if there is none."""
    with matplotlib.rc_context(STYLE):
        chart = draw(FILE, *data, **more)
        if isinstance(chart, str):
            return chart
        with replace_file(path) as partial:
            FigureCanvasAgg(chart.figure).print_png(partial)  # savefig would lay everything out twice: 1.5x the time
    return None


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure to draw on, and write it to `path` as a PNG at the end of the context."""
    with matplotlib.rc_context(STYLE), replace_file(path) as partial:
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.06), dpi=DOTS_PER_INCH)
        yield figure
        FigureCanvasAgg(figure).print_png(partial)


def head(figure: Figure, title: str, *notes: str) -> None:
    """Write what is shown, in bold, and below it of how much."""
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=TITLE_POINTS, fontweight="bold")  # room for the notes
    below = 0.98 - 1.5 * TITLE_POINTS / 72 / figure.get_figheight()
    figure.text(0.01, below, ", ".join(note for note in notes if note), va="top", fontsize=8.5, color=GREY)


def count_steps(axes: Axes) -> None:
    """Label the axis of optimizer steps."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=(1, 2, 5, 10)))
    axes.xaxis.set_major_formatter(TICKS)
    axes.set_xlabel("optimizer step")


# --- SVG inside a page ------------------------------------------------------------------------------------------------


class PageFigure(NamedTuple):
    """A chart as a page shows it: text, and markup that is safe to include as it is."""

    title: str
    notes: tuple[str, ...]
    keys: tuple[Key, ...]
    svg: Markup


def page_figure(name: str, draw: Draw[P], *data: P.args, **more: P.kwargs) -> PageFigure | None:
    """Draw a chart for a page; None where there is no chart. `name` is unique on the page: ids within the SVG are made from it."""
    style = STYLE | {
        "font.size": PAGE.font_size,
        "axes.titlesize": PAGE.font_size,
        "axes.facecolor": "none",
        "path.simplify_threshold": 0.5,
        "svg.fonttype": "none",
        "svg.hashsalt": name,
    }
    with matplotlib.rc_context(style):
        chart = draw(PAGE, *data, **more)
        if isinstance(chart, str):
            return None
        for axes in chart.figure.axes:
            axes.yaxis.label.set_rotation_mode("anchor")  # so that it stays centred in whatever font a reader has
        content = io.BytesIO()
        FigureCanvasSVG(chart.figure).print_svg(content, metadata={"Date": None})
    return PageFigure(chart.title, chart.notes, tuple(chart.keys), _svg_of_page(content.getvalue(), chart.title))


_DECIMAL = re.compile(r"-?\d+\.\d+")
_LENGTHS = {"d", "x", "y", "width", "height", "stroke-width", "stroke-dasharray"}
"""Attributes that one decimal is enough for: a page's figure is 500 units wide."""


def _svg_of_page(raw: bytes, title: str) -> Markup:
    """Rewrite matplotlib's SVG for a page whose content policy lets no inline style through.

    Style declarations become attributes, the palette's colours CSS variables; fonts are the page's; numbers are rounded.
    """
    root = ElementTree.fromstring(raw)
    referenced = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", raw.decode()))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes: dict[str, str] = {}
        for name, value in element.attrib.items():
            if name != "style":
                attributes[name.rpartition("}")[2]] = value
            elif element.tag == "image":
                attributes["image-rendering"] = "pixelated"
            else:
                declarations = (part.partition(":") for part in value.split(";"))
                attributes |= {key.strip(): setting.strip() for key, _, setting in declarations}
        for unwanted in ("", "font", "font-size", "font-family", "font-weight", "type"):
            attributes.pop(unwanted, None)
        if attributes.get("id") not in referenced:
            attributes.pop("id", None)
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        for name in ("fill", "stroke"):
            if attributes.get(name, "none").startswith("#"):
                attributes[name] = f"var(--{CSS_VARIABLES[attributes[name].lower()]})"
        for name in _LENGTHS & attributes.keys():
            attributes[name] = _DECIMAL.sub(lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), attributes[name])
        if "d" in attributes:
            attributes["d"] = " ".join(attributes["d"].split())
        element.attrib.clear()
        element.attrib.update(attributes)
        element.text = element.text if element.tag == "text" else None
        element.tail = None
    for parent in list(root.iter()):
        for child in list(parent):
            draws_nothing = child.tag == "path" and child.get("fill") == "none" and "stroke" not in child.attrib
            if child.tag in ("metadata", "style") or (draws_nothing and parent.tag == "g"):
                parent.remove(child)
        if parent.tag == "g" and len(parent) > 1 and all(child.tag == "use" for child in parent):
            for name, value in list(parent[0].items()):  # marks of one curve: what they share is written once
                if name not in ("href", "x", "y") and all(child.get(name) == value for child in parent):
                    parent.set(name, value)
                    for child in parent:
                        del child.attrib[name]
    view = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": view, "role": "img", "aria-label": title})
    return Markup(ElementTree.tostring(root, encoding="unicode"))
