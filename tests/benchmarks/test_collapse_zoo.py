"""The zoo: which runs it holds, how networks are altered and recorded, the truth about a run, replay, rival rules and scores."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.detection import zoo_recording, zoo_runs
from benchmarks.detection.collapse_zoo import report, summary
from benchmarks.detection.zoo_recording import (
    BASELINE_SEEDS,
    FIXED_LOGVAR,
    altered,
    baseline_path,
    read_json,
    record_path,
    seed_errors,
    write_at_once,
)
from benchmarks.detection.zoo_recording import (
    record as record_run,
)
from benchmarks.detection.zoo_runs import ALL_DATA, DATA, DECODERS, FREE_DATA, TREATMENTS, Alteration, ZooRun, all_runs
from benchmarks.detection.zoo_scoring import (
    CADENCES,
    JUDGES,
    Call,
    Measured,
    Outcome,
    Record,
    Replayed,
    Rule,
    SmallKL,
    due_readings,
    history,
    measured_from,
    record_from,
    replay,
    score,
    truth_of,
)
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import ObjectiveSettings, TrainingSettings
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.reading import Reading, to_row
from seqvae.verdicts import Verdict
from tests.support.small_models import DESCRIPTIONS, SMALL, make_batch

# --- The runs ---------------------------------------------------------------------------------------------------------


def test_both_halves_hold_every_data_set_every_decoder_and_about_as_many_runs() -> None:
    runs = all_runs()
    sizes = Counter(one.half for one in runs)
    assert abs(sizes["tuning"] - sizes["scored"]) <= 0.1 * len(runs)
    for half in sizes:
        assert {one.data for one in runs if one.half == half} == set(ALL_DATA)
        assert {one.decoder for one in runs if one.half == half} == set(DECODERS)


def test_every_treatment_is_in_both_halves() -> None:
    for treatment in TREATMENTS:
        assert {one.half for one in all_runs() if one.treatment == treatment} == {"tuning", "scored"}


def test_a_run_does_not_depend_on_which_data_sets_exist() -> None:
    assert set(all_runs(FREE_DATA)) <= set(all_runs())
    assert "weight-1.demo-tokens.lstm" in {one.name for one in all_runs() if one.half == "tuning"}


def test_names_and_seeds_tell_all_runs_apart() -> None:
    runs = all_runs()
    assert len({one.name for one in runs}) == len({one.seed for one in runs}) == len(runs)


def test_the_tuning_half_comes_first() -> None:
    halves = [one.half for one in all_runs()]
    assert halves == sorted(halves, key=lambda half: half != "tuning")


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_every_treatment_is_a_command_line_that_parses(treatment: str) -> None:
    run = next(one for one in all_runs() if one.treatment == treatment)
    settings = parse_command_line(TrainingSettings, run.words, prog="zoo", description="")
    assert settings.lengths.max_sequence_length == DATA[run.data].longest
    assert settings.run.seed == run.seed


def test_word_dropout_is_what_a_run_has_in_common_with_its_baseline() -> None:
    run = next(one for one in all_runs() if one.treatment == "word-dropout-0.6")
    words = run.baseline_words
    assert words[words.index("--word_dropout") + 1] == "0.6"
    assert "word-dropout-0.6" in run.baseline


# --- Truth ------------------------------------------------------------------------------------------------------------

UNUSED = {"decoder_use": 0.02, "decoder_use_error": 0.02, "gain": 0.0}
"""Changes with which the decoder does not use the latent."""


def measured(**changed: object) -> Measured:
    """Return the numbers of a healthy run of 4 dimensions, with changes."""
    numbers: dict[str, object] = {
        "sequences": 400,
        "rate": 3.0,
        "kl_per_dim": (0.75,) * 4,
        "mutual_information": 2.5,
        "mutual_information_cap": math.log(400),
        "active_units": 4,
        "variance_of_means": (0.5,) * 4,
        "mean_of_variances": (0.4,) * 4,
        "decoder_use": 5.0,
        "decoder_use_error": 0.2,
        "nll_without_latent": 100.0,
        "gain": 0.5,
        "gain_error": 0.1,
    }
    return measured_from(numbers | changed)


def test_a_latent_that_is_used_in_all_dimensions_is_healthy() -> None:
    assert truth_of(measured()).right == ("healthy",)


def test_no_rate_no_information_no_use_no_gain_is_collapsed() -> None:
    assert truth_of(measured(rate=0.01, mutual_information=0.0, **UNUSED)).right == ("collapsed",)


def test_a_rate_without_decoder_use_is_ignored_by_the_decoder_whatever_the_mutual_information() -> None:
    assert truth_of(measured(rate=3.0, mutual_information=2.5, **UNUSED)).right == ("decoder_ignores_z",)


@pytest.mark.parametrize(
    "changed",
    [
        {"decoder_use": 0.3, "decoder_use_error": 0.05},
        {"decoder_use": 0.9, "decoder_use_error": 0.3},
        UNUSED | {"rate": 0.45},
        UNUSED | {"rate": 0.2, "mutual_information": 0.25},
        UNUSED | {"rate": 0.01, "mutual_information": 0.0, "gain": 2.0},
        {"mean_of_variances": (0.03,) * 4, "gain": -5.0},
        {"mean_of_variances": (0.01,) * 4, "gain": -0.9},
        {"mutual_information": 0.15},
        {"rate": None},
    ],
)
def test_a_run_that_lies_between_the_limits_is_grey(changed: dict[str, object]) -> None:
    truth = truth_of(measured(**changed))
    assert (truth.right, truth.name) == ((), "grey")


def test_narrow_posteriors_that_cost_more_than_they_tell_are_not_variational() -> None:
    narrow = (0.01,) * 4
    assert truth_of(measured(mean_of_variances=narrow, gain=-5.0)).right == ("not_variational",)
    assert truth_of(measured(mean_of_variances=narrow, gain=5.0)).right == ("healthy",)


def test_dead_dimensions_do_not_widen_the_variance_of_the_others() -> None:
    half_dead = measured(
        active_units=2, variance_of_means=(1, 1, 0, 0), mean_of_variances=(0.001, 0.001, 1, 1), gain=-5.0
    )
    assert truth_of(half_dead).right == ("not_variational",)


@pytest.mark.parametrize(
    ("active", "right"),
    [(1, ("partly_collapsed",)), (2, ("healthy", "partly_collapsed")), (3, ("healthy",))],
)
def test_few_active_dimensions_are_partly_collapsed_and_half_of_them_either(
    active: int, right: tuple[str, ...]
) -> None:
    assert truth_of(measured(active_units=active)).right == right


def test_a_gain_no_larger_than_seeds_make_is_none() -> None:
    dead = measured(rate=0.01, mutual_information=0.0, **UNUSED | {"gain": 3.0})
    assert truth_of(dead).right == ()
    assert truth_of(dead, seed_error=2.0).right == ("collapsed",)


def test_nothing_measured_is_diverged() -> None:
    assert truth_of(None).right == ("diverged",)


# --- Altered networks, and what is recorded ----------------------------------------------------------------------------

BATCH = make_batch("vectors", [3, 5, 4])


def network(alteration: Alteration) -> SequenceVAE:
    torch.manual_seed(0)
    return altered(SequenceVAE(DESCRIPTIONS["vectors"], SMALL), alteration)


def has_gradient(part: torch.nn.Module) -> bool:
    return any(weight.grad is not None and bool(weight.grad.any()) for weight in part.parameters())


def test_a_fixed_variance_stays_while_the_means_move() -> None:
    output = network("fixed variance")(BATCH)
    assert torch.all(output.posterior_logvar == FIXED_LOGVAR)
    assert output.posterior_mean.std() > 0


def test_no_gradient_reaches_a_dead_encoder_but_its_posterior_learns() -> None:
    dead = network("dead encoder")
    output = dead(BATCH)
    (output.nll_B.sum() + output.posterior_mean.square().sum()).backward()
    assert has_gradient(dead.posterior)
    assert not has_gradient(dead.encoder)


def test_the_output_of_a_decoder_that_is_cut_off_does_not_depend_on_z() -> None:
    z, other = torch.randn(2, 3, SMALL.latent_size)
    deaf, listening = network("z is 0"), network("none")
    assert torch.equal(deaf.nll_given_z(BATCH, z), deaf.nll_given_z(BATCH, other))
    assert not torch.equal(listening.nll_given_z(BATCH, z), listening.nll_given_z(BATCH, other))


def test_a_decoder_that_sees_noise_gets_no_gradient_from_z() -> None:
    z = torch.randn(3, SMALL.latent_size, requires_grad=True)
    network("z is noise").nll_given_z(BATCH, z).sum().backward()
    assert z.grad is not None
    assert not z.grad.any()


def test_a_run_is_recorded_once_with_its_baselines_and_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (zoo_runs, zoo_recording):
        monkeypatch.setattr(module, "STEPS", 6)
    monkeypatch.setattr(zoo_recording, "DEMO_SEQUENCES", 320)
    run = next(one for one in all_runs() if one.treatment == "weight-4" and one.data == "demo-tokens")
    stored = read_json(record_run(run, tmp_path))
    assert [reading.step for reading in record_from(stored).readings] == list(range(1, 7))
    assert stored["measured"]["sequences"] == 32
    assert stored["diverged_at_step"] is None
    assert all(baseline_path(run, tmp_path, seed).exists() for seed in BASELINE_SEEDS)
    assert list((tmp_path / "runs").iterdir()) == []
    assert read_json(record_run(run, tmp_path)) == stored


# --- Replay -----------------------------------------------------------------------------------------------------------


def reading(step: int, rate: float = 1.0, active_units: int | None = 4, use: float | None = 2.0) -> Reading:
    tens = (0.1,) * 10
    error = None if use is None else 0.1
    return Reading(
        *(step, 0, "sequence", 64, rate, tens, active_units, 0.5, 4.2, 0.5, tens, tens, 4.0, 1.0, 50.0), use, error
    )


def record(readings: list[Reading], message: str | None = None, diverged_at_step: int | None = None) -> Record:
    objective = ObjectiveSettings(kl_schedule="constant")
    return Record("made up", 40, objective, tuple(readings), diverged_at_step, message)


class CuriousJudge:
    """A judge that requests decoder use at one step, and whose verdict is always healthy."""

    def __init__(self, requested_at: int) -> None:
        self.requested_at = requested_at
        self.seen: list[tuple[int, float | None]] = []

    def wants_decoder_use(self, reading: Reading) -> bool:
        return reading.step == self.requested_at

    def judge(self, reading: Reading) -> Verdict:
        self.seen.append((reading.step, reading.decoder_use))
        return Verdict("healthy", reading.step, "")

    def diverged(self, step: int, message: str, /) -> Verdict:
        return Verdict("diverged", step, message)


def test_a_throttled_judge_sees_decoder_use_where_it_requests_it_and_nowhere_else() -> None:
    judge = CuriousJudge(requested_at=20)
    replayed = replay(record([reading(step) for step in range(2, 41, 2)]), CADENCES["throttled"], judge)
    assert judge.seen == [(20, 2.0), (40, None)]
    assert replayed.probed == 1


def test_by_default_every_fourth_reading_and_the_last_come_with_decoder_use() -> None:
    readings = due_readings(record([reading(step) for step in range(2, 101, 2)]), CADENCES["2 x as close"])
    assert [one.decoder_use for one in readings] == [None, None, None, 2.0, *[None] * 3, 2.0, None, None]


def test_a_run_that_broke_off_ends_in_the_verdict_on_its_message() -> None:
    replayed = replay(
        record([reading(2), reading(4)], message="NaN", diverged_at_step=5), CADENCES["10 x, closest"], CuriousJudge(0)
    )
    assert [(call.step, call.name) for call in replayed.calls] == [(2, "healthy"), (4, "healthy"), (5, "diverged")]


def test_a_run_that_broke_off_before_its_first_reading_is_called_all_the_same() -> None:
    replayed = replay(record([reading(2)], message="NaN", diverged_at_step=3), CADENCES["throttled"], CuriousJudge(0))
    assert [(call.step, call.name) for call in replayed.calls] == [(3, "diverged")]


def test_every_judge_goes_through_a_record_that_ends_in_nan() -> None:
    broken = [reading(step, math.nan, None, math.nan) for step in range(22, 40, 2)]
    stored = record([*(reading(step) for step in range(2, 21, 2)), *broken], message="NaN", diverged_at_step=21)
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


def outcome(right: tuple[str, ...], *names: str, full_from: int | None = 0) -> Outcome:
    calls = tuple(Call(10 * place, name, "") for place, name in enumerate(names, start=1))
    truth = truth_of(None)._replace(right=right)
    return Outcome("made up", truth, Replayed(calls, probed=1), 100, full_from)


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


def test_any_alarm_in_a_run_that_is_well_is_a_false_alarm() -> None:
    scores = score(
        [
            outcome(("healthy",), "collapsing", "healthy"),
            outcome(("healthy",), "warming_up", "healthy"),
            outcome(("partly_collapsed",), "partly_collapsed"),
            outcome(("healthy", "partly_collapsed"), "cannot_tell"),
        ]
    )
    assert (scores.well, scores.false_alarms, scores.right_kind) == (4, 1, 3)


def test_grey_runs_are_not_scored() -> None:
    scores = score([outcome((), "collapsed"), outcome(("healthy",), "healthy")])
    assert (scores.runs, scores.sick, scores.well, scores.false_alarms) == (1, 0, 1, 0)


def test_collapsing_is_a_right_early_call_of_a_collapse_and_of_nothing_else() -> None:
    assert outcome(("collapsed",), "healthy", "collapsing", "collapsed").first_right == 1
    assert outcome(("decoder_ignores_z",), "collapsing", "decoder_ignores_z").first_right == 1


def test_a_right_call_that_was_taken_back_does_not_count_as_the_first() -> None:
    assert outcome(("collapsed",), "collapsed", "healthy", "collapsed").first_right == 2
    assert outcome(("collapsed",), "collapsed", "healthy").first_right is None


def test_a_run_that_starts_dead_is_timed_from_its_start_and_an_annealed_one_from_its_full_weight() -> None:
    names: tuple[str, ...] = ("healthy", "healthy", "healthy", "collapsed")
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
    assert history(outcome(("healthy",), "warming_up", "warming_up", "healthy")) == "10 warming_up, 30 healthy"


# --- Files ------------------------------------------------------------------------------------------------------------


def run_named(name: str) -> ZooRun:
    return next(one for one in all_runs() if one.name == name)


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    run = run_named("weight-1.demo-tokens.lstm")
    write_record(run, tmp_path, measured(), [reading(2), reading(4, math.nan)])
    back = record_from(read_json(record_path(run, tmp_path)))
    assert back.readings[0] == reading(2)
    assert math.isnan(back.readings[1].rate)
    assert back.objective == ObjectiveSettings(kl_schedule="constant")


def test_the_error_of_seeds_is_pooled_over_the_decoders_of_a_data_set(tmp_path: Path) -> None:
    one, other = (
        run_named("weight-1.demo-tokens.lstm"),
        next(
            one
            for one in all_runs()
            if one.data == "demo-tokens" and one.decoder == "parallel" and one.word_dropout == "0"
        ),
    )
    for run, difference in ((one, 1.0), (other, 7.0)):
        for seed in BASELINE_SEEDS:
            nll = 50.0 + difference * seed
            write_at_once(baseline_path(run, tmp_path, seed), {"nll": [nll - 1, nll + 1]})
    assert seed_errors([one, other], tmp_path)["demo-tokens"] == pytest.approx(5.0)


def test_a_report_scores_what_is_recorded_and_says_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, grey = run_named("weight-1.demo-tokens.lstm"), run_named("weight-1.demo-vectors.transformer")
    readings = [reading(step, rate=0.001, active_units=0, use=0.0) for step in range(20, 1001, 20)]
    write_record(dead, tmp_path, measured(rate=0.01, mutual_information=0.0, **UNUSED), readings)
    write_record(grey, tmp_path, measured(decoder_use=0.4, decoder_use_error=0.1), readings)
    result = report([dead, grey, run_named("weight-2.demo-tokens.weak-transformer")], tmp_path)
    assert (result["recorded"], result["grey"]) == (2, 1)
    assert result["scores"]["tuning"]["KL < 0.01 over 50 steps"]["closest"]["found"] == 1
    printed = capsys.readouterr().out
    assert "2 of 3 runs are recorded" in printed
    assert "decoder use 0.40 ± 0.10" in printed


def write_record(run: ZooRun, directory: Path, truth: Measured, readings: list[Reading]) -> None:
    stored = {
        "name": run.name,
        "total_steps": 1000,
        "objective": {"kl_schedule": "constant"},
        "diverged_at_step": None,
        "said": None,
        "has_finite_weights": True,
        "measured": truth._asdict(),
        "readings": [to_row(one) for one in readings],
    }
    write_at_once(record_path(run, directory), stored)


def test_the_summary_gives_the_span_over_the_cadences_of_the_commands():
    row: dict[str, int | None] = {"runs": 58, "sick": 29, "found": 28, "well": 29, "false_alarms": 1, "right_kind": 56}
    scores = {
        "detector": {
            name: row | {"most_readings_dead_at_start": late, "most_readings_after_annealing": None if late == 8 else 0}
            for name, late in zip(CADENCES, (7, 8, 7, 7, 99, 99, 99, 99), strict=True)
        }
    }
    assert list(summary(scores)[0].values()) == [
        *("detector", "28 of 29", "1 of 29", "56 of 58", "7 to 8", "not all"),
    ]
