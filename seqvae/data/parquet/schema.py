"""The role of each column: the schemas of Parquet files and the user's flags -> a Layout, and the check of each file against it.

Detection looks at types first and at common names second. Where both leave an id open, it looks at whether the first values of a
column repeat, and where a column of text may name the variables of events, at some sequences. Every role can be overruled by its
flag.
"""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat

from seqvae.config.data import SourceSettings
from seqvae.console import shell_word
from seqvae.data.description import Kind
from seqvae.data.storage import DataFile, readable
from seqvae.errors import DataError
from seqvae.text import counted

WRITTEN_DATE = re.compile(r"\s*\d{1,4}([-/.] ?|\s)(\d{1,2}|[A-Za-z]{3,9})([-/.,]\s?|\s)\d{1,4}(\D|$)")
"""A day, in figures or with the name of its month, at the beginning of a text."""
STRAY_INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+")
"""Columns that pandas makes of an index without a name."""
ID_NAMES = ("id", "ts_id", "subject_id", "sequence_id", "series_id", "patient_id", "stay_id", "user_id", "unique_id")
TIME_NAMES = (
    "time",
    "minute",
    "minutes",
    "timestamp",
    "datetime",
    "hour",
    "hours",
    "seconds",
    "date",
    "t",
    "ts",
    "step",
)
ID_ENDINGS = ("id", "no", "nr", "number", "uuid")
"""Last words of columns that number things: Device No., Serial Number."""
VARIABLE_NAMES = ("variable", "code", "parameter", "item")
VALUE_NAMES = ("value", "numeric_value")
SEQUENCE_NAMES = ("sequence", "tokens", "input_ids", "token_ids", "ids", "text", "frames", "values", "features")
SKIP = "or leave such files out with --on_bad_files skip"
NO_ID = "none"
"""The value of --id_column for files without one."""
SET_NAME = "set_index"
SHOWN_ROLES = ("time", "variable", "value", SET_NAME, "label")
MEASURED_NAMES = (
    *VARIABLE_NAMES,
    *("analyte", "channel", "measurand", "measure", "measurement", "metric", "quantity", "sensor", "signal", "vital"),
)
"""Last words of columns that say what a value measures, a "name" behind them aside: Sensor, signal_name."""
NEVER_FEATURES = ("label", "target", "class", "outcome", "index", "level_0")
PEEK_ROWS = 10_000
"""Rows of one file that are looked at where names leave it open which column is the id."""
PEEK_SEQUENCES = 100
"""Sequences of one file that are looked at where names leave it open whether a column of text names the variables of events."""
SEARCHED_ROWS = 1_000_000
"""Rows that these sequences are looked for in; in larger files they may be cut short."""
VARYING = 0.1
"""Share of these sequences in which such a column changes; one that changes in fewer describes the sequence."""
SHARED_TIMES, TOLD_APART = 0.1, 0.9
"""Share of rows that have their time in common with another of the sequence, and of these that such a column tells apart: then each
row is one of the things that were measured at that time."""
FEW_FILES = 3
"""Up to one file for each split: then no file is a sequence of its own."""

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
"""Role, or kind of the sequence column -> the families of types that it may have, and their name in a message."""


class RowGroup(NamedTuple):
    """Rows that a Parquet file holds together."""

    rows: int
    bytes: int


class Footer(NamedTuple):
    """The footer of a readable Parquet file."""

    path: DataFile
    schema: pa.Schema
    groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)


