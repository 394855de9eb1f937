"""Random SIGKILLs: a tiny run is killed again and again, at any moment, resumed each time by the same command, and compared at its
end with the run that was never killed.

    python -m benchmarks.reliability.chaos --kills 100 [--seed 0] [flags of train_optimized.py]

Out: the number of kills and resumes, the most optimizer steps that a kill cost, and the number of runs that ended otherwise (the
exit code is 1 unless it is 0). Where a run ends before the kills are used up, another one begins.
"""

import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import machine, make_parser, print_table
from benchmarks.reliability.same_run import differences_of_runs
from seqvae.errors import run_command
from seqvae.files import read_rows
from seqvae.training.run_directory.checkpoint_file import read_lazily
from seqvae.training.run_directory.resume import find_checkpoint

ROOT = Path(__file__).parent.parent.parent
SHARE_EARLY = 0.15
"""Share of the kills that come while a process starts; the others come while it trains, validates and saves."""
MAX_SECONDS = 3.0
"""Longest training before a kill."""
SMALL = """
--width 16 --heads 2 --depth 1 --tokens_per_batch 1000 --dropout 0.2 --kind tokens
--max_steps 1500 --log_every_n_steps 1 --checkpoint_every_n_steps 20
--val_check_interval 50 --limit_val_batches 2 --monitor_every_n_steps 10
"""


class Tally(NamedTuple):
    """Counts over all runs."""

    kills: int = 0
    kills_while_starting: int = 0
    resumes: int = 0
    steps_lost_at_most: int = 0
    runs: int = 0
    mismatches: int = 0


def main() -> int:
    parser = make_parser("benchmarks.reliability.chaos", __doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options, words = parser.parse_known_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        chaos = Chaos(Path(directory), words, random.Random(options.seed))
        tally = chaos.cause(options.kills)
    print_table(f"{options.kills} kills", [tally._asdict()])
    minutes = round((time.monotonic() - started) / 60, 1)
    print(json.dumps({"machine": machine(), "minutes": minutes, "seed": options.seed, "tally": tally._asdict()}))
    return 1 if tally.mismatches else 0


class Chaos:
    """Runs of one command in one directory."""

    def __init__(self, directory: Path, words: Sequence[str], chance: random.Random) -> None:
        self.directory = directory
        self.words = words
        self.chance = chance
        self._log = directory / "log.txt"
        self._start_seconds = 0.0

    def cause(self, kills: int) -> Tally:
        """Run the unbroken run first, then others that are killed until there were this many kills."""
        started = time.monotonic()
        with self._start("unbroken") as process:
            self._wait_for_training(process)
            self._start_seconds = time.monotonic() - started
        self._check("unbroken", process)
        tally = Tally()
        while tally.kills < kills:
            tally = self._kill_repeatedly(f"run-{tally.runs}", tally, kills)
            print(f"{tally.kills} kills, {tally.runs} runs, {tally.mismatches} mismatches", flush=True)
        return tally

    def _kill_repeatedly(self, name: str, tally: Tally, max_kills: int) -> Tally:
        """Bring one run to its end, and count it."""
        run = self.directory / "runs" / name
        while tally.kills < max_kills:
            is_early = self.chance.random() < SHARE_EARLY
            with self._start(name) as process:
                if is_early:
                    time.sleep(self.chance.uniform(0, self._start_seconds))
                else:
                    self._wait_for_training(process)
                    time.sleep(self.chance.uniform(0, MAX_SECONDS))
                process.kill()
            if process.returncode >= 0:  # it ended first
                self._check(name, process)
                break
            checkpoint = find_checkpoint(run)
            saved = 0 if checkpoint is None else int(read_lazily(checkpoint)["global_step"])
            tally = tally._replace(
                kills=tally.kills + 1,
                kills_while_starting=tally.kills_while_starting + is_early,
                steps_lost_at_most=max(tally.steps_lost_at_most, last_step(run) - saved),
            )
        with self._start(name) as process:  # to its end; where it has ended already, it says so
            pass
        self._check(name, process)
        differences = differences_of_runs(run, self.directory / "runs" / "unbroken")
        for line in differences:
            print(f"{name}: {line}", file=sys.stderr)
        resumes = sum(row["event"] == "resumed" for row in read_rows(run / "events.jsonl"))
        return tally._replace(
            resumes=tally.resumes + resumes, runs=tally.runs + 1, mismatches=tally.mismatches + bool(differences)
        )

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        places = ("--output_dir", str(self.directory / "runs"), "--cache_dir", str(self.directory / "cache"))
        command = [sys.executable, "-u", str(ROOT / "train_optimized.py"), *SMALL.split(), *places, "--run_name", name]
        with self._log.open("wb") as log:
            return subprocess.Popen([*command, *self.words], stdout=log, stderr=subprocess.STDOUT, cwd=self.directory)

    def _wait_for_training(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the first step is printed, or the process has ended."""
        while process.poll() is None and b"\nstep" not in self._log.read_bytes():
            time.sleep(0.01)

    def _check(self, name: str, process: subprocess.Popen[bytes]) -> None:
        if process.returncode:
            output = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise SystemExit(f"{name} ended with {process.returncode}, although nothing killed it: {output}")


def last_step(run: Path) -> int:
    """Return the last optimizer step whose row was written."""
    path = run / "metrics.csv"
    if not path.exists():
        return 0
    with path.open(newline="", encoding="utf-8") as file:
        return max((int(row["step"]) for row in csv.DictReader(file) if row["step"].isdigit()), default=0)


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.reliability.chaos"))
