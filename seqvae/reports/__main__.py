"""Write the report of a run directory anew, or one page that compares several runs. Needs neither torch nor Lightning.

python -m seqvae.reports runs/name                          # writes runs/name/report.html
python -m seqvae.reports runs/*                             # of several, each its own
python -m seqvae.reports --compare runs/a runs/b            # writes comparison.html
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path

from seqvae.reports.compare_page import compare_page
from seqvae.reports.run_directory import is_run_directory, read_run
from seqvae.reports.run_files import REPORT
from seqvae.reports.run_page import run_page
from seqvae.text import visible

COMPARISON = "comparison.html"
DONE, USAGE, STORAGE, INTERRUPTED = 0, 2, 6, 130
"""Exit codes, as those of the other commands."""
LEFT_SECONDS = 60.0
"""A page is written in milliseconds: a file that is older was left behind."""
MOST_RUNS = 24
"""In one comparison: beyond it nobody can tell the curves apart."""


def write_report(directory: Path, output: Path | None = None) -> Path:
    """Of a run, in its directory if nothing else is said."""
    return _write(output or directory / REPORT, run_page(read_run(directory), time.time()))


class Refusal(Exception):
    """What was typed cannot be done."""


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    try:
        runs = _found(given.runs)
        _refuse(runs, given.output, compares=given.compare)
        written = _compare(runs, given.output) if given.compare else _reports(runs, given.output)
    except Refusal as refusal:
        return _fail(str(refusal), USAGE)
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        return _fail(
            f"{place}cannot be written ({error.strerror}). Make it writable, or choose another --output.", STORAGE
        )
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C", INTERRUPTED)
    for path in written:
        print(visible(str(path)))
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seqvae.reports",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Exit codes: 0 done, 2 wrong arguments or no run directory, 6 a file cannot be written.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="directory of a run, finished or not")
    parser.add_argument("--compare", action="store_true", help="one page that lays several runs over one another")
    parser.add_argument(
        *("--output", "-o"),
        type=Path,
        metavar="FILE",
        help=f"where to write (default: {REPORT} in the run's directory; of a comparison {COMPARISON} here)",
    )
    return parser


def _found(given: Sequence[Path]) -> list[Path]:
    """Those that are runs: a shell's `*` stands for whatever lies there."""
    reasons = [(directory, _why_no_run(directory)) for directory in given]
    others = [reason for _, reason in reasons if reason is not None]
    if len(others) == len(given):
        raise Refusal(f"{others[0]}. Give the directory of a run.")
    for reason in others:
        print(visible(f"note: {reason}; it is left out"), file=sys.stderr)
    return [directory for directory, reason in reasons if reason is None]


def _why_no_run(directory: Path) -> str | None:
    if not directory.is_dir():
        return f"{directory}: there is no such directory"
    return None if is_run_directory(directory) else f"{directory} is no run: it has neither config.yaml nor metrics.csv"


def _refuse(runs: Sequence[Path], output: Path | None, *, compares: bool) -> None:
    if compares and not 2 <= len(runs) <= MOST_RUNS:
        raise Refusal(f"--compare wants 2 to {MOST_RUNS} run directories, got {len(runs)}")
    if output is not None and not compares and len(runs) > 1:
        raise Refusal("--output is for one report, or for a comparison (--compare)")
    if output is not None and output.is_dir():
        raise Refusal(f"--output {output} is a directory: give the name of a file in it")


def _reports(runs: Sequence[Path], output: Path | None) -> list[Path]:
    return [write_report(directory, output) for directory in runs]


def _compare(runs: Sequence[Path], output: Path | None) -> list[Path]:
    return [_write(output or Path(COMPARISON), compare_page([read_run(directory) for directory in runs], time.time()))]


def _write(path: Path, content: str) -> Path:
    """At once: who reloads the page sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        _sweep(path)
        beside.write_text(content, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        _remove(beside)
    return path


def _sweep(path: Path) -> None:
    """What processes that were killed left beside it; others may be writing now."""
    for left in path.parent.glob(f".{escape(path.name)}.[0-9]*.new"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                _remove(left)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _fail(said: str, code: int) -> int:
    print(f"python -m seqvae.reports: {visible(said)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
