"""What is said of a speed: the numbers that follow from it, the table, the picture, and what is named as the bottleneck."""

import json

import matplotlib.image
import pytest

from seqvae.config.data import BatchSettings
from seqvae.config.run import ValidationSettings
from seqvae.config.training import OptimizedSettings, ReferenceSettings
from seqvae.profiling.analysis import Costs, bottleneck_of, whole_run
from seqvae.reports.profile_report import (
    STAGE_NAMES,
    Bottleneck,
    Comparison,
    as_dict,
    performance_page,
    write_performance_figure,
)
from seqvae.reports.terminal import Ink, grid
from seqvae.text import cells
from seqvae.training.schedules import Plan
from tests.support.speeds import RUN, speed

NOTHING = Bottleneck("nothing", "Nothing does.", ())
COMPARISON = Comparison("optimized", "reference", 4.0, 3.5, 4.5)


# --- Numbers -----------------------------------------------------------------------------------------------------------


def test_rates_are_of_real_steps_and_so_is_the_share_of_the_peak():
    half_padding = speed(real_steps=50_000, padded_steps=100_000)
    assert half_padding.real_steps_per_second == 5_000
    assert half_padding.padding_share == 0.5
    assert half_padding.flops_per_second == 5_000 * 4e7
    assert half_padding.share_of_peak == 0.5


def test_events_a_second_follow_from_those_of_a_step():
    assert speed(events_per_step=6.0).events_per_second == 30_000


def test_all_of_it_can_be_written_as_json():
    told = json.loads(json.dumps(as_dict(speed(), NOTHING), allow_nan=False))
    assert told["real_steps_per_second"] == 5_000
    assert told["run"]["seconds"] == 1021.0
    assert told["bottleneck"] == {"name": "nothing", "evidence": "Nothing does.", "tries": []}
    assert list(told["stages"]) == list(STAGE_NAMES)


# --- The whole run -----------------------------------------------------------------------------------------------------


def run_of(steps: int, validation: ValidationSettings) -> tuple[int, float, int]:
    """Validations, their seconds and checkpoints of a run with 10 optimizer steps an epoch.

    A validation takes 3 seconds on the way, and 100 on everything.
    """
    plan = Plan(steps, steps_per_epoch=10, tokens_per_step=100.0, sequences_per_step=4.0, lr=0.1)
    costs = Costs(step=1.0, validation=3.0, last_validation=100.0, checkpoint=0.5)
    run = whole_run(validation, plan, costs, batches_per_epoch=20, accumulate=2)
    assert run.training_seconds == steps
    assert run.checkpoint_seconds == 0.5 * run.checkpoints
    return run.validations, run.validation_seconds, run.checkpoints


def test_a_run_that_ends_with_a_validation_on_all_needs_no_other():
    assert run_of(30, ValidationSettings()) == (3, 9.0, 3)


def test_a_run_that_ends_between_two_validations_has_one_more_of_each():
    assert run_of(35, ValidationSettings()) == (4, 109.0, 4)


def test_validations_on_a_part_are_followed_by_one_on_all():
    assert run_of(20, ValidationSettings(val_check_interval=5, limit_val_batches=0.1)) == (5, 112.0, 4)


def test_validations_by_steps_are_counted_from_the_beginning_of_each_epoch():
    assert run_of(20, ValidationSettings(val_check_interval=3)) == (7, 118.0, 7)


def test_without_validations_there_is_the_last_one_and_a_checkpoint_each_epoch():
    assert run_of(25, ValidationSettings(limit_val_batches=0)) == (1, 100.0, 3)


def test_checkpoints_by_steps_have_the_one_at_the_end():
    assert run_of(25, ValidationSettings(checkpoint_every_n_steps=10))[2] == 3


# --- The bottleneck ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "name"),
    [
        (speed(), "the products themselves"),
        (speed(peak_flops_per_second=4e12), "small operations"),
        (speed(stages={"data": 0.4}), "the products themselves"),
        (speed(stages={"data": 0.6}), "waiting for data"),
        (speed(real_steps=50_000, padded_steps=60_000), "padding"),
        (speed(stages={"optimizer": 1.6}), "clipping and optimizer"),
        (speed(stages={"monitoring": 0.7, "loop": 0.5}), "monitoring and loop"),
        (speed(stages={"data": 1.0, "optimizer": 3.0}), "clipping and optimizer"),
        (speed(stages={"data": 3.0, "optimizer": 2.0}), "waiting for data"),
        (speed(run=RUN._replace(validation_seconds=200.0)), "validation"),
        (speed(run=RUN._replace(checkpoint_seconds=100.0)), "checkpoints"),
        (speed(recompiles=2), "recompiling"),
    ],
)
def test_the_costliest_loss_that_is_notable_is_the_bottleneck(measured, name):
    assert bottleneck_of(measured, OptimizedSettings()).name == name


def test_padding_costs_no_more_than_the_time_that_is_computed():
    mostly_waiting = speed(stages={"data": 9.0}, real_steps=50_000, padded_steps=100_000)
    assert bottleneck_of(mostly_waiting, OptimizedSettings()).name == "waiting for data"


