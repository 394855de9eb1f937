"""Random numbers for the sequences of a batch, each sequence with a stream of its own.

    noise = Noise(seed, batch.sequences_B)
    noise.normal((B, Z))                           what a sequence gets is the same alone and in any batch

A generator of torch has one stream for a whole batch, and a generator for each sequence would be called B times a draw. Here a
number is a hash (SplitMix64) of the seed, the sequence's number, the draw, and the place in it: one tensor operation for all.

Shapes: K draws, B sequences, C numbers of each, H hashes for these.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""From one number of a stream to the next; from one draw to the next it is 2^32 of these."""
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
AHEAD = 2**14
"""Numbers that are hashed together where a draw takes fewer: one by one, they take a tenth of the time that few events take."""


class Noise:
    """The streams of the sequences with these numbers, on the numbers' device; each call is another draw.

    The first numbers of a draw do not depend on how many follow: a sequence gets the same beside a longer one.
    """

    def __init__(self, seed: int, numbers_B: Tensor) -> None:
        numbers_B1 = numbers_B.long()[:, None]
        self._streams_B1 = _hash(_hash(torch.full_like(numbers_B1, seed)) + numbers_B1)
        self._draw = 0
        self._ahead: dict[int, tuple[int, Tensor]] = {}
        """By how many numbers each sequence gets in a draw: the first draw that was hashed, and it and those after it."""

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Draw multiples of 2^-24 from [0, 1); the first dimension is that of the sequences."""
        return (self._bits(shape) * 2.0**-24).add_(0.5)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Draw from the standard normal distribution; the first dimension is that of the sequences."""
        return (self._bits(shape) * 2.0**-23).add_(2.0**-24).erfinv_().mul_(math.sqrt(2))

    def _bits(self, shape: Sequence[int]) -> Tensor:
        """Draw whole numbers from -2^23 up to 2^23, which is left out."""
        count = math.prod(shape[1:])
        first, ahead_KBC = self._ahead.get(count, (self._draw, None))
        if ahead_KBC is None or self._draw - first >= len(ahead_KBC):
            draws = max(1, AHEAD // max(1, count * len(self._streams_B1)))
            draws_K11 = torch.arange(self._draw, self._draw + draws, device=self._streams_B1.device)[:, None, None]
            places_H = torch.arange((count + 1) // 2, device=self._streams_B1.device)
            hashes_KBH = _hash(self._streams_B1 + ((draws_K11 << 32) + places_H) * GOLDEN)
            first, ahead_KBC = self._draw, hashes_KBH.view(torch.int32)[..., :count].bitwise_right_shift(8)
            self._ahead[count] = first, ahead_KBC
        self._draw += 1
        return ahead_KBC[self._draw - 1 - first].view(shape)


def _hash(x: Tensor) -> Tensor:
    """Return the finalizer of SplitMix64 of int64 numbers; the masks make its shifts those of unsigned ones.

    In place, and by their methods, the operations take a sixth less time.
    """
    x = x.bitwise_right_shift(30).bitwise_and_((1 << 34) - 1).bitwise_xor_(x).mul_(FACTORS[0])
    x = x.bitwise_right_shift(27).bitwise_and_((1 << 37) - 1).bitwise_xor_(x).mul_(FACTORS[1])
    return x.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1).bitwise_xor_(x)
