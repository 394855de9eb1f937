"""--data_dir -> the Parquet files that can be used, each with its split and a fingerprint, and why the others cannot be used.

Known layouts: train/ valid/ test/ as folders or as train.parquet ...; the same below data/ (MEDS); MEDS with
metadata/subject_splits.parquet; one pool without splits; a single file. A glob takes the union over its matches.
"""

import fnmatch
import glob
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.config.data import SourceSettings
from seqvae.console import shell_word
from seqvae.data.parquet.plain_files import PLAIN, is_plain
from seqvae.data.parquet.reader import BlockReader, read_batches
from seqvae.data.parquet.schema import (
    SKIP,
    STRAY_INDEX,
    Footer,
    Layout,
    RowGroup,
    check_schema,
    class_names,
    common_columns,
    detect_layout,
)
from seqvae.data.storage import (
    DataFile,
    Listed,
    RemoteFile,
    Store,
    ahead,
    in_order,
    open_store,
    readable,
    require_consent,
    trouble_with,
)
from seqvae.errors import DataError
from seqvae.files import is_remote
from seqvae.text import counted, some

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "tuning": "valid",
    "dev": "valid",
    "test": "test",
    "testing": "test",
    "held_out": "test",
}
SHARD = re.compile(r"-\d{5}-of-\d{5}.*")
"""The end of a name like train-00000-of-00002.parquet, after the name of the split."""
POOL = "pool"
SUFFIXES = (".parquet", ".pq")
VOCABULARY_INDEX = "code/vocab_index"
"""The column of metadata/codes.parquet with the number that stands for a code in data that MEDS_transforms has normalised."""
TAIL_BYTES = 4096
"""The end of a Parquet file holds its footer; a digest of this much tells a rewritten file from an untouched one."""
SHOWN_FILES = 5


class DataFiles(NamedTuple):
    """The files of a data set by split; "pool" where the split is not known from the layout."""

    by_split: dict[str, list[DataFile]]
    subject_splits: tuple[DataFile, ...] = ()
    """MEDS tables with the split of each subject."""
    hidden: tuple[DataFile, ...] = ()
    """Files left out because their name, or that of a folder they are in, starts with a dot or an underscore."""
    beside: tuple[DataFile, ...] = ()
    """Files left out because they stand beside train/, valid/, ... and belong to no split, or beside the data/ of MEDS."""
    codes: tuple[DataFile, ...] = ()
    """MEDS tables with the name of each code, where the data hold numbers in their place."""

    @property
    def paths(self) -> list[DataFile]:
        return [path for paths in self.by_split.values() for path in paths]


class Fingerprint(NamedTuple):
    """The marks by which a changed file is recognised."""

    path: str
    size: int
    modified_ns: int
    tail_digest: str


class ColumnRow(NamedTuple):
    """A column of the files as a user sees it; meta.json has the same fields."""

    column: str
    type: str
    part: str | None
    """Its role; None: not used, or not known."""
    files: int
    """Number of files that have it."""


class Survey(NamedTuple):
    """The findings about files from which no cache can be built."""

    files: int
    bytes: int
    columns: tuple[ColumnRow, ...]
    refused: tuple[str, ...]


class UsableFiles(NamedTuple):
    """Files that are readable, with rows, and with the columns that most of them have."""

    layout: Layout
    by_split: dict[str, list[DataFile]]
    row_groups: dict[DataFile, tuple[RowGroup, ...]]
    columns: tuple[ColumnRow, ...]
    bad_files: tuple[str, ...]
    """Why each file that cannot be used is left out."""
    notes: list[str]

    @property
    def paths(self) -> list[DataFile]:
        return [path for paths in self.by_split.values() for path in paths]

    def rows_of(self, paths: Iterable[DataFile]) -> dict[DataFile, int]:
        """Return the number of rows of each of these files."""
        return {path: sum(group.rows for group in self.row_groups[path]) for path in paths}


# --- Finding --------------------------------------------------------------------------------------------------------


