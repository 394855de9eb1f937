"""Benchmarks one after the other, each in a process of its own; then the tables of docs/ and README.md.

    python -m benchmarks.bench                        # the short form of each (`make bench`)
    python -m benchmarks.bench --full ablation step   # the whole of some
    python -m benchmarks.bench --full chaos           # how much a run survives: only where it is named

A benchmark's last line goes to benchmarks/figures/NAME.json, with its command, of several data sets each in the place of its own;
the pages are rewritten after each. One that fails leaves its figures as they were, and the exit code is 1.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.pages import FIGURES, read_figures, rewrite_pages
from seqvae.errors import run_command


class Form(NamedTuple):
    """Where a benchmark stands, and the words that it is called with."""

    area: str
    short: tuple[str, ...] = ("--short",)
    full: tuple[str, ...] = ()
    is_usual: bool = True
    """The others (what a run survives, what models reach) are measured where they are named."""
    sets: tuple[str, ...] = ()
    """One data set after the other, each with a report of its own."""


DATA_SETS = ("demo", "moses_smiles", "japanese_vowels", "physionet2012")
"""Of `benchmarks.quality.results`, which takes torch to ask."""

FORMS = {
    "step": Form("speed"),
    "ablation": Form("speed"),
    "time_to_quality": Form("speed"),
    "scaling": Form("speed"),
    "loading": Form("speed", short=("--sequences", "200000"), full=("--large_gb", "5")),
    "chaos": Form("reliability", short=("--kills", "10"), is_usual=False),
    "bad_inputs": Form("reliability", short=("--cases", "60"), is_usual=False),
    "long_run": Form("reliability", short=("--steps", "2000"), is_usual=False),
    "results": Form("quality", short=("--samples", "50"), is_usual=False, sets=DATA_SETS),
    "event_throughput": Form("speed", short=("--rounds", "3"), is_usual=False),
    "latents": Form("quality", is_usual=False, short=(), sets=("japanese_vowels", "physionet2012")),
    "molecules": Form("quality", short=("--limit", "20000", "--max_steps", "100"), is_usual=False),
    "encoding": Form("speed", is_usual=False),
    "evaluation_cost": Form("speed", is_usual=False),
    "collapse_zoo": Form("detection", short=("--half", "scored"), is_usual=False),
    "monitor_cost": Form("detection", short=("--stop_after", "100"), is_usual=False),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    usual = [name for name, form in FORMS.items() if form.is_usual]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FORMS)}; default: {', '.join(usual)}")
    parser.add_argument("--full", action="store_true", help="everything they measure, which may take an hour")
    options = parser.parse_args()
    if unknown := set(options.names) - FORMS.keys():
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(FORMS)}")
    failed = [name for name in options.names or usual if not succeeds(name, full=options.full)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def succeeds(name: str, *, full: bool) -> bool:
    """Run it, keep what it said, and rewrite the pages; of several data sets, what came before one that fails is kept."""
    form = FORMS[name]
    words = form.full if full else form.short
    return all(_succeeds(name, words_of_set) for words_of_set in _of_each_set(form, words))


def _of_each_set(form: Form, words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [("--data", data, *words) for data in form.sets] or [words]


def _succeeds(name: str, words: tuple[str, ...]) -> bool:
    module = f"benchmarks.{FORMS[name].area}.{name}"
    last_line = output_of([sys.executable, "-u", "-m", module, *words])  # -u: its tables are to be seen as they come
    if last_line is None:
        return False
    keep(name, json.loads(last_line) | {"command": " ".join(["python -m", module, *words])})
    return True


def output_of(command: Sequence[str]) -> str | None:
    """Its last line; all lines are passed on as they come. None: it failed."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line
        except BaseException:  # stopped: it has to end, too
            process.terminate()
            raise
    return None if process.returncode else last


def keep(name: str, report: dict[str, Any]) -> None:
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{name}.json"
    if FORMS[name].sets:
        report = merged(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"sets": []}, report)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for page in rewrite_pages(read_figures()):
        print(f"{page.name} rewritten", flush=True)


def merged(before: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """The reports of all data sets, with a new one in the place of its set's last."""
    sets = {one["data"]: one for one in before["sets"]} | {report["data"]: report}
    return before | {"sets": list(sets.values())}


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.bench"))
