"""What the loader hands to a model: one named tuple of padded tensors for each kind of sequence; and back to plain Python data.

Named tuples, because torch's `pin_memory` and Lightning's device transfer rebuild them and skip plain dataclasses without a word.
Masks are not here: they follow from `lengths_B` and are made on the device.

Shapes: B sequences, T steps (padded), D features of a vector, E events of the whole batch. Functions below go by them: the first
field of a batch is padded (_BT), and a field whose shape begins with B has a row for each sequence.
With --pad_grid a batch may end with sequences of length 0 (number -1, no label); an empty batch (every process must take part in
every step) holds nothing else. They come to 0 nats and 0 steps.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
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
    step_tokens: float
    """Real steps of an optimizer step, over all its micro-batches and processes, on average over the epoch: what the loss is
    divided by. So a nat weighs the same in a batch of short sequences as in one of long ones."""
    position: int
    """Number of this micro-batch, counted through all epochs: the seed of its noise, whatever the number of processes."""
    ends_B: Tensor | None = None
    """bool: the sequence ends where it ends here, and is not cut off by the length cap; None: nothing in the split is cut off."""


class VectorBatch(NamedTuple):
    """Sequences of real vectors."""

    values_BTD: Tensor
    """float32, normalised; 0 where padded or missing."""
    observed_BTD: Tensor
    """bool: a real, present value."""
    lengths_B: Tensor
    sequences_B: Tensor
    labels_B: Tensor | None
    step_tokens: float
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
    step_tokens: float
    position: int


Batch = TokenBatch | VectorBatch | EventBatch


class Gathers(Protocol):
    """The source of batches of sequences, such as a `SequenceSet`."""

    @property
    def lengths_N(self) -> np.ndarray: ...

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch: ...


def padded_length(batch: Batch) -> int:
    """Return how many steps each sequence has with its padding."""
    return int(batch[0].shape[1])


def padded_steps(batch: Batch) -> int:
    """Return how many steps a network computes on, padding included."""
    return len(batch.lengths_B) * padded_length(batch)


def end_marks(batch: TokenBatch) -> Tensor:
    """Return (B,): True for each sequence that an end mark follows, False where it is cut off or has no steps."""
    has_steps_B = batch.lengths_B > 0
    return has_steps_B if batch.ends_B is None else has_steps_B & batch.ends_B


def predicted_steps(batch: Batch) -> Tensor:
    """Return (B,): how many steps of each sequence are predicted, its own and, of tokens, its end mark."""
    return batch.lengths_B + end_marks(batch) if isinstance(batch, TokenBatch) else batch.lengths_B


def checksum_of(batch: Batch, *, without: tuple[str, ...] = ("sequences_B", "labels_B"), begin: int = 0) -> int:
    """Return a checksum of all tensors but those named: of what the sequences hold, not of which ones they are.

    `begin`: the checksum of the batches before.
    """
    checksum = begin
    for name, value in batch._asdict().items():
        if isinstance(value, Tensor) and name not in without:
            checksum = zlib.crc32(value.contiguous().numpy().tobytes(), checksum)
    return checksum


def part_of(batch: Batch, first: int, last: int) -> Batch:
    """Return sequences `first` to `last` (not included) of a batch, as wide as it is. It belongs to the same optimizer step."""
    part: dict[str, Any] = {
        name: value[first:last] for name, value in batch._asdict().items() if "_B" in name and value is not None
    }
    if isinstance(batch, EventBatch):
        steps = padded_length(batch)
        bounds = torch.tensor([first * steps, last * steps], device=batch.steps_E.device)
        begin, end = torch.searchsorted(batch.steps_E, bounds).tolist()
        part |= {name: getattr(batch, name)[begin:end] for name in ("variables_E", "values_E", "has_value_E")}
        part["steps_E"] = batch.steps_E[begin:end] - first * steps
    return batch._replace(**part)


def with_rows(batch: Batch, rows: int) -> Batch:
    """Fill a batch up to `rows` sequences with sequences of length 0, which have no number (-1) and no label."""
    missing = rows - len(batch.lengths_B)
    assert missing >= 0, "a batch of more sequences than were to fit"
    filled: dict[str, Any] = {}
    for name, value in batch._asdict().items():
        if "_B" in name and value is not None:
            fill = -1 if name in ("sequences_B", "labels_B") else 0
            filled[name] = F.pad(value, (0, 0) * (value.dim() - 1) + (0, missing), value=fill)
    return batch._replace(**filled)


Record = str | list[int] | list[dict[str, float]] | list[dict[str, str | float]]
"""A sequence in the data's own units: text; ids; a dictionary of features for each step; or time, variable and value (NaN: none)
for each event."""


def to_records(batch: Batch, description: DataDescription) -> list[Record]:
    """Return one record for each sequence of the batch. Times of events count from the sequence's first step."""
    lengths, names = batch.lengths_B.tolist(), description.names
    match batch:
        case TokenBatch():
            speak = speaker(description)
            return [speak(ids[:length]) for ids, length in zip(batch.tokens_BT.tolist(), lengths, strict=True)]
        case VectorBatch():
            mean_D, std_D = (torch.tensor(of, dtype=torch.float64) for of in (description.mean, description.std))
            values_BTD = batch.values_BTD.cpu() * std_D + mean_D
            values_BTD[~batch.observed_BTD.cpu()] = math.nan
            return [
                [dict(zip(names, step, strict=True)) for step in steps[:length]]
                for steps, length in zip(values_BTD.tolist(), lengths, strict=True)
            ]
        case EventBatch():
            steps = padded_length(batch)
            times = batch.gaps_BT.cpu().double().cumsum(dim=1).flatten().tolist()
            records: list[list[dict[str, str | float]]] = [[] for _ in lengths]
            columns = (batch.steps_E, batch.variables_E, batch.values_E, batch.has_value_E)
            for step, variable, value, has_value in zip(*(column.tolist() for column in columns), strict=True):
                own = value * description.std[variable] + description.mean[variable] if has_value else math.nan
                records[step // steps].append({"time": times[step], "variable": names[variable], "value": own})
            return [*records]


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
