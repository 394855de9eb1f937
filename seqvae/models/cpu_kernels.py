"""Operations written by hand for training on a CPU, where they are faster than torch's; each class names its gain.

All of them together train 1.5 to 1.9 times as many tokens per second as torch's operations (`python -m benchmarks.speed.ablation`,
table in docs/performance.md). `--plain_operations` leaves everything to torch. Gains of one are measured by `python -m
benchmarks.speed.step`; docs/performance_log.md has what was tried.

Shapes: B sequences, T steps, H heads, K numbers of a head, P = K / 2 pairs of them, X = 3 H K packed, G = B H; N rows, M of them
that are computed, R rows of a slice, W width, V vocabulary, C ids of a block.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LONGEST_ATTENTION = {"bf16": 1024, "others": 384}
"""Steps up to which the kernel is faster than torch's fused one."""

SCORES_AT_ONCE = 2**21
"""Scores that exist at one time: 8 MB in float32 and 4 in bf16, which stay in a processor's cache."""
FEWEST_ROWS = 256
"""Rows of a slice, at least: products of fewer are slow."""
ROWS_MULTIPLE = 64
"""Rows are a multiple of this: a CPU's products in bf16 are compiled for each number of rows."""
MANY_IDS = 2**16
"""From this many ids on, their scores are computed in blocks of ids: the FEWEST_ROWS rows of a slice would have too many."""
FEWEST_COLUMNS = 512
"""Ids or variables of a block, at least: products of fewer are slow."""
LEAST_P = 1e-30
"""Float32 loses digits of smaller probabilities; their logarithm is computed from the scores."""


class HasCpuKernel:
    """Mixin of the modules that compute with a kernel of this file; `use_kernel` is their one switch."""

    kernel_enabled = True
    """False with --plain_operations."""

    def use_kernel(self, tensor: Tensor) -> bool:
        """Decide whether the kernel computes on `tensor`: on a CPU, where looking at data is free, in code that is not compiled.

        In compiled code a kernel would be slower than what the compiler makes ("Custom operations" in docs/performance_log.md).
        """
        return self.kernel_enabled and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


