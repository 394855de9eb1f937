"""Whole Parquet files with values that nobody expects: not finite, huge, null, empty, out of order, met before.

In: a form of data. Out: variants, each of which changes the files before they are written, and what they mean along with them.
"""

import datetime as dt
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.reliability.bad_input_data import LONG, NAMES, PARTS, ROWS, TIMES, VARIABLES, File, Meant, as_it_is
from benchmarks.reliability.bad_input_names import Done, Must, Variant

NAN, INF = float("nan"), float("inf")
LAST_MINUTE = dt.datetime(9999, 12, 31, 23, 59)


def value_variants(form: str) -> list[Variant]:
    variants = [
        Variant(f"{what} in a sequence", partial(one_row, form, new), must) for what, new, must in _rows_of(form)
    ]
    if form not in ("tokens", "text"):
        numbers = (NAN, INF, -INF, 1e300, -1e300, 1e31, 1e29, -0.0, 5e-324, 1e-300)
        variants += [Variant(f"{number} as a value", partial(one_number, form, number)) for number in numbers]
    if form in LONG:
        variants.append(Variant("rows in any order", partial(shuffled, form), "hold"))
        times = (
            (dt.datetime(1, 1, 1), LAST_MINUTE, dt.datetime(1677, 9, 22))
            if form == "meds"
            else (NAN, INF, -1e300, 1e15)
        )
        variants += [Variant(f"{time} as a time", partial(one_time, form, time)) for time in times]
    if form not in ("files", "meds"):
        ids = (2**63 - 1, -(2**63), -1, 0, None)
        variants += [Variant(f"{id_} as an id", partial(one_id, form, id_), "any") for id_ in ids]
    if form in ROWS:
        variants.append(Variant("an id met before", partial(doubled_id, form), "hold"))
    return variants


def _rows_of(form: str) -> list[tuple[str, Any, Must]]:
    """What may stand in place of a whole sequence."""
    both: list[tuple[str, Any, Must]] = [("null", None, "refuse")]
    if form == "tokens":
        wrong: list[Any] = [[], [None], [1, None], [-1], [3, -(2**63)], [2**31], [2**63 - 1]]
        huge = [2**31 - 1]
        fine: list[tuple[str, Any, Must]] = [
            ("[0]", [0], "hold"),
            ("200,000 ids", [7] * 200_000, "hold"),
            (str(huge), huge, "any"),
        ]
        return [*both, *((str(one), one, "refuse") for one in wrong), *fine, ("[5000]", [5000], "any")]
    if form == "text":
        return [
            *both,
            ("no text", "", "refuse"),
            ("much text", "ab " * 50_000, "hold"),
            ("text of white space", "  ", "any"),
        ]
    if form == "nested":
        wrong = [[], [[]], [[], []], [[1.0]], [[1.0, 2.0], [3.0]], [[1.0, 2.0, 3.0]], [[1.0] * 5000]]
        return [
            *both,
            *((f"{one!r:.40}", one, "refuse") for one in wrong),
            ("nulls inside", [[1.0, None], None], "any"),
        ]
    return (
        [*both, ("no vectors", [], "refuse"), ("a null vector", [None, [1.0, 2.0]], "any")] if form == "fixed" else []
    )


def one_row(form: str, new: Any, random: np.random.Generator, files: list[File]) -> Done:
    """One sequence is what no sequence should be; whether it may be kept is for what it means to say."""
    file, at = choose(random, files)
    values = file.table[PARTS[form]].to_pylist()
    values[at] = new
    column = pa.array(values, file.table[PARTS[form]].type)
    file.table = file.table.set_column(1, PARTS[form], column)
    id_ = file.meant[at].id
    vectors = [[None, None] if one is None else one for one in new or []]
    bad = not new or (form == "tokens" and any(one is None or not 0 <= one < 2**31 for one in new))
    bad = bad or (form == "nested" and any(len(one) != 2 for one in vectors))
    value = vectors if form in ("nested", "fixed") else new
    file.meant[at] = Meant(id_, None, None) if bad else as_it_is(id_, value)
    return Done()


