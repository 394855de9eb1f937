"""The layers of the package, as the contracts in pyproject.toml have them."""

import subprocess
import sys
from pathlib import Path

from benchmarks import layers

ROOT = Path(__file__).parents[2]


def test_every_import_keeps_to_the_contracts():
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([script, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_picture_of_the_layers_is_that_of_the_contracts(tmp_path):
    layers.draw(tmp_path / "layers.svg")
    assert (tmp_path / "layers.svg").read_text() == layers.PICTURE.read_text(), "python -m benchmarks.layers draws it"
