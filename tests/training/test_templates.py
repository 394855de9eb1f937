"""The files of docs/templates/: SLURM's with a fake srun and scontrol that do what the real ones do, SkyPilot's by its words."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings
from seqvae.data.demo import write_demo
from seqvae.files import read_rows
from tests.faults.runs import on_posix
from tests.support.launched import ROOT, SMALL, ends, environment, free_port, wait_for_step

TEMPLATES = ROOT / "docs" / "templates"

SRUN = """\
import os, signal, subprocess, sys
tasks = int(os.environ["FAKE_TASKS"])
variables = {
    "SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NNODES": "1", "SLURM_JOB_NAME": "seqvae",
    "SLURM_NODEID": "0", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "127.0.0.1",
}
started = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, **variables, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)})
    for n in range(tasks)
]
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in started])
sys.exit(max(code if code >= 0 else 128 - code for code in [task.wait() for task in started]))
"""
SCONTROL = 'import pathlib, sys; pathlib.Path("requeued").write_text(" ".join(sys.argv[1:]))'


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch job, with commands before all others on its PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(f"#!{sys.executable}\n{text}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "train_optimized.py").symlink_to(ROOT / "train_optimized.py")
    path = f"{commands}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "7", "FAKE_TASKS": "2", "MASTER_PORT": str(free_port())}
    return environment({"PATH": path, **job})


@on_posix
@pytest.mark.slow
def test_a_job_whose_time_is_nearly_over_is_saved_requeued_and_goes_on(tmp_path, cluster):
    data_dir = write_demo(tmp_path, "tokens", sequences=300, mean_length=20)
    words = [*SMALL.split(), "--data_dir", str(data_dir), "--cache_dir", "cache", "--run_name", "big"]
    words += ["--batches_per_step", "4"]

    def job(*more: str) -> subprocess.Popen[str]:
        line = ["bash", str(TEMPLATES / "seqvae.sbatch"), *words, *more]
        return subprocess.Popen(
            line, cwd=tmp_path, env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    run, requeued = tmp_path / "runs" / "big", tmp_path / "requeued"
    batch = job("--max_steps", "100000")
    wait_for_step(run, 3, [batch])
    batch.send_signal(signal.SIGUSR1)
    (first,) = ends([batch], timeout=60)
    assert first.code == 0, first.errors
    assert requeued.read_text() == "requeue 7"
    assert "stopped by SIGUSR1 after step" in first.errors
    (command,) = [line for line in first.errors.splitlines() if line.startswith("srun ")]
    assert command.startswith("srun --nodes 1 --ntasks-per-node 2 python ")
    requeued.unlink()
    last = read_rows(run / "events.jsonl")[-1]["step"]
    (second,) = ends([job("--max_steps", str(last + 4))], timeout=60)
    assert second.code == 0, second.errors
    assert not requeued.exists()
    rows = read_rows(run / "events.jsonl")
    assert [row["event"] for row in rows if row["event"] != "early_stopping"][:3] == [
        "started",
        "interrupted",
        "resumed",
    ]
    assert [(row["launcher"], row["processes"]) for row in rows if "launcher" in row] == [("SLURM", 2)] * 2


def test_the_command_of_the_sky_template_parses():
    task = yaml.safe_load((TEMPLATES / "seqvae.sky.yaml").read_text())
    assert task["num_nodes"] == 2
    assert {"/data", "/runs"} == set(task["file_mounts"])
    words = shlex.split(task["run"].replace("\\\n", " "))
    launcher, flags = words[: words.index("train_optimized.py")], words[words.index("train_optimized.py") + 1 :]
    settings = parse_command_line(OptimizedSettings, flags, prog="train_optimized.py", description="")
    assert (settings.source.data_dir, settings.run.output_dir, settings.run.run_name) == ("/data", "/runs", "big")
    from torch.distributed.run import get_args_parser

    numbers = [word.replace("$SKYPILOT_NUM_NODES", "2").replace("$SKYPILOT_NODE_RANK", "1") for word in launcher[1:]]
    options = get_args_parser().parse_args([*numbers, "train_optimized.py"])
    assert (options.nnodes, options.node_rank, options.master_port) == ("2", 1, 29500)
