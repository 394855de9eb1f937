"""How the zoo replays its records, how a judge is scored, and what the rival rules say."""

import math
from pathlib import Path

import pytest

from benchmarks.detection.zoo_files import (
    BASELINE_SEEDS,
    baseline_path,
    read_json,
    record_path,
    seed_errors,
    write_at_once,
)
from benchmarks.detection.zoo_limits import truth_of
from benchmarks.detection.zoo_replay import (
    CADENCES,
    JUDGES,
    Call,
    Record,
    Replayed,
    Rule,
    SmallKL,
    offered,
    record_from,
    replay,
)
from benchmarks.detection.zoo_report import in_short, report
from benchmarks.detection.zoo_score import Outcome, changes, first_right, score
from benchmarks.detection.zoo_species import Species, all_species
from benchmarks.detection.zoo_truth import Measured
from seqvae.config.training import ObjectiveSettings
from seqvae.monitors.detection.findings import Verdict, VerdictName
from seqvae.monitors.reading import Reading, to_row
from tests.support.zoo_numbers import UNUSED, measured

# --- Replay -----------------------------------------------------------------------------------------------------------


def reading(step: int, rate: float = 1.0, active_units: int | None = 4, use: float | None = 2.0) -> Reading:
    tens = (0.1,) * 10
    error = None if use is None else 0.1
    return Reading(
        *(step, 0, "sequence", 64, rate, tens, active_units, 0.5, 4.2, 0.5, tens, tens, 4.0, 1.0, 50.0), use, error
    )


def record(readings: list[Reading], said: str | None = None, diverged_at_step: int | None = None) -> Record:
    objective = ObjectiveSettings(kl_schedule="constant")
    return Record("made up", 40, objective, tuple(readings), diverged_at_step, said)


class Curious:
    """Wants decoder use at one step, and is healthy all the time."""

    def __init__(self, wanted_at: int) -> None:
        self.wanted_at = wanted_at
        self.seen: list[tuple[int, float | None]] = []

    def wants_decoder_use(self, reading: Reading) -> bool:
        return reading.step == self.wanted_at

    def judge(self, reading: Reading) -> Verdict:
        self.seen.append((reading.step, reading.decoder_use))
        return Verdict("healthy", reading.step, "")

    def diverged(self, step: int, said: str) -> Verdict:
        return Verdict("diverged", step, said)


def test_a_throttled_judge_sees_decoder_use_where_it_asks_and_nowhere_else() -> None:
    judge = Curious(wanted_at=20)
    replayed = replay(record([reading(step) for step in range(2, 41, 2)]), CADENCES["throttled"], judge)
    assert judge.seen == [(20, 2.0), (40, None)]
    assert replayed.asked == 1


def test_by_default_every_fourth_reading_and_the_last_come_with_decoder_use() -> None:
    readings = offered(record([reading(step) for step in range(2, 101, 2)]), CADENCES["2 x as close"])
    assert [one.decoder_use for one in readings] == [None, None, None, 2.0, *[None] * 3, 2.0, None, None]


def test_a_run_that_broke_off_ends_in_what_the_judge_says_of_that() -> None:
    replayed = replay(
        record([reading(2), reading(4)], said="NaN", diverged_at_step=5), CADENCES["10 x, closest"], Curious(0)
    )
    assert [(call.step, call.name) for call in replayed.calls] == [(2, "healthy"), (4, "healthy"), (5, "diverged")]


def test_a_run_that_broke_off_before_its_first_reading_is_called_all_the_same() -> None:
    replayed = replay(record([reading(2)], said="NaN", diverged_at_step=3), CADENCES["throttled"], Curious(0))
    assert [(call.step, call.name) for call in replayed.calls] == [(3, "diverged")]


