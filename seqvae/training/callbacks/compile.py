"""--compile_model: layers compiled in place, tried on a few batches before the first step, and kept only where that is faster.

In: a network, batches of the run's own lengths, and what was measured on this machine before. Out: layers that are compiled, or
as they were, and a line that says which and what it took. Weights, gradients and the noise of the run are the same as without.
"""

import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import nn

from seqvae.data.batch import Batch, padded_length
from seqvae.data.batching import gather_batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import harmless
from seqvae.files import replace_file
from seqvae.reports.run_files import cpu_name
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
LAYER_CALLS = 5
"""Calls of one layer that are timed together: one takes some milliseconds."""
COMPILER_ANSWERS = "compiled_layers.json"
"""In the cache directory."""
STATE = "compiled"
"""Key of the decision in a checkpoint: a run that goes on computes as it did, whatever else the machine is doing."""

Context = Callable[[], AbstractContextManager[Any]]
"""The precision in force, as what a network's forward pass stands in."""


@runtime_checkable
class CompilesInnerLayers(Protocol):
    """A network that knows which of its parts are worth compiling."""

    def compile_inner(self, mode: str) -> None: ...


def compile_in_place(network: nn.Module, mode: str) -> None:
    """Have the layers compiled at their first call, in place, so that checkpoints keep their names.

    Lengths differ from batch to batch: without `dynamic` each new one would be compiled for, for seconds.
    """
    if isinstance(network, CompilesInnerLayers):
        network.compile_inner(mode)
    else:
        network.compile(mode=mode, dynamic=True)
    if not is_compiled(network):
        raise RuntimeError("none of its layers is of a kind that torch compiles")


def usable_mode(mode: str, accelerator: str) -> str:
    """Return how hard the compiler can try on a device."""
    return "default" if mode == "reduce-overhead" and accelerator != "cuda" else mode


def remark_on_compiling(mode: str, accelerator: str) -> str:
    """Return what the header says of --compile_model."""
    usable = usable_mode(mode, accelerator)
    reason = "" if usable == mode else f": {mode} records what a GPU does, and there is none"
    first = "one layer is compiled and measured first" if accelerator == "cpu" else "layers are compiled and measured"
    return f"{first}, before the first step ({usable}{reason})"


def is_compiled(network: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in network.modules())


