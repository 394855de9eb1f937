"""The directory of a saved model: how it is written, read, and told from others.

    model.safetensors   the weights
    config.json         settings, symbols or names and moments, what the run came to, and checksums
    tokenizer.json      where the model has one
    README.md           the model card, made from config.json (`seqvae/reports/model_card.py`)

All settings are kept by name, and what older files lack has the value that was in force then (`ADDED_LATER`): a new one needs no
new format. In format 1 the settings were in `model.json`, without card, results and checksums; it is read, and replaced when a
model is saved there. Nothing in these files is ever run.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors import torch as safetensors

import seqvae
from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.files import MADE_BY
from seqvae.inference.streaming import new_file
from seqvae.reports.model_card import card_of
from seqvae.text import some
from seqvae.training.network import StoredNetwork
from seqvae.training.run_directory.checkpoint_file import plain

CONFIG, WEIGHTS, TOKENIZER, CARD = "config.json", "model.safetensors", "tokenizer.json", "README.md"
FIRST_CONFIG = "model.json"
"""The config of format 1."""
FORMAT = 2
"""Raise it when an older version would read a file wrongly, and keep a file of it in tests/inference/saved."""


class Saved(NamedTuple):
    """The content of a saved model."""

    stored: StoredNetwork
    results: dict[str, Any]
    """What the run came to (`results_of`); {}: not known."""


def config_in(directory: Path) -> Path | None:
    """Return the config of the saved model in a directory, None where there is none."""
    return next((path for name in (CONFIG, FIRST_CONFIG) if (path := directory / name).is_file()), None)


def files_of(
    stored: StoredNetwork, results: Mapping[str, Any], address: str | None = None, *, with_card: bool = True
) -> dict[str, bytes]:
    """Return the files of a saved model by name, config.json last; `address`: what `seqvae.load` will open it by, for the card."""
    weights = {name: weight.detach().cpu().contiguous().clone() for name, weight in stored.weights.items()}
    files = {WEIGHTS: safetensors.save(weights, {"format": "pt", "made_by": MADE_BY})}
    tokenizer = stored.description.tokenizer
    if tokenizer is not None and tokenizer.lstrip().startswith("{"):
        files[TOKENIZER] = tokenizer.encode()
    about = {
        "made_by": MADE_BY,
        "format": FORMAT,
        "version": seqvae.__version__,
        "step": stored.step,
        "parameters": sum(weight.numel() for weight in stored.weights.values()),
        "settings": stored.settings,
        "data": stored.data,
        "description": asdict(stored.description),
        "results": dict(results),
    }
    if with_card:  # from what a reader will find, where tuples are lists
        files[CARD] = card_of(json.loads(json.dumps(about)), address).encode()
    about["sha256"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return files | {CONFIG: f"{json.dumps(about, indent=1, ensure_ascii=False)}\n".encode()}


def write_saved(directory: Path, stored: StoredNetwork, results: Mapping[str, Any]) -> list[Path]:
    """Write a model into a directory. Each file is complete or absent; config.json comes last.

    A card that somebody edited stays as it is.
    """
    refuse_foreign_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files = files_of(stored, results, with_card=not is_edited(directory))
    for name in (CONFIG, FIRST_CONFIG):  # it would describe the weights of another model
        (directory / name).unlink(missing_ok=True)
    for name, content in files.items():  # as bytes: the library's own writing hides the error of the disk
        with new_file(directory / name) as partial:
            partial.write_bytes(content)
    return [directory / name for name in files]


def is_edited(directory: Path) -> bool:
    """Return whether the card in the directory of a saved model is not as it was written."""
    card, config = directory / CARD, directory / CONFIG
    if not card.is_file() or not config.is_file():
        return False
    return _sums(_read_object(config) or {}).get(CARD) != hashlib.sha256(card.read_bytes()).hexdigest()


def refuse_foreign_directory(
    directory: Path,
    configs: Sequence[str] = (CONFIG, FIRST_CONFIG),
    others: Sequence[str] = (WEIGHTS, TOKENIZER, CARD),
) -> None:
    """Refuse to overwrite files of the same names where none of the configs among them is ours."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--output {directory}: is a file; export writes a directory")
    found = [name for name in (*configs, *others) if (directory / name).exists()]
    content = next((_read_object(directory / name) for name in configs if name in found), None)
    if found and (content is None or content.get("made_by") != MADE_BY):
        raise UsageError(
            f"--output {directory}: holds {found[0]}, which is of no export of ours; choose another directory"
        )


def read_saved(directory: Path) -> Saved:
    """Read what `write_saved` of this version or an older one wrote; refuse what is damaged or of a newer format."""
    path = config_in(directory) or directory / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] not in range(1, FORMAT + 1):
            raise UsageError(
                f"{path}: is of format {content['format']!r}, this version reads 1 to {FORMAT}. Install a newer seqvae."
            )
        known = {field.name for field in fields(DataDescription)}
        if strange := [name for name in content["description"] if name not in known]:
            raise UsageError(f"{path}: describes data by {some(strange)}, which this version does not know")
        description = DataDescription(**{name: plain(value) for name, value in content["description"].items()})
        encoded = (directory / WEIGHTS).read_bytes()
        if _sums(content).get(WEIGHTS, "") not in ("", hashlib.sha256(encoded).hexdigest()):
            raise ValueError(f"{WEIGHTS} is not as it was written")
        settings, data = dict(content["settings"]), dict(content["data"])
        stored = StoredNetwork(description, settings, safetensors.load(encoded), int(content["step"]), data)
        _ = stored.model  # refuses settings of no network
        return Saved(stored, dict(content.get("results", {})))
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise UsageError(f"{directory}: no export of ours, or a damaged one ({error}). Export it again.") from error


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _sums(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the checksums that a config has; none of format 1."""
    sums = config.get("sha256")
    return sums if isinstance(sums, dict) else {}
