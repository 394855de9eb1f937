"""Damaged data through `seqvae inspect` and training: each case ends in a clear error with exit 3, or in data that are unchanged.

    python -m benchmarks.reliability.bad_inputs [--cases 400] [--seed 0] [--processes 12] [--workers 2]
    python -m benchmarks.reliability.bad_inputs --only 137                # one case again, with all outputs

A case is a small data set, damaged as its number says, with bad files and values refused, then left out (and, where values are
bad, counted as missing): checked, reported on, trained on for two steps. Sequences that were not touched have to come out of the
cache as they went in, and the others to be counted. The commands run in long-lived processes, which are killed when a case hangs;
some cases run once more in processes of their own. The last line is JSON; exit code 1 where anything failed.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, make_parser, print_table, restart_as_commands_run
from benchmarks.reliability.bad_input_runs import (
    ENDS,
    Ended,
    Outcome,
    run_case,
    run_in_own_process,
    run_in_this_process,
    run_in_workers,
)
from seqvae.errors import run_command

PROG = "benchmarks.reliability.bad_inputs"
CASE_SECONDS = 120


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    restart_as_commands_run()
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=12, help="cases that run in processes of their own, too")
    parser.add_argument("--workers", type=int, default=2, help="processes that run cases")
    parser.add_argument("--only", type=int, help="the number of the one case to run")
    options = parser.parse_args()
    started = time.perf_counter()
    if options.only is not None:
        outcomes = [run_alone(options.seed, options.only)]
        repeated = 0
    else:
        outcomes = run_all(options.seed, options.cases, options.workers)
        repeated = min(options.processes, len(outcomes))
    differing = compare_processes(options.seed, outcomes, repeated, options.workers)
    report(outcomes, repeated, differing, options.seed, time.perf_counter() - started)
    return int(bool(differing) or any(one.wrong for one in outcomes))


def run_alone(seed: int, number: int) -> Outcome:
    """Run a case in this process, and show the outputs of its commands."""

    def run(name: str, words: tuple[str, ...], directory: Path) -> Ended:
        ended = run_in_this_process(name, words, directory)
        print(f"--- {name} {words!a}: exit code {ended.code}")
        for line in f"{ended.out}\n{ended.err}".split("\n"):
            print(ascii(line)[1:-1])  # what would command a terminal is spelled out
        return ended

    with tempfile.TemporaryDirectory() as scratch:
        return run_case(seed, number, Path(scratch), run)


def run_all(seed: int, cases: int, workers: int) -> list[Outcome]:
    outcomes = []
    for done, outcome in enumerate(run_in_workers(seed, range(cases), workers, CASE_SECONDS), start=1):
        outcomes.append(outcome)
        if outcome.wrong:
            print(f"case {outcome.number} failed ({outcome.family}, {outcome.form}): {outcome.what!a}", flush=True)
        elif done % 50 == 0:
            print(f"{done} of {cases} cases", flush=True)
    return outcomes


def compare_processes(seed: int, outcomes: Sequence[Outcome], count: int, workers: int) -> list[str]:
    """Run some cases again with a process for each command; return a sentence for each that ends otherwise."""

    def difference(before: Outcome) -> str | None:
        with tempfile.TemporaryDirectory() as scratch:
            after = run_case(seed, before.number, Path(scratch), run_in_own_process, policies=("refuse",))
        if after.ends["refuse"] == before.ends["refuse"]:
            return None
        return f"case {before.number}: {before.ends}, but in processes of their own {after.ends} {after.wrong}"

    chosen = sorted(outcomes)[:: max(1, len(outcomes) // max(1, count))][:count]
    with ThreadPoolExecutor(workers) as pool:
        return [sentence for sentence in pool.map(difference, chosen) if sentence is not None]


def report(outcomes: Sequence[Outcome], repeated: int, differing: Sequence[str], seed: int, seconds: float) -> None:
    rows: list[dict[str, Any]] = []
    for family in dict.fromkeys(one.family for one in outcomes):
        of_family = [one for one in outcomes if one.family == family]
        counts = Counter(end for one in of_family for end in one.ends.values())
        rows.append({"family": family, "cases": len(of_family)} | {end: counts[end] for end in ENDS})
    total: dict[str, Any] = {"family": "all"} | {key: sum(row[key] for row in rows) for key in ("cases", *ENDS)}
    print_table("Damaged data, and how a case ended under each policy for bad files and values", [*rows, total])
    failed = [one for one in outcomes if one.wrong]
    for one in failed:
        print(f"\ncase {one.number}, {one.family}, {one.form}: {one.what!a}")
        print("".join(f"  {wrong!a}\n" for wrong in one.wrong), end="")
        print(f"  again: python -m {PROG} --seed {seed} --only {one.number}")
    for sentence in differing:
        print(f"\n{sentence!a}")
    result = {
        "benchmark": "bad_inputs",
        "machine": machine(),
        "seed": seed,
        "seconds": round(seconds),
        "rows": rows,
        "total": total,
        "in_own_processes": repeated,
        "differing": len(differing),
        "failed_cases": [one.number for one in failed],
        "failed": len(failed) + len(differing),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
