"""A run's decoder use: which batches are asked about, where their posteriors come from, and that nothing is left behind.

In: the Trainer, its module, and the micro-batch at hand with its outputs. Out: the sums of a `DecoderUse`.

Asked are a few fixed batches: those the user gave, or the DataModule offers, or the first of the validation. Where there are
none, or nobody can tell their posteriors, it is the micro-batch at hand.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from seqvae.monitors.contract import ReadOutputs, StepOutputs, checked
from seqvae.monitors.decoder_probe import (
    NOISE_SEED,
    DecoderUse,
    Probeable,
    TellsPosterior,
    decoder_use,
    mask_of,
    posterior_of,
    real_sequences,
    undisturbed,
)

ENOUGH_SEQUENCES = 32
MOST_BATCHES = 8
"""Validation batches are taken until they hold enough sequences, but no more than so many."""


@runtime_checkable
class OffersProbeBatches(Protocol):
    """What a LightningDataModule may offer: a small sample, where its validation batches are large, or single sequences."""

    def probe_batches(self) -> Sequence[Any]:
        """Return the same few batches in every process and after a resume; some 32 sequences in all, two or more in each."""


class DecoderProbe:
    """Asks one run's module. A new run takes a new one."""

    def __init__(self, read_outputs: ReadOutputs, probe_batch: Any = None) -> None:
        self.read_outputs = read_outputs
        self.probe_batch = probe_batch
        self._fixed: list[Any] | None = None
        """On the device, chosen at the first question."""

    def can_ask(self, module: LightningModule) -> bool:
        return isinstance(module, Probeable)

    def ask(self, trainer: Trainer, module: LightningModule, batch: Any, told: StepOutputs) -> DecoderUse:
        """Return this process's share of the sums; all processes have to ask.

        What the others find on fixed batches does not count, as these may be the same for all. They ask nevertheless: a module
        may wait for its like in the other processes.
        """
        assert isinstance(module, Probeable)
        precision = trainer.precision_plugin.forward_context()
        with isolate_rng(include_cuda=False), undisturbed(module, trainer.strategy.root_device, precision):
            if self._fixed is None:
                self._fixed = list(self._choose(trainer, module))
            torch.manual_seed(NOISE_SEED)
            if not self._fixed:
                return decoder_use(module, batch, told)
            uses = [decoder_use(module, one, self._posterior(trainer, module, one)) for one in self._fixed]
        sums = DecoderUse(*(torch.stack(column).sum(dim=0) for column in zip(*uses, strict=True)))
        return sums if trainer.is_global_zero else DecoderUse(*(torch.zeros_like(total) for total in sums))

    def _choose(self, trainer: Trainer, module: LightningModule) -> Iterator[Any]:
        """Yield batches in which sequences can exchange their latents, until there are enough."""
        if not (isinstance(module, TellsPosterior) or module.automatic_optimization):
            # A step of manual optimisation moves the weights: it cannot be taken to learn a posterior.
            if self.probe_batch is not None:
                raise ValueError(f"to be asked about probe_batch, {type(module).__name__} needs posterior_of(batch)")
            return
        torch.manual_seed(NOISE_SEED)  # a loader that shuffles begins alike in a run and in its continuation
        found = 0
        for raw in self._candidates(trainer):
            batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(raw))
            sequences = int(real_sequences(mask_of(self._posterior(trainer, module, batch))).sum())
            if sequences > 1:
                found += sequences
                yield batch
            if found >= ENOUGH_SEQUENCES:
                return

    def _candidates(self, trainer: Trainer) -> Iterator[Any]:
        offering = vars(trainer)["datamodule"]  # set by Lightning, None too, and declared nowhere
        if self.probe_batch is not None:
            yield self.probe_batch
        elif isinstance(offering, OffersProbeBatches) and (batches := offering.probe_batches()):
            yield from batches
        elif trainer.val_dataloaders is not None:
            for loader in CombinedLoader(trainer.val_dataloaders).flattened[:1]:
                yield from islice(loader, MOST_BATCHES)

    def _posterior(self, trainer: Trainer, module: LightningModule, batch: Any) -> StepOutputs:
        if isinstance(module, TellsPosterior):
            return posterior_of(module, batch)
        named = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        with _restored(module), _unlogged(trainer, module):
            try:
                outputs = module.training_step(batch, 0) if named else module.training_step(batch)
                if isinstance(outputs, Tensor):
                    outputs = {"loss": outputs}  # as Lightning hands it to callbacks
                return checked(module, self.read_outputs(module, outputs, batch))
            except Exception as error:  # whatever a module raises goes on, with a word on who had asked
                error.add_note(_NOTE.format(module=type(module).__name__))
                raise


_NOTE = """\
This was the monitor, which asked {module}.training_step in eval mode, without gradients, for the posteriors of a batch of
validation data, in order to read decoder use. Give {module} a method posterior_of(batch) that returns mean and
log-variance, or give the monitor probe_batch=..., or probe_decoder=False."""


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Attributes, buffers, and what lists and dicts hold, are afterwards what they were: a step may count or collect."""
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    values = [value for _, kept in attributes for value in kept.values()]
    containers = [(value, value.copy()) for value in values if type(value) in (list, dict, set, deque)]
    tensors = [value for value in (*values, *module.buffers()) if type(value) is Tensor and not value.is_inference()]
    copies = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        # What did not change is not touched: compiled code would notice.
        for container, content in (*attributes, *containers):
            if _members(container) != _members(content):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(content)
        for tensor, version, content in copies:
            if tensor._version != version:
                tensor.copy_(content)


def _members(container: Any) -> list[int]:
    """Who is in it, whatever they are worth."""
    return [id(member) for member in (*container, *(container.values() if isinstance(container, dict) else ()))]


@contextmanager
def _unlogged(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """What the module logs is lost. Outside of its own step, Lightning would take it for another metric, or refuse it."""
    loggers = trainer.loggers
    with ExitStack() as afterwards:
        afterwards.callback(setattr, trainer, "loggers", loggers)
        trainer.loggers = [DummyLogger() for _ in loggers]
        for name in ("log", "log_dict"):
            vars(module)[name] = _nothing
            afterwards.callback(vars(module).pop, name)
        yield


def _nothing(*arguments: object, **named: object) -> None:
    pass