class Dropout(HasCpuKernel, nn.Module):
    """Sets a share of the numbers to zero in training, exact to 1 in 65,536, and scales the others so that the mean stays.

    In 0.16 of the time of torch's (4,000 x 256 numbers in bf16), which took 12 % of a training step: torch draws a random number
    for each element, on one core alone. Here 64 random bits from a faster generator serve for four of them, and are compared where
    they stand.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, numbers: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return numbers
        if not self.use_kernel(numbers):
            return F.dropout(numbers, self.share)
        seed = int(torch.empty((), dtype=torch.int64).random_())  # so that torch's seed decides
        words = np.random.SFC64(seed).random_raw((numbers.numel() + 3) // 4)
        bits = torch.from_numpy(words.view(np.int16))[: numbers.numel()].view(numbers.shape)
        threshold = min(round(self.share * 2**16), 2**16 - 1) - 2**15
        kept = bits.ge_(threshold)  # 0 or 1, where the bits stood: booleans become bf16 slowly
        return numbers * kept.to(numbers.dtype).mul_(1 / (1 - self.share))

    def extra_repr(self) -> str:
        return f"share={self.share}"


class RotaryAttention(torch.autograd.Function):
    """Attention of packed queries, keys and values, (B, T, X), with rotary positions: (B, T, H K).

    Of each head, query, key and value stand one behind the other. `bias` is added to the scores: minus infinity where a step may
    not be seen; None where all may.

    What torch does in thirty operations forward and forty backward, each through memory and with results of its own to keep, takes
    as few passes as possible here; the turned vectors and the weights are kept, nothing else. Forward and backward, in bf16: 0.92
    of the time of torch's operations at 8 steps, 0.72 at 300, 0.63 at 512, 0.86 at 1,000; in float32 0.85 at 300 steps and 1.2 at
    700.
    """

    @staticmethod
    def forward(
        ctx: Any, packed_BTX: Tensor, cos_TP: Tensor, sin_TP: Tensor, bias: Tensor | None, heads: int
    ) -> Tensor:
        batch, steps, size = *packed_BTX.shape[:2], packed_BTX.shape[2] // 3 // heads
        # Both sides of a product by the fourth root: the scores are then divided by the root.
        turns_TP = complex_turns(cos_TP, sin_TP, packed_BTX.dtype) * size**-0.25
        turned = packed_BTX.new_empty(3, batch, heads, steps, size)
        turned.copy_(packed_BTX.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4))
        _turn_in_place(turned[:2], turns_TP)
        query_GTK, key_GTK, value_GTK = turned.flatten(1, 2)
        weights_GTT = query_GTK @ key_GTK.mT
        if bias is not None:
            weights_GTT.view(batch, heads, steps, steps).add_(bias)
        torch.softmax(weights_GTT, dim=-1, out=weights_GTT)
        ctx.save_for_backward(turned, weights_GTT, turns_TP)
        return (weights_GTT @ value_GTK).view(batch, heads, steps, size).transpose(1, 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_BTW,) = gradients
        turned, weights_GTT, turns_TP = ctx.saved_tensors
        _, batch, heads, steps, size = turned.shape
        query_GTK, key_GTK, value_GTK = turned.flatten(1, 2)
        attended_GTK = gradient_BTW.view(batch, steps, heads, size).transpose(1, 2).reshape(-1, steps, size)
        by_part = torch.empty_like(turned)
        query_gradient, key_gradient, value_gradient = by_part.flatten(1, 2)
        torch.bmm(weights_GTT.mT, attended_GTK, out=value_gradient)
        scores_GTT = attended_GTK @ value_GTK.mT
        torch._softmax_backward_data(scores_GTT, weights_GTT, -1, scores_GTT.dtype, grad_input=scores_GTT)
        torch.bmm(scores_GTT, key_GTK, out=query_gradient)
        torch.bmm(scores_GTT.mT, query_GTK, out=key_gradient)
        _turn_in_place(by_part[:2], turns_TP.conj())
        packed_BTX = turned.new_empty(batch, steps, 3 * heads * size)
        packed_BTX.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4).copy_(by_part)
        return packed_BTX, None, None, None, None


def complex_turns(cos_TP: Tensor, sin_TP: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a complex number for each position and pair, which turns a pair that is multiplied by it; float32 for bf16 vectors."""
    real = dtype if dtype == torch.float64 else torch.float32
    return torch.complex(cos_TP.to(real), sin_TP.to(real))


def _turn_in_place(vectors: Tensor, turns_TP: Tensor) -> None:
    """Turn pairs of neighbours as complex numbers, in the order of memory; bf16 goes through float32 and back.

    Pairs whose numbers lie half a head apart take four passes, 32 numbers at a time, and twice as long.
    """
    pairs = vectors.to(turns_TP.real.dtype)
    torch.view_as_complex(pairs.unflatten(-1, (-1, 2))).mul_(turns_TP)
    if pairs is not vectors:
        vectors.copy_(pairs)


def rows_at_once(scores_per_row: int) -> int:
    """Return how many rows have no more than SCORES_AT_ONCE scores together."""
    rows = SCORES_AT_ONCE // scores_per_row
    return max(FEWEST_ROWS, rows - rows % ROWS_MULTIPLE)


def columns_at_once(rows: int) -> int:
    """Return of how many ids or variables this many rows have no more than SCORES_AT_ONCE scores together."""
    columns = SCORES_AT_ONCE // max(rows, 1)
    return max(FEWEST_COLUMNS, columns - columns % ROWS_MULTIPLE)


