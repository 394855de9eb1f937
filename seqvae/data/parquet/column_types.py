"""The Arrow types of columns, in families whose members can stand for one another across files.

A family is a plain word: integer, float, text, time, null, or "list of" one of these. Integers widen to floats, nulls to
anything; all else that differs between files is refused by `layout.check_schema`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.types as pat

from seqvae.data.parquet.files import Footer

STRAY_INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")
"""What pandas leaves behind where an index was saved as a column."""


class Column(NamedTuple):
    """What most files hold under one name."""

    type: pa.DataType
    path: Path
    """The first file that has it so."""


def common_columns(footers: Sequence[Footer]) -> dict[str, Column]:
    """Every column of any file, with the type that most files give it, as wide as the widest of these."""
    seen: dict[str, list[Column]] = {}
    for footer in footers:
        for field in footer.schema:
            seen.setdefault(field.name, []).append(Column(field.type, footer.path))
    return {name: _most_common(columns) for name, columns in seen.items()}


def _most_common(columns: list[Column]) -> Column:
    telling = [column for column in columns if not _is_of_nulls(column.type)] or columns
    votes = Counter(_rough(column.type) for column in telling)
    winner = votes.most_common(1)[0][0]  # of equals the one met first
    members = [column for column in telling if _rough(column.type) == winner]
    return next((column for column in members if family(column.type).endswith("float")), members[0])


def goes_with(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether columns of these types, in two files, hold the same kind of thing."""
    return _is_of_nulls(one) or _is_of_nulls(other) or _rough(one) == _rough(other)


@cache  # a folder of many files asks for the same few types again and again
def family(column: pa.DataType) -> str:
    """
    >>> family(pa.list_(pa.uint8())), family(pa.dictionary(pa.int32(), pa.string())), family(pa.bool_())
    ('list of integer', 'text', 'float')
    """
    if is_list(column):
        return f"list of {family(column.value_type)}"
    tests = (
        ("text", is_text),
        ("integer", pat.is_integer),
        ("float", _is_float),
        ("time", is_time),
        ("null", pat.is_null),
    )
    return next((name for name, test in tests if test(column)), str(column))


def is_text(column: pa.DataType) -> bool:
    value = column.value_type if pat.is_dictionary(column) else column
    return bool(pat.is_string(value) or pat.is_large_string(value) or pat.is_string_view(value))


def is_list(column: pa.DataType) -> bool:
    return bool(pat.is_list(column) or pat.is_large_list(column) or pat.is_fixed_size_list(column))


def is_time(column: pa.DataType) -> bool:
    return bool(pat.is_timestamp(column) or pat.is_date(column) or pat.is_duration(column))


def _is_float(column: pa.DataType) -> bool:
    return bool(pat.is_floating(column) or pat.is_boolean(column) or pat.is_decimal(column))


def _is_of_nulls(column: pa.DataType) -> bool:
    return family(column).endswith("null")


def _rough(column: pa.DataType) -> str:
    """The family, integers and floats in one."""
    return family(column).replace("integer", "number").replace("float", "number")
