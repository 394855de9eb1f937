"""Utterances in the latent space, and on the way from one to another: two PNGs.

Shapes: N utterances, S frames, D coefficients.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from examples.latents import project
from seqvae.reports.figures import COLOUR_MAP, head, new_figure
from seqvae.text import percent

MARKS = "osv^D<P>X"
"""One for each speaker, since nine colours alone are hard to tell apart."""


def draw_speakers(path: Path, mean_NZ: np.ndarray, speakers_N: np.ndarray) -> None:
    """A point for each utterance, where its latent mean lies in the plane in which they differ most."""
    plane = project(mean_NZ)
    colours = matplotlib.colormaps["tab10"]
    with new_figure(path, 7, 5.4) as figure:
        axes = figure.subplots()
        for place, speaker in enumerate(np.unique(speakers_N)):
            x, y = plane.places_N2[speakers_N == speaker].T
            mark = MARKS[place % len(MARKS)]
            axes.scatter(x, y, s=26, color=colours(place % 10), marker=mark, linewidth=0, label=f"speaker {speaker}")
        axes.set_xlabel(f"first principal component: {percent(plane.shares[0])} of the variance")
        axes.set_ylabel(f"second: {percent(plane.shares[1])}")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        axes.set_aspect("equal", adjustable="datalim")
        head(
            figure,
            "Latent means by speaker",
            f"{len(speakers_N)} utterances that were held out",
            "neither the model nor the choice of the plane was told who spoke",
        )


def draw_interpolation(path: Path, utterances: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Standardised coefficients from top to bottom, frames from left to right; all frames are as wide as one another."""
    most = float(np.quantile(np.abs(np.concatenate(utterances)), 0.99))
    lengths = [len(values_SD) for values_SD in utterances]
    with new_figure(path, 11, 3.4) as figure:
        places = figure.subplots(1, len(utterances), sharey=True, squeeze=False, width_ratios=lengths)[0]
        for axes, values_SD, name in zip(places, utterances, names, strict=True):
            steps, coefficients = values_SD.shape
            image = axes.imshow(
                values_SD.T,
                vmin=-most,
                vmax=most,
                cmap=COLOUR_MAP,
                aspect="auto",
                interpolation="nearest",
                extent=(0.5, steps + 0.5, coefficients + 0.5, 0.5),
            )
            axes.grid(visible=False)
            axes.set_title(name, fontsize=9)
            axes.set(xticks=(1, steps), yticks=range(1, coefficients + 1))
        places[0].set_ylabel("coefficient")
        places[len(places) // 2].set_xlabel("frame")
        figure.colorbar(image, ax=list(places), shrink=0.9, pad=0.01, extend="both", label="standard deviations")
        head(figure, "From one utterance to another", "latents at equal distances, decoded, between two recordings")
