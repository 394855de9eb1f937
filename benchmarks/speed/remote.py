"""What data in an object store cost: building a cache from there, and training on a cache that stays there.

    python -m benchmarks.speed.remote [--sequences 600000] [--rounds 5] [--short]

The store is moto's S3 server in a process of this machine (which shares its cores), reached by sockets: once as it is, once with
every answer 50 ms late. A build is by one process; training is that of train_optimized.py without monitoring, streamed with room
for a tenth of the cache. All take turns.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import machine, make_parser, median, print_table, spread
from seqvae.errors import run_command
from tests.support.object_store import ENVIRONMENT, ObjectStore, object_store

ROOT = Path(__file__).parent.parent.parent
DELAY = 0.05
FIRST_STEP = 10
TRAINING_SEQUENCES = 40_000
"""So few that a short training goes through several of their 32 groups; of more it would fetch as many bytes for each token."""
TRAINING = (
    "--disable_metrics_monitoring --log_every_n_steps 1 --val_check_interval 100000 --limit_val_batches 0.02 --precision 32 "
    "--width 64 --depth 1 --max_sequence_length 256 --tokens_per_batch 4000 --max_steps {steps} --lr 0.001"
)


def main() -> None:
    parser = make_parser("benchmarks.speed.remote", __doc__)
    parser.add_argument("--sequences", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    parser.add_argument("--short", action="store_true", help="one round of 20,000 sequences")
    options = parser.parse_args()
    rounds, sequences = (1, 20_000) if options.short else (options.rounds, options.sequences)
    with tempfile.TemporaryDirectory() as directory, object_store() as store:
        folder = Path(directory)
        write_data(folder / "data", sequences)
        url = store.upload(folder / "data", "bucket/data")
        builds = measure_builds(folder, store, url, rounds)
        print_table(f"Building the cache of {sequences:,} sequences, medians of {rounds} in turns", builds)
        shutil.rmtree(folder / "data")
        write_data(folder / "data", TRAINING_SEQUENCES)
        trainings = measure_trainings(folder, store, rounds, 20 if options.short else options.steps)
        print_table(f"Training on it, medians of {rounds} in turns", trainings)
    print(json.dumps({"benchmark": "remote", "machine": machine(), "builds": builds, "trainings": trainings}))


def write_data(folder: Path, sequences: int) -> None:
    """Write lists of token ids in eight files."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(8):
        lengths_S = random.integers(100, 250, sequences // 8)
        ids_T = random.integers(0, 1000, int(lengths_S.sum())).astype(np.int32)
        lists = pa.ListArray.from_arrays(np.append(0, np.cumsum(lengths_S)).astype(np.int32), ids_T)
        pq.write_table(pa.table({"tokens": lists}), folder / f"{number}.parquet", row_group_size=20_000)


def measure_builds(folder: Path, store: ObjectStore, url: str, rounds: int) -> list[dict[str, Any]]:
    ways = {"from this disk": (str(folder / "data"), 0.0), "from the store": (url, 0.0), "50 ms late": (url, DELAY)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (place, delay) in ways.items():
            store.misbehave(delay=delay)
            seconds[name].append(build(folder / "built", place, store))
            shutil.rmtree(folder / "built")
    return table(seconds, "build, s")


def build(cache_dir: Path, place: str, store: ObjectStore) -> float:
    """Return the seconds that a build takes in a process that has imported everything."""
    program = (
        "import sys, time; from seqvae.config.data import CacheSettings, SourceSettings; "
        "from seqvae.data.cache import prepare_cache; import pyarrow.fs; begin = time.perf_counter(); "
        "source = SourceSettings(data_dir=sys.argv[1], allow_remote=True, endpoint_url=sys.argv[3]); "
        "prepare_cache(source, CacheSettings(cache_dir=sys.argv[2])); print(time.perf_counter() - begin)"
    )
    line = [sys.executable, "-c", program, place, str(cache_dir), store.url]
    done = subprocess.run(line, env=environment({}), cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout)


def measure_trainings(folder: Path, store: ObjectStore, rounds: int, steps: int) -> list[dict[str, Any]]:
    shelf = store.upload(ROOT / "pyproject.toml", "shelf/caches")
    words = f"--data_dir {folder / 'data'} --endpoint_url {store.url}"
    line = [sys.executable, "-m", "seqvae", "build-cache", *words.split(), "--cache_dir", shelf]
    variables = environment({"XDG_CACHE_HOME": str(folder / "builder")})
    subprocess.run(line, env=variables, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    whole = sum(path.stat().st_size for path in (folder / "builder").rglob("*.bin"))
    stream = f"--cache_dir {shelf} --stream --local_limit {whole // 10}B"
    ways = {
        "a cache on this disk": (f"--cache_dir {folder / 'local'}", 0.0),
        "streamed, a tenth here": (stream, 0.0),
        "streamed, 50 ms late": (stream, DELAY),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, (flags, delay) in ways.items():
            store.misbehave(delay=delay)
            run = f"{number}-{list(ways).index(name)}"
            seconds[name].append(train(folder, f"{words} {flags} --run_name {run}", run, steps))
    return table(seconds, "s an epoch")


def train(folder: Path, words: str, run: str, steps: int) -> float:
    """Return the seconds that a training takes for an epoch, from its tenth step on."""
    line = [sys.executable, str(ROOT / "train_optimized.py"), *TRAINING.format(steps=steps).split(), *words.split()]
    variables = environment({"XDG_CACHE_HOME": str(folder / "home")})
    subprocess.run(line, env=variables, cwd=folder, check=True, capture_output=True)
    with (folder / "runs" / run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("loss") and int(row["step"]) >= FIRST_STEP]
    of_step = (float(rows[-1]["seconds"]) - float(rows[0]["seconds"])) / (int(rows[-1]["step"]) - int(rows[0]["step"]))
    facts = json.loads((folder / "runs" / run / "run.json").read_text())
    return (
        of_step * int(facts["data"]["batches"].split()[0].replace(",", "")) / 2
    )  # train_optimized.py takes two to a step


def environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **ENVIRONMENT, **more}


def table(seconds: Mapping[str, list[float]], unit: str) -> list[dict[str, Any]]:
    """Return a row for each way; how fast it is beside the first."""
    first = median(next(iter(seconds.values())))
    return [
        {"way": name, unit: round(median(times), 3), "spread": spread(times), "speed": round(first / median(times), 2)}
        for name, times in seconds.items()
    ]


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.speed.remote"))
