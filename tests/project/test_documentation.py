"""What README and docs show is there: commands and modules parse, flags and files exist, and numbers in tables were measured."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest

from benchmarks import bench, pages
from benchmarks.flag_page import COMMANDS, Command
from benchmarks.guides import PROGRAMS, read_guide, run_guide
from seqvae.cli.command_line import parse_command_line
from seqvae.cli.use_model import models_and_flags
from seqvae.config.flags import CommandLine, flags_of
from seqvae.config.training import OptimizedSettings
from seqvae.errors import ExitCode
from tests.support.documents import (
    GUIDES,
    OF_EXAMPLES,
    PAGES,
    ROOT,
    Table,
    commands,
    files_named,
    files_written,
    flags_named,
    make_targets,
    modules_run,
    tables,
    text_of,
)

OF_TORCHRUN = {
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "max_restarts",
    "rdzv_conf",
    "rdzv_backend",
    "rdzv_endpoint",
}
OF_OTHERS = OF_TORCHRUN | {
    "nodes",
    "ntasks",
    "ntasks_per_node",
    "plain",
    "query_gpu",
    "format",
    "shutdown",
    "to",
    "execute",
}
"""Flags of torchrun, SLURM, nvidia-smi, wsl and jupytext, and the one of `seqvae train` that is no setting."""
FROM_ELSEWHERE = {"venv", "pip"}
"""Modules that are not ours."""
IN_RUNS = {
    "step_level",
    *(
        "config.yaml",
        "environment.json",
        "metrics.csv",
        "posterior.jsonl",
        "throughput.jsonl",
        "events.jsonl",
        "report.html",
        "evaluation.jsonl",
        "run.json",
    ),
    *("best.ckpt", "last.ckpt", "previous.ckpt", "healthy.ckpt", "replaced.ckpt", "collapsed.ckpt", "run.yaml"),
    *(
        "timeline.png",
        "kl_per_dim.png",
        "active_units.png",
        "posterior_means.png",
        "posterior_pca.png",
        "posteriors.npz",
    ),
    *("analysis.json", "analysis.png", "trace.json", "plots", "samples", "checkpoints"),
    *(
        "model.safetensors",
        "config.json",
        "model.json",
        "encoder.onnx",
        "decoder_step.onnx",
        "onnx.json",
        "latents.parquet",
        "reconstructed.parquet",
        "samples.parquet",
    ),
    *("comparison.html", "between.parquet", "filled.parquet", "labels.csv"),
    "compiled_layers.json",
    *("index.html", "summary.json", "latents.json", "study.db", "study.json", "trial-000.log"),
}
"""What commands write into a run's directory, or beside it."""
OF_USERS = {
    *(
        "my_data.parquet",
        "readings.csv",
        "lines.txt",
        "new.parquet",
        "tokenizer.json",
        "train.parquet",
        "subject_splits.parquet",
        "codes.parquet",
        "200001.0.parquet",
    ),
    *("oc.csv", "stats.csv", "cached.csv", "train", "valid", "test", "data", "tuning", "held_out", "metadata"),
    *("moses_smiles", "japanese_vowels", "physionet2012", "132539.txt", "Outcomes-a.txt"),
}
"""What users bring, by the names that the pages give it."""
DIARY = "performance_log.md"
"""What was measured while it was tried out, on the machine of that hour: no table, and no benchmark keeps it."""
DEFINITIONS = {
    ("latents.md", "Priors"): "formulas, and defaults",
    ("latents.md", "Posteriors"): "formulas, and a constant",
    ("README.md", "How it compares"): "a word of others, and no figure",
    ("training.md", "Exit codes"): "the members of ExitCode",
    ("using.md", "Numbers"): "how many posteriors are compared at most",
    ("using.md", "Latents, samples, missing values"): "a 0 where there is nothing to fill",
    ("data.md", "Three kinds of sequence"): "a dimension, D = 1",
    ("monitoring.md", "What a reading says"): "fields of Thresholds",
    ("monitoring.md", "Verdicts"): "fields of Thresholds, and flags",
    ("monitoring.md", "How closely to watch"): "what `seqvae/config/monitoring.py` says",
    ("reliability.md", "What happens, and what the run does"): "exit codes and limits; each row names its test",
    ("reliability.md", "Security"): "a limit on files; each row names its test",
    ("results.md", "Models on held-out data"): "how large the sets are",
    ("troubleshooting.md", "Troubleshooting"): "exit codes",
    ("training.md", "Training"): "defaults of the two commands",
    ("training.md", "The objective, and how it prevents collapse"): "flags, with an example each",
}
"""Tables with numbers that no benchmark measures, by page and heading, and what the numbers are. Pages that are written from the
code as a whole (every_flag.md) have a test of their own."""
WRITTEN_FROM_CODE = {"every_flag.md"}