class Column(NamedTuple):
    """The type that most files give a column."""

    type: pa.DataType
    path: DataFile
    """The first file with this type."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The column of each role."""

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
    """Minutes where the time's column says so, else the column's name: the unit is then the user's."""
    id_names_rows: bool = False
    """The id was found by its values, which are all different: it names rows, but does not decide on splits."""
    label_names: tuple[str, ...] = ()
    """What the labels 0, 1, ... are called, where the files say so."""
    code_names: tuple[tuple[str, str], ...] = ()
    """Numbers in the variable column, as text, and what they stand for, where a table beside the files says so."""

    @property
    def roles(self) -> dict[str, str]:
        """Role -> column; the features are 0, 1, ... The order is that in which missing columns are reported."""
        names = ("sequence", "id", "time", "variable", "value", "set_index", "label")
        roles = {name: column for name in names if (column := getattr(self, name)) is not None}
        return roles | {str(number): column for number, column in enumerate(self.features)}

    @property
    def columns(self) -> list[str]:
        """Return every column that is read, once."""
        return list(dict.fromkeys(self.roles.values()))

    def role_of(self, column: str) -> str:
        role = next(role for role, name in self.roles.items() if name == column)
        return "feature" if role.isdigit() else role

    def describe(self) -> str:
        """Return what was detected, in one line."""
        where = {
            "rows": f"one sequence a row in column {self.sequence!r}" + (" (text)" if self.is_text else ""),
            "table": f"long table, id {self.id!r}",
            "files": "one sequence a file, id = the file's name",
        }[self.form]
        parts = [f"{self.kind}: {where}"]
        parts += [f"{role} {column!r}" for role, column in self.roles.items() if role in SHOWN_ROLES]
        if self.form == "rows":
            parts.append(f"id {self.id!r}" if self.id else "ids are row numbers")
        if self.features:
            shown = ", ".join(map(repr, self.features[:6])) + (", ..." if len(self.features) > 6 else "")
            number = len(self.features)
            what = (
                f"{counted(number, 'variable')}, a column each" if self.kind == "events" else counted(number, "feature")
            )
            parts.append(f"{what} ({shown})")
        return ", ".join(parts)


# --- Types ----------------------------------------------------------------------------------------------------------


@cache  # a folder of many files has the same few types again and again
def family(column: pa.DataType) -> str:
    """Return the name of a group of types that may replace one another across files: integer, float, text, time, null, or list of
    one of these. Any other type is a group of its own.

    >>> family(pa.list_(pa.uint8())), family(pa.dictionary(pa.int32(), pa.string())), family(pa.bool_())
    ('list of integer', 'text', 'float')
    """
    if is_list(column):
        return f"list of {family(column.value_type)}"
    if is_text(column):
        return "text"
    if pat.is_integer(column):
        return "integer"
    if pat.is_floating(column) or pat.is_boolean(column) or pat.is_decimal(column):
        return "float"
    return "time" if is_time(column) else "null" if pat.is_null(column) else str(column)


def is_text(column: pa.DataType) -> bool:
    value = column.value_type if pat.is_dictionary(column) else column
    return bool(pat.is_string(value) or pat.is_large_string(value) or pat.is_string_view(value))


def is_list(column: pa.DataType) -> bool:
    return bool(pat.is_list(column) or pat.is_large_list(column) or pat.is_fixed_size_list(column))


def is_time(column: pa.DataType) -> bool:
    return bool(pat.is_timestamp(column) or pat.is_date(column) or pat.is_duration(column))


def common_columns(footers: Sequence[Footer]) -> dict[str, Column]:
    """Return every column of any file, with the type that most files give it, as wide as the widest of these."""
    seen: dict[str, list[Column]] = {}
    for footer in footers:
        for field in footer.schema:
            seen.setdefault(field.name, []).append(Column(field.type, footer.path))
    common = {}
    for name, columns in seen.items():
        telling = [column for column in columns if not family(column.type).endswith("null")] or columns
        votes = Counter(_rough_family(column.type) for column in telling)
        winner = votes.most_common(1)[0][0]  # of equals the one that came first
        members = [column for column in telling if _rough_family(column.type) == winner]
        common[name] = next((one for one in members if family(one.type).endswith("float")), members[0])
    return common


def _rough_family(column: pa.DataType) -> str:
    """Return the family with integers and floats in one: integers widen to floats."""
    return family(column).replace("integer", "number").replace("float", "number")


def check_schema(footer: Footer, layout: Layout, columns: Mapping[str, Column]) -> Footer:
    """Return the footer of a file that has the columns of the layout; refuse one that lacks a column, or in which a column is of
    another family than in most files."""
    for name in layout.columns:
        common, found = columns[name], footer.schema.names.count(name)
        if found == 0:
            raise DataError(
                f"{footer.path}: column {name!r} is missing, but {common.path.name} has it"
                f"{closest(name, footer.schema.names)} Add or rename it, {SKIP}."
            )
        if found > 1:
            raise DataError(f"{footer.path}: column {name!r} stands there {found} times. Rename all but one, {SKIP}.")
        here = footer.schema.field(name).type
        one_is_null = family(here).endswith("null") or family(common.type).endswith("null")
        if not one_is_null and _rough_family(here) != _rough_family(common.type):
            raise DataError(
                f"{footer.path}: column {name!r} is {here}, but {common.type} in {common.path.name}. "
                f"Convert one of them, {SKIP}."
            )
        role = layout.role_of(name)
        families, wanted = ALLOWED[role if role != "sequence" else "text" if layout.is_text else layout.kind]
        if family(here) not in families:
            flag = {"feature": "--feature_columns", "set_index": None}.get(role, f"--{role}_column")
            how = " (pandas.to_datetime)" if role == "time" and is_text(here) else ""
            raise DataError(
                f"{footer.path}: column {name!r} is {here}, but must hold {wanted}. "
                + (f"Convert it{how}, or choose another with {flag}." if flag else "Convert or rename it.")
            )
    return footer


