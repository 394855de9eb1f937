"""What the loader hands to a model: one named tuple of padded tensors for each kind of sequence; and back to plain Python data.

Named tuples, because torch's `pin_memory` and Lightning's device transfer rebuild them and skip plain dataclasses without a word.
Masks are not here: they follow from `lengths_B` and are made on the device.

Shapes: B sequences, T steps (padded), D features of a vector, E events of the whole batch.
With --pad_grid a batch may end with sequences of length 0 (number -1, no label); an empty batch (every process must take part in
every step) holds nothing else. They come to 0 nats and 0 steps.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from seqvae.data.description import DataDescription


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
    """Sequences of sets of events: the events of all steps one behind the other, each with its step."""

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


class Gathers(Protocol):
    """What makes batches of sequences; a `SequenceSet` does."""

    @property
    def lengths_N(self) -> np.ndarray: ...

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch: ...


def padded_length(batch: Batch) -> int:
    """Return how many steps each sequence has with its padding."""
    match batch:
        case TokenBatch():
            return int(batch.tokens_BT.shape[1])
        case VectorBatch():
            return int(batch.values_BTD.shape[1])
        case EventBatch():
            return int(batch.gaps_BT.shape[1])


def padded_steps(batch: Batch) -> int:
    """Return how many steps a network computes on, padding included."""
    return len(batch.lengths_B) * padded_length(batch)


def part_of(batch: Batch, first: int, last: int) -> Batch:
    """Return sequences `first` to `last` (not included) of a batch, as wide as it is. It belongs to the same optimizer step."""
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


Record = str | list[int] | list[dict[str, float]] | list[dict[str, str | float]]
"""A sequence in the data's own units: text; ids; a dictionary of features for each step; or time, variable and value (NaN: none)
for each event."""


def to_records(batch: Batch, description: DataDescription) -> list[Record]:
    """Return one record for each sequence of the batch."""
    match batch:
        case TokenBatch():
            speak = speaker(description)
            lengths = batch.lengths_B.tolist()
            return [speak(ids[:length]) for ids, length in zip(batch.tokens_BT.tolist(), lengths, strict=True)]
        case VectorBatch():
            return [*vector_records(batch, description)]
        case EventBatch():
            return [*event_records(batch, description)]


def speaker(description: DataDescription) -> Callable[[list[int]], str | list[int]]:
    """Return what turns ids into text. Ids without a tokenizer stand for themselves; a tokenizer.json is decoded by its library,
    or, without that library, to its tokens one behind the other."""
    symbols = description.symbols
    match description.tokenizer:
        case None:
            return lambda ids: ids
        case "words":
            return lambda ids: " ".join(symbols[token] for token in ids)
        case "characters":
            return lambda ids: "".join(symbols[token] for token in ids)
        case "bytes":
            return lambda ids: bytes(ids).decode("utf-8", errors="replace")
        case file:
            try:
                from tokenizers import Tokenizer
            except ImportError:  # the extra 'text' is not needed to train from a cache, and need not be there
                return lambda ids: " ".join(symbols[token] for token in ids)
            tokenizer = Tokenizer.from_str(file)
            return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def vector_records(batch: VectorBatch, description: DataDescription) -> list[list[dict[str, float]]]:
    """Return the vectors of each sequence in their own units; NaN where a value is missing."""
    mean_D, std_D = (torch.tensor(moments, dtype=torch.float64) for moments in (description.mean, description.std))
    values_BTD = batch.values_BTD.cpu() * std_D + mean_D
    values_BTD[~batch.observed_BTD.cpu()] = math.nan
    return [
        [dict(zip(description.names, step, strict=True)) for step in steps[:length]]
        for steps, length in zip(values_BTD.tolist(), batch.lengths_B.tolist(), strict=True)
    ]


def event_records(batch: EventBatch, description: DataDescription) -> list[list[dict[str, str | float]]]:
    """Return the events of each sequence in their own units; times count from its first step."""
    steps = batch.gaps_BT.shape[1]
    times = batch.gaps_BT.cpu().double().cumsum(dim=1).flatten().tolist()
    records: list[list[dict[str, str | float]]] = [[] for _ in batch.lengths_B]
    columns = (batch.steps_E, batch.variables_E, batch.values_E, batch.has_value_E)
    for step, variable, value, has_value in zip(*(column.tolist() for column in columns), strict=True):
        own = value * description.std[variable] + description.mean[variable] if has_value else math.nan
        records[step // steps].append({"time": times[step], "variable": description.names[variable], "value": own})
    return records
