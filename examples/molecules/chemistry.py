"""What RDKit says of SMILES strings: whether they are molecules, which, and what they look like.

In: strings, as a model wrote them. Out: counts, and a PNG.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reports.terminal import clip
from training.exit_codes import UsageError

CELL, FOOT = 220, 18
"""Pixels that a molecule takes in the picture, and of these for the line below it."""
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
    """A grid. What is no molecule keeps its place, with its string for a caption: a picture must not flatter."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=13)
    rows = -(-len(smiles) // columns)
    sheet = Image.new("RGB", (columns * CELL, rows * CELL), "white")
    for place, (one, caption) in enumerate(zip(smiles, captions, strict=True)):
        corner = (place % columns * CELL, place // columns * CELL)
        molecule = _parsed(one)
        if molecule is not None:
            sheet.paste(_drawn(molecule), corner)
        text = caption if molecule is not None else f"no molecule: {clip(one, 18)}"
        ImageDraw.Draw(sheet).text((corner[0] + 8, corner[1] + CELL - FOOT), text, fill="#555555", font=font)
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