def closest(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence about a name that is missing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


# --- Detection ------------------------------------------------------------------------------------------------------


class _Candidates:
    """The columns of all files, and for each role the column that its flag names, or else the first with a common name and a
    type of the role. Of time stamps a lone one is the time, whatever it is called."""

    def __init__(self, columns: Mapping[str, Column], source: SourceSettings, files: int) -> None:
        every = {name: column.type for name, column in columns.items()}
        self.where = str(next(iter(columns.values())).path) if columns else str(source.data_dir)
        shown = [f"{name!r}: {kind}" for name, kind in list(every.items())[:20]]
        self.listing = ", ".join(shown) + (", ..." if len(every) > 20 else "") if shown else "it has none"
        self.source = source
        self.types = {name: kind for name, kind in every.items() if not STRAY_INDEX.fullmatch(name)}
        self._columns = columns
        for flag in ("sequence_column", "id_column", "time_column", "variable_column", "value_column"):
            if (name := getattr(source, flag)) and (flag, name) != ("id_column", NO_ID):
                self.require(name, f"--{flag}")
        self.label = source.label_column if source.label_path is None else None
        if self.label:
            self.require(self.label, "--label_column")
        self.id = None if source.id_column == NO_ID else self._pick("id", ID_NAMES)
        self.time, self.variable = self._pick("time", TIME_NAMES), self._pick("variable", VARIABLE_NAMES)
        self.value = self._pick("value", VALUE_NAMES)
        self.stamps = [name for name, kind in self.types.items() if is_time(kind) and name not in (self.id, self.label)]
        """Columns of time stamps."""
        if self.time is None and len(self.stamps) == 1:
            self.time = self.stamps[0]
        self.features = self._features()
        texts = [name for name, kind in self.types.items() if is_text(kind)]
        self.text_times = [name for name in texts if plain_name(name) in TIME_NAMES]
        """Columns with the name or the values of a time that hold text, which has no order."""
        if self.time is None and self.features:
            self.text_times += [name for name in texts if name not in self.text_times and self._holds_dates(name)]
        if self.id is None and source.id_column is None and self._is_table():
            self.id = self._id_of_table(files)
        if source.kind in ("auto", "events") and self._is_table() and not source.feature_columns:
            self._find_variable()

    def require(self, name: str, flag: str) -> None:
        """Refuse a flag that names no column; a stray index is a column where a flag names it."""
        if name not in self._columns:
            close = closest(name, self._columns)
            raise DataError(f"{self.where}: {flag} {name!r} is not one of its columns ({self.listing}){close}")
        self.types[name] = self._columns[name].type

    @property
    def is_table(self) -> bool:
        """Return whether rows are steps of sequences, by their columns or by the flags that were given."""
        if self.source.id_column == NO_ID:
            return self.time is not None and bool(self.features) and not self.unique_texts()
        if self.time is None and self.text_times and self.features:
            return not self.unique_texts(but=self.text_times[0])
        if self.id is None or self._is_unique(self.id):
            return False
        return self.time is not None or (self.source.id_column is not None and bool(self.features))

    def unique_texts(self, but: str | None = None) -> list[str]:
        """Return the columns of text, except one, whose first values are all different."""
        others = [name for name, kind in self.types.items() if is_text(kind) and name not in (but, self.label)]
        return [name for name in others if self._is_unique(name)]

    def _pick(self, role: str, names: Iterable[str]) -> str | None:
        families, _ = ALLOWED[role]
        fitting = [name for name, kind in self.types.items() if family(kind) in families and name != self.label]
        given: str | None = getattr(self.source, f"{role}_column")
        for form in (str.lower, plain_name):
            found = {form(name): name for name in reversed(fitting)}
            given = given or next((found[name] for name in names if name in found), None)
        return given

    def _features(self) -> tuple[str, ...]:
        """Return the columns of numbers that make up a step of a long table."""
        if self.source.feature_columns:
            names = (name.strip() for name in self.source.feature_columns.split(","))
            features = tuple(dict.fromkeys(name for name in names if name))
            for name in features:
                self.require(name, "--feature_columns")
            return features
        return tuple(
            name
            for name, kind in self.types.items()
            if name not in (self.id, self.time, self.label)
            and name.lower() not in (*NEVER_FEATURES, *ID_NAMES)
            and family(kind) in ("integer", "float")
        )

    def _is_table(self) -> bool:
        """Return whether there is a time beside numbers, and nothing that would be a sequence in itself."""
        has_lists = any(is_list(kind) for kind in self.types.values())
        is_of_rows = self.source.sequence_column is not None or self.source.tokenizer is not None
        return self.time is not None and bool(self.features) and not has_lists and not is_of_rows

    def _id_of_table(self, files: int) -> str | None:
        """Return the column that tells the sequences of a long table apart: whose name ends like a number's, or else the only
        one of text, and whose values repeat. None: each file is a sequence."""
        taken = (self.time, self.variable, self.value, self.label, SET_NAME)
        fitting = [n for n, kind in self.types.items() if family(kind) in ALLOWED["id"][0] and n not in taken]
        if self.source.feature_columns:
            fitting = [name for name in fitting if name not in self.features]
        seen = {name: self._seen(name) for name in fitting}
        # Where files are many, a value that is the same throughout a file tells nothing that the file does not.
        least = 1 if files <= FEW_FILES else 2
        distinct = {name: one.distinct for name, one in seen.items() if one and least <= one.distinct <= one.rows / 2}
        numbered = [name for name in distinct if is_numbered(name)]
        texts = [name for name in distinct if is_text(self.types[name]) and name not in self.text_times]
        found = numbered or (texts if files <= FEW_FILES else [])
        if len(found) > 1:
            advice = f"--id_column {shell_word(found[0])}"
            if (value := self._lone_value()) and self.source.kind in ("auto", "events"):
                # Sequences are many, what is measured in them is little.
                name, *others = sorted(found, key=lambda name: -distinct[name])
                advice += f", or, where {others[0]!r} says what was measured, "
                advice += f"--id_column {shell_word(name)} {_flags_of_events(others[0], value)}"
            raise DataError(
                f"{self.where}: several columns could name the sequence that a row belongs to ({', '.join(map(repr, found))}). "
                f"Choose with {advice}, or say --id_column {NO_ID} where each file is one sequence."
            )
        if found and not self.source.feature_columns:
            self.features = tuple(name for name in self.features if name != found[0])
        return found[0] if found else None

    def _lone_value(self) -> str | None:
        """Return the column of the values, if a long table has but one that can hold them."""
        if self.source.value_column:
            return self.value
        others = (self.variable, SET_NAME)
        numbers = [name for name in self.features if name not in others and not is_numbered(name)]
        return numbers[0] if len(numbers) == 1 else None

    def _find_variable(self) -> None:
        """Find the column of text that says what a lone column of numbers measures, or stop where that is not clear."""
        value, is_given = self._lone_value(), self.source.variable_column is not None
        if value is None or (self.variable and self.value) or (self.variable == "code" and not is_given):
            return
        if is_given:
            self.value = value
            return
        taken = (self.id, self.time, self.label, *self.text_times)
        texts = [name for name, kind in self.types.items() if is_text(kind) and name not in taken]
        texts = [name for name in texts if name.lower() not in NEVER_FEATURES]
        if not texts or (rows := self._rows_of_sequences(texts)) is None:
            return
        signs = {name: _sign_of_variable(rows, number) for number, name in enumerate(texts)}
        varying = {name: is_clear for name, is_clear in signs.items() if is_clear is not None}
        named = [name for name in varying if is_measured(name)]
        clear = named or [name for name, is_clear in varying.items() if is_clear]
        if len(clear) == 1:
            self.variable, self.value = clear[0], value
        elif varying:
            shown = " or ".join(map(repr, clear or varying))
            as_events = _flags_of_events(next(iter(clear or varying)), value)
            kind = "--kind events " if self.source.kind == "events" else ""
            raise DataError(
                f"{self.where}: {shown} may say what {value!r} measures. If so, choose events: {as_events}. If it says something "
                f"else: {kind}--feature_columns {shell_word(value)}."
            )

    def _rows_of_sequences(self, texts: Sequence[str]) -> pa.Table | None:
        """Return all rows of the first sequences of one file: columns id, time, and 0, 1, ... for those of text. None where one of
        them is missing, or the file cannot be read (the build says why)."""
        roles = {name: self._columns[name] for name in (self.id, self.time, *texts) if name is not None}
        try:
            with pq.ParquetFile(readable(self._columns[texts[0]].path)) as file:
                if not file.metadata.num_rows or any(file.schema_arrow.names.count(name) != 1 for name in roles):
                    return None
                first_ids, found, searched = None, [], 0
                for batch in file.iter_batches(columns=list(roles)):
                    columns = {str(n): batch.column(name).cast(pa.large_string()) for n, name in enumerate(texts)}
                    ids = pa.repeat(pa.scalar(0), len(batch)) if self.id is None else batch.column(self.id)
                    ids = ids.cast(pa.large_string()) if is_text(ids.type) else ids
                    if first_ids is None:
                        first_ids = pc.unique(ids.drop_null()).slice(0, PEEK_SEQUENCES)
                    rows = pa.table({"id": ids, "time": batch.column(self.time)} | columns)
                    found.append(rows.filter(pc.is_in(ids, value_set=first_ids)))
                    searched += len(batch)
                    if searched >= SEARCHED_ROWS:
                        break
            return pa.concat_tables(found)
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            return None

    def _is_unique(self, name: str) -> bool:
        seen = self._seen(name)
        return seen is not None and seen.distinct == seen.rows > 1

    def repeats(self, name: str) -> bool:
        """Return whether the first values of a column are few, as those of names and categories are."""
        seen = self._seen(name)
        return seen is not None and seen.distinct <= seen.rows / 2

    def _holds_dates(self, name: str) -> bool:
        values = self._first_values(name)
        known = values.drop_null().slice(0, PEEK_SEQUENCES).to_pylist() if values is not None else []
        return bool(known) and all(WRITTEN_DATE.match(str(value)) for value in known)

    def _seen(self, name: str) -> "_Seen | None":
        """Count the first values of a column; None where some are missing, or the file cannot be read."""
        values = self._first_values(name)
        if values is None or values.null_count:
            return None
        return _Seen(len(values), int(pc.count_distinct(values).as_py()))

    def _first_values(self, name: str) -> pa.Array | None:
        """Return the first values of a column; None where the file cannot be read (the build says why)."""
        try:
            with pq.ParquetFile(readable(self._columns[name].path)) as file:
                batch = next(file.iter_batches(batch_size=PEEK_ROWS, columns=[name]), None)
            if batch is None:
                return None
            values = batch.column(name)
            return values.cast(pa.large_string()) if is_text(values.type) else values  # a dictionary cannot be counted
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            return None


class _Seen(NamedTuple):
    """The properties that the first values of a column show."""

    rows: int
    distinct: int


def plain_name(name: str) -> str:
    """Return a column's name without its unit and its punctuation.

    >>> plain_name("ts (UTC)"), plain_name("Device No."), plain_name("Time[s]")
    ('ts', 'device_no', 'time')
    """
    without_unit = re.sub(r"\s*[(\[].*?[)\]]", "", name)
    return re.sub(r"[\W_]+", "_", without_unit.lower()).strip("_")


def is_numbered(name: str) -> bool:
    """Return whether a column is called like one that numbers things.

    >>> is_numbered("Device No."), is_numbered("doc_id"), is_numbered("notes")
    (True, True, False)
    """
    return plain_name(name).rpartition("_")[2] in ID_ENDINGS


def is_measured(name: str) -> bool:
    """Return whether a column is called like one that says what was measured.

    >>> is_measured("sensor name"), is_measured("SensorName"), is_measured("Parameter"), is_measured("sensor status")
    (True, True, True, False)
    """
    words = plain_name(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)).removesuffix("_name").split("_")
    return words[-1] in MEASURED_NAMES


