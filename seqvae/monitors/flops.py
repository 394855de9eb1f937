"""How much arithmetic training asks for, and how much a device can do: products in FLOPs, a multiplication and an addition are two.

Products of matrices, convolutions, attention and recurrent layers are counted, forward and backward, as they are done: with
what padding costs, and with what is computed a second time to save memory. Elementwise work is not.

Shapes: B sequences, H heads, Q queries, K keys, D size of a head, T steps, N of a square matrix.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

CPU_SIDE, GPU_SIDE = 1024, 4096
"""Of the square product: large enough that a device comes near its best, small enough for milliseconds."""
WARM_UP, REPEATS = 2, 9
MOST_SECONDS = 0.2
"""After which a product is not repeated again."""

Shape = Sequence[int]


class FlopCount:
    """Counts between `begin` and `end`, which may stand in different functions of one thread."""

    def __init__(self) -> None:
        self._counter: FlopCounterMode | None = None

    def begin(self) -> None:
        self.end()
        self._counter = FlopCounterMode(display=False, custom_mapping=MORE_PRODUCTS)
        self._counter.__enter__()

    def end(self) -> int | None:
        """FLOPs since the beginning; None: it has not begun."""
        counter, self._counter = self._counter, None
        if counter is None:
            return None
        counter.__exit__(None, None, None)
        return counter.get_total_flops()


def has_compiled_parts(module: nn.Module) -> bool:
    """Whether torch compiled the module or a part of it: it then computes beside the operations that can be counted.

    A function that was compiled by hand cannot be seen here.
    """
    return any(
        part._compiled_call_impl is not None or name.rpartition(".")[2] == "_orig_mod"
        for name, part in module.named_modules()
    )


def product_dtype(precision: AbstractContextManager[Any], device: torch.device) -> torch.dtype:
    """What matrices are multiplied in, under a precision that training is in."""
    with precision:
        one = torch.ones(1, 1, device=device)
        return (one @ one).dtype


def product_peak(device: torch.device, dtype: torch.dtype, now: Callable[[], float] = time.perf_counter) -> float:
    """FLOPs in a second of a large square product, the median of a few: what a device can do where nothing else is done.

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
    """Scores, and values weighted by them."""
    pairs = math.prod(query_BHQD[:-1]) * key_BHKD[-2]
    return 2 * pairs * (query_BHQD[-1] + value_BHKD[-1])


def _attention_backward(_: Any, query_BHQD: Shape, key_BHKD: Shape, value_BHKD: Shape, *__: Any, **___: Any) -> int:
    """The scores anew, gradients of the weights, queries, keys and values."""
    pairs = math.prod(query_BHQD[:-1]) * key_BHKD[-2]
    return 2 * pairs * (3 * query_BHQD[-1] + 2 * value_BHKD[-1])


def _cpu_recurrence(steps_TBD: Shape, *weights: Any, **_: Any) -> int:
    """One layer in one direction: each step meets the weights for its input and those for the state before."""
    return 2 * math.prod(steps_TBD[:-1]) * (math.prod(weights[0]) + math.prod(weights[1]))


def _gpu_recurrence(steps_TBD: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """All layers; biases are the weights with one dimension."""
    return 2 * math.prod(steps_TBD[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) > 1)


def _twice(forward: Callable[..., int]) -> Callable[..., int]:
    """Backward, there is a product for the inputs' gradient, and one for the weights'."""
    return lambda *arguments, **named: 2 * forward(*arguments, **named)


MORE_PRODUCTS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.mkldnn_rnn_layer: _cpu_recurrence,
    torch.ops.aten.mkldnn_rnn_layer_backward: _twice(_cpu_recurrence),
    torch.ops.aten._cudnn_rnn: _gpu_recurrence,
    torch.ops.aten._cudnn_rnn_backward: _twice(_gpu_recurrence),
}