each_page = pytest.mark.parametrize("page", [*PAGES, *OF_EXAMPLES], ids=lambda page: page.relative_to(ROOT).as_posix())


@each_page
def test_every_command_shown_parses(page):
    written = files_written(text_of(page))
    for words in commands(text_of(page)):
        if words[0] in written:
            continue
        command = command_of(words)
        assert command is not None, f"{page.name} shows {shlex.join(words)}"
        rest = [word for word in words[len(command.typed.split()) :] if word != "--plain"]
        if command.typed == "seqvae evaluate":  # its --compare has runs behind it
            _, rest, _ = models_and_flags(rest)
        before = list(takewhile(lambda word: not word.startswith("--"), rest))
        assert command.takes_words or not before, f"{page.name} shows {shlex.join(words)}"
        parse_command_line(command.schema, rest[len(before) :], prog=command.typed, description="")


ALSO_TYPED = {"seqvae train": "train_optimized.py", "analyze_performance.py": "seqvae profile"}
"""Other names of commands."""


def command_of(words: list[str]) -> Command | None:
    for typed, name in ALSO_TYPED.items():
        if words[: len(typed.split())] == typed.split():
            words[: len(typed.split())] = name.split()
    found = [command for command in COMMANDS if words[: len(command.typed.split())] == command.typed.split()]
    return max(found, key=lambda command: len(command.typed), default=None)


@each_page
def test_every_module_run_exists_and_knows_its_flags(page):
    for name, *words in modules_run(text_of(page)):
        module = name
        if module in FROM_ELSEWHERE:
            continue
        spec = find_spec(module)
        assert spec is not None, f"{page.name} runs {name}"
        assert flags_named(" ".join(words)) <= flags_of_module(module), f"{page.name} runs {name} {shlex.join(words)}"
        if module == "benchmarks.bench":
            assert {word for word in words if not word.startswith("--")} <= bench.FORMS.keys()


def flags_of_module(name: str) -> set[str]:
    """Those of its own parser and of the modules of its folder that it takes; those of training, if it hands words on to that."""
    path = ROOT / f"{name.replace('.', '/')}.py"
    source = text_of(path if path.exists() else path.with_suffix("") / "__main__.py")
    folder = name.partition(".")[0]
    taken = re.findall(rf"^from ({folder}\.[\w.]+) import", source, flags=re.MULTILINE)
    sources = [
        source,
        *(
            text_of(ROOT / f"{one.replace('.', '/')}.py")
            for one in taken
            if (ROOT / f"{one.replace('.', '/')}.py").exists()
        ),
    ]
    own = {flag for one in sources for flag in re.findall(r'add_argument\(\s*"--(\w+)"', one)}
    return own | (set(flags_of(OptimizedSettings)) if "parse_command_line(" in source else set())


@each_page
def test_every_flag_named_exists(page):
    known = OF_OTHERS.union(*(flags_of(command.schema) for command in COMMANDS))
    known |= CommandLine(OptimizedSettings).controls.keys()
    for path in (path for folder in stations() for path in folder.rglob("*.py")):
        known |= set(re.findall(r'add_argument\(\s*"--(\w+)"', text_of(path)))
    assert flags_named(text_of(page)) - known == set()


@each_page
def test_every_make_target_shown_is_in_the_makefile(page):
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), flags=re.MULTILINE))
    assert make_targets(text_of(page)) - targets == set()


@each_page
def test_every_file_linked_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(page)):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links {target}"


@each_page
def test_every_file_named_is_there(page):
    """By its path from the root or from the page, or, as in a list of a folder's files, by its name."""
    named = files_named(text_of(page)) - files_written(text_of(page))
    assert {name for name in named if not is_there(name, page)} == set()


def is_there(name: str, page: Path) -> bool:
    path = Path(name)
    if path.name in IN_RUNS | OF_USERS or path.parts[0] == "runs":
        return True
    if len(path.parts) > 1:
        return (ROOT / path).exists() or (page.parent / path).exists()
    return name in names_of_ours()


@cache
def names_of_ours() -> set[str]:
    """Of files and folders."""
    ours = [*ROOT.glob("*"), *(path for folder in stations() for path in folder.rglob("*"))]
    return {path.name for path in ours}


def stations() -> list[Path]:
    return [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "runs"]


