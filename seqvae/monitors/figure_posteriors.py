"""Posteriors of the last readings -> posterior_means.png and posterior_pca.png: where they lie, beside the prior.

Shapes: N posteriors, Z latent dimensions, D dimensions shown, K principal components, G places on an axis.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle

from seqvae.monitors.figure_data import Posteriors
from seqvae.monitors.figure_style import DARK, LIGHT, MIDDLE, PLAIN, head, legend_above, new_figure

MOST_DIMENSIONS = 12
PER_LINE = 4
BINS = 41
LEAST_REACH = 4.0
"""Standard deviations of the prior to both sides of 0."""
HIGHEST = 1.25
"""Three times the prior's density at 0. A posterior that is the prior has all its means in one bar, which is cut here."""
MOST_COMPONENTS = 16
LEAST_VARIANCE = 1e-6
NONE_FINITE = "no posterior is finite"


def draw_posterior_means(path: Path, posteriors: Posteriors) -> str | None:
    """Draw the dimensions with the largest KL. Return why there is no figure, if there is none."""
    mean_NZ, logvar_NZ = posteriors.mean_NZ, posteriors.logvar_NZ
    if not mean_NZ.size:
        return NONE_FINITE
    kl_Z = kl_per_dim(mean_NZ, logvar_NZ)
    largest_D = np.argsort(-kl_Z, kind="stable")[:MOST_DIMENSIONS]
    lines = math.ceil(len(largest_D) / PER_LINE)
    with new_figure(path, 10, 1.55 * lines + (1.9 if lines == 1 else 1.2)) as figure:
        columns = min(PER_LINE, len(largest_D))
        places = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
        are_some = len(kl_Z) > MOST_DIMENSIONS
        few = f"the {MOST_DIMENSIONS} with the largest KL of {len(kl_Z):,} dimensions" if are_some else ""
        head(figure, f"Posterior means beside the prior, at step {posteriors.step:,}", *posteriors.notes, few)
        highest = 0.0
        for axes, column in zip(places, largest_D, strict=False):
            highest = max(highest, _draw_means(axes, mean_NZ[:, column], logvar_NZ[:, column]))
            name = posteriors.dimensions_Z[column]
            axes.set_title(f"dimension {name}: KL {kl_Z[column]:.3g}", fontsize=9, fontweight="normal")
        for axes in places[len(largest_D) :]:
            axes.set_visible(False)
        for axes in places[::columns]:
            axes.set_ylabel("density")
        places[0].set_ylim(0, min(1.1 * highest, HIGHEST))
        figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, handlelength=3)
    return None


def draw_posterior_pca(path: Path, posteriors: Posteriors) -> str | None:
    """Draw the means in the plane in which they differ most. Return why there is no figure, if there is none."""
    mean_NZ = posteriors.mean_NZ
    if not mean_NZ.size:
        return NONE_FINITE
    if len(mean_NZ) < 2:
        return "it takes two posteriors that are finite, and there is 1"
    if mean_NZ.shape[1] < 2:
        return "it takes two dimensions that are finite, and there is 1"
    found = principal_components(mean_NZ)
    with new_figure(path, 10, 5.2) as figure:
        plane, spectrum = figure.subplots(1, 2, width_ratios=(1.25, 1))
        head(figure, f"Principal components of the posterior means, at step {posteriors.step:,}", *posteriors.notes)
        _draw_plane(plane, found)
        _draw_spectrum(spectrum, found)
    return None


def kl_per_dim(mean_NZ: np.ndarray, logvar_NZ: np.ndarray) -> np.ndarray:
    """The formula of `formulas.kl_per_dim`, which needs torch.

    >>> kl_per_dim(np.array([[0.0, 2.0]]), np.zeros((1, 2)))
    array([0., 2.])
    """
    with np.errstate(over="ignore"):
        return (0.5 * (mean_NZ**2 + np.expm1(logvar_NZ) - logvar_NZ)).mean(axis=0)


class Components(NamedTuple):
    """Principal components; the prior's mean stays at 0."""

    places_N2: np.ndarray
    variances_K: np.ndarray
    """Of the means, along each component, the largest first."""
    prior_variances_K: np.ndarray
    """Of as many draws from the prior, along theirs: the first ones are above 1, since they were looked for."""


def principal_components(mean_NZ: np.ndarray) -> Components:
    centred_NZ = mean_NZ - mean_NZ.mean(axis=0)
    values, vectors = np.linalg.eigh(_smaller_product(centred_NZ))
    directions_Z2 = vectors[:, :-3:-1]
    if len(directions_Z2) != mean_NZ.shape[1]:
        directions_Z2 = np.linalg.qr(centred_NZ.T @ directions_Z2)[0]
    largest_12 = np.abs(directions_Z2).argmax(axis=0)[None]
    directions_Z2 = directions_Z2 * np.sign(
        np.take_along_axis(directions_Z2, largest_12, axis=0)
    )  # not mirrored next time
    drawn_NZ = np.random.default_rng(0).standard_normal(mean_NZ.shape)
    prior_values = np.linalg.eigvalsh(_smaller_product(drawn_NZ - drawn_NZ.mean(axis=0)))
    variances_K, prior_variances_K = (np.maximum(both[::-1], 0) / (len(mean_NZ) - 1) for both in (values, prior_values))
    return Components(mean_NZ @ directions_Z2, variances_K, prior_variances_K)


