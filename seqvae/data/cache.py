"""The cache: any Parquet, converted once into flat memory-mapped arrays, and opened in no time ever after.

In: where the data are and how to read them. Out: an opened cache with its splits. `prepare_cache` finds the cache of exactly these
files and options or builds it, beside the others in --cache_dir, into a temporary directory that is renamed when it is whole.
Processes that start together wait for the one that builds.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.data.building.builder import Built, build, hashed_shares, relabel
from seqvae.data.building.parts import PARTS, Each
from seqvae.data.dataset import SequenceSet, read_meta
from seqvae.data.demo import write_demo
from seqvae.data.description import DataDescription, FittedPreprocessing
from seqvae.data.flat_file import META, SPLITS, checksum_of, described
from seqvae.data.parquet.discovery import DataFiles, Fingerprint, find_files, fingerprint, usable_files
from seqvae.data.parquet.plain_files import as_parquet, is_plain
from seqvae.data.shared_caches import Shelf, shelf_of
from seqvae.data.storage import DataFile, in_order
from seqvae.data.stream import GROUPS, Room, Stream, read_bytes
from seqvae.errors import DataError, StorageError, UsageError
from seqvae.files import DISK_FULL, is_in_use, is_remote, mark_in_use, wait_for_lock
from seqvae.text import counted, size

log = logging.getLogger(__name__)
FORMAT = 6
"""Raise it when what lies in a cache changes: older caches are then built again."""
NOT_IN_KEY = ("data_dir", "allow_remote", "endpoint_url", "variable_embeddings_path", "freeze_variable_embeddings")
"""Options that a cache does not depend on, or that its name holds otherwise."""
ABOUT_LABELS = ("label_path", "label_column", "allow_missing_labels")
"""Options that only labels depend on: caches that differ in nothing else share their files."""
ABOUT_COLUMNS = (
    "kind",
    "sequence_column",
    "id_column",
    "time_column",
    "variable_column",
    "value_column",
    "feature_columns",
)
"""Options that a cache depends on by the columns that they lead to: a flag may name what is found anyway, or no more than ids."""
SIDE_FILES = ("label_path", "params_map_path", "tokenizer")
"""Options that may be files whose content a cache depends on."""
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOLCK)
FOOTER_BYTES, SAMPLES, SAMPLE_BYTES = 1 << 20, 32, 1 << 16
"""Of a file that is known by its content: what is looked at, its end and pieces of it."""
VERIFIED_BYTES = 256 << 20
"""Caches up to this size are compared with their checksums at every start, which takes a tenth of a second or two."""
CUT = {
    "truncate": "only their first {cap} are used",
    "keep_last": "only their last {cap} are used",
    "split": "they are cut into windows, {windows} sequences in all",
    "drop": "they are left out",
}
"""What --long_sequences does to what is longer than the cap."""


class HasCacheDir(Protocol):
    """Settings that say where caches lie."""

    @property
    def cache_dir(self) -> str | None: ...


class SequenceData(NamedTuple):
    """An opened cache."""

    path: Path
    description: DataDescription
    splits: dict[str, SequenceSet]
    layout: str
    """What was detected, in one line."""
    notes: tuple[str, ...]
    """What a user should know of these data, one sentence each."""
    counts: dict[str, dict[str, Any]]
    """Per split: sequences, steps, missing values and the like, before the length cap."""


def default_cache_dir() -> Path:
    """Return where caches lie unless --cache_dir says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "seqvae"


def cache_root(cache_dir: str | None) -> Path:
    """Return the directory that caches lie in, which is made where it is not there; of caches in a store, what was fetched."""
    root = Path(cache_dir) if cache_dir and not is_remote(cache_dir) else default_cache_dir()
    try:
        root = root.expanduser()
        root.mkdir(parents=True, exist_ok=True)
    except RuntimeError as error:
        raise StorageError(f"{root}: there is no home directory. Choose a directory with --cache_dir.") from error
    except OSError as error:
        raise StorageError(f"{root}: cannot be written ({error.strerror}). Choose another --cache_dir.") from error
    return root


def with_parquet(source: SourceSettings, cache: HasCacheDir) -> SourceSettings:
    """Return where the data are as Parquet: of a plain file (CSV, lines of text), the copy in the cache directory."""
    if source.data_dir is None or not is_plain(source.data_dir):
        return source
    return replace(source, data_dir=as_parquet(source.data_dir, cache_root(cache.cache_dir)))


