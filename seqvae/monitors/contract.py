"""What a module hands over at each training step, and the words for what is wrong with it.

In: whatever `training_step` returned. Out: `StepOutputs`, checked. The checks look at names, types and shapes alone, so they
wait for no device and are done at every step.

Shapes: B sequences, S steps, Z latent dimensions.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StepOutputs(NamedTuple):
    """The posteriors of a micro-batch."""

    posterior_mean: Tensor
    """(B, Z), or (B, S, Z) where every step has a posterior of its own."""
    posterior_logvar: Tensor
    """As large."""
    posterior_mask: Tensor | None = None
    """(B,) or (B, S), true for what is real; none: all of it. The real steps of a sequence come first."""
    nll: Tensor | None = None
    """(B,): -log p(x | z) of each sequence in nats, summed over its steps."""
    kl_weight: Tensor | float | None = None
    """The weight of the KL in the loss of this step."""


ReadOutputs = Callable[[Any, Any, Any], StepOutputs]
"""(module, what training_step returned, batch) -> StepOutputs: for modules whose training_step returns something else."""

WANTED = """\
Let training_step return a dict with
    "loss"
    "posterior_mean" and "posterior_logvar": (B, Z), a row for each sequence, or (B, S, Z), a row for each step
    "posterior_mask" (optional): bool, (B,) or (B, S), false for padding
    "nll" (optional): (B,), the reconstruction's -log p(x|z) of each sequence in nats, summed over its steps
    "kl_weight" (optional): a number, the weight of the KL in this step's loss
or give the monitor read_outputs=f, where f(module, outputs, batch) returns seqvae.monitors.StepOutputs."""


def from_training_step(module: object, outputs: object, batch: object) -> StepOutputs:
    """Take what the dict of `training_step` says by the names of `StepOutputs`."""
    if not isinstance(outputs, Mapping):
        raise _refusal(module, f"a {type(outputs).__name__}")
    missing = [name for name in ("posterior_mean", "posterior_logvar") if name not in outputs]
    if missing:
        found = ", ".join(f'"{name}"' for name in outputs) or "nothing"
        raise _refusal(module, f"{found}, and no {' and no '.join(missing)}")
    return StepOutputs(**{name: outputs[name] for name in StepOutputs._fields if name in outputs})


def checked(module: object, outputs: StepOutputs) -> StepOutputs:
    """Refuse what is no posterior."""
    if not isinstance(outputs, StepOutputs):
        raise ValueError(f"read_outputs returned a {type(outputs).__name__}: let it return seqvae.monitors.StepOutputs")
    if not looks_right(outputs):
        for fault in faults_of(outputs):
            raise _refusal(module, fault)
    return outputs


def looks_right(outputs: StepOutputs) -> bool:
    """What most outputs are, found out in a third of the time that it takes to look for faults: this is asked at every step."""
    mean, logvar, mask, nll, kl_weight = outputs
    return (
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
    )


def faults_of(outputs: StepOutputs) -> Iterator[str]:
    """What is wrong, in words, the worst first; each fault holds as long as those before it are not there."""
    mean, logvar, mask, nll, kl_weight = outputs
    yield from _type_faults("posterior_mean", mean)
    yield from _type_faults("posterior_logvar", logvar)
    if mean.dim() not in (2, 3) or mean.shape[-1] == 0:
        yield f"a posterior_mean of shape {tuple(mean.shape)}"
    if logvar.shape != mean.shape:
        yield f"a posterior_mean of shape {tuple(mean.shape)} and a posterior_logvar of {tuple(logvar.shape)}"
    if mask is not None:
        yield from _type_faults("posterior_mask", mask, boolean=True)
        yield from _shape_faults("posterior_mask", mask, mean.shape[:-1])
    if nll is not None:
        yield from _type_faults("nll", nll)
        yield from _shape_faults("nll", nll, mean.shape[:1])
    if isinstance(kl_weight, Tensor):
        yield from _shape_faults("kl_weight", kl_weight, torch.Size(()))
    elif not isinstance(kl_weight, float | int | None):
        yield f"a kl_weight that is a {type(kl_weight).__name__}"


def _type_faults(name: str, value: object, *, boolean: bool = False) -> Iterator[str]:
    if not isinstance(value, Tensor):
        yield f"a {name} that is a {type(value).__name__}, not a tensor"
    elif value.dtype != torch.bool if boolean else not value.is_floating_point():
        yield f"a {name} of {value.dtype}"


def _shape_faults(name: str, value: Tensor, shape: torch.Size) -> Iterator[str]:
    if value.shape != shape:
        yield f"a {name} of shape {tuple(value.shape)} where {tuple(shape)} was wanted"


def _refusal(module: object, found: str) -> ValueError:
    return ValueError(f"{type(module).__name__}.training_step returned {found}. {WANTED}")
