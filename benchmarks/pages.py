"""What the benchmarks printed last (benchmarks/figures/*.json) -> the tables of docs/ and README.md.

    python -m benchmarks.pages

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`, with the machine, the date and the command that made it.
So no figure is on these pages that a command did not print; nothing is written between the marks by hand.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "figures"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "docs" / "reliability.md", ROOT / "README.md")
MARKS = re.compile(r"(<!-- begin: (\S+) -->\n)(.*?)(<!-- end: \2 -->)", re.DOTALL)

Report = Mapping[str, Any]
Row = Mapping[str, Any]


class Table(NamedTuple):
    title: str
    place: str
    """Of its rows in the report: keys with dots between them."""


TABLES: dict[str, tuple[Table, ...]] = {
    "step": (
        Table("Training, against the plain recipe and against the machine's own product of matrices", "recipes.rows"),
        Table("A step of about 10 ms: batches that lie ready, the loader, Lightning's Trainer", "loop.rows"),
        Table(
            "Ratios of these: real tokens a second with the loader to those with ready batches; and of the step's times",
            "loop.ratios",
        ),
        Table("Compiled, after its warm-up", "compile.rows"),
    ),
    "ablation": tuple(Table(kind.capitalize(), kind) for kind in ("tokens", "vectors", "events")),
    "time_to_quality": (
        Table("Tokens: the same network, against the plain recipe", "rows.reference"),
        Table("Molecules: as many parameters, against MOSES' own VAE", "rows.moses"),
        Table("Tokens: the same network, against Hugging Face `datasets` and a bare loop", "rows.hf"),
    ),
    "scaling": (
        Table("Against the number of sequences", "sequences"),
        Table("A second start, against the number of sequences", "sequences.start"),
        Table("An optimizer step, against the length of its sequences", "length"),
        Table("An optimizer step, against the width of the network", "width"),
        Table("An optimizer step, against the tokens of its batch", "batch"),
        Table("Exponents", "exponents"),
    ),
    "loading": (
        Table("Cache: built once (peak memory of the whole process), opened ever after", "build"),
        Table("Random batches of 64, padded; real tokens only, the same rows", "against_hf.rows"),
        Table("Gathering batches out of the memory map, no loader around it", "gather"),
        Table("Plan of an epoch, cut included", "plan"),
        Table("Memory of all processes together, mapped files apart", "worker_memory"),
    ),
    "chaos": (Table("Runs that were killed at random, and went on", "tally"),),
    "bad_inputs": (Table("Damaged files: how each case ended, under each policy for bad files and values", "rows"),),
    "long_run": (Table("Memory over a long run, each tenth of it", "tenths"), Table("In all", "all")),
}


def main() -> None:
    for page in rewrite_pages(read_figures()):
        print(f"{page.relative_to(ROOT)} rewritten")


def read_figures() -> dict[str, Report]:
    """The last line of JSON of each benchmark that was run, with its `command`."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FIGURES.glob("*.json"))}


def rewrite_pages(figures: Mapping[str, Report]) -> list[Path]:
    """The pages that came out different."""
    changed = []
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = rewritten(before, figures)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def rewritten(page: str, figures: Mapping[str, Report]) -> str:
    """A page with what belongs between its marks; what was not measured is said to be so."""

    def block(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        benchmark, write = BLOCKS[name]
        report = figures.get(benchmark)
        missing = f"Not measured so far: `python -m benchmarks.bench {benchmark}`.\n"
        return f"{begin}{write(report) if report else missing}{end}"

    return MARKS.sub(block, page)


def tables_of(benchmark: str, report: Report) -> str:
    """Where and how it was measured, and each of its tables; a short form has fewer."""
    parts = [provenance(report)]
    for table in TABLES[benchmark]:
        rows = rows_at(report, table.place)
        if rows:
            parts.append(f"**{table.title}**\n\n{markdown(rows)}")
    return "\n\n".join(parts) + "\n"


def provenance(report: Report) -> str:
    machine = report["machine"]
    data = f", {report['data']}" if "data" in report else ""
    units = {True: " with bf16 units", False: " without bf16 units", None: ""}[machine.get("bf16_units")]
    return (
        f"{machine['cores']} CPU cores{units}, {machine['memory_gb']} GB, Python {machine['python']}; "
        f"{machine['date']}; `{report['command']}`{data}:"
    )


def rows_at(report: Report, place: str) -> list[Row]:
    """
    >>> rows_at({"a": [{"n": 1, "b": {"x": 2}}]}, "a.b"), rows_at({}, "a.b")
    ([{'x': 2}], [])
    """
    found: Any = report
    for key in place.split("."):
        found = [one[key] for one in found] if isinstance(found, list) else found.get(key, {})
    return found if isinstance(found, list) else [found] if found else []


def markdown(rows: Sequence[Row]) -> str:
    """Columns are those of the first row whose cells are not tables themselves."""
    names = [name for name, value in rows[0].items() if not isinstance(value, dict | list)]
    lines = [names, ["---"] * len(names), *([cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: object) -> str:
    """
    >>> cell(12345), cell(0.5), cell("a|b"), cell(True)
    ('12,345', '0.5', 'a\\\\|b', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|")


def loading_in_short(report: Report) -> str:
    """The README's part: one line for each thing that one may want to know."""
    gather, plans = report["gather"], report["plan"]
    lines = {
        "random batches of 64 from one file, real tokens/s": (
            f"{report['against_hf']['ratio']} x HF datasets in its fastest form, the same rows"
        ),
        f"gathering batches of {gather['tokens a batch']:,} tokens": f"{gather['M real tokens/s']} M real tokens/s",
    }
    for build in report["build"]:
        lines[f"building the cache, {build['data']}"] = (
            f"{build['seconds']:.1f} s ({build['M items/s']} M a second), with a peak of {build['peak MB']:,} MB"
        )
    largest = max(report["build"], key=lambda build: build["M items"])
    lines[f"a second start, {largest['data']}"] = f"{largest['second start s']:.2f} s"
    (million,) = (plan for plan in plans if (plan["sequences"], plan["tokens a batch"]) == (1_000_000, 4096))
    lines["plan of an epoch, 10^6 sequences"] = f"{million['ms']} ms"
    lines["padding efficiency, 10^6 log-normal lengths (mean 75), 4,096 tokens a batch"] = (
        f"{million['padding efficiency']:.3f}"
    )
    thread, process = (
        max(row["MB a worker"] for row in report["worker_memory"] if row["worker_type"] == kind and row["workers"])
        for kind in ("thread", "process")
    )
    lines["memory of a worker thread; of a worker process"] = f"{thread} MB; {process} MB"
    table = "\n".join(f"| {name} | {value} |" for name, value in lines.items())
    return f"{provenance(report)}\n\n| | |\n|---|---|\n{table}\n"


BLOCKS: dict[str, tuple[str, Callable[[Report], str]]] = {
    **{name: (name, partial(tables_of, name)) for name in TABLES},
    "loading_in_short": ("loading", loading_in_short),
    "step_in_short": ("step", lambda report: f"{provenance(report)}\n\n{markdown(report['recipes']['rows'])}\n"),
}
"""What stands between the marks of each name: the benchmark it is from, and how its report is written."""


if __name__ == "__main__":
    main()
