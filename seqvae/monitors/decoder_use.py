"""Whether the decoder uses the latent: a batch and its posteriors in, the NLL that its sequences lose given another one's z out.

    decoder use = NLL(x_i | z_j) - NLL(x_i | z_i),  j another sequence of the batch, z drawn from the posterior

`decoder_use` computes its sums for a batch. `DecoderProbe` reads it during a run, and leaves nothing behind: on a few fixed
batches, those the user gave, or the DataModule offers, or the first of the validation. Where there are none, or their posteriors
cannot be had, it is the micro-batch at hand. A quick look takes some 32 sequences and one j for each, which is enough where the
decoder clearly uses z; a close one 128 and three.

Shapes: B sequences, S steps, Z latent dimensions, R real sequences.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from seqvae.monitors.contract import HasLevels, MovesLatents, ReadOutputs, StepOutputs, check_step_outputs, fault_of

NOISE_SEED = 0
"""The same noise at every reading: what moves is the model."""
QUICK_SEQUENCES, ENOUGH_SEQUENCES = 32, 128
"""Sequences of a quick look and of a close one. Of 32, a decoder use of 0.44 has a standard error of 0.18."""
PARTNERS = 3
"""Other sequences' z that each sequence meets in a close look."""
MOST_BATCHES = 32
"""Validation batches are taken until they hold enough sequences, but no more than these."""

TRAINING_STEP_NOTE = """\
This was the monitor, which called {module}.training_step in eval mode, without gradients, for the posteriors of a batch of
validation data, in order to read decoder use. Give {module} a method posterior_of(batch) that returns mean and
log-variance, or give the monitor probe_batch=..., or probe_decoder=False."""


@runtime_checkable
class Probeable(Protocol):
    """What a module offers for its decoder's use to be read. Called in eval mode, without gradients."""

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
        """Return -log p(x | z) of each sequence, (B,), in nats, summed over its steps; z has the shape of the mean, or is codes
        of the shape of the module's own."""


@runtime_checkable
class ComputesPosterior(Protocol):
    """What a module may offer besides: its posteriors, cheaper than by a `training_step` and without side effects."""

    def posterior_of(self, batch: Any) -> tuple[Any, ...]:
        """Return mean and log-variance, (B, Z) or (B, S, Z), and, if there is padding, a mask, (B,) or (B, S); of codes, what
        `code_outputs` makes of them.

        Where steps have posteriors of their own, a sequence's real steps come first.
        """


@runtime_checkable
class OffersProbeBatches(Protocol):
    """What a LightningDataModule may offer: a small sample, where its validation batches are large, or single sequences."""

    def probe_batches(self) -> Sequence[Any]:
        """Return the same few batches in every process and after a resume; some 128 sequences in all, two or more in each.

        The first ones, up to 32 sequences, are for quick looks.
        """


@runtime_checkable
class CountsSteps(Protocol):
    """What a module may offer besides: how much data a reading rests on."""

    def steps_of(self, batch: Any) -> Tensor:
        """Return how many steps each sequence has, (B,)."""


class DecoderUse(NamedTuple):
    """Sums over sequences; a mean is divided after they are added up over batches and processes."""

    nll_lost: Tensor
    nll_lost_squared: Tensor
    sequences: Tensor
    steps: Tensor
    """0: the module does not say."""
    wins: Tensor
    """Comparisons in which the own z gave the lower NLL, a tie being half of one, each as a share of its sequence's."""


def decoder_use(module: Probeable, batch: Any, posterior: StepOutputs, partners: int = 1) -> DecoderUse:
    """Compare each sequence's NLL with its own z to that with the z of others of its batch, on average over `partners` of them.
    Latents that are codes are exchanged as they are.

    Padding has no part in it, and neither has a sequence that is alone in its batch.
    """
    mean, logvar, mask = posterior.posterior_mean, posterior.posterior_logvar, mask_of(posterior)
    if posterior.codes is not None:
        z = torch.where(mask[..., None], posterior.codes, 0)
    else:
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(NOISE_SEED)).to(mean.device)
        drawn = mean.float() + torch.exp(0.5 * logvar.float()) * noise
        if isinstance(module, MovesLatents):
            drawn = module.move_latents(drawn, mean.float(), logvar.float())
        # In the posterior's own type: that is what the decoder is used to. Padding may hold anything.
        z = torch.where(mask[..., None], drawn, 0.0).to(mean.dtype)
    partners = max(1, min(partners, int(real_sequences(mask).sum()) - 1))
    nlls = []
    for one in (z, *(z_of_another(z, mask, number) for number in range(1, partners + 1))):
        nll_B = module.nll_given_z(batch, one)
        if not (isinstance(nll_B, Tensor) and nll_B.shape == z.shape[:1]):
            found = f"shape {tuple(nll_B.shape)}" if isinstance(nll_B, Tensor) else f"a {type(nll_B).__name__}"
            raise ValueError(
                f"{type(module).__name__}.nll_given_z returned {found} for a batch of {len(z)}: "
                f"let it return ({len(z)},), the NLL of each sequence, summed over its steps"
            )
        nlls.append(nll_B.float())
    counted_B = real_sequences(mask)
    counted_B = counted_B & (counted_B.sum() > 1)
    differences_KB = torch.stack(nlls[1:]) - nlls[0]
    lost_B = torch.where(counted_B, differences_KB.mean(dim=0), 0.0)
    wins_B = torch.where(counted_B, 0.5 + 0.5 * differences_KB.sign().mean(dim=0), 0.0)
    steps_B = module.steps_of(batch) * counted_B if isinstance(module, CountsSteps) else torch.zeros_like(lost_B)
    return DecoderUse(lost_B.sum(), lost_B.square().sum(), counted_B.sum(), steps_B.sum(), wins_B.sum())


