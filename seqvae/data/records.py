"""A normalised batch -> plain Python data in the data's own units: text as text, values with their scale, times added up.

Shapes: B sequences, T steps, D features, E events.
"""

import math
from collections.abc import Callable, Sequence

import torch

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.description import DataDescription

Record = str | list[int] | list[dict[str, float]] | list[dict[str, str | float]]
"""Text; ids; a dictionary of features for each step; or time, variable and value (NaN: none) for each event."""


def to_records(batch: Batch, description: DataDescription) -> list[Record]:
    """One record for each sequence of the batch."""
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
    """How ids become what they stand for. Ids without a tokenizer stand for themselves."""
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
            return file_speaker(file, symbols)


def file_speaker(file: str, symbols: Sequence[str]) -> Callable[[list[int]], str]:
    """Of a tokenizer.json: as its own library decodes; without that library, the tokens one behind the other."""
    try:
        from tokenizers import Tokenizer
    except ImportError:  # the extra 'text' is not needed to train from a cache, and need not be there
        return lambda ids: " ".join(symbols[token] for token in ids)
    tokenizer = Tokenizer.from_str(file)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def vector_records(batch: VectorBatch, description: DataDescription) -> list[list[dict[str, float]]]:
    mean_D, std_D = (torch.tensor(moments, dtype=torch.float64) for moments in (description.mean, description.std))
    values_BTD = batch.values_BTD.cpu() * std_D + mean_D
    values_BTD[~batch.observed_BTD.cpu()] = math.nan
    return [
        [dict(zip(description.names, step, strict=True)) for step in steps[:length]]
        for steps, length in zip(values_BTD.tolist(), batch.lengths_B.tolist(), strict=True)
    ]


def event_records(batch: EventBatch, description: DataDescription) -> list[list[dict[str, str | float]]]:
    """Times count from a sequence's first step."""
    steps = batch.gaps_BT.shape[1]
    times = batch.gaps_BT.cpu().double().cumsum(dim=1).flatten().tolist()
    records: list[list[dict[str, str | float]]] = [[] for _ in batch.lengths_B]
    columns = (batch.steps_E, batch.variables_E, batch.values_E, batch.has_value_E)
    for step, variable, value, has_value in zip(*(column.tolist() for column in columns), strict=True):
        own = value * description.std[variable] + description.mean[variable] if has_value else math.nan
        records[step // steps].append({"time": times[step], "variable": description.names[variable], "value": own})
    return records