def _sign_of_variable(rows: pa.Table, number: int) -> bool | None:
    """Return whether a column of text clearly names what each row measures; None where it is clear that it does not."""
    name = str(number)
    of_id = rows.group_by("id").aggregate([(name, "count_distinct"), (name, "count")])
    several = pc.greater(of_id[f"{name}_count"], 1)
    changes = pc.greater(of_id[f"{name}_count_distinct"].filter(several), 1)
    distinct = int(pc.count_distinct(rows[name]).as_py())
    if distinct > len(rows) / 2 or (pc.mean(changes).as_py() or 0) < VARYING:
        return None
    times, both = (len(rows.group_by(keys).aggregate([])) for keys in (["id", "time"], ["id", "time", name]))
    shared = len(rows) - times
    return shared >= SHARED_TIMES * len(rows) and both - times >= TOLD_APART * shared


def _flags_of_events(variable: str, value: str) -> str:
    return f"--variable_column {shell_word(variable)} --value_column {shell_word(value)}"


def detect_layout(columns: Mapping[str, Column], source: SourceSettings, files: int = 1) -> Layout:
    """Return the layout of all `files` together; that some file lacks a column is found by `check_schema`."""
    found = _Candidates(columns, source, files)
    of_events = source.variable_column or source.value_column
    of_rows, of_table = source.sequence_column, source.feature_columns
    time, variable, value = found.time, found.variable, found.value
    may_be_events = source.kind in ("auto", "events") and not (of_rows or of_table)
    if may_be_events and time and variable and (value or variable == "code"):
        return Layout(
            kind="events",
            form="table" if found.id else "files",
            id=found.id,
            time=time,
            variable=variable,
            value=value,
            set_index=SET_NAME if SET_NAME in found.types else None,
            label=found.label,
            time_unit=_time_unit(found, time),
        )
    if source.kind in ("auto", "tokens", "vectors") and not (of_events or of_table) and (layout := _rows_layout(found)):
        return layout
    is_wide = source.kind != "tokens" and not (of_events or of_rows)
    if is_wide and (layout := _table_layout(found, "events" if source.kind == "events" else "vectors")):
        return layout
    hints = [
        f"; {name!r} is text: convert it to time stamps or numbers (pandas.to_datetime)" for name in found.text_times
    ]
    hints += [
        f"; {name!r} holds lists of text: number their entries, or join them to one text a row for --tokenizer words"
        for name, kind in found.types.items()
        if family(kind) == "list of text"
    ]
    if time is None and len(found.stamps) > 1:
        shown = ", ".join(map(repr, found.stamps))
        hints.append(f"; several could be the time ({shown}): choose with --time_column {shell_word(found.stamps[0])}")
    if variable and time and not value:
        hints.append(
            f"; {variable!r} looks like the variable of events, but their value is not found: name --value_column"
        )
    raise DataError(
        f"{found.where}: no {'sequences' if source.kind == 'auto' else source.kind} recognised in its columns "
        f"({found.listing}){''.join(hints)}.{_flags_that_name(found)}"
    )


