"""Which of the files that were found can be used: readable, with rows, with the columns that most of them have."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seqvae.config.data_settings import SourceSettings
from seqvae.data.building.encoded import counted
from seqvae.data.building.moments import some
from seqvae.data.parquet.column_types import STRAY_INDEX
from seqvae.data.parquet.file_check import ColumnRow, detect_and_check, list_columns, read_footers
from seqvae.data.parquet.files import DataFiles
from seqvae.data.parquet.layout import Layout
from seqvae.data.parquet.reading import BlockReader
from seqvae.errors import DataError

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
