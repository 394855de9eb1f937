"""Numbers, sizes, durations and names as people read them: the one place that knows how.

What comes from data (names, tokens, paths) goes through `visible`, so that nothing in it can steer a terminal. Tables and
headings for terminals are in `seqvae/reports/terminal.py`.
"""

import math
import os
import re
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from rich.cells import cell_len

from seqvae.errors import harmless

MINUS = "\N{MINUS SIGN}"
UNITS = ("B", "kB", "MB", "GB", "TB")
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
"""Bytes of each unit. G is short for GB, as in other programs."""
cells = cell_len
"""Columns of a terminal that a text takes: two for a wide character, none for a combining one."""
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def visible(text: str) -> str:
    """Spell out what a terminal would obey or hide instead of show.

    >>> visible("pulse\\x1b[2J\\n")
    'pulse\\\\x1b[2J\\\\n'
    """
    return harmless(text).replace("\n", "\\n")


def window_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream goes to; None: it goes elsewhere, where a line can be of any length."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # no terminal, or no file at all
        return None


def folded(text: str, width: int | None, indent: int = 2) -> str:
    """Break lines between words where a terminal would break them within a number; None: leave them whole.

    >>> print(folded("a loss of 1.2345 nats", 14))
    a loss of
      1.2345 nats
    """
    if width is None:
        return text
    fold = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(fold.fill(line) for line in text.split("\n"))


def clip(text: str, width: int) -> str:
    """Return the text, or as much of its beginning as fits into `width` cells of a terminal with two dots behind it.

    >>> clip("temperature", 8), clip("pulse", 8)
    ('temper..', 'pulse')
    """
    if cells(text) <= width:
        return text
    while cells(text) > width - 2:
        text = text[:-1]
    return f"{text}.."


def plain(value: Any) -> str:
    """Return a text made visible, a whole number with its thousands apart, or four digits of a measure."""
    if isinstance(value, str):
        return visible(value)
    return f"{value:,}" if isinstance(value, int) else measure(value)


def measure(value: float) -> str:
    """Return four digits, or three and a power of ten.

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


def brief(value: float) -> str:
    """Return about three digits, enough to compare, with a minus sign as in print.

    >>> brief(29.0249), brief(8921.4), brief(0.53142), brief(1e-7), brief(16.0)
    ('29.0', '8,921', '0.531', '1e-07', '16')
    """
    if value == round(value) and abs(value) < 1e6:
        written = f"{value:,.0f}"
    elif abs(value) >= 1e6 or 0 < abs(value) < 1e-4:
        written = f"{value:.3g}"
    else:
        decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
        written = f"{value:,.{decimals}f}"
    return written.replace("-", MINUS, 1) if value < 0 else written


def tick_label(value: float) -> str:
    """Return a number as short as the tick of an axis needs it.

    >>> tick_label(1500.0), tick_label(20000.0), tick_label(0.25), tick_label(2500000.0), tick_label(-0.0)
    ('1,500', '20k', '0.25', '2.5M', '0')
    """
    size, letter = 1.0, ""
    for unit in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
        if abs(value) >= max(unit[0], 10_000):
            size, letter = unit
    written = f"{value:,.0f}" if not letter and abs(value) >= 1000 else f"{value / size + 0.0:.6g}{letter}"
    return written.replace("-", MINUS, 1) if value < 0 else written


def percent(share: float) -> str:
    """Return a share in percent; only none is 0 %, only all is 100 %.

    >>> percent(0.5), percent(0.00001), percent(0.0), percent(0.9999), percent(1.0)
    ('50.0 %', '<0.1 %', '0 %', '>99.9 %', '100 %')
    """
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    if share < 0.001:
        return "<0.1 %"
    return ">99.9 %" if share >= 0.9995 else f"{100 * share:.1f} %"


def size(count: int) -> str:
    """Return a number of bytes.

    >>> size(999), size(1234), size(5_000_000)
    ('999 B', '1.2 kB', '5.0 MB')
    """
    power = 0
    while round(count / 1000**power, 1) >= 1000 and power < len(UNITS) - 1:
        power += 1
    return f"{count} B" if power == 0 else f"{count / 1000**power:.1f} {UNITS[power]}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> duration(0.2134), duration(75), duration(300), duration(3675), duration(200_000)
    ('0.21 s', '1 min 15 s', '5 min', '1 h 1 min', '2 d 7 h')
    """
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(place for place, (count, _) in enumerate(units) if count)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2] if count)


def clock(seconds: float) -> str:
    """Return a time as on a clock.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def step_name(kind: str) -> str:
    """Return what a step of a sequence is called, so that it is not taken for one of the optimizer.

    >>> step_name("tokens"), step_name("events")
    ('token', 'time step')
    """
    return "token" if kind == "tokens" else "time step"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def some(names: Sequence[str], most: int = 8, separator: str = ", ") -> str:
    """Return the first few names, and how many there are.

    >>> some(["a", "b", "c"], most=2)
    'a, b, ... (3 in all)'
    """
    return separator.join(names[:most]) + (f"{separator}... ({len(names)} in all)" if len(names) > most else "")


def parse_size(text: str, flag: str = "--memory_limit") -> int:
    """Return the bytes that a size stands for.

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
