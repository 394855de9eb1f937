"""Runs of several processes, started as launchers start them, on one machine with a directory for each that stands in for it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from seqvae.files import read_rows

ROOT = Path(__file__).parent.parent.parent
SMALL = (
    "--width 16 --heads 2 --depth 1 --latent_size 4 --precision 32 --log_every_n_steps 1 --max_steps 12 --val_check_interval 4 "
    "--tokens_per_batch 400 --disable_metrics_monitoring --lr 0.01 --limit_val_batches 4 --num_workers 0 --plot_every_n_steps 1000"
)
COLUMNS = ["step", "loss", "nll_per_step", "kl", "kl_weight", "lr", "gradient_norm", "valid_elbo", "valid_kl"]
SCRIPT = str(ROOT / "train_optimized.py")


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    output: str
    errors: str


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def environment(more: Mapping[str, str] = {}) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def ranked(rank: int, world: int, port: int, **more: str) -> dict[str, str]:
    """Return what Kubeflow and others tell a process."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}


def start(
    folder: Path,
    words: str,
    variables: Mapping[str, str] = {},
    launcher: Sequence[str] = (),
    before: Sequence[str] = (),
    faults: Sequence[Mapping[str, Any]] = (),
) -> subprocess.Popen[str]:
    """Start a training in a directory. `before`: what runs it somewhere else."""
    folder.mkdir(exist_ok=True)
    script = ("-m", "tests.faults.faulty", json.dumps(faults), "train_optimized.py") if faults else (SCRIPT,)
    line = [*before, sys.executable, *launcher, *script, *SMALL.split(), *words.split()]
    return subprocess.Popen(
        line, cwd=folder, env=environment(variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def by_torchrun(agents: int | str, address: str, *, local: str, restarts: int = 0) -> list[str]:
    """Return the words by which one of several agents of torchrun starts a process; they meet at the first one's address."""
    words = f"--nnodes={agents} --nproc_per_node=1 --max_restarts={restarts} --rdzv_backend=c10d --rdzv_id=test"
    is_host = address.startswith(f"{local}:")
    place = f"--rdzv_endpoint={address} --rdzv_conf=last_call_timeout=3,is_host={is_host} --local_addr={local}"
    return ["-m", "torch.distributed.run", *words.split(), *place.split()]


def workers_of(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the trainings that an agent has started, wherever it runs."""
    children = psutil.Process(agent.pid).children(recursive=True)
    return [child for child in children if SCRIPT in child.cmdline() and "torch.distributed.run" not in child.cmdline()]


def ends(processes: Sequence[subprocess.Popen[str]], timeout: float = 150.0) -> list[Ended]:
    """Wait for all of them; those that do not end in time are killed, and the test fails."""
    deadline, found = time.monotonic() + timeout, []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            found.append(Ended(process.returncode, output, errors))
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
    return found


def wait_for_step(run: Path, step: int, processes: Sequence[subprocess.Popen[str]], timeout: float = 90.0) -> None:
    """Wait until a run has written a row of this step; where it does not, end its processes and show what they said."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and all(process.poll() in (None, 0) for process in processes):
        path = run / "metrics.csv"
        if path.exists() and any(line.split(",")[0] == str(step) for line in path.read_text().splitlines()):
            return
        time.sleep(0.05)
    for process in processes:
        process.kill()
    raise TimeoutError(f"{run} did not come to step {step}: {ends(processes)}")


def events_of(run: Path) -> list[str]:
    return [row["event"] for row in read_rows(run / "events.jsonl")]
