"""Counts and pictures from what `seqvae` writes about molecules: samples from the prior, and the way from one to another.

Whether a string is a molecule, which one, and what it looks like is RDKit's answer.
"""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from seqvae.errors import UsageError
from seqvae.monitors.reading import NAME
from seqvae.reports.read_run import read_history
from seqvae.text import visible

SHOWN, COLUMNS = 24, 6


class Quality(NamedTuple):
    """Counts as MOSES has them, but over all samples."""

    sampled: int
    valid: int
    """Strings that RDKit reads as a molecule."""
    unique: int
    """Different molecules among the valid ones."""
    novel: int
    """Of these, those that are not in the training set."""

    def lines(self) -> list[str]:
        return [
            f"valid   {self.valid:,} of {self.sampled:,}: {self.valid / max(self.sampled, 1):.1%}",
            f"unique  {self.unique:,} of these: {self.unique / max(self.valid, 1):.1%}",
            f"novel   {self.novel:,} of these: {self.novel / max(self.unique, 1):.1%} are not in the training set",
        ]


def judge(samples: Path, data: Path, picture: Path) -> Quality:
    """Count the samples of `seqvae sample` beside the data of `data.py`, and draw the first, not the best."""
    sampled = _column(samples, "text")
    shown = sampled[:SHOWN]
    draw_molecules(picture, shown, [""] * len(shown), COLUMNS)
    return quality(sampled, set(_column(data / "train.parquet", "smiles")))


def latent_line(run: Path) -> str:
    """Return the last reading in a line: a decoder that ignores its latent writes valid molecules, too."""
    history = read_history(run / NAME)
    if history is None:
        raise UsageError(f"{run / NAME} holds no reading: was the run watched?")
    rate, information = history.rate_R[-1], history.mutual_information_R[-1]
    return f"latent  rate {rate:.2f}, mutual information {information:.2f} nats at step {int(history.steps_R[-1]):,}"


def ends_of(data: Path) -> tuple[int, int]:
    """Return the ids of the first two test molecules."""
    first, second, *_ = pq.read_table(data / "test.parquet", columns=["id"])["id"].to_pylist()
    return first, second


def show_way(interpolation: Path, data: Path, ends: tuple[int, int], picture: Path) -> None:
    """Draw what `seqvae interpolate ID ID` wrote, a row for each latent on the way."""
    steps = _column(interpolation, "text")
    test = pq.read_table(data / "test.parquet", filters=[("id", "in", ends)])
    smiles = dict(zip(test["id"].to_pylist(), test["smiles"].to_pylist(), strict=True))
    captions = ["from here", *(f"decoded, {number} of {len(steps)}" for number in range(1, len(steps) + 1)), "to here"]
    drawn = [smiles[ends[0]], *steps, smiles[ends[1]]]
    draw_molecules(picture, drawn, captions, -(-len(drawn) // 2))


def _column(path: Path, name: str) -> list[str]:
    return [str(smiles) for smiles in pq.read_table(path, columns=[name])[name].to_pylist()]


# --- RDKit --------------------------------------------------------------------------------------------------------------


CELL, FOOT = 220, 18
"""Pixels of a molecule in the picture, and of these for the line below it."""
LINE, LINES = 24, 4
"""Characters and lines of a string that is no molecule."""
BOND = 22
"""Pixels at most, or the smallest molecules would be drawn largest."""


def quality(sampled: Sequence[str], trained_on: set[str]) -> Quality:
    """Count molecules as RDKit writes them; `trained_on` is taken as it is, as MOSES wrote 99.9 % of it so."""
    canonical = [name for name in map(canonical_of, sampled) if name is not None]
    different = set(canonical)
    return Quality(len(sampled), len(canonical), len(different), len(different - trained_on))


def canonical_of(smiles: str) -> str | None:
    """Return the one way in which RDKit writes this molecule; None if it is none, as an empty string is."""
    molecule = _parsed(smiles)
    return None if molecule is None else str(_rdkit().MolToSmiles(molecule))


def draw_molecules(path: Path, smiles: Sequence[str], captions: Sequence[str], columns: int) -> None:
    """Draw a grid. What is no molecule keeps its place, with its string for a picture: the grid must not flatter."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=13)
    rows = -(-len(smiles) // columns)
    sheet = Image.new("RGB", (columns * CELL, rows * CELL), "white")
    pen = ImageDraw.Draw(sheet)
    for place, (one, caption) in enumerate(zip(smiles, captions, strict=True)):
        left, top = place % columns * CELL, place // columns * CELL
        molecule = _parsed(one)
        if molecule is not None:
            sheet.paste(_drawn(molecule), (left, top))
        else:
            text = "\n".join(["no molecule:", *textwrap.wrap(visible(one), LINE, break_on_hyphens=False)[:LINES]])
            pen.text((left + 12, top + 70), text, fill="#a03c00", font=font)
        pen.text((left + 8, top + CELL - FOOT), caption, fill="#555555", font=font)
        pen.rectangle((left, top, left + CELL, top + CELL), outline="#e3e3e3")
    sheet.save(path)


def _drawn(molecule: Any) -> Any:
    from PIL import Image
    from rdkit.Chem.Draw import rdMolDraw2D

    draw: Any = rdMolDraw2D  # its stubs know less than it does
    canvas = draw.MolDraw2DCairo(CELL, CELL - FOOT)
    canvas.drawOptions().fixedBondLength = BOND
    draw.PrepareAndDrawMolecule(canvas, molecule)
    return Image.open(io.BytesIO(canvas.GetDrawingText()))


def _parsed(smiles: str) -> Any:
    return _rdkit().MolFromSmiles(smiles) if smiles else None


def _rdkit() -> Any:
    try:
        from rdkit import Chem, RDLogger
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}: pip install -c constraints.txt -e '.[examples]'") from error
    log: Any = RDLogger
    log.DisableLog("rdApp.*")  # it complains of each string that is none, and we count those
    return Chem
