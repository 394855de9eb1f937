"""Run benchmarks one after the other, each in a process of its own, and rewrite the tables of docs/ and README.md.

    python -m benchmarks.bench                        # the short form of each (`make bench`)
    python -m benchmarks.bench --full ablation step   # the whole of some
    python -m benchmarks.bench --full chaos           # how much a run survives: only where it is named

A benchmark's last line goes to benchmarks/figures/NAME.json, with its command; of several data sets, each has a place of its own.
The pages are rewritten after each. One that fails leaves its figures as they were, and the exit code is 1.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.measure import make_parser
from benchmarks.pages import FIGURES, read_figures, rewrite_pages
from seqvae.errors import run_command


class Form(NamedTuple):
    """The module of a benchmark, and the flags with which it is called."""

    area: str
    short: tuple[str, ...] = ("--short",)
    full: tuple[str, ...] = ()
    is_default: bool = True
    """Whether it runs where none is named. What a run survives and what models reach is measured only by name."""
    sets: tuple[str, ...] = ()
    """Data sets that are measured one after the other, each with a report of its own."""


DATA_SETS = ("demo", "moses_smiles", "japanese_vowels", "physionet2012")
"""The data sets of `benchmarks.quality.results`, whose import takes torch."""

VARIANT_SETS = ("demo_tokens", "demo_vectors", "demo_events", *DATA_SETS[1:])
"""Those of `benchmarks.quality.variants`."""

CODE_SETS = ("demo_tokens", "japanese_vowels")
"""Those of `benchmarks.quality.codes`."""

FORMS = {
    "step": Form("speed"),
    "ablation": Form("speed"),
    "time_to_quality": Form("speed"),
    "scaling": Form("speed"),
    "planning": Form(
        "speed", short=("--sequences", "1000000"), full=("--sequences", "10000000", "100000000"), is_default=False
    ),
    "loading": Form("speed", short=("--sequences", "200000"), full=("--large_gb", "5")),
    "chaos": Form("reliability", short=("--kills", "10"), is_default=False),
    "bad_inputs": Form("reliability", short=("--cases", "60"), is_default=False),
    "long_run": Form("reliability", short=("--steps", "2000"), is_default=False),
    "results": Form("quality", short=("--samples", "50"), is_default=False, sets=DATA_SETS),
    "event_throughput": Form("speed", short=("--rounds", "3"), is_default=False),
    "latents": Form("quality", short=(), is_default=False, sets=("japanese_vowels", "physionet2012")),
    "molecules": Form("quality", short=("--limit", "20000", "--max_steps", "100"), is_default=False),
    "variants": Form(
        "quality",
        short=("--steps", "20", "--only", "default", "no latent"),
        full=("--any_version",),
        is_default=False,
        sets=VARIANT_SETS,
    ),
    "recipe": Form(
        "quality",
        short=("--steps", "20", "--seeds", "1", "--only", "default", "muon, rate x 1"),
        full=("--any_version",),
        is_default=False,
        sets=VARIANT_SETS,
    ),
    "codes": Form("quality", short=("--steps", "20"), is_default=False, sets=CODE_SETS),
    "lagging": Form(
        "quality", short=("--steps", "100"), full=("--checkout", "runs/vae-lagging-encoder"), is_default=False
    ),
    "encoding": Form("speed", is_default=False),
    "evaluation_cost": Form("speed", is_default=False),
    "many_codes": Form("speed", is_default=False),
    "processes": Form("speed", is_default=False),
    "remote": Form("speed", is_default=False),
    "collapse_zoo": Form("detection", short=("--half", "scored"), is_default=False),
    "threshold": Form("detection", short=("--closed",), is_default=False),
    "rescue": Form(
        "detection",
        short=("--zoo", "runs/zoo", "--only", "weight-4.demo"),
        full=("--zoo", "runs/zoo"),
        is_default=False,
    ),
    "risk": Form("detection", short=(), full=("--half", "scored"), is_default=False),
    "monitor_cost": Form("detection", short=("--stop_after", "100"), is_default=False),
}


def main() -> int:
    parser = make_parser("benchmarks.bench", __doc__)
    default = [name for name, form in FORMS.items() if form.is_default]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(FORMS)}; default: {', '.join(default)}"
    )
    parser.add_argument("--full", action="store_true", help="everything they measure, which may take an hour")
    parser.add_argument("--sets", nargs="+", metavar="SET", help="only these of a benchmark's data sets")
    options = parser.parse_args()
    if unknown := set(options.names) - FORMS.keys():
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(FORMS)}")
    failed = [name for name in options.names or default if not measure(name, options.sets, full=options.full)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(name: str, only: Sequence[str] | None = None, *, full: bool) -> bool:
    """Run a benchmark, keep its report, and rewrite the pages.

    Return whether it succeeded; of several data sets, the reports before the one that failed are kept.
    """
    form, path = FORMS[name], FIGURES / f"{name}.json"
    for data in [data for data in form.sets if only is None or data in only] if form.sets else [None]:
        words = [f"benchmarks.{form.area}.{name}", *([] if data is None else ["--data", data])]
        words += form.full if full else form.short
        last_line = last_line_of([sys.executable, "-u", "-m", *words])  # -u: its tables are shown as they come
        if last_line is None:
            return False
        report = json.loads(last_line) | {"command": " ".join(["python -m", *words])}
        if form.sets:
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"sets": []}
            sets = {one["data"]: one for one in before["sets"]} | {report["data"]: report}
            report = before | {"sets": list(sets.values())}
        FIGURES.mkdir(exist_ok=True)
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for page in rewrite_pages(read_figures()):
            print(f"{page.name} rewritten", flush=True)
    return True


def last_line_of(command: Sequence[str]) -> str | None:
    """Run a command, pass on its lines as they come, and return the last; None if it failed."""
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


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.bench"))
