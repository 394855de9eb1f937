"""The detector on curves that were measured: those that fool simple rules, a table of nine runs, and recorded ones."""

import pytest

from seqvae.monitors.detector import KLSchedule
from tests.support.made_curves import DEFAULT, STEPS, THROTTLED, Cadence, Curve, interpolated, reading, watch
from tests.support.recorded_runs import RECORDED

at_two_cadences = pytest.mark.parametrize("cadence", [DEFAULT, THROTTLED], ids=str)

# --- Curves that fool simple rules --------------------------------------------------------------------------------------


@at_two_cadences
def test_a_high_kl_alone_is_not_health(cadence):
    """KL 8.9 with next to no information, early in training."""
    watched = watch(lambda step: reading(step, rate=8.9, information=0.03, use=0.02), cadence)
    assert "healthy" not in {name for _, name in watched.changes}


@at_two_cadences
def test_a_high_kl_that_comes_to_be_used_is_healthy_and_never_was_anything_worse(cadence):
    information = interpolated([(0, 0.02), (60, 0.03), (200, 3.0), (1000, 5.0)])
    watched = watch(
        lambda step: reading(step, rate=8.9, information=information(step), use=1.5 * information(step)), cadence
    )
    assert (watched.alarms, watched.last.name) == ([], "healthy")


def test_information_that_leaves_zero_after_a_250th_of_the_steps_is_seen():
    """Of 10,000 steps the first 40 tell nothing; a run is healthy as soon as its beginning is over."""
    information = interpolated([(0, 0.01), (40, 0.02), (300, 2.0), (10_000, 5.0)])
    watched = watch(
        lambda step: reading(
            step, rate=2 * information(step), information=information(step), use=3 * information(step)
        ),
        Cadence(20, 4),
        KLSchedule(10_000, lambda step: 1.0),
        steps=2000,
    )
    assert [name for _, name in watched.changes] == ["cannot_tell", "healthy"]
    assert watched.first("healthy") <= 600


# --- Nine runs of 800 steps ---------------------------------------------------------------------------------------------

# KL, active units, mutual information and decoder use of an LSTM VAE with 16 latent dimensions at steps 50, 200 and 800.
ENDED_HEALTHY = {
    "synthetic, free bits 0.25 a dimension": ((5.7, 16, 1.8, 12), (4.0, 16, 2.2, 10), (3.8, 16, 2.8, 8.1)),
    "synthetic, batch-normalised means 0.6": ((2.9, 16, 1.5, 12), (3.0, 16, 1.7, 5.7), (3.0, 16, 2.1, 5.6)),
    "synthetic, weight 0.2": ((3.2, 16, 1.4, 8.3), (5.2, 16, 3.0, 12), (10, 16, 6.1, 40)),
}
ENDED_HEALTHY_AFTER_A_SLOW_START = {
    "SMILES, free bits 0.25 a dimension": ((4.1, 3, 0.1, 0.02), (3.2, 16, 1.3, 1.4), (3.5, 16, 2.5, 5.8)),
    "SMILES, weight 0.2": ((0.7, 2, 0.0, 0.0), (0.9, 14, 0.7, 0.7), (6.4, 16, 5.0, 12)),
}
ENDED_COLLAPSED = {
    "synthetic, weight 1": ((0.06, 6, 0.05, 0.06), (0.02, 0, 0.01, 0.0), (0.02, 0, 0.01, 0.06)),
    "SMILES, weight 1": ((0.01, 0, 0.0, 0.0), (0.0, 0, 0.0, 0.05), (0.0, 0, 0.0, 0.0)),
}
COLLAPSING_UNDER_A_RISING_WEIGHT = {
    "synthetic, weight 0 to 1": ((7.6, 16, 2.1, 14), (5.1, 16, 3.0, 16), (1.8, 7, 1.9, 8.1)),
    "SMILES, weight 0 to 1": ((4.2, 12, 0.17, 0.02), (0.7, 15, 0.5, 0.7), (0.2, 5, 0.2, 0.4)),
}
TABLE_STEPS = (50, 200, 800)
CONSTANT = KLSchedule(800, lambda step: 1.0)
RISING = KLSchedule(800, lambda step: step / 800)