def find_files(source: SourceSettings, *, to_learn_from: bool = True) -> DataFiles:
    """Return the files below the directories (or the files) that --data_dir names, literally or as a glob."""
    data_dir = str(source.data_dir)
    literal = Path(data_dir)
    try:
        if is_remote(data_dir):
            require_consent(data_dir, source.allow_remote)
            found = _find_remote(*open_store(data_dir, source.endpoint_url))
        elif (literal := literal.expanduser()).exists():
            found = [_find_below(literal.absolute(), None)]
        elif glob.has_magic(data_dir):
            matches = [Path(match).absolute() for match in sorted(glob.glob(str(literal), recursive=True))]
            # Matches that are named after splits are these splits: dir/* is then what dir is.
            found = [_find_below(m, split_of(m.name)) for m in matches if m.is_dir() or _is_parquet(m.name)]
            if not found:
                raise DataError(f"--data_dir {data_dir}: no directory or Parquet file matches this pattern.")
        else:
            parent = next(p for p in literal.absolute().parents if p.exists())
            try:
                names = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))
                listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
            except OSError:
                listing = "nothing that may be listed"
            raise DataError(f"--data_dir {data_dir}: does not exist. {parent} is there and holds {listing}.")
    except OSError as error:
        place = error.filename or data_dir
        raise DataError(f"{place}: cannot be listed ({error.strerror}). Check the path and its permissions.") from error
    by_split: dict[str, list[DataFile]] = {}
    for one in found:
        for split, paths in one.by_split.items():
            by_split[split] = list(dict.fromkeys([*by_split.get(split, []), *paths]))
    tables = tuple(dict.fromkeys(path for one in found for path in one.subject_splits))
    hidden = tuple(dict.fromkeys(path for one in found for path in one.hidden))
    beside = tuple(dict.fromkeys(path for one in found for path in one.beside))
    codes = tuple(dict.fromkeys(path for one in found for path in one.codes if _numbers_codes(path)))
    if not any(by_split.values()):
        passed = f" beside {len(hidden)} whose names begin with . or _" if hidden else ""
        advice = "Wanted: train/, valid/, test/ or one pool of files; point --data_dir there."
        if not is_remote(data_dir) and (plain := [path for path in sorted(literal.glob("*")) if is_plain(str(path))]):
            advice = f"A plain file is read where it is named itself: --data_dir {shell_word(plain[0])}."
        raise DataError(f"{data_dir}: holds no Parquet file ({' or '.join(SUFFIXES)}){passed}. {advice}")
    if POOL in by_split and len(by_split) > 1:
        raise DataError(
            f"{data_dir}: some matches have train/ and valid/, others are pools (the first: {by_split[POOL][0]}); "
            f"give them to --data_dir apart."
        )
    if to_learn_from and POOL not in by_split and "train" not in by_split:
        raise DataError(
            f"{data_dir}: has {', '.join(sorted(by_split))} but no train/ or train.parquet to learn from. Add one, or point "
            f"--data_dir at a folder that has it."
        )
    return DataFiles(by_split, tables, hidden, beside, codes)


def _find_remote(store: Store, path: str) -> list[DataFiles]:
    """Return the files below what a path in a store names, literally or as a glob, each in the order of those of a local folder."""
    url, literal = store.url_of(path), store.find(path)
    if literal is not None:
        matches = [literal]
    elif not glob.has_magic(path):
        above = PurePosixPath(path).parent if "/" in path else PurePosixPath(path)
        while not (there := store.list(str(above), recursive=False)) and len(above.parts) > 1:
            above = above.parent
        if not there and store.find(str(above)) is None:
            raise DataError(
                f"{store.url_of(above)}: there is no such bucket or container. Check the name, and --endpoint_url."
            )
        names = [PurePosixPath(one.path).name for one in there]
        listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
        raise DataError(f"--data_dir {url}: does not exist. {store.url_of(above)} is there and holds {listing}.")
    else:
        matches = [
            one
            for one in _matches(store, PurePosixPath(path))
            if one.is_folder or _is_parquet(PurePosixPath(one.path).name)
        ]
        if not matches:
            raise DataError(f"--data_dir {url}: no folder or Parquet file matches this pattern.")

    def find_below(match: Listed) -> DataFiles:
        root = PurePosixPath(match.path)
        split = split_of(root.name) if literal is None else None
        below = store.list(match.path) if match.is_folder else [match]
        children: dict[PurePath, dict[PurePath, bool]] = {}
        for one in below:
            children.setdefault(PurePosixPath(one.path).parent, {})[PurePosixPath(one.path)] = one.is_folder
        of: dict[Any, RemoteFile] = {
            (key := PurePosixPath(one.path)): RemoteFile(key, one.size, one.modified_ns, store)
            for one in below
            if not one.is_folder
        }
        if not match.is_folder:
            return DataFiles({split or POOL: [of[root]]})
        found = _arrange(root, split, {key for key in of if _is_parquet(key.name)}, children.get)
        return DataFiles(
            {name: [of[key] for key in keys] for name, keys in found.by_split.items()},
            *(tuple(of[key] for key in keys) for keys in found[1:]),
        )

    return list(ahead((0, partial(find_below, match)) for match in matches))


