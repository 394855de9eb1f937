"""Scores of a large vocabulary and their cross entropy in one: hidden vectors and targets in, -log p of each target out.

Written for training on a CPU. A batch's scores, 80 MB for 4,000 rows of 5,000 ids, cost page faults and memory traffic, not
arithmetic. Here a slice of them exists at a time; and because the gradient of -log p is known as soon as p is, the slice gives its
gradients right away, and nothing is computed a second time on the way back.

Shapes: N rows, M of them that are worked on, R rows of a slice, W width, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

SCORES_AT_ONCE = 2**21
"""Scores that exist at one time: 8 MB in float32, and 4 in bf16, which stay in a processor's cache."""
FEWEST_ROWS = 256
"""Of a slice: products of fewer are slow."""
ROWS_MULTIPLE = 64
"""For each number of rows, a CPU's products in bf16 are compiled anew."""
LEAST_P = 1e-30
"""Of smaller ones float32 loses digits; their logarithm is worked out from the scores."""


def rows_at_once(scores_per_row: int) -> int:
    rows = SCORES_AT_ONCE // scores_per_row
    return max(FEWEST_ROWS, rows - rows % ROWS_MULTIPLE)


def linear_cross_entropy(
    hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, counts_N: Tensor
) -> Tensor:
    """-log softmax(hidden weight' + bias)[target] in float32; 0 for rows that do not count.

    Under autocast, products are in its type. Forward and backward of 4,000 rows of width 256 and 5,000 ids in bf16 take 0.6 of
    the time that computing the slices twice does.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden_NW.dtype
    return _LinearCrossEntropy.apply(hidden_NW.to(dtype), weight_VW, bias_V, targets_N, counts_N)


class _Sums(NamedTuple):
    """-log p, and the gradients of the sum of -log p times the rows' weights."""

    nll_N: Tensor
    hidden_NW: Tensor
    weight_VW: Tensor
    bias_V: Tensor


class _LinearCrossEntropy(torch.autograd.Function):
    """The way forward guesses that all rows which count have the same weight in the loss, and works out the gradients for a weight
    of 1. The way back multiplies them by the weight or, where the guess was wrong, works them out anew."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, counts_N: Tensor
    ) -> Tensor:
        sums = _work_out(hidden_NW, weight_VW, bias_V, targets_N, counts_N.float())
        ctx.save_for_backward(hidden_NW, weight_VW, bias_V, targets_N, counts_N, *sums[1:])
        return sums.nll_N * counts_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_N,) = gradients
        *inputs, counts_N, for_hidden_NW, for_weight_VW, for_bias_V = ctx.saved_tensors
        counted_N = gradient_N[counts_N]
        if len(counted_N) and not bool((counted_N == counted_N[0]).all()):
            hidden_NW, weight_VW, bias_V, targets_N = inputs
            _, *anew = _work_out(hidden_NW, weight_VW, bias_V, targets_N, gradient_N * counts_N)
            return *anew, None, None
        factor = counted_N[0] if len(counted_N) else gradient_N.new_zeros(())
        return for_hidden_NW * factor.to(for_hidden_NW.dtype), for_weight_VW * factor, for_bias_V * factor, None, None


def _work_out(hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, weights_N: Tensor) -> _Sums:
    """The gradient of -log p by the scores is p, less 1 at the target. Rows without weight have no gradient, whatever they hold."""
    dtype, rows = hidden_NW.dtype, rows_at_once(len(weight_VW))
    sums = _Sums(
        torch.zeros(len(hidden_NW)), torch.zeros_like(hidden_NW), torch.zeros_like(weight_VW), torch.zeros_like(bias_V)
    )
    own_weight_VW, own_bias_V = weight_VW.to(dtype), bias_V.to(dtype)
    chosen_M = _rows_with_weight(weights_N)
    all_scores_RV = torch.empty(min(rows, len(chosen_M)), len(weight_VW), dtype=dtype)
    all_slopes_RV = torch.empty_like(all_scores_RV, dtype=torch.float32)
    for here_R in chosen_M.split(rows):
        scores_RV, slopes_RV = all_scores_RV[: len(here_R)], all_slopes_RV[: len(here_R)]
        weights_R1 = weights_N[here_R, None]
        hidden_RW = hidden_NW[here_R].masked_fill_(weights_R1 == 0, 0.0)
        torch.addmm(own_bias_V, hidden_RW, own_weight_VW.T, out=scores_RV)
        sums.nll_N[here_R] = _nll_and_slopes(scores_RV, slopes_RV, targets_N[here_R, None], weights_R1)
        scores_RV.copy_(slopes_RV)
        sums.hidden_NW[here_R] = scores_RV @ own_weight_VW
        sums.weight_VW.add_(scores_RV.T @ hidden_RW)
        sums.bias_V.add_((scores_RV.new_ones(1, len(scores_RV)) @ scores_RV)[0])
    return sums


def _rows_with_weight(weights_N: Tensor) -> Tensor:
    """And a few without, up to a multiple."""
    is_idle_N = weights_N == 0
    wanted = len(weights_N) - int(is_idle_N.sum())
    return is_idle_N.argsort(stable=True)[: wanted + -wanted % ROWS_MULTIPLE]


def _nll_and_slopes(scores_RV: Tensor, slopes_RV: Tensor, targets_R1: Tensor, weights_R1: Tensor) -> Tensor:
    """-log p of the targets. Its gradient by the scores, times the weights, is written into `slopes_RV`."""
    torch.softmax(scores_RV, dim=1, dtype=torch.float32, out=slopes_RV)
    p_R1 = slopes_RV.gather(1, targets_R1)
    nll_R1 = -p_R1.log()
    is_rare_R = (p_R1 < LEAST_P).flatten()
    if bool(is_rare_R.any()):
        rare_scores_RV = scores_RV[is_rare_R].float()
        nll_R1[is_rare_R] = rare_scores_RV.logsumexp(1, keepdim=True) - rare_scores_RV.gather(1, targets_R1[is_rare_R])
    slopes_RV.scatter_(1, targets_R1, p_R1 - 1)
    if not bool((weights_R1 == 1).all()):
        slopes_RV.mul_(weights_R1)
    return nll_R1[:, 0]
