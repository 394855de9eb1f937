"""What two runs differ in, in a few words: flags, data, weights.

In: origins of checkpoints, descriptions, tables of weights. Out: short texts for messages; none where all is the same.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from seqvae.data.description import DataDescription

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
