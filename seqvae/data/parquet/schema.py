"""Which column plays which part, what may stand in it, and whether a file has it all."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.types as pat

from seqvae.config.data import SourceSettings
from seqvae.data.description import Kind
from seqvae.data.parquet.discovery import Footer
from seqvae.errors import DataError

# The Arrow types of columns, in families whose members can stand for one another across files.
#
# A family is a plain word: integer, float, text, time, null, or "list of" one of these. Integers widen to floats, nulls to
# anything; all else that differs between files is refused by `layout.check_schema`.

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


NUMBERS = ("integer", "float", "null")
TOKEN_LISTS = ("list of integer", "list of null")
VECTOR_LISTS = tuple(f"list of {inner}" for one in NUMBERS for inner in (one, f"list of {one}"))
ALLOWED = {
    "id": (("integer", "float", "text"), "whole numbers or text"),
    "time": (("integer", "float", "time", "null"), "numbers or time stamps"),
    "variable": (("integer", "float", "text"), "text or whole numbers"),
    "value": (NUMBERS, "numbers"),
    "set_index": (NUMBERS, "whole numbers"),
    "label": (("integer", "float", "text", "null"), "whole numbers or text"),
    "feature": (NUMBERS, "numbers"),
    "text": (("text",), "text"),
    "tokens": (TOKEN_LISTS, "lists of whole numbers"),
    "vectors": (VECTOR_LISTS, "lists of numbers, or lists of such lists"),
}
"""Part -> families of types that can play it, and how to say so."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which column plays which part."""

    kind: Kind
    form: Literal["rows", "table", "files"]
    """One sequence a row; a long table with an id; long tables of one sequence each, whose id is the file's stem."""

    sequence: str | None = None
    is_text: bool = False
    id: str | None = None
    time: str | None = None
    variable: str | None = None
    value: str | None = None
    set_index: str | None = None
    features: tuple[str, ...] = ()
    label: str | None = None
    time_unit: str = ""
    """Events: minutes where the column says so, else the column's name: the unit is then the user's."""

    @property
    def columns(self) -> list[str]:
        parts = (
            self.sequence,
            self.id,
            self.time,
            self.variable,
            self.value,
            self.set_index,
            *self.features,
            self.label,
        )
        return list(dict.fromkeys(part for part in parts if part is not None))

    def describe(self) -> str:
        """One line for the header: what was detected."""
        where = {
            "rows": f"one sequence a row in column {self.sequence!r}" + (" (text)" if self.is_text else ""),
            "table": f"long table, id {self.id!r}",
            "files": "one sequence a file, id = the file's name",
        }[self.form]
        parts = [f"{self.kind}: {where}"]
        roles = ("time", "variable", "value", "set_index", "label")
        parts += [f"{role} {column!r}" for role in roles if (column := getattr(self, role))]
        if self.form == "rows":
            parts.append(f"id {self.id!r}" if self.id else "ids are row numbers")
        if self.features:
            shown = ", ".join(map(repr, self.features[:6])) + (", ..." if len(self.features) > 6 else "")
            parts.append(f"{len(self.features)} feature{'s' * (len(self.features) > 1)} ({shown})")
        return ", ".join(parts)


def check_schema(footer: Footer, layout: Layout, columns: Mapping[str, Column]) -> None:
    """Refuse a file that lacks a column of the layout or holds another kind of thing in it than most files."""
    skip = "or leave such files out with --on_bad_files skip"
    for name in layout.columns:
        common, found = columns[name], footer.schema.names.count(name)
        if found == 0:
            raise DataError(
                f"{footer.path}: column {name!r} is missing, but {common.path.name} has it"
                f"{closest(name, footer.schema.names)} Add or rename it, {skip}."
            )
        if found > 1:
            raise DataError(f"{footer.path}: column {name!r} stands there {found} times. Rename all but one, {skip}.")
        here = footer.schema.field(name).type
        if not goes_with(here, common.type):
            raise DataError(
                f"{footer.path}: column {name!r} is {here}, but {common.type} in {common.path.name}. "
                f"Convert one of them, {skip}."
            )
        families, wanted = ALLOWED[_part_of(name, layout)]
        if family(here) not in families:
            role = role_of(name, layout)
            flag = {"feature": "--feature_columns", "set_index": None}.get(role, f"--{role}_column")
            raise DataError(
                f"{footer.path}: column {name!r} is {here}, but must hold {wanted}. "
                + (f"Convert it, or choose another with {flag}." if flag else "Convert or rename it.")
            )


