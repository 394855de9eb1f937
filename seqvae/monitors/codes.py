"""The last latents of a run whose latents are codes, kept where they were computed, and the readings that are taken of them.

    share in use     of the codes of all codebooks, those that a latent got
    perplexity       exp of the entropy of how often each code is used: as many codes, equally used, would tell as much
    idle             how long nothing has fallen to a code, in optimizer steps and in latents

Codes are counted on their device as they come, without a wait. A reading adds the counts of all processes to those of the
readings before it, as many as hold `ENOUGH` latents for each code: of fewer, some codes would be missed by chance. What the codes
tell of the input is their entropy, as nothing about them is random once the input is known; it is that of the last latents, as for
Gaussians.

Shapes: B sequences, S steps, H codebooks, K codes of each, N latents, C rows that there is room for, R processes.
"""

import math
from collections import deque

import torch
from torch import Tensor

from seqvae.monitors.decoder_use import DecoderUse
from seqvae.monitors.reading import MOST_LISTED, Reading, Scope
from seqvae.monitors.window import MICRO_BATCHES, Gather, LastRows, real_rows, rounded, share_of, with_sums

ENOUGH = 16
"""Latents for each code of a codebook that a share in use is read on: equally likely codes are all met, but for one in 9
million."""
DEAD_AFTER = 8
"""Latents for each code of a codebook, without any for one of them, after which that one counts as dead."""


