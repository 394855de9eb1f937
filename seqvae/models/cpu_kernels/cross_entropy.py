"""Scores of a large vocabulary and their cross entropy in one: 0.62 of the time of slices that are computed a second time in the
backward pass (4,000 rows of width 256, 5,000 ids, bf16). With `attention.py`, 17 % off the CPU time of a step of 7 million
parameters.

A batch's scores, 80 MB for 4,000 rows of 5,000 ids, cost page faults and memory traffic, not arithmetic. Here one slice of them
exists at a time; and because the gradient of -log p is known as soon as p is, the slice gives its gradients in the forward pass.
Measured by `python -m benchmarks.speed.step`; "Head and cross entropy in one" in docs/performance_log.md.

Shapes: N rows, M of them that are computed, R rows of a slice, W width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

SCORES_AT_ONCE = 2**21
"""Scores that exist at one time: 8 MB in float32 and 4 in bf16, which stay in a processor's cache."""
FEWEST_ROWS = 256
"""Rows of a slice, at least: products of fewer are slow."""
ROWS_MULTIPLE = 64
"""Rows are a multiple of this: a CPU's products in bf16 are compiled for each number of rows."""
LEAST_P = 1e-30
"""Float32 loses digits of smaller probabilities; their logarithm is computed from the scores."""


def rows_at_once(scores_per_row: int) -> int:
    """Return how many rows a slice has."""
    rows = SCORES_AT_ONCE // scores_per_row
    return max(FEWEST_ROWS, rows - rows % ROWS_MULTIPLE)


def linear_cross_entropy(
    hidden_NW: Tensor, weight_VW: Tensor, bias_V: Tensor, targets_N: Tensor, counts_N: Tensor
) -> Tensor:
    """Return -log softmax(hidden weight' + bias)[target] in float32; 0 for rows that do not count.

    Under autocast, products are in its type.
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