def _matches(store: Store, pattern: PurePosixPath) -> list[Listed]:
    """Return what matches a pattern, level by level, so that nothing beside it is listed; `**` is any number of folders."""
    bucket, *rest = pattern.parts
    if glob.has_magic(bucket):
        raise DataError(f"--data_dir {store.url_of(pattern)}: a pattern may stand behind the bucket only.")
    found = [Listed(bucket, 0, 0, True)]
    for number, part in enumerate(rest):
        folders = [one.path for one in found if one.is_folder]
        if part == "**":
            deeper = [
                one
                for folder in folders
                for one in store.list(folder)
                if not any(name.startswith(".") for name in PurePosixPath(one.path).relative_to(folder).parts)
            ]
            found += [one for one in deeper if one.is_folder or number == len(rest) - 1]
        elif glob.has_magic(part):
            found = [
                one
                for folder in folders
                for one in store.list(folder, recursive=False)
                if fnmatch.fnmatchcase(name := PurePosixPath(one.path).name, part)
                and (part.startswith(".") or not name.startswith("."))
            ]
        else:
            paths = [f"{folder}/{part}" for folder in folders]
            is_last_literal = not any(map(glob.has_magic, rest[number:]))
            found = [
                one
                for path in paths
                if (one := store.find(path) if is_last_literal else Listed(path, 0, 0, True)) is not None
            ]
    return list(dict.fromkeys(found))


def _find_below(root: Path, split: str | None) -> DataFiles:
    """Return the files in all folders below, links followed."""
    if root.is_file():
        return DataFiles({split or POOL: [root]})

    def raise_error(error: OSError) -> None:  # a folder that cannot be opened must not be passed over
        raise error

    every: set[Path] = set()
    entered = {os.path.realpath(root)}
    for parent, folders, names in os.walk(root, onerror=raise_error, followlinks=True):
        folders[:] = [name for name in folders if os.path.realpath(Path(parent, name)) not in entered]
        entered |= {os.path.realpath(Path(parent, name)) for name in folders}
        every |= {Path(parent, name) for name in names if _is_parquet(name)}

    def children(folder: Any) -> dict[Any, bool] | None:
        return {one: one.is_dir() for one in folder.iterdir()} if folder.is_dir() else None

    return _arrange(root, split, every, children)


def _arrange(
    root: Any, split: str | None, every: set[Any], children: Callable[[Any], Mapping[Any, bool] | None]
) -> DataFiles:
    """Return the files by split; all are of `split`, unless there are split folders below. `children` returns what is directly in
    a folder, and whether that is a folder; None where there is no such folder."""
    hidden = {path for path in every if any(part.startswith((".", "_")) for part in path.relative_to(root).parts)}
    files, hidden_files = sorted(every - hidden), tuple(sorted(hidden))

    metadata, data = root / "metadata", root / "data"
    tables = tuple(path for path in files if path == metadata / "subject_splits.parquet")
    codes = tuple(path for path in files if path == metadata / "codes.parquet")
    is_meds = children(data) is not None and children(metadata) is not None
    if tables or is_meds:
        files = [path for path in files if path.parent != metadata]
    split_of_entry: dict[Any, str] = {}
    """The folders and Parquet files directly below root, or else below data/, that are named after a split."""
    for directory in [] if tables else [root, data]:
        if not split_of_entry:
            split_of_entry = {
                child: name
                for child, is_folder in sorted((children(directory) or {}).items())
                if (name := split_of(child.name)) and (is_folder or _is_parquet(child.name))
            }
    if not split_of_entry:
        # Beside data/, MEDS_transforms leaves a folder for each stage that the data went through.
        others = [path for path in files if is_meds and data not in path.parents]
        files = [path for path in files if path not in set(others)]
        return DataFiles({split or POOL: files} if files else {}, tables, hidden_files, tuple(others), codes)
    by_split: dict[str, list[Any]] = {name: [] for name in split_of_entry.values()}
    depth = len(next(iter(split_of_entry)).parts)
    beside: list[Any] = []
    for path in files:
        split = split_of_entry.get(type(path)(*path.parts[:depth]))
        (by_split[split] if split else beside).append(path)
    for entry, name in split_of_entry.items():
        if not by_split[name]:
            raise DataError(
                f"{entry}: holds no Parquet file, but a {name} split was expected there. Fill or remove it."
            )
    return DataFiles(by_split, (), hidden_files, tuple(beside), codes if is_meds else ())


