"""A latent that is silent: dead or asleep, by its escape threshold, and under weights that rise and fall."""

import json
import math

import pytest

from seqvae.monitors.detector import Detector, KLSchedule
from seqvae.monitors.rules import Point, escape_of
from seqvae.verdicts import VERDICTS
from tests.support.made_curves import (
    ALWAYS,
    DEFAULT,
    STEPS,
    THROTTLED,
    Cadence,
    Curve,
    Watched,
    dead,
    falling,
    healthy,
    ignored,
    interpolated,
    noise,
    offered,
    reading,
    watch,
)

at_two_cadences = pytest.mark.parametrize("cadence", [DEFAULT, THROTTLED], ids=str)


def silent_until(step: int) -> Curve:
    """Return a run that is silent up to a step and then wakes within a tenth of it."""
    alive = interpolated([(0, 0.02), (step, 0.02), (step + 60, 3.0), (10_000, 5.0)])
    return lambda now: reading(now, rate=alive(now), use=2 * alive(now), active=0 if alive(now) < 0.1 else 16)


def names(watched: Watched) -> list[str]:
    return [name for _, name in watched.changes]


# --- By the escape threshold --------------------------------------------------------------------------------------------


@at_two_cadences
def test_a_weight_above_the_threshold_twice_is_a_collapse_with_the_number(cadence):
    watched = watch(dead, cadence, threshold=lambda step: 0.5)
    assert names(watched) == ["cannot_tell", "collapsed"]
    assert "the weight is 1.0; this latent could live below 0.50 ± 0.050: it will not come back by itself" in (
        watched.last.evidence
    )
    assert watched.last.numbers["escape_threshold"] == 0.5
    assert len(watched.thresholds_read) == 2
    assert watched.first("collapsed") == watched.thresholds_read[1]


@pytest.mark.parametrize("every_n_steps", [4, 10, 20])
def test_a_dead_latent_is_called_as_soon_as_a_hundred_steps_are_done(every_n_steps):
    """The first of two readings of the threshold falls into them."""
    watched = watch(dead, Cadence(every_n_steps, 1), threshold=lambda step: 0.5)
    assert 50 <= watched.thresholds_read[0] < 100 <= watched.first("collapsed") < 100 + every_n_steps


def test_an_early_threshold_a_little_below_the_weight_is_no_death():
    """That of a latent which woke under a weight of 8 rose from 9.1 at step 60 to 12.6 at step 80."""

    def waking(step):
        return 0.87 if step < 100 else 1.4

    watched = watch(silent_until(400), Cadence(10, 1), threshold=waking)
    assert watched.thresholds_read[0] < 100
    assert watched.alarms == []


@at_two_cadences
@pytest.mark.parametrize("threshold", [1.02, 1.2])
def test_patience_alone_calls_no_latent_whose_threshold_is_not_below_its_weight(threshold, cadence):
    """A run on PhysioNet under a weight of 9 read 9.6 ± 1.0, 12 ± 1.9 and 9.7 ± 1.7, and woke at half of its steps."""
    assert watch(dead, cadence).first("collapsed") < 200
    assert watch(silent_until(380), cadence, threshold=lambda step: threshold).alarms == []
    assert 400 < watch(dead, cadence, threshold=lambda step: threshold).first("collapsed") < 600


@at_two_cadences
def test_no_threshold_confirms_a_death_under_free_bits_that_are_not_used_up(cadence):
    """Silence is unstable there whatever the weight: it is judged by patience, and does not end a run at once."""
    watched = watch(dead, cadence, threshold=lambda step: 0.5, free_bits=0.1)
    assert watched.first("collapsed") is not None
    assert "will not come back" not in watched.last.evidence
    assert watched.certain[0] > watched.first("collapsed")


@at_two_cadences
def test_the_threshold_replaces_patience_with_a_silence_that_began_late(cadence):
    alive = interpolated([(0, 3.0), (400, 3.0), (420, 0.05), (1000, 0.05)])

    def curve(step):
        # Neither clearly there nor gone before, so that the run was never healthy.
        return reading(
            step, rate=alive(step), information=min(0.4, alive(step)), use=min(0.35, alive(step)), use_error=0.1
        )

    patient = watch(curve, cadence).first("collapsed")
    assert watch(curve, cadence, threshold=lambda step: 0.5).first("collapsed") < patient


