"""What the loader hands to a model: one named tuple of padded tensors for each kind of sequence.

Named tuples, because torch's `pin_memory` and Lightning's device transfer rebuild them and skip plain dataclasses in
silence. Masks are not here: they follow from `lengths_B` and are made on the device.

Shapes: B sequences, T steps (padded), D features of a vector, E events of the whole batch.
With --pad_grid a batch may end with sequences of length 0 (number -1, no label); an empty batch (every process must take part in
every step) holds nothing else. They come to 0 nats and 0 steps.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
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


def padded_length(batch: Batch) -> int:
    """How many steps each sequence has with its padding."""
    return int(_grid(batch).shape[1])


def padded_steps(batch: Batch) -> int:
    """How many steps a network computes on, padding included."""
    grid = _grid(batch)
    return grid.shape[0] * grid.shape[1]


def part_of(batch: Batch, first: int, last: int) -> Batch:
    """Sequences `first` to `last` (not included) of a batch, as wide as it is. It belongs to the same optimizer step."""
    labels_B = None if batch.labels_B is None else batch.labels_B[first:last]
    common: dict[str, Any] = {
        "lengths_B": batch.lengths_B[first:last],
        "sequences_B": batch.sequences_B[first:last],
        "labels_B": labels_B,
    }
    match batch:
        case TokenBatch():
            return batch._replace(tokens_BT=batch.tokens_BT[first:last], **common)
        case VectorBatch():
            observed_BTD = batch.observed_BTD[first:last]
            return batch._replace(values_BTD=batch.values_BTD[first:last], observed_BTD=observed_BTD, **common)
        case EventBatch():
            steps = padded_length(batch)
            bounds = torch.tensor([first * steps, last * steps], device=batch.steps_E.device)
            begin, end = torch.searchsorted(batch.steps_E, bounds).tolist()
            events: dict[str, Any] = {
                name: getattr(batch, name)[begin:end] for name in ("variables_E", "values_E", "has_value_E", "steps_E")
            }
            events["steps_E"] = events["steps_E"] - first * steps
            return batch._replace(gaps_BT=batch.gaps_BT[first:last], **events, **common)


def _grid(batch: Batch) -> Tensor:
    match batch:
        case TokenBatch():
            return batch.tokens_BT
        case VectorBatch():
            return batch.values_BTD
        case EventBatch():
            return batch.gaps_BT


class Gathers(Protocol):
    """What is needed of a `SequenceSet`."""

    @property
    def lengths_N(self) -> np.ndarray: ...

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch: ...
