"""From a window of posteriors to a reading: the formulas, applied once for all processes.

In: the window, what the step adds, and a way to gather over processes. Out: a `Reading`, the same in every process. One
wait for the device in all of it; the formulas then run in float64 on the CPU (3 ms for 1,024 x 16).

Shapes: N posteriors, Z latent dimensions, P numbers of a process, E of them beside the window.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from seqvae.monitors import formulas
from seqvae.monitors.decoder_probe import DecoderUse
from seqvae.monitors.reading import Reading, Scope
from seqvae.monitors.window import PosteriorWindow, real_rows

Gather = Callable[[Tensor], Tensor]
"""A tensor of one process -> those of all, one after the other in memory."""

DIGITS = 6
"""Of every number in a reading. Rounded here, so that a row of posterior.jsonl is the reading itself."""

MOST_PRODUCTS = 2**28
"""N * N * Z of the mutual information, at most: 1,024 posteriors of up to 256 dimensions. A reading of a larger latent is made of
fewer (256 of 4,096 dimensions, which takes a twentieth of the time), and its cap is lower."""


ENOUGH_SAMPLES = 340
"""That the information is a mean over, each beside all N posteriors: with all 1,024 it scatters less by some hundredths of a nat,
and the reading takes twice as long."""


class Moment(NamedTuple):
    """What a reading says beside the window."""

    step: int
    epoch: int
    kl_weight: Tensor | float | None = None
    decoder_use: DecoderUse | None = None


def take_reading(window: PosteriorWindow, moment: Moment, gather: Gather = lambda own: own) -> Reading:
    """Read the windows of all processes together; each must have been pushed to."""
    posteriors_CW, nll_CW = window.posteriors.rows_CW, window.nll.rows_CW
    assert posteriors_CW is not None, "a window that nothing was pushed to has nothing to read"
    if nll_CW is None:
        nll_CW = posteriors_CW.new_zeros((0, 2))
    parts = [posteriors_CW.flatten(), nll_CW.flatten(), _extras(moment, posteriors_CW)]
    everything = gather(torch.cat(parts)).cpu()  # sync: the only one, once a reading
    sizes = [part.numel() for part in parts]
    posteriors_RP, nll_RP, extras_RE = everything.reshape(-1, sum(sizes)).split(sizes, dim=1)
    mean_NZ, logvar_NZ = real_rows(posteriors_RP.reshape(-1, posteriors_CW.shape[1])).chunk(2, dim=1)
    nll_N = real_rows(nll_RP.reshape(-1, 2))[:, 0]
    use, use_error = _mean_and_error(*extras_RE.double()[:, 1:].sum(dim=0).tolist())
    return read(mean_NZ, logvar_NZ, moment.step, moment.epoch, window.scope)._replace(
        kl_weight=None if moment.kl_weight is None else _rounded(extras_RE[0, 0]),
        nll=_rounded(nll_N.double().mean()) if len(nll_N) else None,
        decoder_use=use,
        decoder_use_error=use_error,
    )


def with_decoder_use(reading: Reading, use: DecoderUse, gather: Gather = lambda own: own) -> Reading:
    """Add what a probe found to a reading that was taken without."""
    sums_R3 = gather(torch.stack([part.float() for part in use])).cpu().reshape(-1, len(use))  # sync: once a probe
    mean, error = _mean_and_error(*sums_R3.double().sum(dim=0).tolist())
    return reading._replace(decoder_use=mean, decoder_use_error=error)


def read(mean_NZ: Tensor, logvar_NZ: Tensor, step: int, epoch: int, scope: Scope = "sequence") -> Reading:
    """Apply the formulas to real posteriors on the CPU. The step seeds the noise, so that the same input reads the same."""
    every = every_nth_counts(*mean_NZ.shape)
    mean_NZ, logvar_NZ = mean_NZ[::every].double(), logvar_NZ[::every].double()
    kl_Z = formulas.kl_per_dim(mean_NZ, logvar_NZ)
    rate = formulas.rate(kl_Z)
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
        rate=_rounded(rate),
        kl_per_dim=_all_rounded(kl_Z),
        active_units=None if variance_Z.isnan().any() else int(formulas.count_active(variance_Z)),
        mutual_information=_rounded(information),
        mutual_information_cap=_rounded(math.log(len(mean_NZ))) if len(mean_NZ) else math.nan,
        aggregate_kl=_rounded(formulas.aggregate_kl(rate, information)),
        variance_of_means=_all_rounded(variance_Z),
        mean_of_variances=_all_rounded(formulas.mean_of_variances(logvar_NZ)),
        effective_dimensions=_rounded(formulas.effective_dimensions(kl_Z)),
    )


def every_nth_counts(posteriors: int, dimensions: int) -> int:
    """
    >>> every_nth_counts(1024, 256), every_nth_counts(1024, 257), every_nth_counts(1024, 4096), every_nth_counts(0, 16)
    (1, 2, 4, 1)
    """
    most = max(1, math.isqrt(MOST_PRODUCTS // dimensions))
    return max(1, -(-posteriors // most))


def _extras(moment: Moment, like: Tensor) -> Tensor:
    """KL weight and the sums of the decoder's probe; zeros for what there is none of."""
    told = [moment.kl_weight, *(moment.decoder_use or (0.0, 0.0, 0.0))]
    return torch.stack([torch.as_tensor(0.0 if value is None else value).detach().to(like) for value in told])


def _mean_and_error(total: float, squares: float, count: float) -> tuple[float | None, float | None]:
    """A mean and its standard error, from sums; of nothing neither."""
    if not count:
        return None, None
    mean = total / count
    variance = max(squares - count * mean * mean, 0.0) / (count - 1) if count > 1 else math.nan
    return _rounded(mean), _rounded(math.sqrt(variance / count))


def _rounded(value: Tensor | float) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _all_rounded(values_Z: Tensor) -> tuple[float, ...]:
    return tuple(_rounded(value) for value in values_Z.tolist())
