"""The house in numbers: how large the product is, how its modules hang together, and how many functions a row passes through.

    python -m benchmarks.house [--checkout PATH ...] [--list]

Several checkouts (default: this one) stand side by side, whatever their layout: apart from `train_optimized.py` and the command
that writes a report, no module of the product is known by name. The product is every .py file that git tracks or would track
outside of tests, benchmarks, examples and docs.

*Lines of code* hold more than a comment or a docstring. *Functions* are all `def`s, methods and nested ones included. A module's
*importers* are the modules of the product that import it anywhere, within functions too, but not under `TYPE_CHECKING` and not by
a name in a string. *At start* leaves out imports within functions. The *longest import chain* is the longest path through these
imports, in modules; modules that import one another in a cycle count as one.

*Hops* are distinct functions of the product, and their files, that `sys.setprofile` sees in any thread while two commands run on a
small Parquet of tokens; lambdas, comprehensions and the bodies of modules and classes are not counted.

- *From Parquet to gradient*: `train_optimized.py` without a cache, from the product's first call into pyarrow to the end of the
  first backward pass. *Running meanwhile* are all functions that are called or return in that time. A *hop* is one of them that
  handles data: an array, a tensor, an Arrow column or table or a data frame is an argument, a variable or the result, bare or
  within tuples, lists, dicts and dataclasses. Weights of a network are not data, and neither is what a method reaches by `self`.
- *From a reading to the report*: all functions called by the `on_train_batch_end` that appends to posterior.jsonl, of the reading
  that calls most (the decoder is probed, a verdict is weighed), and all that are called by the command that then writes
  report.html. The processes that a training starts itself, for figures as PNG, are not included.
"""

import argparse
import ast
import inspect
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

NOT_PRODUCT = ("tests", "benchmarks", "examples", "docs")
TEMPLATES = (".css", ".html", ".j2", ".yaml")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
REPORT_COMMANDS = {
    "seqvae/__main__.py": ("seqvae", "report"),
    "seqvae/reports/__main__.py": ("seqvae.reports",),
    "reports/__main__.py": ("reports",),
}
"""The module, and its arguments, that writes a report; the first whose file exists is run."""
DATA = (np.ndarray, torch.Tensor, pa.Array, pa.ChunkedArray, pa.RecordBatch, pa.Table, pd.DataFrame, pd.Series)
MAX_DEPTH, MAX_PARTS = 3, 100
"""Depth of the search for data, and the number of parts of each container that it looks at."""


def main() -> None:
    # Not at the top: a process that runs another checkout imports this file, and must not get this checkout's product with it.
    from benchmarks.measure import machine, print_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, action="append", metavar="PATH", help="default: this one")
    parser.add_argument("--list", action="store_true", help="print the functions counted, file by file")
    options = parser.parse_args()
    reports, columns = [], {}
    for path in options.checkout or [Path(__file__).parent.parent]:
        root = path.resolve()
        commit = git(root, "describe", "--always", "--dirty", "--exclude=*")[0]
        ways = functions_of_ways(root)
        if options.list:
            for way, functions in ways.items():
                print(f"\n{root.name} {commit}, {way}", *sorted(functions), sep="\n  ")
        numbers, structure = measure_source(root)
        for way, functions in ways.items():
            numbers |= {
                f"{way}, functions": len(functions),
                f"{way}, files": len({f.rpartition(" ")[0] for f in functions}),
            }
        columns[f"{root.name} {commit}"] = numbers
        reports.append({"checkout": root.name, "commit": commit, **numbers, **structure})
    rows = [{"": name, **{title: f"{of[name]:,}" for title, of in columns.items()}} for name in numbers]
    print_table("The house in numbers", rows)
    print(json.dumps({"machine": machine(), "checkouts": reports}))


# --- From the source ------------------------------------------------------------------------------------------------


def git(root: Path, *words: str) -> list[str]:
    """Return the lines that git prints."""
    return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.splitlines()


def read_product(root: Path, suffixes: tuple[str, ...] = (".py",)) -> dict[str, str]:
    """Return the text of each of the product's files, by its path from the root."""
    paths = {*git(root, "-c", "core.quotePath=off", "ls-files", "--cached", "--others", "--exclude-standard")}
    mine = [path for path in paths if path.split("/")[0] not in NOT_PRODUCT and not path.startswith(".")]
    return {p: (root / p).read_text("utf-8") for p in sorted(mine) if p.endswith(suffixes) and (root / p).is_file()}


