"""Draw the layers of the package from the import contracts in pyproject.toml.

    python -m benchmarks.layers            # writes docs/images/layers.svg

In: the contract "layers" of import-linter, and the first sentence of each module's docstring. Out: one box per module; a
module imports only from the rows below its own, and never from its neighbours in a row.
"""

import ast
import textwrap
import tomllib
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "layers.svg"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "layers", "font.family": "sans-serif"}
WIDTH, ROW = 10.0, 0.78
"""Width of the picture and height of a row in inches."""


def layers() -> list[list[str]]:
    """Return the modules of each layer, from the top down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = (one for one in contracts if one["type"] == "layers")
    return [[name.strip() for name in row.split("|")] for row in contract["layers"]]


def purpose(module: str) -> str:
    """Return the first sentence of a module's docstring."""
    path = ROOT / "seqvae" / module / "__init__.py"
    source = (path if path.exists() else path.parent.with_suffix(".py")).read_text(encoding="utf-8")
    docstring = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    return docstring.partition(". ")[0].rstrip(".")


def draw(path: Path = PICTURE) -> None:
    rows = layers()
    height = ROW * len(rows)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, height))
        axes.axis("off")
        for number, modules in enumerate(rows):
            bottom = height - ROW * (number + 1)
            width = WIDTH / len(modules)
            for column, module in enumerate(modules):
                place = (column * width + 0.06, bottom + 0.07)
                box = FancyBboxPatch(
                    place,
                    width - 0.12,
                    ROW - 0.14,
                    boxstyle="round,pad=0,rounding_size=0.06",
                    facecolor="#eef2f7",
                    edgecolor="#8795a8",
                )
                axes.add_patch(box)
                text = textwrap.wrap(purpose(module), round(15 * (width - 1.5)))[:2]
                axes.text(
                    place[0] + 0.12, bottom + ROW / 2, module, weight="bold", va="center", size=11, color="#1d2733"
                )
                axes.text(
                    place[0] + 1.25,
                    bottom + ROW / 2,
                    "\n".join(text),
                    va="center",
                    size=8,
                    color="#46525f",
                    linespacing=1.3,
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw()
