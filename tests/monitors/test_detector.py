"""The detector on made-up runs: every verdict, when it comes, what it takes to change it, and what must not end it."""

import json
import math
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seqvae.cli.command_line import parse_command_line
from seqvae.config import monitoring
from seqvae.config.flags import flags_of
from seqvae.config.training import TrainingSettings
from seqvae.monitors.detector import FEWEST_IN_WINDOW, Detector, KLSchedule
from seqvae.monitors.reading import Reading
from seqvae.monitors.rules import OF_SEQUENCES, Thresholds
from seqvae.reports import story
from seqvae.verdicts import VERDICTS, Circumstances, advice_on, describe_change
from tests.support.made_curves import (
    ALWAYS,
    CADENCES,
    DEFAULT,
    LINEAR,
    STEPS,
    THROTTLED,
    Cadence,
    Curve,
    annealed_to_death,
    dead,
    falling,
    healthy,
    ignored,
    interpolated,
    noise,
    offered,
    partly,
    points,
    reading,
    settling,
    watch,
)

at_each_cadence = pytest.mark.parametrize("cadence", CADENCES, ids=str)


# --- The kinds of trouble -----------------------------------------------------------------------------------------------


@at_each_cadence
def test_a_healthy_run_is_called_so_once_and_nothing_else(cadence):
    assert [name for _, name in watch(healthy, cadence).changes] == ["cannot_tell", "healthy"]


@at_each_cadence
def test_no_collapse_is_reported_while_the_kl_weight_rises(cadence):
    watched = watch(dead, cadence, LINEAR)
    assert {verdict.name for step, verdict in watched.verdicts if step <= 190} == {"warming_up"}
    assert watched.last.name == "collapsed"


@at_each_cadence
def test_a_run_dead_from_the_start_is_collapsed(cadence):
    assert [name for _, name in watch(dead, cadence).changes] == ["cannot_tell", "collapsed"]


@pytest.mark.parametrize("cadence", [DEFAULT, THROTTLED], ids=str)
def test_a_run_dead_from_the_start_is_called_within_ten_readings(cadence):
    assert watch(dead, cadence).first("collapsed") <= 10 * cadence.every_n_steps


@pytest.mark.parametrize("cadence", [DEFAULT, THROTTLED], ids=str)
def test_a_run_that_annealing_kills_is_called_within_ten_readings_of_the_full_weight(cadence):
    watched = watch(annealed_to_death, cadence, LINEAR)
    assert watched.first("collapsed") <= 190 + 10 * cadence.every_n_steps
    assert watched.last.name == "collapsed"


@at_each_cadence
def test_a_fall_that_leads_to_nothing_is_collapsing_and_predicts_when_it_will_be_dead(cadence):
    watched = watch(falling, cadence)
    dead_by = {step: verdict.dead_by_step for step, verdict in watched.verdicts if verdict.name == "collapsing"}
    assert min(dead_by) < 400
    assert all(predicted == pytest.approx(476, abs=40) for step, predicted in dead_by.items() if step < 440)
    assert watched.last.name == "collapsed"


@at_each_cadence
def test_a_fall_that_settles_is_no_alarm(cadence):
    assert watch(settling, cadence).alarms == []


@at_each_cadence
def test_a_latent_that_never_had_much_and_loses_some_of_it_is_no_alarm(cadence):
    """Although its line leads to nothing within the run."""

    def curve(step):
        left = math.exp(-step / 2000)
        return reading(step, rate=0.43 * left, information=0.25 * left, use=2.0, use_error=0.1)

    assert watch(curve, cadence, steps=600).alarms == []


@at_each_cadence
def test_a_rate_that_is_paid_and_not_used_is_ignored_by_the_decoder(cadence):
    watched = watch(ignored, cadence)
    assert [name for _, name in watched.changes] == ["cannot_tell", "decoder_ignores_z"]


@at_each_cadence
def test_a_latent_of_which_most_dimensions_are_dead_is_partly_collapsed(cadence):
    watched = watch(partly, cadence)
    assert [name for _, name in watched.changes] == ["cannot_tell", "partly_collapsed"]
    assert watched.last.advice[0].startswith("--latent_size 4 ")


@pytest.mark.parametrize("curve", [dead, ignored, partly, points], ids=lambda curve: curve.__name__)
@pytest.mark.parametrize("steps", [10, 12, 50, 99, 200])
def test_nothing_is_held_against_a_model_of_fewer_than_a_hundred_steps(curve, steps):
    watched = watch(curve, Cadence(1, 1), KLSchedule(steps, lambda step: 1.0), steps=steps)
    grave = [step for step, verdict in watched.verdicts if VERDICTS[verdict.name].tone in ("fair", "bad")]
    assert bool(grave) == (steps == 200)
    assert min(grave, default=100) >= 100


