"""Damaged data sets by number: which family of damage, in which form of data, done to which file. The same seed, the same bytes.

In: a seed and the number of a case. Out: a `Case`, and its files on disk. What is damaged in bytes is made here; hostile names,
absurd values, schemas that drift and what is no Parquet each have a file of their own.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from benchmarks.reliability.bad_input_data import FLAGS, FORMS, File, make_files
from benchmarks.reliability.bad_input_impostors import IMPOSTORS
from benchmarks.reliability.bad_input_names import Done, Must, Variant, name_variants
from benchmarks.reliability.bad_input_schemas import drift_variants, writing_variants
from benchmarks.reliability.bad_input_values import value_variants

PLAIN: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
FOOTER_LENGTH = 8
"""Bytes behind a footer: its length and PAR1."""


class Case(NamedTuple):
    number: int
    family: str
    form: str
    what: str
    files: list[File]
    words: tuple[str, ...]
    """Flags."""
    must: Must
    protected: bool
    """False: nothing in the file could tell that it was changed. Other values may come out."""
    root: Path
    """The paths of the files are relative to it."""
    data_dir: Path


class Damaged(NamedTuple):
    """What was done to the files, which are written now."""

    what: str
    must: Must
    protected: bool = True
    done: Done = Done()


def make_case(seed: int, number: int, directory: Path) -> Case:
    """Write the data of a case to directory/data."""
    family = ROUND[number % len(ROUND)]
    turn = number // len(ROUND) * ROUND.count(family) + ROUND[: number % len(ROUND)].count(family)
    random = np.random.default_rng([seed, number])
    root = directory / "data"
    if family in VARIED:
        form, variant = in_turn(family, seed, turn)
        files = make_files(form, random)
        damaged = vary(variant, random, files, root)
    else:
        form = FORMS[turn % len(FORMS)]
        files = make_files(form, random)
        damaged = DAMAGES[family](random, turn, files, root)
    words = (*FLAGS.get(form, ()), *damaged.done.words)
    data_dir = root / damaged.done.folder
    return Case(number, family, form, damaged.what, files, words, damaged.must, damaged.protected, root, data_dir)


def in_turn(family: str, seed: int, turn: int) -> tuple[str, Variant]:
    """All variants of all forms in an order that only the seed decides: none comes twice before each has come once."""
    shuffled = _shuffled(family, seed)
    return shuffled[turn % len(shuffled)]


@cache
def _shuffled(family: str, seed: int) -> list[tuple[str, Variant]]:
    pairs = [(form, variant) for form in FORMS for variant in VARIED[family](form)]
    order = np.random.default_rng([seed, list(VARIED).index(family)]).permutation(len(pairs))
    return [pairs[at] for at in order]


def vary(variant: Variant, random: np.random.Generator, files: list[File], root: Path) -> Damaged:
    """Files that are whole, with something in them that nobody expects."""
    done = variant.change(random, files)
    write_files(root, files, **variant.options)
    return Damaged(variant.what, variant.must, done=done)


def write_files(root: Path, files: list[File], **options: Any) -> None:
    for file in files:
        path = root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as sink:  # pyarrow itself opens no name that is not UTF-8
            pq.write_table(file.table, sink, **options)


def truncate(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    """Anywhere, within the footer, at its last bytes, or to nothing."""
    write_files(root, files)
    path = root / choose(random, files).path
    size = path.stat().st_size
    footer = size - footer_bytes(path)
    places = (
        lambda: int(random.integers(0, size)),
        lambda: int(random.integers(footer, size)),
        lambda: size - 1,
        lambda: 0,
    )
    kept = places[turn % len(places)]()
    path.write_bytes(path.read_bytes()[:kept])
    return Damaged(f"{path.name} cut after {kept} of {size} bytes", "refuse")


def flip_pages(random: np.random.Generator, turn: int, files: list[File], root: Path, *, checksums: bool) -> Damaged:
    """One bit to eight within what the pages of one file take."""
    options = (PLAIN, {}, {"compression": "zstd"}, {"data_page_version": "2.0"})[turn % 4]
    write_files(root, files, write_page_checksum=checksums, **options)
    path = root / choose(random, files).path
    count = int(random.choice([1, 1, 2, 8]))
    places = flip(path, random, *page_range(path), count)
    return Damaged(f"{path.name}: bits flipped in pages at {places}, {options}", "any", protected=checksums)


def flip_footer(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    write_files(root, files, write_page_checksum=turn % 2 == 0)
    path = root / choose(random, files).path
    size = path.stat().st_size
    places = flip(path, random, size - footer_bytes(path), size, int(random.choice([1, 1, 3])))
    return Damaged(f"{path.name}: bits flipped in the footer at {places}", "any", protected=False)


def overwrite(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    """A run of bytes zeroed, made random, taken out, doubled, or taken from another file."""
    write_files(root, files, write_page_checksum=turn % 2 == 0)
    path = root / choose(random, files).path
    intact, pages_end = path.read_bytes(), page_range(path)[1]
    start = int(random.integers(0, len(intact)))
    stop = min(len(intact), start + int(random.choice([1, 16, 512])))
    ways = {
        "zeroed": bytes(stop - start),
        "random": random.bytes(stop - start),
        "taken out": b"",
        "doubled": intact[start:stop] * 2,
        "of another file": (root / files[0].path).read_bytes()[start:stop],
    }
    way = list(ways)[turn % len(ways)]
    path.write_bytes(intact[:start] + ways[way] + intact[stop:])
    checked = turn % 2 == 0 and stop <= pages_end
    return Damaged(f"{path.name}: bytes {start} to {stop} {way}", "any", protected=checked)


def declare(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    """Numbers of rows and values in the footer become billions, or negative."""
    write_files(root, files, write_page_checksum=True)
    path = root / choose(random, files).path
    data = path.read_bytes()
    footer = data[len(data) - footer_bytes(path) : -FOOTER_LENGTH]
    rows = pq.read_metadata(path).num_rows
    values = pq.read_metadata(path).row_group(0).column(1).num_values
    old, wanted = (rows, values)[turn % 2], (10**9, 2**31 - 1, 2**62, -1, 0, 10**12)[turn // 2 % 6]
    places = [at for at in range(len(footer)) if footer[at:].startswith(b"\x16" + varint(old))]
    at = int(random.choice(places)) + 1
    footer = footer[:at] + varint(wanted) + footer[at + len(varint(old)) :]
    path.write_bytes(data[: len(data) - footer_bytes(path)] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return Damaged(f"{path.name}: {old} at byte {at} of the footer became {wanted}", "any", protected=False)


def pretend(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    """Something that is no Parquet file stands among the others."""
    write_files(root, files)
    name, (make, must) = list(IMPOSTORS.items())[turn % len(IMPOSTORS)]
    path = (root / choose(random, files).path).with_name("9.parquet")
    make(path, root / files[0].path)
    return Damaged(f"{path.name}: {name}", must)


DAMAGES: dict[str, Callable[..., Damaged]] = {
    "truncated": truncate,
    "flips, checksums": partial(flip_pages, checksums=True),
    "flips, no checksums": partial(flip_pages, checksums=False),
    "flips in the footer": flip_footer,
    "overwritten": overwrite,
    "declared sizes": declare,
    "no Parquet": pretend,
}
VARIED = {"values": value_variants, "drift": drift_variants, "names": name_variants, "odd but right": writing_variants}
ROUND = (*DAMAGES, *VARIED, "values", "drift", "names", "values", "flips, checksums")
"""The families of cases 0, 1, 2, ...; those with the most variants come several times."""


def choose(random: np.random.Generator, files: list[File]) -> File:
    return files[int(random.integers(len(files)))]


def flip(path: Path, random: np.random.Generator, start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Byte and bit of each flip; none twice, which would undo it."""
    data = bytearray(path.read_bytes())
    bits = random.choice((stop - start) * 8, size=count, replace=False).tolist()
    for bit in bits:
        data[start + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return [(start + bit // 8, bit % 8) for bit in bits]


def page_range(path: Path) -> tuple[int, int]:
    """From the magic bytes to the footer: pages and their headers, and nothing else."""
    return 4, path.stat().st_size - footer_bytes(path)


def footer_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[-8:-4], "little") + FOOTER_LENGTH


def varint(number: int) -> bytes:
    """As Parquet's footers write whole numbers: zigzag, seven bits a byte.

    >>> varint(-1), varint(150)
    (b'\\x01', b'\\xac\\x02')
    """
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    return bytes([*out, left])
