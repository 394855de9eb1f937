"""What the benchmarks printed last (benchmarks/figures/*.json) -> the tables of docs/ and README.md.

    python -m benchmarks.pages

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`, with the machine, the date and the command that made it.
So no figure is on these pages that a command did not print; nothing is written between the marks by hand.

A new one takes a report in benchmarks/figures/, a line in `TABLES`, a form in benchmarks/bench.py and its marks on a page; where it
is to say less or other than the report's own rows, a function in `BLOCKS`.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.short_tables import loading_in_short, results_in_short, step_in_short
from benchmarks.tables import Report, markdown, provenance, rows_at

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "figures"
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("monitoring", "performance", "reliability", "results")),
)
MARKS = re.compile(r"(<!-- begin: (\S+) -->\n)(.*?)(<!-- end: \2 -->)", re.DOTALL)


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
    "results": (
        Table("Likelihood", "sets.likelihood"),
        Table("Latent", "sets.latent"),
        Table("Demo data, in nats a symbol", "sets.truth"),
    ),
    "event_throughput": (Table("Training, medians of rounds in turns", "rows"),),
    "latents": (
        Table("A linear probe, trained on the training split; the last rows are paired differences", "sets.rows"),
    ),
    "molecules": (Table("After the training that its page describes", "rows"),),
    "encoding": (
        Table("Encoding, against the network alone on batches that lie ready", "rows"),
        Table("Memory while one file grows", "memory"),
    ),
    "evaluation_cost": (Table("Importance weighting, against plain forward passes over as many tokens", "rows"),),
    "collapse_zoo": (Table("The half that was not tuned on", "in_short"),),
    "monitor_cost": (Table("In the monitor's hooks", "rows"),),
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


BLOCKS: dict[str, tuple[str, Callable[[Report], str]]] = {
    **{name: (name, partial(tables_of, name)) for name in TABLES},
    "loading_in_short": ("loading", loading_in_short),
    "results_in_short": ("results", results_in_short),
    "step_in_short": ("step", step_in_short),
}
"""What stands between the marks of each name: the benchmark it is from, and how its report is written."""


if __name__ == "__main__":
    main()
