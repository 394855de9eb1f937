"""--compile_model: compiled once for all lengths, tried before the first step, kept where it is faster, and left where it fails."""

import copy
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from seqvae.config.data import BatchSettings
from seqvae.data.cache import SequenceData
from seqvae.models.vae import SequenceVAE
from seqvae.training.callbacks import compile as compiling
from seqvae.training.callbacks.compile import (
    CompilerTrial,
    compile_in_place,
    compiled_graphs,
    go_through,
    is_compiled,
    take_turns,
    trial_batches,
    undo_compiling,
    warm_up,
)
from tests.support.fake_sequences import FakeSequences, log_normal_lengths
from tests.support.short_runs import DESCRIPTION, MODEL, Run, ShortData, assert_same, short_module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")

ROOT = Path(__file__).parent.parent.parent
quiet_compiler = pytest.mark.filterwarnings("ignore")  # torch 2.13 warns of what its own compiler does


def of_lengths(lengths: np.ndarray, **batches: Any) -> ShortData:
    data = ShortData(batches=BatchSettings(**batches))
    sets: Any = {"train": FakeSequences(lengths), "valid": FakeSequences(lengths[:20])}
    data.data = SequenceData(Path(), DESCRIPTION, sets, "tokens: in memory", (), {})
    return data


def pretend_compiled(network: Any) -> None:
    """Code that stands where compiled code would, at no cost."""
    for backbone in (network.encoder, network.decoder):
        for block in backbone.blocks:
            block._compiled_call_impl = block._call_impl


def short_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, timed: tuple[float, float], **options: Any
) -> tuple[Run, CompilerTrial]:
    """Train for a while; `timed`: seconds of a micro-batch compiled and as written."""
    monkeypatch.setattr(compiling, "take_turns", lambda *_: timed)
    data, module = ShortData(), short_module()
    pretend_compiled(module.network)
    trial = CompilerTrial(data, total_steps=12)
    return train(directory, [trial], data=data, module=module, **options), trial


def test_the_trial_meets_the_longest_and_the_shortest_batch_and_each_kind_that_is_compiled_for_apart():
    data = of_lengths(np.array([50, 20, 20, 9, 9, 9, 9, 9, 1, 1]), tokens_per_batch=50)
    alone: list[Any] = trial_batches(data, world=1)
    shapes = {tuple(batch.tokens_BT.shape) for batch in alone}
    assert (1, 50) in shapes
    assert any(steps == 1 for _, steps in shapes)
    assert len(trial_batches(data, world=2)) == len(alone) + 1
    assert not trial_batches(data, world=2)[-1].lengths_B.any()


def test_the_trial_leaves_weights_gradients_and_noise_as_they_were(tmp_path, monkeypatch):
    without = train(tmp_path / "without")
    tried, trial = short_run(tmp_path / "tried", monkeypatch, (1.0, 2.0))
    assert trial.is_kept
    assert is_compiled(tried.trainer.lightning_module)
    assert_same(without, tried)


def test_code_that_is_slower_is_not_kept_and_the_run_goes_on_without(tmp_path, monkeypatch, capsys):
    run, trial = short_run(tmp_path, monkeypatch, (2.0, 1.0))
    assert trial.is_kept is False
    assert not is_compiled(run.trainer.lightning_module)
    assert "0.50 times as fast as without: the run goes on without" in capsys.readouterr().out


def test_a_run_that_goes_on_computes_as_it_did_whatever_is_faster_now(tmp_path, monkeypatch):
    short_run(tmp_path, monkeypatch, (2.0, 1.0), max_steps=4)
    faster_now = (1.0, 2.0)
    run, trial = short_run(tmp_path, monkeypatch, faster_now, checkpoint=tmp_path / "last.ckpt")
    assert trial.is_kept is False
    assert not is_compiled(run.trainer.lightning_module)


def test_a_failure_at_the_first_call_is_one_line_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def fail(*_: Any) -> Any:
        raise RuntimeError("InductorError: no triton\nand a long story")

    data, module = ShortData(), short_module()
    network: Any = module.network
    network.encoder.blocks[0]._compiled_call_impl = fail
    run = train(tmp_path, [CompilerTrial(data, total_steps=12)], data=data, module=module)
    assert run.trainer.global_step == 12
    said = capsys.readouterr().out
    assert "compiler    not compiled: InductorError: no triton; the run goes on without\n" in said


def test_buffers_and_mode_are_restored_after_the_trial():
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()).eval()
    before = copy.deepcopy(network.state_dict())
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with compiling.untouched(network):
        network.train()(torch.randn(4, 2))
    torch.testing.assert_close(dict(network.state_dict()), dict(before), rtol=0, atol=0)
    assert not network.training
    assert torch.equal(torch.rand(3), expected)


def test_reduce_overhead_says_that_it_is_for_gpus_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    modes: list[str] = []

    class Network(nn.Module):
        def compile_inner(self, mode: str) -> None:
            modes.append(mode)

    assert "reduce-overhead records what a GPU does, and there is none" in compile_in_place(
        Network(), "reduce-overhead", "cpu"
    )
    assert "(reduce-overhead)" in compile_in_place(Network(), "reduce-overhead", "cuda")
    assert modes == ["default", "reduce-overhead"]


@pytest.mark.slow
@quiet_compiler
def test_after_the_trial_nothing_is_compiled_anew_on_log_normal_lengths():
    data = of_lengths(log_normal_lengths(600, cap=400), tokens_per_batch=1200)
    network = SequenceVAE(replace(DESCRIPTION, vocabulary_size=600), MODEL)
    torch._dynamo.reset()
    assert compile_in_place(network, "default", "cpu").startswith("compiled")
    batches = trial_batches(data, world=2)
    _, problem = warm_up(network, batches, nullcontext)
    assert not problem
    take_turns(network, batches[:2], nullcontext)
    before = compiled_graphs()
    plan = data.plan_of_epoch(0)
    for number in range(plan.batches):
        batch = data.split("train").gather(plan.batch(number))
        go_through(network.train(), batch, nullcontext)
        with torch.inference_mode():
            network.eval()(batch)
    assert before > 0
    assert compiled_graphs() == before


@pytest.mark.slow
@quiet_compiler
def test_undone_a_network_runs_as_it_was_written():
    network = SequenceVAE(DESCRIPTION, MODEL).eval()
    batch = of_lengths(np.array([5, 5])).split("train").gather(np.arange(2))
    expected = network.encode(batch).mean
    compile_in_place(network, "default", "cpu")
    assert is_compiled(network)
    undo_compiling(network)
    graphs = compiled_graphs()
    assert torch.equal(network.encode(batch).mean, expected)
    assert (is_compiled(network), compiled_graphs()) == (False, graphs)


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so_and_the_run_ends_well(tmp_path):
    tiny = "--width 8 --heads 2 --depth 1 --max_steps 3 --limit_val_batches 1 --compile_model"
    places = ["--output_dir", str(tmp_path), "--cache_dir", str(tmp_path / "cache")]
    nowhere = {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_optimized.py"), *tiny.split(), *places],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **nowhere},
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall("not compiled: ", done.stdout)) == 1
