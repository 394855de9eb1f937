"""Files of a run directory that grow line by line -> rows; whatever they hold: half lines, other people's lines, nothing.

A long run's files are thinned to what a page can show: rows spread evenly over the run, and always the last one. Numbers that are
no numbers are None here; infinity counts as none, and so does what is next to it.
"""

import csv
import io
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

MOST_BYTES = 64_000_000
"""Of one file: what is longer is read from its end. Readings of 16 dimensions come to 800 bytes each."""
MOST_HEAD = 100_000
"""Bytes of a header."""
LARGEST = 1e100
"""What lies beyond is no measurement, and sums and squares of what is left are finite."""


def read_lines(path: Path, *, has_head: bool = False) -> list[bytes]:
    """Whole lines; of a file that is not there, or cannot be read, none. `has_head`: the first line is always among them."""
    try:
        with path.open("rb") as file:
            head = [file.readline(MOST_HEAD).rstrip(b"\n")] if has_head else []
            end = file.seek(0, io.SEEK_END)
            file.seek(max(0, end - MOST_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return [*head, *lines[1:-1]] if end > MOST_BYTES else lines[:-1]


def spread(lines: Sequence[Any], most: int) -> list[Any]:
    """
    >>> spread([1, 2, 3, 4, 5, 6, 7], 4)
    [1, 3, 5, 7]
    """
    if len(lines) <= most:
        return list(lines)
    last = len(lines) - 1
    return [lines[round(place * last / (most - 1))] for place in range(most)]


def json_rows(lines: Sequence[bytes]) -> list[Row]:
    return [row for row in map(_row_of, lines) if row is not None]


def csv_lines(lines: Sequence[bytes], names: Container[str], most: int) -> list[bytes]:
    """The header, and of the lines with something in one of these columns at most so many: to parse all takes seconds.

    >>> csv_lines([b"step,a,b", b"1,2,", b"2,,3", b"3,,4"], ("b",), 9)
    [b'step,a,b', b'2,,3', b'3,,4']
    """
    heads = [head.decode("utf-8", "replace") for head in lines[0].rstrip().split(b",")] if lines else []
    places = [place for place, head in enumerate(heads) if head in names]
    last = max(places, default=0) + 1
    cut = ((line, line.rstrip().split(b",", last)) for line in lines[1:])
    found = [line for line, fields in cut if any(fields[place] for place in places if place < len(fields))]
    return [*lines[:1], *spread(found, most)]


def csv_rows(lines: Sequence[bytes]) -> list[Row]:
    """Numbers by column; what is no number is left out."""
    text = (line.decode("utf-8", "replace") for line in lines)
    return [{name: value for name, field in row.items() if (value := _number(field)) is not None} for row in _of(text)]


def read_json(path: Path) -> Row:
    """A file that is one object; empty where it is not."""
    try:
        return _row_of(path.read_bytes()) or {}
    except OSError:
        return {}


def number(row: Mapping[str, Any], name: str) -> float | None:
    """
    >>> number({"a": 1, "b": True, "c": "x"}, "a"), number({"b": True}, "b"), number({}, "a")
    (1.0, None, None)
    """
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _finite(value)


def whole(row: Mapping[str, Any], name: str) -> int | None:
    value = number(row, name)
    return None if value is None else int(value)


def text(row: Mapping[str, Any], name: str) -> str:
    """
    >>> text({"a": "x", "b": 1}, "a"), text({"b": 1}, "b")
    ('x', '')
    """
    value = row.get(name)
    return value if isinstance(value, str) else ""


def texts(row: Mapping[str, Any], name: str) -> list[str]:
    value = row.get(name)
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def numbers(row: Mapping[str, Any], name: str) -> list[float | None]:
    """A list in its order and length."""
    value = row.get(name)
    if not isinstance(value, list):
        return []
    return [one if type(one) is float and abs(one) <= LARGEST else number({"": one}, "") for one in value]


def rows_in(row: Mapping[str, Any], name: str) -> list[Row]:
    value = row.get(name)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def row_in(row: Mapping[str, Any], name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def _row_of(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _of(lines: Iterator[str]) -> Iterator[Row]:
    """Up to what is no CSV."""
    try:
        for row in csv.DictReader(lines):
            yield {name: field for name, field in row.items() if isinstance(name, str) and isinstance(field, str)}
    except csv.Error:
        return


def _number(field: str) -> float | None:
    try:
        return _finite(float(field))
    except ValueError:
        return None


def _finite(value: float) -> float | None:
    return float(value) if abs(value) <= LARGEST else None
