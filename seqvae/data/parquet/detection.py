"""From the schemas of Parquet files and the user's flags to a Layout: which column plays which part.

Detection looks at types first and at common names second; every part can be overruled by its flag.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from seqvae.config.data_settings import SourceSettings
from seqvae.data.description import Kind
from seqvae.data.parquet.column_types import STRAY_INDEX, Column, family, is_list, is_text, is_time
from seqvae.data.parquet.layout import ALLOWED, TOKEN_LISTS, VECTOR_LISTS, Layout, closest
from seqvae.errors import DataError

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