def linear_cross_entropy(
    hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, counts_N: Tensor
) -> Tensor:
    """Return -log softmax(hidden weight' + bias)[target] in float32; 0 for rows that do not count. Under autocast, products are
    in its type.

    A batch's scores, 80 MB for 4,000 rows of 5,000 ids, cost page faults and memory traffic, not arithmetic. Here one slice of
    them exists at a time; and because the gradient of -log p is known as soon as p is, the slice gives its gradients in the
    forward pass. In 0.62 of the time of slices that are computed a second time in the backward pass (4,000 rows of width 256,
    5,000 ids, bf16). With the attention, 17 % off the CPU time of a step of 7 million parameters.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden_NW.dtype
    return _LinearCrossEntropy.apply(hidden_NW.to(dtype), weight_VW, bias_V, targets_N, counts_N)


class _LinearCrossEntropy(torch.autograd.Function):
    """The forward pass guesses that all rows which count have the same weight in the loss, and computes the gradients for a weight
    of 1. The backward pass multiplies them by the weight or, where the guess was wrong, computes them again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, counts_N: Tensor
    ) -> Tensor:
        nll_N, *gradients = _nll_and_gradients(hidden_NW, weight_VW, bias_V, targets_N, counts_N.float())
        ctx.save_for_backward(hidden_NW, weight_VW, bias_V, targets_N, counts_N, *gradients)
        return nll_N * counts_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_N,) = gradients
        hidden_NW, weight_VW, bias_V, targets_N, counts_N, for_hidden_NW, for_weight_VW, for_bias_V = ctx.saved_tensors
        counted_N = gradient_N[counts_N]
        if len(counted_N) and not bool((counted_N == counted_N[0]).all()):
            _, *again = _nll_and_gradients(hidden_NW, weight_VW, bias_V, targets_N, gradient_N * counts_N)
            return *again, None, None
        factor = counted_N[0] if len(counted_N) else gradient_N.new_zeros(())
        return for_hidden_NW * factor.to(for_hidden_NW.dtype), for_weight_VW * factor, for_bias_V * factor, None, None


