"""--compile_model: layers compiled in place, tried on a few batches before the first step, and kept only where that is faster.

In: a network, and batches of the run's own lengths. Out: layers that are compiled, or as they were, and a line that says which
and what it took. Weights, gradients and the noise of the run are the same as without the trial.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import nn

from seqvae.data.batch import Batch
from seqvae.data.batching import gather_batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import harmless
from seqvae.text import clock
from seqvae.training.module import TrainingModule
from seqvae.training.objective import negative_elbo

LEAST_GAIN = 1.02
"""Less is chance."""
ROUNDS = 5
"""Rounds of steps compiled and as written, in turns; the medians decide."""
WARM_ROUNDS = 2
"""Rounds before, which are not counted: a GPU records its graphs in the second."""
TIMED_BATCHES = 3
STATE = "compiled"
"""Key of the decision in a checkpoint: a run that goes on computes as it did, whatever else the machine is doing."""

Context = Callable[[], AbstractContextManager[Any]]
"""The precision in force, as what a network's forward pass stands in."""


@runtime_checkable
class CompilesInnerLayers(Protocol):
    """A network that knows which of its parts are worth compiling."""

    def compile_inner(self, mode: str) -> None: ...


def compile_in_place(network: nn.Module, mode: str, accelerator: str) -> str:
    """Compile in place, so that checkpoints keep their names; return a remark for the header.

    Lengths differ from batch to batch: without `dynamic` each new one would be compiled for, for seconds.
    """
    try:
        torch.compile(torch.neg, dynamic=True)(torch.ones(2))  # next to nothing to compile
    except RuntimeError as error:  # every error of a compiler is one
        return f"not compiled: torch.compile does not work here ({_first_line(error)})"
    remark = ""
    if mode == "reduce-overhead" and accelerator != "cuda":
        mode, remark = "default", ": reduce-overhead records what a GPU does, and there is none"
    if isinstance(network, CompilesInnerLayers):
        network.compile_inner(mode)
    else:
        network.compile(mode=mode, dynamic=True)
    return f"compiled ({mode}{remark}), before the first step, which takes up to a minute"


def is_compiled(network: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in network.modules())


