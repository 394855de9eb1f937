"""Checkpoints on disk: which ones there are when, that they are whole at every moment, that damage is seen and code never run."""

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback
from torch import Tensor

from seqvae.errors import StorageError
from seqvae.reports.run_files import BEST, LAST, PREVIOUS
from seqvae.training.callbacks.progress import STATE
from seqvae.training.run_directory.checkpoint_file import AtomicCheckpointIO, damage_of, read_lazily
from tests.support.short_runs import STEPS, Kill, Killed, ShortData, short_module, train

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")
ROOT = Path(__file__).parent.parent.parent
CHECKPOINT: dict[str, Any] = {"state_dict": {"network.w": torch.arange(2000.0)}, "origin": {}, "global_step": 3}


def steps_in(directory: Path) -> dict[str, int]:
    return {path.name: read_lazily(path)["global_step"] for path in directory.iterdir()}


class Elbos(Callback):
    """Puts chosen numbers in place of the validation ELBO."""

    def __init__(self, *elbos: float) -> None:
        self.elbos = iter(elbos)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        log_dict = pl_module.log_dict
        pl_module.log_dict = lambda metrics, **named: log_dict(metrics | {"valid_elbo": next(self.elbos)}, **named)


class Counting(AtomicCheckpointIO):
    def __init__(self) -> None:
        self.saved = 0

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        self.saved += 1
        super().save_checkpoint(*arguments, **named)


# --- Which ones -----------------------------------------------------------------------------------------------------


def test_each_validation_leaves_the_last_two_and_the_best(tmp_path):
    train(tmp_path, [Elbos(-9, -5, -7, -6, -8, -7)])
    assert steps_in(tmp_path) == {LAST: 12, PREVIOUS: 10, BEST: 4}


def test_with_a_number_of_steps_validations_save_the_best_alone(tmp_path):
    train(tmp_path, [Elbos(-9, -5, -7, -6, -8, -7)], every_n_steps=5)
    assert steps_in(tmp_path) == {LAST: 12, PREVIOUS: 10, BEST: 4}
    assert not read_lazily(tmp_path / PREVIOUS)["owes_validation"]


@pytest.mark.parametrize(("every_n_steps", "expected"), [(None, {8, 12}), (7, {7, 12}), (STEPS, {12})])
def test_without_validations_each_epoch_or_number_of_steps_and_the_end_are_saved(every_n_steps, expected, tmp_path):
    train(tmp_path, every_n_steps=every_n_steps, limit_val_batches=0)
    assert set(steps_in(tmp_path).values()) == expected


def test_a_run_that_ends_early_is_saved_where_it_ends(tmp_path):
    class Enough(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 5

    run = train(tmp_path, [Enough()], every_n_steps=100)
    assert run.validated_at[-1] == 5
    assert steps_in(tmp_path)[LAST] == 5


def test_best_and_last_are_one_file_and_one_write(tmp_path):
    counting = Counting()
    train(tmp_path, [Elbos(*range(6))], plugins=[counting])
    assert (tmp_path / BEST).samefile(tmp_path / LAST)
    assert counting.saved == 6


def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    train(tmp_path, [Elbos(*range(6))])
    assert steps_in(tmp_path) == {LAST: 12, PREVIOUS: 10, BEST: 12}


@pytest.mark.parametrize("elbo", [math.nan, math.inf])
def test_an_elbo_that_is_no_number_is_never_the_best(elbo, tmp_path):
    train(tmp_path, [Elbos(elbo, -5, elbo, -6, elbo, elbo)])
    assert steps_in(tmp_path) == {LAST: 12, PREVIOUS: 10, BEST: 4}


def test_weights_that_are_not_finite_are_not_saved(tmp_path, caplog):
    class Spoil(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                next(pl_module.parameters()).data[0] = math.nan

    train(tmp_path, [Spoil(), Elbos(*range(6))])
    assert steps_in(tmp_path) == {LAST: 6, PREVIOUS: 4, BEST: 6}
    assert "step 8: the weights are not finite" in caplog.text


def test_a_mask_of_infinities_is_saved_and_one_of_nan_is_not(tmp_path):
    for value, expected in ((float("-inf"), True), (float("nan"), False)):
        module = short_module()
        module.network.register_buffer("mask", torch.full((2, 2), value))
        train(tmp_path / str(value), module=module, max_steps=2)
        assert (tmp_path / str(value) / LAST).exists() == expected


def test_the_best_so_far_outlives_a_resume_but_not_a_move(tmp_path):
    train(tmp_path / "a", [Elbos(-1, -2), Kill("on_train_batch_start", 9)])
    train(tmp_path / "a", [Elbos(-3, -4, -5, -6)], checkpoint=tmp_path / "a" / LAST)
    assert steps_in(tmp_path / "a")[BEST] == 2
    train(tmp_path / "b", [Elbos(-7, -8, -9, -9)], checkpoint=tmp_path / "a" / PREVIOUS)
    assert steps_in(tmp_path / "b")[BEST] == 12


def test_validations_on_other_sequences_do_not_compete_for_the_best(tmp_path):
    train(tmp_path, [Elbos(-1, -2), Kill("on_train_batch_start", 9)])
    fewer = ShortData(limit_val_batches=1)
    train(tmp_path, [Elbos(-30, -40, -50, -60)], checkpoint=tmp_path / LAST, data=fewer)
    assert steps_in(tmp_path)[BEST] == 6


@pytest.mark.parametrize(("validated_on", "best"), [(6, 2), (5, 6)])
def test_the_best_of_an_older_checkpoint_is_of_the_sequences_it_was_last_validated_on(validated_on, best, tmp_path):
    class AsOlder(Callback):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint[STATE] = {"validated": [4, validated_on]}
            (state,) = (state for state in checkpoint["callbacks"].values() if "best_elbo" in state)
            del state["best_of_sequences"]

    train(tmp_path, [Elbos(-1, -2), Kill("on_train_batch_start", 9)])
    train(tmp_path, [AsOlder(), Elbos(-30, -40, -50, -60)], checkpoint=tmp_path / LAST)
    assert steps_in(tmp_path)[BEST] == best


def test_a_checkpoint_within_an_accumulation_is_never_made(tmp_path):
    train(tmp_path, every_n_steps=1, val_check_interval=3)
    batches = read_lazily(tmp_path / PREVIOUS)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
    assert batches % 2 == 0
    assert steps_in(tmp_path)[PREVIOUS] == 11


# --- Whole at every moment ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(8))
def test_a_run_killed_at_any_file_operation_leaves_a_whole_checkpoint(at, tmp_path, monkeypatch):
    """At a rename, a link or a sync of the third save, of which there are 8."""
    calls = 0

    def dying(operation: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 16 + at:
                raise Killed
            return operation(*arguments, **named)

        return wrapped

    for module, name in ((os, "fsync"), (os, "link"), (Path, "replace")):
        monkeypatch.setattr(module, name, dying(getattr(module, name)))
    assert isinstance(train(tmp_path, [Elbos(*range(6))]).ended_by, Killed)
    whole = [name for name in (LAST, PREVIOUS) if damage_of(tmp_path / name) is None]
    assert whole
    assert read_lazily(tmp_path / whole[0])["global_step"] >= 4


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from seqvae.errors import StorageError
from seqvae.training.run_directory.checkpoint_file import AtomicCheckpointIO
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(int(sys.argv[2]))}, Path(sys.argv[1]))
except StorageError as error:
    print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="other platforms have no such limit")
