"""What `use_model.py` writes about utterances -> pictures: latents by speaker, and the way from one speaker to another."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from examples.latents import read_latents
from examples.spoken_vowels.pictures import draw_interpolation, draw_speakers

SPLIT = "test"


def show_speakers(latents: Path, data: Path, picture: Path) -> None:
    """`latents`: of `use_model.py encode --split test`; `data`: the directory that `data.py` made."""
    encoded = read_latents(latents)
    speakers = _speakers_of(data)
    draw_speakers(picture, encoded.mean_NZ, np.array([speakers[one] for one in encoded.ids]), SPLIT)


def ends_of(data: Path) -> tuple[int, int]:
    """The ids of the first utterance of the first speaker and of the last one."""
    by_speaker = {speaker: identity for identity, speaker in reversed(_speakers_of(data).items())}
    return by_speaker[min(by_speaker)], by_speaker[max(by_speaker)]


def show_way(interpolation: Path, data: Path, ends: tuple[int, int], picture: Path) -> None:
    """`interpolation`: of `use_model.py interpolate ID ID`, a row for each latent on the way."""
    rows = pq.read_table(interpolation, columns=["frames"])["frames"].to_pylist()
    speakers = _speakers_of(data)
    first, last = (f"speaker {speakers[one]}" for one in ends)
    draw_interpolation(picture, [np.array(row, dtype=np.float64) for row in rows], (first, last))


def _speakers_of(data: Path) -> dict[int, int]:
    table = pq.read_table(data / f"{SPLIT}.parquet", columns=["id", "label"])
    return dict(zip(table["id"].to_pylist(), table["label"].to_pylist(), strict=True))
