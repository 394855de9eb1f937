"""Write the tables of docs/ and README.md from what the benchmarks printed last (benchmarks/figures/*.json).

    python -m benchmarks.pages

A table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`, with the machine, the date and the command that made it.
So no figure is on these pages that a command did not print; nothing is written between the marks by hand.

A new one takes a report in benchmarks/figures/, a line in `TABLES`, a form in benchmarks/bench.py and its marks on a page; where it
shows less or other than the report's own rows, a function in `BLOCKS`. A report of several data sets holds those of each in a
list, `sets`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

Report = Mapping[str, Any]
Row = Mapping[str, Any]

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "figures"
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("monitoring", "performance", "reliability", "results")),
)
MARKS = re.compile(r"(<!-- begin: (\S+) -->\n)(.*?)(<!-- end: \2 -->)", re.DOTALL)


class Table(NamedTuple):
    """A table of a page."""

    title: str
    place: str
    """Place of its rows in the report: keys with dots between them."""


TABLES: dict[str, tuple[Table, ...]] = {
    "step": (
        Table("Training, against the plain recipe and against the machine's own product of matrices", "recipes.rows"),
        Table("A step of about 10 ms: batches that lie ready, the loader, Lightning's Trainer", "loop.rows"),
        Table(
            "Ratios of these: real tokens per second with the loader to those with ready batches; and of the step's times",
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
    "planning": (Table("A start with many sequences, in two processes of a machine and in one on its own", "rows"),),
    "processes": (
        Table("Two cores, in turns", "threads"),
        Table("Two machines with a slow cable between them, in turns", "cable"),
    ),
    "remote": (
        Table("Building a cache, in turns", "builds"),
        Table("Training on it, in turns", "trainings"),
    ),
    "loading": (
        Table("Cache: built once (peak memory of the whole process), then only opened", "build"),
        Table("Random batches of 64, padded; real tokens only, the same rows", "against_hf.rows"),
        Table("Gathering batches out of the memory map, no loader around it", "gather"),
        Table("Plan of an epoch, cut included", "plan"),
        Table("Memory of all processes together, mapped files apart", "worker_memory"),
    ),
    "chaos": (Table("Runs that were killed at random, and resumed", "tally"),),
    "bad_inputs": (Table("Damaged files: how each case ended, under each policy for bad files and values", "rows"),),
    "results": (
        Table("Likelihood", "sets.likelihood"),
        Table("Latent", "sets.latent"),
        Table("Demo data, in nats per symbol", "sets.truth"),
    ),
    "event_throughput": (Table("Training, medians of rounds in turns", "rows"),),
    "latents": (
        Table("A linear probe, trained on the training split; the last rows are paired differences", "sets.rows"),
    ),
    "molecules": (Table("After the training that its page describes", "rows"),),
    "variants": (Table("Each variant, the test split; the difference is that of the IW-NLL", "sets.rows"),),
    "codes": (
        Table("512 codes for each sequence, of the vowels for each step; the ELBO of the test split", "sets.rows"),
    ),
    "recipe": (Table("Medians over seeds, the least and the largest in brackets", "sets.rows"),),
    "lagging": (
        Table("Their code and ours, one thread each", "rows"),
        Table("To the same likelihood and mutual information", "ratios"),
        Table("The data", "in_short"),
    ),
    "encoding": (
        Table("Encoding, against the network alone on batches that lie ready", "rows"),
        Table("Memory while one file grows", "memory"),
    ),
    "evaluation_cost": (Table("Importance weighting, against plain forward passes over as many tokens", "rows"),),
    "many_codes": (
        Table("Training, in turns", "rows"),
        Table("40,000 codes: times as long as 500", "ratios"),
        Table("Memory of a million token ids: the likelihood of 240 tokens, forward and backward", "memory"),
    ),
    "collapse_zoo": (Table("The half that was not tuned on", "in_short"),),
    "threshold": (
        Table("Closed forms", "closed"),
        Table("Trainings at constant weights, as multiples of the ideal threshold", "runs"),
        Table("In all", "in_short"),
    ),
    "rescue": (Table("Runs that die, left alone and rescued", "runs"), Table("In all", "in_short")),
    "risk": (
        Table("How well the risk orders runs", "scores"),
        Table("The risk, and the share that died", "calibration"),
    ),
    "monitor_cost": (Table("In the monitor's hooks", "rows"),),
    "long_run": (Table("Memory over a long run, each tenth of it", "tenths"), Table("In all", "all")),
}


def main() -> None:
    for page in rewrite_pages(read_figures()):
        print(f"{page.relative_to(ROOT)} rewritten")


def read_figures() -> dict[str, Report]:
    """Read the last line of JSON of each benchmark that was run, with its `command`."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FIGURES.glob("*.json"))}


