"""Checkpoint files: how one gets to disk whole, what tells a damaged one, how it is read.

In: what Lightning wants to keep. Out: a file that is under its name in full or not at all; nothing that lies in it is ever run.
"""

import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from seqvae.data.description import DataDescription
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


# What two runs differ in, in a few words: flags, data, weights.
#
# In: origins of checkpoints, descriptions, tables of weights. Out: short texts for messages; none where all is the same.

MUST_BE_THE_SAME = (
    *("encoder", "decoder", "width", "depth", "heads", "latent_size", "latent_scope", "posterior"),
    *("max_sequence_length", "long_sequences", "window_stride"),
    *("batch_size", "tokens_per_batch", "use_dynamic_padding", "bucketing", "drop_last", "level_cost", "pad_grid"),
    *("gradient_accumulation_steps", "seed"),
)
"""The network's shape, and what goes into which batch. All else may be changed on purpose when a run goes on."""

ADDED_LATER: dict[str, Any] = {"level_cost": False, "pad_grid": 0}
"""What older checkpoints do not tell of, as it was then."""

MEANING = ("kind", "symbols", "tokenizer", "names", "classes")
"""Of a description: what ids and positions stand for. Weights of the same shapes would fit, and mean something else."""

MOST_DIFFERENCES = 5
"""Shown of what does not fit."""


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What must be the same and is not, each in a few words; of data of another kind nothing more need be said."""
    kinds = (there["description"]["kind"], here["description"]["kind"])
    if kinds[0] != kinds[1]:
        return [_difference("data", *kinds)]
    old, new = (ADDED_LATER | origin["settings"] for origin in (there, here))
    for settings in (old, new):
        settings["pad_grid"] = settings["pad_grid"] or 0  # not given, or no grid wanted
    flags = [(f"--{name}", old[name], new[name]) for name in MUST_BE_THE_SAME]
    known = there["data"].keys() & here["data"].keys()  # older checkpoints know less
    data = [(f"data: {name}", there["data"][name], here["data"][name]) for name in here["data"] if name in known]
    described = [
        (name.replace("_", " "), there["description"][name], here["description"][name]) for name in here["description"]
    ]
    return [_difference(name, old, new) for name, old, new in (*flags, *data, *described) if plain(old) != plain(new)]


def other_meanings(there: DataDescription, here: DataDescription) -> list[str]:
    """Where ids and positions stand for something else."""
    pairs = [(name, getattr(there, name), getattr(here, name)) for name in MEANING]
    return [_difference(name, old, new) for name, old, new in pairs if old != new]


def misfits(wanted: dict[str, Tensor], there: dict[str, Tensor]) -> Iterator[str]:
    for name in wanted.keys() - there.keys():
        yield f"{name} is missing"
    for name in there.keys() - wanted.keys():
        yield f"{name} has no place"
    for name in wanted.keys() & there.keys():
        if wanted[name].shape != there[name].shape:
            yield f"{name} is {tuple(there[name].shape)} there and {tuple(wanted[name].shape)} here"


def some_of(found: list[str]) -> str:
    more = len(found) - MOST_DIFFERENCES
    return "; ".join(sorted(found)[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def plain(value: Any) -> Any:
    """As it was before it went through JSON."""
    return tuple(value) if isinstance(value, list) else value


def _difference(name: str, old: Any, new: Any) -> str:
    old, new = plain(old), plain(new)
    if not isinstance(old, tuple) or not isinstance(new, tuple):
        return f"{name} {_short(old)} there, {_short(new)} here"
    if len(old) != len(new):
        return f"{len(old)} {name} there, {len(new)} here"
    first = next(index for index, (one, other) in enumerate(zip(old, new, strict=True)) if one != other)
    return f"{name}[{first}] {_short(old[first])} there, {_short(new[first])} here"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
