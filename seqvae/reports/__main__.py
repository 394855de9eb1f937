"""Write the report of a run, the index of a directory of runs or a page that compares runs. Needs neither torch nor Lightning.

python -m seqvae.reports runs/name                          # writes runs/name/report.html
python -m seqvae.reports runs/*                             # of several, each its own
python -m seqvae.reports runs/                              # writes runs/index.html, which runs there then keep up to date
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
from seqvae.reports.runs_page import PAGE, STUDY, renew_runs_page, runs_in, studies_in, write_runs_page, write_summary
from seqvae.reports.study_page import read_study, write_study_page
from seqvae.text import visible

COMPARISON = "comparison.html"
MOST_RUNS = 24
"""In one comparison: beyond it no one can tell the curves apart."""


def write_report(directory: Path, output: Path | None = None) -> Path:
    """Write the report of a run, by default into its directory; then it takes its place in the index beside it, if there is one."""
    run, now = read_run(directory), time.time()
    page = _write(output or directory / REPORT, report_page(run, now))
    if output is None:
        write_summary(run, now)
        renew_runs_page(directory)
    return page


def write_index(directory: Path) -> Path:
    """Write the page of a directory of runs: of a study the one that `seqvae tune` writes, else an index."""
    if (directory / STUDY).is_file():
        return write_study_page(directory, read_study(directory))
    return write_runs_page(directory)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m seqvae.reports",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Exit codes: 0 done, 2 wrong arguments or no run directory, 6 a file cannot be written.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="directory of a run, finished or not, or of runs"
    )
    parser.add_argument("--compare", action="store_true", help="one page that lays several runs over one another")
    parser.add_argument(
        *("--output", "-o"),
        type=Path,
        metavar="FILE",
        help=f"where to write (default: {REPORT} in the run's directory; of a comparison {COMPARISON} here); not for an index",
    )
    settings = parser.parse_args(argv)
    output: Path | None = settings.output
    try:
        runs, of_runs = _runs_among(settings.runs, takes_indexes=not settings.compare)
        if settings.compare and not 2 <= len(runs) <= MOST_RUNS:
            raise UsageError(f"--compare wants 2 to {MOST_RUNS} run directories, got {len(runs)}")
        if output is not None and not settings.compare and (len(runs) > 1 or of_runs):
            raise UsageError(
                f"--output is for one report, or for a comparison (--compare); links of {PAGE} lead to the runs beside it"
            )
        if output is not None and output.is_dir():
            raise UsageError(f"--output {output} is a directory: give the name of a file in it")
        if settings.compare:
            page = comparison_page([read_run(directory) for directory in runs], time.time())
            written = [_write(output or Path(COMPARISON), page)]
        else:
            written = [write_report(directory, output) for directory in runs]
            written += [write_index(directory) for directory in of_runs]
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


def _runs_among(directories: Sequence[Path], *, takes_indexes: bool) -> tuple[list[Path], list[Path]]:
    """Return the runs and the directories of runs, with a note on the others: a shell's `*` stands for whatever lies there."""
    runs, of_runs, reasons = [], [], []
    for directory in directories:
        if directory.name == PAGE and directory.is_file():  # it lies among the runs
            continue
        if not directory.is_dir():
            reasons.append(f"{directory}: there is no such directory")
        elif is_run_directory(directory):
            runs.append(directory)
        elif takes_indexes and ((directory / STUDY).is_file() or runs_in(directory) or studies_in(directory)):
            of_runs.append(directory)
        else:
            holds = ", and holds no run" if takes_indexes else ""
            reasons.append(f"{directory} is no run: it has neither config.yaml nor metrics.csv{holds}")
    if not runs and not of_runs:
        raise UsageError(f"{reasons[0] if reasons else f'{PAGE} is no run'}. Give the directory of a run.")
    for reason in reasons:
        print(visible(f"note: {reason}; it is left out"), file=sys.stderr)
    return runs, of_runs


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
