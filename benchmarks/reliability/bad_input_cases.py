"""Damaged data sets by number: which family of damage, in which form of data, done to which file. The same seed, the same bytes.

In: a seed and the number of a case. Out: a `Case`, and its files on disk. What is changed in tables is in `bad_input_data.py`; here
is what is done to bytes, and what stands where a Parquet file should and is none.
"""

import gzip
import os
import socket
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from benchmarks.reliability.bad_input_data import (
    FLAGS,
    FORMS,
    Done,
    File,
    Must,
    Variant,
    drift_variants,
    make_files,
    name_variants,
    value_variants,
    writing_variants,
)

PLAIN: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
FOOTER_LENGTH = 8
"""Bytes behind a footer, which are its length and PAR1."""
MAGIC, ENCRYPTED = b"PAR1", b"PARE"


class Case(NamedTuple):
    """A damaged data set on disk, and what must become of it."""

    number: int
    family: str
    form: str
    what: str
    files: list[File]
    words: tuple[str, ...]
    """Flags of the commands."""
    must: Must
    protected: bool
    """Whether the file shows that it was changed; if not, other values may come out."""
    root: Path
    """The directory that the paths of the files are relative to."""
    data_dir: Path


class Damaged(NamedTuple):
    """The damage to the files, which are written now."""

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
        form, variant = variant_of_turn(family, seed, turn)
        files = make_files(form, random)
        done = variant.change(random, files)
        write_files(root, files, **variant.options)
        damaged = Damaged(variant.what, variant.must, done=done)
    else:
        form = FORMS[turn % len(FORMS)]
        files = make_files(form, random)
        damaged = DAMAGES[family](random, turn, files, root)
    words = (*FLAGS.get(form, ()), *damaged.done.words)
    data_dir = root / damaged.done.folder
    return Case(number, family, form, damaged.what, files, words, damaged.must, damaged.protected, root, data_dir)


def variant_of_turn(family: str, seed: int, turn: int) -> tuple[str, Variant]:
    """Return a form and a variant: no pair comes twice before each has come once, in an order that only the seed decides."""
    shuffled = _shuffled(family, seed)
    return shuffled[turn % len(shuffled)]


@cache
def _shuffled(family: str, seed: int) -> list[tuple[str, Variant]]:
    pairs = [(form, variant) for form in FORMS for variant in VARIED[family](form)]
    order = np.random.default_rng([seed, list(VARIED).index(family)]).permutation(len(pairs))
    return [pairs[at] for at in order]


def write_files(root: Path, files: list[File], **options: Any) -> None:
    for file in files:
        path = root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as sink:  # pyarrow itself opens no name that is not UTF-8
            pq.write_table(file.table, sink, **options)


def write_and_choose(random: np.random.Generator, files: list[File], root: Path, **options: Any) -> Path:
    """Write all files, and return the path of one."""
    write_files(root, files, **options)
    return root / files[int(random.integers(len(files)))].path


# --- Damaged bytes ----------------------------------------------------------------------------------------------------


