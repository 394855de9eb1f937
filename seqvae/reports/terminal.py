"""Headings, notes, tables, bars and histograms as lines of text for a terminal, a pipe or a file.

What comes from data goes through `visible`, so that nothing in it can steer the terminal. Colour is only ever added to what is
readable without it. rich lays the tables out.

Shapes: E edges of bins, one more than there are bins.
"""

import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqvae.text import cells, plain, visible

NARROWEST = 8
"""Characters that a column of text keeps, however many columns a table has."""
WIDEST = 100
"""Characters; longer lines are hard to read, however wide the window is."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
MOST_BINS = 16
LONG_TAIL = 5.0
"""Longest length / median from which on the bins grow with the length."""
SERIES = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
"""Round numbers of a decade, the finest series first."""

Formats = Mapping[str, Callable[[Any], str]]


class Ink(NamedTuple):
    """The abilities of the output."""

    width: int = 80
    colour: bool = False
    blocks: bool = True
    """Whether block characters can be written; else bars are made of #."""

    def bold(self, text: str) -> str:
        return self._paint("1", text)

    def dim(self, text: str) -> str:
        return self._paint("2", text)

    def good(self, text: str) -> str:
        return self._paint("1;32", text)

    def warning(self, text: str) -> str:
        return self._paint("33", text)

    def bad(self, text: str) -> str:
        return self._paint("1;31", text)

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text


def ink_for(stream: TextIO, environment: Mapping[str, str]) -> Ink:
    """Choose colours only for a terminal that shows them, unless NO_COLOR is set (no-color.org)."""
    blocks = "utf" in (stream.encoding or "").lower()
    if not stream.isatty():
        return Ink(blocks=blocks)
    able = environment.get("TERM") != "dumb" and (sys.platform != "win32" or "WT_SESSION" in environment)
    width = min(shutil.get_terminal_size().columns, WIDEST)
    return Ink(width, able and not environment.get("NO_COLOR"), blocks)


def heading(title: str, ink: Ink) -> list[str]:
    return ["", ink.bold(visible(title))]


def note(text: str, ink: Ink, mark: str = "-") -> list[str]:
    """Wrap a paragraph behind a mark. Paths and flags stay in one piece, to be copied."""
    indent = f"  {mark} " if mark else "  "
    width = ink.width - len(indent)
    lines = textwrap.wrap(visible(text), width, break_on_hyphens=False, break_long_words=False)
    return [(indent if number == 0 else " " * len(indent)) + line for number, line in enumerate(lines)]


def section(
    title: str,
    rows: Sequence[Any],
    ink: Ink,
    *,
    most: int = 0,
    total: int | None = None,
    formats: Formats | None = None,
    remark: str = "",
) -> list[str]:
    """Return a heading, a table of at most `most` rows (0: all) and a remark; nothing where there are no rows.

    The table says how many of the `total` (default: of the rows) it leaves out.
    """
    if not rows:
        return []
    shown = rows[:most] if most else rows
    left_out = (len(rows) if total is None else total) - len(shown)
    more = [f"  ... and {left_out:,} more"] if left_out > 0 else []
    below = [ink.dim(line) for line in (*more, *note(remark, ink, mark=""))]
    return [*heading(title, ink), *table(shown, ink, formats), *below]


def table(rows: Sequence[Any], ink: Ink, formats: Formats | None = None) -> list[str]:
    """Return named tuples as a table: a field is a column, and one that is None in all rows is left out."""
    columns: list[list[str]] = []
    texts = []
    for field in rows[0]._fields:
        values = [getattr(row, field) for row in rows]
        if all(value is None for value in values):
            continue
        if any(isinstance(value, str) for value in values):
            texts.append(len(columns))
        write = (formats or {}).get(field, plain)
        columns.append([field.replace("_", " "), *("-" if value is None else write(value) for value in values)])
    return grid(list(zip(*columns, strict=True)), ink, texts)


