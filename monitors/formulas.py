"""Formulas on diagonal Gaussian posteriors: tensors in, tensors out, nothing else. Everything in nats.

Shapes: B sequences, Z latent dimensions (an axis for steps may stand in between).
"""

import torch
from torch import Tensor


def gaussian_kl(mean_BZ: Tensor, logvar_BZ: Tensor) -> Tensor:
    """KL(q || p) of each latent dimension, from the diagonal Gaussian q to the standard normal p, in float32 at least.

    0.5 * (mean^2 + exp(logvar) - 1 - logvar)

    >>> gaussian_kl(torch.tensor([0.0, 2.0]), torch.zeros(2))
    tensor([0., 2.])
    """
    mean_BZ, logvar_BZ = at_least_float32(mean_BZ), at_least_float32(logvar_BZ)
    return 0.5 * (mean_BZ.square() + torch.expm1(logvar_BZ) - logvar_BZ)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision carries 3 digits: too few for a difference of variances near 1."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
