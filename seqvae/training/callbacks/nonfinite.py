"""Steps that come to NaN or infinity: not taken, counted, told with the sequences they came from; too many in a row end a session.

In: the loss of each micro-batch, the gradient's norm of each optimizer step. Out: weights that such a step leaves as they were, a
line in events.jsonl, and `NonFiniteError` after a few in a row. Nothing waits for a GPU but once in a while.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from seqvae.errors import DivergedError
from seqvae.training.run_directory.events import RunEvents

MOST_IN_A_ROW = 5
"""Steps. A bad sequence or two may come with one step; weights that have gone astray spoil all that follow."""
GPU_LOOKS_EVERY = 16
"""Steps, as a look waits for the device. On a CPU there is nothing to wait for."""
SHOWN_IDS = 3
LOWEST_SCALE = 1.0
"""Of 16-mixed: as long as the loss is multiplied by more, gradients that overflow say no more than that it is too much."""


class NonFiniteError(DivergedError):
    """A session came to NaN or infinity and cannot go on from where it is."""

    def __init__(self, said: str, first_step: int) -> None:
        """`first_step`: the first that was spoilt; what was saved before it may be worth going back to."""
        super().__init__(said)
        self.first_step = first_step


class Judged(NamedTuple):
    """An optimizer step, on its device."""

    is_finite: Tensor
    losses_M: Tensor
    """Of its micro-batches."""
    sequences: list[Tensor]
    """Which ones each micro-batch held."""


class StepJudge:
    """Finds out whether a step is finite before the optimizer takes it. Part of the training module."""

    def __init__(self) -> None:
        self.last: Judged | None = None
        """The last step; whoever looks at it takes it away."""
        self.begin()

    def begin(self) -> None:
        """Another optimizer step, or the same one again."""
        self._losses: list[Tensor] = []
        self._sequences: list[Tensor] = []

    def take_in(self, loss: Tensor, sequences_B: Tensor) -> None:
        self._losses.append(loss.detach())
        self._sequences.append(sequences_B)

    def refuse_if_spoilt(self, optimizer: Optimizer, gradient_norm: Tensor, trainer: Trainer) -> None:
        """Right before the optimizer takes the step. Several processes have one gradient, and go by that alone."""
        losses_M = torch.stack(self._losses)
        is_finite = gradient_norm.isfinite()
        if trainer.world_size == 1:
            is_finite = is_finite & losses_M.isfinite().all()
        self.last = Judged(is_finite, losses_M, self._sequences)
        if scaler_of(trainer) is not None:
            return  # it leaves such steps out itself
        if leaves_out_on_device(optimizer, is_finite.device):
            vars(optimizer)["found_inf"] = (~is_finite).float()  # where a fused optimizer looks, on the device
        elif not is_finite:
            optimizer.zero_grad(set_to_none=True)  # without a gradient nothing moves, weight decay included


class SkippedSteps(Callback):
    """Tells of steps that were not taken, and ends the session after a few in a row. Stands before whatever saves checkpoints."""

    def __init__(self, judge: StepJudge, events: RunEvents, ids_of: Callable[[np.ndarray], list[Any]]) -> None:
        self.judge = judge
        self.events = events
        self.ids_of = ids_of
        self._waiting: list[tuple[int, Judged]] = []
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._in_a_row = state_dict["in_a_row"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        judged, self.judge.last = self.judge.last, None
        if judged is None:
            return
        self._waiting.append((trainer.global_step, judged))
        is_on_gpu = trainer.strategy.root_device.type == "cuda"
        if not is_on_gpu or len(self._waiting) >= GPU_LOOKS_EVERY:
            self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        finite = torch.stack(
            [judged.is_finite for _, judged in waiting]
        ).tolist()  # sync: one for GPU_LOOKS_EVERY steps
        for (step, judged), is_finite in zip(waiting, finite, strict=True):
            if is_finite:
                self._in_a_row = 0
            else:
                self._tell(trainer, step, judged)

    def _tell(self, trainer: Trainer, step: int, judged: Judged) -> None:
        losses, ids = _of_all_processes(self._suspects(judged), trainer)
        scaler = scaler_of(trainer)
        if scaler is not None and scaler.get_scale() > LOWEST_SCALE and not losses:
            return  # the scale falls first
        self._in_a_row += 1
        found = f"the loss is {losses[0]}" if losses else "the gradient is not finite"
        some = ", ".join(map(str, ids[:SHOWN_IDS])) + (
            f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
        )
        said = f"{found}, so the step is not taken (sequences {some}; all of them stand in events.jsonl)"
        self.events.survived("step_skipped", step, said, sequences=ids)
        if self._in_a_row >= MOST_IN_A_ROW:
            raise NonFiniteError(
                f"step {step:,}: {found}, as in the {self._in_a_row - 1} steps before", step - self._in_a_row + 1
            )

    def _suspects(self, judged: Judged) -> "Suspects":
        """The losses that are not finite, and the sequences of their micro-batches; of all, where the losses do not tell."""
        losses = judged.losses_M.tolist()
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        chosen = bad or range(len(losses))
        sequences_N = np.concatenate([judged.sequences[number].cpu().numpy() for number in chosen])
        return Suspects([losses[number] for number in bad], self.ids_of(sequences_N[sequences_N >= 0]))


class Suspects(NamedTuple):
    """What may have spoilt a step."""

    losses: list[float]
    ids: list[Any]


def leaves_out_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the optimizer can be told not to take a step without anybody waiting for the device."""
    return device.type == "cuda" and bool(optimizer.defaults.get("fused"))


def _of_all_processes(own: Suspects, trainer: Trainer) -> Suspects:
    """All come here at the same step. Where some have losses that are not finite, the others are not suspected."""
    if trainer.world_size == 1:
        return own
    everybodys: list[Suspects] = [own] * trainer.world_size
    torch.distributed.all_gather_object(everybodys, own)
    guilty = [each for each in everybodys if each.losses] or everybodys
    return Suspects([loss for each in guilty for loss in each.losses], [name for each in guilty for name in each.ids])


def scaler_of(trainer: Trainer) -> torch.amp.GradScaler | None:
    """What multiplies the loss of 16-mixed; None in other precisions."""
    plugin = trainer.precision_plugin
    return plugin.scaler if isinstance(plugin, MixedPrecision) else None