def one_number(form: str, number: float, random: np.random.Generator, files: list[File]) -> Done:
    """The first number of one sequence."""
    file, at = choose(random, files)
    one = file.meant[at]
    row = first_row(form, file, at)
    column = file.table[PARTS[form]].combine_chunks()
    values = column.to_pylist()
    if form in ("nested", "fixed"):
        values[row][0][0] = number
    else:
        values[row] = number
    file.table = file.table.set_column(
        file.table.column_names.index(PARTS[form]), PARTS[form], pa.array(values, column.type)
    )
    if form in ("fixed", "meds"):
        with np.errstate(over="ignore"):
            number = float(np.float32(number))
    good = abs(number) <= 1e30
    replaced = number if good else None
    if form in VARIABLES:
        minute, step = one.value[0]
        name = file.table[VARIABLES[form]][row].as_py()
        changed: Any = [(minute, {**step, name: replaced}), *one.value[1:]]
    else:
        changed = [[replaced, *one.value[0][1:]], *one.value[1:]]
    file.meant[at] = Meant(one.id, changed if good else None, changed)
    return Done()


def one_time(form: str, time: Any, random: np.random.Generator, files: list[File]) -> Done:
    """The last row of one sequence is at another time, alone; it must come where the time says, or not at all."""
    file, at = choose(random, files)
    row = first_row(form, file, at + 1) - 1
    column = file.table[TIMES[form]].combine_chunks()
    values = column.to_pylist()
    minute = time
    if form == "meds":
        minute = (time - dt.datetime(2020, 1, 1)) / dt.timedelta(minutes=1)
    values[row] = time
    kind = column.type if form in ("meds", "table") else pa.float64()
    name = TIMES[form]
    file.table = file.table.set_column(file.table.column_names.index(name), name, pa.array(values, kind))
    one = file.meant[at]
    if not abs(minute) <= (1e308 if form == "table" else 1e30):  # vectors have an order, but no gaps
        file.meant[at] = Meant(one.id, None, None)
        return Done()
    if form == "table":
        steps = [*one.value[:-1]]
        value: Any = [*steps, one.value[-1]] if minute > 0 else [one.value[-1], *steps]
    else:
        last_minute, step = one.value[-1]
        moved = file.table[VARIABLES[form]][row].as_py()
        rest = {key: number for key, number in step.items() if key != moved}
        value = sorted([*one.value[:-1], (last_minute, rest), (minute, {moved: step[moved]})], key=lambda pair: pair[0])
    file.meant[at] = as_it_is(one.id, value)
    return Done()


def one_id(form: str, id_: int | None, random: np.random.Generator, files: list[File]) -> Done:
    file, at = choose(random, files)
    old = file.meant[at].id
    ids = [id_ if one == old else one for one in file.table["id"].to_pylist()]
    file.table = file.table.set_column(0, "id", pa.array(ids, pa.int64()))
    if id_ is None:  # of rows without an id it is said how many there are
        del file.meant[at]
    else:
        file.meant[at] = file.meant[at]._replace(id=id_)
    return Done()


def doubled_id(form: str, random: np.random.Generator, files: list[File]) -> Done:
    file = files[0]
    file.table = file.table.set_column(0, "id", pa.array([file.meant[0].id] * len(file.table)))
    file.meant[:] = [one._replace(id=file.meant[0].id) for one in file.meant]
    return Done()


def shuffled(form: str, random: np.random.Generator, files: list[File]) -> Done:
    for file in files:
        file.table = file.table.take(random.permutation(len(file.table)))
    return Done()


def choose(random: np.random.Generator, files: list[File]) -> tuple[File, int]:
    """A file and one of its sequences."""
    file = files[int(random.integers(len(files)))]
    return file, int(random.integers(len(file.meant)))


def first_row(form: str, file: File, at: int) -> int:
    """Where a sequence begins in its file's table, or where the last one ends."""
    if form in ROWS:
        return at
    return sum(len(one.value) * (1 if form == "table" else len(NAMES)) for one in file.meant[:at])