def test_steps_under_a_small_rising_kl_weight_do_not_count_as_training():
    """Less than half of the weight; more of it can only make a silent latent worse."""

    def rising(step: int) -> float:
        return min(1.0, step / 200)

    watched = watch(
        lambda step: dead(step)._replace(kl_weight=rising(step)), Cadence(1, 1), KLSchedule(400, rising), steps=400
    )
    assert watched.first("collapsed") == 99 + 100
    paid = watch(
        lambda step: ignored(step)._replace(kl_weight=rising(step)), Cadence(1, 1), KLSchedule(400, rising), steps=400
    )
    evidence = next(verdict.evidence for step, verdict in paid.verdicts if step == 250)
    assert evidence == (
        "perhaps decoder ignores z, but trained for only 60 of the 100 steps under the full KL weight that it takes to tell"
    )


def test_a_run_that_diverges_is_called_so_however_short():
    assert (
        watch(lambda step: reading(step, rate=math.nan, information=math.nan), Cadence(1, 1), steps=5).last.name
        == "diverged"
    )


@at_each_cadence
def test_posteriors_that_are_next_to_points_are_not_variational(cadence):
    assert [name for _, name in watch(points, cadence).changes] == ["cannot_tell", "not_variational"]


@pytest.mark.parametrize(
    "schedule",
    [KLSchedule(800, lambda step: float(step >= 400)), KLSchedule(800, None, is_steered=True)],
    ids=["constant", "steered"],
)
def test_the_narrow_posteriors_of_an_autoencoder_that_is_pretrained_are_no_alarm(schedule):
    seen = watch(lambda step: points(step)._replace(kl_weight=0.0), schedule=schedule, steps=400)
    assert {verdict.name for _, verdict in seen.verdicts} <= {"cannot_tell", "warming_up"}
    assert watch(points, schedule=KLSchedule(800, None, is_steered=True), steps=400).last.name == "not_variational"


def narrow(weight: float, variance: float, use: float, step_rate: float = 30.0) -> Curve:
    return lambda step: reading(
        step, rate=step_rate, information=6.0, use=use, use_error=1.0, variance=variance, weight=weight
    )


@pytest.mark.parametrize(
    ("weight", "variance", "use", "sees_inputs", "expected"),
    [
        # A decoder that sees nothing else gains about half of what another sequence's z costs.
        *((0.05, 0.01, 100.0, False, "healthy"), (0.05, 0.01, 100.0, None, "healthy")),
        (0.05, 0.01, 40.0, False, "not_variational"),
        # One that sees earlier steps is misled by it: 5.7 times the rate, and 48 nats worse than without a latent.
        *((0.005, 0.001, 170.0, True, "not_variational"), (0.3, 0.012, 240.0, True, "not_variational")),
        # 11 times the rate: 3.6 nats better.
        (0.2, 0.015, 335.0, True, "healthy"),
        # Narrow under any weight up to 1.
        *((0.3, 0.004, 100.0, True, "healthy"), (0.3, 0.004, 10.0, True, "not_variational")),
    ],
)
def test_a_precise_latent_is_told_from_one_that_a_small_weight_made_narrow(
    weight, variance, use, sees_inputs, expected
):
    assert watch(narrow(weight, variance, use), sees_inputs=sees_inputs).last.name == expected


def test_the_use_of_a_sequence_is_compared_with_the_rate_of_all_its_steps():
    def curve(step):
        one = narrow(0.05, 0.01, use=100.0, step_rate=7.0)(step)
        return one._replace(scope="step", decoder_use_sequences=100, decoder_use_steps=1000)

    assert watch(curve, sees_inputs=False).last.name == "not_variational"


def test_a_rate_that_free_bits_hold_near_the_line_is_paid():
    """As 0.2 in each of eight dimensions did, between 0.46 and 0.62: called at 50 % of the run."""

    def curve(step):
        return reading(step, rate=0.54 + 0.08 * noise(step), information=0.25, use=0.0, use_error=0.001)

    assert watch(curve).first("decoder_ignores_z") <= 300


def test_a_rate_that_fell_at_first_and_stays_does_not_fall():
    """A decoder that is cut off, whose free bits hold the rate that the beginning left."""
    rate = interpolated([(0, 0.9), (120, 0.55), (1000, 0.55)])
    watched = watch(lambda step: reading(step, rate=rate(step), information=0.1, use=0.0, use_error=0.1))
    assert watched.first("decoder_ignores_z") <= 320


def test_a_small_rate_is_paid_where_the_use_is_none_beyond_doubt():
    def held(use_error):
        return watch(lambda step: reading(step, rate=0.45, information=0.25, use=0.0, use_error=use_error)).last.name

    assert (held(0.001), held(0.2)) == ("decoder_ignores_z", "cannot_tell")


def test_the_first_reading_that_could_be_decided_by_decoder_use_asks_for_it():
    watched = watch(lambda step: ignored(step), Cadence(10, None))
    assert watched.probed[0] == 30


@at_each_cadence
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_run_that_diverges_is_called_at_the_second_reading_of_it(cadence, broken):
    def curve(step):
        return healthy(step) if step < 300 else reading(step, rate=broken, information=math.nan, use=None)

    at = [step for step in range(0, STEPS + 1, cadence.every_n_steps) if step >= 300]
    assert watch(curve, cadence).changes[-1] == (at[1], "diverged")