@at_two_cadences
def test_a_sleeper_is_called_asleep_and_then_healthy_and_never_collapsed(cadence):
    """As two runs on PhysioNet, whose silence was called a collapse at 18 % and ended at 56 %."""
    watched = watch(silent_until(560), cadence, threshold=lambda step: 2.5)
    assert names(watched) == ["cannot_tell", "asleep", "cannot_tell", "healthy"]
    assert watched.first("asleep") >= 200
    assert watched.alarms == []
    assert watched.certain == []
    assert "this latent could live below 2.5 ± 0.25" in watched.verdicts[20][1].evidence


@at_two_cadences
def test_a_sleep_is_believed_for_two_fifths_of_the_run(cadence):
    watched = watch(dead, cadence, threshold=lambda step: 2.5)
    assert names(watched) == ["cannot_tell", "asleep", "collapsed"]
    assert watched.first("collapsed") == watched.first("asleep") + 400 + cadence.every_n_steps
    assert "this latent could live below 2.5 ± 0.25, and has not come to life in" in watched.last.evidence
    assert watched.certain[0] == watched.first("collapsed")


def test_a_sleep_is_believed_no_more_at_the_end_of_a_run():
    alive = interpolated([(0, 3.0), (700, 3.0), (720, 0.02), (1000, 0.02)])
    watched = watch(lambda step: reading(step, rate=alive(step), use=alive(step) - 0.02), threshold=lambda step: 2.5)
    assert watched.first("collapsed") <= 920


@at_two_cadences
def test_a_sleeper_whose_threshold_falls_below_the_weight_is_dead(cadence):
    watched = watch(dead, cadence, threshold=lambda step: 2.5 if step < 300 else 0.5)
    assert names(watched) == ["cannot_tell", "asleep", "collapsed"]
    assert watched.first("collapsed") <= 460


def test_a_high_threshold_early_on_only_means_to_wait():
    """The dead reach 2.8 times the weight at steps 100 to 150, while their decoder learns the simplest things."""
    watched = watch(dead, Cadence(10, 4), threshold=lambda step: 2.8 if step < 160 else 0.5)
    assert names(watched) == ["cannot_tell", "collapsed"]
    assert watched.first("collapsed") >= 160


@at_two_cadences
@pytest.mark.parametrize("threshold", [math.nan, math.inf, 0.95])
def test_a_threshold_that_tells_nothing_leaves_it_to_patience(threshold, cadence):
    watched = watch(dead, cadence, threshold=lambda step: threshold)
    assert names(watched) == ["cannot_tell", "collapsed"]
    assert watched.first("collapsed") <= 200
    assert "will not come back" not in watched.last.evidence
    assert watched.certain[0] > watched.first("collapsed")


def test_a_healthy_run_reads_no_threshold():
    assert watch(healthy, threshold=lambda step: 2.5).thresholds_read == []


def test_a_collapse_that_was_called_reads_no_further_thresholds():
    watched = watch(dead, Cadence(10, 1), threshold=lambda step: 0.5)
    assert max(watched.thresholds_read) <= watched.first("collapsed")


def test_a_weight_that_rises_is_compared_with_what_it_will_be_and_what_it_is():
    """Above the threshold already: dead, though its weight is not full. Not yet above it: no sleep, and no death."""
    schedule = KLSchedule(STEPS, lambda step: 4 * min(1.0, step / 500))

    def curve(step):
        return dead(step)._replace(kl_weight=schedule.weight_at and schedule.weight_at(step))

    early = watch(curve, DEFAULT, schedule, threshold=lambda step: 0.5)
    assert early.first("collapsed") < watch(curve, DEFAULT, schedule).first("collapsed") + 60
    assert early.first("collapsed") < 250
    assert "asleep" not in names(watch(curve, DEFAULT, schedule, threshold=lambda step: 3.0))
    assert "asleep" in names(watch(curve, DEFAULT, schedule, threshold=lambda step: 9.0))


