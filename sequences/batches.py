"""What the loader hands to a model: one named tuple of padded tensors for each kind of sequence.

Named tuples, because torch's `pin_memory` and Lightning's device transfer rebuild them and skip plain dataclasses in
silence. Masks are not here: they follow from `lengths_B` and are made on the device.

Shapes: B sequences, T steps (padded), D features of a vector, E events of the whole batch.
With --pad_grid a batch may end with sequences of length 0 (number -1, no label); an empty batch (every process must take part in
every step) holds nothing else. They come to 0 nats and 0 steps.
"""

from typing import NamedTuple

from torch import Tensor


class TokenBatch(NamedTuple):
    """Sequences of token ids."""

    tokens_BT: Tensor
    """int64, 0 where padded."""
    lengths_B: Tensor
    """int64, real steps."""
    sequences_B: Tensor
    """int64, which sequences of the split these are."""
    labels_B: Tensor | None
    """int64, class of each sequence; -1 where it has none."""
    step_tokens: int
    """Real steps of the whole optimizer step, over all its micro-batches and processes: what the loss is divided by."""
    position: int
    """Number of this micro-batch, counted through all epochs: the seed of its noise, whatever the number of processes."""


class VectorBatch(NamedTuple):
    """Sequences of real vectors."""

    values_BTD: Tensor
    """float32, normalised; 0 where padded or missing."""
    observed_BTD: Tensor
    """bool: a real, present value."""
    lengths_B: Tensor
    sequences_B: Tensor
    labels_B: Tensor | None
    step_tokens: int
    position: int


class EventBatch(NamedTuple):
    """Sequences of sets of events: the events of all steps stand one behind the other, each with the step it belongs to."""

    gaps_BT: Tensor
    """float32, time since the step before; 0 for a sequence's first step and where padded."""
    lengths_B: Tensor
    variables_E: Tensor
    """int64, which variable; 0 is <unknown>."""
    values_E: Tensor
    """float32, normalised; 0 where the event has no value."""
    has_value_E: Tensor
    """bool: the event carries a value, not only its presence."""
    steps_E: Tensor
    """int64, the event's step as a flat index b * T + t, ascending."""
    sequences_B: Tensor
    labels_B: Tensor | None
    step_tokens: int
    position: int


Batch = TokenBatch | VectorBatch | EventBatch


def padded_steps(batch: Batch) -> int:
    """How many steps a network computes on, padding included."""
    match batch:
        case TokenBatch():
            grid = batch.tokens_BT
        case VectorBatch():
            grid = batch.values_BTD
        case EventBatch():
            grid = batch.gaps_BT
    return grid.shape[0] * grid.shape[1]