class CodeWindow:
    """The material of readings of codes: counts since the last reading, those of the readings before, and the last latents."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.scope: Scope = "sequence"
        self._codes, self._nll = LastRows(capacity), LastRows(capacity)
        self._pushes = 0
        self._most = max(1, capacity // MICRO_BATCHES)
        self._counts_HK: Tensor | None = None
        """Of this process, since the last reading."""
        self._read: deque[Tensor] = deque()
        """Counts of all processes at the last readings, the newest last, (H, K) on the CPU."""
        self._idle_HK = self._used_at_HK = torch.zeros(0, 0, dtype=torch.int64)
        """Latents of all processes since each code was used, and the step of the reading before which that was."""

    def push(self, codes: Tensor, size: int, mask: Tensor | None = None, nll_B: Tensor | None = None) -> None:
        """Take in (B, H) or (B, S, H), each below `size`; `mask`, (B,) or (B, S), is true for what is real."""
        self.scope = "sequence" if codes.dim() == 2 else "step"
        codes, (books, device) = codes.detach(), (codes.shape[-1], codes.device)
        mask = torch.ones(codes.shape[:-1], dtype=torch.bool, device=device) if mask is None else mask
        flat_NH, real_N = codes.flatten(0, -2), mask.flatten()
        flat_NH = torch.where(real_N[:, None], flat_NH, 0)
        if device.type == "cpu" and len(flat_NH) and (int(flat_NH.min()) < 0 or int(flat_NH.max()) >= size):
            raise ValueError(f"codes from {int(flat_NH.min())} to {int(flat_NH.max())} for a codebook_size of {size}")
        if self._counts_HK is None or self._counts_HK.shape != (books, size):
            self._counts_HK = torch.zeros(books, size, dtype=torch.int64, device=device)
            self._read.clear()
            self._idle_HK = self._used_at_HK = torch.zeros(books, size, dtype=torch.int64)
        places_NH = flat_NH + torch.arange(books, device=device) * size
        counted_NH = real_N[:, None].expand(-1, books).long()
        self._counts_HK = self._counts_HK.to(device)
        self._counts_HK.view(-1).index_add_(0, places_NH.flatten(), counted_NH.flatten())
        self._codes.push(share_of(torch.cat((flat_NH, real_N[:, None].long()), dim=1), self._most, self._pushes))
        if nll_B is not None:
            real_B = mask if mask.dim() == 1 else mask.any(dim=1)
            self._nll.push(
                torch.stack(
                    (share_of(nll_B.detach(), self._most, self._pushes), share_of(real_B, self._most, self._pushes)),
                    dim=1,
                )
            )
        self._pushes += 1

    @property
    def is_empty(self) -> bool:
        return self._counts_HK is None

    def take_reading(
        self,
        step: int,
        epoch: int,
        kl_weight: Tensor | float | None = None,
        use: DecoderUse | None = None,
        gather: Gather = lambda own: own,
    ) -> Reading:
        """Read what all processes have counted; each must have been pushed to. One wait for the device in all of it."""
        counts_HK, codes_CW, nll_CW = self._counts_HK, self._codes.rows_CW, self._nll.rows_CW
        assert counts_HK is not None, "a window that nothing was pushed to has nothing to read"
        assert codes_CW is not None
        nll_CW = codes_CW.new_zeros((0, 2)) if nll_CW is None else nll_CW
        extras = [0.0 if kl_weight is None else kl_weight, *(use or (0.0,) * len(DecoderUse._fields))]
        extras_E = torch.stack([torch.as_tensor(value).detach().to(codes_CW) for value in extras])
        # In float64, which counts exactly to 2^53.
        parts = [part.double() for part in (counts_HK, codes_CW, nll_CW, extras_E)]
        everything = gather(torch.cat([part.flatten() for part in parts])).cpu()  # sync: the only one, once a reading
        sizes = [part.numel() for part in parts]
        counts_RP, codes_RP, nll_RP, extras_RE = everything.reshape(-1, sum(sizes)).split(sizes, dim=1)
        counts_HK.zero_()
        self._add(counts_RP.sum(dim=0).long().view(counts_HK.shape), step)
        codes_NH = real_rows(codes_RP.reshape(-1, codes_CW.shape[1])).long()
        nll_N = real_rows(nll_RP.reshape(-1, 2))[:, 0]
        reading = self._reading(codes_NH, step, epoch)._replace(
            kl_weight=None if kl_weight is None else rounded(extras_RE[0, 0]),
            nll=rounded(nll_N.mean()) if len(nll_N) else None,
        )
        return with_sums(reading, extras_RE[:, 1:])

    def _add(self, counts_HK: Tensor, step: int) -> None:
        """Take in the counts of a reading, and let go of those that the rest does without."""
        latents, size = int(counts_HK[0].sum()), counts_HK.shape[1]
        self._idle_HK = torch.where(counts_HK > 0, 0, self._idle_HK + latents)
        self._used_at_HK = torch.where(counts_HK > 0, step, self._used_at_HK)
        self._read.append(counts_HK)
        held = sum(int(one[0].sum()) for one in self._read)
        while len(self._read) > 1 and held - (first := int(self._read[0][0].sum())) >= ENOUGH * size:
            self._read.popleft()
            held -= first

    def _reading(self, codes_NH: Tensor, step: int, epoch: int) -> Reading:
        """Apply the formulas."""
        counts_HK = torch.stack(list(self._read)).sum(dim=0)
        books, size = counts_HK.shape
        latents = int(counts_HK[0].sum())
        information = joint_entropy(codes_NH)
        rate = books * math.log(size)
        idle_steps_HK = step - self._used_at_HK
        is_dead_HK = self._idle_HK >= DEAD_AFTER * size
        dead_steps = idle_steps_HK[is_dead_HK]
        return Reading(
            step=step,
            epoch=epoch,
            scope=self.scope,
            posteriors=len(codes_NH),
            rate=rounded(rate),
            kl_per_dim=(rounded(math.log(size)),) * books,
            active_units=None,
            mutual_information=rounded(information),
            mutual_information_cap=rounded(math.log(len(codes_NH))) if len(codes_NH) else math.nan,
            aggregate_kl=rounded(rate - information),
            variance_of_means=(),
            mean_of_variances=(),
            effective_dimensions=math.nan,
            codebook_size=size,
            codebooks=books,
            code_latents=latents,
            codes_in_use=rounded((counts_HK > 0).double().mean()),
            codes_in_use_expected=rounded(-math.expm1(latents * math.log1p(-1 / size))),
            code_perplexity=rounded(perplexity(counts_HK)),
            dead_codes=int(is_dead_HK.sum()),
            dead_code_steps=int(dead_steps.median()) if len(dead_steps) else None,
            code_idle_steps=tuple(idle_steps_HK.flatten().tolist()) if books * size <= MOST_LISTED else None,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that later readings depend on; empty before the first push. Tensors only, so that it can be gathered."""
        codes_CW, nll_CW = self._codes.rows_CW, self._nll.rows_CW
        if self._counts_HK is None or codes_CW is None:
            return {}
        read_XHK = torch.stack(list(self._read)) if self._read else self._counts_HK.new_zeros(0, *self._counts_HK.shape)
        return {
            "posteriors": codes_CW,
            "nll": codes_CW.new_zeros((0, 2)) if nll_CW is None else nll_CW,
            "numbers": torch.tensor((self._pushes, int(self.scope == "step"))),
            "counts": self._counts_HK,
            "read": read_XHK,
            "idle": torch.stack((self._idle_HK, self._used_at_HK)),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the state of a window of the same capacity."""
        self._codes, self._nll = LastRows(self.capacity), LastRows(self.capacity)
        self._codes.push(state["posteriors"])
        if len(state["nll"]):
            self._nll.push(state["nll"])
        self._pushes, by_step = state["numbers"].tolist()
        self.scope = "step" if by_step else "sequence"
        self._counts_HK = state["counts"].clone()
        self._read = deque(state["read"].cpu())
        self._idle_HK, self._used_at_HK = state["idle"].cpu()


def perplexity(counts_HK: Tensor) -> Tensor:
    """Return exp of the entropy of how often each code is used, the geometric mean over the codebooks; NaN where nothing was
    counted.

    >>> perplexity(torch.tensor([[5, 5, 5, 5, 0, 0, 0, 0]]))
    tensor(4., dtype=torch.float64)
    """
    shares_HK = counts_HK.double() / counts_HK.sum(dim=1, keepdim=True)
    return torch.special.entr(shares_HK).sum(dim=1).mean().exp()


def joint_entropy(codes_NH: Tensor) -> float:
    """Return the entropy of the latents' codes, all codebooks together, in nats: at most log N. 0 of nothing.

    >>> round(joint_entropy(torch.tensor([[0, 1], [0, 1], [0, 2], [3, 1]])), 4)
    1.0397
    """
    if not len(codes_NH):
        return 0.0
    _, counts_X = codes_NH.unique(dim=0, return_counts=True)
    return float(torch.special.entr(counts_X.double() / len(codes_NH)).sum())