def test_what_is_in_force_already_is_not_proposed():
    slow = speed(stages={"optimizer": 3.0})
    assert "--fused_optimizer" in bottleneck_of(slow, ReferenceSettings()).tries
    assert "--fused_optimizer" not in bottleneck_of(slow, OptimizedSettings()).tries


@pytest.mark.parametrize(
    ("batches", "tries"),
    [
        (BatchSettings(pad_grid=32, batch_size=512), ("--pad_grid 0", "a smaller --batch_size")),
        (BatchSettings(pad_grid=0), ("a smaller --tokens_per_batch",)),
        (BatchSettings(bucketing=False), ("--bucketing",)),
        (BatchSettings(use_dynamic_padding=False), ("--use_dynamic_padding", "a lower --max_sequence_length")),
    ],
)
def test_padding_is_blamed_on_what_pads(batches, tries):
    padded = speed(real_steps=50_000, padded_steps=60_000)
    assert bottleneck_of(padded, OptimizedSettings(batches=batches)).tries == tries


def test_a_batch_is_enlarged_by_the_limit_that_is_in_force():
    slow = speed(stages={"optimizer": 3.0})
    assert "a larger --batch_size" in bottleneck_of(slow, ReferenceSettings()).tries
    assert "a larger --tokens_per_batch" in bottleneck_of(slow, OptimizedSettings()).tries


def test_the_evidence_names_the_share():
    assert "20.0 % of the time" in bottleneck_of(speed(stages={"data": 2.0}), OptimizedSettings()).evidence


# --- The table ---------------------------------------------------------------------------------------------------------


def page(*speeds, comparison=None) -> str:
    return "\n".join(performance_page(["tokens: a column"], speeds, [NOTHING] * len(speeds), comparison, Ink()))


def test_a_page_of_one_command_has_milliseconds_of_an_optimizer_step():
    text = page(speed(stages={"data": 1.0, "backward": 6.0}))
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert "Where an optimizer step of 1,000 ms goes (10 of them)" in rows
    assert any(row.startswith("waiting for data 100.00 10.0 %") for row in rows)
    assert any(row.startswith("backward 600.00 60.0 %") for row in rows)
    assert {"real tokens/s 5,000", "in 3 turns 4,000-6,000", "optimizer step 1,000 ms", "padding 0 %"} <= rows
    assert {"peak memory 1.25 GiB", "CPU 90.0 % of 2 cores", "share of that peak 50.0 %"} <= rows


def test_a_page_of_two_has_microseconds_of_a_real_step_side_by_side_and_their_ratio():
    text = page(speed("reference", real_steps=12_500), speed(), comparison=COMPARISON)
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert "forward 800.00 100 % 200.00 100 %" in rows
    assert "real tokens/s 1,250 5,000" in rows
    assert "optimized passes 4.00 times as many real tokens per second as reference" in " ".join(text.split())


def test_no_line_is_wider_than_the_paper():
    text = page(speed("reference"), speed(), comparison=COMPARISON)
    assert max(map(cells, text.splitlines())) <= 80


def test_what_a_machine_does_not_tell_has_no_row():
    told = page(speed(gpu_utilisation=0.5, events_per_step=2.0, others_cpu_share=0.01))
    silent = page(speed(others_cpu_share=None))
    for name in ("GPU", "events/s", "other programs"):
        assert name in told
        assert name not in silent


def test_a_busy_machine_is_warned_of():
    assert "on a quiet one" in page(speed(others_cpu_share=0.3))
    assert "on a quiet one" not in page(speed(others_cpu_share=0.05))


def test_columns_of_a_grid_stand_under_one_another():
    assert grid([["", "a"], ["name", "1,000"], ["x", "2"]], Ink()) == [
        "            a",
        "  name  1,000",
        "  x         2",
    ]


# --- The picture -------------------------------------------------------------------------------------------------------


def test_the_picture_of_one_command_shows_the_colours_of_what_took_time(tmp_path):
    write_performance_figure(tmp_path / "one.png", [speed(stages={"backward": 6.0, "data": 2.0})], None)
    pixels = matplotlib.image.imread(tmp_path / "one.png")[..., :3]
    for red, green, blue in ((0x00, 0x43, 0x7A), (0xD5, 0x5E, 0x00), (0x8E, 0xCA, 0xE6)):
        share = (abs(pixels - [red / 255, green / 255, blue / 255]).max(axis=2) < 0.02).mean()
        assert share > 0.02


def test_two_commands_have_two_bars_whose_lengths_are_in_the_ratio_of_their_speeds(tmp_path):
    speeds = [speed("reference", real_steps=12_500), speed()]
    write_performance_figure(tmp_path / "two.png", speeds, COMPARISON)
    pixels = matplotlib.image.imread(tmp_path / "two.png")[..., :3]
    forward = abs(pixels - [0x8E / 255, 0xCA / 255, 0xE6 / 255]).max(axis=2) < 0.02
    widths = sorted({int(row.sum()) for row in forward[: len(forward) // 3] if row.sum() > 50}, reverse=True)
    assert widths[0] > 2 * widths[-1]
