"""Runs that break off, and monitors that cannot do what they should: what is said, and that training goes on where it can."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback

from seqvae.files import read_rows
from seqvae.monitors.window import PosteriorWindow
from tests.support.foreign_vaes import QUIET
from tests.support.scripted_vaes import SaveAtSteps, ScriptedVAE, lives, quiet, verdicts_of, watch

pytestmark = QUIET

# --- Ends of other kinds --------------------------------------------------------------------------------------------


class BreaksDown(ScriptedVAE):
    """Raises in the batch behind a step."""

    def __init__(self, step: int, error: Exception, *, spoils: str = "nothing") -> None:
        super().__init__(lives)
        self.step, self.error, self.spoils = step, error, spoils

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.step:
            raise self.error
        outputs = super().training_step(batch, batch_idx)
        if self.global_step == self.step - 1:
            if self.spoils == "the posterior":
                outputs["posterior_mean"] = outputs["posterior_mean"] * torch.nan
            if self.spoils == "the weights":
                outputs["loss"] = outputs["loss"] * torch.nan
        return outputs


@pytest.mark.parametrize(
    ("spoils", "said"),
    [
        ("the posterior", "the last posteriors hold NaN or infinity"),
        ("the weights", "the weights hold NaN or infinity"),
        ("nothing", None),
    ],
)
def test_a_run_that_breaks_off_in_nan_was_diverged_even_if_no_reading_was_due(spoils, said, tmp_path):
    error = RuntimeError("as raised by the module")
    with pytest.raises(RuntimeError) as raised:
        watch(tmp_path, quiet(update_frequency=20), module=BreaksDown(27, error, spoils=spoils), max_steps=200)
    assert raised.value is error
    found = [(row["step"], row["evidence"]) for row in verdicts_of(tmp_path) if row["verdict"] == "diverged"]
    assert found == ([(27, said)] if said else [])


def test_a_verdict_found_as_a_run_broke_off_is_gone_when_it_goes_on_from_before(tmp_path):
    save = SaveAtSteps(tmp_path, {30})
    with pytest.raises(ArithmeticError):
        watch(tmp_path, quiet(), save, Spoiler(30), module=BreaksDown(30, ArithmeticError()))
    assert [row["verdict"] for row in verdicts_of(tmp_path)] == ["healthy", "diverged"]
    watch(tmp_path, quiet(), module=ScriptedVAE(lives), ckpt_path=tmp_path / "30.ckpt")
    assert [row["verdict"] for row in verdicts_of(tmp_path)] == ["healthy"]


class Spoiler(Callback):
    """Turns the weight into NaN behind a step, and behind its checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            pl_module.weight.data.fill_(torch.nan)


def test_a_device_that_failed_is_left_alone(tmp_path, monkeypatch):
    monitor = quiet(plot_frequency=1000)
    failed: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), global_step=20)

    class Fails(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 20:
                with monkeypatch.context() as patch:
                    patch.setattr(PosteriorWindow, "real_posteriors", lambda *_: pytest.fail("it was used"))
                    monitor.on_exception(failed, Untouchable(), RuntimeError("CUDA error"))

    watch(tmp_path, monitor, Fails(), max_steps=30)
    assert [row["verdict"] for row in verdicts_of(tmp_path)] == ["healthy"]


class Untouchable(ScriptedVAE):
    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        pytest.fail("it was used")


# --- What a run must not end of -------------------------------------------------------------------------------------


class LeavesOut(ScriptedVAE):
    """Some batches, the first among them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 10 in (0, 4) else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("update_frequency", [1, 5])
def test_batches_that_a_module_leaves_out_are_no_reason_to_end(update_frequency, tmp_path):
    monitor = quiet(update_frequency=update_frequency)
    trainer = watch(tmp_path, monitor, module=LeavesOut(lives), max_steps=60 * update_frequency)
    steps = [row["step"] for row in read_rows(tmp_path / "posterior.jsonl")]
    assert trainer.global_step == 60 * update_frequency
    assert len(steps) >= 48
    assert verdicts_of(tmp_path)[-1]["verdict"] == "healthy"


@pytest.mark.draws
def test_figures_that_cannot_be_drawn_are_reported_once_and_training_goes_on(tmp_path, capsys):
    (tmp_path / "plots").write_text("in the way")
    trainer = watch(tmp_path, quiet(plot_frequency=5), max_steps=40)
    assert trainer.global_step == 40
    assert capsys.readouterr().out.count("figures cannot be drawn") == 1


@pytest.mark.draws
def test_a_drawing_process_that_fails_is_reported_once_and_training_goes_on(tmp_path, capsys, monkeypatch):
    def fails(directory: Path, module: str, *, is_urgent: bool) -> subprocess.Popen[str]:
        return subprocess.Popen(["sh", "-c", "echo no paint >&2; exit 3"], stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr("seqvae.monitors.drawing.begin", fails)
    trainer = watch(tmp_path, quiet(plot_frequency=5), max_steps=40)
    assert trainer.global_step == 40
    printed = [line for line in capsys.readouterr().out.splitlines() if "drawn" in line]
    assert printed == ["posterior: figures cannot be drawn (no paint); training continues without them"]


@pytest.mark.draws
def test_plots_that_are_removed_meanwhile_are_made_again(tmp_path):
    class Removes(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 20:
                (tmp_path / "plots" / "posteriors.npz").unlink()
                (tmp_path / "plots").rmdir()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqvae.monitors.publish.Drawing.start", lambda *_, **__: False)
        watch(tmp_path, quiet(plot_frequency=10), Removes(), max_steps=30)
    assert (tmp_path / "plots" / "posteriors.npz").exists()


@pytest.mark.draws
def test_a_short_run_leaves_its_five_figures(tmp_path, capsys):
    watch(tmp_path, quiet(plot_frequency=1000), max_steps=12)
    names = {"timeline", "active_units", "kl_per_dim", "posterior_means", "posterior_pca"}
    assert {path.stem for path in (tmp_path / "plots").glob("*.png")} == names
    assert "drawn" not in capsys.readouterr().out
