"""Verdicts in runs of our command, and in two processes: they end, go on and tell their story alike."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seqvae.data.demo import write_demo
from seqvae.errors import ExitCode
from seqvae.files import read_rows
from seqvae.monitors.callback import COLLAPSED_EXIT_CODE, FEWEST_READINGS
from seqvae.reports.run_files import HEALTHY, LAST
from seqvae.training.run_directory.checkpoint_file import damage_of, read_lazily
from tests.support.scripted_vaes import LONG, events_of, script, step_of, verdicts_of

ROOT = Path(__file__).parent.parent.parent

COLLAPSING = (
    "--kl_schedule constant --free_bits 0 --beta 4 --max_steps 240 --max_sequence_length 64 --tokens_per_batch 1000 "
    "--log_every_n_steps 10 --checkpoint_every_n_steps 5"
)


def start(folder: Path, words: str) -> subprocess.Popen[str]:
    small = f"--width 16 --heads 2 --depth 1 --cache_dir {folder / 'cache'} --plot_every_n_steps 10000"
    line = [sys.executable, str(ROOT / "train_optimized.py"), *small.split(), *words.split()]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)


def command(folder: Path, words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with start(folder, words) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that was stopped by its collapse, and what it said on stderr."""
    folder = tmp_path_factory.mktemp("stopped")
    code, _, err = command(folder, f"{COLLAPSING} --on_collapse stop --run_name a")
    assert code == ExitCode.COLLAPSED == COLLAPSED_EXIT_CODE == 7, err
    return folder, err


def test_a_command_that_stops_at_a_collapse_leaves_a_whole_checkpoint_of_that_step(stopped):
    folder, said = stopped
    run = folder / "runs" / "a"
    step = next(row["step"] for row in read_rows(run / "events.jsonl") if row["event"] == "stopped")
    assert step >= step_of("collapsed", run)
    go_on = f"python {ROOT / 'train_optimized.py'} --config runs/a/config.yaml"
    assert said.splitlines()[-5:] == [
        f"posterior: collapsed: stopped after step {step}, which is saved",
        "It was never well. Begin again, healing itself:",
        f"{go_on} --run_name a-2 --on_collapse rescue",
        "To go on all the same:",
        go_on,
    ]
    assert damage_of(run / "checkpoints" / LAST) is None
    assert read_lazily(run / "checkpoints" / LAST)["global_step"] == step
    assert (events_of(run)[0], events_of(run)[-1]) == ("started", "stopped")


def test_a_run_that_goes_on_takes_no_other_weights(stopped):
    folder, _ = stopped
    code, _, err = command(folder, "--config runs/a/config.yaml --init_from nowhere.ckpt")
    assert code == ExitCode.USAGE
    assert "--init_from nowhere.ckpt: runs/a goes on from its own last.ckpt; give another --run_name" in err


def test_to_stop_at_a_collapse_takes_a_monitor(tmp_path):
    code, out, err = command(tmp_path, "--disable_metrics_monitoring --on_collapse stop")
    assert (code, out) == (2, "")
    assert "--on_collapse stop needs the monitor" in err


@pytest.fixture(scope="module")
def warned(stopped: tuple[Path, str]) -> Path:
    """The same run, which was only warned."""
    folder, _ = stopped
    code, _, err = command(folder, f"{COLLAPSING} --run_name warned")
    assert code == 0, err
    return folder / "runs" / "warned"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [f"{COLLAPSING} --run_name a", f"{COLLAPSING} --resume RUN/checkpoints/last.ckpt", "--config RUN/config.yaml"],
)
def test_a_command_goes_on_from_where_it_was_stopped_as_if_it_had_only_been_warned(words, stopped, warned, tmp_path):
    folder, _ = stopped
    runs = tmp_path / "runs"
    shutil.copytree(folder / "runs", runs)
    asked = words.replace("RUN", str(runs / "a"))
    code, out, err = command(folder, f"{asked} --on_collapse stop --output_dir {runs}")
    assert code == 0, err
    assert "posterior: collapsed since step" in out
    assert events_of(runs / "a")[-1] == "finished"
    assert read_rows(runs / "a" / "posterior.jsonl") == read_rows(warned / "posterior.jsonl")
    assert verdicts_of(runs / "a") == verdicts_of(warned)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--fast_detection"])
