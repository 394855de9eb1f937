"""What a run says of itself: the same rows however often it is interrupted, honest speed, no sync between two rows."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from seqvae.training.callbacks.progress import COLUMNS, LABEL_COLUMNS, STATE, Progress
from tests.support.pseudo_terminal import terminal
from tests.support.scripted_training import (
    Clock,
    Loader,
    Recorder,
    Scripted,
    fake_trainer,
    read_rows,
    second_by_second,
    step_through,
)

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


# --- Under a Trainer ------------------------------------------------------------------------------------------------


VALIDATION = {name: torch.tensor(1.5) for name in COLUMNS if name.startswith("valid_")}
VALIDATED = {3, 6, 9, 12, 15}
"""Optimizer steps with a validation, of two batches each, six to an epoch, 15 in all."""


class SaveAndStop(lightning.Callback):
    """Saves at one step, where a validation is due after it, and breaks off at another."""

    def __init__(self, path: Path, save_at: int, stop_at: int) -> None:
        self.path, self.save_at, self.stop_at = path, save_at, stop_at

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == self.save_at and step not in VALIDATED and not self.path.exists():
            trainer.save_checkpoint(self.path)
        if step == self.stop_at:
            raise KeyError("broken off")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)


def run(folder: Path, *more: lightning.Callback, resume: Path | None = None, **changes: Any) -> None:
    options: dict[str, Any] = {"every_n_steps": 4, "total_steps": 15, "unit": "token"}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=15,
        accumulate_grad_batches=2,
        val_check_interval=6,
        num_sanity_val_steps=1,
        limit_val_batches=2,
        callbacks=[Progress(folder / "metrics.csv", **options | changes), *more],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Scripted(), Loader(), Loader(), ckpt_path=resume, weights_only=True)


def timeless(path: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if "second" not in name} for row in read_rows(path)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("unbroken")
    run(folder)
    return timeless(folder / "metrics.csv")


def test_there_is_a_row_every_n_steps_at_the_end_and_after_each_validation(unbroken):
    trained = [row["step"] for row in unbroken if row["loss"]]
    validated = [row["step"] for row in unbroken if row["valid_elbo"]]
    assert trained == ["4", "8", "12", "15"]
    assert validated == ["3", "6", "9", "12", "15"]
    assert len(unbroken) == 9


@pytest.mark.parametrize("save_at", range(1, 15))
def test_a_resumed_run_writes_the_very_same_rows(tmp_path, unbroken, save_at):
    checkpoint = tmp_path / "some.ckpt"
    with pytest.raises(KeyError, match="broken off"):
        run(tmp_path, SaveAndStop(checkpoint, save_at, min(save_at + 5, 15)))
    assert timeless(tmp_path / "metrics.csv") != unbroken
    run(tmp_path, resume=checkpoint)
    assert timeless(tmp_path / "metrics.csv") == unbroken


def test_validating_another_checkpoint_takes_no_row_away(tmp_path):
    run(tmp_path, SaveAndStop(tmp_path / "some.ckpt", 5, 99))
    rows = timeless(tmp_path / "metrics.csv")
    progress = Progress(tmp_path / "metrics.csv", every_n_steps=4, total_steps=15, unit="token")
    trainer = fake_trainer(state=SimpleNamespace(fn=TrainerFn.VALIDATING))
    saved = torch.load(tmp_path / "some.ckpt", weights_only=True)
    progress._has_begun = True
    progress.on_load_checkpoint(trainer, Scripted(), saved)
    assert progress._has_begun
    assert timeless(tmp_path / "metrics.csv") == rows


def test_elsewhere_than_on_a_terminal_each_row_is_a_line(tmp_path, capsys, unbroken):
    run(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10] for line in lines] == [f"step {int(row['step']):>2}/15" for row in unbroken]
    assert "elbo 5.000" in lines[-1]
    assert [" left" in line for line in lines if "loss" in line] == [True] * 4


def test_on_a_terminal_there_is_a_bar_with_the_validations_above_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with terminal(columns=120) as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        run(tmp_path, now=second_by_second())
        assert sys.stdout is window.stream
        *validations, bar, end = window.screen
    assert [": elbo" in line for line in validations] == [True] * 5
    assert bar.startswith("100% ━━━")
    assert "15/15" in bar
    assert "loss " in bar
    assert "tokens/s" in bar
    assert end == ""


def test_a_run_that_breaks_off_leaves_its_bar_on_a_line_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        with pytest.raises(KeyError):
            run(tmp_path, SaveAndStop(tmp_path / "some.ckpt", 2, 2), now=second_by_second())
        print("what came of it")
        bar, message, _ = window.screen
    assert bar.startswith(" 13% ━")
    assert message == "what came of it"


def test_on_a_terminal_a_line_ends_between_two_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")  # lines, and no bar
    clock = Clock()
    long = {name: torch.tensor(-123456.789) for name in (*VALIDATION, *LABEL_COLUMNS)}
    trainer = fake_trainer(global_step=100_000, callback_metrics=long)
    progress = Progress(
        tmp_path / "m.csv", every_n_steps=1, total_steps=200_000, unit="time step", has_labels=True, now=clock
    )
    with terminal(columns=80) as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        progress.on_train_start(trainer, Scripted())
        for _ in range(2):
            clock.seconds += 1e-4
            step_through(progress, trainer, 1)
        progress.on_validation_end(trainer, Scripted())
        *trained, validated, end = window.screen
    assert (len(trained), end) == (2, "")
    assert all(len(line) <= 80 for line in (*trained, validated))
    assert trained[1].endswith("  kl 0.50 (weight 0.25)")
    assert validated.endswith("elbo -123456.789  nll -123456.789")


# --- Hook by hook ---------------------------------------------------------------------------------------------------


def test_a_row_is_made_of_means_over_what_they_are_means_of(tmp_path):
    clock, trainer = Clock(), fake_trainer()
    progress = Progress(tmp_path / "m.csv", every_n_steps=2, total_steps=9, unit="token", now=clock)
    progress.on_train_start(trainer, Scripted())
    clock.seconds += 8
    step_through(progress, trainer, 2)
    (row,) = read_rows(tmp_path / "m.csv")
    expected = {"step": "2", "epoch": "0", "seconds": "8.00", "loss": "2", "nll_per_step": "1", "kl": "0.5"}
    expected |= {"kl_weight": "0.25", "lr": "0.1", "gradient_norm": "0", "steps_per_second": "0.5"}
    assert row == dict.fromkeys(COLUMNS, "") | expected


def test_the_speed_is_that_of_training_without_validation(tmp_path):
    clock, trainer = Clock(), fake_trainer(callback_metrics=VALIDATION)
    progress = Progress(tmp_path / "m.csv", every_n_steps=2, total_steps=9, unit="token", now=clock)
    progress.on_train_start(trainer, Scripted())
    step_through(progress, trainer, 1)
    clock.seconds += 1
    progress.on_validation_start(trainer, Scripted())
    clock.seconds += 100
    progress.on_validation_end(trainer, Scripted())
    clock.seconds += 1
    step_through(progress, trainer, 1)
    validation, training = read_rows(tmp_path / "m.csv")
    assert validation["seconds"] == "101.00"
    assert (training["seconds"], training["steps_per_second"]) == ("102.00", "2")


def test_the_time_left_counts_the_steps_of_this_session_after_the_first_and_their_validations(tmp_path, capsys):
    clock, trainer = Clock(), fake_trainer(global_step=500, callback_metrics=VALIDATION)
    progress = Progress(tmp_path / "m.csv", every_n_steps=1, total_steps=600, unit="token", now=clock)
    progress.on_train_start(trainer, Scripted())
    clock.seconds += 60  # the first step compiles
    step_through(progress, trainer, 1)
    assert " left" not in capsys.readouterr().out
    clock.seconds += 10
    progress.on_validation_start(trainer, Scripted())
    clock.seconds += 10
    progress.on_validation_end(trainer, Scripted())
    trainer.global_step = 510
    step_through(progress, trainer, 1)
    assert capsys.readouterr().out.endswith("  2:58 left\n")  # 89 steps of 2 seconds


def test_between_two_rows_nothing_waits_for_the_device_and_a_row_waits_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    asked: list[str] = []

    def listened_to(name: str, original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            asked.append(name)
            return original(*arguments, **named)

        return call

    for name in ("item", "tolist", "cpu", "numpy", "to", "__float__", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, listened_to(name, getattr(Tensor, name)))
    trainer = fake_trainer()
    with terminal() as window:
        monkeypatch.setattr(sys, "stdout", window.stream)
        progress = Progress(tmp_path / "m.csv", every_n_steps=5, total_steps=99, unit="token", now=second_by_second())
        progress.on_train_start(trainer, Scripted())
        step_through(progress, trainer, 4)
        assert asked == []
        step_through(progress, trainer, 1)
        assert asked == ["tolist"]
        step_through(progress, trainer, 4)
        assert asked == ["tolist"]
        progress.on_train_end(trainer, Scripted())
        assert "9/99" in window.text


@pytest.mark.parametrize(("bad", "written"), [((False, True), "0.5"), ((True, True), "nan")])
def test_a_loss_that_is_no_number_is_left_out_of_the_means(bad, written, tmp_path):
    trainer = fake_trainer()
    progress = Progress(tmp_path / "m.csv", every_n_steps=2, total_steps=9, unit="token")
    progress.on_train_start(trainer, Scripted())
    for is_bad in bad:
        step_through(progress, trainer, 1, loss=math.nan if is_bad else 1.5)
    assert read_rows(tmp_path / "m.csv")[0]["loss"] == written


def test_loggers_get_the_settings_once_and_each_row_in_one_call(tmp_path):
    recorder = Recorder()
    trainer = fake_trainer(loggers=[recorder], callback_metrics=VALIDATION)
    progress = Progress(tmp_path / "m.csv", every_n_steps=2, total_steps=9, unit="token")
    progress.on_train_start(trainer, Scripted())
    step_through(progress, trainer, 2)
    progress.on_validation_start(trainer, Scripted())
    progress.on_validation_end(trainer, Scripted())
    assert recorder.hyperparameters == [{"lr": 0.1}]
    (first, training), (second, validation) = recorder.rows
    assert (first, second, training["loss"], validation) == (
        2,
        2,
        2.0,
        {name: float(value) for name, value in VALIDATION.items()},
    )


def test_the_last_validation_on_all_stands_apart_from_those_on_a_part(tmp_path, capsys):
    recorder = Recorder()
    part, whole = (VALIDATION | {"valid_sequences": torch.tensor(float(number))} for number in (200, 2000))
    progress = Progress(tmp_path / "m.csv", every_n_steps=2, total_steps=9, unit="token", valid_sequences=2000)
    for metrics, fn in ((part, TrainerFn.FITTING), (whole, TrainerFn.VALIDATING)):
        trainer = fake_trainer(loggers=[recorder], callback_metrics=metrics, state=SimpleNamespace(fn=fn))
        progress.on_validation_end(trainer, Scripted())
    (_, on_the_way), (_, at_the_end) = recorder.rows
    assert set(on_the_way) == set(VALIDATION)
    assert set(at_the_end) == {f"{name}_on_all" for name in VALIDATION}
    assert [row["valid_sequences"] for row in read_rows(tmp_path / "m.csv")] == ["200", "2000"]
    printed = capsys.readouterr().out
    assert "validation on 200 of 2,000: elbo" in printed
    assert "validation on all 2,000: elbo" in printed


def test_where_the_data_have_labels_there_are_columns_for_them(tmp_path, capsys):
    metrics = {name: torch.tensor(0.5) for name in COLUMNS + LABEL_COLUMNS if name.startswith("valid_")}
    progress = Progress(tmp_path / "m.csv", every_n_steps=2, total_steps=9, unit="token", has_labels=True)
    progress.on_validation_end(fake_trainer(callback_metrics=metrics), Scripted())
    (row,) = read_rows(tmp_path / "m.csv")
    assert (row["valid_auroc"], row["valid_auprc"]) == ("0.5", "0.5")
    assert "auroc 0.500  auprc 0.500" in capsys.readouterr().out


def test_only_the_first_process_writes_and_prints(tmp_path, capsys):
    trainer = fake_trainer(is_global_zero=False, global_rank=1)
    progress = Progress(tmp_path / "m.csv", every_n_steps=2, total_steps=9, unit="token")
    progress.on_train_start(trainer, Scripted())
    step_through(progress, trainer, 2)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_sums_of_three_processes_go_on_in_any_number_of_them(tmp_path, world_size):
    saved: dict[str, Any] = {}
    gather = SimpleNamespace(all_gather=lambda values_N: torch.stack([values_N * factor for factor in (1, 10, 100)]))
    three = fake_trainer(world_size=3, strategy=gather)
    progress = Progress(tmp_path / "m.csv", every_n_steps=9, total_steps=99, unit="token")
    progress.on_train_start(three, Scripted())
    step_through(progress, three, 2)
    progress.on_save_checkpoint(three, Scripted(), saved)
    losses, real_steps = 0.0, 0
    for rank in range(world_size):
        trainer = fake_trainer(world_size=world_size, global_rank=rank, is_global_zero=False)
        progress.on_load_checkpoint(trainer, Scripted(), saved)
        progress.on_train_start(trainer, Scripted())
        losses += sum(part.loss.item() for part in progress._since_row)
        real_steps += sum(int(part.real_steps) for part in progress._since_row)
    assert (losses, real_steps) == (2 * 6.0 * 111, 2 * 2 * 111)


def test_a_checkpoint_holds_nothing_but_tensors_and_types_of_json(tmp_path):
    trainer, saved = fake_trainer(), dict[str, Any]()
    progress = Progress(tmp_path / "m.csv", every_n_steps=9, total_steps=99, unit="token")
    progress.on_train_start(trainer, Scripted())
    step_through(progress, trainer, 2)
    progress.on_save_checkpoint(trainer, Scripted(), saved)
    torch.save(saved, tmp_path / "some.ckpt")
    assert torch.load(tmp_path / "some.ckpt", weights_only=True)[STATE]["file"] == {"rows": 0, "unwritten": []}
