"""How fast encoding is beside nothing but the network on batches that lie ready, and how its memory grows.

    python -m benchmarks.speed.encoding [--rounds 7] [--short]

A network of `train_optimized.py`'s defaults with two steps of training (how well it models does not matter here). One side goes
through all batches of a set, which lie in memory, in the order and the sizes that encoding uses; the other is what `seqvae
encode` does: sequences out of the cache, the network, ids, and the rows of a Parquet file on disk. Both take turns in this process.

Memory: encoding the same split again and again into one file, resident memory after a quarter of it and at its end.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.measure import (
    interleaved_seconds,
    machine,
    make_parser,
    median,
    print_table,
    restart_as_commands_run,
    spread,
)
from seqvae.errors import UsageError, run_command

if TYPE_CHECKING:
    import pyarrow as pa

    from seqvae.inference.model import Model

SETS: dict[str, tuple[str, ...]] = {
    "moses_smiles": ("--tokenizer", "characters"),
    "japanese_vowels": (),
    "physionet2012": (),
}
SPLITS = {"moses_smiles": "test", "japanese_vowels": "train", "physionet2012": "test"}
"""Splits that are large enough for a measurement, and no larger."""
PASSES = 12


def main() -> None:
    parser = make_parser("benchmarks.speed.encoding", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="vowels alone, three rounds")
    options = parser.parse_args()
    restart_as_commands_run()
    with tempfile.TemporaryDirectory() as directory:
        trained = {name: train_two_steps(name, directory) for name in (["japanese_vowels"] if options.short else SETS)}
        rounds = 3 if options.short else options.rounds
        rows = [measure_speed(name, one, Path(directory), rounds) for name, one in trained.items()]
        print_table("encoding, against the network alone", rows)
        largest = next(iter(trained))
        memory = measure_memory(largest, trained[largest], Path(directory))
    print_table("memory", memory)
    print(json.dumps({"machine": machine(), "rows": rows, "memory": memory}))


def train_two_steps(name: str, directory: str) -> "Model":
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.training import OptimizedSettings
    from seqvae.inference.model import open_model
    from seqvae.training.fit import fit

    folder = os.environ.get("SEQVAE_REAL_DATA")
    if not folder:
        raise UsageError("SEQVAE_REAL_DATA does not name the folder of the real data")
    words = ["--data_dir", str(Path(folder) / name), *SETS[name], "--output_dir", directory, "--run_name", name]
    words += ["--max_steps", "2", "--limit_val_batches", "0"]
    settings = parse_command_line(OptimizedSettings, words, prog="benchmarks.speed.encoding", description="")
    return open_model(str(fit(settings, []).directory))


def measure_speed(name: str, trained: "Model", directory: Path, rounds: int) -> dict[str, Any]:
    import numpy as np

    from seqvae.config.inference import DataChoices
    from seqvae.inference.model import open_data
    from seqvae.inference.streaming import STEPS_AT_ONCE, cut_ascending, evaluating, windows, write_tables
    from seqvae.inference.tables import encode

    data, split = open_data(trained, DataChoices()), SPLITS[name]
    stored = data.split(split)
    lengths_N = np.asarray(stored.lengths_N)
    batches = []
    for first, behind in windows(lengths_N):  # as encoding does
        order_W = first + np.argsort(lengths_N[first:behind], kind="stable")
        batches += [stored.gather(order_W[part]) for part in cut_ascending(lengths_N[order_W], STEPS_AT_ONCE)]

    def network_alone() -> None:
        with evaluating(trained.network, trained.autocast):
            for batch in batches:
                trained.network(batch)

    def encoding() -> None:
        write_tables(directory / "latents.parquet", encode(trained, data, [split]), {})

    seconds = interleaved_seconds({"alone": network_alone, "encoding": encoding}, rounds)
    steps = int(lengths_N.sum())
    ratios = [alone / whole for alone, whole in zip(seconds["alone"], seconds["encoding"], strict=True)]
    return {
        "data": f"{name}, {split}",
        "sequences": len(stored),
        "network alone, steps/s": round(steps / median(seconds["alone"])),
        "encoding, steps/s": round(steps / median(seconds["encoding"])),
        "ratio": round(median(ratios), 3),
        "spread": spread(ratios),
    }


def measure_memory(name: str, trained: "Model", directory: Path) -> list[dict[str, Any]]:
    """Encode the same split PASSES times into one file."""
    from seqvae.config.inference import DataChoices
    from seqvae.inference.model import open_data
    from seqvae.inference.streaming import write_tables
    from seqvae.inference.tables import encode

    data = open_data(trained, DataChoices())
    held: list[tuple[int, float]] = []

    def passes() -> "Iterator[pa.Table]":
        rows = 0
        for _ in range(PASSES):
            for table in encode(trained, data, [SPLITS[name]]):
                rows += table.num_rows
                yield table
            held.append((rows, psutil.Process().memory_info().rss / 1e6))

    begin = time.perf_counter()
    write_tables(directory / "long.parquet", passes(), {})
    quarter = PASSES // 4
    (_, first), (last_rows, last) = held[quarter - 1], held[-1]
    return [
        {
            "data": name,
            "sequences": last_rows,
            "seconds": round(time.perf_counter() - begin, 1),
            "resident MB after a quarter": round(first, 1),
            "at the end": round(last, 1),
            "growth": f"{last / first - 1:.1%}",
        }
    ]


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.speed.encoding"))