def test_a_run_that_ends_in_nan_between_two_readings_has_diverged():
    detector = Detector()
    said = detector.diverged(70, "the loss is nan")
    assert (said.name, said.since_step, said.evidence) == ("diverged", 70, "the loss is nan")


# --- What cannot be judged, and why--------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "numbers"),
    [
        ("too few posteriors (7): rate 5.00", {"rate": 5.0, "posteriors": 7, "use": 9.0}),
        ("neither clearly there nor gone: ", {"rate": 2.0, "information": 0.4, "use": 0.3}),
        ("a small rate, and not used: ", {"rate": 0.4, "information": 0.3, "use": 0.0}),
        ("almost no information, and yet it is used: ", {"rate": 0.1, "use": 2.0}),
        ("there were no posteriors to read", {"rate": math.nan, "information": math.nan, "posteriors": 0}),
        ("the mutual information is beyond what can be computed", {"rate": 400.0, "information": math.nan}),
    ],
)
def test_what_cannot_be_judged_has_its_reason(why, numbers):
    watched = watch(lambda step: reading(step, **numbers))
    assert {verdict.name for _, verdict in watched.verdicts} == {"cannot_tell"}
    assert watched.last.evidence.startswith(why)


def test_a_faint_dimension_that_stands_out_is_waited_for_but_not_for_ever():
    watched = watch(lambda step: reading(step, rate=0.1, use=0.0, largest=0.08))
    before = [verdict for step, verdict in watched.verdicts if step <= 150]
    assert {verdict.name for verdict in before} == {"cannot_tell"}
    assert before[-1].evidence.startswith("faint, but one dimension stands out: ")
    assert watched.last.name == "collapsed"


def test_the_beginning_of_a_run_and_of_its_full_weight_cannot_be_judged():
    run = [verdict.evidence for _, verdict in watch(dead, LONG_RUN).verdicts[:4]]
    assert run[:2] == ["the run has only begun: step 10 of 1,000", "the run has only begun: step 20 of 1,000"]
    first = watch(dead, LONG_RUN, KLSchedule()).verdicts[0][1]
    assert first.evidence == "the run has only begun: step 10"
    sixth = watch(dead, LONG_RUN, KLSchedule()).verdicts[4][1]
    assert sixth.evidence == (
        "perhaps collapsed, but trained for only 50 of the 100 steps under the full KL weight that it takes to tell"
    )
    later = watch(dead, LONG_RUN, KLSchedule()).verdicts[10][1]
    assert later.evidence == "perhaps collapsed, but not for long enough (since step 50)"
    assert Detector().verdict.evidence == "there is no reading yet"


@pytest.mark.parametrize(
    ("why", "shape"),
    [
        (
            "faint, but it grows",
            lambda step: reading(step, rate=0.06 * math.exp(step / 110), use=0.0, information=0.05),
        ),
        (
            "not used, and the rate falls",
            lambda step: reading(step, rate=8 * math.exp(-step / 200), information=0.1, use=0.0),
        ),
        (
            "not used so far, but the information grows",
            lambda step: reading(step, rate=6.0, information=0.06 * math.exp(step / 30), use=0.0),
        ),
    ],
)
def test_what_moves_is_not_judged_by_where_it_stands(why, shape):
    evidences = [verdict.evidence for _, verdict in watch(shape, Cadence(10, 1)).verdicts]
    assert any(evidence.startswith(why) for evidence in evidences)


# --- Changing one's mind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cadence", [Cadence(2, 1), DEFAULT, THROTTLED], ids=str)
@pytest.mark.parametrize("outlier", [dead, ignored, points, partly], ids=lambda curve: curve.__name__)
def test_an_outlier_changes_nothing(cadence, outlier):
    odd = 600 - 600 % cadence.every_n_steps
    watched = watch(lambda step: outlier(step) if step == odd else healthy(step), cadence)
    assert [name for _, name in watched.changes] == ["cannot_tell", "healthy"]


@at_each_cadence
def test_noise_around_the_line_of_partly_collapsed_does_not_flicker(cadence):
    """Seven, eight or nine of sixteen dimensions: partly collapsed begins above one half and ends below 0.4."""
    watched = watch(lambda step: reading(step, rate=4.0, use=6.0, active=8 + round(1.4 * noise(step))), cadence)
    assert len(watched.changes) <= 3


def test_a_partly_collapsed_latent_has_to_come_back_clearly():
    def curve(step):
        return reading(step, rate=4.0, use=6.0, active=6 if step <= 300 else 9 if step <= 600 else 11)

    assert watch(curve, Cadence(10, 1)).changes[1:] == [(100, "partly_collapsed"), (630, "healthy")]


@at_each_cadence
def test_noise_around_the_line_of_clear_use_does_not_flicker(cadence):
    """Answers cross it hundreds of times."""
    watched = watch(
        lambda step: reading(step, rate=2.0, information=0.4, use=0.5 + 0.2 * noise(step), use_error=0.01), cadence
    )
    assert len(watched.changes) <= 4


