"""What a machine does while it trains: clocks of wall time and CPU time, peak memory, FLOPs and the peak of a device.

Nothing here waits for a device, except `product_peak`. FLOPs: a multiplication and an addition are two. Products of matrices,
convolutions, attention and recurrent layers are counted, forward and backward, as they are done: with what padding costs, and with
what is computed a second time to save memory. Elementwise work is not.

Shapes: B sequences, H heads, Q queries, K keys, D size of a head, T steps, N of a square matrix.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

MACHINE_CPUS = Path("/proc/stat")
OWN_STATUS = Path("/proc/self/status")
GIB = 2**30


class Spent(NamedTuple):
    """Clocks: seconds since an arbitrary moment, or differences of these."""

    wall: float = 0.0
    process: float = 0.0
    """CPU time of this process: all its threads, but no other process that it started."""
    machine_busy: float = 0.0
    """CPU time of all processes of the machine. This and the next stay 0 where they are not known."""
    machine_total: float = 0.0
    """The same with the time that cores were idle."""


class Machine:
    """The machine that this process runs on; tests replace it."""

    def now(self) -> float:
        return time.perf_counter()

    def spent(self) -> Spent:
        busy = total = 0.0
        if MACHINE_CPUS.exists():
            # user, nice, system, idle, waiting for disks, interrupts, more of them, stolen by other virtual machines; guests,
            # which come next, are counted among the users already. The unit is its own: only the ratio has a meaning.
            times = [float(word) for word in MACHINE_CPUS.read_text(encoding="ascii").partition("\n")[0].split()[1:9]]
            busy, total = sum(times) - times[3] - times[4], sum(times)
        return Spent(self.now(), time.process_time(), busy, total)

    def cores(self) -> int:
        """Return how many cores this process may use."""
        return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

    def peak_memory_gib(self) -> float | None:
        """Return the most that this process ever had in memory."""
        if OWN_STATUS.exists():  # getrusage takes over what the parent process once had
            status = OWN_STATUS.read_text(encoding="utf-8")
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / GIB
        if sys.platform == "win32":
            return None
        import resource  # Windows has none

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB

    def gpu_peak_memory_gib(self, device: torch.device) -> float | None:
        return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None

    def gpu_utilisation(self, device: torch.device) -> float | None:
        """Return the share of the last second, or less, in which the GPU was at work; None where that cannot be known."""
        if device.type != "cuda" or self.missing_package(device):
            return None
        return torch.cuda.utilization(device) / 100

    def missing_package(self, device: torch.device) -> str:
        """Return the package that has to be installed before torch can tell how busy this GPU is; empty: none has."""
        package, module = ("amdsmi", "amdsmi") if torch.version.hip else ("nvidia-ml-py", "pynvml")
        return package if device.type == "cuda" and find_spec(module) is None else ""


def difference(now: Spent, before: Spent) -> Spent:
    return Spent(*(a - b for a, b in zip(now, before, strict=True)))


CPU_SIDE, GPU_SIDE = 1024, 4096
"""Sides of the square product: large enough that a device comes near its best, small enough for milliseconds."""
WARM_UP, REPEATS = 2, 9
MOST_SECONDS = 0.2
"""Seconds after which a product is not repeated again."""

Shape = Sequence[int]


class FlopCount:
    """A count of the FLOPs between `begin` and `end`, which may stand in different functions of one thread."""

    def __init__(self) -> None:
        self._counter: FlopCounterMode | None = None

    def begin(self) -> None:
        self.end()
        self._counter = FlopCounterMode(display=False, custom_mapping=MORE_PRODUCTS)
        self._counter.__enter__()

    def end(self) -> int | None:
        """Return the FLOPs since the beginning; None: it has not begun."""
        counter, self._counter = self._counter, None
        if counter is None:
            return None
        counter.__exit__(None, None, None)
        return counter.get_total_flops()


def has_compiled_parts(module: nn.Module) -> bool:
    """Return whether torch compiled the module or a part of it: it then computes beside the operations that can be counted.

    A function that was compiled by hand cannot be seen here.
    """
    return any(
        part._compiled_call_impl is not None or name.rpartition(".")[2] == "_orig_mod"
        for name, part in module.named_modules()
    )


def product_peak(device: torch.device, dtype: torch.dtype, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the FLOPs per second of a large square product, the median of a few: what a device can do where nothing else is done.

    Waits for the device. Where other programs are at work, what they take is missing from it.
    """
    side = CPU_SIDE if device.type == "cpu" else GPU_SIDE
    generator = torch.Generator(device).manual_seed(0)
    left_NN, right_NN = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds: list[float] = []
    with torch.no_grad():
        for _ in range(WARM_UP + REPEATS):
            start = now()
            (left_NN @ right_NN)[0, 0].item()  # sync: what is timed has to be done
            seconds.append(now() - start)
            if len(seconds) > WARM_UP and sum(seconds) > MOST_SECONDS:
                break
    return 2 * side**3 / statistics.median(seconds[WARM_UP:])


# --- What torch's own counter leaves out ----------------------------------------------------------------------------


def _attention(query_BHQD: Shape, key_BHKD: Shape, value_BHKD: Shape, *_: Any, **__: Any) -> int:
    """Count scores, and values weighted by them."""
    pairs = math.prod(query_BHQD[:-1]) * key_BHKD[-2]
    return 2 * pairs * (query_BHQD[-1] + value_BHKD[-1])


def _attention_backward(_: Any, query_BHQD: Shape, key_BHKD: Shape, value_BHKD: Shape, *__: Any, **___: Any) -> int:
    """Count the scores again, and gradients of the weights, queries, keys and values."""
    pairs = math.prod(query_BHQD[:-1]) * key_BHKD[-2]
    return 2 * pairs * (3 * query_BHQD[-1] + 2 * value_BHKD[-1])


def _cpu_recurrence(steps_TBD: Shape, *weights: Any, **_: Any) -> int:
    """Count one layer in one direction: each step meets the weights for its input and those for the state before."""
    return 2 * math.prod(steps_TBD[:-1]) * (math.prod(weights[0]) + math.prod(weights[1]))


def _gpu_recurrence(steps_TBD: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """Count all layers; biases are the weights with one dimension."""
    return 2 * math.prod(steps_TBD[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) > 1)


# The backward pass of a recurrence: a product for the inputs' gradient, and one for the weights'.
MORE_PRODUCTS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.mkldnn_rnn_layer: _cpu_recurrence,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *shapes, **_: 2 * _cpu_recurrence(*shapes),
    torch.ops.aten._cudnn_rnn: _gpu_recurrence,
    torch.ops.aten._cudnn_rnn_backward: lambda *shapes, **_: 2 * _gpu_recurrence(*shapes),
}
