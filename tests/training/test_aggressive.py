"""Aggressive training of the encoder: what it moves, what ends it, what it may cost, and that a run goes on exactly amid it."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning import Callback, Trainer
from torch import Tensor, nn

from seqvae.config.data import CacheSettings
from seqvae.config.model import ModelSettings
from seqvae.config.training import ComputeSettings, ObjectiveSettings, OptimizerSettings, TrainingSettings
from seqvae.errors import UsageError
from seqvae.files import read_rows
from seqvae.training.callbacks.aggressive import AGGRESSIVE, AggressiveEncoder, encoder_weights
from seqvae.training.module import TrainingModule
from seqvae.training.remedies import BEGUN, MOST_IN_A_ROW, PATIENCE, RISE, WINDOW, AggressivePlan
from seqvae.training.run_directory.records import RunEvents
from tests.support.short_runs import STEPS, Ask, Kill, Run, ShortData, assert_same, last_of, short_module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")
ON = ObjectiveSettings(aggressive_encoder=True)


# --- The plan ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.lists(st.integers(0, 30), max_size=20))
def test_the_budget_is_never_exceeded(budget, rows):
    plan = AggressivePlan(budget)
    for row in rows:
        taken = sum(plan.take_step() for _ in range(min(row, plan.left)))
        assert taken <= row
        plan.end_steps(0.5)
        assert plan.state.used_steps <= budget
    assert plan.is_over == (plan.state.used_steps >= budget)


def test_it_ends_when_the_mutual_information_stops_rising_and_not_before_there_is_any():
    plan = AggressivePlan(1000)
    for information in (0.0, 0.01, math.nan, 0.0, BEGUN / 2, BEGUN / 2, BEGUN / 2, BEGUN / 2):
        plan.take_in(information)
    assert not plan.is_over
    for information in (0.5, 0.9, 0.89, 0.9 + RISE / 2, 1.5, 1.4, math.nan, 1.5):
        plan.take_in(information)
    assert not plan.is_over
    assert plan.state.without_rise == PATIENCE - 1
    plan.take_in(1.5 + RISE / 2)
    assert plan.state.ended_because == "the mutual information no longer rises above 1.50 nats"
    assert not plan.take_step()


def test_the_same_readings_give_the_same_plan_across_a_checkpoint():
    plan, other = AggressivePlan(100), AggressivePlan(100)
    for information in (0.2, 0.4, 0.4):
        plan.take_in(information)
    other.load_state_dict(plan.state_dict())
    for each in (plan, other):
        each.take_in(0.4)
        each.take_in(0.4)
    assert plan.state == other.state
    assert other.is_over


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"compute": ComputeSettings(strategy="fsdp")}, "--strategy fsdp"),
        ({"model": ModelSettings(latent_scope="both")}, "--latent_scope both"),
        ({"cache": CacheSettings(stream=True, cache_dir="s3://bucket/caches")}, "--stream"),
    ],
)
def test_what_it_does_not_go_with_is_refused(settings, why):
    with pytest.raises(ValueError, match=f"--aggressive_encoder .*{why}"):
        TrainingSettings(objective=ON, **settings)


# --- Runs -------------------------------------------------------------------------------------------------------------


class Readings(Callback):
    """In place of a monitor: a mutual information that is a function of the step."""

    def __init__(self, information: Any) -> None:
        self.information, self.reading = information, SimpleNamespace(step=0, mutual_information=0.0)
        self.every: list[int | None] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        self.reading = SimpleNamespace(step=step, mutual_information=self.information(step))

    def read_at_least_every(self, n_steps: int | None) -> None:
        self.every.append(n_steps)


class Look(Callback):
    """The encoder steps before each micro-batch, and what moved in them; it stands behind what takes them."""

    def __init__(self, aggressive: AggressiveEncoder) -> None:
        self.aggressive = aggressive
        self.used: list[int] = []
        self.moved: list[str] = []
        self.before: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        now = pl_module.network.state_dict()
        self.moved += [name for name, value in now.items() if self.before and not torch.equal(value, self.before[name])]
        self.used.append(self.aggressive.plan.state.used_steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.before = {name: value.clone() for name, value in pl_module.network.state_dict().items()}


def run(
    directory: Path, *callbacks: Callback, budget: float = 8.0, information: Any = lambda step: step, **options: Any
) -> tuple[Run, AggressiveEncoder, Readings]:
    data, readings = ShortData(), Readings(information)
    monitor: Any = readings
    aggressive = AggressiveEncoder(data, monitor, budget)
    module = short_module(STEPS, ON, **options.pop("optimizer", {}))
    module.events = RunEvents(directory)
    ended = train(directory, [*callbacks, readings, aggressive], module=module, data=data, **options)
    return ended, aggressive, readings


def test_only_what_the_posterior_alone_depends_on_moves_and_the_budget_ends_it(tmp_path):
    data, module = ShortData(), short_module(STEPS, ON)
    aggressive = AggressiveEncoder(data, None, budget=5.0)
    look, module.events = Look(aggressive), RunEvents(tmp_path)
    train(tmp_path, [aggressive, look], module=module, data=data, every_n_steps=4)
    used, per_step = look.used, [after - before for before, after in zip([0, *look.used], look.used, strict=False)]
    assert used[-1] == 5 * STEPS
    assert max(per_step) <= MOST_IN_A_ROW
    assert per_step[0] >= min(WINDOW, ShortData().cut.batches)
    assert per_step[1] == 0  # the second micro-batch of the same step
    expected = {
        name for name, w in module.network.named_parameters() if any(w is e for e in encoder_weights(module.network))
    }
    assert set(look.moved) == expected
    assert not any(name.startswith(("decoder", "likelihood", "embedding")) for name in expected)
    (event,) = [row for row in read_rows(tmp_path / "events.jsonl") if row["event"] == AGGRESSIVE]
    assert (event["used_steps"], event["budget_steps"], event["ended_because"]) == (60, 60, "the budget is used up")
    assert event["seconds"] > 0


def test_the_reading_ends_it_and_then_no_encoder_steps_are_taken(tmp_path):
    ended, aggressive, readings = run(tmp_path, budget=1000.0, information=lambda step: min(step, 3))
    state = aggressive.plan.state
    assert state.ended_because == "the mutual information no longer rises above 3.00 nats"
    assert state.steps == 3 + PATIENCE
    assert readings.every == [5, None]
    assert ended.trainer.global_step == STEPS


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stop",
    [Ask("on_train_batch_start", 4), pytest.param(Kill("on_train_batch_start", 7), marks=pytest.mark.slow)],
    ids=["signal", "kill"],
)
def test_a_run_goes_on_exactly_in_the_midst_of_it(optimizer, stop, tmp_path):
    stop.calls, options = 0, {"every_n_steps": 1, "limit_val_batches": 0}
    unbroken, whole, _ = run(tmp_path / "unbroken", optimizer={"optimizer": optimizer}, **options)
    before, part, _ = run(tmp_path / "broken", stop, optimizer={"optimizer": optimizer}, **options)
    assert before.ended_by is not None
    assert 0 < part.plan.state.used_steps < whole.plan.state.used_steps
    checkpoint = last_of(tmp_path / "broken")
    after, rest, _ = run(tmp_path / "broken", checkpoint=checkpoint, optimizer={"optimizer": optimizer}, **options)
    assert_same(after, unbroken)
    assert rest.plan.state._replace(seconds=0.0) == whole.plan.state._replace(seconds=0.0)


def test_what_is_not_ours_has_no_encoder_to_train():
    module = TrainingModule(nn.Linear(1, 1), ON, OptimizerSettings(), total_steps=STEPS, seed=0, origin={})
    with pytest.raises(UsageError, match="--aggressive_encoder: Linear has no encoder of ours"):
        AggressiveEncoder(ShortData(), None, 1.0).setup(
            Trainer(logger=False, enable_checkpointing=False), module, "fit"
        )
