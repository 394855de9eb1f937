"""What an attacker would submit: files that run code where they are trusted, and names that command whatever shows them."""

import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NAMES = (
    *("\x1b[2J\x1b]0;owned\x07", "$x$", "$\\frac{$", "<script>alert(1)</script>", "../../../outside", "a\nb\r\tc"),
    *(
        "\u202eevil\u2066",
        "\x9b31m",
        "",
        "long" * 500,
        "体温\u3000°C",
        "{0} %s %(name)s",
        "\u2028",
        "-rf",
        "'; rm -rf ~ #",
    ),
)


class Malice:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def _in_zip(path: Path, trace: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(2)}, "origin": Malice(trace), "global_step": 1}, path)


def _in_old_format(path: Path, trace: Path) -> None:
    torch.save({"state_dict": {}, "origin": Malice(trace)}, path, _use_new_zipfile_serialization=False)


def _bare(path: Path, trace: Path) -> None:
    path.write_bytes(pickle.dumps(Malice(trace)))


def _in_tar(path: Path, trace: Path) -> None:
    """Write the format before that, in which each member is a pickle."""
    content = pickle.dumps(Malice(trace))
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _in_script(path: Path, trace: Path) -> None:
    """Write what torch takes for a program of its own and reads with another reader."""
    _in_zip(path, trace)
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/constants.pkl", pickle.dumps(Malice(trace)))


def _compressed(path: Path, trace: Path) -> None:
    """Write compressed members: a gigabyte would fit into a megabyte."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Malice(trace)))


CHECKPOINTS: dict[str, Callable[[Path, Path], None]] = {
    "zip": _in_zip,
    "old format": _in_old_format,
    "bare": _bare,
    "tar": _in_tar,
    "script": _in_script,
    "compressed": _compressed,
}
"""Ways to write a file to the first path that makes the second one when it is trusted."""
