"""The micro-batches of an optimizer step, computed so that a lack of memory does not end the run.

In: micro-batches as Lightning hands them out, and what computes the loss of one. Out: what `training_step` tells, and gradients; a
micro-batch for which there is no room is computed in parts, and with it what went before it in its optimizer step: a way back that
broke off has left some gradients behind.

Whoever holds the loss holds all that it was computed from, and Lightning does while it calls `backward`: so it gets a copy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import lightning
from torch import Tensor

from seqvae.data.batches import Batch, padded_length
from seqvae.training.callbacks.nonfinite import scaler_of
from seqvae.training.out_of_memory import Parts, fitting, joined

Told = dict[str, Any]
Result = TypeVar("Result")


class Computes(Protocol):
    """What is needed of a training module."""

    trainer: lightning.Trainer

    def begin_step(self) -> None:
        """Forget the gradients, and all that was taken in of an optimizer step."""

    def compute(self, batch: Batch, part: int) -> Told:
        """Go forward through a micro-batch or a part of one, to its loss."""

    def tell_of_parts(self, said: str) -> None: ...


class MicroBatches:
    """Of one process. Among several a batch is never split: the others would wait for sums that do not come."""

    def __init__(self, module: Computes) -> None:
        self.module = module
        self.parts = Parts()
        self.may_split = True
        self._of_step: list[Batch] = []
        self._way_back: list[tuple[Tensor, Tensor]] = []
        """The loss of the present micro-batch, and the copy of it that Lightning scales; nothing where it went back already."""

    def forward(self, batch: Batch, *, begins_step: bool) -> Told:
        """To the loss; where the batch is in parts, there and back."""
        self._way_back.clear()
        if begins_step:
            self._of_step.clear()
            self.module.begin_step()
        if not self._can_split():
            return self.module.compute(batch, 0)
        self._of_step.append(batch)
        is_whole = self.parts.of(batch) == 1
        told = fitting(partial(self.module.compute, batch, 0) if is_whole else partial(self._there_and_back, batch))
        if told is None:
            self._double(batch)
            told = self._step_again()
        elif is_whole:
            copy = told["loss"].detach().requires_grad_()
            self._way_back.append((told["loss"], copy))
            told["loss"] = copy
        return told

    def backward(self, scaled_loss: Tensor) -> None:
        """From what Lightning made of the loss, or of its copy."""
        scaled_loss.backward()
        if self._way_back and fitting(partial(_go_back, self._way_back)) is None:
            self._double(self._of_step[-1])
            self._step_again()

    def without_gradients(self, batch: Batch, work: Callable[[Batch, int], Result]) -> list[Result]:
        """What `work` makes of a batch, or of each of its parts."""
        while True:
            if not self._can_split():
                return [work(batch, 0)]
            results = fitting(lambda: [work(part, number) for number, part in enumerate(self.parts.split(batch))])
            if results is not None:
                return results
            self._double(batch)

    def _can_split(self) -> bool:
        return self.may_split and self.module.trainer.world_size == 1

    def _step_again(self) -> Told:
        """All micro-batches of the optimizer step so far, there and back; what the last one tells."""
        while True:
            self.module.begin_step()
            for batch in self._of_step:
                told = fitting(partial(self._there_and_back, batch))
                if told is None:
                    self._double(batch)
                    break
            else:
                assert told is not None
                return told

    def _there_and_back(self, batch: Batch) -> Told:
        trainer = self.module.trainer
        scaler = scaler_of(trainer)
        told = []
        for number, part in enumerate(self.parts.split(batch)):
            with trainer.precision_plugin.train_step_context():
                one = self.module.compute(part, number)
            loss = one["loss"] / trainer.accumulate_grad_batches
            (loss if scaler is None else scaler.scale(loss)).backward()
            told.append(one | {"loss": one["loss"].detach()})
        whole = joined(told)
        return whole | {"loss": whole["loss"].requires_grad_()}  # Lightning wants something to go back from

    def _double(self, batch: Batch) -> None:
        sequences, steps = len(batch.lengths_B), padded_length(batch)
        if not self.parts.double(batch):
            raise MemoryError(
                f"with a single sequence of {steps:,} steps: lower --max_sequence_length or --width, or give "
                "--gradient_checkpointing"
            )
        self.module.tell_of_parts(
            f"out of memory with {sequences:,} sequences of {steps:,} steps: computed in {self.parts.of(batch)} parts from now on, "
            "and so is all that is as long; an optimizer step learns from the same sequences as before"
        )


def _go_back(way_back: list[tuple[Tensor, Tensor]]) -> bool:
    """Takes the loss out, so that nothing holds it any longer when this fails."""
    loss, copy = way_back.pop()
    loss.backward(copy.grad)
    return True
