"""Numbers -> lines of text for a terminal, a pipe or a file: headings, notes, tables.

What comes from data (names, tokens, paths) goes through `visible`, so that nothing in it can steer the terminal. Colour is
only ever added to what is readable without it.
"""

import math
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

NARROWEST = 8
"""Characters that a column of text keeps, however many columns a table has."""
WIDEST = 100
"""Characters; longer lines are hard to read, however wide the window is."""
UNITS = ("B", "kB", "MB", "GB", "TB")


class Ink(NamedTuple):
    """What the paper takes."""

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
    """Colours only for a terminal that shows them, and for nobody who set NO_COLOR (no-color.org)."""
    blocks = "utf" in (stream.encoding or "").lower()
    if not stream.isatty():
        return Ink(blocks=blocks)
    able = environment.get("TERM") != "dumb" and (sys.platform != "win32" or "WT_SESSION" in environment)
    width = min(shutil.get_terminal_size().columns, WIDEST)
    return Ink(width, able and not environment.get("NO_COLOR"), blocks)


def visible(text: str) -> str:
    """Spell out what a terminal would obey or hide instead of show.

    >>> visible("pulse\\x1b[2J\\n")
    'pulse\\\\x1b[2J\\\\n'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cells(text: str) -> int:
    """Columns of a terminal that a text takes: two for a wide character, none for a combining one.

    >>> cells("pH"), cells("体温"), cells("e\u0301")
    (2, 4, 1)
    """
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def clip(text: str, width: int) -> str:
    """The text, or as much of its beginning as fits with two dots behind it.

    >>> clip("temperature", 8), clip("pulse", 8)
    ('temper..', 'pulse')
    """
    if cells(text) <= width:
        return text
    while cells(text) > width - 2:
        text = text[:-1]
    return f"{text}.."


def section(
    title: str,
    rows: Sequence[Any],
    ink: Ink,
    *,
    most: int = 0,
    total: int | None = None,
    formats: Mapping[str, Callable[[Any], str]] | None = None,
    remark: str = "",
) -> list[str]:
    """A heading, a table and what has to be said about it; nothing where there are no rows.

    The table has at most so many rows (0: all), and says how many of the `total` (default: of the rows) it leaves out.
    """
    if not rows:
        return []
    shown = rows[:most] if most else rows
    left_out = (len(rows) if total is None else total) - len(shown)
    more = [f"  ... and {left_out:,} more"] if left_out > 0 else []
    below = [ink.dim(line) for line in (*more, *note(remark, ink, mark=""))]
    return [*heading(title, ink), *table(shown, ink, formats), *below]


def heading(title: str, ink: Ink) -> list[str]:
    return ["", ink.bold(visible(title))]


def note(text: str, ink: Ink, mark: str = "-") -> list[str]:
    """A paragraph behind a mark. Paths and flags stay in one piece, to be copied."""
    indent = f"  {mark} " if mark else "  "
    width = ink.width - len(indent)
    lines = textwrap.wrap(visible(text), width, break_on_hyphens=False, break_long_words=False)
    return [(indent if number == 0 else " " * len(indent)) + line for number, line in enumerate(lines)]


def table(rows: Sequence[Any], ink: Ink, formats: Mapping[str, Callable[[Any], str]] | None = None) -> list[str]:
    """Named tuples as a table: a field is a column, and one that is None in all rows is left out."""
    fields = [field for field in rows[0]._fields if any(getattr(row, field) is not None for row in rows)]
    columns = [[getattr(row, field) for row in rows] for field in fields]
    on_the_left = [any(isinstance(value, str) for value in column) for column in columns]
    written = [
        ["-" if value is None else (formats or {}).get(field, plain)(value) for value in column]
        for field, column in zip(fields, columns, strict=True)
    ]
    titles = [field.replace("_", " ") for field in fields]
    widths = [max(map(cells, [title, *column])) for title, column in zip(titles, written, strict=True)]
    _squeeze(widths, on_the_left, ink.width)
    heading, *body = [_line(line, widths, on_the_left) for line in (titles, *zip(*written, strict=True))]
    return [ink.dim(heading), *body]


def plain(value: Any) -> str:
    """A text, a whole number or a measure as people write it."""
    if isinstance(value, str):
        return visible(value)
    return f"{value:,}" if isinstance(value, int) else measure(value)


def measure(value: float) -> str:
    """Four digits, or three and a power of ten.

    >>> measure(1234.56), measure(0.012345), measure(-2.5), measure(1.5e9), measure(0.0)
    ('1,235', '0.01235', '-2.5', '1.5e+09', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = math.floor(math.log10(abs(value)))
    if not -4 <= size <= 6:
        return f"{value:.3g}"
    text = f"{value:,.{max(0, 3 - size)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """
    >>> percent(0.5), percent(0.00001), percent(0.0), percent(0.9999), percent(1.0)
    ('50.0 %', '<0.1 %', '0 %', '>99.9 %', '100 %')
    """
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    if share < 0.001:
        return "<0.1 %"
    return ">99.9 %" if share >= 0.9995 else f"{100 * share:.1f} %"


def size(count: int) -> str:
    """
    >>> size(999), size(1234), size(5_000_000)
    ('999 B', '1.2 kB', '5.0 MB')
    """
    power = 0
    while round(count / 1000**power, 1) >= 1000 and power < len(UNITS) - 1:
        power += 1
    return f"{count} B" if power == 0 else f"{count / 1000**power:.1f} {UNITS[power]}"


def _squeeze(widths: list[int], on_the_left: list[bool], total: int) -> None:
    """Take what is too much from the widest columns of text, in place."""
    texts = [number for number, is_text in enumerate(on_the_left) if is_text]
    while texts and 2 * len(widths) + sum(widths) > total:
        widest = max(texts, key=lambda number: widths[number])
        if widths[widest] <= NARROWEST:
            return
        widths[widest] -= 1


def _line(entries: Sequence[str], widths: Sequence[int], on_the_left: Sequence[bool]) -> str:
    padded = []
    for entry, width, is_text in zip(entries, widths, on_the_left, strict=True):
        text = clip(entry, width)
        space = " " * (width - cells(text))
        padded.append(text + space if is_text else space + text)
    return "  " + "  ".join(padded).rstrip()


def counted(count: int, noun: str) -> str:
    """
    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def some(names: list[str], most: int = 8) -> str:
    """
    >>> some(["a", "b", "c"], most=2)
    'a, b, ... (3 in all)'
    """
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
"""G is short for GB, as in other programs."""


_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str, flag: str = "--memory_limit") -> int:
    """Bytes.

    >>> parse_size("6GB"), parse_size("1.5 GiB"), parse_size("900MB"), parse_size("6e9")
    (6000000000, 1610612736, 900000000, 6000000000)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{flag} must be a size like 6GB, 6GiB or 900MB, got {text!r}")
    number = float(found[1]) * FACTORS[(found[2] or "").lower()]
    if not 1 <= number < 2**63:
        raise ValueError(f"{flag} must be above 0 and a size that memory can have, got {text!r}")
    return round(number)
