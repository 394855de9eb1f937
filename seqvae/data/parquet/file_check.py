"""Which files of a data set can be used together, and why each of the others cannot.

Footers first (and pages, where asked for), then every schema against what was detected of all of them. Nothing here stops
at the first bad file: whether bad files end a run is for the caller to say.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seqvae.config.data_settings import SourceSettings
from seqvae.data.parquet.column_types import common_columns
from seqvae.data.parquet.detection import detect_layout
from seqvae.data.parquet.files import DataFiles, Footer, find_files, read_footer
from seqvae.data.parquet.layout import Layout, check_schema, role_of
from seqvae.data.parquet.reading import read_batches
from seqvae.errors import DataError


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
