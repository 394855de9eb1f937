"""Where readings are heading: slopes that no outlier moves, and when a KL weight is full."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqvae.config.training import ObjectiveSettings
from seqvae.monitors.detector import KLSchedule, why_not_full
from seqvae.monitors.rules import log_trend
from seqvae.training.schedules import scheduled_kl_weight

STEPS = list(range(0, 120, 10))


@given(slope=st.floats(-0.02, 0.02), level=st.floats(0.1, 10))
def test_the_trend_of_an_exponential_is_its_rate(slope, level):
    trend = log_trend(STEPS, [level * math.exp(slope * (step - STEPS[-1])) for step in STEPS], floor=1e-6)
    assert trend.slope == pytest.approx(slope, abs=1e-12)
    assert trend.level == pytest.approx(level, rel=1e-9)


def test_an_outlier_moves_no_trend():
    values = [math.exp(-0.01 * step) for step in STEPS]
    plain = log_trend(STEPS, values, floor=1e-6)
    values[5] = 1000.0
    assert log_trend(STEPS, values, floor=1e-6).slope == pytest.approx(plain.slope, rel=0.1)


def test_readings_that_go_up_and_down_agree_on_nothing():
    assert log_trend(STEPS, [1.0, 2.0] * 6, floor=0.01).agreement < 0.5
    assert log_trend(STEPS, [1.0] * 12, floor=0.01) == (0.0, 1.0, 0.0)


def test_a_trend_that_leads_elsewhere_never_arrives():
    trend = log_trend([0, 10, 20], [1.0, 2.0, 4.0], floor=0.01)
    assert trend.steps_until(1.0) == math.inf
    assert trend.steps_until(16.0) == pytest.approx(20)


def test_a_trend_that_leads_beyond_all_numbers_has_a_level_nevertheless():
    assert math.isfinite(log_trend([0, 1, 2, 3], [1.0, 1e299, 1e299, 1e299], floor=0.01).level)
    from_infinity = log_trend([0, 9, 18, 29, 35], [math.inf, 1e300, math.inf, 1.0, 0.01], floor=0.01)
    assert from_infinity.level > 0
    assert not math.isnan(from_infinity.steps_until(0.2))


def test_one_reading_is_no_trend():
    assert log_trend([7], [3.0], floor=0.01).slope == 0.0


def schedule(steps: int = 1000, **objective) -> KLSchedule:
    settings = ObjectiveSettings(**objective)
    return KLSchedule(steps, lambda step: scheduled_kl_weight(step, steps, settings))


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ({"kl_schedule": "constant"}, 0),
        ({"kl_schedule": "linear", "kl_warmup": 0.2}, 190),
        ({"kl_schedule": "linear", "kl_warmup": 0.2, "beta": 0.1}, 190),
        ({"kl_schedule": "sigmoid", "kl_warmup": 0.5}, 398),
        ({"kl_schedule": "cyclical", "kl_warmup": 0.4, "kl_cycle": 0.25}, 845),
        ({"kl_schedule": "constant", "beta": 0.0}, 0),
    ],
)
def test_a_known_schedule_is_full_from_the_last_time_that_it_reaches_its_height(objective, expected):
    full_from = schedule(**objective).full_from()
    assert full_from == pytest.approx(expected, abs=2)


def test_a_known_schedule_is_waited_for():
    known = schedule(kl_schedule="linear", kl_warmup=0.2)
    full_from = known.full_from()
    assert why_not_full(100, [0.25, 0.5], known, full_from) == ("the KL weight is 0.5 and will be full from step 190")
    assert why_not_full(200, [0.5, 1.0], known, full_from) is None


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], None),
        ([1.0] * 8, None),
        ([0.1, 0.2, 0.3], "the KL weight is 0.3 and still rising"),
        ([0.2, 0.6, 1.0, 1.0, 1.0], "the KL weight is 1 and still rising"),
        ([0.2, 0.6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], None),
        ([1.0, 1.0, 1.0, 1.0, 0.1], "the KL weight is 0.1 and has been 1"),
        ([None, None], None),
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_an_unknown_schedule_is_seen_from_its_weights(weights, expected):
    unknown = KLSchedule()
    assert why_not_full(100, weights, unknown, unknown.full_from()) == expected


def test_a_weight_that_ends_low_is_full_from_where_it_was_at_its_height_for_the_last_time():
    cycles = KLSchedule(1001, lambda step: min(1.0, step % 250 / 125))
    assert cycles.full_from() == pytest.approx(750 + 119, abs=2)
    assert KLSchedule(1000, lambda step: 4 - 3 * step / 1000).full_from() == 0
    assert KLSchedule(1000, lambda step: 0.0).full_from() == 0


def test_a_weight_that_is_known_beforehand_need_not_be_returned():
    known = schedule(kl_schedule="linear", kl_warmup=0.2)
    assert why_not_full(100, [None], known, known.full_from()) == "the KL weight will be full from step 190"
    assert why_not_full(200, [None], known, known.full_from()) is None


@pytest.mark.parametrize("weight", [math.inf, math.nan])
def test_a_weight_that_is_no_number_counts_for_nothing(weight):
    unknown = KLSchedule()
    assert why_not_full(100, [1.0, weight], unknown, None) is None
    assert why_not_full(100, [weight, 1.0, 1.0], unknown, None) is None


def test_a_weight_in_half_precision_is_as_full_as_any():
    rounded = [float(np.float16(0.2 * min(1.0, reading / 20))) for reading in range(40)]
    early = [why_not_full(10 * place, rounded[: place + 1], KLSchedule(), None) for place in range(40)]
    assert all(early[1:21])
    assert not any(early[26:])


@pytest.mark.parametrize("total_steps", [0, 1])
def test_a_run_of_one_step_or_none_has_no_schedule_to_wait_for(total_steps):
    assert not KLSchedule(total_steps, lambda step: step / 5).full_from()


def test_a_steered_weight_is_in_force_whatever_its_size():
    steered = KLSchedule(1000, is_steered=True)
    assert why_not_full(10, [0.01, 0.1, 0.5], steered, steered.full_from()) is None
