"""The blocks that backbones are stacks of, a file for each architecture, and the memory of those that are called step by step."""

import torch.nn.functional as F
from torch import Tensor

FIRST_ROOM = 16
"""Steps that there is space for at first, while sequences are drawn."""


def with_room(kept: Tensor | None, new: Tensor, step: int, most: int | None = None) -> Tensor:
    """Return what is kept of the steps so far, in a tensor that has space for `step`; steps stand in the last dimension but one.

    `new` is one such step. Space doubles, up to `most` steps: what is kept of T steps is copied less than twice.
    """
    if kept is None:
        return new.new_empty(*new.shape[:-2], FIRST_ROOM, new.shape[-1])
    size = kept.shape[-2]
    if step < size or (most is not None and size >= most):
        return kept
    return F.pad(kept, (0, 0, 0, size if most is None else min(size, most - size)))
