"""What README and docs show is there: every command parses, every flag exists, every file named stands where it is named."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import analyze_performance
import inspect_data
import train_optimized
import train_with_collapse_detection
from training.command_line import parse_command_line
from training.flags import flags_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCHEMAS = {
    "train_optimized.py": train_optimized.OptimizedSettings,
    "train_with_collapse_detection.py": train_with_collapse_detection.ReferenceSettings,
    "analyze_performance.py": analyze_performance.AnalyzeOptimized,
    "inspect_data.py": inspect_data.InspectSettings,
}
OTHER_FLAGS = {
    *("config", "preset", "print_config", "help", "version"),
    *("part", "seconds", "rounds", "seeds", "chosen"),
    *("sequences", "large_gb", "data", "evaluate", "full", "short"),
    *("kills", "cases", "steps"),
    "nproc_per_node",
}
"""Of the command line itself, of benchmarks, and of torchrun."""


def commands(text: str) -> list[list[str]]:
    """Every line or code span that runs one of the commands, without the interpreter and comments."""
    lines = re.findall(r"python (\w+\.py[^\n`#]*)", text)
    return [shlex.split(line.split("...")[0]) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_parses(page):
    for program, *words in commands(page.read_text(encoding="utf-8")):
        assert program in SCHEMAS, f"{page.name} shows {program}"
        parse_command_line(SCHEMAS[program], words, prog=program, description="")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_named_exists(page):
    known = OTHER_FLAGS.union(*(flags_of(schema) for schema in SCHEMAS.values()))
    named = set(re.findall(r"(?<![\w-])--([a-z]\w+)", page.read_text(encoding="utf-8")))
    assert {flag for flag in named if flag.removeprefix("no_") not in known} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_linked_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_claim_rests_on_is_there(page):
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8"))
    missing = [
        (file, test)
        for file, test in named
        if not (ROOT / file).exists() or (test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_make_train_types_a_command_that_parses():
    recipe = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in recipe.splitlines() if "train_optimized.py" in line]
    _, program, *words = shlex.split(line)
    parse_command_line(SCHEMAS[program], words, prog=program, description="")


def test_the_readmes_own_parquet_is_ready_to_train(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    words = ["--data_dir", "my_data.parquet", "--cache_dir", "cache", "--check_only"]
    command = [sys.executable, str(ROOT / "inspect_data.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ready to train: tokens")
