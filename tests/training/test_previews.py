"""Previews are readable, bounded in cost and number, and training goes on as if they were not there."""

import errno
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from seqvae.config.training import ObjectiveSettings, OptimizerSettings
from seqvae.data.batch import Batch, EventBatch, VectorBatch, to_records
from seqvae.data.description import DataDescription
from seqvae.models.noise import Noise
from seqvae.models.sampling import reconstruct
from seqvae.models.vae import SequenceVAE
from seqvae.reports.previews import preview_page
from seqvae.training.callbacks import previews as module_of_previews
from seqvae.training.callbacks.previews import (
    MOST_FILES,
    Previews,
    beginning,
    draw_preview,
    preview_rows,
    write_preview,
)
from seqvae.training.module import TrainingModule
from tests.support.small_models import KINDS, NAMES, SMALL, make_batch

MOMENTS: dict[str, Any] = {
    "names": NAMES,
    "mean": (0.0, 80.0, 7.4),
    "std": (1.0, 10.0, 0.1),
    "valued": (True, True, True),
}
DESCRIPTIONS = {
    "tokens": DataDescription(
        kind="tokens", vocabulary_size=5, symbols=("<unknown>", "a", "b", "\x1b", "\n"), tokenizer="words"
    ),
    "vectors": DataDescription(kind="vectors", **MOMENTS),
    "events": DataDescription(kind="events", time_unit="minutes", **MOMENTS),
}