def _nll_and_gradients(
    hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, weights_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return -log p, and the gradients of the sum of -log p times the rows' weights by hidden vectors, weight and bias.

    The gradient of -log p by the scores is p, less 1 at the target. Rows without weight have no gradient, whatever they hold;
    a few of them are computed to fill up the last slice.
    """
    dtype, rows = hidden_NW.dtype, rows_at_once(len(weight_VW))
    nll_N = torch.zeros(len(hidden_NW))
    for_hidden_NW, for_weight_VW, for_bias_V = map(torch.zeros_like, (hidden_NW, weight_VW, bias_V))
    own_weight_VW, own_bias_V = weight_VW.to(dtype), bias_V.to(dtype)
    is_idle_N = weights_N == 0
    counted = len(weights_N) - int(is_idle_N.sum())
    chosen_M = is_idle_N.argsort(stable=True)[: counted + -counted % ROWS_MULTIPLE]
    all_scores_RV = torch.empty(min(rows, len(chosen_M)), len(weight_VW), dtype=dtype)
    all_slopes_RV = torch.empty_like(all_scores_RV, dtype=torch.float32)
    for here_R in chosen_M.split(rows):
        scores_RV, slopes_RV = all_scores_RV[: len(here_R)], all_slopes_RV[: len(here_R)]
        targets_R1, weights_R1 = targets_N[here_R, None], weights_N[here_R, None]
        hidden_RW = hidden_NW[here_R].masked_fill_(weights_R1 == 0, 0.0)
        torch.addmm(own_bias_V, hidden_RW, own_weight_VW.T, out=scores_RV)
        torch.softmax(scores_RV, dim=1, dtype=torch.float32, out=slopes_RV)
        p_R1 = slopes_RV.gather(1, targets_R1)
        nll_R1 = -p_R1.log()
        is_rare_R = (p_R1 < LEAST_P).flatten()
        if bool(is_rare_R.any()):
            rare_RV = scores_RV[is_rare_R].float()
            nll_R1[is_rare_R] = rare_RV.logsumexp(1, keepdim=True) - rare_RV.gather(1, targets_R1[is_rare_R])
        nll_N[here_R] = nll_R1[:, 0]
        slopes_RV.scatter_(1, targets_R1, p_R1 - 1)
        if not bool((weights_R1 == 1).all()):
            slopes_RV.mul_(weights_R1)
        scores_RV.copy_(slopes_RV)
        for_hidden_NW[here_R] = scores_RV @ own_weight_VW
        for_weight_VW.add_(scores_RV.T @ hidden_RW)
        for_bias_V.add_((scores_RV.new_ones(1, len(scores_RV)) @ scores_RV)[0])
    return nll_N, for_hidden_NW, for_weight_VW, for_bias_V


def wide_cross_entropy(
    hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, counts_N: Tensor
) -> Tensor:
    """Return the same as `linear_cross_entropy`, of so many ids that even a few rows of scores take too much memory.

    A block of ids goes through all rows at once, so that each weight is read once and its gradient written once. The backward
    pass computes the scores again, a fourth product beside three: 240 rows of 10^6 ids need 35 MB beside weights and gradients
    instead of 2.3 GB, in 1.5 times the time (`python -m benchmarks.speed.many_codes`). On any device.
    """
    device = hidden_NW.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NW.dtype
    return _WideCrossEntropy.apply(hidden_NW.to(dtype), weight_VW, bias_V, targets_N, counts_N)


class _WideCrossEntropy(torch.autograd.Function):
    """The log of each row's sum over all ids is kept for the backward pass, and nothing of the scores."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, counts_N: Tensor
    ) -> Tensor:
        chosen_M = _rows_that_count(counts_N)
        hidden_MW = hidden_NW[chosen_M].masked_fill_(~counts_N[chosen_M, None], 0.0)
        targets_M = targets_N[chosen_M]
        total_M = torch.full((len(chosen_M),), -torch.inf, device=hidden_NW.device)
        target_M = torch.zeros_like(total_M)
        for block in _blocks(len(weight_VW), len(chosen_M)):
            scores_MC = _scores(hidden_MW, weight_VW[block], bias_V[block])
            total_M = torch.logaddexp(total_M, scores_MC.logsumexp(dim=1))
            places_M1, is_here_M = _places(targets_M, block, scores_MC.shape[1])
            target_M = torch.where(is_here_M, scores_MC.gather(1, places_M1)[:, 0], target_M)
        ctx.save_for_backward(hidden_MW, weight_VW, bias_V, targets_M, chosen_M, counts_N, total_M)
        nll_N = torch.zeros(len(hidden_NW), device=hidden_NW.device)
        nll_N[chosen_M] = total_M - target_M
        return nll_N * counts_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_N,) = gradients
        hidden_MW, weight_VW, bias_V, targets_M, chosen_M, counts_N, total_M = ctx.saved_tensors
        weights_M1 = (gradient_N * counts_N)[chosen_M, None]
        for_weight_VW, for_bias_V = torch.empty_like(weight_VW), torch.empty_like(bias_V)
        for_hidden_MW = torch.zeros_like(hidden_MW, dtype=torch.float32)
        for block in _blocks(len(weight_VW), len(chosen_M)):
            slopes_MC = _scores(hidden_MW, weight_VW[block], bias_V[block]).sub_(total_M[:, None]).exp_()
            places_M1, is_here_M = _places(targets_M, block, slopes_MC.shape[1])
            slopes_MC.scatter_add_(1, places_M1, -is_here_M[:, None].float())
            slopes_MC.mul_(weights_M1)
            for_bias_V[block] = slopes_MC.sum(dim=0)
            slopes_MC = slopes_MC.to(hidden_MW.dtype)
            for_hidden_MW.add_(slopes_MC @ weight_VW[block].to(hidden_MW.dtype))
            for_weight_VW[block] = slopes_MC.T @ hidden_MW
        for_hidden_NW = hidden_MW.new_zeros(len(gradient_N), hidden_MW.shape[1])
        for_hidden_NW[chosen_M] = for_hidden_MW.to(hidden_MW.dtype)
        return for_hidden_NW, for_weight_VW, for_bias_V, None, None


def _rows_that_count(counts_N: Tensor) -> Tensor:
    """Return the rows that count, and a few others that fill them up to a multiple of ROWS_MULTIPLE."""
    counted = int(counts_N.sum())  # sync: once a batch
    return (~counts_N).long().argsort(stable=True)[: counted + -counted % ROWS_MULTIPLE]


def _blocks(ids: int, rows: int) -> list[slice]:
    columns = columns_at_once(rows)
    return [slice(start, min(start + columns, ids)) for start in range(0, ids, columns)]


def _scores(hidden_MW: Tensor, weight_CW: Tensor, bias_C: Tensor) -> Tensor:
    """Return scores in float32, computed in the type of the hidden vectors."""
    return torch.addmm(bias_C.to(hidden_MW.dtype), hidden_MW, weight_CW.to(hidden_MW.dtype).T).float()


def _places(targets_M: Tensor, block: slice, columns: int) -> tuple[Tensor, Tensor]:
    """Return each target's column in a block, (M, 1), any where it is not in it; and whether it is, (M,)."""
    places_M = targets_M - block.start
    return places_M.clamp(0, columns - 1)[:, None], (places_M >= 0) & (places_M < columns)
