"""What changes in the course of a run: how long it is, the weight of the KL, its controller, the learning rate."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from seqvae.config.training import ObjectiveSettings, OptimizerSettings
from seqvae.training import schedules as kl_weight
from seqvae.training.schedules import (
    KLWeight,
    has_full_kl_weight,
    learning_rate_factor,
    planned_steps,
    scheduled_kl_weight,
    steps_of,
)

KL_SCHEDULES = ["constant", "linear", "sigmoid", "cyclical"]
LR_SCHEDULES = ["cosine", "linear", "constant"]


# --- The length of a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "tokens", "expected"),
    [
        (None, None, 1_000_000, 3 * 50),
        (None, None, 300_000, 10 * 50),
        (None, None, 1_000, 30 * 50),
        (None, None, 100_000_000, 1 * 50),
        (2, None, 1_000, 100),
        (None, 5_000, 100_000_000, 5_000),
        (2, 5_000, 1_000, 100),
        (2, 70, 1_000, 70),
    ],
)
def test_a_run_is_as_long_as_requested_or_else_as_the_data_need(max_epochs, max_steps, tokens, expected):
    steps = planned_steps(max_epochs, max_steps, optimizer_steps_per_epoch=50, sequence_steps_per_epoch=tokens)
    assert steps == expected


@given(amount=st.floats(0, 0.999), total_steps=st.integers(1, 10**6))
def test_a_fraction_of_a_run_is_no_shorter_than_requested_and_no_longer_than_the_run(amount, total_steps):
    assert amount * total_steps - 1e-6 <= steps_of(amount, total_steps) <= total_steps


# --- The weight of the KL ---------------------------------------------------------------------------------------------


def kl_weights(total_steps: int, **settings: Any) -> list[float]:
    objective = ObjectiveSettings(**settings)
    return [scheduled_kl_weight(step, total_steps, objective) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("settings", "full"),
    [
        ({"kl_schedule": "constant"}, range(100)),
        ({"kl_schedule": "linear", "beta": 0.3}, range(20, 100)),
        ({"kl_schedule": "sigmoid", "kl_warmup": 50}, range(50, 100)),
        ({"kl_schedule": "cyclical", "kl_cycle": 50, "kl_warmup": 0.5}, [*range(25, 50), *range(75, 100)]),
        ({"target_kl": 4}, range(20, 100)),
    ],
)
def test_the_steps_under_the_full_weight_are_those_behind_its_rise(settings, full):
    objective = ObjectiveSettings(**settings)
    assert [step for step in range(100) if has_full_kl_weight(step, 100, objective)] == list(full)


@given(
    schedule=st.sampled_from(KL_SCHEDULES),
    total_steps=st.integers(1, 300),
    warmup=st.floats(0, 400),
    cycle=st.floats(0, 400, exclude_min=True),
)
def test_the_weight_never_leaves_zero_to_beta(schedule, total_steps, warmup, cycle):
    assume(schedule != "cyclical" or warmup <= cycle or cycle <= 1)
    weights = kl_weights(total_steps, kl_schedule=schedule, kl_warmup=warmup, kl_cycle=cycle, beta=0.5)
    assert all(0 <= weight <= 0.5 for weight in weights)


@given(schedule=st.sampled_from(["constant", "linear", "sigmoid"]), warmup=st.sampled_from([0, *range(2, 81)]))
def test_the_weight_never_falls_and_is_exactly_beta_after_the_warm_up(schedule, warmup):
    weights = kl_weights(100, kl_schedule=schedule, kl_warmup=warmup, beta=0.5)
    assert weights == sorted(weights)
    assert set(weights[warmup:]) == {0.5}


@pytest.mark.parametrize(("schedule", "beginning", "steepest"), [("linear", 0.0, 0.00251), ("sigmoid", 0.007, 0.0071)])
def test_the_warm_up_begins_at_nothing_and_goes_up_without_a_jump(schedule, beginning, steepest):
    weights = kl_weights(1000, kl_schedule=schedule, kl_warmup=0.4)
    assert weights[0] == pytest.approx(beginning, abs=1e-3)
    assert weights[200] == pytest.approx(0.5)
    assert weights[399] >= 0.99
    assert max(after - before for before, after in pairwise(weights)) <= steepest


def test_the_weight_of_a_constant_schedule_is_beta_from_the_first_step():
    assert set(kl_weights(10, kl_schedule="constant", beta=2.0)) == {2.0}


@given(total_steps=st.integers(8, 2000), cycles=st.integers(1, 8))
def test_every_cycle_begins_at_zero_and_there_are_as_many_as_requested(total_steps, cycles):
    weights = kl_weights(total_steps, kl_schedule="cyclical", kl_cycle=1 / cycles)
    length = steps_of(1 / cycles, total_steps)
    assert all(weight == 0 for weight in weights[::length])
    assert len(weights[::length]) <= cycles


def test_in_a_cycle_the_weight_rises_over_its_share_of_the_cycle_and_then_stays():
    weights = kl_weights(100, kl_schedule="cyclical", kl_cycle=20, kl_warmup=0.5)
    assert weights[20:40] == pytest.approx([step / 10 for step in range(10)] + [1.0] * 10)
    assert kl_weights(100, kl_schedule="cyclical", kl_cycle=20, kl_warmup=10) == weights


@pytest.mark.parametrize("schedule", KL_SCHEDULES)
@pytest.mark.parametrize("total_steps", [37, 400, 1001])
def test_a_run_ends_at_full_weight_with_the_other_settings_at_their_defaults(schedule, total_steps):
    assert kl_weights(total_steps, kl_schedule=schedule)[-1] == 1.0


# --- The controller ---------------------------------------------------------------------------------------------------


def controller(target_kl: float = 4.0) -> KLWeight:
    return KLWeight(ObjectiveSettings(target_kl=target_kl), total_steps=1000)


def weights_under(control: KLWeight, kls: list[float]) -> list[float]:
    """What the weight becomes while the KL is what it is, whatever the weight."""
    weights = []
    for step, kl in enumerate(kls):
        control.update(torch.tensor(kl))
        weights.append(float(control(step)))
    return weights


def test_without_a_target_the_weight_is_the_schedules_and_nothing_goes_into_checkpoints():
    settings = ObjectiveSettings(beta=0.5, kl_warmup=0.4)
    weight = KLWeight(settings, total_steps=10)
    assert weight.target_kl is None
    assert [weight(step) for step in range(10)] == [scheduled_kl_weight(step, 10, settings) for step in range(10)]
    assert all(isinstance(weight(step), float) for step in range(10))
    assert weight.state_dict() == {}


@pytest.mark.parametrize(("kl", "goes_up"), [(3.0, False), (5.0, True)])
def test_a_kl_above_the_target_raises_the_weight_and_one_below_lowers_it(kl, goes_up):
    weights = weights_under(controller(), [4.0] * 300 + [kl] * 50)[300:]
    assert weights == sorted(weights, reverse=not goes_up)
    assert (weights[-1] > weights[0]) == goes_up


def test_at_its_target_the_controller_leaves_the_weight_alone():
    weights = weights_under(controller(), [4.0] * 500)
    assert weights[-1] == pytest.approx(weights[-100], rel=1e-3)


@pytest.mark.parametrize(("kl", "bound"), [(0.0, 1e-4), (1e4, 1e3)])
def test_the_weight_stays_within_its_bounds_however_long_the_target_is_missed(kl, bound):
    assert weights_under(controller(), [kl] * 2000)[-1] == pytest.approx(bound, rel=1e-4)


@pytest.mark.parametrize(("stuck_at", "then"), [(0.0, 12.0), (100.0, 1.0)])
def test_after_a_long_time_at_a_bound_the_weight_turns_soon_and_without_anti_windup_it_does_not(
    monkeypatch, stuck_at, then
):
    def steps_until_the_weight_is_past_one(patience: int = 1500) -> int:
        weights = weights_under(controller(), [stuck_at] * 2000 + [then] * patience)[2000:]
        past = [step for step, weight in enumerate(weights) if (weight > 1) == (then > 4)]
        return past[0] if past else patience

    assert steps_until_the_weight_is_past_one() < 150
    monkeypatch.setattr(kl_weight, "pushes_outwards", lambda log_weight, error: torch.zeros((), dtype=torch.bool))
    assert steps_until_the_weight_is_past_one() > 900


def test_a_restored_controller_goes_on_exactly_as_the_one_that_was_saved():
    generator = torch.Generator().manual_seed(0)
    kls = (8 * torch.rand(200, generator=generator)).tolist()
    control = controller()
    weights_under(control, kls[:100])
    restored = controller()
    restored.load_state_dict({name: value.clone() for name, value in control.state_dict().items()})
    assert float(restored(100)) == float(control(100))
    assert weights_under(restored, kls[100:]) == weights_under(control, kls[100:])


def test_a_step_whose_kl_is_not_finite_is_not_remembered():
    control = controller()
    before = weights_under(control, [4.0] * 100)[-1]
    weights = weights_under(control, [math.nan, math.inf] + [4.0] * 300)
    assert weights[1] == pytest.approx(before, rel=0.2)
    assert all(math.isfinite(weight) for weight in weights)


def test_a_weight_that_was_handed_out_does_not_change_with_the_next_update():
    control = controller()
    handed_out = control(0)
    value = float(handed_out)
    weights_under(control, [100.0])
    assert float(handed_out) == value != float(control(1))


# --- The learning rate ------------------------------------------------------------------------------------------------


def factors_of(total_steps: int, **settings: Any) -> list[float]:
    optimizer = OptimizerSettings(**settings)
    return [learning_rate_factor(step, total_steps, optimizer) for step in range(total_steps + 1)]


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
def test_the_learning_rate_rises_evenly_to_its_maximum_and_never_exceeds_it(schedule):
    factors = factors_of(100, lr_schedule=schedule, warmup=0.1)
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(factors) == factors[9] == 1.0
    assert factors[9:] == sorted(factors[9:], reverse=True)


@pytest.mark.parametrize(("schedule", "half_way"), [("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)])
def test_after_the_warm_up_the_learning_rate_follows_its_schedule(schedule, half_way):
    factors = factors_of(100, lr_schedule=schedule, warmup=10)
    assert factors[55] == pytest.approx(half_way)
    assert factors[100] == pytest.approx(1.0 if schedule == "constant" else 0.0)


def test_a_cosine_falls_slowly_at_first_and_at_last():
    cosine, line = (factors_of(100, lr_schedule=schedule, warmup=0) for schedule in ("cosine", "linear"))
    assert cosine[25] == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert cosine[10] > line[10]
    assert cosine[90] < line[90]


@given(schedule=st.sampled_from(LR_SCHEDULES), total_steps=st.integers(1, 300), warmup=st.floats(0, 400))
def test_no_step_of_a_run_learns_nothing(schedule, total_steps, warmup):
    factors = factors_of(total_steps, lr_schedule=schedule, warmup=warmup)
    assert all(0 < factor <= 1 for factor in factors[:-1])