def prepare_cache(
    source: SourceSettings,
    cache: HasCacheDir,
    preprocessing: FittedPreprocessing | None = None,
    each: Each = map,
) -> Path:
    """Return the directory of the cache for these data, which is built first where it is not there or not whole.

    With `preprocessing`, the data are read as a trained network knows such data, and no split has to be there. `each` works on the
    parts of a cache that is built. Where --cache_dir is in a store, the cache is fetched from there, or put there once it is built.
    """
    shelf = shelf_of(cache.cache_dir, source.endpoint_url, source.allow_remote)
    root = cache_root(cache.cache_dir)
    try:
        if source.data_dir is None:
            demo = write_demo(root / "demo", "tokens" if source.kind == "auto" else source.kind)
            # Text is read letter by letter, unless the flags or a network that was trained before take it as numbers.
            is_text = source.kind in ("auto", "tokens") and source.tokenizer is None and source.sequence_column is None
            if is_text and (preprocessing is None or preprocessing.description.tokenizer is not None):
                source = replace(source, tokenizer="characters")
            source = replace(source, data_dir=str(demo))
        source = with_parquet(source, cache)
        found = _look_at(source, preprocessing, by_content=shelf is not None)
        path = root / found.name
        if why_unusable(path) is None and (shelf is None or shelf.has(path.name)):
            return path
        with wait_for_lock(
            root / f".{path.name}.lock", lambda: log.info("waiting for the process that builds this cache")
        ):
            if (reason := why_unusable(path)) is not None:
                for leftover in root.glob(f".{path.name}.building-*"):  # of processes that were killed
                    shutil.rmtree(leftover, ignore_errors=True)
                if shelf is not None and shelf.has(path.name):
                    log.info("fetching the cache %s", shelf.url_of(path.name))
                    _fetch_into(path, shelf)
                    return path
                older = []  # for an earlier state of the files
                if shelf is None:
                    older = [one for one in root.glob(f"{found.request}-*") if one != path]
                if path.exists():
                    log.warning("the cache %s cannot be used (%s): building it again", path, reason)
                elif older:
                    log.warning("the Parquet files have changed since their cache was built: building it again")
                else:
                    log.info("building the cache %s (once)", path)
                _build_into(path, found, source, preprocessing, each)
                for one in older:  # a run that uses one goes on with the data that it began with
                    if not any(map(is_in_use, one.glob("*/"))):
                        with suppress(OSError):
                            remove_cache(one)
            if shelf is not None and not shelf.has(path.name):
                log.info("putting the cache into %s", shelf.url_of(path.name))
                shelf.put(path)
        return path
    except OSError as error:
        if error.errno in DISK_FULL:
            advice = "Free some space or choose another --cache_dir"
            raise StorageError(f"{root}: the disk is full ({error.strerror}). {advice}.") from error
        if error.errno in UNWRITABLE:
            raise StorageError(f"{root}: cannot be written ({error.strerror}). Choose another --cache_dir.") from error
        raise


def build_in_store(source: SourceSettings, cache: HasCacheDir, each: Each) -> tuple[str, dict[str, Any]]:
    """Return URL and description of the cache for these data in a store. Where it is not there it is built there, by machines that
    see the data and the store and share nothing else; none holds more of it on a disk than the tables of sequences.
    """
    if source.data_dir is None:
        raise UsageError("--data_dir is missing: made data are on one machine alone")
    shelf = shelf_of(cache.cache_dir, source.endpoint_url, source.allow_remote)
    assert shelf is not None
    source = with_parquet(source, cache)
    found = _look_at(source, None, by_content=True)
    place = shelf.place_of(found.name)
    if not shelf.has(found.name):
        log.info("building the cache %s (once)", place)
        built = build(found.data, source, place, each=each)
        place.store.write(str((place / META).path), _description(built, found).encode())
    if place.store.exists(parts := str((place / PARTS).path)):
        place.store.delete_folder(parts)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / META).write_bytes(shelf.meta_of(found.name))
        if reason := why_unusable(Path(folder), has_files=False):
            raise DataError(f"{place}: cannot be used ({reason}). Delete it there; it is built again.")
        return str(place), read_meta(Path(folder))