class Batches:
    """A loader; Lightning takes a list for a collection of loaders."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def make_module(kind: str) -> TrainingModule:
    torch.manual_seed(0)
    network = SequenceVAE(DESCRIPTIONS[kind], SMALL)
    return TrainingModule(network, ObjectiveSettings(), OptimizerSettings(), total_steps=3, seed=0, origin={})


def make_previews(kind: str, **more: Any) -> Previews:
    usual: dict[str, Any] = {"batch": make_batch(kind, [6, 4, 2]), "seed": 0, "tokens_per_batch": 100.0}
    return Previews(DESCRIPTIONS[kind], **usual | more)


def end_validation(previews: Previews, module: TrainingModule, directory: Path, step: int, **of_trainer: Any) -> None:
    usual: dict[str, Any] = {
        "default_root_dir": str(directory),
        "global_step": step,
        "max_steps": 1000,
        "accumulate_grad_batches": 2,
        "world_size": 1,
        "sanity_checking": False,
        "is_global_zero": True,
    }
    usual["callback_metrics"] = {"valid_elbo": torch.tensor(-1.0)}
    usual |= {"state": SimpleNamespace(fn=TrainerFn.FITTING), "loggers": []}
    trainer: Any = SimpleNamespace(**usual | of_trainer)
    previews.on_validation_end(trainer, module)


def written(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "samples").glob("*"))


# --- What is written ----------------------------------------------------------------------------------------------------


def test_tokens_become_a_page_of_text_that_cannot_steer_a_terminal(tmp_path):
    end_validation(make_previews("tokens"), make_module("tokens"), tmp_path, step=40)
    (page,) = (tmp_path / "samples").iterdir()
    text = page.read_text(encoding="utf-8")
    assert page.name == "step-0000040.txt"
    assert text.startswith("Step 40: ")
    assert [text.count(word) for word in ("original ", "reconstruction ", "Drawn from the prior")] == [3, 3, 1]
    assert all(c.isprintable() or c == "\n" for c in text)


def test_an_original_that_is_shown_in_part_has_no_end_mark():
    shown: Any = beginning(make_batch("tokens", [6, 4, 2]), 2, 5)
    assert shown.ends_B.tolist() == [False, True]


@pytest.mark.parametrize("kind", ["vectors", "events"])
def test_numbers_become_a_picture(kind, tmp_path):
    end_validation(make_previews(kind), make_module(kind), tmp_path, step=7)
    (picture,) = (tmp_path / "samples").iterdir()
    assert picture.name == "step-0000007.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_names_that_look_like_formulas_are_drawn_as_they_are(tmp_path):
    names = ("$x", "a_{", "\x1b[2J")
    description = DataDescription(kind="vectors", names=names, mean=(0.0,) * 3, std=(1.0,) * 3)
    previews = Previews(description, batch=make_batch("vectors", [4]), seed=0, tokens_per_batch=100.0)
    end_validation(previews, make_module("vectors"), tmp_path, step=1)
    assert written(tmp_path) == ["step-0000001.png"]


def test_pictures_show_values_in_their_own_units_and_reconstructions_at_the_times_of_the_originals():
    network, batch = SequenceVAE(DESCRIPTIONS["events"], SMALL), make_batch("events", [6, 4])
    network(batch)  # which variables have values is learned
    rows = preview_rows(draw_preview(network, batch, DESCRIPTIONS["events"], seed=0), DESCRIPTIONS["events"])
    (row,) = (row for row in rows if row.name == "pH")
    of_first_E = (batch.steps_E < 6) & (batch.variables_E == 2)
    assert row.originals[0].values == pytest.approx((batch.values_E[of_first_E] * 0.1 + 7.4).tolist())
    assert row.originals[0].times == pytest.approx(batch.gaps_BT[0].cumsum(0)[batch.steps_E[of_first_E]].tolist())
    assert row.reconstructions[0].times == pytest.approx(row.originals[0].times)
    assert len(row.samples) == 2


def test_reconstructed_tokens_are_drawn_with_the_same_noise_each_time():
    network, batch = SequenceVAE(DESCRIPTIONS["tokens"], SMALL), make_batch("tokens", [6, 4, 2])
    drawn, again, other = (
        draw_preview(network, batch, DESCRIPTIONS["tokens"], seed).reconstructions for seed in (0, 0, 1)
    )
    noise = Noise(0, torch.arange(3))
    most_likely = to_records(reconstruct(network, batch, temperature=0.0, noise=noise), DESCRIPTIONS["tokens"])
    assert drawn == again
    assert drawn not in (other, most_likely)


def test_x_and_y_make_a_drawing_of_the_places_that_are_known(tmp_path):
    moments: dict[str, Any] = {"mean": (1.0, 2.0, 3.0), "std": (1.0, 1.0, 1.0), "valued": (True,) * 3}
    description = DataDescription(kind="vectors", names=("pressure", "X", "y"), **moments)
    network, batch = SequenceVAE(description, SMALL), make_batch("vectors", [6, 4])
    assert isinstance(batch, VectorBatch)
    shown = draw_preview(network, batch, description, seed=0)
    drawing, pressure = preview_rows(shown, description)
    known_B = batch.observed_BTD[:, :, 1:].all(dim=2)
    assert not known_B[0, :6].all(), "a batch in which nothing is missing shows nothing"
    places = (batch.values_BTD[0][known_B[0]][:, 1:] + torch.tensor([2.0, 3.0])).T.tolist()
    assert [*drawing.originals[0]] == [pytest.approx(each) for each in places]
    assert [(row.name, row.is_drawing) for row in (drawing, pressure)] == [("y over X", True), ("pressure", False)]
    write_preview(tmp_path, 1, shown, description)
    assert (tmp_path / "step-0000001.png").stat().st_size > 10_000
    assert DataDescription(kind="vectors", names=("x", "y", "z")).plane is None


def test_a_page_keeps_long_texts_whole():
    words = " ".join(f"word{number}" for number in range(60))
    page = preview_page("step 1", [words], [""], [words])
    assert "".join(page.split()).count("".join(words.split())) == 2
    assert max(map(len, page.splitlines())) <= 132


# --- What it costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_beginning_of_a_few_sequences_is_used(kind):
    """The same as if the batch had never held more."""
    whole, part = make_batch(kind, [9, 4, 7]), make_batch(kind, [5, 4], steps=5)
    cut = beginning(whole, sequences=2, steps=5)
    if isinstance(cut, EventBatch):  # which events a random batch holds depends on its size
        inside_E = (whole.steps_E // 9 < 2) & (whole.steps_E % 9 < 5)
        assert torch.equal(cut.values_E, whole.values_E[inside_E])
        assert torch.equal(cut.steps_E // 5 * 9 + cut.steps_E % 5, whole.steps_E[inside_E])
        assert torch.equal(cut.gaps_BT, whole.gaps_BT[:2, :5])
    else:
        assert torch.equal(cut[0], whole[0][:2, :5])
    assert torch.equal(cut.lengths_B, part.lengths_B)


def shown_at(directory: Path) -> list[int]:
    return [int(name.removeprefix("step-").removesuffix(".txt")) for name in written(directory)]


def test_the_first_validation_of_each_stretch_of_the_run_is_shown_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module_of_previews, "TOKENS_BETWEEN", 60 * 200)  # of 60 steps of two batches
    previews, module = make_previews("tokens"), make_module("tokens")
    for step in range(25, 150, 25):
        end_validation(previews, module, tmp_path, step)
    assert shown_at(tmp_path) == [25, 75, 125]
    end_validation(previews, module, tmp_path, 130, state=SimpleNamespace(fn=TrainerFn.VALIDATING))
    assert shown_at(tmp_path) == [25, 75, 125, 130]


@pytest.mark.parametrize(("tokens_per_batch", "shown"), [(1e6, 20), (1250.0, 5)])
def test_a_run_has_twenty_previews_at_most_and_one_in_half_a_million_tokens(tokens_per_batch, shown, tmp_path):
    previews, module = make_previews("tokens", tokens_per_batch=tokens_per_batch), make_module("tokens")
    for step in range(10, 1000, 10):
        end_validation(previews, module, tmp_path, step)
    assert len(written(tmp_path)) == shown


def test_a_run_that_was_killed_shows_the_same_as_one_that_was_not(tmp_path, monkeypatch):
    module = make_module("tokens")
    for name, sessions in {"whole": [(15, 240)], "killed": [(15, 135), (60, 150), (105, 240)]}.items():
        (tmp_path / name).mkdir()
        for first, end in sessions:
            previews = make_previews("tokens", tokens_per_batch=1e6)
            for step in range(first, end, 15):
                end_validation(previews, module, tmp_path / name, step)
    assert shown_at(tmp_path / "killed") == shown_at(tmp_path / "whole")


def test_the_newest_stay(tmp_path):
    module, previews = make_module("tokens"), make_previews("tokens", tokens_per_batch=1e9)
    for step in range(MOST_FILES + 3):
        end_validation(previews, module, tmp_path, 100 * step)
    assert written(tmp_path) == [f"step-{100 * step:07}.txt" for step in range(3, MOST_FILES + 3)]


def test_where_originals_have_no_values_the_features_are_those_of_the_samples(tmp_path):
    batch = make_batch("vectors", [6, 4])
    nothing_BTD = torch.zeros_like(batch.observed_BTD)
    missing = batch._replace(observed_BTD=nothing_BTD, values_BTD=batch.values_BTD * 0)
    end_validation(make_previews("vectors", batch=missing), make_module("vectors"), tmp_path, step=1)
    assert written(tmp_path) == ["step-0000001.png"]


def test_data_without_any_values_have_no_picture(tmp_path):
    description = replace(DESCRIPTIONS["events"], valued=(False, False, False))
    batch = make_batch("events", [6, 4])
    batch = batch._replace(values_E=batch.values_E * 0, has_value_E=torch.zeros_like(batch.has_value_E))
    previews = Previews(description, batch=batch, seed=0, tokens_per_batch=100.0)
    module = make_module("events")
    module.network = SequenceVAE(description, SMALL)
    end_validation(previews, module, tmp_path, step=1)
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    "of_trainer",
    [
        {"sanity_checking": True},
        {"is_global_zero": False},
        {"callback_metrics": {"valid_elbo": torch.tensor(float("nan"))}},
    ],
)
def test_sanity_checks_other_processes_and_diverged_networks_write_nothing(of_trainer, tmp_path):
    end_validation(make_previews("tokens"), make_module("tokens"), tmp_path, step=1, **of_trainer)
    assert written(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOTDIR])
def test_what_cannot_be_written_is_said_once_and_leaves_nothing_behind(number, tmp_path, monkeypatch, capsys, caplog):
    module, previews = make_module("vectors"), make_previews("vectors", tokens_per_batch=1e9)

    def refuse(path: Path, *arguments: Any, **named: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(number, "as the system says")

    monkeypatch.setattr("seqvae.training.callbacks.previews.write_preview_figure", refuse)
    for step in (100, 200):
        end_validation(previews, module, tmp_path, step)
    assert (capsys.readouterr().out + caplog.text).count("as the system says") == 1
    assert written(tmp_path) == []


@pytest.mark.parametrize("then", ["the next preview", "a checkpoint"])
def test_what_a_full_disk_had_no_room_for_is_written_once_there_is_room(then, tmp_path, monkeypatch):
    module, previews = make_module("tokens"), make_previews("tokens", tokens_per_batch=1e9)
    write, is_full = module_of_previews.write_preview, True

    def write_if_there_is_room(*arguments: Any) -> Path | None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(module_of_previews, "write_preview", write_if_there_is_room)
    for step in (100, 200):
        end_validation(previews, module, tmp_path, step)
    trainer: Any = SimpleNamespace(default_root_dir=str(tmp_path), loggers=[])
    save = partial(previews.on_save_checkpoint, trainer, module, {})
    save()  # no room for the previews ends no save
    assert written(tmp_path) == []
    is_full = False
    if then == "a checkpoint":
        save()
    else:
        end_validation(previews, module, tmp_path, 300)
    assert shown_at(tmp_path) == ([100, 200] if then == "a checkpoint" else [100, 200, 300])
    texts = {step: (tmp_path / "samples" / f"step-{step:07}.txt").read_text() for step in shown_at(tmp_path)}
    assert all(text.startswith(f"Step {step}:") for step, text in texts.items())


# --- What it leaves alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_noise_modes_and_weights_are_left_alone(kind, tmp_path):
    module = make_module(kind).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    noise = torch.random.get_rng_state()
    end_validation(make_previews(kind), module, tmp_path, step=1)
    assert torch.equal(torch.random.get_rng_state(), noise)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated
def test_training_comes_to_the_same_weights_with_and_without(tmp_path):
    with_previews = train([make_previews("events")], tmp_path)
    without = train([], tmp_path)
    assert written(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(with_previews, without, strict=True))


def train(callbacks: list[lightning.Callback], directory: Path) -> list[Tensor]:
    module = make_module("events")
    batches = [make_batch("events", [6, 3], seed=seed)._replace(position=seed) for seed in range(3)]
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        val_check_interval=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=directory,
    )
    trainer.fit(module, Batches(batches), Batches(batches[:1]))
    return [parameter.detach() for parameter in module.parameters()]
