"""The zoo: which runs it holds, how networks are altered and recorded, the truth about a run, replay, rival rules and scores."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.detection import zoo_recording
from benchmarks.detection.collapse_zoo import report, shard_of, summary
from benchmarks.detection.zoo_data import GENERATED, SPLITS, write_generated
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
from benchmarks.detection.zoo_runs import (
    ALL_DATA,
    DATA,
    DECODERS,
    FREE_DATA,
    PAIRS,
    TREATMENTS,
    Alteration,
    Treatment,
    ZooRun,
    all_runs,
    common_flags,
    words_of,
)
from benchmarks.detection.zoo_scoring import (
    CADENCES,
    JUDGES,
    Cadence,
    Call,
    Measured,
    Outcome,
    Record,
    Replayed,
    Rule,
    SmallInformation,
    SmallKL,
    Truth,
    as_far_as_can_be_told,
    due_readings,
    has_slept,
    history,
    measured_from,
    record_from,
    replay,
    score,
    silence_of,
    truth_of,
)
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import ObjectiveSettings, TrainingSettings
from seqvae.errors import UsageError
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
    for name, treatment in TREATMENTS.items():
        halves = {one.half for one in all_runs() if one.treatment == name}
        assert halves == {"tuning", "scored"} or treatment.runs == 1


def test_a_run_does_not_depend_on_which_data_sets_exist() -> None:
    assert set(all_runs(FREE_DATA)) <= set(all_runs())


def test_both_halves_hold_about_as_many_runs_of_each_kind_of_treatment() -> None:
    counts = Counter((TREATMENTS[one.treatment].kind, one.half) for one in all_runs())
    for kind in {kind for kind, _ in counts}:
        assert abs(counts[kind, "tuning"] - counts[kind, "scored"]) <= 4


def test_decoders_without_a_latent_are_trained_for_few_pairs() -> None:
    baselines = {one.baseline for one in all_runs()} - {None}
    assert len(baselines) == len(PAIRS) <= 24


def test_what_is_trained_unlike_its_baseline_has_none() -> None:
    for name in ("word-dropout-0.3", "batch-2", "short-60", "waker-5"):
        assert {one.baseline for one in all_runs() if one.treatment == name} == {None}


def test_the_parts_of_a_recording_are_all_runs() -> None:
    runs = all_runs()
    parts = [shard_of(runs, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(one.name for part in parts for one in part) == sorted(one.name for one in runs)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "a/b", "1/"])
def test_a_part_that_does_not_exist_is_refused(shard: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        shard_of(all_runs(), shard)


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


@pytest.mark.parametrize("name", GENERATED)
def test_generated_sets_have_factors_that_steps_depend_on(tmp_path: Path, name: str) -> None:
    folder = write_generated(tmp_path, name)
    assert write_generated(tmp_path, name) == folder
    tables = {split: pq.read_table(folder / f"{split}.parquet") for split in SPLITS}
    assert {split: len(table) for split, table in tables.items()} == SPLITS
    column = "tokens" if "tokens" in tables["train"].column_names else "values"
    first = np.array([np.asarray(steps, dtype=float).mean(axis=0) for steps in tables["train"][column].to_pylist()])
    factors_NF = np.array(tables["train"]["factors"].to_pylist())
    correlations = np.corrcoef(first.reshape(len(first), -1).T, factors_NF.T)[: -factors_NF.shape[1], first.ndim :]
    assert np.abs(correlations).max() > 0.2


# --- Truth ------------------------------------------------------------------------------------------------------------

UNUSED = {"decoder_use": 0.02, "decoder_use_error": 0.02, "gain": 0.0}
"""Changes with which the decoder does not use the latent."""


def measured(**changed: object) -> Measured:
    """Return the numbers of a healthy run of 4 dimensions, with changes."""
    numbers: dict[str, object] = {
        "sequences": 400,
        "scope": "sequence",
        "is_compared": True,
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
        {"rate": 0.25, "mutual_information": 0.22},
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


def test_the_rate_of_a_latent_of_each_step_is_held_to_a_tenth() -> None:
    faint = measured(scope="step", rate=0.1, mutual_information=0.05, **UNUSED)
    assert truth_of(faint).right == ("decoder_ignores_z",)
    assert truth_of(faint._replace(rate=0.02)).right == ("collapsed",)
    assert truth_of(faint._replace(scope="sequence")).right == ("collapsed",)


def test_without_a_decoder_to_compare_with_the_gain_decides_nothing() -> None:
    alone: dict[str, object] = {"is_compared": False, "gain": None, "gain_error": None}
    dead = measured(rate=0.01, mutual_information=0.0, **UNUSED | alone)
    assert truth_of(dead).right == ("collapsed",)
    assert truth_of(measured(**alone)).right == ("healthy",)
    assert truth_of(measured(mean_of_variances=(0.01,) * 4, **alone)).right == ()


DEAD, ALIVE = truth_of(measured(rate=0.01, mutual_information=0.0, **UNUSED)), truth_of(measured())


@pytest.mark.parametrize(
    ("steps", "truth", "right"),
    [
        (60, DEAD, ("cannot_tell", "warming_up")),
        (60, ALIVE, ("cannot_tell", "warming_up", "healthy")),
        (150, DEAD, ("cannot_tell", "warming_up", "collapsed")),
        (300, DEAD, ("collapsed",)),
        (60, truth_of(None), ("diverged",)),
        (60, truth_of(measured(decoder_use=0.3, decoder_use_error=0.05)), ()),
    ],
)
def test_a_short_run_may_be_left_open(steps: int, truth: Truth, right: tuple[str, ...]) -> None:
    assert as_far_as_can_be_told(truth, record([])._replace(total_steps=steps)).right == right


def test_steps_under_the_full_weight_are_counted_over_all_cycles() -> None:
    cyclical = ObjectiveSettings(kl_schedule="cyclical", kl_cycle=0.25, kl_warmup=0.5)
    assert record([])._replace(total_steps=400, objective=cyclical).steps_under_full_weight == pytest.approx(210, abs=8)


def test_a_rate_beyond_all_measure_is_no_latent_any_more_whatever_the_weights() -> None:
    assert truth_of(measured(rate=4e5)).right == ("diverged", "not_variational")
    assert truth_of(measured(rate=4e5, **UNUSED)).right == ("diverged", "not_variational", "decoder_ignores_z")


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
    monkeypatch.setitem(TREATMENTS, "weight-4", TREATMENTS["weight-4"]._replace(steps=6))
    monkeypatch.setattr(Treatment, "is_compared", True)
    monkeypatch.setattr(zoo_recording, "DEMO_SEQUENCES", 320)
    monkeypatch.setattr(zoo_recording, "FAINT_ENOUGH", math.inf)
    short = common_flags("demo-vectors", "wide-parallel", steps=6)
    monkeypatch.setattr(ZooRun, "baseline_words", words_of(short))
    run = ZooRun("weight-4", "demo-vectors", "wide-parallel", "tuning")
    stored = read_json(record_run(run, tmp_path))
    assert [reading.step for reading in record_from(stored).readings] == list(range(1, 7))
    assert stored["measured"]["sequences"] == 32
    assert stored["diverged_at_step"] is None
    assert all((reading.escape_threshold or 0.0) > 0 for reading in record_from(stored).readings)
    assert stored["features"]["final_weight"] == 4
    assert stored["features"]["eigenvalues"][0] > 1
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
    return Record("made up", 1000, objective, tuple(readings), diverged_at_step, message)


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
    replayed = replay(record([reading(step) for step in range(4, 41, 4)]), CADENCES["throttled"], judge)
    assert judge.seen == [(20, 2.0), (40, None)]
    assert replayed.probed == 1


def test_by_default_every_fourth_reading_and_the_last_come_with_decoder_use() -> None:
    readings = due_readings(record([reading(step) for step in range(4, 201, 4)]), CADENCES["default"])
    assert [one.decoder_use for one in readings] == [None, None, None, 2.0, *[None] * 3, 2.0, None, None]


class SuspiciousJudge(CuriousJudge):
    """A judge that asks for the escape threshold at one step."""

    def __init__(self, suspects_at: int) -> None:
        super().__init__(requested_at=0)
        self.suspects_at = suspects_at
        self.thresholds: list[float | None] = []

    def wants_escape_threshold(self, reading: Reading) -> bool:
        return reading.step == self.suspects_at

    def judge(self, reading: Reading) -> Verdict:
        self.thresholds.append(reading.escape_threshold)
        return super().judge(reading)


def test_a_judge_sees_the_threshold_where_it_asks_for_it_and_it_was_recorded() -> None:
    readings = [reading(step)._replace(escape_threshold=0.7) for step in range(10, 41, 10)]
    judge = SuspiciousJudge(suspects_at=30)
    every = Cadence(10, 50, None)
    stored = record(readings)._replace(total_steps=500)
    replayed = replay(stored, every, judge)
    assert judge.thresholds == [None, None, 0.7, None]
    assert judge.seen[2] == (30, None)
    assert replayed.thresholds == 1
    not_recorded = replay(record([reading(30)])._replace(total_steps=500), every, SuspiciousJudge(suspects_at=30))
    assert not_recorded.thresholds == 0


def test_the_detector_asks_for_the_threshold_of_a_silent_latent_and_calls_it_dead_by_it() -> None:
    silent = [
        reading(step, rate=0.02, active_units=0, use=0.0)._replace(
            kl_per_dim=(0.002,) * 10, mutual_information=0.01, escape_threshold=0.5, escape_threshold_error=0.1
        )
        for step in range(20, 1001, 20)
    ]
    stored = record(silent)
    replayed = replay(stored, CADENCES["throttled"], JUDGES["detector"](stored, CADENCES["throttled"]))
    assert replayed.thresholds == 2
    assert "will not come back by itself" in replayed.calls[-1].evidence


def test_a_run_that_broke_off_ends_in_the_verdict_on_its_message() -> None:
    replayed = replay(
        record([reading(4), reading(8)], message="NaN", diverged_at_step=9), CADENCES["5 x, closest"], CuriousJudge(0)
    )
    assert [(call.step, call.name) for call in replayed.calls] == [(4, "healthy"), (8, "healthy"), (9, "diverged")]


def test_a_run_that_broke_off_before_its_first_reading_is_called_all_the_same() -> None:
    replayed = replay(record([reading(2)], message="NaN", diverged_at_step=3), CADENCES["throttled"], CuriousJudge(0))
    assert [(call.step, call.name) for call in replayed.calls] == [(3, "diverged")]


def test_every_judge_goes_through_a_record_that_ends_in_nan() -> None:
    broken = [reading(step, math.nan, None, math.nan) for step in range(220, 401, 20)]
    stored = record([*(reading(step) for step in range(20, 201, 20)), *broken], message="NaN", diverged_at_step=210)
    last = {
        name: replay(stored, CADENCES["closest"], make(stored, CADENCES["closest"])).calls[-1].name
        for name, make in JUDGES.items()
    }
    assert last == {
        "detector": "diverged",
        "KL < 0.01 over 50 steps": "healthy",
        "AU < 10 %": "healthy",
        "MI < 0.1, five in a row": "healthy",
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


def test_the_rule_of_a_small_information_wants_five_readings_in_a_row() -> None:
    is_small = SmallInformation()
    low, high = reading(2)._replace(mutual_information=0.05), reading(2)
    assert [is_small(one) for one in (low, low, high, *[low] * 5)] == [*[False] * 7, True]


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


def test_an_alarm_that_a_short_run_need_not_raise_is_no_false_one() -> None:
    may_tell = ("cannot_tell", "warming_up", "collapsed")
    scores = score([outcome(may_tell, "collapsing", "collapsed"), outcome(may_tell, "cannot_tell", "diverged")])
    assert (scores.sick, scores.false_alarms, scores.false_at_end, scores.right_kind) == (0, 1, 1, 1)


def test_a_false_alarm_that_was_taken_back_is_none_at_the_end() -> None:
    scores = score([outcome(("healthy",), "collapsed", "healthy")])
    assert (scores.false_alarms, scores.false_at_end) == (1, 0)


def test_a_sleeper_that_wakes_must_never_have_been_called_collapsed() -> None:
    patient, hasty, dead = (
        outcome(("healthy",), "cannot_tell", "healthy"),
        outcome(("healthy",), "collapsed", "healthy"),
        outcome(("collapsed",), "collapsed"),
    )
    scores = score([one._replace(slept=True) for one in (patient, hasty, dead)])
    assert (scores.wakers, scores.wakers_called) == (2, 1)


def test_a_latent_slept_where_its_rate_was_small_for_a_while_after_the_beginning() -> None:
    def of(*rates: float) -> Record:
        return record([reading(20 * place, rate=rate) for place, rate in enumerate(rates, start=1)])

    assert has_slept(of(2.0, 2.0, 2.0, 0.1, 0.1, 0.1, 0.1, 2.0))
    assert not has_slept(of(0.1, 0.1, 0.1, 2.0, 0.1, 2.0))


def test_a_silence_is_tabulated_by_threshold_over_weight_and_by_what_became_of_it() -> None:
    def silent(threshold: float, rate: float) -> Reading:
        return reading(20, rate=rate)._replace(kl_weight=2.0, escape_threshold=threshold, escape_threshold_error=0.2)

    stored = record([silent(8.0, 2.0), silent(3.0, 0.1), silent(1.9, 0.1), silent(1.0, 0.1), silent(math.nan, 0.1)])
    dead, woke = outcome(("collapsed",), "collapsed"), outcome(("healthy",), "healthy")._replace(slept=True)
    row = silence_of(stored, dead)
    assert row is not None
    assert row[1:] == (False, 2.0, 3, 0.5, 0.95, 0.5, 1, True)
    assert (silence_of(stored, woke) or row)[1::7] == (True, False)
    assert silence_of(stored, woke._replace(slept=False)) is None
    assert silence_of(record([reading(20, rate=0.1)]), dead) is None


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


def some_tuning_runs(count: int) -> list[ZooRun]:
    return [one for one in all_runs() if one.half == "tuning"][:count]


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    (run,) = some_tuning_runs(1)
    write_record(run, tmp_path, measured(), [reading(2), reading(4, math.nan)])
    back = record_from(read_json(record_path(run, tmp_path)))
    assert back.readings[0] == reading(2)
    assert math.isnan(back.readings[1].rate)
    assert back.objective == ObjectiveSettings(kl_schedule="constant")


def test_the_error_of_seeds_is_pooled_over_the_decoders_of_a_data_set(tmp_path: Path) -> None:
    compared = {one.baseline: one for one in all_runs() if one.data == "demo-tokens" and one.baseline}
    one, other = compared.values()
    for run, difference in ((one, 1.0), (other, 7.0)):
        for seed in BASELINE_SEEDS:
            nll = 50.0 + difference * seed
            write_at_once(baseline_path(run, tmp_path, seed), {"nll": [nll - 1, nll + 1]})
    assert seed_errors([one, other], tmp_path)["demo-tokens"] == pytest.approx(5.0)


def test_a_report_scores_what_is_recorded_and_says_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, grey, missing = some_tuning_runs(3)
    readings = [reading(step, rate=0.001, active_units=0, use=0.0) for step in range(20, 1001, 20)]
    write_record(dead, tmp_path, measured(rate=0.01, mutual_information=0.0, **UNUSED), readings)
    write_record(grey, tmp_path, measured(decoder_use=0.4, decoder_use_error=0.1), readings)
    result = report([dead, grey, missing], tmp_path)
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
        "features": {"is_autoregressive": True},
        "readings": [to_row(one) for one in readings],
    }
    write_at_once(record_path(run, directory), stored)


def test_the_summary_gives_the_span_over_the_cadences_of_the_commands() -> None:
    row = score([outcome(("collapsed",), "collapsed")])._asdict() | {"runs": 58, "sick": 29, "well": 29, "wakers": 3}
    scores = {
        "detector": {
            name: row
            | {"found": 28, "false_alarms": 1, "false_at_end": 0, "right_kind": 56, "wakers_called": 0}
            | {"most_readings_dead_at_start": late, "most_readings_after_annealing": None if late == 8 else 0}
            | {"median_share": late / 100}
            for name, late in zip(CADENCES, (7, 8, 7, 7, 99, 99), strict=True)
        }
    }
    assert list(summary(scores)[0].values()) == [
        *("detector", "28 of 29", "1 of 29", "0", "56 of 58", "0 of 3", "0.07 to 0.08 of the run", "7 to 8", "not all"),
    ]
