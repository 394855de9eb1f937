"""Checkpoint files: how one gets to disk whole, what is wrong with one, how it is read, and how it differs from a run.

In: what Lightning wants to keep, or a path. Out: a file that is under its name in full or not at all; its content as data, of which
nothing is ever run; differences as short texts for messages.
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
from torch import Tensor

from seqvae.data.description import DataDescription
from seqvae.errors import StorageError
from seqvae.files import replace_file, sync_directory
from seqvae.text import clip

ASTRAY = "diverged-"
"""Prefix of checkpoints that a run went back further than; nothing goes on from them by itself."""
REPLACED = "replaced.ckpt"
"""The last.ckpt from before --resume named another one."""

WEIGHTS = "network."
"""Prefix of the network's weights in a checkpoint."""

MUST_BE_THE_SAME = (
    *(
        "encoder",
        "decoder",
        "width",
        "depth",
        "heads",
        "latent_size",
        "pooling",
        "latent_scope",
        "step_latent_size",
        "prior",
        "prior_components",
        "least_rate",
        "posterior",
        "latent",
        "codebook",
        "codes",
        "codebooks",
        "flow_layers",
    ),
    *("max_sequence_length", "long_sequences", "window_stride"),
    *("batch_size", "tokens_per_batch", "use_dynamic_padding", "bucketing", "drop_last", "level_cost", "pad_grid"),
    *("batches_per_step", "seed", "stream", "optimizer"),
)
"""The network's shape, what goes into which batch, and what kind of state the optimizer has. All else may be changed on purpose
when a run goes on."""
ADDED_LATER: dict[str, Any] = {
    "pooling": "mean",
    "optimizer": "adamw",
    "prior": "standard",
    "prior_components": 32,
    "least_rate": 0.0,
    "step_latent_size": 16,
    "latent": "gaussian",
    "codebook": "vq",
    "codes": 512,
    "codebooks": 1,
    "commitment": 0.25,
    "revive_codes": True,
    "flow_layers": 4,
    "stream": False,
    "level_cost": False,
    "pad_grid": 0,
    "robust_scaling": False,
    "missing_values": None,
}
"""Settings that older checkpoints lack, with the values that were in force then."""
MEANING = ("kind", "symbols", "tokenizer", "names", "classes")
"""Fields of a description that say what ids and positions stand for. Weights of the same shapes would fit, and mean something
else."""

_DAMAGE = (
    *(OSError, ValueError, RuntimeError, EOFError, struct.error, zipfile.BadZipFile, pickle.UnpicklingError),
    *(LookupError, TypeError, AttributeError),
)
"""What reading a damaged or hostile file raises; ValueError includes undecodable names, RuntimeError is torch's own, and the last
three come from torch's unpickler."""


class AtomicCheckpointIO(CheckpointIO):
    """Writer of checkpoints that are under their names in full or not at all, and reader of nothing but data."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write beside the target, as a move from another file system would not be atomic, read it back, and rename it."""
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
            with suppress(OSError):  # the error before is the one to report
                partial.unlink(missing_ok=True)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: Any = None) -> Any:
        """Read weights and plain values, also where the caller requests more."""
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        Path(path).unlink(missing_ok=True)


def damage_of(path: Path) -> str | None:
    """Return why a file is no checkpoint to resume from; None where it is one."""
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
    """Return a checkpoint whose tensors are read only when they are used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch writes at length about foreign files
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(checkpoint, dict) or not {"state_dict", "origin", "global_step"} <= checkpoint.keys():
        raise ValueError(f"{path} holds no checkpoint of ours")
    return checkpoint


def _damage_of_archive(path: Path) -> str | None:
    """Check the checksums, which torch writes with every tensor and does not look at when it reads."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type for entry in archive.infolist()):
                return "no checkpoint of ours, or a damaged one"  # torch compresses nothing; it could swell to any size
            bad = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, struct.error):
        return "damaged"
    return None if bad is None else f"damaged at {bad}"


def give_second_name(path: Path, name: Path) -> None:
    """Let a file be under another name, too: by a link, or by a copy where the file system has no links."""
    with replace_file(name) as partial:
        partial.unlink(missing_ok=True)  # a link that a killed run left would be written through
        try:
            os.link(path, partial)
        except OSError:
            shutil.copyfile(path, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return what must be the same in two origins and is not, sorted; of data of another kind, nothing else."""
    kinds = (there["description"]["kind"], here["description"]["kind"])
    if kinds[0] != kinds[1]:
        return [_difference("data", *kinds)]
    old, new = (ADDED_LATER | origin["settings"] for origin in (there, here))
    for settings in (old, new):
        settings["pad_grid"] = settings["pad_grid"] or 0  # None is no grid, either
    if "batches_per_step" not in old:  # an older one does not say among how many processes it was
        old["batches_per_step"], new["batches_per_step"] = (one["gradient_accumulation_steps"] for one in (old, new))
    pairs = [(f"--{name}", old[name], new[name]) for name in MUST_BE_THE_SAME]
    known = [name for name in here["data"] if name in there["data"]]  # older checkpoints know less
    pairs += [(f"data: {name}", there["data"][name], here["data"][name]) for name in known]
    # The share of <unknown> follows from the data, and older checkpoints have none: a run goes on with its own.
    described = [name for name in here["description"] if name in there["description"] and name != "unknown_share"]
    pairs += [(name.replace("_", " "), *(one["description"][name] for one in (there, here))) for name in described]
    return sorted(_difference(name, old, new) for name, old, new in pairs if _differ(name, plain(old), plain(new)))


def other_meanings(there: DataDescription, here: DataDescription) -> list[str]:
    """Return where ids and positions stand for something else."""
    pairs = [(name, getattr(there, name), getattr(here, name)) for name in MEANING]
    return [_difference(name, old, new) for name, old, new in pairs if _differ(name, old, new)]


def misfits(expected: dict[str, Tensor], there: dict[str, Tensor]) -> list[str]:
    """Return how weights differ from those that a network expects, in names and shapes."""
    found = [f"{name} is missing" for name in expected.keys() - there.keys()]
    found += [f"{name} has no place" for name in there.keys() - expected.keys()]
    found += [
        f"{name} is {tuple(there[name].shape)} there and {tuple(weight.shape)} here"
        for name, weight in expected.items()
        if name in there and there[name].shape != weight.shape
    ]
    return sorted(found)


def plain(value: Any) -> Any:
    """Undo what JSON does to a value: lists were tuples."""
    return tuple(value) if isinstance(value, list) else value


def _differ(name: str, old: Any, new: Any) -> bool:
    """Return whether two values are unlike; numbers of classes and their names, which older checkpoints lack, are alike."""
    if name == "classes" and len(old) == len(new) and all(one.isdecimal() for one in old):
        return any(one.isdecimal() for one in new) and old != new
    return bool(old != new)


def _difference(name: str, old: Any, new: Any) -> str:
    old, new = plain(old), plain(new)
    if isinstance(old, tuple) and isinstance(new, tuple):
        if len(old) != len(new):
            return f"{len(old)} {name} there, {len(new)} here"
        first = next(index for index, (one, other) in enumerate(zip(old, new, strict=True)) if one != other)
        name, old, new = f"{name}[{first}]", old[first], new[first]
    return f"{name} {clip(str(old), 40)} there, {clip(str(new), 40)} here"
