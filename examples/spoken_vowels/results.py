"""What `seqvae` writes about utterances -> pictures: latents by speaker, and the way from one speaker to another."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.latents import read_latents
from examples.spoken_vowels.data import DIMENSIONS
from examples.spoken_vowels.pictures import draw_interpolation, draw_speakers

HELD_OUT = ("valid", "test")


def show_speakers(latents: Path, data: Path, picture: Path) -> None:
    """`latents`: of `seqvae encode`; `data`: the directory that `data.py` made. Drawn is what was held out of training."""
    encoded = read_latents(latents, HELD_OUT)
    speakers = _speakers_of(data, HELD_OUT)
    draw_speakers(picture, encoded.mean_NZ, np.array([speakers[one] for one in encoded.ids]))


def ends_of(data: Path) -> tuple[int, int]:
    """The ids of the first test utterance of the first speaker, and of the last one."""
    by_speaker = {speaker: identity for identity, speaker in reversed(_speakers_of(data, ["test"]).items())}
    return by_speaker[min(by_speaker)], by_speaker[max(by_speaker)]


def show_way(interpolation: Path, data: Path, ends: tuple[int, int], picture: Path) -> None:
    """`interpolation`: of `seqvae interpolate ID ID`, a row for each frame of each place on the way."""
    table = pq.read_table(interpolation)
    values_RD = np.stack([table[f"frames[{d}]"].to_numpy() for d in range(DIMENSIONS)], axis=1)
    places_R = table["place"].to_numpy()
    decoded = [values_RD[places_R == place] for place in np.unique(places_R)]
    first, last = (_recorded(data, one) for one in ends)
    mean_D, std_D = _moments(data)
    names = [f"speaker {first.speaker}", "decoded", *("" for _ in decoded[1:]), f"speaker {last.speaker}"]
    utterances = [first.values_SD, *decoded, last.values_SD]
    draw_interpolation(picture, [(values_SD - mean_D) / std_D for values_SD in utterances], names)


class _Recorded(NamedTuple):
    values_SD: np.ndarray
    speaker: int


def _recorded(data: Path, one: int) -> _Recorded:
    table = pq.read_table(data / "test.parquet", filters=[("id", "=", one)])
    return _Recorded(np.array(table["frames"][0].as_py()), table["label"][0].as_py())


def _moments(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of each coefficient over all frames of the training utterances."""
    frames = pq.read_table(data / "train.parquet", columns=["frames"])["frames"].combine_chunks()
    values_RD = frames.flatten().flatten().to_numpy().reshape(-1, DIMENSIONS)
    return values_RD.mean(axis=0), values_RD.std(axis=0)


def _speakers_of(data: Path, splits: Sequence[str]) -> dict[int, int]:
    table = pa.concat_tables(pq.read_table(data / f"{split}.parquet", columns=["id", "label"]) for split in splits)
    return dict(zip(table["id"].to_pylist(), table["label"].to_pylist(), strict=True))
