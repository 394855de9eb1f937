"""The plan of a rescue, on made readings: which course when, for how long, within which budget, and what it remembers."""

import json
from typing import Any

import pytest

from seqvae.config.training import ObjectiveSettings
from seqvae.monitors.reading import Reading
from seqvae.training.rescue import RUNGS, TRIGGERS, Course, Move, RescuePlan, courses_of, is_alive
from seqvae.verdicts import FLOOR_NATS

PLAIN = ObjectiveSettings(beta=4.0, kl_schedule="constant", free_bits=0.0)
STEPS = 1000


def reading(step: int, *, alive: bool = False, **fields: Any) -> Reading:
    information, use = (1.5, 2.0) if alive else (0.05, 0.02)
    made = {
        "step": step,
        "epoch": 0,
        "scope": "sequence",
        "posteriors": 320,
        "rate": information,
        "kl_per_dim": (0.1,) * 16,
    }
    made |= {"active_units": 1, "mutual_information": information, "mutual_information_cap": 5.0, "aggregate_kl": 0.0}
    made |= {"variance_of_means": (0.1,) * 16, "mean_of_variances": (0.9,) * 16, "effective_dimensions": 1.0}
    made |= {"decoder_use": use, "decoder_use_error": 0.1, "decoder_use_sequences": 32, "decoder_use_steps": 320}
    return Reading(**{**made, **fields})


def run(plan: RescuePlan, begins: int, lives: Any, until: int = 10**6) -> list[tuple[int, Move]]:
    """Collapse at step `begins`, then read as often as a rescue does; `lives` says of each course whether the latent is alive."""
    moves = []
    step, verdict = begins, "collapsed"
    while step <= until and plan.state.phase != "given_up":
        name = plan.state.name
        if (move := plan.take_in(reading(step, alive=name is not None and lives(name)), verdict)) is not None:
            moves.append((step, move))
            if move.is_over:
                break
        verdict = "cannot_tell"
        step += plan.every_n_steps
    return moves


def courses(moves: list[tuple[int, Move]]) -> list[str]:
    return [move.name for _, move in moves]


# --- Rungs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [*TRIGGERS, "healthy", "warming_up", "cannot_tell", "asleep", "not_variational"])
def test_a_rescue_begins_with_a_collapse_that_is_there_or_under_way_and_with_nothing_else(verdict):
    plan = RescuePlan(PLAIN, STEPS, 0.3)
    move = plan.take_in(reading(140, alive=verdict == "collapsing"), verdict)
    assert (move is not None) == (verdict in TRIGGERS)
    assert plan.is_active == (verdict in TRIGGERS)


def test_the_first_rung_resets_the_optimizer_with_a_weight_of_1_and_a_floor_of_one_and_a_half_nats():
    move = RescuePlan(PLAIN, STEPS, 0.3).take_in(reading(140), "collapsed")
    assert move is not None
    assert (move.phase, move.course) == ("healing", Course(1.0, 1.5))
    assert move.resets_optimizer
    assert not move.revives_decoder


def test_rungs_become_stronger_until_all_are_tried_and_then_the_first_floor_stays():
    plan = RescuePlan(PLAIN, 2000, 0.3)
    moves = run(plan, 140, lambda name: False)
    assert courses(moves) == [*RUNGS, "floor"]
    assert [step for step, _ in moves] == [140, 240, 340, 440, 540]
    assert [move.resets_optimizer for _, move in moves] == [True] * 4 + [False]
    assert [move.revives_decoder for _, move in moves] == [False, False, False, True, False]
    assert [move.phase for _, move in moves] == ["healing"] * 4 + ["given_up"]
    assert plan.take_in(reading(900), "collapsed") is None


@pytest.mark.parametrize("heals", RUNGS)
def test_a_rung_that_brings_the_latent_to_life_is_the_last_and_courses_become_weaker_down_to_the_users_own(heals):
    plan = RescuePlan(PLAIN, 4000, 0.4)
    moves = run(plan, 140, lambda name: name == heals or plan.state.phase == "lowering")
    before = RUNGS[: RUNGS.index(heals) + 1]
    assert tuple(courses(moves)) == (*before, *WEAKER[heals], "own")
    assert moves[-1][1].phase == "watching"


