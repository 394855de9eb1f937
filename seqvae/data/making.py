"""One batch for one request, or why there is none: the same in process, in a thread and in a worker process.

In: a split, and the sequences asked for. Out: a padded batch. What would come again is raised as it is; what may be gone at the
next try comes as `NotMade`.
"""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from seqvae.data.batches import Batch
from seqvae.errors import DataError, SettingsError, StorageError, is_out_of_memory

Made = TypeVar("Made")
AFTER_AN_ERROR = (
    "If it stays so, look whether the disks with the cache and the Parquet files are well, and delete the cache directory: it is "
    "built anew from the files"
)


class Gathers(Protocol):
    """What is needed of a `SequenceSet`."""

    @property
    def lengths_N(self) -> np.ndarray: ...

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> Batch: ...


class NotMade(Exception):
    """A batch that did not come about, for a reason that may be gone when the workers have started anew."""

    def __init__(self, reason: str, advice: str) -> None:
        """`advice`: what to do if it stays so; without a full stop, as is the reason."""
        super().__init__(reason, advice)
        self.reason, self.advice = reason, advice


class NothingCame(NotMade):
    """Whoever makes the batch hangs."""


class Maker:
    """Makes the batches of a split; what a worker process is sent."""

    def __init__(self, sequences: Gathers, pad_to: int | None) -> None:
        self._sequences = sequences
        self._pad_to = pad_to

    def __call__(self, sequences_B: np.ndarray) -> Batch:
        return self._sequences.gather(sequences_B, self._pad_to)


def attempt(make: Callable[[np.ndarray], Made], sequences_B: np.ndarray) -> Made:
    """Make something of a request; whatever goes wrong is either final or `NotMade`."""
    try:
        return make(sequences_B)
    except (NotMade, DataError, SettingsError, StorageError):
        raise
    except Exception as error:  # of any type, as anybody's `gather` may run here; it is counted and told, not swallowed
        if is_out_of_memory(error):
            raise
        raise NotMade(_in_words(error), AFTER_AN_ERROR) from error


def pin(batch: Batch) -> Batch:
    """Copy a batch's tensors to page-locked memory."""
    pinned: dict[str, Any] = {
        name: value.pin_memory() for name, value in batch._asdict().items() if isinstance(value, Tensor)
    }
    return batch._replace(**pinned)


def _in_words(error: Exception) -> str:
    """With the line that raised it: the traceback does not get out of a worker process, nor into the message that ends a run."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said} ({Path(frame.f_code.co_filename).name}:{line})"
