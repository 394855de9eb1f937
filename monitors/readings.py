"""A reading: what a window of posteriors says about a model at one optimizer step.

In: the window, what the step adds, and a way to gather over processes. Out: a `Reading` of plain numbers, the same in every
process. One wait for the device in all of it; the formulas then run in float64 on the CPU (10 ms for 1,024 x 16).

Shapes: N posteriors, Z latent dimensions, P numbers of a process.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import formulas
from .decoder_probe import DecoderUse
from .window import PosteriorWindow, Scope

Gather = Callable[[Tensor], Tensor]
"""A tensor of one process -> those of all, one after the other in memory."""

DIGITS = 6
"""Of every number in a reading. Rounded here, so that a row of posterior.jsonl is the reading itself."""


class Reading(NamedTuple):
    """In nats. A number that cannot be known is NaN; what a module does not tell, or was not asked for, is None."""

    step: int
    """Optimizer steps done."""
    epoch: int
    scope: Scope
    """What has a posterior: a sequence or a step. All but the NLL and the decoder use is per posterior."""
    posteriors: int
    """How many the reading is made of: the N of the mutual information."""
    rate: float
    kl_per_dim: tuple[float, ...]
    active_units: int | None
    """None: fewer than two posteriors, or a NaN among them."""
    mutual_information: float
    mutual_information_cap: float
    """log N: more cannot be seen."""
    aggregate_kl: float
    variance_of_means: tuple[float, ...]
    """Of each dimension, like the next."""
    mean_of_variances: tuple[float, ...]
    effective_dimensions: float
    kl_weight: float | None = None
    nll: float | None = None
    """Reconstruction NLL per sequence, over as many of the last sequences as the window holds."""
    decoder_use: float | None = None


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
    everything = gather(torch.cat(parts)).cpu().double()  # sync: the only one, once a reading
    sizes = [part.numel() for part in parts]
    posteriors_RP, nll_RP, extras_R3 = everything.reshape(-1, sum(sizes)).split(sizes, dim=1)
    mean_NZ, logvar_NZ = _real(posteriors_RP.reshape(-1, posteriors_CW.shape[1])).chunk(2, dim=1)
    nll_N = _real(nll_RP.reshape(-1, 2))[:, 0]
    nll_lost, probed = extras_R3[:, 1:].sum(dim=0).tolist()
    return read(mean_NZ, logvar_NZ, moment.step, moment.epoch, window.scope)._replace(
        kl_weight=None if moment.kl_weight is None else _rounded(extras_R3[0, 0]),
        nll=_rounded(nll_N.mean()) if len(nll_N) else None,
        decoder_use=_rounded(nll_lost / probed) if probed else None,
    )


def read(mean_NZ: Tensor, logvar_NZ: Tensor, step: int, epoch: int, scope: Scope = "sequence") -> Reading:
    """Apply the formulas to real posteriors on the CPU. The step seeds the noise, so that the same input reads the same."""
    kl_Z = formulas.kl_per_dim(mean_NZ, logvar_NZ)
    rate = formulas.rate(kl_Z)
    information = formulas.mutual_information(mean_NZ, logvar_NZ, torch.Generator().manual_seed(step))
    variance_Z = formulas.variance_of_means(mean_NZ)
    return Reading(
        step=step,
        epoch=epoch,
        scope=scope,
        posteriors=len(mean_NZ),
        rate=_rounded(rate),
        kl_per_dim=_all_rounded(kl_Z),
        active_units=None if variance_Z.isnan().any() else int(formulas.active_units(mean_NZ)),
        mutual_information=_rounded(information),
        mutual_information_cap=_rounded(math.log(len(mean_NZ))) if len(mean_NZ) else math.nan,
        aggregate_kl=_rounded(formulas.aggregate_kl(rate, information)),
        variance_of_means=_all_rounded(variance_Z),
        mean_of_variances=_all_rounded(formulas.mean_of_variances(logvar_NZ)),
        effective_dimensions=_rounded(formulas.effective_dimensions(kl_Z)),
    )


def line_of(reading: Reading) -> str:
    """Say a reading in one line."""
    parts = [
        f"step {reading.step:,}",
        f"rate {reading.rate:.2f}",
        f"MI {reading.mutual_information:.2f} of at most {reading.mutual_information_cap:.2f}",
        f"active units {'?' if reading.active_units is None else reading.active_units}/{len(reading.kl_per_dim)}",
    ]
    told = (("decoder use", reading.decoder_use), ("NLL", reading.nll), ("KL weight", reading.kl_weight))
    return "posterior: " + "  ".join([*parts, *(f"{name} {value:.2f}" for name, value in told if value is not None)])


def _extras(moment: Moment, like: Tensor) -> Tensor:
    """KL weight, NLL lost, sequences probed; zeros for what there is none of."""
    told = [moment.kl_weight, *(moment.decoder_use or (0.0, 0.0))]
    return torch.stack([torch.as_tensor(0.0 if value is None else value).to(like) for value in told])


def _real(rows_NW: Tensor) -> Tensor:
    """Leave out the rows whose last number says that they are padding, and that number."""
    return rows_NW[rows_NW[:, -1] > 0, :-1]


def _rounded(value: Tensor | float) -> float:
    return float(f"{float(value):.{DIGITS}g}")


def _all_rounded(values_Z: Tensor) -> tuple[float, ...]:
    return tuple(_rounded(value) for value in values_Z.tolist())
