"""Small data sets in every form that the product reads, and what is changed in their tables before they are written.

In: a form and a generator of random numbers. Out: the tables of the files, and beside them what their sequences mean, as plain
Python; variants of hostile names, absurd values, drifting schemas and rare ways of writing, each of which changes both.
Numbers are multiples of 1/8, so that no type of float changes them, and times are whole minutes.
"""

import datetime as dt
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from seqvae.files import why_no_path

FORMS = ("tokens", "text", "nested", "fixed", "table", "events", "meds", "files")
"""Lists of token ids, text, lists of lists, lists of fixed lists, a long table of features or events, MEDS, and a file for each."""
ROWS, LONG = FORMS[:4], FORMS[4:]
FLAGS = {"text": ("--tokenizer", "characters")}
PARTS = {
    "tokens": "tokens",
    "text": "text",
    "nested": "frames",
    "fixed": "frames",
    "table": "x",
    "events": "value",
    "meds": "numeric_value",
    "files": "value",
}
"""The column with what a sequence is made of."""
IDS = {"meds": "subject_id", "files": None}
"""The column with the ids, where it is not called id."""
VARIABLES = {"events": "variable", "files": "variable", "meds": "code"}
TIMES = {"events": "minute", "files": "minute", "meds": "time", "table": "time"}
SPLITS = {"train": (3, 4), "valid": (1, 4)}
"""Number of files of a split, and of sequences of a file."""
NAMES = ("pulse", "ph", "age")
EPOCH = dt.datetime(2020, 1, 1)
MINUTE = dt.timedelta(minutes=1)

Value = Any
"""The value of a sequence. Tokens: numbers; text: a text; vectors: lists of numbers or None; events: (minute, {variable: number
or None}) for each step."""


class Meant(NamedTuple):
    """A sequence, and what of it may stand in a cache; None: nothing, it has to be refused or left out."""

    id: int | str
    value: Value
    if_missing: Value
    """The value with --bad_values missing."""


def unchanged(id_: int | str, value: Value) -> Meant:
    return Meant(id_, value, value)


@dataclass
class File:
    """A file that is about to be written, and what stands in it."""

    path: str
    """Path below the data's directory."""
    split: str
    table: pa.Table
    meant: list[Meant]

    def replace_column(self, name: str, column: pa.Array | pa.ChunkedArray) -> None:
        self.table = with_column(self.table, name, column)


def with_column(table: pa.Table, name: str, column: Any) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, column)


# --- Undamaged data sets ----------------------------------------------------------------------------------------------


def make_files(form: str, random: np.random.Generator) -> list[File]:
    """Return the files of an undamaged data set."""
    files = []
    number = 100
    for split, (count, per_file) in SPLITS.items():
        count, per_file = (count * per_file, 1) if form == "files" else (count, per_file)
        folder = f"data/{'tuning' if split == 'valid' else split}" if form == "meds" else split
        for _ in range(count):
            sequences = [(number + at, make_value(form, random)) for at in range(per_file)]
            meant = [unchanged(*pair) for pair in sequences]
            files.append(File(f"{folder}/{number}.parquet", split, to_table(form, sequences), meant))
            number += per_file
    return files


def make_value(form: str, random: np.random.Generator) -> Value:
    steps = int(random.integers(3, 20))
    if form == "tokens":
        return [39, *random.integers(0, 40, steps).tolist()]
    if form == "text":
        return "abcdefgh " + "".join(random.choice(list("abcdefgh "), steps))
    if form in ("nested", "fixed", "table"):
        return (random.integers(-800, 800, (steps, 2)) / 8).tolist()
    minutes = np.cumsum(random.integers(1, 600, steps)).tolist()
    return [(minute, dict(zip(NAMES, (random.integers(-800, 800, 3) / 8).tolist(), strict=True))) for minute in minutes]


def to_table(form: str, sequences: Sequence[tuple[int | str, Value]]) -> pa.Table:
    """Return sequences as a table of this form; sequences of None are nulls."""
    if form in ROWS:
        kinds = {
            "tokens": pa.list_(pa.int64()),
            "text": pa.string(),
            "nested": pa.list_(pa.list_(pa.float64())),
            "fixed": pa.list_(pa.list_(pa.float32(), 2)),
        }
        ids, values = zip(*sequences, strict=True)
        return pa.table({"id": list(ids), PARTS[form]: pa.array(values, kinds[form])})
    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    if form == "table":
        names = ("id", "time", "x", "y")
        rows = [(id_, float(time), *step) for id_, steps in sequences for time, step in enumerate(steps)]
    else:
        names = (
            ("subject_id", "time", "code", "numeric_value") if form == "meds" else ("id", "minute", "variable", "value")
        )
        rows = [
            (id_, EPOCH + minute * MINUTE if form == "meds" else minute, name, number)
            for id_, steps in sequences
            for minute, step in steps
            for name, number in step.items()
        ]
    table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    if form == "meds":
        return with_column(table, "numeric_value", table["numeric_value"].cast(pa.float32()))
    return table.drop_columns(["id"]) if form == "files" else table