def _flags_that_name(found: _Candidates) -> str:
    """Return the advice which flags to name columns with: those whose columns are not known yet."""
    source = found.source
    if found.text_times and not found.time:
        return ""
    if source.kind == "tokens":
        return " Name their column with --sequence_column."
    table = [] if found.id or source.id_column else ["--id_column"]
    table += [] if found.time else ["--time_column"]
    table += [] if found.features else ["--feature_columns, or --variable_column and --value_column"]
    given = (source.id_column, source.time_column, source.variable_column, source.value_column, source.feature_columns)
    if any(given) or found.time or source.kind == "events":
        return f" Name them with {', '.join(table)}." if table else ""
    return f" Name them with --sequence_column, or, where a row is a step, with {', '.join(table)}."


def _time_unit(found: _Candidates, time: str) -> str:
    """Return the unit of times: minutes, or for numbers of another unit, the column's name."""
    return "minutes" if is_time(found.types[time]) or time.lower() in ("minute", "minutes") else time


def _rows_layout(found: _Candidates) -> Layout | None:
    """Return the layout of files with one sequence a row, or None where no column holds sequences."""
    source, sequence = found.source, found.source.sequence_column
    if sequence is None:
        others = {name: column for name, column in found.types.items() if name not in (found.id, found.label)}
        families = TOKEN_LISTS if source.kind == "tokens" else VECTOR_LISTS
        candidates = [name for name, column in others.items() if is_list(column) and family(column) in families]
        if source.kind != "vectors":
            names_in_tables = (*TIME_NAMES, *VARIABLE_NAMES)
            texts = [n for n, kind in others.items() if is_text(kind) and plain_name(n) not in names_in_tables]
            # Of several, what is called like a number or a label is not the text.
            texts = [n for n in texts if not is_numbered(n) and n.lower() not in NEVER_FEATURES] or texts
            if len(texts) > 1:  # names, categories and dates are none, unless a text is known to be among them
                rare = [n for n in texts if n not in found.text_times and not found.repeats(n)]
                texts = rare if rare or source.tokenizer is None else texts
            if (source.tokenizer and texts) or (not candidates and not found.is_table):
                candidates = texts
        if not candidates:
            return None
        named = candidates if len(candidates) == 1 else [name for name in SEQUENCE_NAMES if name in candidates]
        if not named:
            shown = ", ".join(map(repr, candidates))
            raise DataError(
                f"{found.where}: several columns could be the sequence ({shown}); choose with --sequence_column "
                f"{shell_word(candidates[0])} or another."
            )
        sequence = named[0]
    column = found.types[sequence]
    text = is_text(column)
    natural: Kind = "tokens" if text or family(column) in TOKEN_LISTS else "vectors"
    kind = natural if source.kind == "auto" else source.kind
    if family(column) not in ALLOWED["text" if text and kind == "tokens" else kind][0]:
        of_kind = "" if source.kind == "auto" else f" of {kind}"
        wanted = ALLOWED["vectors" if source.kind == "auto" else kind][1]
        or_text = ", or text" if source.kind != "vectors" else ""
        raise DataError(
            f"{found.where}: column {sequence!r} is {column}, but sequences{of_kind} must be {wanted}{or_text}. Choose "
            f"another --sequence_column or --kind ({found.listing})."
        )
    if text and source.tokenizer is None:
        raise DataError(
            f"{found.where}: column {sequence!r} is text: say how to cut it with --tokenizer words, characters, bytes or "
            f"the path of a tokenizer.json.{_other_uses(found, sequence)}"
        )
    identity, names_rows = found.id if found.id != sequence else None, False
    if identity is None and source.id_column is None and len(unique := found.unique_texts(but=sequence)) == 1:
        identity, names_rows = unique[0], True
    return Layout(
        kind=kind,
        form="rows",
        sequence=sequence,
        is_text=text,
        id=identity,
        label=found.label,
        id_names_rows=names_rows,
    )


