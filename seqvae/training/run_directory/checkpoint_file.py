"""Checkpoint files: how one gets to disk whole, what tells a damaged one, how it is read.

In: what Lightning wants to keep. Out: a file that is under its name in full or not at all; nothing that lies in it is ever run.
"""

import os
import pickle
import shutil
import struct
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from seqvae.errors import StorageError

BEST, LAST, PREVIOUS, HEALTHY = "best.ckpt", "last.ckpt", "previous.ckpt", "healthy.ckpt"
ASTRAY = "diverged-"
"""Begins the names of checkpoints that a run had to go back further than; nothing goes on from them by itself."""
REPLACED = "replaced.ckpt"
"""What was last.ckpt before --resume named another one."""
_DAMAGE = (
    *(OSError, ValueError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile, pickle.UnpicklingError),
    *(LookupError, TypeError, AttributeError),
)
"""What reading a damaged or hostile file comes to; ValueError holds undecodable names, RuntimeError what torch finds, and the
last three are what torch's own unpickler stumbles over."""


class AtomicCheckpointIO(CheckpointIO):
    """A checkpoint is under its name in full or not at all, and what it holds is data."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """In the same directory, as a move from another file system would not be atomic."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            if damage := _damage_of_archive(partial):
                raise StorageError(f"{target}: what was written reads back differently ({damage})")
            partial.replace(target)
            sync_directory(target.parent)
        except (OSError, RuntimeError) as error:  # torch wraps what the file system says
            raise StorageError(f"{target} cannot be written ({error}); what was there before is whole") from error
        finally:
            with suppress(OSError):  # what went wrong before is what is to be told
                partial.unlink(missing_ok=True)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: Any = None) -> Any:
        """Whoever asks for more than weights and plain values does not get it."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)


def damage_of(path: Path) -> str | None:
    """Why a file is no checkpoint that could be resumed, or None."""
    try:
        if damage := _damage_of_archive(path):
            return damage
        read_lazily(path)
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return error.strerror or "cannot be read"
    except _DAMAGE:
        return "no checkpoint of ours, or a damaged one"
    return None


def read_lazily(path: Path) -> dict[str, Any]:
    """Return a checkpoint whose tensors are read only where they are looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of foreign files torch says at length what damage_of says in a word
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(checkpoint, dict) or not {"state_dict", "origin", "global_step"} <= checkpoint.keys():
        raise ValueError(f"{path} holds no checkpoint of ours")
    return checkpoint


def _damage_of_archive(path: Path) -> str | None:
    """Torch writes a checksum with every tensor but does not look at it when it reads."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type for entry in archive.infolist()):
                return "no checkpoint of ours, or a damaged one"  # torch compresses nothing; it could swell to any size
            bad = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error):
        return "damaged"
    return None if bad is None else f"damaged at {bad}"


def give_second_name(path: Path, name: Path) -> None:
    link = name.with_name(f".{name.name}.partial")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links
        try:
            shutil.copyfile(path, link)
            with link.open("rb") as file:
                os.fsync(file.fileno())
        except OSError:
            link.unlink(missing_ok=True)
            raise
    link.replace(name)


def sync_directory(directory: Path) -> None:
    """So that a name, too, outlives a power cut. Windows cannot open a directory, and needs no such thing."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
