"""Parts -> one HTML page that needs nothing else: no script, no network, readable on a phone, in the dark and on paper.

All text from outside goes through `said`: nothing in it can become markup, steer a terminal or fill the page.
Its own style is let through the page's content policy by its hash; everything else, but pictures inside the page, is forbidden.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from seqvae.reports.page_style import STYLE
from seqvae.text import visible

MOST_BYTES = 2_000_000
"""Of a page."""
MOST_PICTURE_BYTES = 900_000
MINUS = "\N{MINUS SIGN}"
MOST_TEXT = 400
"""Characters of one piece of text from outside."""
TABLE_ROWS = 200
"""Of a table."""


_FLAG = re.compile(r"--[a-z]\w*(?: (?:[\d.:]+\b|cyclical|linear|parallel|32-true|stop)(?![\w-]))?")


class Key(NamedTuple):
    """Of a legend: how a curve looks, and what it is."""

    look: str
    name: str
    value: str = ""


def said(text: object, most: int = MOST_TEXT) -> str:
    """
    >>> said("<b>\\x1b[2J"), said("long" * 500, 8)
    ('&lt;b&gt;\\\\x1b[2J', 'longlo..')
    """
    shown = visible(str(text)[: most + 1])
    return escape(shown if len(shown) <= most else f"{shown[: most - 2]}..")


def prose(text: object, most: int = MOST_TEXT) -> str:
    """With flags set apart, each in one piece.

    >>> prose("try --free_bits 0.25")
    'try <code>--free_bits 0.25</code>'
    """
    return _FLAG.sub(r"<code>\g<0></code>", said(text, most))


def brief(value: float) -> str:
    """Three digits, which is what anybody compares.

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


def page(title: str, body: Iterable[str]) -> str:
    policy = f"default-src 'none'; style-src '{_hash_of(STYLE)}'; img-src data:; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',
            f"<title>{said(title, 100)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def section(title: str, parts: Sequence[str], remark: str = "") -> str:
    """Nothing where there are no parts."""
    inside = [part for part in parts if part]
    if not inside:
        return ""
    note = f'<p class="remark">{said(remark, 1000)}</p>' if remark else ""
    return f"<section><h2>{said(title)}</h2>{note}{''.join(inside)}</section>"


def paragraph(text: str, look: str = "") -> str:
    return f"<p{_class(look)}>{prose(text, 1500)}</p>" if text else ""


def grid(parts: Sequence[str]) -> str:
    inside = [part for part in parts if part]
    return f'<div class="grid-of-figures">{"".join(inside)}</div>' if inside else ""


def figure(title: str, drawing: str, keys: Sequence[Key] = (), remark: str = "") -> str:
    legend = "".join(_key(key) for key in keys)
    head = f"<figcaption><b>{said(title)}</b>{f'<span class=keys>{legend}</span>' if legend else ''}</figcaption>"
    return f"<figure>{head}{drawing}{f'<p class=remark>{said(remark)}</p>' if remark else ''}</figure>"


def embedded(path: Path, title: str) -> str:
    """A PNG inside the page; nothing where it is no PNG or too large for a page."""
    try:
        content = path.read_bytes()
    except OSError:
        return ""
    if len(content) > MOST_PICTURE_BYTES or not content.startswith(b"\x89PNG"):
        return ""
    coded = base64.b64encode(content).decode("ascii")
    return f'<figure class="wide"><img alt="{said(title)}" src="data:image/png;base64,{coded}"></figure>'


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    look: str = "",
    most: int = TABLE_ROWS,
) -> str:
    """`numbers`: the columns that stand right-aligned in figures of one width."""
    if not rows:
        return ""
    top = "".join(f"<th{_class('n' if place in numbers else '')}>{said(head)}</th>" for place, head in enumerate(heads))
    lines = []
    for row in rows[:most]:
        cells = "".join(
            f"<td{_class('n' if place in numbers else '')}>{said(cell)}</td>" for place, cell in enumerate(row)
        )
        lines.append(f"<tr>{cells}</tr>")
    head_row = f"<thead><tr>{top}</tr></thead>" if any(heads) else ""
    more = f'<p class="remark">... and {len(rows) - most:,} more</p>' if len(rows) > most else ""
    return f'<div class="scroll"><table{_class(look)}>{head_row}<tbody>{"".join(lines)}</tbody></table></div>{more}'


def fold(title: str, inside: str) -> str:
    """Closed until somebody wants to see it."""
    return f"<details><summary>{said(title)}</summary>{inside}</details>" if inside else ""


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Names and what they are."""
    inside = "".join(f"<div><dt>{said(name)}</dt><dd>{said(value, 1000)}</dd></div>" for name, value in rows if value)
    return f"<dl>{inside}</dl>" if inside else ""


def _key(key: Key) -> str:
    value = f" <span class=v>{said(key.value)}</span>" if key.value else ""
    swatch = f'<i class="swatch {key.look}"></i>' if key.look else ""
    return f'<span class="key">{swatch}{said(key.name)}{value}</span> '


def _class(look: str) -> str:
    return f' class="{look}"' if look else ""


def _hash_of(style: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