@pytest.mark.parametrize(
    ("lowest", "highest", "threshold", "error", "expected"),
    [
        (1.0, 1.0, 0.85, 0.1, "dead"),
        (1.0, 1.0, 0.95, 0.1, "open"),
        (1.0, 1.0, 1.15, 0.1, "open"),
        (1.0, 1.0, 1.25, 0.1, "asleep"),
        (0.0, 1.0, 0.5, 0.1, "open"),
        (0.3, 4.0, 1.0, 0.1, "open"),
        (None, None, 0.5, 0.1, "open"),
        (1.0, 1.0, 0.5, math.nan, "open"),
        (1.0, 1.0, 0.5, None, "open"),
        (1.0, 1.0, None, None, None),
    ],
)
def test_a_latent_is_dead_above_and_asleep_below_by_the_errors(lowest, highest, threshold, error, expected):
    point = Point(9, 0.0, 0.0, 64, None, None, 0, 4, 0.0, math.nan, 1.0, None, 0.0)
    point = point._replace(lowest_ahead=lowest, highest_ahead=highest, threshold=threshold, threshold_error=error)
    assert escape_of(point) == expected


@pytest.mark.parametrize(("curve", "threshold"), [(dead, 2.5), (dead, 0.5), (silent_until(560), 2.5)])
def test_a_state_that_went_through_json_changes_no_verdict_of_a_silence(curve, threshold):
    whole = watch(curve, DEFAULT, threshold=lambda step: threshold)
    verdicts, state = [], None
    for one in offered(curve, DEFAULT):
        detector = Detector(None, DEFAULT.window, ALWAYS, can_read_threshold=True, advises_flags=True)
        if state is not None:
            detector.load_state_dict(json.loads(state))
        one = curve(one.step) if detector.wants_decoder_use(one) else one
        if detector.wants_escape_threshold(one):
            one = one._replace(
                escape_threshold=threshold, escape_threshold_error=threshold / 10, ideal_escape_threshold=math.nan
            )
        verdicts.append((one.step, detector.judge(one)))
        state = json.dumps(detector.state_dict())
    assert repr(verdicts) == repr(whole.verdicts)


# --- Under weights that rise and fall -----------------------------------------------------------------------------------


def cycles(step: int) -> float:
    return min(1.0, step % 250 / 125)


def under(schedule: KLSchedule, curve: Curve) -> Curve:
    return lambda step: curve(step)._replace(kl_weight=schedule.weight_at and schedule.weight_at(step))


@at_two_cadences
def test_a_run_that_a_long_ramp_killed_is_called_while_the_ramp_lasts(cadence):
    """Dead since 30 % of a run whose weight is full at 80 %."""
    schedule = KLSchedule(STEPS, lambda step: min(1.0, step / 800))
    alive = interpolated([(0, 3.0), (240, 2.0), (300, 0.05), (1000, 0.05)])
    curve = under(schedule, lambda step: reading(step, rate=alive(step), use=1.5 * alive(step) - 0.07))
    assert watch(curve, cadence, schedule).first("collapsed") <= 520
    assert names(watch(curve, cadence, schedule)) == ["warming_up", "collapsed"]


@at_two_cadences
def test_a_cyclical_run_that_sleeps_through_a_fall_of_the_weight_is_called_in_the_second_cycle(cadence):
    schedule = KLSchedule(STEPS, cycles)
    watched = watch(under(schedule, dead), cadence, schedule)
    assert 250 < watched.first("collapsed") <= 340
    assert names(watched) == ["warming_up", "collapsed"]


@at_two_cadences
def test_a_cyclical_run_that_is_silent_on_a_plateau_and_wakes_in_each_cycle_is_no_collapse(cadence):
    """As the recorded one that ended healthy: a rate of 0.06 at the end of the first cycle, 0.4 in the second."""
    schedule = KLSchedule(STEPS, cycles)

    def breathing(step):
        rate = 0.06 if cycles(step) == 1.0 and step < 800 else 0.9
        return reading(step, rate=rate, use=2 * rate, use_error=0.1)

    assert watch(under(schedule, breathing), cadence, schedule).alarms == []


@at_two_cadences
def test_a_latent_that_is_silent_from_the_start_is_called_early_in_a_ramp_by_its_threshold(cadence):
    """A decoder that gets noise instead of z; the weight that counts is reached at 30 % of the run."""
    schedule = KLSchedule(STEPS, lambda step: min(1.0, step / 600))
    watched = watch(under(schedule, dead), cadence, schedule, threshold=lambda step: 0.01)
    assert 100 <= watched.first("collapsed") <= 160