def test_every_judge_goes_through_a_record_that_ends_in_nan() -> None:
    broken = [reading(step, math.nan, None, math.nan) for step in range(22, 40, 2)]
    stored = record([*(reading(step) for step in range(2, 21, 2)), *broken], said="NaN", diverged_at_step=21)
    last = {
        name: replay(stored, CADENCES["closest"], make(stored, CADENCES["closest"])).calls[-1].name
        for name, make in JUDGES.items()
    }
    assert last == {
        "detector": "diverged",
        "KL < 0.01 over 50 steps": "healthy",
        "AU < 10 %": "healthy",
        "always 0 active units": "collapsed",
    }


def test_the_rule_of_a_small_kl_waits_for_fifty_steps_and_averages_over_them() -> None:
    is_small = SmallKL()
    assert [is_small(reading(step, rate=0.001)) for step in (40, 50)] == [False, True]
    assert not is_small(reading(60, rate=1.0))
    assert [is_small(reading(step, rate=0.001)) for step in (100, 110)] == [False, True]


def test_the_rule_of_few_active_units_counts_shares() -> None:
    rule = JUDGES["AU < 10 %"](record([]), CADENCES["closest"])
    assert [rule.judge(reading(step, active_units=units)).name for step, units in ((2, 0), (4, 1))] == [
        "collapsed",
        "healthy",
    ]


def test_a_rule_keeps_its_verdict_when_a_run_breaks_off() -> None:
    rule = Rule(lambda reading: True)
    rule.judge(reading(2))
    assert rule.diverged(3, "NaN").name == "collapsed"


# --- Score ------------------------------------------------------------------------------------------------------------


def outcome(right: tuple[VerdictName, ...], *names: VerdictName, full_from: int | None = 0) -> Outcome:
    calls = tuple(Call(10 * place, name, "") for place, name in enumerate(names, start=1))
    truth = truth_of(None)._replace(right=right)
    return Outcome("made up", truth, Replayed(calls, asked=1), 100, full_from)


def test_recall_counts_any_alarm_at_the_end_and_the_right_kind_is_counted_apart() -> None:
    scores = score(
        [
            outcome(("collapsed",), "healthy", "collapsed"),
            outcome(("collapsed",), "collapsed", "healthy"),
            outcome(("collapsed",), "decoder_ignores_z"),
            outcome(("collapsed",), "collapsing"),
            outcome(("diverged",), "diverged"),
        ]
    )
    assert (scores.sick, scores.found, scores.right_kind) == (5, 4, 2)


def test_any_alarm_ever_in_force_is_false_in_a_run_that_is_well() -> None:
    scores = score(
        [
            outcome(("healthy",), "collapsing", "healthy"),
            outcome(("healthy",), "warming_up", "healthy"),
            outcome(("partly_collapsed",), "partly_collapsed"),
            outcome(("healthy", "partly_collapsed"), "cannot_tell"),
        ]
    )
    assert (scores.well, scores.false_alarms, scores.right_kind) == (4, 1, 3)


def test_grey_runs_have_no_part() -> None:
    scores = score([outcome((), "collapsed"), outcome(("healthy",), "healthy")])
    assert (scores.runs, scores.sick, scores.well, scores.false_alarms) == (1, 0, 1, 0)


def test_collapsing_is_a_right_early_call_of_a_collapse_and_of_nothing_else() -> None:
    assert first_right(outcome(("collapsed",), "healthy", "collapsing", "collapsed")) == 1
    assert first_right(outcome(("decoder_ignores_z",), "collapsing", "decoder_ignores_z")) == 1


def test_a_right_call_that_was_taken_back_does_not_count_as_the_first() -> None:
    assert first_right(outcome(("collapsed",), "collapsed", "healthy", "collapsed")) == 2
    assert first_right(outcome(("collapsed",), "collapsed", "healthy")) is None


def test_a_run_that_starts_dead_is_timed_from_its_start_and_an_annealed_one_from_its_full_weight() -> None:
    names: tuple[VerdictName, ...] = ("healthy", "healthy", "healthy", "collapsed")
    scores = score([outcome(("collapsed",), *names), outcome(("collapsed",), *names, full_from=20)])
    assert (scores.dead_at_start, scores.most_readings_dead_at_start) == (1, 4)
    assert (scores.annealed, scores.most_readings_after_annealing) == (1, 2)
    assert (scores.median_readings, scores.median_share) == (4, 0.4)


