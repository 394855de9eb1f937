"""What all benchmarks share: timing in turns, processes that report on themselves, generated data, tables on the terminal."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from seqvae.console import share_machine
from seqvae.data.demo import LengthLaw
from seqvae.files import parse_rows, whole_lines
from seqvae.training.distributed import cpu_has_bf16_units

ROWS_PER_GROUP = 50_000


def make_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows a module's docstring as it is; flags must be typed in full."""
    return argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def interleaved_seconds(candidates: Mapping[str, Callable[[], object]], repeats: int = 5) -> dict[str, list[float]]:
    """Time each candidate `repeats` times, taking turns, so that a busy minute of the machine hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate()  # warm: files in the page cache, threads started
    for _ in range(repeats):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            seconds[name].append(time.perf_counter() - start)
    return seconds


median = statistics.median


def spread(values: Sequence[float]) -> str:
    """Return lowest to highest, relative to the median."""
    middle = median(values)
    return f"{min(values) / middle:.2f}-{max(values) / middle:.2f}"


def run_in_own_process(module: str, *words: str) -> dict[str, Any]:
    """Run `python -m module words` and return the JSON of its last line: memory is only its own there."""
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{module} {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def known_figures(path: Path, data: str, steps: int, version: str | None) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what trainings by name and seed a file of JSON lines holds, whose folder is made; `version`: of this code alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return {
        (row["name"], row["seed"]): row
        for row in (parse_rows(whole_lines(path)) if path.exists() else ())
        if row["data"] == data and row["steps"] == steps and version in (None, row["version"])
    }


def code_version(benchmark: str) -> str:
    """Return the commit of the last change of the package or of the file of a benchmark."""
    words = ("git", "log", "-1", "--format=%h", "--", "seqvae", benchmark)
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def restart_as_commands_run() -> None:
    """Start the program again with what commands set for torch before they import it, unless that is in force already."""
    before = dict(os.environ)
    share_machine()
    if os.environ != before:
        spec = sys.modules["__main__"].__spec__
        assert spec is not None  # started with -m
        os.execv(sys.executable, [sys.executable, "-m", spec.name, *sys.argv[1:]])


def peak_mb() -> float:
    """Return the peak memory of this process (Linux); that of `getrusage` begins at the peak of its parent."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def write_token_lists(path: Path, sequences: int, vocabulary: int = 5000, seed: int = 0, longest: int = 1000) -> None:
    """Write columns id and tokens: list<int32>, with log-normal lengths (mean 75, 3 to `longest`), of any size.

    A row group is written at a time, so that it fits in memory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    writer = None
    for start in range(0, sequences, ROWS_PER_GROUP):
        lengths = LengthLaw(longest=longest).sample(min(ROWS_PER_GROUP, sequences - start), random)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = random.integers(0, vocabulary, offsets[-1], dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
        table = pa.table({"id": np.arange(start, start + len(lengths)), "tokens": lists})
        writer = writer or pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    print(f"\n{title}")
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    cells.insert(1, ["-" * width for width in widths])
    for line in cells:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def machine() -> dict[str, object]:
    return {
        "date": date.today().isoformat(),
        "cores": psutil.cpu_count(),
        "bf16_units": cpu_has_bf16_units(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }
