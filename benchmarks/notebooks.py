"""Run the notebooks of examples/ cell by cell in a Jupyter kernel, and keep the picture that each ends in.

    python -m benchmarks.notebooks                         # all of them
    python -m benchmarks.notebooks icu_stays               # one
    python -m benchmarks.notebooks icu_stays --keep DIR    # and DIR/icu_stays.ipynb, with all that it printed and drew

In: scripts whose cells begin with `# %%`. Out: docs/images/examples/NAME.png. Needs the extra `examples`.
"""

import base64
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode, write
from nbformat.v4 import new_code_cell
from PIL import Image
from traitlets.config import Config

from benchmarks.measure import make_parser
from benchmarks.site_pages import notebooks

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "images" / "examples"
COLOURS, DOTS_PER_INCH = 64, 160


def run_notebook(script: Path, folder: Path, *more: str) -> NotebookNode:
    """Return the notebook with what its cells printed and drew, run in a folder; `more` are cells to run after its own."""
    notebook = jupytext.read(script)
    notebook.cells += [new_code_cell(source) for source in more]
    own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    sockets = {"transport": "ipc", "ip": str(folder / "kernel")}  # files, so that no port is opened
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=None,
        resources={"metadata": {"path": str(folder)}},
        config=Config(KernelManager=sockets),
    )
    return client.execute(env=os.environ | own)


def pictures(notebook: NotebookNode) -> list[bytes]:
    """Return all PNG files that its cells show, in their order."""
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser("benchmarks.notebooks", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where to keep the notebooks with all that came out")
    options = parser.parse_args(words)
    scripts = {path.stem: path for path in notebooks()}
    for name in options.names or scripts:
        if name not in scripts:
            parser.error(f"{name} is none of {', '.join(scripts)}")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "matplotlibrc").write_text(f"figure.dpi: {DOTS_PER_INCH}\n", encoding="utf-8")
            notebook = run_notebook(scripts[name], Path(folder))
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            write(notebook, options.keep / f"{name}.ipynb")
        PICTURES.mkdir(parents=True, exist_ok=True)
        picture = Image.open(io.BytesIO(pictures(notebook)[-1])).convert("RGB")
        picture.quantize(COLOURS).save(PICTURES / f"{name}.png", optimize=True)  # a third of the size
        print((PICTURES / f"{name}.png").relative_to(ROOT))


if __name__ == "__main__":
    main()
