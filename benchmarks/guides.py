"""Run the guides of docs/guides as a reader would, from top to bottom, and keep the pictures that they end in.

    python -m benchmarks.guides                  # all of them
    python -m benchmarks.guides text             # one

In: the code on a page, in its order. Python that begins with the comment `# file.py` is written to that file, other Python is run,
and so is each line of commands, in one empty folder. Out: the picture that the page shows, in docs/images/guides/.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

ROOT = Path(__file__).parent.parent
GUIDES = ROOT / "docs" / "guides"
COLOURS = 64
PROGRAMS = {
    "seqvae": [sys.executable, "-m", "seqvae"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
"""The commands of guides, as they run in this environment; `pip install` is what made it."""


class Guide(NamedTuple):
    """What a reader of a page types."""

    steps: tuple[tuple[str, str], ...]
    """(`python`, code) or (`command`, line)."""
    picture: Path
    """Where the picture lies that the page ends in."""


def read_guide(page: Path) -> Guide:
    text = page.read_text(encoding="utf-8")
    steps: list[tuple[str, str]] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language == "python":
            steps.append(("python", block))
        else:
            steps += [("command", line) for line in block.splitlines() if line and not line.startswith("pip install")]
    (picture,) = re.findall(r"^!\[[^\]]+\]\(([^)]+)\)", text, flags=re.MULTILINE)
    return Guide(tuple(steps), (page.parent / picture).resolve())


def run_guide(guide: Guide, folder: Path) -> Path:
    """Do everything that a guide shows, in a folder; return the picture that came of it."""
    own = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "XDG_CACHE_HOME": str(folder / "cache")}
    for kind, text in guide.steps:
        if kind == "command":
            program, *words = shlex.split(text, comments=True)
            command = [*PROGRAMS[program], *words]
        elif named := re.match(r"# (\w+\.py)\n", text):
            (folder / named[1]).write_text(text, encoding="utf-8")
            continue
        else:
            command = [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{text}\n\nended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    (picture,) = folder.rglob(guide.picture.name)
    return picture


def main(names: list[str]) -> None:
    for page in [GUIDES / f"{name}.md" for name in names] or sorted(GUIDES.glob("*.md")):
        guide = read_guide(page)
        with tempfile.TemporaryDirectory() as folder:
            picture = Image.open(run_guide(guide, Path(folder))).convert("RGB")
            guide.picture.parent.mkdir(parents=True, exist_ok=True)
            picture.quantize(COLOURS).save(guide.picture, optimize=True)  # a third of the size
        print(guide.picture.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