@each_page
def test_every_test_that_a_claim_rests_on_is_there(page):
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text_of(page))
    missing = [
        (file, test)
        for file, test in named
        if not (ROOT / file).exists() or (test and f"def {test}(" not in text_of(ROOT / file))
    ]
    assert missing == []


def test_every_number_in_a_table_was_printed_by_a_benchmark():
    """What stands between the marks is held equal to the benchmarks' JSON by tests/benchmarks/test_bench_pages.py."""
    by_hand = {
        (page.name, table.heading)
        for page in PAGES
        for table in tables(text_of(page))
        if table.has_numbers and not table.is_rendered
        if page.name not in {DIARY, *WRITTEN_FROM_CODE}
    }
    assert by_hand - DEFINITIONS.keys() == set()
    assert DEFINITIONS.keys() - by_hand == set(), "exceptions that are none any more"


def test_a_page_with_marks_is_one_that_is_rewritten():
    assert {page for page in PAGES if "\n<!-- begin:" in text_of(page)} == set(pages.PAGES)


def test_what_pages_show_is_found_in_them():
    text = """# Head

Type `python -m a.b --some-flag 2` or `make test-slow`, see `models/no.py`, `plots/` and https://x.org/y.py.

```
python use.py sub id --one 1     # and no more
python plain.py --two ...
```

```python
# own.py
table.to_parquet("mine.parquet", index=False)
run("seqvae sample --output out.csv")
plt.savefig("a.png")
```

| a | b |
|---|---|
| `7` | x |

<!-- begin: step -->
| 1 |
<!-- end: step -->
| 2 |
"""
    assert commands(text) == [["use.py", "sub", "id", "--one", "1"], ["plain.py", "--two"]]
    assert modules_run(text) == [["a.b", "--some-flag", "2"]]
    assert flags_named(text) == {"some_flag", "one", "two", "output"}
    assert make_targets(text) == {"test-slow"}
    written = {"own.py", "mine.parquet", "out.csv", "a.png"}
    assert files_named(text) == {"models/no.py", "plots", "use.py", "plain.py"} | written
    assert files_written(text) == written
    found = [(table.heading, table.is_rendered, table.has_numbers) for table in tables(text)]
    assert found == [("Head", False, False), ("Head", True, True), ("Head", False, True)]


@pytest.mark.parametrize("name", ["models/no.py", "no.md", "train_fast.py", "nothing"])
def test_a_file_that_is_not_there_is_missed(name):
    assert not is_there(name, ROOT / "README.md")


def test_the_diary_has_no_tables():
    assert list(tables(text_of(ROOT / "docs" / DIARY))) == []


def test_exit_codes_shown_are_those_there_are():
    table = table_under(ROOT / "docs" / "training.md", "Exit codes")
    shown = {int(code) for line in table.lines[2:] for code in re.findall(r"\d+", line.split("|")[1])}
    assert shown == set(ExitCode)


def table_under(page: Path, heading: str) -> Table:
    return next(table for table in tables(text_of(page)) if table.heading == heading)


def test_the_readme_stays_short():
    assert len(text_of(ROOT / "README.md").splitlines()) <= 200


def test_make_train_types_a_command_that_parses():
    recipe = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in recipe.splitlines() if "train_optimized.py" in line]
    _, *words = shlex.split(line)
    command = command_of(words)
    assert command is not None
    parse_command_line(command.schema, words[1:], prog=command.typed, description="")


def test_the_readmes_own_parquet_is_ready_to_train(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", text_of(ROOT / "README.md"), flags=re.DOTALL)
    (code,) = [block for block in blocks if "to_parquet" in block]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    words = ["--data_dir", "my_data.parquet", "--cache_dir", "cache", "--check_only"]
    command = [sys.executable, "-m", "seqvae", "inspect", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ready to train: tokens")


each_guide = pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)


@each_guide
def test_a_guide_leads_from_the_installation_to_a_picture(page):
    text, guide = text_of(page), read_guide(page)
    assert re.search(r"^```\npip install ", text, flags=re.MULTILINE)
    assert guide.picture.exists()
    assert "savefig(" in guide.steps[-1][1] or guide.picture.name in IN_RUNS
    for kind, code in guide.steps:
        if kind == "python":
            compile(code, page.name, "exec")
        else:
            assert code.split()[0] in PROGRAMS, f"{page.name} shows {code}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@each_guide
def test_a_guide_runs_as_it_is_shown(page, tmp_path):
    assert run_guide(read_guide(page), tmp_path).stat().st_size > 5_000
