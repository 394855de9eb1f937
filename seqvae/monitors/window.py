"""The last posteriors of a run, kept where they were computed, and the readings that are taken of them.

Taking in a micro-batch is one copy on the device, two with an NLL. It never waits for the device: padding is taken in with its
mask and sorted out by the reading.

Shapes: B sequences, S steps, Z latent dimensions, N posteriors, C rows that there is room for, W numbers in a row, R processes,
P numbers of a process, E of them beside the window, U sums of a probe.
"""

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqvae.monitors import formulas
from seqvae.monitors.contract import MovesLatents
from seqvae.monitors.decoder_use import DecoderUse
from seqvae.monitors.escape import EscapeThreshold
from seqvae.monitors.reading import Reading, Scope

MICRO_BATCHES = 4
"""The fewest micro-batches that a full window is made of. One of them alone is no fair sample: its sequences may be of one
length, or its posteriors those of the neighbouring steps of a few sequences."""

MOST_NUMBERS_WAITING = 2**16
"""Numbers in the means of a micro-batch that waits: it is kept whole, with all that its tensors are views of."""
MOST_WAITING = 16
"""Micro-batches of a CPU that are taken in together: one after the other, just after a training step, cost three times as much."""

Gather = Callable[[Tensor], Tensor]
"""A tensor of one process -> those of all, one after the other in memory."""

DIGITS = 6
"""Digits of every number in a reading. Rounded here, so that a row of posterior.jsonl is the reading itself."""

MOST_PRODUCTS = 2**28
"""N * N * Z of the mutual information, at most: 1,024 posteriors of up to 256 dimensions. A reading of a larger latent is made of
fewer (256 of 4,096 dimensions, which takes a twentieth of the time), and its cap is lower."""

ENOUGH_SAMPLES = 340
"""Samples that the information is a mean over, each beside all N posteriors: with all 1,024 it scatters less by some hundredths of
a nat, and the reading takes twice as long."""


MOST_MOVED, MOVED_DRAWS, ENOUGH_MOVED = 256, 16, 85
"""Where latents are moved from the Gaussians, each sample goes through the inverse for every posterior: posteriors of a reading,
latents drawn of each, and samples that the information is a mean over."""