@at_two_cadences
def test_a_fall_of_the_weight_between_two_readings_counts_as_one_that_was_slept_through(cadence):
    """Cycles up to a weight of 30 are low for two steps, which no reading meets: one was called at 90 % of its run."""
    schedule = KLSchedule(STEPS, lambda step: 30 * min(1.0, step % 200 / 60))
    watched = watch(under(schedule, dead), cadence, schedule)
    assert 200 < watched.first("collapsed") <= 260


# --- Withdrawing, and ending a run --------------------------------------------------------------------------------------


@at_two_cadences
def test_a_collapse_is_withdrawn_by_the_first_reading_with_information(cadence):
    """In place of three readings later: a run was said to be collapsed at an information of 0.59."""
    watched = watch(silent_until(500), cadence)
    back = next(step for step in range(0, STEPS, 20) if silent_until(500)(step).mutual_information >= 0.5)
    assert dict(watched.changes)[back] in ("cannot_tell", "healthy")


def test_a_slow_growth_out_of_the_noise_is_seen():
    """From a rate of 0.02 to 0.09 in 100 steps: a latent that wakes."""

    def waking(step):
        return reading(step, rate=0.02 * (4.5 ** ((step - 60) / 100)) if step > 60 else 0.02, information=0.01, use=0.0)

    watched = watch(waking, Cadence(10, 1), steps=160)
    assert watched.last.evidence.startswith("faint, but it grows")
    assert watched.alarms == []


def test_a_restless_silence_is_not_taken_for_a_growth():
    def restless(step):
        return reading(step, rate=0.045 + 0.02 * noise(step), information=0.03, use=0.0)

    watched = watch(restless)
    assert names(watched) == ["cannot_tell", "collapsed"]
    assert watched.first("collapsed") <= 240


@at_two_cadences
def test_a_dimension_that_stands_out_and_falls_with_the_rest_wakes_nothing(cadence):
    """Latents of steps die slowly: one was called at 42 % of its run because of a dimension of 0.004 nats."""

    def dying(step):
        rate = 0.1 * math.exp(-step / 60)
        return reading(
            step, rate=rate, information=0.01, use=0.02 * noise(step), dimensions=4, largest=rate / 2, scope="step"
        )

    assert watch(dying, cadence, steps=400).first("collapsed") <= 200


@pytest.mark.parametrize(
    ("curve", "threshold", "share"),
    [(dead, 0.5, 0.0), (dead, None, 0.25), (dead, math.nan, 0.25), (ignored, None, 0.25), (falling, None, 0.1)],
    ids=["confirmed", "no threshold", "threshold unknown", "decoder ignores z", "has been alive"],
)
def test_a_run_is_ended_later_than_it_is_warned_unless_the_threshold_confirms_it(curve, threshold, share):
    watched = watch(curve, DEFAULT, threshold=None if threshold is None else lambda step: threshold)
    called = next(step for step, verdict in watched.verdicts if VERDICTS[verdict.name].is_collapse)
    assert 0 <= watched.certain[0] - (called + share * STEPS) < DEFAULT.every_n_steps


def test_sleep_is_neither_an_alarm_nor_a_collapse():
    kind = VERDICTS["asleep"]
    assert (kind.is_alarm, kind.is_collapse, kind.is_unharmed) == (False, False, False)
    assert kind.tone in ("open", "fair")


# --- The checkpoint to go back to ---------------------------------------------------------------------------------------


def test_a_model_that_is_no_longer_healthy_by_its_last_reading_is_not_worth_going_back_to():
    """A checkpoint was kept as healthy at an information of 0.15, while the verdict had not changed yet."""
    alive = interpolated([(0, 3.0), (400, 3.0), (440, 0.15), (1000, 0.15)])
    detector = Detector(None, 50, ALWAYS)
    unharmed = {}
    for step in range(10, 480, 10):
        detector.judge(reading(step, rate=alive(step), use=2 * alive(step) - 0.3, use_error=0.05))
        unharmed[step] = detector.is_unharmed()
    assert unharmed[400]
    assert detector.verdict.name == "healthy" or VERDICTS[detector.verdict.name].is_alarm
    assert not unharmed[450]
    assert not unharmed[470]
