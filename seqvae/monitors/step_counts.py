"""How many steps a micro-batch had: whatever `training_step` returned in, `Counts` out, and the words for what is wrong with it.

The checks look at names, types and shapes alone, so they wait for no device and are done at every step.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Counts(NamedTuple):
    """Of one micro-batch, or a sum of them. Whole numbers, on the device where they were computed."""

    real: Tensor | int
    """Steps (tokens) that are data."""
    padded: Tensor | int
    """With padding: what the network computes on."""
    sequences: Tensor | int


Count = Callable[[Any, Any, Any], Counts]
"""(module, what training_step returned, batch) -> Counts: for modules whose training_step returns something else."""

WANTED = """\
Let training_step return a dict with, beside "loss",
    "real_steps": how many steps (tokens) of the micro-batch are data
    "padded_steps": how many there are with padding
    "sequences": how many sequences
each an int or an integer tensor of shape (), or give the monitor count=f, where f(module, outputs, batch) returns
seqvae.monitors.Counts."""


def from_training_step(module: object, outputs: object, batch: object) -> Counts:
    """Take what the dict of `training_step` says by name."""
    if not isinstance(outputs, Mapping):
        raise _refusal(module, f"a {type(outputs).__name__}")
    names = ("real_steps", "padded_steps", "sequences")
    missing = [name for name in names if name not in outputs]
    if missing:
        found = ", ".join(f'"{name}"' for name in outputs) or "nothing"
        raise _refusal(module, f"{found}, and no {' and no '.join(missing)}")
    return Counts(*(outputs[name] for name in names))


def checked(module: object, counts: Counts) -> Counts:
    """Refuse what is no whole number."""
    for name, value in zip(Counts._fields, counts, strict=True):
        if isinstance(value, Tensor):
            if value.dim() or value.is_floating_point() or value.is_complex():
                raise _refusal(module, f"a count ({name}) of shape {tuple(value.shape)} and {value.dtype}")
        elif type(value) is not int:
            raise _refusal(module, f"a count ({name}) that is a {type(value).__name__}")
    return counts


def add(total: Counts, more: Counts) -> Counts:
    """A sum with tensors in it is a tensor on their device."""
    return Counts(total.real + more.real, total.padded + more.padded, total.sequences + more.sequences)


def padding_share(real: int, padded: int) -> float:
    """
    >>> padding_share(60, 80)
    0.25
    """
    if real > padded:
        raise ValueError(f"{real:,} real steps among {padded:,} with padding cannot be. {WANTED}")
    return 1 - real / padded if padded else math.nan


def _refusal(module: object, found: str) -> ValueError:
    return ValueError(f"{type(module).__name__}.training_step returned {found}. {WANTED}")
