"""Whole Parquet files whose schemas drift from file to file, or which are written in ways that are rare and right.

In: a form of data. Out: variants, each of which changes the files before they are written, and what they mean along with them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.reliability.bad_input_data import IDS, LONG, PARTS, TIMES, File, Meant
from benchmarks.reliability.bad_input_names import Done, Variant
from benchmarks.reliability.bad_input_values import choose

Alter = Callable[[pa.Table], pa.Table]


def drift_variants(form: str) -> list[Variant]:
    """One file differs from the others in its schema. What it means stays, or is lost: then nothing of it may be kept."""
    id_, part = IDS.get(form, "id"), PARTS[form]
    kept: dict[str, Alter] = {
        "another column": lambda table: table.append_column("more", pa.array(range(len(table)))),
        "columns in another order": lambda table: table.select(table.column_names[::-1]),
    }
    lost: dict[str, Alter] = {}
    for name in (one for one in (part, id_, TIMES.get(form)) if one is not None):
        kept |= {
            f"{name} renamed": partial(_renamed, name=name, new=f"{name}s"),
            f"{name} in capitals": partial(_renamed, name=name, new=name.upper()),
            f"{name} twice": partial(_twice, name=name),
            f"{name} in a struct": partial(_in_struct, name=name),
            f"{name} in a list": partial(_in_list, name=name),
            f"{name} that may not be null": partial(_not_null, name=name),
        }
        kept |= {f"{name} as {kind}": partial(_cast, name=name, kind=kind) for kind in _kinds(form, name)}
        lost |= {f"without {name}": partial(_without, name=name), f"{name} of words": partial(_of_words, name=name)}
    if form not in LONG:  # in a long table a null is a missing value, or a fact without a time
        lost[f"{part} of nulls"] = partial(_of_nulls, name=part)
    return [
        Variant(what, partial(_drift, is_lost, alter))
        for is_lost, group in ((False, kept), (True, lost))
        for what, alter in group.items()
    ]


def writing_variants(form: str) -> list[Variant]:
    """All is well, but written in another way, or with nothing in one file."""
    codecs = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")
    options: list[dict[str, Any]] = [
        {"compression": codec} for codec in codecs if codec == "none" or pa.Codec.is_available(codec)
    ]
    options += [
        {"data_page_version": "2.0", "use_dictionary": False},
        {"row_group_size": 1},
        {"data_page_size": 1, "write_batch_size": 1},
        {"write_page_index": True, "store_schema": False},
        {"use_deprecated_int96_timestamps": True},
        {"version": "1.0", "use_compliant_nested_type": False},
        {"flavor": "spark"},
    ]
    empty: dict[str, Alter] = {
        "no rows in a file": lambda table: table.slice(0, 0),
        "no columns in a file": lambda table: table.select([]).slice(0, 0),
    }
    return [
        *(Variant(f"written with {one}", lambda *_: Done(), "hold", one) for one in options),
        *(Variant(what, partial(_emptied, alter), "hold") for what, alter in empty.items()),
    ]


def _kinds(form: str, name: str) -> list[pa.DataType]:
    """Types that can say the same, or nearly."""
    if name == "tokens":
        inner = (pa.int8(), pa.uint64(), pa.float64(), pa.float16(), pa.string(), pa.bool_())
        return [*map(pa.list_, inner), pa.large_list(pa.int32()), pa.list_view(pa.int64())]
    if name == "text":
        return [pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
    if name == "frames":
        pairs = [pa.list_(pa.float32(), 2), pa.large_list(pa.float64()), pa.list_(pa.decimal128(20, 6))]
        return [*map(pa.list_, pairs), pa.large_list(pa.list_(pa.float64()))]
    if name == "time" and form == "meds":
        return [*map(pa.timestamp, ("s", "ms", "us", "ns")), pa.timestamp("us", "Asia/Kathmandu"), pa.string()]
    if name in ("id", "subject_id"):
        numbers = [pa.int16(), pa.uint64(), pa.float64(), pa.float32(), pa.decimal128(20, 0)]
        return [*numbers, pa.string(), pa.dictionary(pa.int32(), pa.int64())]
    if name in TIMES.values():
        return (
            [pa.float64(), pa.decimal128(30, 6), pa.string(), pa.duration("s")] if name == "minute" else [pa.float32()]
        )
    return [pa.float32(), pa.float64(), pa.decimal128(30, 6), pa.string(), pa.float16(), pa.decimal256(50, 10)]


def _drift(is_lost: bool, alter: Alter, random: np.random.Generator, files: list[File]) -> Done:
    file, _ = choose(random, files)
    file.table = alter(file.table)
    if is_lost:
        file.meant[:] = [Meant(one.id, None, None) for one in file.meant]
    return Done()


def _emptied(alter: Alter, random: np.random.Generator, files: list[File]) -> Done:
    files[0].table = alter(files[0].table)
    files[0].meant.clear()
    return Done()


def _replaced(table: pa.Table, name: str, column: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


def _renamed(table: pa.Table, name: str, new: str) -> pa.Table:
    return table.rename_columns([new if one == name else one for one in table.column_names])


def _twice(table: pa.Table, name: str) -> pa.Table:
    return table.append_column(name, table[name])


def _without(table: pa.Table, name: str) -> pa.Table:
    return table.drop_columns([name])


def _of_words(table: pa.Table, name: str) -> pa.Table:
    return _replaced(table, name, pa.array([b"word"] * len(table), pa.binary()))


def _of_nulls(table: pa.Table, name: str) -> pa.Table:
    return _replaced(table, name, pa.nulls(len(table)))


def _in_struct(table: pa.Table, name: str) -> pa.Table:
    return _replaced(table, name, pa.StructArray.from_arrays([table[name].combine_chunks()], [name]))


def _in_list(table: pa.Table, name: str) -> pa.Table:
    offsets = pa.array(range(len(table) + 1), pa.int32())
    return _replaced(table, name, pa.ListArray.from_arrays(offsets, table[name].combine_chunks()))


def _not_null(table: pa.Table, name: str) -> pa.Table:
    number = table.column_names.index(name)
    return table.set_column(number, table.schema.field(number).with_nullable(False), table[name])


def _cast(table: pa.Table, name: str, kind: pa.DataType) -> pa.Table:
    if pa.types.is_dictionary(kind):
        return _replaced(table, name, table[name].dictionary_encode())
    if pa.types.is_duration(kind):  # of minutes
        return _replaced(table, name, pa.array([60 * minute for minute in table[name].to_pylist()], kind))
    return _replaced(table, name, table[name].cast(kind, safe=False))
