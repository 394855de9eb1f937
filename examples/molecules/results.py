"""What `seqvae` writes about molecules -> counts and pictures: samples from the prior, and the way from one to another."""

from pathlib import Path

import pyarrow.parquet as pq

from examples.molecules.chemistry import Quality, draw_molecules, quality
from seqvae.errors import UsageError
from seqvae.monitors.reading import NAME
from seqvae.reports.read_run import read_history

SHOWN, COLUMNS = 24, 6


def judge(samples: Path, data: Path, picture: Path) -> Quality:
    """`samples`: of `seqvae sample`; `data`: the directory that `data.py` made. The first samples are drawn, not the best."""
    sampled = _column(samples, "text")
    shown = sampled[:SHOWN]
    draw_molecules(picture, shown, [""] * len(shown), COLUMNS)
    return quality(sampled, set(_column(data / "train.parquet", "smiles")))


def latent_line(run: Path) -> str:
    """What the monitor read last: a decoder that ignores its latent writes valid molecules, too."""
    history = read_history(run / NAME)
    if history is None:
        raise UsageError(f"{run / NAME} holds no reading: was the run watched?")
    rate, information = history.rate_R[-1], history.mutual_information_R[-1]
    return f"latent  rate {rate:.2f}, mutual information {information:.2f} nats at step {int(history.steps_R[-1]):,}"


def ends_of(data: Path) -> tuple[int, int]:
    """The ids of the first two test molecules."""
    first, second, *_ = pq.read_table(data / "test.parquet", columns=["id"])["id"].to_pylist()
    return first, second


def show_way(interpolation: Path, data: Path, ends: tuple[int, int], picture: Path) -> None:
    """`interpolation`: of `seqvae interpolate ID ID`, a row for each latent on the way."""
    steps = _column(interpolation, "text")
    test = pq.read_table(data / "test.parquet", filters=[("id", "in", ends)])
    smiles = dict(zip(test["id"].to_pylist(), test["smiles"].to_pylist(), strict=True))
    captions = ["from here", *(f"decoded, {number} of {len(steps)}" for number in range(1, len(steps) + 1)), "to here"]
    drawn = [smiles[ends[0]], *steps, smiles[ends[1]]]
    draw_molecules(picture, drawn, captions, -(-len(drawn) // 2))


def _column(path: Path, name: str) -> list[str]:
    return [str(smiles) for smiles in pq.read_table(path, columns=[name])[name].to_pylist()]
