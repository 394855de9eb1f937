"""The micro-batches of an optimizer step, computed so that a lack of memory does not end the run.

In: micro-batches as Lightning hands them out, and what computes the loss of one. Out: what `training_step` returns, and gradients.
A micro-batch for which there is no room is computed in two, four ... parts, whose gradients add up to the same, and so are all that
are as long; shorter ones stay whole. What was computed of its optimizer step before is computed again: a backward pass that broke
off has left some gradients behind. Free bits and contrastive loss are those of the whole micro-batch: which dimensions are above
their floor, and how each posterior should move, is found in all its parts before the first of them goes backward.

A reference to the loss keeps all that it was computed from, and Lightning holds one while it calls `backward`: so it gets a copy.
"""

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from seqvae.data.batch import Batch, padded_length, part_of
from seqvae.errors import is_out_of_memory
from seqvae.models.vae import SequenceVAE
from seqvae.training.callbacks.nonfinite import scaler_of

if TYPE_CHECKING:
    from seqvae.training.module import TrainingModule

ROWS = (
    *("posterior_mean", "posterior_logvar", "posterior_mask", "nll", "steps_B", "kl", "codes"),
    *("step_posterior_mean", "step_posterior_logvar", "step_posterior_mask"),
)
"""Outputs of `training_step` with a row for each sequence; its counts and sums add up."""

Result = TypeVar("Result")


class MicroBatches:
    """The micro-batches of one process. Among several a batch is never split: the others would wait for sums that do not come."""

    def __init__(self, module: "TrainingModule") -> None:
        self.module = module
        network = module.network
        self.posterior = network.settings.posterior if isinstance(network, SequenceVAE) else ""
        self.parts = Parts(network.posterior.least_sequences if isinstance(network, SequenceVAE) else 1)
        self.may_split = True
        self._batches_of_step: list[Batch] = []
        self._whole: list[tuple[Tensor, Tensor]] = []
        """The loss of the present micro-batch and the copy of it that Lightning scales, until its backward pass."""

    def forward(self, batch: Batch, *, begins_step: bool) -> dict[str, Any]:
        """Go forward to the loss; where the batch is in parts, also backward."""
        self._whole.clear()
        if begins_step:
            self._batches_of_step.clear()
            self.module.begin_step()
        if not (self.may_split and self.module.trainer.world_size == 1):
            return self.module.compute(batch, 0)
        self._batches_of_step.append(batch)
        if self.parts.of(batch) > 1:
            outputs = run_or_none_on_oom(self._forward_and_backward, batch)
        else:
            outputs = run_or_none_on_oom(self.module.compute, batch, 0)
            if outputs is not None:
                copy = outputs["loss"].detach().requires_grad_()
                self._whole.append((outputs["loss"], copy))
                return outputs | {"loss": copy}
        if outputs is None:
            self._split_further(batch)
            outputs = self._repeat_step()
        return outputs

    def backward(self, scaled_loss: Tensor) -> None:
        """Go backward from what Lightning made of the loss, or of its copy."""
        scaled_loss.backward()
        if self._whole and run_or_none_on_oom(self._backward_from_loss) is None:
            self._split_further(self._batches_of_step[-1])
            self._repeat_step()

    def without_gradients(self, batch: Batch, work: Callable[[Batch, int], Result]) -> list[Result]:
        """Return what `work` makes of a batch, or of each of its parts."""
        if not (self.may_split and self.module.trainer.world_size == 1):
            return [work(batch, 0)]
        while True:
            results = run_or_none_on_oom(
                lambda: [work(part, number) for number, part in enumerate(self.parts.split(batch))]
            )
            if results is not None:
                return results
            self._split_further(batch)

    def _backward_from_loss(self) -> bool:
        """Take the loss out of the list, so that nothing holds it any longer when this fails."""
        loss, copy = self._whole.pop()
        loss.backward(copy.grad)
        return True

    def _repeat_step(self) -> dict[str, Any]:
        """Compute all micro-batches of the optimizer step so far, forward and backward; return the outputs of the last one."""
        while True:
            self.module.begin_step()
            for batch in self._batches_of_step:
                outputs = run_or_none_on_oom(self._forward_and_backward, batch)
                if outputs is None:
                    self._split_further(batch)
                    break
            else:
                assert outputs is not None
                return outputs

    def _forward_and_backward(self, batch: Batch) -> dict[str, Any]:
        """Compute a batch part by part, as a whole optimizer step is scaled; return the outputs of all parts together."""
        trainer = self.module.trainer
        scaler, outputs, parts = scaler_of(trainer), [], self.parts.split(batch)
        with trainer.precision_plugin.train_step_context():
            whole_batch = self.module.whole_batch(parts) if len(parts) > 1 else None
        first = 0
        for number, part in enumerate(parts):
            last = first + len(part.lengths_B)
            known = None if whole_batch is None else whole_batch.of_part(first, last)
            first = last
            with trainer.precision_plugin.train_step_context():
                one = self.module.compute(part, number, known)
            loss = one["loss"] / trainer.accumulate_grad_batches
            (loss if scaler is None else scaler.scale(loss)).backward()
            outputs.append(one | {"loss": one["loss"].detach()})
        whole = joined(outputs)
        return whole | {"loss": whole["loss"].requires_grad_()}  # Lightning goes backward from it, to nothing

    def _split_further(self, batch: Batch) -> None:
        """Compute this batch and all that are as long in twice as many parts from now on; raise where no more can be made."""
        sequences, steps = len(batch.lengths_B), padded_length(batch)
        if not self.parts.double(batch):
            if (least := self.parts.least_sequences) > 1:
                raise MemoryError(
                    f"with {sequences} sequences of {steps:,} steps, of which --posterior {self.posterior} needs {least} together: "
                    "lower --max_sequence_length or --width, give --gradient_checkpointing, or take --posterior gaussian"
                )
            raise MemoryError(
                f"with a single sequence of {steps:,} steps: lower --max_sequence_length or --width, or give "
                "--gradient_checkpointing"
            )
        if self.module.events is not None:
            message = (
                f"out of memory with {sequences:,} sequences of {steps:,} steps: computed in {self.parts.of(batch)} parts from now "
                "on, and so is all that is as long; an optimizer step learns from the same sequences as before"
            )
            self.module.events.survived("out_of_memory", self.module.global_step, message)


