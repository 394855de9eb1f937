"""A model for other programs: its weights as safetensors, and all else that it takes to use them in one JSON file.

In: a trained network. Out: a directory with `model.safetensors`, `model.json` (settings; symbols and tokenizer, or the names and
moments to scale values by), and the `tokenizer.json` where there is one; and the same, read back.

A safetensors file is the length of a header (8 bytes, little endian), the header in JSON (name -> type, shape, place), and all
numbers one behind the other.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.inference.output import MADE_BY, new_file
from seqvae.training.network import StoredNetwork
from seqvae.training.run_directory.checkpoint_file import plain

MODEL, WEIGHTS, TOKENIZER = "model.json", "model.safetensors", "tokenizer.json"
FORMAT = 1
LONGEST_HEADER = 100_000_000
"""Bytes; what the format's own library refuses beyond."""
TYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


def write_exported(directory: Path, stored: StoredNetwork) -> list[Path]:
    """`directory` is there. Each file is there in full or not at all; model.json comes last."""
    weights = {name: weight.detach().cpu() for name, weight in stored.weights.items()}
    (directory / MODEL).unlink(missing_ok=True)  # it would describe the weights of another export
    with new_file(directory / WEIGHTS) as partial:
        partial.write_bytes(to_safetensors(weights, {"format": "pt", "made_by": MADE_BY}))
    written = [directory / WEIGHTS]
    tokenizer = stored.description.tokenizer
    if tokenizer is not None and tokenizer.lstrip().startswith("{"):
        with new_file(directory / TOKENIZER) as partial:
            partial.write_text(tokenizer, encoding="utf-8")
        written.append(directory / TOKENIZER)
    content = {
        "made_by": MADE_BY,
        "format": FORMAT,
        "weights": WEIGHTS,
        "step": stored.step,
        "settings": stored.settings,
        "data": stored.data,
        "description": asdict(stored.description),
    }
    with new_file(directory / MODEL) as partial:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [*written, directory / MODEL]


def refuse_foreign(directory: Path) -> None:
    """What lies there under our names and is no export of ours is not overwritten."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--output {directory}: is a file; export wants a directory")
    there = [name for name in (MODEL, WEIGHTS, TOKENIZER) if (directory / name).exists()]
    if there and not _is_ours(directory / MODEL):
        raise UsageError(
            f"--output {directory}: holds {there[0]}, which is of no export of ours; choose another directory"
        )


def _is_ours(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("made_by") == MADE_BY


def read_exported(directory: Path) -> StoredNetwork:
    path = directory / MODEL
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UsageError(
                f"{path}: is of format {content['format']!r}, this version reads {FORMAT}. Export it anew."
            )
        described = {name: plain(value) for name, value in content["description"].items()}
        weights = from_safetensors((directory / WEIGHTS).read_bytes())
        description, settings = DataDescription(**described), dict(content["settings"])
        stored = StoredNetwork(description, settings, weights, int(content["step"]), dict(content["data"]))
        _ = stored.model  # refuses settings of no network
        return stored
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise UsageError(f"{directory}: no export of ours, or a damaged one ({error}). Export it anew.") from error


def to_safetensors(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    names = {kind: name for name, kind in TYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(about)}
    parts, place = [], 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + len(data)],
        }
        parts.append(data)
        place += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # numbers then begin where a machine likes to read them
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def from_safetensors(content: bytes) -> dict[str, Tensor]:
    """Copies; a file that does not keep to the format is a ValueError."""
    (length,) = struct.unpack("<Q", content[:8])
    if length > min(LONGEST_HEADER, len(content) - 8):
        raise ValueError("the weights' header is longer than the file")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    body = content[8 + length :]
    return {name: _tensor(entry, body) for name, entry in header.items()}


def _tensor(entry: Mapping[str, Any], body: bytes) -> Tensor:
    kind, shape = TYPES[entry["dtype"]], [int(size) for size in entry["shape"]]
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(body) or end - begin != math.prod(shape) * kind.itemsize:
        raise ValueError("the weights end too early")
    if begin == end:
        return torch.zeros(shape, dtype=kind)
    numbers = np.frombuffer(body[begin:end], np.uint8).copy()
    return torch.from_numpy(numbers).view(kind).reshape(shape)
