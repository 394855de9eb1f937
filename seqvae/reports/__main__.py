"""Write the report of a run directory, or one page that compares several runs. Needs neither torch nor Lightning.

python -m seqvae.reports runs/name                          # writes runs/name/report.html
python -m seqvae.reports runs/*                             # of several, each its own
python -m seqvae.reports --compare runs/a runs/b            # writes comparison.html
python -m seqvae.reports.draw runs/name                     # draws the figures in runs/name/plots
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from seqvae.errors import ExitCode, UsageError
from seqvae.files import replace_file
from seqvae.reports.compare import comparison_page
from seqvae.reports.read_run import is_run_directory, read_run
from seqvae.reports.run_files import REPORT
from seqvae.reports.run_page import report_page
from seqvae.text import visible

COMPARISON = "comparison.html"
MOST_RUNS = 24
"""In one comparison: beyond it no one can tell the curves apart."""


def write_report(directory: Path, output: Path | None = None) -> Path:
    """Write the report of a run, by default into its directory."""
    return _write(output or directory / REPORT, report_page(read_run(directory), time.time()))


def main(argv: Sequence[str] | None = None) -> int:
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
    settings = parser.parse_args(argv)
    output: Path | None = settings.output
    try:
        runs = _runs_among(settings.runs)
        if settings.compare and not 2 <= len(runs) <= MOST_RUNS:
            raise UsageError(f"--compare wants 2 to {MOST_RUNS} run directories, got {len(runs)}")
        if output is not None and not settings.compare and len(runs) > 1:
            raise UsageError("--output is for one report, or for a comparison (--compare)")
        if output is not None and output.is_dir():
            raise UsageError(f"--output {output} is a directory: give the name of a file in it")
        if settings.compare:
            page = comparison_page([read_run(directory) for directory in runs], time.time())
            written = [_write(output or Path(COMPARISON), page)]
        else:
            written = [write_report(directory, output) for directory in runs]
    except UsageError as error:
        message, code = str(error), ExitCode.USAGE
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        message = f"{place}cannot be written ({error.strerror}). Make it writable, or choose another --output."
        code = ExitCode.STORAGE
    except KeyboardInterrupt:
        message, code = "stopped by Ctrl-C", ExitCode.INTERRUPTED
    else:
        for path in written:
            print(visible(str(path)))
        return ExitCode.DONE
    print(f"{parser.prog}: {visible(message)}", file=sys.stderr)
    return code


def _runs_among(directories: Sequence[Path]) -> list[Path]:
    """Return those that are runs, with a note on the others: a shell's `*` stands for whatever lies there."""
    runs, reasons = [], []
    for directory in directories:
        if not directory.is_dir():
            reasons.append(f"{directory}: there is no such directory")
        elif not is_run_directory(directory):
            reasons.append(f"{directory} is no run: it has neither config.yaml nor metrics.csv")
        else:
            runs.append(directory)
    if not runs:
        raise UsageError(f"{reasons[0]}. Give the directory of a run.")
    for reason in reasons:
        print(visible(f"note: {reason}; it is left out"), file=sys.stderr)
    return runs


def _write(path: Path, content: str) -> Path:
    """Replace a page at once: a reader who reloads it sees the old one or the new one."""
    try:
        with replace_file(path) as partial:
            partial.write_text(content, encoding="utf-8")
    except OSError as error:  # a message names the page, not the partial file
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


if __name__ == "__main__":
    sys.exit(main())
