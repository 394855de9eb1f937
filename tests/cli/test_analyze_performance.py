"""analyze_performance.py: whose settings are measured, and the command as users type it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import analyze_performance
from seqvae.cli import profile
from seqvae.cli.command_line import parse_command_line
from seqvae.cli.profile import ProfileOptimized, _new_directory, read_settings, training_settings
from seqvae.config.flags import without_flags
from seqvae.config.profiling import MeasuringSettings
from seqvae.config.training import OptimizedSettings, ReferenceSettings
from seqvae.config.yaml_files import to_yaml, values_of
from seqvae.console import named_command
from seqvae.errors import UsageError
from seqvae.profiling.measured_run import Recipe
from seqvae.reports.terminal import Ink
from seqvae.training.fit import make_monitors
from tests.support.parquet_files import write_splits

ROOT = Path(__file__).parent.parent.parent
SMALL = "--width 16 --heads 2 --depth 1 --latent_size 2 --tokens_per_batch 400 --max_sequence_length 100"


@pytest.fixture(scope="module")
def token_lists(tmp_path_factory) -> Path:
    lists = [[number % 7] * (1 + number % 50) for number in range(400)]
    return write_splits(tmp_path_factory.mktemp("data"), train={"tokens": lists}, valid={"tokens": lists[:80]})


def training_words(words: list[str]) -> list[str]:
    """Return the words of a training command among those of the measurement."""
    return without_flags(words, values_of(MeasuringSettings()))


# --- Whose settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "command", "schema"),
    [
        ("", "optimized", OptimizedSettings),
        ("--command reference", "reference", ReferenceSettings),
        ("--command reference --lr 0.5 --bucketing", "reference", ReferenceSettings),
    ],
)
def test_the_settings_are_those_of_the_training_command(words, command, schema):
    found = read_settings(words.split())
    mine = training_words(words.split())
    assert list(found) == [command]
    assert training_settings(command, found[command]) == parse_command_line(schema, mine, prog="x", description="")


def test_a_comparison_gives_all_flags_to_both_and_each_its_own_defaults():
    found = read_settings(["--compare", "reference,optimized", "--width", "32"])
    assert list(found) == ["reference", "optimized"]
    assert [one.model.width for one in found.values()] == [32, 32]
    assert [one.batches.batch_size for one in found.values()] == [4, None]
    assert [one.optimizer.fused_optimizer for one in found.values()] == [False, True]


def test_the_config_of_a_run_is_taken_as_it_is(tmp_path):
    settings = parse_command_line(OptimizedSettings, ["--lr", "0.5", "--run_name", "mine"], prog="x", description="")
    (tmp_path / "config.yaml").write_text(to_yaml(settings))
    (found,) = read_settings(["--config", str(tmp_path / "config.yaml")]).values()
    assert training_settings("optimized", found) == settings


def test_settings_that_were_printed_read_back_the_same(tmp_path, capsys):
    with pytest.raises(SystemExit):
        read_settings(["--command", "reference", "--num_iterations", "7", "--print_config"])
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    (name, found), *others = read_settings(["--config", str(tmp_path / "config.yaml")]).items()
    assert (name, found.measuring.num_iterations, others) == ("reference", 7, [])
    assert training_settings(name, found) == ReferenceSettings()


@pytest.mark.parametrize(
    "words",
    [
        "--num_iterations 0",
        "--warmup_iterations 0",
        "--compare reference",
        "--compare reference,reference",
        "--compare reference,fastest",
        "--compare reference,optimized --advise",
        "--advise --find_batch",
        "--memory_limit 6GB",
        "--find_batch --memory_limit much",
        "--command fastest",
    ],
)
def test_what_cannot_be_measured_is_refused(words):
    with pytest.raises(UsageError):
        read_settings(words.split())


def test_the_words_of_the_training_command_are_kept_and_those_of_the_measurement_left_out():
    words = ["--advise", "--data_dir", "my data", "--num-iterations=5", "--no_trace", "--output", "x", "--pin_memory"]
    assert training_words(words) == ["--data_dir", "my data", "--pin_memory"]


# --- The command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "advised"),
    [
        ("python analyze_performance.py", "python train_with_collapse_detection.py"),
        ("seqvae profile", "seqvae train --plain"),
        ("python -m seqvae profile", "python -m seqvae train --plain"),
    ],
)
def test_changes_are_tried_on_the_training_command_as_it_was_typed(typed, advised, monkeypatch, capsys):
    found: dict[str, Any] = {}

    class Advice:
        def as_dict(self) -> dict[str, Any]:
            return {"command": "the best"}

    def advise(recipe: Recipe, words: list[str], *, prog: str, say: Any) -> Advice:
        found.update(words=words, prog=prog)
        return Advice()

    monkeypatch.setattr("seqvae.profiling.advise.advise", advise)
    monkeypatch.setattr("seqvae.reports.profile_report.advice_lines", lambda advice, ink: [advice["command"]])
    words = ["--advise", "--command", "reference", "--lr", "0.1", "--num-iterations", "20", "--no_trace"]
    recipe = Recipe("reference", ReferenceSettings(), make_monitors)
    with named_command(typed):
        assert profile.advise(recipe, words, Ink()) == {"command": "the best"}
    assert found == {"words": ["--lr", "0.1"], "prog": advised}
    assert capsys.readouterr().out == "the best\n"


def test_a_directory_of_which_nothing_came_is_removed_again(tmp_path):
    with pytest.raises(KeyError), _new_directory(None, str(tmp_path / "runs"), "tokens") as directory:
        raise KeyError
    assert not directory.exists()


def test_a_directory_that_was_there_stays(tmp_path):
    with pytest.raises(KeyError), _new_directory(str(tmp_path), "runs", "tokens"):
        raise KeyError
    assert tmp_path.exists()


def test_a_file_is_no_place_for_output(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--output"), _new_directory(str(tmp_path / "file"), "runs", "tokens"):
        pass


def start(folder: Path, data_dir: Path, words: str) -> subprocess.Popen[str]:
    """Start the command in a process group of its own, as a terminal does."""
    places = ["--data_dir", str(data_dir), "--cache_dir", str(folder / "cache"), "--output", str(folder / "out")]
    line = [sys.executable, str(ROOT / "analyze_performance.py"), *words.split(), *places]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, cwd=folder, start_new_session=True, **pipes)


def test_the_command_says_where_a_step_goes_and_writes_it_down(tmp_path, token_lists):
    with start(tmp_path, token_lists, f"{SMALL} --num_iterations 3 --warmup_iterations 2 --trace") as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    for text in ("Where an optimizer step", "real tokens/s", "The whole run", "What holds it back", "files: "):
        assert text in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"analysis.json", "analysis.png", "trace.json"}
    numbers = json.loads((tmp_path / "out" / "analysis.json").read_text())
    (run,) = numbers["runs"]
    assert numbers["settings"]["optimized"]["width"] == 16
    assert sum(run["stages"].values()) == pytest.approx(run["seconds"], rel=1e-2)
    assert run["steps"] == 3
    assert run["recompiles"] == 0
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert not (tmp_path / "runs").exists()


def test_unusable_data_end_it_with_exit_code_3_and_one_line(tmp_path):
    with start(tmp_path, tmp_path / "nowhere", "") as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 3
    assert err.startswith("analyze_performance.py: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name != "posix", reason="other platforms have no such signals")
def test_ctrl_c_leaves_no_process_behind(tmp_path, token_lists):
    with start(tmp_path, token_lists, f"{SMALL} --num_iterations 100000") as process:
        assert process.stderr is not None
        while "measuring" not in (line := process.stderr.readline()):
            assert line, "it ended before its time"
        others = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "analyze_performance.py: stopped by Ctrl-C"
    assert others
    deadline = time.monotonic() + 10
    while any(other.is_running() and other.status() != psutil.STATUS_ZOMBIE for other in others):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_help_imports_nothing_heavy():
    code = "import sys, analyze_performance; print([name for name in ('torch', 'lightning', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_both_commands_are_put_side_by_side(tmp_path, token_lists):
    words = f"{SMALL} --compare reference,optimized --num_iterations 10 --warmup_iterations 2"
    with start(tmp_path, token_lists, words) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert "times as many real tokens per second as" in " ".join(out.split())
    numbers = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert [run["name"] for run in numbers["runs"]] == ["reference", "optimized"]
    assert numbers["comparison"]["lowest"] <= numbers["comparison"]["highest"]


def test_the_words_that_are_shown_in_its_docstring_parse():
    lines = [line for line in (analyze_performance.__doc__ or "").splitlines() if "python " in line]
    assert len(lines) == 5
    for line in lines:
        _, _, *words = shlex.split(line, comments=True)
        parse_command_line(ProfileOptimized, words, prog="x", description="")