def posterior_of(module: ComputesPosterior, batch: Any) -> StepOutputs:
    """Return the posteriors that the module computes, checked."""
    returned = module.posterior_of(batch)
    name = f"{type(module).__name__}.posterior_of"
    remedy = "let it return mean and logvar, (B, Z) or (B, S, Z), and, if there is padding, a bool mask, (B,) or (B, S)"
    if isinstance(returned, StepOutputs) and (fault := fault_of(returned)) is None:
        return returned
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise ValueError(f"{name} returned a {type(returned).__name__}, not a tuple of two or three: {remedy}")
    mean, logvar, *mask = returned
    posterior = StepOutputs(mean, logvar, mask[0] if mask else None)
    if fault := fault_of(posterior):
        raise ValueError(f"{name} returned {fault}: {remedy}")
    return posterior


def level_of(module: LightningModule, level: str | None) -> Any:
    """Return what offers the methods for probing a level of a module's latents: itself, or what it has for the level."""
    if level is None:
        return module
    if not isinstance(module, HasLevels):
        raise ValueError(
            f"{type(module).__name__} has no method latent_level(name), so that level {level!r} cannot be read"
        )
    return module.latent_level(level)


def mask_of(posterior: StepOutputs) -> Tensor:
    """Return (B,) or (B, S), true for what is real."""
    mean, mask = posterior.posterior_mean, posterior.posterior_mask
    return torch.ones(mean.shape[:-1], dtype=torch.bool, device=mean.device) if mask is None else mask


def real_sequences(mask: Tensor) -> Tensor:
    """Return (B,): false for sequences that are nothing but padding."""
    return mask.reshape(len(mask), -1).any(dim=1)


def z_of_another(z: Tensor, mask: Tensor, number: int = 1) -> Tensor:
    """Give each real sequence the z of another real one: a random one, as neighbours may be of one class or of one recording.

    Another `number`, below that of the real sequences, gives it that of a third.
    """
    real_R = real_sequences(mask).nonzero().squeeze(dim=1)
    shuffled_R = real_R[torch.randperm(len(real_R), generator=torch.Generator().manual_seed(NOISE_SEED)).to(z.device)]
    other_R = shuffled_R.roll(number)
    swapped = z.clone()
    swapped[shuffled_R] = z[other_R] if z.dim() == 2 else repeated(z[other_R], mask[other_R], z.shape[1])
    return swapped


def repeated(z_BSZ: Tensor, mask_BS: Tensor, steps: int) -> Tensor:
    """Return (B, steps, Z): the z of each sequence's real steps, from the first again where they are too few."""
    lengths_B1 = mask_BS.sum(dim=1, keepdim=True).clamp(min=1)
    places_BT = torch.arange(steps, device=z_BSZ.device) % lengths_B1
    return z_BSZ.gather(1, places_BT[..., None].expand(-1, -1, z_BSZ.shape[2]))


