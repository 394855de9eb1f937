"""What the user said about batches, and the data -> how much goes into a batch: pure functions of numbers.

    limits = resolve_limits(lengths_N, BatchSettings(), max_sequence_length=1000, accumulate=2)

Shapes: N sequences. A token is one step of a sequence.
"""

from typing import NamedTuple

import numpy as np

from seqvae.config.data_settings import BatchSettings
from seqvae.errors import SettingsError

STEPS_PER_EPOCH = 50
"""Optimizer steps that an epoch of a small set should have, unless the user says otherwise."""


class Limits(NamedTuple):
    """How much goes into a batch."""

    batch_size: int | None
    """At most this many sequences; None: no limit."""
    tokens_per_batch: int
    """At most this many steps, padding included."""
    pad_to: int | None
    """Steps that every sequence is padded to; None: the longest of its batch."""
    hint: str = ""
    """What the same memory would hold, where that is more."""
    quadratic: float | None = None
    """Steps of a sequence from which on attention costs more than all else: L steps cost as much as L + L^2 / `quadratic` would
    without. None: no quadratic term."""


def resolve_limits(
    lengths_N: np.ndarray, settings: BatchSettings, max_sequence_length: int, accumulate: int = 1
) -> Limits:
    """Fill in what the user left open for training; `accumulate` batches make one optimizer step."""
    pad_to = None if settings.use_dynamic_padding else max_sequence_length
    row = pad_to or int(lengths_N.max())  # steps of the dearest sequence
    by_length = settings.bucketing and settings.use_dynamic_padding
    if settings.tokens_per_batch is not None:
        _refuse_small_budget(settings.tokens_per_batch, row, settings.use_dynamic_padding)
        return Limits(settings.batch_size, settings.tokens_per_batch, pad_to)
    if settings.batch_size is not None:
        hint = _packing_hint(lengths_N, settings.batch_size, row) if by_length else ""
        return Limits(settings.batch_size, settings.batch_size * row, pad_to, hint)
    tokens = int(lengths_N.sum(dtype=np.int64)) if by_length else len(lengths_N) * row
    return Limits(None, max(row, min(4 * max_sequence_length, tokens // (STEPS_PER_EPOCH * accumulate))), pad_to)


def resolve_evaluation_limits(lengths_N: np.ndarray, settings: BatchSettings, max_sequence_length: int) -> Limits:
    """Fill in what the user left open for a pass without gradients: as many steps as it takes, room for any sequence."""
    pad_to = None if settings.use_dynamic_padding else max_sequence_length
    row = pad_to or int(lengths_N.max())
    default = 4 * max_sequence_length if settings.batch_size is None else settings.batch_size * row
    return Limits(settings.batch_size, max(row, settings.tokens_per_batch or default), pad_to)


def _refuse_small_budget(tokens: int, row: int, use_dynamic_padding: bool) -> None:
    if tokens >= row:
        return
    if use_dynamic_padding:
        raise SettingsError(
            f"--tokens_per_batch {tokens} is less than the longest sequence ({row} steps): "
            "raise it or lower --max_sequence_length"
        )
    raise SettingsError(
        f"--tokens_per_batch {tokens} is less than --max_sequence_length {row}, to which --use_dynamic_padding false "
        "pads every sequence: raise the one or lower the other"
    )


def _packing_hint(lengths_N: np.ndarray, batch_size: int, row: int) -> str:
    tokens = batch_size * row
    packed = int(tokens / lengths_N.mean())
    if packed <= batch_size:
        return ""
    return (
        f"--batch_size {batch_size}: the same memory holds {packed} sequences of mean length in a batch of {tokens:,} "
        f"steps (--tokens_per_batch {tokens} in its place)"
    )