def table_curve(columns: tuple[tuple[float, ...], ...]) -> Curve:
    """A run begins with nothing."""
    kl, active, information, use = (
        interpolated([(0, 0.01), *zip(TABLE_STEPS, numbers, strict=True)]) for numbers in zip(*columns, strict=True)
    )
    return lambda step: reading(
        step,
        rate=kl(step),
        active=int(active(step)),
        information=information(step),
        use=use(step),
        use_error=0.05 + 0.02 * use(step),
        posteriors=512,
    )


@at_two_cadences
@pytest.mark.parametrize("name", ENDED_HEALTHY)
def test_no_alarm_is_given_for_a_run_that_ended_healthy(name, cadence):
    watched = watch(table_curve(ENDED_HEALTHY[name]), cadence, CONSTANT, steps=800)
    assert (watched.alarms, watched.last.name) == ([], "healthy")


@at_two_cadences
@pytest.mark.parametrize("name", ENDED_HEALTHY_AFTER_A_SLOW_START)
def test_no_alarm_is_given_for_a_slow_start(name, cadence):
    """At step 50 the latent says nothing that is used."""
    watched = watch(table_curve(ENDED_HEALTHY_AFTER_A_SLOW_START[name]), cadence, CONSTANT, steps=800)
    assert (watched.alarms, watched.last.name) == ([], "healthy")


@at_two_cadences
@pytest.mark.parametrize("name", ENDED_COLLAPSED)
def test_an_alarm_is_given_for_a_run_that_ended_collapsed(name, cadence):
    watched = watch(table_curve(ENDED_COLLAPSED[name]), cadence, CONSTANT, steps=800)
    assert [alarm for _, alarm in watched.alarms] == ["collapsed"]
    assert watched.last.name == "collapsed"


@pytest.mark.parametrize("name", COLLAPSING_UNDER_A_RISING_WEIGHT)
def test_a_run_is_neither_well_nor_lost_while_its_weight_rises(name):
    watched = watch(table_curve(COLLAPSING_UNDER_A_RISING_WEIGHT[name]), DEFAULT, RISING, steps=750)
    assert [verdict for _, verdict in watched.changes] == ["warming_up"]


# --- Recorded runs ------------------------------------------------------------------------------------------------------


ALLOWED_ON_THE_WAY = {"collapsed": {"collapsing"}, "diverged": {"decoder_ignores_z", "not_variational"}}
"""Alarms before the right one: what a run that diverges was before is another question."""


@at_two_cadences
@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run.name)
def test_a_recorded_run_gets_its_right_verdict_and_no_false_alarm(run, cadence):
    watched = run.watched(cadence)
    allowed = set(run.truth).union(*(ALLOWED_ON_THE_WAY.get(name, ()) for name in run.truth))
    assert watched.last.name in run.truth
    assert {name for _, name in watched.alarms} <= allowed


NEVER_ALIVE = [run for run in RECORDED if run.truth == ["collapsed"] and not run.name.startswith("continued")]


@pytest.mark.parametrize("run", NEVER_ALIVE, ids=lambda run: run.name)
@at_two_cadences
def test_a_recorded_collapse_is_called_within_ten_readings_of_the_full_weight(run, cadence):
    full_from = run.schedule().full_from() or 0
    assert run.watched(cadence).first("collapsed") <= full_from + 10 * cadence.every_n_steps


@at_two_cadences
def test_a_recorded_fall_is_called_while_it_goes_on(cadence):
    (run,) = [run for run in RECORDED if run.name.startswith("continued")]
    names = [name for _, name in run.watched(cadence).changes]
    assert names == ["cannot_tell", "healthy", "collapsing", "collapsed"]


def test_the_recorded_runs_came_to_every_end_there_is():
    ends = {name for run in RECORDED for name in run.truth}
    assert ends == {"healthy", "collapsed", "decoder_ignores_z", "partly_collapsed", "not_variational", "diverged"}
    assert all(run.total_steps == STEPS for run in RECORDED)