class Found(NamedTuple):
    """The files of some data, and the name of the cache of exactly these."""

    data: DataFiles
    fingerprints: list[Fingerprint]
    request: str
    """The beginning of the name, which other files do not change."""
    name: str
    content: str
    """A digest of all that sequences depend on, but not labels and ids."""


def _look_at(source: SourceSettings, preprocessing: FittedPreprocessing | None, *, by_content: bool) -> Found:
    """Look at the files of some data. `by_content`: the name is the same wherever these files lie, and whenever they came there."""
    data = find_files(source, to_learn_from=preprocessing is None)
    # Of unreadable files, too, so that a repaired one makes a new cache; the build says what is wrong.
    fingerprints = list(in_order(_fingerprint_of_any, [*data.paths, *data.subject_splits, *data.codes]))
    request, files, content = _name_parts(source, data, fingerprints, preprocessing, by_content=by_content)
    return Found(data, fingerprints, request, f"{request}-{files}", content)


def _fetch_into(path: Path, shelf: Shelf) -> None:
    """Fetch a cache beside its place, and move it there once it was compared with its checksums; the caller holds the lock."""
    directory = Path(tempfile.mkdtemp(prefix=f".{path.name}.building-", dir=path.parent))
    try:
        shelf.fetch(path.name, directory)
        if reason := why_unusable(directory, is_new=True):
            raise DataError(
                f"{shelf.url_of(path.name)}: cannot be used ({reason}). Delete it there; the next run builds it again."
            )
        directory.chmod(0o755)
        remove_cache(path)
        directory.rename(path)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _fingerprint_of_any(path: DataFile) -> Fingerprint:
    try:
        return fingerprint(path)
    except DataError:
        return Fingerprint(str(path), -1, -1, "")


def _name_parts(
    source: SourceSettings,
    data: DataFiles,
    fingerprints: list[Fingerprint],
    preprocessing: FittedPreprocessing | None,
    *,
    by_content: bool,
) -> tuple[str, str, str]:
    """Return <readable part>-<hash of the request>, a hash of the files (a changed file changes it alone), and a hash of both
    without the options about labels and columns. `by_content`: files are known by their names in the data, their sizes and their
    contents (`sampled_digest`), or in a store by their ETags, and not by where they lie."""
    options = {key: value for key, value in asdict(source).items() if key not in NOT_IN_KEY}
    beside = [path for flag in SIDE_FILES if (path := getattr(source, flag)) and Path(path).is_file()]
    every = [*fingerprints, *(fingerprint(Path(path)) for path in beside)]
    files: list[list[Any]] = [list(one) for one in every]
    splits = {split: [str(path) for path in paths] for split, paths in data.by_split.items()}
    whole = str(source.data_dir)
    whole = whole.rstrip("/") if is_remote(whole) else str(Path(whole).absolute())
    if by_content:
        base = os.path.commonpath([os.path.dirname(one) for of_split in splits.values() for one in of_split])  # noqa: PTH120
        places = [os.path.relpath(one.path, base) for one in fingerprints] + [Path(path).name for path in beside]
        files = [
            [place, one.size, one.tail_digest if is_remote(one.path) else sampled_digest(Path(one.path), one.size)]
            for place, one in zip(places, every, strict=True)
        ]
        splits = {split: [os.path.relpath(one, base) for one in paths] for split, paths in splits.items()}
        whole = ""
    name = "" if by_content else Path(str(source.data_dir)).name
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:40] or "data"
    known = [] if preprocessing is None else [asdict(preprocessing.description), *preprocessing[1:]]
    request = _digest([FORMAT, whole, options, *known])
    lasting = {key: value for key, value in options.items() if key not in (*ABOUT_LABELS, *ABOUT_COLUMNS)}
    without_labels = [one for one in files if source.label_path is None or one[0] != str(Path(source.label_path))]
    content = _digest([FORMAT, lasting, without_labels, splits, *known])
    return f"{readable}-{request}", _digest([files, splits]), content