WEAKER = {
    "floor": ["half_floor", "own"],
    "target_kl": ["floor", "half_floor", "own"],
    "low_weight": ["half_weight", "floor", "half_floor", "own"],
    "no_kl": ["low_weight", "half_weight", "floor", "half_floor", "own"],
}


def test_two_readings_in_a_row_have_to_be_alive():
    plan = RescuePlan(PLAIN, STEPS, 0.3)
    plan.take_in(reading(140), "collapsed")
    answers = [plan.take_in(reading(150 + 10 * n, alive=n in (0, 2, 3)), "cannot_tell") for n in range(4)]
    assert [answer is not None for answer in answers] == [False, False, False, True]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"mutual_information": 0.5}, False),
        ({"mutual_information": float("nan")}, False),
        ({"decoder_use": 0.4}, False),
        ({"decoder_use_error": 0.7}, False),
        ({"decoder_use_error": float("nan")}, False),
        ({"decoder_use": None, "decoder_use_error": None}, True),
        ({"mutual_information": 0.3, "scope": "step"}, True),
    ],
)
def test_a_latent_is_alive_with_information_that_the_decoder_clearly_uses_where_that_can_be_read(fields, expected):
    assert is_alive(reading(1, alive=True, **fields)) == expected


# --- Lowering -------------------------------------------------------------------------------------------------------


def test_the_last_course_that_the_latent_survived_stays():
    plan = RescuePlan(PLAIN, STEPS, 0.3)
    moves = run(plan, 140, lambda name: name in ("floor", "half_floor"))
    assert courses(moves) == ["floor", "half_floor", "own", "half_floor"]
    assert moves[-1][1].phase == "watching"
    assert [move.course.floor for _, move in moves] == [1.5, 0.75, 0.0, 0.75]
    assert not plan.is_active


def test_without_a_floor_that_keeps_it_up_the_information_has_to_be_twice_the_line():
    for information, name in ((0.9, "half_floor"), (1.1, "own")):
        plan, step = RescuePlan(PLAIN, STEPS, 0.3), 140
        move = plan.take_in(reading(step), "collapsed")
        while move is None or not move.is_over:
            step += plan.every_n_steps
            move = plan.take_in(reading(step, alive=True, mutual_information=information), "cannot_tell")
        assert move.name == name


def test_where_the_latent_survives_without_a_floor_the_users_objective_is_back_but_for_a_weight_above_1():
    moves = run(RescuePlan(PLAIN, STEPS, 0.3), 140, lambda name: True)
    assert moves[-1][1].course == Course(1.0, 0.0)
    assert courses(moves)[-2:] == ["own", "own"]  # tried, and then for good


def test_a_course_that_failed_is_not_tried_again_in_a_later_rescue():
    plan = RescuePlan(PLAIN, STEPS, 0.6)
    run(plan, 140, lambda name: True)
    assert courses(run(plan, 700, lambda name: True)) == ["floor", "half_floor", "half_floor"]


def test_a_collapse_on_the_first_floor_takes_the_next_rung():
    plan = RescuePlan(PLAIN, 4000, 0.3)
    run(plan, 140, lambda name: name == "floor")
    assert courses(run(plan, 2000, lambda name: True))[0] == "target_kl"


