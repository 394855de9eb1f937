"""`seqvae cache`: a table of the caches of converted data, and their removal. `seqvae build-cache`: one more of them."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from seqvae.cli.command_line import INFORMATION_FLAGS, parse_command_line
from seqvae.config.data import BuildCache, ManageCache
from seqvae.console import program, set_up_output
from seqvae.errors import UsageError, did_you_mean
from seqvae.files import is_remote

ACTIONS = ("list", "clear")
_ABOUT = """\
Say what the cache of converted data holds, or empty it.

    seqvae cache list                 # name, kind, sequences, size and origin of each cache
    seqvae cache clear                # remove all of them, but those that a run has open
    seqvae cache clear NAME NAME      # remove these

A cache that was removed is built again when its data are next used. Data that came from memory (in the folder frames) have no
other copy, and stay.
"""

_BUILDING = """\
Convert Parquet into the cache that training reads, ahead of it and with all cores.

    seqvae build-cache --data_dir my_data                     # into the cache directory that train uses, too
    seqvae build-cache --data_dir s3://bucket/data --workers 8 --cache_dir s3://bucket/caches
    seqvae build-cache --data_dir my_data --cache_dir /shared/caches --launcher ray
    seqvae build-cache --data_dir s3://bucket/data --cache_dir s3://bucket/caches --launcher ray   # no disk holds it

With the last one, a build that was interrupted goes on when the same command is given again.

Flags about the data have to be those of the training, as for other ones it would build a cache of its own.
"""


def run(verb: str, words: Sequence[str]) -> None:
    """Print the table of caches, or remove caches and say which."""
    first_flag = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    before, flags = list(words[:first_flag]), words[first_flag:]
    if INFORMATION_FLAGS.isdisjoint(flags):
        usage = f"Usage: {program()} list, or {program()} clear [NAME ...]"
        if not before:
            raise UsageError(f"list or clear is missing. {usage}")
        if before[0] not in ACTIONS:
            raise UsageError(f"{before[0]!r} is neither list nor clear{did_you_mean(before[0], ACTIONS)}. {usage}")
        if before[0] == "list" and len(before) > 1:
            raise UsageError(f"{before[1]!r}: list takes no name. {usage}")
    usage_line = f"seqvae {verb} list|clear [NAME ...]"
    settings = parse_command_line(ManageCache, flags, prog=usage_line, description=_ABOUT, presets=None)

    from seqvae.data.cache import default_cache_dir  # only now: pyarrow takes a while
    from seqvae.data.frames import FRAMES
    from seqvae.data.stored_caches import clear_caches, size_of, stored_caches
    from seqvae.reports.terminal import grid, ink_for
    from seqvae.text import counted, size, visible

    root = Path(settings.cache.cache_dir or default_cache_dir()).expanduser()
    if before[0] == "clear":
        removed, left = clear_caches(root, before[1:])
        freed = size(sum(one.size for one in removed))
        print(visible(f"{root}: {counted(len(removed), 'cache')} removed, {freed} freed"))
        for name in left:
            print(visible(f"{name} stays: a run uses it, or is building it"))
    else:
        caches = stored_caches(root)
        print(visible(f"{root}: {counted(len(caches), 'cache')}, {size(sum(one.size for one in caches))}"))
        rows = [["cache", "kind", "sequences", "size", "built", "of"]]
        for one in caches:
            sequences = "-" if one.sequences is None else f"{one.sequences:,}"
            name = f"{one.name} (in use)" if one.is_in_use else one.name
            rows.append(
                [visible(name), one.kind or "outdated", sequences, size(one.size), one.built, visible(one.data)]
            )
        if caches:
            print("\n".join(grid(rows, ink_for(sys.stdout, os.environ), texts=(1, 5))))
    if in_memory := size_of(root / FRAMES):
        print(f"{FRAMES}: {size(in_memory)} of data that came from memory; no other copy of them is known")


def build(verb: str, words: Sequence[str]) -> None:
    """Build the cache of some data, or find that it is there, and print its directory."""
    settings = parse_command_line(BuildCache, words, prog=f"seqvae {verb}", description=_BUILDING, presets=None)
    set_up_output()

    from seqvae.clusters import tasks_of_ray
    from seqvae.data.building.parts import side_by_side  # only now: pyarrow takes a while
    from seqvae.data.cache import build_in_store, prepare_cache
    from seqvae.data.dataset import read_meta
    from seqvae.data.shared_caches import files_of
    from seqvae.text import size, visible

    building = settings.building
    workers = (os.cpu_count() or 1) if building.workers == "auto" else building.workers
    with tasks_of_ray() if building.launcher == "ray" else side_by_side(workers) as each:
        if building.launcher == "ray" and is_remote(building.cache_dir or ""):
            place, meta = build_in_store(settings.source, building, each)
        else:
            place = str(path := prepare_cache(settings.source, building, each=each))
            meta = read_meta(path)
    sequences = ", ".join(f"{split['counts']['sequences']:,} {name}" for name, split in meta["splits"].items())
    print(
        visible(f"{meta['layout']}: {sequences} sequences, {size(sum(of for *_, of in files_of(Path(place), meta)))}")
    )
    for note in meta["notes"]:
        print(visible(note if note.startswith("warning: ") else f"note: {note}"))
    print(visible(place))