def _numbers_codes(path: DataFile) -> bool:
    """Return whether a table of codes gives them numbers, as those of MEDS_transforms do that have a vocabulary."""
    try:
        return VOCABULARY_INDEX in pq.read_schema(readable(path)).names
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return False  # it is no part of the data, which may do without


def split_of(name: str) -> str | None:
    """Return the split that a folder or file is named after.

    >>> split_of("Tuning"), split_of("test-00000-of-00001.parquet"), split_of("notes")
    ('valid', 'test', None)
    """
    stem = Path(name).stem if _is_parquet(name) else name
    return SPLIT_NAMES.get(SHARD.sub("", stem).lower())


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


# --- One file -------------------------------------------------------------------------------------------------------


def fingerprint(path: DataFile) -> Fingerprint:
    """Return the marks of a file; of one in a store its size, and its ETag or, where the store has none, its time of change."""
    if isinstance(path, RemoteFile):
        return Fingerprint(str(path), path.size, 0, path.mark())
    try:
        _refuse_irregular(path)
        with path.open("rb") as file:
            status = path.stat()
            file.seek(max(0, status.st_size - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.") from error
    return Fingerprint(str(path), status.st_size, status.st_mtime_ns, hashlib.sha256(tail).hexdigest()[:16])


def _refuse_irregular(path: Path) -> None:
    """Refuse what is no file: opening a pipe would wait until something writes to it, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError(
            f"{path}: is no file but a pipe, a device or the like. Put a Parquet file in its place, {SKIP}."
        )


def _read_footer(path: DataFile, *, read_pages: bool) -> Footer:
    """Return schema and row count of one file, or refuse it with the reason why it is no Parquet file.

    With `read_pages` every page is read once, so that a file is left out whole or not at all.
    """
    try:
        if isinstance(path, Path):
            _refuse_irregular(path)
        str(path).encode()  # raises here what pyarrow would raise later
        metadata = pq.read_metadata(readable(path))
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = tuple(RowGroup(group.num_rows, group.total_byte_size) for group in groups)
        footer = Footer(path, metadata.schema.to_arrow_schema(), sizes)
        names = footer.schema.names  # they are decoded here, or cannot be
        if footer.rows != metadata.num_rows:
            raise pa.ArrowInvalid(f"it declares {metadata.num_rows} rows, but {footer.rows} in its row groups")
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read (permission denied). Change its permissions, {SKIP}.") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}: cannot be read, as its name is not UTF-8. Rename it or its folder, {SKIP}."
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(path, RemoteFile) and (trouble := trouble_with(path, error)):
            raise trouble from error
        wrong = _what_is_wrong(path, error)
        raise DataError(f"{path}: is not a readable Parquet file: {wrong}. Write it again, {SKIP}.") from error
    if read_pages:
        for _ in read_batches(path, names):
            pass
    return footer


def _what_is_wrong(path: DataFile, error: Exception) -> str:
    if isinstance(path, Path) and not path.is_file():
        return "it is gone"
    with path.open("rb") as file:
        head = file.read(64)
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4))
        tail = file.read(4)
    if not head:
        return "it is empty (0 bytes)"
    if not head.startswith(b"PAR1"):
        is_text = all(byte >= 32 or byte in b"\t\r\n" for byte in head)
        hint = f"; plain files are read where their names end in {', '.join(PLAIN)}" if is_text else ""
        return f"it begins with {head[:16]!r} where Parquet begins with b'PAR1'{hint}"
    if tail != b"PAR1":
        return "its end is missing (truncated while it was written or copied)"
    return f"its footer is damaged ({' '.join(str(error).split())[:200]})"


# --- All files ------------------------------------------------------------------------------------------------------


def usable_files(data: DataFiles, source: SourceSettings) -> UsableFiles:
    """Return the files that can be used together; --on_bad_files decides whether others end the build."""

    def refuse(reasons: list[str]) -> None:
        if reasons and source.on_bad_files == "error":
            more = f" {counted(len(reasons) - 1, 'more file')} cannot be used." if len(reasons) > 1 else ""
            raise DataError(reasons[0] + more)

    legible, bad_files = _sift_footers(data.paths, read_pages=source.on_bad_files == "skip")
    refuse(bad_files)
    full = [footer for footer in legible if footer.rows]
    if not full:
        bad = f"The first reason: {bad_files[0]}" if bad_files else "Fill them, or point --data_dir elsewhere."
        raise DataError(f"{source.data_dir}: none of its Parquet files has rows that can be read. {bad}")
    layout, fitting, unfit = _detect_and_check(full, source)
    refuse(unfit)
    if not fitting:
        raise DataError(f"{source.data_dir}: all files are left out. The first reason: {unfit[0]}")
    row_groups = {footer.path: footer.groups for footer in fitting}
    by_split = {split: [path for path in paths if path in row_groups] for split, paths in data.by_split.items()}
    if layout.form == "files":  # two files of one split must not come out as the same sequence
        reader = BlockReader([path for paths in by_split.values() for path in paths], layout)
        for paths in by_split.values():
            first_of: dict[int | str, DataFile] = {}
            for path in paths:
                twin = first_of.setdefault(reader.stem_id(path), path)
                if twin != path:
                    raise DataError(
                        f"{twin} and {path}: two files with the same sequence id {reader.stem_id(path)!r}, their name. Rename "
                        f"one."
                    )
    columns = _list_columns(full, layout)
    bad_files += unfit
    notes = []
    if data.hidden:
        notes.append(
            f"{counted(len(data.hidden), 'file')} left out whose name, or that of a folder, begins with . or _"
        )
    if data.beside:
        notes.append(
            f"{counted(len(data.beside), 'file')} left out that stand beside the data, the first: {data.beside[0]}"
        )
    if empty := [footer.path for footer in legible if not footer.rows]:
        notes.append(f"{counted(len(empty), 'file')} without rows, the first: {empty[0]}")
    if bad_files:
        files = counted(len(data.paths), "file")
        notes.append(f"{len(bad_files):,} of {files} left out that cannot be used (--on_bad_files skip)")
        notes += [f"left out: {reason}" for reason in bad_files[:SHOWN_FILES]]
    if unused := [repr(row.column) for row in columns if row.part is None and not STRAY_INDEX.fullmatch(row.column)]:
        notes.append(f"columns that are not used: {some(unused)}")
    return UsableFiles(layout, by_split, row_groups, columns, tuple(bad_files), notes)


def survey_files(source: SourceSettings, *, read_pages: bool) -> Survey | None:
    """Return every file that cannot be used, and the columns of the readable ones; None where there are no files.

    Pages are read where they are suspected, that is, after any bad file: it takes as long as a build.
    """
    try:
        data = find_files(source)
    except DataError:
        return None
    legible, refused = _sift_footers(data.paths, read_pages=read_pages)
    layout, full = None, [footer for footer in legible if footer.rows]
    if full:
        try:
            layout, _, unfit = _detect_and_check(full, source)
            refused += unfit
        except DataError:
            pass  # no layout was detected: the fault of all files together, not of one of them
    if refused and not read_pages:
        return survey_files(source, read_pages=True)
    sizes = [
        path.size if isinstance(path, RemoteFile) else path.stat().st_size if path.is_file() else 0
        for path in data.paths
    ]
    return Survey(
        len(data.paths), sum(sizes), _list_columns(legible, layout), tuple(refused)
    )  # a link may lead nowhere


def _detect_and_check(footers: Sequence[Footer], source: SourceSettings) -> tuple[Layout, list[Footer], list[str]]:
    """Return the layout of all files together, those that have its columns, and why each of the others does not fit."""
    columns = common_columns(footers)
    layout = detect_layout(columns, source, len(footers))
    if layout.label is not None:
        layout = replace(layout, label_names=class_names(footers, layout.label))
    return layout, *_sift(footers, lambda footer: check_schema(footer, layout, columns))


def _sift_footers(paths: Sequence[DataFile], *, read_pages: bool) -> tuple[list[Footer], list[str]]:
    """Return the footers of the files that can be read, and why each of the others cannot."""

    def footer_or_error(path: DataFile) -> Footer | DataError:
        try:
            return _read_footer(path, read_pages=read_pages)
        except DataError as error:
            return error

    def raised(found: Footer | DataError) -> Footer:
        if isinstance(found, DataError):
            raise found
        return found

    return _sift(in_order(footer_or_error, paths), raised)


def _sift(items: Iterable[Any], check: Callable[[Any], Footer]) -> tuple[list[Footer], list[str]]:
    """Return the footers of the items that pass the check, and one sentence for each that does not."""
    passed: list[Footer] = []
    refused: list[str] = []
    for item in items:
        try:
            passed.append(check(item))
        except DataError as error:
            refused.append(str(error))
    return passed, refused


def _list_columns(footers: Sequence[Footer], layout: Layout | None) -> tuple[ColumnRow, ...]:
    """Return every column that some file has."""
    number_of = Counter(name for footer in footers for name in footer.schema.names)
    used = set(layout.columns) if layout else set()
    return tuple(
        ColumnRow(name, str(column.type), layout.role_of(name) if layout and name in used else None, number_of[name])
        for name, column in common_columns(footers).items()
    )