# --- Variants ---------------------------------------------------------------------------------------------------------

Must = Literal["hold", "refuse", "any"]
"""Requirements: everything has to be in the cache | what is damaged has to be refused or left out | either, but no mixture."""


class Done(NamedTuple):
    """The flags and the directory that go with changed files."""

    words: tuple[str, ...] = ()
    """Flags of the commands."""
    folder: str = ""
    """Directory below the data's, where the files stand now."""


Change = Callable[[np.random.Generator, list[File]], Done]


class Variant(NamedTuple):
    """A change of the files of a data set, and what must become of it."""

    what: str
    change: Change
    must: Must = "any"
    options: Mapping[str, Any] = MappingProxyType({})
    """Options for writing the files."""


def choose_sequence(random: np.random.Generator, files: list[File]) -> tuple[File, int]:
    """Return a file and the place of one of its sequences."""
    file = files[int(random.integers(len(files)))]
    return file, int(random.integers(len(file.meant)))


# --- Names that would command a terminal, forge a line, leave a folder or break a format ------------------------------

HOSTILE = (
    "\x1b[2J\x1b[31mred",
    "\x9b31m",
    "bell\x07 back\x08",
    "\rforged",
    "line\nforged line",
    "line\u2028forged",
    "\u202eabc\u2066",
    "\u200b\ufeff",
    "$x_{1}$ $",
    "<script>alert(1)</script>",
    "../../up",
    "/etc/passwd",
    "{0} %s {name} %(x)d",
    "a,b;'\"`$(id)`",
    "--data_dir",
    "-rf *",
    "größe 変 e\u0301",
    "long" * 60,
    "nul\x00byte",
    "",
    "[x]*?",
    "\ud800",
)
"""Names. Some cannot stand everywhere: file names have no / and no zero byte, Arrow's text has no half of a surrogate pair."""
HALF_A_PAIR = "\ud800"


def name_variants(form: str) -> list[Variant]:
    """Return each name in each place: once alone, when all must be well, and once beside a fault, when a message quotes it."""
    places = ["extra column"]
    places += [] if form in ("files", "meds") else ["id", "label"]
    places += ["column"] if form in (*ROWS, "table") else []
    places += ["variable"] if form in VARIABLES else []
    places += ["text"] if form == "text" else []
    variants = [
        Variant(f"{name!a} as {place}", partial(put_name_in_tables, form, place, name), "hold")
        for place in places
        for name in HOSTILE
        if name != HALF_A_PAIR and not (name == "" and place in ("text", "column", "extra column"))
    ]
    for place in ("file", "folder", "data folder"):
        for name in HOSTILE:
            # Bytes that are no UTF-8 where the name is no text; no dot at its beginning, which would hide the file.
            safe = name.replace("/", "\u2215").replace("\x00", "").lstrip("._")
            on_disk = os.fsdecode(b"\xff\xfe") if name == HALF_A_PAIR else safe
            if name != "" and not (place == "data folder" and why_no_path(on_disk)):  # flags refuse those themselves
                change = partial(put_name_on_disk, form, place, on_disk)
                variants.append(Variant(f"{name!a} as {place}", change, "any" if name == HALF_A_PAIR else "hold"))
    beside_null = [Variant(f"{one.what}, beside a null", partial(with_null, form, one.change)) for one in variants]
    return [*variants, *beside_null]


def with_null(form: str, change: Change, random: np.random.Generator, files: list[File]) -> Done:
    """Put a null into a first row, so that a message quotes the names; of a feature, a note does."""
    file = files[int(random.integers(len(files)))]
    place = VARIABLES.get(form, PARTS[form])
    column = file.table[place].combine_chunks()
    file.replace_column(place, pa.concat_arrays([pa.nulls(1, column.type), column.slice(1)]))
    first = file.meant[0]
    if form == "table":
        file.meant[0] = unchanged(first.id, [[None, first.value[0][1]], *first.value[1:]])
    else:
        file.meant[0] = Meant(first.id, None, None)
    return change(random, files)