@at_each_cadence
def test_a_run_that_falls_silent_and_wakes_up_again_is_not_called_collapsed(cadence):
    """Rate 3 at 10 % of the run, 0.08 at 14 %, 2 at 20 %: the decoder learns the simplest things meanwhile."""
    alive = interpolated([(0, 3.0), (100, 3.0), (140, 0.08), (160, 0.08), (200, 2.0), (1000, 5.0)])
    watched = watch(lambda step: reading(step, rate=alive(step), use=2 * alive(step)), cadence)
    assert watched.alarms == [] or {name for _, name in watched.alarms} == {"collapsing"}
    assert watched.last.name == "healthy"


@at_each_cadence
def test_a_run_that_falls_silent_for_good_is_called_within_a_fifth_of_the_run(cadence):
    """Within an eighth, where the decoder is probed regularly: otherwise its last use is that of better days."""
    alive = interpolated([(0, 3.0), (100, 3.0), (140, 0.08), (1000, 0.08)])
    watched = watch(lambda step: reading(step, rate=alive(step), use=alive(step) - 0.08), cadence)
    assert 140 < watched.first("collapsed") <= (340 if cadence.probe_every_n_readings is None else 260)
    assert watched.last.name == "collapsed"


# --- The same run, the same verdicts ------------------------------------------------------------------------------------


