"""What all benchmarks share: interleaved timing, subprocesses that report on themselves, tables and the last line of JSON."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

import psutil

from seqvae.console import share_machine
from seqvae.training.distributed import cpu_has_bf16_units


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


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Lowest to highest, relative to the median."""
    middle = median(values)
    return f"{min(values) / middle:.2f}-{max(values) / middle:.2f}"


def in_own_process(module: str, *words: str) -> dict[str, Any]:
    """Run `python -m module words` and return the JSON of its last line: memory is only its own there."""
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{module} {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def as_commands_run() -> None:
    """Start the program again with what commands set for torch before they import it, if that is not in force yet."""
    before = dict(os.environ)
    share_machine()
    if os.environ != before:
        spec = sys.modules["__main__"].__spec__
        assert spec is not None  # started with -m
        os.execv(sys.executable, [sys.executable, "-m", spec.name, *sys.argv[1:]])


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    print(f"\n{title}")
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for number, line in enumerate(cells):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))


def machine() -> dict[str, object]:
    return {
        "date": date.today().isoformat(),
        "cores": psutil.cpu_count(),
        "bf16_units": cpu_has_bf16_units(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
    }