def put_name_in_tables(form: str, place: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    chosen = files[0].meant[0].id
    for file in files:
        table = file.table
        match place:
            case "extra column":
                file.table = table.append_column(name, pa.array([b"x"] * len(table), pa.binary()))
            case "label":
                file.table = table.append_column("label", pa.array([name or "x"] * len(table)))
            case "column":
                file.table = table.rename_columns([name if one == PARTS[form] else one for one in table.column_names])
            case "id":  # all ids become text, as they must be of one type; one becomes the name
                ids = [name if one == chosen else str(one) for one in table["id"].to_pylist()]
                file.replace_column("id", pa.array(ids, pa.string()))
                file.meant[:] = [one._replace(id=name if one.id == chosen else str(one.id)) for one in file.meant]
            case "variable":
                renamed = {NAMES[0]: name}
                values = [renamed.get(one, one) for one in table[VARIABLES[form]].to_pylist()]
                file.replace_column(VARIABLES[form], pa.array(values, pa.string()))
                for at, one in enumerate(file.meant):
                    if one.value is not None:
                        steps = [(m, {renamed.get(key, key): v for key, v in step.items()}) for m, step in one.value]
                        file.meant[at] = unchanged(one.id, steps)
            case "text":
                file.meant[:] = [
                    one if one.value is None else unchanged(one.id, one.value + name) for one in file.meant
                ]
                file.replace_column(PARTS[form], pa.array([one.value for one in file.meant], pa.string()))
    return Done(("--label_column", "label") if place == "label" else ())


def put_name_on_disk(form: str, place: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    if place == "data folder":
        for file in files:
            file.path = f"{name}/{file.path}"
        return Done(folder=name)
    file = files[int(random.integers(len(files)))]
    above, _, own = file.path.rpartition("/")
    if place == "folder":
        file.path = f"{above}/{name}/{own}"
        return Done()
    file.path = f"{above}/{name[:200]}.parquet"
    if form == "files":  # the file's name is the sequence's id
        file.meant[0] = file.meant[0]._replace(id=name[:200])
    return Done()


# --- Values: not finite, huge, null, empty, out of order, repeated ----------------------------------------------------

NAN, INF = float("nan"), float("inf")
LAST_MINUTE = dt.datetime(9999, 12, 31, 23, 59)


def value_variants(form: str) -> list[Variant]:
    variants = [
        Variant(f"{what} in a sequence", partial(replace_sequence, form, new), must)
        for what, new, must in replacements_of_a_sequence(form)
    ]
    if form not in ("tokens", "text"):
        numbers = (NAN, INF, -INF, 1e300, -1e300, 1e31, 1e29, -0.0, 5e-324, 1e-300)
        variants += [Variant(f"{number} as a value", partial(replace_number, form, number)) for number in numbers]
    if form in LONG:
        variants.append(Variant("rows in any order", shuffle_rows, "hold"))
        dates = (dt.datetime(1, 1, 1), LAST_MINUTE, dt.datetime(1677, 9, 22))
        times = dates if form == "meds" else (NAN, INF, -1e300, 1e15)
        variants += [Variant(f"{time} as a time", partial(replace_time, form, time)) for time in times]
    if form not in ("files", "meds"):
        ids = (2**63 - 1, -(2**63), -1, 0, None)
        variants += [Variant(f"{id_} as an id", partial(replace_id, id_), "any") for id_ in ids]
    if form in ROWS:
        variants.append(Variant("an id met before", repeat_id, "hold"))
    return variants


def replacements_of_a_sequence(form: str) -> Iterator[tuple[str, Any, Must]]:
    """Yield what may stand in place of a whole sequence."""
    wrong: list[Any]
    if form in ROWS:
        yield "null", None, "refuse"
    if form == "tokens":
        wrong = [[], [None], [1, None], [-1], [3, -(2**63)], [2**31], [2**63 - 1]]
        yield from ((str(one), one, "refuse") for one in wrong)
        yield "[0]", [0], "hold"
        yield "200,000 ids", [7] * 200_000, "hold"
        yield str([2**31 - 1]), [2**31 - 1], "any"
        yield "[5000]", [5000], "any"
    elif form == "text":
        yield "no text", "", "refuse"
        yield "much text", "ab " * 50_000, "hold"
        yield "text of white space", "  ", "any"
    elif form == "nested":
        wrong = [[], [[]], [[], []], [[1.0]], [[1.0, 2.0], [3.0]], [[1.0, 2.0, 3.0]], [[1.0] * 5000]]
        yield from ((f"{one!r:.40}", one, "refuse") for one in wrong)
        yield "nulls inside", [[1.0, None], None], "any"
    elif form == "fixed":
        yield "no vectors", [], "refuse"
        yield "a null vector", [None, [1.0, 2.0]], "any"


def replace_sequence(form: str, new: Any, random: np.random.Generator, files: list[File]) -> Done:
    """Replace one sequence; whether the new one may be kept follows from what it means."""
    file, at = choose_sequence(random, files)
    column = file.table[PARTS[form]]
    values = column.to_pylist()
    values[at] = new
    file.replace_column(PARTS[form], pa.array(values, column.type))
    vectors = [[None, None] if one is None else one for one in new or []]
    bad = not new or (form == "tokens" and any(one is None or not 0 <= one < 2**31 for one in new))
    bad = bad or (form == "nested" and any(len(one) != 2 for one in vectors))
    value = vectors if form in ("nested", "fixed") else new
    id_ = file.meant[at].id
    file.meant[at] = Meant(id_, None, None) if bad else unchanged(id_, value)
    return Done()


def replace_number(form: str, number: float, random: np.random.Generator, files: list[File]) -> Done:
    """Replace the first number of one sequence."""
    file, at = choose_sequence(random, files)
    one, row = file.meant[at], first_row(form, file, at)
    column = file.table[PARTS[form]].combine_chunks()
    values = column.to_pylist()
    if form in ("nested", "fixed"):
        values[row][0][0] = number
    else:
        values[row] = number
    file.replace_column(PARTS[form], pa.array(values, column.type))
    if form in ("fixed", "meds"):
        with np.errstate(over="ignore"):
            number = float(np.float32(number))
    good = abs(number) <= 1e30
    stored = number if good else None
    if form in VARIABLES:
        minute, step = one.value[0]
        name = file.table[VARIABLES[form]][row].as_py()
        changed: Any = [(minute, {**step, name: stored}), *one.value[1:]]
    else:
        changed = [[stored, *one.value[0][1:]], *one.value[1:]]
    file.meant[at] = Meant(one.id, changed if good else None, changed)
    return Done()


def replace_time(form: str, time: Any, random: np.random.Generator, files: list[File]) -> Done:
    """Move the last row of one sequence to another time; it must come where the time says, or not at all."""
    file, at = choose_sequence(random, files)
    row = first_row(form, file, at + 1) - 1
    column = file.table[TIMES[form]].combine_chunks()
    values = column.to_pylist()
    values[row] = time
    kind = column.type if form in ("meds", "table") else pa.float64()
    file.replace_column(TIMES[form], pa.array(values, kind))
    minute = (time - EPOCH) / MINUTE if form == "meds" else time
    one = file.meant[at]
    *steps, last = one.value
    if not abs(minute) <= (1e308 if form == "table" else 1e30):  # vectors have an order, but no gaps
        file.meant[at] = Meant(one.id, None, None)
    elif form == "table":
        file.meant[at] = unchanged(one.id, [*steps, last] if minute > 0 else [last, *steps])
    else:
        last_minute, step = last
        moved = file.table[VARIABLES[form]][row].as_py()
        rest = {key: number for key, number in step.items() if key != moved}
        value = sorted([*steps, (last_minute, rest), (minute, {moved: step[moved]})], key=lambda pair: pair[0])
        file.meant[at] = unchanged(one.id, value)
    return Done()


def replace_id(id_: int | None, random: np.random.Generator, files: list[File]) -> Done:
    file, at = choose_sequence(random, files)
    old = file.meant[at].id
    ids = [id_ if one == old else one for one in file.table["id"].to_pylist()]
    file.replace_column("id", pa.array(ids, pa.int64()))
    if id_ is None:  # rows without an id are counted, not named
        del file.meant[at]
    else:
        file.meant[at] = file.meant[at]._replace(id=id_)
    return Done()


def repeat_id(random: np.random.Generator, files: list[File]) -> Done:
    file, id_ = files[0], files[0].meant[0].id
    file.replace_column("id", pa.array([id_] * len(file.table)))
    file.meant[:] = [one._replace(id=id_) for one in file.meant]
    return Done()


def shuffle_rows(random: np.random.Generator, files: list[File]) -> Done:
    for file in files:
        file.table = file.table.take(random.permutation(len(file.table)))
    return Done()


def first_row(form: str, file: File, at: int) -> int:
    """Return where a sequence begins in its file's table, or where the last one ends."""
    if form in ROWS:
        return at
    return sum(len(one.value) * (1 if form == "table" else len(NAMES)) for one in file.meant[:at])


# --- Schemas that drift from file to file, and ways of writing that are rare and right --------------------------------

Alter = Callable[[pa.Table], pa.Table]


def drift_variants(form: str) -> list[Variant]:
    """Return variants in which one file has another schema. What it means stays, or is lost: then nothing of it may be kept."""
    part = PARTS[form]
    kept: dict[str, Alter] = {
        "another column": lambda table: table.append_column("more", pa.array(range(len(table)))),
        "columns in another order": lambda table: table.select(table.column_names[::-1]),
    }
    lost: dict[str, Alter] = {}
    for name in (part, IDS.get(form, "id"), TIMES.get(form)):
        if name is not None:
            kept |= same_values(form, name)
            lost |= other_values(name)
    if form not in LONG:  # in a long table a null is a missing value, or a fact without a time
        lost[f"{part} of nulls"] = lambda table: with_column(table, part, pa.nulls(len(table)))
    groups = ((False, kept), (True, lost))
    return [
        Variant(what, partial(alter_file, is_lost, alter)) for is_lost, group in groups for what, alter in group.items()
    ]


def same_values(form: str, name: str) -> dict[str, Alter]:
    """Return the ways to keep a column's values under another name or type."""

    def rename(new: str) -> Alter:
        return lambda table: table.rename_columns([new if one == name else one for one in table.column_names])

    def in_list(table: pa.Table) -> pa.Table:
        offsets = pa.array(range(len(table) + 1), pa.int32())
        return with_column(table, name, pa.ListArray.from_arrays(offsets, table[name].combine_chunks()))

    def not_null(table: pa.Table) -> pa.Table:
        number = table.column_names.index(name)
        return table.set_column(number, table.schema.field(number).with_nullable(False), table[name])

    def cast(kind: pa.DataType, table: pa.Table) -> pa.Table:
        if pa.types.is_dictionary(kind):
            return with_column(table, name, table[name].dictionary_encode())
        if pa.types.is_duration(kind):  # of minutes
            return with_column(table, name, pa.array([60 * minute for minute in table[name].to_pylist()], kind))
        return with_column(table, name, table[name].cast(kind, safe=False))

    def in_struct(table: pa.Table) -> pa.Table:
        return with_column(table, name, pa.StructArray.from_arrays([table[name].combine_chunks()], [name]))

    return {
        f"{name} renamed": rename(f"{name}s"),
        f"{name} in capitals": rename(name.upper()),
        f"{name} twice": lambda table: table.append_column(name, table[name]),
        f"{name} in a struct": in_struct,
        f"{name} in a list": in_list,
        f"{name} that may not be null": not_null,
        **{f"{name} as {kind}": partial(cast, kind) for kind in similar_types(form, name)},
    }


def other_values(name: str) -> dict[str, Alter]:
    return {
        f"without {name}": lambda table: table.drop_columns([name]),
        f"{name} of words": lambda table: with_column(table, name, pa.array([b"word"] * len(table), pa.binary())),
    }


def similar_types(form: str, name: str) -> list[pa.DataType]:
    """Return the types that hold the same values, or nearly."""
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
    if name == "minute":
        return [pa.float64(), pa.decimal128(30, 6), pa.string(), pa.duration("s")]
    if name == "time":
        return [pa.float32()]
    return [pa.float32(), pa.float64(), pa.decimal128(30, 6), pa.string(), pa.float16(), pa.decimal256(50, 10)]


def alter_file(is_lost: bool, alter: Alter, random: np.random.Generator, files: list[File]) -> Done:
    file, _ = choose_sequence(random, files)
    file.table = alter(file.table)
    if is_lost:
        file.meant[:] = [Meant(one.id, None, None) for one in file.meant]
    return Done()


def writing_variants(form: str) -> list[Variant]:
    """Return variants in which all is well, but written in another way, or with nothing in one file."""
    codecs = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")
    options: list[dict[str, Any]] = [
        *({"compression": codec} for codec in codecs if codec == "none" or pa.Codec.is_available(codec)),
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
        *(Variant(what, partial(empty_file, alter), "hold") for what, alter in empty.items()),
    ]


def empty_file(alter: Alter, random: np.random.Generator, files: list[File]) -> Done:
    files[0].table = alter(files[0].table)
    files[0].meant.clear()
    return Done()