@contextmanager
def undisturbed(module: nn.Module, device: torch.device, precision: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter eval mode, without gradients, in the precision of training; restore modes and torch's random numbers afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    gpus = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=gpus), precision:
        module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode


class DecoderProbe:
    """The probe of one run's module. A new run takes a new one."""

    def __init__(self, read_outputs: ReadOutputs, probe_batch: Any = None, level: str | None = None) -> None:
        """`level`: what of a module with several levels of latents to probe; None: its own latents, or the uppermost."""
        self.read_outputs = read_outputs
        self.probe_batch = probe_batch
        self.level = level
        self._fixed: list[Any] | None = None
        """On the device, chosen at the first probe."""
        self._quick = 0
        """How many of them are enough for a quick look."""

    def probe(
        self, trainer: Trainer, module: LightningModule, batch: Any, outputs: StepOutputs, *, closely: bool = False
    ) -> DecoderUse:
        """Return this process's share of the sums; all processes have to probe.

        What the others find on fixed batches does not count, as these may be the same for all. They probe nevertheless: a module
        may wait for the other processes.
        """
        probed = level_of(module, self.level)
        assert isinstance(probed, Probeable)
        precision = trainer.precision_plugin.forward_context()
        with isolate_rng(include_cuda=False), undisturbed(module, trainer.strategy.root_device, precision):
            if self._fixed is None:
                self._fixed = list(self._choose(trainer, module))
            torch.manual_seed(NOISE_SEED)
            partners = PARTNERS if closely else 1
            if not self._fixed:
                return decoder_use(probed, batch, outputs, partners)
            fixed = self._fixed if closely else self._fixed[: self._quick]
            uses = [decoder_use(probed, one, self._posterior(trainer, module, one), partners) for one in fixed]
        sums = DecoderUse(*(torch.stack(column).sum(dim=0) for column in zip(*uses, strict=True)))
        return sums if trainer.is_global_zero else DecoderUse(*(torch.zeros_like(total) for total in sums))

    def _choose(self, trainer: Trainer, module: LightningModule) -> Iterator[Any]:
        """Yield batches in which sequences can exchange their latents, until there are enough."""
        if not (isinstance(level_of(module, self.level), ComputesPosterior) or module.automatic_optimization):
            # A step of manual optimisation moves the weights: it cannot be taken to learn a posterior.
            if self.probe_batch is not None:
                raise ValueError(
                    f"to read decoder use on probe_batch, {type(module).__name__} needs posterior_of(batch)"
                )
            return
        torch.manual_seed(NOISE_SEED)  # a loader that shuffles begins alike in a run and in its continuation
        offering = vars(trainer)["datamodule"]  # set by Lightning, None too, and declared nowhere
        candidates: Iterable[Any] = ()
        if self.probe_batch is not None:
            candidates = (self.probe_batch,)
        elif isinstance(offering, OffersProbeBatches) and (batches := offering.probe_batches()):
            candidates = batches
        elif trainer.val_dataloaders is not None:
            for loader in CombinedLoader(trainer.val_dataloaders).flattened[:1]:
                candidates = islice(loader, MOST_BATCHES)
        found = 0
        for raw in candidates:
            batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(raw))
            sequences = int(real_sequences(mask_of(self._posterior(trainer, module, batch))).sum())
            if sequences > 1:
                # As many batches as come closest to the number wanted.
                self._quick += found + sequences / 2 <= QUICK_SEQUENCES or not self._quick
                found += sequences
                yield batch
            if found >= ENOUGH_SEQUENCES:
                return

    def _posterior(self, trainer: Trainer, module: LightningModule, batch: Any) -> StepOutputs:
        probed = level_of(module, self.level)
        if isinstance(probed, ComputesPosterior):
            return posterior_of(probed, batch)
        named = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        with _leaving_no_trace(trainer, module):
            try:
                outputs = module.training_step(batch, 0) if named else module.training_step(batch)
                if isinstance(outputs, Tensor):
                    outputs = {"loss": outputs}  # as Lightning hands it to callbacks
                return check_step_outputs(module, self.read_outputs(module, outputs, batch))
            except Exception as error:  # whatever a module raises goes on, with a note on the caller
                error.add_note(TRAINING_STEP_NOTE.format(module=type(module).__name__))
                raise


@contextmanager
def _leaving_no_trace(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Restore attributes, buffers, and what lists and dicts hold, as a step may count or collect; drop what the module logs.

    Outside of its own step, Lightning would take what is logged for another metric, or refuse it.
    """
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    values = [value for _, kept in attributes for value in kept.values()]
    containers = [(value, value.copy()) for value in values if type(value) in (list, dict, set, deque)]
    tensors = [value for value in (*values, *module.buffers()) if type(value) is Tensor and not value.is_inference()]
    copies = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
    loggers = trainer.loggers
    try:
        trainer.loggers = [DummyLogger() for _ in loggers]
        for name in ("log", "log_dict"):
            vars(module)[name] = lambda *_, **__: None
        yield
    finally:
        trainer.loggers = loggers
        for name in ("log", "log_dict"):
            vars(module).pop(name)
        # What did not change is not touched: compiled code would notice.
        for container, content in (*attributes, *containers):
            if _identities(container) != _identities(content):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(content)
        for tensor, version, content in copies:
            if tensor._version != version:
                tensor.copy_(content)


def _identities(container: Any) -> list[int]:
    return [id(member) for member in (*container, *(container.values() if isinstance(container, dict) else ()))]
