"""A split in memory with the interface of `SequenceSet`: token sequences of chosen lengths, and nothing on disk."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from seqvae.data.batch import TokenBatch
from seqvae.data.dataset import Windows


class FakeSequences:
    """Sequence i of length L holds the tokens i % 97, i % 97 + 1, ..."""

    stream = None

    def __init__(self, lengths: np.ndarray, broken: int | None = None, owners: np.ndarray | None = None) -> None:
        self.lengths_N = np.asarray(lengths, dtype=np.int32)
        self.broken, self.owners_N = broken, owners

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def windows(self) -> Windows:
        return Windows(np.zeros(len(self), np.int64), self.lengths_N, self.owners_N, 0)

    def cropped(self, most_steps: int) -> "FakeSequences":
        return FakeSequences(np.minimum(self.lengths_N, most_steps), self.broken, self.owners_N)

    def share(self, name: str, key: tuple[object, ...], make: Callable[[], Sequence[np.ndarray]]) -> list[np.ndarray]:
        return list(make())

    def ids(self, sequences_B: np.ndarray) -> list[int | str]:
        return [int(sequence) for sequence in sequences_B]

    def gather(self, sequences_B: np.ndarray, pad_to: int | None = None) -> TokenBatch:
        if self.broken is not None and self.broken in sequences_B:
            raise OSError(f"sequence {self.broken} cannot be read")
        empty = len(sequences_B) == 0
        lengths_B = np.zeros(1, np.int64) if empty else self.lengths_N[sequences_B].astype(np.int64)
        sequences_B = np.array([-1]) if empty else sequences_B
        steps_T = np.arange(pad_to or max(1, lengths_B.max()))
        tokens_BT = np.where(steps_T < lengths_B[:, None], (sequences_B % 97)[:, None] + steps_T, 0)
        return TokenBatch(
            tokens_BT=torch.from_numpy(tokens_BT),
            lengths_B=torch.from_numpy(lengths_B),
            sequences_B=torch.from_numpy(sequences_B.copy()),
            labels_B=None,
            step_tokens=0,
            position=0,
        )


def log_normal_lengths(number: int, seed: int = 0, mean: float = 75, cap: int = 1000) -> np.ndarray:
    """Return lengths as real sets have them: many short ones, few long ones."""
    random = np.random.default_rng(seed)
    spread = 0.8
    lengths = random.lognormal(np.log(mean) - spread**2 / 2, spread, number)
    return np.clip(lengths, 3, cap).astype(np.int32)
