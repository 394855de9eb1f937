"""Logistic regression with an L2 penalty, for two classes or more, in float64: features and classes in, class scores out.

    loss = mean cross entropy + strength / 2 * |weights|^2        (the biases are free)

The strength is chosen by cross-validation on the same sequences, so that whoever is scored afterwards has no part in it. Nothing
is drawn but the folds, from a fixed seed.

Shapes: N sequences, P features, C classes.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

STRENGTHS = tuple(10.0**power for power in (1, 0, -1, -2, -3, -4, -5))
"""From strong to weak, each beginning where the one before it ended."""
FOLDS = 5
MOST_ROUNDS = 200
FARTHEST = 10.0
"""Standard deviations; a pH of 735 must not lead the fit."""


class Standardiser(NamedTuple):
    """Each feature to mean 0 and deviation 1 over the training sequences; what is missing (NaN) becomes the mean."""

    mean_P: np.ndarray
    std_P: np.ndarray

    def __call__(self, features_NP: np.ndarray) -> Tensor:
        standard_NP = (features_NP - self.mean_P) / self.std_P
        return torch.from_numpy(np.clip(np.nan_to_num(standard_NP, nan=0.0), -FARTHEST, FARTHEST))


class Classifier(NamedTuple):
    """As fitted, with the standardising that goes before it."""

    standardise: Standardiser
    weights_PC: Tensor
    bias_C: Tensor
    strength: float

    def scores(self, features_NP: np.ndarray) -> np.ndarray:
        """log p(class), (N, C)."""
        return F.log_softmax(self.standardise(features_NP) @ self.weights_PC + self.bias_C, dim=1).numpy()


def fit_classifier(features_NP: np.ndarray, classes_N: np.ndarray, classes: int, seed: int = 0) -> Classifier:
    standardise = standardiser_of(features_NP)
    x_NP, y_N = standardise(features_NP), torch.from_numpy(classes_N)
    strength = _choose_strength(x_NP, y_N, classes, seed)
    weights_PC, bias_C = _begin(x_NP, classes)
    for stronger in (one for one in STRENGTHS if one >= strength):
        weights_PC, bias_C = minimise(x_NP, y_N, stronger, weights_PC, bias_C)
    return Classifier(standardise, weights_PC, bias_C, strength)


def standardiser_of(features_NP: np.ndarray) -> Standardiser:
    known_NP = ~np.isnan(features_NP)
    count_P = np.maximum(known_NP.sum(axis=0), 1)
    mean_P = np.where(known_NP, features_NP, 0.0).sum(axis=0) / count_P
    std_P = np.sqrt(np.where(known_NP, (features_NP - mean_P) ** 2, 0.0).sum(axis=0) / count_P)
    return Standardiser(mean_P, np.where(std_P > 1e-12 * (1 + np.abs(mean_P)), std_P, 1.0))


def folds_of(classes_N: np.ndarray, seed: int) -> np.ndarray:
    """Which fold each sequence is in: each class shared out evenly, at random."""
    shuffled_N = np.random.default_rng(seed).permutation(len(classes_N))
    by_class_N = shuffled_N[np.argsort(classes_N[shuffled_N], kind="stable")]
    folds_N = np.empty(len(classes_N), np.int64)
    folds_N[by_class_N] = np.arange(len(classes_N)) % FOLDS
    return folds_N


def minimise(x_NP: Tensor, y_N: Tensor, strength: float, weights_PC: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
    """From the weights given to those where the loss is least; it is convex."""
    weights_PC, bias_C = weights_PC.clone().requires_grad_(), bias_C.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights_PC, bias_C],
        max_iter=MOST_ROUNDS,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x_NP @ weights_PC + bias_C, y_N) + 0.5 * strength * weights_PC.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weights_PC.detach(), bias_C.detach()


def _choose_strength(x_NP: Tensor, y_N: Tensor, classes: int, seed: int) -> float:
    """The one with the least cross entropy on sequences left out."""
    fold_N = torch.from_numpy(folds_of(y_N.numpy(), seed))
    losses = dict.fromkeys(STRENGTHS, 0.0)
    for fold in range(FOLDS):
        inside_N, outside_N = fold_N != fold, fold_N == fold
        if not bool(outside_N.any()) or not bool(inside_N.any()):
            continue
        weights_PC, bias_C = _begin(x_NP, classes)
        for strength in STRENGTHS:
            weights_PC, bias_C = minimise(x_NP[inside_N], y_N[inside_N], strength, weights_PC, bias_C)
            scores_NC = x_NP[outside_N] @ weights_PC + bias_C
            losses[strength] += float(F.cross_entropy(scores_NC, y_N[outside_N], reduction="sum"))
    return min(losses, key=losses.__getitem__)


def _begin(x_NP: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    return x_NP.new_zeros(x_NP.shape[1], classes), x_NP.new_zeros(classes)
