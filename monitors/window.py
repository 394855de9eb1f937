"""The last posteriors of a run, kept where they were computed: micro-batches in, nothing out until a reading asks.

A push is two concatenations and two to four small copies on the device. It never waits for the device: padding is taken in
with its mask and sorted out at the reading.

Shapes: B sequences, S steps, Z latent dimensions, N posteriors, C rows of the ring, W numbers in a row.
"""

import torch
from torch import Tensor

from .reading import Scope

MICRO_BATCHES = 4
"""The fewest micro-batches that a full window is made of. One of them alone is no fair sample: its sequences may be of one
length, or its posteriors those of the neighbouring steps of a few sequences."""


class Ring:
    """The last `capacity` rows. Rows that were never pushed are 0."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a ring must have room for 1 row or more, got {capacity}")
        self.capacity = capacity
        self.rows_CW: Tensor | None = None
        """In float32, on the device of the last push."""
        self.next_row = 0

    def push(self, rows_NW: Tensor) -> None:
        """Write over the oldest rows; of more rows than there is room for, the last ones stay."""
        rows_NW = rows_NW[-self.capacity :]
        if self.rows_CW is None:
            self.rows_CW = rows_NW.new_zeros((self.capacity, rows_NW.shape[1]), dtype=torch.float32)
        self.rows_CW = self.rows_CW.to(rows_NW.device)  # a checkpoint's come back on the CPU
        until_end = min(len(rows_NW), self.capacity - self.next_row)
        self.rows_CW[self.next_row : self.next_row + until_end].copy_(rows_NW[:until_end])
        self.rows_CW[: len(rows_NW) - until_end].copy_(rows_NW[until_end:])
        self.next_row = (self.next_row + len(rows_NW)) % self.capacity


class PosteriorWindow:
    """The posteriors that a reading is made of, and the reconstruction NLL of as many sequences."""

    def __init__(self, capacity: int = 1024) -> None:
        self.posteriors = Ring(capacity)
        """Rows: Z means, Z log-variances, 1 or 0 for real or padding."""
        self.nll = Ring(capacity)
        """Rows: nats, 1 or 0 for real or padding. Stays empty where a module does not tell its NLL."""
        self.scope: Scope = "sequence"
        self._pushes = 0

    @torch.no_grad()
    def push(self, mean: Tensor, logvar: Tensor, mask: Tensor | None = None, nll_B: Tensor | None = None) -> None:
        """Take in (B, Z), or (B, S, Z); `mask`, (B,) or (B, S), is true for what is real."""
        if mask is None:
            mask = torch.ones(mean.shape[:-1], dtype=torch.bool, device=mean.device)
        self.scope = "sequence" if mean.dim() == 2 else "step"
        taken = self._taken(mask.numel())
        mean_NZ, logvar_NZ = mean.flatten(0, -2)[taken], logvar.flatten(0, -2)[taken]
        real_N1 = mask.flatten()[taken, None]
        self.posteriors.push(torch.cat((mean_NZ.float(), logvar_NZ.float(), real_N1.float()), dim=1))
        if nll_B is not None:
            real_B = mask.reshape(len(mask), -1).any(dim=1)
            self.nll.push(torch.stack((nll_B.float(), real_B.float()), dim=1)[self._taken(len(nll_B))])
        self._pushes += 1

    def _taken(self, count: int) -> slice:
        """Take all `count` of a micro-batch, or, where they are too many, every n-th, from another one on each time."""
        most = max(1, self.posteriors.capacity // MICRO_BATCHES)
        every = max(1, -(-count // most))
        return slice(self._pushes % every, None, every)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that later readings depend on; empty before the first push. Tensors only, so that it can be gathered."""
        if self.posteriors.rows_CW is None:
            return {}
        nll_CW = self.nll.rows_CW
        numbers = (self.posteriors.next_row, self.nll.next_row, self._pushes, int(self.scope == "step"))
        return {
            "posteriors": self.posteriors.rows_CW.clone(),
            "nll": self.posteriors.rows_CW.new_zeros((0, 2)) if nll_CW is None else nll_CW.clone(),
            "numbers": torch.tensor(numbers),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if len(state["posteriors"]) != self.posteriors.capacity:
            raise ValueError(f"the state holds {len(state['posteriors'])} rows, this window {self.posteriors.capacity}")
        self.posteriors.rows_CW = state["posteriors"].clone()
        self.nll.rows_CW = state["nll"].clone() if len(state["nll"]) else None
        self.posteriors.next_row, self.nll.next_row, self._pushes, by_step = state["numbers"].tolist()
        self.scope = "step" if by_step else "sequence"