@pytest.mark.parametrize("numbers", [6_000, 1_000_000])
def test_a_full_disk_leaves_what_was_there(numbers, tmp_path):
    path = tmp_path / LAST
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    before = path.read_bytes()
    command = [sys.executable, "-c", FULL_DISK, str(path), str(numbers)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100).stdout
    assert out.startswith(f"{path} cannot be written")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        AtomicCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / LAST)


def test_what_was_half_written_is_written_over(tmp_path):
    path = tmp_path / LAST
    (tmp_path / f".{LAST}.partial").write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    assert list(tmp_path.iterdir()) == [path]


# --- Damage and malice ----------------------------------------------------------------------------------------------


def same_content(path: Path) -> bool:
    weights: Tensor = AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["network.w"]
    return torch.equal(weights, CHECKPOINT["state_dict"]["network.w"])


def test_every_flipped_bit_is_seen_or_without_effect(tmp_path):
    path, damaged = tmp_path / "whole.ckpt", tmp_path / "damaged.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    content = path.read_bytes()
    random = np.random.default_rng(0)
    seen = 0
    for position in range(0, len(content), 23):
        flipped = bytearray(content)
        flipped[position] ^= 1 << int(random.integers(8))
        damaged.write_bytes(flipped)
        if damage_of(damaged) is None:
            assert same_content(damaged)
        else:
            seen += 1
    assert seen > 200


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_damaged(share, tmp_path):
    path = tmp_path / LAST
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert damage_of(path) == "damaged"


@pytest.mark.parametrize("name", ["missing", "directory", "text", "pickle", "foreign", "zip"])
def test_what_is_no_checkpoint_is_told_from_one(name, tmp_path):
    path = tmp_path / name
    if name == "directory":
        path.mkdir()
    if name == "text":
        path.write_text("not at all")
    if name == "pickle":
        path.write_bytes(pickle.dumps({"state_dict": {}}))
    if name == "foreign":
        torch.save({"weights": torch.zeros(2)}, path)
    if name == "zip":
        np.savez(path.with_suffix(".npz"), zeros=np.zeros(3))
        path.with_suffix(".npz").rename(path)
    assert damage_of(path) is not None


class Malice:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("weights_only", [None, False, True])
def test_code_in_a_checkpoint_is_never_run(weights_only, tmp_path):
    path, trace = tmp_path / LAST, tmp_path / "trace"
    torch.save({**CHECKPOINT, "origin": Malice(trace)}, path)
    assert damage_of(path) == "no checkpoint of ours, or a damaged one"
    with pytest.raises(pickle.UnpicklingError):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    with pytest.raises(pickle.UnpicklingError):
        train(tmp_path / "run", checkpoint=path, module=short_module())
    assert not trace.exists()
