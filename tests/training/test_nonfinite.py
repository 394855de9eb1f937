"""Steps that come to NaN or infinity: not taken, told with their sequences, too many in a row; and where a run goes back to."""

import math
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning import Callback

from seqvae.config.run import RunSettings
from seqvae.reports.run_files import LAST, PREVIOUS, read_events
from seqvae.training.callbacks.nonfinite import (
    MOST_IN_A_ROW,
    MOST_TIMES,
    NonFiniteError,
    Recovery,
    SkippedSteps,
    StepJudge,
    read_recovery,
)
from seqvae.training.callbacks.progress import Progress
from seqvae.training.distributed import ResolvedPrecision
from seqvae.training.module import TrainingModule
from seqvae.training.run_directory.checkpoint_file import REPLACED, read_lazily
from seqvae.training.run_directory.records import RunEvents
from seqvae.training.run_directory.resume import ROLLED_BACK, Start, adopt_as_last, find_checkpoint, go_back, open_run
from tests.support.fake_sequences import FakeSequences
from tests.support.short_runs import STEPS, short_module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


SEQUENCES = FakeSequences(np.full(16, 5))


class Spoilt(TrainingModule):
    """Losses of some micro-batches are not finite."""

    losses: dict[int, float]

    def compute(self, batch: Any, part: int, *more: Any) -> dict[str, Any]:
        told = super().compute(batch, part, *more)
        factor = self.losses.get(batch.position, 1.0)
        if not math.isfinite(factor):
            told["loss"] = told["loss"] * factor
            self.judge.add(told["loss"], batch.sequences_B)
        return told


