"""Texts -> a page that shows originals above what a model makes of them, and below what it makes up by itself.

Texts from data go through `visible`: nothing in them can steer the terminal that shows the page.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seqvae.text import visible

WIDTH = 110
INDENT = 22


class Preview(NamedTuple):
    """Such a page, read back."""

    title: str
    pairs: tuple[tuple[str, str], ...]
    """Originals and what was made of them."""
    samples: tuple[str, ...]


def preview_page(title: str, originals: Sequence[str], reconstructions: Sequence[str], samples: Sequence[str]) -> str:
    """
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
    lines = [visible(title), ""]
    for number, (original, reconstruction) in enumerate(zip(originals, reconstructions, strict=True), 1):
        lines += [*_entry(f"{number:>4}  original", original), *_entry("      reconstruction", reconstruction), ""]
    lines += ["Drawn from the prior", ""]
    for number, sample in enumerate(samples, 1):
        lines += _entry(f"{number:>4}", sample)
    return "\n".join(lines) + "\n"


def read_preview(path: Path) -> Preview | None:
    """What `preview_page` wrote; None where it cannot be read. A blank at the end of a line is lost."""
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


def _entry(label: str, text: str) -> list[str]:
    """The text behind its label, in as many lines as it takes, each blank of it kept."""
    parts = textwrap.wrap(visible(text), WIDTH, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False)
    labels = [label, *[""] * len(parts)]
    return [f"{begin:<{INDENT}}{part}".rstrip() for begin, part in zip(labels, parts or [""], strict=False)]
