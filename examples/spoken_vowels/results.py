"""Pictures from what `seqvae` writes about utterances: latents by speaker, and the way from one speaker to another.

Shapes: N utterances, Z latent dimensions, S frames, D coefficients, R rows of a table.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.shared import read_latents
from examples.spoken_vowels.data import DIMENSIONS
from seqvae.reports.figures import COLOUR_MAP, head, new_figure
from seqvae.text import percent

HELD_OUT = ("valid", "test")


def show_speakers(latents: Path, data: Path, picture: Path) -> None:
    """Draw the latents that `seqvae encode` wrote, of what was held out of training; `data` is what `data.py` made."""
    encoded = read_latents(latents, HELD_OUT)
    speakers = _speakers_of(data, HELD_OUT)
    draw_speakers(picture, encoded.mean_NZ, np.array([speakers[one] for one in encoded.ids]))


def ends_of(data: Path) -> tuple[int, int]:
    """Return the ids of the first test utterance of the first speaker, and of the last one."""
    by_speaker = {speaker: identity for identity, speaker in reversed(_speakers_of(data, ["test"]).items())}
    return by_speaker[min(by_speaker)], by_speaker[max(by_speaker)]


def show_way(interpolation: Path, data: Path, ends: tuple[int, int], picture: Path) -> None:
    """Draw what `seqvae interpolate ID ID` wrote, a row for each frame of each place on the way."""
    table = pq.read_table(interpolation)
    values_RD = np.stack([table[f"frames[{d}]"].to_numpy() for d in range(DIMENSIONS)], axis=1)
    places_R = table["place"].to_numpy()
    decoded = [values_RD[places_R == place] for place in np.unique(places_R)]
    recorded = [pq.read_table(data / "test.parquet", filters=[("id", "=", one)]) for one in ends]
    first_SD, last_SD = (np.array(table["frames"][0].as_py()) for table in recorded)
    first_speaker, last_speaker = (table["label"][0].as_py() for table in recorded)
    names = [f"speaker {first_speaker}", "decoded", *("" for _ in decoded[1:]), f"speaker {last_speaker}"]
    train = pq.read_table(data / "train.parquet", columns=["frames"])["frames"].combine_chunks()
    train_RD = train.flatten().flatten().to_numpy().reshape(-1, DIMENSIONS)
    mean_D, std_D = train_RD.mean(axis=0), train_RD.std(axis=0)
    draw_interpolation(picture, [(values_SD - mean_D) / std_D for values_SD in (first_SD, *decoded, last_SD)], names)


def _speakers_of(data: Path, splits: Sequence[str]) -> dict[int, int]:
    table = pa.concat_tables(pq.read_table(data / f"{split}.parquet", columns=["id", "label"]) for split in splits)
    return dict(zip(table["id"].to_pylist(), table["label"].to_pylist(), strict=True))


# --- Pictures -----------------------------------------------------------------------------------------------------------


MARKS = "osv^D<P>X"
"""One for each speaker, since nine colours alone are hard to tell apart."""


class Plane(NamedTuple):
    """The means along the two directions in which they differ most."""

    places_N2: np.ndarray
    shares: tuple[float, float]
    """Shares of the variance along each direction."""


def project(mean_NZ: np.ndarray) -> Plane:
    """Return the principal components. Their signs are arbitrary; here the largest weight of each is positive.

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


def draw_speakers(path: Path, mean_NZ: np.ndarray, speakers_N: np.ndarray) -> None:
    """Draw a point for each utterance: its latent mean in the plane in which they differ most."""
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
            "neither the model nor the choice of the plane knows the speakers",
        )


def draw_interpolation(path: Path, utterances: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Draw standardised coefficients from top to bottom, frames from left to right, all frames of one width."""
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
