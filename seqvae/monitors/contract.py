"""What a module hands over at each training step, and the words for what is wrong with it.

In: what `training_step` returned. Out: `StepOutputs` for the monitor of the posterior, `Counts` for that of the speed, checked. The
checks look at names, types and shapes alone, so they wait for no device and are done at every step.

Shapes: B sequences, S steps, Z latent dimensions, H codes of a latent.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class StepOutputs(NamedTuple):
    """The posteriors of a micro-batch."""

    posterior_mean: Tensor
    """(B, Z), or (B, S, Z) where every step has a posterior of its own."""
    posterior_logvar: Tensor
    """The same shape."""
    posterior_mask: Tensor | None = None
    """(B,) or (B, S), true for what is real; none: all of it. The real steps of a sequence come first."""
    nll: Tensor | None = None
    """(B,): -log p(x | z) of each sequence in nats, summed over its steps."""
    kl_weight: Tensor | float | None = None
    """The weight of the KL in the loss of this step."""
    prior_mean: Tensor | None = None
    """Where the prior is not N(0, I): its mean for each posterior, of the posterior's shape."""
    prior_logvar: Tensor | None = None
    """The same shape."""
    kl: Tensor | None = None
    """Where the KL does not follow from these: that of each posterior in nats, by dimension, of the mean's shape, or in all, with
    a 1 in place of Z. It may be an estimate from draws."""
    kl_is_estimated: bool = True
    """False: `kl` is computed exactly, so that a reading needs no error."""
    codes: Tensor | None = None
    """(B, H) or (B, S, H), whole numbers from 0 on, where latents are codes: then these are read, and no mean and log-variance
    (`code_outputs`)."""
    codebook_size: int | None = None
    """How many codes there are to choose each of them from."""


def code_outputs(
    codes: Tensor,
    codebook_size: int,
    posterior_mask: Tensor | None = None,
    nll: Tensor | None = None,
    kl_weight: Tensor | float | None = None,
) -> StepOutputs:
    """Return outputs of latents that are codes: points, which have no variance."""
    points = codes.detach().float()
    logvar = torch.full_like(points, -torch.inf)
    return StepOutputs(
        points, logvar, posterior_mask, nll, kl_weight, codes=codes.detach(), codebook_size=codebook_size
    )


class Counts(NamedTuple):
    """The size of one micro-batch, or a sum of them. Whole numbers, on the device where they were computed."""

    real: Tensor | int
    """Steps (tokens) that are data."""
    padded: Tensor | int
    """With padding: what the network computes on."""
    sequences: Tensor | int


