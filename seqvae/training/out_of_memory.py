"""Batches that are too large for the memory there is: computed in parts, whose gradients add up to the same.

In: a micro-batch, and the error that says that there was no room. Out: the same sequences in two, four ... micro-batches, for this
one and for all that are as long; shorter ones stay whole. What was found out goes into checkpoints, so that a resumed run computes
as it did.
"""

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import torch

from seqvae.data.batches import Batch, padded_length, part_of
from seqvae.errors import is_out_of_memory

Result = TypeVar("Result")

ROWS = ("posterior_mean", "posterior_logvar", "posterior_mask", "nll", "steps_B")
"""What `training_step` tells of each sequence; its counts and sums add up."""
THE_SAME = ("kl_weight",)


class Parts:
    """How many parts a micro-batch is computed in."""

    def __init__(self) -> None:
        self._parts_from: dict[int, int] = {}
        """From so many steps (padded) on, so many parts."""

    def of(self, batch: Batch) -> int:
        steps, sequences = padded_length(batch), len(batch.lengths_B)
        parts = max((parts for least, parts in self._parts_from.items() if steps >= least), default=1)
        return min(parts, sequences)

    def double(self, batch: Batch) -> bool:
        """From this batch's length on, take twice as many parts; False: it is a single sequence already."""
        parts = self.of(batch)
        if parts >= len(batch.lengths_B):
            return False
        self._parts_from[padded_length(batch)] = 2 * parts
        return True

    def split(self, batch: Batch) -> Iterator[Batch]:
        parts, sequences = self.of(batch), len(batch.lengths_B)
        if parts == 1:
            yield batch
            return
        bounds = [sequences * part // parts for part in range(parts + 1)]
        for first, last in pairwise(bounds):
            yield part_of(batch, first, last)

    def state_dict(self) -> dict[str, int]:
        return {str(steps): parts for steps, parts in self._parts_from.items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._parts_from = {int(steps): parts for steps, parts in state.items()}


def fitting(work: Callable[[], Result]) -> Result | None:
    """What `work` returns; None where there was no room for it. What it had allocated is free again by then."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here nobody holds the error any more, and with it the frames and tensors of what failed.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def joined(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """What `training_step` told of each part, as if the micro-batch had been whole."""
    if len(outputs) == 1:
        return outputs[0]
    return {name: _joined(name, [output[name] for output in outputs]) for name in outputs[0]}


def _joined(name: str, values: list[Any]) -> Any:
    if name in THE_SAME:
        return values[0]
    if name in ROWS:
        return torch.cat(values)
    if isinstance(values[0], tuple):
        return type(values[0])(*[sum(column) for column in zip(*values, strict=True)])
    return sum(values)