class Weights(Callback):
    """After each optimizer step."""

    def __init__(self) -> None:
        self.at: dict[int, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        weights = [weight.detach().flatten() for weight in pl_module.network.parameters()]
        self.at[trainer.global_step] = torch.cat(weights).clone()


def spoilt_run(directory: Path, losses: dict[int, float], *, fused: bool = True, **options: Any) -> tuple[Any, Weights]:
    module = short_module(fused_optimizer=fused)
    module.__class__ = type("Spoilt", (Spoilt,), {"losses": losses})
    weights = Weights()
    skipped = SkippedSteps(module.judge, RunEvents(directory), SEQUENCES.ids)
    return train(directory, [weights, skipped], module=module, **options), weights


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_changes_no_weight_and_the_next_ones_go_on(fused, loss, tmp_path):
    _, weights = spoilt_run(tmp_path, {4: loss, 9: loss}, fused=fused)
    unchanged = [step for step in range(2, STEPS + 1) if torch.equal(weights.at[step], weights.at[step - 1])]
    assert unchanged == [3, 5]
    assert all(bool(at.isfinite().all()) for at in weights.at.values())


def test_the_sequences_of_the_spoilt_micro_batch_alone_are_told(tmp_path):
    batches: dict[int, list[int]] = {}

    class Spy(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batches[batch.position] = batch.sequences_B.tolist()

    module = short_module()
    module.__class__ = type("Spoilt", (Spoilt,), {"losses": {5: math.nan}})
    skipped = SkippedSteps(module.judge, RunEvents(tmp_path), SEQUENCES.ids)
    train(tmp_path, [Spy(), skipped], module=module)
    (event,) = read_events(tmp_path)
    assert (event["event"], event["step"]) == ("step_skipped", 3)
    assert set(event["sequences"]) == set(batches[5])


@pytest.mark.parametrize("first", [2, 8])
def test_too_many_in_a_row_end_the_session_and_tell_where_it_began(first, tmp_path):
    with pytest.raises(NonFiniteError, match=f"step {first // 2 + MOST_IN_A_ROW}: the loss is nan") as raised:
        spoilt_run(tmp_path, dict.fromkeys(range(first, 100), math.nan))
    assert raised.value.first_step == first // 2 + 1


def test_fewer_in_a_row_do_not_however_many_they_are(tmp_path):
    losses = {position: math.nan for position in range(24) if position // 2 % MOST_IN_A_ROW}
    run, _ = spoilt_run(tmp_path, losses)
    assert run.trainer.global_step == STEPS


@pytest.mark.parametrize(("loss_scale", "is_told"), [(2.0**16, False), (1.0, True)])
def test_a_gradient_that_overflows_lets_the_loss_scale_fall_first(loss_scale, is_told, tmp_path):
    class Overflows(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == 3:
                next(iter(pl_module.network.parameters())).grad.fill_(math.inf)

    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
    plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    module = short_module()
    skipped = SkippedSteps(module.judge, RunEvents(tmp_path), SEQUENCES.ids)
    train(tmp_path, [Overflows(), skipped], module=module, max_steps=6, plugins=[plugin], limit_val_batches=0)
    assert [event["event"] for event in read_events(tmp_path)] == ["step_skipped"] * is_told
    assert float(scaler.get_scale()) == loss_scale / 2


def test_a_fused_optimizer_on_a_gpu_is_told_on_the_device(monkeypatch):
    """As torch's own scaler does it: the step is left out without anybody waiting. Here on a CPU, which obeys the same word."""
    monkeypatch.setattr("seqvae.training.callbacks.nonfinite.leaves_out_on_device", lambda *_: True)
    trainer: Any = SimpleNamespace(world_size=1, precision_plugin=None)
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for loss, expected in ((math.nan, 1.0), (1.0, 0.9)):
        weight.grad = torch.ones(3)
        judge = StepJudge()
        judge.add(torch.tensor(loss), torch.zeros(1))
        judge.refuse_if_spoilt(optimizer, torch.tensor(1.0), trainer)
        optimizer.step()
        assert weight[0].item() == pytest.approx(expected, abs=0.01)


# --- Where a run goes back to ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """last.ckpt at 8, previous.ckpt at 6, best.ckpt at some validation."""
    train(tmp_path / "checkpoints", max_steps=8)
    return tmp_path


def steps_of(directory: Path) -> dict[str, int]:
    return {path.name: read_lazily(path)["global_step"] for path in (directory / "checkpoints").glob("*.ckpt")}


def test_a_run_goes_back_to_the_newest_checkpoint_from_before(saved):
    assert go_back(saved, before_step=9) == saved / "checkpoints" / LAST
    assert steps_of(saved)[LAST] == 8
    assert go_back(saved, before_step=8) == saved / "checkpoints" / LAST
    assert (steps_of(saved)[LAST], steps_of(saved)[f"diverged-{LAST}"]) == (6, 8)


def test_with_no_checkpoint_from_before_it_goes_back_to_its_beginning_and_nothing_leads_astray_again(saved):
    steps = steps_of(saved)
    assert go_back(saved, before_step=1) is None
    assert steps_of(saved) == {f"diverged-{name}": step for name, step in steps.items()}
    assert find_checkpoint(saved) is None


def test_what_a_run_without_a_checkpoint_decided_outlives_its_being_cleared(tmp_path):
    run = RunSettings(output_dir=str(tmp_path), run_name="a")
    with ExitStack() as held:
        directory = open_run(run, "tokens", held).directory
        (directory / "config.yaml").touch()
        events = RunEvents(directory)
        events.note("started", 0)
        events.note(ROLLED_BACK, 7, asked_lr=0.01, lr=0.005, precision="32-true")
    with ExitStack() as held:
        open_run(run, "tokens", held)
    assert [event["event"] for event in read_events(directory)] == [ROLLED_BACK]
    assert read_recovery(directory, 0.01).lr == 0.005


@pytest.mark.parametrize("event", [{}, {"asked_lr": 0.01}, {"asked_lr": 0.01, "lr": 1e9, "precision": "32-true"}])
def test_what_somebody_else_wrote_decides_nothing(event, tmp_path):
    RunEvents(tmp_path).note(ROLLED_BACK, 7, **event)
    assert read_recovery(tmp_path, 0.01) == Recovery(0.01, 0.01)


def test_what_resume_names_is_the_runs_last_checkpoint_from_then_on(saved):
    best = saved / "checkpoints" / PREVIOUS
    adopt_as_last(Start(saved, best))
    assert find_checkpoint(saved) == saved / "checkpoints" / LAST
    assert (steps_of(saved)[LAST], steps_of(saved)[REPLACED]) == (6, 8)
    adopt_as_last(Start(saved, best))
    assert steps_of(saved)[REPLACED] == 8


def test_each_time_the_rate_is_lower_and_three_times_is_all():
    recovery, rates = Recovery(0.01, 0.01), []
    while recovery.times < MOST_TIMES:
        recovery = recovery.once_more("32-true", "cpu")
        rates.append(recovery.lr)
    assert rates == [0.005, 0.0025, 0.00125]


@pytest.mark.parametrize(("has_units", "then"), [(True, "bf16-mixed"), (False, "32-true")])
def test_from_16_mixed_a_run_goes_on_in_what_the_device_has(has_units, then, monkeypatch):
    monkeypatch.setattr("seqvae.training.callbacks.nonfinite.cpu_has_bf16_units", lambda: has_units)
    recovery = Recovery(0.01, 0.01).once_more("16-mixed", "cpu")
    assert recovery.resolve_precision(ResolvedPrecision("16-mixed")).precision == then
    assert Recovery(0.01, 0.01).once_more("32-true", "cpu").resolve_precision(
        ResolvedPrecision("32-true")
    ) == ResolvedPrecision("32-true")


def test_what_was_decided_holds_for_later_sessions_unless_another_rate_is_asked_for(tmp_path):
    events = RunEvents(tmp_path)
    assert read_recovery(tmp_path, 0.01) == Recovery(0.01, 0.01)
    for lr in (0.005, 0.0025):
        events.note(ROLLED_BACK, 7, asked_lr=0.01, lr=lr, precision="32-true")
    assert read_recovery(tmp_path, 0.01) == Recovery(0.01, 0.0025, 2, "32-true")
    assert read_recovery(tmp_path, 0.001) == Recovery(0.001, 0.001)


def test_a_validation_that_is_no_number_sends_a_run_back(tmp_path, monkeypatch):
    module = short_module()
    validate = module._validate

    def spoilt(batch: Any, part: int) -> Any:
        sums, *others = validate(batch, part)
        return sums._replace(loss=sums.loss * math.nan), *others

    monkeypatch.setattr(module, "_validate", spoilt)
    progress = Progress(tmp_path / "m.csv", every_n_steps=5, total_steps=STEPS, unit="token")
    with pytest.raises(NonFiniteError, match="step 2: the validation ELBO is nan") as raised:
        train(tmp_path, [progress], module=module)
    assert raised.value.first_step == 2
