"""What several processes cost: two of one thread beside one of two threads, and two machines with a slow cable between them.

    python -m benchmarks.speed.processes [--rounds 5] [--megabits 300] [--short]

Real trainings by train_optimized.py of demo data, which take turns; seconds are those between rows of metrics.csv, from the fifth
step on. The cable (benchmarks/two_machines.py) takes Linux, root and `tc`; without them its table is left out.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, make_parser, median, print_table, spread
from benchmarks.two_machines import two_machines, why_not
from seqvae.data.demo import write_demo
from seqvae.errors import run_command

ROOT = Path(__file__).parent.parent.parent
LAUNCHER = ("-m", "torch.distributed.run")
QUIET = (
    "--disable_metrics_monitoring --log_every_n_steps 1 --val_check_interval 100000 --limit_val_batches 1 --num_workers 0 "
    "--precision 32 --batches_per_step 2 --lr 0.001"
)
SMALL = "--width 128 --depth 2 --tokens_per_batch 4000 --max_steps 45"
TEN_MILLION = "--width 384 --depth 3 --heads 4 --tokens_per_batch 300 --max_sequence_length 64 --max_steps 14"
FIRST_STEP = 5
WAYS = {
    "buckets of 25 MB": "",
    "buckets of 3 MB": "--bucket_megabytes 3",
    "buckets of 3 MB, fp16": "--bucket_megabytes 3 --compress_gradients fp16",
    "buckets of 3 MB, bf16": "--bucket_megabytes 3 --compress_gradients bf16",
}


def main() -> None:
    parser = make_parser("benchmarks.speed.processes", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabits", type=int, default=300, help="a second, each way")
    parser.add_argument("--short", action="store_true", help="one round")
    options = parser.parse_args()
    rounds = 1 if options.short else options.rounds
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        data_dir = write_demo(folder, "tokens", sequences=4000, mean_length=60)
        rows = measure_threads(folder, data_dir, rounds)
        print_table(f"Two cores, medians of {rounds} in turns", rows)
        report = {"benchmark": "processes", "machine": machine(), "threads": rows, "megabits": options.megabits}
        if reason := why_not():
            print(f"no cable: {reason}")
        else:
            report["cable"] = measure_cable(folder, data_dir, rounds, options.megabits)
            print_table(f"A cable of {options.megabits} Mbit/s, medians of {rounds} in turns", report["cable"])
    print(json.dumps(report))


def measure_threads(folder: Path, data_dir: Path, rounds: int) -> list[dict[str, Any]]:
    ways: dict[str, tuple[str, ...]] = {
        "one process of two threads": (),
        "two processes of one thread": (*LAUNCHER, "--standalone", "--nproc_per_node", "2"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, launcher in ways.items():
            threads = "1" if launcher else "2"
            words = f"{SMALL} --data_dir {data_dir} --cache_dir {folder / 'cache'} --run_name {threads}-{number}"
            process = start(folder, words, launcher, {"OMP_NUM_THREADS": threads})
            finish([process])
            seconds[name].append(seconds_per_step(folder / "runs" / f"{threads}-{number}"))
    return table(seconds)


def measure_cable(folder: Path, data_dir: Path, rounds: int, megabits: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    megabytes: dict[str, list[float]] = {name: [] for name in WAYS}
    with two_machines([folder / "a", folder / "b"], megabits) as machines:
        place = f"--nnodes 2 --nproc_per_node 1 --master_addr {machines[0].name} --master_port 29500".split()
        for number in range(rounds):
            for name, flags in WAYS.items():
                run = f"run-{len(megabytes[name])}-{list(WAYS).index(name)}"
                words = f"{TEN_MILLION} --data_dir {data_dir} --cache_dir cache --run_name {run} {flags}"
                processes = [
                    start(
                        one.folder,
                        words,
                        (*LAUNCHER, *place, "--node_rank", str(rank)),
                        {"OMP_NUM_THREADS": "1", **one.variables},
                        one.before,
                    )
                    for rank, one in enumerate(machines)
                ]
                directory = machines[0].folder / "runs" / run
                sent = []
                for step in (FIRST_STEP, FIRST_STEP + 8):
                    wait_for_step(directory, step, processes)
                    sent.append(machines[0].sent_bytes())
                finish(processes)
                seconds[name].append(seconds_per_step(directory))
                megabytes[name].append((sent[1] - sent[0]) / 8e6)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    rows = table(seconds)
    return [row | {"MB a step and process": round(median(megabytes[str(row["way"])]), 1)} for row in rows]


def start(
    folder: Path, words: str, launcher: Sequence[str], variables: Mapping[str, str], before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    line = [*before, sys.executable, *launcher, str(ROOT / "train_optimized.py"), *QUIET.split(), *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"a training ended with {process.returncode}:\n{errors}")


def wait_for_step(run: Path, step: int, processes: Sequence[subprocess.Popen[str]]) -> None:
    while all(int(row["step"]) < step for row in training_rows(run)):
        if any(process.poll() for process in processes):
            finish(processes)
        time.sleep(0.01)


def training_rows(run: Path) -> list[dict[str, str]]:
    path = run / "metrics.csv"
    return [row for row in csv.DictReader(path.open()) if row.get("loss")] if path.exists() else []


def seconds_per_step(run: Path) -> float:
    rows = [row for row in training_rows(run) if int(row["step"]) >= FIRST_STEP]
    return (float(rows[-1]["seconds"]) - float(rows[0]["seconds"])) / (int(rows[-1]["step"]) - int(rows[0]["step"]))


def table(seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return a row for each way; all train the same batches, so that speeds are to one another as the seconds of a step."""
    first = median(next(iter(seconds.values())))
    return [
        {
            "way": name,
            "seconds a step": round(median(values), 3),
            "spread": spread(values),
            "speed": round(first / median(values), 2),
        }
        for name, values in seconds.items()
    ]


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.speed.processes"))
