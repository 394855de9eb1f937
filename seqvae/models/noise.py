"""Random numbers for the sequences of a batch, each sequence with a stream of its own.

    noise = Noise(seed, batch.sequences_B)
    noise.normal((B, Z))                           what a sequence gets is the same alone and in any batch

A generator of torch has one stream for a whole batch, and a generator for each sequence would be called B times a draw. Here a
number is a hash (SplitMix64) of the seed, the sequence's number, the draw, and the place in it: one tensor operation for all.

Shapes: B sequences, H hashes of each.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""From one number of a stream to the next."""
DRAW = ((GOLDEN << 32) + 2**63) % 2**64 - 2**63
"""From one draw to the next: 2^32 numbers."""
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


class Noise:
    """The streams of the sequences with these numbers, on the numbers' device; each call draws anew.

    The first numbers of a draw do not depend on how many follow: a sequence gets the same beside a longer one.
    """

    def __init__(self, seed: int, numbers_B: Tensor) -> None:
        numbers_B1 = numbers_B.long()[:, None]
        self._streams_B1 = _hash(_hash(torch.full_like(numbers_B1, seed)) + numbers_B1)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Draw multiples of 2^-24 from [0, 1); the first dimension is that of the sequences."""
        return (self._bits(shape) * 2.0**-24).add_(0.5)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Draw from the standard normal distribution; the first dimension is that of the sequences."""
        return (self._bits(shape) * 2.0**-23).add_(2.0**-24).erfinv_().mul_(math.sqrt(2))

    def _bits(self, shape: Sequence[int]) -> Tensor:
        """Draw whole numbers from -2^23 up to 2^23, which is left out."""
        self._streams_B1 = self._streams_B1 + DRAW
        count = math.prod(shape[1:])
        places_H = torch.arange((count + 1) // 2, device=self._streams_B1.device).mul_(GOLDEN)
        halves = _hash(self._streams_B1 + places_H).view(torch.int32)
        return halves[:, :count].bitwise_right_shift(8).view(shape)


def _hash(x: Tensor) -> Tensor:
    """Return the finalizer of SplitMix64 of int64 numbers; the masks make its shifts those of unsigned ones.

    In place, and by their methods, the operations take a sixth less time.
    """
    x = x.bitwise_right_shift(30).bitwise_and_((1 << 34) - 1).bitwise_xor_(x).mul_(FACTORS[0])
    x = x.bitwise_right_shift(27).bitwise_and_((1 << 37) - 1).bitwise_xor_(x).mul_(FACTORS[1])
    return x.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1).bitwise_xor_(x)
