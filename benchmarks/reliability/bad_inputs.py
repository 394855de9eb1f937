"""Damaged data through seqvae inspect and training: each case ends in a clear error with exit 3, or in data that are as they were.

    python -m benchmarks.reliability.bad_inputs [--cases 400] [--seed 0] [--processes 12] [--workers 2]
    python -m benchmarks.reliability.bad_inputs --only 137                # one case again, with all that was said

A case is a small data set, damaged as its number says, with bad files and values refused, then left out (and, where values are
bad, counted as missing): checked, reported on, trained on for two steps. Sequences that were not touched have to come out of the
cache as they went in, and the others to be counted. The commands run in long-lived processes, which are killed when a case hangs;
some cases run once more in processes of their own. The last line is JSON; exit code 1 where anything failed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqvae.console import share_machine
from seqvae.errors import run_command

if TYPE_CHECKING:
    from benchmarks.reliability.bad_input_runs import Outcome

PROG = "benchmarks.reliability.bad_inputs"
CASE_SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=12, help="cases that run in processes of their own, too")
    parser.add_argument("--workers", type=int, default=2, help="processes that run cases")
    parser.add_argument("--only", type=int, help="the number of the one case to run")
    options = parser.parse_args()
    share_machine()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    started = time.perf_counter()
    if options.only is not None:
        outcomes = [run_alone(options.seed, options.only)]
    else:
        outcomes = list(run_all(options.seed, range(options.cases), options.workers, CASE_SECONDS))
    again = 0 if options.only is not None else min(options.processes, len(outcomes))
    differing = compare_processes(options.seed, outcomes, again, options.workers)
    report(outcomes, again, differing, options.seed, time.perf_counter() - started)
    failures = sum(bool(one.wrong) for one in outcomes) + len(differing)
    return int(failures > 0)


def run_alone(seed: int, number: int) -> "Outcome":
    """In this process, with the outputs of the commands shown."""
    from benchmarks.reliability.bad_input_checks import Ended
    from benchmarks.reliability.bad_input_runs import in_this_process, run_case

    def show(name: str, words: tuple[str, ...], directory: Path) -> Ended:
        ended = in_this_process(name, words, directory)
        print(f"--- {name} {words!a}: exit code {ended.code}\n{ascii_lines(ended.out)}\n{ascii_lines(ended.err)}")
        return ended

    with tempfile.TemporaryDirectory() as scratch:
        return run_case(seed, number, Path(scratch), show)


def ascii_lines(text: str) -> str:
    """What would command a terminal is spelled out."""
    return "\n".join(ascii(line)[1:-1] for line in text.split("\n"))


def run_all(seed: int, numbers: Sequence[int], workers: int, limit: float) -> Iterator["Outcome"]:
    from benchmarks.reliability.bad_input_workers import run_in_workers

    for done, outcome in enumerate(run_in_workers(seed, numbers, workers, limit), start=1):
        if outcome.wrong:
            print(f"case {outcome.number} failed ({outcome.family}, {outcome.form}): {outcome.what!a}", flush=True)
        elif done % 50 == 0:
            print(f"{done} of {len(numbers)} cases", flush=True)
        yield outcome


def compare_processes(seed: int, outcomes: Sequence["Outcome"], count: int, workers: int) -> list[str]:
    """Some cases once more with a process for each command: where they end otherwise than in the long-lived ones."""
    from benchmarks.reliability.bad_input_runs import in_its_own_process, run_case

    def differs(before: "Outcome") -> str | None:
        with tempfile.TemporaryDirectory() as scratch:
            after = run_case(seed, before.number, Path(scratch), in_its_own_process, policies=("refuse",))
        if after.ends["refuse"] == before.ends["refuse"]:
            return None
        return f"case {before.number}: {before.ends}, but in processes of their own {after.ends} {after.wrong}"

    chosen = sorted(outcomes)[:: max(1, len(outcomes) // max(1, count))][:count]
    with ThreadPoolExecutor(workers) as pool:
        return [sentence for sentence in pool.map(differs, chosen) if sentence is not None]


def report(outcomes: Sequence["Outcome"], again: int, differing: Sequence[str], seed: int, seconds: float) -> None:
    from benchmarks.measure import machine, print_table
    from benchmarks.reliability.bad_input_runs import ENDS

    families = list(dict.fromkeys(one.family for one in outcomes))
    rows = [family_row(family, [one for one in outcomes if one.family == family], ENDS) for family in families]
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
        "in_own_processes": again,
        "differing": len(differing),
        "failed_cases": [one.number for one in failed],
        "failed": len(failed) + len(differing),
    }
    print(json.dumps(result))


def family_row(family: str, outcomes: Sequence["Outcome"], ends: Sequence[str]) -> dict[str, Any]:
    counts = Counter(end for one in outcomes for end in one.ends.values())
    return {"family": family, "cases": len(outcomes)} | {end: counts[end] for end in ends}


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