class Parts:
    """The number of parts that a micro-batch is computed in. It goes into checkpoints, so that a resumed run computes as it did."""

    def __init__(self, least_sequences: int = 1) -> None:
        """`least_sequences`: what a part holds at least."""
        self.least_sequences = least_sequences
        self._parts_from: dict[int, int] = {}
        """Least padded length -> parts."""

    def of(self, batch: Batch) -> int:
        steps = padded_length(batch)
        parts = max((parts for least, parts in self._parts_from.items() if steps >= least), default=1)
        return min(parts, self._most(batch))

    def _most(self, batch: Batch) -> int:
        return max(1, len(batch.lengths_B) // self.least_sequences)

    def double(self, batch: Batch) -> bool:
        """Take twice as many parts from this batch's length on; return False where there are as many as can be."""
        parts = self.of(batch)
        if parts >= self._most(batch):
            return False
        self._parts_from[padded_length(batch)] = 2 * parts
        return True

    def split(self, batch: Batch) -> list[Batch]:
        parts, sequences = self.of(batch), len(batch.lengths_B)
        if parts == 1:
            return [batch]
        bounds = [sequences * part // parts for part in range(parts + 1)]
        return [part_of(batch, first, last) for first, last in pairwise(bounds)]

    def state_dict(self) -> dict[str, int]:
        return {str(steps): parts for steps, parts in self._parts_from.items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._parts_from = {int(steps): parts for steps, parts in state.items()}


def run_or_none_on_oom(work: Callable[..., Result], *arguments: Any) -> Result | None:
    """Return what `work` returns; None where there was no room for it. What it had allocated is free again by then."""
    try:
        return work(*arguments)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here the error is gone, and with it the frames and tensors of what failed.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def joined(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the outputs of `training_step` for parts as if the micro-batch had been whole."""
    if len(outputs) == 1:
        return outputs[0]
    whole: dict[str, Any] = {}
    for name, first in outputs[0].items():
        values = [output[name] for output in outputs]
        if name in ("kl_weight", "kl_is_estimated", "codebook_size"):
            whole[name] = first
        elif name in ROWS:
            whole[name] = torch.cat(values)
        elif isinstance(first, tuple):
            whole[name] = type(first)(*[sum(column) for column in zip(*values, strict=True)])
        else:
            whole[name] = sum(values)
    return whole