KINDS = [healthy, dead, falling, settling, ignored, partly, points, annealed_to_death]


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    cadence=st.sampled_from([DEFAULT, THROTTLED, Cadence(20, 1)]),
    schedule=st.sampled_from([ALWAYS, LINEAR, KLSchedule(), KLSchedule(STEPS, is_steered=True)]),
    breaks=st.sets(st.integers(0, 99), max_size=6),
)
@example(kinds=[annealed_to_death], cadence=DEFAULT, schedule=LINEAR, breaks=set(range(100)))
@example(kinds=[healthy, ignored, dead], cadence=THROTTLED, schedule=ALWAYS, breaks=set(range(100)))
def test_a_state_that_went_through_json_changes_no_verdict(kinds, cadence, schedule, breaks):
    def curve(step):
        return kinds[min(len(kinds) - 1, step * len(kinds) // STEPS)](step)

    whole = watch(curve, cadence, schedule)
    broken = Detector(None, cadence.window, schedule, advises_flags=True)
    verdicts = []
    for number, one in enumerate(offered(curve, cadence)):
        if number in breaks:
            state = json.loads(json.dumps(broken.state_dict()))
            broken = Detector(None, cadence.window, schedule, advises_flags=True)
            broken.load_state_dict(state)
        verdicts.append((one.step, broken.judge(curve(one.step) if broken.wants_decoder_use(one) else one)))
    assert verdicts == whole.verdicts


def test_a_step_that_is_read_again_takes_the_place_of_its_reading():
    plain, repeated = Detector(schedule=ALWAYS), Detector(schedule=ALWAYS)
    for step in range(10, 310, 10):
        plain.judge(healthy(step))
        repeated.judge(healthy(step))
    for step in range(250, 310, 10):
        repeated.judge(healthy(step))
    assert repeated.state_dict()["points"] == plain.state_dict()["points"]
    assert repeated.verdict == plain.verdict


# --- Edges ---------------------------------------------------------------------------------------------------------------


@at_each_cadence
def test_a_kl_of_exactly_zero_is_collapsed(cadence):
    watched = watch(lambda step: reading(step, rate=0.0, use=0.0, use_error=0.0, active=0), cadence)
    assert [name for _, name in watched.changes] == ["cannot_tell", "collapsed"]


@at_each_cadence
def test_of_single_posteriors_only_a_rate_that_is_gone_can_be_judged(cadence):
    def single(rate):
        return lambda step: reading(step, rate=rate, information=math.nan, posteriors=1, active=0, use=None)

    assert {verdict.name for _, verdict in watch(single(5.0), cadence).verdicts} == {"cannot_tell"}
    watched = watch(single(0.01), cadence)
    assert watched.last.name == "collapsed"
    assert "nan" not in watched.last.evidence
    assert "mutual_information" not in watched.last.numbers


def test_a_ring_that_fills_up_from_one_sequence_is_judged_once_it_holds_enough():
    """One sequence a step, a reading at each: the first has no information, and trends do without it."""
    fell = interpolated([(0, 6.0), (60, 1.0), (200, 0.8)])
    watched = watch(
        lambda step: reading(
            step,
            rate=fell(step),
            information=math.nan if step == 1 else 0.9 * fell(step),
            posteriors=step // 9,
            use=3.0,
        ),
        Cadence(1, 1),
        KLSchedule(),
        steps=120,
    )
    assert watched.verdicts[62][1].evidence.startswith("too few posteriors (7)")
    assert watched.last.name == "healthy"


@pytest.mark.parametrize(
    ("rate", "use", "expected"), [(2.0, 3.0, "healthy"), (0.01, 0.0, "collapsed"), (2.0, 0.0, "decoder_ignores_z")]
)
def test_a_single_latent_dimension_is_judged_like_many(rate, use, expected):
    active = int(rate > 1)
    information = None if use else 0.05
    watched = watch(
        lambda step: reading(step, rate=rate, information=information, use=use, dimensions=1, active=active)
    )
    assert watched.last.name == expected


def test_four_thousand_dead_dimensions_are_dead_although_their_rest_adds_up():
    watched = watch(
        lambda step: reading(step, rate=4.1, information=0.02, use=0.0, dimensions=4096, active=0, posteriors=256)
    )
    assert [name for _, name in watched.changes] == ["cannot_tell", "collapsed"]


def test_nan_in_one_dimension_is_diverged():
    broken = reading(40, rate=math.nan, information=math.nan, use=None)._replace(
        kl_per_dim=(1.0, math.nan, 0.5), variance_of_means=(1.0, math.nan, 1.0), mean_of_variances=(0.5, math.nan, 0.5)
    )
    assert watch(lambda step: broken._replace(step=step)).last.name == "diverged"


@pytest.mark.parametrize("use", [math.nan, math.inf, 3.0])
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_answer_without_a_finite_error_is_none(use, error):
    """As of a single sequence, or of a decoder that overflows."""
    watched = watch(lambda step: reading(step, rate=4.0, information=0.05, use=use, use_error=error))
    assert {verdict.name for _, verdict in watched.verdicts} == {"cannot_tell"}
    assert "decoder use" not in watched.last.evidence


def test_a_decoder_that_cannot_be_probed_is_never_judged_to_ignore_z():
    watched = watch(ignored, can_probe=False)
    assert (watched.probed, {verdict.name for _, verdict in watched.verdicts}) == ([], {"cannot_tell"})


@pytest.mark.parametrize(("curve", "expected"), [(healthy, "healthy"), (dead, "collapsed"), (falling, "collapsed")])
def test_all_other_verdicts_come_without_probes(curve, expected):
    assert watch(curve, can_probe=False).last.name == expected


@pytest.mark.parametrize(
    ("use", "use_error", "expected"),
    [(0.3, 0.05, "healthy"), (0.15, 0.05, "decoder_ignores_z"), (0.44, 0.18, "healthy"), (9.0, 5.0, "healthy")],
)
def test_clear_information_is_enough_unless_the_decoder_is_found_not_to_use_it(use, use_error, expected):
    """A use that may be half a nat, by two errors, is not found to be none."""
    watched = watch(lambda step: reading(step, rate=3.0, information=2.0, use=use, use_error=use_error))
    assert watched.last.name == expected


@pytest.mark.parametrize(
    ("use", "use_error", "wins", "sequences", "expected"),
    [
        (1.3, 1.6, 0.51, 128, "decoder_ignores_z"),
        (1.3, 1.6, 0.51, 32, "healthy"),
        (1.3, 1.6, 0.8, 128, "healthy"),
        (3.0, 1.6, 0.8, 128, "healthy"),
        (0.1, 0.05, 0.8, 128, "decoder_ignores_z"),
    ],
)
def test_where_a_few_sequences_make_the_error_large_the_ranks_of_many_decide(use, use_error, wins, sequences, expected):
    watched = watch(
        lambda step: reading(step, rate=3.0, information=2.0, use=use, use_error=use_error)._replace(
            decoder_use_wins=wins, decoder_use_sequences=sequences
        )
    )
    assert watched.last.name == expected
    assert watched.last.evidence.startswith("the latent carries something and") == (use > 1 and wins == 0.8)


def test_a_close_look_outweighs_quick_ones_that_decide_nothing_for_a_while():
    """And a closer one is asked for only while it is open, and not at each reading."""
    detector, looks, names = Detector(schedule=ALWAYS), [], []
    for step in range(10, 1000, 10):
        quick = reading(step, rate=3.0, information=2.0, use=0.04, use_error=0.3)._replace(decoder_use_sequences=32)
        closely = detector.wants_closer_look(quick)
        if closely:
            looks.append(step)
            quick = quick._replace(decoder_use_error=0.1, decoder_use_sequences=128)
        names.append(detector.judge(quick, looked_closely=closely).name)
    assert set(names) == {"cannot_tell", "decoder_ignores_z"}
    assert len(looks) <= 99 / 4
    assert names[-1] == "decoder_ignores_z"


def test_evidence_claims_no_use_of_a_latent_that_was_not_probed():
    assert "whether the decoder uses it" in watch(healthy, can_probe=False).last.evidence
    assert "the decoder uses it" in watch(healthy).last.evidence


@pytest.mark.parametrize(("rate", "expected"), [(0.2, "healthy"), (0.002, "collapsed")])
def test_steps_have_lower_lines_than_sequences(rate, expected):
    watched = watch(lambda step: reading(step, rate=rate, use=50 * rate - 0.1, scope="step"))
    assert watched.last.name == expected


def test_thresholds_of_ones_own_are_in_force():
    detector = Detector(Thresholds(faint_rate=0.001, faint_information=0.001, clear_use=0.05), schedule=ALWAYS)
    for step in range(10, 500, 10):
        detector.judge(reading(step, rate=0.2, use=0.2, use_error=0.01))
    assert detector.verdict.name == "healthy"


def test_numbers_that_stand_in_two_layers_are_the_same():
    assert monitoring.FEWEST_IN_WINDOW == FEWEST_IN_WINDOW
    assert OF_SEQUENCES.faint_rate == story.FAINT_RATE


@pytest.mark.parametrize("lowest", [0.0, -1.0, math.nan])
def test_a_threshold_that_is_no_positive_number_is_refused(lowest):
    with pytest.raises(ValueError, match=r"^faint_rate must be above 0, got "):
        Thresholds(faint_rate=lowest)


ODD = st.one_of(st.floats(0, 30), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e-300, 1e300, -0.001]))


