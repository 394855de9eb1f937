"""Whether a run may write where it wants to: asked at its start, before data are read, and not after hours.

In: what --output_dir, --run_name, --resume and --log_dir say. Out: nothing, or a `StorageError` with the first path that
cannot be written. Nothing is made, and nothing that is there is changed.
"""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from seqvae.config.run_settings import RunSettings
from seqvae.errors import StorageError

CONFIG = "config.yaml"
FOLDERS = ("checkpoints", "plots", "samples", "tensorboard")
FILES = (CONFIG, "environment.json", "run.json", "*.csv", "*.jsonl")
"""What stands in a run's directory and is written to in place."""


def refuse_unwritable(run: RunSettings) -> None:
    """The run's directory, what of the run lies in it already, and --log_dir."""
    directory, flag = _directory_of(run)
    _try(_written_in(directory), directory, flag)
    if run.log_dir is not None and run.logger != "csv":
        log_dir = Path(run.log_dir).expanduser()
        _try(iter([_nearest(log_dir)]), log_dir, "--log_dir")


def _directory_of(run: RunSettings) -> tuple[Path, str]:
    """Where the run will be, as far as that is known without its data, and the flag that leads elsewhere."""
    output_dir = Path(run.output_dir).expanduser()
    if run.run_name is not None:
        return output_dir / run.run_name, "--output_dir"
    if run.resume not in ("auto", "never"):
        given = Path(run.resume).expanduser().absolute()
        own = given if given.is_dir() else given.parent.parent
        if (own / CONFIG).is_file():
            return own, "--run_name"
    return output_dir, "--output_dir"


def _written_in(directory: Path) -> Iterator[Path]:
    if directory.exists() and not directory.is_dir():
        return  # it is no run, which is said where runs are opened
    yield _nearest(directory)
    if not (directory / CONFIG).exists():
        return  # what lies there is not the run's
    yield from (folder for name in FOLDERS if (folder := directory / name).is_dir())
    yield from (path for pattern in FILES for path in sorted(directory.glob(pattern)) if path.is_file())


def _nearest(directory: Path) -> Path:
    """The directory, or that of those above it in which it would be made."""
    absolute = directory.absolute()
    nearest = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return nearest


def _try(paths: Iterator[Path], asked: Path, flag: str) -> None:
    """Only trying tells: a file system may not grant what the permissions say."""
    path = asked
    try:
        for path in paths:
            if path.is_dir():
                tempfile.TemporaryFile(dir=path).close()
            else:
                path.open("rb+").close()
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}). Make it writable, or choose another {flag}."
        ) from error
