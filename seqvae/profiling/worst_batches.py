"""A budget of steps -> the batches of each length that need the most memory, made of real sequences.

What a batch of so many steps needs depends on their lengths: attention grows with the square of a length, an end mark or a
latent costs more where sequences are short, and kernels change at some length. So lengths are looked at in ranges.

Shapes: N sequences, K batches, B sequences of one batch, E events of the whole batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from seqvae.data.batch import Batch, EventBatch
from seqvae.data.batching import Cut

NEARLY_FULL = 0.95
"""A batch of so large a share of the most steps is taken for a full one, and of those the longest sequences are worst."""

CHOICE = 4
"""The batch with the most events is made of this many times as many sequences."""


class LengthRange(NamedTuple):
    """Lengths of sequences in steps."""

    above: int
    up_to: int


class WorstBatch(NamedTuple):
    """Of a range of lengths, under one budget."""

    length: int
    """Steps that its sequences are padded to."""
    sequences_B: np.ndarray
    """int64; which sequences of the split these are."""

    @property
    def steps(self) -> int:
        return self.length * len(self.sequences_B)

    @property
    def name(self) -> tuple[int, int, int]:
        """Two batches of the same name are the same."""
        return self.length, len(self.sequences_B), int(self.sequences_B[0])


class WorstBatches:
    """Finds them for any budget, in the cut that training would have."""

    def __init__(
        self,
        lengths_N: np.ndarray,
        cut_at: Callable[[int], Cut],
        gather: Callable[[np.ndarray], Batch],
        *,
        pad_to: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """`cut_at` is told the steps of a batch, `gather` makes one of sequences; the rest is as in `Limits`."""
        self._longest_first_N = np.argsort(-lengths_N, kind="stable")
        self._sorted_lengths_N = lengths_N[self._longest_first_N]
        self._cut_at, self._gather, self._pad_to, self._batch_size = cut_at, gather, pad_to, batch_size
        self._last_cut: tuple[int, Cut] | None = None

    @property
    def longest(self) -> int:
        """Steps that the longest sequence is padded to."""
        return self._pad_to or int(self._sorted_lengths_N[0])

    @property
    def highest(self) -> int:
        """The budget that nothing larger differs from: all sequences in one batch, or as many as --batch_size lets in."""
        number = len(self._sorted_lengths_N)
        return self.longest * min(number, self._batch_size or number)

    def ranges(self, number: int) -> list[LengthRange]:
        """At most so many, from long to short, each a constant factor below the one before; all hold sequences."""
        longest, shortest = int(self._sorted_lengths_N[0]), int(self._sorted_lengths_N[-1])
        edges = np.unique(np.geomspace(longest, max(1, shortest), number + 1).round().astype(np.int64))[::-1].tolist()
        tops = edges[: max(1, len(edges) - 1)]
        found = [LengthRange(above, up_to) for up_to, above in zip(tops, [*tops[1:], shortest - 1], strict=True)]
        present_L = np.bincount(self._sorted_lengths_N) > 0
        return [one for one in found if present_L[one.above + 1 : one.up_to + 1].any()]

    def at(self, tokens_per_batch: int, lengths: LengthRange) -> WorstBatch:
        """Of the batches that this budget cuts for sequences of these lengths, the one that needs the most."""
        cut = self._cut(tokens_per_batch)
        starts_K, sizes_K = cut.starts_K1[:-1], np.diff(cut.starts_K1)
        tops_K = cut.tokens_K // sizes_K
        shortest_K = self._sorted_lengths_N[cut.starts_K1[1:] - 1] if self._pad_to is None else np.zeros_like(tops_K)
        concerned = np.flatnonzero((tops_K > lengths.above) & (shortest_K <= lengths.up_to))
        tokens = cut.tokens_K[concerned]
        batch = concerned[np.flatnonzero(tokens >= NEARLY_FULL * tokens.max())[0]]  # they come from long to short
        # Which sequences of its bucket make up a batch differs from epoch to epoch: the longest can come together.
        bucket = np.searchsorted(cut.bucket_starts, starts_K[batch], side="right") - 1
        begin, end = cut.bucket_starts[bucket], cut.bucket_starts[bucket + 1]
        size = int(sizes_K[batch])
        candidates = self._longest_first_N[begin : max(begin + size, min(end, begin + CHOICE * size))]
        return WorstBatch(self._pad_to or int(tops_K[batch]), most_events(candidates, size, self._gather))

    def _cut(self, tokens_per_batch: int) -> Cut:
        if self._last_cut is None or self._last_cut[0] != tokens_per_batch:
            self._last_cut = tokens_per_batch, self._cut_at(tokens_per_batch)
        return self._last_cut[1]


def most_events(candidates: np.ndarray, number: int, gather: Callable[[np.ndarray], Batch]) -> np.ndarray:
    """The first, which is the longest, and of the others those with the most events; without events, the first ones."""
    batch = gather(candidates[:1])
    if not isinstance(batch, EventBatch) or number == len(candidates):
        return candidates[:number]
    batch = gather(candidates)
    assert isinstance(batch, EventBatch)
    rows_E = batch.steps_E.numpy() // batch.gaps_BT.shape[1]
    events_B = np.bincount(rows_E, minlength=len(candidates))
    events_B[0] = events_B.max() + 1
    return candidates[np.argsort(-events_B, kind="stable")[:number]]
