"""--compile_model: compiled once for all lengths, tried before the first step, kept where it is faster, and left where it fails."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
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
    Answers,
    CompilerTrial,
    compile_in_place,
    compiled_graphs,
    go_through,
    is_compiled,
    measure_one_layer,
    question_of,
    remark_on_compiling,
    take_turns,
    trial_batches,
    undo_compiling,
    usable_mode,
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


def pretend(monkeypatch: pytest.MonkeyPatch, timed: Iterable[tuple[float, float]]) -> list[int]:
    """Compile nothing, and time nothing; return how many layers are compiled each time that something is timed."""
    compiled: list[int] = []
    coming = iter(timed)

    def take_turns(works: Any) -> tuple[float, float]:
        layer_or_network = works[0].args[0]
        compiled.append(sum(part._compiled_call_impl is not None for part in layer_or_network.modules()))
        return next(coming)

    monkeypatch.setattr(compiling, "take_turns", take_turns)
    monkeypatch.setattr(compiling, "compile_in_place", lambda network, mode: pretend_compiled(network))
    return compiled


def short_run(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    timed: tuple[float, float],
    *,
    answers: Answers | None = None,
    **options: Any,
) -> tuple[Run, CompilerTrial]:
    """Train for a while; `timed`: seconds of a micro-batch, or of a layer, compiled and as written."""
    pretend(monkeypatch, repeat(timed))
    data, module = ShortData(), short_module()
    trial = CompilerTrial(data, total_steps=12, answers=answers)
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

    def compile_to_failure(network: Any, mode: str) -> None:
        pretend_compiled(network)
        network.decoder.blocks[-1]._compiled_call_impl = fail

    monkeypatch.setattr(compiling, "compile_in_place", compile_to_failure)
    data, module = ShortData(), short_module()
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


def test_reduce_overhead_says_that_it_is_for_gpus_where_there_is_none():
    assert "(default: reduce-overhead records what a GPU does, and there is none)" in remark_on_compiling(
        "reduce-overhead", "cpu"
    )
    assert "(reduce-overhead)" in remark_on_compiling("reduce-overhead", "cuda")
    assert [usable_mode("reduce-overhead", device) for device in ("cpu", "cuda")] == ["default", "reduce-overhead"]


# --- One layer first ----------------------------------------------------------------------------------------------------


def test_on_a_cpu_one_layer_that_is_slower_is_all_that_is_compiled(tmp_path, monkeypatch, capsys):
    compiled = pretend(monkeypatch, [(2.0, 1.0)])
    trial = CompilerTrial(ShortData(), total_steps=12)
    train(tmp_path, [trial], data=trial.data, module=short_module(), max_steps=2)
    assert (trial.is_kept, compiled) == (False, [1])
    assert "one layer compiled in 0 s, but 0.50 times as fast as without: the run goes on" in capsys.readouterr().out


def test_where_one_layer_is_faster_all_of_them_are_tried(tmp_path, monkeypatch, capsys):
    compiled = pretend(monkeypatch, [(1.0, 2.0), (1.0, 1.5)])
    trial = CompilerTrial(ShortData(), total_steps=12)
    train(tmp_path, [trial], data=trial.data, module=short_module(), max_steps=2)
    assert (trial.is_kept, compiled) == (True, [1, 2])
    said = capsys.readouterr().out
    assert "one layer compiled in 0 s, and 2.00 times as fast: compiling all of them" in said
    assert "compiled in 0 s; now 1.50 times as fast" in said


def test_a_second_run_on_the_machine_compiles_nothing_where_it_did_not_pay(tmp_path, monkeypatch, capsys):
    answers = Answers(tmp_path / "answers.json")
    short_run(tmp_path / "first", monkeypatch, (2.0, 1.0), answers=answers, max_steps=2)
    monkeypatch.setattr(compiling, "measure_one_layer", None)  # which is not called
    run, trial = short_run(tmp_path / "second", monkeypatch, (1.0, 2.0), answers=answers, max_steps=2)
    assert trial.is_kept is False
    assert not is_compiled(run.trainer.lightning_module)
    assert (
        f"0.50 times as fast as without when it was measured on this machine ({answers.path})"
        in capsys.readouterr().out
    )


def test_what_all_layers_brought_overrules_what_one_promised(tmp_path, monkeypatch):
    answers = Answers(tmp_path / "answers.json")
    pretend(monkeypatch, [(1.0, 2.0), (2.0, 1.0)])
    trial = CompilerTrial(ShortData(), total_steps=12, answers=answers)
    train(tmp_path, [trial], data=trial.data, module=short_module(), max_steps=2)
    assert trial.is_kept is False
    assert list(json.loads(answers.path.read_text()).values()) == [0.5]


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"\x00\xff", b'{"q": "fast"}', b'{"q": NaN}', b'{"q": -1}', b"[" * 100_000]
)
def test_an_answer_that_cannot_be_read_is_measured_again(content, tmp_path):
    answers = Answers(tmp_path / "answers.json")
    assert answers.ratio("q") is None
    answers.path.write_bytes(content)
    assert answers.ratio("q") is None
    answers.keep("q", 0.5)
    assert answers.ratio("q") == 0.5


def test_an_answer_that_cannot_be_kept_is_no_trouble(tmp_path):
    Answers(tmp_path / "nowhere" / "answers.json").keep("q", 0.5)
    assert list(tmp_path.iterdir()) == []


def test_an_answer_is_for_one_machine_torch_network_and_size_of_batch(monkeypatch):
    def ask(network: nn.Module, rows: int = 3, steps: int = 9) -> str:
        batch = of_lengths(np.full(rows, steps)).split("train").gather(np.arange(rows))
        return question_of(network, batch, "default", "32-true")

    network = short_module().network
    first = ask(network)
    assert ask(network, 4, 16) == first
    others = [ask(network, 5), ask(network, 3, 17), ask(nn.Linear(2, 2))]
    monkeypatch.setattr(compiling, "cpu_name", lambda: "another")
    others.append(ask(network))
    monkeypatch.setattr(torch, "__version__", "9")
    others.append(ask(network))
    assert len({first, *others}) == 6


def test_a_network_without_layers_to_compile_says_so(tmp_path, capsys):
    recurrent = replace(MODEL, encoder="lstm", decoder="lstm")
    module = short_module()
    module.network = SequenceVAE(DESCRIPTION, recurrent)
    run = train(tmp_path, [CompilerTrial(ShortData(), total_steps=12)], data=ShortData(), module=module, max_steps=2)
    assert run.trainer.global_step == 2
    assert "not compiled: none of its layers is of a kind that torch compiles" in capsys.readouterr().out


@pytest.mark.slow
@quiet_compiler
def test_one_layer_is_measured_and_everything_left_as_it_was():
    network = SequenceVAE(DESCRIPTION, MODEL)
    batch = of_lengths(np.array([5, 5])).split("train").gather(np.arange(2))
    seconds, ratio, problem = measure_one_layer(network, batch, "default", nullcontext)
    assert not problem
    assert ratio is not None
    assert ratio > 0
    assert seconds > 0
    assert not is_compiled(network)
    assert all(weight.grad is None for weight in network.parameters())


# --- Compiled -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@quiet_compiler
def test_after_the_trial_nothing_is_compiled_anew_on_log_normal_lengths():
    data = of_lengths(log_normal_lengths(600, cap=400), tokens_per_batch=1200)
    network = SequenceVAE(replace(DESCRIPTION, vocabulary_size=600), MODEL)
    torch._dynamo.reset()
    batches = trial_batches(data, world=2)
    _, problem = warm_up(network, batches, nullcontext, "default")
    assert not problem
    take_turns([partial(go_through, network.train(), batch, nullcontext) for batch in batches[:2]])
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
    compile_in_place(network, "default")
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