def _part_of(name: str, layout: Layout) -> str:
    if name == layout.sequence:
        return "text" if layout.is_text else layout.kind
    return role_of(name, layout)


def role_of(name: str, layout: Layout) -> str:
    roles = ("sequence", "id", "time", "variable", "value", "set_index", "label")
    return next((role for role in roles if getattr(layout, role) == name), "feature")


def closest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that is not there."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


# From the schemas of Parquet files and the user's flags to a Layout: which column plays which part.
#
# Detection looks at types first and at common names second; every part can be overruled by its flag.

ID_NAMES = ("id", "ts_id", "subject_id", "sequence_id", "series_id", "patient_id", "stay_id", "user_id", "unique_id")
TIME_NAMES = ("time", "minute", "minutes", "timestamp", "datetime", "hour", "hours", "seconds", "date", "t", "step")
VARIABLE_NAMES = ("variable", "code", "parameter", "item")
VALUE_NAMES = ("value", "numeric_value")
SEQUENCE_NAMES = ("sequence", "tokens", "input_ids", "token_ids", "ids", "text", "frames", "values", "features")
NO_ID = "none"
"""What --id_column says where a column called id, or the like, is none."""
SET_NAME = "set_index"
NEVER_FEATURES = ("label", "target", "class", "outcome", "index", "level_0")


def detect_layout(columns: Mapping[str, Column], source: SourceSettings) -> Layout:
    """The layout of all files together; a column that some file lacks is found out by `check_schema`."""
    given = _Given(columns, source)
    of_events, of_rows, of_table = (
        source.variable_column or source.value_column,
        source.sequence_column,
        source.feature_columns,
    )
    if source.kind in ("auto", "events") and not (of_rows or of_table) and (layout := _as_events(given)):
        return layout
    if source.kind in ("auto", "tokens", "vectors") and not (of_events or of_table) and (layout := _as_rows(given)):
        return layout
    if source.kind in ("auto", "vectors") and not (of_events or of_rows) and (layout := _as_long_vectors(given)):
        return layout
    raise DataError(
        f"{given.where}: no {'sequences' if source.kind == 'auto' else source.kind} recognised in its columns "
        f"({given.listing()}){given.hint()}. Name them with --sequence_column, or --id_column, --time_column and "
        f"--variable_column, --value_column or --feature_columns."
    )


class _Given:
    """The columns at hand and what the user said of them."""

    def __init__(self, columns: Mapping[str, Column], source: SourceSettings) -> None:
        self.every = {name: column.type for name, column in columns.items()}
        self.where = str(next(iter(columns.values())).path) if columns else str(source.data_dir)
        self.source = source
        self.types = {name: kind for name, kind in self.every.items() if not STRAY_INDEX.fullmatch(name)}
        for flag in ("sequence_column", "id_column", "time_column", "variable_column", "value_column"):
            if (name := getattr(source, flag)) and (flag, name) != ("id_column", NO_ID):
                self.require(name, f"--{flag}")
        self.label = source.label_column if source.label_path is None else None
        if self.label:
            self.require(self.label, "--label_column")

    def require(self, name: str, flag: str) -> None:
        """A column that a flag names must be there; even a stray index is taken where it is asked for."""
        if name not in self.every:
            close = closest(name, self.every)
            raise DataError(f"{self.where}: {flag} {name!r} is not one of its columns ({self.listing()}){close}")
        self.types[name] = self.every[name]

    def pick(self, part: str, names: Iterable[str]) -> str | None:
        """The column that the part's flag names, or else the first one with a common name and a fitting type."""
        families, _ = ALLOWED[part]
        fitting = [name for name, kind in self.types.items() if family(kind) in families and name != self.label]
        lowered = {name.lower(): name for name in reversed(fitting)}
        return getattr(self.source, f"{part}_column") or next((lowered[n] for n in names if n in lowered), None)

    def identity(self) -> str | None:
        return None if self.source.id_column == NO_ID else self.pick("id", ID_NAMES)

    def time(self) -> str | None:
        return self.pick("time", TIME_NAMES)

    def text_times(self) -> list[str]:
        """Columns that are called like times and hold text, which is in no order."""
        return [name for name, kind in self.types.items() if name.lower() in TIME_NAMES and is_text(kind)]

    def listing(self) -> str:
        shown = [f"{name!r}: {kind}" for name, kind in list(self.every.items())[:20]]
        return ", ".join(shown) + (", ..." if len(self.every) > 20 else "") if shown else "it has none"

    def hint(self) -> str:
        """What keeps columns with a telling name or type from being taken."""
        hints = [f"; {name!r} is text: convert it to time stamps or numbers" for name in self.text_times()]
        hints += [
            f"; {name!r} holds lists of text: number their entries, or join them to one text a row for --tokenizer words"
            for name, kind in self.types.items()
            if family(kind) == "list of text"
        ]
        if (variable := self.pick("variable", VARIABLE_NAMES)) and self.time() and not self.pick("value", VALUE_NAMES):
            hints.append(
                f"; {variable!r} looks like the variable of events, but their value is not found: name --value_column"
            )
        return "".join(hints)