def measure_source(root: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the numbers, and the chain and the cycles of imports behind them."""
    sources = read_product(root)
    trees = {path: ast.parse(source) for path, source in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    lines_of_code = sum(count_lines_of_code(source, trees[path]) for path, source in sources.items())
    graph, graph_at_start = import_graph(trees), import_graph(trees, within_functions=False)
    chain, cycles = longest_chain(graph)
    numbers = {
        "modules": len(sources),
        "lines": sum(len(source.splitlines()) for source in sources.values()),
        "lines of templates, styles and presets": sum(
            len(text.splitlines()) for text in read_product(root, TEMPLATES).values()
        ),
        "lines of code": lines_of_code,
        "functions": functions,
        "functions per 100 lines of code": round(100 * functions / lines_of_code, 2),
        "modules with one importer": count_single_importers(graph),
        "modules with one importer, at start": count_single_importers(graph_at_start),
        "longest import chain": len(chain),
        "longest import chain, at start": len(longest_chain(graph_at_start)[0]),
        "import cycles": len(cycles),
    }
    return numbers, {"chain": chain, "cycles": cycles}


def count_lines_of_code(source: str, tree: ast.Module) -> int:
    """Count the lines that hold more than a comment or a docstring; attributes have docstrings, too.

    >>> text = "'''Doc.'''\\n\\na = '''b\\nc'''  # d\\n# e\\n"
    >>> count_lines_of_code(text, ast.parse(text))
    2
    """
    docstrings = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for t in tokens if t.type not in NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    return len(code - docstrings)


def import_graph(trees: Mapping[str, ast.Module], *, within_functions: bool = True) -> dict[str, set[str]]:
    """Map each module of the product to those that it imports.

    >>> sources = {"a/__init__.py": "from . import b", "a/b.py": "def f(): import c", "c.py": ""}
    >>> trees = {path: ast.parse(source) for path, source in sources.items()}
    >>> import_graph(trees), import_graph(trees, within_functions=False)["a.b"]
    ({'a': {'a.b'}, 'a.b': {'c'}, 'c': set()}, set())
    """
    names = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in trees}
    modules = set(names.values())
    graph = {}
    for path, tree in trees.items():
        package = path.split("/")[:-1]
        imported = set[str]()
        for node in imports_below(tree, within_functions=within_functions):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            else:
                above = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                found = {f"{source}.{alias.name}" for alias in node.names}
                imported |= {name if name in modules else source for name in found}
        graph[names[path]] = imported & modules - {names[path]}
    return graph


def imports_below(node: ast.AST, *, within_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements below a node that are carried out when the program runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        elif within_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports_below(child, within_functions=within_functions)


def count_single_importers(graph: Mapping[str, set[str]]) -> int:
    """Count the modules that exactly one other module imports."""
    return sum(sum(module in imported for imported in graph.values()) == 1 for module in graph)


def longest_chain(graph: Mapping[str, set[str]]) -> tuple[list[str], list[str]]:
    """Return the longest path, the modules of a cycle joined into one link, and all cycles.

    >>> longest_chain({"a": {"b", "d"}, "b": {"c"}, "c": {"b", "d"}, "d": set()})
    (['a', 'b + c', 'd'], ['b + c'])
    """

    @cache
    def reached(module: str) -> frozenset[str]:
        found, waiting = set[str](), [module]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return frozenset(found)

    @cache
    def link_of(module: str) -> tuple[str, ...]:
        return tuple(sorted({module, *(other for other in reached(module) if module in reached(other))}))

    @cache
    def chain_from(link: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        below = {link_of(imported) for module in link for imported in graph[module]} - {link}
        return link, *max((chain_from(other) for other in sorted(below)), key=len, default=())

    links = sorted({link_of(module) for module in graph})
    longest = max((chain_from(link) for link in links), key=len)
    return [" + ".join(link) for link in longest], [" + ".join(link) for link in links if len(link) > 1]


# --- From a run -----------------------------------------------------------------------------------------------------


def functions_of_ways(root: Path) -> dict[str, set[str]]:
    """Train and write a report; return the functions on each way, as `file function`."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory).resolve()
        run, random = place / "run", np.random.default_rng(0)
        tokens = [random.integers(0, 50, length) for length in random.integers(3, 30, 400)]
        pq.write_table(pa.table({"id": range(len(tokens)), "tokens": tokens}), place / "data.parquet")
        data = ("--data_dir", str(place / "data.parquet"), "--cache_dir", str(place / "cache"))
        output = ("--output_dir", str(place), "--run_name", run.name, "--max_steps", "8", "--fast_detection")
        report_command = next(command for file, command in REPORT_COMMANDS.items() if (root / file).exists())
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as new_process:
            training = new_process.submit(record, root, run, "train_optimized.py", *data, *output).result()
            report = new_process.submit(record, root, run, *report_command, str(run)).result()
    if not (training.is_gradient_seen and training.readings and report.called):
        raise RuntimeError(
            f"{root}: no Parquet opened, backward pass, reading or report was seen; have their marks changed?"
        )
    reading = max(training.readings, key=len)
    return {
        "from Parquet to gradient, hops": training.hops,
        "from Parquet to gradient, running meanwhile": training.meanwhile,
        "from a reading to the report": reading | report.called,
        "taking and writing the reading": reading,
        "writing the report": report.called,
        "both ways, hops": training.hops | reading | report.called,
    }


class Recorder:
    """A profile function that sorts the product's functions as they are called and return."""

    def __init__(self, root: Path, readings_file: Path) -> None:
        self.called: set[str] = set()
        self.meanwhile: set[str] = set()
        self.hops: set[str] = set()
        self.readings: list[set[str]] = []
        self.is_parquet_open = self.is_gradient_seen = False
        self._paths = {str(root / path): path for path in read_product(root)}
        self._readings_file = readings_file
        self._hook: tuple[FrameType, int, set[str]] | None = None
        """The `on_train_batch_end` of a callback that is under way, the size of the file before it, and what it has called."""

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if event not in ("call", "return"):
            return
        if code.co_filename not in self._paths:
            if module.startswith("pyarrow.") and frame.f_back and frame.f_back.f_code.co_filename in self._paths:
                self.is_parquet_open = True
            elif (module, code.co_name, event) == ("torch.autograd", "backward", "return") and self.is_parquet_open:
                self.is_gradient_seen = True
        elif code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
            name = f"{self._paths[code.co_filename]} {code.co_qualname}"
            self.called.add(name)
            if self.is_parquet_open and not self.is_gradient_seen:
                self.meanwhile.add(name)
                if name not in self.hops and (holds_data(result) or holds_data(frame.f_locals)):
                    self.hops.add(name)
            if threading.current_thread() is threading.main_thread():
                self._note_reading(frame, event, name)

    def _note_reading(self, frame: FrameType, event: str, name: str) -> None:
        if self._hook is None and event == "call" and frame.f_code.co_name == "on_train_batch_end":
            self._hook = frame, size_of(self._readings_file), set()
        if self._hook is not None:
            hook, size_before, functions = self._hook
            functions.add(name)
            if frame is hook and event == "return":
                if size_of(self._readings_file) > size_before:
                    self.readings.append(functions)
                self._hook = None


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def record(root: Path, run: Path, program: str, *words: str) -> Recorder:
    """Run a script or a module of a checkout under the profile; to be called in a new process."""
    recorder = Recorder(root, run / "posterior.jsonl")
    os.chdir(root)
    sys.path[0] = str(root)
    sys.argv[:] = [program, *words]
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        with redirect_stdout(io.StringIO()):
            if program.endswith(".py"):
                runpy.run_path(str(root / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{root}: {program} {' '.join(words)} ended with {end.code}") from None
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return recorder


def holds_data(value: object, depth: int = MAX_DEPTH) -> bool:
    """Return whether a value is data or holds some.

    >>> holds_data({"batch": (0, torch.zeros(1))}), holds_data([torch.nn.Parameter(torch.zeros(1))]), holds_data([1, 2])
    (True, False, False)
    """
    if isinstance(value, DATA):
        return not isinstance(value, torch.nn.Parameter)
    parts: Iterable[object] = ()
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    return depth > 0 and any(holds_data(part, depth - 1) for part in islice(parts, MAX_PARTS))


if __name__ == "__main__":
    main()