def undo_compiling(network: nn.Module) -> None:
    for module in network.modules():
        module._compiled_call_impl = None


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process: after the trial it should stay the same."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds, where nothing is compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class CompilerTrial(Callback):
    """Callback that tries compiled layers when training starts.

    It stands first among the callbacks: no clock of theirs counts what compiling takes.
    """

    def __init__(self, data: SequenceDataModule, total_steps: int) -> None:
        """`total_steps`: optimizer steps of the whole run."""
        self.data = data
        self.total_steps = total_steps
        self.is_kept: bool | None = None
        """Whether compiled layers are in force; None: not decided so far."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile; then, unless an earlier session did, find out whether it was worth it. All processes decide alike."""
        assert isinstance(pl_module, TrainingModule)
        network, strategy, context = pl_module.network, trainer.strategy, trainer.precision_plugin.forward_context
        if self.is_kept is False:
            undo_compiling(network)
        if not is_compiled(network):
            return
        batches = trial_batches(self.data, trainer.world_size)
        batches = [strategy.batch_to_device(batch, dataloader_idx=0) for batch in batches]
        with untouched(network):
            seconds, problem = warm_up(network, batches, context)
            if not strategy.reduce_boolean_decision(not problem, all=True):
                self.is_kept = False
                message = f"not compiled: {problem or 'another process could not'}; the run goes on without"
            elif self.is_kept:
                message = f"compiled in {seconds:.0f} s"
            else:
                compiled, as_written = take_turns(network, batches[:TIMED_BATCHES], context)
                self.is_kept = strategy.broadcast(compiled * LEAST_GAIN < as_written)
                micro_batches_left = (self.total_steps - trainer.global_step) * trainer.accumulate_grad_batches
                message = describe(seconds, compiled, as_written, micro_batches_left)
            if not self.is_kept:
                undo_compiling(network)
        if trainer.is_global_zero:
            print(f"{'compiler':<11} {harmless(message)}", flush=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.is_kept is not None:
            checkpoint[STATE] = self.is_kept

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.is_kept = checkpoint.get(STATE)


def trial_batches(data: SequenceDataModule, world: int) -> list[Batch]:
    """Return the longest, a middling and the shortest batch of the plan, and one of each kind that is compiled for apart: of a
    single sequence, of single steps, and the empty one that fills up the last round of several processes."""
    train, cut = data.split("train"), data.cut
    rows_K = np.diff(cut.starts_K1)
    longest_K = cut.tokens_K // rows_K
    last = cut.batches - 1
    chosen = [0, last // 2, last]
    chosen += [int(is_kind_K.argmax()) for is_kind_K in (rows_K == 1, longest_K == 1) if is_kind_K.any()]
    rows = [cut.order_N[cut.starts_K1[k] : cut.starts_K1[k + 1]] for k in dict.fromkeys(chosen)]
    if world > 1:
        rows.append(np.empty(0, dtype=np.int64))
    return [gather_batch(train, data.limits, sequences_B) for sequences_B in rows]


def describe(compile_seconds: float, compiled: float, as_written: float, micro_batches_left: int) -> str:
    """Return what compiling took, what it brings, and whether that pays in what is left of the run.

    `compiled` and `as_written`: seconds of a micro-batch, as `take_turns` returns them.

    >>> describe(12.0, 0.10, 0.11, 3000)
    'compiled in 12 s; now 1.10 times as fast, which saves about 0:30 of this run'
    >>> describe(12.0, 0.10, 0.11, 300)
    'compiled in 12 s; now 1.10 times as fast, which saves less in this run: leave out --compile_model where runs are this short'
    >>> describe(12.0, 0.11, 0.10, 3000)
    'compiled in 12 s, but 0.91 times as fast as without: the run goes on without (leave out --compile_model)'
    """
    took, ratio = f"compiled in {compile_seconds:.0f} s", as_written / compiled
    if compiled * LEAST_GAIN >= as_written:
        return f"{took}, but {ratio:.2f} times as fast as without: the run goes on without (leave out --compile_model)"
    saved = (as_written - compiled) * micro_batches_left
    saves = f"about {clock(saved)} of this run"
    if saved < compile_seconds:
        saves = "less in this run: leave out --compile_model where runs are this short"
    return f"{took}; now {ratio:.2f} times as fast, which saves {saves}"


@contextmanager
def untouched(network: nn.Module) -> Iterator[None]:
    """Restore a network's buffers and mode, and the random numbers to come, after it computed something else."""
    was_training = network.training
    buffers = [buffer.clone() for buffer in network.buffers()]
    devices = {weight.device for weight in network.parameters() if weight.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            network.train(was_training)
            with torch.no_grad():
                for buffer, before in zip(network.buffers(), buffers, strict=True):
                    buffer.copy_(before)


def warm_up(network: nn.Module, batches: Iterable[Batch], context: Context) -> tuple[float, str]:
    """Return the seconds that compiling took, for training and for validation, and what went wrong."""
    start = time.perf_counter()
    problem = ""
    try:
        for batch in batches:
            go_through(network.train(), batch, context)
            with torch.inference_mode(), context():
                network.eval()(batch)
    except (RuntimeError, OSError) as error:  # of a compiler, and of starting one
        problem = _first_line(error)
    return time.perf_counter() - start, problem


def take_turns(network: nn.Module, batches: Sequence[Batch], context: Context) -> tuple[float, float]:
    """Return the median seconds of a micro-batch, forward and backward, with compiled layers and as written.

    Both take turns on the same batches, so that a busy machine slows them alike.
    """
    network.train()
    seconds: dict[str, list[float]] = {"default": [], "force_eager": []}
    for _ in range(WARM_ROUNDS + ROUNDS):
        for stance, times in seconds.items():
            with torch.compiler.set_stance(stance):
                start = time.perf_counter()
                for batch in batches:
                    go_through(network, batch, context)
                times.append((time.perf_counter() - start) / len(batches))
    compiled, as_written = (median(times[WARM_ROUNDS:]) for times in seconds.values())
    return compiled, as_written


def go_through(network: nn.Module, batch: Batch, context: Context) -> None:
    """Run one forward and backward pass.

    The gradients are dropped: those of the run, and what averages them over processes, are not touched.
    """
    with context():
        loss = negative_elbo(network(batch), kl_weight=1.0, free_bits=0.0).loss
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    torch.autograd.grad(loss, weights, allow_unused=True)
    if loss.device.type == "cuda":
        torch.cuda.synchronize()  # sync: in the trial alone


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