@st.composite
def odd_readings(draw) -> Reading:
    dimensions = draw(st.integers(0, 3))
    many = st.tuples(*[ODD] * dimensions)
    return Reading(
        step=draw(st.integers(0, 60)),
        epoch=0,
        scope=draw(st.sampled_from(["sequence", "step"])),
        posteriors=draw(st.sampled_from([0, 1, 8, 1024])),
        rate=draw(ODD),
        kl_per_dim=draw(many),
        active_units=None,
        mutual_information=draw(ODD),
        mutual_information_cap=1.0,
        aggregate_kl=math.nan,
        variance_of_means=draw(many),
        mean_of_variances=draw(many),
        effective_dimensions=1.0,
        kl_weight=draw(st.none() | ODD),
        decoder_use=draw(st.none() | ODD),
        decoder_use_error=draw(st.none() | ODD),
    )


@settings(max_examples=100, deadline=None)
@given(
    readings=st.lists(odd_readings(), min_size=1, max_size=20),
    total_steps=st.sampled_from([None, 0, 1, 60]),
    weight_at=st.sampled_from([None, lambda step: 0.0, lambda step: step / 7, lambda step: math.inf]),
    is_steered=st.booleans(),
    window=st.sampled_from([1, FEWEST_IN_WINDOW, 50]),
    in_order=st.booleans(),
)
def test_no_reading_ends_a_run(readings, total_steps, weight_at, is_steered, window, in_order):
    """With steps that repeat or go back, gaps, and numbers that no run should have."""
    readings = sorted(readings, key=lambda one: one.step) if in_order else readings
    detector = Detector(None, window, KLSchedule(total_steps, weight_at, is_steered))
    for one in readings:
        detector.wants_decoder_use(one)
        verdict = detector.judge(one)
        assert verdict.evidence
        assert json.dumps(detector.state_dict())


# --- Asking the decoder -------------------------------------------------------------------------------------------------


def test_a_long_healthy_run_is_probed_once_in_ten_readings():
    watched = watch(healthy, Cadence(2, None), KLSchedule(2000), steps=2000)
    later = [step for step in watched.probed if step > watched.first("healthy")]
    readings = (2000 - watched.first("healthy")) // 2
    assert readings / 11 <= len(later) <= readings / 10


@pytest.mark.parametrize("curve", KINDS, ids=lambda curve: curve.__name__)
@pytest.mark.parametrize("every_n_steps", [2, 4, 10, 20])
def test_no_verdict_on_the_decoder_comes_without_a_fresh_answer(curve, every_n_steps):
    watched = watch(curve, Cadence(every_n_steps, None), LINEAR)
    settled = ("healthy", "collapsed", "decoder_ignores_z", "partly_collapsed")
    assert {step for step, name in watched.changes if name in settled} <= set(watched.probed)


def test_there_is_no_probe_while_its_result_would_change_nothing():
    warming = watch(dead, Cadence(10, None), LINEAR)
    assert min(warming.probed) == 190  # where the weight that counts has lasted a hundred steps
    assert watch(lambda step: reading(step, rate=math.nan, information=math.nan), Cadence(10, None)).probed == []


# --- What is known of the KL weight -------------------------------------------------------------------------------------


LONG_RUN = Cadence(10, 1)


def cycles(step: int) -> float:
    return min(1.0, step % 250 / 125)


@pytest.mark.parametrize(
    ("name", "schedule", "weight_at", "expected"),
    [
        ("known", LINEAR, LINEAR.weight_at, [(10, "warming_up"), (190, "collapsed")]),
        ("known, but not returned", LINEAR, None, [(10, "warming_up"), (190, "collapsed")]),
        (
            "known cycles",
            KLSchedule(STEPS, cycles),
            cycles,
            [(10, "warming_up"), (320, "collapsed")],
        ),
    ],
)
def test_a_known_weight_is_waited_for_until_it_can_only_get_worse(name, schedule, weight_at, expected):
    """From half of a weight that rises for good, or once a silence has outlasted a fall of it."""

    def curve(step):
        return dead(step)._replace(kl_weight=weight_at and weight_at(step))

    assert watch(curve, LONG_RUN, schedule).changes == expected


