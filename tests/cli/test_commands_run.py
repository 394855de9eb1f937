"""The commands as users type them, on demo data: nothing is added but a step limit and places for files.

Those of all flags and of two processes run in processes of their own; the others in this one, which has torch imported.
"""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import yaml

import train_optimized
import train_with_collapse_detection
from seqvae.errors import run_command

ROOT = Path(__file__).parent.parent.parent
FULL = (
    "--batch_size 4 --num_workers 8 --pin_memory --gradient_accumulation_steps 2 --max_sequence_length 1000 "
    "--precision 16-mixed"
)
LIMITS = "--max_steps 2 --limit_val_batches 1"
SHORTER = "--fast_dev_run"
"""As many steps, but without the validation on all data at the end, which takes long one sequence at a time."""


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def line_of(folder: Path, cache_dir: Path, words: str) -> list[str]:
    return [*words.split(), "--output_dir", str(folder), "--cache_dir", str(cache_dir), "--run_name", "run"]


def run(folder: Path, cache_dir: Path, words: str) -> str:
    """What it printed."""
    line = [sys.executable, str(ROOT / "train_optimized.py"), *line_of(folder, cache_dir, f"{words} {LIMITS}")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run_here(tmp_path, cache_dir, monkeypatch, capsys):
    """What a command printed that ran in this process."""

    def call(words: str, script: ModuleType = train_optimized) -> str:
        name = f"{script.__name__}.py"
        monkeypatch.setattr(sys, "argv", [name, *line_of(tmp_path, cache_dir, f"{words} {SHORTER}")])
        assert run_command(script.main, name) == 0
        return capsys.readouterr().out

    return call


def test_the_full_command_with_fast_detection(tmp_path, cache_dir):
    out = run(tmp_path, cache_dir, f"{FULL} --fast_detection")
    assert "bf16-mixed in place of 16-mixed" in out or "32-true in place of 16-mixed" in out
    assert {"config.yaml", "environment.json", "events.jsonl", "metrics.csv", "posterior.jsonl"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


@pytest.mark.slow
def test_the_full_command_without_monitoring_and_compiled(tmp_path, cache_dir):
    out = run(tmp_path, cache_dir, f"{FULL} --disable_metrics_monitoring --compile_model")
    assert "one layer is compiled and measured first, before the first step (default)" in out
    assert "neither be seen nor named" in out
    assert not (tmp_path / "run" / "posterior.jsonl").exists()
    assert len(pd.read_csv(tmp_path / "run" / "metrics.csv")) > 0


@pytest.mark.parametrize(
    "words",
    [
        "--batch_size 2 --num_workers 4 --max_sequence_length 500 --precision 16-mixed --fast_detection",
        "--batch_size 1 --num_workers 2 --max_sequence_length 100 --precision 32 --fast_detection",
        "--use_dynamic_padding",
        "--precision bf16-mixed",
        "--num_workers 12 --pin_memory",
    ],
)
@pytest.mark.draws
def test_the_commands_of_the_readme(tmp_path, run_here, words):
    *_, done, report = run_here(words).splitlines()
    assert done.startswith("done: ")
    assert report == f"report  {tmp_path / 'run' / 'report.html'}"


@pytest.mark.parametrize(
    "preset", ["recommended", "memory_limited", "debug", pytest.param("high_memory", marks=pytest.mark.slow)]
)
def test_every_preset_trains(run_here, preset):
    assert "done: " in run_here(f"--preset {preset}")


def test_the_reference_command_is_plain_and_talkative(tmp_path, run_here):
    out = run_here("", train_with_collapse_detection)
    assert "32-true" in out
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["batch_size"], config["bucketing"], config["fused_optimizer"]) == (4, False, False)


@pytest.mark.slow
def test_two_processes_of_one_machine_train_one_model(tmp_path, cache_dir):
    out = run(tmp_path, cache_dir, "--devices 2")
    assert "2 processes" in out
    assert sum(line.startswith("done: ") for line in out.splitlines()) == 1
