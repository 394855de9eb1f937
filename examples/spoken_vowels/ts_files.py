"""The .ts format of time series archives: text in, one array and one class a series out.

Lines with # are remarks, lines with @ say what follows, and behind @data a line is a series: its dimensions, separated by colons,
each a list of numbers, and at the end its class. Only what the spoken vowels need: no time stamps, no missing values.
"""

from typing import NamedTuple

import numpy as np

from seqvae.errors import DataError


class Series(NamedTuple):
    values_SD: np.ndarray
    """S steps of D dimensions, float32."""
    label: str


def read_ts(text: str, name: str) -> list[Series]:
    """`name`: of the file, for messages.

    >>> [series] = read_ts("@data\\n1,2,3:4,5,6:nine", "a.ts")
    >>> series.values_SD.tolist(), series.label
    ([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], 'nine')
    """
    lines = text.splitlines()
    begins = next((number for number, line in enumerate(lines) if line.strip().lower() == "@data"), None)
    if begins is None:
        raise DataError(f"{name}: no line @data, so this is no .ts file")
    told = dict(line.lower().split(maxsplit=1) for line in lines[:begins] if line.startswith("@") and " " in line)
    for what in ("@timestamps", "@missing"):
        if told.get(what, "false") != "false":
            raise DataError(
                f"{name}: {what} {told[what]}, and this reader takes neither time stamps nor missing values"
            )
    numbered = enumerate(lines[begins + 1 :], start=begins + 2)
    return [_series_of(line, f"{name}, line {number}") for number, line in numbered if line.strip()]


def _series_of(line: str, place: str) -> Series:
    *dimensions, label = line.strip().split(":")
    lengths = {dimension.count(",") + 1 for dimension in dimensions}
    if len(lengths) != 1:
        raise DataError(f"{place}: dimensions of {sorted(lengths)} steps, and all should be as long as one another")
    try:
        values_DS = np.array([dimension.split(",") for dimension in dimensions], dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{place}: {error}, and a dimension should be numbers with commas between them") from None
    return Series(np.ascontiguousarray(values_DS.T), label)
