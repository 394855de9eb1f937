"""Curves -> SVG inside a page: axes, lines, marks and a strip below, a few kilobytes each, in the page's own colours.

Colours are classes (`c1` .. `c6`, `mute`), which the page's style sheet defines for light, dark and paper. Words around a
drawing are the page's: they wrap on a phone, which text in an SVG does not.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from seqvae.reports.svg_scale import Scale, tick_label

WIDTH, HEIGHT = 500, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 22, 10, 38
STRIP = 12
LEAST_BAND = 5
MOST_POINTS = 400
"""Of a line: as many as a phone has pixels for, and nearly as many as a screen."""


class Line(NamedTuple):
    """What is None breaks it."""

    points: Sequence[tuple[float, float | None]]
    look: str
    """Class names."""
    marks: str = ""
    """ends: a ring at its end; all: at each point."""
    errors: Sequence[tuple[float, float, float]] = ()
    """Place, low and high."""


class Span(NamedTuple):
    """Of the strip."""

    start: float
    end: float
    look: str


class Chart(NamedTuple):
    title: str
    """Read out where a drawing cannot be seen."""
    lines: Sequence[Line]
    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str
    is_log: bool = False
    strip: Sequence[Span] = ()
    guides: Sequence[Line] = ()
    """Behind the curves."""


def draw(chart: Chart) -> str:
    bottom = HEIGHT - BOTTOM - (STRIP + 4 if chart.strip else 0)
    x = Scale(*_apart(chart.x), LEFT, WIDTH - RIGHT)
    y = Scale(*_apart(chart.y), bottom, TOP, chart.is_log)
    parts = [*_axes(chart, x, y, bottom), *(_line(line, x, y) for line in (*chart.guides, *chart.lines))]
    parts += _strip(chart, x, bottom + 5)
    return picture(chart.title, "".join(parts))


def picture(title: str, inside: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" preserveAspectRatio="xMidYMid meet">'
        f"{inside}</svg>"
    )


def words(x: float, y: float, text: str, look: str = "tick", anchor: str = "middle") -> str:
    if text.startswith("-"):
        text = f"\N{MINUS SIGN}{text[1:]}"
    return f'<text x="{_short(x)}" y="{_short(y)}" class="{look}" text-anchor="{anchor}">{escape(text)}</text>'


def thinned(points: Sequence[tuple[float, float | None]], most: int = MOST_POINTS) -> list[tuple[float, float | None]]:
    """Of each stretch the lowest and the highest, so that no spike is lost.

    >>> thinned([(0, 1.0), (1, 9.0), (2, 0.0), (3, 1.0), (4, 2.0), (5, 3.0)], most=4)
    [(1, 9.0), (2, 0.0), (3, 1.0), (5, 3.0)]
    """
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // most)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        some = points[start : start + size]
        told = [(value, place) for place, (_, value) in enumerate(some) if value is not None]
        chosen = sorted({min(told)[1], max(told)[1]}) if told else [0]
        kept += [some[place] for place in chosen]
    return kept


def _axes(chart: Chart, x: Scale, y: Scale, bottom: float) -> Iterator[str]:
    for value in y.ticks(5):
        place = _short(y.place(value))
        yield f'<path class="grid" d="M{LEFT} {place}H{WIDTH - RIGHT}"/>'
        yield words(LEFT - 7, y.place(value) + 4, tick_label(value), anchor="end")
    yield f'<path class="axis" d="M{LEFT} {_short(bottom)}H{WIDTH - RIGHT}"/>'
    below = HEIGHT - BOTTOM + 16
    for value in x.ticks(5):
        yield words(x.place(value), below, tick_label(value))
    yield words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, chart.x_label, "label")
    yield f'<g transform="translate(18 {_short((TOP + bottom) / 2)}) rotate(-90)">{words(0, 0, chart.y_label, "label")}</g>'


def _line(line: Line, x: Scale, y: Scale) -> str:
    """What lies beyond the axis is drawn along its edge."""
    low, high = min(y.start, y.end), max(y.start, y.end)
    points = [
        (x.place(at), None if value is None else min(max(y.place(value), low), high))
        for at, value in thinned(line.points)
    ]
    parts = []
    for at, bottom, top in line.errors[:: max(1, len(line.errors) // 60)]:
        ends = [min(max(y.place(value), low), high) for value in (bottom, top)]
        parts.append(f"M{_short(x.place(at))} {_short(ends[0])}V{_short(ends[1])}")
    drawn = f'<path class="error {line.look}" d="{"".join(parts)}"/>' if parts else ""
    drawn += f'<path class="line {line.look}" d="{_way(points)}"/>'
    there = [(at, value) for at, value in points if value is not None]
    marked = there if line.marks == "all" or len(there) == 1 else there[-1:] if line.marks == "ends" else []
    rings = (
        f'<circle class="ring {line.look}" cx="{_short(at)}" cy="{_short(value)}" r="3.2"/>' for at, value in marked
    )
    return drawn + "".join(rings)


def _way(points: Sequence[tuple[float, float | None]]) -> str:
    parts, pen = [], "M"
    for at, value in points:
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{_short(at)} {_short(value)}")
        pen = "L"
    return "".join(parts)


def _strip(chart: Chart, x: Scale, top: float) -> Iterator[str]:
    for span in chart.strip:
        end = x.place(min(span.end, chart.x[1]))
        start = min(x.place(max(span.start, chart.x[0])), end - LEAST_BAND)  # also what was last said is to be seen
        yield (
            f'<rect class="band {span.look}" x="{_short(start)}" y="{_short(top)}" '
            f'width="{_short(end - start)}" height="{STRIP}"/>'
        )


def _apart(span: tuple[float, float]) -> tuple[float, float]:
    return span if span[1] > span[0] else (span[0] - 0.5, span[0] + 0.5)


def _short(value: float) -> str:
    """
    >>> _short(12.3456), _short(2.0)
    ('12.3', '2')
    """
    return f"{value:.1f}".removesuffix(".0")