def test_a_call_before_the_weight_is_full_took_no_reading() -> None:
    scores = score([outcome(("collapsed",), "warming_up", "collapsing", "collapsed", full_from=30)])
    assert scores.most_readings_after_annealing == 0


def test_one_call_that_never_came_leaves_no_figure_for_the_slowest() -> None:
    scores = score([outcome(("collapsed",), "collapsed"), outcome(("collapsed",), "healthy")])
    assert scores.most_readings_dead_at_start is None


def test_a_history_names_each_change_once() -> None:
    assert changes(outcome(("healthy",), "warming_up", "warming_up", "healthy")) == "10 warming_up, 30 healthy"


# --- Files ------------------------------------------------------------------------------------------------------------


def species_named(name: str) -> Species:
    return next(one for one in all_species() if one.name == name)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    species = species_named("weight-1.demo-tokens.lstm")
    write_record(species, tmp_path, measured(), [reading(2), reading(4, math.nan)])
    back = record_from(read_json(record_path(species, tmp_path)))
    assert back.readings[0] == reading(2)
    assert math.isnan(back.readings[1].rate)
    assert back.objective == ObjectiveSettings(kl_schedule="constant")


def test_the_error_of_seeds_is_pooled_over_the_decoders_of_a_data_set(tmp_path: Path) -> None:
    one, other = (
        species_named("weight-1.demo-tokens.lstm"),
        next(
            one
            for one in all_species()
            if one.data == "demo-tokens" and one.decoder == "parallel" and one.word_dropout == "0"
        ),
    )
    for species, difference in ((one, 1.0), (other, 7.0)):
        for seed in BASELINE_SEEDS:
            nll = 50.0 + difference * seed
            write_at_once(baseline_path(species, tmp_path, seed), {"nll": [nll - 1, nll + 1]})
    assert seed_errors([one, other], tmp_path)["demo-tokens"] == pytest.approx(5.0)


def test_a_report_scores_what_is_recorded_and_says_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, grey = species_named("weight-1.demo-tokens.lstm"), species_named("weight-1.demo-vectors.transformer")
    readings = [reading(step, rate=0.001, active_units=0, use=0.0) for step in range(20, 1001, 20)]
    write_record(dead, tmp_path, measured(rate=0.01, mutual_information=0.0, **UNUSED), readings)
    write_record(grey, tmp_path, measured(decoder_use=0.4, decoder_use_error=0.1), readings)
    result = report([dead, grey, species_named("weight-2.demo-tokens.weak-transformer")], tmp_path)
    assert (result["recorded"], result["grey"]) == (2, 1)
    assert result["scores"]["tuning"]["KL < 0.01 over 50 steps"]["closest"]["found"] == 1
    printed = capsys.readouterr().out
    assert "2 of 3 runs are recorded" in printed
    assert "decoder use 0.40 ± 0.10" in printed


def write_record(species: Species, directory: Path, truth: Measured, readings: list[Reading]) -> None:
    stored = {
        "name": species.name,
        "total_steps": 1000,
        "objective": {"kl_schedule": "constant"},
        "diverged_at_step": None,
        "said": None,
        "has_finite_weights": True,
        "measured": truth._asdict(),
        "readings": [to_row(one) for one in readings],
    }
    write_at_once(record_path(species, directory), stored)


def test_in_short_a_judge_has_the_span_of_the_ways_in_which_the_commands_read():
    row: dict[str, int | None] = {"runs": 58, "sick": 29, "found": 28, "well": 29, "false_alarms": 1, "right_kind": 56}
    scores = {
        "detector": {
            name: row | {"most_readings_dead_at_start": late, "most_readings_after_annealing": None if late == 8 else 0}
            for name, late in zip(CADENCES, (7, 8, 7, 7, 99, 99, 99, 99), strict=True)
        }
    }
    assert list(in_short(scores)[0].values()) == [
        *("detector", "28 of 29", "1 of 29", "56 of 58", "7 to 8", "not all"),
    ]
