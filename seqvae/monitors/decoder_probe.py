"""Does the decoder listen? A batch and its posteriors in, the NLL that its sequences lose when told another one's z out.

    decoder use = NLL(x_i | z_j) - NLL(x_i | z_i),  j another sequence of the batch, z drawn from the posterior

`ask_decoder.py` says which batches are asked about in a run, and whose posteriors these are.

Shapes: B sequences, S steps, Z latent dimensions, R real sequences.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from seqvae.monitors.contract import StepOutputs, faults_of

NOISE_SEED = 0
"""The same noise at every reading: what moves is the model."""


@runtime_checkable
class Probeable(Protocol):
    """What a module offers for its decoder's use to be read. Called in eval mode, without gradients."""

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
        """Return -log p(x | z) of each sequence, (B,), in nats, summed over its steps; z is as large as the mean."""


@runtime_checkable
class TellsPosterior(Protocol):
    """What a module may offer beside it: cheaper than a `training_step`, and nothing else can come of it."""

    def posterior_of(self, batch: Any) -> tuple[Tensor, ...]:
        """Return mean and log-variance, (B, Z) or (B, S, Z), and, if there is padding, a mask, (B,) or (B, S).

        Where steps have posteriors of their own, a sequence's real steps come first.
        """


class DecoderUse(NamedTuple):
    """Sums over sequences; whoever wants the mean divides, after adding up over batches and processes."""

    nll_lost: Tensor
    nll_lost_squared: Tensor
    sequences: Tensor


def decoder_use(module: Probeable, batch: Any, posterior: StepOutputs) -> DecoderUse:
    """Compare each sequence's NLL with its own z to that with the z of the sequence before it.

    Padding has no part in it, and neither has a sequence that is alone in its batch.
    """
    mean, logvar, mask = posterior.posterior_mean, posterior.posterior_logvar, mask_of(posterior)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(NOISE_SEED)).to(mean.device)
    drawn = mean.float() + torch.exp(0.5 * logvar.float()) * noise
    # In the posterior's own type: that is what the decoder is used to. Padding may hold anything.
    z = torch.where(mask[..., None], drawn, 0.0).to(mean.dtype)
    own_B, others_B = (_checked_nll(module, module.nll_given_z(batch, told), z) for told in (z, z_of_another(z, mask)))
    counted_B = real_sequences(mask)
    counted_B = counted_B & (counted_B.sum() > 1)
    lost_B = torch.where(counted_B, others_B.float() - own_B.float(), 0.0)
    return DecoderUse(lost_B.sum(), lost_B.square().sum(), counted_B.sum())


def posterior_of(module: TellsPosterior, batch: Any) -> StepOutputs:
    """Return what the module says, checked."""
    told = module.posterior_of(batch)
    name = f"{type(module).__name__}.posterior_of"
    wanted = "let it return mean and logvar, (B, Z) or (B, S, Z), and, if there is padding, a bool mask, (B,) or (B, S)"
    if not isinstance(told, tuple) or len(told) not in (2, 3):
        raise ValueError(f"{name} returned a {type(told).__name__}, not a tuple of two or three: {wanted}")
    posterior = StepOutputs(*told)
    for fault in faults_of(posterior):
        raise ValueError(f"{name} returned {fault}: {wanted}")
    return posterior


def mask_of(posterior: StepOutputs) -> Tensor:
    """(B,) or (B, S), true for what is real."""
    mean, mask = posterior.posterior_mean, posterior.posterior_mask
    return torch.ones(mean.shape[:-1], dtype=torch.bool, device=mean.device) if mask is None else mask


def real_sequences(mask: Tensor) -> Tensor:
    """(B,): false for sequences that are nothing but padding."""
    return mask.reshape(len(mask), -1).any(dim=1)


def z_of_another(z: Tensor, mask: Tensor) -> Tensor:
    """Give each real sequence the z of the real one before it. Where steps have a z each, those of a shorter one repeat."""
    real_R = real_sequences(mask).nonzero().squeeze(dim=1)
    other_R = real_R.roll(1)
    swapped = z.clone()
    if z.dim() == 2:
        swapped[real_R] = z[other_R]
        return swapped
    lengths_R1 = mask[other_R].sum(dim=1, keepdim=True)
    steps_RS = torch.arange(z.shape[1], device=z.device) % lengths_R1
    swapped[real_R] = z[other_R[:, None], steps_RS]
    return swapped


@contextmanager
def undisturbed(module: nn.Module, device: torch.device, precision: AbstractContextManager[Any]) -> Iterator[None]:
    """Eval mode, no gradients, the precision of training; afterwards modes and torch's random numbers are what they were."""
    modes = [(part, part.training) for part in module.modules()]
    gpus = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=gpus), precision:
        module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode


def _checked_nll(module: Probeable, nll: Tensor, z: Tensor) -> Tensor:
    if isinstance(nll, Tensor) and nll.shape == z.shape[:1]:
        return nll
    found = f"shape {tuple(nll.shape)}" if isinstance(nll, Tensor) else f"a {type(nll).__name__}"
    raise ValueError(
        f"{type(module).__name__}.nll_given_z returned {found} for a batch of {len(z)}: "
        f"let it return ({len(z)},), the NLL of each sequence, summed over its steps"
    )
