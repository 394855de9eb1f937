"""Utterances in the latent space, and on the way from one to another: two PNGs.

Shapes: N utterances, S frames, D coefficients.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from examples.latents import project
from monitors.figure_style import COLOUR_MAP, head, new_figure
from reports.terminal import percent

MARKS = "osv^D<P>X"
"""One for each speaker, since nine colours alone are hard to tell apart."""


def draw_speakers(path: Path, mean_NZ: np.ndarray, speakers_N: np.ndarray, split: str) -> None:
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
            f"{len(speakers_N)} utterances of the {split} split",
            "trained without labels",
        )


def draw_interpolation(path: Path, steps: Sequence[np.ndarray], ends: tuple[str, str]) -> None:
    """What the decoder makes of each latent on the way: coefficients from top to bottom, frames from left to right."""
    most = max(float(np.abs(values_SD).max()) for values_SD in steps)
    with new_figure(path, 10, 3.6) as figure:
        places = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
        names = [ends[0], *("" for _ in steps[2:]), ends[1]]
        for axes, values_SD, name in zip(places, steps, names, strict=True):
            image = axes.imshow(
                values_SD.T, vmin=-most, vmax=most, cmap=COLOUR_MAP, aspect="auto", interpolation="nearest"
            )
            axes.grid(visible=False)
            axes.set_title(name, fontsize=9)
            axes.set_xlabel("frame")
        places[0].set_ylabel("coefficient")
        figure.colorbar(image, ax=list(places), shrink=0.9, pad=0.01)
        head(figure, "From one utterance to another", f"{len(steps)} latents at equal distances, decoded")