def test_a_weight_that_is_returned_but_not_known_beforehand_is_waited_for():
    watched = watch(lambda step: dead(step)._replace(kl_weight=min(1.0, step / 200)), LONG_RUN, KLSchedule(STEPS))
    assert (10, "warming_up") in watched.changes or (20, "warming_up") in watched.changes
    assert 100 + 80 < watched.first("collapsed") <= 200 + 5 * 10 + 10 * 10


@pytest.mark.parametrize("schedule", [KLSchedule(STEPS), KLSchedule()], ids=["length known", "length unknown"])
def test_a_weight_of_which_nothing_is_known_counts_as_full(schedule):
    watched = watch(lambda step: dead(step)._replace(kl_weight=None), LONG_RUN, schedule)
    assert watched.first("collapsed") <= 140


def test_a_verdict_that_no_reading_upholds_ends():
    """Healthy for 300 steps, and then the rate goes up and down across the line to faint, with nothing used."""

    def torn(step):
        return (
            healthy(step) if step <= 300 else reading(step, rate=0.25 if step % 40 else 0.45, information=0.05, use=0.0)
        )

    watched = watch(torn)
    assert watched.verdicts[14][1].name == "healthy"
    assert watched.last.name != "healthy"


def test_a_run_of_unknown_length_is_not_called_dead_in_its_first_steps():
    watched = watch(dead, Cadence(1, 1), KLSchedule())
    assert watched.first("collapsed") >= 50 + 80


def test_a_slow_rise_of_an_unknown_weight_is_waited_for():
    def rising(step):
        return dead(step)._replace(kl_weight=step / 100_000)

    watched = watch(rising, Cadence(20, 4), KLSchedule(100_000), steps=40_000)
    assert {verdict.name for _, verdict in watched.verdicts[6:]} == {"warming_up"}


def test_a_decoder_that_does_worse_with_its_own_latent_does_not_ignore_it():
    watched = watch(lambda step: reading(step, rate=2.0, information=0.3, use=-3.0, use_error=0.5))
    assert {verdict.name for _, verdict in watched.verdicts} == {"cannot_tell"}


def test_a_steered_weight_is_judged_at_once_and_not_advised_again():
    watched = watch(lambda step: dead(step)._replace(kl_weight=0.01), LONG_RUN, KLSchedule(STEPS, is_steered=True))
    assert watched.first("collapsed") <= 120
    assert not any("--target_kl" in line or "--kl_schedule" in line for line in watched.last.advice)


def test_a_schedule_is_evaluated_only_when_a_run_starts():
    evaluated = []

    def weight_at(step):
        evaluated.append(step)
        return 1.0

    detector = Detector(schedule=KLSchedule(STEPS, weight_at))
    before = len(evaluated)
    for step in range(10, STEPS, 10):
        detector.judge(dead(step))
    assert len(evaluated) == before


@pytest.mark.parametrize("total_steps", [None, 0, 1])
def test_a_run_of_no_known_length_is_judged_by_its_readings(total_steps):
    watched = watch(dead, LONG_RUN, KLSchedule(total_steps, lambda step: 1.0))
    assert watched.last.name == "collapsed"


# --- Advice ---------------------------------------------------------------------------------------------------------------


SITUATIONS: list[dict[str, Any]] = [
    {"has_been_healthy": healthy, "is_steered": steered, "is_cyclical": cyclical, "kl_weight": weight}
    for healthy in (False, True)
    for steered in (False, True)
    for cyclical in (False, True)
    for weight in (None, 0.2, 1.0, 30.0)
]
WITH_A_VALUE = re.compile(r"^(--\w+ [\w.]+)(?: \(|$)")


@pytest.mark.parametrize("name", VERDICTS)
def test_advice_names_flags_that_the_training_commands_have(name):
    known = flags_of(TrainingSettings)
    lines = {line for situation in SITUATIONS for line in advice_on(name, **situation, active=4)}
    assert {flag for line in lines for flag in re.findall(r"--(\w+)", line)} <= known.keys()
    for line in lines:
        if (words := WITH_A_VALUE.match(line)) and "--init_from" not in line:
            parse_command_line(TrainingSettings, words[1].split(), prog="test", description="")


@pytest.mark.parametrize("name", VERDICTS)
def test_advice_for_other_modules_names_no_flag_and_covers_the_same_remedies(name):
    for situation in SITUATIONS:
        flags, words = (advice_on(name, **situation, active=4, as_flags=as_flags) for as_flags in (True, False))
        assert len(words) == len(flags)
        assert not any("--" in line or "{" in line for line in words)


@pytest.mark.parametrize("name", [name for name, kind in VERDICTS.items() if kind.is_alarm])
def test_every_alarm_comes_with_advice(name):
    assert all(advice_on(name, **situation, active=4) for situation in SITUATIONS)


