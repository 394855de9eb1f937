"""What RDKit says of SMILES strings: whether they are molecules, which, and what they look like.

In: strings, as a model wrote them. Out: counts, and a PNG.
"""

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqvae.errors import UsageError
from seqvae.text import visible

CELL, FOOT = 220, 18
"""Pixels that a molecule takes in the picture, and of these for the line below it."""
LINE, LINES = 24, 4
"""Characters and lines of a string that is no molecule."""
BOND = 22
"""Pixels at most, or the smallest molecules would be drawn largest."""


class Quality(NamedTuple):
    """As MOSES counts, but over all samples."""

    sampled: int
    valid: int
    """Strings that RDKit reads as a molecule."""
    unique: int
    """Different molecules among the valid ones."""
    novel: int
    """Of these, how many are not in the training set."""

    def lines(self) -> list[str]:
        return [
            f"valid   {self.valid:,} of {self.sampled:,}: {self.valid / max(self.sampled, 1):.1%}",
            f"unique  {self.unique:,} of these: {self.unique / max(self.valid, 1):.1%}",
            f"novel   {self.novel:,} of these: {self.novel / max(self.unique, 1):.1%} are not in the training set",
        ]


def quality(sampled: Sequence[str], trained_on: set[str]) -> Quality:
    """Molecules are compared as RDKit writes them; `trained_on` as it stands: MOSES wrote 99.9 % of it so."""
    canonical = [name for name in map(canonical_of, sampled) if name is not None]
    different = set(canonical)
    return Quality(len(sampled), len(canonical), len(different), len(different - trained_on))


def canonical_of(smiles: str) -> str | None:
    """The one way in which RDKit writes this molecule; None of what is none. An empty string is none."""
    molecule = _parsed(smiles)
    return None if molecule is None else str(_rdkit().MolToSmiles(molecule))


def draw_molecules(path: Path, smiles: Sequence[str], captions: Sequence[str], columns: int) -> None:
    """A grid. What is no molecule keeps its place, with its string for a picture: it must not flatter."""
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
            said = "\n".join(["no molecule:", *textwrap.wrap(visible(one), LINE, break_on_hyphens=False)[:LINES]])
            pen.text((left + 12, top + 70), said, fill="#a03c00", font=font)
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