def truncate(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    """Cut a file anywhere, within the footer, before its last byte, or to nothing."""
    path = write_and_choose(random, files, root)
    size = path.stat().st_size
    match turn % 4:
        case 0 | 1:
            kept = int(random.integers(size - footer_bytes(path) if turn % 4 else 0, size))
        case 2:
            kept = size - 1
        case _:
            kept = 0
    path.write_bytes(path.read_bytes()[:kept])
    return Damaged(f"{path.name} cut after {kept} of {size} bytes", "refuse")


def flip_pages(random: np.random.Generator, turn: int, files: list[File], root: Path, *, checksums: bool) -> Damaged:
    """Flip one bit to eight within the pages of one file."""
    options = (PLAIN, {}, {"compression": "zstd"}, {"data_page_version": "2.0"})[turn % 4]
    path = write_and_choose(random, files, root, write_page_checksum=checksums, **options)
    count = int(random.choice([1, 1, 2, 8]))
    flips = flip(path, random, 4, path.stat().st_size - footer_bytes(path), count)
    return Damaged(f"{path.name}: bits flipped in pages at {flips}, {options}", "any", protected=checksums)


def flip_footer(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    path = write_and_choose(random, files, root, write_page_checksum=turn % 2 == 0)
    size = path.stat().st_size
    flips = flip(path, random, size - footer_bytes(path), size, int(random.choice([1, 1, 3])))
    return Damaged(f"{path.name}: bits flipped in the footer at {flips}", "any", protected=False)


def flip(path: Path, random: np.random.Generator, start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Flip bits, none twice, which would undo it; return the byte and the bit of each."""
    data = bytearray(path.read_bytes())
    bits = random.choice((stop - start) * 8, size=count, replace=False).tolist()
    for bit in bits:
        data[start + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return [(start + bit // 8, bit % 8) for bit in bits]


def overwrite(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    """Zero a run of bytes, make it random, take it out, double it, or take it from another file."""
    path = write_and_choose(random, files, root, write_page_checksum=turn % 2 == 0)
    intact, pages_end = path.read_bytes(), path.stat().st_size - footer_bytes(path)
    start = int(random.integers(0, len(intact)))
    stop = min(len(intact), start + int(random.choice([1, 16, 512])))
    replacements = {
        "zeroed": bytes(stop - start),
        "random": random.bytes(stop - start),
        "taken out": b"",
        "doubled": intact[start:stop] * 2,
        "of another file": (root / files[0].path).read_bytes()[start:stop],
    }
    name = list(replacements)[turn % len(replacements)]
    path.write_bytes(intact[:start] + replacements[name] + intact[stop:])
    checked = turn % 2 == 0 and stop <= pages_end
    return Damaged(f"{path.name}: bytes {start} to {stop} {name}", "any", protected=checked)


def declare(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    """Let a footer declare billions of rows or values, or a negative number."""
    path = write_and_choose(random, files, root, write_page_checksum=True)
    data = path.read_bytes()
    footer = data[len(data) - footer_bytes(path) : -FOOTER_LENGTH]
    metadata = pq.read_metadata(path)
    old = metadata.row_group(0).column(1).num_values if turn % 2 else metadata.num_rows
    new = (10**9, 2**31 - 1, 2**62, -1, 0, 10**12)[turn // 2 % 6]
    found = [at for at in range(len(footer)) if footer[at:].startswith(b"\x16" + varint(old))]
    at = int(random.choice(found)) + 1
    footer = footer[:at] + varint(new) + footer[at + len(varint(old)) :]
    path.write_bytes(data[: len(data) - footer_bytes(path)] + footer + len(footer).to_bytes(4, "little") + MAGIC)
    return Damaged(f"{path.name}: {old} at byte {at} of the footer became {new}", "any", protected=False)


def footer_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[-8:-4], "little") + FOOTER_LENGTH


def varint(number: int) -> bytes:
    """Encode a whole number as Parquet's footers do: zigzag, seven bits per byte.

    >>> varint(-1), varint(150)
    (b'\\x01', b'\\xac\\x02')
    """
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    return bytes([*out, left])


# --- What stands where a Parquet file should, and is none -------------------------------------------------------------

MakeImpostor = Callable[[Path, Path], object]
"""A function of the path to stand at, and of a whole Parquet file to imitate."""


def content(content: bytes) -> MakeImpostor:
    return lambda path, _: path.write_bytes(content)


def changed(change: Callable[[bytes], bytes]) -> MakeImpostor:
    return lambda path, whole: path.write_bytes(change(whole.read_bytes()))


def make_socket(path: Path, _: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's name may only be short, but is taken relative to the folder
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def make_folder_with_file(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "_SUCCESS").touch()


def make_loop_of_folders(path: Path, _: Path) -> None:
    path.with_suffix("").mkdir()
    (path.with_suffix("") / "again.parquet").symlink_to(path.parent, target_is_directory=True)


IMPOSTORS: dict[str, tuple[MakeImpostor, Literal["refuse", "hold"]]] = {
    "nothing": (content(b""), "refuse"),
    "HTML": (content(b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 20), "refuse"),
    "CSV": (content(b"id,tokens\n1,2\n" * 50), "refuse"),
    "JSON": (content(b'{"id": 1, "tokens": [1, 2]}\n' * 50), "refuse"),
    "gzip of a Parquet file": (changed(gzip.compress), "refuse"),
    "escape sequences": (content(b"\x1b[2J\x1b]0;title\x07" * 30), "refuse"),
    "zeros": (content(bytes(5000)), "refuse"),
    "one byte": (content(b"P"), "refuse"),
    "the magic bytes alone": (content(MAGIC), "refuse"),
    "the magic bytes twice": (content(MAGIC * 2), "refuse"),
    "a footer longer than the file": (changed(lambda whole: whole[:-8] + b"\xff\xff\xff\x7f" + MAGIC), "refuse"),
    "a footer of negative length": (changed(lambda whole: whole[:-8] + b"\xff\xff\xff\xff" + MAGIC), "refuse"),
    "a footer of no length": (changed(lambda whole: whole[:-8] + bytes(4) + MAGIC), "refuse"),
    "an encrypted footer": (changed(lambda whole: ENCRYPTED + whole[4:-4] + ENCRYPTED), "refuse"),
    "no magic bytes at the end": (changed(lambda whole: whole[:-4] + b"1RAP"), "refuse"),
    "Parquet with text before it": (changed(lambda whole: b"HTTP/1.1 200 OK\r\n\r\n" + whole), "refuse"),
    "Parquet with text behind it": (changed(lambda whole: whole + b"\n"), "refuse"),
    "a link to nowhere": (lambda path, _: path.symlink_to("nowhere.parquet"), "refuse"),
    "a link to itself": (lambda path, _: path.symlink_to(path.name), "refuse"),
    "a link to a device": (lambda path, _: path.symlink_to("/dev/zero"), "refuse"),
    "a pipe": (lambda path, _: os.mkfifo(path), "refuse"),
    "a socket": (make_socket, "refuse"),
    "a folder": (lambda path, _: path.mkdir(), "hold"),
    "a folder with a mark in it": (make_folder_with_file, "hold"),
    "a folder that contains itself": (make_loop_of_folders, "hold"),
}
"""Impostors and their fate. `refuse`: an error, or left out and counted; `hold`: no file of the data at all."""


def add_impostor(random: np.random.Generator, turn: int, files: list[File], root: Path) -> Damaged:
    path = write_and_choose(random, files, root).with_name("9.parquet")
    name, (make, must) = list(IMPOSTORS.items())[turn % len(IMPOSTORS)]
    make(path, root / files[0].path)
    return Damaged(f"{path.name}: {name}", must)


DAMAGES: dict[str, Callable[..., Damaged]] = {
    "truncated": truncate,
    "flips, checksums": partial(flip_pages, checksums=True),
    "flips, no checksums": partial(flip_pages, checksums=False),
    "flips in the footer": flip_footer,
    "overwritten": overwrite,
    "declared sizes": declare,
    "no Parquet": add_impostor,
}
VARIED = {"values": value_variants, "drift": drift_variants, "names": name_variants, "odd but right": writing_variants}
ROUND = (*DAMAGES, *VARIED, "values", "drift", "names", "values", "flips, checksums")
"""The families of cases 0, 1, 2, ...; those with the most variants come several times."""
