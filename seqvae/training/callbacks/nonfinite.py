"""Steps that come to NaN or infinity: not taken, counted, reported with their sequences; too many in a row end a session.

In: the loss of each micro-batch, the gradient's norm of each optimizer step. Out: weights that such a step leaves as they were, a
line in events.jsonl, and `NonFiniteError` after a few in a row. A GPU is waited for only once in a while. `Recovery`: how the run
then goes on from an earlier checkpoint, at a lower rate and, from 16-mixed, in another precision. It stands in events.jsonl, so
that a run that is killed meanwhile goes on with it; another --lr overrides it.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from seqvae.errors import DivergedError
from seqvae.reports.run_files import read_events
from seqvae.training.distributed import Precision, ResolvedPrecision, cpu_has_bf16_units
from seqvae.training.run_directory.records import RunEvents
from seqvae.training.run_directory.resume import ROLLED_BACK

MOST_IN_A_ROW = 5
"""Steps that are not finite. A bad sequence or two may spoil one step; weights that have gone astray spoil all that follow."""
GPU_LOOKS_EVERY = 16
"""Steps between two looks on a GPU, as a look waits for the device. On a CPU there is nothing to wait for."""
SHOWN_IDS = 3
MOST_TIMES = 3
"""Times that a run goes back to an earlier checkpoint."""
LOWER = 0.5
"""Factor of the rate each time."""
LOWEST_SCALE = 1.0
"""Loss scale of 16-mixed above which gradients that overflow say only that the scale is too high."""


class NonFiniteError(DivergedError):
    """The error of a session that came to NaN or infinity and cannot go on from where it is."""

    def __init__(self, message: str, first_step: int) -> None:
        """`first_step`: the first that was spoilt; what was saved before it may be worth going back to."""
        super().__init__(message)
        self.first_step = first_step


class JudgedStep(NamedTuple):
    """An optimizer step, on its device."""

    is_finite: Tensor
    losses_M: Tensor
    """Losses of its M micro-batches."""
    sequences: list[Tensor]
    """The sequences of each micro-batch."""


class StepJudge:
    """The part of the training module that finds out whether a step is finite before the optimizer takes it."""

    def __init__(self) -> None:
        self.last: JudgedStep | None = None
        """The last step; a reader sets it to None."""
        self.begin()

    def begin(self) -> None:
        """Begin another optimizer step, or the same one again."""
        self._losses: list[Tensor] = []
        self._sequences: list[Tensor] = []

    def add(self, loss: Tensor, sequences_B: Tensor) -> None:
        """Add a micro-batch to the step."""
        self._losses.append(loss.detach())
        self._sequences.append(sequences_B)

    def refuse_if_spoilt(self, optimizer: Optimizer, gradient_norm: Tensor, trainer: Trainer) -> None:
        """Keep the optimizer from taking a step that is not finite.

        Several processes have one gradient, and go by that alone.
        """
        losses_M = torch.stack(self._losses)
        is_finite = gradient_norm.isfinite()
        if trainer.world_size == 1:
            is_finite = is_finite & losses_M.isfinite().all()
        self.last = JudgedStep(is_finite, losses_M, self._sequences)
        if scaler_of(trainer) is not None:
            return  # the scaler leaves such steps out
        if leaves_out_on_device(optimizer, is_finite.device):
            vars(optimizer)["found_inf"] = (~is_finite).float()  # where a fused optimizer looks, on the device
        elif not is_finite:
            optimizer.zero_grad(set_to_none=True)  # without a gradient nothing moves, weight decay included


def leaves_out_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether the optimizer can leave out a step without a wait for the device."""
    return device.type == "cuda" and bool(optimizer.defaults.get("fused"))


def scaler_of(trainer: Trainer) -> torch.amp.GradScaler | None:
    """Return what multiplies the loss of 16-mixed; None in other precisions."""
    plugin = trainer.precision_plugin
    return plugin.scaler if isinstance(plugin, MixedPrecision) else None