def sampled_digest(path: Path, size: int) -> str:
    """Return a digest of the end of a file, as much as a footer of Parquet may take, and of pieces from all over it."""
    digest = hashlib.sha256()
    with suppress(OSError), path.open("rb") as file:  # what cannot be read has no digest, and the build says why
        for begin in np.linspace(0, max(0, size - FOOTER_BYTES), SAMPLES).astype(np.int64).tolist():
            file.seek(begin)
            digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(0, size - FOOTER_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _build_into(
    path: Path, found: Found, source: SourceSettings, preprocessing: FittedPreprocessing | None, each: Each
) -> None:
    """Build a cache beside its place, and move it there once it is whole; the caller holds the lock."""
    directory = Path(tempfile.mkdtemp(prefix=f".{path.name}.building-", dir=path.parent))
    try:
        built = _relabelled(path, found.data, source, preprocessing, directory, found.content)
        if built is None:
            built = build(found.data, source, directory, preprocessing, each)
        (directory / META).write_text(_description(built, found), encoding="utf-8")
        directory.chmod(0o755)
        remove_cache(path)
        directory.rename(path)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _description(built: Built, found: Found) -> str:
    """Return the content of meta.json."""
    number_of = {one.path: number for number, one in enumerate(found.fingerprints)}
    meta = {
        "format": FORMAT,
        "layout": built.layout.describe(),
        "roles": asdict(built.layout),
        "content": found.content,
        "columns": [column._asdict() for column in built.columns],
        "description": asdict(built.description),
        "splits": built.splits,
        "notes": built.notes,
        "lasting_notes": built.lasting_notes,
        "bad_files": built.bad_files,
        "files": [one._asdict() for one in found.fingerprints],
        # Which of these the tables of sequences mean by 0, 1, ...
        "sources": [number_of[str(file)] for file in built.files],
    }
    meta = json.loads(json.dumps(meta))  # tuples become lists, so that the digest is that of what is read back
    return json.dumps(meta | {"digest": _digest(meta)}, indent=1)


def _relabelled(
    path: Path,
    data: DataFiles,
    source: SourceSettings,
    preprocessing: FittedPreprocessing | None,
    directory: Path,
    content: str,
) -> Built | None:
    """Return a cache that is made of another one of the same sequences, with labels and ids of its own; None where none is."""
    metas = {}
    for twin in sorted(path.parent.glob(f"{path.name.rsplit('-', 2)[0]}-*")):
        if twin != path and why_unusable(twin) is None and (meta := read_meta(twin)).get("content") == content:
            metas[twin] = meta
    if not metas:
        return None
    usable = usable_files(data, source)
    if usable.layout.label is not None and usable.layout.form != "rows":
        return None  # whether all rows of a sequence have one label shows only where they are all read
    paths = [str(one) for of_split in usable.by_split.values() for one in of_split]

    def roles_of_sequences(roles: dict[str, Any]) -> str:
        """Return a digest of the columns that decide on the splits' sequences: where each is a row, ids may only name them."""
        id_splits = data.subject_splits or (hashed_shares(data, source, preprocessing) and not roles["id_names_rows"])
        if roles["form"] == "rows" and source.bad_values != "drop" and not (roles["id"] and id_splits):
            roles = {**roles, "id": None, "id_names_rows": False}
        return _digest({**roles, "label": None, "label_names": (), "code_names": ()})  # `content` knows the codes

    wanted = roles_of_sequences(asdict(usable.layout))
    for twin, meta in metas.items():
        found = [meta["files"][number]["path"] for number in meta["sources"]]
        if roles_of_sequences(meta["roles"]) == wanted and found == paths:
            try:
                return relabel(twin, meta, usable, source, directory)
            except FileNotFoundError:  # it was replaced in the meantime
                for half in directory.iterdir():
                    shutil.rmtree(half)
    return None


def remove_cache(cache: Path) -> None:
    """Remove a cache. Of a link, only the link goes: it may lead to anything."""
    if cache.is_symlink() or cache.is_file():
        cache.unlink()
    elif cache.exists():
        shutil.rmtree(cache)


def open_cache(
    path: Path, lengths: LengthSettings, in_memory: bool = False, streams: Mapping[str, Stream] = {}
) -> SequenceData:
    """Open a cache; what the length cap does to its sequences is added to the notes. `streams`: of splits that are not all here."""
    meta = read_meta(path)
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in meta["description"].items()}
    description = DataDescription(**fields)
    splits = {
        name: SequenceSet(path / name, description.kind, split["arrays"], lengths, in_memory, streams.get(name))
        for name, split in meta["splits"].items()
    }
    notes = list(meta["notes"])
    for name, split in splits.items():
        if over := split.windows.over_cap:
            cap, how = lengths.max_sequence_length, lengths.long_sequences
            stored = counted(meta["splits"][name]["counts"]["sequences"], "sequence")
            done = CUT[how].format(cap=cap, windows=f"{len(split):,}")
            notes.append(
                f"{name}: {over:,} of {stored} longer than {counted(cap, description.unit)}: {done} (--long_sequences {how})"
            )
    counts = {name: split["counts"] for name, split in meta["splits"].items()}
    return SequenceData(path, description, splits, meta["layout"], tuple(notes), counts)


