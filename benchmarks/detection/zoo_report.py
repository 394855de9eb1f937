"""The zoo's records -> truths, grey zone, scores of all judges and every wrong verdict: tables for people, figures for JSON.

In: the directory of the records. Truths and the grey zone are made and printed before a judge is asked anything.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.detection.zoo_files import read_json, record_path, seed_errors
from benchmarks.detection.zoo_limits import Truth, truth_of
from benchmarks.detection.zoo_replay import CADENCES, JUDGES, OF_COMMANDS, Record, record_from, replay
from benchmarks.detection.zoo_score import (
    Outcome,
    Score,
    alarms_of,
    changes,
    is_right_at_end,
    is_sick,
    outcome_of,
    score,
)
from benchmarks.detection.zoo_species import HALVES, Half, Species, all_species
from benchmarks.detection.zoo_truth import from_json
from benchmarks.measure import print_table
from seqvae.errors import UsageError


class Judged(NamedTuple):
    """A run and its truth, before anybody is asked."""

    half: Half
    record: Record
    truth: Truth


def report(species: Sequence[Species], directory: Path) -> dict[str, Any]:
    recorded = [one for one in species if record_path(one, directory).exists()]
    if not recorded:
        raise UsageError(f"no records of these runs in {directory}: make them with --record {directory}")
    errors = seed_errors(all_species(), directory)  # of all, so that a run's truth does not depend on what is chosen
    runs = [read_run(one, directory, errors[one.data]) for one in recorded]
    if len(runs) < len(species):
        print(f"{len(runs)} of {len(species)} runs are recorded")
    print_truths(runs)
    result: dict[str, Any] = {"recorded": len(runs), "grey": sum(not run.truth.right for run in runs), "scores": {}}
    for half in HALVES:
        of_half = [run for run in runs if run.half == half]
        if of_half:
            result["scores"][half] = report_half(half, of_half)
    if "scored" in result["scores"]:
        result["in_short"] = in_short(result["scores"]["scored"])
    return result


def read_run(species: Species, directory: Path, seed_error: float) -> Judged:
    stored = read_json(record_path(species, directory))
    measured = None if stored["measured"] is None else from_json(stored["measured"])
    has_diverged = stored["diverged_at_step"] is not None or not stored["has_finite_weights"]
    return Judged(species.half, record_from(stored), truth_of(None if has_diverged else measured, seed_error))


def print_truths(runs: Sequence[Judged]) -> None:
    counts = Counter((run.truth.name, run.half) for run in runs)
    names = sorted({run.truth.name for run in runs})
    print_table("truth", [{"truth": name} | {half: counts[name, half] for half in HALVES} for name in names])
    grey = [run for run in runs if not run.truth.right]
    if grey:
        rows = [{"half": run.half, "run": run.record.name, "why": run.truth.why} for run in grey]
        print_table("grey zone, not scored", rows)


def report_half(half: Half, runs: Sequence[Judged]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    rows = []
    for cadence in CADENCES:
        for judge in JUDGES:
            outcomes = [judged(run, judge, cadence) for run in runs]
            figures = score(outcomes)
            rows.append({"cadence": cadence, "judge": judge} | row_of(figures))
            result.setdefault(judge, {})[cadence] = figures._asdict()
            if judge == "detector":
                print_wrong(f"{half} half, {cadence}: where the detector was wrong", outcomes)
    print_table(f"{half} half", rows)
    return result


def judged(run: Judged, judge: str, cadence: str) -> Outcome:
    made = JUDGES[judge](run.record, CADENCES[cadence])
    return outcome_of(run.record, run.truth, replay(run.record, CADENCES[cadence], made))


def row_of(figures: Score) -> dict[str, object]:
    return {
        "found": f"{figures.found}/{figures.sick}",
        "false alarms": f"{figures.false_alarms}/{figures.well}",
        "right kind": f"{figures.right_kind}/{figures.runs}",
        "readings to call": shown(figures.median_readings),
        "share of run": "-" if figures.median_share is None else f"{figures.median_share:.1%}",
        "dead at start": f"{shown(figures.most_readings_dead_at_start)} ({figures.dead_at_start})",
        "after annealing": f"{shown(figures.most_readings_after_annealing)} ({figures.annealed})",
        "decoder asked": f"{figures.asked_share:.0%}",
    }


def in_short(scores: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each judge, over the ways in which the commands read such runs; for the documentation."""
    rows = []
    for judge, by_cadence in scores.items():
        of = [by_cadence[cadence] for cadence in OF_COMMANDS]
        rows.append(
            {
                "judge": judge,
                "found": f"{span(of, 'found')} of {of[0]['sick']}",
                "false alarms": f"{span(of, 'false_alarms')} of {of[0]['well']}",
                "right kind at the end": f"{span(of, 'right_kind')} of {of[0]['runs']}",
                "readings until a run dead from the start is called": span(of, "most_readings_dead_at_start"),
                "readings after the full weight until one annealed to death is": span(
                    of, "most_readings_after_annealing"
                ),
            }
        )
    return rows


def span(scores: Sequence[Mapping[str, Any]], name: str) -> str:
    """
    >>> span([{"a": 7}, {"a": 8}], "a"), span([{"a": 2}, {"a": 2}], "a"), span([{"a": 2}, {"a": None}], "a")
    ('7 to 8', '2', 'not all')
    """
    values = {score[name] for score in scores}
    if None in values:
        return "not all"
    return " to ".join(f"{value:g}" for value in sorted({min(values), max(values)}))


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def print_wrong(title: str, outcomes: Sequence[Outcome]) -> None:
    wrong = [one for one in outcomes if is_wrong(one)]
    if not wrong:
        return
    print(f"\n{title}")
    for one in wrong:
        print(f"  {one.name}, in truth {one.truth.name}: {one.truth.why}")
        print(f"    {changes(one)}")
        if one.replayed.calls:
            print(f"    at last: {one.replayed.calls[-1].evidence}")


def is_wrong(outcome: Outcome) -> bool:
    if not outcome.truth.right:
        return False
    return not is_right_at_end(outcome) or (not is_sick(outcome.truth) and bool(alarms_of(outcome)))
