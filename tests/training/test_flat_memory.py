"""Memory over thousands of batches of different shapes: free pages go back on a CPU, and a long run does not grow."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seqvae.console import share_machine
from seqvae.training.callbacks import memory
from seqvae.training.callbacks.memory import FlatMemory, malloc_trim

ROOT = Path(__file__).parent.parent.parent
SHAPES = """
import json, os, sys
from seqvae.console import share_machine
share_machine()
import torch
from types import SimpleNamespace
from seqvae.training.callbacks.memory import FlatMemory, own_bytes
from tests.support.small_models import make_batch, make_vae
torch.set_num_threads(1)
vae = make_vae("tokens", width=32).train()
optimizer = torch.optim.AdamW(vae.parameters(), fused=True)
steps, every = int(sys.argv[1]), int(sys.argv[2])
lengths = (torch.randn(steps, generator=torch.Generator().manual_seed(0)) * 0.7 + 2.7).exp().clamp(1, 50).int().tolist()
held = []
trainer = SimpleNamespace(global_step=0, strategy=SimpleNamespace(root_device=torch.device("cpu")))
flat = FlatMemory(every_n_steps=every, every_seconds=0)
flat.on_train_start(trainer, None)
for step, length in enumerate(lengths, start=1):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = vae(make_batch("tokens", [length] * max(1, 400 // length))).nll_B.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % every == 0:
        held.append(own_bytes())
    trainer.global_step = step
    flat.on_train_batch_end(trainer, None, {}, None, 0)
print(json.dumps(held))
"""
STEPS_OF_ONE_SIZE = """
import ctypes, resource, sys
from seqvae.training.callbacks.memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "kept":
    keep_freed_memory()
else:
    libc.free(libc.malloc(30_000_000))  # ends glibc's habit of mapping blocks like these each on its own
def step():
    blocks = [libc.malloc(1_000_000) for _ in range(100)]
    for block in blocks:
        ctypes.memset(block, 1, 1_000_000)
    for block in blocks:
        libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""

on_glibc = pytest.mark.skipif(malloc_trim() is None, reason="only glibc gives pages back when asked")


def trained(
    device: str, steps: list[int], monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0, growth: float = 1.1
) -> list[int]:
    """The steps, of those that went by, each in a second, at which memory was given back; `growth`: from look to look."""
    given_back: list[int] = []
    looks = itertools.count()
    trainer: Any = SimpleNamespace(global_step=0, strategy=SimpleNamespace(root_device=torch.device(device)))
    monkeypatch.setattr(memory, "malloc_trim", lambda: lambda _: given_back.append(trainer.global_step))
    kept: list[bool] = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: kept.append(True))
    callback = FlatMemory(
        every_n_steps=10,
        every_seconds=seconds,
        now=lambda: float(trainer.global_step),
        held=lambda: round(1e6 * growth ** next(looks)),
    )
    nothing: Any = None
    callback.on_train_start(trainer, nothing)
    for trainer.global_step in steps:
        callback.on_train_batch_end(trainer, nothing, {}, nothing, 0)
    assert kept == ([True] if device == "cpu" else [])
    return given_back


def test_free_pages_go_back_at_every_second_look_at_most_whatever_makes_up_a_step(monkeypatch):
    two_batches_a_step = [step // 2 for step in range(70)]
    assert trained("cpu", two_batches_a_step, monkeypatch) == [10, 30]


def test_short_steps_give_back_no_more_often_than_long_ones(monkeypatch):
    assert trained("cpu", list(range(1, 200)), monkeypatch, seconds=45.0) == [45, 135]


def test_pages_stay_where_no_more_of_them_gathered_since_the_last_time(monkeypatch):
    assert trained("cpu", list(range(1, 100)), monkeypatch, growth=1.01) == [10, 40, 70]
    assert trained("cpu", list(range(1, 100)), monkeypatch, growth=1.0) == [10]


def test_a_run_on_another_device_is_left_alone(monkeypatch):
    assert trained("meta", list(range(100)), monkeypatch) == []


@on_glibc
def test_glibc_gives_pages_back():
    trim = malloc_trim()
    assert trim is not None
    blocks = [bytearray(100_000) for _ in range(100)]  # too small to be mapped each on its own
    del blocks
    assert trim(0) in (0, 1)


@on_glibc
def test_the_next_step_gets_the_pages_that_a_step_frees():
    def faults_a_step(mode: str) -> float:
        command = [sys.executable, "-c", STEPS_OF_ONE_SIZE, mode]
        return float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    assert faults_a_step("kept") < 0.2 * faults_a_step("as glibc has it")


def test_what_a_user_set_in_the_environment_stays(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    share_machine()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


@on_glibc
@pytest.mark.slow
def test_memory_is_flat_over_thousands_of_steps_of_different_shapes():
    words = [sys.executable, "-c", SHAPES, "3000", "200"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    resident = json.loads(done.stdout)
    early, late = resident[4:7], resident[-3:]
    assert max(late) <= 1.03 * max(early)