def stream_cache(
    source: SourceSettings,
    cache: CacheSettings,
    lengths: LengthSettings,
    preprocessing: FittedPreprocessing | None = None,
) -> SequenceData:
    """Open a cache that stays in --cache_dir, of which no more than --local_limit lies on this disk."""
    shelf = shelf_of(cache.cache_dir, source.endpoint_url, source.allow_remote)
    if shelf is not None:
        name = _look_at(source, preprocessing, by_content=True).name
        if not shelf.has(name):
            raise DataError(
                f"{shelf.url_of(name)}: there is no cache of these data yet, and --stream builds none. Build it where there is "
                f"room: seqvae build-cache with the same flags of the data, and --cache_dir {cache.cache_dir}."
            )
        content = shelf.meta_of(name)
    else:
        origin = prepare_cache(source, cache, preprocessing)
        content = (origin / META).read_bytes()
    room = Room(cache_root(None))
    (room.directory / META).write_bytes(content)
    if reason := why_unusable(room.directory, has_files=False):
        raise DataError(
            f"{shelf.url_of(name) if shelf else origin}: cannot be used ({reason}). Delete it; it is built again."
        )
    streams: dict[str, Stream] = {}
    for split, parts in read_meta(room.directory)["splits"].items():
        read = shelf.ranges(name, split) if shelf is not None else partial(read_bytes, origin / split)
        streams[split] = Stream(read, room, room.directory / split, parts)
        if shelf is None:
            mark_in_use(streams[split], origin / split)
    least = sum(stream.least_bytes for stream in streams.values())
    if least > cache.local_limit_bytes:
        raise UsageError(
            f"--local_limit {cache.local_limit}: these data need {size(least)} at least, for two of the {GROUPS} groups or more "
            f"that each split is used in, and for the beginnings of all sequences"
        )
    for split, stream in streams.items():
        stream.room_bytes = stream.least_bytes + (cache.local_limit_bytes - least if split == "train" else 0)
    return open_cache(room.directory, lengths, streams=streams)


def why_unusable(directory: Path, *, is_new: bool = False, has_files: bool = True) -> str | None:
    """Return what is wrong with a cache: its description, its format, the size of a file, or the content of a small one, and of any
    that came from elsewhere just now (`is_new`). `has_files`: not only the description is there."""
    if not directory.exists():
        return "there is none yet"
    try:
        meta = read_meta(directory)
        if meta["format"] != FORMAT:
            return f"it has format {meta['format']}, this version writes {FORMAT}"
        if meta.pop("digest") != _digest(meta):
            return "meta.json is damaged"
        DataDescription(**meta["description"])
        if unknown := set(meta["splits"]) - SPLITS:
            return f"meta.json is damaged ({min(unknown)!r} is no split)"
        files = [
            (path, count * dtype.itemsize, entry["crc32"])
            for split, parts in meta["splits"].items()
            for entry in (parts["table"], *parts["arrays"].values())
            for path, dtype, count in [described(directory / split, entry)]
        ]
        if not has_files:
            return None
        for path, size, _ in files:
            if path.stat().st_size != size:
                return f"{path.name} of {path.parent.name} has {path.stat().st_size} bytes instead of {size}"
        if is_new or sum(size for _, size, _ in files) <= VERIFIED_BYTES:
            for path, _, checksum in files:
                if checksum_of(path) != checksum:
                    return f"{path.name} of {path.parent.name} is damaged"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"meta.json is damaged ({error})"
    return None
