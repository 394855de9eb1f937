"""What `use_model.py` writes about molecules -> counts and pictures: samples from the prior, and the way from one to another."""

from pathlib import Path

import pyarrow.parquet as pq

from examples.molecules.chemistry import Quality, draw_molecules, quality

SHOWN, COLUMNS = 24, 6


def judge(samples: Path, data: Path, picture: Path) -> Quality:
    """`samples`: of `use_model.py sample`; `data`: the directory that `data.py` made. The first samples are drawn, not the best."""
    sampled = _smiles_of(samples)
    shown = sampled[:SHOWN]
    draw_molecules(picture, shown, [""] * len(shown), COLUMNS)
    return quality(sampled, set(_smiles_of(data / "train.parquet")))


def show_way(interpolation: Path, picture: Path) -> None:
    """`interpolation`: of `use_model.py interpolate ID ID`, a row for each latent on the way."""
    steps = _smiles_of(interpolation)
    draw_molecules(picture, steps, [f"{number} of {len(steps)}" for number in range(1, len(steps) + 1)], len(steps))


def _smiles_of(path: Path) -> list[str]:
    return [str(smiles) for smiles in pq.read_table(path, columns=["smiles"])["smiles"].to_pylist()]