# --- The budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lives", [lambda name: False, lambda name: True, lambda name: name == "low_weight"])
@pytest.mark.parametrize("begins", [100, 570, 990])
@pytest.mark.parametrize(("steps", "budget"), [(1000, 0.3), (1000, 0.05), (120, 0.3), (20_000, 0.1)])
def test_all_rescues_together_stay_within_the_budget_and_so_does_what_the_run_becomes_longer_by(
    steps, budget, begins, lives
):
    plan = RescuePlan(PLAIN, steps, budget)
    used = 0
    for begin in (begins * steps // 1000, 2 * steps, 3 * steps):
        moves = run(plan, begin, lives)
        if moves:
            used = moves[-1][1].used_steps
    assert 0 < used <= budget * steps
    first = run(again := RescuePlan(PLAIN, steps, budget), begins * steps // 1000, lives)
    assert again.state.added_steps <= budget * steps
    assert first[-1][0] <= steps + again.state.added_steps


def test_a_rescue_has_its_whole_budget_before_it_however_late_it_begins():
    for begins, added_steps in ((140, 0), (700, 0), (900, 200), (1000, 300)):
        plan = RescuePlan(PLAIN, STEPS, 0.3)
        move = plan.take_in(reading(begins), "collapsed")
        assert move is not None
        assert move.added_steps == added_steps


def test_the_budget_of_a_run_that_the_clock_ends_is_a_share_of_what_it_will_reach():
    plan = RescuePlan(PLAIN, 1_000_000, 0.3)
    plan.expect(1000)
    moves = run(plan, 140, lambda name: True)
    plan.expect(2000)  # too late: it has been counted by
    assert plan.budget_steps == 300
    assert moves == run(RescuePlan(PLAIN, 1000, 0.3), 140, lambda name: True)


def test_a_budget_that_ends_within_a_lowering_keeps_what_held():
    plan = RescuePlan(PLAIN, STEPS, 0.1)
    moves = run(plan, 140, lambda name: True)
    assert moves[-1][1].name == moves[-2][1].name or courses(moves)[-1] in courses(moves)[:-1]
    assert moves[-1][1].phase == "watching"
    assert moves[-1][1].used_steps <= 100


def test_without_budget_a_collapse_is_said_to_be_beyond_rescue_and_the_run_gets_no_longer():
    plan = RescuePlan(PLAIN, STEPS, 0.3)
    run(plan, 140, lambda name: False)
    assert plan.state.phase == "given_up"
    small = RescuePlan(PLAIN, STEPS, 0.001)
    move = small.take_in(reading(990), "collapsed")
    assert move is not None
    assert (move.phase, move.added_steps) == ("given_up", 0)
    assert "no further rescue" in move.message


# --- Other objectives -----------------------------------------------------------------------------------------------


def test_a_weight_below_1_is_kept():
    found = courses_of(ObjectiveSettings(beta=0.5, free_bits=0.0), reading(1), 0.0)
    assert found["floor"].kl_weight == found["own"].kl_weight == 0.5
    assert found["low_weight"].kl_weight == pytest.approx(0.1)


def test_floors_come_on_top_of_the_users_own():
    found = courses_of(ObjectiveSettings(free_bits=0.25), reading(1), 0.0)
    floors = {name: course.floor for name, course in found.items()}
    assert floors == {
        **dict.fromkeys(("no_kl", "low_weight", "half_weight", "floor"), 5.5),
        "target_kl": 0.0,
        "half_floor": 4.75,
        "own": 4.0,
    }


def test_a_target_kl_is_in_force_again_where_the_latent_survives_it():
    moves = run(RescuePlan(ObjectiveSettings(target_kl=5.0), STEPS, 0.3), 140, lambda name: True)
    assert moves[0][1].course == Course(1.0, 1.5)
    assert moves[-1][1].course == Course(1.0, 0.0, 5.0)


def test_a_latent_of_each_step_has_a_floor_of_its_own_and_a_target_for_as_many_steps_as_sequences_have():
    found = courses_of(PLAIN, reading(1, scope="step"), 10.0)
    assert found["floor"].floor == FLOOR_NATS["step"] < FLOOR_NATS["sequence"]
    assert found["target_kl"].target_kl == pytest.approx(2 * FLOOR_NATS["step"] * 10)
    assert found.keys() == {"no_kl", "target_kl", "floor", "own"}
    unknown = courses_of(PLAIN, reading(1, scope="step"), 0.0)
    assert "target_kl" not in unknown


# --- Memory ---------------------------------------------------------------------------------------------------------


def test_a_plan_that_goes_on_from_its_state_makes_the_moves_of_one_that_was_never_interrupted():
    def lives(name: str) -> bool:
        return name in ("low_weight", "half_weight")

    unbroken = run(RescuePlan(PLAIN, 2000, 0.3), 140, lives)
    for until in range(140, unbroken[-1][0], 10):
        before, after = RescuePlan(PLAIN, 2000, 0.3), RescuePlan(PLAIN, 2000, 0.3)
        moves = run(before, 140, lives, until=until)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        while after.is_active:
            until += 10
            assert after.state.name is not None
            if (move := after.take_in(reading(until, alive=lives(after.state.name)), "cannot_tell")) is not None:
                moves.append((until, move))
        assert moves == unbroken
