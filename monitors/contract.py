"""What a module hands over at each training step, and the words for what is wrong with it.

In: whatever `training_step` returned. Out: `StepOutputs`, checked. The checks look at names, types and shapes alone, so they
wait for no device and are done at every step.

Shapes: B sequences, S steps, Z latent dimensions.
"""

from collections.abc import Callable, Mapping
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
    """(B,) or (B, S), true for what is real; none: all of it."""
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
or give the monitor read_outputs=f, where f(module, outputs, batch) returns posterior_monitors.StepOutputs."""


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
    mean, logvar, mask, nll, kl_weight = outputs
    _check_tensor(module, "posterior_mean", mean)
    _check_tensor(module, "posterior_logvar", logvar)
    if mean.dim() not in (2, 3):
        raise _refusal(module, f"a posterior_mean of shape {tuple(mean.shape)}")
    if logvar.shape != mean.shape:
        raise _refusal(
            module, f"a posterior_mean of shape {tuple(mean.shape)} and a posterior_logvar of {tuple(logvar.shape)}"
        )
    if mask is not None:
        _check_tensor(module, "posterior_mask", mask, floating=False)
        _check_shape(module, "posterior_mask", mask, mean.shape[:-1])
    if nll is not None:
        _check_tensor(module, "nll", nll)
        _check_shape(module, "nll", nll, mean.shape[:1])
    if isinstance(kl_weight, Tensor):
        _check_shape(module, "kl_weight", kl_weight, torch.Size(()))
    elif not isinstance(kl_weight, float | int | None):
        raise _refusal(module, f"a kl_weight that is a {type(kl_weight).__name__}")
    return outputs


def _check_tensor(module: object, name: str, value: object, *, floating: bool = True) -> None:
    if not isinstance(value, Tensor):
        raise _refusal(module, f"a {name} that is a {type(value).__name__}, not a tensor")
    if floating != value.is_floating_point() or (not floating and value.dtype != torch.bool):
        raise _refusal(module, f"a {name} of {value.dtype}")


def _check_shape(module: object, name: str, value: Tensor, shape: torch.Size) -> None:
    if value.shape != shape:
        raise _refusal(module, f"a {name} of shape {tuple(value.shape)} where {tuple(shape)} was wanted")


def _refusal(module: object, found: str) -> ValueError:
    return ValueError(f"{type(module).__name__}.training_step returned {found}. {WANTED}")
