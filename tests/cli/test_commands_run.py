"""The commands as users type them, in real processes on demo data: nothing is added but a step limit and places for files."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

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


def run(folder: Path, cache_dir: Path, words: str, command: str = "train_optimized.py", limits: str = LIMITS) -> str:
    """What it printed."""
    places = ["--output_dir", str(folder), "--cache_dir", str(cache_dir), "--run_name", "run"]
    line = [sys.executable, str(ROOT / command), *words.split(), *limits.split(), *places]
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
def test_the_commands_of_the_readme(tmp_path, cache_dir, words):
    *_, done, report = run(tmp_path, cache_dir, words, limits=SHORTER).splitlines()
    assert done.startswith("done: ")
    assert report == f"report  {tmp_path / 'run' / 'report.html'}"


@pytest.mark.parametrize(
    "preset", ["recommended", "memory_limited", "debug", pytest.param("high_memory", marks=pytest.mark.slow)]
)
def test_every_preset_trains(tmp_path, cache_dir, preset):
    run(tmp_path, cache_dir, f"--preset {preset}", limits=SHORTER)


def test_the_reference_command_is_plain_and_talkative(tmp_path, cache_dir):
    out = run(tmp_path, cache_dir, "", "train_with_collapse_detection.py", limits=SHORTER)
    assert "32-true" in out
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["batch_size"], config["bucketing"], config["fused_optimizer"]) == (4, False, False)


@pytest.mark.slow
def test_two_processes_of_one_machine_train_one_model(tmp_path, cache_dir):
    out = run(tmp_path, cache_dir, "--devices 2")
    assert "2 processes" in out
    assert sum(line.startswith("done: ") for line in out.splitlines()) == 1
