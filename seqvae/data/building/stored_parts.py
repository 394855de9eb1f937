"""The parts of a cache that is built in a store, by machines that share nothing else.

A part is written straight into the store, as is all that later rounds make of it: no machine needs a disk for it. The description
of a part is put there last, and says of which rows it is. So a build that was interrupted begins with the parts that are there.

In: the parts to read. Out: all of them; those that were there were not read again. What lies in a store was written by anyone: a
description is JSON, and a part whose description could not be ours is read again.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from seqvae import __version__
from seqvae.data.building.parts import Each, Part, Reading, Request, read_parts
from seqvae.data.flat_file import SPLITS, SplitFiles, described
from seqvae.data.storage import THREADS, StoredPlace
from seqvae.errors import DataError
from seqvae.text import counted

log = logging.getLogger(__name__)
DESCRIPTION = "part.json"


def read_missing_parts(reading: Reading, requests: Sequence[Request], each: Each) -> list[Part]:
    """Read the parts that the store does not have yet; return all."""
    there = _parts_there(reading, requests)
    known = [part for part in there if part is not None]
    missing = [request for request, part in zip(requests, there, strict=True) if part is None]
    if missing:
        how_many = counted(len(missing), "part")
        log.info("reading %s into the store; if that is interrupted, the same command goes on", how_many)
    if known:
        log.info("%s are there, from a build that was interrupted", counted(len(known), "part"))
        reading = replace(reading, width=max(part.width for part in known))

    def each_kept(read: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return each(partial(_read_and_describe, read, reading), items)

    read = iter(read_parts(reading, missing, each_kept))
    return [part or next(read) for part in there]


def _read_and_describe(read: Callable[[Request], Part], reading: Reading, request: Request) -> Part:
    part = read(request)
    fields = part._asdict() | {
        "mark": _mark(request),
        "splits": {
            split: {key: getattr(files, key) for key in ("sequences", "steps", "entries", "table_entry")}
            for split, files in part.splits.items()
        },
        "repairs": [[*repair, count] for repair, count in part.repairs.items()],
    }
    directory = request.directory
    assert isinstance(directory, StoredPlace)
    directory.store.write(str(directory.path / DESCRIPTION), json.dumps(fields).encode())
    return part


def _parts_there(reading: Reading, requests: Sequence[Request]) -> list[Part | None]:
    directory = requests[0].directory
    assert isinstance(directory, StoredPlace)
    prefix = str(directory.path.parent)
    listed = {one.path for one in directory.store.list(prefix, recursive=False)}

    def part_of(request: Request) -> Part | None:
        with suppress(DataError, ValueError, KeyError, TypeError, AttributeError):
            if f"{prefix}/{request.directory.name}" in listed:
                return _part_there(reading, request)
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(part_of, requests))


def _part_there(reading: Reading, request: Request) -> Part | None:
    """Return a part as its description has it; None: it is of other rows."""
    directory = request.directory
    assert isinstance(directory, StoredPlace)
    fields = json.loads(directory.store.read(str(directory.path / DESCRIPTION)))
    if fields["mark"] != _mark(request):
        return None
    splits: dict[str, SplitFiles] = {}
    for split, found in fields["splits"].items():
        files = splits[split] = SplitFiles(directory / split, reading.files)
        files.sequences, files.steps = int(found["sequences"]), int(found["steps"])
        files.entries, files.table_entry = found["entries"], found["table_entry"]
        for entry in (files.table_entry, *files.entries.values()):
            described(Path(), entry)
        if split not in SPLITS:
            raise ValueError(f"{split!r} is no split")
    repairs = Counter({(str(noun), str(what)): int(count) for noun, what, count in fields["repairs"]})
    gaps = float(fields["shortest_gap"]), float(fields["longest_gap"])
    return Part(splits, tuple(map(str, fields["symbols"])), repairs, *gaps, int(fields["width"]))


def _mark(request: Request) -> str:
    """Return a digest of which rows a part is of, and of the version that reads them."""
    stretches = [[str(path), *rest] for path, *rest in request.stretches]
    rows = [__version__, request.group, stretches, request.rows, request.is_scattered]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
