"""Names that would command a terminal, forge a line, leave a folder or break a format, wherever a data set has names.

In: a form of data. Out: variants, each of which changes the files before they are written, and what they mean along with them.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.reliability.bad_input_data import NAMES, PARTS, VARIABLES, File, Meant, as_it_is
from seqvae.files import why_no_path

Must = Literal["hold", "refuse", "any"]
"""Everything has to be in the cache | what is damaged has to be refused or left out | either, but nothing in between."""


class Done(NamedTuple):
    """What goes with files that were changed."""

    words: tuple[str, ...] = ()
    """Flags."""
    folder: str = ""
    """In the data's directory, where the files stand now."""


Change = Callable[[np.random.Generator, list[File]], Done]


class Variant(NamedTuple):
    what: str
    change: Change
    must: Must = "any"
    options: Mapping[str, Any] = MappingProxyType({})
    """Of writing."""


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
"""Some of them cannot stand everywhere: file names have no / and no zero byte, Arrow's text has no half of a pair."""
HALF_A_PAIR = "\ud800"


def name_variants(form: str) -> list[Variant]:
    """Each name in each place; once alone, when all must be well, and once beside a fault, when a message quotes it."""
    places: dict[str, Callable[..., Done]] = {"extra column": name_a_column}
    if form not in ("files", "meds"):
        places |= {"id": name_an_id, "label": name_a_label}
    if form in ("tokens", "text", "nested", "fixed", "table"):
        places["column"] = name_the_part
    if form in VARIABLES:
        places["variable"] = name_a_variable
    if form == "text":
        places["text"] = name_in_text
    in_data = [
        Variant(f"{name!a} as {place}", partial(change, form, name), "hold")
        for place, change in places.items()
        for name in HOSTILE
        if name != HALF_A_PAIR and not (name == "" and place in ("text", "column", "extra column"))
    ]
    on_disk = [
        Variant(
            f"{name!a} as {place}", partial(change, form, on_a_disk(name)), "any" if name == HALF_A_PAIR else "hold"
        )
        for place, change in {"file": name_a_file, "folder": name_a_folder, "data folder": name_the_root}.items()
        for name in HOSTILE
        if name != "" and not (place == "data folder" and why_no_path(on_a_disk(name)))  # flags refuse those themselves
    ]
    names = [*in_data, *on_disk]
    return [*names, *(Variant(f"{one.what}, beside a null", partial(with_a_null, form, one.change)) for one in names)]


def on_a_disk(name: str) -> str:
    """As the name of a file can be: bytes that are no UTF-8 for what is no text; no dot at its beginning, which would hide it."""
    return (
        os.fsdecode(b"\xff\xfe")
        if name == HALF_A_PAIR
        else name.replace("/", "\u2215").replace("\x00", "").lstrip("._")
    )


def with_a_null(form: str, change: Change, random: np.random.Generator, files: list[File]) -> Done:
    """Something to complain about in a first row, so that names are quoted; of a feature, something to note."""
    file = files[int(random.integers(len(files)))]
    place = VARIABLES.get(form, PARTS[form])
    column = file.table[place].combine_chunks()
    nulled = pa.concat_arrays([pa.nulls(1, column.type), column.slice(1)])
    file.table = file.table.set_column(file.table.column_names.index(place), place, nulled)
    first = file.meant[0]
    if form == "table":
        file.meant[0] = as_it_is(first.id, [[None, first.value[0][1]], *first.value[1:]])
    else:
        file.meant[0] = Meant(first.id, None, None)
    return change(random, files)


def name_the_part(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    for file in files:
        names = [name if one == PARTS[form] else one for one in file.table.column_names]
        file.table = file.table.rename_columns(names)
    return Done()


def name_a_column(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    for file in files:
        file.table = file.table.append_column(name, pa.array([b"x"] * len(file.table), pa.binary()))
    return Done()


def name_a_label(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    for file in files:
        file.table = file.table.append_column("label", pa.array([name or "x"] * len(file.table)))
    return Done(("--label_column", "label"))


def name_an_id(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    """All ids become text, as they must be of one type; one becomes the name."""
    chosen = files[0].meant[0].id
    for file in files:
        old = file.table["id"].to_pylist()
        new = [name if one == chosen else str(one) for one in old]
        file.table = file.table.set_column(file.table.column_names.index("id"), "id", pa.array(new, pa.string()))
        file.meant[:] = [one._replace(id=name if one.id == chosen else str(one.id)) for one in file.meant]
    return Done()


def name_a_variable(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    column = VARIABLES[form]
    for file in files:
        old = file.table[column].to_pylist()
        new = pa.array([name if one == NAMES[0] else one for one in old], pa.string())
        file.table = file.table.set_column(file.table.column_names.index(column), column, new)
        for at, one in enumerate(file.meant):
            if one.value is not None:
                steps = [
                    (minute, {name if key == NAMES[0] else key: v for key, v in step.items()})
                    for minute, step in one.value
                ]
                file.meant[at] = as_it_is(one.id, steps)
    return Done()


def name_in_text(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    for file in files:
        meant = [one if one.value is None else as_it_is(one.id, one.value + name) for one in file.meant]
        file.meant[:] = meant
        texts = pa.array([one.value for one in meant], pa.string())
        file.table = file.table.set_column(1, PARTS[form], texts)
    return Done()


def name_a_file(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    file = files[int(random.integers(len(files)))]
    file.path = f"{file.path.rpartition('/')[0]}/{name[:200]}.parquet"
    if form == "files":  # the file's name is the sequence's id
        file.meant[0] = file.meant[0]._replace(id=name[:200])
    return Done()


def name_a_folder(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    file = files[int(random.integers(len(files)))]
    above, _, own = file.path.rpartition("/")
    file.path = f"{above}/{name}/{own}"
    return Done()


def name_the_root(form: str, name: str, random: np.random.Generator, files: list[File]) -> Done:
    for file in files:
        file.path = f"{name}/{file.path}"
    return Done(folder=name)