def _other_uses(found: _Candidates, text: str) -> str:
    """Return what else a column of text may be, where there are columns beside it that a long table has."""
    source, uses = found.source, ""
    if source.id_column is None and (found.time or found.text_times or found.features):
        uses += f" If it names the sequences of a long table: --id_column {shell_word(text)}."
    if source.variable_column is None and (found.time or found.text_times) and found.features:
        uses += f" If it names the variables of one: --variable_column {shell_word(text)} --value_column "
        uses += f"{shell_word(found.features[0])}."
    return uses


def _table_layout(found: _Candidates, kind: Literal["vectors", "events"]) -> Layout | None:
    """Return the layout of a long table with a column for each feature of a vector, or for each variable of events."""
    if not found.features or (found.id is None and found.time is None) or (found.time is None and found.text_times):
        return None
    if kind == "events" and (found.time is None or (found.variable and not found.source.feature_columns)):
        return None
    return Layout(
        kind=kind,
        form="table" if found.id else "files",
        id=found.id,
        time=found.time,
        set_index=SET_NAME if kind == "events" and SET_NAME in found.types else None,
        features=tuple(name for name in found.features if kind == "vectors" or name != SET_NAME),
        label=found.label,
        time_unit=_time_unit(found, found.time) if found.time else "",
    )


def class_names(footers: Iterable[Footer], label: str) -> tuple[str, ...]:
    """Return what the numbers in a column of labels stand for, where a file was written by the library `datasets`, which keeps the
    names of a ClassLabel in the schema's metadata."""
    for footer in footers:
        try:
            about = json.loads((footer.schema.metadata or {})[b"huggingface"])
            names = about["info"]["features"][label]["names"]
        except (KeyError, TypeError, ValueError):  # written by another program, or not a ClassLabel
            continue
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()
