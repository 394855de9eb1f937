"""Where a run begins: --run_name, --resume and --init_from, what they refuse and in which words."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqvae.config.data import SourceSettings
from seqvae.config.run import RunSettings
from seqvae.config.training import ObjectiveSettings
from seqvae.errors import UsageError
from seqvae.models.vae import SequenceVAE
from seqvae.reports.run_files import BEST, LAST, PREVIOUS
from seqvae.training.network import go_on_as_begun, load_weights, read_network, rebuild_network
from seqvae.training.run_directory.checkpoint_file import differences, read_lazily
from seqvae.training.run_directory.resume import (
    Start,
    as_it_began,
    find_checkpoint,
    identity_of,
    open_run,
    refuse_other_run,
    settings_it_began_with,
    with_labels_as_it_began,
)
from tests.support.short_runs import DESCRIPTION, MODEL, short_module, train

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    train(directory, max_steps=4)
    return directory / LAST


def settings(directory: Path, name: str | None = "a", resume: str | Path = "auto") -> RunSettings:
    return RunSettings(output_dir=str(directory), run_name=name, resume=str(resume))


def make_run(directory: Path, checkpoint: Path | None = None, *names: str) -> Path:
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.yaml").write_text("seed: 0\n")
    (directory / "metrics.csv").write_text("step\n1\n")
    for name in names:
        assert checkpoint is not None
        (directory / "checkpoints" / name).write_bytes(checkpoint.read_bytes())
    return directory


def start_of(run: RunSettings) -> Start:
    """Return where a run begins, and release its directory again."""
    with ExitStack() as held:
        return open_run(run, "tokens", held)


# --- The directory --------------------------------------------------------------------------------------------------


def test_runs_without_a_name_get_directories_of_their_own(tmp_path):
    starts = [start_of(settings(tmp_path, None)) for _ in range(3)]
    assert len({start.directory for start in starts}) == 3
    assert all(start.directory.name.startswith("tokens-") and start.checkpoint is None for start in starts)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_name_is_a_new_directory(resume, tmp_path):
    assert start_of(settings(tmp_path, "a", resume)) == Start(tmp_path / "a", None)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_name_that_is_there_goes_on(checkpoint, tmp_path):
    directory = make_run(tmp_path / "a", checkpoint, LAST, PREVIOUS, BEST)
    assert start_of(settings(tmp_path)) == Start(directory, directory / "checkpoints" / LAST)
    assert (directory / "metrics.csv").exists()


def test_never_refuses_a_name_that_is_there(tmp_path):
    make_run(tmp_path / "a")
    with pytest.raises(UsageError, match=r"--run_name a: .* is there already; --resume auto goes on with it"):
        start_of(settings(tmp_path, "a", "never"))


def test_a_run_without_a_checkpoint_begins_anew_and_keeps_nothing_of_its_own_but_all_that_is_not(tmp_path):
    directory = make_run(tmp_path / "a")
    (directory / "plots").mkdir()
    (directory / "notes.txt").write_text("mine")
    assert start_of(settings(tmp_path)) == Start(directory, None)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_links_of_a_run_are_removed_and_not_followed(tmp_path):
    directory, elsewhere = make_run(tmp_path / "a"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (directory / "plots").symlink_to(elsewhere)
    start_of(settings(tmp_path))
    assert (elsewhere / "precious").exists()
    assert list(directory.iterdir()) == []


def test_a_directory_that_is_a_link_is_not_cleared(tmp_path):
    make_run(tmp_path / "real")
    (tmp_path / "a").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="is a link"):
        start_of(settings(tmp_path))
    assert (tmp_path / "real" / "metrics.csv").exists()


@pytest.mark.parametrize("what", ["directory", "file", "dangling"])
def test_what_is_no_run_is_left_alone(what, tmp_path):
    if what == "directory":
        (tmp_path / "a" / "plots").mkdir(parents=True)
    if what == "file":
        (tmp_path / "a").touch()
    if what == "dangling":
        (tmp_path / "a").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"--run_name a: .* choose another name"):
        start_of(settings(tmp_path))
    assert what != "directory" or (tmp_path / "a" / "plots").exists()


# --- The checkpoint -------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(checkpoint, tmp_path, caplog):
    directory = make_run(tmp_path / "a", checkpoint, LAST, PREVIOUS)
    (directory / "checkpoints" / LAST).write_bytes(checkpoint.read_bytes()[:5000])
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(directory) == directory / "checkpoints" / PREVIOUS
    assert f"{LAST}: damaged; going on from previous.ckpt instead" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_is_neither_resumed_nor_cleared(checkpoint, tmp_path):
    directory = make_run(tmp_path / "a", checkpoint, LAST, PREVIOUS)
    for name in (LAST, PREVIOUS):
        (directory / "checkpoints" / name).write_bytes(b"")
    with pytest.raises(UsageError, match=r"last\.ckpt: damaged; .*previous\.ckpt: damaged. Choose another --run_name"):
        start_of(settings(tmp_path))
    assert (directory / "metrics.csv").exists()


def test_a_checkpoint_in_a_run_goes_on_in_it(checkpoint, tmp_path):
    directory = make_run(tmp_path / "a", checkpoint, BEST)
    best = directory / "checkpoints" / BEST
    for name in (None, "a"):
        assert start_of(settings(tmp_path, name, best)) == Start(directory, best)


def test_a_run_may_be_given_instead_of_its_checkpoint(checkpoint, tmp_path):
    directory = make_run(tmp_path / "a", checkpoint, LAST)
    assert start_of(settings(tmp_path, None, directory)).checkpoint == directory / "checkpoints" / LAST


def test_a_checkpoint_goes_on_under_another_name(checkpoint, tmp_path):
    path = make_run(tmp_path / "a", checkpoint, LAST) / "checkpoints" / LAST
    assert start_of(settings(tmp_path, "b", path)) == Start(tmp_path / "b", path)


def test_a_checkpoint_that_lies_in_no_run_goes_on_in_a_new_one(checkpoint, tmp_path):
    start = start_of(settings(tmp_path, None, checkpoint))
    assert (start.directory.parent, start.checkpoint) == (tmp_path, checkpoint)


def test_a_checkpoint_does_not_take_the_place_of_another_runs(checkpoint, tmp_path):
    path = make_run(tmp_path / "a", checkpoint, LAST) / "checkpoints" / LAST
    make_run(tmp_path / "b", checkpoint, LAST)
    with pytest.raises(UsageError, match=r"--run_name b: .* holds checkpoints of its own"):
        start_of(settings(tmp_path, "b", path))


@pytest.mark.parametrize("path", ["nowhere.ckpt", "."])
def test_a_path_that_is_no_checkpoint_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^--resume .*: there is no such file"):
        start_of(settings(tmp_path, None, path))


# --- Does it fit? ---------------------------------------------------------------------------------------------------


def origin(**changes: Any) -> dict[str, Any]:
    made = short_module().origin
    return {part: {**made[part], **changes.get(part, {})} for part in made}


ALL_FLAGS: dict[str, Any] = {
    **dict.fromkeys(("max_sequence_length", "long_sequences", "window_stride", "batch_size", "tokens_per_batch")),
    **dict.fromkeys(("use_dynamic_padding", "bucketing", "drop_last", "gradient_accumulation_steps")),
}


def complete(**changes: Any) -> dict[str, Any]:
    return origin(**{**changes, "settings": {**ALL_FLAGS, **changes.get("settings", {})}})


def test_the_same_run_has_no_differences():
    assert differences(complete(), complete()) == []


def test_what_may_be_changed_on_purpose_is_no_difference():
    assert differences(complete(), complete(settings={"dropout": 0.9, "lr": 1.0, "max_steps": 5})) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"width": 64}}, "--width 8 there, 64 here"),
        ({"settings": {"batch_size": 7}}, "--batch_size None there, 7 here"),
        ({"settings": {"stream": True}}, "--stream False there, True here"),
        ({"description": {"vocabulary_size": 9}}, "vocabulary size 120 there, 9 here"),
        ({"description": {"names": ("a", "b")}}, "0 names there, 2 here"),
        ({"data": identity_of(np.array([70, 10]), "in memory")}, "data: sequences 16 there, 2 here"),
    ],
)
def test_a_difference_is_said_in_a_few_words(changes, said):
    assert said in differences(complete(), complete(**changes))


def test_data_of_the_same_number_of_sequences_and_steps_are_told_apart():
    there, here = identity_of(np.array([3, 4]), ""), identity_of(np.array([4, 3]), "")
    assert [name for name in there if there[name] != here[name]] == ["checksum"]


def test_data_of_the_same_lengths_and_other_content_are_told_apart():
    there, here = (identity_of(np.array([3, 4]), content) for content in ("0a", "0b"))
    assert differences(complete(data=there), complete(data=here)) == ["data: content 0a there, 0b here"]


def test_a_checkpoint_that_knows_less_of_its_data_is_no_other_run():
    there = complete()
    del there["data"]["content"]
    assert differences(there, complete(data={"content": "0a"})) == []


def test_a_run_from_before_the_unknown_had_a_share_goes_on_without_one():
    there, here = complete(), complete(description={"unknown_share": 0.2})
    del there["description"]["unknown_share"]
    assert differences(there, here) == []
    network = SequenceVAE(replace(DESCRIPTION, unknown_share=0.2), MODEL)
    go_on_as_begun(network, here, there)
    assert network.likelihood.unknown_share == here["description"]["unknown_share"] == 0.0


def test_a_checkpoint_from_before_there_were_presence_rates_is_no_other_run():
    there = complete()
    there["description"] = {name: value for name, value in there["description"].items() if name != "presence_rates"}
    assert differences(there, complete(description={"presence_rates": (0.1,)})) == []


def test_a_checkpoint_from_before_classes_had_names_is_no_other_run():
    there, here = (complete(description={"classes": names}) for names in (["0", "1"], ("walk", "run")))
    assert differences(there, here) == []
    assert differences(here, complete(description={"classes": ("walk", "fall")})) == ["classes[1] run there, fall here"]


def test_a_checkpoint_from_before_a_field_of_the_data_was_known_is_no_other_run():
    there = complete()
    del there["description"]["robust"]
    assert differences(there, complete(description={"robust": (True,)})) == []


@pytest.mark.parametrize(
    ("written", "goes_on_by_quantiles"),
    [("seed: 0\n", False), ("robust_scaling: false\n", False), ("robust_scaling: true\n", True), (": [", True)],
)
def test_a_run_goes_on_with_the_scale_of_its_beginning(written, goes_on_by_quantiles, tmp_path):
    make_run(tmp_path / "a")
    (tmp_path / "a" / "config.yaml").write_text(written)
    by_name, by_path = settings(tmp_path), settings(tmp_path, None, tmp_path / "a" / "checkpoints" / LAST)
    for run in (by_name, by_path):
        assert as_it_began(SourceSettings(), settings_it_began_with(run)).robust_scaling == goes_on_by_quantiles
    assert as_it_began(SourceSettings(), settings_it_began_with(settings(tmp_path, "new"))).robust_scaling


def test_a_run_goes_on_with_the_labels_of_its_beginning_unless_a_flag_says_otherwise(tmp_path):
    make_run(tmp_path / "a")
    (tmp_path / "a" / "config.yaml").write_text("label_weight: 1.0\n")  # the default of earlier versions
    began, plain, off = (
        settings_it_began_with(settings(tmp_path)),
        ObjectiveSettings(),
        ObjectiveSettings(label_weight=0),
    )
    assert with_labels_as_it_began(plain, began).weight_of_labels == 1
    assert with_labels_as_it_began(off, began).weight_of_labels == 0
    (tmp_path / "a" / "config.yaml").write_text("label_weight: null\n")
    assert with_labels_as_it_began(plain, settings_it_began_with(settings(tmp_path))).weight_of_labels == 0
    assert with_labels_as_it_began(plain, {}).weight_of_labels == 0


def test_of_long_lists_the_first_difference_is_shown():
    there, here = complete(description={"names": ["a", "b" * 99]}), complete(description={"names": ("a", "c")})
    assert differences(there, here) == [f"names[1] {'b' * 38}.. there, c here"]


def test_not_all_of_many_differences_are_listed(tmp_path):
    here = complete(settings=dict.fromkeys(("width", "depth", "heads", "latent_size", "encoder", "decoder"), 99))
    here["description"]["vocabulary_size"] = here["data"]["sequences"] = here["data"]["steps"] = 99
    torch.save({"origin": complete(), "state_dict": {}, "global_step": 1}, tmp_path / LAST)
    with pytest.raises(UsageError, match=r"another run: --decoder (.*; ){8}\.\.\. \(9 in all\)\. Give"):
        refuse_other_run(tmp_path / LAST, here)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / LAST
    torch.save({"origin": complete(), "state_dict": {}, "global_step": 1}, path)
    refuse_other_run(path, complete())
    with pytest.raises(UsageError, match=r"last\.ckpt is of another run: --seed 0 there, 1 here\. Give .*--init_from"):
        refuse_other_run(path, complete(settings={"seed": 1}))


# --- Weights alone --------------------------------------------------------------------------------------------------


def test_a_network_is_made_anew_with_its_weights(checkpoint):
    network = rebuild_network(checkpoint)
    stored = read_lazily(checkpoint)
    read = read_network(checkpoint)
    assert (read.description, read.model, read.step) == (DESCRIPTION, MODEL, 4)
    assert not network.training
    assert all(
        torch.equal(weight, stored["state_dict"][f"network.{name}"]) for name, weight in network.state_dict().items()
    )


def test_weights_alone_are_taken(checkpoint):
    torch.manual_seed(5)
    network = SequenceVAE(DESCRIPTION, MODEL)
    load_weights(network, checkpoint, DESCRIPTION)
    rebuilt = rebuild_network(checkpoint).state_dict()
    assert all(torch.equal(weight, rebuilt[name]) for name, weight in network.state_dict().items())


def test_weights_of_other_shapes_are_refused_by_name(checkpoint):

    network = SequenceVAE(DESCRIPTION, replace(MODEL, latent_size=3))
    with pytest.raises(UsageError, match=r"^--init_from .*last\.ckpt does not fit: .* is \(.*\) there and \(.*\) here"):
        load_weights(network, checkpoint, DESCRIPTION)


def test_weights_for_other_meanings_are_refused_though_they_would_fit(checkpoint):

    text = replace(DESCRIPTION, symbols=tuple(f"word {number}" for number in range(120)))
    with pytest.raises(UsageError, match="does not fit: 0 symbols there, 120 here"):
        load_weights(SequenceVAE(text, MODEL), checkpoint, text)


def test_weights_that_are_not_there_are_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"--init_from .*nowhere: there is no such file"):
        load_weights(SequenceVAE(DESCRIPTION, MODEL), tmp_path / "nowhere", DESCRIPTION)