def test_a_command_that_was_killed_tells_the_story_of_an_unbroken_one(words, tmp_path):
    story = f"{COLLAPSING} {words}"
    assert command(tmp_path, f"{story} --run_name unbroken")[0] == 0
    with start(tmp_path, f"{story} --run_name broken") as process:
        assert process.stdout is not None
        steps = 0
        while steps < 6:
            line = process.stdout.readline()
            assert line, "the run ended before its time"
            steps += line.startswith("step")
        process.kill()
    code, _, err = command(tmp_path, f"{story} --run_name broken")
    assert code == 0, err
    unbroken, broken = tmp_path / "runs" / "unbroken", tmp_path / "runs" / "broken"
    assert read_rows(broken / "posterior.jsonl") == read_rows(unbroken / "posterior.jsonl")
    assert verdicts_of(broken) == verdicts_of(unbroken) != []


@pytest.mark.slow
def test_two_processes_of_a_command_stop_together_with_code_7(stopped):
    folder, _ = stopped
    words = "--on_collapse stop --run_name two --devices 2 --gradient_accumulation_steps 1"
    code, out, err = command(folder, f"{COLLAPSING} {words}")
    run = folder / "runs" / "two"
    assert code == 7, err
    assert out.count("posterior: step") == len(verdicts_of(run))
    (step,) = (row["step"] for row in read_rows(run / "events.jsonl") if row["event"] == "stopped")
    assert step >= step_of("collapsed", run)  # to stop takes longer than to warn
    said = [line for line in err.splitlines() if "stopped" in line]
    assert said == [f"posterior: collapsed: stopped after step {step}, which is saved"]
    assert read_lazily(run / "checkpoints" / LAST)["global_step"] == step


@pytest.mark.slow
def test_the_healthy_checkpoint_of_a_command_is_what_another_run_may_begin_from(tmp_path):
    data_dir = write_demo(tmp_path, "vectors", sequences=600, mean_length=12)
    healthy = (
        "--kl_schedule constant --beta 0.05 --tokens_per_batch 500 --lr 0.02 --warmup 5 --checkpoint_every_n_steps 10"
    )
    code, out, err = command(tmp_path, f"{healthy} --max_steps 200 --data_dir {data_dir} --run_name a")
    assert code == 0, err
    assert "healthy" in out
    saved = tmp_path / "runs" / "a" / "checkpoints" / HEALTHY
    code, _, err = command(tmp_path, f"{healthy} --max_steps 2 --data_dir {data_dir} --init_from {saved}")
    assert code == 0, err


# --- Two processes of a script --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_agree_on_each_verdict_and_one_of_them_writes(tmp_path):
    ended = script(tmp_path, "two")
    changes = verdicts_of(tmp_path)
    assert "process 0 terminated with exit code 7" in ended.stderr.splitlines()[-1]
    assert ended.stdout.count("posterior: step") == len(changes)
    events = events_of(tmp_path)
    assert [name for name in events if name in ("verdict", "stopped")] == ["verdict"] * len(changes) + ["stopped"]
    (step,) = (row["step"] for row in read_rows(tmp_path / "events.jsonl") if row["event"] == "stopped")
    saved = torch.load(tmp_path / "collapsed.ckpt", weights_only=True)
    assert (
        saved["global_step"] == step >= step_of("collapsed", tmp_path)
    )  # both came there, or it would have waited for ever
    steps = [row["step"] for row in read_rows(tmp_path / "posterior.jsonl")]
    every = LONG // FEWEST_READINGS
    assert steps == list(range(every, steps[-1] + 1, every))
