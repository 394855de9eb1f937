"""How fast Parquet becomes batches: cache, plan, gather and loader, beside HF datasets on the same file and rows.

    python -m benchmarks.speed.loading [--sequences 1000000] [--large_gb 5]

Real data sets are timed where SEQVAE_REAL_DATA points at them. --large_gb 5 also builds the cache of a file of that size
and reports the peak memory; it takes a few minutes and the disk space twice.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from benchmarks.measure import (
    interleaved_seconds,
    machine,
    make_parser,
    median,
    peak_mb,
    print_table,
    run_in_own_process,
    spread,
    write_token_lists,
)
from seqvae.config.data import CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.data.batch import TokenBatch
from seqvae.data.batching import Limits, Plan, cut_batches, padding_efficiency, plan_epoch
from seqvae.data.cache import open_cache, prepare_cache
from seqvae.data.dataset import SequenceSet
from seqvae.data.demo import LengthLaw
from seqvae.data.loader import BatchLoader, resolve_loading
from seqvae.errors import run_command

BATCH = 64
TIMED_BATCHES = 200
WORKERS = (0, 2, 4)
FIRST_LOOK, LAST_LOOK = 50, 1000


def main() -> None:
    parser = make_parser("benchmarks.speed.loading", __doc__)
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--large_gb", type=float, default=0.0)
    parser.add_argument("--build", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--workers", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        print(json.dumps(build_once(*options.build)))
        return
    if options.workers:
        print(json.dumps(memory_with_workers(options.workers[0], options.workers[1], int(options.workers[2]))))
        return
    with tempfile.TemporaryDirectory(prefix="seqvae-bench-") as name:
        print(json.dumps(run(Path(name), options.sequences, options.large_gb)))


def run(directory: Path, sequences: int, large_gb: float) -> dict[str, Any]:
    data = directory / "tokens"
    write_token_lists(data / "all.parquet", sequences)
    result: dict[str, Any] = {"benchmark": "loading", "machine": machine()}
    result["build"] = report_builds(directory, data, large_gb)
    path = prepare_cache(SourceSettings(data_dir=str(data)), CacheSettings(cache_dir=str(directory / "cache")))
    train = open_cache(path, LengthSettings()).splits["train"]
    result["against_hf"] = report_against_hf(train, data / "all.parquet", directory)
    result["gather"] = report_gather(train)
    result["plan"] = report_plan()
    result["worker_memory"] = report_worker_memory(path)
    return result


def report_builds(directory: Path, data: Path, large_gb: float) -> list[dict[str, Any]]:
    """Build each cache in a process of its own; a second start only opens it."""
    jobs: dict[str, list[str]] = {"generated token lists": [str(data), ""]}
    if real := os.environ.get("SEQVAE_REAL_DATA"):
        jobs["moses_smiles, 200,000 strings"] = [f"{real}/moses_smiles", "characters"]
        jobs["physionet2012, 1.4 M training events"] = [f"{real}/physionet2012", ""]
    if large_gb:
        write_token_lists(directory / "large" / "all.parquet", int(large_gb * 1e9 / 310))
        size = sum(path.stat().st_size for path in (directory / "large").rglob("*") if path.is_file())
        jobs[f"generated token lists, {size / 1e9:.1f} GB"] = [str(directory / "large"), ""]
    rows = []
    for name, (path, tokenizer) in jobs.items():
        cache = directory / "built"
        runs = [
            run_in_own_process("benchmarks.speed.loading", "--build", path, str(cache), tokenizer) for _ in range(2)
        ]
        shutil.rmtree(cache)
        rows.append({"data": name, **runs[0], "second start s": runs[1]["seconds"]})
    print_table("Cache: built once (peak memory of the whole process), then only opened", rows)
    return rows


def build_once(path: str, cache: str, tokenizer: str = "") -> dict[str, Any]:
    before = peak_mb()
    start = time.perf_counter()
    source = SourceSettings(data_dir=path, tokenizer=tokenizer or None)
    data = open_cache(prepare_cache(source, CacheSettings(cache_dir=cache)), LengthSettings())
    seconds = time.perf_counter() - start
    items = sum(counts.get("events", counts["steps"]) for counts in data.counts.values())
    return {
        "seconds": round(seconds, 3),
        "M items": round(items / 1e6, 1),
        "M items/s": round(items / seconds / 1e6, 1),
        "peak MB": round(peak_mb()),
        "of it before the build": round(before),
    }


def report_against_hf(train: SequenceSet, file: Path, directory: Path) -> dict[str, Any]:
    """Load the same random batches of 64 from the same file: with ours, and with HF datasets in each documented form."""
    import datasets

    datasets.disable_progress_bars()
    hf = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(directory / "hf"))
    random = np.random.default_rng(0)
    batches = [random.choice(len(train), BATCH, replace=False) for _ in range(TIMED_BATCHES)]
    rows_of = [np.array(train.ids(batch)) for batch in batches]

    def pad(rows: list[dict[str, Any]]) -> torch.Tensor:
        return pad_sequence([torch.as_tensor(row["tokens"]).long() for row in rows], batch_first=True)

    def hf_batches(form: str, workers: int) -> Iterator[torch.Tensor]:
        """Yield batches as the documentation of `datasets` has it: a DataLoader, indices, rows padded by torch."""
        samples = [rows.tolist() for rows in rows_of]
        yield from DataLoader(hf.with_format(form), batch_sampler=samples, num_workers=workers, collate_fn=pad)

    def our_batches(loading: LoadingSettings) -> Iterator[torch.Tensor]:
        bounds = np.arange(len(batches) + 1) * BATCH
        plan = Plan(np.concatenate(batches), bounds, np.arange(len(batches)))
        limits = Limits(BATCH, BATCH * int(train.lengths_N.max()), None)
        for batch in BatchLoader(train, limits, lambda epoch: plan, len(batches), resolve_loading(loading)):
            assert isinstance(batch, TokenBatch)
            yield batch.tokens_BT

    forms: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
        "HF numpy format, in process": lambda: hf_batches("numpy", 0),
        "HF torch format, in process": lambda: hf_batches("torch", 0),
        "HF numpy format, 2 workers": lambda: hf_batches("numpy", 2),
        "SeqVAE, in process": lambda: our_batches(LoadingSettings(num_workers=0)),
        "SeqVAE, 1 thread (the default)": lambda: our_batches(LoadingSettings(num_workers="auto")),
    }
    for ours, theirs in zip(our_batches(LoadingSettings()), hf_batches("numpy", 0), strict=True):
        if not torch.equal(ours, theirs):
            raise AssertionError("the two loaders do not deliver the same rows")
    tokens = sum(int(train.lengths_N[batch].sum()) for batch in batches)
    seconds = interleaved_seconds({name: partial(drain, form) for name, form in forms.items()})
    best_hf = min(median(values) for name, values in seconds.items() if name.startswith("HF"))
    rows = [
        {
            "loader": name,
            "us per batch": round(median(values) / TIMED_BATCHES * 1e6),
            "M real tokens/s": round(tokens / median(values) / 1e6, 1),
            "times the best HF": round(best_hf / median(values), 1),
            "spread": spread(values),
        }
        for name, values in seconds.items()
    ]
    print_table(f"Random batches of {BATCH}, padded tensors, real tokens only; the same rows", rows)
    return {"rows": rows, "ratio": rows[-1]["times the best HF"]}


def drain(form: Callable[[], Iterator[torch.Tensor]]) -> None:
    for _ in form():
        pass


def report_gather(train: SequenceSet) -> dict[str, Any]:
    """Gather batches of about 4,000 tokens out of the memory map, without a loader."""
    cut = cut_batches(train.lengths_N, Limits(None, 4096, None))
    plan = plan_epoch(cut, seed=0, epoch=0)
    batches = [plan.batch(k) for k in range(min(plan.batches, 500))]
    tokens = sum(int(train.lengths_N[batch].sum()) for batch in batches)

    def gather_all() -> None:
        for batch in batches:
            train.gather(batch)

    seconds = interleaved_seconds({"gather": gather_all})["gather"]
    row = {
        "tokens per batch": round(tokens / len(batches)),
        "us per batch": round(median(seconds) / len(batches) * 1e6, 1),
        "M real tokens/s": round(tokens / median(seconds) / 1e6),
        "spread": spread(seconds),
    }
    print_table("Gather alone", [row])
    return row


def report_plan() -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    rows = []
    for count in (10_000, 100_000, 1_000_000, 10_000_000):
        lengths_N = LengthLaw().sample(count, random).astype(np.int32)
        for tokens in (4096, 16384):
            seconds, plan = [], None
            for epoch in range(3):
                start = time.perf_counter()
                plan = plan_epoch(cut_batches(lengths_N, Limits(None, tokens, None)), seed=0, epoch=epoch)
                seconds.append(time.perf_counter() - start)
            assert plan is not None
            rows.append(
                {
                    "sequences": count,
                    "tokens per batch": tokens,
                    "ms": round(median(seconds) * 1e3, 1),
                    "padding efficiency": round(padding_efficiency(lengths_N, plan), 3),
                    "same order, each once at 1, 2, 4, 8 processes": turns_agree(plan, count),
                }
            )
    print_table("Plan of an epoch, cut included", rows)
    return rows


def turns_agree(plan: Plan, count: int) -> bool:
    """Return whether processes that take turns see one global order, equal counts, and every sequence once."""
    whole = [plan.batch(k) for k in range(plan.batches)]
    for world in (1, 2, 4, 8):
        rounds = -(-plan.batches // world)
        turns = [[rank + world * turn for turn in range(rounds)] for rank in range(world)]
        order = [k for together in zip(*turns, strict=True) for k in together if k < plan.batches]
        if order != list(range(plan.batches)):
            return False
    return bool((np.bincount(np.concatenate(whole), minlength=count) == 1).all())


def report_worker_memory(path: Path) -> list[dict[str, Any]]:
    rows = []
    for kind in ("thread", "process"):
        for workers in WORKERS:
            words = ("--workers", str(path), kind, str(workers))
            rows.append(
                {"worker_type": kind, "workers": workers, **run_in_own_process("benchmarks.speed.loading", *words)}
            )
            without = rows[-1 - WORKERS.index(workers)]["MB"]
            rows[-1]["MB per worker"] = round((rows[-1]["MB"] - without) / max(1, workers), 1)
    print_table(
        f"Memory of all processes together, mapped files apart; growth is from batch {FIRST_LOOK} to {LAST_LOOK}", rows
    )
    return rows


def memory_with_workers(path: str, kind: str, workers: int) -> dict[str, Any]:
    """Return the memory of this process and its children (Linux) while batches flow."""
    train = open_cache(Path(path), LengthSettings()).splits["train"]
    limits = Limits(None, 4096, None)
    cut = cut_batches(train.lengths_N, limits)
    settings = LoadingSettings(worker_type="process" if kind == "process" else "thread", num_workers=workers)
    loader = BatchLoader(train, limits, lambda epoch: plan_epoch(cut, 0, epoch), cut.batches, resolve_loading(settings))
    looks = {}
    for number, _ in enumerate(loader):
        if number in (FIRST_LOOK, LAST_LOOK):
            me = psutil.Process()
            held = 0
            for process in (me, *me.children(recursive=True)):
                # Memory that holds no file's pages; what several processes share counts in parts, so that the sum is right.
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                held += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
            looks[number] = held / 1024
        if number == LAST_LOOK:
            break
    return {"MB": round(looks[LAST_LOOK], 1), "growth MB": round(looks[LAST_LOOK] - looks[FIRST_LOOK], 1)}


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.speed.loading"))