class LastRows:
    """The last `capacity` rows, in the blocks that they came in.

    After a training step nothing of a monitor is left in the processor's caches, and each call of torch takes ten times as long
    as in a loop of pushes: to write a block into its place in one tensor, too, took 1.5 to 2 times as long as to keep it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: deque[Tensor] = deque()
        self._held = 0

    def push(self, rows_NW: Tensor) -> None:
        """Keep a block of rows, and let go of those that no reading will see again."""
        self._blocks.append(rows_NW.detach())
        self._held += len(rows_NW)
        while self._held - len(self._blocks[0]) >= self.capacity:
            self._held -= len(self._blocks.popleft())

    @property
    def rows_CW(self) -> Tensor | None:
        """The rows in float32, on the device of the last push, the oldest first; None before the first push.

        Rows that were never pushed are 0 and stand before them.
        """
        if not self._blocks:
            return None
        device = self._blocks[-1].device  # a checkpoint's come back on the CPU
        rows_NW = torch.cat([block.to(device) for block in self._blocks])[-self.capacity :].float()
        missing = self.capacity - len(rows_NW)
        return pad(rows_NW, (0, 0, missing, 0)) if missing else rows_NW


class PosteriorWindow:
    """The posteriors that a reading is made of, and the reconstruction NLL of as many sequences."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.scope: Scope = "sequence"
        self._posteriors, self._nll = LastRows(capacity), LastRows(capacity)
        self._kl_columns = 0
        """Numbers of a posterior's KL that are handed over: none, Z, or 1 in all."""
        self.kl_is_estimated = True
        """Whether these are estimates from draws."""
        self._waiting: list[tuple[tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], list[int]]] = []
        """Micro-batches as they were handed over, with the versions of their tensors, which grow when these change in place."""
        self._most = max(1, capacity // MICRO_BATCHES)
        self._pushes = 0

    def push(
        self,
        mean: Tensor,
        logvar: Tensor,
        mask: Tensor | None = None,
        nll_B: Tensor | None = None,
        kl: Tensor | None = None,
        *,
        kl_is_estimated: bool = True,
    ) -> None:
        """Take in (B, Z), or (B, S, Z); `mask`, (B,) or (B, S), is true for what is real. `kl` and whether it is estimated as in
        `StepOutputs`."""
        self.scope = "sequence" if mean.dim() == 2 else "step"
        self._kl_columns, self.kl_is_estimated = 0 if kl is None else kl.shape[-1], kl_is_estimated
        nll_B, kl = (None if part is None else part.detach() for part in (nll_B, kl))
        batch = (mean.detach(), logvar.detach(), mask, nll_B, kl)
        self._waiting.append((batch, [part._version for part in batch if part is not None]))
        # A GPU may use the memory of a batch again for the next one (CUDA graphs).
        may_wait = mean.device.type == "cpu" and mean.numel() <= MOST_NUMBERS_WAITING
        if len(self._waiting) >= MOST_WAITING or not may_wait:
            self._take_in_waiting()

    def _take_in_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for batch, versions in waiting:
            if [part._version for part in batch if part is not None] != versions:
                raise ValueError("training_step returned a posterior that was changed in place later: return a copy")
            mean, logvar, mask, nll_B, kl = batch
            if mask is None:
                mask = torch.ones(mean.shape[:-1], dtype=torch.bool, device=mean.device)
            columns = (mean, logvar, mask[..., None]) if kl is None else (mean, logvar, kl, mask[..., None])
            parts = [share_of(part.flatten(0, -2), self._most, self._pushes) for part in columns]
            self._posteriors.push(torch.cat(parts, dim=1))
            if nll_B is not None:
                real_B = mask if mask.dim() == 1 else mask.any(dim=1)
                self._nll.push(
                    torch.stack(
                        (share_of(nll_B, self._most, self._pushes), share_of(real_B, self._most, self._pushes)), dim=1
                    )
                )
            self._pushes += 1

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._pushes)

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """Return the last rows of posteriors and of NLLs; None before the first push.

        A posterior's row is Z means, Z log-variances, its KL if that was handed over, and 1 or 0 for real or padding; that of an
        NLL is nats, and 1 or 0. A module that does not return its NLL has none of these.
        """
        self._take_in_waiting()
        posteriors_CW, nll_CW = self._posteriors.rows_CW, self._nll.rows_CW
        if posteriors_CW is None:
            return None
        return posteriors_CW, posteriors_CW.new_zeros((0, 2)) if nll_CW is None else nll_CW

    def real_posteriors(self) -> tuple[Tensor, Tensor]:
        """Return means and log-variances, (N, Z), on the CPU. A window that nothing was pushed to has none."""
        rows = self.rows()
        assert rows is not None, "nothing was pushed"
        mean_NZ, logvar_NZ, _ = self.columns_of(real_rows(rows[0].cpu()))  # sync: at drawings and at a run's end
        return mean_NZ, logvar_NZ

    @torch.no_grad()
    def moved_posteriors(self, moves: MovesLatents) -> tuple[Tensor, Tensor]:
        """Return the same of latents that the module moves from these Gaussians, estimated from MOVED_DRAWS of each."""
        rows = self.rows()
        assert rows is not None, "nothing was pushed"
        device = rows[0].device
        mean_NZ, logvar_NZ = (part.to(device) for part in self.real_posteriors())
        z_KNZ = moved_draws(moves, mean_NZ, logvar_NZ, MOVED_DRAWS, torch.Generator().manual_seed(0)).cpu()
        return z_KNZ.mean(dim=0), z_KNZ.var(dim=0).log()

    def columns_of(self, rows_NW: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return means and log-variances, (N, Z), and the KL, (N, Z) or (N, 1), of rows without their last number."""
        size = (rows_NW.shape[1] - self._kl_columns) // 2
        mean_NZ, logvar_NZ, kl_NK = rows_NW.split((size, size, self._kl_columns), dim=1)
        return mean_NZ, logvar_NZ, kl_NK if self._kl_columns else None

    def is_finite(self) -> bool:
        """Return whether no posterior holds NaN or infinity."""
        return self.rows() is None or all(bool(part.isfinite().all()) for part in self.real_posteriors())

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that later readings depend on; empty before the first push. Tensors only, so that it can be gathered."""
        rows = self.rows()
        if rows is None:
            return {}
        numbers = torch.tensor((self._pushes, int(self.scope == "step"), self._kl_columns, int(self.kl_is_estimated)))
        return {"posteriors": rows[0], "nll": rows[1], "numbers": numbers}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the state of a window of the same capacity."""
        self._waiting = []
        self._posteriors, self._nll = LastRows(self.capacity), LastRows(self.capacity)
        self._posteriors.push(state["posteriors"])
        if len(state["nll"]):
            self._nll.push(state["nll"])
        # Earlier versions knew of no KL that is handed over, and then only of estimates.
        numbers = state["numbers"].tolist()
        numbers += (0, 1)[len(numbers) - 2 :]
        self._pushes, by_step, self._kl_columns, is_estimated = numbers
        self.kl_is_estimated = bool(is_estimated)
        self.scope = "step" if by_step else "sequence"


def share_of(rows: Tensor, most: int, pushes: int) -> Tensor:
    """Return all rows of a micro-batch, or, where there are more than `most`, every n-th, beginning with another one each time."""
    every = -(-len(rows) // most)
    return rows if every <= 1 else rows[pushes % every :: every]


def real_rows(rows_NW: Tensor) -> Tensor:
    """Return the rows whose last number is not 0, as that of padding is, without that number. Waits for a device."""
    return rows_NW[rows_NW[:, -1] > 0, :-1]


def take_reading(
    window: PosteriorWindow,
    step: int,
    epoch: int,
    kl_weight: Tensor | float | None = None,
    use: DecoderUse | None = None,
    gather: Gather = lambda own: own,
    moves: MovesLatents | None = None,
) -> Reading:
    """Read the windows of all processes together; each must have been pushed to. The result is the same in every process.

    `moves`: the module whose latents are moved from the Gaussians. One wait for the device but for those; the formulas then
    run in float64 on the CPU (3 ms for 1,024 x 16).
    """
    rows = window.rows()
    assert rows is not None, "a window that nothing was pushed to has nothing to read"
    posteriors_CW, nll_CW = rows
    extras = [0.0 if kl_weight is None else kl_weight, *(use or (0.0,) * len(DecoderUse._fields))]
    extras_E = torch.stack([torch.as_tensor(value).detach().to(posteriors_CW) for value in extras])
    parts = [posteriors_CW.flatten(), nll_CW.flatten(), extras_E]
    everything = gather(torch.cat(parts)).cpu()  # sync: the only one, once a reading
    sizes = [part.numel() for part in parts]
    posteriors_RP, nll_RP, extras_RE = everything.reshape(-1, sum(sizes)).split(sizes, dim=1)
    mean_NZ, logvar_NZ, kl_NK = window.columns_of(real_rows(posteriors_RP.reshape(-1, posteriors_CW.shape[1])))
    nll_N = real_rows(nll_RP.reshape(-1, 2))[:, 0]
    reading = read(mean_NZ, logvar_NZ, step, epoch, window.scope, kl_NK, kl_is_estimated=window.kl_is_estimated)
    if moves is not None:
        reading = _with_moved(reading, moves, mean_NZ, logvar_NZ, posteriors_CW.device)
    return with_sums(
        reading._replace(
            kl_weight=None if kl_weight is None else rounded(extras_RE[0, 0]),
            nll=rounded(nll_N.double().mean()) if len(nll_N) else None,
        ),
        extras_RE[:, 1:],
    )


def with_decoder_use(reading: Reading, use: DecoderUse, gather: Gather = lambda own: own) -> Reading:
    """Add what a probe found to a reading that was taken without."""
    sums_RU = gather(torch.stack([part.float() for part in use])).cpu().reshape(-1, len(use))  # sync: once a probe
    return with_sums(reading, sums_RU)


def with_escape_threshold(reading: Reading, threshold: EscapeThreshold, gather: Gather = lambda own: own) -> Reading:
    """Add the escape threshold, that of the first process, to a reading that was taken without."""
    numbers = gather(torch.tensor(threshold)).reshape(-1, len(threshold))[0].tolist()  # sync: once a threshold
    names = ("escape_threshold", "escape_threshold_error", "ideal_escape_threshold", "ideal_escape_threshold_error")
    return reading._replace(**dict(zip(names, numbers, strict=True)))


def with_sums(reading: Reading, sums_RU: Tensor) -> Reading:
    """Add the mean over what all processes probed; the reading of nothing stays as it is."""
    total, squares, count, steps, wins = sums_RU.double().sum(dim=0).tolist()
    if not count:
        return reading
    mean, error = _mean_and_error(total, squares, count)
    return reading._replace(
        decoder_use=mean,
        decoder_use_error=error,
        decoder_use_sequences=int(count),
        decoder_use_steps=int(steps) or None,
        decoder_use_wins=rounded(wins / count),
    )


def read(
    mean_NZ: Tensor,
    logvar_NZ: Tensor,
    step: int,
    epoch: int,
    scope: Scope = "sequence",
    kl_NK: Tensor | None = None,
    *,
    kl_is_estimated: bool = True,
) -> Reading:
    """Apply the formulas to real posteriors on the CPU. The step seeds the noise, so that the same input reads the same.

    A KL that is handed over, by dimension or in all, stands in place of that to N(0, I).
    """
    most = max(1, math.isqrt(MOST_PRODUCTS // mean_NZ.shape[1]))
    every = max(1, -(-len(mean_NZ) // most))
    mean_NZ, logvar_NZ = mean_NZ[::every].double(), logvar_NZ[::every].double()
    rate_error = None
    if kl_NK is None:
        kl_Z = formulas.kl_per_dim(mean_NZ, logvar_NZ)
        rate = kl_Z.sum()
    else:
        kl_NK = kl_NK[::every].double()
        kl_Z = kl_NK.mean(dim=0) if kl_NK.shape[1] == mean_NZ.shape[1] else formulas.kl_to_moments(mean_NZ, logvar_NZ)
        rate = kl_NK.sum(dim=1).mean()
        if kl_is_estimated:
            rate_error = rounded(kl_NK.sum(dim=1).std() / math.sqrt(len(kl_NK)))
    information = formulas.mutual_information(
        mean_NZ,
        logvar_NZ,
        torch.Generator().manual_seed(step),
        every_nth_sample=max(1, len(mean_NZ) // ENOUGH_SAMPLES),
    )
    variance_Z = formulas.variance_of_means(mean_NZ)
    return Reading(
        step=step,
        epoch=epoch,
        scope=scope,
        posteriors=len(mean_NZ),
        rate=rounded(rate),
        kl_per_dim=tuple(map(rounded, kl_Z.tolist())),
        active_units=None if variance_Z.isnan().any() else int(formulas.count_active(variance_Z)),
        mutual_information=rounded(information),
        mutual_information_cap=rounded(math.log(len(mean_NZ))) if len(mean_NZ) else math.nan,
        aggregate_kl=rounded(rate - information),
        variance_of_means=tuple(map(rounded, variance_Z.tolist())),
        mean_of_variances=tuple(map(rounded, formulas.mean_of_variances(logvar_NZ).tolist())),
        effective_dimensions=rounded(formulas.effective_dimensions(kl_Z)),
        rate_error=rate_error,
    )


def moved_draws(moves: MovesLatents, mean: Tensor, logvar: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Return `draws` latents of each posterior, (draws, N, Z), on the posteriors' device."""
    noise = torch.randn((draws, *mean.shape), generator=generator).to(mean.device)
    base = mean + torch.exp(0.5 * logvar) * noise
    return moves.move_latents(base, mean.expand_as(base), logvar.expand_as(base))


@torch.no_grad()
def _with_moved(
    reading: Reading, moves: MovesLatents, mean_NZ: Tensor, logvar_NZ: Tensor, device: torch.device
) -> Reading:
    """Read what rests on means and variances from latents that the module draws, of fewer posteriors."""
    every = max(1, -(-len(mean_NZ) // MOST_MOVED))
    mean_NZ, logvar_NZ = (part[::every].float().to(device) for part in (mean_NZ, logvar_NZ))
    if len(mean_NZ) < 2 or not bool((mean_NZ + logvar_NZ).isfinite().all()):
        return reading
    generator = torch.Generator().manual_seed(reading.step)
    z_KNZ = moved_draws(moves, mean_NZ, logvar_NZ, MOVED_DRAWS, generator)
    moments = formulas.moments_of_draws(z_KNZ.double().cpu())
    information = rounded(
        formulas.moved_information(
            z_KNZ[0],
            lambda z_RZ: moves.log_density_at(z_RZ, mean_NZ, logvar_NZ),
            every_nth_sample=max(1, len(mean_NZ) // ENOUGH_MOVED),
        )
    )
    return reading._replace(
        posteriors=len(mean_NZ),
        kl_per_dim=tuple(map(rounded, moments.kl.tolist())),
        active_units=int(formulas.count_active(moments.variance_of_means)),
        mutual_information=information,
        mutual_information_cap=rounded(math.log(len(mean_NZ))),
        aggregate_kl=rounded(reading.rate - information),
        variance_of_means=tuple(map(rounded, moments.variance_of_means.tolist())),
        mean_of_variances=tuple(map(rounded, moments.mean_of_variances.tolist())),
        effective_dimensions=rounded(formulas.effective_dimensions(moments.kl)),
    )


def _mean_and_error(total: float, squares: float, count: float) -> tuple[float, float]:
    """Return a mean and its standard error, from sums."""
    mean = total / count
    variance = max(squares - count * mean * mean, 0.0) / (count - 1) if count > 1 else math.nan
    return rounded(mean), rounded(math.sqrt(variance / count))


def rounded(value: Tensor | float) -> float:
    return float(f"{float(value):.{DIGITS}g}")