@runtime_checkable
class MovesLatents(Protocol):
    """What a module offers whose z is no draw from its Gaussian, but made of one by an invertible map: a normalising flow. Called
    without gradients, with float32 tensors on the module's device."""

    def move_latents(self, base: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
        """Return the latents that draws from these Gaussians are moved to; all have one shape, (..., Z)."""

    def log_density_at(self, z: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
        """Return log q(z | x) of each latent, (R, Z), under each of N posteriors, whose moments are (N, Z): (R, N)."""


ReadOutputs = Callable[[Any, Any, Any], StepOutputs]
"""(module, what training_step returned, batch) -> StepOutputs: for modules whose training_step returns something else."""

ReadCounts = Callable[[Any, Any, Any], Counts]
"""(module, what training_step returned, batch) -> Counts: for modules whose training_step returns something else."""

STEP_OUTPUTS_HELP = """\
Let training_step return a dict with
    "loss"
    "posterior_mean" and "posterior_logvar": (B, Z), a row for each sequence, or (B, S, Z), a row for each step
    "posterior_mask" (optional): bool, (B,) or (B, S), false for padding
    "nll" (optional): (B,), the reconstruction's -log p(x|z) of each sequence in nats, summed over its steps
    "kl_weight" (optional): a number, the weight of the KL in this step's loss
    "prior_mean" and "prior_logvar" (optional): as the posterior's, of a Gaussian prior that is learned; else N(0, I) is assumed
    "kl" (optional): the KL of each posterior where prior or posterior is no Gaussian, of the mean's shape or with 1 in place of Z
    "kl_is_estimated" (optional): False where that KL is computed, and no estimate from draws
    "codes" and "codebook_size", in place of "posterior_mean" and "posterior_logvar" where latents are codes (VQ, FSQ): whole
        numbers from 0 on, (B, H) or (B, S, H) for H codes of each, and how many there are to choose each of them from
or give the monitor read_outputs=f, where f(module, outputs, batch) returns seqvae.monitors.StepOutputs."""

COUNTS_HELP = """\
Let training_step return a dict with, beside "loss",
    "real_steps": how many steps (tokens) of the micro-batch are data
    "padded_steps": how many there are with padding
    "sequences": how many sequences
each an int or an integer tensor of shape (), or give the monitor count=f, where f(module, outputs, batch) returns
seqvae.monitors.Counts."""


def step_outputs_of(module: object, outputs: object, batch: object) -> StepOutputs:
    """Take from the dict of `training_step` what stands there by the names of `StepOutputs`."""
    if isinstance(outputs, Mapping) and outputs.get("codes") is not None:
        found = _with_names(module, outputs, ("codes", "codebook_size"), STEP_OUTPUTS_HELP)
        if isinstance(found["codes"], Tensor):
            names = ("codes", "codebook_size", "posterior_mask", "nll", "kl_weight")
            return code_outputs(**{name: found[name] for name in names if name in found})
        raise _refusal(module, f"codes that are a {type(found['codes']).__name__}, not a tensor", STEP_OUTPUTS_HELP)
    found = _with_names(module, outputs, ("posterior_mean", "posterior_logvar"), STEP_OUTPUTS_HELP)
    return StepOutputs(**{name: found[name] for name in StepOutputs._fields if name in found})


@runtime_checkable
class HasLevels(Protocol):
    """A module with latents of several levels: what it hands over and offers by the usual names is of the uppermost."""

    def latent_level(self, name: str) -> Any:
        """Return what offers `nll_given_z`, `posterior_of` and the like of another level; the latents of all others stay."""


class ReadLevel:
    """Reader of one level's posteriors in the dict of `training_step`: of the level "step" `step_posterior_mean` and the like."""

    def __init__(self, level: str) -> None:
        self.level = level

    def __call__(self, module: object, outputs: object, batch: object) -> StepOutputs:
        own = {f"{self.level}_{name}": name for name in (*_OF_LEVEL, "kl", "kl_is_estimated")}
        found = _with_names(module, outputs, tuple(own)[:2], STEP_OUTPUTS_HELP)
        shared = {name: found[name] for name in ("nll", "kl_weight") if name in found}
        return StepOutputs(**shared, **{name: found[key] for key, name in own.items() if key in found})


_OF_LEVEL = ("posterior_mean", "posterior_logvar", "posterior_mask", "prior_mean", "prior_logvar")


def counts_of(module: object, outputs: object, batch: object) -> Counts:
    """Take the counts from the dict of `training_step`."""
    names = ("real_steps", "padded_steps", "sequences")
    found = _with_names(module, outputs, names, COUNTS_HELP)
    return Counts(*(found[name] for name in names))


def check_step_outputs(module: object, outputs: StepOutputs) -> StepOutputs:
    """Refuse what is no posterior."""
    if not isinstance(outputs, StepOutputs):
        raise ValueError(f"read_outputs returned a {type(outputs).__name__}: let it return seqvae.monitors.StepOutputs")
    mean, logvar, mask, nll, kl_weight, prior_mean, prior_logvar, kl, _, codes, _ = outputs
    # What most outputs are, found out in a third of the time that it takes to look for faults: this is checked at every step.
    if not (
        type(mean) is type(logvar) is type(mask) is type(nll) is Tensor
        and mean.dim() == 2
        and (shape := mean.shape) == logvar.shape
        and shape[1] > 0
        and shape[:1] == mask.shape == nll.shape
        and mask.dtype is torch.bool
        and mean.dtype.is_floating_point
        and logvar.dtype.is_floating_point
        and nll.dtype.is_floating_point
        and type(kl_weight) is float
        and prior_mean is prior_logvar is kl is codes is None
    ) and (fault := fault_of(outputs)):
        raise _refusal(module, fault, STEP_OUTPUTS_HELP)
    return outputs


def seen_from_prior(outputs: StepOutputs) -> tuple[Tensor, Tensor]:
    """Return mean and log-variance of the posteriors in units of their priors, in which every prior is N(0, I).

    The KL is that to the prior, and the information what a posterior tells beyond it.
    """
    mean, logvar = outputs.posterior_mean, outputs.posterior_logvar
    if outputs.prior_mean is None or outputs.prior_logvar is None:
        return mean, logvar
    apart = (mean.detach() - outputs.prior_mean.detach()) * torch.exp(-0.5 * outputs.prior_logvar.detach())
    return apart, logvar.detach() - outputs.prior_logvar.detach()


def describe_loss(loss: Tensor, outputs: StepOutputs) -> str | None:
    """Return what a loss tells of numbers that were handed over wrongly; None: nothing. Waits for the device.

    The loss is compared with NLL + weight * KL on the mean of the micro-batch, and with what that would be if `posterior_logvar`
    held standard deviations. Other terms make a loss larger, and are no fault.
    """
    if outputs.nll is None or outputs.kl_weight is None or outputs.kl is not None or loss.dim():
        return None
    if outputs.codes is not None:
        return None
    mean, logvar = (part.detach().cpu().double() for part in seen_from_prior(outputs))
    whole = torch.ones(mean.shape[:-1], dtype=torch.bool)
    mask = whole if outputs.posterior_mask is None else outputs.posterior_mask.cpu()

    def kl_of(logvar: Tensor) -> float:
        kl_BS = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(dim=-1) * mask
        return float(kl_BS.flatten(1).sum() if kl_BS.dim() > 1 else kl_BS.sum()) / max(1, len(mean))

    nll, weight, found = (
        float(outputs.nll.detach().cpu().double().mean()),
        float(outputs.kl_weight),
        float(loss.detach()),
    )
    handed = outputs.posterior_logvar.detach().cpu()
    if outputs.prior_mean is None and bool((handed[mask] > 0).all()):
        plain = nll + weight * kl_of(logvar)
        of_deviation = nll + weight * kl_of(2 * handed.double().log())
        differ = abs(plain - of_deviation)
        if differ > LEAST_DIFFERENCE * abs(found) and abs(found - of_deviation) < CLOSE * differ:
            return "posterior_logvar seems to hold standard deviations: hand over 2 * log of them"
    if nll > 0 and 0 < found <= MEAN_SHARE * nll:
        return (
            "the loss is less than half of nll alone, as if it were a mean over steps or values of what nll sums up. "
            "Where the KL in it is a sum, it weighs more than kl_weight says: hand over its weight beside such a sum"
        )
    return None


MEAN_SHARE = 0.5
"""Share of the NLL below which a loss is a mean over something; one without a KL is all of it."""
LEAST_DIFFERENCE, CLOSE = 1e-5, 0.02
"""Share of a loss by which two explanations of it must differ, and share of that difference by which the loss may miss one."""


def check_counts(module: object, counts: Counts) -> Counts:
    """Refuse what is no whole number."""
    for name, value in zip(Counts._fields, counts, strict=True):
        if isinstance(value, Tensor):
            if value.dim() or value.is_floating_point() or value.is_complex():
                raise _refusal(module, f"a count ({name}) of shape {tuple(value.shape)} and {value.dtype}", COUNTS_HELP)
        elif type(value) is not int:
            raise _refusal(module, f"a count ({name}) that is a {type(value).__name__}", COUNTS_HELP)
    return counts


def fault_of(outputs: StepOutputs) -> str | None:
    """Return what is wrong in words, the worst of it; None: nothing is."""
    mean, logvar, mask, nll, kl_weight, prior_mean, prior_logvar, kl, kl_is_estimated, codes, codebook_size = outputs
    if not isinstance(kl_is_estimated, bool):
        return f"a kl_is_estimated that is a {type(kl_is_estimated).__name__}, not a bool"
    if codes is not None:
        if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
            return f"codes of {codes.dtype}, not whole numbers"
        if codes.dim() not in (2, 3) or codes.shape[-1] == 0:
            return f"codes of shape {tuple(codes.shape)}"
        if type(codebook_size) is not int or codebook_size < 2:
            return f"a codebook_size of {codebook_size!r}"
    for name, value in outputs._asdict().items():
        if name in ("kl_weight", "kl_is_estimated", "codes", "codebook_size") or (
            value is None and name in StepOutputs._field_defaults
        ):
            continue
        if not isinstance(value, Tensor):
            return f"a {name} that is a {type(value).__name__}, not a tensor"
        if value.dtype != torch.bool if name == "posterior_mask" else not value.is_floating_point():
            return f"a {name} of {value.dtype}"
    if mean.dim() not in (2, 3) or mean.shape[-1] == 0:
        return f"a posterior_mean of shape {tuple(mean.shape)}"
    if logvar.shape != mean.shape:
        return f"a posterior_mean of shape {tuple(mean.shape)} and a posterior_logvar of {tuple(logvar.shape)}"
    if (prior_mean is None) != (prior_logvar is None):
        return "one of prior_mean and prior_logvar without the other"
    for name, value in (("prior_mean", prior_mean), ("prior_logvar", prior_logvar)):
        if value is not None and value.shape != mean.shape:
            return f"a {name} of shape {tuple(value.shape)} where {tuple(mean.shape)} is required"
    if kl is not None and kl.shape not in (mean.shape, (*mean.shape[:-1], 1)):
        return f"a kl of shape {tuple(kl.shape)} where {tuple(mean.shape)} is required, or 1 for its last dimension"
    for name, value, shape in (("posterior_mask", mask, mean.shape[:-1]), ("nll", nll, mean.shape[:1])):
        if value is not None and value.shape != shape:
            return f"a {name} of shape {tuple(value.shape)} where {tuple(shape)} is required"
    if isinstance(kl_weight, Tensor):
        return f"a kl_weight of shape {tuple(kl_weight.shape)} where () is required" if kl_weight.dim() else None
    return None if isinstance(kl_weight, float | int | None) else f"a kl_weight that is a {type(kl_weight).__name__}"


def _with_names(module: object, outputs: object, names: tuple[str, ...], remedy: str) -> Mapping[str, Any]:
    if not isinstance(outputs, Mapping):
        raise _refusal(module, f"a {type(outputs).__name__}", remedy)
    missing = [name for name in names if name not in outputs]
    if missing:
        found = ", ".join(f'"{name}"' for name in outputs) or "nothing"
        raise _refusal(module, f"{found}, and no {' and no '.join(missing)}", remedy)
    return outputs


def _refusal(module: object, found: str, remedy: str) -> ValueError:
    return ValueError(f"{type(module).__name__}.training_step returned {found}. {remedy}")