def rewrite_pages(figures: Mapping[str, Report]) -> list[Path]:
    """Return the pages that came out different."""
    changed = []
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = rewritten(before, figures)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def rewritten(page: str, figures: Mapping[str, Report]) -> str:
    """Return a page with what belongs between its marks, or a note that it was not measured."""

    def block(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        benchmark, write = BLOCKS[name]
        report = figures.get(benchmark)
        if report is None:
            return f"{begin}Not measured so far: `python -m benchmarks.bench {benchmark}`.\n{end}"
        return f"{begin}{provenance(report)}\n\n{write(report)}\n{end}"

    return MARKS.sub(block, page)


# --- Parts of a report as Markdown ------------------------------------------------------------------------------------


def provenance(report: Report) -> str:
    """Return machine, day and command; one line for all data sets that were measured on the same machine and day.

    The first command is whole; of those that call the same module, the rest of the line follows.
    """
    commands: dict[str, list[str]] = {}
    for one in report.get("sets", [report]):
        about = one["machine"]
        units = {True: " with bf16 units", False: " without bf16 units", None: ""}[about.get("bf16_units")]
        where = f"{about['cores']} CPU cores{units}, {about['memory_gb']} GB, Python {about['python']}; {about['date']}"
        first = commands.get(where, [""])[0].split()
        commands.setdefault(where, []).append(one["command"].removeprefix(f"{' '.join(first[:3])} " if first else ""))
    data = f", {report['data']}" if "data" in report else ""
    return "\n".join(f"{where}; {', '.join(f'`{one}`' for one in of)}{data}:" for where, of in commands.items())


def rows_at(report: Report, place: str) -> list[Row]:
    """Return the rows below keys with dots between them; of several data sets those of all that have such rows.

    >>> rows_at({"a": [{"n": 1, "b": {"x": 2}}]}, "a.b"), rows_at({}, "a.b")
    ([{'x': 2}], [])
    >>> rows_at({"sets": [{"a": [{"x": 1}]}, {}, {"a": [{"x": 2}, {"x": 3}]}]}, "sets.a")
    [{'x': 1}, {'x': 2}, {'x': 3}]
    """
    found: list[Any] = [report]
    for key in place.split("."):
        below = [one[key] for one in found if key in one]
        found = [row for one in below for row in (one if isinstance(one, list) else [one])]
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return rows as a table, with the columns of the first row whose cells are not tables themselves.

    >>> print(markdown([{"a": 12345, "b": 0.5, "c": "d|e", "f": True, "g": None, "h": []}]))
    | a | b | c | f | g |
    | --- | --- | --- | --- | --- |
    | 12,345 | 0.5 | d\\|e | yes |  |
    """

    def cell(value: object) -> str:
        if isinstance(value, bool | None):
            return {None: "", True: "yes", False: "no"}[value]
        return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")

    names = [name for name, value in rows[0].items() if not isinstance(value, dict | list)]
    lines = [names, ["---"] * len(names), *([cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables_of(benchmark: str, report: Report) -> str:
    """Return all tables of a benchmark; a short form of it has fewer."""
    tables = [(table.title, rows_at(report, table.place)) for table in TABLES[benchmark]]
    return "\n\n".join(f"**{title}**\n\n{markdown(rows)}" for title, rows in tables if rows)


# --- What README.md shows: some rows, or one line for each thing that one may want to know ----------------------------


def results_in_short(report: Report) -> str:
    """Return for each data set what a model is worth, and whether its latent is used."""
    latents = {row["set"]: row for row in rows_at(report, "sets.latent")}
    rows = [
        {
            "set": row["set"],
            "NLL, nats per sequence": row["IW-NLL per sequence"],
            "without a latent": row["without a latent"],
            **{name: latents[row["set"]][name] for name in ("mutual information (cap)", "decoder use")},
        }
        for row in rows_at(report, "sets.likelihood")
    ]
    return markdown(rows)


def loading_in_short(report: Report) -> str:
    gather = report["gather"]
    lines = {
        "random batches of 64 from one file, real tokens/s": (
            f"{report['against_hf']['ratio']} x HF datasets in its fastest form, the same rows"
        ),
        f"gathering batches of {gather['tokens per batch']:,} tokens": f"{gather['M real tokens/s']} M real tokens/s",
    }
    for build in report["build"]:
        lines[f"building the cache, {build['data']}"] = (
            f"{build['seconds']:.1f} s ({build['M items/s']} M per second), with a peak of {build['peak MB']:,} MB"
        )
    largest = max(report["build"], key=lambda build: build["M items"])
    lines[f"a second start, {largest['data']}"] = f"{largest['second start s']:.2f} s"
    (plan,) = (one for one in report["plan"] if (one["sequences"], one["tokens per batch"]) == (1_000_000, 4096))
    lines["plan of an epoch, 10^6 sequences"] = f"{plan['ms']} ms"
    lines["padding efficiency, 10^6 log-normal lengths (mean 75), 4,096 tokens per batch"] = (
        f"{plan['padding efficiency']:.3f}"
    )
    thread, process = (
        max(row["MB per worker"] for row in report["worker_memory"] if row["worker_type"] == kind and row["workers"])
        for kind in ("thread", "process")
    )
    lines["memory of a worker thread; of a worker process"] = f"{thread} MB; {process} MB"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in lines.items())])


BLOCKS: dict[str, tuple[str, Callable[[Report], str]]] = {
    **{name: (name, partial(tables_of, name)) for name in TABLES},
    "loading_in_short": ("loading", loading_in_short),
    "results_in_short": ("results", results_in_short),
    "step_in_short": ("step", lambda report: markdown(report["recipes"]["rows"])),
}
"""The contents between the marks of each name: the benchmark, and the function that writes its report."""


if __name__ == "__main__":
    main()