def undo_compiling(network: nn.Module) -> None:
    for module in network.modules():
        module._compiled_call_impl = None


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process: after the trial it should stay the same."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds, where nothing is compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class Answers:
    """The gains of compiling a layer on this machine before, in a file that several programs may use.

    It is trusted with speed alone: what cannot be read counts as not measured, and what cannot be written is measured again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def ratio(self, question: str) -> float | None:
        """Return how many times as fast it was."""
        ratio = self._read().get(question)
        return float(ratio) if isinstance(ratio, int | float) and math.isfinite(ratio) and ratio > 0 else None

    def keep(self, question: str, ratio: float) -> None:
        with suppress(OSError), replace_file(self.path) as partial:
            answers = self._read() | {question: round(ratio, 3)}
            partial.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, Any]:
        try:
            answers = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return answers if isinstance(answers, dict) else {}


class CompilerTrial(Callback):
    """Callback that tries compiled layers when training starts.

    Compiling them all can take minutes on a CPU, where they seldom are faster: there one of them is measured first, unless the
    answer is known. It stands first among the callbacks: no clock of theirs counts what compiling takes.
    """

    def __init__(
        self, data: SequenceDataModule, total_steps: int, mode: str = "default", answers: Answers | None = None
    ) -> None:
        """`total_steps`: optimizer steps of the whole run. `mode`: --compile_mode. None: nothing is remembered."""
        self.data = data
        self.total_steps = total_steps
        self.mode = mode
        self.answers = answers
        self.is_kept: bool | None = None
        """Whether compiled layers are in force; None: not decided so far."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile; then, unless an earlier session did, find out whether it was worth it. All processes decide alike."""
        assert isinstance(pl_module, TrainingModule)
        network, device = pl_module.network, pl_module.device.type
        if self.is_kept is False:
            undo_compiling(network)
            return
        batches = trial_batches(self.data, trainer.world_size)
        batches = [trainer.strategy.batch_to_device(batch, dataloader_idx=0) for batch in batches]
        with untouched(network):
            mode = usable_mode(self.mode, device)
            if self.is_kept is None and device == "cpu":
                question = question_of(network, batches[0], mode, trainer.precision)
                is_worth_it = self._try_one_layer(trainer, network, batches[0], mode, question)
            else:
                question, is_worth_it = "", True
            if is_worth_it:
                self._try_all(trainer, network, batches, mode, question)
            else:
                self.is_kept = False
        if not self.is_kept:
            undo_compiling(network)

    def _try_one_layer(self, trainer: Trainer, network: nn.Module, batch: Batch, mode: str, question: str) -> bool:
        """Return whether one layer is faster, by what is known of this machine, or else by measuring it in the first process."""
        known = self.answers.ratio(question) if self.answers else None
        known = trainer.strategy.broadcast(known)
        if known is not None:
            assert self.answers is not None
            found = f"{known:.2f} times as fast as without when it was measured on this machine ({self.answers.path})"
            is_faster = known >= LEAST_GAIN
            self._say(
                trainer, f"compiling: {found}" if is_faster else f"not compiled: {found}; leave out --compile_model"
            )
            return is_faster
        seconds, ratio, problem = measure_one_layer(network, batch, mode, trainer.precision_plugin.forward_context)
        seconds, ratio, problem = trainer.strategy.broadcast((seconds, ratio, problem))
        if problem:
            self._say(trainer, f"not compiled: {problem}; the run goes on without")
        elif ratio is None:
            self._say(trainer, "compiling the network as a whole")
        elif ratio < LEAST_GAIN:
            slower = f"{ratio:.2f} times as fast as without: the run goes on without (leave out --compile_model)"
            self._say(trainer, f"one layer compiled in {seconds:.0f} s, but {slower}")
            self._remember(trainer, question, ratio)
        else:
            self._say(
                trainer, f"one layer compiled in {seconds:.0f} s, and {ratio:.2f} times as fast: compiling all of them"
            )
        return not problem and (ratio is None or ratio >= LEAST_GAIN)

    def _try_all(
        self, trainer: Trainer, network: nn.Module, batches: Sequence[Batch], mode: str, question: str
    ) -> None:
        """Compile all layers, and keep them where they are faster, or where an earlier session did."""
        strategy, context = trainer.strategy, trainer.precision_plugin.forward_context
        seconds, problem = warm_up(network, batches, context, mode)
        if not strategy.reduce_boolean_decision(not problem, all=True):
            self.is_kept = False
            message = f"not compiled: {problem or 'another process could not'}; the run goes on without"
        elif self.is_kept:
            message = f"compiled in {seconds:.0f} s"
        else:
            works = [partial(go_through, network, batch, context) for batch in batches[:TIMED_BATCHES]]
            compiled, as_written = take_turns(works)
            self.is_kept = strategy.broadcast(compiled * LEAST_GAIN < as_written)
            micro_batches_left = (self.total_steps - trainer.global_step) * trainer.accumulate_grad_batches
            message = describe(seconds, compiled, as_written, micro_batches_left)
            self._remember(trainer, question, as_written / compiled)
        self._say(trainer, message)

    def _remember(self, trainer: Trainer, question: str, ratio: float) -> None:
        if self.answers is not None and question and trainer.is_global_zero:
            self.answers.keep(question, ratio)

    def _say(self, trainer: Trainer, message: str) -> None:
        if trainer.is_global_zero:
            print(f"{'compiler':<11} {harmless(message)}", flush=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.is_kept is not None:
            checkpoint[STATE] = self.is_kept

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.is_kept = checkpoint.get(STATE)


def question_of(network: nn.Module, batch: Batch, mode: str, precision: str) -> str:
    """Return what the speed of a compiled layer depends on: machine, torch, network, and about how large a batch is."""
    shapes = zlib.crc32(str([tuple(weight.shape) for weight in network.parameters()]).encode())
    rows, steps = (1 << (size - 1).bit_length() for size in (len(batch.lengths_B), padded_length(batch)))
    machine = f"{cpu_name()} with {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{machine}: {type(network).__name__} {shapes:08x}, {rows} x {steps}, {precision}, {mode}"


def measure_one_layer(network: nn.Module, batch: Batch, mode: str, context: Context) -> tuple[float, float | None, str]:
    """Compile one of the layers; return what that took, how many times as fast it is, and what went wrong.

    The ratio is None where the network is compiled as a whole. All layers are left as written.
    """
    seconds = 0.0
    try:
        compile_in_place(network, mode)
        compiled = [layer for layer in network.modules() if layer._compiled_call_impl is not None]
        layer = compiled[-1]
        implementation: Any = layer._compiled_call_impl
        undo_compiling(network)
        if len(compiled) == 1:
            return seconds, None, ""
        work = partial(go_through_layer, layer, inputs_of(layer, network.train(), batch, context), context)
        layer._compiled_call_impl = implementation
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        fast, as_written = take_turns([work] * LAYER_CALLS)
        return seconds, as_written / fast, ""
    except (RuntimeError, OSError) as error:  # of a compiler, and of starting one
        return seconds, None, _first_line(error)
    finally:
        undo_compiling(network)


def inputs_of(layer: nn.Module, network: nn.Module, batch: Batch, context: Context) -> tuple[Any, ...]:
    """Return what a layer is called with in a forward pass."""
    caught: list[tuple[Any, ...]] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs))
    try:
        with torch.no_grad(), context():
            network(batch)
    finally:
        handle.remove()
    return caught[0]


