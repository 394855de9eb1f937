"""The micro-batches of an optimizer step, computed so that a lack of memory does not end the run.

In: micro-batches as Lightning hands them out, and what computes the loss of one. Out: what `training_step` tells, and gradients; a
micro-batch for which there is no room is computed in parts, and with it what went before it in its optimizer step: a way back that
broke off has left some gradients behind.

Whoever holds the loss holds all that it was computed from, and Lightning does while it calls `backward`: so it gets a copy.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import lightning
import torch
from torch import Tensor

from seqvae.data.batch import Batch, padded_length, part_of
from seqvae.errors import is_out_of_memory
from seqvae.training.callbacks.nonfinite import scaler_of

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
        told = run_or_none_on_oom(
            partial(self.module.compute, batch, 0) if is_whole else partial(self._there_and_back, batch)
        )
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
        if self._way_back and run_or_none_on_oom(partial(_go_back, self._way_back)) is None:
            self._double(self._of_step[-1])
            self._step_again()

    def without_gradients(self, batch: Batch, work: Callable[[Batch, int], Result]) -> list[Result]:
        """What `work` makes of a batch, or of each of its parts."""
        while True:
            if not self._can_split():
                return [work(batch, 0)]
            results = run_or_none_on_oom(
                lambda: [work(part, number) for number, part in enumerate(self.parts.split(batch))]
            )
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
                told = run_or_none_on_oom(partial(self._there_and_back, batch))
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


# Batches that are too large for the memory there is: computed in parts, whose gradients add up to the same.
#
# In: a micro-batch, and the error that says that there was no room. Out: the same sequences in two, four ... micro-batches, for
# this one and for all that are as long; shorter ones stay whole. What was found out goes into checkpoints, so that a resumed
# run computes as it did.

ROWS = ("posterior_mean", "posterior_logvar", "posterior_mask", "nll", "steps_B")
"""What `training_step` tells of each sequence; its counts and sums add up."""
THE_SAME = ("kl_weight",)


class Parts:
    """How many parts a micro-batch is computed in."""

    def __init__(self) -> None:
        self._parts_from: dict[int, int] = {}
        """From so many steps (padded) on, so many parts."""

    def of(self, batch: Batch) -> int:
        steps, sequences = padded_length(batch), len(batch.lengths_B)
        parts = max((parts for least, parts in self._parts_from.items() if steps >= least), default=1)
        return min(parts, sequences)

    def double(self, batch: Batch) -> bool:
        """From this batch's length on, take twice as many parts; False: it is a single sequence already."""
        parts = self.of(batch)
        if parts >= len(batch.lengths_B):
            return False
        self._parts_from[padded_length(batch)] = 2 * parts
        return True

    def split(self, batch: Batch) -> Iterator[Batch]:
        parts, sequences = self.of(batch), len(batch.lengths_B)
        if parts == 1:
            yield batch
            return
        bounds = [sequences * part // parts for part in range(parts + 1)]
        for first, last in pairwise(bounds):
            yield part_of(batch, first, last)

    def state_dict(self) -> dict[str, int]:
        return {str(steps): parts for steps, parts in self._parts_from.items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._parts_from = {int(steps): parts for steps, parts in state.items()}


def run_or_none_on_oom(work: Callable[[], Result]) -> Result | None:
    """What `work` returns; None where there was no room for it. What it had allocated is free again by then."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here nobody holds the error any more, and with it the frames and tensors of what failed.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def joined(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """What `training_step` told of each part, as if the micro-batch had been whole."""
    if len(outputs) == 1:
        return outputs[0]
    return {name: _joined(name, [output[name] for output in outputs]) for name in outputs[0]}


def _joined(name: str, values: list[Any]) -> Any:
    if name in THE_SAME:
        return values[0]
    if name in ROWS:
        return torch.cat(values)
    if isinstance(values[0], tuple):
        return type(values[0])(*[sum(column) for column in zip(*values, strict=True)])
    return sum(values)
