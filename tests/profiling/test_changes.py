"""Which changes are worth trying, what they keep, and the command line that they make."""

from dataclasses import replace

import pytest

from seqvae.cli.command_line import parse_command_line
from seqvae.config.data import BatchSettings, LoadingSettings
from seqvae.config.training import ComputeSettings, OptimizedSettings, OptimizerSettings, TrainingSettings
from seqvae.profiling.advise import (
    Change,
    Facts,
    Trial,
    Verdict,
    as_typed,
    changes_for,
    with_flags,
    worth_measuring_again,
)

FACTS = Facts(
    device="cpu",
    precision="32-true",
    has_bf16=True,
    tokens=100_000,
    longest=100,
    tokens_per_batch=400,
    waiting_share=0.001,
    has_room=True,
)
PLAIN = TrainingSettings()
IN_TWOS = replace(PLAIN, optimizer=OptimizerSettings(gradient_accumulation_steps=2))


def changes_of(theme: str, settings: TrainingSettings = PLAIN, facts: Facts = FACTS) -> dict[str, Change]:
    return {change.name: change for change in changes_for(settings, facts) if change.theme == theme}


def flags_of_theme(theme: str, settings: TrainingSettings = PLAIN, facts: Facts = FACTS) -> list[str]:
    return [" ".join(as_typed(change.values)) for change in changes_of(theme, settings, facts).values()]


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_other_batches_keep_the_tokens_of_an_optimizer_step(accumulate):
    settings = replace(PLAIN, optimizer=OptimizerSettings(gradient_accumulation_steps=accumulate))
    found = changes_of("batches", settings)
    assert found
    for change in found.values():
        changed = change.apply(settings)
        budget = changed.batches.tokens_per_batch or 0
        assert budget * changed.optimizer.gradient_accumulation_steps == FACTS.tokens_per_batch * accumulate


def test_a_number_of_sequences_grows_as_a_budget_does():
    settings = replace(IN_TWOS, batches=BatchSettings(batch_size=4))
    assert flags_of_theme("batches", settings) == [
        "--batch_size 8 --gradient_accumulation_steps 1",
        "--batch_size 2 --gradient_accumulation_steps 4",
    ]


def test_an_odd_number_of_sequences_is_not_halved():
    settings = replace(IN_TWOS, batches=BatchSettings(batch_size=5))
    assert list(changes_of("batches", settings)) == ["batches 2 times as large"]


def test_batches_never_get_smaller_than_the_longest_sequence():
    assert list(changes_of("batches", IN_TWOS, FACTS._replace(longest=201))) == ["batches 2 times as large"]


def test_batches_never_get_larger_than_the_data():
    assert list(changes_of("batches", IN_TWOS, FACTS._replace(tokens=799))) == ["batches half as large"]


def test_larger_batches_are_tried_only_where_memory_has_room():
    assert list(changes_of("batches", IN_TWOS, FACTS._replace(has_room=False))) == ["batches half as large"]


def test_gradient_checkpointing_that_is_on_is_tried_without():
    settings = replace(PLAIN, compute=ComputeSettings(gradient_checkpointing=True))
    assert flags_of_theme("memory", settings) == ["--no_gradient_checkpointing"]


@pytest.mark.parametrize(
    "batches", [BatchSettings(bucketing=False), BatchSettings(use_dynamic_padding=False)], ids=["random", "one_shape"]
)
def test_sorting_by_length_keeps_the_number_of_sequences(batches):
    (change,) = (
        c for c in changes_of("batches", replace(PLAIN, batches=batches)).values() if c.reason == "less padding"
    )
    changed = change.apply(replace(PLAIN, batches=batches)).batches
    assert changed == BatchSettings(batch_size=4, bucketing=True, use_dynamic_padding=True)


def test_a_grid_of_shapes_is_tried_the_other_way_round():
    assert flags_of_theme("shapes") == ["--pad_grid 32"]
    assert flags_of_theme("shapes", replace(PLAIN, batches=BatchSettings(pad_grid=16))) == ["--pad_grid 0"]


def test_no_grid_where_all_batches_have_one_length():
    assert flags_of_theme("shapes", replace(PLAIN, batches=BatchSettings(use_dynamic_padding=False))) == []


