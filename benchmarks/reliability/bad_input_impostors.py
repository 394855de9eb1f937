"""What stands where a Parquet file should, and is none: other formats, folders, links to nowhere, pipes nobody writes to.

In: the path to stand at, and a whole Parquet file to imitate. `refuse`: it is an error, or has to be left out and counted;
`hold`: it is no file of the data at all.
"""

import gzip
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
Impostor = tuple[Callable[[Path, Path], object], Literal["refuse", "hold"]]


def written(content: bytes) -> Callable[[Path, Path], object]:
    return lambda path, _: path.write_bytes(content)


def remade(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], object]:
    return lambda path, whole: path.write_bytes(change(whole.read_bytes()))


def listen(path: Path, _: Path) -> None:
    """A socket's name may only be short, but is taken relative to the folder."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def folder_with_file(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "_SUCCESS").touch()


def loop_of_folders(path: Path, _: Path) -> None:
    path.with_suffix("").mkdir()
    (path.with_suffix("") / "again.parquet").symlink_to(path.parent, target_is_directory=True)


IMPOSTORS: dict[str, Impostor] = {
    "nothing": (written(b""), "refuse"),
    "HTML": (written(b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 20), "refuse"),
    "CSV": (written(b"id,tokens\n1,2\n" * 50), "refuse"),
    "JSON": (written(b'{"id": 1, "tokens": [1, 2]}\n' * 50), "refuse"),
    "gzip of a Parquet file": (remade(gzip.compress), "refuse"),
    "escape sequences": (written(b"\x1b[2J\x1b]0;title\x07" * 30), "refuse"),
    "zeros": (written(bytes(5000)), "refuse"),
    "one byte": (written(b"P"), "refuse"),
    "the magic bytes alone": (written(MAGIC), "refuse"),
    "the magic bytes twice": (written(MAGIC * 2), "refuse"),
    "a footer longer than the file": (remade(lambda whole: whole[:-8] + b"\xff\xff\xff\x7f" + MAGIC), "refuse"),
    "a footer of negative length": (remade(lambda whole: whole[:-8] + b"\xff\xff\xff\xff" + MAGIC), "refuse"),
    "a footer of no length": (remade(lambda whole: whole[:-8] + bytes(4) + MAGIC), "refuse"),
    "an encrypted footer": (remade(lambda whole: ENCRYPTED + whole[4:-4] + ENCRYPTED), "refuse"),
    "no magic bytes at the end": (remade(lambda whole: whole[:-4] + b"1RAP"), "refuse"),
    "Parquet with text before it": (remade(lambda whole: b"HTTP/1.1 200 OK\r\n\r\n" + whole), "refuse"),
    "Parquet with text behind it": (remade(lambda whole: whole + b"\n"), "refuse"),
    "a link to nowhere": (lambda path, _: path.symlink_to("nowhere.parquet"), "refuse"),
    "a link to itself": (lambda path, _: path.symlink_to(path.name), "refuse"),
    "a link to a device": (lambda path, _: path.symlink_to("/dev/zero"), "refuse"),
    "a pipe": (lambda path, _: os.mkfifo(path), "refuse"),
    "a socket": (listen, "refuse"),
    "a folder": (lambda path, _: path.mkdir(), "hold"),
    "a folder with a mark in it": (folder_with_file, "hold"),
    "a folder that contains itself": (loop_of_folders, "hold"),
}