def grid(
    rows: Sequence[Sequence[str]], ink: Ink, texts: Sequence[int] = (0,), bold: Collection[tuple[int, int]] = ()
) -> list[str]:
    """Lay rows out in columns, the first row as a heading.

    Columns of text (`texts`) stand left and give way where the output is too narrow; numbers stand right and are never cut.
    `bold`: row and column of cells that stand out.
    """
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    least = [min(width, NARROWEST) if place in texts else width for place, width in enumerate(widths)]
    drawn = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    for place, width in enumerate(least):
        is_text = place in texts
        drawn.add_column(justify="left" if is_text else "right", no_wrap=not is_text, min_width=width)
    for number, row in enumerate(rows):
        styles = ["bold" if (number, place) in bold else "" for place in range(len(row))]
        pairs = zip(row, styles, strict=True)
        drawn.add_row(*(Text(cell, style, no_wrap=True, overflow="ellipsis") for cell, style in pairs))
    console = Console(
        file=io.StringIO(),
        width=max(ink.width, sum(least) + 2 * len(least)),
        color_system="standard" if ink.colour else None,
        force_terminal=ink.colour,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(drawn)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    if not ink.blocks:
        lines = [line.replace("…", ".") for line in lines]
    return [ink.dim(lines[0]), *lines[1:]]


def bar(share: float, width: int, ink: Ink) -> str:
    """Return a bar padded with spaces; what is more than nothing is never drawn as nothing.

    >>> bar(0.5, 4, Ink(blocks=False)), bar(0.001, 4, Ink(blocks=False)), bar(0.45, 4, Ink())
    ('##  ', '#   ', '█▊  ')
    """
    if not ink.blocks:
        return ("#" * max(int(share > 0), round(share * width))).ljust(width)
    eighths = max(int(share > 0), round(share * width * 8))
    return (EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()).ljust(width)


def histogram(lengths: Mapping[str, np.ndarray], cap: int, ink: Ink) -> list[str]:
    """Draw a bar for each bin of the first split, and the counts of every split behind it."""
    edges = bin_edges(np.concatenate(list(lengths.values())), cap)
    counts = {split: np.histogram(of_split, edges)[0].tolist() for split, of_split in lengths.items()}
    labels = [f"{a:,}" if a == b - 1 else f"{a:,}-{b - 1:,}" for a, b in pairwise(edges.tolist())]
    label_width = max(map(len, ("steps", *labels)))
    columns = []
    for split, numbers in counts.items():
        texts = [split, *(f"{number:,}" for number in numbers)]
        width = max(map(len, texts))
        columns.append([f"  {text:>{width}}" for text in texts])
    room = ink.width - 4 - label_width - sum(len(column[0]) for column in columns)
    first = next(iter(counts.values()))
    bars = [" " * room, *(bar(number / max(first), room, ink) for number in first)]
    lines = []
    for label, drawn, *row in zip(("steps", *labels), bars, *columns, strict=True):
        lines.append(f"  {label:>{label_width}}  {drawn}{''.join(row)}")
    lines[0] = ink.dim(lines[0])
    over_cap = np.flatnonzero(edges[:-1] > cap)
    if len(over_cap):
        line = f"  {'':>{label_width}}  -- over --max_sequence_length {cap:,} ".ljust(ink.width, "-")
        lines.insert(1 + int(over_cap[0]), ink.warning(line))
    return lines


def bin_edges(lengths: np.ndarray, cap: int | None = None, most: int = MOST_BINS) -> np.ndarray:
    """Choose whole numbers, ascending; bin i holds the lengths edges[i] .. edges[i + 1] - 1.

    Where lengths go beyond the cap, a bin ends with it.

    >>> bin_edges(np.array([1, 2, 2, 4])).tolist()
    [1, 2, 3, 4, 5]
    >>> bin_edges(np.array([3, 50, 60, 900]), cap=400, most=8).tolist()
    [3, 5, 10, 20, 50, 100, 200, 401, 500, 901]
    """
    lowest, highest = int(lengths.min()), int(lengths.max())
    if highest > LONG_TAIL * float(np.median(lengths)):
        decades = 10.0 ** np.arange(len(str(highest)) + 1)
        for series in SERIES:
            inner = np.unique((decades[:, None] * np.array(series)).round().astype(np.int64))
            inner = inner[(inner > lowest) & (inner <= highest)]
            if len(inner) < most:
                break
    else:
        steps = (factor * 10**decade for decade in range(19) for factor in (1, 2, 5))
        step = next(step for step in steps if highest // step - lowest // step < most)
        inner = np.arange(lowest // step, highest // step + 1) * step
    if cap is not None and lowest <= cap < highest:
        if cap - 1 not in inner:
            inner = inner[inner != cap]  # no bin for the cap alone, where bins are wide
        inner = np.append(inner, cap + 1)
    inner = np.unique(inner)
    return np.array([lowest, *inner[(inner > lowest) & (inner <= highest)], highest + 1])