def test_the_precisions_that_are_not_in_force_are_tried():
    assert flags_of_theme("precision") == ["--precision bf16-mixed"]
    assert flags_of_theme("precision", facts=FACTS._replace(precision="bf16-mixed")) == ["--precision 32-true"]


def test_no_half_precision_where_nothing_computes_fast_with_it():
    assert flags_of_theme("precision", facts=FACTS._replace(has_bf16=False)) == []


def test_more_loader_workers_only_where_a_step_waits():
    assert flags_of_theme("loading") == []
    assert flags_of_theme("loading", facts=FACTS._replace(waiting_share=0.3)) == ["--num_workers 2"]


def test_many_worker_processes_are_tried_as_one_thread():
    settings = replace(PLAIN, loading=LoadingSettings(worker_type="process", num_workers=8))
    assert "--worker_type thread --num_workers 1" in flags_of_theme("loading", settings)


def test_pinned_memory_is_tried_for_a_gpu_where_it_was_switched_off():
    on_gpu, unpinned = FACTS._replace(device="cuda"), replace(PLAIN, loading=LoadingSettings(pin_memory=False))
    assert flags_of_theme("transfer", unpinned) == []
    assert flags_of_theme("transfer", unpinned, facts=on_gpu) == ["--pin_memory"]
    assert flags_of_theme("transfer", facts=on_gpu) == []


def test_compiling_is_tried_the_other_way_round():
    assert flags_of_theme("compiler") == ["--compile_model"]
    compiled = replace(PLAIN, compute=ComputeSettings(compile_model=True))
    assert flags_of_theme("compiler", compiled) == ["--no_compile_model"]


def test_a_fused_optimizer_is_proposed_and_never_taken_away():
    assert flags_of_theme("optimizer") == []
    settings = replace(PLAIN, optimizer=OptimizerSettings(fused_optimizer=False))
    assert flags_of_theme("optimizer", settings) == ["--fused_optimizer"]


def test_watching_is_never_given_up_but_for_less_of_it():
    assert flags_of_theme("watching") == ["--fast_detection"]


@pytest.mark.parametrize("settings", [PLAIN, IN_TWOS, replace(PLAIN, batches=BatchSettings(batch_size=4))])
def test_every_change_changes_something_and_comes_back_from_its_flags(settings):
    words = ["--gradient_accumulation_steps", str(settings.optimizer.gradient_accumulation_steps)]
    words += ["--batch_size", str(settings.batches.batch_size or "null")]
    for change in changes_for(settings, FACTS._replace(waiting_share=0.5)):
        changed = change.apply(settings)
        assert changed != settings
        typed = with_flags(words, change.values)
        assert parse_command_line(TrainingSettings, typed, prog="x", description="") == changed


def test_changes_of_different_themes_combine():
    trials = [Trial(change, Verdict.FASTER, gain=1.1) for change in changes_for(IN_TWOS, FACTS)]
    changed = worth_measuring_again(trials)[0].apply(IN_TWOS)
    assert changed.compute.compile_model
    assert changed.compute.precision == "bf16-mixed"


def test_a_change_of_what_is_no_setting_is_a_mistake():
    with pytest.raises(AssertionError, match="no setting speed"):
        Change("x", "x", {"speed": 2}, "x").apply(PLAIN)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["--batch_size", "4"], []),
        (["--batch-size=4"], []),
        (["--no_bucketing"], []),
        (["--bucketing", "false", "--seed", "3"], ["--seed", "3"]),
        (["--config", "a b.yaml", "--batch_size_x=1"], ["--config", "a b.yaml", "--batch_size_x=1"]),
        (["--lr=-1", "--warmup", "-1"], ["--lr=-1", "--warmup", "-1"]),
        ([], []),
    ],
)
def test_typed_flags_are_replaced_and_not_doubled(typed, kept):
    changed = with_flags(typed, {"batch_size": 8, "bucketing": True})
    assert changed == [*kept, "--batch_size", "8", "--bucketing"]


def test_a_flag_wins_over_the_commands_own_default():
    typed = with_flags(["--preset", "max_speed"], {"compile_model": False, "gradient_accumulation_steps": 1})
    settings = parse_command_line(OptimizedSettings, typed, prog="x", description="")
    assert not settings.compute.compile_model
    assert settings.optimizer.gradient_accumulation_steps == 1
