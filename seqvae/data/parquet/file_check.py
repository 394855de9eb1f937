"""Which files of a data set can be used together, and why each of the others cannot.

Footers first (and pages, where asked for), then every schema against what was detected of all of them. Nothing here stops
at the first bad file: whether bad files end a run is for the caller to say.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seqvae.config.data import SourceSettings
from seqvae.data.parquet.discovery import DataFiles, Footer, find_files, read_footer
from seqvae.data.parquet.reader import BlockReader, read_batches
from seqvae.data.parquet.schema import STRAY_INDEX, Layout, check_schema, common_columns, detect_layout, role_of
from seqvae.errors import DataError
from seqvae.text import counted, some


class Checked(NamedTuple):
    """Files that passed a check, and one sentence for each that did not."""

    footers: list[Footer]
    refused: list[str]


class ColumnRow(NamedTuple):
    """A column of the files as a user sees it."""

    column: str
    type: str
    part: str | None
    """What it is to the sequences; None: not used, or not known."""
    files: int
    """How many files have it."""


class Survey(NamedTuple):
    """What can be said of files from which no cache can be built."""

    files: int
    bytes: int
    columns: tuple[ColumnRow, ...]
    refused: tuple[str, ...]


def read_footers(data: DataFiles, *, read_pages: bool) -> Checked:
    """The files that are readable Parquet; their footer says so, or every page of them does."""
    checked = Checked([], [])
    for path in data_paths(data):
        try:
            footer = read_footer(path)
            if read_pages:
                _read_through(footer)
            checked.footers.append(footer)
        except DataError as error:
            checked.refused.append(str(error))
    return checked


def detect_and_check(footers: Sequence[Footer], source: SourceSettings) -> tuple[Layout, Checked]:
    """The layout of all files together, and those that have its columns with the right kind of thing in them."""
    columns = common_columns(footers)
    layout = detect_layout(columns, source)
    checked = Checked([], [])
    for footer in footers:
        try:
            check_schema(footer, layout, columns)
            checked.footers.append(footer)
        except DataError as error:
            checked.refused.append(str(error))
    return layout, checked


def list_columns(footers: Sequence[Footer], layout: Layout | None) -> tuple[ColumnRow, ...]:
    """Every column that some file has."""
    number_of = Counter(name for footer in footers for name in footer.schema.names)
    used = set(layout.columns) if layout else set()
    return tuple(
        ColumnRow(name, str(column.type), role_of(name, layout) if layout and name in used else None, number_of[name])
        for name, column in common_columns(footers).items()
    )


def survey_files(source: SourceSettings, *, read_pages: bool) -> Survey | None:
    """Every file that cannot be used, and the columns of the readable ones; None where there are no files.

    Pages are read where they are suspected, that is, after any bad file: it takes as long as a build.
    """
    try:
        data = find_files(str(source.data_dir))
    except DataError:
        return None
    readable, refused = read_footers(data, read_pages=read_pages)
    layout, full = None, [footer for footer in readable if footer.rows]
    if full:
        try:
            layout, fitting = detect_and_check(full, source)
            refused = refused + fitting.refused
        except DataError:
            pass  # nothing was detected: that is about all files together, not about one of them
    if refused and not read_pages:
        return survey_files(source, read_pages=True)
    paths = data_paths(data)
    return Survey(len(paths), bytes_of(paths), list_columns(readable, layout), tuple(refused))


def data_paths(data: DataFiles) -> list[Path]:
    return [path for paths in data.by_split.values() for path in paths]


def bytes_of(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())  # a link may lead nowhere


def _read_through(footer: Footer) -> None:
    """Read every page once, so that a file is left out whole or not at all."""
    for _ in read_batches(footer.path, footer.schema.names):
        pass


# Which of the files that were found can be used: readable, with rows, with the columns that most of them have.

SHOWN_FILES = 5


class Usable(NamedTuple):
    layout: Layout
    by_split: dict[str, list[Path]]
    rows: dict[Path, int]
    columns: tuple[ColumnRow, ...]
    bad_files: tuple[str, ...]
    """Why each file that cannot be used is left out."""
    notes: list[str]


def usable_files(data: DataFiles, source: SourceSettings) -> Usable:
    readable = read_footers(data, read_pages=source.on_bad_files == "skip")
    _refuse_bad(readable.refused, source)
    full = [footer for footer in readable.footers if footer.rows]
    if not full:
        bad = (
            f"The first reason: {readable.refused[0]}"
            if readable.refused
            else "Fill them, or point --data_dir elsewhere."
        )
        raise DataError(f"{source.data_dir}: none of its Parquet files has rows that can be read. {bad}")
    layout, fitting = detect_and_check(full, source)
    _refuse_bad(fitting.refused, source)
    if not fitting.footers:
        raise DataError(f"{source.data_dir}: all files are left out. The first reason: {fitting.refused[0]}")
    rows = {footer.path: footer.rows for footer in fitting.footers}
    by_split = {split: [path for path in paths if path in rows] for split, paths in data.by_split.items()}
    _refuse_equal_stems(by_split, layout)
    columns = list_columns(full, layout)
    bad_files = (*readable.refused, *fitting.refused)
    empty = [footer.path for footer in readable.footers if not footer.rows]
    return Usable(layout, by_split, rows, columns, bad_files, _notes(data, bad_files, empty, columns))


def _refuse_bad(reasons: list[str], source: SourceSettings) -> None:
    if reasons and source.on_bad_files == "error":
        more = f" {counted(len(reasons) - 1, 'more file')} cannot be used." if len(reasons) > 1 else ""
        raise DataError(reasons[0] + more)


def _refuse_equal_stems(by_split: dict[str, list[Path]], layout: Layout) -> None:
    """One file a sequence: two files of one split must not come out as the same sequence."""
    if layout.form != "files":
        return
    reader = BlockReader([path for paths in by_split.values() for path in paths], layout)
    for paths in by_split.values():
        met: dict[int | str, Path] = {}
        for path in paths:
            twin = met.setdefault(reader.stem_id(path), path)
            if twin != path:
                raise DataError(
                    f"{twin} and {path}: two files with the same sequence id {reader.stem_id(path)!r}, their name. Rename one."
                )


def _notes(data: DataFiles, bad: Sequence[str], empty: list[Path], columns: Sequence[ColumnRow]) -> list[str]:
    """What is left out, a sentence each."""
    notes = []
    if data.hidden:
        notes.append(
            f"{counted(len(data.hidden), 'file')} left out whose name, or that of a folder, begins with . or _"
        )
    if data.beside:
        notes.append(
            f"{counted(len(data.beside), 'file')} left out that belong to no split, the first: {data.beside[0]}"
        )
    if empty:
        notes.append(f"{counted(len(empty), 'file')} without rows, the first: {empty[0]}")
    if bad:
        files = sum(len(paths) for paths in data.by_split.values())
        notes.append(f"{len(bad):,} of {counted(files, 'file')} left out that cannot be used (--on_bad_files skip)")
        notes += [f"left out: {reason}" for reason in bad[:SHOWN_FILES]]
    unused = [repr(row.column) for row in columns if row.part is None and not STRAY_INDEX.fullmatch(row.column)]
    return [*notes, f"columns that are not used: {some(unused)}"] if unused else notes