class SkippedSteps(Callback):
    """Callback that reports steps that were not taken, and ends the session after a few in a row.

    It stands before what saves checkpoints.
    """

    def __init__(self, judge: StepJudge, events: RunEvents, ids_of: Callable[[np.ndarray], list[Any]]) -> None:
        self.judge = judge
        self.events = events
        self.ids_of = ids_of
        self._waiting: list[tuple[int, JudgedStep]] = []
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._in_a_row = state_dict["in_a_row"]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        judged, self.judge.last = self.judge.last, None
        if judged is None:
            return
        self._waiting.append((trainer.global_step, judged))
        if len(self._waiting) >= GPU_LOOKS_EVERY or trainer.strategy.root_device.type != "cuda":
            self._look(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if self._waiting:
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        waiting, self._waiting = self._waiting, []
        are_finite_S = torch.stack([judged.is_finite for _, judged in waiting])
        scaler = scaler_of(trainer)
        # sync: one for GPU_LOOKS_EVERY steps
        for (step, judged), is_finite in zip(waiting, are_finite_S.tolist(), strict=True):
            if is_finite:
                self._in_a_row = 0
                continue
            losses, ids = self._suspects(trainer, judged)
            if scaler is not None and scaler.get_scale() > LOWEST_SCALE and not losses:
                continue  # the scale falls first
            self._in_a_row += 1
            found = f"the loss is {losses[0]}" if losses else "the gradient is not finite"
            more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
            shown = ", ".join(map(str, ids[:SHOWN_IDS])) + more
            message = f"{found}, so the step is not taken (sequences {shown}; all of them stand in events.jsonl)"
            self.events.survived("step_skipped", step, message, sequences=ids)
            if self._in_a_row >= MOST_IN_A_ROW:
                raise NonFiniteError(
                    f"step {step:,}: {found}, as in the {self._in_a_row - 1} steps before", step - self._in_a_row + 1
                )

    def _suspects(self, trainer: Trainer, judged: JudgedStep) -> tuple[list[float], list[Any]]:
        """Return the losses that are not finite and the sequences of their micro-batches; all, where every loss is finite.

        All processes come here at the same step. Where some have losses that are not finite, the others are not suspected.
        """
        losses = judged.losses_M.tolist()
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        sequences_N = np.concatenate([judged.sequences[number].cpu().numpy() for number in bad or range(len(losses))])
        own = [losses[number] for number in bad], self.ids_of(sequences_N[sequences_N >= 0])
        if trainer.world_size == 1:
            return own
        everyone: list[tuple[list[float], list[Any]]] = [own] * trainer.world_size
        torch.distributed.all_gather_object(everyone, own)
        guilty = [each for each in everyone if each[0]] or everyone
        return [loss for some_losses, _ in guilty for loss in some_losses], [id_ for _, ids in guilty for id_ in ids]


class Recovery(NamedTuple):
    """The way a run goes on after it came to NaN or infinity."""

    requested_lr: float
    lr: float
    times: int = 0
    """How often the run went back so far; MOST_TIMES is all."""
    precision: Precision | None = None
    """None: the requested one."""

    def resolve_precision(self, requested: ResolvedPrecision) -> ResolvedPrecision:
        if self.precision is None or self.precision == requested.precision:
            return requested
        return ResolvedPrecision(self.precision, "16-mixed came to NaN or infinity")

    def once_more(self, precision: Precision, device_type: str) -> "Recovery":
        """Return how to go on after another failure in this precision: at a lower rate, and out of 16-mixed."""
        if precision == "16-mixed":
            has_bf16 = torch.cuda.is_bf16_supported() if device_type == "cuda" else cpu_has_bf16_units()
            precision = "bf16-mixed" if has_bf16 and device_type in ("cuda", "cpu") else "32-true"
        return Recovery(self.requested_lr, self.lr * LOWER, self.times + 1, precision)

    def announce(self, events: RunEvents, trouble: NonFiniteError, checkpoint: Path | None) -> None:
        """Report why and from which checkpoint the run goes on; None: from its beginning."""
        place = "its beginning" if checkpoint is None else checkpoint.name
        events.survived(
            ROLLED_BACK,
            trouble.first_step,
            f"{trouble}: back to {place}, on with --lr {self.lr:g} and --precision {self.precision} ({self.times} of {MOST_TIMES})",
            asked_lr=self.requested_lr,
            lr=self.lr,
            precision=self.precision,
        )


def read_recovery(directory: Path, requested_lr: float) -> Recovery:
    """Return what earlier sessions of a run decided at the rate that is requested.

    Anyone may have written to the file, so each event is checked to be as `Recovery.announce` writes it.
    """
    recovery = Recovery(requested_lr, requested_lr)
    for event in read_events(directory):
        lr, precision = event.get("lr"), event.get("precision")
        if (
            (event["event"], event.get("asked_lr")) == (ROLLED_BACK, requested_lr)
            and isinstance(lr, float)
            and 0 < lr < requested_lr
            and precision in ("bf16-mixed", "32-true")
        ):
            recovery = Recovery(requested_lr, lr, recovery.times + 1, precision)
    return recovery
