"""Is the detector right? Train 188 small runs once, record what a detector may see, replay the records, score the verdicts.

    python -m benchmarks.detection.collapse_zoo                                 # both, in runs/zoo
    python -m benchmarks.detection.collapse_zoo --record DIR --jobs 2           # only train; existing records are kept
    python -m benchmarks.detection.collapse_zoo --record DIR --shard 1/4        # only the first quarter of the runs
    python -m benchmarks.detection.collapse_zoo --score DIR --half tuning       # only replay and score, in a minute

A third of the data sets are real and lie below SEQVAE_REAL_DATA; without it the zoo is of demo and generated data alone.
Thresholds are chosen on one half of the runs. The figures that count are those of the other half, which is looked at once.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.detection.zoo_recording import quiet_worker, read_json, record, record_path, seed_errors
from benchmarks.detection.zoo_runs import ALL_DATA, FREE_DATA, HALVES, Half, ZooRun, all_runs
from benchmarks.detection.zoo_scoring import (
    CADENCES,
    JUDGES,
    OF_COMMANDS,
    Outcome,
    Record,
    Truth,
    as_far_as_can_be_told,
    history,
    measured_from,
    outcome_of,
    record_from,
    replay,
    score,
    silence_of,
    truth_of,
)
from benchmarks.measure import machine, make_parser, print_table
from seqvae.console import share_machine
from seqvae.errors import UsageError, run_command

PROG = "benchmarks.detection.collapse_zoo"
DEFAULT_DIRECTORY = "runs/zoo"


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--record", metavar="DIR", help="only train and record")
    parser.add_argument("--score", metavar="DIR", help="only replay and score the records of a directory")
    parser.add_argument("--half", choices=HALVES, help="only this half of the runs")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="only runs whose names begin with these")
    parser.add_argument("--shard", metavar="I/N", help="only the I-th of N parts of the runs, each of all kinds")
    parser.add_argument("--jobs", type=int, default=2, help="processes that train, of one thread each")
    options = parser.parse_args()
    if options.jobs < 1:
        raise UsageError(f"--jobs must be 1 or more, got {options.jobs}")
    if options.record is not None and options.score is not None:
        raise UsageError("--record and --score exclude each other; without either, the zoo is recorded and scored")
    runs = shard_of(choose(options.only, options.half), options.shard)
    directory = Path(options.record or options.score or DEFAULT_DIRECTORY).resolve()
    result: dict[str, Any] = {"benchmark": "collapse_zoo", "machine": machine(), "runs": len(runs)}
    if options.score is None:
        result["recording_seconds"] = record_all(runs, directory, options.jobs)
    if options.record is None:
        result |= report(runs, directory)
    print(json.dumps(result))


def choose(prefixes: Sequence[str], half: str | None) -> list[ZooRun]:
    has_real = bool(os.environ.get("SEQVAE_REAL_DATA"))
    if not has_real:
        print("SEQVAE_REAL_DATA does not name the folder of the real data: demo data alone", file=sys.stderr)
    runs = all_runs(ALL_DATA if has_real else FREE_DATA)
    for prefix in prefixes:
        if not any(run.name.startswith(prefix) for run in runs):
            raise UsageError(f"--only {prefix}: no run's name begins with it; one is called {runs[0].name}")
    return [run for run in runs if run.name.startswith(tuple(prefixes) or "") and half in (None, run.half)]


def shard_of(runs: list[ZooRun], shard: str | None) -> list[ZooRun]:
    """Return each N-th run from the I-th on; the parts 1/N to N/N are all runs.

    >>> shard_of([1, 2, 3, 4, 5], "2/2")
    [2, 4]
    """
    if shard is None:
        return runs
    first, _, parts = shard.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise UsageError(f"--shard must be two numbers like 1/4, the first no larger than the second, got {shard}")
    return runs[int(first) - 1 :: int(parts)]


def record_all(runs: Sequence[ZooRun], directory: Path, jobs: int) -> float:
    """Train and record in processes of one thread each; return the seconds that all took."""
    share_machine()  # before the processes start, which import torch
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=quiet_worker) as pool:
        futures = [pool.submit(record, run, directory) for run in runs]
        for number, future in enumerate(as_completed(futures), start=1):
            seconds = time.perf_counter() - start
            print(f"{number}/{len(futures)} after {seconds:,.0f} s: {future.result().name}", flush=True)
    return round(time.perf_counter() - start, 1)


class RunWithTruth(NamedTuple):
    """A recorded run and its truth, which is determined before any judge sees it."""

    run: ZooRun
    record: Record
    truth: Truth


def known_runs(runs: Sequence[ZooRun], directory: Path) -> list[RunWithTruth]:
    """Return those of the runs that are recorded, each with its truth."""
    recorded = [run for run in runs if record_path(run, directory).exists()]
    if not recorded:
        raise UsageError(f"no records of these runs in {directory}: make them with --record {directory}")
    errors = seed_errors(all_runs(), directory)  # of all, so that a run's truth does not depend on what is chosen
    known = []
    for run in recorded:
        stored = read_json(record_path(run, directory))
        has_diverged = stored["said"] is not None or not stored["has_finite_weights"]  # a single step may be survived
        has_numbers = stored["measured"] is not None and not has_diverged
        truth = truth_of(measured_from(stored["measured"]) if has_numbers else None, errors[run.data])
        one = record_from(stored)
        known.append(RunWithTruth(run, one, as_far_as_can_be_told(truth, one)))
    return known


def report(runs: Sequence[ZooRun], directory: Path) -> dict[str, Any]:
    """Print truths, grey zone, scores of all judges and each wrong verdict; return the figures."""
    known = known_runs(runs, directory)
    if len(known) < len(runs):
        print(f"{len(known)} of {len(runs)} runs are recorded")
    counts = Counter((run.truth.name, run.run.half) for run in known)
    names = sorted({run.truth.name for run in known})
    print_table("truth", [{"truth": name} | {half: counts[name, half] for half in HALVES} for name in names])
    grey = [
        {"half": run.run.half, "run": run.record.name, "why": run.truth.why} for run in known if not run.truth.right
    ]
    if grey:
        print_table("grey zone, not scored", grey)
    halves = {half: of_half for half in HALVES if (of_half := [run for run in known if run.run.half == half])}
    silences = {half: report_silences(half, of_half) for half, of_half in halves.items()}
    scores = {half: report_half(half, of_half) for half, of_half in halves.items()}
    result: dict[str, Any] = {"recorded": len(known), "grey": len(grey), "scores": scores, "silences": silences}
    return result | ({"in_short": summary(scores["scored"])} if "scored" in scores else {})


def report_silences(half: Half, runs: Sequence[RunWithTruth]) -> dict[str, str]:
    """Print escape threshold over weight of the runs that woke and of those that stayed dead; return how many were called dead."""
    cadence = CADENCES[OF_COMMANDS[0]]
    found = []
    for run in runs:
        replayed = replay(run.record, cadence, JUDGES["detector"](run.record, cadence))
        found.append(silence_of(run.record, outcome_of(run.record, run.truth, replayed)))
    silences = sorted((one for one in found if one is not None), key=lambda one: (not one.woke, one.run))
    if not silences:
        return {}
    rows = [
        {
            "run": one.run,
            "in truth": "woke" if one.woke else "dead",
            "weight": f"{one.weight:g}",
            "readings": one.readings,
            "lowest": one.lowest,
            "median": one.median,
            "last": one.last,
            "below 1": one.below,
            "called": "yes" if one.called else "no",
        }
        for one in silences
    ]
    print_table(f"sleeping against dead, {half} half: escape threshold over weight while the latent was silent", rows)
    woke, dead = [one for one in silences if one.woke], [one for one in silences if not one.woke]
    counts = {name: f"{sum(one.called for one in of)} of {len(of)}" for name, of in (("woke", woke), ("dead", dead))}
    print(f"  called dead: {counts['woke']} that woke, {counts['dead']} dead ones")
    return counts


def report_half(half: Half, runs: Sequence[RunWithTruth]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the scores of each judge at each cadence."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    rows = []
    for name, cadence in CADENCES.items():
        for judge, make_judge in JUDGES.items():
            outcomes = [
                outcome_of(run.record, run.truth, replay(run.record, cadence, make_judge(run.record, cadence)))
                for run in runs
            ]
            figures = score(outcomes)
            late = [figures.median_readings, figures.most_readings_dead_at_start, figures.most_readings_after_annealing]
            readings, at_start, after_annealing = ("-" if value is None else f"{value:g}" for value in late)
            rows.append(
                {
                    "cadence": name,
                    "judge": judge,
                    "found": f"{figures.found}/{figures.sick}",
                    "false alarms": f"{figures.false_alarms}/{figures.well}",
                    "at the end": figures.false_at_end,
                    "wakers called": f"{figures.wakers_called}/{figures.wakers}",
                    "right kind": f"{figures.right_kind}/{figures.runs}",
                    "readings to call": readings,
                    "share of run": "-" if figures.median_share is None else f"{figures.median_share:.1%}",
                    "dead at start": f"{at_start} ({figures.dead_at_start})",
                    "after annealing": f"{after_annealing} ({figures.annealed})",
                    "with decoder use": f"{figures.asked_share:.0%}",
                    "thresholds": figures.threshold_readings,
                }
            )
            result.setdefault(judge, {})[name] = figures._asdict()
            if judge == "detector":
                print_wrong(f"{half} half, {name}: where the detector was wrong", outcomes)
    print_table(f"{half} half", rows)
    return result


def print_wrong(title: str, outcomes: Sequence[Outcome]) -> None:
    scored = [one for one in outcomes if one.truth.right]
    wrong = [one for one in scored if not one.is_right_at_end or one.false_alarms]
    if wrong:
        print(f"\n{title}")
    for one in wrong:
        print(f"  {one.name}, in truth {one.truth.name}: {one.truth.why}\n    {history(one)}")
        if one.replayed.calls:
            print(f"    at last: {one.replayed.calls[-1].evidence}")


def summary(scores: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each judge, over the ways in which the commands read such runs: the table of docs/monitoring.md."""
    rows = []
    for judge, by_cadence in scores.items():
        of = [by_cadence[cadence] for cadence in OF_COMMANDS]
        span = {name: span_of([one[name] for one in of]) for name in of[0]}
        shares = span_of([None if one["median_share"] is None else round(one["median_share"], 3) for one in of])
        rows.append(
            {
                "judge": judge,
                "found": f"{span['found']} of {of[0]['sick']}",
                "false alarms": f"{span['false_alarms']} of {of[0]['well']}",
                "false at the end": span["false_at_end"],
                "right kind at the end": f"{span['right_kind']} of {of[0]['runs']}",
                "sleepers that wake, called": f"{span['wakers_called']} of {of[0]['wakers']}",
                "median first call": "none" if span["median_share"] == "not all" else f"{shares} of the run",
                "readings until a run dead from the start is called": span["most_readings_dead_at_start"],
                "readings after the full weight until one annealed to death is": span["most_readings_after_annealing"],
            }
        )
    return rows


def span_of(values: Sequence[float | None]) -> str:
    """Return the lowest and highest of several values.

    >>> span_of([7, 8]), span_of([2, 2]), span_of([2, None])
    ('7 to 8', '2', 'not all')
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "not all"
    return " to ".join(f"{value:g}" for value in sorted({min(known), max(known)}))


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
