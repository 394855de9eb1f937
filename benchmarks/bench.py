"""Benchmarks one after the other, each in a process of its own; then the tables of docs/ and README.md.

    python -m benchmarks.bench                        # the short form of each (`make bench`)
    python -m benchmarks.bench --full ablation step   # the whole of some
    python -m benchmarks.bench --full chaos           # how much a run survives: only where it is named

A benchmark's last line goes to benchmarks/figures/NAME.json, with its command; the pages are rewritten after each. One that fails
leaves its figures as they were, and the exit code is 1.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.pages import FIGURES, read_figures, rewrite_pages
from training.exit_codes import run_command


class Form(NamedTuple):
    """The words that a benchmark is called with."""

    short: tuple[str, ...] = ("--short",)
    full: tuple[str, ...] = ()
    is_speed: bool = True
    """The others are about what a run survives, and are measured where they are named."""


FORMS = {
    "step": Form(),
    "ablation": Form(),
    "time_to_quality": Form(),
    "scaling": Form(),
    "loading": Form(short=("--sequences", "200000"), full=("--large_gb", "5")),
    "chaos": Form(short=("--kills", "10"), is_speed=False),
    "bad_inputs": Form(short=("--cases", "60"), is_speed=False),
    "long_run": Form(short=("--steps", "2000"), is_speed=False),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FORMS)}; default: those of speed")
    parser.add_argument("--full", action="store_true", help="everything they measure, which may take an hour")
    options = parser.parse_args()
    if unknown := set(options.names) - FORMS.keys():
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(FORMS)}")
    names = options.names or [name for name, form in FORMS.items() if form.is_speed]
    failed = [name for name in names if not succeeds(name, full=options.full)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def succeeds(name: str, *, full: bool) -> bool:
    """Run it, keep what it said, and rewrite the pages."""
    words = FORMS[name].full if full else FORMS[name].short
    module = f"benchmarks.{name}"
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
    (FIGURES / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for page in rewrite_pages(read_figures()):
        print(f"{page.name} rewritten", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.bench"))
