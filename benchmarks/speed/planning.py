"""What the plan of an epoch costs a machine with two processes: seconds until the first batch is known, and memory of each.

    python -m benchmarks.speed.planning [--sequences 10000000 100000000]

Log-normal lengths (75 steps on average), 4,096 tokens per batch; nothing but the beginnings of the sequences lies on the disk. The
first process makes what the second one maps; a third makes all in memory of its own. The second one starts when the first one is
done, and memory is read when both are, from the end of their imports on: `own` is what a process shares with none, `mapped` its
share of files. Takes 25 bytes of disk and 30 of memory a sequence. The last line is JSON.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks.measure import machine, make_parser, peak_mb, print_table
from seqvae.config.data import BatchSettings, LengthSettings, SourceSettings
from seqvae.data.batching import choose_sequences
from seqvae.data.datamodule import SCORED_SEQUENCES, SequenceDataModule
from seqvae.data.dataset import SequenceSet
from seqvae.data.demo import LengthLaw
from seqvae.errors import run_command
from seqvae.training.run_directory.resume import identity_of

PROG = "benchmarks.speed.planning"
NUMBERS = (10_000_000,)
PROCESSES = ("first", "second", "on its own")


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=NUMBERS)
    parser.add_argument(
        "--start", nargs=2, metavar=("DIRECTORY", "PROCESS"), help="one process, for this benchmark's own use"
    )
    options = parser.parse_args()
    if options.start:
        start(Path(options.start[0]), options.start[1])
        return
    rows = [row for number in options.sequences for row in run(number)]
    print_table("Plan of an epoch in two processes of a machine, and in one on its own; a start, seconds and MB", rows)
    print(json.dumps({"benchmark": "planning", "machine": machine(), "rows": rows}))


def run(number: int) -> list[dict[str, Any]]:
    """Return a row of each process."""
    with tempfile.TemporaryDirectory(prefix="seqvae-bench-") as folder:
        offsets_S1 = np.zeros(number + 1, np.int64)
        np.cumsum(LengthLaw().sample(number, np.random.default_rng(0)), out=offsets_S1[1:])
        offsets_S1.tofile(Path(folder) / "offsets.bin")
        del offsets_S1
        command = [sys.executable, "-m", PROG, "--start", folder]
        running: list[tuple[subprocess.Popen[str], dict[str, Any]]] = []
        rows = []
        for name in PROCESSES:
            if name == "on its own":  # it needs the memory of the others
                rows += [finish(*one) for one in running]
            process = subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            running.append((process, {"sequences": number, "process": name, **json.loads(process.stdout.readline())}))
        rows.append(finish(*running[-1]))
    return rows


def finish(process: subprocess.Popen[str], row: dict[str, Any]) -> dict[str, Any]:
    """Ask a process that waits for its memory, and let it end."""
    said, _ = process.communicate("\n")
    return row | json.loads(said)


def start(folder: Path, process: str) -> None:
    """Take the way of a run to its first batch, and to the plan of the next epoch; print seconds, then, when asked, memory."""
    number = (folder / "offsets.bin").stat().st_size // 8 - 1
    cap = LengthSettings(max_sequence_length=1000)
    entry = {"file": "offsets.bin", "dtype": "<i8", "count": number + 1, "crc32": 0}
    train = SequenceSet(folder, "tokens", {"offsets": entry}, cap)
    data = SequenceDataModule(SourceSettings(), cap, batches=BatchSettings(tokens_per_batch=4096))
    own, mapped, peak, cpu = *memory_mb(), peak_mb(), time.process_time()
    row: dict[str, float] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        begun = time.perf_counter()
        call()
        row[f"{name} s"] = round(time.perf_counter() - begun, 2)

    def choose() -> list[np.ndarray]:
        return [choose_sequences(train.lengths_N, None, min(SCORED_SEQUENCES, number))]

    shared_from = math.inf if process == "on its own" else 0
    with patch("seqvae.data.dataset.SHARED_FROM", shared_from), patch.object(data, "split", lambda name: train):
        timed("lengths", lambda: train.windows)
        timed("cut", lambda: data.cut)
        timed("plan", lambda: data.plan_of_epoch(0).batch(0))
        timed("choice", lambda: train.share("chosen", (), choose))
        timed("checksum", lambda: identity_of(train.lengths_N, ""))
        row["to the first batch s"] = round(sum(row.values()), 2)
        row["of the CPU s"] = round(time.process_time() - cpu, 2)
        row["peak MB"] = round(peak_mb() - peak)
        timed("next epoch", lambda: data.plan_of_epoch(1).batch(0))
        print(json.dumps(row), flush=True)
        sys.stdin.readline()
        own_now, mapped_now = memory_mb()
        print(json.dumps({"own MB": round(own_now - own), "mapped MB": round(mapped_now - mapped)}))


def memory_mb() -> tuple[float, float]:
    """Return the megabytes that this process has for itself, and its share of those that it has mapped (Linux)."""
    whole, own = psutil.Process().memory_full_info().pss, 0
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss_Anon:"):
            own = int(line.split()[1]) << 10
    return own / 2**20, (whole - own) / 2**20


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
