"""Does the decoder listen? A batch and a module in, the NLL that its sequences lose when they are told another one's z out.

    decoder use = NLL(x_i | z_j) - NLL(x_i | z_i),  j another sequence of the batch, z drawn from the posterior

Nothing about the module or the random numbers of the run is different afterwards.

Shapes: B sequences, S steps, Z latent dimensions, R real sequences.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

ENOUGH_SEQUENCES = 16
MOST_BATCHES = 8
"""A probe is made on the first batch with enough sequences, or the largest of so many."""
NOISE_SEED = 0
"""The same noise at every reading: what moves is the model."""


@runtime_checkable
class Probeable(Protocol):
    """What a module offers for its decoder's use to be read. Both are called in eval mode, without gradients."""

    def posterior_of(self, batch: Any) -> tuple[Tensor, ...]:
        """Return mean and log-variance, (B, Z) or (B, S, Z), and, if there is padding, a mask, (B,) or (B, S).

        Where steps have posteriors of their own, a sequence's real steps come first.
        """

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
        """Return -log p(x | z) of each sequence, (B,), in nats, summed over its steps."""


class DecoderUse(NamedTuple):
    """Sums over sequences; whoever wants the mean divides, after adding up over processes."""

    nll_lost: Tensor
    nll_lost_squared: Tensor
    sequences: Tensor


def decoder_use(module: Probeable, batch: Any) -> DecoderUse:
    """Compare each sequence's NLL with its own z to that with the z of the sequence before it; padding has no part in it."""
    mean, logvar, mask = _checked_posterior(module, batch)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(NOISE_SEED)).to(mean)
    z = mean + torch.exp(0.5 * logvar) * noise
    real_B = mask.reshape(len(mask), -1).any(dim=1)
    own_B, others_B = (module.nll_given_z(batch, told) for told in (z, z_of_another(z, mask)))
    if own_B.shape != real_B.shape:
        raise ValueError(
            f"{type(module).__name__}.nll_given_z returned shape {tuple(own_B.shape)} for a batch of {len(mean)}: "
            f"let it return ({len(mean)},), the NLL of each sequence, summed over its steps"
        )
    lost_B = torch.where(real_B, others_B.float() - own_B.float(), 0.0)
    return DecoderUse(lost_B.sum(), lost_B.square().sum(), real_B.sum())


def z_of_another(z: Tensor, mask: Tensor) -> Tensor:
    """Give each real sequence the z of the real one before it. Where steps have a z each, those of a shorter one repeat."""
    real_R = mask.reshape(len(mask), -1).any(dim=1).nonzero().squeeze(dim=1)
    other_R = real_R.roll(1)
    swapped = z.clone()
    if z.dim() == 2:
        swapped[real_R] = z[other_R]
        return swapped
    lengths_R1 = mask[other_R].sum(dim=1, keepdim=True)
    steps_RS = torch.arange(z.shape[1], device=z.device) % lengths_R1
    swapped[real_R] = z[other_R[:, None], steps_RS]
    return swapped


def choose_batch(module: Probeable, batches: Iterable[Any]) -> Any | None:
    """Return the first batch with enough real sequences, or the largest of the first few; none has two: None."""
    best, most = None, 1
    for batch in islice(batches, MOST_BATCHES):
        mask = _checked_posterior(module, batch)[2]
        count = int(mask.reshape(len(mask), -1).any(dim=1).sum())
        if count > most:
            best, most = batch, count
        if most >= ENOUGH_SEQUENCES:
            break
    return best


@contextmanager
def undisturbed(module: nn.Module, device: torch.device, precision: AbstractContextManager[Any]) -> Iterator[None]:
    """Eval mode, no gradients, the precision of training; afterwards modes and random numbers are what they were."""
    modes = [(part, part.training) for part in module.modules()]
    gpus = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=gpus), precision:
        module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode


def _checked_posterior(module: Probeable, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean, logvar, *masks = module.posterior_of(batch)
    mask = masks[0] if masks else None
    if mean.dim() not in (2, 3) or logvar.shape != mean.shape or (mask is not None and mask.shape != mean.shape[:-1]):
        shapes = ", ".join(str(tuple(part.shape)) for part in (mean, logvar, *masks) if part is not None)
        raise ValueError(
            f"{type(module).__name__}.posterior_of returned shapes {shapes}: let it return mean and logvar, (B, Z) or "
            "(B, S, Z), and, if there is padding, a bool mask, (B,) or (B, S)"
        )
    if mask is None:
        mask = torch.ones(mean.shape[:-1], dtype=torch.bool, device=mean.device)
    return mean.float(), logvar.float(), mask
