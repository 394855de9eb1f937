"""What `pip install .` puts into an environment: the package with its data files, and the command; the checkout is not needed."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from seqvae.data.demo import write_demo
from seqvae.monitors import read_readings

ROOT = Path(__file__).parent.parent.parent
MOST_DISTRIBUTIONS = 20
"""That come with the package beside torch, lightning and what those need themselves."""
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
    first, second, third = blocks_of("Your own LightningModule")
    script = "\n".join([first, BETWEEN, second, third, AFTERWARDS])
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
from seqvae.monitors.escape import escape_threshold, latent_scores
torch.manual_seed(0)
threshold = escape_threshold(latent_scores(YourDrawingVAE(), torch.randn(256, 8)))
print("threshold", threshold.ideal - 1 < 3 * threshold.ideal_error)
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
    assert ran.said.splitlines()[-3:] == ["threshold True", f"from {where}", "found []"]


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


# --- What is in it -----------------------------------------------------------------------------------------------------


def test_the_wheel_brings_license_readme_types_presets_and_the_command(installed):
    archive = zipfile.ZipFile(installed.wheel)
    names = archive.namelist()
    assert {"seqvae/py.typed", "seqvae/config/presets/recommended.yaml"} < set(names)
    assert any(re.fullmatch(r"seqvae-.*\.dist-info/(licenses/)?LICENSE", name) for name in names)
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "seqvae = seqvae.cli.main:main" in archive.read(entry_points).decode()
    description = metadata_of(installed.wheel).get_payload(decode=True)
    assert isinstance(description, bytes)
    assert description.decode() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_few_distributions_come_with_it(installed):
    """Counted among those that are installed here."""
    required = [Requirement(text) for text in metadata_of(installed.wheel).get_all("Requires-Dist") or []]
    ours = closure({one.name for one in required if one.marker is None})
    theirs = closure({"torch", "lightning"})
    assert len(ours - theirs) < MOST_DISTRIBUTIONS, sorted(ours - theirs)


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(archive.read(name))


def closure(names: set[str]) -> set[str]:
    """These distributions and all that they need, by normalised names."""
    found: set[tuple[str, str]] = set()
    rest = [(name, "") for name in names]  # the second is an extra: lightning needs fsspec[http]
    while rest:
        name, extra = rest.pop()
        one = (re.sub(r"[-_.]+", "-", name).lower(), extra)
        if one in found:
            continue
        found.add(one)
        required = [Requirement(text) for text in distribution(name).requires or []]
        needed = [each for each in required if each.marker is None or each.marker.evaluate({"extra": extra})]
        rest += [(each.name, of_it) for each in needed for of_it in ("", *each.extras)]
    return {name for name, _ in found}


# --- The command, where nothing of the checkout is ---------------------------------------------------------------------

TRAINING = "--max_steps 3 --max_sequence_length 30 --width 32 --heads 2 --depth 1 --run_name first --num_workers 0"


def walk(environment: Path, folder: Path, data: str, sequences: str) -> None:
    """The first things that people type after an installation. `sequences`: of the test split."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}

    def seqvae(line: str) -> str:
        command = [str(environment / BIN / "seqvae"), *line.split()]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    code = "import seqvae; print(seqvae.__file__)"
    where = subprocess.run(
        [str(environment / BIN / "python"), "-c", code], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert str(environment) in where.stdout
    assert "  train " in seqvae("--help")
    out = seqvae(f"train {TRAINING} {data}")
    assert "to go on    seqvae train --config" in out
    assert "validation ELBO" in out
    assert '"command": "seqvae train --max_steps 3' in (folder / "runs" / "first" / "environment.json").read_text()
    inspected = seqvae(f"inspect --batch_size 8 {data}")
    assert "READY to train" in inspected
    assert re.search(r"\bseqvae train (\S+ )*--batch_size 8\b", " ".join(inspected.split()))
    assert "ELBO" in seqvae("evaluate runs/first --iw_sequences 0")
    assert f"{sequences} rows" in seqvae("encode runs/first --split test --output latents.parquet")
    assert "report.html" in seqvae("report runs/first")
    assert "<html" in (folder / "runs" / "first" / "report.html").read_text(encoding="utf-8")


BIN = "Scripts" if sys.platform == "win32" else "bin"


def test_the_command_trains_inspects_evaluates_encodes_and_reports(installed, tmp_path):
    """In an environment that finds torch and the other dependencies in this one, and the package only in itself."""
    environment, folder = tmp_path / "environment", tmp_path / "elsewhere"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.rglob("site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip(
        *("--python", str(environment / BIN / "python"), "install", "--no-deps", "--no-index", "--ignore-installed"),
        *("--quiet", str(installed.wheel)),
    )
    data_dir = write_demo(folder, "tokens", sequences=100, mean_length=12)
    walk(environment, folder, f"--data_dir {data_dir.name}", "10")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_plain_installation_into_an_empty_environment_is_all_it_takes(installed, tmp_path):
    """Downloads torch and the rest."""
    environment, folder = tmp_path / "environment", tmp_path / "elsewhere"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / BIN / "python")
    pip("--python", python, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(installed.wheel))
    walk(environment, folder, "", "2,000")  # on the demo
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    names = {line.partition("==")[0].lower().replace("_", "-") for line in listed.stdout.splitlines()}
    others = names - closure({"torch", "lightning"}) - {"pip", "setuptools", "seqvae"}
    assert len(others) < MOST_DISTRIBUTIONS, sorted(others)
