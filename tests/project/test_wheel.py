"""What `pip install .` puts into an environment: the package with its data files, which works there outside of the checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from seqvae.monitors import read_readings

ROOT = Path(__file__).parent.parent.parent
CHECKOUT_ONLY = ("monitors", "benchmarks", "tests", "dataset", "train_optimized")


class Installed(NamedTuple):
    wheel: Path
    target: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of a copy of the tree, since `build/` would keep modules that are gone; without any network."""
    directory = tmp_path_factory.mktemp("wheel")
    (directory / "tree").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory / "tree")
    shutil.copytree(ROOT / "seqvae", directory / "tree" / "seqvae", ignore=shutil.ignore_patterns("__pycache__"))
    offline = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    pip("wheel", *offline, "--no-build-isolation", "--wheel-dir", str(directory), str(directory / "tree"))
    (wheel,) = directory.glob("*.whl")
    pip("install", *offline, "--target", str(directory / "target"), str(wheel))
    return Installed(wheel, directory / "target")


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


class Ran(NamedTuple):
    directory: Path
    said: str


@pytest.fixture(scope="module")
def ran(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The modules of the page, in a process that knows nothing of the checkout. `-P`: nor of where it is started."""
    first, second = blocks_of("Your own LightningModule")
    script = "\n".join([first, BETWEEN, second, AFTERWARDS])
    directory = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-P", "-c", script]
    environment = os.environ | {"PYTHONPATH": str(installed.target)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Ran(directory, done.stdout)


BETWEEN = """
from pathlib import Path
Path("posterior.jsonl").rename("first.jsonl")
"""
AFTERWARDS = f"""
import seqvae.monitors
from importlib.util import find_spec
for name in seqvae.monitors.__all__:
    getattr(seqvae.monitors, name)
print("from", seqvae.__file__)
print("found", [name for name in {CHECKOUT_ONLY} if find_spec(name)])
"""


def blocks_of(section: str) -> list[str]:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_wheel_holds_the_package_with_its_data_files_and_nothing_else(installed):
    names = zipfile.ZipFile(installed.wheel).namelist()
    ours = {name for name in names if not re.match(r"seqvae-[^/]+\.dist-info/", name)}
    files = (path for path in (ROOT / "seqvae").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert ours == {path.relative_to(ROOT).as_posix() for path in files}


def test_installed_the_package_needs_nothing_of_the_checkout(installed, ran):
    where = installed.target / "seqvae" / "__init__.py"
    assert ran.said.splitlines()[-2:] == [f"from {where}", "found []"]


@pytest.mark.parametrize("name", ["first.jsonl", "posterior.jsonl"])
def test_the_modules_on_the_page_are_read_where_only_the_wheel_is(name, ran):
    last = read_readings(ran.directory / name)[-1]
    assert last.step == 40
    assert last.rate > 0
    assert last.kl_weight == 1.0
    assert last.decoder_use is not None


def test_installed_the_monitors_draw(ran):
    assert "cannot be drawn" not in ran.said
    assert list((ran.directory / "plots").glob("*.png"))
