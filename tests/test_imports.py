"""Who may import whom: the walls between the stations, read from the source with `ast` and held for every file.

A station is a folder, or `dataset.py`; the other files at the root are commands. The rules cover stations that do not
exist yet.
"""

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    *("train_optimized", "train_with_collapse_detection", "analyze_performance"),
    *("evaluate", "use_model", "inspect_data"),
}
PRODUCT = {"sequences", "models", "training", "monitors", "reports", "performance", "using", "dataset"}
HAND_OVERS = {"sequences.batches", "sequences.description"}
"""The types that sequences/ hands over; they know nothing of how the data came about."""
MAY_IMPORT: dict[str, set[str]] = {
    "sequences": set(),
    "monitors": set(),
    "reports": set(),
    "dataset": {"sequences"},
    "models": HAND_OVERS,
    "training": {
        "dataset",
        "models",
        "monitors",
        "reports",
        "sequences.settings",
        "sequences.local_paths",
        "sequences.errors",
        *HAND_OVERS,
    },
    "performance": {
        *("dataset", "models", "monitors", "reports", "training"),
        *(
            "sequences.settings",
            "sequences.local_paths",
            "sequences.errors",
            "sequences.plan",
            "sequences.limits",
            *HAND_OVERS,
        ),
    },
    "using": {
        *("dataset", "models", "monitors", "reports", "training"),
        *("sequences.settings", "sequences.local_paths", "sequences.errors", *HAND_OVERS),
    },
    "command": PRODUCT,
    "analyze_performance": PRODUCT | {"train_optimized", "train_with_collapse_detection"},
    "examples": PRODUCT,
    "benchmarks": PRODUCT | COMMANDS | {"examples"},
    "tests": PRODUCT | COMMANDS | {"benchmarks", "examples"},
}
"""What is ours, beside the station itself; a name stands for all below it."""
OURS = PRODUCT | COMMANDS | {"benchmarks", "tests", "examples"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
TORCH = {"torch", "torchmetrics", *LIGHTNING}
NO_CODE = {"build", "dist", "runs"}


class Import(NamedTuple):
    line: int
    name: str
    """Absolute; `from a import b` is a.b, as b may be a module."""
    is_relative: bool


def broken_rules(path: PurePosixPath, source: str, formulas: set[str]) -> list[str]:
    """What a file imports and may not. `path` starts at the root, `formulas` are the modules of `formula_modules`."""
    station = _station_of(path)
    if station not in MAY_IMPORT:
        return [f"{path}: {station} is no station; give it a place in MAY_IMPORT"]
    reasons = [(imported, _reason_against(station, imported, formulas)) for imported in _imports_of(path, source)]
    return [f"{path}:{imported.line}: {imported.name}: {reason}" for imported, reason in reasons if reason]


def formula_modules(sources: dict[PurePosixPath, str]) -> set[str]:
    """The modules of monitors/ that do without Lightning, so that no callback is among them."""
    return {
        f"monitors.{path.stem}"
        for path, source in sources.items()
        if path.parts[0] == "monitors" and path.stem != "__init__"
        if not any(_is_within(imported.name, LIGHTNING) for imported in _imports_of(path, source))
    }


def _station_of(path: PurePosixPath) -> str:
    if len(path.parts) > 1:
        return path.parts[0]
    return "command" if path.stem in COMMANDS - MAY_IMPORT.keys() else path.stem


def _imports_of(path: PurePosixPath, source: str) -> Iterator[Import]:
    """All imports of a file, those inside of functions, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.parts[: len(path.parts) - node.level] if node.level else ()
            above = [*package, *([node.module] if node.module else [])]
            yield from (Import(node.lineno, ".".join([*above, alias.name]), node.level > 0) for alias in node.names)


def _reason_against(station: str, imported: Import, formulas: set[str]) -> str | None:
    root = imported.name.partition(".")[0]
    if station == "reports" and root in TORCH:
        return "reports does without torch and Lightning"
    if station == "monitors" and root == "monitors" and not imported.is_relative:
        return "inside monitors imports are relative, since it is installed under another name"
    if root not in OURS or root == station:
        return None
    if not _is_within(imported.name, MAY_IMPORT[station]):
        return f"{station} may not import it"
    if (
        station in ("training", "performance", "using")
        and root == "monitors"
        and not _is_within(imported.name, formulas)
    ):
        return f"{station} takes the formulas from monitors; callbacks are passed in"
    return None


def _is_within(name: str, names: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in names)


def _sources() -> dict[PurePosixPath, str]:
    folders = [
        folder
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name not in NO_CODE and folder.name[0] != "."
        if not (folder / "pyvenv.cfg").exists()
    ]
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return {PurePosixPath(path.relative_to(ROOT).as_posix()): path.read_text(encoding="utf-8") for path in paths}


def test_every_import_keeps_to_the_rules():
    sources = _sources()
    formulas = formula_modules(sources)
    assert [rule for path, source in sources.items() for rule in broken_rules(path, source, formulas)] == []


FORMULAS = {"monitors.formulas"}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("sequences/cache.py", "import models"),
        ("sequences/cache.py", "from training.settings import RunSettings"),
        ("sequences/cache.py", "def f():\n    import dataset"),
        ("sequences/cache.py", "from ..training import settings"),
        ("sequences/cache.py", "from .. import training"),
        ("models/lstm.py", "from sequences.cache import open_cache"),
        ("models/lstm.py", "from sequences import cache"),
        ("models/lstm.py", "import dataset"),
        ("models/lstm.py", "from monitors.formulas import gaussian_kl"),
        ("dataset.py", "from models.settings import ModelSettings"),
        ("dataset.py", "import training.run"),
        ("training/run.py", "from sequences.cache import open_cache"),
        ("training/run.py", "from monitors.callback import PosteriorMonitor"),
        ("training/run.py", "from monitors import PosteriorMonitor"),
        ("training/run.py", "import monitors"),
        ("training/run.py", "import train_optimized"),
        ("training/run.py", "from performance.find_batch import find_batch"),
        ("performance/baton.py", "from monitors.callback import PosteriorMonitor"),
        ("performance/find_batch.py", "from sequences.cache import open_cache"),
        ("performance/find_batch.py", "import analyze_performance"),
        ("monitors/window.py", "from training.objective import Objective"),
        ("monitors/window.py", "from monitors.formulas import gaussian_kl"),
        ("monitors/window.py", "import monitors"),
        ("monitors/window.py", "from ..sequences import batches"),
        ("reports/page.py", "import torch"),
        ("reports/page.py", "from torch import nn"),
        ("reports/page.py", "from lightning.pytorch import Callback"),
        ("reports/page.py", "from monitors.verdicts import Verdict"),
        ("train_optimized.py", "import train_with_collapse_detection"),
        ("train_optimized.py", "import analyze_performance"),
        ("analyze_performance.py", "import evaluate"),
        ("evaluate.py", "from tests.fake_sequences import make"),
        ("evaluate.py", "from benchmarks.measure import median"),
        ("models/lstm.py", "import tests"),
        ("benchmarks/loading.py", "import tests"),
        ("helpers/words.py", "import os"),
        ("helpers.py", "import os"),
    ],
)
def test_a_broken_rule_is_found(path, source):
    assert len(broken_rules(PurePosixPath(path), source, FORMULAS)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("sequences/cache.py", "import numpy\nfrom sequences.errors import DataError\nfrom .files import find_files"),
        ("models/lstm.py", "import torch\nfrom sequences.batches import Batch\nfrom sequences import description"),
        ("dataset.py", "import lightning\nfrom sequences.cache import open_cache"),
        ("training/run.py", "from dataset import SequenceDataModule\nfrom models.lstm import Encoder"),
        ("training/run.py", "from monitors.formulas import gaussian_kl\nfrom monitors import formulas"),
        ("training/run.py", "from sequences.settings import SourceSettings\nfrom sequences.errors import DataError"),
        (
            "monitors/callback.py",
            "from lightning import Callback\nfrom .formulas import gaussian_kl\nfrom . import window",
        ),
        ("reports/page.py", "import json\nfrom reports.figures import draw"),
        ("performance/find_batch.py", "from training.run import make_data\nfrom sequences.plan import cut_batches"),
        ("performance/baton.py", "from monitors.formulas import gaussian_kl\nfrom reports.terminal import table"),
        ("train_optimized.py", "from training.run import fit\nfrom monitors.callback import PosteriorMonitor"),
        ("analyze_performance.py", "import train_optimized\nfrom performance.find_batch import find_batch"),
        ("tests/test_x.py", "import train_optimized\nfrom benchmarks.measure import median"),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert broken_rules(PurePosixPath(path), source, FORMULAS) == []


def test_formulas_are_the_monitors_modules_without_lightning():
    sources = {
        PurePosixPath("monitors/__init__.py"): "",
        PurePosixPath("monitors/formulas.py"): "import torch",
        PurePosixPath("monitors/callback.py"): "from lightning.pytorch import Callback",
        PurePosixPath("models/lstm.py"): "import torch",
    }
    assert formula_modules(sources) == FORMULAS