def test_advice_names_nothing_that_is_in_force_or_has_no_say():
    def flags(name, **situation):
        return re.findall(r"--\w+", " ".join(advice_on(name, **situation, active=4)))

    assert flags("collapsed", is_steered=True) == ["--free_bits"]
    assert flags("collapsed", is_cyclical=True) == ["--free_bits", "--target_kl", "--beta"]
    assert flags("collapsed", kl_weight=0.1) == ["--free_bits", "--target_kl"]
    assert flags("collapsed", circumstances=Circumstances(free_bits=0.25)) == ["--target_kl", "--beta"]
    assert flags("not_variational", kl_weight=0.01) == ["--beta", "--target_kl"]
    assert flags("not_variational", kl_weight=1.0) == ["--target_kl"]
    assert flags("not_variational", is_cyclical=True) == ["--beta", "--kl_schedule", "--target_kl"]


def test_a_floor_is_advised_that_is_as_high_for_a_latent_of_any_size_and_a_fifth_for_one_of_each_step():
    """0.25 in each dimension made 12 nats of one."""
    (small, large, step) = (
        advice_on("collapsed", active=0, **latent)[0]
        for latent in ({"dimensions": 2}, {"dimensions": 64}, {"dimensions": 4, "scope": "step"})
    )
    assert small.startswith("--free_bits 0.75 (a floor of 1.5 nats in all")
    assert large.startswith("--free_bits 0.023 ")
    assert step.startswith("--free_bits 0.075 (a floor of 0.3 nats for each step")


@pytest.mark.parametrize(
    ("kl_weight", "expected"),
    [
        (1.0, ["--free_bits", "--target_kl", "--beta", "--kl_schedule"]),
        (3.0, ["--beta", "--free_bits", "--target_kl", "--beta", "--word_dropout", "--depth", "--width", "--decoder"]),
    ],
    ids=["another encoder could live", "no encoder could"],
)
def test_advice_follows_the_escape_thresholds(kl_weight, expected):
    lines = advice_on("collapsed", active=0, kl_weight=kl_weight, threshold=0.5, ideal_threshold=2.0)
    assert re.findall(r"--\w+", " ".join(lines)) == expected
    assert any(line.startswith("--beta 0.27 (0.3 nats, by the escape threshold") for line in lines)


def test_a_warm_up_is_not_advised_where_the_weight_rises():
    between: dict[str, Any] = {"active": 0, "kl_weight": 1.0, "threshold": 0.5, "ideal_threshold": 2.0}
    assert any("--kl_schedule" in line for line in advice_on("collapsed", **between))
    assert not any("--kl_schedule" in line for line in advice_on("collapsed", has_warm_up=True, **between))


def test_a_sleeper_is_left_alone_and_only_a_heavier_weight_is_advised_against():
    assert advice_on("asleep", active=0, kl_weight=1.0, threshold=3.0) == ("waiting (it can come to life by itself)",)
    assert len(advice_on("asleep", active=0, kl_weight=1.0, threshold=1.5)) == 2


def test_what_is_not_in_force_is_not_blamed_and_what_a_decoder_does_not_see_is_not_dropped():
    def last(**circumstances):
        detector = Detector(schedule=ALWAYS, advises_flags=True, circumstances=Circumstances(**circumstances))
        for step in range(10, 1000, 10):
            detector.judge(ignored(step))
        assert detector.verdict.name == "decoder_ignores_z"
        return detector.verdict

    held = last(free_bits=0.25)
    assert held.evidence.startswith(
        "the rate is paid and not used: free bits of 0.25 nats in each dimension hold it up"
    )
    assert "normalised" not in held.evidence
    labels = last(has_label_loss=True, sees_inputs=False)
    assert "the loss on labels holds it up" in labels.evidence
    assert labels.advice[0].startswith("--label_weight 0")
    assert not any("--word_dropout" in line for line in labels.advice)
    assert "has not come to listen" in last().evidence


def test_a_rescue_is_offered_first_where_the_commands_have_one():
    offered = Circumstances(offers_rescue=True)
    for name in ("collapsing", "collapsed", "decoder_ignores_z"):
        assert advice_on(name, active=0, circumstances=offered)[0].startswith("--on_collapse rescue ")
        assert not any("rescue" in line for line in advice_on(name, active=0))
        assert all(advice_on(name, active=0, circumstances=offered, as_flags=False))


def test_a_full_weight_is_not_advised_in_figures_to_modules_whose_loss_may_be_a_mean():
    lines = advice_on("not_variational", active=4, kl_weight=0.001, as_flags=False)
    assert "up to 1 where the NLL is summed" in lines[0]


def test_what_was_healthy_can_be_gone_back_to():
    assert not any("healthy.ckpt" in line for line in watch(dead).last.advice)
    assert "healthy.ckpt" in watch(falling).last.advice[-1]


@pytest.mark.parametrize("curve", KINDS, ids=lambda curve: curve.__name__)
def test_a_change_of_verdict_is_one_line(curve):
    watched = watch(curve)
    line = describe_change(watched.last, "cannot_tell", STEPS)
    assert "\n" not in line
    assert line.startswith(f"step 1,000: {watched.last.name.replace('_', ' ')}")
    assert all(line.count(advice.partition(" (")[0]) >= 1 for advice in watched.last.advice)