def _smaller_product(centred_NZ: np.ndarray) -> np.ndarray:
    """N x N or Z x Z: beside zeros they have the same eigenvalues."""
    is_wide = centred_NZ.shape[1] > len(centred_NZ)
    return centred_NZ @ centred_NZ.T if is_wide else centred_NZ.T @ centred_NZ


def aggregate_density(mean_N: np.ndarray, logvar_N: np.ndarray, places_G: np.ndarray) -> np.ndarray:
    """The mean of the N posteriors' densities; each is made as wide as the places are apart, so that none falls between them."""
    apart = places_G[1] - places_G[0]
    variance_N = np.exp(np.minimum(logvar_N, 50.0)) + apart**2
    distance_GN = places_G[:, None] - mean_N
    return (np.exp(-0.5 * distance_GN**2 / variance_N) / np.sqrt(2 * math.pi * variance_N)).mean(axis=1)


def _draw_means(axes: Axes, mean_N: np.ndarray, logvar_N: np.ndarray) -> float:
    """Return the highest density."""
    reach = max(LEAST_REACH, 1.05 * float(np.abs(mean_N).max()))
    density, edges = np.histogram(mean_N, BINS, (-reach, reach), density=True)
    places_G = np.linspace(-reach, reach, 4 * BINS + 1)
    axes.stairs(density, edges, fill=True, color=LIGHT, label="means")
    axes.stairs(density, edges, color=DARK, linewidth=0.7)
    prior_G = np.exp(-0.5 * places_G**2) / math.sqrt(2 * math.pi)
    aggregate_G = aggregate_density(mean_N, logvar_N, places_G)
    axes.plot(places_G, prior_G, color="black", linewidth=1.1, label="prior N(0, 1)")
    axes.plot(
        places_G, aggregate_G, "--", color=MIDDLE, linewidth=1.5, label="all posteriors together, with their variances"
    )
    highest = density.argmax()
    if density[highest] > HIGHEST:
        middle = edges[highest : highest + 2].mean()
        said = f"bar up to {density[highest]:.2g}"
        axes.annotate(said, (middle, HIGHEST), (6, -2), textcoords="offset points", va="top", fontsize=8, color=DARK)
    axes.set_xlim(-reach, reach)
    axes.grid(visible=False)
    return float(max(density.max(), aggregate_G.max(), prior_G.max()))


def _draw_plane(axes: Axes, found: Components) -> None:
    x_N, y_N = found.places_N2.T
    for radius, line in ((1, "-"), (2, "--")):
        label = f"prior: {radius} sd"
        axes.add_patch(
            Circle((0, 0), radius, fill=False, edgecolor="black", linewidth=1.1, linestyle=line, label=label)
        )
    axes.plot(0, 0, "+", color="black", markersize=9)
    axes.plot(x_N, y_N, "o", markersize=3.2, color=DARK, alpha=0.45, markeredgewidth=0, label="posterior mean")
    reach = max(2.3, 1.05 * float(np.abs(found.places_N2).max()))
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-reach, reach)
    axes.set_aspect("equal")
    total = found.variances_K.sum()
    shares = [f" ({100 * part / total:.3g} % of the variance)" if total > 0 else "" for part in found.variances_K[:2]]
    axes.set_xlabel(f"first component{shares[0]}")
    axes.set_ylabel(f"second component{shares[1]}")
    legend_above(axes, columns=3)


def _draw_spectrum(axes: Axes, found: Components) -> None:
    """How far the means spread along each component, on the prior's scale."""
    variances_K, prior_variances_K = found.variances_K[:MOST_COMPONENTS], found.prior_variances_K[:MOST_COMPONENTS]
    numbers = np.arange(1, len(variances_K) + 1)
    floor = np.clip(variances_K.min() / 3, LEAST_VARIANCE, 0.01)
    label = "posterior means"
    axes.plot(
        numbers, np.maximum(variances_K, floor), "o-", color=DARK, linewidth=1, markersize=5, clip_on=False, label=label
    )
    axes.plot(numbers, prior_variances_K, "--", color="black", linewidth=1.1, label="as many draws from the prior")
    axes.set_yscale("log")
    axes.set_ylim(floor, 3 * max(1.0, variances_K.max(), prior_variances_K.max()))
    axes.set_xlim(0.4, max(len(numbers), 4) + 0.6)
    axes.set_xticks(numbers)
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_xlabel(
        "component" + (f" (of {len(found.variances_K):,})" if len(found.variances_K) > len(numbers) else "")
    )
    axes.set_ylabel("variance along it")
    axes.grid(visible=False, axis="x")
    legend_above(axes, columns=2)