def _as_events(given: _Given) -> Layout | None:
    variable = given.pick("variable", VARIABLE_NAMES)
    time = given.time()
    value = given.pick("value", VALUE_NAMES)
    if variable is None or time is None or (value is None and variable != "code"):
        return None
    identity = given.identity()
    in_minutes = is_time(given.types[time]) or time.lower() in ("minute", "minutes")
    return Layout(
        kind="events",
        form="table" if identity else "files",
        id=identity,
        time=time,
        variable=variable,
        value=value,
        set_index=SET_NAME if SET_NAME in given.types else None,
        label=given.label,
        time_unit="minutes" if in_minutes else time,
    )


def _as_rows(given: _Given) -> Layout | None:
    identity = given.identity()
    sequence = given.source.sequence_column or _guess_sequence(given, identity)
    if sequence is None:
        return None
    column = given.types[sequence]
    text = is_text(column)
    natural: Kind = "tokens" if text or family(column) in TOKEN_LISTS else "vectors"
    kind = natural if given.source.kind == "auto" else given.source.kind
    if family(column) not in ALLOWED["text" if text and kind == "tokens" else kind][0]:
        of_kind = "" if given.source.kind == "auto" else f" of {kind}"
        wanted = ALLOWED["vectors" if given.source.kind == "auto" else kind][1]
        or_text = ", or text" if given.source.kind != "vectors" else ""
        raise DataError(
            f"{given.where}: column {sequence!r} is {column}, but sequences{of_kind} must be {wanted}{or_text}. Choose "
            f"another --sequence_column or --kind ({given.listing()})."
        )
    if text and given.source.tokenizer is None:
        raise DataError(
            f"{given.where}: column {sequence!r} is text: say how to cut it with --tokenizer words, characters, bytes or "
            f"the path of a tokenizer.json. If it names the sequences of a long table: --id_column {sequence}. If it names "
            f"the variables of one: --kind events with --id_column, --time_column, --variable_column and --value_column."
        )
    return Layout(
        kind=kind,
        form="rows",
        sequence=sequence,
        is_text=text,
        id=identity if identity != sequence else None,
        label=given.label,
    )


def _guess_sequence(given: _Given, identity: str | None) -> str | None:
    kind, tokenizer = given.source.kind, given.source.tokenizer
    wanted = {"tokens": TOKEN_LISTS, "vectors": VECTOR_LISTS}.get(kind, VECTOR_LISTS)
    others = {name: column for name, column in given.types.items() if name not in (identity, given.label)}
    lists = [name for name, column in others.items() if is_list(column) and family(column) in wanted]
    parts_of_tables = (*TIME_NAMES, *VARIABLE_NAMES)
    texts = [name for name, column in others.items() if is_text(column) and name.lower() not in parts_of_tables]
    texts = texts if kind != "vectors" else []
    if tokenizer and texts:
        candidates = texts
    else:
        candidates = lists or ([] if identity and given.time() else texts)
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    named = [name for name in SEQUENCE_NAMES if name in candidates]
    if not named:
        shown = ", ".join(map(repr, candidates))
        raise DataError(
            f"{given.where}: several columns could be the sequence ({shown}); choose with --sequence_column."
        )
    return named[0]


def _as_long_vectors(given: _Given) -> Layout | None:
    identity, time = given.identity(), given.time()
    if given.source.feature_columns:
        names = (name.strip() for name in given.source.feature_columns.split(","))
        features = tuple(dict.fromkeys(name for name in names if name))
        for name in features:
            given.require(name, "--feature_columns")
    else:
        taken = {identity, time, given.label}
        features = tuple(
            name
            for name, kind in given.types.items()
            if name not in taken
            and name.lower() not in (*NEVER_FEATURES, *ID_NAMES)
            and family(kind) in ("integer", "float")
        )
    if not features or (identity is None and time is None) or (time is None and given.text_times()):
        return None
    form: Literal["table", "files"] = "table" if identity else "files"
    return Layout(kind="vectors", form=form, id=identity, time=time, features=features, label=given.label)