def go_through_layer(layer: nn.Module, inputs: tuple[Any, ...], context: Context) -> None:
    """Run one forward and backward pass of a layer that turns its first input into something of its kind."""
    hidden, *rest = inputs
    hidden = hidden.detach().requires_grad_()
    with context():
        output = layer(hidden, *rest)
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    torch.autograd.grad(output.float().sum(), [hidden, *weights], allow_unused=True)


def trial_batches(data: SequenceDataModule, world: int) -> list[Batch]:
    """Return a middling, the longest and the shortest batch of the plan, and one of each kind that is compiled for apart: of a
    single sequence, of single steps, and the empty one that fills up the last round of several processes."""
    train, cut = data.split("train"), data.cut
    rows_K = np.diff(cut.starts_K1)
    longest_K = cut.tokens_K // rows_K
    last = cut.batches - 1
    chosen = [last // 2, 0, last]
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


def warm_up(network: nn.Module, batches: Iterable[Batch], context: Context, mode: str) -> tuple[float, str]:
    """Return the seconds that compiling took, for training and for validation, and what went wrong."""
    start = time.perf_counter()
    problem = ""
    try:
        if not is_compiled(network):
            compile_in_place(network, mode)
        for batch in batches:
            go_through(network.train(), batch, context)
            with torch.inference_mode(), context():
                network.eval()(batch)
    except (RuntimeError, OSError) as error:  # of a compiler, and of starting one
        problem = _first_line(error)
    return time.perf_counter() - start, problem


def take_turns(works: Sequence[Callable[[], None]]) -> tuple[float, float]:
    """Return the median seconds of one of these works, with compiled layers and as written.

    Both take turns, so that a busy machine slows them alike.
    """
    seconds: dict[str, list[float]] = {"default": [], "force_eager": []}
    for _ in range(WARM_ROUNDS + ROUNDS):
        for stance, times in seconds.items():
            with torch.compiler.set_stance(stance):
                start = time.perf_counter()
                for work in works:
                    work()
                times.append((time.perf_counter() - start) / len(works))
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
