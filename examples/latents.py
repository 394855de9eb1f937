"""Latents as `seqvae encode` writes them -> arrays, and a picture's two dimensions of them.

Shapes: N sequences, Z latent dimensions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq


class Latents(NamedTuple):
    """Of some splits, in the order of the file."""

    ids: list[Any]
    mean_NZ: np.ndarray
    surprise_N: np.ndarray
    """NLL and rate together, in nats: the outlier score."""


class Plane(NamedTuple):
    """The two directions along which the means differ most, each column one of them."""

    places_N2: np.ndarray
    shares: tuple[float, float]
    """Of the variance, that each direction shows."""


def read_latents(path: Path, splits: Sequence[str]) -> Latents:
    table = pq.read_table(path, columns=["id", "mean", "nll", "rate"], filters=[("split", "in", splits)])
    surprise_N = table["nll"].to_numpy() + table["rate"].to_numpy()
    return Latents(table["id"].to_pylist(), np.array(table["mean"].to_pylist(), dtype=np.float64), surprise_N)


def project(mean_NZ: np.ndarray) -> Plane:
    """Principal components. Their signs are arbitrary; here the largest weight of each is positive.

    >>> plane = project(np.array([[0.0, 1.0, 0.0], [0.0, -1.0, 0.0], [0.0, 3.0, 0.5], [0.0, -3.0, 0.5]]))
    >>> plane.places_N2[:, 0].round(6).tolist(), round(plane.shares[0], 3)
    ([1.0, -1.0, 3.0, -3.0], 0.988)
    """
    centred_NZ = mean_NZ - mean_NZ.mean(axis=0)
    _, sizes, directions = np.linalg.svd(centred_NZ, full_matrices=False)
    chosen = directions[:2]
    chosen = chosen * np.sign(np.take_along_axis(chosen, np.abs(chosen).argmax(axis=1)[:, None], axis=1))
    shares = sizes[:2] ** 2 / (sizes**2).sum()
    return Plane(centred_NZ @ chosen.T, (float(shares[0]), float(shares[1])))
