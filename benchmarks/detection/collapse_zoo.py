"""Is the detector right? Train some 120 small runs once, record what a detector may see, replay the records, score.

    python -m benchmarks.detection.collapse_zoo                                 # both, in runs/zoo
    python -m benchmarks.detection.collapse_zoo --record DIR --jobs 2           # only train; records that are there are kept
    python -m benchmarks.detection.collapse_zoo --score DIR --half tuning       # only replay and score, in a minute

Half of the data sets are real and lie below SEQVAE_REAL_DATA; without it the zoo is of the demo data alone. Thresholds are
chosen on one half of the runs, and the figures that count are those of the other, which is looked at last.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.detection.zoo_report import report
from benchmarks.detection.zoo_species import ALL_DATA, FREE_DATA, HALVES, Species, all_species
from benchmarks.measure import machine
from seqvae.console import share_machine
from seqvae.errors import UsageError, run_command

PROG = "benchmarks.detection.collapse_zoo"
DEFAULT_DIRECTORY = "runs/zoo"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--record", metavar="DIR", help="only train and record")
    parser.add_argument("--score", metavar="DIR", help="only replay and score the records of a directory")
    parser.add_argument("--half", choices=HALVES, help="only this half of the runs")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="only runs whose names begin so")
    parser.add_argument("--jobs", type=int, default=2, help="processes that train, of one thread each")
    given = parser.parse_args()
    if given.jobs < 1:
        raise UsageError(f"--jobs must be 1 or more, got {given.jobs}")
    if given.record is not None and given.score is not None:
        raise UsageError("--record and --score exclude each other; without either, the zoo is recorded and scored")
    species = chosen(given.only, given.half)
    directory = Path(given.record or given.score or DEFAULT_DIRECTORY).resolve()
    result: dict[str, Any] = {"benchmark": "collapse_zoo", "machine": machine(), "runs": len(species)}
    if given.score is None:
        result["recording_seconds"] = record_all(species, directory, given.jobs)
    if given.record is None:
        result |= report(species, directory)
    print(json.dumps(result))


def chosen(beginnings: Sequence[str], half: str | None) -> list[Species]:
    has_real = bool(os.environ.get("SEQVAE_REAL_DATA"))
    if not has_real:
        print("SEQVAE_REAL_DATA does not say where the real data are: demo data alone", file=sys.stderr)
    everything = all_species(ALL_DATA if has_real else FREE_DATA)
    for beginning in beginnings:
        if not any(species.name.startswith(beginning) for species in everything):
            raise UsageError(f"--only {beginning}: no run's name begins so; one is called {everything[0].name}")
    named = [species for species in everything if species.name.startswith(tuple(beginnings) or "")]
    return [species for species in named if half in (None, species.half)]


def record_all(species: Sequence[Species], directory: Path, jobs: int) -> float:
    """In processes of their own, one thread each; returns the seconds."""
    share_machine()  # before the processes start, which import torch

    from benchmarks.detection.zoo_runs import be_quiet_worker, record

    start = time.perf_counter()
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=be_quiet_worker) as pool:
        futures = [pool.submit(record, one, directory) for one in species]
        for number, future in enumerate(as_completed(futures), start=1):
            seconds = time.perf_counter() - start
            print(f"{number}/{len(futures)} after {seconds:,.0f} s: {future.result().name}", flush=True)
    return round(time.perf_counter() - start, 1)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
